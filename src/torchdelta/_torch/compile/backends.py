"""Every compile of a process: each backend that dynamo is given passes somebody who may put another in its place.

Whoever compiles, by `torch.compile`, `Module.compile`, a decorator or in a library, and whatever stance is set, dynamo
looks the backend up in one function of its own; there somebody stands. Torch is not imported for that: a script may
still set variables that torch reads when it is imported, so the place is taken once the script has imported it.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdelta._torch.compile.dynamo import Backend

Wrap = Callable[["Backend", str], "Backend"]
"""Takes a backend and its name, and returns the one to use."""

_PLACE = "torch._dynamo.eval_frame"
_LOOKUP = "get_compiler_fn"


@contextmanager
def guarding_every(wrap: Wrap) -> Iterator[None]:
    """Let every backend pass `wrap` while the context is open; eager, and what torch captures for itself, do not."""
    with ExitStack() as undo:

        def stand_in(place: ModuleType) -> None:
            look_up = getattr(place, _LOOKUP)
            setattr(place, _LOOKUP, functools.partial(_passing, look_up, wrap))
            undo.callback(setattr, place, _LOOKUP, look_up)

        if _PLACE in sys.modules:
            stand_in(sys.modules[_PLACE])
        else:
            waiting = _Waiting(_PLACE, stand_in)
            sys.meta_path.insert(0, waiting)
            undo.callback(sys.meta_path.remove, waiting)
        yield


def _passing(look_up: Callable[[Any], Any], wrap: Wrap, asked_for: Any) -> Any:
    found = look_up(asked_for)
    name = str(getattr(found, "_compiler_name", None) or getattr(found, "__name__", type(found).__name__))
    if name == "eager" or _captures_for_torch(found):
        return found
    wrapped = wrap(found, name)
    return found if wrapped is found else _InPlaceOf(found, wrapped)


def _captures_for_torch(found: Any) -> bool:
    """Tell whether a backend is a function inside of torch that nobody can name: export and control flow have some."""
    from torch._dynamo.backends.registry import _is_registered_backend
    from torch._dynamo.eval_frame import innermost_backend

    innermost = innermost_backend(found)
    function = getattr(innermost, "compiler_fn", innermost)
    if not isinstance(function, FunctionType) or _is_registered_backend(innermost):
        return False
    return function.__module__.startswith(("torch._dynamo.", "torch._export.", "torch._higher_order_ops."))


class _InPlaceOf:
    """A backend in the place of another, with all that dynamo reads from that one.

    Dynamo compares what it wraps to tell whether compiled code fits a call: that stays the user's own, so that the same
    calls are compiled again, and the same are not.
    """

    def __init__(self, found: Any, wrapped: Backend) -> None:
        vars(self).update(vars(found))
        self._wrapped = wrapped

    def __call__(self, graph_module: Any, example_inputs: Any, **options: Any) -> Any:
        return self._wrapped(graph_module, example_inputs, **options)


class _Waiting:
    """A finder that finds one module as others do, and tells somebody when that has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module that is waited for; None of any other."""
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
