"""The sensitivity of a model's layers: how much the outputs lose when one layer alone is quantized.

Start reading at `Sensitivity`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torchdelta.records.case import Case
from torchdelta.records.comparison import Measurement
from torchdelta.records.report import Environment

SCHEMA_VERSION = 1
"""The version of a sensitivity's JSON, which differs from that of a report."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of quantizing on one tensor that the program returns."""

    path: str
    measurement: Measurement
    """The quantized program's tensor against the reference's."""

    @property
    def sqnr_db(self) -> float:
        """Signal to noise in dB, the reference being the signal.

        Minus infinity if a NaN or an infinity of one side is not on the other.
        """
        return -math.inf if self.measurement.misplaced else self.measurement.sqnr_db


@dataclass(frozen=True, kw_only=True)
class LayerEffect:
    """One module that is quantized while the others are not."""

    module_path: str
    """Empty for the outermost module: operations that are in none of its submodules."""
    ops: tuple[str, ...] = ()
    """The operations of the module that read quantized values."""
    effects: tuple[Effect, ...] = ()
    reason: str = ""
    """Why it could not be quantized alone; empty if it could."""

    @property
    def sqnr_db(self) -> float | None:
        """Signal to noise of the worst output; None if nothing was measured."""
        return worst_sqnr_db(self.effects)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The answer of `locate --sensitivity`: every module that a quantizer quantizes, one at a time."""

    case: Case
    environment: Environment
    modules: tuple[LayerEffect, ...]
    """The module that loses most comes first; those that could not be quantized alone come last."""
    together: tuple[Effect, ...] = ()
    """All of them quantized at once."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION


def worst_sqnr_db(effects: Iterable[Effect]) -> float | None:
    """Return the lowest signal to noise of several effects; None if there are none."""
    return min((effect.sqnr_db for effect in effects), default=None)
