"""An FX pass as a user would write it: it looks harmless, but the program then computes something else."""

from torch.fx import GraphModule


def gelu_by_tanh(graph_module: GraphModule, example_inputs):
    """Replace gelu by its tanh approximation, which is close but not equal."""
    for node in graph_module.graph.nodes:
        if "gelu" in str(node.target):
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    graph_module.recompile()
    return graph_module
