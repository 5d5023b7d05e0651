"""Hold two captures against each other: nodes are matched, and each batch of a match is judged.

Both sides computed from what they had themselves, so an error here is inherited, or made at that node: which of the
two a capture cannot tell. The first node that diverged, in the order of the reference, is the place to look at.
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
from torchdelta.nodewise.capture import Capture
from torchdelta.nodewise.matching import Alignment, align
from torchdelta.records.case import VALUES, Case
from torchdelta.records.comparison import Comparison
from torchdelta.records.location import Location, NodeRecord, Row
from torchdelta.records.report import Coverage
from torchdelta.records.verdict import Verdict, worst_of

_NO_TRUTH = "captures have no truth to be held against: judged by torch.testing's tolerances"
_NOTHING_MATCHED = "no node of one side was found on the other; what both return is {verdict}"
_LITTLE = (
    "of some values only statistics were kept: those tell identical values and gaps that are too large, and nothing "
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
    """Match the nodes of two captures and compare what they logged; each row has the worst of all batches.

    `given` maps names of the reference's nodes to the candidate's. Without a `policy` torch.testing's tolerances hold,
    and the notes say so. The last row is that of the outputs.
    """
    chosen = policy if policy is not None else "close"
    ignored = tuple(ignore)
    case = Case(program="two captures", transform="none", stages=(VALUES,), policy=chosen, ignore=ignored)
    both = _Both(reference, candidate, Judge(policy=parse(chosen), terms=Terms(ignore=frozenset(ignored))))
    alignment = _aligned(reference, candidate, given)
    nodes = {node.name: node for node in reference.nodes}
    others = {node.name: node for node in candidate.nodes}
    table = [both.row(nodes[match.reference], others[match.candidate], match.how) for match in alignment.matches]
    first = next((row for row in table if _verdict(row) is Verdict.DIVERGED), None)
    notes = [*_notes(reference, candidate)]
    if policy is None:
        notes.append(_NO_TRUTH)
    if both.had_statistics:
        notes.append(_LITTLE)
    if first is not None:
        notes.append(
            f"{first.reference.name} is the first node that diverged; whether it inherited that, captures cannot tell"
        )
    table.append(both.outputs())
    if not alignment.matches:
        notes.append(_NOTHING_MATCHED.format(verdict=_verdict(table[-1]).value))
    return Location(
        verdict=_overall(table, alignment, reference, candidate),
        environment=versions.environment(),
        case=case,
        table=tuple(table),
        coverage=_covered(alignment.coverage, table[:-1]),
        unmatched_reference=alignment.unmatched_reference,
        unmatched_candidate=alignment.unmatched_candidate,
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass
class _Both:
    reference: Capture
    candidate: Capture
    judge: Judge
    had_statistics: bool = False

    def row(self, node: NodeRecord, other: NodeRecord, how: str) -> Row:
        inherited = self._worst(
            lambda batch: self.reference.leaves(batch, node.name),
            lambda batch: self.candidate.leaves(batch, other.name),
        )
        reason = "" if inherited else "neither side logged a value: it did not run, or is inside of what was not logged"
        return Row(reference=node, candidate=other, how=how, inherited=inherited, reason=reason)

    def outputs(self) -> Row:
        inherited = self._worst(self.reference.outputs, self.candidate.outputs)
        node = NodeRecord(name="output", op="output")
        reason = "" if inherited else "neither side has outputs"
        return Row(reference=node, candidate=node, how="name", inherited=inherited, reason=reason)

    def _worst(
        self, of_reference: Callable[[int], Leaves], of_candidate: Callable[[int], Leaves]
    ) -> tuple[Comparison, ...]:
        """Return the comparison of each path in the batch where it is worst, which its details name."""
        found: dict[str, Comparison] = {}
        # batches that only one side has are on the notes, and keep the verdict from being equivalent
        for batch in range(min(len(self.reference.batches), len(self.candidate.batches))):
            for seen in self._compare(of_reference(batch), of_candidate(batch)):
                if seen.path not in found or seen.rank > found[seen.path].rank:
                    found[seen.path] = replace(seen, details={**seen.details, "batch": batch})
        return tuple(found.values())

    def _compare(self, reference: Leaves, candidate: Leaves) -> list[Comparison]:
        reduced = [
            path
            for path in reference
            if path in candidate
            and (isinstance(reference[path], Statistics) or isinstance(candidate[path], Statistics))
            and all(isinstance(side[path], (Statistics, torch.Tensor)) for side in (reference, candidate))
        ]
        self.had_statistics |= bool(reduced)
        comparisons, _ = self.judge.compare(_without(reference, reduced), _without(candidate, reduced))
        return comparisons + [
            compare_statistics(
                path, _reduced(reference[path]), _reduced(candidate[path]), self.judge.policy, self.judge.terms
            )
            for path in reduced
        ]


def _covered(coverage: Coverage, rows: Sequence[Row]) -> Coverage:
    """Return the coverage without what was matched and has no value: the branch that was not taken."""
    how = Counter(coverage.how)
    for side in (attrgetter("reference.name"), attrgetter("candidate.name")):
        seen = {side(row) for row in rows if row.inherited}
        how.subtract({side(row): row.how for row in rows if side(row) not in seen}.values())
    return Coverage(matched=how.total(), total=coverage.total, how={way: count for way, count in how.items() if count})


def _aligned(reference: Capture, candidate: Capture, given: Mapping[str, str] | None) -> Alignment:
    first = align(reference.nodes, candidate.nodes, mapping=given)
    if not (first.unmatched_reference and first.unmatched_candidate):
        return first
    # reading every value of two captures is dear: only those are asked for that may decide something
    prints = (
        _fingerprints(reference, first.unmatched_reference),
        _fingerprints(candidate, first.unmatched_candidate),
    )
    return align(reference.nodes, candidate.nodes, mapping=given, values=prints)


def _fingerprints(capture: Capture, nodes: Sequence[NodeRecord]) -> dict[str, Hashable]:
    found: dict[str, Hashable] = {}
    for node in nodes:
        logged = [capture.leaves(batch, node.name) for batch in range(len(capture.batches))]
        tensors = [
            (batch, path, _reduced(leaf).checksum)
            for batch, leaves in enumerate(logged)
            for path, leaf in leaves.items()
            if isinstance(leaf, (torch.Tensor, Statistics))
        ]
        if tensors:
            found[node.name] = tuple(tensors)
    return found


def _reduced(leaf: Statistics | torch.Tensor) -> Statistics:
    return leaf if isinstance(leaf, Statistics) else statistics_of(leaf)


def _without(leaves: Leaves, paths: Sequence[str]) -> Leaves:
    return {path: leaf for path, leaf in leaves.items() if path not in paths}


def _verdict(row: Row) -> Verdict:
    return worst_of(seen.verdict for seen in row.inherited)


def _notes(reference: Capture, candidate: Capture) -> Iterator[str]:
    if len(reference.batches) != len(candidate.batches):
        yield (
            f"{len(reference.batches)} batches in the reference and {len(candidate.batches)} in the candidate: those "
            "that only one side has were not compared"
        )
    for side, capture in (("reference", reference), ("candidate", candidate)):
        yield from (f"{side}: {note}" for note in capture.notes)
    if reference.environment != candidate.environment:
        yield f"captured on {reference.environment} and on {candidate.environment}"


def _overall(table: Sequence[Row], alignment: Alignment, reference: Capture, candidate: Capture) -> Verdict:
    if candidate.failure and not reference.failure:
        return Verdict.CRASHED
    if not alignment.matches:
        return Verdict.INCONCLUSIVE  # programs that have nothing in common may not have been meant to
    verdicts = [_verdict(row) for row in table if row.inherited]
    if len(reference.batches) != len(candidate.batches) or reference.failure:
        verdicts.append(Verdict.INCONCLUSIVE)
    return worst_of(verdicts)
