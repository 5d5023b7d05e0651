"""Passes as users write them: a function of a graph module and perhaps its inputs, or of a graph.

It changes the graph in place, or returns another one, or any callable. `run_pass` calls it, and returns what is to run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from torchdelta._torch.graphs import graphs

Pass = Callable[..., Any]

_GRAPH_NAME = "graph"
_INPUT_NAMES = ("example_inputs", "inputs", "args", "example_args")


def run_pass(each: Pass, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run a pass on a graph that it may change in place; return the graph or callable that it leaves, ready to run.

    The given graph is returned if the pass returns None, a bool or an int; of torch's `PassResult` the module is taken.
    For a `Graph`, the result is its graph module: the given one, or a new one with the attributes of the given one. A
    graph is sorted and recompiled: ValueError if it has a cycle. A function that takes its arguments as one list is
    wrapped. Raise TypeError for any other result that is not callable. Exceptions of the pass are raised.
    """
    wants_graph, with_inputs = wanted_by(each)
    result = each(graph.graph if wants_graph else graph, *((list(inputs),) if with_inputs else ()))
    if isinstance(result, tuple) and hasattr(result, "graph_module"):  # a `PassResult`, as torch's own passes return
        result = result.graph_module
    if isinstance(result, Graph):
        result = graph if result is graph.graph else GraphModule(graph, result)
    # a pass that returns a count or a bool has changed the graph in place
    return graphs.as_callable(None if isinstance(result, (bool, int)) else result, graph)


def wanted_by(each: Pass) -> tuple[bool, bool]:
    """Return whether a pass takes a graph in place of a graph module, and whether it takes the inputs too.

    Its signature tells. The inputs come second if the second parameter has no default or is named in `_INPUT_NAMES`, if
    there is a `*args`, or if the signature cannot be read or is empty.
    """
    try:
        parameters = list(inspect.signature(each).parameters.values())
    except (TypeError, ValueError):  # builtins and C++ functions have no signature
        parameters = []
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    takes_any = not parameters or any(one.kind is one.VAR_POSITIONAL for one in parameters)
    second = positional[1] if len(positional) > 1 else None
    is_given = second is not None and (second.default is inspect.Parameter.empty or second.name in _INPUT_NAMES)
    with_inputs = takes_any or is_given
    return bool(positional) and _wants_graph(positional[0], is_alone=not with_inputs), with_inputs


def _wants_graph(parameter: inspect.Parameter, *, is_alone: bool) -> bool:
    """Tell whether a parameter is a `Graph` and not a `GraphModule`, by its annotation.

    Without an annotation it is one if its name is `_GRAPH_NAME` and `is_alone` says that the pass takes no inputs.
    """
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return is_alone and parameter.name == _GRAPH_NAME
    words = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "GraphModule" not in words and "Graph" in words
