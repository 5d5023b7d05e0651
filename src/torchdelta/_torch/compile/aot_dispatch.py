"""AOTAutograd by itself: a callable traced as the compiler will trace it, and run as it was traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from functorch.compile import aot_function, default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from torchdelta._torch.compile.dynamo import Witness
from torchdelta._torch.tensors import storage_key

PARTITIONERS = {"min-cut": min_cut_rematerialization_partition, "default": default_partition}

_TENSOR = object()
"""Where a tensor stands among what is no tensor."""

_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class AotTrace:
    """A callable that is traced when it is first called, and again where what a trace assumed does not hold.

    Only tensors are inputs of the trace; everything else is what it was. The parameters and buffers of a module are
    inputs too, so that they get gradients.
    """

    def __init__(
        self, call: Callable[..., Any], *, dynamic: bool, functionalised: bool, partitioner: str, witness: Witness
    ) -> None:
        self.call = call
        self.dynamic = dynamic
        self.functionalised = functionalised
        self.partitioner = partitioner
        self.witness = witness
        self.traces: list[_Trace] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names, state = _state_of(self.call)
        leaves, spec = tree_flatten((args, kwargs))
        given = [*state, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
        plain = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self.witness.calls += 1
        for trace in self.traces:
            if trace.fits(given, plain, spec):
                return trace.run(*given)
        trace = self._traced(names, given, plain, spec)
        return self._first_call(trace, given)

    def _traced(
        self, names: Sequence[str], given: Sequence[torch.Tensor], plain: tuple[Any, ...], spec: TreeSpec
    ) -> _Trace:
        returns: list[tuple[TreeSpec, list[Any]]] = []

        def of_tensors(*tensors: torch.Tensor) -> list[Any]:
            state = dict(zip(names, tensors, strict=False))
            rest = iter(tensors[len(names) :])
            filled = [next(rest) if leaf is _TENSOR else leaf for leaf in plain]
            args, kwargs = tree_unflatten(filled, spec)
            if isinstance(self.call, torch.nn.Module):
                returned = torch.func.functional_call(self.call, state, args, kwargs)
            else:
                returned = self.call(*args, **kwargs)
            flat, structure = tree_flatten(_swapped(returned, torch.Size, lambda size: _Sizes(list(size))))
            # what is no tensor is no output of a trace: it is what it is
            returns.append((structure, [_TENSOR if isinstance(leaf, _TRACED) else leaf for leaf in flat]))
            return [leaf for leaf in flat if isinstance(leaf, _TRACED)]

        def run_traced(*tensors: torch.Tensor) -> Any:
            outputs = iter(run(*tensors))
            structure, rest = returns[-1]
            made = tree_unflatten([next(outputs) if leaf is _TENSOR else leaf for leaf in rest], structure)
            return _swapped(made, _Sizes, lambda sizes: torch.Size(sizes.each))

        run = aot_function(
            of_tensors,
            fw_compiler=self._taken,
            bw_compiler=_as_it_is,
            partition_fn=PARTITIONERS[self.partitioner],
            dynamic=self.dynamic,
            keep_inference_input_mutations=True,
            disable_functionalization=not self.functionalised,
        )
        # static or not: a size that depends on data is a symbol
        env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        fakes = [
            # the mode remembers them: AOTAutograd gets these very ones; by these names its guards are asked
            mode.from_tensor(tensor, static_shapes=not self.dynamic, source=LocalSource(f"t{place}"))
            for place, tensor in enumerate(given)
        ]
        return _Trace(
            run=run_traced,
            plain=plain,
            spec=spec,
            sharing=_sharing(given),
            is_dynamic=self.dynamic,
            mode=mode,
            fakes=fakes,
        )

    def _first_call(self, trace: _Trace, given: Sequence[torch.Tensor]) -> Any:
        # AOTAutograd takes the mode of whoever is tracing: so its guards can be asked afterwards
        with tracing(TracingContext(trace.mode)):
            returned = trace.run(*given)
        self.traces.append(trace)
        return returned

    def _taken(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.witness.captured += 1
        return _as_it_is(graph_module, inputs)


@dataclass(frozen=True, kw_only=True)
class _Trace:
    run: Callable[..., Any]
    plain: tuple[Any, ...]
    spec: TreeSpec
    sharing: list[int]
    is_dynamic: bool
    mode: FakeTensorMode
    fakes: Sequence[FakeTensor]

    def fits(self, given: Sequence[torch.Tensor], plain: tuple[Any, ...], spec: TreeSpec) -> bool:
        """Tell whether the trace stands for a call with these inputs too; values are never asked about."""
        if spec != self.spec or not _are_same(plain, self.plain) or _sharing(given) != self.sharing:
            return False
        if any(fake.dtype != tensor.dtype for fake, tensor in zip(self.fakes, given, strict=True)):
            return False
        if not self.is_dynamic:
            return all(fake.shape == tensor.shape for fake, tensor in zip(self.fakes, given, strict=True))
        assert self.mode.shape_env is not None
        return bool(self.mode.shape_env.evaluate_guards_for_args(list(self.fakes), list(given), ignore_static=False))


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    # an array says of each of its elements whether it is the same
    return all(
        one is other or (type(one) is type(other) and (one == other) is True)
        for one, other in zip(some, others, strict=True)
    )


def _sharing(given: Sequence[torch.Tensor]) -> list[int]:
    """Return for each tensor the first that has the same memory."""
    keys = [storage_key(tensor) or -place for place, tensor in enumerate(given, 1)]
    return [keys.index(key) for key in keys]


class _Sizes(NamedTuple):
    """Stands for a `torch.Size`, of which torch's trees make a tuple."""

    each: list[Any]


def _swapped(value: Any, kind: type, swap: Callable[[Any], Any]) -> Any:
    return tree_map(
        lambda leaf: swap(leaf) if isinstance(leaf, kind) else leaf, value, is_leaf=lambda leaf: isinstance(leaf, kind)
    )


def _state_of(call: Callable[..., Any]) -> tuple[list[str], list[torch.Tensor]]:
    if not isinstance(call, torch.nn.Module):
        return [], []
    named = {**dict(call.named_parameters()), **dict(call.named_buffers())}
    return list(named), list(named.values())


def _as_it_is(graph_module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return make_boxed_func(graph_module.forward)  # type: ignore[no-any-return]
