"""What compilers make of an operator: traced with the given inputs, run on them, and then on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchdelta import transforms
from torchdelta._torch.modes.outside import dispatch_kept
from torchdelta.check.baseline import Baseline
from torchdelta.check.check import Check
from torchdelta.compare.policy import Policy
from torchdelta.operators.inputs import OpInputs
from torchdelta.operators.probes import fake
from torchdelta.program.sides import Side
from torchdelta.records.case import Case
from torchdelta.records.comparison import Scalar
from torchdelta.records.operators import Probe
from torchdelta.records.report import Report, telling, wrong_in
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.wrappers import applied_once

VARIANTS: dict[str, dict[str, Scalar]] = {
    "min-cut": {},
    "default": {"partitioner": "default"},
    "unfunctionalised": {"functionalised": False},
}
UNSUPPORTED = "UnsupportedFakeTensorException"
BAKED = "something that it saw while it was traced is a constant of the trace: compute it from the arguments"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A way to make something callable of an operator."""

    name: str
    transform: str
    options: dict[str, Scalar]

    @property
    def is_dynamic(self) -> bool:
        """Whether sizes are symbols."""
        return bool(self.options["dynamic"])


def traces_with(backends: Sequence[str]) -> Iterator[Trace]:
    """Yield AOTAutograd's ways, and those of the backends."""
    for shapes in ("static", "dynamic"):
        dynamic: dict[str, Scalar] = {"dynamic": shapes == "dynamic"}
        for variant, options in VARIANTS.items():
            yield Trace(name=f"aot/{shapes}/{variant}", transform="aot", options={**options, **dynamic})
        for backend in backends:
            yield Trace(name=f"backend/{backend}/{shapes}", transform=f"backend:{backend}", options=dynamic)


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """An operator with its inputs, and how what is made of it is judged."""

    inputs: OpInputs
    policy: Policy
    policy_words: str
    ignore: tuple[str, ...]
    correctness: bool

    def probe(self, trace: Trace) -> Probe:
        """Run what was made of the operator on the given inputs, and then on others than it was made for."""
        inputs = self.inputs
        is_resized = trace.is_dynamic and bool(inputs.resized)
        others = inputs.resized if is_resized or inputs.others else inputs.fresh
        transform = transforms.build(trace.transform, trace.options)
        side, draws_random = Side.copied_from(inputs.given.program), inputs.given.reference.draws_random
        with dispatch_kept(), applied_once(transform, side, draws_random=draws_random) as once:
            probe = self._run(trace, once, inputs.given)
            for other in others if probe.verdict is Verdict.EQUIVALENT else ():
                second = self._run(trace, once, other)
                if second.verdict is not Verdict.EQUIVALENT:
                    how = "other sizes" if is_resized else "fresh data"
                    said = f"traced with the given inputs and run on {how}: {second.reason}"
                    return replace(second, reason=said, remedy=second.remedy or BAKED)
        if probe.verdict is not Verdict.EQUIVALENT or not (untried := self._untried(trace)):
            return probe
        return replace(
            probe,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"with the given inputs it is equivalent, but {untried}",
            remedy="give other arguments that it takes as others=[(args, kwargs)]",
        )

    def _untried(self, trace: Trace) -> str:
        """Return what it could not be run on besides the given inputs; empty where there is nothing else."""
        inputs = self.inputs
        if trace.is_dynamic and inputs.can_be_resized:
            return "" if inputs.resized else inputs.no_other_sizes
        if inputs.fresh or inputs.others or not inputs.can_vary:
            return ""
        return "no other values could be drawn that it takes"

    def _run(self, trace: Trace, transform: Transform, baseline: Baseline) -> Probe:
        if not self.correctness:
            return _only_run(trace, transform, baseline)
        case = Case(
            program=baseline.program.name,
            transform=trace.transform,
            options=trace.options,
            stages=baseline.plan.stages,
            policy=self.policy_words,
            seed=baseline.plan.seed,
            ignore=self.ignore,
            semantic=False,
        )
        check = Check(
            case=case,
            baseline=baseline,
            transform=transform,
            policy=self.policy,
            stages_by_default=True,
        )
        report = check.run()
        if report.verdict is Verdict.EQUIVALENT:
            return Probe(name=trace.name, verdict=report.verdict, report=report)
        reason, remedy = telling(report), _remedy(report)
        # what torch cannot fake at all (quantized, nested) no operator could mend
        is_beyond = report.failure is not None and UNSUPPORTED in report.failure.type
        verdict = Verdict.INCONCLUSIVE if is_beyond else report.verdict
        return Probe(name=trace.name, verdict=verdict, reason=reason, remedy=remedy, report=report)


def _only_run(trace: Trace, transform: Transform, baseline: Baseline) -> Probe:
    """Ask only whether it traces and runs."""
    run = baseline.run(transform)
    if run.failure is not None:
        reason = f"{run.failure.type}: {run.failure.message}".partition("\n")[0]
        remedy = fake.remedy_of(run.failure.message)
        return Probe(name=trace.name, verdict=Verdict.CRASHED, reason=reason, remedy=remedy)
    if why := run.untransformed():
        return Probe(name=trace.name, verdict=Verdict.INCONCLUSIVE, reason=why)
    return Probe(name=trace.name, verdict=Verdict.EQUIVALENT, reason="it traces and runs; nothing was compared")


def _remedy(report: Report) -> str:
    """Return what to do about it, as far as what was seen tells that."""
    if report.failure is not None:
        return fake.remedy_of(report.failure.message)
    wrong = wrong_in(report)
    if any(breach.clause == "aliasing" for seen in wrong for breach in seen.contract):
        return "return a copy of what it would alias"
    forward = report.stages[0].comparisons
    if any(seen in wrong and seen.path.startswith(("args", "kwargs")) for seen in forward):
        return "declare what it changes: mutates_args=… or Tensor(a!) in its schema"
    if wrong and all(seen.path.endswith(".grad") for seen in wrong):
        return "register its gradient with torch.library.register_autograd, made of operators that can be traced"
    return ""
