"""Two FX passes as a user would write them: one keeps what the program computes, one does not."""

import torch
from torch.fx import GraphModule


def double_by_adding(graph_module: GraphModule, example_inputs):
    """x * 2 -> x + x."""
    for node in graph_module.graph.nodes:
        if node.target in (torch.mul, "mul") and node.args[1] == 2:
            node.target, node.op, node.args = torch.add, "call_function", (node.args[0], node.args[0])
    graph_module.recompile()
    return graph_module


def gelu_by_tanh(graph_module: GraphModule, example_inputs):
    """gelu(x) -> its tanh approximation, which is close and not the same."""
    for node in graph_module.graph.nodes:
        if "gelu" in str(node.target):
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    graph_module.recompile()
    return graph_module
