"""Correct rewrites of exported graphs: what a fault hides among, so that comparing two graphs' text finds nothing."""

import random

import torch
from torch.fx import GraphModule

aten = torch.ops.aten


def _replace(node, target, args, kwargs=None):
    graph = node.graph
    with graph.inserting_before(node):
        made = graph.call_function(target, args, kwargs or {})
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def swap_operands(node):
    node.args = (node.args[1], node.args[0], *node.args[2:])


def copy_result(node):
    graph = node.graph
    with graph.inserting_after(node):
        made = graph.call_function(aten.clone.default, (node,))
    node.replace_all_uses_with(made, lambda user: user is not made)


def add_zero(node):
    graph = node.graph
    with graph.inserting_after(node):
        made = graph.call_function(aten.add.Tensor, (node, 0.0))
    node.replace_all_uses_with(made, lambda user: user is not made)


def split_linear(node):
    graph, (source, weight, *bias) = node.graph, node.args
    with graph.inserting_before(node):
        turned = graph.call_function(aten.t.default, (weight,))
    if bias and bias[0] is not None:
        with graph.inserting_before(node):
            product = graph.call_function(aten.matmul.default, (source, turned))
        _replace(node, aten.add.Tensor, (product, bias[0]))
    else:
        _replace(node, aten.matmul.default, (source, turned))


def subtract_negated(node):
    graph, (left, right) = node.graph, node.args[:2]
    with graph.inserting_before(node):
        turned = graph.call_function(aten.neg.default, (right,))
    _replace(node, aten.sub.Tensor, (left, turned))


def multiply_by_inverse(node):
    _replace(node, aten.mul.Tensor, (node.args[0], 1.0 / node.args[1]))


def relu_as_maximum(node):
    _replace(node, aten.clamp_min.default, (node.args[0], 0.0))


def view_as_reshape(node):
    _replace(node, aten.reshape.default, node.args)


def read_dead(node):
    graph = node.graph
    with graph.inserting_after(node):
        graph.call_function(aten.mul.Tensor, (node, 3.0))


def _is(node, *targets):
    return node.op == "call_function" and node.target in targets


def _is_float(node):
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and value.is_floating_point()


def _has_two_tensors(node):
    return len(node.args) == 2 and not node.kwargs and all(isinstance(arg, torch.fx.Node) for arg in node.args)


REWRITES = (
    (lambda node: _is(node, aten.add.Tensor, aten.mul.Tensor) and _has_two_tensors(node), swap_operands),
    (lambda node: _is(node, aten.add.Tensor) and _has_two_tensors(node), subtract_negated),
    (_is_float, copy_result),
    (_is_float, add_zero),
    (_is_float, read_dead),
    (lambda node: _is(node, aten.linear.default), split_linear),
    (lambda node: _is(node, aten.div.Tensor) and isinstance(node.args[1], float), multiply_by_inverse),
    (lambda node: _is(node, aten.relu.default), relu_as_maximum),
    (lambda node: _is(node, aten.view.default), view_as_reshape),
)


def rewrite(graph_module: GraphModule, count: int, *, seed: int, sparing: str) -> int:
    """Rewrite so many places of an exported graph, all but the node of that name; return how many there were."""
    draw = random.Random(f"rewrites {seed}")
    done = 0
    spoken_for = {sparing}
    places = [(node.name, change) for node in graph_module.graph.nodes for fits, change in REWRITES if fits(node)]
    draw.shuffle(places)
    for name, change in places:
        node = next((node for node in graph_module.graph.nodes if node.name == name), None)
        if done == count or node is None or name in spoken_for:
            continue
        spoken_for.add(name)
        change(node)
        done += 1
    graph_module.graph.lint()
    graph_module.recompile()
    return done
