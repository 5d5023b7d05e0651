"""Measure how often the culprit is exactly the planted node, among correct rewrites, in the open or in a black box.

One trial is one search. Its record is one JSON line, so that a run resumes after an interruption. Start reading at
`run`.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchdelta.check.prepare import prepare
from torchdelta.locate.locator import Locator
from torchdelta.program.sides import Side
from torchdelta.records.case import CheckOptions
from torchdelta.records.location import Location
from torchdelta.records.report import Report
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.export import export_side
from torchdelta.transforms.fx_pass import FxPass

TESTS = Path(__file__).parent.parent / "tests"
MODELS = ("bert", "gpt2", "vit", "resnet", "lstm")
REWRITES = 20
CLEAN = "nothing"
"""The kind of a trial without a fault."""
OPEN, BOXED = "open", "black box"
PLACES = (OPEN, BOXED)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One search: a model, a kind of fault, whether the candidate is a graph or a black box, and the seed."""

    model: str
    kind: str
    place: str
    seed: int

    @property
    def key(self) -> str:
        """The text that identifies a trial."""
        return f"{self.place}/{self.seed}/{self.model}/{self.kind}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of a trial."""

    trial: Trial
    seconds: float
    checked: str = ""
    """The verdict of the check as a whole."""
    located: str = ""
    """The verdict after looking at the nodes."""
    planted: str | None = None
    rewritten: int = 0
    culprits: list[str] = field(default_factory=list)
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    """The exception of the search, if it raised."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was planted."""
        return self.trial.kind == CLEAN

    @property
    def is_diverged(self) -> bool:
        """Whether the check itself reported the fault; one that raised counts, so that it is not dropped."""
        return not self.is_clean and (bool(self.error) or self.checked == Verdict.DIVERGED.value)

    @property
    def is_exact(self) -> bool:
        """Whether the planted node is named and no other; in a clean trial, whether no node is named."""
        return not self.error and self.culprits == ([] if self.is_clean else [self.planted])

    @property
    def outcome(self) -> str:
        """The result in a word or two."""
        if self.error:
            return "raised"
        if self.is_clean:
            return "none named" if self.is_exact else "WRONGLY NAMED"
        if not self.is_diverged:
            return f"check says {self.checked}, {'exact' if self.is_exact else f'{len(self.culprits)} named'}"
        if self.is_exact:
            return "exact"
        if not self.culprits:
            return "NONE"
        return "MORE THAN ONE" if self.planted in self.culprits else "ANOTHER"


class Ledger:
    """The records of one file, by key."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.records = {record.trial.key: record for record in self._read()}

    def add(self, record: Record) -> None:
        """Add a record and write it to the file at once."""
        with self._path.open("a", encoding="utf-8") as file:
            # a line break in front too, because a killed run may have left half a line
            file.write("\n" + json.dumps(asdict(record)) + "\n")
        self.records[record.trial.key] = record

    def _read(self) -> Iterator[Record]:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        for line in filter(None, lines):
            try:
                data = json.loads(line)
            except json.JSONDecodeError:  # the line that was being written when the run was killed
                continue
            yield Record(trial=Trial(**data.pop("trial")), **data)


def trials(
    models: Sequence[str], places: Sequence[str], seeds: Sequence[int], kinds: Sequence[str] | None = None
) -> Iterator[Trial]:
    """Yield every trial: for each model nothing planted, then each kind of fault that has a place in it."""
    for seed in seeds:
        for place in places:
            for model in models:
                for kind in (CLEAN, *_kinds_in(model)):
                    if kinds is None or kind in kinds or kind == CLEAN:
                        yield Trial(model=model, kind=kind, place=place, seed=seed)


def run_missing(ledger: Ledger, asked: Iterable[Trial], *, retry: bool = False) -> None:
    """Run every trial that has no record yet; with `retry` also those that raised."""
    for trial in asked:
        known = ledger.records.get(trial.key)
        if known is None or (retry and known.error):
            record = run(trial)
            ledger.add(record)
            print(f"{record.seconds:7.1f} s  {trial.key}: {record.outcome}, {_named(record)}", flush=True)


def run(trial: Trial) -> Record:
    """Plant a fault, locate it, and return the record."""
    started = time.perf_counter()
    hidden = _programs("hidden").Hidden(
        None if trial.kind == CLEAN else trial.kind,
        seed=trial.seed,
        is_black_box=trial.place == BOXED,
        rewrites=REWRITES,
    )
    model, inputs = _built(trial.model)
    try:
        report, found = _located(model, inputs, FxPass(hidden, {"graph": "export"}))
    except Exception as error:
        return Record(
            trial=trial,
            seconds=round(time.perf_counter() - started, 1),
            planted=hidden.planted,
            rewritten=hidden.rewritten,
            error=f"{type(error).__name__}: {error}",
        )
    return Record(
        trial=trial,
        seconds=round(time.perf_counter() - started, 1),
        checked=report.verdict.value,
        located=found.verdict.value,
        planted=hidden.planted,
        rewritten=hidden.rewritten,
        culprits=[culprit.node for culprit in found.culprits],
        reason=found.culprits[0].reason if found.culprits else found.reason,
        notes=list(found.notes),
    )


def _located(model: Any, inputs: tuple[Any, ...], transform: FxPass) -> tuple[Report, Location]:
    """Do what `td.locate` does; return the report of its check and the location."""
    check = prepare(model, inputs, options=CheckOptions(transform=transform))
    report = check.run()
    return report, Locator(check=check, report=report).run()


def _built(model: str) -> tuple[Any, tuple[Any, ...]]:
    built: tuple[Any, tuple[Any, ...]] = _programs("models").build(model, probing=True)
    return built


@functools.cache
def _kinds_in(model: str) -> tuple[str, ...]:
    module, inputs = _built(model)
    graph_module, _ = export_side(Side.of(module, inputs, {}), strict=False)
    return tuple(_programs("hidden").kinds_that_fit(graph_module))


def _programs(name: str) -> Any:
    """Return a module of the package `programs` in the tests."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return importlib.import_module(f"programs.{name}")


def as_markdown(records: Sequence[Record]) -> str:
    """Return tables of how many were named exactly, by place, model and kind, and a list of all others."""
    if not records:
        return "Nothing was run.\n"
    fewest = min((record.rewritten for record in records if not record.error), default=0)
    seeds = ", ".join(str(seed) for seed in sorted({record.trial.seed for record in records}))
    lines = [
        f"{len(records)} searches, seeds {seeds}: one fault, or none, among {fewest} or more correct rewrites.",
    ]
    for title, of in (("where", "place"), ("model", "model"), ("kind of fault", "kind")):
        lines += ["", *_counts(title, of, records)]
    odd = [record for record in records if record.is_diverged and not record.is_exact]
    odd += [record for record in records if record.is_clean and not record.is_exact]
    odd += [record for record in records if not record.is_clean and not record.is_diverged]
    lines += ["", "Not exact, or not seen by the check:", ""] if odd else []
    lines += [f"- {record.trial.key}: {record.outcome}; {_named(record)}. {_why(record)}".rstrip() for record in odd]
    return "\n".join(lines) + "\n"


def _counts(title: str, of: str, records: Sequence[Record]) -> Iterator[str]:
    groups = dict.fromkeys(getattr(record.trial, of) for record in records)
    yield f"| {title} | planted | check says diverged | exactly named | % | clean | none named |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for group in (*sorted(groups), None) if len(groups) > 1 else groups:
        chosen = [record for record in records if group is None or getattr(record.trial, of) == group]
        seen = [record for record in chosen if record.is_diverged]
        exact = sum(record.is_exact for record in seen)
        clean = [record for record in chosen if record.is_clean]
        share = f"{100 * exact / len(seen):.1f}" if seen else "–"
        cells = [len(chosen) - len(clean), len(seen), exact, share, len(clean), sum(each.is_exact for each in clean)]
        yield f"| {'all' if group is None else group} | " + " | ".join(str(cell) for cell in cells) + " |"


def _named(record: Record) -> str:
    culprits = ", ".join(record.culprits[:4]) + (" …" if len(record.culprits) > 4 else "")
    return f"planted {record.planted or 'nothing'}, named {culprits or 'none'}"


def _why(record: Record) -> str:
    text = record.error or (record.reason if record.culprits else next(iter(record.notes[-1:]), record.reason))
    return text.strip().partition("\n")[0]
