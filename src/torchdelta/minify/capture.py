"""The subjects of a check: the graphs that its transform would be given, in the normal form of a subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torchdelta._torch.graphs.nodes import module_path, op_name, short_name, source_line
from torchdelta.check.check import Check
from torchdelta.check.graphs import CapturedGraph, capture_graphs
from torchdelta.errors import ProgramError, UsageError
from torchdelta.minify.subject import Subject
from torchdelta.records.case import AOT, DYNAMO
from torchdelta.records.report import Culprit
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.fx_pass import FxPass


def subjects_of(check: Check, level: str = DYNAMO) -> list[Subject]:
    """Capture the graphs that the transform would be given, without applying it, and return them as subjects.

    `level` is `dynamo`, or `aot` for the graphs that AOTAutograd makes. Raise UsageError if the transform is given none
    of the level `aot`, or is another implementation of the program; raise ProgramError if torch makes no graph of the
    program, or a compiler would be given none that computes.
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
    subjects = as_subjects(capture_graphs(check.baseline, transform, level))
    if not subjects:
        raise ProgramError(f"{check.case.program}: its graphs compute nothing, so there is nothing to minify")
    return subjects


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
