"""The results of trials, one JSON line each, so that a run resumes after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchdelta.records.report import ASKED
from verdict_cases import Subject, Trial

DONE = "done"
NOT_PLANTABLE = "not plantable"
CRASHED = "crashed"
"""The candidate raised, so there are no values to judge."""
FAILED = "failed"
"""The benchmark itself raised."""

NATIVE_ALONE, OURS, THOROUGH = "torchdelta, native question alone", "torchdelta", "torchdelta --thorough"


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """One stage of a trial: torchdelta's verdict, and every rule that raised the alarm."""

    verdict: str
    flagged: list[str]
    reasons: list[str] = field(default_factory=list)
    matters: bool = False
    """For a fault: whether this stage differs from the program exported without it, natively or in float64."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """The answer to the local question about a trial."""

    asked: str = ""
    """`asked`, or the reason why not; empty if it was not tried."""
    culprits: list[str] = field(default_factory=list)
    nodes: str = ""
    """How many nodes were judged."""
    ratio: float = 0.0
    """The largest error of a node, in multiples of what is allowed."""
    nearest: str = ""
    """The node with that error, and the reason of its verdict."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


NOT_ASKED_YET = Local()


@dataclass(frozen=True, kw_only=True)
class Record:
    """One finished trial."""

    trial: Trial
    status: str
    seconds: float
    error: str = ""
    place: str = ""
    """Where a fault was planted."""
    graphs: int = 0
    """How many graphs the transform was given."""
    stages: dict[str, StageRecord] = field(default_factory=dict)
    local: Local = NOT_ASKED_YET

    @property
    def why(self) -> str:
        """The error in one line: the first of the candidate's message, or the last of a traceback of the benchmark."""
        first, _, rest = self.error.strip().partition("\n")
        return first if self.status == CRASHED else rest.rpartition("\n")[2] or first

    @property
    def matters(self) -> bool:
        """Whether a fault changes any stage at all."""
        return any(stage.matters for stage in self.stages.values())

    def is_flagged(self, rule: str, stages: tuple[str, ...]) -> bool:
        """Return whether a rule raised the alarm in any of these stages; the thorough check includes the default."""
        rules = {OURS, THOROUGH} if rule == THOROUGH else {rule}
        return any(rules & set(self.stages[name].flagged) for name in stages if name in self.stages)

    @property
    def is_asked_locally(self) -> bool:
        """Whether the local question was asked."""
        return self.local.asked == ASKED


class Ledger:
    """The records of one folder, by key."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "cases.jsonl"
        self._running = folder / "running"
        self.records: dict[str, Record] = dict(self._read())
        if self._running.exists():
            self._add_dead(json.loads(self._running.read_text()))

    def add(self, record: Record) -> None:
        """Add a record and write it to the file at once; it replaces an earlier one of the same trial."""
        with self._file.open("a", encoding="utf-8") as file:
            # a line break in front too, because a killed run may have left half a line
            file.write("\n" + json.dumps(asdict(record)) + "\n")
        self.records[record.trial.key] = record

    @contextmanager
    def running(self, trial: Trial) -> Iterator[None]:
        """Note in a file that a trial is running, so that one that kills the process is not started again and again."""
        self._running.write_text(json.dumps(asdict(trial)))
        try:
            yield
        finally:
            self._running.unlink()

    def _add_dead(self, trial: dict[str, object]) -> None:
        self.add(Record(trial=_trial(trial), status=FAILED, seconds=0.0, error="the process died while it ran"))
        self._running.unlink()

    def _read(self) -> Iterator[tuple[str, Record]]:
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        for line in filter(None, lines):
            try:
                data = json.loads(line)
            except json.JSONDecodeError:  # the line that was being written when the run was killed
                continue
            trial = _trial(data.pop("trial"))
            stages = {name: StageRecord(**stage) for name, stage in data.pop("stages").items()}
            local = Local(**data.pop("local", {}))  # records from before the question have none
            yield trial.key, Record(trial=trial, stages=stages, local=local, **data)


def _trial(data: dict[str, object]) -> Trial:
    subject = data.pop("subject")
    assert isinstance(subject, dict)
    return Trial(subject=Subject(**subject), **data)  # type: ignore[arg-type]  # as `asdict` wrote it
