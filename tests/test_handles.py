"""A handle stays with what was made of its node, and no other node gets it."""

import copy
import io
import operator

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import scan
from torch.fx import GraphModule, symbolic_trace
from torch.fx.passes.shape_prop import ShapeProp

from torchdelta.errors import UsageError
from torchdelta.nodewise.matching import assign_handles, handles_of, merge_handles
from torchdelta.nodewise.node_records import node_records, placed_nodes
from torchdelta.storage.graphs import read_graph, write_graph


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        pooled = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2).mean((2, 3))
        first, second = torch.split(nn.functional.silu(self.linear(pooled)), [2, 4], dim=1)
        return [first + 1, second]


class Branches(nn.Module):
    def forward(self, x):
        def accumulate(carry, row):
            return carry + row, carry * row

        chosen = torch.cond(x.sum() > 0, lambda value: value.sin() + 1, lambda value: value.cos(), (x,))
        looped = torch.while_loop(lambda value: value.sum() < 10, lambda value: (value.abs() + 1,), (chosen,))[0]
        carry, rows = scan(accumulate, x[0], x)
        return looped, carry, rows, map_rows(lambda row: row.exp(), x)


def exported(model=None):
    torch.manual_seed(0)
    program = torch.export.export((model or Conv()).eval(), INPUTS[type(model)])
    assign_handles(program)
    return program


IMAGE = (torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8),)
TABLE = (torch.linspace(-1, 1, 12).reshape(3, 4),)
INPUTS = {type(None): IMAGE, Conv: IMAGE, Branches: TABLE}


def nodes_in(program):
    graph = program if isinstance(program, GraphModule) else program.graph_module
    graphs = [module for module in graph.modules() if isinstance(module, GraphModule)]
    return [node for one in graphs for node in one.graph.nodes if node.op not in ("placeholder", "output")]


def by_name(program):
    return {node.name: handles_of(node) for node in nodes_in(program)}


def all_handles(program):
    return frozenset().union(*(handles_of(node) for node in nodes_in(program)))


def first(program, op):
    return next(node for node in nodes_in(program) if op in str(node.target))


def test_every_node_gets_one_handle_that_no_other_has():
    nodes = nodes_in(exported())

    assert all(len(handles_of(node)) == 1 for node in nodes)
    assert len({handles_of(node) for node in nodes}) == len(nodes)


def test_the_bodies_of_cond_while_loop_scan_and_map_are_included():
    program = exported(Branches())

    assert {"sin", "cos", "abs_1", "exp"} <= by_name(program).keys()
    assert sum(isinstance(module, GraphModule) for module in program.graph_module.modules()) == 7
    assert all(handles_of(node) for node in nodes_in(program))
    assert len({handles_of(node) for node in nodes_in(program)}) == len(nodes_in(program))


def test_placeholders_and_outputs_have_none():
    # tracing again leaves the handle of `cond` on the placeholders of its bodies
    retraced = torch.export.export(exported(Branches()).module(), TABLE).graph_module
    graphs = [module for module in retraced.modules() if isinstance(module, GraphModule)]
    outer = [node for one in graphs for node in one.graph.nodes if node.op in ("placeholder", "output")]

    assert len(outer) > 8
    assert not any(handles_of(node) for node in outer)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_the_same_handles(copied):
    graph = exported().graph_module

    assert by_name(copied(graph)) == by_name(graph)


def test_a_deep_copy_changes_its_handles_without_the_original():
    graph = exported().graph_module
    before = by_name(graph)
    duplicate = copy.deepcopy(graph)

    merge_handles(first(duplicate, "relu"), first(duplicate, "conv2d"))

    assert handles_of(first(duplicate, "relu")) == before["relu"] | before["conv2d"]
    assert by_name(graph) == before


def test_an_exported_program_keeps_them_when_saved_and_loaded():
    program = exported()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)

    expected = {name: handles for name, handles in by_name(program).items() if "getitem" not in name}
    assert len(expected) == 8
    assert {name: handles for name, handles in by_name(loaded).items() if "getitem" not in name} == expected
    # of the parts of a result only the operator's own is written to the file
    assert by_name(loaded)["getitem"] == expected["split_with_sizes"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU())),
        lambda: exported().module(),
        lambda: exported(Branches()).graph_module,
    ],
    ids=["traced", "exported", "nested"],
)
def test_a_graph_keeps_them_when_written_and_read_by_us(make, tmp_path):
    graph = make()
    assign_handles(graph)
    write_graph(graph, tmp_path / "graph.json")

    loaded = read_graph(tmp_path / "graph.json")

    expected = [(node.name, handles_of(node)) for node in nodes_in(graph) if node.target != "_guards_fn"]
    assert [(node.name, handles_of(node)) for node in nodes_in(loaded)] == expected
    assert len(all_handles(loaded)) == len(expected) > 3


def test_a_fused_node_is_written_with_the_handles_of_all(tmp_path):
    graph = exported().module()
    assign_handles(graph)
    merge_handles(first(graph, "relu"), first(graph, "conv2d"))
    write_graph(graph, tmp_path / "graph.json")

    loaded = read_graph(tmp_path / "graph.json")

    assert handles_of(first(loaded, "relu")) == handles_of(first(graph, "relu"))
    assert len(handles_of(first(loaded, "relu"))) == 2


def test_exporting_again_keeps_them():
    program = exported()
    again = torch.export.export(program.module(), IMAGE)

    expected = {name: handles for name, handles in by_name(program).items() if "getitem" not in name}
    assert {name: handles for name, handles in by_name(again).items() if "getitem" not in name} == expected


class WithConstants(nn.Module):
    def forward(self, x):
        table = torch.tensor([1.0, 2.0, 3.0])
        return nn.functional.silu(x + table) * torch.tensor(2.0) + table


def test_exporting_a_graph_with_constants_again_keeps_them():
    graph = torch.export.export(WithConstants(), (torch.randn(3),)).module()
    assign_handles(graph)
    again = torch.export.export(graph, (torch.randn(3),)).module()

    expected = {name: handles for name, handles in by_name(graph).items() if name != "_guards_fn"}
    assert {name for name in expected if name.startswith("lifted_tensor")} == {"lifted_tensor_0", "lifted_tensor_1"}
    assert {name: handles for name, handles in by_name(again).items() if name != "_guards_fn"} == expected


def test_all_nodes_of_a_decomposed_operator_have_its_handle():
    program = exported()
    decomposed = program.run_decompositions()
    of = by_name(program)

    assert by_name(decomposed)["sigmoid"] == by_name(decomposed)["mul"] == of["silu"]
    assert by_name(decomposed)["convolution"] == of["conv2d"]
    assert by_name(decomposed)["addmm"] == of["linear"]
    assert all(handles_of(node) for node in nodes_in(decomposed))


def test_decomposition_keeps_the_set_of_handles():
    program = exported(Branches())

    # the part of `cond` that is read, and the names of bodies, are the operator's own afterwards
    computing = {
        handle
        for node in nodes_in(program)
        if node.op != "get_attr" and node.target is not operator.getitem
        for handle in handles_of(node)
    }
    assert all_handles(program.run_decompositions()) == computing


def test_a_pass_that_copies_nodes_keeps_them():
    graph = exported().module()
    assign_handles(graph)
    rebuilt = torch.fx.Graph()
    made = {}
    for node in graph.graph.nodes:
        made[node] = rebuilt.node_copy(node, made.__getitem__)

    copied = GraphModule(graph, rebuilt)

    assert by_name(copied) == by_name(graph)
    assert all_handles(copied)


def test_assigning_again_gives_only_new_nodes_a_handle():
    graph = exported().graph_module
    before = by_name(graph)
    relu = first(graph, "relu")
    with graph.graph.inserting_after(relu):
        added = graph.graph.call_function(torch.ops.aten.neg.default, (relu,))

    assert not handles_of(added)
    assign_handles(graph)

    after = by_name(graph)
    assert len(after.pop(added.name)) == 1
    assert after == before
    assert not handles_of(added) & frozenset().union(*before.values())


def test_nodes_added_to_two_copies_do_not_get_the_same_handle():
    graph = exported().graph_module
    added = []
    for one in (copy.deepcopy(graph), copy.deepcopy(graph)):
        relu = first(one, "relu")
        with one.graph.inserting_after(relu):
            added.append(one.graph.call_function(torch.ops.aten.neg.default, (relu,)))
        assign_handles(one)

    assert not handles_of(added[0]) & handles_of(added[1])


def test_two_exports_of_one_model_share_no_handle():
    assert not all_handles(exported()) & all_handles(exported())


def test_a_fused_node_carries_the_union():
    graph = exported().graph_module
    conv, relu, silu = (first(graph, op) for op in ("conv2d", "relu", "silu"))
    union = handles_of(conv) | handles_of(relu) | handles_of(silu)

    merge_handles(silu, conv, relu)

    assert handles_of(silu) == union
    assert len(handles_of(conv)) == 1


def test_what_has_no_graph_is_refused():
    with pytest.raises(UsageError, match="trace or export it first"):
        assign_handles(nn.Linear(2, 2))


def test_records_have_the_kinds_the_handles_and_the_place_of_each_node():
    graph = exported().module()
    assign_handles(graph)
    records = {record.name: record for record in node_records(graph)}

    linear = records["linear"]
    assert (linear.op, linear.kinds, linear.module_path) == ("aten.linear.default", ("float32[2, 6]",), "linear")
    assert "self.linear(pooled)" in linear.source_line
    assert linear.handles == tuple(handles_of(first(graph, "linear.default")))
    assert records["split_with_sizes"].kinds == ("float32[2, 2]", "float32[2, 4]")
    assert records["linear_weight"].kinds == ("float32[6, 4]",)
    # a part of a result can be matched with what returns the whole
    assert set(records["split_with_sizes"].handles) < set(records["getitem"].handles)


def test_records_lead_back_to_their_nodes_in_nested_graphs():
    graph = exported(Branches()).graph_module
    placed = placed_nodes(graph)

    sine = placed["true_graph_0.sin"]
    assert sine.node.target is torch.ops.aten.sin.default
    assert sine.owner is graph.true_graph_0
    assert {record.name for record in node_records(graph)} == placed.keys()
    assert {name.partition(".")[0] for name in placed if name.endswith(("abs_1", ".cos"))} == {
        "while_loop_body_graph_0",
        "false_graph_0",
    }
    assert not {"true_graph_0", "x", "output", "_guards_fn"} & placed.keys()


def test_one_tensor_in_a_sequence_is_not_that_tensor():
    records = {record.name: record for record in node_records(exported(Branches()).graph_module)}

    assert records["cond"].kinds == ("(float32[3, 4],)",)
    assert records["getitem"].kinds == ("float32[3, 4]",)


def test_sizes_that_are_symbols_are_the_same_in_every_export():
    rows = torch.export.Dim("rows", min=2, max=9)
    program = torch.export.export(nn.Linear(4, 2), TABLE, dynamic_shapes=({0: rows},))

    assert [record.kinds for record in node_records(program.graph_module)] == [("float32[?, 2]",)]


def test_a_graph_of_dynamo_and_one_with_propagated_shapes_tell_their_kinds():
    seen = []

    def backend(graph, _):
        seen.append(node_records(graph))
        return graph.forward

    torch.compile(lambda x: torch.relu(x), backend=backend)(TABLE[0])
    traced = symbolic_trace(nn.ReLU())
    ShapeProp(traced).propagate(TABLE[0])

    assert [record.kinds for record in (*seen[0], *node_records(traced))] == [("float32[3, 4]",)] * 2
