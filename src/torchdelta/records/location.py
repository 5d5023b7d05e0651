"""Where a difference comes from: nodes of both sides, matched, each judged by itself."""

from __future__ import annotations

from dataclasses import dataclass

from torchdelta.records.case import Case
from torchdelta.records.comparison import Comparison
from torchdelta.records.report import Cost, Coverage, Culprit, Environment
from torchdelta.records.verdict import Verdict

SCHEMA_VERSION = 1
"""Of a location's JSON, which is not that of a report."""


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """One node of a graph, or one module of a model, as another process can read it."""

    name: str
    """Unique in its program; a node of a nested graph is behind the name of that graph, as in `true_graph_0.add`."""
    op: str
    kinds: tuple[str, ...] = ()
    """What each tensor that it returns is, as in `float32[2, 3]`; empty where nobody said."""
    handles: tuple[int, ...] = ()
    module_path: str = ""
    source_line: str = ""
    inputs: tuple[str, ...] = ()
    """The names of the nodes that it reads, those included that compute nothing and have no record."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Nodes of both sides that should compute the same, and how that was found."""

    reference: str
    candidate: str
    how: str
    """`given`, `handle`, `name`, `value` or `path`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One matched pair: what it does wrong by itself, and what it was given wrong already."""

    reference: NodeRecord
    candidate: NodeRecord
    how: str
    local: tuple[Comparison, ...] = ()
    """The candidate's node, fed the reference's values, against the reference's node."""
    local_gradients: tuple[Comparison, ...] = ()
    """The same for the gradients of what the node reads, given the same cotangent."""
    inherited: tuple[Comparison, ...] = ()
    """The candidate's own value against the reference's."""
    reason: str = ""
    """Why it could not be judged, where it could not."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of the ladder from eager to the candidate, held against the eager program."""

    name: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Location:
    """What was found out about where the two sides part."""

    verdict: Verdict
    environment: Environment
    case: Case
    reason: str = ""
    """The worst that the check saw, or what the candidate raised."""
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
