"""Norms write to their running statistics although their schemas do not say so; every reader of a graph knows them."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from torchdelta._torch.graphs.interpreter import ObservingInterpreter
from torchdelta._torch.graphs.nodes import may_write, short_name, writes_to, writes_to_first

aten = torch.ops.aten
INPUT = torch.randn(4, 3, 5)


def graph_of(target, arguments):
    """Return a graph of one call whose tensors are its inputs, and those tensors."""
    graph = Graph()
    tensors = [argument.clone() for argument in arguments if isinstance(argument, torch.Tensor)]
    inputs = iter([graph.placeholder(f"t{place}") for place in range(len(tensors))])
    args = tuple(next(inputs) if isinstance(argument, torch.Tensor) else argument for argument in arguments)
    graph.output(graph.call_function(target, args))
    return GraphModule(torch.nn.Module(), graph), tensors


def statistics():
    return torch.zeros(3), torch.ones(3)


NORMS = [
    (aten.batch_norm.default, (INPUT, None, None, *statistics(), True, 0.1, 1e-5, False)),
    (aten._batch_norm_impl_index.default, (INPUT, None, None, *statistics(), True, 0.1, 1e-5, False)),
    (aten.native_batch_norm.default, (INPUT, None, None, *statistics(), True, 0.1, 1e-5)),
    (aten.instance_norm.default, (INPUT, None, None, *statistics(), True, 0.1, 1e-5, False)),
    (aten.batch_norm_update_stats.default, (INPUT, *statistics(), 0.1)),
    (torch.batch_norm, (INPUT, None, None, *statistics(), True, 0.1, 1e-5, False)),
    (torch._batch_norm_impl_index, (INPUT, None, None, *statistics(), True, 0.1, 1e-5, False)),
    (torch.nn.functional.batch_norm, (INPUT, *statistics(), None, None, True)),
]


@pytest.mark.parametrize(
    ("target", "arguments"), NORMS, ids=[getattr(target, "__name__", "norm") for target, _ in NORMS]
)
def test_the_statistics_that_a_norm_writes_to_are_known_before_it_does(target, arguments):
    module, tensors = graph_of(target, arguments)
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    written = []
    interpreter = ObservingInterpreter(module, before_write=written.extend, after_node=lambda *_: None, unlogged={})

    interpreter.run_on(tuple(tensors), {})

    assert not torch.equal(tensors[1], statistics()[0])
    assert any(tensor is tensors[1] for tensor in written)
    assert writes_to(node)
    assert not writes_to_first(node)
    assert {"t1", "t2"} <= {source.name for source in may_write(node)}


@pytest.mark.parametrize(
    "name", ["cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"]
)
def test_norms_of_other_devices_are_known_too(name):
    graph = Graph()
    schema = getattr(aten, name).default._schema
    inputs = [graph.placeholder(argument.name) for argument in schema.arguments]

    node = graph.call_function(getattr(aten, name).default, tuple(inputs))

    assert {source.name for source in may_write(node)} == {"running_mean", "running_var"}


def test_a_norm_that_returns_its_statistics_writes_to_none():
    module, _ = graph_of(
        aten._native_batch_norm_legit_functional.default, (INPUT, None, None, *statistics(), True, 0.1, 1e-5)
    )

    assert not any(writes_to(node) for node in module.graph.nodes)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten.relu_.default", "relu"),
        ("aten.add.Tensor", "add"),
        ("prims.convert_element_type.default", "convert_element_type"),
        ("mylib.fused_norm.default", "fused_norm"),
        ("relu", "relu"),
    ],
)
def test_an_operation_has_one_short_name_in_all_kinds_of_graphs(name, short):
    assert short_name(name) == short
