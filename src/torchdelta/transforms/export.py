"""`torch.export`: the program as one graph, run by itself.

Other transforms start from an exported program too, through `export_side`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import CellType
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta._torch.graphs.export_sizes import Size, dynamic_shapes, open_sizes
from torchdelta._torch.pytree import tree_leaves
from torchdelta.compare.leaves import leaves_of
from torchdelta.errors import UsageError
from torchdelta.program.copies import tensor_slots
from torchdelta.program.sides import Side, state_holders
from torchdelta.records.comparison import Scalar
from torchdelta.transforms.base import Options, OtherInputs, Traits, Transform, TransformedSide, flag, require_known

ExportedProgram = torch.export.ExportedProgram


class ExportBase(Transform):
    """A transform that starts from the exported program; its result is meant for other inputs than the given ones."""

    traits = Traits(other_inputs=OtherInputs.VALUES)

    def __init__(self, options: Options) -> None:
        """Read the options `strict` and `dynamic`, which is true, or the axes of all inputs whose sizes are left open.

        With `dynamic`, the traits say that the result is meant for other sizes. UsageError if a value is wrong; unknown
        options are not looked for.
        """
        self.strict = bool(flag(options, "strict"))
        self.axes = _dynamic_axes(options.get("dynamic"))
        if self.axes is not None:
            self.traits = replace(self.traits, other_inputs=OtherInputs.SIZES)

    def export(
        self, side: Side, then: Callable[[ExportedProgram], ExportedProgram] = lambda program: program
    ) -> tuple[GraphModule, Side]:
        """Export a side with this transform's options; return the exported module and the side that runs it.

        `then` takes the exported program and returns the one to use; see `export_side`.
        """
        return export_side(side, strict=self.strict, axes=self.axes, then=then)

    def open_sizes(self, side: Side) -> dict[str, list[Size | None]] | None:
        """Export the side, and return for each tensor input, by its path, a list with one entry for each axis.

        The entry is the `Size` that the exported program leaves open, or None if it is made for that size alone. The
        list is empty for a tensor that export does not take as an input. UsageError if the side cannot be exported.
        """
        found: dict[int, list[Size | None]] = {}

        def look(program: ExportedProgram) -> ExportedProgram:
            found.update(zip(map(id, tree_leaves((side.args, side.kwargs))), open_sizes(program), strict=True))
            return program

        try:
            self.export(side, look)
        except Exception as error:
            words = str(error).strip().partition("\n")[0]
            raise UsageError(f"it cannot be exported ({type(error).__name__}: {words})") from error
        inputs = {**leaves_of(side.args, "args"), **leaves_of(side.kwargs, "kwargs")}
        return {path: found.get(id(leaf), []) for path, leaf in inputs.items() if isinstance(leaf, torch.Tensor)}


def _dynamic_axes(value: Scalar | None) -> frozenset[int] | None:
    """Return the set of axes whose sizes the option `dynamic` leaves open, which is empty for all, or None for no axis.

    The option's value is true for all, false or None for none, or text such as `0,1`; UsageError for any other.
    """
    if value is None or value is False:
        return None
    if value is True:
        return frozenset()
    axes = str(value).split(",")
    if not all(axis.strip().isdecimal() for axis in axes):
        raise UsageError(f"option dynamic is true, false, or axes such as 0,1, not {value!r}")
    return frozenset(map(int, axes))


class Export(ExportBase):
    """`torch.export.export(program).module()`."""

    def __init__(self, options: Options) -> None:
        """Read the options `dynamic` and `strict`; UsageError if an option is unknown or has a wrong value."""
        require_known("export", options, ("dynamic", "strict"))
        super().__init__(options)

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side with its call exported; all calls count as transformed. The keywords are not used."""
        yield TransformedSide.counting_calls(self.export(side)[1], captured=1)


def export_side(
    side: Side,
    *,
    strict: bool,
    axes: Collection[int] | None = None,
    then: Callable[[ExportedProgram], ExportedProgram] = lambda program: program,
) -> tuple[GraphModule, Side]:
    """Export a side's callable; return the exported module, and the side with it as call and as owner of the state.

    The new side has the same inputs, and the program's names for the module's state. `axes` are those of the inputs
    whose sizes are left open, where the program allows it: None for no axis, and all if it is empty. `then` takes the
    exported program and returns the one to use. Exceptions of `torch.export` and of `then` pass through.
    """
    owner, names = _as_module(side)
    shapes = None if axes is None else dynamic_shapes(owner, side.args, side.kwargs, axes)
    with owner.bound() if isinstance(owner, _FunctionModule) else nullcontext():
        program = then(torch.export.export(owner, side.args, side.kwargs, dynamic_shapes=shapes, strict=strict))
    module = program.module()
    assert isinstance(module, GraphModule)
    return module, replace(side, call=module, owner=module, names=names)


class Exports:
    """Exports one program many times, and traces it once in each precision, because copying a graph is cheaper."""

    def __init__(self) -> None:
        self._exports: dict[bool, tuple[GraphModule, Side]] = {}

    def of(self, side: Side, *, lifted: bool) -> tuple[GraphModule, Side]:
        """Return an exported module that the caller may change, and the side that runs it, as `export_side` does.

        Only the first side of each precision (`lifted` or not) is exported. Of later sides only the inputs are used,
        with a copy of that export.
        """
        if lifted not in self._exports:
            module, exported = export_side(side, strict=False)
            self._exports[lifted] = copy.deepcopy(module), exported
            return module, exported
        original, exported = self._exports[lifted]
        module = copy.deepcopy(original)
        return module, replace(side, call=module, owner=module, names=exported.names)


def _module_of(call: Callable[..., Any]) -> _FunctionModule:
    """Return a function as a module whose `forward` has the function's own signature, if it has one that can be read.

    Export names inputs and their sizes by that signature.
    """
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):  # builtins and C++ functions have no signature
        return _FunctionModule(call)

    def forward(module: _FunctionModule, /, *args: Any, **kwargs: Any) -> Any:
        return _FunctionModule.forward(module, *args, **kwargs)

    own = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    if any(each.name == own.name for each in parameters):
        own = own.replace(name="_".join(each.name for each in parameters) + "_")
    forward.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    return type("_FunctionModule", (_FunctionModule,), {"forward": forward})(call)  # type: ignore[no-any-return]


class _FunctionModule(torch.nn.Module):
    """A function as a module, in which the modules and tensors that it refers to are registered.

    Export sees only registered state: a tensor in a closure would become a constant, without a gradient, and a write to
    it would happen once, while export runs. So the function refers to the registered tensors while it is exported.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        """Register each module and tensor that the function refers to as `held_0`, `held_1` and so on.

        A tensor that is a leaf and requires grad becomes a parameter, any other a buffer. `names` has the program's
        name of each parameter and buffer by its name in this module; `slots` the places where the function holds its
        tensors.
        """
        super().__init__()
        self.call = call
        self.names: dict[str, str] = {}
        tensors: dict[int, str] = {}
        for index, (name, holder) in enumerate(state_holders(call)):
            own = f"held_{index}"
            if isinstance(holder, torch.nn.Module):
                self.add_module(own, holder)
                for inner in (*dict(holder.named_parameters()), *dict(holder.named_buffers())):
                    self.names[f"{own}.{inner}"] = f"{name}.{inner}" if name else inner
                continue
            if holder.requires_grad and holder.is_leaf:
                self.register_parameter(own, torch.nn.Parameter(holder))
            else:
                self.register_buffer(own, holder)
            self.names[own], tensors[id(holder)] = name, own
        self.slots = [
            (holder, key, tensors[id(tensor)]) for holder, key, tensor in tensor_slots(call) if id(tensor) in tensors
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and return its result; unless dynamo compiles it, it reads the module's own tensors."""
        if torch.compiler.is_dynamo_compiling():  # it finds the registered tensors by itself
            return self.call(*args, **kwargs)
        with self.bound():
            return self.call(*args, **kwargs)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the function refer to the module's registered tensors while the block runs, and to its own afterwards."""
        before = [(holder, key, _read(holder, key)) for holder, key, _ in self.slots]
        for holder, key, name in self.slots:
            _write(holder, key, getattr(self, name))
        try:
            yield
        finally:
            for holder, key, value in before:
                _write(holder, key, value)


def _read(holder: Any, key: Any) -> Any:
    """Return the content of a closure's cell, or the item `key` of any other holder, such as a dict of globals."""
    return holder.cell_contents if isinstance(holder, CellType) else holder[key]


def _write(holder: Any, key: Any, value: Any) -> None:
    """Replace the content of a closure's cell, or the item `key` of any other holder, such as a dict of globals."""
    if isinstance(holder, CellType):
        holder.cell_contents = value
    else:
        holder[key] = value


def _as_module(side: Side) -> tuple[torch.nn.Module, dict[str, str]]:
    """Return the side's callable as a module, and a dict: the program's name of each tensor by that in the module.

    A module is returned itself, and any other callable within a new module.
    """
    state = side.state
    if isinstance(side.call, torch.nn.Module):
        return side.call, {name: name for name in (*state.parameters, *state.buffers)}
    module = _module_of(side.call)
    return module, module.names
