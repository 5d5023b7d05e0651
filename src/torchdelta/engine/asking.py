"""Queries put to workers: a subject goes out as files, and what comes back, or does not, becomes an answer."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from torchdelta.engine.check import Check
from torchdelta.engine.isolated import OF_THE_CANDIDATE, TASKS, dead
from torchdelta.engine.prepare import prepare
from torchdelta.errors import ProgramError
from torchdelta.execute.programs import load_object
from torchdelta.isolate.outcome import Outcome
from torchdelta.isolate.pool import Pool, Query
from torchdelta.minify.oracle import Answer
from torchdelta.minify.subject import Subject
from torchdelta.records.case import Case
from torchdelta.records.codec import decode, encode
from torchdelta.records.report import Report
from torchdelta.records.signatures import guilty_of, signatures_of
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform

PATIENCE = 10.0
"""A query may take so many times what the slowest one took that ended by itself,"""
LEAST_S = 5.0
"""and at least this long."""


@dataclass(kw_only=True)
class Workers:
    """Asks workers about subjects."""

    pool: Pool
    case: Case
    timeout_s: float
    memory_bytes: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    imports: Sequence[str] = ()
    slowest_s: float | None = None
    """Of those that ended by themselves; the first compiles what all others share, and does not count."""
    asked: int = 0
    """How many queries were begun."""
    answered: int = 0
    foreseen: dict[str, Callable[[], Answer]] = field(default_factory=dict)
    """Queries that were begun before anybody needs their answers, by the keys of their subjects."""
    under_way: dict[Query, tempfile.TemporaryDirectory[str]] = field(default_factory=dict)

    @property
    def deadline_s(self) -> float:
        """How long the next query may take."""
        return self.timeout_s if self.slowest_s is None else max(LEAST_S, PATIENCE * self.slowest_s)

    def __call__(self, subject: Subject) -> Answer:
        """Ask about one subject, unless that was foreseen."""
        return (self.foreseen.pop(subject.key, None) or self.begin(subject))()

    def foresee(self, subject: Subject, case: Case | None = None) -> None:
        """Begin to ask what will most likely be asked."""
        if subject.key not in self.foreseen:
            self.foreseen[subject.key] = self.begin(subject, case)

    def remember(self, subject: Subject, answer: Answer) -> None:
        """Give an answer once more to whoever asks next."""
        self.foreseen[subject.key] = lambda: answer

    def end(self) -> None:
        """End what nobody waits for any more."""
        for query, place in list(self.under_way.items()):
            query.cancel()
            query.result()
            place.cleanup()
        self.under_way.clear()

    def begin(self, subject: Subject, case: Case | None = None) -> Callable[[], Answer]:
        """Ask about one subject while something else is done; what comes back waits for the answer."""
        # in the pool's own directory, which is swept if this process is killed
        place = tempfile.TemporaryDirectory(prefix="subject-", dir=self.pool.directory)
        subject.write(Path(place.name))
        case = case or self.case
        request = {
            "case": encode(case),
            "settings": dict(self.settings),
            "imports": list(self.imports),
            "threads": torch.get_num_threads(),
            "allow": subject.modules,
            "subject": place.name,
        }
        query = self.pool.submit(
            f"{TASKS}:check_subject", request, deadline_s=self.deadline_s, memory_bytes=self.memory_bytes
        )

        self.asked += 1
        self.under_way[query] = place

        def wait() -> Answer:
            try:
                outcome = query.result()
            except BaseException:  # a Ctrl-C ends the query, not only the waiting
                query.cancel()
                raise
            finally:
                self.under_way.pop(query).cleanup()
            self.answered += 1
            if outcome.answer is not None and self.answered > 1:
                self.slowest_s = max(self.slowest_s or 0.0, outcome.seconds)
            return answer_of(outcome, case)

        return wait


@dataclass(kw_only=True)
class InProcess:
    """Asks in this process: for a transform that no other process could import."""

    case: Case
    transform: Transform | Callable[..., Any]
    asked: int = 0

    def __call__(self, subject: Subject) -> Answer:
        """Ask about one subject."""
        self.asked += 1
        try:
            return answer_from(prepare_subject(subject, self.case, self.transform).run())
        except ProgramError:  # a subject that does not run eagerly tells nothing
            return Answer()


def prepare_subject(
    subject: Subject,
    case: Case,
    transform: str | Transform | Callable[..., Any],
    progress: Callable[[str], None] = lambda _: None,
) -> Check:
    """Return the check of a subject by everything else that a case says."""
    return prepare(subject.graph, subject.inputs, transform=transform, progress=progress, **_words(case, transform))


def answer_of(outcome: Outcome, case: Case) -> Answer:
    """Return what an outcome says about a subject; one that fails eagerly says nothing."""
    if outcome.answer is not None:
        return answer_from(decode(Report, outcome.answer["report"], "report"))
    try:
        outcome.raise_own_error()
    except ProgramError:
        return Answer()
    assert outcome.failure is not None
    if outcome.failure.kind == "exception":
        raise RuntimeError(f"a query failed: {outcome.failure.message}\n{outcome.failure.traceback}")
    if outcome.part not in OF_THE_CANDIDATE:
        return Answer()
    return answer_from(dead(replace(outcome.failure, traceback=outcome.output), case))


def answer_from(report: Report) -> Answer:
    """Return what a report says about a subject."""
    return Answer(
        signatures=signatures_of(report),
        guilty=guilty_of(report),
        has_passed=report.verdict is Verdict.EQUIVALENT,
        message=report.failure.message if report.failure is not None else "",
        report=report,
    )


def spec_of(transform: object) -> str | None:
    """Return the name by which another process finds a transform; None where there is none."""
    if isinstance(transform, str):
        return transform
    name, module = getattr(transform, "__qualname__", ""), getattr(transform, "__module__", "")
    if not inspect.isroutine(transform) or not name or "<" in name or module in ("", "__main__"):
        return None
    spec = f"{module}:{name}"
    try:
        return spec if load_object(spec, what="transform") is transform else None
    except ProgramError:
        return None


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that another process can be told."""

    def is_plain(value: Any) -> bool:
        try:
            return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
        except (TypeError, ValueError):
            return False

    return {name: value for name, value in settings.items() if is_plain(value)}


def _words(case: Case, transform: object) -> dict[str, Any]:
    words = asdict(case)
    # a subject has flat outputs and no parameters of its own: nothing to train, and nothing for a user's loss
    left_out = {"program", "transform", "thorough", "loss", "optimizer", "steps", "iterations"}
    known = {each.name for each in fields(Case)} - left_out
    kept = {name: value for name, value in words.items() if name in known}
    if isinstance(transform, Transform):
        kept.pop("options")
    return kept
