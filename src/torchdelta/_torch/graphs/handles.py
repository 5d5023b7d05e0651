"""Handles on nodes: ids in `meta["custom"]`, which torch copies to whatever it makes of a node.

What it does not copy them to is found by what it stands behind: an observer, and the quantize and dequantize nodes
that it becomes, have the handles of the node that they observe.
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
"""Of what is read from a module: exporting again gives that what its first reader carries too, and the same key must
then have the same value."""
_WITHOUT = ("placeholder", "output")
_INDEX_BITS, _TAG_BITS = 21, 32
"""Together what a double holds exactly, as every reader of JSON does."""


def graph_of(program: Handled) -> GraphModule:
    """Return the outermost graph of a program."""
    return program.graph_module if isinstance(program, torch.export.ExportedProgram) else program


def graphs_in(program: Handled) -> Iterator[tuple[str, GraphModule]]:
    """Yield a program's graph and the bodies nested in it, each with its path."""
    for path, module in graph_of(program).named_modules():
        if isinstance(module, GraphModule):
            yield path, module


def handled_nodes(program: Handled) -> Iterator[Node]:
    """Yield every node that has handles or may get some."""
    for _, graph_module in graphs_in(program):
        yield from (node for node in graph_module.graph.nodes if node.op not in _WITHOUT)


def assign_handles(program: Handled) -> None:
    """Give every node that has no handle one of its own; ids of two assignments never meet, in whichever programs."""
    bare = [node for node in handled_nodes(program) if not handles_of(node)]
    # drawn, and not counted on from the highest: two copies that get new nodes must not give them the same ids
    first = secrets.randbits(_TAG_BITS) << _INDEX_BITS
    for index, node in enumerate(bare):
        write_handles(node, (first + index,))


def handles_of(node: Node) -> frozenset[int]:
    """Return the handles that a node carries, or that what it observes does."""
    source: Node | None = node
    while source is not None and source.op not in _WITHOUT:
        custom = source.meta.get(_CUSTOM) or {}
        if written := custom.get(_key_of(source)) or custom.get(_KEY):
            return frozenset(written)
        source = observed_by(source)
    return frozenset()


def write_handles(node: Node, handles: Iterable[int]) -> None:
    """Let a node carry exactly these handles."""
    # copies of a graph share the dict, and an exported program can be saved with a list in it but not with a set
    node.meta[_CUSTOM] = {**(node.meta.get(_CUSTOM) or {}), _key_of(node): sorted(handles)}


def _key_of(node: Node) -> str:
    return _CONSTANT_KEY if node.op == "get_attr" else _KEY


def merge_handles(into: Node, *sources: Node) -> None:
    """Let a node that does the work of others carry their handles too."""
    write_handles(into, handles_of(into).union(*(handles_of(source) for source in sources)))


def observed_by(node: Node) -> Node | None:
    """Return the node whose values an observer, or a quantize or dequantize node, passes on."""
    if not (is_observer(node) or is_quantizing(node)):
        return None
    return next((argument for argument in node.args if isinstance(argument, Node)), None)


def is_observer(node: Node) -> bool:
    """Tell whether a node calls an observer or a fake quantizer."""
    if node.op != "call_module" or node.graph.owning_module is None:
        return False
    try:
        module = node.graph.owning_module.get_submodule(str(node.target))
    except AttributeError:  # the call may be there before its module is
        return False
    return hasattr(module, "calculate_qparams")


def is_quantizing(node: Node) -> bool:
    """Tell whether a node quantizes, dequantizes or chooses the parameters for it."""
    return _quantizing_operator(node).startswith(("quantize", "dequantize", "choose_qparams"))


def is_dequantizing(node: Node) -> bool:
    """Tell whether a node turns quantized values back into floats."""
    return _quantizing_operator(node).startswith("dequantize")


def _quantizing_operator(node: Node) -> str:
    # aten's operators of these names are those of quantized tensors, and what they return says so itself
    if not isinstance(node.target, OpOverload) or node.target.namespace == "aten":
        return ""
    return str(node.target).split(".")[1]


def observed_handles(prepared: GraphModule) -> dict[str, frozenset[int]]:
    """Return the handles of every observer by its name, while what it observes is still there."""
    return {node.name: handles_of(node) for node in handled_nodes(prepared) if is_observer(node)}


def restore_handles(converted: GraphModule, observed: Mapping[str, frozenset[int]]) -> None:
    """Let what became of each observer carry its handles: a weight that was folded no longer tells what it was."""
    for node in handled_nodes(converted):
        for source in node.meta.get("from_node") or ():
            if handles := observed.get(source.name):
                write_handles(node, handles)


def share_handles_of_folded(before: GraphModule, after: GraphModule) -> None:
    """Let what took over the work of nodes that are gone carry their handles, and so the constants that it reads.

    Batch norm is folded into the convolution before it, whose weights are others from then on: what both compute
    together is what it was, and nothing inside of it is.
    """
    kept = {handle: node for node in handled_nodes(after) if not is_observer(node) for handle in handles_of(node)}
    for node in handled_nodes(before):
        heir = None if node.op == "get_attr" else _heir(node, kept)
        if heir is None:
            continue
        constants = [source for source in _read_by(heir) if source.op == "get_attr"]
        folded = [source for source in node.all_input_nodes if source.op == "get_attr"]
        together = handles_of(node).union(*(handles_of(one) for one in (heir, *constants, *folded)))
        for one in (heir, *constants):
            write_handles(one, together)


def _heir(node: Node, kept: Mapping[int, Node]) -> Node | None:
    """Return the node that is read in place of one that is gone; None where it is still there."""
    if _kept(node, kept) is not None:
        return None
    source: Node | None = node
    heir: Node | None = None
    while source is not None and heir is None:
        source = next(iter(source.all_input_nodes), None)
        heir = None if source is None else _kept(source, kept)
    if heir is None or not any(heir in _read_by(reader) for reader in _readers(node, kept, heir)):
        return None
    return heir


def _readers(node: Node, kept: Mapping[int, Node], heir: Node) -> Iterator[Node]:
    """Yield what is left of those who read a node; one that is gone read it for its own readers."""
    for user in node.users:
        if user.op == "output":
            yield heir.graph.output_node()
        elif (still_there := _kept(user, kept)) is not None:
            yield still_there
        else:
            yield from _readers(user, kept, heir)


def _kept(node: Node, kept: Mapping[int, Node]) -> Node | None:
    return next((kept[handle] for handle in handles_of(node) if handle in kept), None)


def _read_by(node: Node) -> list[Node]:
    """Return what a node reads, looking through observers."""
    found = []
    for source in node.all_input_nodes:
        while is_observer(source) and (observed := observed_by(source)) is not None:
            source = observed
        found.append(source)
    return found
