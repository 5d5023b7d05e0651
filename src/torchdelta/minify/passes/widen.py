"""Start from where the failure is said to be, and take in its surroundings until it shows."""

from __future__ import annotations

from dataclasses import replace

from torchdelta.minify.edit import kept_only
from torchdelta.minify.search import Proposals, Search
from torchdelta.minify.subject import Subject

RADII = (0, 1, 2, 4, 8)


def propose(search: Search) -> Proposals:
    """Propose each culprit with its producers and consumers, near ones first."""
    subject = search.subject
    names = {node.name for node in subject.nodes}
    for culprit in search.culprits:
        if culprit not in names:
            continue
        for radius in RADII:
            region = _around(subject, culprit, radius)
            if len(region) >= len(names):
                break
            # most failures are a single operation's own
            if (yield replace(kept_only(subject, region), guess=True if radius == 0 else None)):
                return


def _around(subject: Subject, culprit: str, radius: int) -> list[str]:
    by_name = {node.name: node for node in subject.nodes}
    region = {culprit}
    for _ in range(radius):
        nearby = (each for name in region for each in (*by_name[name].all_input_nodes, *by_name[name].users))
        region |= {node.name for node in nearby if node.name in by_name}
    return [name for name in by_name if name in region]
