"""The parts that all probes share: the operator that they ask about, their entries in the table, and the conditions.

A probe is a function of an `OpSubject`. It returns a `Probe` with a verdict, or a text that says why it does not apply:

    def repeat(subject: OpSubject) -> Probe:
        ...

Conditions that several probes share are functions too, and stand in the table beside the probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from torchdelta._torch.operators import lookup
from torchdelta.compare.policy import Policy
from torchdelta.operators.inputs import OpInputs
from torchdelta.records.operators import Probe


@dataclass(frozen=True, kw_only=True)
class OpSubject:
    """An operator with its inputs, and how its results are judged."""

    inputs: OpInputs
    gradients: bool | str
    """Whether gradients are compared: True, False, or "auto" for only if an input is of floats."""
    policy: Policy
    policy_words: str
    ignore: tuple[str, ...]
    correctness: bool
    """Whether values are compared; otherwise only fake kernels, and whether the traces run."""


Ask = Callable[[OpSubject], Probe | str]
"""Returns the answer, or why the probe does not apply."""

Condition = Callable[[OpSubject], str]
"""Returns why a probe does not apply to the subject, or an empty text if it does."""


@dataclass(frozen=True, kw_only=True)
class ProbeEntry:
    """One line of the table of probes."""

    name: str
    ask: Ask
    needs: tuple[Condition, ...] = ()
    """Asked in this order before the probe; the first that is not met says why the probe does not apply."""
    compares_values: bool = True
    """Whether the probe only compares values, so that it is left out without `correctness`."""


def is_registered(subject: OpSubject) -> str:
    """Return why the subject is not a registered operator, or an empty text if it is one.

    A plain function declares nothing, and autograd sees its parts.
    """
    return "" if lookup.is_registered(subject.inputs.op) else "it is a function and not a registered operator"


def wants_gradients(subject: OpSubject) -> str:
    """Return why gradients are not asked about, or an empty text if they are.

    They are not asked about if `gradients` is False, or if it is "auto" and no input is a float or complex tensor.
    """
    if not subject.gradients:
        return "gradients were left out on request"
    if not subject.inputs.floats and subject.gradients == "auto":
        return "no input is of a kind that has gradients"
    return ""


def has_input_with_grad(subject: OpSubject) -> str:
    """Return "no input requires grad", or an empty text if a float or complex input does."""
    return "" if any(tensor.requires_grad for tensor in subject.inputs.floats) else "no input requires grad"


def has_backward(subject: OpSubject) -> str:
    """Return "the backward raises" or "no output requires grad", or an empty text if the backward runs eagerly."""
    if subject.inputs.backward_error:
        return "the backward raises"
    return "" if subject.inputs.own.reference.is_differentiable else "no output requires grad"


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Tell whether a value is a tensor."""
    return isinstance(value, torch.Tensor)
