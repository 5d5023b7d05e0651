"""Measure the verdicts: the rate of false alarms on clean programs, and the share of planted faults that are caught.

Every model runs under real compilers, where an alarm is false, and exported with planted faults, where a pass is a
miss. The same values are also judged by other common rules. A full run takes hours and resumes after an interruption.

Start reading at `run`; `verdict_cases.py` defines the trials, `verdict_runs.py` runs one, `verdict_table.py` counts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path

import verdict_cases as cases
from torchdelta.audit.faults import FAULTS
from verdict_cost import cost_section, measure_cost
from verdict_local import ASKABLE, LocalBench, is_open
from verdict_records import FAILED, Ledger, Record
from verdict_runs import Bench
from verdict_table import as_markdown

DEFAULT_OUT = Path("build/verdicts")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the trials that have no record yet, then print the table of all records."""
    options = _parser().parse_args(argv)
    if options.subset:
        _narrow_to_subset(options)
    ledger = Ledger(options.out)
    cost_file = options.out / "cost.json"
    if not options.table_only:
        # torch and transformers warn about their own code while they trace
        warnings.simplefilter("ignore")
        run(ledger, options)
        if options.thorough is not None:
            ask_locally(ledger, options)
        if not (options.subset or cost_file.exists()):
            measure_cost(cost_file)
    text = as_markdown(list(ledger.records.values())) + cost_section(cost_file)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text)


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Run every trial that has no record yet; with `--retry` also those whose record says that the benchmark failed."""
    for subject in cases.subjects(options.models, options.dtypes, options.seeds):
        asked = cases.trials(subject, options.faults)
        missing = [trial for trial in asked if _is_missing(trial, ledger, options.retry)]
        for stages, group in itertools.groupby(missing, key=lambda trial: trial.stages):
            bench = Bench(subject, stages)
            for trial in group:
                with ledger.running(trial):
                    record = bench.run(trial)
                ledger.add(record)
                print(_line(record), flush=True)
            del bench
            gc.collect()


def ask_locally(ledger: Ledger, options: argparse.Namespace) -> None:
    """Ask the local question of every record that has no answer to it yet and may need one."""
    askable = options.thorough or ASKABLE
    for subject in cases.subjects(options.models, options.dtypes, options.seeds):
        keys = [trial.key for trial in cases.trials(subject, options.faults)]
        records = [ledger.records[key] for key in keys if key in ledger.records]
        if not (unanswered := [record for record in records if is_open(record, askable)]):
            continue
        bench = LocalBench(subject)
        for record in unanswered:
            answered = bench.ask(record)
            ledger.add(answered)
            print(_local_line(answered), flush=True)
        del bench
        gc.collect()


def _is_missing(trial: cases.Trial, ledger: Ledger, retry: bool) -> bool:
    record = ledger.records.get(trial.key)
    return record is None or (retry and record.status == FAILED)


def _line(record: Record) -> str:
    verdicts = " ".join(f"{name} {stage.verdict}" for name, stage in record.stages.items())
    what = verdicts or record.why
    return f"{record.seconds:7.1f} s  {record.trial.key}: {record.status}, {what}"


def _local_line(record: Record) -> str:
    local = record.local
    right = f"{local.nodes} nodes, none wrong, {local.nearest or 'all the same to the bit'} ({local.ratio:.2g})"
    told = "; ".join(local.culprits) or (right if record.is_asked_locally else local.asked)
    return f"{local.seconds:7.1f} s  {record.trial.key}: local, {told}"


def _parser() -> argparse.ArgumentParser:
    models = cases.model_file().MODELS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where cases.jsonl, cost.json and table.md are")
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--dtypes", nargs="+", choices=cases.DTYPES, default=cases.DTYPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=cases.SEEDS)
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS), help="no kind: clean cases")
    parser.add_argument(
        "--thorough",
        nargs="*",
        choices=ASKABLE,
        metavar="WHAT",
        help=f"ask the local question too, of {', '.join(ASKABLE)}; no WHAT: of all of them",
    )
    parser.add_argument("--subset", action="store_true", help="a few minutes of everything")
    parser.add_argument("--retry", action="store_true", help="run the trials again that failed")
    parser.add_argument("--table-only", action="store_true", help="print the table of existing records only")
    return parser


def _narrow_to_subset(options: argparse.Namespace) -> None:
    options.models = cases.SUBSET_MODELS
    options.seeds = cases.SUBSET_SEEDS
    options.faults = options.faults[:: cases.SUBSET_FAULTS]


if __name__ == "__main__":
    main()
