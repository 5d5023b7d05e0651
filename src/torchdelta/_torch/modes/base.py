"""The base of all modes: it sees every operation that a program runs, inside of a branch or a loop too.

A mode derives from `OperationMode` and implements `operate`, which runs one operation and returns its result. Torch
calls it for each operation while the mode is active (`with mode: …`). A composite operation, such as `layer_norm`,
comes as the operations that it consists of, in inference mode too.
"""

from __future__ import annotations

import functools
import threading
from abc import abstractmethod
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Operations(threading.local):
    """How many operations of this thread run in a mode, one inside of the other."""

    running = 0


_OPERATIONS = _Operations()


def is_inside_operation() -> bool:
    """Tell whether this thread runs an operation under a mode, and not the program itself."""
    return _OPERATIONS.running > 0


_BACKENDS = ("CPU", "CUDA", "MPS", "XPU", "HPU", "XLA", "MTIA", "PrivateUse1")


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Tell whether an operation consists of others, and has no kernel of its own for any device."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func._name)
    return has_kernel("CompositeImplicitAutograd") and not any(map(has_kernel, _BACKENDS))


def _are_strided(values: Any) -> bool:
    """Tell whether all tensors in nested values are strided; others may have a kernel of their own."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return all(leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized for leaf in leaves)


_COND = torch.ops.higher_order.cond
_WHILE = torch.ops.higher_order.while_loop


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes each operation to `operate`; of composite ones, `cond` and `while_loop` it passes the parts."""

    supports_higher_order_operators = True

    @abstractmethod
    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation, and return its result."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass a plain operation to `operate`, or run what consists of others under the mode; return the result.

        That is a `cond` or `while_loop`, and a composite operation: in inference mode it comes as a whole, because
        torch's autograd, which takes it apart, is left out. NotImplementedError for any other higher-order operator,
        because the mode cannot see its operations.
        """
        if not isinstance(func, HigherOrderOperator):
            if _is_composite(func) and _are_strided((args, kwargs)):
                with self:
                    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
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
