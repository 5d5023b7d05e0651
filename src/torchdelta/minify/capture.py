"""The subjects of a check: the graphs that its transform would be given, in the normal form of a subject."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchdelta._torch.graphs.nodes import module_path, op_name, short_name, source_line
from torchdelta._torch.process import runtime
from torchdelta.check.check import Check
from torchdelta.check.graphs import CapturedGraph, ProgramGraphs, capture_graphs, read_graphs
from torchdelta.errors import ProgramError, ReportUnreadable, UsageError
from torchdelta.isolate.pool import Pool
from torchdelta.minify.subject import Subject
from torchdelta.minify.warm_workers import WORKER
from torchdelta.program.loading import import_program
from torchdelta.records.case import AOT, DYNAMO, CheckOptions, SearchLimits
from torchdelta.records.codec import encode
from torchdelta.records.failure import Failure
from torchdelta.records.report import Culprit
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.fx_pass import FxPass


def subjects_of(check: Check, level: str = DYNAMO) -> list[Subject]:
    """Capture the graphs that the transform would be given, without applying it, and return them as subjects.

    `level` is `dynamo`, or `aot` for the graphs that AOTAutograd makes. Raise UsageError if the transform is given none
    of the level `aot`, or is another implementation of the program; raise ProgramError if torch makes no graph of the
    program, or a compiler would be given none that computes.
    """
    subjects = as_subjects(graphs_of(check, level))
    if not subjects:
        raise ProgramError(f"{check.case.program}: its graphs compute nothing, so there is nothing to minify")
    return subjects


def graphs_of(check: Check, level: str) -> list[CapturedGraph]:
    """Capture the graphs that the transform would be given at a level, without applying it, and return them.

    Raise UsageError if the transform is given none of the level `aot`, or is another implementation of the program, and
    ProgramError if torch makes no graph of the program. Graphs that compute nothing are returned too.
    """
    transform = check.transform
    is_behind_aot = isinstance(transform, Compiler) or (isinstance(transform, FxPass) and transform.graph == "aten")
    if level == AOT and not is_behind_aot:
        raise UsageError(
            f"AOTAutograd hands nothing to {check.case.transform}: only a compiler and a pass on ATen graphs have the "
            f"level {AOT}"
        )
    if not transform.traits.reads_program or not transform.traits.keeps_names:
        raise UsageError(
            f"{check.case.transform} is another implementation, so there is no graph to make smaller: "
            "`torchdelta locate` names the module that differs"
        )
    return capture_graphs(check.baseline, transform, level)


@dataclass(frozen=True, kw_only=True)
class ProgramSubjects:
    """The subjects of a program, with the global state under which its graphs run."""

    subjects: Sequence[Subject]
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] | None = None
    """Torch's flags; None are those of this process."""

    @classmethod
    def of(cls, captured: ProgramGraphs) -> ProgramSubjects:
        """Return the subjects of a program's graphs, with its settings and flags.

        Graphs that compute nothing are left out.
        """
        return cls(subjects=as_subjects(captured.graphs), settings=captured.settings, flags=captured.flags)


def capture_here(check: Check, level: str) -> ProgramSubjects:
    """Capture the graphs of a check in this process, and return them as subjects.

    The result has the settings and flags of this process. Raises what `subjects_of` raises.
    """
    with runtime.preserved():
        subjects = subjects_of(check, level)
    state = ProgramGraphs.captured_here(())
    return ProgramSubjects(subjects=subjects, settings=state.settings, flags=state.flags)


def capture_isolated(
    program: str, options: CheckOptions, *, limits: SearchLimits, settings: Mapping[str, Any], pool: Pool
) -> ProgramSubjects:
    """Load a named program in a worker of the pool, capture its graphs there, and return them as subjects.

    Code of the program does not run in this process, unless a graph calls functions or operators that its module
    defines: then the module is imported here too. `settings` are compiler settings that the worker has meanwhile. There
    are no subjects if no graph computes. Of `limits`, the level, timeout and memory are used. Raises what `graphs_of`
    and `prepare` raise, ProgramError if the program ends the worker or exceeds these limits, and ReportUnreadable if
    the graphs cannot be read here.
    """
    request = {
        "program": program,
        "options": encode(options),
        "level": limits.level,
        "settings": dict(settings),
    }
    with tempfile.TemporaryDirectory(prefix="graphs-", dir=pool.directory) as directory:
        outcome = pool.ask(
            f"{WORKER}:capture_program",
            {**request, "graphs": directory},
            deadline_s=limits.timeout_s,
            memory_bytes=limits.memory_bytes,
        )
        result = outcome.read(str, "directory", program=program, candidate_parts=())
        if isinstance(result, Failure):
            raise ProgramError(f"{program}: its graphs were not captured: {result.message}{outcome.last_words}")
        return ProgramSubjects.of(read_captured(program, Path(directory)))


def read_captured(program: str, directory: Path) -> ProgramGraphs:
    """Return the graphs of a named program that a worker wrote to a directory.

    If they cannot be read at first, the program's modules are imported here and they are read again. ReportUnreadable
    if they cannot be read even then, or if there are none.
    """
    try:
        captured = read_graphs(directory)
    except ReportUnreadable:
        import_program(program)
        captured = read_graphs(directory)
    if captured is None:
        raise ReportUnreadable(f"{directory} has no graphs of {program}")
    return captured


def as_subjects(captured: Sequence[CapturedGraph]) -> list[Subject]:
    """Return the subjects of captured graphs, without those that compute nothing; `origin` is the level of the capture.

    An exported graph has no level, and stays in any case.
    """
    subjects = [
        replace(
            Subject.of(each.graph, each.inputs),
            origin=each.level,
            with_names=partial(Subject.named, each.graph, each.inputs),
        )
        for each in captured
    ]
    return [subject for subject in subjects if subject.nodes or not subject.origin]


def nodes_of(culprit: Culprit, subject: Subject) -> tuple[str, ...]:
    """Return the names of a subject's nodes that may be the culprit; those that call the culprit's operator come first.

    They have the culprit's source line and module path. Empty if there are none, or if the culprit has neither.
    """
    if not culprit.source_line and not culprit.module_path:
        return ()
    matches = [
        node
        for node in subject.nodes
        if (source_line(node), module_path(node)) == (culprit.source_line, culprit.module_path)
    ]
    word = short_name(culprit.op)
    return tuple(node.name for node in sorted(matches, key=lambda node: word != short_name(op_name(node))))
