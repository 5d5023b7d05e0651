"""Measure the cost of a guard in a training run: the time of a step with and without it, and of the first call."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

import torchdelta as td

MAX_RATIO = 1.03
"""The goal: how much longer a step may take under a guard that checks first calls only."""
Step = Callable[[], None]


def transformer(width: int = 256, layers: int = 6) -> tuple[nn.Module, torch.Tensor]:
    """Return a transformer encoder without dropout, and a batch for it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(4, 64, width)


def training(model: nn.Module, x: torch.Tensor, backend: str | Callable[..., object]) -> Step:
    """Return a function that trains a copy of the model for one step, compiled by the backend."""
    own = copy.deepcopy(model)
    # all copies have the same code, and the code compiled for one must not run for another
    compiled = torch.compile(own, backend=backend, isolate_recompiles=True)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    return step


def seconds(step: Step) -> float:
    """Return the seconds of one step."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def main() -> int:
    """Print the table of steps side by side; return 1 if a guard costs more than the goal, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    model, x = transformer()
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    with ExitStack() as watching:

        def begin(name: str, backend: str | Callable[..., object]) -> None:
            steps[name] = training(model, x, backend)
            first[name] = seconds(steps[name])

        training(model, x, options.backend)()  # warm: headers, kernels and the compiler's cache
        begin("unguarded", options.backend)
        guards = {f"guarded, every={every}": td.guard(options.backend, every=every) for every in (0, 10)}
        for name, guard in guards.items():
            begin(name, guard)
        watched = watching.enter_context(td.watch_passes())
        begin("watch_passes", options.backend)
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                taken[name].append(seconds(step))
    for guard in guards.values():
        assert guard.summary.verdicts == {"equivalent": 1}, guard.summary
    assert watched.checked or options.backend != "inductor", watched.seen
    assert not watched.findings, watched.findings
    return _print(taken, first)


def _print(taken: dict[str, list[float]], first: dict[str, float]) -> int:
    """Print a row for each way of training; return 1 if a guard costs more than the goal, else 0."""
    plain = taken["unguarded"]
    print("| training step | median ms | ratio | mean ratio | first call s |\n|---|---:|---:|---:|---:|")
    ratios = {}
    for name, own in taken.items():
        # the ratio of steps side by side, so that a machine that slows down slows both
        ratios[name] = statistics.median(one / other for one, other in zip(own, plain, strict=True))
        mean = statistics.fmean(own) / statistics.fmean(plain)
        median = 1e3 * statistics.median(own)
        print(f"| {name} | {median:.1f} | {ratios[name]:.3f} | {mean:.2f} | {first[name]:.1f} |")
    return int(ratios["guarded, every=0"] > MAX_RATIO)


if __name__ == "__main__":
    raise SystemExit(main())
