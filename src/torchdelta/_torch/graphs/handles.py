"""Handles: ids on graph nodes that survive copies and rewrites, so that two versions of a graph can be matched.

They are in `node.meta["custom"]`, which torch copies to the nodes that it makes from a node. Where torch does not copy
it, this module helps: an observer, and the quantize and dequantize nodes that replace it, have the handles of the node
that they observe (`handles_of`).

    assign_handles(program)         # every node gets an id of its own
    transform(program)              # torch carries the ids along
    handles_of(node)                # a set, because rewrites fuse and split nodes

Start reading at `assign_handles` and `handles_of`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

Handled = GraphModule | torch.export.ExportedProgram

_CUSTOM = "custom"
_KEY = "torchdelta_handles"
_CONSTANT_KEY = "torchdelta_constant_handles"
"""The key for `get_attr` nodes. A second export copies the metadata of the first reader to them, and would fail if the
same key had two values."""
_OPS_WITHOUT_HANDLES = ("placeholder", "output")
_INDEX_BITS, _TAG_BITS = 21, 32
"""Together 53 bits, which a double holds exactly, because some JSON readers read numbers as doubles."""


def graph_of(program: Handled) -> GraphModule:
    """Return the outermost graph of a graph module or an exported program."""
    return program.graph_module if isinstance(program, torch.export.ExportedProgram) else program


def graphs_in(program: Handled) -> Iterator[tuple[str, GraphModule]]:
    """Yield a program's graph and the graphs nested in it, each behind its path, which is empty for the outermost."""
    for path, module in graph_of(program).named_modules():
        if isinstance(module, GraphModule):
            yield path, module


def handled_nodes(program: Handled) -> Iterator[Node]:
    """Yield every node that can have handles, in nested graphs too: all but placeholders and outputs."""
    for _, graph_module in graphs_in(program):
        yield from (node for node in graph_module.graph.nodes if node.op not in _OPS_WITHOUT_HANDLES)


def assign_handles(program: Handled) -> None:
    """Give every node without a handle a new one, in nested graphs too, except for placeholders and outputs.

    An observer of a node with handles has those already: see `handles_of`. Ids start at a random number, so that those
    of two calls, also in other processes, hardly ever meet.
    """
    bare = [node for node in handled_nodes(program) if not handles_of(node)]
    # random, not the highest id plus one, because two copies of a graph must not give new nodes the same ids
    first = secrets.randbits(_TAG_BITS) << _INDEX_BITS
    for index, node in enumerate(bare):
        write_handles(node, (first + index,))


def handles_of(node: Node) -> frozenset[int]:
    """Return the handles of a node, or of the node that it observes if it has none of its own.

    Several observers, quantize and dequantize nodes in a row are followed. The set is empty if none has handles, and
    for placeholders and outputs.
    """
    source: Node | None = node
    while source is not None and source.op not in _OPS_WITHOUT_HANDLES:
        custom = source.meta.get(_CUSTOM) or {}
        if written := custom.get(_key_of(source)) or custom.get(_KEY):
            return frozenset(written)
        source = observed_by(source)
    return frozenset()


def write_handles(node: Node, handles: Iterable[int]) -> None:
    """Replace the handles of a node by these, in its metadata."""
    # a new dict, because copies of a graph share it; a list, because `export.save` rejects sets
    node.meta[_CUSTOM] = {**(node.meta.get(_CUSTOM) or {}), _key_of(node): sorted(handles)}


def _key_of(node: Node) -> str:
    """Return the metadata key of a node's handles, which is another one for a `get_attr` node."""
    return _CONSTANT_KEY if node.op == "get_attr" else _KEY


def merge_handles(into: Node, *sources: Node) -> None:
    """Add the handles of other nodes to a node that does their work."""
    write_handles(into, handles_of(into).union(*(handles_of(source) for source in sources)))


def observed_by(node: Node) -> Node | None:
    """Return the first node among the positional arguments of an observer, or of a node that `is_quantizing` accepts.

    None for other nodes, and if there is no such argument.
    """
    if not (is_observer(node) or is_quantizing(node)):
        return None
    return next((argument for argument in node.args if isinstance(argument, Node)), None)


def is_observer(node: Node) -> bool:
    """Tell whether a node calls a module that is an observer or a fake quantizer: one with `calculate_qparams`.

    False if the graph does not have the module yet.
    """
    if node.op != "call_module" or node.graph.owning_module is None:
        return False
    try:
        module = node.graph.owning_module.get_submodule(str(node.target))
    except AttributeError:  # the call may be added before its module is
        return False
    return hasattr(module, "calculate_qparams")


def is_quantizing(node: Node) -> bool:
    """Tell whether a node quantizes, dequantizes, or chooses parameters for that, by an operator not of aten."""
    return _quantizing_operator(node).startswith(("quantize", "dequantize", "choose_qparams"))


def is_dequantizing(node: Node) -> bool:
    """Tell whether a node turns quantized values back into floats, by an operator that is not one of aten's."""
    return _quantizing_operator(node).startswith("dequantize")


def _quantizing_operator(node: Node) -> str:
    """Return a node's operator without namespace and overload; empty if it is one of aten's, or not an operator."""
    # aten's operators of these names return quantized tensors, whose type shows it
    if not isinstance(node.target, OpOverload) or node.target.namespace == "aten":
        return ""
    return str(node.target).split(".")[1]


def observed_handles(prepared: GraphModule) -> dict[str, frozenset[int]]:
    """Return the handles of every observer in a graph, nested graphs included, by the name of the observer's node.

    They are empty if neither it nor the node that it observes has any. It is called before a conversion, which replaces
    the observers.
    """
    return {node.name: handles_of(node) for node in handled_nodes(prepared) if is_observer(node)}


def restore_handles(converted: GraphModule, observed: Mapping[str, frozenset[int]]) -> None:
    """Replace the handles of the nodes that a conversion made from observers, in place, by those of the observers.

    `observed` has the handles of each observer by its node's name, as `observed_handles` returns them. The metadata
    `from_node` tells from which observer a node was made; of several, the last one counts. Nodes made from none, or
    from an observer without handles, stay as they are.
    """
    for node in handled_nodes(converted):
        for source in node.meta.get("from_node") or ():
            if handles := observed.get(source.name):
                write_handles(node, handles)


def share_handles_of_folded(before: GraphModule, after: GraphModule) -> None:
    """Give the handles of nodes that were folded away to the node that does their work, and to its constants.

    `before` is the graph before the folding, and `after`, whose handles are changed in place, the one after it. If
    batch norm was folded into a convolution, the convolution and its weights all get the same handles: those of both
    nodes, of the weights, and of the constants that batch norm read.
    """
    survivors = {handle: node for node in handled_nodes(after) if not is_observer(node) for handle in handles_of(node)}
    for node in handled_nodes(before):
        heir = None if node.op == "get_attr" else _heir(node, survivors)
        if heir is None:
            continue
        constants = [source for source in _read_by(heir) if source.op == "get_attr"]
        folded = [source for source in node.all_input_nodes if source.op == "get_attr"]
        together = handles_of(node).union(*(handles_of(one) for one in (heir, *constants, *folded)))
        for one in (heir, *constants):
            write_handles(one, together)


def _heir(node: Node, survivors: Mapping[int, Node]) -> Node | None:
    """Return the node of the later graph that is read in place of a node that was folded away, or None.

    `survivors` has the nodes of the later graph by their handles. The heir is the survivor of the nearest node before
    `node`, along first inputs. None if `node` itself survived, if no node before it did, or if no survivor of its
    readers reads the heir.
    """
    if _survivor(node, survivors) is not None:
        return None
    source: Node | None = node
    heir: Node | None = None
    while source is not None and heir is None:
        source = next(iter(source.all_input_nodes), None)
        heir = None if source is None else _survivor(source, survivors)
    if heir is None or not any(heir in _read_by(reader) for reader in _readers(node, survivors, heir)):
        return None
    return heir


def _readers(node: Node, survivors: Mapping[int, Node], heir: Node) -> Iterator[Node]:
    """Yield the nodes of the later graph that share a handle with a reader of a node of the earlier one.

    `survivors` has the nodes of the later graph by their handles. A reader that is gone is replaced by its own readers,
    and an output by the output of the graph of `heir`.
    """
    for user in node.users:
        if user.op == "output":
            yield heir.graph.output_node()
        elif (survivor := _survivor(user, survivors)) is not None:
            yield survivor
        else:
            yield from _readers(user, survivors, heir)


def _survivor(node: Node, survivors: Mapping[int, Node]) -> Node | None:
    """Return the node of the later graph that shares a handle with this one, or None."""
    return next((survivors[handle] for handle in handles_of(node) if handle in survivors), None)


def _read_by(node: Node) -> list[Node]:
    """Return the nodes that a node reads; in place of an observer, the node that it observes."""
    sources = []
    for source in node.all_input_nodes:
        while is_observer(source) and (observed := observed_by(source)) is not None:
            source = observed
        sources.append(source)
    return sources
