"""A program that asks for its dtype takes in float64 the branch that it took natively."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchdelta as td
from torchdelta._torch.modes.dtype_answers import DtypeRecord, DtypeReplay
from torchdelta._torch.modes.lift import Lift
from torchdelta.records.verdict import Verdict

DIVERGED, EQUIVALENT = Verdict.DIVERGED, Verdict.EQUIVALENT
UNCHANGED = {"unchanged": "ok"}


def recorded(program, *args):
    with DtypeRecord() as record:
        program(*args)
    return record.answers


def replayed(program, answers, *args):
    replay, lifted = DtypeReplay(answers), [arg.double() for arg in args]
    with Lift(), replay:
        result = program(*lifted)
    return result, replay


def test_every_question_gets_the_recorded_answer():
    def program(x):
        return [x.dtype, (x * 2).itemsize, x.element_size(), x.type(), x.nbytes, torch.finfo(x.sum().dtype).eps]

    x = torch.randn(4).bfloat16()
    answers = recorded(program, x)

    assert replayed(program, answers, x)[0] == program(x)
    assert x.double().dtype is torch.float64


def test_torch_itself_is_as_before_afterwards():
    before = dict(vars(torch.Tensor))

    with pytest.raises(RuntimeError, match="on purpose"), DtypeRecord():
        raise RuntimeError("on purpose")

    assert dict(vars(torch.Tensor)) == before


def test_a_cast_that_changed_nothing_returns_its_own_tensor_again():
    def program(x, y):
        x.to(y.dtype).add_(1)
        return x, x.float() is x

    x, y = torch.zeros(2).bfloat16(), torch.zeros(1).bfloat16()
    answers = recorded(program, x, y)
    (after, is_same), replay = replayed(program, answers, torch.zeros(2).bfloat16(), y)

    assert after.tolist() == [1.0, 1.0]
    assert not is_same
    assert replay.astray == ""


def test_a_question_that_was_not_recorded_is_noticed():
    answers = recorded(lambda x: x.dtype, torch.zeros(1))
    _, replay = replayed(lambda x: (x.dtype, x.itemsize), answers, torch.zeros(1))

    assert "asked for itemsize where it had asked for nothing" in replay.astray


def test_what_an_operation_asks_inside_is_answered_truly():
    x = torch.randn(3, 4).bfloat16()

    def program(x):
        return F.layer_norm(x * (2 if x.dtype is torch.bfloat16 else 3), (4,))

    result, _ = replayed(program, recorded(program, x), x)

    assert result.dtype is torch.float64
    torch.testing.assert_close(result, F.layer_norm(x.double() * 2, (4,)))
    assert not torch.allclose(result, F.layer_norm(x.double() * 3, (4,)), rtol=1e-9, atol=0)


# programs


class Clamps(nn.Module):
    def forward(self, x):
        y = x * 3
        if y.dtype == torch.bfloat16:
            y = y.clamp(-4, 4)
        return y.sum(-1)


def scaled_by_epsilon(x):
    return x / (x.abs().amax(-1, keepdim=True) + 3 * torch.finfo(x.dtype).eps)


def masked_by_dtype(x):
    scores = x @ x.transpose(-1, -2)
    low = torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype)
    keep = torch.ones(8, 8).tril().bool()
    return torch.where(keep, scores, low).softmax(-1).to(x.dtype)


def wide_inside(x):
    dtype = x.dtype
    y = x.float() if dtype in (torch.float16, torch.bfloat16) else x
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)


def unclamped(graph_module, example_inputs):
    for node in list(graph_module.graph.nodes):
        if node.target in ("clamp", torch.clamp):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def unchanged(graph_module, example_inputs):
    return graph_module


def scaled(factor):
    def scale_outputs(graph_module, example_inputs):
        return lambda *args: tuple(value * factor for value in graph_module.forward(*args))

    return scale_outputs


@pytest.mark.parametrize("program", [Clamps(), scaled_by_epsilon, masked_by_dtype, wide_inside])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_programs_that_ask_are_equivalent_to_themselves_and_small_faults_show(program, dtype):
    torch.manual_seed(0)
    x = torch.randn(8, 64).to(dtype)

    clean = td.check(program, (x,), transform=unchanged, options=UNCHANGED)
    assert (clean.verdict, clean.questions.semantic) == (EQUIVALENT, "asked")
    assert td.check(program, (x,), transform="aot_eager").verdict is EQUIVALENT
    assert td.check(program, (x,), transform=scaled(1.002)).verdict is DIVERGED


def test_a_branch_that_only_bfloat16_takes_must_not_be_lost():
    torch.manual_seed(0)
    x = torch.randn(8, 64).bfloat16()

    assert td.check(Clamps(), (x,), transform=unclamped).verdict is DIVERGED
    assert td.check(Clamps(), (x,), candidate=lambda x: (x * 3).sum(-1)).verdict is DIVERGED
    assert td.check(Clamps(), (x,), candidate=lambda x: (x * 3).clamp(-4, 4).sum(-1)).verdict is EQUIVALENT
    assert td.check(Clamps(), (x.float(),), transform=unclamped, options=UNCHANGED).verdict is EQUIVALENT


def test_another_implementation_that_asks_too_is_told_its_own_answers():
    torch.manual_seed(0)
    x = torch.randn(8, 64).bfloat16()

    def other(x):
        return (3 * x).clamp(-4, 4).sum(-1) if x.element_size() == 2 else (3 * x).sum(-1)

    report = td.check(Clamps(), (x,), candidate=other)

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


class Activated(nn.Module):
    """Has an operation that only narrow programs have, and none that takes its place in float64."""

    def forward(self, x):
        y = x * 2
        return F.gelu(y.float()).to(y.dtype) if y.dtype in (torch.bfloat16, torch.float16) else y


def with_gelu(approximation):
    def approximated(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            if getattr(node.target, "__name__", "") == "gelu":
                node.kwargs = {"approximate": approximation}
        graph_module.recompile()
        return graph_module

    return approximated


def test_a_small_fault_in_a_branch_that_float64_does_not_take_shows():
    torch.manual_seed(0)
    x = torch.randn(16, 32).bfloat16()

    assert td.check(Activated(), (x,), transform=with_gelu("tanh")).verdict is DIVERGED
    report = td.check(Activated(), (x,), transform=with_gelu("none"), options=UNCHANGED)
    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


def of_its_dtype(x):
    return x * torch.tensor(0.1, dtype=x.dtype) + torch.full((8,), 0.3, dtype=x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transform", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_constant_of_the_inputs_dtype_is_no_difference_of_a_compiler(transform, dtype):
    torch.manual_seed(0)
    x = torch.randn(30, 8).to(dtype)

    report = td.check(of_its_dtype, (x,), transform=transform)
    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")
    assert td.check(of_its_dtype, (x,), transform=scaled(1.001)).verdict is DIVERGED
