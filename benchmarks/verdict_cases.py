"""The trials of the verdict benchmark: which models with which weights, under which transforms, with which faults.

A seed decides more than the random numbers. Its parity selects the half (tuned or held out), its second bit the
initialisation of the weights, its third bit train or eval mode. So every kind of case is in both halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchdelta.program.programs import Program, load_module

MODELS_FILE = Path(__file__).parent.parent / "tests" / "programs" / "models.py"
DTYPES = ("float32", "bfloat16")
SEEDS = tuple(range(12))
FAULT_SEEDS = (0, 1, 2, 3)
"""Each seed plants the faults at other nodes. All are in eval mode, because one kind of fault is dropout there."""

TUNED, HELD_OUT = "tuned", "held out"
_TUNED_MODELS = ("bert", "llama", "mixtral", "resnet", "lstm", "recommender")

CLEAN, CONTROL, FAULT = "clean", "control", "fault"
_ALL_STAGES = ("forward", "gradients", "steps")
FAULT_STAGES = ("forward", "gradients")

SUBSET_MODELS = ("recommender", "moe")
SUBSET_SEEDS = (0,)
SUBSET_FAULTS = 4
"""The subset has every fourth kind of fault."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model with its weights and inputs, shared by its clean cases and its faults."""

    model: str
    dtype: str
    seed: int

    @property
    def half(self) -> str:
        """`tuned` if the constants of the rule may be tuned on it, else `held out`."""
        return TUNED if self.model in _TUNED_MODELS and self.seed % 2 == 0 else HELD_OUT

    @property
    def is_trained(self) -> bool:
        """Whether the model is in train mode."""
        return self.seed // 4 % 2 == 1

    def program(self) -> Program:
        """Build the model."""
        module, args = model_file().build(
            self.model,
            dtype=getattr(torch, self.dtype),
            seed=self.seed,
            probing=self.seed // 2 % 2 == 1,
            train=self.is_trained,
        )
        return Program(name=self.model, call=module, args=args)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One check: a subject under a transform, or exported with a fault planted."""

    subject: Subject
    kind: str
    transform: str
    """The name of a transform, or of a kind of fault."""

    @property
    def key(self) -> str:
        """The text that identifies a trial."""
        subject = self.subject
        return f"{self.kind}/{subject.model}/{subject.dtype}/{subject.seed}/{self.transform}"

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that are compared."""
        return _ALL_STAGES if self.kind == CLEAN else FAULT_STAGES


def model_file() -> Any:
    """Return the module with the models."""
    return load_module(str(MODELS_FILE), what="model")


def subjects(models: Sequence[str], dtypes: Sequence[str], seeds: Sequence[int]) -> Iterator[Subject]:
    """Yield every model in every dtype, all seeds of a model in a row, because the compiler's cache is warm then."""
    for model in models:
        for dtype in dtypes:
            for seed in seeds:
                yield Subject(model=model, dtype=dtype, seed=seed)


def trials(subject: Subject, fault_kinds: Sequence[str]) -> Iterator[Trial]:
    """Yield the clean cases of a subject, then its control without a fault, then its faults."""
    yield Trial(subject=subject, kind=CLEAN, transform="inductor")
    if subject.seed % 3 < 2:
        yield Trial(subject=subject, kind=CLEAN, transform=("decompose", "aot_eager")[subject.seed % 3])
    if subject.seed in FAULT_SEEDS:
        yield Trial(subject=subject, kind=CONTROL, transform="export")
        for kind in fault_kinds:
            yield Trial(subject=subject, kind=FAULT, transform=kind)
