"""Values of very different sizes in one tensor are judged by themselves."""

import math

import pytest
import torch

import torchdelta as td
from torchdelta.compare.kernels import measure
from torchdelta.compare.magnitudes import parts_of
from torchdelta.compare.policy import Sample
from torchdelta.records.verdict import Verdict

DIVERGED, EQUIVALENT = Verdict.DIVERGED, Verdict.EQUIVALENT


def sample_of(truth, reference=None, candidate=None):
    reference = truth.float() if reference is None else reference
    candidate = reference.clone() if candidate is None else candidate
    return Sample(
        reference=reference,
        candidate=candidate,
        truth=truth,
        measurement=measure(reference, candidate),
        worst=None,
        rtol=0.0,
        atol=0.0,
    )


def parts(truth):
    return parts_of(sample_of(truth), truth)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_ordinary_values_are_one_part(scale):
    torch.manual_seed(0)
    truth = torch.randn(1000, dtype=torch.float64) * scale

    (whole,) = parts(truth)

    assert whole.elements == 1000
    assert whole.ordinary == pytest.approx(float(truth.abs().median()), rel=0.01)


@pytest.mark.parametrize("constant", [-1e4, -1e9, -1e20, 1e30, -3e38])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.8])
def test_a_mask_constant_is_apart_whatever_its_share(constant, share):
    torch.manual_seed(0)
    truth = torch.randn(40, 50, dtype=torch.float64)
    count = int(share * 2000)
    truth.view(-1)[torch.randperm(2000)[:count]] = constant

    small, large = parts(truth)

    assert (small.elements, large.elements) == (2000 - count, count)
    assert float(small.sample.truth.abs().max()) < 10
    assert large.is_mask == (abs(constant) > 1e30 and share <= 0.5)


def test_zeros_belong_to_the_most_and_non_finite_values_to_none():
    truth = torch.tensor([0.0, 1.0, 2.0, 3.0, 1e9, torch.inf, torch.nan], dtype=torch.float64)

    small, large = parts(truth)

    assert (small.elements, large.elements) == (4, 1)


def test_many_scales_make_several_parts_and_no_more_than_eight():
    truth = torch.logspace(-150, 150, 301, dtype=torch.float64)

    assert len(parts(truth)) == 8
    assert sum(part.elements for part in parts(truth)) == 301


def test_very_large_and_very_small_values_are_scaled():
    for exponent in (900, -900):
        truth = torch.randn(100, dtype=torch.float64) * 2.0**exponent

        (whole,) = parts(truth)

        assert abs(math.frexp(float(whole.sample.truth.abs().max()))[1]) < 2
        assert whole.unscale(float(whole.sample.truth.abs().max())) == float(truth.abs().max())


def test_components_of_complex_values_are_taken_apart():
    truth = torch.complex(torch.randn(64, dtype=torch.float64), torch.full((64,), 1e9, dtype=torch.float64))

    reference = truth.to(torch.complex64)
    small, large = parts_of(sample_of(truth, reference), truth)

    assert (small.elements, large.elements) == (64, 64)


# programs


def scores(q, k, keep):
    return (q @ k.transpose(-1, -2)).masked_fill(~keep, CONSTANT)


CONSTANT = -1e20


@pytest.mark.parametrize("constant", [-1e4, -1e9, -1e20, -1e30, -3e38])
@pytest.mark.parametrize("semantic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_that_are_lost_beside_a_mask_constant_are_seen(constant, semantic, dtype, monkeypatch):
    monkeypatch.setitem(globals(), "CONSTANT", constant)
    torch.manual_seed(0)
    q, k = torch.randn(2, 12, 8).to(dtype), torch.randn(2, 12, 8).to(dtype)
    keep = torch.ones(12, 12).tril().bool()

    def lost(q, k, keep):
        return (q @ k.transpose(-1, -2) * 0).masked_fill(~keep, CONSTANT)

    def slightly_off(q, k, keep):
        return (q @ k.transpose(-1, -2) * 1.1).masked_fill(~keep, CONSTANT)

    def same(q, k, keep):
        return torch.where(keep, q @ k.transpose(-1, -2), torch.tensor(CONSTANT).to(q.dtype))

    assert td.check(scores, (q, k, keep), candidate=lost, semantic=semantic).verdict is DIVERGED
    assert td.check(scores, (q, k, keep), candidate=slightly_off, semantic=semantic).verdict is DIVERGED
    assert td.check(scores, (q, k, keep), candidate=same, semantic=semantic).verdict is EQUIVALENT


def test_a_lost_or_changed_mask_constant_is_seen():
    torch.manual_seed(0)
    q, k = torch.randn(2, 12, 8), torch.randn(2, 12, 8)
    keep = torch.ones(12, 12).tril().bool()

    def other(q, k, keep):
        return (q @ k.transpose(-1, -2)).masked_fill(~keep, CONSTANT * 1.5)

    assert td.check(scores, (q, k, keep), candidate=other).verdict is DIVERGED
    assert td.check(scores, (q, k, keep), candidate=other, semantic=False).verdict is DIVERGED


@pytest.mark.parametrize("constant", [-1e100, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("semantic", [True, False])
def test_a_lost_mask_constant_is_seen_that_float64_alone_can_hold(constant, semantic):
    torch.manual_seed(0)
    values = torch.randn(16, 64, dtype=torch.float64)
    is_masked = torch.rand(16, 64) < 0.1

    def masked(values, constant=constant):
        return (values * 1.1).masked_fill(is_masked, constant)

    def reordered(values):
        return (values / (1 / 1.1)).masked_fill(is_masked, constant)

    for other in (0.0, -constant, 1.0):
        report = td.check(masked, (values,), candidate=lambda x, other=other: masked(x, other), semantic=semantic)
        assert report.verdict is DIVERGED

    assert td.check(masked, (values,), candidate=reordered, semantic=semantic).verdict is EQUIVALENT


def test_small_outputs_beside_one_huge_one_are_held_to_their_own_noise():
    torch.manual_seed(0)
    x = torch.randn(256)

    def program(x):
        return torch.cat([x.exp().sum()[None] * 1e12, x * 1.1])

    def wrong(x):
        return torch.cat([x.exp().sum()[None] * 1e12, x * 1.2])

    report = td.check(program, (x,), candidate=wrong, semantic=False)
    clean = td.check(program, (x,), candidate=lambda x: torch.cat([x.exp().sum()[None] * 1e12, x / (1 / 1.1)]))

    assert report.verdict is DIVERGED
    assert clean.verdict is EQUIVALENT
    assert clean.stages[0].comparisons[0].resolution < 1e-4


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e307, 1e-300])
def test_no_size_overflows_in_our_own_arithmetic(scale):
    torch.manual_seed(0)
    x = torch.randn(64, 8, dtype=torch.float64) / 4

    def program(x):
        return x.tanh() * scale

    def reordered(x):
        return (x.sinh() / x.cosh()) * scale

    assert td.check(program, (x,), candidate=reordered).verdict is EQUIVALENT
    assert td.check(program, (x,), candidate=lambda x: program(x) * 1.001).verdict is DIVERGED
