"""Pairs of graphs for the cost of lockstep: an exported model and a candidate made of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from torchdelta.audit.faults import FAULTS
from torchdelta.audit.faults.base import eligible_nodes
from torchdelta.nodewise.matching import assign_handles

EARLY_FAULT = "scale_by_1_001"
SAME, FAULTY, DECOMPOSED = "the same graph", "a fault early", "decomposed"
CANDIDATES = (SAME, FAULTY, DECOMPOSED)


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """Both sides, each with its own weights, and their inputs."""

    reference: GraphModule
    candidate: GraphModule
    inputs: tuple[Any, ...]

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters and buffers of both sides."""
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for side in (self.reference, self.candidate)
            for tensor in (*side.parameters(), *side.buffers())
        }
        return sum(held.values())


class ConvNet(nn.Module):
    """Twelve convolutions, each with a norm and an activation; its activations are much larger than its weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for index in range(12):
            self.layers.append(nn.Conv2d(3 if index == 0 else channels, channels, 3, padding=1))
            self.layers.append(nn.BatchNorm2d(channels))
            self.layers.append(nn.ReLU())
        self.head = nn.Linear(channels, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        scores: torch.Tensor = self.head(self.layers(image).mean((2, 3)))
        return scores


class Bert(nn.Module):
    """A BERT encoder of transformers that takes its input by position and returns one tensor."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=1000,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=max(width // 64, 1),
            intermediate_size=4 * width,
        )
        self.model: nn.Module = BertModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state."""
        hidden: torch.Tensor = self.model(input_ids=tokens).last_hidden_state
        return hidden


def _conv_net(channels: int, size: int, batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return ConvNet(channels), (torch.randn(batch, 3, size, size),)


def _bert(width: int, layers: int, batch: int, length: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return Bert(width, layers), (torch.randint(0, 1000, (batch, length)),)


CONV, BERT = "12-layer conv net", "BERT"
_SIZES: dict[str, dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]]] = {
    CONV: {
        "full": lambda: _conv_net(64, 64, 8),
        "small": lambda: _conv_net(32, 32, 8),
        "warm-up": lambda: _conv_net(8, 8, 2),
    },
    BERT: {
        "full": lambda: _bert(768, 2, 4, 128),
        "small": lambda: _bert(256, 2, 4, 64),
        "warm-up": lambda: _bert(64, 1, 1, 8),
    },
}
MODELS = tuple(_SIZES)
SIZES = ("full", "small")
WORDS = {
    "full": f"{CONV}: 64 channels at 64 × 64, batch 8; {BERT}: hidden size 768, 2 layers, batch 4 of 128 tokens",
    "small": f"{CONV}: 32 channels at 32 × 32, batch 8; {BERT}: hidden size 256, 2 layers, batch 4 of 64 tokens",
}


def build(model: str, candidate: str, size: str) -> Graphs:
    """Return a model's exported graph and its candidate, in eval mode and with the weights of one seed."""
    torch.manual_seed(0)
    module, inputs = _SIZES[model][size]()
    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs, strict=False)
    assign_handles(program)
    reference = _module_of(program)
    if candidate == DECOMPOSED:
        other = copy.deepcopy(_module_of(program.run_decompositions()))
    else:
        other = copy.deepcopy(reference)
    if candidate == FAULTY:
        fault = FAULTS.get(EARLY_FAULT)
        fault.plant(eligible_nodes(fault, other.graph)[0])
        other.recompile()
    return Graphs(reference=reference, candidate=other, inputs=inputs)


def _module_of(program: torch.export.ExportedProgram) -> GraphModule:
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module
