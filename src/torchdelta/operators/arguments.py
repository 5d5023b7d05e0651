"""Arguments of an operator: built from a description, and described in short.

`build` makes the values that a command line such as `--args "f32[3, 4], dim=1"` describes; `describe` goes the other
way, for reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchdelta.errors import UsageError

MOST_SHOWN = 8
"""How many elements of a list or dict a description shows."""

_INTEGERS_BELOW = 10
"""Integers without bounds are drawn from 0 up to this."""


def build(description: Sequence[Any], seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the args and kwargs that `cli.op_arguments.read_arguments` described, with values drawn by the seed.

    The description is a pair: a list for the args, and a dict by name for the kwargs. UsageError if a tensor in it
    cannot be made on this machine, or if torch does not know a device.
    """
    args, kwargs = description
    generator = torch.Generator().manual_seed(seed)
    return (
        tuple(_build_value(each, generator) for each in args),
        {name: _build_value(each, generator) for name, each in kwargs.items()},
    )


def describe(value: Any) -> str:
    """Return an argument in short: `float32[3, 4]` for a tensor, `[int64[5], 2]` for a list, `'mean'` for a text.

    A list, tuple or dict shows its first `MOST_SHOWN` elements, described alike, and how many more there are. Numbers,
    texts and None are shown as Python writes them; dtypes, layouts, memory formats and devices as code. A nested tensor
    shows no sizes. Of any other object only the class is shown.
    """
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"nested {_after_dot(value.dtype)}"
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape)) if value.dim() else "()"
        return f"{_after_dot(value.dtype)}[{sizes}]"
    if isinstance(value, Mapping):
        return f"{{{_join_some([f'{key!r}: {describe(each)}' for key, each in value.items()])}}}"
    if type(value) is tuple:
        comma = "," if len(value) == 1 else ""
        return f"({_join_some([describe(each) for each in value])}{comma})"
    if isinstance(value, (list, tuple)):
        return f"[{_join_some([describe(each) for each in value])}]"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return f"torch.{_after_dot(value)}"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return type(value).__name__


def describe_all(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every argument of a call in short, keyword arguments as `dim=1`."""
    return (*map(describe, args), *(f"{name}={describe(value)}" for name, value in kwargs.items()))


def _join_some(texts: list[str]) -> str:
    """Return the first `MOST_SHOWN` texts between commas, and how many more there are."""
    more = [f"… {len(texts) - MOST_SHOWN} more"] if len(texts) > MOST_SHOWN else []
    return ", ".join(texts[:MOST_SHOWN] + more)


def _after_dot(value: object) -> str:
    """Return a value such as a dtype as text, without `torch.` in front."""
    return str(value).removeprefix("torch.")


def _build_value(description: Any, generator: torch.Generator) -> Any:
    """Return the value that a description stands for; ValueError if it is of an unknown kind.

    A plain value describes itself, and a list is built element by element. A dict has one item: the kind (`tensor`,
    `tuple`, `device`, …) and what it is built from. UsageError if a tensor cannot be made or a device is unknown.
    """
    if isinstance(description, list):
        return [_build_value(each, generator) for each in description]
    if not isinstance(description, dict):
        return description
    ((kind, of),) = description.items()
    match kind:
        case "tensor":
            return _draw_tensor(of, generator)
        case "tuple":
            return tuple(_build_value(each, generator) for each in of)
        case "dict":
            return {_build_value(key, generator): _build_value(value, generator) for key, value in of}
        case "float":
            return float(of)
        case "complex":
            return complex(*(_build_value(each, generator) for each in of))
        case "dtype" | "torch":
            return getattr(torch, of)
        case "device":
            return _device(of)
    raise ValueError(f"{kind!r} is not a kind of argument")


def _device(name: str) -> torch.device:
    """Return the device of that name, even if this machine lacks it; UsageError if torch cannot read the name."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device {name!r}: {str(error).splitlines()[0]}") from None


def _draw_tensor(tensor: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    """Return a random tensor with the described dtype, sizes, bounds, device and requires_grad.

    With `transposed`, its last two dimensions lie transposed in memory. UsageError if it cannot be made.
    """
    sizes = list(tensor["sizes"])
    if tensor["transposed"]:
        sizes[-2:] = reversed(sizes[-2:])
    try:
        values = _draw_values(sizes, getattr(torch, tensor["dtype"]), tensor["bounds"], generator)
        values = values.to(tensor["device"])
    except (RuntimeError, TypeError, AssertionError) as error:  # too many elements, or no such device in this build
        shown = f"{tensor['dtype']}[{', '.join(map(str, tensor['sizes']))}]"
        raise UsageError(f"{shown} cannot be made on {tensor['device']}: {str(error).splitlines()[0]}") from error
    values = values.mT if tensor["transposed"] else values
    return values.requires_grad_(tensor["requires_grad"])


def _draw_values(
    sizes: list[int], dtype: torch.dtype, bounds: Sequence[float] | None, generator: torch.Generator
) -> torch.Tensor:
    """Return random values of these sizes on the CPU: uniform between the bounds, without the upper one for integers.

    Without bounds, floats and complex numbers are normal, and integers are from 0 to 9. Booleans are even odds,
    whatever the bounds. Both parts of a complex number are within the bounds.
    """
    if dtype is torch.bool:
        return torch.rand(sizes, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        low, high = bounds or (0, _INTEGERS_BELOW)
        return torch.randint(int(low), int(high), sizes, generator=generator).to(dtype)
    if bounds is None:
        return torch.randn(sizes, dtype=dtype if dtype.is_complex else _wide(dtype), generator=generator).to(dtype)
    if dtype.is_complex:
        real = torch.float32 if dtype is torch.complex64 else torch.float64
        return torch.complex(*(_draw_values(sizes, real, bounds, generator) for _ in range(2)))
    low, high = bounds
    return torch.empty(sizes, dtype=torch.float64).uniform_(low, high, generator=generator).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to draw floats of a dtype in: float64 for float64, and float32 for any other."""
    return dtype if dtype is torch.float64 else torch.float32
