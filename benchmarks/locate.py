"""Measure locating: the cost of lockstep over running both sides, and how often the culprit is the planted node.

A full run takes hours and resumes after an interruption. The cost of lockstep alone takes minutes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import locate_cost as cost
import locate_planted as planted
import locate_subjects as subjects
from torchdelta.audit.faults import FAULTS

DEFAULT_OUT = Path("build/locate")
COST, PLANTED = "cost", "planted"
SEEDS = (1, 2, 3)

SUBSET_MODELS = ("lstm",)
SUBSET_SEEDS = (1,)
SUBSET_KINDS = ("add_to_subtract", "bias_dropped", "cast_through_bfloat16", "gradient_detached")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the trials and measurements that have no record yet, then print the tables of all records."""
    options = _parser().parse_args(argv)
    if options.subset:
        _narrow_to_subset(options)
    ledger = planted.Ledger(options.out / "planted.jsonl")
    cost_file = options.out / "cost.json"
    if not options.table_only:
        # torch and transformers warn about their own code while they trace
        warnings.simplefilter("ignore")
        if COST in options.sections:
            measured = (subjects.CONV,) if options.subset else subjects.MODELS
            cost.measure(cost_file, measured, options.size, options.rounds)
        if PLANTED in options.sections:
            asked = planted.trials(options.models, options.places, options.seeds, options.kinds)
            planted.run_missing(ledger, asked, retry=options.retry)
    parts = {
        COST: f"## What lockstep costs\n\n{cost.as_markdown(cost_file, options.size)}",
        PLANTED: f"## Planted faults\n\n{planted.as_markdown(list(ledger.records.values()))}",
    }
    text = "\n".join(parts[section] for section in options.sections)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=DEFAULT_OUT, help="where cost.json, planted.jsonl and table.md are")
    add("--sections", nargs="+", choices=(COST, PLANTED), default=[COST, PLANTED])
    add("--size", choices=subjects.SIZES, default="full", help="size of the models whose cost is measured")
    add("--rounds", type=int, default=3, help="how often each method is timed")
    add(
        "--models", nargs="+", choices=planted.MODELS, default=planted.MODELS, help="models in which faults are planted"
    )
    add("--places", nargs="+", choices=planted.PLACES, default=planted.PLACES)
    add("--seeds", nargs="+", type=int, default=SEEDS)
    add("--kinds", nargs="+", choices=list(FAULTS), help="kinds of faults; all that fit a model by default")
    add("--subset", action="store_true", help="a few minutes of everything")
    add("--retry", action="store_true", help="run the trials again that raised")
    add("--table-only", action="store_true", help="print the tables of existing records only")
    return parser


def _narrow_to_subset(options: argparse.Namespace) -> None:
    options.size, options.models, options.seeds, options.kinds = "small", SUBSET_MODELS, SUBSET_SEEDS, SUBSET_KINDS


if __name__ == "__main__":
    main()
