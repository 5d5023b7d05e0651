"""From a program that fails to the smallest graph that fails in the same way."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchdelta._torch import runtime, settings
from torchdelta.engine.asking import InProcess, Workers, plain_settings, spec_of
from torchdelta.engine.check import Check
from torchdelta.engine.isolated import TASKS
from torchdelta.engine.minified import Minified
from torchdelta.engine.subjects import nodes_of, subjects_of
from torchdelta.errors import NothingToMinify, UsageError
from torchdelta.isolate.pool import Pool
from torchdelta.minify.journal import Entry, Journal
from torchdelta.minify.oracle import Answer, Oracle
from torchdelta.minify.passes import PASSES, STRATEGIES
from torchdelta.minify.reducer import Budget, Progress, Reducer
from torchdelta.minify.subject import Subject
from torchdelta.records.failure import Signature
from torchdelta.records.report import Culprit, Reduction, Report
from torchdelta.transforms.compiler import Compiler

TIMEOUT_S = 600.0
"""How long the first query may take."""
TRIALS = 8
"""How often a failure that did not come again is asked for, to tell how often it comes."""
RARE = 0.2
"""A failure that comes less often than this cannot be minified by running it again and again."""
SURE = 0.02
"""The chance that is taken of losing a failure which comes only now and then."""


@dataclass(kw_only=True)
class Minifying:
    """One reduction of what a check finds; `run` answers it."""

    check: Check
    transform: Any
    """As the user named it: workers build it again from its name."""
    timeout_s: float = TIMEOUT_S
    memory_bytes: int | None = None
    budget: Budget = field(default_factory=Budget)
    match: str | None = None
    """Which of several failures to follow: a regular expression for its signature."""
    out: Path | None = None
    """Where the best so far is kept."""
    is_resumed: bool = False
    is_isolated: bool = True
    culprit: Culprit | None = None
    """Where the failure is said to be."""
    imports: Sequence[str] = ()
    pool: Pool | None = None
    """Workers that are there already."""
    tell: Callable[[Progress], None] = lambda _: None
    notes: list[str] = field(default_factory=list)
    rate: float = 1.0

    def run(self) -> Minified:
        """Minify; NothingToMinify where no graph of the program shows a failure."""
        self.started = time.monotonic()
        # workers get ready while the graphs are captured
        with self._asking() as ask:
            with runtime.preserved():
                subjects = self._resumed() if self.is_resumed else subjects_of(self.check)
            subject, answer, wanted = self._preflight(subjects, ask)
            oracle = self._steady(ask, subject, wanted)
            return self._reduced(subject, answer, wanted, oracle)

    def died(self) -> Report | None:
        """Return the report of a graph whose candidate ends its process, before anybody runs it in this one."""
        with self._asking() as ask, runtime.preserved():
            for subject in subjects_of(self.check):
                report = ask(subject).report
                if report is not None and report.failure is not None and report.failure.kind != "exception":
                    return replace(report, case=self.check.case)
        return None

    @contextmanager
    def _asking(self) -> Iterator[Workers | InProcess]:
        spec = spec_of(self.transform)
        if spec is None or not self.is_isolated:
            why = "on request" if spec is not None else "no other process could import the transform"
            self.notes.append(f"every query ran in this process, where a crash ends everything: {why}")
            yield InProcess(case=self.check.case, transform=self.transform)
            return
        place = spec.rpartition(":")[0]
        # what a graph calls of the user's own is defined where its program or its transform is
        imports = [*self.imports, *([place] if place.endswith(".py") else [])]
        with nullcontext(self.pool) if self.pool is not None else ready_pool(self.check) as pool:
            yield Workers(
                pool=pool,
                case=replace(self.check.case, transform=spec, program="subject"),
                timeout_s=self.timeout_s,
                memory_bytes=self.memory_bytes,
                settings=plain_settings(settings.changed_settings()),
                imports=imports,
            )

    def _preflight(self, subjects: Sequence[Subject], ask: Workers | InProcess) -> tuple[Subject, Answer, Signature]:
        """Return the first graph that fails by itself, and with which failure."""
        seen: list[Signature] = []
        asked = ask.case
        # the semantic question takes one more compile, and most failures need it not
        for is_semantic in (False, True) if asked.semantic else (False,):
            ask.case = replace(asked, semantic=is_semantic)
            for number, subject in enumerate(subjects, 1):
                self.tell(Progress(nodes=subject.size, queries=0, doing=f"graph {number} of {len(subjects)}"))
                answer = ask(subject)
                seen += answer.signatures
                wanted = next(filter(self._is_meant, answer.signatures), None)
                if wanted is not None:
                    if len(subjects) > 1:
                        self.notes.append(f"the failure is in graph {number} of {len(subjects)}")
                    stages = ("forward",) if wanted.stage in ("forward", "transform") else ("forward", "gradients")
                    ask.case = replace(ask.case, stages=stages)
                    return subject, answer, wanted
        if seen:
            raise NothingToMinify(f"{self.match!r} matches none of the failures: {'; '.join(map(str, seen))}")
        raise NothingToMinify(
            f"{self.check.case.program} under {self.check.case.transform}: none of the {len(subjects)} graphs that "
            "it is made of fails by itself, so there is nothing to make smaller"
        )

    def _is_meant(self, signature: Signature) -> bool:
        return self.match is None or re.search(self.match, str(signature)) is not None

    def _steady(self, ask: Oracle, subject: Subject, wanted: Signature) -> Oracle:
        """Ask once more, in a fresh worker; what fails only now and then is asked about as often as it takes."""
        if ask(subject).shows(wanted):
            return ask
        shown = 1 + sum(ask(subject).shows(wanted) for _ in range(TRIALS - 2))
        self.rate = shown / TRIALS
        if self.rate < RARE:
            raise NothingToMinify(
                f"{wanted}: it came in {shown} of {TRIALS} runs of the same graph on the same inputs, which is too "
                "rare to tell a smaller graph that does not fail from one that did not fail this time"
            )
        times = math.ceil(math.log(SURE) / math.log(1 - self.rate))
        self.notes.append(f"it fails in {shown} of {TRIALS} runs: each smaller graph was run up to {times} times")

        def ask_again(subject: Subject) -> Answer:
            answer = ask(subject)
            for _ in range(times - 1):
                if answer.shows(wanted):
                    break
                answer = ask(subject)
            return answer

        return ask_again

    def _reduced(self, subject: Subject, answer: Answer, wanted: Signature, ask: Oracle) -> Minified:
        reducer = Reducer(ask=ask, wanted=wanted, budget=self.budget, tell=self.tell)
        before, spent = self._journalled(reducer, subject, wanted) if self.out is not None else (subject.size, 0.0)
        subject.values  # noqa: B018 — what each node is: computed once, before anything is cut
        culprits = nodes_of(self.culprit, subject) if self.culprit is not None else ()
        small = reducer.run(subject, answer, strategies=STRATEGIES, passes=PASSES, culprits=culprits)
        found = reducer.search.answer
        assert found.report is not None
        asked = getattr(ask, "case", self.check.case)
        places = {name: index for index, name in enumerate(small.named_inputs)}
        return Minified(
            graph=small.graph,
            inputs=small.inputs,
            case=found.report.case if found.report else asked,
            report=found.report,
            signature=wanted,
            reduction=Reduction(
                nodes_before=before,
                nodes_after=small.size,
                queries=reducer.queries + 2,
                seconds=spent + time.monotonic() - self.started,
            ),
            is_minimal=reducer.is_minimal,
            rate=self.rate,
            drawn={places[name]: text for name, text in small.drawn.items()},
            settings=plain_settings(settings.changed_settings()),
            also_seen=tuple(reducer.also_seen),
            twin=reducer.twin.graph if reducer.twin is not None else None,
            notes=tuple(self.notes),
        )

    def _journalled(self, reducer: Reducer, subject: Subject, wanted: Signature) -> tuple[int, float]:
        """Keep the best so far on disk; return how large it was, and what was spent, before this run."""
        assert self.out is not None
        journal, spent, before = Journal(directory=self.out), 0.0, subject.size
        if self.is_resumed:
            _, entry = journal.read(allow=())
            reducer.known.update(entry.known)
            reducer.queries, spent, before = entry.queries, entry.seconds, entry.nodes_before

        def keep(best: Subject, _: Answer) -> None:
            entry = Entry(
                wanted=wanted,
                nodes_before=before,
                queries=reducer.queries,
                seconds=spent + time.monotonic() - self.started,
                best=f"best-{reducer.queries}",
                drawn=dict(best.drawn),
                known=dict(reducer.known),
            )
            journal.write(best, entry)

        reducer.keep = keep
        keep(subject, Answer())
        return before, spent

    def _resumed(self) -> list[Subject]:
        if self.out is None:
            raise UsageError("name the directory of the reduction that is to be gone on with")
        return [Journal(directory=self.out).read()[0]]


def ready_pool(check: Check) -> Pool:
    """Return workers that have everything imported, and compiled something where compiling is what they will do."""
    transform = check.transform
    is_inductor = isinstance(transform, Compiler) and transform.is_inductor
    return Pool(preload=(TASKS,), warm="inductor" if is_inductor else "eager" if transform.is_compiler else "")
