"""Questions about subjects, answered by workers: a subject goes out as files, and a report comes back.

An oracle takes a subject and returns an `Answer`. `WorkerOracle` is the usual one; while it waits, it asks ahead about
subjects that the reducer will most likely need next. `InProcessOracle` is for a transform that no other process can
import.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchdelta._torch.process import runtime
from torchdelta.check.check import Check
from torchdelta.check.isolated import CANDIDATE_PARTS, report_of_death
from torchdelta.check.prepare import prepare
from torchdelta.errors import ProgramError
from torchdelta.isolate.pool import Pool, Query, wait_for_any
from torchdelta.isolate.supervisor import Outcome
from torchdelta.minify.search import Answer, Predictor
from torchdelta.minify.subject import Subject
from torchdelta.minify.warm_workers import WORKER
from torchdelta.program.programs import load_object
from torchdelta.records.case import Case, CheckOptions
from torchdelta.records.codec import encode
from torchdelta.records.failure import Failure
from torchdelta.records.report import Report
from torchdelta.records.signatures import diverged_leaves, signatures_of
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform

PATIENCE = 10.0
"""A query may take this many times as long as the slowest that ended by itself, but not less than `LEAST_S`."""
LEAST_S = 5.0
"""A query may take at least this long."""


class PendingQuery:
    """A question about a subject that a worker is answering; calling it waits for the answer."""

    def __init__(self, query: Query, case: Case, answered: Callable[[Outcome], Answer]) -> None:
        """Set up a question for a query that was submitted; `answered` turns its outcome into the answer or raises."""
        self.query, self.case = query, case
        self._answered = answered
        self._answer: Answer | None = None
        self._error: Exception | None = None

    def is_done(self) -> bool:
        """Tell whether the query has ended, with or without an answer."""
        return self.query.is_done()

    def __call__(self) -> Answer:
        """Wait for the query's end and return the answer, or raise the error of the worker's task; both are remembered.

        An interrupt or error of the waiting itself cancels the query and is not remembered.
        """
        if self._error is not None:
            raise self._error
        if self._answer is None:
            try:
                outcome = self.query.result()
            except BaseException:  # a Ctrl-C ends the query, not only the waiting
                self.query.cancel()
                raise
            try:
                self._answer = self._answered(outcome)
            except Exception as error:
                self._error = error
                raise
        return self._answer


@dataclass(frozen=True, kw_only=True)
class AnswerCache:
    """A question whose answer is known already."""

    case: Case
    answer: Answer

    def is_done(self) -> bool:
        """Return True: the answer is there."""
        return True

    def __call__(self) -> Answer:
        """Return the answer."""
        return self.answer


@dataclass(kw_only=True)
class WorkerOracle:
    """Asks workers about subjects; an idle worker gets a subject that will most likely be needed next."""

    pool: Pool
    case: Case
    timeout_s: float
    memory_bytes: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] | None = None
    """Torch's flags that a worker sets; None are those of this process."""
    imports: Sequence[str] = ()
    slowest_s: float | None = None
    """The longest query that ended by itself. The first does not count, because it fills caches for all others."""
    begun: int = 0
    """How many queries were begun."""
    answered: int = 0
    ahead: dict[str, PendingQuery | AnswerCache] = field(default_factory=dict)
    """Questions that were asked before they were needed, by the keys of their subjects."""
    now: tuple[str, PendingQuery | AnswerCache] | None = None
    """The question whose answer is needed now, after the key of its subject."""
    under_way: dict[Query, tempfile.TemporaryDirectory[str]] = field(default_factory=dict)
    given_up: set[Query] = field(default_factory=set)
    """Queries under way whose answers are not needed any more."""

    @property
    def at_work(self) -> list[Query]:
        """The queries that have no outcome yet."""
        return [query for query in self.under_way if not query.is_done()]

    @property
    def deadline_s(self) -> float:
        """How long the next query may take: `PATIENCE` times the slowest one so far, but at least `LEAST_S`.

        It is never more than `timeout_s`, and just that as long as `slowest_s` is unknown.
        """
        patience_s = math.inf if self.slowest_s is None else max(LEAST_S, PATIENCE * self.slowest_s)
        return min(self.timeout_s, patience_s)

    @property
    def unused_count(self) -> int:
        """How many questions were asked ahead, and not needed yet."""
        return len(self.ahead)

    def __call__(self, subject: Subject) -> Answer:
        """Wait for the answer about a subject and return it; the question may have been asked ahead.

        If it was not, the questions ahead that are still running are cancelled.
        """
        return self._needed(subject)()

    def ask(self, subject: Subject, predict: Predictor, case: Case | None = None) -> Answer:
        """Return the answer about a subject under the oracle's case; meanwhile ask idle workers what `predict` returns.

        The predicted subjects are asked under `case`, or under the oracle's case if it is None, and are kept in
        `ahead`. An error of a prediction is ignored.
        """
        needed = self._needed(subject)
        while not needed.is_done():
            at_work = self.at_work  # taken before `predict`, so that a query that ends meanwhile is not waited for
            if len(at_work) >= self.pool.workers or not self._has_begun(predict, case):
                wait_for_any(at_work)
        return needed()

    def _has_begun(self, predict: Predictor, case: Case | None) -> bool:
        """Begin to ask about the next predicted subject and return True; the question is kept in `ahead`.

        It is asked under `case`, or the oracle's own if that is None. Return False if nothing is predicted, or if the
        prediction or the start of its query raises.
        """
        try:
            predicted = predict()
            if predicted is not None:
                self.ahead[predicted.key] = self.begin(predicted, case)
        except Exception:  # a wrong guess must not break the question that is needed
            return False
        return predicted is not None

    def find(self, subject: Subject, case: Case | None = None) -> PendingQuery | AnswerCache | None:
        """Return the question about a subject that is needed now or was asked ahead, or None if there is none.

        It must have been asked under `case`, or the oracle's own if that is None. It stays in `now` or `ahead`.
        """
        of_subject = [self.now[1]] if self.now is not None and self.now[0] == subject.key else []
        if subject.key in self.ahead:
            of_subject.append(self.ahead[subject.key])
        return next((question for question in of_subject if question.case == (case or self.case)), None)

    def remember(self, subject: Subject, answer: Answer) -> None:
        """Keep an answer in `ahead` for the next question about its subject under the oracle's present case."""
        self.ahead[subject.key] = AnswerCache(case=self.case, answer=answer)

    def begin(self, subject: Subject, case: Case | None = None) -> PendingQuery:
        """Send a subject to a worker and return the question, without waiting; `case` replaces the oracle's case.

        The query is counted in `begun`, and may take `deadline_s`. The subject is written to a directory of its own,
        which is removed when the answer is read.
        """
        self._sweep()
        # in the pool's own directory, which is removed even if this process is killed
        place = tempfile.TemporaryDirectory(prefix="subject-", dir=self.pool.directory)
        subject.write(Path(place.name))
        case = case or self.case
        request = {
            "case": encode(case),
            "settings": dict(self.settings),
            "imports": list(self.imports),
            "flags": dict(self.flags) if self.flags is not None else runtime.plain_flags(),
            "allow": subject.modules,
            "subject": place.name,
        }
        query = self.pool.submit(
            f"{WORKER}:check_subject", request, deadline_s=self.deadline_s, memory_bytes=self.memory_bytes
        )
        self.begun += 1
        self.under_way[query] = place

        def answered(outcome: Outcome) -> Answer:
            """Remove the subject's files, and return or raise what `answer_of` does.

            `answered` is counted up; `slowest_s` rises to the query's time, except for the first outcome that is read
            and for one without a worker's answer.
            """
            self.under_way.pop(query).cleanup()
            self.answered += 1
            if outcome.answer is not None and self.answered > 1:
                self.slowest_s = max(self.slowest_s or 0.0, outcome.seconds)
            return answer_of(outcome, case)

        return PendingQuery(query, case, answered)

    def end(self) -> None:
        """Cancel all queries under way, wait for their ends, and remove their files."""
        for query in self.under_way:
            query.cancel()
        for query, place in self.under_way.items():
            query.wait()
            place.cleanup()
        self.under_way.clear()

    def _sweep(self) -> None:
        """Remove the files of queries that were given up and have ended."""
        for query in [query for query in self.given_up if query.is_done()]:
            self.given_up.remove(query)
            self.under_way.pop(query).cleanup()

    def _needed(self, subject: Subject) -> PendingQuery | AnswerCache:
        """Return the question about a subject, and keep it as `now`: the one that was asked ahead, or a new one.

        A question that was asked ahead is taken out of `ahead`. If a new one is begun, the questions ahead that are
        still running are cancelled and forgotten.
        """
        self.now = None
        question = self.find(subject)
        if question is not None:
            del self.ahead[subject.key]
        else:
            # the foresight was wrong, so its other questions are not needed either and must not delay this one
            for key, pending in list(self.ahead.items()):
                if isinstance(pending, PendingQuery) and not pending.is_done():
                    pending.query.cancel()
                    self.given_up.add(pending.query)
                    del self.ahead[key]
            question = self.begin(subject)
        self.now = subject.key, question
        return question


@dataclass(kw_only=True)
class InProcessOracle:
    """Asks in this process, for a transform that no other process can import."""

    case: Case
    transform: Transform | Callable[..., Any]
    begun: int = 0

    def __call__(self, subject: Subject) -> Answer:
        """Check a subject in this process, count it in `begun`, and return the answer.

        If the check raises ProgramError, as for a subject that does not run eagerly, the answer has no failure, and the
        error's text is in `rejected`. Other exceptions are raised.
        """
        self.begun += 1
        try:
            return answer_from(prepare_subject(subject, self.case, self.transform).run())
        except ProgramError as error:
            return Answer(rejected=str(error))


def prepare_subject(
    subject: Subject,
    case: Case,
    transform: str | Transform | Callable[..., Any],
    progress: Callable[[str], None] = lambda _: None,
) -> Check:
    """Return the check of a subject under a case, not yet run; `transform` is passed along because it may have no name.

    Of the case, iterations, steps, optimizer, loss and `thorough` are left out, and for a `Transform` object also the
    options, because it has its own. `progress` gets the name of each part of the check as it begins.
    """
    options = CheckOptions(
        transform=transform,
        options={} if isinstance(transform, Transform) else case.options,
        stages=case.stages,
        policy=case.policy,
        ignore=case.ignore,
        strict=case.strict,
        seed=case.seed,
        deterministic=case.deterministic,
        anomaly=case.anomaly,
        semantic=case.semantic,
    )
    return prepare(subject.graph, subject.inputs, options=options, progress=progress)


def answer_of(outcome: Outcome, case: Case) -> Answer:
    """Return the answer about a subject that a worker's outcome gives: that of its report, if it has one.

    A timeout while the candidate ran, and any other end of the worker after the candidate began, is a failure in the
    answer. If `Outcome.read` raises ProgramError, as for a subject that fails eagerly, the answer has no failure, and
    the error's text is in `rejected`. For a timeout in another part it is empty. Other errors are raised.
    """
    try:
        result = outcome.read(Report, "report", program="a subject", candidate_parts=CANDIDATE_PARTS)
    except ProgramError as error:
        return Answer(rejected=str(error))
    if not isinstance(result, Failure):
        return answer_from(result)
    is_candidates = outcome.is_in(CANDIDATE_PARTS) or result.kind != "timeout"
    return answer_from(report_of_death(result, case)) if is_candidates else Answer()


def answer_from(report: Report) -> Answer:
    """Return the answer that a report gives: the signatures of its failures, the leaves that diverged, and the report.

    It has passed only if the verdict is EQUIVALENT. Its message is that of the report's failure, or empty without one.
    """
    return Answer(
        signatures=signatures_of(report),
        failing_leaves=diverged_leaves(report),
        has_passed=report.verdict is Verdict.EQUIVALENT,
        message=report.failure.message if report.failure is not None else "",
        report=report,
    )


def spec_of(transform: object) -> str | None:
    """Return the name by which another process can import a transform, or None if there is none.

    A text is returned unchanged. A function has a name, `module:name`, if that leads back to it; lambdas, inner
    functions, functions of `__main__` and other objects have none.
    """
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
