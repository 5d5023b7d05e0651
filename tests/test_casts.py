"""RegionParts casts that a candidate leaves out are noticed and named."""

import pytest
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


def slightly_scaled(x, w):
    return rounding(x, w) * 1.01


@pytest.mark.parametrize(("candidate", "verdict"), [(keeping, Verdict.EQUIVALENT), (slightly_scaled, Verdict.DIVERGED)])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_program_in_inference_mode_is_judged_as_one_without_gradients(context, candidate, verdict):
    report = td.check(context()(rounding), INPUTS, candidate=context()(candidate))

    assert report.verdict is verdict


def test_a_cast_in_the_backward_is_not_named_by_a_line_of_ours():
    inputs = (torch.ones(4, dtype=torch.bfloat16, requires_grad=True),)
    program = Program(name="test", call=lambda x: (x * 3).float() * 2, args=inputs)
    plan = Plan(stages=("forward", "gradients"), seed=0, iterations=1, steps=1, optimizer=torch.optim.SGD)
    original = Side.of(program.call, program.args, {})
    mode = Elide()

    observe(Side.copied_from(program), plan, original, lambda: mode)

    assert mode.elided
    assert all(place.startswith("test_casts.py:") for place in mode.elided)


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


def in_bfloat16(x):
    return F.silu(x) * x * 3.0


def in_bfloat16_wide(x):
    return in_bfloat16(x.float()).to(torch.bfloat16)


def test_operations_in_a_narrow_dtype_round_too():
    inputs = (INPUTS[0].to(torch.bfloat16),)
    report = td.check(in_bfloat16, inputs, candidate=in_bfloat16_wide)

    assert report.verdict is Verdict.EQUIVALENT
    note = next(note for note in report.notes if "narrowing casts were elided" in note)
    assert f"test_casts.py:{in_bfloat16.__code__.co_firstlineno + 1} (to bfloat16)" in note
    assert td.check(in_bfloat16, inputs, candidate=in_bfloat16_wide, strict="casts").verdict is Verdict.DIVERGED
    same = td.check(in_bfloat16, inputs, candidate=lambda x: in_bfloat16(x).clone(), strict="casts")
    assert same.verdict is Verdict.EQUIVALENT


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


@pytest.mark.parametrize(
    "write",
    [
        lambda narrow: torch._foreach_mul_([narrow], 2),
        lambda narrow: narrow.view(-1)[:16].mul_(2),
        lambda narrow: narrow.t().mul_(2),
        lambda narrow: torch.mul(narrow, 2, out=narrow),
    ],
)
def test_a_write_by_a_list_or_through_an_alias_is_seen(write):
    def written(x, w):
        narrow = (x @ w).to(torch.bfloat16)
        write(narrow)
        return narrow.float() * 2

    report = td.check(written, INPUTS, candidate=lambda x, w: written(x, w) + 0.0, strict="casts")

    assert report.verdict is Verdict.EQUIVALENT


def test_a_value_before_its_cast_is_kept_though_its_memory_is_written_to():
    def overwritten(x, w):
        wide = x @ w
        narrow = wide.to(torch.bfloat16)
        wide.add_(100)
        return narrow.float() * 2

    report = td.check(overwritten, INPUTS, candidate=keeping)

    assert report.verdict is Verdict.EQUIVALENT
    assert any("narrowing casts were elided" in note for note in report.notes)


def test_operands_of_two_dtypes_are_brought_to_one():
    def mixed(x, w):
        return torch.lerp((x @ w).to(torch.bfloat16), x.to(torch.bfloat16), 0.5).float()

    report = td.check(mixed, INPUTS, candidate=lambda x, w: torch.lerp(x @ w, x, 0.5))

    assert report.verdict is Verdict.EQUIVALENT
    assert not any("not known" in note for note in report.notes)
    assert any("narrowing casts were elided" in note for note in report.notes)


def squared(x):
    return (x * x) * 1e-4


def squared_wide(x):
    wide = x.float()
    return ((wide * wide) * 1e-4).to(x.dtype)


def cast_and_squared(x):
    narrow = x.to(torch.float16)
    return (narrow * narrow).float()


HALVES = (torch.tensor([5000.0, 3.0, 100.0, 8000.0], dtype=torch.float16),)
WHOLES = (torch.tensor([5003.3, 3.1, 100.7, 300.0]),)


def overflow_note(report):
    return next(note for note in report.notes if "the reference overflows" in note)


class TestOverflow:
    """An overflow of the reference that the candidate avoids."""

    def test_of_a_float_of_one_byte_ends_in_a_verdict(self):
        values, dtype = (torch.arange(-40.0, 40.0) * 8000,), torch.float8_e5m2

        def program(x):
            return x.to(dtype)

        def saturated(x):
            return x.clamp(-57344, 57344).to(dtype)

        assert td.check(program, values, candidate=saturated).verdict is Verdict.DIVERGED
        assert td.check(program, values, candidate=lambda x: x.clone().to(dtype)).verdict is Verdict.EQUIVALENT

    def test_before_a_cast_to_a_float_of_one_byte_is_judged_by_what_is_finite(self):
        def program(x):
            return ((x * x) * 1e-4).to(torch.float8_e5m2)

        def wide(x, factor=1e-4):
            return ((x.float() * x.float()) * factor).to(torch.float8_e5m2)

        halves = (torch.linspace(2.0, 400.0, 64).to(torch.float16),)
        report = td.check(program, halves, candidate=wide)

        assert report.verdict is not Verdict.DIVERGED
        assert "the reference overflows in float16" in overflow_note(report)
        assert td.check(program, halves, candidate=lambda x: wide(x, 4e-4)).verdict is Verdict.DIVERGED

    def test_is_equivalent_and_named_without_any_cast_in_the_program(self):
        report = td.check(squared, HALVES, candidate=squared_wide)
        output = report.stage("forward").comparisons[0]

        assert report.verdict is Verdict.EQUIVALENT
        assert {breach.clause for breach in output.contract if breach.excused} == {"casts"}
        assert "2 of 4 elements of forward outputs" in overflow_note(report)
        assert f"mul to float16 at test_casts.py:{squared.__code__.co_firstlineno + 1}" in overflow_note(report)

    def test_diverges_if_casts_are_held_strictly(self):
        report = td.check(squared, HALVES, candidate=squared_wide, strict="casts")

        assert report.verdict is Verdict.DIVERGED
        assert "casts: NaN or Inf at 2 of 4 elements" in report.stage("forward").comparisons[0].reason

    def test_names_the_cast_that_the_candidate_elides(self):
        report = td.check(cast_and_squared, WHOLES, candidate=lambda x: x * x)

        assert report.verdict is Verdict.EQUIVALENT
        assert "1 of 4 elements of forward outputs" not in overflow_note(report)
        assert any("narrowing casts were elided: test_casts.py" in note for note in report.notes)

    def test_allows_the_candidate_the_rounding_of_the_narrow_dtype(self):
        def rounds_once(x):
            narrow = x.to(torch.float16).float()
            return narrow * narrow

        report = td.check(cast_and_squared, WHOLES, candidate=rounds_once, semantic=False)

        assert report.verdict is Verdict.EQUIVALENT
        assert overflow_note(report)

    @pytest.mark.parametrize(
        "finish",
        [
            lambda wide, exact: wide.where(exact < 65504, 60000.0),
            lambda wide, exact: wide.where(exact < 65504, 1.05 * wide),
            lambda wide, exact: wide.where(exact != exact.max(), 0.0),
            lambda wide, exact: wide.where(exact != exact[3], 0.0),
        ],
    )
    def test_does_not_excuse_a_candidate_that_is_finite_and_wrong_there(self, finish):
        def wrong(x):
            return finish(x * x, (x * x).detach())

        inputs = (torch.tensor([5003.3, 3.1, 100.7, 300.0]),)
        report = td.check(cast_and_squared, inputs, candidate=wrong, semantic=False)

        assert report.verdict is Verdict.DIVERGED

    def test_does_not_excuse_a_wrong_element_beside_it(self):
        def wrong(x):
            return (x * x).where(x != WHOLES[0][2], 10_700.0)

        report = td.check(cast_and_squared, WHOLES, candidate=wrong, semantic=False)

        assert report.verdict is Verdict.DIVERGED

    def test_does_not_excuse_an_infinity_where_reference_and_truth_are_finite(self):
        def overflows_elsewhere(x):
            return squared(x).where(x != 3.0, torch.inf)

        def overflows_only_elsewhere(x):
            return squared_wide(x).where(x != 3.0, torch.inf)

        for candidate in (overflows_elsewhere, overflows_only_elsewhere):
            assert td.check(squared, HALVES, candidate=candidate, semantic=False).verdict is Verdict.DIVERGED

    def test_is_not_noted_if_both_sides_overflow(self):
        report = td.check(squared, HALVES, candidate=lambda x: x * x * 1e-4 + 0.0)

        assert report.verdict is Verdict.EQUIVALENT
        assert not any("overflows" in note for note in report.notes)

    @pytest.mark.parametrize(
        ("program", "values"),
        [
            (lambda x: torch.exp(x) * 1e-5, [14.0, 1.0, 2.0]),
            (lambda x: x.sum() / 100, [60000.0, 30000.0, 1.0]),
            (lambda x: (x * x - x * (x + 1)) * 0.5, [5000.0, 3.0, 2.0]),
        ],
    )
    def test_is_found_behind_exp_a_sum_and_a_difference_of_infinities(self, program, values):
        inputs = (torch.tensor(values, dtype=torch.float16),)
        wide = td.check(program, inputs, candidate=lambda x: program(x.float()).to(x.dtype))

        assert wide.verdict is Verdict.EQUIVALENT
        assert "in float16" in overflow_note(wide)

    def test_is_found_in_gradients(self):
        def program(x):
            return x * 1e-3 * 300.0 * 300.0

        inputs = (torch.tensor([8.0, 0.5, 0.25, 2.0, 3.0, 1.0], dtype=torch.float16, requires_grad=True),)
        report = td.check(program, inputs, candidate=lambda x: program(x.float()).to(x.dtype))

        assert report.verdict is Verdict.EQUIVALENT
        assert "elements of gradients args[0].grad" in overflow_note(report)
