"""What rounding decides, a correct program may decide otherwise; what it does not decide, may not."""

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.modes.decisions import Choice, DecisionRecord, DecisionReplay
from torchdelta.check import decisions


class Routed(nn.Module):
    """Each token goes to one of four experts."""

    def __init__(self, *, rounds_scores=False, is_coarse=False, misroutes=None):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.rounds_scores = rounds_scores
        self.is_coarse = is_coarse
        self.misroutes = misroutes

    def forward(self, tokens):
        scores = self.router(tokens)
        if self.rounds_scores:
            scores = (scores + 4.0) - 4.0
        chosen = scores.topk(1, -1).indices[:, 0]
        if self.misroutes is not None and tokens.dtype is torch.float32:
            chosen = torch.where(torch.arange(len(tokens)) == self.misroutes, (chosen + 1) % 4, chosen)
        made = torch.einsum("tij,ti->tj", self.experts[chosen], tokens)
        return (made + 64.0) - 64.0 if self.is_coarse else made


def tokens_with(margin):
    """Return tokens of which the first is torn between two experts by this margin."""
    tokens = torch.randn(64, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = Routed().router.weight.detach().double()
    scores, best = (tokens[0] @ weight.T).topk(2)
    direction = weight[best[0]] - weight[best[1]]
    tokens[0] -= direction * (scores[0] - scores[1] - margin) / direction.dot(direction)
    return tokens.float()


TORN = tokens_with(1e-7)
CLEAR = tokens_with(0.1)


def note_of(report):
    return next((note for note in report.notes if "decided as the candidate did" in note), "")


def test_a_candidate_that_chose_otherwise_within_rounding_is_held_against_a_truth_that_did_too():
    plain, rounded = Routed(), Routed(rounds_scores=True)
    report = td.check(plain, (TORN,), candidate=rounded)

    outputs = report.stage("forward").comparisons[0]
    assert not torch.allclose(plain(TORN)[0], rounded(TORN)[0], atol=0.1)
    assert report.verdict is Verdict.EQUIVALENT
    assert outputs.details["followed"]
    assert "1 choices (topk by a margin of 1" in note_of(report)


def test_a_lost_digit_is_not_excused_by_a_clear_choice():
    report = td.check(Routed(), (CLEAR,), candidate=Routed(is_coarse=True))

    assert report.stage("forward").verdict is Verdict.DIVERGED
    assert not note_of(report)


def test_a_lost_digit_is_not_excused_by_a_torn_choice():
    report = td.check(Routed(), (TORN,), candidate=Routed(is_coarse=True, rounds_scores=True))

    assert report.stage("forward").verdict is Verdict.DIVERGED


def test_another_choice_by_a_clear_margin_has_diverged():
    report = td.check(Routed(), (TORN,), candidate=Routed(misroutes=5))

    assert report.verdict is Verdict.DIVERGED


def test_more_torn_choices_than_are_tried_are_doubted_where_float64_finds_the_same_function(monkeypatch):
    monkeypatch.setattr(decisions, "TRIED", 0)
    monkeypatch.setattr(decisions, "FAR", float("inf"))

    doubted = td.check(Routed(), (TORN,), candidate=Routed(rounds_scores=True))
    untold = td.check(Routed(), (TORN,), candidate=Routed(rounds_scores=True), semantic=False)

    reason = doubted.stage("forward").comparisons[0].reason
    assert doubted.verdict is Verdict.INCONCLUSIVE
    assert "1 choices are within rounding, the closest topk by a margin of 1" in reason
    assert untold.verdict is Verdict.DIVERGED


@pytest.mark.parametrize(
    ("choose", "margin", "other"),
    [
        (lambda x: x.topk(2, -1).indices, 2.0, [[3, 2]]),
        (lambda x: x.topk(1, -1, largest=False).indices, 1.0, [[2]]),
        (lambda x: x.argmax(-1), 4.0, [1]),
        (lambda x: x.argmin(-1, keepdim=True), 1.0, [[2]]),
        (lambda x: x.T.max(0).indices, 4.0, [1]),
        (lambda x: x.argmax(), 4.0, 1),
        (lambda x: x.sort(-1).indices, 1.0, [[2, 0, 1, 3]]),
    ],
)
def test_the_other_way_of_a_choice_exchanges_what_its_margin_separates(choose, margin, other):
    with DecisionRecord() as record:
        choose(torch.tensor([[1.0, 4.0, 2.0, 8.0]]))
    (choice,) = record.choices

    margins, pairs = choice.nearest_exchanges()

    assert margins.tolist() == [margin]
    assert choice.exchange(0, pairs[0]).tolist() == other


def test_a_choice_is_forced_and_later_ones_are_free():
    values = torch.tensor([[1.0, 3.0, 2.0]])

    with DecisionReplay([torch.tensor([[2]])]):
        first, second = values.topk(1, -1), values.topk(1, -1)

    assert (first.values.item(), first.indices.item()) == (2.0, 2)
    assert (second.values.item(), second.indices.item()) == (3.0, 1)


def test_a_choice_among_one_value_has_no_other_way():
    choice = Choice(operation="argmax", values=torch.ones(3, 1), indices=torch.zeros(3, dtype=torch.int64), dim=-1)

    assert choice.nearest_exchanges()[0].isinf().all()


def test_a_choice_among_no_values_has_no_other_way():
    with DecisionRecord() as record:
        torch.ones(3, 0).sort(-1)
        torch.ones(3, 2).topk(0, -1)

    for choice in record.choices:
        margins, _ = choice.nearest_exchanges()
        assert margins.shape == (3,)
        assert margins.isinf().all()


def test_a_recorded_choice_does_not_change_with_its_values():
    values = torch.tensor([1.0, 3.0], dtype=torch.float64)
    with DecisionRecord() as record:
        values.topk(1)
    values.zero_()

    assert record.choices[0].rows.tolist() == [[1.0, 3.0]]


class Torn(nn.Module):
    """The first step of `lean` goes by the sign of two sums that differ by rounding, and all later ones by its side."""

    def __init__(self, *, turns=False, reorders=False, loses_digits=False):
        super().__init__()
        self.lean = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))
        self.turns = turns
        self.reorders = reorders
        self.loses_digits = loses_digits
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        halves, strides = x[:32].sum() + x[32:].sum(), x[::2].sum() + x[1::2].sum()
        between = 1e4 * ((strides - halves if self.turns else halves - strides) + 3e-8)
        bent = 1 + 100 * self.lean**2 + 1e4 * self.lean**3
        if self.loses_digits and self.calls > 1:
            x = (x + 64.0) - 64.0
        return self.lean * between, self.weight * (x * bent) if self.reorders else self.weight * x * bent


def drawn(seed):
    return torch.randn(64, generator=torch.Generator().manual_seed(seed))


ALL = "forward,gradients,steps"


def test_a_candidate_that_stepped_otherwise_within_rounding_is_held_against_a_truth_that_did_too():
    report = td.check(Torn(), (drawn(0),), candidate=Torn(turns=True), stages=ALL, seed=1)

    assert report.verdict is Verdict.EQUIVALENT
    assert "the steps of 1 elements whose gradient is zero but for rounding" in note_of(report)


def test_a_digit_lost_in_later_steps_is_seen_behind_a_step_that_went_otherwise():
    report = td.check(Torn(), (drawn(0),), candidate=Torn(turns=True, loses_digits=True), stages=ALL, seed=1)

    assert report.stage("gradients").verdict is Verdict.EQUIVALENT
    assert report.stage("steps").verdict is Verdict.DIVERGED


def test_a_reference_that_stepped_otherwise_than_the_truth_is_no_other_program():
    report = td.check(Torn(), (drawn(1),), candidate=Torn(reorders=True), stages=ALL, seed=1)

    assert report.stage("steps").verdict is Verdict.EQUIVALENT


def is_single(x):
    # no question to torch, which would be answered as natively
    return x.detach().numpy().itemsize == 4


def test_a_program_that_branches_on_its_dtype_unseen_is_doubted_in_its_steps_too():
    class Branching(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            return made * made if is_single(x) else made * made * made

    class Reordered(Branching):
        def forward(self, x):
            made = x[:, 16:] @ self.weight[:, 16:].T + self.bias + x[:, :16] @ self.weight[:, :16].T
            return made * made if is_single(x) else made * (made * made)

    torch.manual_seed(0)
    reference, candidate = Branching(32, 8), Reordered(32, 8)
    candidate.load_state_dict(reference.state_dict())
    report = td.check(reference, (torch.randn(16, 32),), candidate=candidate, stages="steps")

    assert report.verdict is Verdict.INCONCLUSIVE
    assert any("another function" in seen.reason for seen in report.comparisons)


class WrongDecay(nn.Linear):
    """The weights shrink by themselves between two steps, as under another weight decay."""

    def forward(self, x):
        if self.training and getattr(self, "calls", 0):
            with torch.no_grad():
                self.weight *= 1 - 1e-5
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_another_weight_decay_is_seen_in_the_steps():
    torch.manual_seed(0)
    reference, candidate = nn.Linear(32, 8), WrongDecay(32, 8)
    candidate.load_state_dict(reference.state_dict())

    report = td.check(reference, (torch.randn(16, 32),), candidate=candidate, stages=ALL)

    assert report.stage("forward").verdict is Verdict.EQUIVALENT
    assert report.stage("steps").verdict is Verdict.DIVERGED
