"""What was found out about operators: one looked at closely, or many of torch's own database."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torchdelta.records.report import Environment, Report
from torchdelta.records.verdict import Verdict, worst_of

SCHEMA_VERSION = 1
"""Of the JSON of both, which is not that of a report."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question that was put to an operator, and its answer."""

    name: str
    """`schema`, `fake/resized`, `aot/dynamic/min-cut`, `backend/inductor/static`, …"""
    verdict: Verdict
    reason: str = ""
    """What was seen, with numbers; empty where it is equivalent and there is no more to say."""
    remedy: str = ""
    """What to register or to mend."""
    report: Report | None = None
    """Of the run that the answer rests on, where two programs were compared."""


@dataclass(frozen=True, kw_only=True)
class OpReport:
    """What came of every question that an operator was asked."""

    op: str
    arguments: tuple[str, ...]
    """Each of them in short: `float32[3, 4]`, `dim=1`."""
    verdict: Verdict
    """The worst of the probes."""
    probes: tuple[Probe, ...]
    unasked: dict[str, str]
    """Probes that do not apply to this operator or were left out on request, and why."""
    notes: tuple[str, ...]
    environment: Environment
    seconds: float
    schema_version: int = SCHEMA_VERSION

    def probe(self, name: str) -> Probe:
        """Return the probe of that name; KeyError where it was not asked."""
        for probe in self.probes:
            if probe.name == name:
                return probe
        raise KeyError(name)

    @property
    def worst(self) -> Probe | None:
        """The first of the probes that the verdict comes from; None where all are equivalent."""
        guilty = [probe for probe in self.probes if probe.verdict is self.verdict]
        return guilty[0] if guilty and self.verdict is not Verdict.EQUIVALENT else None


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One operator of the database in one dtype."""

    op: str
    dtype: str
    samples: int
    """How many of its sample inputs were checked."""
    verdict: Verdict
    probes: dict[str, Verdict]
    """The worst verdict of each probe over all samples."""
    probe: str = ""
    """The probe that the verdict comes from; empty where it is equivalent or the process ended."""
    reason: str = ""
    sample: str = ""
    """The arguments that it was seen with."""
    remedy: str = ""
    unasked: int = 0
    """Samples that eager itself rejects."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Samples that the database has and nobody can check, by the reason."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Many operators, each with the worst that was seen of it."""

    swept: tuple[SweepRow, ...]
    total: int
    """How many there would have been: more than were swept where somebody interrupted it."""
    environment: Environment
    words: dict[str, str]
    """What was asked: operators, dtypes, probes, backends, policy, gradients, samples, seed."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION

    def by_verdict(self, dtype: str | None = None) -> Counter[Verdict]:
        """Return how many operators ended so, of one dtype or of all."""
        return Counter(each.verdict for each in self.swept if dtype in (None, each.dtype))

    @property
    def verdict(self) -> Verdict:
        """The worst that was seen, where it is a failure.

        That something could not be decided of one operator of hundreds says nothing of the others.
        """
        worst = worst_of(each.verdict for each in self.swept)
        return worst if worst.is_failure or not self.swept else Verdict.EQUIVALENT
