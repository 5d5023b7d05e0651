"""Tensors as source text: inline where they are small, and otherwise in a file beside the script.

Strides, `requires_grad` and which of them share memory are kept, because a failure may need any of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torchdelta._torch import runtime
from torchdelta._torch import tensors as parts
from torchdelta.errors import ReproUnwritable, UsageError
from torchdelta.execute.copies import copy_together
from torchdelta.repro.numbers import is_constant, is_trivial, write_contiguous

INLINE = 64
"""Elements of a tensor that a reader can still look over."""
SEEDED = "torch.manual_seed(0)"


@dataclass(kw_only=True)
class TensorSource:
    """What a script makes its tensors of."""

    setup: list[str] = field(default_factory=list)
    """Statements that come first."""
    expressions: dict[str, str] = field(default_factory=dict)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    """What goes to the file beside the script, by name; the script calls it `saved`."""
    embeds_data: bool = False
    is_replaced: bool = False
    """Whether random numbers stand for values."""
    is_shared: bool = False
    """Whether some of them are one piece of memory."""


def write_tensors(
    given: Mapping[str, torch.Tensor], *, recipes: Mapping[str, str] | None = None, data: bool = True
) -> TensorSource:
    """Return the source of named tensors; without `data` random numbers stand for their values."""
    source = TensorSource()
    if not data and any(not is_trivial(tensor) for tensor in given.values()):
        source.setup.append(SEEDED)
    for shared in _by_memory(given):
        if len(shared) == 1:
            ((name, tensor),) = shared.items()
            source.expressions[name] = _dressed(
                _write_one(name, tensor, (recipes or {}).get(name), data, source), tensor
            )
        else:
            source.is_shared = True
            _write_shared(shared, data, source)
    source.saved = dict(zip(source.saved, copy_together(list(source.saved.values()), name="inputs"), strict=True))
    return source


def _by_memory(given: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    groups: dict[object, dict[str, torch.Tensor]] = {}
    for name, tensor in given.items():
        groups.setdefault(parts.storage_key(tensor) or name, {})[name] = tensor
    return list(groups.values())


def _write_one(name: str, tensor: torch.Tensor, recipe: str | None, data: bool, source: TensorSource) -> str:
    if recipe is not None:
        _require_same(recipe, tensor, name)
        return recipe
    if not parts.has_own_buffer(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_neg():
        if not data:
            raise ReproUnwritable(f"{name} is a {parts.describe(tensor)}, which random numbers cannot stand for")
        source.embeds_data = True
        source.saved[name] = tensor.detach()
        return f'saved["{name}"]'
    if tensor.is_conj():
        return _write_one(name, tensor.detach().conj(), None, data, source) + ".conj()"
    if _is_permuted(tensor):
        if not _is_inline(tensor, data):
            source.embeds_data = True
            source.saved[name] = _compact(tensor)
            return f'saved["{name}"]'
        written = _write_values(tensor, data, source)
        if tensor.is_contiguous():
            return written
        layout = f"{tuple(tensor.shape)}, {tensor.stride()}, dtype={tensor.dtype}"
        return f"torch.empty_strided({layout}).copy_({written})"
    _write_shared({name: tensor}, data, source)
    return source.expressions.pop(name)


def _write_shared(shared: Mapping[str, torch.Tensor], data: bool, source: TensorSource) -> None:
    """Write one piece of memory, and each tensor as a view of it."""
    first = next(iter(shared.values()))
    if any(tensor.dtype != first.dtype for tensor in shared.values()):
        names = ", ".join(shared)
        raise ReproUnwritable(f"{names} are one piece of memory in several dtypes: give the graph copies of them")
    start = min(int(tensor.storage_offset()) for tensor in shared.values())
    # where memory starts is not kept, but how it is aligned
    start -= start % 16
    end = max(int(tensor.storage_offset()) + _span(tensor) for tensor in shared.values())
    memory = first.detach().as_strided((end - start,), (1,), start)
    name = "memory" if "memory = " not in "".join(source.setup) else f"memory_{len(source.setup)}"
    if _is_inline(memory, data):
        source.setup.append(f"{name} = {_write_values(memory, data, source)}")
    else:
        source.embeds_data = True
        source.saved[name] = memory.clone()
        source.setup.append(f'{name} = saved["{name}"]')
    for key, tensor in shared.items():
        layout = f"{tuple(tensor.shape)}, {tensor.stride()}, {int(tensor.storage_offset()) - start}"
        view = f"{name}.as_strided({layout})"
        source.expressions[key] = _dressed(view, tensor) if len(shared) > 1 else view


def _write_values(tensor: torch.Tensor, data: bool, source: TensorSource) -> str:
    if not data and not is_trivial(tensor):
        source.is_replaced = True
        return _write_random(tensor)
    source.embeds_data |= not is_trivial(tensor)
    return write_contiguous(tensor)


def _write_random(tensor: torch.Tensor) -> str:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if dtype is torch.bool:
        return f"torch.rand({shape}) < 0.5"
    if dtype.is_complex or dtype.is_floating_point:
        if dtype.itemsize == 1:
            return f"torch.randn({shape}).to({dtype})"
        return f"torch.randn({shape}{'' if dtype is torch.float32 else f', dtype={dtype}'})"
    # indices must stay within what they index
    wide = tensor.detach().cpu().to(torch.int64)
    return f"torch.randint({int(wide.min())}, {int(wide.max()) + 1}, {shape}, dtype={dtype})"


def _dressed(expression: str, tensor: torch.Tensor) -> str:
    """Add to the values of a tensor where it is and whether it is trained."""
    if tensor.device.type != "cpu" and not expression.startswith("saved"):
        expression = f"{_atom(expression)}.to({str(tensor.device)!r})"
    if isinstance(tensor, torch.nn.Parameter):
        return f"torch.nn.Parameter({expression}{'' if tensor.requires_grad else ', requires_grad=False'})"
    if not tensor.requires_grad:
        return expression
    if expression.startswith("torch.tensor(") and expression.count("(") == 1:
        return f"{expression[:-1]}, requires_grad=True)"
    return f"{_atom(expression)}.requires_grad_()"


def _atom(expression: str) -> str:
    return f"({expression})" if " < " in expression else expression


def _is_inline(tensor: torch.Tensor, data: bool) -> bool:
    return not data or tensor.numel() <= INLINE or is_constant(tensor)


def _span(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill their memory from its start, each a place of its own, in whichever order."""
    steps = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    filled = 1
    for stride, size in steps:
        if stride != filled and tensor.numel():
            return False
        filled *= size
    return tensor.storage_offset() == 0


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def _require_same(recipe: str, tensor: torch.Tensor, name: str) -> None:
    try:
        with runtime.drawing_from():
            made = eval(recipe, {"torch": torch})
    except Exception as error:
        raise UsageError(f"the source of {name} fails: {recipe}: {type(error).__name__}: {error}") from error
    is_like = isinstance(made, torch.Tensor) and (made.dtype, made.shape, made.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    if not is_like or not torch.equal(made.detach().cpu(), tensor.detach().cpu()):
        raise UsageError(f"{recipe} does not give the values of {name}")
