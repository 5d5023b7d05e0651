"""Lifted programs: nothing rounds below float64, by a mode or by rewriting the graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.compile.dynamo import compiling
from torchdelta._torch.graphs.lift_graph import form_of, lift_graph
from torchdelta._torch.modes.lift import Lift


def casts_inside(x):
    hidden = x.to(torch.bfloat16).float() * torch.full((), 0.1)
    hidden = F.softmax(hidden, -1, dtype=torch.float32).half()
    return hidden.to(x.dtype) + torch.arange(4, dtype=torch.float32).to(torch.bfloat16).to(x.dtype)


def counts(x):
    return x * torch.arange(4).exp() / (torch.arange(4) + 3).sqrt()


def attention(x):
    return F.scaled_dot_product_attention(x, x, x).float() * 1.5


def numbers_beside_integers(x):
    count = torch.arange(4)
    return x * (count * 0.1 + (0.7 - count)) + (x > 0.0) * 0.3 + 1.1**count + torch.special.expit(count)


PROGRAMS = [casts_inside, counts, attention, numbers_beside_integers]


def exactly(function, x):
    """The function as it would be without any cast: 0.1 is what the program's float32 made of it."""
    if function is casts_inside:
        tenth = torch.full((), 0.1).double()
        return F.softmax(x * tenth, -1) + torch.arange(4.0, dtype=torch.float64)
    if function is counts:
        return x * torch.arange(4.0).double().exp() / (torch.arange(4.0).double() + 3).sqrt()
    if function is numbers_beside_integers:
        count = torch.arange(4.0, dtype=torch.float64)
        return x * (count * 0.1 + (0.7 - count)) + (x > 0.0).double() * 0.3 + 1.1**count + count.sigmoid()
    return torch.softmax(x @ x.transpose(-1, -2) / 2.0, -1) @ x * 1.5


@pytest.mark.parametrize("function", PROGRAMS)
def test_no_cast_and_no_integer_rounds_under_the_mode(function):
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with Lift(torch.bfloat16):
        lifted = function(x)

    assert lifted.dtype is torch.float64
    torch.testing.assert_close(lifted, exactly(function, x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("function", PROGRAMS)
def test_no_cast_and_no_integer_rounds_in_a_rewritten_graph(function):
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with compiling(function, lambda graph_module, _: graph_module, lifted=True) as (call, witness):
        lifted = call(x)

    assert witness.calls
    assert lifted.dtype is torch.float64
    torch.testing.assert_close(lifted, exactly(function, x), rtol=1e-14, atol=1e-14)


def test_an_autocast_region_does_not_lower_a_rewritten_graph():
    def lowered(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    x = torch.randn(8, 8, dtype=torch.float64)
    with compiling(lowered, lambda graph_module, _: graph_module, lifted=True) as (call, _):
        assert torch.equal(call(x), x @ x)


def test_a_graph_without_casts_is_left_as_it_is():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    before = traced.code

    assert lift_graph(traced).code == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_what_the_program_drops_and_rounds_nothing(dtype):
    x = torch.randn(64, 64, dtype=torch.float64)
    for drop in (lambda x: torch.native_dropout(x, 0.3, True)[0], lambda x: F.dropout(x, 0.3)):
        torch.manual_seed(0)
        native = drop(x.to(dtype))
        torch.manual_seed(0)
        with Lift(dtype):
            lifted = drop(x)

        assert torch.equal(native == 0, lifted == 0)
        torch.testing.assert_close(lifted, torch.where(lifted == 0, 0.0, x / 0.7), rtol=1e-14, atol=0)


def test_what_has_no_float64_runs_natively_and_is_named():
    unlifted = set()
    codes = torch.randint(-100, 100, (16, 16), dtype=torch.int8)
    scales = torch.rand(16, dtype=torch.float64)
    x = torch.randn(4, 16, dtype=torch.float64)
    with Lift(torch.float32, unlifted):
        made = torch.ops.aten._weight_int8pack_mm(x, codes, scales)
        x.to(torch.float8_e4m3fn)

    assert made.dtype is torch.float64
    assert unlifted == {"aten::_weight_int8pack_mm", "a cast to float8_e4m3fn"}


def test_numbers_that_are_drawn_into_a_tensor_are_those_of_the_program():
    torch.manual_seed(0)
    native = [torch.rand(3, out=torch.zeros(3)), torch.randn(2, out=torch.zeros(0)), torch.zeros(4).uniform_()]
    given, empty, filled = torch.zeros(3), torch.zeros(0), torch.zeros(4)
    torch.manual_seed(0)
    with Lift(torch.float32):
        given, empty, filled = given.double(), empty.double(), filled.double()
        torch.rand(3, out=given), torch.randn(2, out=empty), filled.uniform_()

    assert [each.tolist() for each in (given, empty, filled)] == [each.tolist() for each in native]


@pytest.mark.parametrize(("scale", "verdict"), [(0.01, Verdict.EQUIVALENT), (0.0101, Verdict.DIVERGED)])
def test_an_operator_that_takes_integers_alone_runs_natively_in_a_program_in_float64(scale, verdict):
    with torch.library._scoped_library("torchdelta_lift", "FRAGMENT") as library:
        library.define("dequantize(Tensor codes, float scale) -> Tensor")

        def dequantize(codes, scale):
            assert codes.dtype is torch.int8
            return codes.float() * scale

        library.impl("dequantize", dequantize, "CPU")
        library.impl("dequantize", lambda codes, scale: codes.float(), "Meta")
        codes = torch.arange(-50, 50, dtype=torch.int8).reshape(10, 10)

        report = td.check(
            lambda x: x @ torch.ops.torchdelta_lift.dequantize(codes, 0.01),
            (torch.randn(4, 10),),
            candidate=lambda x: x @ (codes.float() * scale),
        )

    assert report.verdict is verdict
    assert report.questions.native == "asked"


def test_an_error_that_has_nothing_to_do_with_float64_stays_what_it_is():
    with Lift(torch.float32), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))


INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def absolute_by_bits(x):
    integers = INTEGERS.get(x.dtype)
    if integers is None:
        return x.abs()
    return (x.view(integers) & torch.iinfo(integers).max).view(x.dtype)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.EQUIVALENT), (1.01, Verdict.DIVERGED)])
def test_a_candidate_that_reads_bits_is_judged_natively(dtype, factor, verdict):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)

    report = td.check(lambda x: x.abs().sin(), (x,), candidate=lambda x: (absolute_by_bits(x) * factor).sin())

    assert report.verdict is verdict
    assert report.questions.semantic == "not asked: the candidate has a view of bits, which has no float64"


def test_a_program_that_reads_bits_is_named_for_it_and_one_in_float64_is_not():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    narrow = td.check(absolute_by_bits, (x,), transform="eager")
    wide = td.check(lambda x: x.view(torch.int64).view(torch.float64) * 2, (x.double(),), transform="eager")

    assert narrow.verdict is wide.verdict is Verdict.EQUIVALENT
    assert "a view of bits" in narrow.questions.semantic
    assert wide.questions.semantic == "asked"
    inside = td.check(
        lambda x: (x.double().view(torch.int64) & -2).view(torch.float64).float(), (x,), transform="eager"
    )
    assert inside.verdict is Verdict.EQUIVALENT
    assert inside.questions.semantic == "asked"
    with Lift() as mode:
        assert torch.equal(absolute_by_bits(x), x.abs().double())
        x.double().view(8, 8).view(torch.float64)
    assert mode.unlifted == {"a view of bits"}


def with_positions(x):
    positions = torch.arange(x.shape[1], dtype=torch.bfloat16)
    return x * positions[:, None].cos() * torch.full((8,), 0.1, dtype=torch.bfloat16)


def test_numbers_that_a_narrow_constant_rounds_stay_rounded_in_a_rewritten_graph():
    x = torch.randn(2, 300, 8, dtype=torch.bfloat16)
    graphs = []
    torch.compile(with_positions, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(x)
    before = form_of(graphs[0])

    lifted = lift_graph(graphs[0])

    positions = torch.arange(300, dtype=torch.bfloat16).double()
    assert positions.tolist() != list(range(300))
    expected = x.double() * positions[:, None].cos() * torch.tensor(0.1, dtype=torch.bfloat16).double()
    assert not any("bfloat16" in str((node.args, node.kwargs)) for node in lifted.graph.nodes)
    torch.testing.assert_close(lifted(x.double())[0], expected, rtol=1e-15, atol=0.0)
    assert form_of(lifted) == before


@pytest.mark.parametrize(("slope", "verdict"), [(0.1, Verdict.EQUIVALENT), (0.1 + 1e-9, Verdict.DIVERGED)])
def test_an_integer_times_a_number_is_the_same_function_under_a_compiler_unless_the_number_changes(slope, verdict):
    def program(x):
        return x + torch.arange(5) * 0.1

    def set_slope(graph_module, _):
        for node in graph_module.graph.nodes:
            node.args = tuple(slope if arg == 0.1 else arg for arg in node.args)
        return graph_module

    report = td.check(program, (torch.randn(4, 5),), transform=set_slope, options={"unchanged": "ok"})

    assert (report.verdict, report.questions.semantic) == (verdict, "asked")


@pytest.mark.slow
def test_positions_in_bfloat16_are_equivalent_under_inductor():
    torch.manual_seed(0)
    x = torch.randn(2, 300, 8, dtype=torch.bfloat16)

    report = td.check(with_positions, (x,), transform="inductor")

    assert (report.verdict, report.questions.semantic) == (Verdict.EQUIVALENT, "asked")
