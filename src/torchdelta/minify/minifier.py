"""From a program that fails to the smallest graph that fails in the same way.

`Minifier.run` captures the graphs of the program (`capture`), finds the one that fails (`preflight`), lets the reducer
cut it down (`reducer`), and returns a `MinifiedGraph`, which can write the script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchdelta import transforms
from torchdelta._torch.compile import settings
from torchdelta._torch.graphs.nodes import op_name, short_name
from torchdelta._torch.process.warmup import warmup_steps
from torchdelta.check.isolated import check_isolated
from torchdelta.errors import NothingToMinify, ProgramError, ReproUnwritable, UsageError
from torchdelta.isolate.pool import CAN_FORK, Pool
from torchdelta.minify.capture import ProgramSubjects, nodes_of
from torchdelta.minify.journal import Entry, Journal, graphs_hash, new_best
from torchdelta.minify.passes import PASSES, STRATEGIES
from torchdelta.minify.preflight import FORWARD, FailingGraph, Preflight, stages_of
from torchdelta.minify.queries import InProcessOracle, WorkerOracle, spec_of
from torchdelta.minify.reducer import REPEATS, Budget, FlakyFailure, Progress, Reducer
from torchdelta.minify.result import Draft, MinifiedGraph, MinifiedResult, WholeProgram
from torchdelta.minify.search import Answer, Oracle, Predictor, Search
from torchdelta.minify.speculation import Speculation
from torchdelta.minify.subject import Subject
from torchdelta.minify.warm_workers import pool_for
from torchdelta.program import recordings
from torchdelta.records.case import DYNAMO, Case, CheckOptions, SearchLimits
from torchdelta.records.failure import Signature
from torchdelta.records.recording import recording_of
from torchdelta.records.report import Culprit, Reduction, Report
from torchdelta.records.signatures import signatures_of
from torchdelta.repro.confirm import CleanProcess

NOT_SMALLEST = "the script of the smallest graph did not fail in a clean process: this is a larger one that does"
LIKELY = Signature(kind="divergence", stage="forward", type="values", message="")
"""The failure of most programs."""


@dataclass(kw_only=True)
class Minifier:
    """One reduction of a failure; `run` returns the result."""

    case: Case
    capture: Callable[[], ProgramSubjects]
    """Returns the graphs that the transform would be given, when they are needed."""
    transform: Any
    """The transform as the user passed it: a worker builds it again from its name, if it has one."""
    limits: SearchLimits = field(default_factory=SearchLimits)
    captured: ProgramSubjects | None = None
    """The graphs, if they were captured earlier."""
    out: Path | None = None
    """The directory that keeps the best subject so far."""
    is_resumed: bool = False
    is_isolated: bool = True
    expected: Sequence[Signature] = ()
    """The failures of the program as a whole."""
    culprit: Culprit | None = None
    """The operation that `locate` blames."""
    program: str | None = None
    """The program's name, if another process can build it by that: a script of the program itself needs it."""
    options: CheckOptions | None = None
    """The options of the check, if they are named ones: a worker checks the program as a whole with them."""
    report: Report | None = None
    """The report on the program as a whole; None checks it if it is needed."""
    imports: Sequence[str] = ()
    """Modules that workers import first, because graphs may call their functions."""
    pool: Pool | None = None
    """A pool that was started earlier; None starts one."""
    tell: Callable[[Progress], None] = lambda _: None
    notes: list[str] = field(default_factory=list)
    rate: float = 1.0
    clean: CleanProcess | None = None
    """A process that waits for the script."""
    script: Path | None = None
    """The path of the script, if it is known: then the script runs while the last queries do."""
    with_data: bool = True
    """Whether the script may have the user's data."""
    draft: Draft | None = None
    keeps_names: bool = False
    """Whether the failure shows only if the graph keeps the names that the capture gave."""
    history: list[tuple[Subject, Answer]] = field(default_factory=list)
    """Every subject that was the best one for a while, with its answer, the largest first."""

    def run(self) -> MinifiedResult:
        """Return the smallest failing graph that is found, or else the result of `whole_program`, with a note.

        `whole_program` is asked if no graph fails by itself, the failure is too rare, or torch makes no graph. If it
        returns None, or `out` had a reduction to resume, NothingToMinify or ProgramError is raised. With `is_resumed`,
        the reduction continues from the best subject in `out`; if there is none, it begins anew, with a note. A flaky
        failure makes it begin again and ask several times about each subject. With `out`, the best subject is kept
        there; `notes` are added to. Other errors, also those of `_resumed`, pass through.
        """
        self.started = time.monotonic()
        if (recording := recording_of(self.case.program)) is not None:
            recordings.make_findable(recording)  # a script copies the user's modules
        is_continued = self.is_resumed and self._journal.is_there
        try:
            return self._minify()
        except (NothingToMinify, ProgramError) as error:
            whole = None if is_continued else self.whole_program(pool=self.pool)
            if whole is None:
                raise
            self.notes.append(f"the script is the program itself: {error}")
            return replace(whole, notes=tuple(self.notes))

    def _minify(self) -> MinifiedGraph:
        """Return the smallest failing graph that is found, as `run` describes.

        Raise NothingToMinify if no graph fails by itself, if the failure is too rare, or if a resumed graph does not
        show its failure any more; ProgramError if torch makes no graph of the program; and what `_resumed` raises.
        """
        entry: Entry | None = None
        # workers warm up while the graphs are captured
        with self._asking() as self.ask:
            subjects = self._capture()
            self._hand_state_to_workers()
            if self.is_resumed and self._journal.is_there:
                best, entry = self._resumed(subjects)
                subjects = [best]
            elif self.is_resumed:
                self.notes.append(f"{self.out} had no reduction to continue: this one began anew")
            preflight = Preflight(
                ask=self.ask,
                program=f"{self.case.program} under {self.case.transform}",
                limits=self.limits,
                expected=self._expected if entry is None else (entry.wanted,),
                culprit=self.culprit,
                tell=self._told,
                notes=self.notes,
            )
            is_plain = len(subjects) == 1 and self.culprit is None and entry is None
            if is_plain and self.limits.queries is None:
                preflight.guess = self._guess
            if transforms.is_pass(self.transform):
                preflight.alternatives = [each.with_names() for each in subjects if each.with_names is not None]
            chosen = preflight.choose(subjects)
            self.keeps_names = any(chosen.subject is each for each in preflight.alternatives)
            self.keeps_names |= entry is not None and entry.keeps_names
            if entry is not None and not entry.wanted.is_same_as(chosen.wanted):
                raise NothingToMinify(f"the graph that was reduced so far does not show {entry.wanted} any more")
            try:
                return self._reduced(chosen, self.ask, entry)
            except FlakyFailure as wavering:
                oracle = preflight.patient(wavering.subject, chosen.wanted)
                self.rate = preflight.rate
                return self._reduced(chosen, oracle, entry)

    def whole_program(self, pool: Pool | None = None) -> WholeProgram | None:
        """Return the user's own program as a result, or None if no script can build it or it does not fail as is meant.

        It must have a name that is not a recording, and named options; one of its failures must be one that `limits`
        accept, and the first such is followed. Without a `report` the program is checked, by the workers of `pool` or
        of a new one, and `report` is set; what `check_isolated` raises passes through.
        """
        options = self.options
        if self.program is None or recording_of(self.program) is not None or options is None or not options.is_named:
            return None
        if self.report is None:
            self.report = check_isolated(
                self.program,
                options,
                timeout_s=self.limits.timeout_s,
                memory_bytes=self.limits.memory_bytes,
                settings=self._settings,
                pool=pool,
            ).report
        report = self.report
        meant = [signature for signature in signatures_of(report) if self.limits.is_meant(signature)]
        if not report.verdict.is_failure or not meant:
            return None
        return WholeProgram(
            program=self.program,
            case=report.case,
            report=report,
            signature=meant[0],
            settings=self._settings,
            memory_bytes=self.limits.memory_bytes,
            clean=self.clean,
        )

    def _capture(self) -> Sequence[Subject]:
        """Return the subjects of the program; unless `captured` is set already, capture them and keep them there.

        Raise ProgramError if the capture has no subjects; what `capture` raises passes through.
        """
        if self.captured is None:
            self.captured = self.capture()
            if not self.captured.subjects:
                raise ProgramError(f"{self.case.program}: its graphs compute nothing, so there is nothing to minify")
        return self.captured.subjects

    @property
    def _settings(self) -> dict[str, Any]:
        """The compiler's settings under which the graphs were captured; before that, those changed in this process."""
        if self.captured is not None:
            return dict(self.captured.settings)
        return settings.plain_settings(settings.changed_settings())

    def _resumed(self, subjects: Sequence[Subject]) -> tuple[Subject, Entry]:
        """Return the best subject of an earlier reduction, and its entry in the journal in `out`.

        `subjects` are those of the program: the best subject may call functions of their modules. Raise UsageError if
        `out` is None, or if the journal is about another level or other graphs than `subjects`, and ReportUnreadable if
        the journal or the best subject cannot be read.
        """
        best, entry = self._journal.read(allow=[name for subject in subjects for name in subject.modules])
        level = self.limits.level
        if entry.level != level:
            raise UsageError(f"{self.out} has a graph of the level {entry.level}: resume with that, not {level}")
        if entry.graphs != graphs_hash(subjects):
            raise UsageError(
                f"{self.out} is about other graphs than {self.case.program} has now, because it was edited since "
                "or is another program: minify it without --resume"
            )
        return best, entry

    def _hand_state_to_workers(self) -> None:
        """Give an oracle of workers the settings and flags under which the graphs were captured.

        Nothing happens if the oracle asks in this process, or before the capture.
        """
        if isinstance(self.ask, WorkerOracle) and self.captured is not None:
            self.ask.settings, self.ask.flags = self.captured.settings, self.captured.flags

    def _told(self, progress: Progress) -> None:
        """Pass a copy of a progress on to `tell`, with `workers` set to the number of queries without an outcome yet.

        It is 0 if the oracle asks in this process.
        """
        self.tell(replace(progress, workers=len(self.ask.at_work) if isinstance(self.ask, WorkerOracle) else 0))

    @property
    def _expected(self) -> Sequence[Signature]:
        """The failures of the program as a whole, for graphs of dynamo; empty for graphs of AOTAutograd."""
        # a failure in the backward of a program is one in the forward of its backward graph
        return self.expected if self.limits.level == DYNAMO else ()

    def _guess(self, subject: Subject) -> Predictor:
        """Return a predictor of the queries that the reduction will most likely need, before the failure is known.

        It assumes that values diverge in forward, or, once the first predicted query is answered, that the failure is
        the first one in its answer. If that answer shows no failure, or one that needs gradients, it predicts nothing.
        """
        assert isinstance(self.ask, WorkerOracle)
        find = partial(self.ask.find, case=replace(self.ask.case, stages=FORWARD))
        search = Search(subject=subject, answer=Answer(), wanted=LIKELY)
        foresight = Speculation(find=find, search=search, strategies=STRATEGIES, passes=PASSES)
        first: Subject | None = None

        def predict() -> Subject | None:
            """Return the next subject to ask about, or None if there is none; `_guess` says for which failure."""
            nonlocal first
            first = first or foresight()
            begun = find(first) if first is not None else None
            if begun is None or not begun.is_done():
                return foresight()
            # the whole most likely fails in the same way as the first part
            search.wanted = next(iter(begun().signatures), LIKELY)
            is_guess = search.wanted is not LIKELY and stages_of(search.wanted, subject) == FORWARD
            return foresight() if is_guess else None

        return predict

    def report_death(self) -> Report | None:
        """Return the report on the first graph whose candidate ends the worker, hangs or breaks a limit, or else None.

        Candidates that diverge or raise an exception do not count. The report has the case of the whole program. None
        also if the capture raises ProgramError or UsageError; errors of the queries pass through.
        """
        try:
            subjects = self._capture()
        except (ProgramError, UsageError):  # there is no graph to ask about, and the check will say more
            return None
        with self._asking() as ask:
            for subject in subjects:
                report = ask(subject).report
                if report is not None and report.failure is not None and report.failure.kind != "exception":
                    return replace(report, case=self.case)
        return None

    @contextmanager
    def _asking(self) -> Iterator[WorkerOracle | InProcessOracle]:
        """Yield the oracle that answers questions; afterwards end its queries, and the pool unless it was passed in.

        The oracle asks workers. If `is_isolated` is false or no other process can import the transform, it asks in this
        process instead, and a note says so.
        """
        spec = spec_of(self.transform)
        if spec is None or not self.is_isolated:
            why = "on request" if spec is not None else "no other process can import the transform"
            self.notes.append(f"every query ran in this process, where a crash ends everything: {why}")
            yield InProcessOracle(case=self.case, transform=self.transform)
            return
        place = spec.rpartition(":")[0]
        # the user's functions that a graph calls are defined in the module of its program or of its transform
        imports = [*self.imports, *([place] if place.endswith(".py") else [])]
        with nullcontext(self.pool) if self.pool is not None else pool_for(spec) as pool:
            workers = WorkerOracle(
                pool=pool,
                case=replace(self.case, transform=spec, program="subject"),
                timeout_s=self.limits.timeout_s,
                memory_bytes=self.limits.memory_bytes,
                settings=self._settings,
                flags=self.captured.flags if self.captured is not None else None,
                imports=imports,
            )
            try:
                yield workers
            finally:
                workers.end()

    def _reduced(self, chosen: FailingGraph, ask: Oracle, entry: Entry | None) -> MinifiedGraph:
        """Return the smallest graph that the reducer finds below the chosen one.

        `ask` answers the queries; `entry` is that of a resumed run, or None. With `out`, each new best subject, and a
        neighbour that passes (a twin), are written there. `notes` are added to. Raise FlakyFailure if the failure does
        not come again; after any error, a script whose run has begun is dropped.
        """
        subject = chosen.subject
        left = None if self.limits.queries is None else max(0, self.limits.queries - self.ask.begun)
        is_flaky = self.rate < 1.0
        # a failure that is known to be flaky needs no repeats, so it leaves no queries aside for them
        most_repeats = 0 if is_flaky else REPEATS if left is None else min(REPEATS, left)
        reducer = Reducer(
            ask=ask,
            wanted=chosen.wanted,
            budget=Budget(queries=None if left is None else left - most_repeats, seconds=self.limits.seconds),
            most_repeats=most_repeats,
            tell=self._told,
            is_flaky=is_flaky,
        )
        if most_repeats < REPEATS and not is_flaky:
            self.notes.append("whether it fails each time was not asked: that takes more queries than were allowed")
        if isinstance(self.ask, WorkerOracle):
            if ask is self.ask:  # a flaky failure is asked for several times, each time anew
                reducer.pool = self.ask
            if self.script is not None:
                # the process of the script warms up while the first cuts keep one worker busy
                self.clean = self.clean or CleanProcess(warmup_steps(self.transform, forks=CAN_FORK))
        if entry is not None:
            reducer.outcomes.update(entry.known)
        self.history = []
        reducer.save_best = self._keeping(reducer, self._nodes_before(chosen, entry), entry)
        reducer.save_best(subject, chosen.answer)
        reducer.on_likely_result = lambda *best: self._begin_script(self._minified(reducer, chosen, entry, *best))
        culprits = nodes_of(self.culprit, subject) if self.culprit is not None else ()
        try:
            reducer.run(subject, chosen.answer, strategies=STRATEGIES, passes=PASSES, culprits=culprits)
        except BaseException:
            self._drop_script()
            raise
        if not reducer.is_minimal:
            why = f"queries broke ({reducer.unanswered})" if reducer.unanswered else "the budget was spent"
            self.notes.append(f"it may not be the smallest: {why}")
        if reducer.twin is not None and self.out is not None:
            self._journal.write_twin(reducer.twin)
            self.notes.append(f"a neighbour that passes is in {self.out / 'twin'}: {_calls(reducer.twin)}")
        small = self._minified(reducer, chosen, entry, reducer.search.subject, reducer.search.answer)
        return replace(small, fallbacks=lambda: self._fallbacks(reducer, chosen, entry))

    def _fallbacks(self, reducer: Reducer, chosen: FailingGraph, entry: Entry | None) -> Iterator[MinifiedResult]:
        """Yield results for the case that the script of the smallest one does not fail in a clean process.

        They are earlier best subjects, each about twice as many steps back as the one before, up to the first; then
        the result of `whole_program`, if it has one, and the `larger` results of that. A note in each says that it is
        not the smallest.
        """
        back, is_last = 1, False
        while not is_last and len(self.history) > 1:
            is_last = back >= len(self.history) - 1
            subject, answer = self.history[0 if is_last else -1 - back]
            earlier = self._minified(reducer, chosen, entry, subject, answer)
            reduction = replace(earlier.reduction, is_minimal=False)
            yield replace(earlier, reduction=reduction, notes=(*earlier.notes, NOT_SMALLEST), draft=None)
            back *= 2
        whole = self.whole_program()
        if whole is not None:
            whole = replace(whole, notes=(*self.notes, NOT_SMALLEST))
            yield whole
            yield from whole.larger()

    def _minified(
        self, reducer: Reducer, chosen: FailingGraph, entry: Entry | None, small: Subject, answer: Answer
    ) -> MinifiedGraph:
        """Return a subject of the reduction as a result, with the report of its answer and the costs so far.

        The costs include those of `entry`, the entry of a resumed run. The report's case names the user's program.
        """
        report = answer.report
        assert report is not None
        # the graph is a part of the user's program, and goes by its name
        report = replace(report, case=replace(report.case, program=self.case.program))
        places = {name: index for index, name in enumerate(small.named_inputs)}
        return MinifiedGraph(
            graph=small.graph,
            inputs=small.inputs,
            case=report.case,
            report=report,
            signature=chosen.wanted,
            reduction=Reduction(
                nodes_before=self._nodes_before(chosen, entry),
                nodes_after=small.size,
                queries=self._queries(entry),
                seconds=self._seconds(entry),
                is_minimal=reducer.is_minimal,
                rate=self.rate,
            ),
            keeps_names=self.keeps_names,
            registering=tuple(self.imports) if report.case.transform.startswith("backend:") else (),
            drawn={places[name]: draw.text(small.named_inputs[name]) for name, draw in small.drawn.items()},
            settings=self._settings,
            also_seen=tuple(reducer.also_seen),
            twin=reducer.twin.graph if reducer.twin is not None else None,
            clean=self.clean,
            draft=self.draft,
            memory_bytes=self.limits.memory_bytes,
            notes=tuple(self.notes),
        )

    def _begin_script(self, small: MinifiedGraph) -> None:
        """Begin to run the script of a result, and keep it as `draft`.

        Nothing happens if the path `script` is unknown or the script cannot be written.
        """
        if self.script is not None:
            # `MinifiedGraph.write` raises the same error for the caller
            with suppress(ReproUnwritable, OSError):
                self.draft = small.begin(self.script, data=self.with_data)

    def _drop_script(self) -> None:
        """End the run of the script that was begun and remove its files; nothing happens if there is none."""
        if self.draft is not None:
            self.draft.drop()
            self.draft = None

    def _nodes_before(self, chosen: FailingGraph, entry: Entry | None) -> int:
        """Return the number of nodes before the reduction: of a resumed run's entry, or else of the chosen graph."""
        return entry.nodes_before if entry is not None else chosen.subject.size

    def _seconds(self, entry: Entry | None) -> float:
        """Return how long the reduction has taken since `run` began, plus the seconds of a resumed run's entry."""
        return (entry.seconds if entry is not None else 0.0) + time.monotonic() - self.started

    def _queries(self, entry: Entry | None) -> int:
        """Return how many queries were begun, plus those of a resumed run's entry."""
        return self.ask.begun + (entry.queries if entry is not None else 0)

    def _keeping(self, reducer: Reducer, before: int, resumed: Entry | None) -> Callable[[Subject, Answer], None]:
        """Return a function that adds a best subject and its answer to `history`.

        With `out` it also writes the subject and the reducer's state into the journal. `before` is the number of nodes
        before the reduction; `resumed` is the entry of an earlier run, whose costs are added, or None.
        """

        def keep(best: Subject, answer: Answer) -> None:
            """Add the subject and its answer to `history`, and with `out` write the journal."""
            self.history.append((best, answer))
            if self.out is None:
                return
            entry = Entry(
                wanted=reducer.wanted,
                level=self.limits.level,
                graphs=graphs_hash(self._capture()),
                nodes_before=before,
                queries=self._queries(resumed),
                seconds=self._seconds(resumed),
                # a new name, so that the subject of the entry before stays until the journal has this one
                best=new_best(),
                drawn=dict(best.drawn),
                known=dict(reducer.outcomes),
                keeps_names=self.keeps_names,
            )
            self._journal.write(best, entry)

        return keep

    @property
    def _journal(self) -> Journal:
        """The journal in `out`; UsageError if `out` is None."""
        if self.out is None:
            raise UsageError("`resume` needs the directory `out` of the earlier run")
        return Journal(directory=self.out)


def _calls(subject: Subject) -> str:
    """Return the short names of the operations in a subject, with commas between them."""
    return ", ".join(short_name(op_name(node)) for node in subject.nodes)
