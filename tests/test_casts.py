"""Narrowing casts that a candidate leaves out are noticed and named."""

import torch
import torch.nn.functional as F

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.modes.elided_casts import Elide
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.program.stages import Plan, observe


def rounding(x, w):
    return (x @ w).to(torch.bfloat16).float() * 2.0


def keeping(x, w):
    return (x @ w) * 2.0


def halved(x, w):
    return (x @ w).to(torch.bfloat16).float() + (x @ w).to(torch.bfloat16).float() * (1 + 1e-6)


def chained(x, w):
    narrow = (x @ w).to(torch.bfloat16)
    return F.silu(narrow).t().contiguous().t() * narrow


def chained_wide(x, w):
    wide = x @ w
    return (F.silu(wide) * wide).to(torch.bfloat16)


ROUNDED_AT = f"test_casts.py:{rounding.__code__.co_firstlineno + 1}"
INPUTS = (torch.randn(16, 32, generator=torch.Generator().manual_seed(0)), torch.eye(32) * 0.7 + 0.01)


def test_a_candidate_that_keeps_the_value_wide_is_equivalent_and_the_cast_is_named():
    report = td.check(rounding, INPUTS, candidate=keeping)
    output = report.stage("forward").comparisons[0]

    assert report.verdict is Verdict.EQUIVALENT
    assert [breach.clause for breach in output.contract if breach.excused] == ["casts"]
    note = next(note for note in report.notes if "narrowing casts were elided" in note)
    assert f"{ROUNDED_AT} (to bfloat16)" in note


def test_a_cast_in_the_backward_is_not_named_by_a_line_of_ours():
    inputs = (torch.ones(4, dtype=torch.bfloat16, requires_grad=True),)
    program = Program(name="test", call=lambda x: (x * 3).float() * 2, args=inputs)
    plan = Plan(stages=("forward", "gradients"), seed=0, iterations=1, steps=1, optimizer=torch.optim.SGD)
    original = Side.of(program.call, program.args, {})
    mode = Elide()

    observe(Side.copied_from(program), plan, original, lambda: mode)

    assert len(mode.elided) == 1
    assert mode.elided.pop().startswith("test_casts.py:")


def test_held_strictly_it_diverges():
    report = td.check(rounding, INPUTS, candidate=keeping, strict="casts")

    assert report.verdict is Verdict.DIVERGED
    assert f"rounds at {ROUNDED_AT}" in report.stage("forward").comparisons[0].reason


def test_a_candidate_that_rounds_where_the_reference_does_elides_nothing():
    report = td.check(rounding, INPUTS, candidate=halved, strict="casts", semantic=False)

    assert report.verdict is Verdict.EQUIVALENT
    assert not any("elided" in note for note in report.notes)


def test_a_value_is_followed_through_views_and_elementwise_operations():
    report = td.check(chained, INPUTS, candidate=chained_wide, ignore="stride")

    assert report.verdict is Verdict.EQUIVALENT
    assert any("elided" in note for note in report.notes)


def test_a_program_without_narrowing_casts_says_nothing():
    report = td.check(keeping, INPUTS, candidate=lambda x, w: (x @ w) + (x @ w))

    assert not any("elided" in note for note in report.notes)


def test_casts_are_held_strictly_under_any_policy():
    report = td.check(rounding, INPUTS, candidate=keeping, strict="casts", policy="sqnr>=20")

    assert report.verdict is Verdict.DIVERGED


def test_a_narrow_tensor_that_was_written_to_is_read_as_it_is():
    def written(x, w):
        narrow = (x @ w).to(torch.bfloat16)
        narrow.add_(100)
        return narrow.float() * 2

    report = td.check(written, INPUTS, candidate=lambda x, w: written(x, w) + 0.0, strict="casts")

    assert report.verdict is Verdict.EQUIVALENT
