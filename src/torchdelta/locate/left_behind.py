"""What a run leaves in its inputs and attributes: the last write to each is part of what its writer does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch.fx import GraphModule, Node

from torchdelta._torch.nodes import returns_what_it_writes
from torchdelta.locate.judged import Judged, inherited_from
from torchdelta.locate.local import LocalJudge
from torchdelta.locate.regions import Region, copied
from torchdelta.locate.running import Running
from torchdelta.locate.trial import is_wrong


@dataclass(kw_only=True)
class LeftBehind:
    """Holds what both sides leave behind against each other, once both have run."""

    reference: GraphModule
    partners: Mapping[Node, Node]
    judge: LocalJudge
    notes: list[str]
    _local: dict[Node, Any] = field(default_factory=dict)
    """What the candidate leaves where its last writer was fed the reference's values."""
    _read: dict[Node, dict[Node, Any]] = field(default_factory=dict)
    """What a writer of the reference read whose partner leaves the writing to somebody else."""

    def note(self, writer: Node, after: Mapping[Node, Any], theirs: Running) -> None:
        """Remember what a writer of the candidate left, fed the reference's values."""
        for given in (given for given, last in theirs.last_writer.items() if last is writer):
            self._local.pop(given, None)
            for source, value in after.items():
                if _start_of(source) is given:
                    self._local[given] = value

    def hold(self, writer: Node, ours: Running) -> None:
        """Keep what a writer of the reference read until the candidate has written, too."""
        if writer in ours.last_writer.values():
            self._read[writer] = copied(ours.before_write[writer])

    def judged(self, ours: Running, theirs: Running, culprits: Collection[Node]) -> Iterator[Judged]:
        """Judge every input and attribute that one side wrote to; whoever is a culprit already explains his own."""
        places = {self.partners[node]: node for node in (theirs.state or {}) if node in self.partners}
        written = dict.fromkeys(
            (*ours.last_writer, *(place for place, node in places.items() if node in theirs.initial))
        )
        for given in written:
            ours_last, theirs_last = ours.last_writer.get(given), theirs.last_writer.get(places.get(given, given))
            partner = self.partners.get(theirs_last) if theirs_last is not None else None
            if (partner is not None and partner is ours_last) or ours_last in culprits or partner in culprits:
                continue  # what they write was judged where they did
            yield from self._judged_one(given, places.get(given), ours, theirs)

    def _judged_one(self, given: Node, place: Node | None, ours: Running, theirs: Running) -> Iterator[Judged]:
        writer = ours.last_writer.get(given)
        other = theirs.last_writer.get(place) if place is not None else None
        if place is not None and other is not None:
            reference = (ours.state or {}).get(given, theirs.initial[place])
            own, local = (theirs.state or {})[place], self._local.get(place)
        else:
            reference = (ours.state or {})[given]
            own = local = ours.initial[given]
        inherited = inherited_from(given.name, reference, own)
        if not is_wrong(inherited):
            return
        if local is None:
            self.notes.append(f"{given.name} is left different, and whether {other} is wrong by itself is not known")
            return
        again, values = itemgetter(given), {given: reference}
        if writer is not None and (read := self._read.get(writer) or ours.before_write.get(writer)) and given in read:
            region = Region(self.reference, (writer,), tuple(read))
            again, values = (lambda values: region.run_writing(values)[1][given]), read  # type: ignore[assignment]
        path = f"{writer.name if writer else other} → {given.name}"
        found = self.judge.judge(path, reference, local, again, values)
        blamed = writer or self.partners.get(other, given) if other is not None else writer
        assert blamed is not None
        yield Judged(
            reference=blamed,
            candidate=other or place or blamed,
            how="name",
            local=found,
            inherited=inherited,
            culprit=blamed if is_wrong(found) else None,
        )


def _start_of(node: Node) -> Node:
    """Return whose memory it is that a node passes on after it wrote to it."""
    while returns_what_it_writes(node):
        assert isinstance(node.args[0], Node)
        node = node.args[0]
    return node
