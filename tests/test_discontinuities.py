"""Integers and booleans are exact, unless they were decided by a margin within noise."""

import pytest
import torch

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.ledges import Ledges

TORN = torch.tensor([[1.0, 1.0 + 2.0**-23, 0.5], [3.0, 1.0, 2.0]])


def scores(x, w):
    return x @ w


def nudged(x, w):
    """The same to the last bit or two, on the other side of the tie."""
    return (x @ w) * torch.tensor([1.0 + 2.0**-22, 1.0, 1.0])


def first(report):
    return report.stage("forward").comparisons[0]


@pytest.mark.parametrize(
    "decide",
    [
        lambda y: y.argmax(-1),
        lambda y: y[:, :1] >= y[:, 1:2],
        lambda y: y.topk(2, -1).indices,
        lambda y: y.sort(-1).indices,
        lambda y: y.max(-1).indices + 1,
    ],
)
def test_a_tie_within_noise_is_inconclusive_with_its_margin(decide):
    w = torch.eye(3)
    report = td.check(
        lambda x, w: decide(scores(x, w)), (TORN, w), candidate=lambda x, w: decide(nudged(x, w)), semantic=False
    )
    seen = first(report)

    assert seen.verdict is Verdict.INCONCLUSIVE
    assert seen.details["margin"] < 1e-6
    assert "margin" in seen.reason


@pytest.mark.parametrize("decide", [lambda y: y.argmax(-1), lambda y: y.topk(2, -1).indices])
def test_a_choice_by_a_wide_margin_diverges(decide):
    def wrong(x, w):
        chosen = decide(scores(x, w)).clone()
        chosen[1] = chosen[1].flip(-1) if chosen.dim() > 1 else 2
        return chosen

    seen = first(td.check(lambda x, w: decide(scores(x, w)), (TORN, torch.eye(3)), candidate=wrong))

    assert seen.verdict is Verdict.DIVERGED
    assert seen.details["margin"] > 0.1


def test_rounding_at_a_half_is_inconclusive_and_elsewhere_it_is_not():
    x = torch.tensor([0.5 + 2.0**-24, 1.7, 2.2])

    def reference(x):
        return (x * 1.0).round().long()

    def to_the_other_side(x):
        return ((x - 2.0**-23) * 1.0).round().long()

    def off_by_one(x):
        return (x * 1.0).round().long() + torch.tensor([0, 1, 0])

    assert first(td.check(reference, (x,), candidate=to_the_other_side)).verdict is Verdict.INCONCLUSIVE
    assert first(td.check(reference, (x,), candidate=off_by_one)).verdict is Verdict.DIVERGED


def test_integers_that_no_float_decided_are_exact():
    seen = first(td.check(lambda x: x + 1, (torch.arange(4),), candidate=lambda x: x + 1 + (x == 2)))

    assert seen.verdict is Verdict.DIVERGED
    assert "margin" not in seen.details


def test_the_margin_of_a_largest_value_is_its_distance_from_the_next():
    with Ledges() as ledges:
        values = torch.tensor([[1.0, 4.0, 2.5], [7.0, 6.5, 0.0]])
        chosen = values.argmax(1)
        ranked = values.topk(2, 1).indices

    torch.testing.assert_close(ledges.margin_of(chosen)[0], torch.tensor([1.5, 0.5]))
    torch.testing.assert_close(ledges.margin_of(ranked)[0], torch.tensor([[1.5, 1.5], [0.5, 0.5]]))
    assert ledges.margin_of(torch.arange(3)) is None
