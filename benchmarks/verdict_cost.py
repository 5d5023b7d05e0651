"""Measure the parts of a default check of a small real model, relative to its two unavoidable runs.

Those are the reference and the candidate, without compilation.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._inductor.utils import fresh_cache

import torchdelta as td
from torchdelta import transforms
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta.compare.leaves import leaves_of
from torchdelta.program.sides import Side
from torchdelta.transforms.base import Transform, TransformedSide

_ROUNDS = 3
_WIDTH, _LAYERS, _BATCH, _LENGTH, _VOCABULARY = 768, 2, 2, 128, 1000
_PARTS = ("reference", "candidate", "truth", "noise", "semantic", "comparison")
_PLAIN = ("reference", "candidate")


class Warmed(Transform):
    """A transform whose result runs once before it is timed; `seconds` has the duration of that first run."""

    def __init__(self, inner: Transform) -> None:
        self.inner = inner
        self.traits = inner.traits
        self.seconds = dict.fromkeys(("candidate", "semantic"), 0.0)

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Transform the side, and run it forward and backward, so that both are compiled."""
        started = time.perf_counter()
        with self.inner.apply(side, draws_random=draws_random, lifted=lifted, seam=seam) as transformed:
            outputs = leaves_of(transformed.side.call(*side.args, **side.kwargs), "outputs").values()
            roots = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            for parameter in transformed.side.state.parameters.values():
                parameter.grad = None
            self.seconds["semantic" if lifted else "candidate"] = time.perf_counter() - started
            yield transformed


def measure_cost(path: Path) -> None:
    """Write the seconds of every part, of the first runs and of a whole check to a JSON file, for each dtype."""
    measured = {str(dtype).removeprefix("torch."): _measured(dtype) for dtype in (torch.float32, torch.bfloat16)}
    path.write_text(json.dumps(measured, indent=1), encoding="utf-8")


def _measured(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    model, inputs = _bert(dtype)
    with fresh_cache():
        cold = _seconds_of_check(model, inputs)
    warm = _seconds_of_check(model, inputs)
    rounds: list[dict[str, float]] = []
    first: list[dict[str, float]] = []
    for _ in range(_ROUNDS):
        transform = Warmed(transforms.build("inductor", {}))
        cost = td.check(model, kwargs=inputs, transform=transform).cost
        assert cost is not None
        first.append(transform.seconds)
        rounds.append({part: taken - transform.seconds.get(part, 0.0) for part, taken in cost.seconds.items()})
    return {
        "parts": _medians(rounds),
        "first runs": _medians(first),
        "wall": {"from an empty compiler cache": cold, "from a warm one": warm},
    }


def _bert(dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_WIDTH // 64,
        intermediate_size=4 * _WIDTH,
    )
    model: torch.nn.Module = BertModel(config)  # type: ignore[no-untyped-call]
    return model.eval().to(dtype), {"input_ids": torch.randint(0, _VOCABULARY, (_BATCH, _LENGTH))}


def _seconds_of_check(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    started = time.perf_counter()
    td.check(model, kwargs=inputs, transform="inductor")
    return time.perf_counter() - started


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(taken.get(name, 0.0) for taken in rounds) for name in rounds[0]}


def cost_section(path: Path) -> str:
    """Return the section of the table, or an empty text if nothing was measured."""
    if not path.exists():
        return ""
    measured: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        "",
        "## Cost of a default check",
        "",
        f"BERT, hidden size {_WIDTH}, {_LAYERS} layers, batch {_BATCH} × {_LENGTH}, forward and gradients "
        "under inductor, compilation apart; × is the multiple of reference + candidate.",
    ]
    for dtype, of_dtype in measured.items():
        parts = of_dtype["parts"]
        plain = sum(parts.get(part, 0.0) for part in _PLAIN)
        lines += ["", f"| {dtype} | seconds | × |", "|---|---|---|"]
        ordered = sorted(parts, key=lambda part: _PARTS.index(part) if part in _PARTS else len(_PARTS))
        lines += [f"| {part} | {parts[part]:.2f} | {parts[part] / plain:.1f} |" for part in ordered]
        total = sum(parts.values())
        lines.append(f"| **all** | {total:.2f} | **{total / plain:.1f}** |")
        first = ", ".join(f"{name} {taken:.1f} s" for name, taken in of_dtype["first runs"].items())
        wall = ", ".join(f"{taken:.1f} s {whence}" for whence, taken in of_dtype["wall"].items())
        lines += [
            "",
            f"A first run, compiled from a warm cache: {first}. Wall time of a check with everything: {wall}.",
        ]
    return "\n".join(lines) + "\n"
