"""Measure the cost of comparing two tensors on this machine, as medians of ratios between runs side by side.

Each section is one function that returns rows; `main` prints them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from torchdelta.compare.judge import Judge
from torchdelta.compare.kernels import measure
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policy_parser import parse

Row = tuple[str, float, str]
"""A description of the comparison, the number and its unit."""

_LARGE = 64 * 2**20
_SMALL = 1_000


def main() -> None:
    """Print one table of all sections."""
    rows = [*large_tensors(torch.float32), *large_tensors(torch.bfloat16), *small_tensors()]
    width = max(len(what) for what, _, _ in rows)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for what, number, unit in rows:
        print(f"{what:<{width}}  {number:8.2f} {unit}")


def large_tensors(dtype: torch.dtype) -> list[Row]:
    """Return the ratio of `measure` to reading both tensors once, and of `torch.allclose` to `measure`."""
    reference, candidate = _noisy_pair(_LARGE, dtype)
    name = f"{str(dtype).removeprefix('torch.')}, {_LARGE // 2**20} Mi elements"

    def sums() -> None:
        reference.sum()
        candidate.sum()

    def measured() -> None:
        measure(reference, candidate)

    def all_close() -> None:
        torch.allclose(reference, candidate)

    return [
        (f"{name}: measure / (reference.sum(); candidate.sum())", _ratio(measured, sums, runs=11), "×"),
        (f"{name}: torch.allclose / measure", _ratio(all_close, measured, runs=5), "×"),
    ]


def small_tensors() -> list[Row]:
    """Return the microseconds for tensors so small that only the overhead counts."""
    reference, candidate = _noisy_pair(_SMALL, torch.float32)
    judge = Judge(policy=parse("close"))
    runs: dict[str, Callable[[], object]] = {
        "measure": lambda: measure(reference, candidate),
        "comparison, from values to verdict": lambda: judge.compare(leaves_of(reference), leaves_of(candidate)),
    }
    rows: list[Row] = []
    for name, run in runs.items():
        run()
        seconds = [_seconds(run) for _ in range(3_000)]
        rows.append((f"float32, {_SMALL} elements: {name}", 1e6 * statistics.median(seconds), "µs"))
    return rows


def _noisy_pair(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(numel, generator=generator)
    candidate = reference + 1e-6 * torch.randn(numel, generator=generator)
    return reference.to(dtype), candidate.to(dtype)


def _ratio(numerator: Callable[[], None], denominator: Callable[[], None], *, runs: int) -> float:
    """Return the median of the ratios of runs side by side, so that a machine that slows down slows both."""
    numerator()
    denominator()
    return statistics.median(_seconds(numerator) / _seconds(denominator) for _ in range(runs))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
