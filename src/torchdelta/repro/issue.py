"""What is wrong, in a sentence, and the head of a script.

The text of an issue: what is wrong, where it was seen, the evidence, and the script.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torchdelta._torch.graphs import nodes
from torchdelta.compare.leaves import brief
from torchdelta.records.comparison import Comparison
from torchdelta.records.failure import Failure, essence
from torchdelta.records.verdict import Verdict
from torchdelta.repro.finding import Divergence, Finding
from torchdelta.repro.question import Question
from torchdelta.repro.transform import TransformSource

WIDTH = 110
SAID = 160
"""Letters of a message that a headline holds."""
_NAMED = 3
_OTHERWISE = {"aliasing": "that share other memory", "requires_grad": "with another requires_grad"}
"""How a broken clause is told where it is no noun."""
EXITS = "Exits with 1 while the bug is there, 0 once it is gone, 2 if it cannot run here."


def headline(finding: Finding, applied: TransformSource, divergence: Divergence | None) -> str:
    """Return what is wrong, without a full stop."""
    return f"{applied.what} {_does(finding, divergence)}{_ops(finding)}"


def header_of(asked: Question, data: str) -> str:
    """Return the docstring of a script."""
    finding, applied, divergence = asked.finding, asked.applied, asked.divergence
    environment = finding.report.environment
    found = f"Found with torch {environment.torch}, Python {environment.python}, {environment.platform}. {data}"
    parts = [f"{headline(finding, applied, divergence)}.", f"{details(asked)} {found} {EXITS}"]
    first, *rest = ("\n".join(textwrap.wrap(_quoted(part), WIDTH, break_long_words=False)) for part in parts)
    return "\n\n".join((f'"""{first}', *rest)) + '\n"""'


def details(asked: Question) -> str:
    """Return the evidence as a sentence, without values that the script has not."""
    finding, applied, divergence = asked.finding, asked.applied, asked.divergence
    failure = finding.report.failure
    if divergence is None:
        assert failure is not None
        return f"It says: {said(failure)}." if failure.kind == "exception" else f"It ended so: {failure.message}."
    seen = divergence.comparison
    if divergence.clause is not None:
        broken = next(breach for breach in seen.contract if breach.clause == divergence.clause)
        return f"{seen.path}, {broken.clause}: {broken.reference} eagerly, {broken.candidate} {applied.label}."
    if divergence.is_lifted:
        return f"It shows in float64, where both sides are run here: {seen.path} is off by {seen.error:.3g}."
    if seen.worst is None or asked.is_replaced:
        return f"{seen.path}: {seen.reason}."
    index = f"{seen.path}{list(seen.worst.index) or ''}"
    has_truth = seen.worst.truth is not None and not divergence.is_exact
    truth = f", {seen.worst.truth} in float64" if has_truth else ""
    casts = next((f" The reference {breach.reference}." for breach in seen.contract if breach.clause == "casts"), "")
    return f"{index} is {seen.worst.reference} eagerly, {seen.worst.candidate} {applied.label}{truth}.{casts}"


def said(failure: Failure) -> str:
    """Return the line of a message that says what went wrong."""
    return brief(essence(failure.message), SAID).rstrip(".")


def _does(finding: Finding, divergence: Divergence | None) -> str:
    failure = finding.report.failure
    if divergence is None:
        assert failure is not None
        name = failure.type.rpartition(".")[2]
        return {
            "exception": f"raises {name}",
            "signal": f"dies of {name}",
            "timeout": "does not end",
            "exit": f"ends the process with status {name}",
            "memory": "runs out of memory",
            "output": "prints without end",
        }.get(failure.kind, f"fails ({failure.kind})")
    if divergence.stage == "gradients":
        what = "gradients"
    elif divergence.leaf.startswith("outputs"):
        what = "outputs"
    else:
        what = "values in its inputs" if divergence.leaf.startswith("args") else "values in its buffers"
    if divergence.clause is None:
        return (
            f"leaves other {what} than eager PyTorch"
            if "values in" in what
            else f"gives other {what} than eager PyTorch"
        )
    return f"gives {what} {_OTHERWISE.get(divergence.clause, f'of another {divergence.clause}')} than eager PyTorch"


def _ops(finding: Finding) -> str:
    """Name what a small graph calls."""
    called = [node for node in finding.graph.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    names = list(dict.fromkeys(nodes.op_name(node) for node in called if nodes.op_name(node) != "getitem"))
    return f" for {', '.join(names)}" if 0 < len(names) <= _NAMED else ""


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


SHOWN = 5
"""Leaves that a table of evidence holds."""


def issue_text(finding: Finding, path: Path, *, data: bool = True) -> str:
    """Return text for a bug tracker about a script that was written to `path`, with the user's values or without."""
    path = Path(path)
    asked = Question(finding, path, data=data)
    environment = finding.report.environment
    parts = [
        f"# {headline(asked.finding, asked.applied, asked.divergence)}",
        details(asked),
        "## Evidence",
        "\n".join(_evidence(finding, has_values=not asked.is_replaced)),
        "## Reproduce",
        f"{EXITS}{_beside(path)}",
        f"```python\n{path.read_text(encoding='utf-8').rstrip()}\n```",
        "## Versions",
        f"- torch {environment.torch}\n- Python {environment.python}\n- {environment.platform}",
    ]
    return "\n\n".join(parts) + "\n"


def _evidence(finding: Finding, *, has_values: bool) -> Iterator[str]:
    report = finding.report
    if report.failure is not None:
        said = report.failure.message.rstrip()[-2000:]
        yield f"```\n{report.failure.type or report.failure.kind}: {said}\n```"
        return
    wrong = [seen for seen in report.comparisons if seen.verdict is Verdict.DIVERGED]
    yield "| where | eager | candidate | float64 | error | noise | why |"
    yield "|---|---|---|---|---|---|---|"
    for seen in sorted(wrong, key=lambda seen: seen.rank, reverse=True)[:SHOWN]:
        yield _row(seen if has_values else replace(seen, worst=None))
    if len(wrong) > SHOWN:
        yield f"\nand {len(wrong) - SHOWN} more."


def _row(seen: Comparison) -> str:
    worst = seen.worst
    where = f"`{seen.path}{list(worst.index) if worst else ''}`"
    values = (worst.reference, worst.candidate, worst.truth) if worst else (None, None, None)
    numbers = ("" if number is None else f"{number:.3g}" for number in (seen.error, seen.noise))
    cells = (
        where,
        *("" if value is None else str(value) for value in values),
        *numbers,
        seen.reason.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _beside(path: Path) -> str:
    tensors = path.with_suffix(".pt")
    return f" Its tensors are in {tensors.name}, which belongs beside it." if tensors.exists() else ""
