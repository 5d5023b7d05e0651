"""Measure the cost of isolation: the overhead of a query, also right after a crash, and the time of a first compile."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from torchdelta.isolate.directories import QueryDirectory
from torchdelta.isolate.pool import CAN_FORK, Pool
from torchdelta.isolate.supervisor import Outcome

MAX_OVERHEAD_S = 0.05
"""The goal: the overhead of a query, which is its time without the work in the worker."""
_MODULE = Path(__file__).stem


def note_time(request: dict[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Sleep as long as the request says, and return the seconds that it took."""
    del place
    started = time.perf_counter()
    time.sleep(request["seconds"])
    return {"seconds": time.perf_counter() - started}


def crash(request: dict[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Die of a segmentation fault."""
    del request, place
    ctypes.string_at(0)
    return {}


def compile_small(request: dict[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Compile one fused kernel with inductor and run it; return the seconds that it took."""
    del request, place
    import torch

    started = time.perf_counter()
    torch.compile(lambda x: torch.relu(x) * 2)(torch.ones(64))
    return {"seconds": time.perf_counter() - started}


def measure(pool: Pool, rounds: int, *, work_s: float) -> dict[str, list[float]]:
    """Return the overheads in seconds, of queries after one that answered and after one that crashed."""
    beside: dict[str, list[float]] = {"after an answer": [], "after a crash": []}
    _timed(pool, "note_time", work_s)
    for _ in range(rounds):
        beside["after an answer"].append(_timed(pool, "note_time", work_s))
        assert _ask(pool, "crash").failure is not None
        beside["after a crash"].append(_timed(pool, "note_time", work_s))
        _timed(pool, "note_time", work_s)
    return beside


def _timed(pool: Pool, task: str, work_s: float = 0.0) -> float:
    """Return the seconds of a query without those of its work."""
    started = time.perf_counter()
    outcome = _ask(pool, task, seconds=work_s)
    taken = time.perf_counter() - started
    assert outcome.answer is not None, outcome
    return taken - float(outcome.answer["seconds"])


def _ask(pool: Pool, task: str, **request: Any) -> Outcome:
    return pool.ask(f"{_MODULE}:{task}", request, deadline_s=600)


def _row(what: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    late = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    return f"| {what} | {1e3 * statistics.median(ordered):.0f} | {1e3 * late:.0f} | {len(ordered)} |"


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--compiles", type=int, default=3)
    options = parser.parse_args()
    worst = 0.0
    print("| query | median ms beside its work | 95 % | queries |\n|---|---:|---:|---:|")
    # preloaded, as torchdelta's own tasks are, because an import would count as overhead
    with Pool(preload=(_MODULE,)) as pool:
        for work_s in (0.0, 0.2):
            for when, seconds in measure(pool, options.rounds, work_s=work_s).items():
                worst = max(worst, statistics.median(seconds))
                print(_row(f"{when}, {work_s:g} s of work", seconds), flush=True)
    print("\n| first compile in a worker | seconds |\n|---|---:|")
    for name, warm in (("cold zygote", ""), ("warm zygote", "inductor")):
        with Pool(warm=warm) as pool:
            answers = [_ask(pool, "compile_small").answer for _ in range(options.compiles)]
        print(f"| {name} | {statistics.median(answer['seconds'] for answer in answers if answer):.2f} |", flush=True)
    return int(CAN_FORK and worst > MAX_OVERHEAD_S)


if __name__ == "__main__":
    sys.exit(_main())
