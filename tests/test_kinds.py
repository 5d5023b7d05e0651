"""A divergence is another function, or the same one less accurate; the report says which."""

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta.errors import UsageError
from torchdelta.records.signatures import signatures_of

X = (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) + 30.0,)


def variance(x):
    return ((x - x.mean(0)) ** 2).mean(0)


def naive_variance(x):
    """The same function, but two large numbers cancel."""
    return (x * x).mean(0) - x.mean(0) ** 2


def unbiased_variance(x):
    return ((x - x.mean(0)) ** 2).sum(0) / 63


def kinds_of(report):
    return {each.kind for each in report.comparisons if each.verdict is Verdict.DIVERGED}


def test_an_unstable_formula_is_the_same_function_less_accurate():
    report = td.check(variance, X, candidate=naive_variance)

    assert report.verdict is Verdict.DIVERGED
    assert kinds_of(report) == {"less_accurate"}
    assert "the same function (float64 agrees to" in report.comparisons[0].reason


@pytest.mark.parametrize(("candidate", "kind"), [(naive_variance, "unknown"), (unbiased_variance, "another_function")])
def test_an_unstable_formula_whose_error_is_too_large_for_rounding_is_not_called_another_function(candidate, kind):
    report = td.check(variance, (X[0] + 1000.0,), candidate=candidate)

    assert kinds_of(report) == {kind}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_another_divisor_is_another_function(dtype):
    report = td.check(variance, (X[0].to(dtype),), candidate=unbiased_variance)

    assert kinds_of(report) == {"another_function"}


@pytest.mark.parametrize("share", [1e-3, 1e-6])
def test_a_small_difference_that_does_not_shrink_with_rounding_is_another_function(share):
    report = td.check(variance, X, candidate=lambda x: variance(x) * (1 + share))

    assert kinds_of(report) == {"another_function"}


def test_a_sum_in_lower_precision_is_less_accurate():
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)

    def rounds(graph_module, example_inputs):
        def call(*args):
            return tuple(
                each.to(torch.bfloat16).to(each.dtype) if each.dtype is torch.float32 else each
                for each in graph_module.forward(*args)
            )

        return call

    report = td.check(layer, X, transform=rounds, stages="forward")

    assert kinds_of(report) == {"less_accurate"}


def test_a_broken_contract_is_a_kind_of_its_own():
    assert kinds_of(td.check(variance, X, candidate=lambda x: variance(x).double())) == {"contract"}
    assert kinds_of(td.check(variance, X, candidate=lambda x: variance(x)[:5])) == {"contract"}


def test_without_float64_the_kind_is_unknown():
    report = td.check(variance, X, candidate=naive_variance, semantic=False)

    assert kinds_of(report) == {"unknown"}


def test_a_kernel_that_is_wrong_in_one_dtype_alone_is_not_called_less_accurate():
    report = td.check(variance, X, candidate=lambda x: variance(x) * (1.5 if x.dtype is torch.float32 else 1.0))

    assert report.verdict is Verdict.DIVERGED
    assert "less_accurate" not in kinds_of(report)


def test_integers_that_differ_in_float64_too_are_another_function():
    x = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def count(x):
        return (x * 10).round().long()

    def other(x):
        return (x * 10).round().long() + 1

    assert kinds_of(td.check(count, (x,), candidate=other)) == {"another_function"}


def test_an_accepted_loss_of_accuracy_is_equivalent_and_a_larger_one_is_not():
    diverged = td.check(variance, X, candidate=naive_variance).comparisons[0]
    times = diverged.error / diverged.noise

    accepted = td.check(variance, X, candidate=naive_variance, policy=f"noise*{times * 1.01}")
    refused = td.check(variance, X, candidate=naive_variance, policy=f"noise*{times / 1.01}")
    wrong = td.check(variance, X, candidate=unbiased_variance, policy="noise*1e9")

    assert accepted.verdict is Verdict.EQUIVALENT
    assert "which the policy accepts" in accepted.comparisons[0].reason
    assert refused.verdict is Verdict.DIVERGED
    assert wrong.verdict is Verdict.DIVERGED
    with pytest.raises(UsageError, match="at least 1"):
        td.check(variance, X, candidate=variance, policy="noise*0.5")


def test_a_loss_of_accuracy_is_another_failure_than_wrong_values():
    less = signatures_of(td.check(variance, X, candidate=naive_variance))
    wrong = signatures_of(td.check(variance, X, candidate=unbiased_variance))

    assert [each.type for each in (*less, *wrong)] == ["accuracy", "values"]
    assert not less[0].is_same_as(wrong[0])
    assert not wrong[0].is_same_as(less[0])


def rounding_more(share):
    """A pass that adds a share of the error of rounding to bfloat16, which there is none of in float64."""

    def transform(graph_module, example_inputs):
        def call(*args):
            results = graph_module.forward(*args)
            return tuple(
                each + share * (each.to(torch.bfloat16).float() - each) if each.dtype is torch.float32 else each
                for each in results
            )

        return call

    return transform


@pytest.mark.parametrize(
    ("times", "verdict"),
    [(0.4, Verdict.EQUIVALENT), (1.5, Verdict.INCONCLUSIVE), (3.0, Verdict.DIVERGED)],
)
def test_less_accurate_by_less_than_twice_the_limit_is_too_near_to_tell(times, verdict):
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)
    whole = td.check(layer, X, transform=rounding_more(1.0), stages="forward")
    ratio = max(each.ratio for each in whole.comparisons)

    report = td.check(layer, X, transform=rounding_more(times / ratio), stages="forward")

    assert report.verdict is verdict
    assert ("too near to what would be rounding" in report.comparisons[0].reason) == (verdict is Verdict.INCONCLUSIVE)
