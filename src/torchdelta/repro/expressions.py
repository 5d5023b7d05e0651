"""One node of a graph as the expression that a person would write for it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch.operators import registered_by
from torchdelta.errors import ReproUnwritable
from torchdelta.repro.literals import Refer, write_callable, write_index, write_value

_INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lshift: "<<", operator.rshift: ">>", operator.eq: "==", operator.ne: "!=",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
_PREFIX: dict[Any, str] = {operator.neg: "-", operator.pos: "+", operator.invert: "~", operator.not_: "not "}
_PUBLIC: dict[Any, str] = {torch.ops.higher_order.cond: "torch.cond"}
_GETATTR: tuple[Callable[..., Any], ...] = (getattr,)


def write_call(node: Node, refer: Refer, imports: set[str]) -> str:
    """Return what a call of a function or method computes; modules to import are added to `imports`."""

    def referring(value: Any) -> str | None:
        if (known := refer(value)) is not None:
            return known
        is_function = callable(value) and not isinstance(value, (torch.device, torch.Tensor, torch.nn.Module, type))
        return write_callable(value, imports) if is_function else None

    args = [write_value(argument, referring) for argument in node.args]
    keywords = [f"{name}={write_value(argument, referring)}" for name, argument in node.kwargs.items()]
    if node.op == "call_method":
        return f"{_operand(args[0])}.{node.target}({', '.join((*args[1:], *keywords))})"
    target = node.target
    if not keywords:
        if target in _INFIX and len(args) == 2:
            return f"{_operand(args[0])} {_INFIX[target]} {_operand(args[1])}"
        if target in _PREFIX and len(args) == 1:
            return f"{_PREFIX[target]}{_operand(args[0])}"
        if target is operator.getitem:
            return f"{_operand(args[0])}[{write_index(node.args[1], referring)}]"
        if target is operator.setitem:
            return f"{_operand(args[0])}[{write_index(node.args[1], referring)}] = {args[2]}"
        if target in _GETATTR and len(args) == 2 and isinstance(node.args[1], str) and node.args[1].isidentifier():
            return f"{_operand(args[0])}.{node.args[1]}"
    _import_registration(target, imports)
    name = _PUBLIC[target] if target in _PUBLIC else write_callable(target, imports)
    return f"{name}({', '.join((*args, *keywords))})"


def is_statement(node: Node) -> bool:
    """Tell whether what is written for a node is no expression."""
    return node.target is operator.setitem


def _import_registration(target: Any, imports: set[str]) -> None:
    try:
        module = registered_by(target)
    except LookupError as error:
        if not imports:
            raise ReproUnwritable(f"{error}: name its module in the finding's imports") from error
        return
    if module is not None:
        imports.add(module)


def _operand(text: str) -> str:
    return f"({text})" if text.startswith("-") or " " in text.split("(")[0] else text
