"""The ladder of a compiler: from eager to what its backend made, each rung held against the original eager program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchdelta.records.location import Rung
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.decompose import Decompose
from torchdelta.transforms.export import Export
from torchdelta.transforms.watched import WatchedAfterAot

BACKEND = "backend"
DECOMPOSED = "decomposed"
"""A compiler on its way: its graphs after AOTAutograd, with the decompositions that its backend asked for."""
DECOMPOSE = "decompose"
"""The transform of that name, which exports and decomposes by its own table, and has no other rung above."""

Ask = Callable[[Transform], tuple[Verdict, str]]
"""Holds a transform against the eager program."""


@dataclass(frozen=True)
class Step:
    """A transform that goes part of the way."""

    name: str
    transform: Transform


def steps_of(transform: Transform) -> Iterator[Step]:
    """Yield what a transform goes through, up to itself; nothing of one that is a single step."""
    if isinstance(transform, Compiler):
        yield Step("dynamo", transform.with_backend("eager"))
        yield Step("aot", WatchedAfterAot(transform, decompose=False, compile_graphs=False))
        yield Step(DECOMPOSED, WatchedAfterAot(transform, compile_graphs=False))
        yield Step(BACKEND, transform)
    elif isinstance(transform, Decompose):
        yield Step("export", Export({"strict": transform.strict}))
        yield Step(DECOMPOSE, transform)


def climb(transform: Transform, known: tuple[Verdict, str], ask: Ask) -> tuple[Rung, ...]:
    """Ask rung by rung until one is as bad as the transform itself, whose own verdict is known."""
    rungs = []
    for step in steps_of(transform):
        verdict, reason = known if step.transform is transform else ask(step.transform)
        if isinstance(step.transform, WatchedAfterAot) and not step.transform.seen.programs:
            continue  # the backend is not built on AOTAutograd, and was not stopped on its way
        rungs.append(Rung(name=step.name, verdict=verdict, reason=reason))
        if verdict in (Verdict.DIVERGED, Verdict.CRASHED, Verdict.TIMED_OUT):
            break
    return tuple(rungs)
