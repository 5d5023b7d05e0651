"""Ask the local question of a trial that has a record: which nodes are wrong by themselves, fed the reference's values?

It costs a run in lockstep or a compile with taps, so it is asked in a second step, and only if it can change a result.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch.process import versions
from torchdelta.check.check import Check
from torchdelta.check.thorough import LOCAL, ask_locally
from torchdelta.compare.policy_parser import parse
from torchdelta.records.case import Case
from torchdelta.records.report import ASKED, Culprit, Questions, Report, Stage
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.transforms.base import Transform
from torchdelta.transforms.export import Exports
from torchdelta.transforms.fx_pass import FxPass
from verdict_cases import CONTROL, FAULT, FAULT_STAGES, Subject, Trial
from verdict_records import DONE, NOT_ASKED_YET, OURS, THOROUGH, Local, Record
from verdict_runs import baseline_of, transform_of

FAULTS = "faults"
ASKABLE = (FAULTS, "export", "decompose", "aot_eager", "inductor")
"""The groups of trials that can be selected: faults, controls (`export`), and clean cases by their transform."""
_MOST_CULPRITS = 5
_MOST_NOTES = 5


def is_open(record: Record, askable: Sequence[str]) -> bool:
    """Return whether to ask the question; of a fault only if it matters and the default check missed it."""
    trial = record.trial
    if record.status != DONE or record.local != NOT_ASKED_YET:
        return False
    if trial.kind == FAULT:
        return FAULTS in askable and record.matters and not record.is_flagged(OURS, FAULT_STAGES)
    return trial.transform in askable


class LocalBench:
    """One subject with its baseline and exports, which its trials share."""

    def __init__(self, subject: Subject) -> None:
        self.baseline = baseline_of(subject.program(), FAULT_STAGES)
        self.exports = Exports()

    def ask(self, record: Record) -> Record:
        """Return the record with the answer to the local question added."""
        started = time.perf_counter()
        try:
            report = ask_locally(self._check(record.trial), _as_report(record))
            answer = _answer(report)
            culprits = report.culprits
        except Exception:
            answer = Local(asked=f"failed: {traceback.format_exc(limit=-6)}")
            culprits = ()
        seconds = round(time.perf_counter() - started, 3)
        return replace(record, stages=_with_alarms(record, culprits), local=replace(answer, seconds=seconds))

    def _check(self, trial: Trial) -> Check:
        return Check(
            case=_case(trial),
            transform=_transform(trial, self.exports),
            policy=parse("noise"),
            baseline=self.baseline,
            stages_by_default=False,
        )


def _case(trial: Trial) -> Case:
    return Case(program=trial.subject.model, transform=trial.transform, stages=FAULT_STAGES)


def _transform(trial: Trial, exports: Exports) -> Transform:
    """Return the trial's transform; for a control a pass that changes nothing, which runs in lockstep as faults do."""
    if trial.kind == CONTROL:
        return FxPass(_hand_back, {"graph": "export"})
    return transform_of(trial, exports)


def _hand_back(graph_module: GraphModule, _: Sequence[Any]) -> GraphModule:
    return graph_module


def _as_report(record: Record) -> Report:
    """Return the part of the default check's report that the local question reads."""
    known = {name: Verdict(record.stages[name].verdict) for name in FAULT_STAGES if name in record.stages}
    stages = tuple(Stage(name=name, verdict=verdict) for name, verdict in known.items())
    return Report(
        verdict=worst_of(stage.verdict for stage in stages),
        environment=versions.environment(),
        case=_case(record.trial),
        stages=stages,
        questions=Questions(semantic=ASKED),
    )


def _with_alarms(record: Record, culprits: Sequence[Culprit]) -> dict[str, Any]:
    """Return the stages with the alarm added. A wrong value in forward counts for gradients too."""
    wrong = {culprit.stage for culprit in culprits}
    alarmed = set(FAULT_STAGES) if "forward" in wrong else wrong
    return {
        name: replace(stage, flagged=[*stage.flagged, THOROUGH]) if name in alarmed else stage
        for name, stage in record.stages.items()
    }


def _answer(report: Report) -> Local:
    seen = [comparison for stage in report.stages if stage.name == LOCAL for comparison in stage.comparisons]
    nearest = max(seen, key=lambda each: each.ratio, default=None)
    return Local(
        asked=report.questions.local,
        culprits=_told(report),
        nodes=_nodes(report),
        ratio=round(nearest.ratio, 4) if nearest else 0.0,
        nearest=f"{nearest.path}: {nearest.reason}" if nearest else "",
        notes=list(report.notes[:_MOST_NOTES]),
    )


def _told(report: Report) -> list[str]:
    return [
        f"{culprit.stage}, {culprit.node} ({culprit.op}) of {culprit.module_path or 'the model'}: {culprit.reason}"
        for culprit in report.culprits[:_MOST_CULPRITS]
    ]


def _nodes(report: Report) -> str:
    coverage = report.coverage
    return f"{coverage.matched} of {coverage.total}" if coverage else ""
