"""Choices within rounding, such as the expert a token goes to, are replayed so that what lies behind them is compared.

Truth and noise are run again with the reference's choices. That tells more about a candidate that chose as the
reference did, and nothing about another one: its native verdict stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from torchdelta._torch import lift
from torchdelta._torch.choices import Record, Replay
from torchdelta._torch.noisy import Noisy
from torchdelta.compare.noise import unit_roundoff
from torchdelta.engine.baseline import Baseline
from torchdelta.execute.sides import Side, varied_in
from torchdelta.execute.stages import Observation, Scope, SideFailed, observe


@dataclass(frozen=True)
class Replayed:
    """The truth and a noisy run that chose as the reference did."""

    truth: Observation
    noisy: Observation
    count: int
    """Choices of the truth that would have been others."""


def replayed(baseline: Baseline) -> Replayed | None:
    """Run the truth and a noisy run with the reference's choices; None where they would have been the same."""
    recorded = Record()
    plan, original = baseline.plan, baseline.original
    noise = Noisy(seed=plan.seed)
    with baseline.timed("replay"):
        try:
            observe(Side.copied_from(baseline.program), plan, original, within(baseline.eager_scope, recorded))
            if not recorded.chosen:
                return None
            unit = unit_roundoff(baseline.drawn_in)
            of_truth, of_noise = Replay(recorded.chosen, unit), Replay(recorded.chosen, unit)
            lifted = within(baseline.lifted_scope(baseline.drawn_in), of_truth)
            truth = observe(
                Side.copied_from(baseline.program, convert=lift.widened), plan, original, lifted, lift.widened
            )
            if not of_truth.count:
                return None
            side = Side.copied_from(baseline.program)
            noise.start_from(varied_in(side))
            noisy = observe(side, plan, original, within(baseline.eager_scope, noise, of_noise))
        except SideFailed as failed:
            baseline.notes.append(f"choices within rounding were not replayed: the program fails with them ({failed})")
            return None
    return Replayed(truth, noisy, of_truth.count)


def within(scope: Scope, *modes: AbstractContextManager[object]) -> Scope:
    """Return a scope with these modes inside it."""

    @contextmanager
    def nested() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(scope())
            for mode in modes:
                stack.enter_context(mode)
            yield

    return nested
