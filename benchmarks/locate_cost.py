"""Measure the cost of lockstep over running both sides, and that of torchao's numeric debugger on the same two graphs.

Memory is the weights of both sides plus the growth of the peak while running. Each method is measured in a process of
its own, whose kernels have run before on a small model. Time is measured in one process, the methods one after the
other in every round, so that a machine that slows down slows them all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import locate_subjects as subjects
from locate_subjects import Graphs
from torchdelta.nodewise.local import LocalJudge
from torchdelta.nodewise.lockstep_seam import compare_graphs
from torchdelta.program.memory import peak_bytes

MOST_MEMORY, MOST_TIME = 1.3, 3.0
"""The goals: the cost of lockstep, in multiples of running both sides."""
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MIB = 2**20
_RAISED = "raised"


def run_both(graphs: Graphs) -> None:
    """Run one side after the other and hold both results, as a comparison has to."""
    with torch.no_grad():
        kept = graphs.reference(*graphs.inputs), graphs.candidate(*graphs.inputs)
    del kept


def run_reference(graphs: Graphs) -> None:
    """Run the reference alone."""
    with torch.no_grad():
        graphs.reference(*graphs.inputs)


def run_candidate(graphs: Graphs) -> None:
    """Run the candidate alone."""
    with torch.no_grad():
        graphs.candidate(*graphs.inputs)


def run_lockstep(graphs: Graphs) -> None:
    """Match both graphs and judge every pair of nodes."""
    compared = compare_graphs(
        graphs.reference, graphs.candidate, list(graphs.inputs), LocalJudge(), "export", with_gradients=False
    )
    assert compared.judgements
    assert not compared.notes, compared.notes


def run_torchao(graphs: Graphs) -> None:
    """Put loggers after every node, run both sides, and compute the signal-to-noise ratio of all logged values."""
    from torchao.quantization.pt2e import (
        compare_results,
        extract_results_from_loggers,
        prepare_for_propagation_comparison,
    )

    def logged(side: GraphModule) -> Any:
        prepared = prepare_for_propagation_comparison(side)
        prepared(*graphs.inputs)
        return extract_results_from_loggers(prepared)

    with torch.no_grad():
        found = compare_results(logged(graphs.reference), logged(graphs.candidate))
        ratios = [result.sqnr for summary in found.values() for result in summary.results]
    assert ratios


REFERENCE, CANDIDATE = "reference", "candidate"
BOTH, LOCKSTEP, TORCHAO = "both", "lockstep", "torchao"
_WAYS: dict[str, Callable[[Graphs], None]] = {
    REFERENCE: run_reference,
    CANDIDATE: run_candidate,
    BOTH: run_both,
    LOCKSTEP: run_lockstep,
    TORCHAO: run_torchao,
}
_TIMED = (BOTH, LOCKSTEP, TORCHAO)
_ALL = "all"
_HEADS = (
    *("model", "candidate", "way", "weights", "growth", "memory"),
    *("× both at once", "× one after the other", "seconds", "× both"),
)


def growth_of(way: str, model: str, candidate: str, size: str) -> dict[str, float]:
    """Return the bytes of both sides' weights, and the growth of the peak while running; call it in a fresh process."""
    _WAYS[way](subjects.build(model, candidate, "warm-up"))
    graphs = subjects.build(model, candidate, size)
    gc.collect()
    if _RESET.exists():
        _RESET.write_text("5")  # resets the peak, because the export's is higher
    before = _resident_bytes()
    _WAYS[way](graphs)
    return {"weights": graphs.weight_bytes, "growth": peak_bytes() - before}


def seconds_of(model: str, candidate: str, size: str, rounds: int) -> dict[str, list[float]]:
    """Return for each method the seconds of every round; the methods run one after the other in each."""
    ways = list(_TIMED)
    warm, graphs = subjects.build(model, candidate, "warm-up"), subjects.build(model, candidate, size)
    for way in list(ways):
        try:
            _WAYS[way](warm)
        except Exception:  # torchao's debugger cannot compare every two graphs
            if way is not TORCHAO:
                raise
            ways.remove(way)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            gc.collect()
            started = time.perf_counter()
            _WAYS[way](graphs)
            taken[way].append(time.perf_counter() - started)
    return taken


def measure(path: Path, models: Sequence[str], size: str, rounds: int) -> None:
    """Measure everything that is not in the file yet, and write each number to it at once."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    for model in models:
        for candidate in subjects.CANDIDATES:
            for way in (*_WAYS, _ALL):
                key = _key(way, model, candidate, size)
                if key not in known:
                    known[key] = _in_child(way, model, candidate, size, rounds)
                    path.write_text(json.dumps(known, indent=1), encoding="utf-8")


def as_markdown(path: Path, size: str) -> str:
    """Return the table of all measurements in the file."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    lines = [
        f"{subjects.WORDS[size]}. Memory: the weights of both sides and the growth of the peak, MiB. Ratios are to "
        f"running both: lockstep may have {MOST_MEMORY} × its memory and {MOST_TIME:g} × its time.",
        "",
        f"| {' | '.join(_HEADS)} |",
        f"|{'---|' * 3}{'---:|' * (len(_HEADS) - 3)}",
    ]
    for model in subjects.MODELS:
        for candidate in subjects.CANDIDATES:
            rows = {way: known.get(_key(way, model, candidate, size), {}) for way in (*_WAYS, _ALL)}
            if all(rows.values()):
                lines += [f"| {model} | {candidate} | {cells} |" for cells in _rows(rows)]
    return "\n".join(lines) + "\n"


def _rows(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the cells of each method, for one model and one candidate."""
    weights = rows[BOTH]["weights"]
    after_each_other = weights + rows[BOTH]["growth"]
    at_once = weights + rows[REFERENCE]["growth"] + rows[CANDIDATE]["growth"]
    yield f"both at once | {_mib(weights)} | {_mib(at_once - weights)} | {_mib(at_once)} | 1.00 | | | "
    for way in _TIMED:
        if _RAISED in rows[way]:
            yield f"{way} | raised: {rows[way][_RAISED]} | | | | | | "
            continue
        growth = rows[way]["growth"]
        taken, plain = rows[_ALL][way], rows[_ALL][BOTH]
        ratio = statistics.median(mine / theirs for mine, theirs in zip(taken, plain, strict=True))
        yield (
            f"{'both, one after the other' if way == BOTH else way} | {_mib(weights)} | {_mib(growth)} "
            f"| {_mib(weights + growth)} | {(weights + growth) / at_once:.2f} "
            f"| {(weights + growth) / after_each_other:.2f} | {statistics.median(taken):.2f} | {ratio:.2f}"
        )


def _key(way: str, model: str, candidate: str, size: str) -> str:
    # the reference alone does not depend on the candidate
    return f"{size}/{model}/{way}" if way == REFERENCE else f"{size}/{model}/{candidate}/{way}"


def _mib(count: float) -> str:
    return f"{count / _MIB:.0f}"


def _in_child(way: str, model: str, candidate: str, size: str, rounds: int) -> dict[str, Any]:
    """Return one measurement, made in a new process; of torchao, which may raise, else the last line of its error."""
    command = [sys.executable, __file__, way, model, candidate, size, str(rounds)]
    # freed memory goes back to the system at once, so that the peak is that of live tensors and not the allocator's
    plain = {} if way == _ALL else {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    print(f"  {model}, {candidate}: {way}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **plain})
    if done.returncode:
        if way != TORCHAO:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return {_RAISED: done.stderr.strip().rpartition("\n")[2][:80]}
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def _resident_bytes() -> int:
    """Return the resident memory of this process; on a system that does not tell, its peak."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return peak_bytes()


def _main() -> None:
    """Run as the child process: make one measurement and print it as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("way", "model", "candidate", "size"):
        parser.add_argument(name)
    parser.add_argument("rounds", type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.way == _ALL:
        found: object = seconds_of(options.model, options.candidate, options.size, options.rounds)
    else:
        found = growth_of(options.way, options.model, options.candidate, options.size)
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
