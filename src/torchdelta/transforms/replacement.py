"""Another implementation in place of the program.

`Replacement` runs a callable that the user already has. `OtherModule` builds a module from a factory and loads the
reference's state dict into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch

from torchdelta import errors
from torchdelta._torch.compile.dynamo import compiles_itself
from torchdelta._torch.compile.seams import Seam, hand_on
from torchdelta._torch.modes.lift import widened
from torchdelta.errors import ProgramError, UsageError
from torchdelta.program.copies import copy_together, everything_in, own_methods
from torchdelta.program.programs import load_callable, require_module
from torchdelta.program.sides import Side
from torchdelta.transforms.base import Options, Traits, Transform, TransformedSide, require_known

StateMap = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

_SAME = (
    "the candidate is the program itself, so the program was compared with itself: to check what changes a module in "
    "place, pass a copy from before (copy.deepcopy) as the program"
)


class Replacement(Transform):
    """A callable that takes the same inputs."""

    traits = Traits(keeps_names=False, reads_program=False)

    def __init__(self, call: Callable[..., Any], *, program: object = None) -> None:
        """Take the candidate, and the program that it replaces; UsageError if the candidate is not callable."""
        if not callable(call):
            raise UsageError(f"a candidate must be callable, and {type(call).__name__} is not")
        self.call = call
        self.is_program = call is program and not compiles_itself(call)

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield a side that runs a copy of the candidate on the inputs of this one; all calls count as transformed.

        A note names a candidate that is the program itself, and that was not compiled in place. If `lifted`, the copy's
        tensors are in float64; TypeError if torch.compile made the candidate. ProgramError if the candidate
        cannot be copied. `draws_random` and `seam` are not used.
        """
        call = (
            _copy_lifted(self.call) if lifted else copy_together(self.call, name="the candidate", keeps_compiled=True)
        )
        transformed = TransformedSide.counting_calls(_side_of(call, side, start=self.call))
        yield replace(transformed, notes=[_SAME]) if self.is_program else transformed


def _side_of(call: Callable[..., Any], side: Side, *, start: Callable[..., Any]) -> Side:
    """Return a side that runs a callable on the inputs of another side; `start` is the callable before any run."""
    own = Side.of(call, side.args, side.kwargs)
    return replace(own, start=Side.of(start, side.args, side.kwargs))


def _copy_lifted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of the callable with its tensors in float64.

    TypeError if torch.compile made it, or anything that it uses.
    """
    parts = everything_in(call)
    # methods are not in an object but in its class
    methods = [method for part in parts for method in own_methods(type(part))]
    parts = everything_in([parts, methods], skips_errors=True)
    if any(callable(part) and compiles_itself(part) for part in parts):
        raise TypeError("the candidate was compiled before, and in float64 it would run uncompiled")
    return cast(Callable[..., Any], copy_together(call, name="the candidate", convert=widened))


class OtherModule(Transform):
    """`module:file.py:factory`: a module that the factory builds, and that gets the reference's state dict.

    `state=file.py:fn` maps the reference's state dict to the module's; `state=none` leaves the module as it was built.
    """

    traits = Traits(keeps_names=False)

    def __init__(self, factory: str, options: Options) -> None:
        """Read the name of the factory and, in the option `state`, that of a mapping of state dicts, which is loaded.

        The factory is loaded when it is first applied, because its module may change torch, and the yardstick must be
        known by then. `state=same`, the default, takes the state dict as it is; `state=none` takes none. UsageError if
        an option is unknown; UsageError or ProgramError if the mapping cannot be loaded or the factory's file or module
        does not exist.
        """
        require_known("module", options, ("state",))
        require_module(factory, what="module factory")
        self.factory_name = factory
        state = str(options.get("state", "same"))
        self.state_map: StateMap | None = None if state == "none" else dict
        if state not in ("none", "same"):
            self.state_map = load_callable(state, what="state-dict mapping")

    @cached_property
    def factory(self) -> Callable[..., Any]:
        """The factory itself; UsageError or ProgramError if its name cannot be loaded."""
        return load_callable(self.factory_name, what="module factory")

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield a side that runs the module, built anew with the reference's state, on the inputs of this one.

        If the factory returns a tuple, its first item is the module; another callable than a module gets no state. A
        copy of the module runs, or the module itself if it cannot be copied. UsageError or ProgramError if the factory
        cannot be loaded. ProgramError if the factory or the mapping of the state raises, or if state is to be loaded
        and the program is not a module or its state dict does not fit. If `lifted`, the copy is in float64; then also
        ProgramError if the module cannot be copied, and TypeError if torch.compile made it. `draws_random` and `seam`
        are not used.
        """
        factory = self.factory
        try:
            built = factory()
        except errors.caught_from_user_code() as error:
            raise ProgramError(f"{self.factory_name}: the factory raised {type(error).__name__}: {error}") from error
        module = built[0] if isinstance(built, tuple) else built
        if self.state_map is not None and isinstance(module, torch.nn.Module):
            if not isinstance(side.call, torch.nn.Module):
                raise ProgramError(
                    f"{self.factory_name}: the program is not a module, so there is no state dict to load"
                )
            try:
                state = dict(self.state_map(side.call.state_dict()))
            except errors.caught_from_user_code() as error:
                raise ProgramError(f"the mapping of the state dict raises {errors.describe(error)}") from error
            try:
                module.load_state_dict(state)
            except RuntimeError as error:
                raise ProgramError(
                    f"{self.factory_name} does not take the reference's state dict: {error}. "
                    "Give a mapping with -O state=file.py:fn, or -O state=none"
                ) from error
        if lifted:
            own = _side_of(_copy_lifted(module), side, start=module)
        else:
            try:
                own = _side_of(copy_together(module, name=self.factory_name, keeps_compiled=True), side, start=module)
            except (
                ProgramError
            ):  # it was built for this side alone, so it can run itself, with the program as its start
                own = Side.of(module, side.args, side.kwargs)
        yield TransformedSide.counting_calls(own)
