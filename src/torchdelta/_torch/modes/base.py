"""The base of all modes: it sees every operation that a program runs, inside of a branch or a loop too.

A mode derives from `OperationMode` and implements `operate`, which runs one operation and returns its result. Torch
calls it for each operation while the mode is active (`with mode: …`).
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode


class _Operations(threading.local):
    """How many operations of this thread run in a mode, one inside of the other."""

    running = 0


_OPERATIONS = _Operations()


def is_inside_operation() -> bool:
    """Tell whether this thread runs an operation under a mode, and not the program itself."""
    return _OPERATIONS.running > 0


_COND = torch.ops.higher_order.cond
_WHILE = torch.ops.higher_order.while_loop


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes each operation to `operate`; the graphs of `cond` and `while_loop` run under the mode too."""

    supports_higher_order_operators = True

    @abstractmethod
    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, and return its result."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass a plain operation to `operate`, or run a `cond` or `while_loop` under the mode; return the result.

        NotImplementedError for any other higher-order operator, because the mode cannot see its operations.
        """
        if not isinstance(func, HigherOrderOperator):
            _OPERATIONS.running += 1
            try:
                return self.operate(func, args, kwargs)
            finally:
                _OPERATIONS.running -= 1
        if func is _COND:
            return self._branch(*args, **(kwargs or {}))
        if func is _WHILE:
            return self._loop(*args, **(kwargs or {}))
        raise NotImplementedError(f"{func} runs operations that a mode cannot see")

    def _branch(self, predicate: Any, if_true: Any, if_false: Any, operands: Any = ()) -> Any:
        """Run the branch of a `cond` that the predicate selects, under the mode, and return its outputs."""
        with self:
            return (if_true if bool(predicate) else if_false)(*operands)

    def _loop(self, condition: Any, body: Any, carried: Any, additional: Any = ()) -> Any:
        """Run a `while_loop` under the mode; return the carried values after its last round.

        Without any round they are the given ones.
        """
        with self:
            while bool(condition(*carried, *additional)):
                carried = tuple(body(*carried, *additional))
        return carried
