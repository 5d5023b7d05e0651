"""Fresh inputs of the same kind: everything stays but the values."""

import pytest
import torch

import torchdelta as td
from torchdelta import Verdict
from torchdelta.program.examples import randomise


def drawn(value, seed=1):
    randomise(value, seed=seed)
    return value


def test_floats_change_and_stay_in_their_range():
    x = torch.rand(1000)
    low, high, before = x.min(), x.max(), x.clone()
    drawn((x,))

    assert (x != before).float().mean() > 0.9
    assert x.min() >= low
    assert x.max() <= high


def test_token_ids_stay_in_their_range():
    tokens = torch.randint(3, 50, (4, 9))
    low, high, before = int(tokens.min()), int(tokens.max()), tokens.clone()
    drawn((tokens,))

    assert not torch.equal(tokens, before)
    assert low <= int(tokens.min()) <= int(tokens.max()) <= high


def test_a_mask_of_ones_stays_and_a_mixed_mask_is_drawn():
    full, mixed = torch.ones(64, dtype=torch.bool), torch.arange(64) < 32
    drawn((full, mixed))

    assert full.all()
    assert not torch.equal(mixed, torch.arange(64) < 32)
    assert mixed.any()


def test_a_single_integer_stays_and_a_single_float_does_not():
    length, scale = torch.tensor(7), torch.tensor(2.0)
    drawn((length, scale))

    assert length == 7
    assert scale != 2.0


def test_views_of_one_another_still_agree():
    base = torch.randn(10)
    view = base[3:]
    drawn({"base": base, "view": view})

    assert torch.equal(base[3:], view)


def test_strides_and_requires_grad_stay():
    x = torch.randn(3, 4).t().requires_grad_()
    drawn((x,))

    assert x.stride() == (1, 4)
    assert x.requires_grad
    assert x.is_leaf


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float16, torch.uint8, torch.uint16])
def test_every_kind_is_drawn(dtype):
    x = torch.arange(1, 65).to(dtype)
    before = x.clone()
    drawn((x,))

    assert x.dtype is dtype
    assert not torch.equal(x, before)


def test_the_same_seed_draws_the_same_values():
    assert torch.equal(drawn(torch.arange(9.0), seed=4), drawn(torch.arange(9.0), seed=4))
    assert not torch.equal(drawn(torch.arange(9.0), seed=4), drawn(torch.arange(9.0), seed=5))


def test_a_value_baked_into_a_trace_is_caught_by_a_second_iteration():
    def bake(graph_module, example_inputs):
        kept = []

        def call(*args):
            if not kept:
                kept.append(tuple(each.clone() for each in graph_module(*args)))
            return kept[0]

        return call

    x = torch.randn(8)
    once = td.check(lambda x: x * 2, (x,), transform=bake)
    twice = td.check(lambda x: x * 2, (x,), transform=bake, iterations=2)

    assert once.verdict is Verdict.EQUIVALENT
    assert twice.verdict is Verdict.DIVERGED
    guilty = [seen.path for seen in twice.comparisons if seen.verdict is Verdict.DIVERGED]
    assert guilty == ["iterations[1].outputs"]


def test_random_inputs_that_the_program_rejects_leave_the_rest_of_the_answer_and_are_inconclusive():
    def picky(x, ends):
        assert bool((ends[1:] >= ends[:-1]).all()), "ends must be sorted"
        return x.cumsum(0)[ends]

    ends = torch.arange(0, 40, 5)
    report = td.check(picky, (torch.randn(40), ends), candidate=picky, iterations=3)

    assert report.verdict is Verdict.INCONCLUSIVE
    assert "iteration 1 did not run" in report.stage("forward").reason
    assert "ends must be sorted" in report.stage("forward").reason
    assert all(seen.verdict is Verdict.EQUIVALENT for seen in report.comparisons)


def test_every_side_gets_the_same_fresh_inputs():
    x = torch.randn(64, 64)
    report = td.check(lambda x: torch.frac(x * 4096), (x,), candidate=lambda x: torch.frac(x * 4096), iterations=2)
    fresh = next(seen for seen in report.comparisons if seen.path == "iterations[1].outputs")

    assert report.verdict is Verdict.EQUIVALENT
    assert fresh.noise < 1e-6


def test_a_long_list_of_plain_arguments_costs_no_comparisons():
    report = td.check(lambda x, numbers: x + len(numbers), (torch.ones(2), list(range(50_000))), transform="eager")

    assert report.verdict is Verdict.EQUIVALENT
    assert len(report.comparisons) < 10
