"""Nodes are matched by what is surest first, and whoever has no partner is told."""

import copy
import itertools

import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies
from torch import nn

from torchdelta.errors import UsageError
from torchdelta.nodewise import matching
from torchdelta.nodewise.matching import align, assign_handles, common_subsequence
from torchdelta.nodewise.node_records import node_records
from torchdelta.records.location import NodeRecord


def node(name, op=None, kinds=("float32[2, 3]",), handles=(), module_path=""):
    return NodeRecord(name=name, op=op or name, kinds=kinds, handles=handles, module_path=module_path)


def pairs(alignment):
    return [(match.reference, match.candidate) for match in alignment.matches]


def how(alignment):
    return {match.reference: match.how for match in alignment.matches}


def unmatched(alignment):
    return (
        [record.name for record in alignment.unmatched_reference],
        [record.name for record in alignment.unmatched_candidate],
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


X = (torch.linspace(-1, 1, 8).reshape(2, 4),)


def exported(model=None):
    graph = torch.export.export(model or Model(), X).module()
    assign_handles(graph)
    return graph


def decomposed(graph):
    return torch.export.export(graph, X).run_decompositions().module()


def test_a_graph_matches_its_copy_by_handle():
    graph = exported()
    records = node_records(graph)
    found = align(records, node_records(copy.deepcopy(graph)))

    assert pairs(found) == [(record.name, record.name) for record in records]
    assert found.coverage.matched == found.coverage.total == 2 * len(records)
    assert found.coverage.how == {"handle": 2 * len(records)}


def test_a_decomposed_operator_is_matched_with_the_last_node_of_what_it_became():
    graph = exported()
    candidate = decomposed(graph)
    found = align(node_records(graph), node_records(candidate))

    matched = dict(pairs(found))
    assert matched["silu"] == "mul"
    assert "sigmoid" in found.covered_candidate
    assert matched["linear"] == "addmm"
    # of the three results of the normalisation one is read
    assert matched["layer_norm"] == "getitem"
    assert "native_layer_norm" in found.covered_candidate
    assert unmatched(found) == ([], [])


def test_the_matched_nodes_of_a_decomposed_graph_compute_the_same():
    graph = exported()
    candidate = decomposed(graph)
    found = align(node_records(graph), node_records(candidate))

    of_reference, of_candidate = (values_of(one) for one in (graph, candidate))
    compared = [(one, other) for one, other in pairs(found) if isinstance(of_reference[one], torch.Tensor)]
    assert len(compared) == len(node_records(graph))
    for one, other in compared:
        torch.testing.assert_close(of_reference[one], of_candidate[other])


def values_of(graph):
    values = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node):
            values[node.name] = super().run_node(node)
            return values[node.name]

    Recorder(graph).run(*X)
    return values


def test_a_result_of_several_is_matched_with_the_only_part_of_its_kind():
    # decomposition dissolves the parts in the operators that compute them
    parts = [
        node("native_layer_norm", kinds=("float32[2, 3]", "float32[2, 1]"), handles=(1,)),
        node("getitem", "getitem", handles=(1, 2)),
        node("getitem_1", "getitem", kinds=("float32[2, 1]",), handles=(1, 3)),
    ]
    inner = [node("rsqrt", kinds=("float32[2, 1]",), handles=(1,)), node("mul", handles=(1,))]

    assert pairs(align(parts, inner)) == [("getitem", "mul")]
    assert pairs(align(inner, parts)) == [("mul", "getitem")]


def test_where_two_parts_would_fit_neither_is_matched():
    parts = [
        node("lstm", kinds=("float32[2, 3]", "float32[2, 3]"), handles=(1,)),
        node("getitem", "getitem", handles=(1, 2)),
        node("getitem_1", "getitem", handles=(1, 3)),
    ]
    found = align(parts, [node("tanh", handles=(1,)), node("mul", handles=(1,))])

    assert pairs(found) == []
    assert unmatched(found) == (["lstm", "getitem", "getitem_1"], ["tanh", "mul"])


def test_fused_nodes_are_matched_by_what_they_end_in():
    reference = [node("conv", handles=(1,)), node("norm", handles=(2,)), node("relu", handles=(3,))]
    candidate = [node("conv", handles=(1, 2)), node("relu", handles=(3,))]
    found = align(reference, candidate)

    # the convolution alone is not what the fused one computes, although it has its name
    assert pairs(found) == [("norm", "conv"), ("relu", "relu")]
    assert found.covered_reference == ("conv",)
    assert (found.groups[0].reference, found.groups[0].candidate) == (("conv", "norm"), ("conv",))


def test_a_node_is_matched_with_itself_and_with_what_dequantizes_it():
    quantize = node("quantize", kinds=(), handles=(1,))
    candidate = [node("mean", handles=(1,)), quantize, node("dequantize", handles=(1,))]
    found = align([node("mean", handles=(1,))], candidate)

    assert pairs(found) == [("mean", "mean"), ("mean", "dequantize")]
    assert found.covered_candidate == ("quantize",)


def test_a_node_that_returns_another_dtype_or_shape_is_still_the_same_node():
    reference = [node("sum_1", kinds=("float32[2]",), handles=(1,)), node("exp", handles=(2,))]
    candidate = [node("sum_1", kinds=("float32[3]",), handles=(1,)), node("exp", kinds=("int64[2, 3]",), handles=(2,))]

    assert pairs(align(reference, candidate)) == [("sum_1", "sum_1"), ("exp", "exp")]


def test_two_exports_of_one_model_match_without_a_shared_handle():
    first, second = exported(), exported()
    found = align(node_records(first), node_records(second))

    assert found.coverage.how == {"name": found.coverage.total}
    assert all(one == other for one, other in pairs(found))


def test_two_exports_match_where_every_name_and_module_is_another():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, x):
            return self.inner(x)

    second = exported(Wrapped())
    for index, one in enumerate(second.graph.nodes):
        if one.op == "call_function":
            one.name = f"renamed{index}"
    reference, candidate = node_records(exported()), node_records(second)
    found = align(reference, candidate)

    assert pairs(found) == [(one.name, other.name) for one, other in zip(reference, candidate, strict=True)]


def test_a_number_that_shifted_is_no_name():
    # an addition was put in front, and tracing numbers them all
    reference = [node("mul"), node("add", "add"), node("exp"), node("add_1", "add"), node("neg")]
    candidate = [
        *(node("sin"), node("add", "add"), node("mul"), node("add_1", "add")),
        *(node("exp"), node("add_2", "add"), node("neg")),
    ]
    found = align(reference, candidate)

    assert ("add", "add_1") in pairs(found)
    assert ("add_1", "add_2") in pairs(found)
    assert unmatched(found) == ([], ["sin", "add"])


def test_a_cast_graph_matches_by_name():
    reference = [node("mul"), node("sum_1", kinds=("float32[2]",))]
    candidate = [node("mul", kinds=("bfloat16[2, 3]",)), node("sum_1", kinds=("bfloat16[2]",))]

    assert pairs(align(reference, candidate)) == [("mul", "mul"), ("sum_1", "sum_1")]


def test_what_has_another_shape_and_no_handle_is_not_matched_by_its_name():
    found = align([node("mul")], [node("mul", kinds=("float32[7]",))])

    assert unmatched(found) == (["mul"], ["mul"])


def test_graphs_with_nothing_in_common_have_no_coverage():
    found = align(node_records(exported()), [node("fft"), node("ifft")])

    assert found.matches == ()
    assert found.coverage.matched == 0
    assert found.coverage.total == len(node_records(exported())) + 2
    assert len(found.unmatched_candidate) == 2


def test_equal_values_match_where_nothing_else_does():
    reference = [node("gelu"), node("erf"), node("tanh")]
    candidate = [node("kernel_0"), node("kernel_1"), node("kernel_2")]
    values = (
        {"gelu": "v1", "erf": "v2", "tanh": "v2"},
        {"kernel_0": "v2", "kernel_1": "v1", "kernel_2": "v3"},
    )
    found = align(reference, candidate, values=values)

    assert pairs(found) == [("gelu", "kernel_1")]
    assert how(found) == {"gelu": "value"}
    # two nodes have the value v2, so it tells nothing
    assert unmatched(found) == (["erf", "tanh"], ["kernel_0", "kernel_2"])


def test_an_equal_value_of_another_kind_is_no_match():
    values = ({"sum_1": "v"}, {"total": "v"})

    assert not align([node("sum_1")], [node("total", kinds=("float32[6]",))], values=values).matches


def test_what_the_user_says_comes_first():
    reference = [node("add", handles=(1,)), node("mul", handles=(2,))]
    candidate = [node("add", handles=(1,)), node("mul", handles=(2,))]
    found = align(reference, candidate, mapping={"add": "mul"})

    assert pairs(found) == [("add", "mul")]
    assert how(found) == {"add": "given"}
    assert unmatched(found) == (["mul"], ["add"])


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"linaer": "linear"}, "the reference has no such node: did you mean linear"),
        ({"linear": "linaer"}, "the candidate has no such node: did you mean linear"),
        ({"linear": "exp", "exp": "exp"}, "names 'exp' of the candidate 2 times"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(mapping, words):
    nodes = [node("linear"), node("exp")]

    with pytest.raises(UsageError, match=words):
        align(nodes, nodes, mapping=mapping)


@examples(
    strategies.lists(strategies.sampled_from("abcd"), max_size=9),
    strategies.lists(strategies.sampled_from("abcd"), max_size=9),
)
def test_a_common_subsequence_rises_and_holds_equal_items(first, second):
    found = common_subsequence(first, second)

    assert all(first[one] == second[other] for one, other in found)
    assert all(one < later and other < latter for (one, other), (later, latter) in itertools.pairwise(found))


@examples(
    strategies.lists(strategies.sampled_from("ab"), max_size=9),
    strategies.lists(strategies.sampled_from("ab"), max_size=9),
)
def test_without_single_items_it_is_a_longest_one(first, second):
    # every item twice, so that nothing is alone
    first, second = first * 2, second * 2
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for one, other in itertools.product(range(len(first)), range(len(second))):
        lengths[one + 1][other + 1] = (
            lengths[one][other] + 1
            if first[one] == second[other]
            else max(lengths[one][other + 1], lengths[one + 1][other])
        )

    assert len(common_subsequence(first, second)) == lengths[-1][-1]


def test_a_table_that_is_halved_finds_as_much(monkeypatch):
    first, second = list("abcabba" * 6), list("cbabac" * 7)
    whole = len(common_subsequence(first, second))
    monkeypatch.setattr(matching, "_LARGEST_TABLE", 4)

    assert len(common_subsequence(first, second)) == whole > 12


def test_many_nodes_of_few_kinds_are_aligned():
    reference = [node(f"reference{index}", "add" if index % 7 else "mul") for index in range(5000)]
    candidate = [node(f"candidate{index}", "add" if index % 5 else "mul") for index in range(5000)]
    found = align(reference, candidate)

    assert len(found.matches) > 4000
    assert len(found.matches) + len(found.unmatched_reference) == 5000
