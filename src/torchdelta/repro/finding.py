"""What a script has to show: a graph, its inputs, how it was transformed, and what came of that.

Which piece of a report a script shows: a failure, a broken clause, or the values that are furthest off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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
class Finding:
    """A failure of one graph; the report is that of a check of exactly this graph on exactly these inputs."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    """In the order of the placeholders: tensors, numbers, text and None."""
    case: Case
    report: Report
    deadline_s: float = 60.0
    """How long a candidate that hangs or dies is waited for."""
    memory_bytes: int = 4 * 2**30
    """How much more memory than it starts with a candidate may take that ran out of it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the compiler that were not as torch ships them, by their full names."""
    inputs_from: Mapping[int, str] = field(default_factory=dict)
    """Expressions of torch alone that give the very values of an input, by its place."""
    tries: int = 1
    """How often a script tries: what fails now and then need not fail at once."""
    imports: tuple[str, ...] = ()
    """Modules whose import registers the operators that the graph calls."""

    def __post_init__(self) -> None:
        wanted = sum(node.op == "placeholder" for node in self.graph.graph.nodes)
        if wanted != len(self.inputs):
            raise UsageError(f"the graph has {wanted} placeholders and {len(self.inputs)} inputs were given")
        if not self.report.verdict.is_failure:
            raise UsageError(f"the report says {self.report.verdict.value}: there is nothing to reproduce")
        for place in self.inputs_from:
            if not 0 <= place < len(self.inputs):
                raise UsageError(f"there is no input {place}: the graph has {len(self.inputs)}")


_STATE = re.compile(r"^(?:parameters|buffers|attributes)\['(?P<name>.+)'\](?P<grad>\.grad)?$")
_ARGUMENT = re.compile(r"^args\[\d+\](\.grad)?$")
_VOLATILE = re.compile(r"\b(?:cpp|triton)_fused_\w+|0x[0-9a-fA-F]+|[\w.+~-]*/[\w./+~-]*|-?\d[\d.]*(?:e[-+]?\d+)?")
_INEXACT = ("float", "bfloat", "complex")
_OF_VALUES = ("casts", "integers")
"""Clauses that are about values after all."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """One leaf that is not what it should be."""

    stage: str
    comparison: Comparison
    leaf: str
    """How a script reaches it, given `outputs`, `args` and `call`."""

    @property
    def clause(self) -> str | None:
        """The clause of the contract that is broken; None where the values differ."""
        broken = (breach.clause for breach in self.comparison.contract if not breach.excused)
        return next((clause for clause in broken if clause not in _OF_VALUES), None)

    @property
    def is_exact(self) -> bool:
        """Whether the values have no rounding."""
        return not (self.comparison.dtype or "").startswith(_INEXACT)

    @property
    def is_lifted(self) -> bool:
        """Whether it shows in float64 only."""
        return self.comparison.details.get("question") == "semantic"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The largest difference of two elements that is not taken for the bug, and where it comes from."""

    value: float
    reason: str


def divergence_of(report: Report, outputs: Mapping[str, str], state: Mapping[str, str]) -> Divergence:
    """Return the worst leaf of the first stage that diverged.

    `outputs` has the expression of each leaf of the outputs by its path in the report, `state` that of each parameter.
    """
    unreachable = ""
    for stage in report.stages:
        found = [seen for seen in stage.comparisons if seen.verdict is Verdict.DIVERGED]
        for seen in sorted(found, key=lambda seen: seen.rank, reverse=True):
            leaf = _expression(seen.path, outputs, state)
            if leaf is not None:
                return Divergence(stage=stage.name, comparison=seen, leaf=leaf)
            unreachable = unreachable or seen.path
    if not unreachable:
        raise ReproUnwritable("the report says diverged and names no leaf that did", report=report)
    raise ReproUnwritable(
        f"only {unreachable} diverged, which a script does not get at: check one call of the graph, "
        "and without optimizer steps",
        report=report,
    )


def bound_of(divergence: Divergence, error: float) -> Bound:
    """Return the bound for elements, the largest of which was this far off."""
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
    """Return the piece of an exception's message that tells it from others, as it stands there."""
    pieces = [piece.strip() for piece in _VOLATILE.split(essence(failure.message))]
    return max(pieces, key=len, default="")[:80].strip()


def _expression(path: str, outputs: Mapping[str, str], state: Mapping[str, str]) -> str | None:
    if path in outputs:
        return outputs[path]
    if path.startswith("outputs"):
        # a leaf that one side alone has is a matter of the structure around it
        return path
    if _ARGUMENT.match(path):
        return path
    found = _STATE.match(path)
    if found is None or found["name"] not in state:
        return None
    return f"{state[found['name']]}{found['grad'] or ''}"
