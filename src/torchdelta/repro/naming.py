"""Names that a person would have given: `x` and `weight`, where a tracer wrote arg0_1 and L_self_modules_…_weight_."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from torchdelta._torch import nodes
from torchdelta._torch.operators import is_operator

RESERVED = frozenset(
    {
        *("torch", "sys", "math", "operator", "subprocess", "signal", "resource", "importlib", "pathlib", "program"),
        *("Program", "inputs", "run", "main", "self", "transformed", "saved", "memory", "cotangent", "structure"),
        *("args", "autocast", "call", "cast", "decomposed", "exported", "given", "outputs", "transform"),
    }
)
"""What a script calls its own."""
_ANONYMOUS = re.compile(r"^(arg|primals_|tangents_|args_|input_|inputs_)\d+(_\d+)?$")
_LOCAL = re.compile(r"^(?:[LG]_+)+")
_HELD = re.compile(r"_(?:parameters|buffers|modules)_")
_ROLES = {"self": "x", "input": "x", "other": "y", "mat1": "x", "mat2": "weight", "tensor": "x", "grad_output": "grad"}
_PLAIN = ("x", "y", "z", "u", "v", "w")


class Names:
    """Gives each thing a name that nothing else has."""

    def __init__(self) -> None:
        self._taken: set[str] = set(RESERVED)

    def give(self, wishes: Iterable[str]) -> str:
        """Return the first wish that is free; if none is, the last one with a number."""
        wish = "value"
        for raw in wishes:
            wish = _identifier(raw)
            if self._is_free(wish):
                self._taken.add(wish)
                return wish
        number = 1
        while not self._is_free(f"{wish}_{number}"):
            number += 1
        self._taken.add(f"{wish}_{number}")
        return f"{wish}_{number}"

    def _is_free(self, name: str) -> bool:
        # no program reads from the terminal
        is_built_in = hasattr(builtins, name) and name != "input"
        return name not in self._taken and not keyword.iskeyword(name) and not is_built_in


def wishes_for_input(node: Node, value: Any) -> Iterator[str]:
    """Yield names for a placeholder, the shortest first."""
    # a reduction calls so what it gives instead of computing it
    target = str(node.target).removesuffix("_given")
    if not isinstance(value, torch.Tensor):
        yield from ("size",) if type(value) is int and re.fullmatch(r"(s|u)\d+", target) else ()
    elif _ANONYMOUS.match(target):
        yield from _roles(node)
        yield from _PLAIN
    yield from wishes_for_path(target)


def wishes_for_path(path: str) -> Iterator[str]:
    """Yield names for what is `h.0.mlp.weight` in a model, or L_self_modules_h_… in a trace: its last part first."""
    held = _HELD.split(_LOCAL.sub("", path).removeprefix("l_"))
    parts = [part for part in ".".join(held[1:] or held).strip("_").split(".") if part.strip("_")]
    for count in range(1, len(parts) + 1):
        name = "_".join(part.strip("_") for part in parts[-count:])
        if not name[:1].isdigit():
            yield name
    yield "_".join(parts) or "value"


def _roles(node: Node) -> Iterator[str]:
    """Yield what the operators that read a placeholder call it."""
    for user in node.users:
        if is_operator(user.target):
            for name, value in nodes.arguments(user).items():
                if value is node:
                    yield _ROLES.get(name, name)


def _identifier(raw: str) -> str:
    name = re.sub(r"\W+", "_", raw).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() else name
