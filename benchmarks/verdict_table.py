"""Make tables of records, as markdown: false alarms, recall and inconclusive cases, for every rule, dtype and stage.

A rule gets credit for a fault only if it passes that case's clean controls: the same program exported without a fault,
and the same program under inductor. Otherwise a rule that always raises the alarm would be the best. The thorough check
has a row if the local question was asked; its false alarms are a share of the clean cases in which it was asked.

Start reading at `as_markdown` and `Results`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from verdict_cases import CLEAN, CONTROL, DTYPES, FAULT, FAULT_STAGES, HELD_OUT, TUNED, Subject
from verdict_records import CRASHED, DONE, FAILED, NATIVE_ALONE, NOT_PLANTABLE, OURS, THOROUGH, Record
from verdict_rules import OTHER_RULES

RULES = (*OTHER_RULES, NATIVE_ALONE, OURS)
_STAGES = ("forward", "gradients", "steps")
_INCONCLUSIVE = "inconclusive"
_OVERALL = (
    "false alarms fwd+grad",
    "false alarms all stages",
    "recall",
    "recall with credit",
    "inconclusive fwd+grad",
    "inconclusive all stages",
)


@dataclass(frozen=True, kw_only=True)
class Results:
    """The records that count: clean cases, faults that matter, and the controls of both."""

    clean: list[Record]
    faults: list[Record]
    controls: dict[Subject, list[Record]]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Results:
        """Return the records by group; records without a verdict are left out here and listed by `_without_verdict`."""
        done = [record for record in records if record.status == DONE]
        controls: dict[Subject, list[Record]] = {}
        for record in done:
            trial = record.trial
            if trial.kind == CONTROL or (trial.kind == CLEAN and trial.transform == "inductor"):
                controls.setdefault(trial.subject, []).append(record)
        return cls(
            clean=[record for record in done if record.trial.kind == CLEAN],
            faults=[record for record in done if record.trial.kind == FAULT and record.matters],
            controls=controls,
        )

    def where(self, holds: Callable[[Subject], bool]) -> Results:
        """Return the results of the subjects for which `holds` is true."""
        return Results(
            clean=[record for record in self.clean if holds(record.trial.subject)],
            faults=[record for record in self.faults if holds(record.trial.subject)],
            controls=self.controls,
        )

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of these results; the thorough check is one if the local question was asked."""
        everything = (*self.clean, *self.faults, *(record for of_one in self.controls.values() for record in of_one))
        return (*RULES, THOROUGH) if any(record.is_asked_locally for record in everything) else RULES

    def judged(self, rule: str) -> list[Record]:
        """Return the clean cases that a rule judged."""
        return [record for record in self.clean if rule != THOROUGH or record.is_asked_locally]

    def false_alarms(self, rule: str, stages: tuple[str, ...]) -> list[Record]:
        """Return the clean cases in which a rule raised the alarm."""
        return [record for record in self.judged(rule) if record.is_flagged(rule, stages)]

    def inconclusive(self, stages: tuple[str, ...]) -> list[Record]:
        """Return the clean cases that torchdelta did not decide."""
        return [record for record in self.clean if _verdict(record, stages) == _INCONCLUSIVE]

    def mattering(self, stages: tuple[str, ...]) -> list[Record]:
        """Return the faults that change any of these stages."""
        return [record for record in self.faults if any(record.stages[name].matters for name in stages)]

    def caught(self, rule: str, stages: tuple[str, ...], *, with_credit: bool = False) -> list[Record]:
        """Return the faults in which a rule raised the alarm; `with_credit` only those whose controls it passes."""
        seen = [record for record in self.mattering(stages) if record.is_flagged(rule, stages)]
        return [record for record in seen if not with_credit or self._passes_controls(record, rule, stages)]

    def _passes_controls(self, fault: Record, rule: str, stages: tuple[str, ...]) -> bool:
        controls = self.controls.get(fault.trial.subject, [])
        if rule == THOROUGH and not any(seen.is_asked_locally for seen in controls if seen.trial.kind == CONTROL):
            return False
        return bool(controls) and not any(control.is_flagged(rule, stages) for control in controls)


def as_markdown(records: Sequence[Record]) -> str:
    """Return the whole report except the section on cost."""
    results = Results.of(records)
    return "\n".join(
        [
            "# Verdicts",
            "",
            _counts(records, results),
            *_overall("All", results),
            *_overall("Held out", results.where(lambda subject: subject.half == HELD_OUT)),
            *_overall("Tuned on", results.where(lambda subject: subject.half == TUNED)),
            *_trained(results),
            *_by_stage(results),
            *_by_fault(results),
            *_listed("False alarms", results.false_alarms(OURS, _STAGES), _STAGES),
            *_listed("Inconclusive clean cases", results.inconclusive(_STAGES), _STAGES),
            *_listed("Missed faults", _missed(results), FAULT_STAGES),
            *_locally(records),
            *_without_verdict(records),
            "",
        ]
    )


def _counts(records: Sequence[Record], results: Results) -> str:
    faults = [record for record in records if record.trial.kind == FAULT]
    planted = [record for record in faults if record.status != NOT_PLANTABLE]
    asked = [record for record in records if record.trial.kind == CLEAN]
    return (
        f"{len(asked)} clean cases, {len(asked) - len(results.clean)} of them without a verdict; "
        f"{len(faults)} faults asked for, {len(planted)} planted, "
        f"{len(results.faults)} that matter. All numbers but counts are percentages."
    )


def _overall(title: str, results: Results) -> list[str]:
    clean, faults = len(results.clean), len(results.faults)
    lines = [
        "",
        f"## {title}: {clean} clean cases, {faults} faults",
        "",
        _row("rule", _OVERALL),
        _rule(1 + len(_OVERALL)),
    ]
    for rule in results.rules:
        judged = len(results.judged(rule))
        numbers = [
            _percent(results.false_alarms(rule, FAULT_STAGES), judged),
            _percent(results.false_alarms(rule, _STAGES), judged),
            _percent(results.caught(rule, FAULT_STAGES), faults),
            _percent(results.caught(rule, FAULT_STAGES, with_credit=True), faults),
            _percent(results.inconclusive(FAULT_STAGES), clean) if rule == OURS else "",
            _percent(results.inconclusive(_STAGES), clean) if rule == OURS else "",
        ]
        lines.append(_row(rule, numbers))
    return lines


def _trained(results: Results) -> list[str]:
    lines = ["", "## Under inductor, in train mode, three AdamW steps", ""]
    for dtype in DTYPES:
        of_dtype = results.where(lambda subject, dtype=dtype: subject.is_trained and subject.dtype == dtype)  # type: ignore[misc]
        compiled = replace(of_dtype, clean=[seen for seen in of_dtype.clean if seen.trial.transform == "inductor"])
        models = {seen.trial.subject.model for seen in compiled.clean}
        alarms, undecided = compiled.false_alarms(OURS, _STAGES), compiled.inconclusive(_STAGES)
        lines.append(
            f"- {dtype}: {len(compiled.clean)} cases of {len(models)} models, {len(alarms)} false alarms, "
            f"{len(undecided)} inconclusive"
        )
    return lines


def _by_stage(results: Results) -> list[str]:
    lines: list[str] = []
    recalls = [f"{what} {name}" for name in FAULT_STAGES for what in ("recall", "with credit")]
    for dtype in DTYPES:
        of_dtype = results.where(lambda subject, dtype=dtype: subject.dtype == dtype)  # type: ignore[misc]
        lines += [
            "",
            f"## {dtype}",
            "",
            _row("rule", (*(f"false alarms {name}" for name in _STAGES), *recalls)),
            _rule(8),
        ]
        for rule in results.rules:
            judged = len(of_dtype.judged(rule))
            numbers = [_percent(of_dtype.false_alarms(rule, (name,)), judged) for name in _STAGES]
            for name in FAULT_STAGES:
                mattering = len(of_dtype.mattering((name,)))
                numbers.append(_percent(of_dtype.caught(rule, (name,)), mattering))
                numbers.append(_percent(of_dtype.caught(rule, (name,), with_credit=True), mattering))
            lines.append(_row(rule, numbers))
    return lines


def _by_fault(results: Results) -> list[str]:
    ours = [rule for rule in results.rules if rule not in OTHER_RULES]
    names = [rule.replace(NATIVE_ALONE, "native alone") for rule in ours]
    lines = [
        "",
        "## Recall with credit, by kind of fault",
        "",
        _row("fault", ("that matter", *names, "best other rule")),
        _rule(3 + len(ours)),
    ]
    for kind in sorted({record.trial.transform for record in results.faults}):
        of_kind = Results(
            clean=[],
            faults=[record for record in results.faults if record.trial.transform == kind],
            controls=results.controls,
        )
        total = len(of_kind.faults)
        caught = {rule: len(of_kind.caught(rule, FAULT_STAGES, with_credit=True)) for rule in results.rules}
        best = max(OTHER_RULES, key=lambda rule: caught[rule])
        numbers = [str(total), *(str(caught[rule]) for rule in ours), f"{caught[best]} ({best})"]
        lines.append(_row(kind, numbers))
    return lines


def _locally(records: Sequence[Record]) -> list[str]:
    """Return the section on the local question; no lines if it was not asked."""
    tried = [record for record in records if record.local.asked]
    if not tried:
        return []
    counts = Counter(record.trial.transform if record.trial.kind != FAULT else "missed faults" for record in tried)
    lines = ["", f"## The local question: {', '.join(f'{count} {what}' for what, count in counts.items())}", ""]
    lines.append(_row("missed fault", ("asked", "caught")))
    lines.append(_rule(3))
    faults = [record for record in tried if record.trial.kind == FAULT]
    for kind in sorted({record.trial.transform for record in faults}):
        of_kind = [record for record in faults if record.trial.transform == kind]
        caught = [record for record in of_kind if record.is_flagged(THOROUGH, FAULT_STAGES)]
        lines.append(_row(kind, (str(len(of_kind)), str(len(caught)))))
    alarms = [record for record in tried if record.trial.kind != FAULT and record.local.culprits]
    lines += _listed_locally("Local false alarms", alarms)
    clean = [record for record in tried if record.trial.kind == CLEAN and record.is_asked_locally]
    lines += _listed_locally("Clean cases by the node that came closest", sorted(clean, key=_closeness, reverse=True))
    lines += _listed_locally("Not asked after all", [record for record in tried if not record.is_asked_locally])
    return lines


def _listed_locally(title: str, records: Sequence[Record]) -> list[str]:
    lines = ["", f"### {title}: {len(records)}", ""]
    for record in records:
        lines.append(f"- {record.trial.key}: {record.local.nodes} nodes")
        told = record.local.asked.strip().rpartition("\n")[2]
        if record.is_asked_locally:
            told = f"{record.local.nearest or 'the same to the bit'}: {record.local.ratio:.2f} of what is allowed"
        lines += [f"  - {each}" for each in record.local.culprits or [told]]
    return lines


def _closeness(record: Record) -> float:
    return record.local.ratio


def _missed(results: Results) -> list[Record]:
    return [record for record in results.faults if not record.is_flagged(OURS, FAULT_STAGES)]


def _listed(title: str, records: list[Record], stages: tuple[str, ...]) -> list[str]:
    lines = ["", f"## {title}: {len(records)}", ""]
    for record in records:
        where = f" at {record.place}" if record.place else ""
        lines.append(f"- {record.trial.key} ({record.trial.subject.half}){where}")
        for name in stages:
            stage = record.stages.get(name)
            if stage and (stage.verdict != "equivalent" or stage.matters):
                lines += [f"  - {name} {stage.verdict}: {reason}" for reason in stage.reasons]
    return lines


def _without_verdict(records: Sequence[Record]) -> list[str]:
    """Return the list of records that crashed or failed, so that none is dropped silently."""
    lost = [record for record in records if record.status in (CRASHED, FAILED)]
    lines = ["", f"## Without a verdict, and in no number above: {len(lost)}", ""]
    for record in lost:
        lines.append(f"- {record.trial.key}: {record.status}, {record.why}")
    return lines


def _verdict(record: Record, stages: tuple[str, ...]) -> str:
    severity = ("equivalent", _INCONCLUSIVE, "diverged", "timed_out", "crashed")
    verdicts = [record.stages[name].verdict for name in stages if name in record.stages]
    return max(verdicts, key=severity.index, default=_INCONCLUSIVE)


def _percent(records: Sequence[Record], total: int) -> str:
    return f"{100 * len(records) / total:.1f}" if total else "–"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
