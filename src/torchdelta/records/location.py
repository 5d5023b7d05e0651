"""The location of a difference: the nodes of both sides, matched, and each pair judged by itself.

A pair has two errors. Its local error is that of the candidate's node when it is fed the reference's values; only that
makes a culprit. Its inherited error is the difference of the two values as they were. Start reading at `Location`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchdelta.records.case import Case
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Cost, Coverage, Culprit, Environment
from torchdelta.records.verdict import Verdict

SCHEMA_VERSION = 2
"""The version of a location's JSON, which differs from that of a report."""


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """One node of a graph, or one module of a model, as another process can read it."""

    name: str
    """Unique in its program; a node of a nested graph is behind the name of that graph, as in `true_graph_0.add`."""
    op: str
    kinds: tuple[str, ...] = ()
    """Dtype and shape of each tensor that it returns, as in `float32[2, 3]`; empty if they are not known."""
    handles: tuple[int, ...] = ()
    module_path: str = ""
    source_line: str = ""
    inputs: tuple[str, ...] = ()
    """The names of the nodes that it reads, also of those that have no record because they compute nothing."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Nodes of both sides that should compute the same, and how they were matched."""

    reference: str
    candidate: str
    how: str
    """`given`, `handle`, `name`, `value` or `path`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One matched pair: its local comparisons, and those that include inherited error."""

    reference: NodeRecord
    candidate: NodeRecord
    how: str
    local: tuple[Comparison, ...] = ()
    """The candidate's node, fed the reference's values, against the reference's node."""
    local_gradients: tuple[Comparison, ...] = ()
    """The same for the gradients of the node's inputs, with the same cotangent on both sides."""
    inherited: tuple[Comparison, ...] = ()
    """The candidate's own value against the reference's."""
    reason: str = ""
    """Why it could not be judged; empty if it was."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of the ladder from eager to the candidate, compared with the eager program."""

    name: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Location:
    """The answer of `locate`: where the two sides begin to differ, with the evidence."""

    verdict: Verdict
    environment: Environment
    case: Case
    reason: str = ""
    """The reason of the check's worst comparison, or the exception that the candidate raised."""
    culprits: tuple[Culprit, ...] = ()
    """The first is the one that goes wrong first."""
    table: tuple[Row, ...] = ()
    """Every matched pair, in the order of the reference."""
    coverage: Coverage | None = None
    unmatched_reference: tuple[NodeRecord, ...] = ()
    unmatched_candidate: tuple[NodeRecord, ...] = ()
    rungs: tuple[Rung, ...] = ()
    compiles: int = 0
    notes: tuple[str, ...] = ()
    cost: Cost | None = None
    schema_version: int = SCHEMA_VERSION
