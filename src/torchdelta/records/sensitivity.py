"""Which layer loses most when it alone is quantized."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torchdelta.records.case import Case
from torchdelta.records.comparison import Measurement
from torchdelta.records.report import Environment

SCHEMA_VERSION = 1
"""Of a sensitivity's JSON, which is not that of a report."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What quantizing did to one tensor that the program returns."""

    path: str
    measurement: Measurement
    """The quantized program's tensor against the reference's."""

    @property
    def sqnr_db(self) -> float:
        """Signal to noise in dB, the reference being the signal; nothing is left of it where a NaN or Inf came in."""
        return -math.inf if self.measurement.misplaced else self.measurement.sqnr_db


@dataclass(frozen=True, kw_only=True)
class LayerEffect:
    """One module, quantized while everything else is left as it is."""

    module_path: str
    """Empty for the outermost: what the program computes in none of its modules."""
    ops: tuple[str, ...] = ()
    """Those of its operations that read what was quantized."""
    effects: tuple[Effect, ...] = ()
    reason: str = ""
    """Why it could not be quantized alone; empty where it could."""

    @property
    def sqnr_db(self) -> float | None:
        """That of the worst output; None where nothing was measured."""
        return worst_sqnr_db(self.effects)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Every module that a quantizer quantizes, one at a time."""

    case: Case
    environment: Environment
    modules: tuple[LayerEffect, ...]
    """The one that loses most first; those that could not be quantized alone last."""
    together: tuple[Effect, ...] = ()
    """All of them quantized at once."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION


def worst_sqnr_db(effects: Iterable[Effect]) -> float | None:
    """Return the lowest signal to noise; None where there is none."""
    return min((effect.sqnr_db for effect in effects), default=None)
