"""Step between AOTAutograd and the compilers of a backend, where the forward and backward graphs are handed over.

Backends that are built on AOTAutograd call one function of torch, `aot_module_simplified`. `intercepting` replaces it,
so that every graph passes a seam (`seams.py`) on its way to the backend's compiler. `SaveEverything` is a partitioner
for finding causes: the forward saves every value that the backward needs, and nothing is recomputed.
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

from torchdelta._torch.compile.seams import BoxedCall, HandedGraph, Seam, as_boxed


class SaveEverything(CustomPartitionerFn):
    """Partitions without recomputation, in place of inductor's own partitioner, which trades memory for work."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Split the joint graph so that nothing is recomputed, and return the forward and the backward graph."""
        kwargs.pop("compiler", None)
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Return a name of the partitioner for the compiler's cache."""
        return "save everything"


@dataclass
class Interception:
    """A record of the graphs that passed AOTAutograd."""

    decompositions: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """The decompositions that the backend asked for."""
    programs: int = 0
    """The number of captured graphs; 0 if the backend is not built on AOTAutograd."""


@contextmanager
def intercepting(seam: Seam, *, decompose: bool = True, compile_graphs: bool = True) -> Iterator[Interception]:
    """Hand each graph that AOTAutograd makes for a backend to the seam, while the context is open.

    Yield an `Interception`, which records what passed. The seam gets forward, backward and inference graphs. Without
    `decompose` the backend's own decompositions are recorded, but not applied; without `compile_graphs` its graphs run
    uncompiled.
    AOTAutograd's cache is off in this thread meanwhile, because a graph from it is not handed over.
    """
    stock = vars(common)["aot_module_simplified"]
    record = Interception()

    def intercepted(
        mod: Any, args: Any, fw_compiler: Any, bw_compiler: Any = None, inference_compiler: Any = None, **kwargs: Any
    ) -> Any:
        """Compile a module as torch's function does, with each compiler behind the seam; record the module."""
        record.programs += 1
        record.decompositions.update(kwargs.get("decompositions") or {})
        if not decompose:
            kwargs["decompositions"] = {}

        def at_seam(compiler: Any, level: str) -> Any:
            return _at_seam(compiler if compile_graphs else run_uncompiled, level, seam)

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
        # a graph from a cache is not handed over
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield record
    finally:
        vars(common)["aot_module_simplified"] = stock


def _at_seam(compiler: Any, level: str, seam: Seam) -> Callable[..., Any]:
    """Return a compiler that hands its graph to the seam, and returns the seam's callable, which then takes a list.

    The seam gets the graph as one of this `level`. The function `make` there calls `compiler`, and then drops the
    strides that were reported for outputs beyond those of the graph.
    """

    def compile_at_seam(graph_module: GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        """Hand a graph to the seam; return the seam's callable, which takes its arguments in a list."""
        outputs = len(list(cast(Sequence[Any], graph_module.graph.output_node().args[0])))

        def make(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
            compiled = compiler(graph, inputs, **kwargs)
            _drop_strides_beyond(outputs)
            return BoxedCall(compiled) if getattr(compiled, "_boxed_call", False) else compiled

        handed = HandedGraph(graph=graph_module, example_inputs=example_inputs, make=make, level=level)
        return boxed(seam(handed))

    return compile_at_seam


def boxed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the arguments of `run` in a list, marked so that AOTAutograd calls it in that way.

    A callable that has the mark is returned as it is.
    """
    if getattr(run, "_boxed_call", False):
        return run

    def call(args: list[Any]) -> Any:
        return as_boxed(run)(args)

    return cast(Callable[..., Any], mark_boxed(call))


def mark_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function for AOTAutograd as one that takes its arguments in a list; return it."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def run_uncompiled(graph_module: GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
    """Return the graph's own forward in place of a compiled one, with its arguments in a list."""
    return cast(Callable[..., Any], make_boxed_func(graph_module.forward))


def _drop_strides_beyond(count: int) -> None:
    """Drop the strides that a compiler reported for outputs beyond the first `count`, those of the graph itself.

    A graph with taps has more outputs, and AOTAutograd takes the last strides for those of the backward's inputs.
    Nothing happens if no strides were reported.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        del context.output_strides[count:]
