"""Trace a callable by AOTAutograd alone, as a compiler would, and run the trace without compiling it.

`AotTrace` is the callable to run in place of the original. It traces at the first call, and once more whenever a call
does not fit any earlier trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from functorch.compile import aot_function, default_partition, min_cut_rematerialization_partition
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from torchdelta._torch.compile.aot import run_uncompiled
from torchdelta._torch.compile.dynamo import Witness
from torchdelta._torch.process import runtime
from torchdelta._torch.tensors import storage_key

PARTITIONERS = {"min-cut": min_cut_rematerialization_partition, "default": default_partition}

_TENSOR = object()
"""Marks the place of a tensor among the other leaves."""

_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class AotTrace:
    """A callable that runs a trace of another one, and traces anew if a call breaks the assumptions of all traces.

    Only tensors are inputs of a trace; other arguments are constants of it. The parameters and buffers of a module are
    inputs too, so that they get gradients.
    """

    def __init__(
        self, call: Callable[..., Any], *, dynamic: bool, functionalised: bool, partitioner: str, witness: Witness
    ) -> None:
        """Take the callable to trace, and how; nothing is traced yet.

        `dynamic` makes the sizes of inputs symbolic, `functionalised` traces without writes in place, and `partitioner`
        is a key of `PARTITIONERS`. The `witness` counts the traced graphs and the calls.
        """
        self.call = call
        self.dynamic = dynamic
        self.functionalised = functionalised
        self.partitioner = partitioner
        self.witness = witness
        self.traces: list[_Trace] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first earlier trace that fits the call, or a new one, and return the result; count the call.

        A new trace is kept for later calls, unless its first run raises; what the run raises passes through.
        """
        names, state = _state_of(self.call)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [*state, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
        plain = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self.witness.calls += 1
        for trace in self.traces:
            if trace.fits(tensors, plain, spec):
                return trace.run(*tensors)
        trace = self._trace(names, tensors, plain, spec)
        return self._first_call(trace, tensors)

    def _trace(
        self, names: Sequence[str], inputs: Sequence[torch.Tensor], plain: tuple[Any, ...], spec: TreeSpec
    ) -> _Trace:
        """Return a trace for calls with such inputs; AOTAutograd does the tracing when it is first run.

        `names` are those of the module's state, which comes first among the inputs. `plain` and `spec` are the other
        leaves and the structure of the arguments. Outputs that are not traced, such as a plain number, are those of the
        tracing.
        """
        returns: list[tuple[TreeSpec, list[Any]]] = []

        def of_tensors(*tensors: torch.Tensor) -> list[Any]:
            """Call the original with state and tensors put in place; return its traced outputs as a flat list.

            The structure and the other outputs are appended to `returns`.
            """
            state = dict(zip(names, tensors, strict=False))
            rest = iter(tensors[len(names) :])
            filled = [next(rest) if leaf is _TENSOR else leaf for leaf in plain]
            args, kwargs = tree_unflatten(filled, spec)
            if isinstance(self.call, torch.nn.Module):
                returned = torch.func.functional_call(self.call, state, args, kwargs)
            else:
                returned = self.call(*args, **kwargs)
            flat, structure = tree_flatten(_swapped(returned, torch.Size, lambda size: _Sizes(list(size))))
            # other outputs are not traced, and are returned unchanged
            returns.append((structure, [_TENSOR if isinstance(leaf, _TRACED) else leaf for leaf in flat]))
            return [leaf for leaf in flat if isinstance(leaf, _TRACED)]

        def run_traced(*tensors: torch.Tensor) -> Any:
            outputs = iter(run(*tensors))
            structure, rest = returns[-1]
            returned = tree_unflatten([next(outputs) if leaf is _TENSOR else leaf for leaf in rest], structure)
            return _swapped(returned, _Sizes, lambda sizes: torch.Size(sizes.each))

        run = aot_function(
            of_tensors,
            fw_compiler=self._count_and_run,
            bw_compiler=run_uncompiled,
            partition_fn=PARTITIONERS[self.partitioner],
            dynamic=self.dynamic,
            keep_inference_input_mutations=True,
            disable_functionalization=not self.functionalised,
        )
        # a size that depends on data is a symbol in a static trace too
        env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        fakes = [
            # the mode memoizes these fakes, so AOTAutograd gets the same ones; its guards go by the source names
            mode.from_tensor(tensor, static_shapes=not self.dynamic, source=LocalSource(f"t{place}"))
            for place, tensor in enumerate(inputs)
        ]
        return _Trace(
            run=run_traced,
            plain=plain,
            spec=spec,
            sharing=_sharing(inputs),
            is_dynamic=self.dynamic,
            mode=mode,
            fakes=fakes,
            need_gradients=[tensor.requires_grad for tensor in inputs],
            strides=[_strides(tensor) for tensor in inputs],
            modes=_modes(),
        )

    def _first_call(self, trace: _Trace, inputs: Sequence[torch.Tensor]) -> Any:
        """Run a new trace under its own fake mode, keep it for later calls, and return the outputs.

        A trace that raises is not kept.
        """
        # AOTAutograd then uses this mode, whose guards `fits` evaluates
        with tracing(TracingContext(trace.mode)):
            returned = trace.run(*inputs)
        self.traces.append(trace)
        return returned

    def _count_and_run(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Count a traced graph in the witness, and return its own forward, uncompiled, to be run."""
        self.witness.captured += 1
        return run_uncompiled(graph_module, inputs)


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """One trace, with the assumptions that it was made under."""

    run: Callable[..., Any]
    plain: tuple[Any, ...]
    spec: TreeSpec
    sharing: list[int]
    is_dynamic: bool
    mode: FakeTensorMode
    fakes: Sequence[FakeTensor]
    need_gradients: list[bool]
    strides: list[tuple[int, ...]]
    modes: tuple[Any, ...]
    """The `_modes` in which it was made: they decide whether it has a backward, and which casts are in it."""

    def fits(self, inputs: Sequence[torch.Tensor], plain: tuple[Any, ...], spec: TreeSpec) -> bool:
        """Tell whether the trace holds for a call with these inputs, whatever the values of the tensors are.

        `inputs` are the tensors, `plain` the other arguments, `spec` their structure. Structure, plain values, dtypes,
        `requires_grad`, sharing of memory, shapes, strides, grad mode, inference mode and autocast have to be the same;
        a dynamic trace asks its guards instead of comparing shapes and strides. Devices are not compared.
        """
        if _modes() != self.modes:
            return False
        if spec != self.spec or not _are_same(plain, self.plain) or _sharing(inputs) != self.sharing:
            return False
        if any(fake.dtype != tensor.dtype for fake, tensor in zip(self.fakes, inputs, strict=True)):
            return False
        if [tensor.requires_grad for tensor in inputs] != self.need_gradients:
            return False
        if not self.is_dynamic:
            has_shapes = all(fake.shape == tensor.shape for fake, tensor in zip(self.fakes, inputs, strict=True))
            return has_shapes and [_strides(tensor) for tensor in inputs] == self.strides
        assert self.mode.shape_env is not None
        return bool(self.mode.shape_env.evaluate_guards_for_args(list(self.fakes), list(inputs), ignore_static=False))


def _modes() -> tuple[Any, ...]:
    """Return whether gradients and inference mode are on, and device and dtype of the active autocast, or None."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), runtime.autocast()


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor; empty if its layout has none."""
    return tensor.stride() if tensor.layout is torch.strided else ()


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether each value is identical to its partner, or of the same type and equal to it.

    Values whose `==` does not return a bool, such as arrays, are not equal. ValueError if the lengths differ.
    """
    # `is True`, because an array compares element by element
    return all(
        one is other or (type(one) is type(other) and (one == other) is True)
        for one, other in zip(some, others, strict=True)
    )


def _sharing(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return for each tensor the position of the first tensor that shares its memory, which may be its own position.

    A tensor without plain memory, such as an empty or sparse one, has its own position.
    """
    keys = [storage_key(tensor) or -place for place, tensor in enumerate(tensors, 1)]
    return [keys.index(key) for key in keys]


class _Sizes(NamedTuple):
    """Holds the numbers of a `torch.Size`, which torch's trees would turn into a tuple."""

    each: list[Any]


def _swapped(value: Any, kind: type, swap: Callable[[Any], Any]) -> Any:
    """Return a tree with every value of one type replaced by `swap` of it."""
    return tree_map(
        lambda leaf: swap(leaf) if isinstance(leaf, kind) else leaf, value, is_leaf=lambda leaf: isinstance(leaf, kind)
    )


def _state_of(call: Callable[..., Any]) -> tuple[list[str], list[torch.Tensor]]:
    """Return the names and the tensors of a module's parameters and buffers; two empty lists for a function."""
    if not isinstance(call, torch.nn.Module):
        return [], []
    named = {**dict(call.named_parameters()), **dict(call.named_buffers())}
    return list(named), list(named.values())
