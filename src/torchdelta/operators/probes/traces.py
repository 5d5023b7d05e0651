"""Probes of what compilers make of an operator: it is traced with the user's inputs and run on others.

A constant that was baked into a trace shows as soon as the inputs change. With static shapes the trace runs on fresh
values, with dynamic shapes on other sizes. Each run is a check like any other. Start with `ask_trace`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchdelta import transforms
from torchdelta._torch.modes.outside import preserved_dispatch
from torchdelta.check.baseline import Baseline
from torchdelta.check.check import Check
from torchdelta.operators.inputs import OpInputs
from torchdelta.operators.probes.base import OpSubject, ProbeEntry
from torchdelta.operators.probes.fake import remedy_of
from torchdelta.program.sides import Side
from torchdelta.records.case import Case
from torchdelta.records.comparison import Scalar
from torchdelta.records.operators import Probe
from torchdelta.records.report import Report, diverged_comparisons, explain_verdict
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.wrappers import applied_once

VARIANTS: dict[str, dict[str, Scalar]] = {
    "min-cut": {},
    "default": {"partitioner": "default"},
    "unfunctionalised": {"functionalised": False},
}
UNSUPPORTED = "UnsupportedFakeTensorException"
BAKED = "a value that it saw while it was traced is a constant of the trace: compute it from the arguments"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A transform that traces an operator, with static or dynamic shapes."""

    name: str
    transform: str
    options: dict[str, Scalar]

    @property
    def is_dynamic(self) -> bool:
        """Whether sizes are symbols."""
        return bool(self.options["dynamic"])


def trace_probes(backends: Sequence[str]) -> Iterator[ProbeEntry]:
    """Yield a probe's entry for each trace: AOTAutograd's variants and the backends', all static and then all dynamic.

    A dynamic trace by AOTAutograd applies only if no two inputs share memory.
    """
    for trace in _traces(backends):
        is_aot_alone = trace.transform == "aot" and trace.is_dynamic
        yield ProbeEntry(
            name=trace.name,
            ask=partial(ask_trace, trace),
            needs=(has_separate_inputs,) if is_aot_alone else (),
            compares_values=False,
        )


def _traces(backends: Sequence[str]) -> Iterator[Trace]:
    """Yield the traces, all static ones and then all dynamic ones: AOTAutograd's variants, then the backends'."""
    for shapes in ("static", "dynamic"):
        dynamic: dict[str, Scalar] = {"dynamic": shapes == "dynamic"}
        for variant, options in VARIANTS.items():
            yield Trace(name=f"aot/{shapes}/{variant}", transform="aot", options={**options, **dynamic})
        for backend in backends:
            yield Trace(name=f"backend/{backend}/{shapes}", transform=f"backend:{backend}", options=dynamic)


def has_separate_inputs(subject: OpSubject) -> str:
    """Return why there are no symbolic sizes if two inputs share memory, or an empty text if none do."""
    is_shared = subject.inputs.are_shared
    return "inputs share memory, for which AOTAutograd alone has no symbolic sizes" if is_shared else ""


def ask_trace(trace: Trace, subject: OpSubject) -> Probe:
    """Trace the operator with the user's inputs, run the trace on them and then on others, and return a probe.

    It is the first probe that is not EQUIVALENT, or that of the user's inputs if all are. Other inputs are tried only
    if the user's own are equivalent: those of other sizes if the trace is dynamic and there are any, or if the user
    gave `others`; else fresh values. An equivalent trace is INCONCLUSIVE if inputs that it should be tried on were not
    to be had: see `_untried`.
    """
    inputs = subject.inputs
    is_resized = trace.is_dynamic and bool(inputs.resized)
    others = inputs.resized if is_resized or inputs.others else inputs.fresh
    transform = transforms.build(trace.transform, trace.options)
    side, draws_random = Side.copied_from(inputs.own.program), inputs.own.reference.draws_random
    with preserved_dispatch(), applied_once(transform, side, draws_random=draws_random) as once:
        probe = _run(subject, trace, once, inputs.own)
        for other in others if probe.verdict is Verdict.EQUIVALENT else ():
            second = _run(subject, trace, once, other)
            if second.verdict is not Verdict.EQUIVALENT:
                how = "other sizes" if is_resized else "other given inputs" if inputs.others else "fresh data"
                reason = f"traced with the given inputs and run on {how}: {second.reason}"
                return replace(second, reason=reason, remedy=second.remedy or BAKED)
    if probe.verdict is not Verdict.EQUIVALENT or not (untried := _untried(trace, inputs)):
        return probe
    return replace(
        probe,
        verdict=Verdict.INCONCLUSIVE,
        reason=f"with the given inputs it is equivalent, but {untried}",
        remedy="give other arguments that it takes as others=[(args, kwargs)]",
    )


def _untried(trace: Trace, inputs: OpInputs) -> str:
    """Return why the trace did not run on other inputs as it should, or an empty text if it did or need not.

    It should run on other sizes if it is dynamic and an input has a size to change; otherwise on fresh values or the
    user's `others`. It need not if no input has elements that could vary.
    """
    if trace.is_dynamic and inputs.can_be_resized:
        return "" if inputs.resized else inputs.why_no_sizes
    if inputs.fresh or inputs.others or not inputs.can_vary:
        return ""
    return "it rejects all other values that were drawn"


def _run(subject: OpSubject, trace: Trace, transform: Transform, baseline: Baseline) -> Probe:
    """Check the traced operator on the inputs of a baseline; return the check's verdict and report as a probe.

    A verdict that is not EQUIVALENT has a reason and, if one is known, a remedy. It is INCONCLUSIVE instead of CRASHED
    if torch has no fake tensors of the inputs' kind. Without `correctness` return what `_run_only` returns.
    """
    if not subject.correctness:
        return _run_only(trace, transform, baseline)
    case = Case(
        program=baseline.program.name,
        transform=trace.transform,
        options=trace.options,
        stages=baseline.plan.stages,
        policy=subject.policy_words,
        seed=baseline.plan.seed,
        ignore=subject.ignore,
        semantic=False,
    )
    check = Check(
        case=case,
        baseline=baseline,
        transform=transform,
        policy=subject.policy,
        stages_by_default=True,
    )
    report = check.run()
    if report.verdict is Verdict.EQUIVALENT:
        return Probe(name=trace.name, verdict=report.verdict, report=report)
    # no operator can make torch support fake tensors that it has none of (quantized, nested)
    is_unsupported = report.failure is not None and UNSUPPORTED in report.failure.type
    verdict = Verdict.INCONCLUSIVE if is_unsupported else report.verdict
    return Probe(
        name=trace.name, verdict=verdict, reason=explain_verdict(report), remedy=_remedy(report), report=report
    )


def _run_only(trace: Trace, transform: Transform, baseline: Baseline) -> Probe:
    """Run the traced operator on the inputs of a baseline, and compare nothing.

    Return a probe that is CRASHED if it raises, INCONCLUSIVE if some calls did not run the trace, else EQUIVALENT.
    """
    run = baseline.run(transform)
    if run.failure is not None:
        reason = f"{run.failure}".partition("\n")[0]
        remedy = remedy_of(run.failure.message)
        return Probe(name=trace.name, verdict=Verdict.CRASHED, reason=reason, remedy=remedy)
    if why := run.untransformed():
        return Probe(name=trace.name, verdict=Verdict.INCONCLUSIVE, reason=why)
    return Probe(name=trace.name, verdict=Verdict.EQUIVALENT, reason="it traces and runs; nothing was compared")


def _remedy(report: Report) -> str:
    """Return what to change in the operator, or an empty text if the report does not tell.

    The remedy of a failure is looked up by its message. Otherwise the diverged comparisons decide, in this order: a
    breach of the clause `aliasing`; an input that differs after the forward; gradients, if nothing else differs.
    """
    if report.failure is not None:
        return remedy_of(report.failure.message)
    wrong = diverged_comparisons(report)
    if any(breach.clause == "aliasing" for comparison in wrong for breach in comparison.contract):
        return "return a copy of what it would alias"
    forward = report.stages[0].comparisons
    if any(comparison in wrong and comparison.path.startswith(("args", "kwargs")) for comparison in forward):
        return "declare what it changes: mutates_args=… or Tensor(a!) in its schema"
    if wrong and all(comparison.path.endswith(".grad") for comparison in wrong):
        return "register its gradient with torch.library.register_autograd, made of operators that can be traced"
    return ""
