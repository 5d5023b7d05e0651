"""From a program that fails to the smallest graph that fails in the same way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchdelta._torch import runtime, settings
from torchdelta._torch.nodes import op_name, short_name
from torchdelta.engine.asking import InProcess, Workers, plain_settings, spec_of
from torchdelta.engine.check import Check
from torchdelta.engine.isolated import pool_for
from torchdelta.engine.minified import Minified
from torchdelta.engine.preflight import Chosen, Preflight
from torchdelta.engine.subjects import nodes_of, subjects_of
from torchdelta.errors import NothingToMinify, ProgramError, UsageError
from torchdelta.execute.programs import load_module
from torchdelta.isolate.pool import Pool
from torchdelta.minify.journal import Entry, Journal
from torchdelta.minify.oracle import Answer, Begin, Oracle
from torchdelta.minify.passes import PASSES, STRATEGIES, scatter
from torchdelta.minify.reducer import Budget, Progress, Reducer, Wavering
from torchdelta.minify.subject import Subject
from torchdelta.records.case import DYNAMO
from torchdelta.records.failure import Signature
from torchdelta.records.report import Culprit, Reduction, Report
from torchdelta.repro.confirm import Clean

TIMEOUT_S = 600.0
"""How long the first query may take."""


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
    expected: Sequence[Signature] = ()
    """The failures of the program as a whole."""
    culprit: Culprit | None = None
    """Where the failure is said to be."""
    level: str = DYNAMO
    """Whose graphs are made smaller: those that dynamo captures, or what AOTAutograd makes of them."""
    imports: Sequence[str] = ()
    pool: Pool | None = None
    """Workers that are there already."""
    tell: Callable[[Progress], None] = lambda _: None
    notes: list[str] = field(default_factory=list)
    rate: float = 1.0
    begin: Begin | None = None
    """Asks while something else is asked; None where everything is asked in this process."""
    clean: Clean | None = None
    """Waits for the script that will be written."""
    foreseen: dict[str, Callable[[], Answer]] = field(default_factory=dict)
    """Queries under way before anybody needs their answers, by the keys of their subjects."""

    def run(self) -> Minified:
        """Minify; NothingToMinify where no graph of the program shows a failure."""
        self.started = time.monotonic()
        resumed = self._journal.read(allow=self._own_modules()) if self.is_resumed else None
        entry = resumed[1] if resumed is not None else None
        # workers get ready while the graphs are captured
        with self._asking() as ask:
            with runtime.preserved():
                subjects = [resumed[0]] if resumed is not None else subjects_of(self.check, self.level)
            preflight = Preflight(
                ask=ask,
                program=f"{self.check.case.program} under {self.check.case.transform}",
                match=self.match,
                expected=self._expected if entry is None else (entry.wanted,),
                tell=self._told,
                notes=self.notes,
            )
            self.begin = ask.begin if isinstance(ask, Workers) else None
            if isinstance(ask, Workers) and len(subjects) == 1 and self.culprit is None and entry is None:
                self._foresee(subjects[0], ask)
            chosen = preflight.choose(subjects)
            if entry is not None and not entry.wanted.is_same_as(chosen.wanted):
                raise NothingToMinify(f"what was reduced so far does not show {entry.wanted} any more")
            try:
                return self._reduced(chosen, self._foreseeing(ask), entry)
            except Wavering:
                oracle = preflight.patient(chosen)
                self.rate = preflight.rate
                return self._reduced(chosen, oracle, entry)

    def _beginning(self, begin: Begin) -> Begin:
        def begin_again(subject: Subject) -> Callable[[], Answer]:
            # a process that will run the script gets ready meanwhile
            self.clean = Clean(("torch", "torch._inductor.compile_fx") if self.transform == "inductor" else ("torch",))
            return begin(subject)

        return begin_again

    def _told(self, progress: Progress) -> None:
        self.tell(replace(progress, workers=len(self.foreseen)))

    def _own_modules(self) -> list[str]:
        return [load_module(place, what="program").__name__ for place in self.imports]

    @property
    def _expected(self) -> Sequence[Signature]:
        # what is wrong in the backward of a program is wrong in the forward of its backward graph
        return self.expected if self.level == DYNAMO else ()

    def _foresee(self, subject: Subject, ask: Workers) -> None:
        """Ask what the reduction will most likely ask first, while nobody knows yet how the subject fails."""
        edit = scatter.first_guess(subject)
        made = edit.applied_to(subject) if edit is not None else None
        if made is not None:
            self.foreseen[made.key] = ask.begin(made, replace(ask.case, semantic=False))

    def _foreseeing(self, ask: Oracle) -> Oracle:
        def answer(subject: Subject) -> Answer:
            begun = self.foreseen.pop(subject.key, None)
            return begun() if begun is not None else ask(subject)

        return answer

    def died(self) -> Report | None:
        """Return the report of a graph whose candidate ends its process, before anybody runs it in this one."""
        try:
            with runtime.preserved():
                subjects = subjects_of(self.check, self.level)
        except (ProgramError, UsageError):  # there is no graph to ask about, and the check will say more
            return None
        with self._asking() as ask:
            for subject in subjects:
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
        with nullcontext(self.pool) if self.pool is not None else pool_for(spec) as pool:
            yield Workers(
                pool=pool,
                case=replace(self.check.case, transform=spec, program="subject"),
                timeout_s=self.timeout_s,
                memory_bytes=self.memory_bytes,
                settings=plain_settings(settings.changed_settings()),
                imports=imports,
            )

    def _reduced(self, chosen: Chosen, ask: Oracle, entry: Entry | None) -> Minified:
        subject, before = chosen.subject, entry.nodes_before if entry is not None else chosen.subject.size
        reducer = Reducer(
            ask=ask, wanted=chosen.wanted, budget=self.budget, tell=self._told, is_patient=self.rate < 1.0
        )
        if self.begin is not None:
            reducer.begin = self._beginning(self.begin)
        if entry is not None:
            reducer.known.update(entry.known)
            reducer.queries = entry.queries
        spent = entry.seconds if entry is not None else 0.0
        if self.out is not None:
            reducer.keep = self._keeping(reducer, before, spent)
            reducer.keep(subject, chosen.answer)
        culprits = nodes_of(self.culprit, subject) if self.culprit is not None else ()
        small = reducer.run(subject, chosen.answer, strategies=STRATEGIES, passes=PASSES, culprits=culprits)
        found = reducer.search.answer.report
        assert found is not None
        if not reducer.is_minimal:
            why = f"queries broke ({reducer.broken[-1]})" if reducer.broken else "the budget was spent"
            self.notes.append(f"it may not be the smallest: {why}")
        if reducer.twin is not None and self.out is not None:
            self._journal.write_twin(reducer.twin)
            self.notes.append(f"a neighbour that passes is in {self.out / 'twin'}: {_calls(reducer.twin)}")
        places = {name: index for index, name in enumerate(small.named_inputs)}
        return Minified(
            graph=small.graph,
            inputs=small.inputs,
            case=found.case,
            report=found,
            signature=chosen.wanted,
            reduction=Reduction(
                nodes_before=before,
                nodes_after=small.size,
                queries=reducer.queries + (0 if entry is not None else 1 + len(self.foreseen)),
                seconds=spent + time.monotonic() - self.started,
                is_minimal=reducer.is_minimal,
                rate=self.rate,
            ),
            drawn={places[name]: text for name, text in small.drawn.items()},
            settings=plain_settings(settings.changed_settings()),
            also_seen=tuple(reducer.also_seen),
            twin=reducer.twin.graph if reducer.twin is not None else None,
            clean=self.clean,
            notes=tuple(self.notes),
        )

    def _keeping(self, reducer: Reducer, before: int, spent: float) -> Callable[[Subject, Answer], None]:
        """Return what keeps the best so far on disk."""

        def keep(best: Subject, _: Answer) -> None:
            entry = Entry(
                wanted=reducer.wanted,
                nodes_before=before,
                queries=reducer.queries,
                seconds=spent + time.monotonic() - self.started,
                # a name of its own: what the journal points to stays until it points elsewhere
                best=f"best-{os.urandom(4).hex()}",
                drawn=dict(best.drawn),
                known=dict(reducer.known),
            )
            self._journal.write(best, entry)

        return keep

    @property
    def _journal(self) -> Journal:
        if self.out is None:
            raise UsageError("name the directory of the reduction that is to be gone on with")
        return Journal(directory=self.out)


def _calls(subject: Subject) -> str:
    return ", ".join(short_name(op_name(node)) for node in subject.nodes)
