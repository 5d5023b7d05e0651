"""An FX pass as a user would write it: it looks harmless, and changes what the program computes."""

from torch.fx import GraphModule


def gelu_by_tanh(graph_module: GraphModule, example_inputs):
    """gelu(x) -> its tanh approximation, which is close and not the same."""
    for node in graph_module.graph.nodes:
        if "gelu" in str(node.target):
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    graph_module.recompile()
    return graph_module
