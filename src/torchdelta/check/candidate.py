"""Run the candidate: what it left behind, how much of it was transformed, and how it failed if it did."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchdelta import errors
from torchdelta._torch.compile import dynamo
from torchdelta._torch.modes.lift import widened
from torchdelta._torch.process.exceptions import is_out_of_memory, place_of
from torchdelta.errors import EnvironmentUnfit, TorchDeltaError
from torchdelta.program.memory import is_limited
from torchdelta.program.sides import Side
from torchdelta.program.stages import Observation, Plan, Scope, SideFailed, observe
from torchdelta.records.case import STAGES
from torchdelta.records.failure import Failure
from torchdelta.records.report import Graphs
from torchdelta.transforms.base import Transform, Transformed


@dataclass
class CandidateRun:
    """What came of a candidate."""

    observation: Observation = field(default_factory=Observation)
    graphs: Graphs = field(default_factory=lambda: Graphs(captured=0, transformed_calls=0))
    notes: list[str] = field(default_factory=list)
    has_reached_recompile_limit: bool = False
    failure: Failure | None = None
    is_partly_eager: bool = False
    """Whether parts of the program ran as they were, between what a compiler captured."""
    failed_in: int = 0
    """Where in the order of the stages it failed; what fails before the first stage fails in it."""

    def has_failed_by(self, stage: str) -> bool:
        """Tell whether the candidate failed in this stage or before it."""
        return self.failure is not None and STAGES.index(stage) >= self.failed_in

    def untransformed(self) -> str:
        """Return why what ran was not, or not always, the transformed program; empty where it was."""
        if self.graphs.transformed_calls == 0:
            return "the transform did not happen: no transformed code ran at all"
        if self.graphs.untransformed_calls:
            calls = self.graphs.untransformed_calls
            return f"the transform did not happen in {calls} calls, which ran as the reference does"
        if self.has_reached_recompile_limit:
            return "the compiler reached its recompile limit, and ran some calls as the reference does"
        return ""


def run_candidate(
    transform: Transform,
    side: Side,
    plan: Plan,
    *,
    original: Side,
    scope: Scope,
    draws_random: bool,
    lifted: Scope | None = None,
) -> CandidateRun:
    """Transform a fresh side and run it; what the candidate raises is its result, what the machine lacks is raised.

    `lifted` is the scope of a side in float64, in which a candidate that is not compiled runs.
    """
    run = CandidateRun()
    plan = plan if transform.traits.has_backward else replace(plan, stages=("forward",))
    run_scope = scope if lifted is None or transform.traits.is_compiler else lifted
    # the loss is no part of what is compiled, and must not round either
    loss_scope = lifted if lifted is not None and transform.traits.is_compiler else nullcontext
    convert = widened if lifted else _as_it_is
    try:
        applied = transform.apply(side, draws_random=draws_random, lifted=lifted is not None)
        with scope(), applied as transformed:
            run.notes += transformed.notes
            _attend(
                transformed,
                run,
                lambda attended: observe(attended, plan, original, run_scope, convert, loss_scope=loss_scope),
            )
    except TorchDeltaError:
        raise
    except SideFailed as failed:
        if isinstance(failed.error, TorchDeltaError):  # who stands at a seam has found a mistake of the user's
            raise failed.error from None
        run.observation, run.failed_in = failed.observation, STAGES.index(failed.stage)
        run.failure = failure_of(failed.error, failed.stage)
    except errors.caught_from_user_code() as error:
        run.failure = failure_of(error, "transform")
    return run


def _as_it_is(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _attend(transformed: Transformed, run: CandidateRun, watch: Callable[[Side], Observation]) -> None:
    """Run the side and count, call by call, whether anything transformed ran."""
    witness = transformed.witness
    untransformed = 0

    def attended(*args: Any, **kwargs: Any) -> Any:
        nonlocal untransformed
        before = witness.calls
        outputs = transformed.side.call(*args, **kwargs)
        untransformed += witness.calls == before
        return outputs

    try:
        run.observation = watch(replace(transformed.side, call=attended))
        # not after a failure: what handles an exception within a compiled call is traced, and is not the program's
        reasons = witness.eager_reasons()
        run.is_partly_eager = bool(reasons)
        run.notes += [f"part of the program ran eagerly: {reason}" for reason in reasons]
    finally:
        run.graphs = Graphs(
            captured=witness.captured, transformed_calls=witness.calls, untransformed_calls=untransformed
        )
        run.has_reached_recompile_limit = witness.has_reached_recompile_limit()


def failure_of(error: BaseException, stage: str) -> Failure:
    """Describe what a candidate raised; EnvironmentUnfit where that is what the machine lacks."""
    if reason := dynamo.unfit_reason(error):
        raise EnvironmentUnfit(reason) from error
    text = "".join(traceback.format_exception(error))
    if is_limited() and is_out_of_memory(error):
        # whether it is refused what it asks for, or ended for what it holds, is a matter of chance
        return Failure.of_refused_memory(str(error), stage=stage, traceback=text)
    return Failure.of(error, stage=stage, traceback=text, where=place_of(error))
