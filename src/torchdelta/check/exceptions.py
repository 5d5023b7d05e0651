"""The exception that a program raises is a result, and is compared as one.

A check needs a reference, and a program that raises eagerly has none. What it raises says still what a candidate has to
do: raise the same. A candidate that returns a value, or raises an exception of another kind, has diverged. If both
raise the same, there is nothing to compare, and the program has to be mended (`EagerFails`). Start with `run`.
"""

from __future__ import annotations

from dataclasses import replace

from torchdelta._torch.process import runtime, versions
from torchdelta._torch.process.exceptions import is_lack_of_machine, is_of_compiler, names_out_of_memory
from torchdelta.check.candidate import CandidateRun
from torchdelta.check.check import Check
from torchdelta.compare.leaves import Container, brief, describe
from torchdelta.errors import EagerFails, message_of
from torchdelta.program.memory import living_set_aside, peak_bytes
from torchdelta.program.stages import SideFailed
from torchdelta.records.case import STAGES
from torchdelta.records.comparison import Breach, Comparison
from torchdelta.records.failure import essence
from torchdelta.records.report import EXCEPTION, Cost, Questions, Report, Stage
from torchdelta.records.verdict import Verdict, worst_of

_NAMED = 3
"""Outputs that a text describes."""


def run(check: Check) -> Report:
    """Run a check and return its report; if the program raises eagerly, compare that with what the candidate does.

    Raise EagerFails without comparing if the program raised only after its reference had run, or if `_raises_by_itself`
    is False. Raise it too if the candidate raises the same, fails to compile or runs out of memory.
    """
    try:
        return check.run()
    except EagerFails as failed:
        if "reference" in vars(check.baseline) or not _raises_by_itself(check, failed):
            raise
        with runtime.preserved(), living_set_aside():
            return _compare(check, failed)


def _raises_by_itself(check: Check, failed: EagerFails) -> bool:
    """Tell whether the program raises the same class in the same stage again, without the flags of the case.

    These are deterministic algorithms and anomaly detection, which raise by themselves. Also False if a lack of the
    machine is the cause, or if it raises after the forward and the transform has no backward to compare.
    """
    error = failed.__cause__
    if error is None or is_lack_of_machine(error):
        return False
    if failed.stage != "forward" and not check.transform.traits.has_backward:
        return False
    baseline = replace(check.baseline, deterministic=False, anomaly=False)
    with runtime.preserved(), living_set_aside(), baseline.timed("second reference"):
        try:
            baseline.observe()
        except SideFailed as again:
            return again.stage == failed.stage and type(again.error) is type(error)
    return False


def _compare(check: Check, failed: EagerFails) -> Report:
    """Return the report on a program that raises eagerly: the stages before that, and the one that compares exceptions.

    If the candidate fails in a stage before, the report ends there, but EagerFails is raised if it raised the same. In
    the stage itself, raise EagerFails if the candidate raises the same, fails to compile or runs out of memory.
    """
    baseline, plan, transform = check.baseline, check.baseline.plan, check.transform
    place = STAGES.index(failed.stage)
    before = tuple(stage for stage in plan.stages if STAGES.index(stage) < place)
    report = Report(verdict=Verdict.EQUIVALENT, environment=versions.environment(), case=check.case, stages=())
    if before:
        earlier = replace(
            check,
            case=replace(check.case, stages=before),
            baseline=replace(baseline, plan=replace(plan, stages=before)),
            notes=[],
            candidate=CandidateRun(),
        )
        report = replace(earlier.run(), case=check.case)
        if report.failure is not None:
            # a compiler that traces the backward with the forward raises there already
            _require_another_kind(earlier.candidate, failed)
            return report
    with baseline.timed("candidate"):
        stages = tuple(stage for stage in plan.stages if STAGES.index(stage) <= place)
        candidate = baseline.run(transform, plan=replace(plan, stages=stages), draws_random=False)
    comparison = _judge(candidate, failed)
    stage = Stage.of(failed.stage, (comparison,), candidate.untransformed() if candidate.failure is None else "")
    why = f"not asked: the program raises in the stage {failed.stage}, so that there is neither a truth nor noise"
    return replace(
        report,
        verdict=worst_of([stage.verdict, *(each.verdict for each in report.stages)]),
        stages=(*report.stages, stage),
        questions=report.questions if before else Questions(native=why, semantic=why),
        graphs=candidate.graphs,
        notes=tuple(dict.fromkeys((*report.notes, *check.notes, *candidate.notes))),
        cost=Cost(seconds=dict(baseline.seconds), peak_bytes=peak_bytes()),
    )


def _judge(candidate: CandidateRun, failed: EagerFails) -> Comparison:
    """Return the comparison of the reference's exception with the candidate's, or with what the candidate returned.

    It is DIVERGED, or INCONCLUSIVE if the candidate returned and some or all of its calls ran untransformed. Raise
    EagerFails if the candidate raises the same, fails to compile or runs out of memory.
    """
    expected, failure = failed.__cause__, candidate.failure
    assert expected is not None
    outcome = _returned(candidate, failed.stage)
    if failure is not None:
        _require_another_kind(candidate, failed)
        outcome = _text(candidate.raised[0].__name__, failure.message)
        is_compiling = failure.signature.stage == "transform" or is_of_compiler(candidate.raised[0])
        if is_compiling or names_out_of_memory(failure.type, failure.message):
            raise EagerFails(f"{failed}. The candidate fails too, by itself: {outcome}") from expected
        outcome = f"raised {outcome}"
    reference = f"raised {_text(type(expected).__name__, message_of(expected))}"
    breach = Breach(clause=EXCEPTION, reference=reference, candidate=outcome)
    is_doubtful = failure is None and candidate.untransformed()
    verdict = Verdict.INCONCLUSIVE if is_doubtful else Verdict.DIVERGED
    return Comparison(path=EXCEPTION, verdict=verdict, reason=str(breach), leaf=EXCEPTION, contract=(breach,))


def _require_another_kind(candidate: CandidateRun, failed: EagerFails) -> None:
    """Raise a new EagerFails if the candidate raised the same kind as the reference, itself or wrapped by a compiler.

    Its text is that of `failed` and then the candidate's exception; its cause is that of `failed`. Nothing happens if
    the candidate did not fail, or if `failed` has no cause. `_is_same_kind` says what is the same kind.
    """
    expected = failed.__cause__
    own = [kind for kind in candidate.raised if not is_of_compiler(kind)]
    if expected is None or candidate.failure is None:
        return
    if any(_is_same_kind(kind, type(expected)) for kind in own):
        text = _text(own[0].__name__, candidate.failure.message)
        raise EagerFails(f"{failed}. The candidate raises the same: {text}") from expected


def _is_same_kind(kind: type[BaseException], expected: type[BaseException]) -> bool:
    """Tell whether the class that a candidate raised (`kind`) is the expected one, or a subclass or base class of it.

    If either of the two is `Exception` or `BaseException`, only the very same class counts, because every exception is
    a subclass of these.
    """
    roots = (Exception, BaseException)
    is_related = issubclass(kind, expected) or issubclass(expected, kind)
    return kind is expected or (is_related and kind not in roots and expected not in roots)


def _text(name: str, message: str) -> str:
    """Return class and message of an exception in one short line, without the words of a wrapper."""
    return brief(f"{name}: {essence(message)}" if message else name)


def _returned(candidate: CandidateRun, stage: str) -> str:
    """Return in a few words what the candidate left behind in a stage in which the reference raised.

    In the forward these are up to three outputs and the number of the others; in another stage, the number of leaves.
    """
    leaves = candidate.observation.stages.get(stage, {})
    if stage != "forward":
        return f"no exception, and {len(leaves)} leaves"
    outputs = [leaf for path, leaf in leaves.items() if path.startswith("outputs") and not isinstance(leaf, Container)]
    more = f" and {len(outputs) - _NAMED} more" if len(outputs) > _NAMED else ""
    return f"returned {', '.join(map(describe, outputs[:_NAMED])) or 'nothing'}{more}"
