"""Fake kernels: an operator's function from sizes, strides and dtypes of inputs to those of its results.

`call_faked` calls one with the sizes of real inputs, `Symbolic` with sizes that are symbols. The predicates at the end
tell why one raised.
"""

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
    """Stands for a number that depends on data and is unknown without it."""

    VALUE = enum.auto()


def call_faked(call: Calling, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run `call` with a fake tensor of the same sizes in place of each tensor, and return its results.

    Tensors among the results are fake; a size of theirs that depends on data is a symbol. A number that depends on data
    is `Unknown.VALUE`. Raises what the call raises, and UnsupportedFakeTensorException if an input cannot be faked.
    """
    mode = _mode()
    fake_args, fake_kwargs = tree_map_only(
        torch.Tensor, lambda tensor: _fake(mode, tensor, static_shapes=True), (args, dict(kwargs))
    )
    with mode, enable_python_dispatcher():
        return _replace_symbols(call(*fake_args, **fake_kwargs), _hint)


class Symbolic:
    """A call with fake tensors whose sizes are symbols, and its results for any sizes put in their place.

    The methods take real `tensors`, one for each tensor among the arguments and in their order, of the same ranks.
    """

    def __init__(self, call: Calling, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make the call at once, on fake tensors of symbolic sizes, and keep its results for the other methods.

        Raises what the call raises, and UnsupportedFakeTensorException if an input cannot be faked.
        """
        self.mode = _mode()
        self.inputs: list[FakeTensor] = []

        def fake(tensor: torch.Tensor) -> FakeTensor:
            symbolic = _fake(self.mode, tensor, source=LocalSource(f"t{len(self.inputs)}"))
            self.inputs.append(symbolic)
            return symbolic

        fake_args, fake_kwargs = tree_map_only(torch.Tensor, fake, (args, dict(kwargs)))
        # the Python dispatcher, because decompositions in C++ take only numbers as sizes
        with self.mode, enable_python_dispatcher():
            self._returned = call(*fake_args, **fake_kwargs)

    @property
    def fixes_sizes(self) -> bool:
        """Whether the call required that a symbolic size is the number that it was traced with."""
        assert self.mode.shape_env is not None
        sizes: list[Any] = [size for fake in self.inputs for size in fake.shape if isinstance(size, torch.SymInt)]
        return any(self.mode.shape_env.replace(size.node.expr).is_number for size in sizes)

    def has_other_branches_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether the call took a branch by its sizes that it would not take with these tensors' sizes."""
        assert self.mode.shape_env is not None
        return not self.mode.shape_env.evaluate_guards_for_args(list(self.inputs), list(tensors), ignore_static=False)

    def returned(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the results, in which symbolic numbers have the values that they have for inputs of these sizes.

        A number that depends on data is `Unknown.VALUE`. Tensors stay fake and keep their symbolic sizes: `sizes`
        returns theirs.
        """
        numbers = self._numbers(tensors)

        def value_of(symbol: Any) -> Any:
            value = symbol.node.expr.subs(numbers)
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(symbol)]
            return kind(value) if value.is_number or value.is_Boolean else Unknown.VALUE

        return _replace_symbols(self._returned, value_of)

    def sizes(self, fake: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
        """Return the sizes that a result has with inputs of these sizes; None for one that depends on data."""
        numbers = self._numbers(tensors)
        return tuple(_evaluate(size, numbers) for size in fake.shape)

    def _numbers(self, tensors: Sequence[torch.Tensor]) -> dict[Any, int]:
        """Return the number of each symbol that is an input's size, by the symbol, for inputs of these sizes.

        The first number counts if a symbol stands for several sizes. Fixed sizes and expressions are left out.
        """
        numbers: dict[Any, int] = {}
        for symbolic, tensor in zip(self.inputs, tensors, strict=True):
            for size, number in zip(symbolic.shape, tensor.shape, strict=True):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    numbers.setdefault(size.node.expr, number)
        return numbers


def is_unknown(size: Any) -> bool:
    """Tell whether a size depends on data and is unknown without it."""
    return isinstance(size, torch.SymInt) and _evaluate(size, {}) is None and not size.node.has_hint()


def lacks_fake_kernel(error: BaseException | None) -> bool:
    """Tell whether an error, or one that caused it or was being handled, was raised for want of a fake kernel.

    Its class or its message tells. False for None.
    """
    while error is not None:
        if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def depends_on_data(error: BaseException) -> bool:
    """Tell whether an error was raised because a result depends on data."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))


def has_no_fake_tensor(error: BaseException) -> bool:
    """Tell whether an error was raised because torch has no fake tensors of an input's kind."""
    return isinstance(error, UnsupportedFakeTensorException)


@contextmanager
def silent() -> Iterator[None]:
    """Switch off the log of torch's fake tensors while the body runs: it has a traceback for each error."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _mode() -> FakeTensorMode:
    """Return a new mode of fake tensors, in which sizes and numbers that depend on data become symbols."""
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, **options: Any) -> FakeTensor:
    """Return a fake tensor like a real one; UnsupportedFakeTensorException if torch has none of its kind."""
    try:
        return mode.from_tensor(tensor, **options)
    except Exception as error:  # torch raises many types here, all before any fake kernel is called
        raise UnsupportedFakeTensorException(f"{type(error).__name__}: {error}") from error


def _replace_symbols(returned: Any, value_of: Callable[[Any], Any]) -> Any:
    """Return nested results with `value_of(symbol)` in the place of each symbolic number; the rest is unchanged."""
    return tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), value_of, returned)


def _hint(symbol: Any) -> Any:
    """Return the value that a symbolic number had in the call, or `Unknown.VALUE` if it depends on data."""
    return symbol.node.hint if symbol.node.has_hint() else Unknown.VALUE


def _evaluate(size: Any, numbers: Mapping[Any, int]) -> int | None:
    """Return a size with numbers in the place of symbols, or None if other symbols remain."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = size.node.expr.subs(dict(numbers))
    return int(value) if value.is_number else None
