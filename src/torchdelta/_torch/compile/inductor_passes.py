"""Where inductor runs its passes over a graph: in three phases, and every pass under an observer of torch's.

Whoever stands there sees which pass runs and what the graph is behind it. What a phase does under no observer's eyes is
noted with the name of the pass that it comes before.
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
"""Each calls itself for the graphs inside of its own."""
_METHODS = ("__enter__", "__exit__", "apply_graph_pass", "apply_gm_pass")
_CACHEABLE = "_check_can_cache"
_MARK = "is_torchdelta_watching"

Failed = Callable[[str, Exception], None]
"""Is told what could not be done, and what was raised; it must not raise."""


@contextmanager
def noting(done: Callable[[Chain], None], failed: Failed) -> Iterator[None]:
    """Take every version of every graph that inductor's passes make; `done` gets the chain when a phase is over.

    Graphs are compiled anew although a cache may have them: of those no pass would be seen.
    """
    # takes seconds, and is imported by whoever compiles
    from torch._inductor import compile_fx
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache

    def refuse_to_cache(*_: Any) -> None:
        raise BypassFxGraphCache("torchdelta watches the passes")

    if is_noting():
        raise UsageError("passes are watched already: one watch_passes() sees all of them, leave the inner one out")
    notebook = _Notebook(done=done, failed=failed)
    functions = {name: vars(compile_fx)[name] for name in _FUNCTIONS}
    methods = {name: vars(GraphTransformObserver)[name] for name in _METHODS}
    cacheable = vars(FxGraphCache)[_CACHEABLE]
    try:
        # a setting would hold for this thread alone
        setattr(FxGraphCache, _CACHEABLE, staticmethod(refuse_to_cache))
        for name, stock in functions.items():
            vars(compile_fx)[name] = notebook.phase(_FUNCTIONS[name], stock)
        for name, method in notebook.methods(methods).items():
            setattr(GraphTransformObserver, name, method)
        yield
    finally:
        setattr(FxGraphCache, _CACHEABLE, cacheable)
        vars(compile_fx).update(functions)
        for name, stock in methods.items():
            setattr(GraphTransformObserver, name, stock)


def is_noting() -> bool:
    """Tell whether somebody takes versions already."""
    return hasattr(vars(GraphTransformObserver)["__enter__"], _MARK)


@contextmanager
def around_programs(around: Callable[[Callable[..., Any], GraphModule], Callable[..., Any]]) -> Iterator[None]:
    """Stand where AOTAutograd is given a captured graph.

    `around` gets what compiles it (it takes nothing) and the graph, and returns what is called in place of what came of
    that.
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


def number_of_graph() -> int | None:
    """Return the number that AOTAutograd has for what it compiles, the same for a forward and its backward."""
    compiled, _, _ = get_aot_compilation_context()
    number = compiled[0].partition("_")[0] if compiled else ""
    return int(number) if number.isdigit() else None


def room_for(node: Node, inputs: Sequence[Node], given: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor as the graph says that this input is, its sizes being those of the inputs that are given."""
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor):
        raise TorchDeltaError(f"the graph does not say what {node.name} is")
    sizes: dict[Any, int] = {}
    for each in inputs:
        known, real = each.meta.get("val"), given.get(each.name)
        if isinstance(known, torch.SymInt) and isinstance(real, int):
            sizes[known.node.expr] = real
        elif isinstance(known, torch.Tensor) and isinstance(real, torch.Tensor):
            pairs = zip((*known.shape, *known.stride()), (*real.shape, *real.stride()), strict=False)
            sizes |= {size.node.expr: number for size, number in pairs if isinstance(size, torch.SymInt)}

    def number(size: Any) -> int:
        # asked for its number, a symbolic size would tell its compiler, which would compile for that number alone
        return size if isinstance(size, int) else int(size.node.expr.xreplace(sizes))

    shape, strides = ([number(size) for size in each] for each in (fake.shape, fake.stride()))
    return torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run graphs of AOTAutograd as they are: their casts are nodes already."""
    with torch._C._DisableAutocast():
        yield


@dataclass(kw_only=True)
class _Notebook:
    """Follows each thread through the phases and passes that it is in."""

    done: Callable[[Chain], None]
    failed: Failed
    threads: threading.local = field(default_factory=threading.local)

    @property
    def chains(self) -> list[Chain]:
        """What this thread is compiling, the innermost last."""
        return self.threads.__dict__.setdefault("chains", [])  # type: ignore[no-any-return]

    @property
    def names(self) -> list[str]:
        """The passes that this thread is in, the innermost last."""
        return self.threads.__dict__.setdefault("names", [])  # type: ignore[no-any-return]

    @property
    def functions(self) -> dict[int, Any]:
        """What each observer that is at work applies."""
        return self.threads.__dict__.setdefault("functions", {})  # type: ignore[no-any-return]

    def phase(self, phase: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that runs a phase."""

        @functools.wraps(stock)
        def noted(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
            if self.chains and self.chains[-1].phase == phase:  # a graph inside of the one that is looked at
                made = stock(gm, *args, **kwargs)
                self._attempt(self._look, "")
                return made
            chain = Chain(phase=phase, module=gm)
            self.chains.append(chain)
            self._attempt(chain.look, "")
            try:
                made = stock(gm, *args, **kwargs)
            finally:
                self.chains.remove(chain)
            self._attempt(self._finish, chain, made)
            return made

        return noted

    def methods(self, stock: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Return an observer's methods, which tell the notebook too."""

        @functools.wraps(stock["__enter__"])
        def enter(observer: Any) -> Any:
            entered = stock["__enter__"](observer)
            self._attempt(self._enter, observer)
            return entered

        @functools.wraps(stock["__exit__"])
        def leave(observer: Any, *error: Any) -> Any:
            left = stock["__exit__"](observer, *error)
            self._attempt(self._leave)
            return left

        def applying(name: str) -> Callable[..., Any]:
            @functools.wraps(stock[name])
            def apply(observer: Any, pass_fn: Any) -> Any:
                self.functions[id(observer)] = pass_fn
                try:
                    return stock[name](observer, pass_fn)
                finally:
                    self.functions.pop(id(observer), None)

            return apply

        setattr(enter, _MARK, True)
        return {"__enter__": enter, "__exit__": leave} | {name: applying(name) for name in _METHODS[2:]}

    def _enter(self, observer: Any) -> None:
        name = _name_of(observer, self.functions.get(id(observer)))
        self.names.append(name)
        if not self.chains:
            return
        chain = self.chains[-1]
        if len(self.names) == 1:
            chain.passes += 1
        if not any(observer.gm is module for module in chain.module.modules()):  # type: ignore[union-attr]
            chain.module = observer.gm  # a step before this pass made another graph
        self._look(f"what comes before {name}" if len(self.names) == 1 else " > ".join(self.names[:-1]))

    def _leave(self) -> None:
        try:
            self._look(" > ".join(self.names))
        finally:
            self.names.pop()

    def _look(self, name: str) -> None:
        if self.chains:
            self.chains[-1].look(name or " > ".join(self.names) or "what comes between two passes")

    def _finish(self, chain: Chain, made: Any) -> None:
        if isinstance(made, GraphModule):
            chain.module = made
        chain.look("what comes after the last pass")
        chain.end()
        self.done(chain)

    def _attempt(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:
            self.failed("a graph could not be taken", error)


def _name_of(observer: Any, applied: Any) -> str:
    """Return what a pass is called; behind a hook of inductor's stands a function of the user's."""
    while isinstance(applied, functools.partial):
        applied = applied.func
    if applied is None or "custom" not in observer.passname:
        return str(observer.passname)
    name = getattr(applied, "__qualname__", type(applied).__qualname__).rpartition("<locals>.")[2]
    return f"{observer.passname} ({name})"
