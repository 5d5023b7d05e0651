"""torch.compile from inside: compile a callable with any backend, and count the compiler's graphs and calls.

`compiling` is the way to compile here: it resets dynamo, holds the settings, and counts in a `Witness` the captured
graphs and the calls that ran compiled code. The rest of the module looks up backends, modes and settings by name, and
explains failures.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor
import torch._inductor.config
from torch._dynamo.exc import RestartAnalysis, SkipFrame, exceptions_allowed_to_be_fallback
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.utils import counters, get_metrics_context
from torch._inductor.exc import InvalidCxxCompiler

from torchdelta._torch.compile.seams import HandedGraph, Seam, graph_behind, hand_on
from torchdelta._torch.graphs.lift_graph import form_of, lift_graph
from torchdelta.errors import UsageError, message_of
from torchdelta.registry import nearest

Backend = Callable[..., Callable[..., Any]]

_EXPLANATION = "Explanation: "


@dataclass
class Witness:
    """Counts of a transform at work: graphs that were captured, and calls that ran transformed code."""

    captured: int = 0
    calls: int = 0
    is_compiler: bool = False
    forms: list[tuple[str, ...]] = field(default_factory=list)
    """The form of each graph that a compiler captured: see `form_of`."""
    result_forms: list[tuple[str, ...]] = field(default_factory=list)
    """The form of the graph that a pass made of each; empty if the result is not a graph."""
    changes: list[bool] = field(default_factory=list)
    """Of each graph that a pass got, whether it changed the graph; empty if that does not matter."""

    def eager_reasons(self) -> list[str]:
        """Return why parts of the program ran eagerly, in the compiler's own words; empty if it is not a compiler.

        Each is the headline of a message that dynamo has counted since its counters were cleared, with its explanation
        in parentheses if it has one. The same reason comes once.
        """
        if not self.is_compiler:
            return []
        messages = [message for category in ("graph_break", "unimplemented") for message in counters[category]]
        return list(dict.fromkeys(_headline(str(message)) for message in messages))

    def has_reached_recompile_limit(self) -> bool:
        """Tell whether the compiler gave up recompiling some frame, and ran it eagerly from then on."""
        return any("recompile limit" in reason for reason in self.eager_reasons())


def _headline(message: str) -> str:
    """Return the first line of a message of dynamo, with the line of its explanation in parentheses if it has one."""
    first, *lines = (line.strip() for line in message.strip().splitlines())
    explanations = (line.removeprefix(_EXPLANATION) for line in lines if line.startswith(_EXPLANATION))
    explanation = next(explanations, "")
    # newer versions of torch name what they do not support in the explanation alone
    return f"{first} ({explanation})" if explanation else first


def uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original of a callable that torch.compile wrapped, even repeatedly; any other callable itself."""
    while True:
        inner = vars(call).get("_torchdynamo_orig_callable") if hasattr(call, "__dict__") else None
        if isinstance(call, torch._dynamo.OptimizedModule):
            inner = call._orig_mod
        if inner is None:
            return call
        call = inner


def compiles_itself(call: Callable[..., Any]) -> bool:
    """Tell whether torch.compile or `Module.compile` was applied to a callable or, if it is a module, to one in it.

    Objects that a function refers to are not looked at.
    """
    if uncompiled(call) is not call:
        return True
    parts = call.modules() if isinstance(call, torch.nn.Module) else ()
    return any(uncompiled(part) is not part or part._compiled_call_impl is not None for part in parts)


def backend_named(name: str) -> Backend:
    """Return a registered torch.compile backend; raise UsageError with the nearest name if there is none."""
    try:
        return torch._dynamo.lookup_backend(name)
    except torch._dynamo.exc.InvalidBackend:
        raise UsageError(f"torch.compile has no backend {name!r}: {nearest(name, backend_names())}") from None


def backend_names() -> list[str]:
    """Return the sorted names of all registered backends, debugging ones included."""
    return sorted(torch._dynamo.list_backends(exclude_tags=()))


def mode_config(mode: str, *, dynamic: bool | None) -> dict[str, Any]:
    """Return the inductor settings that a torch.compile mode stands for; raise UsageError for an unknown mode.

    `dynamic` is only handed to torch, which may choose other settings for dynamic shapes.
    """
    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise UsageError(f"unknown mode {mode!r}: it is one of {', '.join(sorted(known))}")
    return torch._inductor.list_mode_options(mode, dynamic)


def config_of(*, mode: str | None = None, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the inductor settings, by name, that a mode and options of torch.compile stand for; the options win.

    A hyphen in the name of an option stands for an underscore. Without mode and options, the result is empty.
    UsageError if the mode or an option is unknown, or a value has a wrong type.
    """
    settings = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    require_known_config(settings)
    return {**(mode_config(mode, dynamic=None) if mode else {}), **settings}


def hint_of(value: Any) -> Any:
    """Return the value that a symbolic number had when its graph was captured, or None if that is not known.

    Any other value is returned unchanged.
    """
    is_symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return getattr(value.node, "hint", value) if is_symbolic else value


PARTS: Mapping[str, Any] = {
    "inductor": torch._inductor.config,
    "dynamo": torch._dynamo.config,
    "functorch": torch._functorch.config,
}
"""The parts of the compiler that have settings, each with its config module."""


def require_known_config(settings: Mapping[str, Any], part: str = "inductor") -> None:
    """Raise UsageError if a part has no setting of a name, or if a value has another type than the present one.

    `settings` has values by name. The type counts only if the present value is a bool, int, float or str; a whole
    number may stand for a float, and a truth value for no other number.
    """
    known = PARTS[part].get_config_copy()
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"{part} has no setting {name!r}: {nearest(name, known)}")
        present = known[name]
        kind = type(present)
        fits = type(value) in ((int, float) if kind is float else (kind,))
        if isinstance(present, (bool, int, float, str)) and not fits:
            raise UsageError(f"{part}'s setting {name} is {kind.__name__} ({present!r}), not {value!r}")


def reset() -> None:
    """Forget everything that dynamo has compiled in this process, the guards of it, and the tracebacks of its metrics.

    Dynamo ties the guards of a compilation to each object that they look at, by a finalizer, so that they end with the
    object. Most of these objects are functions and modules, which never end: without this, each compilation would stay
    in memory for as long as the process lives. Tracebacks are kept while a compilation is in progress.
    """
    torch._dynamo.reset()
    if not get_metrics_context().in_progress():
        get_metrics_context()._edits.clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        call = alive[1] if alive is not None else None
        if isinstance(getattr(getattr(call, "func", None), "__self__", None), CheckFunctionManager):
            finalizer.detach()


@contextmanager
def compiling(
    call: Callable[..., Any],
    backend: Backend,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    config: Mapping[str, Any] | None = None,
    lifted: bool = False,
    seam: Seam = hand_on,
) -> Iterator[tuple[Callable[..., Any], Witness]]:
    """Yield the callable compiled afresh with the backend, and a witness that counts its graphs and compiled calls.

    Compilation is lazy, also that of the backward, so all runs must be inside of the context, where the inductor
    settings `config` hold. Dynamo is reset at both ends, which drops all compiled code, and its counters are cleared
    first. `lifted` rewrites each captured graph to compute in float64. Then it comes to the `seam`, and from there to
    the backend. `dynamic` and `fullgraph` go to torch.compile. A failure of the compiler is raised by the call, even if
    the user's settings suppress it.
    """
    backend = _at_seam(backend, seam)
    if lifted:
        backend = _lifting(backend)
    witness = Witness(is_compiler=True)
    reset()
    counters.clear()
    # a failure of the compiler is a result here, even if the user's settings let it run eagerly then
    with torch._inductor.config.patch(dict(config or {})), torch._dynamo.config.patch(suppress_errors=False):
        compiled = torch.compile(call, backend=witnessed(backend, witness), dynamic=dynamic, fullgraph=fullgraph)
        try:
            yield compiled, witness
        finally:
            reset()


@contextmanager
def drawing_as_eager() -> Iterator[None]:
    """Let all code that inductor compiles inside, backwards included, draw the random numbers that eager draws."""
    with torch._inductor.config.patch(fallback_random=True):
        yield


def is_for_dynamo(error: BaseException) -> bool:
    """Tell whether a backend raised this to make dynamo capture in another way, which is not a failure."""
    return isinstance(error, (RestartAnalysis, SkipFrame, *exceptions_allowed_to_be_fallback))


@dataclass(frozen=True, kw_only=True)
class GraphOrigin:
    """A backend without the wrappers of torch.compile, with its name and settings."""

    backend: Backend
    name: str
    """The name that torch.compile knows it by, or the function's own."""
    config: dict[str, Any]
    """The settings of inductor that were passed with it."""

    @property
    def is_inductor(self) -> bool:
        """Whether it is torch's inductor."""
        return self.name == "inductor"


def origin_of(backend: str | Backend) -> GraphOrigin:
    """Return the backend without the wrappers of torch.compile, its name, and the settings that were passed with it.

    A text is the name of a registered backend, without settings: UsageError if there is none. Any other backend is
    named by its `compiler_name`, or `inductor` if it is that, or else by its function or class. If several wrappers
    have the same setting, the value of the innermost counts.
    """
    if isinstance(backend, str):
        return GraphOrigin(backend=backend_named(backend), name=backend, config={})
    inner: Any = backend
    config: dict[str, Any] = {}
    while True:
        settings = getattr(inner, "config", None)
        config |= settings if isinstance(settings, Mapping) else {}
        below = getattr(inner, "_torchdynamo_orig_backend", None) or getattr(inner, "compiler_fn", None)
        if below is None:
            break
        inner = below
    own_name = getattr(inner, "__name__", type(inner).__name__)
    known_name = "inductor" if inner is torch._dynamo.lookup_backend("inductor") else own_name
    name = getattr(inner, "compiler_name", None) or known_name
    return GraphOrigin(backend=inner, name=str(name), config=config)


def unfit_reason(error: BaseException) -> str | None:
    """Return a sentence if an error, or one that caused it, says that inductor finds no C++ compiler; otherwise None.

    The sentence says what to install.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InvalidCxxCompiler) or "InvalidCxxCompiler" in message_of(cause):
            return "inductor needs a C++ compiler and finds none: install g++ or clang, or set CXX"
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return None


def witnessed(backend: Backend, witness: Witness) -> Backend:
    """Return a backend that compiles with the given one; the witness counts its graphs and the compiled calls.

    The witness also gets the form of each graph, and that of the graph that the backend made of it.
    """

    def counting_backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        """Compile a graph with the given backend, and return the result so that its calls are counted."""
        witness.captured += 1
        witness.forms.append(form_of(graph_module))
        compiled = backend(graph_module, example_inputs, **options)
        result = graph_behind(compiled)
        witness.result_forms.append(() if result is None else form_of(result))
        return counted(compiled, witness)

    # dynamo prints this name when the backend fails
    counting_backend.__name__ = getattr(backend, "__name__", "backend")
    return counting_backend


def _at_seam(backend: Backend, seam: Seam) -> Backend:
    """Return a backend that hands each graph to the seam, as one of the level `dynamo`, and returns its callable.

    The function `make` at the seam calls the given backend. If the seam is `hand_on`, the backend itself is returned.
    """
    if seam is hand_on:
        return backend

    def backend_at_seam(graph_module: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        def make(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            return backend(graph, list(inputs), **options)

        return seam(HandedGraph(graph=graph_module, example_inputs=example_inputs, make=make, level="dynamo"))

    backend_at_seam.__name__ = getattr(backend, "__name__", "backend")
    return backend_at_seam


def _lifting(backend: Backend) -> Backend:
    """Return a backend that lifts each graph to float64, in place, before the given backend gets it."""

    def lifting_backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        return backend(lift_graph(graph_module), example_inputs, **options)

    lifting_backend.__name__ = getattr(backend, "__name__", "backend")
    return lifting_backend


def counted(function: Callable[..., Any], witness: Witness) -> Callable[..., Any]:
    """Return a function that calls the given one and returns its result; the witness counts the calls."""

    def counting(*args: Any, **kwargs: Any) -> Any:
        witness.calls += 1
        return function(*args, **kwargs)

    return counting
