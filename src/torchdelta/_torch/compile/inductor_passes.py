"""Watch inductor's passes: which pass runs, and which graph it leaves behind.

Inductor runs its passes in three phases, and each pass inside of a `GraphTransformObserver` of torch. `watching` wraps
the functions of the phases and the methods of the observer, and gives every phase a `Chain` of graph versions
(`graph_versions.py`). A change outside of any observer is named after the pass that comes next. The other functions
help to run such versions again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import get_aot_compilation_context
from torch._dynamo.backends import common
from torch.fx import GraphModule, Node
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from torchdelta._torch.compile.graph_versions import Chain
from torchdelta.errors import TorchDeltaError, UsageError

PRE_GRAD, JOINT, POST_GRAD = PHASES = ("pre-grad", "joint", "post-grad")
_FUNCTIONS = {
    "_recursive_pre_grad_passes": PRE_GRAD,
    "_recursive_joint_graph_passes": JOINT,
    "_recursive_post_grad_passes": POST_GRAD,
}
"""The functions of inductor that run a phase. Each calls itself for inner graphs."""
_METHODS = ("__enter__", "__exit__", "apply_graph_pass", "apply_gm_pass")
_CACHEABLE = "_check_can_cache"
_MARK = "is_torchdelta_watching"

Failed = Callable[[str, Exception], None]
"""Takes a description of the step that failed and the exception; it must not raise."""


@contextmanager
def watching(done: Callable[[Chain], None], failed: Failed) -> Iterator[None]:
    """Follow every graph through inductor's passes while the context is open; `done` gets its chain after each phase.

    The chain has the versions of the graph: the first, and one behind each pass that changed it. Errors in following a
    graph go to `failed` and not to the compiler. Inductor's cache is bypassed. UsageError if passes are watched
    already.
    """
    # here, because the import takes seconds; a process that compiles imports it anyway
    from torch._inductor import compile_fx
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache

    def refuse_to_cache(*_: Any) -> None:
        raise BypassFxGraphCache("torchdelta watches the passes")

    if is_watching():
        raise UsageError("passes are watched already: one watch_passes() sees all of them, leave the inner one out")
    recorder = _PassRecorder(done=done, failed=failed)
    functions = {name: vars(compile_fx)[name] for name in _FUNCTIONS}
    methods = {name: vars(GraphTransformObserver)[name] for name in _METHODS}
    cacheable = vars(FxGraphCache)[_CACHEABLE]
    try:
        # a setting of torch would hold for this thread alone
        setattr(FxGraphCache, _CACHEABLE, staticmethod(refuse_to_cache))
        for name, stock in functions.items():
            vars(compile_fx)[name] = recorder.phase(_FUNCTIONS[name], stock)
        for name, method in recorder.methods(methods).items():
            setattr(GraphTransformObserver, name, method)
        yield
    finally:
        setattr(FxGraphCache, _CACHEABLE, cacheable)
        vars(compile_fx).update(functions)
        for name, stock in methods.items():
            setattr(GraphTransformObserver, name, stock)


def is_watching() -> bool:
    """Tell whether a `watching` context is open in this process."""
    return hasattr(vars(GraphTransformObserver)["__enter__"], _MARK)


@contextmanager
def around_programs(around: Callable[[Callable[..., Any], GraphModule], Callable[..., Any]]) -> Iterator[None]:
    """Wrap the function of torch that gives a captured graph to AOTAutograd, while the context is open.

    `around` takes a function without arguments that compiles the graph, and the graph; it returns the callable to use
    in place of the compiled one. Modules that are not graphs are compiled without it.
    """
    stock = vars(common)["aot_module_simplified"]

    @functools.wraps(stock)
    def surrounded(mod: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = functools.partial(stock, mod, *args, **kwargs)
        return around(compiled, mod) if isinstance(mod, GraphModule) else compiled()

    vars(common)["aot_module_simplified"] = surrounded
    try:
        yield
    finally:
        vars(common)["aot_module_simplified"] = stock


def current_graph_number() -> int | None:
    """Return AOTAutograd's number of the graph that it compiles now, or None if there is none.

    A forward and its backward have the same number.
    """
    compiled, _, _ = get_aot_compilation_context()
    number = compiled[0].partition("_")[0] if compiled else ""
    return int(number) if number.isdigit() else None


def empty_input(node: Node, inputs: Sequence[Node], values: Mapping[str, Any]) -> torch.Tensor:
    """Return an uninitialised tensor with the shape, strides, dtype and device that the graph states for `node`.

    `node` is one of its `inputs`. `values` has those that are known, by name: symbolic sizes get their numbers from
    them. Raise TorchDeltaError if the graph does not state that the input is a tensor, and TypeError if a symbolic size
    of it cannot be computed from `values`.
    """
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor):
        raise TorchDeltaError(f"the graph does not say what {node.name} is")
    sizes: dict[Any, int] = {}
    for each in inputs:
        known, real = each.meta.get("val"), values.get(each.name)
        if isinstance(known, torch.SymInt) and isinstance(real, int):
            sizes[known.node.expr] = real
        elif isinstance(known, torch.Tensor) and isinstance(real, torch.Tensor):
            pairs = zip((*known.shape, *known.stride()), (*real.shape, *real.stride()), strict=False)
            sizes |= {size.node.expr: number for size, number in pairs if isinstance(size, torch.SymInt)}

    def number(size: Any) -> int:
        # by substitution, because int() of a symbolic size adds a guard, and the compiler specializes on the number
        return size if isinstance(size, int) else int(size.node.expr.xreplace(sizes))

    shape, strides = ([number(size) for size in each] for each in (fake.shape, fake.stride()))
    return torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off while the body runs: graphs of AOTAutograd have its casts as nodes already."""
    with torch._C._DisableAutocast():
        yield


@dataclass(kw_only=True)
class _PassRecorder:
    """Follows each thread through phases and passes, and keeps a chain for each phase that is running."""

    done: Callable[[Chain], None]
    failed: Failed
    threads: threading.local = field(default_factory=threading.local)

    @property
    def chains(self) -> list[Chain]:
        """The chains of the phases that this thread is in, the innermost last."""
        return self.threads.__dict__.setdefault("chains", [])  # type: ignore[no-any-return]

    @property
    def names(self) -> list[str]:
        """The passes that this thread is in, the innermost last."""
        return self.threads.__dict__.setdefault("names", [])  # type: ignore[no-any-return]

    @property
    def functions(self) -> dict[int, Any]:
        """The function that each running observer applies, by the observer's id."""
        return self.threads.__dict__.setdefault("functions", {})  # type: ignore[no-any-return]

    def phase(self, phase: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return `stock`, the function of inductor for a phase of passes, wrapped so that its graph gets a chain.

        At the end of the phase the chain goes to `done`; if `stock` raises, it is dropped. Inner graphs, for which the
        function calls itself, belong to the chain of the outer one.
        """

        @functools.wraps(stock)
        def watched(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
            """Run the phase on a graph and return its result; pass the chain of the graph to `done`.

            An inner graph has no chain: the chain of the outer one gets a version if the graph was changed.
            """
            # an inner graph is part of the outer one's chain
            if self.chains and self.chains[-1].phase == phase:
                result = stock(gm, *args, **kwargs)
                self._attempt(self._look, "")
                return result
            chain = Chain(phase=phase, module=gm)
            self.chains.append(chain)
            self._attempt(chain.look, "")
            try:
                result = stock(gm, *args, **kwargs)
            finally:
                self.chains.remove(chain)
            self._attempt(self._finish, chain, result)
            return result

        return watched

    def methods(self, stock: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Return the methods of an observer by name, wrapped so that the recorder knows which pass runs.

        `stock` has torch's own methods by name. Entering and leaving an observer add versions of a changed graph; the
        `apply_…` methods remember the function that they apply.
        """

        @functools.wraps(stock["__enter__"])
        def enter(observer: Any) -> Any:
            entered = stock["__enter__"](observer)
            self._attempt(self._enter, observer)
            return entered

        @functools.wraps(stock["__exit__"])
        def leave(observer: Any, *error: Any) -> Any:
            is_suppressed = stock["__exit__"](observer, *error)
            self._attempt(self._leave)
            return is_suppressed

        def applying(name: str) -> Callable[..., Any]:
            """Return torch's method of this name, wrapped so that the function it applies is known meanwhile."""

            @functools.wraps(stock[name])
            def apply(observer: Any, pass_fn: Any) -> Any:
                """Apply a function by torch's method and return its result; `functions` has the function meanwhile."""
                self.functions[id(observer)] = pass_fn
                try:
                    return stock[name](observer, pass_fn)
                finally:
                    self.functions.pop(id(observer), None)

            return apply

        setattr(enter, _MARK, True)
        return {"__enter__": enter, "__exit__": leave} | {name: applying(name) for name in _METHODS[2:]}

    def _enter(self, observer: Any) -> None:
        """Note that a pass begins, and add a version of the graph to the chain if it was changed before the pass.

        `observer` is torch's observer of the pass. If its graph is neither the chain's module nor inside of that, it
        becomes the chain's module. Only a pass outside of any other is counted. Outside of a phase only the name of the
        pass is noted.
        """
        name = _name_of(observer, self.functions.get(id(observer)))
        self.names.append(name)
        if not self.chains:
            return
        chain = self.chains[-1]
        if len(self.names) == 1:
            chain.passes += 1
        if not any(observer.gm is module for module in chain.module.modules()):  # type: ignore[union-attr]
            chain.module = observer.gm  # a step before this pass replaced the graph
        self._look(f"what comes before {name}" if len(self.names) == 1 else " > ".join(self.names[:-1]))

    def _leave(self) -> None:
        """Note that the innermost pass ends, and add a version of the graph to the chain if it was changed."""
        try:
            self._look(" > ".join(self.names))
        finally:
            self.names.pop()

    def _look(self, name: str) -> None:
        """Add a version to the innermost chain if its graph was changed; do nothing outside of a phase.

        The version has this name. If that is empty, it has the names of the passes that are running, or if none is,
        `what comes between two passes`.
        """
        if self.chains:
            self.chains[-1].look(name or " > ".join(self.names) or "what comes between two passes")

    def _finish(self, chain: Chain, result: Any) -> None:
        """Add the last version of a phase to its chain, end the chain, and pass it to `done`.

        If the `result` of the phase is a graph, the last version is taken from that.
        """
        if isinstance(result, GraphModule):
            chain.module = result
        chain.look("what comes after the last pass")
        chain.end()
        self.done(chain)

    def _attempt(self, step: Callable[..., None], *args: Any) -> None:
        """Call a step of the recorder; its exception goes to `failed` and is not raised."""
        try:
            step(*args)
        except Exception as error:
            self.failed("a graph could not be taken", error)


def _name_of(observer: Any, applied: Any) -> str:
    """Return the name of the pass that an observer of torch runs.

    If it is a hook for the user's passes, the name of the function `applied`, if known, follows in brackets.
    """
    while isinstance(applied, functools.partial):
        applied = applied.func
    if applied is None or "custom" not in observer.passname:
        return str(observer.passname)
    name = getattr(applied, "__qualname__", type(applied).__qualname__).rpartition("<locals>.")[2]
    return f"{observer.passname} ({name})"
