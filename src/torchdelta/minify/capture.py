"""The subjects of a check: the graphs that its transform would get, with the inputs that they have in a real call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torchdelta._torch.compile.seams import HandedGraph
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.nodes import module_path, op_name, short_name, source_line
from torchdelta.check.check import Check
from torchdelta.errors import ProgramError, UsageError
from torchdelta.minify.subject import Subject
from torchdelta.program.copies import copy_together
from torchdelta.program.sides import Side
from torchdelta.records.case import AOT, DYNAMO, require_level
from torchdelta.records.report import Culprit
from torchdelta.transforms.base import Transform
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import export_side
from torchdelta.transforms.fx_pass import FxPass
from torchdelta.transforms.wrappers import ObservedAfterAot, ObservedTransform

CALLS = 4
"""How many calls of one graph are kept: a failure may depend on the values."""


def subjects_of(check: Check, level: str = DYNAMO) -> list[Subject]:
    """Capture what the transform would be given, without applying it: nothing of the candidate's runs.

    At the level `aot` these are the forward and backward graphs that a compiler's own backend is given, each by
    itself. UsageError where there is no graph to make smaller, ProgramError where torch makes none of the program.
    """
    transform = check.transform
    require_level(level)
    is_behind_aot = isinstance(transform, Compiler) or (isinstance(transform, FxPass) and transform.graph == "aten")
    if level == AOT and not is_behind_aot:
        raise UsageError(
            f"AOTAutograd hands nothing to {check.case.transform}: only a compiler and a pass on ATen graphs have the "
            f"level {AOT}"
        )
    if not transform.traits.reads_program or not transform.traits.keeps_names:
        raise UsageError(
            f"{check.case.transform} is another implementation, of which there is no graph to make smaller: "
            "`torchdelta locate` names the module that differs"
        )
    return _captured(check, level) if transform.traits.is_compiler else [_exported(check)]


def nodes_of(culprit: Culprit, subject: Subject) -> tuple[str, ...]:
    """Return the nodes of a subject that a culprit may be: it was named in another graph of the same program."""
    if not culprit.source_line and not culprit.module_path:
        return ()
    there = [
        node
        for node in subject.nodes
        if (source_line(node), module_path(node)) == (culprit.source_line, culprit.module_path)
    ]
    word = short_name(culprit.op)
    return tuple(node.name for node in sorted(there, key=lambda node: word != short_name(op_name(node))))


def _captured(check: Check, level: str) -> list[Subject]:
    found: list[Subject] = []

    def seam(handed: HandedGraph) -> Callable[..., Any]:
        graph = graphs.copy_graph(handed.graph)
        calls = 0

        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls <= CALLS:
                given = copy_together(args, name="the inputs of a captured graph")
                if level == AOT:  # its gradients are somebody else's work
                    given = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in given)
                found.append(replace(Subject.of(graph, given), origin=handed.level))
            return handed.graph.forward(*args)

        return run

    baseline = check.baseline
    is_dynamo = level == DYNAMO
    stages = ("forward",) if is_dynamo else tuple(each for each in baseline.plan.stages if each != "steps")
    run = baseline.run(
        ObservedTransform(_dynamo_of(check.transform), seam)
        if is_dynamo
        else ObservedAfterAot(check.transform, seam, compile_graphs=False),
        plan=replace(baseline.plan, stages=stages),
        draws_random=False,
    )
    found = [subject for subject in found if subject.nodes]
    if not found:
        why = f": {run.failure.message}" if run.failure is not None else ""
        who = "dynamo captures" if is_dynamo else "AOTAutograd makes"
        raise ProgramError(f"{check.case.program}: {who} no graph of it, so there is nothing to minify{why}")
    return found


def _dynamo_of(transform: Transform) -> Compiler:
    """Return the compiler that captures as this transform does, and changes nothing."""
    if isinstance(transform, Compiler):
        return transform.with_backend("eager")
    assert isinstance(transform, FxPass)
    return Compiler("eager", transform.options)


def _exported(check: Check) -> Subject:
    side = Side.copied_from(check.baseline.program)
    try:
        module, made = export_side(side, strict=False)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else ""
        raise ProgramError(
            f"{check.case.program} cannot be exported, so there is no graph to minify: {type(error).__name__}: {said}"
        ) from error
    inputs = graphs.flat_inputs(module, made.args, made.kwargs)  # before its calling convention is taken away
    return Subject.of(graphs.flatten_signature(module), inputs)
