"""Run a candidate: what it left behind, how much of it was transformed, and how it failed if it did.

An exception of the candidate is a result, and not an error of the check. `Baseline.run` calls `run_candidate`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchdelta import errors
from torchdelta._torch.compile import dynamo
from torchdelta._torch.modes.dtype_answers import Answer, DtypeRecord, DtypeReplay
from torchdelta._torch.modes.lift import widened
from torchdelta._torch.process.exceptions import is_out_of_memory, kinds_of, place_of
from torchdelta.errors import EnvironmentUnfit, TorchDeltaError, message_of
from torchdelta.program.memory import is_limited
from torchdelta.program.sides import Side
from torchdelta.program.stages import Observation, Plan, Scope, SideFailed, observe
from torchdelta.records.case import STAGES
from torchdelta.records.failure import Failure
from torchdelta.records.report import Graphs
from torchdelta.transforms.base import Transform, TransformedSide

_NAMED = 8
"""Graphs that a note counts out."""


@dataclass
class CandidateRun:
    """One run of a candidate."""

    observation: Observation = field(default_factory=Observation)
    graphs: Graphs = field(default_factory=lambda: Graphs(captured=0, transformed_calls=0))
    notes: list[str] = field(default_factory=list)
    has_reached_recompile_limit: bool = False
    failure: Failure | None = None
    raised: tuple[type[BaseException], ...] = ()
    """The class of the exception behind the failure, and the classes of those that a compiler wrapped in it."""
    is_partly_eager: bool = False
    """Whether parts of the program ran untransformed, between the graphs that a compiler captured."""
    forms: list[tuple[str, ...]] = field(default_factory=list)
    """The form of each graph that a compiler captured; empty for any other transform."""
    result_forms: list[tuple[str, ...]] = field(default_factory=list)
    """The form of the graph that a pass made of each; empty if the result is not a graph."""
    changes: list[bool] = field(default_factory=list)
    """Of each graph that a pass got, whether it changed the graph; empty if that does not matter."""
    dtype_answers: list[Answer] = field(default_factory=list)
    """What the candidate was told when it asked for dtypes; a compiler's is not recorded."""
    failed_in: int = 0
    """The index of the stage in which it failed; a failure before the first stage counts as one in it."""

    def has_failed_by(self, stage: str) -> bool:
        """Tell whether the candidate failed in this stage or before it."""
        return self.failure is not None and STAGES.index(stage) >= self.failed_in

    def untransformed(self) -> str:
        """Return why some or all calls ran untransformed, or an empty text if none is known to have."""
        if self.graphs.transformed_calls == 0:
            return "the transform did not happen: no transformed code ran at all"
        if self.graphs.untransformed_calls:
            calls = self.graphs.untransformed_calls
            return f"the transform did not happen in {calls} calls, which ran as the reference does"
        if self.has_reached_recompile_limit:
            return "the compiler reached its recompile limit, and ran some calls as the reference does"
        return ""

    def unchanged(self) -> str:
        """Return a text that a pass changed none of its graphs; empty if it changed one, or if that does not matter."""
        if self.changes and not any(self.changes):
            graphs = "its graph is" if len(self.changes) == 1 else f"each of its {len(self.changes)} graphs is"
            return f"the transform changed nothing: {graphs} as it was (-O unchanged=ok accepts that)"
        return ""

    def note_unchanged(self) -> list[str]:
        """Return a list of one note on the graphs that a pass left as they were; empty if it changed all or none."""
        unchanged = [str(index) for index, is_changed in enumerate(self.changes) if not is_changed]
        if not unchanged or len(unchanged) == len(self.changes):
            return []
        shown = ", ".join(unchanged[:_NAMED]) + (", …" if len(unchanged) > _NAMED else "")
        return [f"the transform left {len(unchanged)} of its {len(self.changes)} graphs as they were: {shown}"]


def run_candidate(
    transform: Transform,
    side: Side,
    plan: Plan,
    *,
    original: Side,
    scope: Scope,
    draws_random: bool,
    lifted: Scope | None = None,
    answers: Sequence[Answer] = (),
) -> CandidateRun:
    """Transform a fresh side, run it, and return the run, with the failure if the transform or the candidate raised.

    The transform is applied within `scope`, and the side runs in it, unless `lifted` says otherwise. `lifted` is None
    for a native side, and else the scope of a run in float64; of a compiler's candidate, only loss and optimizer run in
    it. `original` is a side of the program that was not run. `draws_random` says whether the candidate has to draw the
    reference's random numbers. If the transform has no backward, only the stage `forward` runs. A candidate that is not
    a compiler's gets the `answers` in a lifted run when it asks for dtypes, and in a native one they are recorded.
    After a failure, the run has the observation up to it. Mistakes of the user and lacks of the machine are raised, as
    TorchDeltaError.
    """
    run = CandidateRun()
    plan = plan if transform.traits.has_backward else replace(plan, stages=("forward",))
    run_scope = scope if lifted is None or transform.traits.is_compiler else lifted
    record = DtypeRecord()
    if not transform.traits.is_compiler:  # a compiler must not find torch.Tensor changed
        run_scope = _combined(run_scope, record if lifted is None else DtypeReplay(answers))
    # loss and optimizer are not compiled, and must not round either
    uncompiled_scope = lifted if lifted is not None and transform.traits.is_compiler else nullcontext
    convert = widened if lifted else _unchanged
    try:
        applied = transform.apply(side, draws_random=draws_random, lifted=lifted is not None)
        with scope(), applied as transformed:
            run.notes += transformed.notes
            _count_calls(
                transformed,
                run,
                lambda counted: observe(counted, plan, original, run_scope, convert, uncompiled_scope=uncompiled_scope),
            )
    except TorchDeltaError:
        raise
    except SideFailed as failed:
        if isinstance(failed.error, TorchDeltaError):  # an observer at a seam found a mistake of the user's
            raise failed.error from None
        run.observation, run.failed_in = failed.observation, STAGES.index(failed.stage)
        run.failure = failure_of(failed.error, failed.stage)
        run.raised = kinds_of(failed.error)
    except errors.caught_from_user_code() as error:
        run.failure = failure_of(error, "transform")
        run.raised = kinds_of(error)
    run.dtype_answers = record.answers
    return run


def _combined(outer: Scope, inner: AbstractContextManager[Any]) -> Scope:
    """Return a function that makes a context: it enters what `outer` makes, and `inner` within that."""

    @contextmanager
    def scope() -> Iterator[None]:
        with outer(), inner:
            yield

    return scope


def _unchanged(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype itself: the conversion of a native run."""
    return dtype


def _count_calls(transformed: TransformedSide, run: CandidateRun, watch: Callable[[Side], Observation]) -> None:
    """Run the side through `watch`, which returns its observation, and write observation and counts to the run.

    The counts are of captured graphs and of calls that ran transformed or not. The run also gets the forms of its
    graphs, which of them a pass changed, whether the recompile limit was reached, and notes on parts that ran eagerly
    and on graphs that a pass left unchanged. If `watch` raises, all but the observation and the eager parts is written,
    and its exception passes through.
    """
    witness = transformed.witness
    untransformed = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        """Call the side and return its outputs; count the call if no transformed code ran in it."""
        nonlocal untransformed
        before = witness.calls
        outputs = transformed.side.call(*args, **kwargs)
        untransformed += witness.calls == before
        return outputs

    try:
        run.observation = watch(replace(transformed.side, call=counted))
        # not after a failure: the code that handles an exception in a compiled call is traced too
        reasons = witness.eager_reasons()
        run.is_partly_eager = bool(reasons)
        run.notes += [f"part of the program ran eagerly: {reason}" for reason in reasons]
    finally:
        run.graphs = Graphs(
            captured=witness.captured, transformed_calls=witness.calls, untransformed_calls=untransformed
        )
        run.has_reached_recompile_limit = witness.has_reached_recompile_limit()
        run.forms, run.result_forms, run.changes = witness.forms, witness.result_forms, witness.changes
        run.notes += run.note_unchanged()


def failure_of(error: BaseException, stage: str) -> Failure:
    """Return the record of an exception that the candidate raised in `stage`, with its traceback.

    Raise EnvironmentUnfit if the cause is a tool that this machine lacks, such as a C++ compiler. If this process has a
    memory limit and the exception is out of memory, the record is that of refused memory.
    """
    if reason := dynamo.unfit_reason(error):
        raise EnvironmentUnfit(reason) from error
    text = "".join(traceback.format_exception(error))
    if is_limited() and is_out_of_memory(error):
        # whether a request is refused or the process is ended for its memory is a matter of chance
        return Failure.of_refused_memory(message_of(error), stage=stage, traceback=text)
    return Failure.of(error, stage=stage, traceback=text, where=place_of(error))
