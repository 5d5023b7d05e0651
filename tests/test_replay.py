"""Choices within rounding are replayed as the reference made them."""

import pytest
import torch
from torch import nn

import torchdelta as td
from programs import models
from torchdelta import Verdict
from torchdelta._torch.modes.decisions import DecisionRecord, DecisionReplay


class Routed(nn.Module):
    """Each token goes to one of two experts that have nothing in common; many are torn between them."""

    def __init__(self, *, wrong=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Parameter(torch.tensor([[1.0, 1.0]]).repeat(16, 1))
        self.experts = nn.Parameter(torch.randn(2, 16, 16) * torch.tensor([1.0, -30.0])[:, None, None])
        self.wrong = wrong

    def forward(self, tokens):
        scores = tokens @ (self.router + torch.tensor([0.0, 1e-9]))
        weight, chosen = scores.topk(1, -1)
        made = torch.einsum("tij,ti->tj", self.experts[chosen[:, 0]], tokens)
        return made * self.wrong * torch.tanh(weight)


TOKENS = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def test_a_torn_choice_is_made_as_it_was_recorded():
    values = torch.tensor([[1.0, 1.0 + 1e-7, 0.0], [3.0, 1.0, 2.0]])
    with DecisionRecord() as record:
        before = torch.tensor([[1.0, 1.0 - 1e-7, 0.0], [1.0, 3.0, 2.0]]).topk(1, -1).indices

    with DecisionReplay(record.indices, unit=2.0**-24) as replay:
        largest, chosen = values.topk(1, -1)

    assert chosen.tolist() == [before[0].tolist(), [0]]
    assert largest.tolist() == [[1.0], [3.0]]
    assert replay.count == 1


@pytest.mark.parametrize("choose", [lambda x: x.argmax(-1), lambda x: x.max(-1).indices, lambda x: x.sort(-1).indices])
def test_every_kind_of_choice_is_replayed(choose):
    torn = torch.tensor([[1.0, 1.0 + 2.0**-23]])
    with DecisionRecord() as record:
        before = choose(torn.flip(-1))
    with DecisionReplay(record.indices, unit=2.0**-24):
        after = choose(torn)

    assert not torch.equal(choose(torn), before)
    assert torch.equal(after, before)


def test_a_candidate_that_chose_as_the_reference_is_held_to_a_fine_measure():
    model, args = models.build("moe", dtype=torch.bfloat16, seed=2, probing=True)
    report = td.check(model, args, transform="aot_eager_decomp_partition", semantic=False)

    replayed = [seen for seen in report.comparisons if seen.details.get("replayed")]
    assert report.verdict is Verdict.EQUIVALENT
    assert replayed
    assert all(seen.resolution < 0.3 for seen in replayed)
    assert any("are within rounding" in note for note in report.notes)


def test_a_wrong_expert_is_not_excused_by_it():
    report = td.check(Routed(), (TOKENS,), candidate=Routed(wrong=1.01), stages="forward")

    assert report.verdict is Verdict.DIVERGED
