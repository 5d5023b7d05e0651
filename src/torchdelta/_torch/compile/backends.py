"""Replace the backend of every compile in a process.

Every way to compile (`torch.compile`, `Module.compile`, a decorator, a library) ends in one function of dynamo that
looks the backend up. `guarding_every` wraps that function. It does not import torch, because a script may still set
variables that torch reads at import: the function is wrapped once the script has imported it.
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
"""Takes a backend and its name, and returns the backend to use in its place."""

_MODULE = "torch._dynamo.eval_frame"
_LOOKUP = "get_compiler_fn"


@contextmanager
def guarding_every(wrap: Wrap) -> Iterator[None]:
    """Pass every backend through `wrap` while the context is open, except eager and the ones that torch uses inside.

    `wrap` is called when dynamo looks a backend up. Torch is not imported here: if dynamo is not imported yet, its
    function is wrapped as soon as it is.
    """
    with ExitStack() as undo:

        def wrap_lookup(module: ModuleType) -> None:
            look_up = getattr(module, _LOOKUP)
            setattr(module, _LOOKUP, functools.partial(_look_up_and_wrap, look_up, wrap))
            undo.callback(setattr, module, _LOOKUP, look_up)

        if _MODULE in sys.modules:
            wrap_lookup(sys.modules[_MODULE])
        else:
            finder = _WaitingFinder(_MODULE, wrap_lookup)
            sys.meta_path.insert(0, finder)
            undo.callback(sys.meta_path.remove, finder)
        yield


def _look_up_and_wrap(look_up: Callable[[Any], Any], wrap: Wrap, requested: Any) -> Any:
    """Look up the `requested` backend as dynamo does; return it, or a substitute that runs what `wrap` returns for it.

    `look_up` is dynamo's own function; `wrap` gets the backend and its name. The backend itself is returned if it is
    eager or one that torch uses inside, or if `wrap` returns it unchanged.
    """
    backend = look_up(requested)
    name = str(getattr(backend, "_compiler_name", None) or getattr(backend, "__name__", type(backend).__name__))
    if name == "eager" or _is_internal(backend):
        return backend
    wrapped = wrap(backend, name)
    return backend if wrapped is backend else _Substitute(backend, wrapped)


def _is_internal(backend: Any) -> bool:
    """Tell whether a backend is an unregistered function of dynamo, export or the higher-order operators."""
    from torch._dynamo.backends.registry import _is_registered_backend
    from torch._dynamo.eval_frame import innermost_backend

    innermost = innermost_backend(backend)
    function = getattr(innermost, "compiler_fn", innermost)
    if not isinstance(function, FunctionType) or _is_registered_backend(innermost):
        return False
    return function.__module__.startswith(("torch._dynamo.", "torch._export.", "torch._higher_order_ops."))


class _Substitute:
    """A backend in place of another one, with all attributes that dynamo reads from the original.

    Dynamo compares these attributes to tell whether compiled code fits a call. They stay the user's, so that exactly
    the same calls are compiled again.
    """

    def __init__(self, original: Any, wrapped: Backend) -> None:
        """Copy the attributes of the original, and keep the backend that is called in its place."""
        vars(self).update(vars(original))
        self._wrapped = wrapped

    def __call__(self, graph_module: Any, example_inputs: Any, **options: Any) -> Any:
        """Compile a graph with the wrapped backend, and return its result."""
        return self._wrapped(graph_module, example_inputs, **options)


class _WaitingFinder:
    """Finds one module as other finders do, and calls a function with it once it is imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the awaited module, whose loader runs the module and then calls the function with it.

        None for any other module, and if the awaited one is not found.
        """
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
