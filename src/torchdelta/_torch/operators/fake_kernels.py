"""Fake kernels: what an operator says of its results without computing them."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._pytree import tree_map_only

Calling = Callable[..., Any]


class Unknown(enum.Enum):
    """What stands for a number that depends on data, so that nobody knows it beforehand."""

    VALUE = enum.auto()


def call_faked(call: Calling, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call with tensors that have no values, all sizes numbers; a size that depends on data is a symbol."""
    mode = _mode()
    fake_args, fake_kwargs = tree_map_only(
        torch.Tensor, lambda tensor: _faked(mode, tensor, static_shapes=True), (args, dict(kwargs))
    )
    with mode, enable_python_dispatcher():
        return _with_numbers(call(*fake_args, **fake_kwargs), _hint)


class Symbolic:
    """A call with tensors whose sizes are symbols, which other numbers may be put in the place of."""

    def __init__(self, call: Calling, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.mode = _mode()
        self.given: list[FakeTensor] = []

        def faked(tensor: torch.Tensor) -> FakeTensor:
            fake = _faked(self.mode, tensor, source=LocalSource(f"t{len(self.given)}"))
            self.given.append(fake)
            return fake

        fake_args, fake_kwargs = tree_map_only(torch.Tensor, faked, (args, dict(kwargs)))
        # what is written in C++ for numbers is written once more in Python, for symbols
        with self.mode, enable_python_dispatcher():
            self._returned = call(*fake_args, **fake_kwargs)

    @property
    def fixes_sizes(self) -> bool:
        """Whether the call took a symbol for the number that it happened to be."""
        assert self.mode.shape_env is not None
        sizes: list[Any] = [size for fake in self.given for size in fake.shape if isinstance(size, torch.SymInt)]
        return any(self.mode.shape_env.replace(size.node.expr).is_number for size in sizes)

    def goes_other_ways_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether the call decided something by its sizes that it would not with these."""
        assert self.mode.shape_env is not None
        return not self.mode.shape_env.evaluate_guards_for_args(list(self.given), list(tensors), ignore_static=False)

    def returned(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the results; what is a number is the one that it is with inputs of these sizes."""
        numbers = self._numbers(tensors)

        def value_of(symbol: Any) -> Any:
            value = symbol.node.expr.subs(numbers)
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(symbol)]
            return kind(value) if value.is_number or value.is_Boolean else Unknown.VALUE

        return _with_numbers(self._returned, value_of)

    def sizes(self, fake: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
        """Return the sizes that a result has with inputs of these sizes; None for one that depends on data."""
        numbers = self._numbers(tensors)
        return tuple(_evaluated(size, numbers) for size in fake.shape)

    def _numbers(self, tensors: Sequence[torch.Tensor]) -> dict[Any, int]:
        """Return each symbol that is a size of an input, and the size that it stands for with these."""
        numbers: dict[Any, int] = {}
        for symbolic, tensor in zip(self.given, tensors, strict=True):
            for size, number in zip(symbolic.shape, tensor.shape, strict=True):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    numbers.setdefault(size.node.expr, number)
        return numbers


def is_unknown(size: Any) -> bool:
    """Tell whether a size depends on data, so that nobody knows it beforehand."""
    return isinstance(size, torch.SymInt) and _evaluated(size, {}) is None and not size.node.has_hint()


def lacks_fake_kernel(error: BaseException | None) -> bool:
    """Tell whether this was raised for want of a fake kernel."""
    while error is not None:
        if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def depends_on_data(error: BaseException) -> bool:
    """Tell whether this was raised because what is asked for cannot be known without data."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))


def has_no_fake_tensor(error: BaseException) -> bool:
    """Tell whether this was raised because torch has no fake tensors of the kind of an input."""
    return isinstance(error, UnsupportedFakeTensorException)


@contextmanager
def silent() -> Iterator[None]:
    """Keep torch from printing a traceback for each fake kernel that raises: whoever asked for it is told."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _mode() -> FakeTensorMode:
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def _faked(mode: FakeTensorMode, tensor: torch.Tensor, **how: Any) -> FakeTensor:
    try:
        return mode.from_tensor(tensor, **how)
    except Exception as error:  # before any fake kernel is called, whatever torch calls it
        raise UnsupportedFakeTensorException(f"{type(error).__name__}: {error}") from error


def _with_numbers(returned: Any, value_of: Callable[[Any], Any]) -> Any:
    """Put a number in the place of each symbol that is returned: as an object it would be all that is known of it."""
    return tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), value_of, returned)


def _hint(symbol: Any) -> Any:
    return symbol.node.hint if symbol.node.has_hint() else Unknown.VALUE


def _evaluated(size: Any, numbers: Mapping[Any, int]) -> int | None:
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = size.node.expr.subs(dict(numbers))
    return int(value) if value.is_number else None
