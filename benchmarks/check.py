"""Measure the overhead of a check: its time over that of the same three runs (reference, candidate, truth) by hand.

Both sides of the ratio include compilation, from a warm compiler cache, anew in every round. Runs that only some checks
need (noisy runs, a second reference) are subtracted, and the semantic question is not asked; `verdict_cost.py` measures
those.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import torchdelta as td
from torchdelta._torch.modes import lift

ROUNDS = 5
BY_HAND = {"reference", "candidate", "truth", "comparison"}
"""The parts of a check that count; the comparison is the overhead that is measured."""


def transformer(width: int = 256, layers: int = 2) -> tuple[nn.Module, torch.Tensor]:
    """Return a transformer encoder without dropout, and a batch for it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(8, 128, width)


def train_once(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Run forward and backward."""
    output = call(x)
    torch.autograd.backward([output], [torch.randn_like(output)])


def three_runs(model: nn.Module, x: torch.Tensor, backend: str) -> None:
    """Run reference, candidate and truth, forward and backward, without comparing them."""
    train_once(copy.deepcopy(model), x)
    torch._dynamo.reset()
    train_once(torch.compile(copy.deepcopy(model), backend=backend), x)
    with lift.Lift():
        train_once(copy.deepcopy(model).double(), x.double())


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Print one table: for each backend the median of runs that alternate between the three runs and the check."""
    model, x = transformer()
    print(f"{'check, forward and gradients':<34}{'three runs':>12}{'check':>10}{'ratio':>8}")
    for backend in ("aot_eager", "inductor"):

        def by_hand(backend: str = backend) -> float:
            return seconds(lambda: three_runs(model, x, backend))

        def checked(backend: str = backend) -> float:
            started = time.perf_counter()
            report = td.check(model, (x,), transform=backend, semantic=False)
            assert report.verdict is td.Verdict.EQUIVALENT, report.verdict
            assert report.cost is not None
            besides = sum(spent for part, spent in report.cost.seconds.items() if part not in BY_HAND)
            return time.perf_counter() - started - besides

        for run in (by_hand, checked):  # warm: headers, kernels and the compiler's cache
            run()
        pairs = [(by_hand(), checked()) for _ in range(ROUNDS)]
        plain, full = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(check / runs for runs, check in pairs)
        print(f"{backend:<34}{plain:>10.2f} s{full:>8.2f} s{ratio:>8.2f}")


if __name__ == "__main__":
    main()
