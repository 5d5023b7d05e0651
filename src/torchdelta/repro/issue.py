"""The words about a finding: the text of an issue, the docstring of a script, and the headline of both.

Start reading at `issue_text` and `header_of`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torchdelta.compare.leaves import brief
from torchdelta.records.comparison import Comparison
from torchdelta.records.failure import Failure, essence
from torchdelta.records.printable import printable
from torchdelta.records.report import EXCEPTION
from torchdelta.records.verdict import Verdict
from torchdelta.repro.finding import Divergence, Evidence
from torchdelta.repro.question import Question
from torchdelta.repro.whole_program import question_of

WIDTH = 110
MESSAGE_LETTERS = 160
"""How much of an exception's message is quoted."""
_MAX_NAMED_OPS = 3
_OF_OUTPUTS = re.compile(r"(iterations\[\d+\]\.)?outputs")
"""A headline names the operations of a graph that has at most so many."""
_CLAUSE_WORDS = {"aliasing": "that share other memory", "requires_grad": "with another requires_grad"}
"""How a headline describes a broken clause that does not fit `of another <clause>`."""
EXITS = "Exits with 1 while the bug is there, 0 once it is gone, 2 if it cannot run here."
MAX_ROWS = 5
"""The table of evidence shows so many leaves."""


def issue_text(finding: Evidence, path: Path, *, data: bool = True) -> str:
    """Return the Markdown text of an issue: headline, details, evidence, the script, and versions.

    The script at `path` and the user's code beside it are quoted, so they must have been written before, with the same
    `data`. Raise ReproUnwritable if no script of torch alone can show the finding.
    """
    path = Path(path)
    question = question_of(finding, path, data=data)
    environment = finding.report.environment
    parts = [
        f"# {headline(question)}",
        details(question),
        "## Evidence",
        "\n".join(_evidence(finding, has_values=not question.is_replaced)),
        "## Reproduce",
        f"{EXITS}{_beside(path)}",
        _quote(path),
        *(f"`{_place(copy, path)}`, beside it:\n\n{_quote(copy)}" for copy in question.imports.copies),
        "## Versions",
        f"- torch {environment.torch}\n- Python {environment.python}\n- {environment.platform}",
    ]
    return "\n\n".join(parts) + "\n"


def _evidence(finding: Evidence, *, has_values: bool) -> Iterator[str]:
    """Yield the evidence in Markdown: a code block with the failure's type and message, or else a table, line by line.

    Only the end of a long message is shown. The table has the `MAX_ROWS` worst of the leaves that diverged in any
    stage, and says how many more there are. Without `has_values`, the index and values of the worst element are left
    out.
    """
    report = finding.report
    if report.failure is not None:
        message = report.failure.message.rstrip()[-2000:]
        yield f"```\n{report.failure.type or report.failure.kind}: {message}\n```"
        return
    diverged = [comparison for comparison in report.comparisons if comparison.verdict is Verdict.DIVERGED]
    yield "| where | eager | candidate | float64 | error | noise | why |"
    yield "|---|---|---|---|---|---|---|"
    for comparison in sorted(diverged, key=lambda each: each.rank, reverse=True)[:MAX_ROWS]:
        yield _row(comparison if has_values else replace(comparison, worst=None))
    if len(diverged) > MAX_ROWS:
        yield f"\nand {len(diverged) - MAX_ROWS} more."


def _row(comparison: Comparison) -> str:
    """Return a leaf's row of the table in Markdown.

    Its cells are the path with the index of the worst element, the three values there (eager, candidate, float64),
    error, noise and reason. Unknown ones are empty.
    """
    worst = comparison.worst
    where = f"`{comparison.path}{list(worst.index) if worst else ''}`"
    values = (worst.reference, worst.candidate, worst.truth) if worst else (None, None, None)
    numbers = ("" if number is None else f"{number:.3g}" for number in (comparison.error, comparison.noise))
    cells = (
        where,
        *("" if value is None else str(value) for value in values),
        *numbers,
        comparison.reason.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _place(copy: Path, script: Path) -> str:
    """Return the path of a copy relative to the script's folder, with forward slashes."""
    return copy.relative_to(script.resolve().parent).as_posix()


def _quote(path: Path) -> str:
    """Return the content of a file as a block of Python code in Markdown."""
    return f"```python\n{path.read_text(encoding='utf-8').rstrip()}\n```"


def _beside(path: Path) -> str:
    """Return a space and a sentence that names the file of the script's tensors, or an empty text without that file."""
    tensors = path.with_suffix(".pt")
    return f" Its tensors are in {tensors.name}, which belongs beside it." if tensors.exists() else ""


def headline(question: Question) -> str:
    """Return one sentence, without a full stop, that says what is wrong."""
    return f"{question.applied.what} {_does(question.finding, question.divergence)}{_ops(question)}"


def header_of(question: Question, data: str) -> str:
    """Return the docstring of a script, quotes included: headline, details, versions, `data`, exit statuses.

    `data` is a sentence about the values that the script embeds. Lines are wrapped; backslashes and triple quotes in
    the text are escaped.
    """
    finding = question.finding
    environment = finding.report.environment
    origin = f"Found with torch {environment.torch}, Python {environment.python}, {environment.platform}. {data}"
    parts = [f"{headline(question)}.", f"{details(question)} {origin} {EXITS}"]
    first, *rest = ("\n".join(textwrap.wrap(_escape(part), WIDTH, break_long_words=False)) for part in parts)
    return "\n\n".join((f'"""{first}', *rest)) + '\n"""'


def details(question: Question) -> str:
    """Return the evidence as one or two sentences.

    They tell a failure's message, both sides of a broken clause, the error of a divergence in float64 only, or the
    worst element on both sides (of floats also in float64, if known), with a cast of the reference if the contract
    names one. If the worst element is unknown or random numbers replace values in the script, the comparison's reason
    takes its place.
    """
    finding, applied, divergence = question.finding, question.applied, question.divergence
    failure = finding.report.failure
    if divergence is None:
        assert failure is not None
        return (
            f"It says: {quote_message(failure)}." if failure.kind == "exception" else f"It ended so: {failure.message}."
        )
    comparison = divergence.comparison
    if divergence.clause is not None:
        broken = next(breach for breach in comparison.contract if breach.clause == divergence.clause)
        return f"{comparison.path}, {broken.clause}: {broken.reference} eagerly, {broken.candidate} {applied.label}."
    if divergence.is_lifted:
        return (
            f"It shows in float64, where both sides are run here: {comparison.path} is off by {comparison.error:.3g}."
        )
    if comparison.worst is None or question.is_replaced:
        return f"{comparison.path}: {comparison.reason}."
    index = f"{comparison.path}{list(comparison.worst.index) or ''}"
    has_truth = comparison.worst.truth is not None and not divergence.is_exact
    truth = f", {comparison.worst.truth} in float64" if has_truth else ""
    casts = next(
        (f" The reference {breach.reference}." for breach in comparison.contract if breach.clause == "casts"), ""
    )
    return (
        f"{index} is {comparison.worst.reference} eagerly, {comparison.worst.candidate} {applied.label}{truth}.{casts}"
    )


def quote_message(failure: Failure) -> str:
    """Return the line of an exception's message that says what went wrong, shortened."""
    return brief(essence(failure.message), MESSAGE_LETTERS).rstrip(".")


def _does(finding: Evidence, divergence: Divergence | None) -> str:
    """Return the predicate of the headline: what the candidate does wrong.

    Without a divergence, it says how the candidate failed (`raises RuntimeError`, `does not end`). Otherwise it says
    which values, or which trait of them, differ from eager PyTorch: gradients, outputs, or values in its inputs,
    buffers or state. If the exceptions of the two sides differ, it says that the candidate does not raise the same.
    """
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
    if divergence.clause == EXCEPTION:
        return "does not raise what eager PyTorch raises"
    if divergence.stage == "gradients":
        what = "gradients"
    elif divergence.leaf.startswith("outputs") or _OF_OUTPUTS.match(divergence.comparison.path):
        what = "outputs"
    else:
        path = divergence.comparison.path
        what = "values in its buffers" if path.startswith(("parameters", "buffers")) else "values in its state"
        what = "values in its inputs" if path.startswith(("args", "kwargs")) else what
    if divergence.clause is None:
        return (
            f"leaves other {what} than eager PyTorch"
            if "values in" in what
            else f"gives other {what} than eager PyTorch"
        )
    return f"gives {what} {_CLAUSE_WORDS.get(divergence.clause, f'of another {divergence.clause}')} than eager PyTorch"


def _ops(question: Question) -> str:
    """Return ` for ` and the names of the program's operations; an empty text if there are none or more than three."""
    names = question.operations
    return f" for {', '.join(names)}" if 0 < len(names) <= _MAX_NAMED_OPS else ""


def _escape(text: str) -> str:
    """Return a text that can be put into a docstring: backslashes are doubled, and triple quotes become `'''`.

    Control characters and lone surrogates, which a source file cannot have, are shown as escapes.
    """
    text = printable(text).encode(errors="backslashreplace").decode()
    return text.replace("\\", "\\\\").replace('"""', "'''")
