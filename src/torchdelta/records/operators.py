"""The results of checking operators: a report on one operator, or a sweep over many of torch's own database.

A probe is one question about an operator: does its schema hold, is its fake kernel right, is its derivative? Start
reading at `OpReport` and `Sweep`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torchdelta.records.report import Environment, Report
from torchdelta.records.verdict import Verdict, worst_of

SCHEMA_VERSION = 1
"""The version of the JSON of both, which differs from that of a check's report."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question about an operator, and its answer."""

    name: str
    """`schema`, `fake/resized`, `aot/dynamic/min-cut`, `backend/inductor/static`, …"""
    verdict: Verdict
    reason: str = ""
    """The evidence, with numbers; may be empty if the verdict is equivalent."""
    remedy: str = ""
    """What to register or to repair."""
    report: Report | None = None
    """The report of the check behind the answer, if two programs were compared."""


@dataclass(frozen=True, kw_only=True)
class OpReport:
    """The answers of every probe of one operator."""

    op: str
    arguments: tuple[str, ...]
    """Each argument in short: `float32[3, 4]`, `dim=1`."""
    verdict: Verdict
    """The worst verdict of the probes."""
    probes: tuple[Probe, ...]
    unasked: dict[str, str]
    """Probes that do not apply to this operator or were left out on request, and why."""
    notes: tuple[str, ...]
    environment: Environment
    seconds: float
    schema_version: int = SCHEMA_VERSION

    def probe(self, name: str) -> Probe:
        """Return the probe of that name; raise KeyError if it was not asked."""
        for probe in self.probes:
            if probe.name == name:
                return probe
        raise KeyError(name)

    @property
    def worst(self) -> Probe | None:
        """The first of the probes that have the worst verdict; None if all are equivalent."""
        guilty = [probe for probe in self.probes if probe.verdict is self.verdict]
        return guilty[0] if guilty and self.verdict is not Verdict.EQUIVALENT else None


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One operator of the database in one dtype."""

    op: str
    dtype: str
    samples: int
    """The number of its sample inputs that were checked."""
    verdict: Verdict
    probes: dict[str, Verdict]
    """The worst verdict of each probe over all samples."""
    probe: str = ""
    """The probe that has the verdict, or the part in which the process ended; empty if there is none."""
    reason: str = ""
    sample: str = ""
    """The arguments that show it."""
    remedy: str = ""
    unasked: int = 0
    """Samples that eager itself rejects."""
    left_out: dict[str, int] = field(default_factory=dict)
    """How many samples of the database cannot be checked, by the reason."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Many operators, each with the worst verdict of its samples."""

    swept: tuple[SweepRow, ...]
    total: int
    """How many rows a finished sweep has: more than `swept` if it was interrupted."""
    environment: Environment
    words: dict[str, str]
    """The options of the sweep: operators, dtypes, probes, backends, policy, gradients, samples, seed."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION

    def by_verdict(self, dtype: str | None = None) -> Counter[Verdict]:
        """Return how many rows have each verdict, of one dtype, or of all if it is None."""
        return Counter(each.verdict for each in self.swept if dtype in (None, each.dtype))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict if it is a failure, otherwise equivalent; inconclusive if no operator is equivalent.

        An inconclusive operator among hundreds says nothing about the others, so it does not count.
        """
        verdicts = [each.verdict for each in self.swept]
        worst = worst_of(verdicts)
        return Verdict.EQUIVALENT if Verdict.EQUIVALENT in verdicts and not worst.is_failure else worst
