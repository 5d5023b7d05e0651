"""The ladder of a compiler, and causes by setting.

A rung is the compiler stopped on its way: after dynamo, after AOTAutograd, after decompositions, or not at all. `climb`
compares each rung with the original eager program, and the first that fails names the part of the compiler. A cause is
a freedom that inductor takes, such as eliding a cast. `find_cause` takes one after the other away by a setting, until
the difference vanishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchdelta._torch.compile.aot import SaveEverything
from torchdelta.records.location import Rung
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.base import Transform
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.decompose import Decompose
from torchdelta.transforms.export import Export
from torchdelta.transforms.wrappers import ObservedAfterAot

CAPTURED = "dynamo"
"""The graphs that dynamo captures, run eagerly."""
BACKEND = "backend"
AFTER_AOT = "aot"
"""The graphs that AOTAutograd makes, not yet decomposed, run eagerly."""
DECOMPOSED = "decomposed"
"""The graphs after AOTAutograd, with the decompositions that the backend asks for, run eagerly."""
DECOMPOSE = "decompose"
"""The transform of that name, which exports and decomposes by its own table; the rung before it is `export`."""


@dataclass(frozen=True)
class LadderStep:
    """A rung: a transform that goes part of the way."""

    name: str
    transform: Transform


Ask = Callable[[LadderStep], tuple[Verdict, str]]
"""Compares a rung with the eager program, and returns verdict and reason."""


def steps_of(transform: Transform) -> Iterator[LadderStep]:
    """Yield the rungs of a transform, from the shortest part of the way to the transform itself, which is the last.

    A compiler has four: `dynamo`, `aot`, `decomposed` and `backend`. The transform `decompose` has two: `export` and
    `decompose`. For every other transform nothing is yielded.
    """
    if isinstance(transform, Compiler):
        yield LadderStep(CAPTURED, transform.with_backend("eager"))
        yield LadderStep(AFTER_AOT, ObservedAfterAot(transform, decompose=False, compile_graphs=False))
        yield LadderStep(DECOMPOSED, ObservedAfterAot(transform, compile_graphs=False))
        yield LadderStep(BACKEND, transform)
    elif isinstance(transform, Decompose):
        yield LadderStep("export", Export({"strict": transform.strict}))
        yield LadderStep(DECOMPOSE, transform)


def climb(transform: Transform, known: tuple[Verdict, str], ask: Ask) -> tuple[Rung, ...]:
    """Return the rungs of a transform in order, up to the first that fails, which is included; all if none fails.

    A rung fails if its verdict is DIVERGED, CRASHED or TIMED_OUT. `known` is the verdict and reason of the transform
    itself, the last rung; `ask` runs every rung before it. The rungs `aot` and `decomposed` are left out if no graph
    gets there, because the backend is not built on AOTAutograd. There are none if `steps_of` has none.
    """
    rungs = []
    has_aot = True
    for step in steps_of(transform):
        is_behind_aot = isinstance(step.transform, ObservedAfterAot)
        if is_behind_aot and not has_aot:
            continue
        verdict, reason = known if step.transform is transform else ask(step)
        if isinstance(step.transform, ObservedAfterAot) and not step.transform.interception.programs:
            # the backend is not built on AOTAutograd: nothing stopped it on its way, so this was the whole transform
            has_aot = False
            continue
        rungs.append(Rung(name=step.name, verdict=verdict, reason=reason))
        if verdict in (Verdict.DIVERGED, Verdict.CRASHED, Verdict.TIMED_OUT):
            break
    return tuple(rungs)


@dataclass(frozen=True)
class Cause:
    """A freedom that inductor takes, in words, and the setting that takes it away."""

    what: str
    setting: str
    value: Any

    def __str__(self) -> str:
        """Return the cause in words, with its setting; a value other than a bool, a whole number or a text is `…`."""
        written = self.value if isinstance(self.value, (bool, int, str)) else "…"
        return f"{self.what}: it vanishes with {self.setting}={written}"


# narrow explanations before broad ones: without fusion, nearly all generated code changes
CAUSES = (
    Cause("narrowing casts are elided", "emulate_precision_casts", True),
    Cause("random numbers are drawn in another order", "fallback_random", True),
    Cause("another memory layout is chosen", "layout_optimization", False),
    Cause("values are recomputed in the backward", "custom_partitioner_fn", SaveEverything()),
    Cause("a pattern is replaced", "pattern_matcher", False),
    Cause("code is vectorised", "cpp.simdlen", 1),
    Cause("operations are fused", "max_fusion_size", 1),
)


def find_cause(transform: Transform, ask: Callable[[Transform], tuple[Verdict, str]]) -> tuple[Cause | None, int]:
    """Return the first of `CAUSES` whose setting makes the verdict EQUIVALENT, and its number in that list, from 1.

    Each is tried alone: `ask` checks the transform with that one setting changed, and returns verdict and reason.
    Return None and the length of the list if no setting does it, or None and 0 if the transform is not inductor. A
    cause whose setting the transform has already is not tried, but counts in that number.
    """
    if not isinstance(transform, Compiler) or not transform.is_inductor:
        return None, 0
    for tried, cause in enumerate(CAUSES, start=1):
        if transform.config.get(cause.setting) == cause.value:
            continue
        if ask(transform.with_config({cause.setting: cause.value}))[0] is Verdict.EQUIVALENT:
            return cause, tried
    return None, len(CAUSES)
