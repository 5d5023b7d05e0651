"""From what a user names to a call of an operator that can be checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchdelta import foreign
from torchdelta._torch import operators
from torchdelta.errors import ProgramError
from torchdelta.execute import op_arguments
from torchdelta.execute.named import import_place
from torchdelta.execute.programs import load_callable


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """An operator with its arguments."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def named_op(op: str, *, imports: Sequence[str], arguments: Any, inputs: str | None, seed: int) -> OpCall:
    """Return the operator of that name, with arguments as they are described, or as a factory gives them."""
    for module in imports:
        import_place(module)
    found = load_callable(op, what="operator") if _is_in_a_file(op) else operators.operator_named(op)
    args, kwargs = op_arguments.build(arguments, seed) if inputs is None else _given_by(inputs)
    operators.require_fitting(found, args, kwargs)
    return OpCall(op=found, args=args, kwargs=kwargs)


def _is_in_a_file(name: str) -> bool:
    return ":" in name.replace("::", "")


def _given_by(spec: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    factory = load_callable(spec, what="factory of arguments")
    try:
        built = factory()
    except foreign.raised() as error:
        raise ProgramError(f"{spec}: the factory raised {type(error).__name__}: {error}") from error
    if not isinstance(built, (tuple, list)):
        raise ProgramError(f"{spec}: the factory must return args or (args, kwargs), not {type(built).__name__}")
    if len(built) == 2 and isinstance(built[0], (tuple, list)) and isinstance(built[1], Mapping):
        return tuple(built[0]), dict(built[1])
    return tuple(built), {}
