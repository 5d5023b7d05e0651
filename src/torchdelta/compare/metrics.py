"""Named numbers of a measurement that a policy can put a bound on."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torchdelta.records.comparison import Measurement
from torchdelta.registry import Registry

Metric = Callable[[Measurement], float]

METRICS: Registry[Metric] = Registry("metric")
METRICS.add("sqnr", attrgetter("sqnr_db"))
METRICS.add("cosine", lambda seen: seen.cosine if seen.square_error else 1.0)  # the square roots would round below 1
METRICS.add("max_abs", attrgetter("max_abs"))
METRICS.add("max_rel", attrgetter("max_rel"))
METRICS.add("rms", attrgetter("rms_error"))
