"""Values as source text, which Python reads back to the last bit.

Three levels, from the top down:

- `write_tensors`: named tensors of a script, inline if they are small, and else in a file beside the script. Strides,
  `requires_grad` and shared memory stay, because a failure may need any of these;
- `write_contiguous`: the elements of one tensor, in the shortest text that gives the same bits;
- `write_value`: numbers, text, containers, dtypes, functions.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchdelta._torch import tensors as parts
from torchdelta._torch.graphs import targets
from torchdelta._torch.process import runtime
from torchdelta.errors import ReproUnwritable, UsageError
from torchdelta.program.copies import copy_together

INLINE = 64
"""A tensor of at most so many elements is written into the script, because a reader can still look them over."""
SEEDED = "torch.manual_seed(0)"


@dataclass(kw_only=True)
class TensorSource:
    """The source text of a script's tensors."""

    setup: list[str] = field(default_factory=list)
    """Statements before the expressions."""
    expressions: dict[str, str] = field(default_factory=dict)
    """The expression of each tensor, by name."""
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors for the file beside the script, by name; the script loads them as `saved`."""
    embeds_data: bool = False
    """Whether the text or the file has values of the user's tensors."""
    is_replaced: bool = False
    """Whether random numbers replace some values."""
    is_shared: bool = False
    """Whether some tensors share memory."""
    taken: Collection[str] = ()
    """The names that other tensors have in the file."""

    def save(self, name: str, tensor: torch.Tensor) -> str:
        """Add a tensor to the file under its name, with a number behind it if that is taken; return its expression."""
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        key = next(key for key in itertools.chain([name], numbered) if key not in {*self.taken, *self.saved})
        self.saved[key] = tensor
        return f"saved[{write_text(key)}]"


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    *,
    recipes: Mapping[str, str] | None = None,
    data: bool = True,
    taken: Collection[str] = (),
) -> TensorSource:
    """Return the source text of named tensors: statements, an expression for each, and tensors for a file beside it.

    `recipes` has expressions that give the values of some of them, by name; that of a tensor which shares its storage
    with another is not used. Large tensors whose elements are not all equal, and sparse, subclassed and lazily negated
    ones, go to the file, as copies, under names that are not `taken`. Without `data`, nothing goes there, and random
    numbers replace all values but those of a used recipe and memory of zeros or of ones alone. Raise ReproUnwritable if
    a tensor has no source, and UsageError if a recipe that is used gives other values.
    """
    source = TensorSource(taken=taken)
    if not data and any(not is_trivial(tensor) for tensor in tensors.values()):
        source.setup.append(SEEDED)
    for shared in _by_memory(tensors):
        if len(shared) == 1:
            ((name, tensor),) = shared.items()
            source.expressions[name] = _add_kind(
                _write_one(name, tensor, (recipes or {}).get(name), data, source), tensor
            )
        else:
            source.is_shared = True
            _write_shared(shared, data, source)
    source.saved = dict(zip(source.saved, copy_together(list(source.saved.values()), name="inputs"), strict=True))
    return source


def _by_memory(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors in groups that share a storage, each as a dict by name; one without a storage is alone."""
    groups: dict[object, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(parts.storage_key(tensor) or name, {})[name] = tensor
    return list(groups.values())


def _write_one(name: str, tensor: torch.Tensor, recipe: str | None, data: bool, source: TensorSource) -> str:
    """Return the expression of one tensor's values and strides; setup and tensors for the file are added to `source`.

    Device, `requires_grad` and Parameter class are left to `_add_kind`. A `recipe` is returned itself, or UsageError
    raised if it gives other values. Large, sparse, subclassed and lazily negated tensors are saved. Without `data`,
    random numbers replace values (`_write_values`); raise ReproUnwritable for a tensor that they cannot replace.
    """
    if recipe is not None:
        _require_same(recipe, tensor, name)
        return recipe
    if not parts.has_own_buffer(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_neg():
        if not data:
            raise ReproUnwritable(f"{name} is a {parts.describe(tensor)}, which random numbers cannot replace")
        source.embeds_data = True
        return source.save(name, tensor.detach())
    if tensor.is_conj():
        return _write_one(name, tensor.detach().conj(), None, data, source) + ".conj()"
    if _is_permuted(tensor):
        if not _is_inline(tensor, data):
            source.embeds_data = True
            return source.save(name, _compact(tensor))
        written = _write_values(tensor, data, source)
        if tensor.is_contiguous():
            return written
        layout = f"{tuple(tensor.shape)}, {tensor.stride()}, dtype={tensor.dtype}"
        return f"torch.empty_strided({layout}).copy_({written})"
    _write_shared({name: tensor}, data, source)
    return source.expressions.pop(name)


def _write_shared(shared: Mapping[str, torch.Tensor], data: bool, source: TensorSource) -> None:
    """Add a piece of memory to the setup of `source`, and each tensor of the group to its expressions, as a view of it.

    `shared` has tensors of one storage by name; if it is a single one, its expression lacks the code of `_add_kind`.
    Large memory of unequal elements is saved to the file, unless random numbers replace it because there is no `data`.
    Raise ReproUnwritable if the tensors have several dtypes, or if there are several and one is a lazy negation.
    """
    names = ", ".join(shared)
    if len({tensor.dtype for tensor in shared.values()}) > 1:
        raise ReproUnwritable(f"{names} are one piece of memory in several dtypes: give the graph copies of them")
    if len(shared) > 1 and any(tensor.is_neg() for tensor in shared.values()):
        raise ReproUnwritable(f"{names} are one piece of memory, in part negated: give the graph copies of them")
    first = next(iter(shared.values()))
    first = first.conj() if first.is_conj() else first
    start = min(int(tensor.storage_offset()) for tensor in shared.values())
    # the start may move, but not its alignment
    start -= start % 16
    end = max(int(tensor.storage_offset()) + _span(tensor) for tensor in shared.values())
    memory = first.detach().as_strided((end - start,), (1,), start)
    name = "memory" if "memory = " not in "".join(source.setup) else f"memory_{len(source.setup)}"
    if _is_inline(memory, data):
        # on its device at once, because views that are moved one by one would not share it
        source.setup.append(f"{name} = {_on_device(_write_values(memory, data, source), memory.device)}")
    else:
        source.embeds_data = True
        source.setup.append(f"{name} = {source.save(name, memory.clone())}")
    for key, tensor in shared.items():
        layout = f"{tuple(tensor.shape)}, {tensor.stride()}, {int(tensor.storage_offset()) - start}"
        view = f"{name}.as_strided({layout})" + (".conj()" if tensor.is_conj() else "")
        source.expressions[key] = _add_kind(view, tensor) if len(shared) > 1 else view


def _write_values(tensor: torch.Tensor, data: bool, source: TensorSource) -> str:
    """Return an expression of a contiguous tensor with the same elements, or with random ones if `data` is false.

    Tensors of zeros or of ones alone keep their elements, because they are not data. `source` notes whether the user's
    values are embedded or replaced.
    """
    if not data and not is_trivial(tensor):
        source.is_replaced = True
        return _write_random(tensor)
    source.embeds_data |= not is_trivial(tensor)
    return write_contiguous(tensor)


def _write_random(tensor: torch.Tensor) -> str:
    """Return an expression that draws a CPU tensor of the same shape and dtype.

    Integers come from the range of the tensor, which must have elements; floats and complex numbers are normally
    distributed.
    """
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if dtype is torch.bool:
        return f"(torch.rand({shape}) < 0.5)"
    if dtype.is_complex or dtype.is_floating_point:
        if dtype.itemsize == 1:
            return f"torch.randn({shape}).to({dtype})"
        return f"torch.randn({shape}{'' if dtype is torch.float32 else f', dtype={dtype}'})"
    # the same range, because the integers may be indices
    wide = tensor.detach().cpu().to(torch.int64)
    end = min(int(wide.max()) + 1, torch.iinfo(torch.int64).max)
    return f"torch.randint({min(int(wide.min()), end - 1)}, {end}, {shape}, dtype={dtype})"


def _add_kind(expression: str, tensor: torch.Tensor) -> str:
    """Return the expression with code behind or around it for the tensor's device, `requires_grad` and Parameter class.

    It is returned unchanged for a plain tensor on the CPU that does not require grad. A saved tensor gets no code for
    its device, because the file has it.
    """
    if not expression.startswith("saved"):
        expression = _on_device(expression, tensor.device)
    if isinstance(tensor, torch.nn.Parameter):
        return f"torch.nn.Parameter({expression}{'' if tensor.requires_grad else ', requires_grad=False'})"
    if not tensor.requires_grad:
        return expression
    if expression.startswith("torch.tensor(") and expression.count("(") == 1:
        return f"{expression[:-1]}, requires_grad=True)"
    return f"{_parenthesise(expression)}.requires_grad_()"


def _on_device(expression: str, device: torch.device) -> str:
    """Return the expression of a CPU tensor with code behind it that moves the tensor to the device."""
    return expression if device.type == "cpu" else f"{_parenthesise(expression)}.to({str(device)!r})"


def _parenthesise(expression: str) -> str:
    """Return the expression in parentheses if it is a comparison (` < `), else unchanged."""
    return f"({expression})" if " < " in expression else expression


def _is_inline(tensor: torch.Tensor, data: bool) -> bool:
    """Tell whether a tensor is written into the script: it is small, its elements are equal, or `data` is false."""
    return not data or tensor.numel() <= INLINE or is_constant(tensor)


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements of memory lie between a tensor's first and last element, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill the beginning of their storage without gaps or overlaps, in any order of axes.

    An empty tensor needs only an offset of zero.
    """
    steps = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    expected = 1
    for stride, size in steps:
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return tensor.storage_offset() == 0


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with the same strides, in memory of its own and without a gradient."""
    duplicate = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return duplicate.copy_(tensor.detach())


def _require_same(recipe: str, tensor: torch.Tensor, name: str) -> None:
    """Raise UsageError if a recipe fails, or does not give the tensor's values, dtype, shape and strides.

    The device may differ. The recipe is evaluated; torch's random generators are as before afterwards. `name` is for
    messages.
    """
    try:
        with runtime.drawing_from():
            result = eval(recipe, {"torch": torch})
    except Exception as error:
        raise UsageError(f"the source of {name} fails: {recipe}: {type(error).__name__}: {error}") from error
    is_like = isinstance(result, torch.Tensor) and (result.dtype, result.shape, result.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    if not is_like or not _has_same_values(result.detach().cpu(), tensor.detach().cpu()):
        raise UsageError(f"{recipe} does not give the values of {name}")


def _has_same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, with NaN where the other has NaN."""
    return torch.equal(first, second) or parts.has_same_bits(first, second)


_NUMPY = {torch.float16: np.float16, torch.float32: np.float32}
_INFERRED = (torch.float32, torch.int64, torch.bool)
"""The dtypes that torch infers from Python numbers, so that a literal needs no dtype."""
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_BY_BYTES = "torch.tensor({bytes}, dtype=torch.uint8).view({dtype}).reshape({shape})"


def write_contiguous(tensor: torch.Tensor) -> str:
    """Return an expression of a contiguous CPU tensor with the same shape, dtype and elements, bit for bit.

    It is a literal, or a call such as `torch.zeros` for equal elements; and bytes if no literal gives the same bits.
    """
    plain = tensor.detach().cpu().contiguous()
    if not plain.numel():
        return f"torch.empty({tuple(plain.shape)}, dtype={plain.dtype})"
    try:
        written = _write_constant(plain) if plain.numel() > 1 and _is_constant(plain) else _write_elements(plain)
        if parts.has_same_bits(_read(written), plain):
            return written
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        pass  # some dtypes can only be stored, and have no operations
    # bytes also keep the payload of a NaN, which has no other text
    return _BY_BYTES.format(
        bytes=plain.reshape(-1).view(torch.uint8).tolist(), dtype=plain.dtype, shape=tuple(plain.shape)
    )


def is_trivial(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is all zeros, all ones or empty, which does not count as the user's data.

    False for a tensor that cannot be compared with numbers.
    """
    if not tensor.numel():
        return True
    try:
        return bool((tensor == 0).all() or (tensor == 1).all())
    except (NotImplementedError, RuntimeError):
        return False


def is_constant(tensor: torch.Tensor) -> bool:
    """Tell whether all elements have the same bits, so that one number describes them.

    True also for a tensor of one element or none.
    """
    return tensor.numel() < 2 or _is_constant(tensor.detach().cpu().contiguous())


def _is_constant(plain: torch.Tensor) -> bool:
    """Tell whether all elements of a contiguous CPU tensor, at least one, have the same bits."""
    cells = plain.reshape(-1, 1).view(torch.uint8)
    return bool((cells == cells[0]).all())


def _write_constant(plain: torch.Tensor) -> str:
    """Return `torch.zeros`, `torch.ones` or `torch.full` for a CPU tensor whose elements, at least one, are equal."""
    shape, keyword = tuple(plain.shape), _keyword(plain.dtype)
    (text,) = _texts(plain.reshape(-1)[:1])
    if text in ("0.0", "1.0") or (text in ("0", "1") and plain.dtype is not torch.int64):
        return f"torch.{'zeros' if text in ('0', '0.0') else 'ones'}({shape}{keyword})"
    return f"torch.full({shape}, {text}{keyword})"


def _write_elements(plain: torch.Tensor) -> str:
    """Return `torch.tensor(…)` with all elements of a CPU tensor as nested lists."""
    return f"torch.tensor({_nested(_texts(plain.reshape(-1)), plain.shape)}{_keyword(plain.dtype)})"


def _keyword(dtype: torch.dtype) -> str:
    """Return `, dtype=…` for a dtype that torch does not infer from Python numbers, or else an empty text."""
    return "" if dtype in _INFERRED else f", dtype={dtype}"


def _nested(texts: Sequence[str], shape: Sequence[int]) -> str:
    """Return the texts of a tensor's elements as nested lists of a shape; for an empty shape, the only text itself."""
    if not shape:
        return texts[0]
    step = len(texts) // shape[0]
    rows = (texts[index * step : (index + 1) * step] for index in range(shape[0]))
    return f"[{', '.join(_nested(row, shape[1:]) for row in rows)}]"


def _texts(flat: torch.Tensor) -> list[str]:
    """Return a text for each element of a flat tensor: a short number that the dtype rounds to the same one.

    Complex elements are written as `complex(real, imag)`, NaN and Inf as `torch.nan` and `torch.inf`.
    """
    if flat.dtype.is_complex:
        real = _REAL[flat.dtype]
        parts = torch.view_as_real(flat).to(torch.float64).tolist()
        return [write_complex(complex(_shortened(x, real), _shortened(y, real))) for x, y in parts]
    if flat.dtype.is_floating_point:
        return [write_float(_shortened(value, flat.dtype)) for value in flat.to(torch.float64).tolist()]
    return [repr(value) for value in flat.tolist()]


def _shortened(value: float, dtype: torch.dtype) -> float:
    """Return a float with a short text that the dtype rounds to `value`, which is a number of that dtype.

    `value` itself is returned if no shorter text is found, and for float64, zero, NaN and Inf.
    """
    if dtype is torch.float64 or not math.isfinite(value) or value == 0.0:
        return value
    if dtype in _NUMPY:
        shorter = float(str(_NUMPY[dtype](value)))
        return shorter if float(torch.tensor(shorter, dtype=dtype)) == value else value
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        if float(torch.tensor(shorter, dtype=dtype)) == value:
            return shorter
    return value


def _read(expression: str) -> torch.Tensor:
    """Evaluate an expression that this module wrote, and return its tensor."""
    # safe, because this module has just written it from numbers
    tensor = eval(expression, {"torch": torch})
    assert isinstance(tensor, torch.Tensor)
    return tensor


Refer = Callable[[Any], str | None]
"""Returns the script's name for a value, or None if the value has none and is written out."""
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_INDEXED = re.compile(r"\.(\d+)(?=\.|$)")


def write_value(value: Any, refer: Refer = lambda _: None) -> str:
    """Return an expression of the value; raise ReproUnwritable for one that has none, such as a tensor or a module.

    `refer` is asked first about the value, and about the items of containers: if it returns a name, that is the
    expression. Functions and classes are written by their names, without an import.
    """
    if (name := refer(value)) is not None:
        return name
    if type(value) is str:
        return write_text(value)
    if value is None or value is Ellipsis or type(value) in (bool, int, bytes):
        return "..." if value is Ellipsis else repr(value)
    if type(value) is float:
        return write_float(value)
    if type(value) is complex:
        return write_complex(value)
    if isinstance(value, torch.Size):
        return f"torch.Size([{_joined(value, refer)}])"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({_joined(value, refer)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{_joined(value, refer)}]"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}([{', '.join(sorted(write_value(item, refer) for item in value))}])"
    if isinstance(value, dict):
        entries = (f"{write_value(key, refer)}: {write_value(item, refer)}" for key, item in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, (slice, range)):
        return f"{type(value).__name__}({_joined((value.start, value.stop, value.step), refer)})"
    return _write_atom(value)


def write_text(value: str) -> str:
    """Return a string literal, in double quotes unless the text has quotes, backslashes or unprintable characters."""
    return repr(value) if any(char in value for char in "\"'\\") or not value.isprintable() else f'"{value}"'


def write_float(value: float) -> str:
    """Return a float literal, or torch's name for NaN and Inf, which have no literal."""
    if math.isfinite(value):
        return repr(value)
    return "torch.nan" if math.isnan(value) else "torch.inf" if value > 0 else "-torch.inf"


def write_complex(value: complex) -> str:
    """Return `complex(real, imag)`, because a complex literal loses the sign of a zero."""
    return f"complex({write_float(value.real)}, {write_float(value.imag)})"


def write_index(index: Any, refer: Refer) -> str:
    """Return the text between the brackets of an index, with slices as `start:stop` and commas between a tuple's items.

    `refer` returns the name of a value that has one, or None. Raise ReproUnwritable if a part has no expression.
    """
    parts = index if type(index) is tuple and index else (index,)
    written = ", ".join(
        _write_slice(part, refer) if isinstance(part, slice) else write_value(part, refer) for part in parts
    )
    return f"{written}," if type(index) is tuple and len(index) == 1 else written


def write_callable(target: Any, imports: set[str] | None = None) -> str:
    """Return a script's expression for a callable, which is found by its name and not copied.

    It is `torch.ops.…` for an operator, the name alone for a builtin, and otherwise `module.name`. The module of a
    function is added to `imports`, if that is given, unless it is `builtins`, `torch` or a submodule of torch. Raise
    ReproUnwritable if the callable cannot be found by a name.
    """
    name = getattr(target, "__name__", "")
    for place, home in (("torch.nn.functional", torch.nn.functional), ("torch", torch)):
        if name.isidentifier() and getattr(home, name, None) is target:
            return f"{place}.{name}"
    try:
        kind, _, rest = targets.name_target(target).partition(" ")
    except ValueError as error:
        raise ReproUnwritable(f"a script cannot call {reprlib.repr(target)}: {error}") from error
    if kind in ("operator", "packet"):
        return "torch.ops." + rest.replace("::", ".") + ("" if kind == "packet" or "." in rest else ".default")
    if kind == "higher_order":
        return f"torch.ops.higher_order.{rest.partition(' ')[0]}"
    module, _, path = rest.partition(":")
    module = "operator" if module == "_operator" else module
    if module == "builtins":
        return path
    if imports is not None and module.partition(".")[0] != "torch":
        imports.add(module)
    return f"{module}.{path}"


def attribute_path(base: str, target: str) -> str:
    """Return the expression of a part of `base` at a dotted path, with numbers as indices: `base.layers[0].weight`.

    If `base` is empty, the expression begins with the dot or the index.
    """
    return base + _INDEXED.sub(r"[\1]", f".{target}")


def _write_slice(part: slice, refer: Refer) -> str:
    """Return a slice as the text between brackets, `start:stop` or `start:stop:step`; nothing is written for None."""
    start, stop, step = (
        "" if edge is None else write_value(edge, refer) for edge in (part.start, part.stop, part.step)
    )
    return f"{start}:{stop}{f':{step}' if step else ''}"


def _write_atom(value: Any) -> str:
    """Return an expression of a constant of torch, a device, an enum member or a callable.

    Raise ReproUnwritable for anything else, and for a callable that cannot be found by a name.
    """
    if isinstance(value, _TORCH_CONSTANTS):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, enum.Enum):
        return f"{write_callable(type(value))}.{value.name}"
    if callable(value) and not isinstance(value, (torch.Tensor, torch.nn.Module)):
        return write_callable(value)
    kind = type(value)
    raise ReproUnwritable(
        f"{reprlib.repr(value)} is a {kind.__module__}.{kind.__qualname__}, which has no literal: "
        "make it an input of the graph"
    )


def _joined(values: Any, refer: Refer) -> str:
    """Return the expressions of several values, with commas between them; ReproUnwritable if one has none."""
    return ", ".join(write_value(value, refer) for value in values)
