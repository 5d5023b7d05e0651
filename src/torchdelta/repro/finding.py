"""A finding: a failing report, and the program that it is about, for which a script is to be written.

The program is a graph with its inputs (`Finding`), or the user's own program by its name (`ProgramFinding`) if the
failure has no graph of its own.

A report may have many failures and a script shows one: `divergence_of` chooses the worst leaf of the first stage that
diverged, `bound_of` the difference above which a script says that the bug is there, and `key_of` the piece of an
exception's message to look for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from torchdelta.errors import ReproUnwritable, UsageError
from torchdelta.records.case import Case
from torchdelta.records.comparison import Comparison
from torchdelta.records.failure import Failure, essence
from torchdelta.records.report import Report
from torchdelta.records.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A failing report, and what a script needs to know beside the program."""

    case: Case
    report: Report
    deadline_s: float = 60.0
    """How long a script waits for a candidate that hangs or dies."""
    memory_bytes: int = 4 * 2**30
    """How much memory a script allows for a candidate that ran out of it, in addition to what it starts with."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the compiler that differ from torch's defaults, by their full names."""
    tries: int = 1
    """How often a script tries, because an intermittent failure may not show in the first run."""

    def __post_init__(self) -> None:
        """Raise UsageError unless the report's verdict is a failure."""
        if not self.report.verdict.is_failure:
            raise UsageError(f"the report says {self.report.verdict.value}: there is nothing to reproduce")


@dataclass(frozen=True, kw_only=True)
class ProgramFinding(Evidence):
    """A failure of the user's own program, which a script builds by its factory."""

    program: str
    """`path/file.py:factory` or `package.module:factory`."""
    is_anew: bool = True
    """Whether a script imports the user's modules anew for each side, so that the sides share no globals."""


@dataclass(frozen=True, kw_only=True)
class Finding(Evidence):
    """A failure of one graph. The report is that of a check of exactly this graph with exactly these inputs."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    """In the order of the placeholders: tensors, numbers, text and None."""
    inputs_from: Mapping[int, str] = field(default_factory=dict)
    """Expressions of torch alone that give exactly the values of an input, by its place."""
    imports: tuple[str, ...] = ()
    """Modules whose import registers the operators that the graph calls."""
    keeps_names: bool = False
    """Whether the script's inputs and modules keep the names that they have in the graph, however long."""

    def __post_init__(self) -> None:
        """Raise UsageError unless the report's verdict is a failure and there is one input for each placeholder.

        Raise it too if a place in `inputs_from` is not that of an input.
        """
        super().__post_init__()
        count = sum(node.op == "placeholder" for node in self.graph.graph.nodes)
        if count != len(self.inputs):
            raise UsageError(f"the graph has {count} placeholders and {len(self.inputs)} inputs were given")
        for place in self.inputs_from:
            if not 0 <= place < len(self.inputs):
                raise UsageError(f"there is no input {place}: the graph has {len(self.inputs)}")


_STATE = re.compile(r"^(?:parameters|buffers|attributes)\['(?P<name>.+)'\](?P<grad>\.grad)?$")
_ARGUMENT = re.compile(r"^args\[\d+\](\.grad)?$")
_VOLATILE = re.compile(r"\b(?:cpp|triton)_fused_\w+|0x[0-9a-fA-F]+|[\w.+~-]*/[\w./+~-]*|-?\d[\d.]*(?:e[-+]?\d+)?")
_INEXACT = ("float", "bfloat", "complex")
_OF_VALUES = ("casts", "integers")
"""Clauses of the contract that are about values, so that a script compares values."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A leaf that diverged: its stage, its comparison, and the script's expression for it."""

    stage: str
    comparison: Comparison
    leaf: str
    """The expression in a script, given `outputs`, `args` and `call`."""

    @property
    def clause(self) -> str | None:
        """The first clause of the contract that is broken, not excused and not about values; None if there is none."""
        broken = (breach.clause for breach in self.comparison.contract if not breach.excused)
        return next((clause for clause in broken if clause not in _OF_VALUES), None)

    @property
    def is_exact(self) -> bool:
        """Whether the values are neither floats nor complex numbers, and so have no rounding.

        True also if the dtype is unknown.
        """
        return not (self.comparison.dtype or "").startswith(_INEXACT)

    @property
    def is_lifted(self) -> bool:
        """Whether the divergence shows in float64 only."""
        return self.comparison.details.get("question") == "semantic"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The largest difference of two elements that a script does not count as the bug, and why."""

    value: float
    reason: str


def graph_divergence(report: Report, outputs: Mapping[str, str], state: Mapping[str, str]) -> Divergence:
    """Return the worst diverged leaf of a graph that a script can reach, of the first stage that has such a leaf.

    `outputs` has the script's expression of each output leaf by its path in the report, `state` that of each parameter,
    buffer and attribute by its name; arguments need none. Raise ReproUnwritable as `divergence_of` does.
    """
    return divergence_of(report, lambda path: _expression(path, outputs, state))


def divergence_of(report: Report, reach: Callable[[str], str | None]) -> Divergence:
    """Return the worst diverged leaf that a script can reach, of the first stage that has such a leaf.

    `reach` returns the script's expression for the leaf at a path of the report, or None if it cannot be reached. Raise
    ReproUnwritable if no leaf diverged, or if a script can reach none of those that did.
    """
    unreachable = ""
    for stage in report.stages:
        diverged = [comparison for comparison in stage.comparisons if comparison.verdict is Verdict.DIVERGED]
        for comparison in sorted(diverged, key=lambda comparison: comparison.rank, reverse=True):
            leaf = reach(comparison.path)
            if leaf is not None:
                return Divergence(stage=stage.name, comparison=comparison, leaf=leaf)
            unreachable = unreachable or comparison.path
    if not unreachable:
        raise ReproUnwritable("the report says diverged but does not name a leaf that did", report=report)
    raise ReproUnwritable(
        f"only {unreachable} diverged, which a script cannot reach: check one call of the graph, "
        "and without optimizer steps",
        report=report,
    )


def bound_of(divergence: Divergence, error: float) -> Bound:
    """Return the largest difference that a script accepts in a leaf, and why; `error` is the largest that was seen.

    It is the geometric mean of the comparison's `allowed` and `error`, or half of `error` if `allowed` is None or not
    between 0 and `error`. If `error` is NaN or Inf, it is `allowed`, or 0 if that is None or not finite.
    """
    allowed = divergence.comparison.allowed
    if not math.isfinite(error):
        value = allowed if allowed is not None and math.isfinite(allowed) else 0.0
        return Bound(value=value, reason="what rounding explains; NaN or Inf out of place is beyond any bound")
    if allowed is not None and 0.0 < allowed < error:
        value = math.sqrt(allowed) * math.sqrt(error)
        return Bound(
            value=value, reason=f"between what rounding explains ({allowed:.1e}) and what was seen ({error:.1e})"
        )
    return Bound(value=error / 2.0, reason=f"half of what was seen ({error:.1e})")


def key_of(failure: Failure) -> str:
    """Return the longest piece of an exception's message without numbers, paths and addresses, cut to 80 letters.

    Names of fused kernels are left out too. Only the part that says what is wrong (`essence`) counts. The text is empty
    if nothing is left of it.
    """
    pieces = [piece.strip() for piece in _VOLATILE.split(essence(failure.message))]
    return max(pieces, key=len, default="")[:80].strip()


def _expression(path: str, outputs: Mapping[str, str], state: Mapping[str, str]) -> str | None:
    """Return the script's expression for a leaf at a path of the report, or None if a script cannot reach it.

    It is looked up in `outputs` by path, or in `state` by name, with `.grad` behind it for a gradient. Other outputs,
    and arguments (`args[0]`, `args[0].grad`), have their path as expression.
    """
    if path in outputs:
        return outputs[path]
    if path.startswith("outputs"):
        # a leaf that only one side has is a difference of structure
        return path
    if _ARGUMENT.match(path):
        return path
    match = _STATE.match(path)
    if match is None or match["name"] not in state:
        return None
    return f"{state[match['name']]}{match['grad'] or ''}"
