"""Call one module on recorded inputs, in any of the ways a comparison needs, and keep what the call leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta._torch.modes import lift
from torchdelta._torch.modes.noisy import Noisy
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.program.copies import copy_together
from torchdelta.program.restore import GeneratorDraws, restored
from torchdelta.program.sides import Side, varied_in
from torchdelta.program.stages import cotangent_for

Mode = Callable[[Side], AbstractContextManager[Any]]
"""Makes what a call runs within, of the module and the inputs that it is going to run on."""


@dataclass(frozen=True, kw_only=True)
class ModuleInputs:
    """What a module was called with, copied before it ran, and the generators at that moment."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draws: GeneratorDraws
    roots: frozenset[str]
    """The outputs that gradients are taken of: those that both sides return."""


@dataclass(frozen=True, kw_only=True)
class ModuleResult:
    """What a call left behind."""

    outputs: Leaves
    inputs: Leaves
    """The tensors that it was given, as they are now."""
    changed: frozenset[str]
    """Which of them it wrote to, besides those that it returned."""
    gradients: Leaves

    def forward(self, changed: frozenset[str]) -> Leaves:
        """Return the outputs, and the inputs that one side or the other changed."""
        return {**self.outputs, **{path: self.inputs[path] for path in sorted(changed) if path in self.inputs}}


def take_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], roots: frozenset[str]) -> ModuleInputs:
    """Copy what a module is called with."""
    args, kwargs = copy_together((args, kwargs), name="what the module is called with")
    return ModuleInputs(args=args, kwargs=kwargs, draws=GeneratorDraws.now(), roots=roots)


def left_by(outputs: Any, given: Any, versions: dict[str, int], gradients: Leaves | None = None) -> ModuleResult:
    """Describe a call that has run, of inputs whose versions were taken before."""
    found = leaves_of(outputs, "outputs")
    returned = {tensors.storage_key(leaf) for leaf in found.values() if isinstance(leaf, torch.Tensor)} - {None}
    inputs = input_tensors(*given)
    changed = frozenset(
        path
        for path, tensor in inputs.items()
        if versions.get(path) != tensors.version(tensor) and tensors.storage_key(tensor) not in returned
    )
    return ModuleResult(outputs=found, inputs=inputs, changed=changed, gradients=gradients or {})


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Leaves:
    """Return the tensors among arguments by path."""
    leaves = {**leaves_of(args, "args"), **leaves_of(kwargs, "kwargs")}
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


def versions_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """Return the version of each tensor among arguments, to tell later which was written to."""
    return {path: tensors.version(tensor) for path, tensor in input_tensors(args, kwargs).items()}


def natively(_: Side) -> AbstractContextManager[Any]:
    """Run as it is."""
    return nullcontext()


def lifted(module: torch.nn.Module) -> Mode:
    """Run in float64; random numbers come in the dtype that the module draws in."""
    floats = (tensor.dtype for tensor in module.parameters() if tensor.is_floating_point())
    drawn_in = next(floats, torch.get_default_dtype())
    return lambda _: lift.Lift(drawn_in)


def noisy(seed: int) -> Mode:
    """Run with every rounding moved."""

    def mode(side: Side) -> AbstractContextManager[Any]:
        moved = Noisy(seed=seed)
        moved.start_from(varied_in(side))
        return moved

    return mode


def both(*modes: Mode) -> Mode:
    """Run within several, the first one outermost."""

    @contextmanager
    def combined(side: Side) -> Iterator[None]:
        if not modes:
            yield
            return
        with modes[0](side), both(*modes[1:])(side):
            yield

    return combined


@dataclass(frozen=True, kw_only=True)
class Runner:
    """How every call of a comparison is made."""

    seed: int
    gradients: bool

    def run(self, module: torch.nn.Module, inputs: ModuleInputs) -> ModuleResult:
        """Call the module itself; its state is as before afterwards."""
        args, kwargs = copy_together((inputs.args, inputs.kwargs), name="what the module is called with")
        with restored([module]):
            return self._call(Side.of(module, args, kwargs), inputs, natively)

    def run_copy(
        self, module: torch.nn.Module, inputs: ModuleInputs, mode: Mode, *, widened: bool = False
    ) -> ModuleResult:
        """Call a copy of the module, which a mode may change."""
        convert = lift.widened if widened else lambda dtype: dtype
        made, args, kwargs = copy_together(
            (module, inputs.args, inputs.kwargs), name=type(module).__name__, convert=convert
        )
        return self._call(Side.of(made, args, kwargs), inputs, mode)

    def _call(self, side: Side, inputs: ModuleInputs, mode: Mode) -> ModuleResult:
        sources = {path: leaf for path, leaf in input_tensors(side.args, side.kwargs).items() if leaf.requires_grad}
        with mode(side):
            args, kwargs = _fed(side, sources)
            versions = versions_of(args, kwargs)
            inputs.draws.rewind()
            outputs = side.call(*args, **kwargs)
            gradients = self._gradients(side, sources, outputs, inputs.roots) if self.gradients else {}
        return left_by(outputs, (args, kwargs), versions, gradients)

    def _gradients(self, side: Side, sources: Leaves, outputs: Any, among: frozenset[str]) -> Leaves:
        roots = {
            path: leaf
            for path, leaf in leaves_of(outputs, "outputs").items()
            if path in among and isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_inexact(leaf.dtype)
        }
        parameters = {
            f"parameters[{name!r}]": tensor
            for name, tensor in side.state.parameters.items()
            if tensor.requires_grad and tensor.is_leaf
        }
        # the same tensor may have come in twice, and is differentiated once
        wanted = {id(tensor): (path, tensor) for path, tensor in reversed({**sources, **parameters}.items())}
        if not roots or not wanted:
            return {}
        paths, wrt = zip(*reversed(wanted.values()), strict=True)
        cotangents = [cotangent_for(root, path, self.seed) for path, root in roots.items()]
        found = torch.autograd.grad(list(roots.values()), wrt, cotangents, allow_unused=True)
        leaves: Leaves = {}
        for path, gradient in zip(paths, found, strict=True):
            leaves.update(leaves_of(gradient, f"{path}.grad"))
        return leaves


def _fed(side: Side, sources: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs with results in place of leaves that require grad: a module may work in place on a result."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in input_tensors(side.args, side.kwargs).values()}
    memo.update({id(tensor): tensor.clone() for tensor in sources.values()})
    fed: tuple[tuple[Any, ...], dict[str, Any]] = copy.deepcopy((side.args, side.kwargs), memo)
    return fed
