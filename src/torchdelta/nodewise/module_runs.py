"""Call one module on recorded inputs, natively, in float64 or with noise, and keep what the call leaves behind.

Start with `Runner`; `take_inputs` and `left_by` record a call that the program itself makes.
"""

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
"""Builds the context that a call runs in, from the module and the inputs of that call."""


@dataclass(frozen=True, kw_only=True)
class ModuleInputs:
    """The arguments of a module, copied before it ran, and the generators at that moment."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draws: GeneratorDraws
    roots: frozenset[str]
    """The outputs whose gradients are taken: those that both sides return."""


@dataclass(frozen=True, kw_only=True)
class ModuleResult:
    """The outputs, inputs and gradients that a call left behind."""

    outputs: Leaves
    inputs: Leaves
    """Its input tensors, as they are after the call."""
    changed: frozenset[str]
    """The inputs that it wrote to, without those that it returned."""
    gradients: Leaves

    def forward(self, changed: frozenset[str]) -> Leaves:
        """Return the outputs, and the inputs whose paths are in `changed`, by path; other paths in it are ignored."""
        return {**self.outputs, **{path: self.inputs[path] for path in sorted(changed) if path in self.inputs}}


def take_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], roots: frozenset[str]) -> ModuleInputs:
    """Return copies of a module's arguments, with the present states of the generators and with `roots`.

    Raise ProgramError if the arguments cannot be copied.
    """
    args, kwargs = copy_together((args, kwargs), name="what the module is called with")
    return ModuleInputs(args=args, kwargs=kwargs, draws=GeneratorDraws.now(), roots=roots)


def left_by(outputs: Any, arguments: Any, versions: dict[str, int], gradients: Leaves | None = None) -> ModuleResult:
    """Return what a call that has run left behind: its outputs, its inputs, which of them it changed, and `gradients`.

    `arguments` are the positional and keyword arguments after the call, and `versions` those of the input tensors
    before it, by path. An input whose version is another one counts as changed, unless its memory is returned. Tensors
    are not copied.
    """
    leaves = leaves_of(outputs, "outputs")
    returned = {tensors.storage_key(leaf) for leaf in leaves.values() if isinstance(leaf, torch.Tensor)} - {None}
    inputs = input_tensors(*arguments)
    changed = frozenset(
        path
        for path, tensor in inputs.items()
        if versions.get(path) != tensors.version(tensor) and tensors.storage_key(tensor) not in returned
    )
    return ModuleResult(outputs=leaves, inputs=inputs, changed=changed, gradients=gradients or {})


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Leaves:
    """Return the tensors among arguments by path, such as `args[0]` or `kwargs['mask']`; they are not copied."""
    leaves = {**leaves_of(args, "args"), **leaves_of(kwargs, "kwargs")}
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


def versions_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """Return the version of each tensor among arguments, by path; it changes if the tensor is written to."""
    return {path: tensors.version(tensor) for path, tensor in input_tensors(args, kwargs).items()}


def natively(_: Side) -> AbstractContextManager[Any]:
    """Return a context manager that changes nothing, for a run as it is."""
    return nullcontext()


def lifted(module: torch.nn.Module) -> Mode:
    """Return a mode that runs in float64: a function that takes a side and returns the context manager to run it in.

    Random numbers are drawn in the dtype of the module's first float parameter, or in the default dtype without any.
    """
    floats = (tensor.dtype for tensor in module.parameters() if tensor.is_floating_point())
    drawn_in = next(floats, torch.get_default_dtype())
    return lambda _: lift.Lift(drawn_in)


def noisy(seed: int) -> Mode:
    """Return a mode for a noisy run: a function that takes a side and returns the context manager to run it in.

    There, parameters, inputs and values computed from them are rounded anew, by random numbers from `seed`. The
    parameters and inputs are changed in place as soon as the function is called, so the side must be a copy.
    """

    def mode(side: Side) -> AbstractContextManager[Any]:
        moved = Noisy(seed=seed)
        moved.start_from(varied_in(side))
        return moved

    return mode


def both(*modes: Mode) -> Mode:
    """Return a mode that enters all of these modes, the first one outermost; without modes it changes nothing."""

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
    """Calls modules with one seed, with or without gradients."""

    seed: int
    gradients: bool

    def run(self, module: torch.nn.Module, inputs: ModuleInputs) -> ModuleResult:
        """Call the module itself on copies of the inputs, restore its state afterwards, and return the result.

        The generators start as they were at the recorded call, and are not put back. Exceptions of the module are not
        caught.
        """
        args, kwargs = copy_together((inputs.args, inputs.kwargs), name="what the module is called with")
        with restored([module]):
            return self._call(Side.of(module, args, kwargs), inputs, natively)

    def run_copy(
        self, module: torch.nn.Module, inputs: ModuleInputs, mode: Mode, *, widened: bool = False
    ) -> ModuleResult:
        """Call a copy of the module on copies of the inputs, in the context that `mode` returns, and return the result.

        With `widened` the floating-point tensors of the copies are in float64. The generators start as they were at the
        recorded call, and are not put back. Exceptions of the module are not caught.
        """
        convert = lift.widened if widened else lambda dtype: dtype
        copied, args, kwargs = copy_together(
            (module, inputs.args, inputs.kwargs), name=type(module).__name__, convert=convert
        )
        return self._call(Side.of(copied, args, kwargs), inputs, mode)

    def _call(self, side: Side, inputs: ModuleInputs, mode: Mode) -> ModuleResult:
        """Run a side within a mode, with the generators as they were at the recorded call, and return the result.

        The generators are not put back. If the runner takes gradients, those of the outputs in `inputs.roots` are taken
        within the mode.
        """
        sources = {path: leaf for path, leaf in input_tensors(side.args, side.kwargs).items() if leaf.requires_grad}
        with mode(side):
            args, kwargs = _with_results(side, sources)
            versions = versions_of(args, kwargs)
            inputs.draws.rewind()
            outputs = side.call(*args, **kwargs)
            gradients = self._gradients(side, sources, outputs, inputs.roots) if self.gradients else {}
        return left_by(outputs, (args, kwargs), versions, gradients)

    def _gradients(self, side: Side, sources: Leaves, outputs: Any, among: frozenset[str]) -> Leaves:
        """Return the gradients of inputs and parameters under random cotangents for the outputs in `among`.

        `sources` are the inputs that require grad, by path. The result is by path, as in `parameters['weight'].grad`; a
        tensor that no output depends on has None. Return an empty dict if there is no output to differentiate, or no
        tensor that requires grad.
        """
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
        # a tensor that is passed twice is differentiated once
        wanted = {id(tensor): (path, tensor) for path, tensor in reversed({**sources, **parameters}.items())}
        if not roots or not wanted:
            return {}
        paths, wrt = zip(*reversed(wanted.values()), strict=True)
        cotangents = [cotangent_for(root, path, self.seed) for path, root in roots.items()]
        gradients = torch.autograd.grad(list(roots.values()), wrt, cotangents, allow_unused=True)
        leaves: Leaves = {}
        for path, gradient in zip(paths, gradients, strict=True):
            leaves.update(leaves_of(gradient, f"{path}.grad"))
        return leaves


def _with_results(side: Side, sources: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the side's arguments with a clone of each tensor in `sources`, so that a module may write to it.

    The sources are the inputs that require grad; as leaves they could not be written to, and gradients still reach
    them. All other tensors are the same objects.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in input_tensors(side.args, side.kwargs).values()}
    memo.update({id(tensor): tensor.clone() for tensor in sources.values()})
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = copy.deepcopy((side.args, side.kwargs), memo)
    return arguments
