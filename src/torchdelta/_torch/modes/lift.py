"""Run a program in double precision although it names lower dtypes itself.

The tensors of the lifted program are float64 already; the mode `Lift` handles the dtypes that the code names. A cast to
a lower float and a new tensor of a lower float become float64, because a correct program need not round there. Random
numbers are drawn in the dtype in which the program draws them, so that the lifted run gets the same ones.

    with Lift(drawn_in=torch.float32):
        truth = model_in_float64(inputs_in_float64)

`graphs/lift_graph.py` does the same to the code of a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchdelta._torch.modes.base import OperationMode

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


# operations that only draw: their result depends on the dtype in which they draw
_DRAWS = frozenset(
    {
        "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "inductor_randint",
        "inductor_random", "log_normal_", "multinomial",
        "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
        "random_", "randperm", "uniform_",
    }
)  # fmt: skip

BITS = "a view of bits"
"""The name in `Lift.unlifted` of an operation that reads floats as integers, or integers as floats."""


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that the lifted program has in place of this one: that in `_WIDE`, or else the same."""
    return _WIDE.get(dtype, dtype)


def is_narrow(dtype: torch.dtype) -> bool:
    """Tell whether the lifted program has a wider dtype in place of this one."""
    return dtype in _WIDE


class Lift(OperationMode):
    """While active, operations run in float64 as far as they can; `drawn_in` is the program's dtype for random numbers.

    An operation that has no float64 kernel runs in `drawn_in`, and its name is added to `unlifted`, the caller's set if
    one is given. So are a cast to a float of one byte, and a view of bits.
    """

    def __init__(self, drawn_in: torch.dtype = torch.float32, unlifted: set[str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn_in = drawn_in
        self.unlifted = set() if unlifted is None else unlifted

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation in float64, as far as that is possible, and return its result.

        Dtypes that the call names, and operands of lower dtypes, are lifted; operands of an operation that writes to
        any of them are not. Integers become float64 if the result would be a lower float. Random numbers, dropout masks
        and constants keep the program's rounding; a constant whose elements are computed, as by linspace, does not.
        Some views as another dtype read the native bits: see `_view_bits`. An operation that fails in float64 runs
        natively: see `_run_native`.
        """
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        if name in _DRAWS:
            return self._draw(func, args, kwargs)
        if name == "native_dropout":
            return self._drop(func, *args, **kwargs)
        if name == "view" and (bits := self._view_bits(func, *args, **kwargs)) is not None:
            return bits
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors and is_computing_factory(name):
            return func(*args, **{**kwargs, "dtype": widened(kwargs.get("dtype") or torch.get_default_dtype())})
        if not tensors:
            # a constant keeps the program's rounding: 0.1 in float32 is the program's 0.1
            return tree_map(_widen, func(*args, **kwargs))
        native = args, kwargs
        kwargs = {key: self._dtype(value) for key, value in kwargs.items()}
        args = tuple(self._dtype(value) for value in args)
        if any(tensor.dtype in _WIDE for tensor in tensors) and not func._schema.is_mutable:
            args, kwargs = tree_map(_widen, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            return self._run_native(func, *native, error)
        is_rounded = any(isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDE for leaf in tree_leaves(result))
        if is_rounded and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            return self._run_on_integers(func, args, kwargs, result)
        return result

    def _run_on_integers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result in float64 of an operation that makes lower floats of integers.

        It runs once more on the integers in float64. If it takes integers alone, as one that dequantizes does, it is
        added to `unlifted`, and `result`, that of the integers, is cast.
        """
        try:
            return func(*tree_map(_as_float64, args), **kwargs)
        except Exception:  # an operator of the user's may check its dtypes in any way
            self.unlifted.add(func._schema.name)
            return tree_map(_widen, result)

    def _dtype(self, value: Any) -> Any:
        """Return the lifted dtype of a dtype, any other value unchanged; a float of one byte is noted in `unlifted`."""
        if isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize == 1:
            self.unlifted.add(f"a cast to {str(value).removeprefix('torch.')}")
        return widened(value) if isinstance(value, torch.dtype) else value

    def _run_native(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Run an operation that failed in float64 once more, natively, and return its result in float64.

        `args` and `kwargs` are those of the program; their float64 tensors are cast to `drawn_in`. The operation is
        added to `unlifted`. Raise `error`, that of float64, if it fails again or writes to its operands.
        """
        narrow_args, narrow_kwargs = tree_map(self._narrow, (args, kwargs))
        try:
            result = func(*narrow_args, **narrow_kwargs)
        except (NotImplementedError, RuntimeError):
            raise error from None
        if func._schema.is_mutable:
            raise error
        self.unlifted.add(func._schema.name)
        return tree_map(_widen, result)

    def _narrow(self, value: Any) -> Any:
        """Return a float64 tensor in the program's dtype, and any other value unchanged."""
        is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float64
        return value.to(self.drawn_in) if is_wide else value

    def _view_bits(self, func: Callable[..., Any], tensor: torch.Tensor, dtype: Any) -> torch.Tensor | None:
        """Read the bits of a tensor as another dtype, as the program does natively, and return the result in float64.

        Bits of float64 would mean nothing to the program. `BITS` is added to `unlifted`. Return None, and add nothing,
        for a view of another shape, for one as a dtype that the lifted tensor has already, and if `drawn_in` is not a
        lower dtype. None too if `dtype` is not a lower one, and has eight bytes or the tensor is not of floats: such
        bits are the same in float64.
        """
        if not isinstance(dtype, torch.dtype) or widened(dtype) is tensor.dtype or self.drawn_in not in _WIDE:
            return None
        if dtype not in _WIDE and (not tensor.is_floating_point() or dtype.itemsize == torch.float64.itemsize):
            return None
        self.unlifted.add(BITS)
        bits: torch.Tensor = _widen(func(self._narrow(tensor), dtype))
        return bits

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw random numbers by `func` in the program's dtype, and return them widened.

        Float64 operands are cast to `drawn_in` first. If that is float64, lower dtypes that the call names are lifted,
        and so is the default dtype, because a lifted graph draws so. An operation that draws in place, or into `out`,
        writes to that operand, which is returned.
        """
        if self.drawn_in not in _WIDE:
            kwargs = {key: self._dtype(value) for key, value in kwargs.items()}
            names_dtype = kwargs.get("dtype") is not None or "out" in kwargs
            if is_drawing_factory(func._schema.name.partition("::")[2], args) and not names_dtype:
                kwargs["dtype"] = widened(torch.get_default_dtype())
        narrow_args, narrow_kwargs = tree_map(self._narrow, (args, kwargs))
        drawn = func(*narrow_args, **narrow_kwargs)
        written = next(iter(args), None) if args and drawn is narrow_args[0] else kwargs.get("out")
        if not isinstance(written, torch.Tensor):
            return tree_map(_widen, drawn)
        if written.shape != drawn.shape:  # an empty `out` takes any shape
            written.resize_(drawn.shape)
        return written.copy_(drawn)

    def _drop(self, func: Callable[..., Any], input: torch.Tensor, p: float, train: bool | None) -> Any:
        """Draw the mask of a dropout in the program's dtype, apply it in float64, and return the result and mask."""
        survivors, mask = func(torch.ones_like(input, dtype=self.drawn_in), p, train)
        return input * (survivors != 0) / (1.0 - p if 0.0 < p < 1.0 and train is not False else 1.0), mask


def is_computing_factory(name: str) -> bool:
    """Tell whether a function that makes a tensor of plain numbers computes its elements, and so rounds them.

    These are linspace, logspace and the windows, by name.
    """
    return name in ("linspace", "logspace") or name.endswith("_window")


def is_drawing_factory(name: str, args: tuple[Any, ...]) -> bool:
    """Tell whether a function makes a tensor of random floats without reading one: `rand`, `randn`, some `normal`."""
    return name in ("rand", "randn", "normal") and not any(isinstance(arg, torch.Tensor) for arg in args)


def _as_float64(value: Any) -> Any:
    """Return a tensor of any dtype cast to float64; any other value unchanged."""
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else value


def _widen(value: Any) -> Any:
    """Return a tensor of a narrow dtype cast to the wide one; any other value unchanged."""
    return value.to(widened(value.dtype)) if isinstance(value, torch.Tensor) and value.dtype in _WIDE else value
