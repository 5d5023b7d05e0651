"""The local question, asked with a check: is each node right by itself?

Errors that accumulate over a whole program can hide a wrong node; a node that is given the reference's inputs cannot
hide. `run_check` asks it if the case is thorough; `node_walk` connects a check to `nodewise.walk`, for `locate` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torchdelta._torch.process import runtime
from torchdelta.check import exceptions, semantic
from torchdelta.check.candidate import CandidateRun
from torchdelta.check.check import Check
from torchdelta.nodewise.findings import NodeFindings
from torchdelta.nodewise.walk import NodeWalk
from torchdelta.records.report import ASKED, Report, Stage, compares_exceptions, reason_of
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.transforms.base import Transform
from torchdelta.transforms.compiler import Compiler

LOCAL = "local"
"""The stage that has the comparisons of single nodes."""


def run_check(check: Check) -> Report:
    """Return the report of a check, with the local question if its case is thorough.

    If the program raises eagerly, the report compares exceptions, or EagerFails is raised: see `exceptions.run`.
    """
    report = exceptions.run(check)
    return ask_locally(check, report) if check.case.thorough else report


def node_walk(
    check: Check,
    *,
    is_lifted: bool = False,
    mapping: Mapping[str, str] | None = None,
    limit_bytes: int | None = None,
    notes: list[str] | None = None,
) -> NodeWalk:
    """Return a walk over the nodes of a check's two sides, natively or in float64; it does not start yet.

    Only the reference runs here, if it has not run before. `mapping` has the user's matches, from names of the
    reference's nodes to the candidate's. `limit_bytes` is the memory that taps may hold. The walk appends its notes to
    the list `notes`, or to a new one if it is None.
    """
    notes = notes if notes is not None else []

    def run(transform: Transform) -> None:
        if note := _run_candidate(check, transform, is_lifted=is_lifted):
            notes.append(note)

    return NodeWalk(
        case=check.case,
        program=check.baseline.program,
        transform=check.transform,
        policy=check.policy,
        draws_random=check.baseline.reference.draws_random,
        is_lifted=is_lifted,
        run=run,
        ask=lambda transform: _ask(check, transform, is_lifted=is_lifted),
        mapping=mapping,
        limit_bytes=limit_bytes,
        notes=notes,
    )


def _ask(check: Check, transform: Transform, *, is_lifted: bool) -> tuple[Verdict, str]:
    """Return verdict and reason of another transform of the same program, natively or in float64 alone.

    Natively, the whole check runs without the semantic question. In float64, verdict and reason are those of the worst
    answer; without answers it is INCONCLUSIVE, with the reason why the question was not asked.
    """
    baseline = check.baseline
    if is_lifted:
        lifted = semantic.run_lifted(baseline, transform)
        question, answers = semantic.judge_lifted(lifted, baseline, keeps_names=transform.traits.keeps_names)
        comparisons = [comparison for stage in answers.values() for comparison in stage.values()]
        if not comparisons:
            return Verdict.INCONCLUSIVE, question
        worst = max(comparisons, key=lambda comparison: comparison.rank)
        return worst_of(comparison.verdict for comparison in comparisons), worst.reason
    case = replace(check.case, semantic=False)
    report = replace(check, case=case, transform=transform, notes=[], candidate=CandidateRun()).run()
    return report.verdict, reason_of(report)


def _run_candidate(check: Check, transform: Transform, *, is_lifted: bool) -> str:
    """Run the program under the transform, so that an observer at its seam sees it; return a note if that fails.

    Otherwise, and always in float64, the text is empty.
    """
    baseline = check.baseline
    if is_lifted:
        semantic.run_lifted(baseline, transform)
        return ""
    run = baseline.run(transform)
    if run.failure is None:
        return ""
    message = f"{run.failure}".splitlines()[0]
    return f"the candidate failed while its nodes were looked at: {message}"


def ask_locally(check: Check, report: Report) -> Report:
    """Return the report with the comparisons of single nodes; a node that is wrong by itself makes it diverge.

    They are one more stage, `local`, if there are any. If float64 was asked and none is wrong natively, nodes of two
    graphs are looked at in float64 too. Culprits, coverage and notes are added. If the candidate failed,
    the program raises eagerly, or no nodes could be matched, the report only gets the reason why the local question was
    not asked. If the walk found no culprit, nodes that diverged are left out.
    """
    if report.failure is not None or compares_exceptions(report):
        why = "the candidate failed" if report.failure is not None else "the program raises when run eagerly"
        return replace(report, questions=replace(report.questions, local=f"not asked: {why}"))
    with runtime.preserved():
        walk = node_walk(check)
        findings = walk.look_at_nodes(report)
        if not findings.culprits and report.questions.semantic == ASKED and _has_two_graphs(check):
            # what rounds to the same bits natively may be another function all the same
            lifted = node_walk(check, is_lifted=True, notes=walk.notes).look_at_nodes(report)
            findings = lifted if lifted.culprits else findings
    findings = replace(findings, notes=(*walk.notes, *findings.notes))
    coverage = findings.coverage
    if coverage is None or not coverage.matched:
        why = "; ".join(findings.notes) or "there is no graph whose nodes could be looked at"
        return replace(report, questions=replace(report.questions, local=f"not asked: {why}"))
    comparisons = tuple(
        comparison
        for row in findings.rows
        for comparison in (*row.local, *row.local_gradients)
        # without a culprit, the walk has excused the nodes that differ
        if findings.culprits or comparison.verdict is not Verdict.DIVERGED
    )
    stages = report.stages
    if comparisons:
        stages = (*stages, Stage.of(LOCAL, comparisons))
    return replace(
        report,
        verdict=worst_of(stage.verdict for stage in stages),
        stages=stages,
        questions=replace(report.questions, local=ASKED),
        culprits=findings.culprits,
        coverage=coverage,
        notes=tuple(dict.fromkeys((*report.notes, *findings.notes, _summary(findings)))),
    )


def _has_two_graphs(check: Check) -> bool:
    """Tell whether both sides are graphs, which can run in lockstep in float64 too without another compile."""
    return check.transform.traits.has_seam and not isinstance(check.transform, Compiler)


def _summary(findings: NodeFindings) -> str:
    """Return a note on how many nodes were judged, and how many of them differ."""
    differing = sum(any(each.error for each in (*row.local, *row.local_gradients)) for row in findings.rows)
    return (
        f"local: {len(findings.rows)} nodes were looked at by themselves, and {differing} are not the same to the bit"
    )
