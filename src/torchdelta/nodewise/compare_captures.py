"""Compare two captures: match their nodes, and judge the values of each match in every batch.

Each side computed from its own values, so the error of a node may be its own or inherited; captures cannot tell which.
The first node that diverged, in the order of the reference, is the place to look at.

    location = compare_captures(read_capture("before"), read_capture("after"))

Start reading at `compare_captures`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from torchdelta._torch.process import versions
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves
from torchdelta.compare.policy_parser import parse
from torchdelta.compare.statistics import Statistics, compare_statistics, statistics_of
from torchdelta.nodewise.matching import Alignment, align
from torchdelta.records.case import VALUES, Case
from torchdelta.records.comparison import Comparison
from torchdelta.records.location import Location, NodeRecord, Row
from torchdelta.records.report import Coverage
from torchdelta.records.verdict import Verdict, worst_of
from torchdelta.storage.captures import Capture

_NO_TRUTH = "captures have no truth: judged by torch.testing's tolerances"
_NOTHING_MATCHED = "no node of one side was found on the other; their outputs are {verdict}"
_NO_VALUE = "neither side logged a value: it did not run, or the inside of its operator was not logged"
_ONLY_STATISTICS = (
    "of some values only statistics were kept: those show identical values and gaps that are too large, and nothing "
    "in between"
)


def compare_captures(
    reference: Capture,
    candidate: Capture,
    *,
    given: Mapping[str, str] | None = None,
    policy: str | None = None,
    ignore: Iterable[str] = (),
) -> Location:
    """Match the nodes of two captures, compare their values, and return a location with one row for each match.

    A row has each leaf in the batch where it is worst; one more row has the outputs. There are no culprits, but a note
    names the first node that diverged. The verdict is that of the worst row; but CRASHED if only the candidate's
    capture failed, INCONCLUSIVE if no nodes match, and never EQUIVALENT if the reference's failed or the numbers of
    batches differ. `given` maps names of the reference's nodes to the candidate's, and `ignore` has clauses of the
    contract. Without a `policy` torch.testing's tolerances hold. Raise UsageError for arguments that cannot be used.
    """
    chosen = policy if policy is not None else "close"
    ignored = tuple(ignore)
    case = Case(program="two captures", transform="none", stages=(VALUES,), policy=chosen, ignore=ignored)
    sides = _CapturePair(reference, candidate, Judge(policy=parse(chosen), terms=Terms(ignore=frozenset(ignored))))
    alignment = _match_nodes(reference, candidate, given)
    nodes = {node.name: node for node in reference.nodes}
    others = {node.name: node for node in candidate.nodes}
    table = [
        sides.compare_nodes(nodes[match.reference], others[match.candidate], match.how) for match in alignment.matches
    ]
    first = next((row for row in table if _verdict(row) is Verdict.DIVERGED), None)
    notes = [*_notes(reference, candidate)]
    if policy is None:
        notes.append(_NO_TRUTH)
    if sides.had_statistics:
        notes.append(_ONLY_STATISTICS)
    if first is not None:
        notes.append(
            f"{first.reference.name} is the first node that diverged; captures cannot tell if it inherited its error"
        )
    table.append(sides.compare_outputs())
    if not alignment.matches:
        notes.append(_NOTHING_MATCHED.format(verdict=_verdict(table[-1]).value))
    return Location(
        verdict=_decide(table, alignment, reference, candidate),
        environment=versions.environment(),
        case=case,
        table=tuple(table),
        coverage=_drop_unlogged(alignment.coverage, table[:-1]),
        unmatched_reference=alignment.unmatched_reference,
        unmatched_candidate=alignment.unmatched_candidate,
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass
class _CapturePair:
    """Two captures and the judge of their values."""

    reference: Capture
    candidate: Capture
    judge: Judge
    had_statistics: bool = False
    """Whether any value so far was known by its statistics only."""

    def compare_nodes(self, node: NodeRecord, other: NodeRecord, how: str) -> Row:
        """Return the row of two matched nodes, with the comparisons of their values as `inherited`.

        If there are none, the row has a reason. `how` says how the nodes were matched.
        """
        inherited = self._compare_batches(
            lambda batch: self.reference.leaves(batch, node.name),
            lambda batch: self.candidate.leaves(batch, other.name),
        )
        reason = "" if inherited else _NO_VALUE
        return Row(reference=node, candidate=other, how=how, inherited=inherited, reason=reason)

    def compare_outputs(self) -> Row:
        """Return the row of the outputs, with their comparisons as `inherited`, or with a reason if there are none."""
        inherited = self._compare_batches(self.reference.outputs, self.candidate.outputs)
        node = NodeRecord(name="output", op="output")
        reason = "" if inherited else "neither side has outputs"
        return Row(reference=node, candidate=node, how="name", inherited=inherited, reason=reason)

    def _compare_batches(
        self, reference_leaves: Callable[[int], Leaves], candidate_leaves: Callable[[int], Leaves]
    ) -> tuple[Comparison, ...]:
        """Return one comparison for each path, of the first batch where it is worst; its details have that number.

        Both functions take the number of a batch and return its leaves by path. Batches that only one side has are left
        out.
        """
        worst: dict[str, Comparison] = {}
        # a batch that only one side has is in the notes, and the verdict cannot be equivalent then
        for batch in range(min(len(self.reference.batches), len(self.candidate.batches))):
            for comparison in self._compare_leaves(reference_leaves(batch), candidate_leaves(batch)):
                path = comparison.path
                if path not in worst or comparison.rank > worst[path].rank:
                    worst[path] = replace(comparison, details={**comparison.details, "batch": batch})
        return tuple(worst.values())

    def _compare_leaves(self, reference: Leaves, candidate: Leaves) -> list[Comparison]:
        """Return the comparisons of the leaves; a tensor that a side has as statistics only is compared by statistics.

        All other leaves are compared by `Judge.compare`: also one that is a tensor's statistics on one side and no
        tensor on the other. If there are comparisons by statistics, `had_statistics` is set. A leaf that only one side
        has is DIVERGED.
        """
        statistics_paths = [
            path
            for path in reference
            if path in candidate
            and (isinstance(reference[path], Statistics) or isinstance(candidate[path], Statistics))
            and all(isinstance(side[path], (Statistics, torch.Tensor)) for side in (reference, candidate))
        ]
        self.had_statistics |= bool(statistics_paths)
        comparisons, _ = self.judge.compare(
            _without(reference, statistics_paths), _without(candidate, statistics_paths)
        )
        return comparisons + [
            compare_statistics(
                path, _reduce(reference[path]), _reduce(candidate[path]), self.judge.policy, self.judge.terms
            )
            for path in statistics_paths
        ]


def _drop_unlogged(coverage: Coverage, rows: Sequence[Row]) -> Coverage:
    """Return the coverage in which nodes that have rows, but none with a comparison, do not count as matched.

    The total stays. Nodes without a row, which a group covers, still count.
    """
    how = Counter(coverage.how)
    for side in (attrgetter("reference.name"), attrgetter("candidate.name")):
        logged = {side(row) for row in rows if row.inherited}
        how.subtract({side(row): row.how for row in rows if side(row) not in logged}.values())
    return Coverage(matched=how.total(), total=coverage.total, how={way: count for way, count in how.items() if count})


def _match_nodes(reference: Capture, candidate: Capture, given: Mapping[str, str] | None) -> Alignment:
    """Return the alignment of two captures' nodes: by mapping, handle, name and order first, and by value for the rest.

    `given` is the user's mapping; raise UsageError if it names an unknown node, or a node twice. Values are compared
    only if both sides have nodes without a match.
    """
    first = align(reference.nodes, candidate.nodes, mapping=given)
    if not (first.unmatched_reference and first.unmatched_candidate):
        return first
    # reading every value of two captures is slow, so only the values of nodes without a match are read
    fingerprints = (
        _fingerprints(reference, first.unmatched_reference),
        _fingerprints(candidate, first.unmatched_candidate),
    )
    return align(reference.nodes, candidate.nodes, mapping=given, values=fingerprints)


def _fingerprints(capture: Capture, nodes: Sequence[NodeRecord]) -> dict[str, Hashable]:
    """Return the checksums of each node's tensors in all batches, by the node's name.

    A fingerprint is a tuple of (batch, path, checksum) triples. Nodes without tensors are left out.
    """
    fingerprints: dict[str, Hashable] = {}
    for node in nodes:
        batches = [capture.leaves(batch, node.name) for batch in range(len(capture.batches))]
        checksums = [
            (batch, path, _reduce(leaf).checksum)
            for batch, leaves in enumerate(batches)
            for path, leaf in leaves.items()
            if isinstance(leaf, (torch.Tensor, Statistics))
        ]
        if checksums:
            fingerprints[node.name] = tuple(checksums)
    return fingerprints


def _reduce(leaf: Statistics | torch.Tensor) -> Statistics:
    """Return the statistics of a tensor; statistics are returned as they are."""
    return leaf if isinstance(leaf, Statistics) else statistics_of(leaf)


def _without(leaves: Leaves, paths: Sequence[str]) -> Leaves:
    return {path: leaf for path, leaf in leaves.items() if path not in paths}


def _verdict(row: Row) -> Verdict:
    """Return the worst verdict among the `inherited` comparisons of a row; INCONCLUSIVE if it has none."""
    return worst_of(comparison.verdict for comparison in row.inherited)


def _notes(reference: Capture, candidate: Capture) -> Iterator[str]:
    """Yield the notes of both captures, each with its side, and notes on different batch counts and environments."""
    if len(reference.batches) != len(candidate.batches):
        yield (
            f"{len(reference.batches)} batches in the reference and {len(candidate.batches)} in the candidate: those "
            "that only one side has were not compared"
        )
    for side, capture in (("reference", reference), ("candidate", candidate)):
        yield from (f"{side}: {note}" for note in capture.notes)
    if reference.environment != candidate.environment:
        yield f"captured on {reference.environment} and on {candidate.environment}"


def _decide(table: Sequence[Row], alignment: Alignment, reference: Capture, candidate: Capture) -> Verdict:
    """Return the worst verdict of the rows with comparisons, or that of captures that cannot be compared as a whole.

    CRASHED if only the candidate has a failure. Otherwise INCONCLUSIVE if no nodes match, or if no row has a
    comparison, and INCONCLUSIVE or worse if the reference has a failure or the numbers of batches differ.
    """
    if candidate.failure and not reference.failure:
        return Verdict.CRASHED
    if not alignment.matches:
        return Verdict.INCONCLUSIVE  # programs without a common node may not have been meant to be compared
    verdicts = [_verdict(row) for row in table if row.inherited]
    if len(reference.batches) != len(candidate.batches) or reference.failure:
        verdicts.append(Verdict.INCONCLUSIVE)
    return worst_of(verdicts)
