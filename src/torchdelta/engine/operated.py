"""An operator as a program: called as its users call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdelta._torch import operators, runtime, schemas
from torchdelta._torch.trees import tree_flatten, tree_leaves, tree_unflatten
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.engine.baseline import Baseline
from torchdelta.execute.copies import copy_together
from torchdelta.execute.programs import Program
from torchdelta.execute.sides import Side


def operated(op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
    """Return the call of an operator.

    A copy of an input is a leaf, and a leaf that requires grad cannot be written to: what is none of the caller's, or
    what the operator declares to change, is made one that is not inside of the call, and returned besides.
    """
    inside = _not_leaves(op, args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def call_inside(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf.clone() if place in inside else leaf for place, leaf in enumerate(leaves)]
        inner_args, inner_kwargs = tree_unflatten(given, spec)
        return op(*inner_args, **inner_kwargs), [given[place] for place in inside]

    name = operators.name_of(op)
    return Program(name=name, call=call_inside if inside else call, args=args, kwargs=dict(kwargs))


def called(side: Side, baseline: Baseline, *, seed: int | None = None) -> Leaves:
    """Call it once on copies, and return what it returns with what it leaves in its inputs."""
    args, kwargs = copy_together((side.args, side.kwargs), name=baseline.program.name)
    runtime.seed_everything(baseline.plan.seed if seed is None else seed)
    with baseline.eager_scope():
        returned = side.call(*args, **kwargs)
    # its memory may be written to by the next call
    returned, args, kwargs = copy_together((returned, args, kwargs), name="the outputs")
    left = {**leaves_of(args, "args"), **leaves_of(kwargs, "kwargs")}
    kept = {path: leaf for path, leaf in left.items() if isinstance(leaf, torch.Tensor)}
    return {**leaves_of(returned, "outputs"), **kept}


def _not_leaves(op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    positions = schemas.positions_of(op)
    written = [
        kwargs[name] if name in kwargs else args[positions[name]]
        for name in schemas.written_by(op)
        if name in kwargs or positions[name] < len(args)
    ]
    changed = {id(leaf) for leaf in tree_leaves(written)}
    met: set[int] = set()
    found = []
    for place, leaf in enumerate(tree_leaves((args, dict(kwargs)))):
        is_inside = isinstance(leaf, torch.Tensor) and leaf.requires_grad and (not leaf.is_leaf or id(leaf) in changed)
        if is_inside and id(leaf) not in met:
            found.append(place)
        met.add(id(leaf))
    return tuple(found)
