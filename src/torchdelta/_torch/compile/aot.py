"""A partitioner that recomputes nothing: what the backward needs, the forward saves.

AOTAutograd seen from inside: the forward and backward graphs that it hands to a backend's own compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch._functorch.config
from functorch.compile import make_boxed_func
from torch._dynamo.backends import common
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from torchdelta._torch.compile.seams import Boxed, HandedGraph, Seam, as_boxed


class SaveEverything(CustomPartitionerFn):
    """In place of inductor's own, which trades memory for work."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Split the joint graph."""
        kwargs.pop("compiler", None)
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Name what it does, for the compiler's cache."""
        return "save everything"


@dataclass
class Interception:
    """What passed AOTAutograd."""

    decompositions: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """Those that the backend asked for."""
    programs: int = 0
    """How many captured graphs came; none of a backend that is not built on AOTAutograd."""


@contextmanager
def intercepting(seam: Seam, *, decompose: bool = True, compile_graphs: bool = True) -> Iterator[Interception]:
    """Stand between AOTAutograd and the compilers of any backend that is built on it.

    Without `decompose` the backend's own decompositions are left out; without `compile_graphs` its graphs run as they
    are.
    """
    stock = vars(common)["aot_module_simplified"]
    seen = Interception()

    def intercepted(
        mod: Any, args: Any, fw_compiler: Any, bw_compiler: Any = None, inference_compiler: Any = None, **kwargs: Any
    ) -> Any:
        seen.programs += 1
        seen.decompositions.update(kwargs.get("decompositions") or {})
        if not decompose:
            kwargs["decompositions"] = {}

        def at_seam(compiler: Any, level: str) -> Any:
            return _at_seam(compiler if compile_graphs else _as_it_is, level, seam)

        return stock(
            mod,
            args,
            fw_compiler=at_seam(fw_compiler, "forward"),
            bw_compiler=at_seam(bw_compiler or fw_compiler, "backward"),
            inference_compiler=at_seam(inference_compiler or fw_compiler, "inference"),
            **kwargs,
        )

    vars(common)["aot_module_simplified"] = intercepted
    try:
        # a graph that came from a cache was handed to nobody
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield seen
    finally:
        vars(common)["aot_module_simplified"] = stock


def _at_seam(compiler: Any, level: str, seam: Seam) -> Callable[..., Any]:
    def compile_at_seam(graph_module: GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        outputs = len(list(cast(Sequence[Any], graph_module.graph.output_node().args[0])))

        def make(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
            made = compiler(graph, inputs, **kwargs)
            _forget_strides_beyond(outputs)
            return Boxed(made) if getattr(made, "_boxed_call", False) else made

        handed = HandedGraph(graph=graph_module, example_inputs=example_inputs, make=make, level=level)
        return boxed(seam(handed))

    return compile_at_seam


def boxed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what AOTAutograd calls with a list of arguments, through to whoever can free them early."""
    if getattr(run, "_boxed_call", False):
        return run

    def call(args: list[Any]) -> Any:
        return as_boxed(run)(args)

    return cast(Callable[..., Any], mark_boxed(call))


def mark_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Say that a function takes its arguments in a list."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _as_it_is(graph_module: GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
    return cast(Callable[..., Any], make_boxed_func(graph_module.forward))


def _forget_strides_beyond(count: int) -> None:
    # a compiler reports the strides of what the forward returns, and AOTAutograd takes the last ones for the backward's
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        del context.output_strides[count:]
