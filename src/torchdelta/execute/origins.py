"""Where modules come from: what another process needs in order to import what this one has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch import operators, targets
from torchdelta.execute.graph_files import modules_named
from torchdelta.execute.reach import is_installed_module


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How another process imports a module."""

    place: str
    """Its name, or its file where it was loaded under a name that only this process has for it."""
    folder: str | None = None
    """Where its package lies; None where every process looks anyway."""


def origin_of(module: str) -> Origin:
    """Return how another process imports a module of this one; LookupError of what is bound to this process."""
    if module == "__main__":
        raise LookupError("what is defined in __main__ is in another file in another process: move it to a module")
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if loaded is None or file is None or is_installed_module(loaded):
        return Origin(place=module)
    path = Path(file).resolve()
    if path.suffix == ".py" and path.stem not in (module.rpartition(".")[2], "__init__"):
        return Origin(place=str(path))
    depth = module.count(".") + (path.name == "__init__.py")
    return Origin(place=module, folder=str(path.parents[depth]))


def owners_of(graph_module: GraphModule) -> tuple[list[str], list[str]]:
    """Return the modules that define what a graph calls and torch does not, and what nobody knows the module of."""
    found = {name for name in modules_named(graph_module) if not targets.is_torchs_own(name)}
    unknown: dict[str, None] = {}
    for target in _called(graph_module):
        try:
            module = operators.registered_by(target)
        except LookupError as error:
            unknown[str(error.args[0])] = None
        else:
            found.update({module} if module is not None else ())
    return sorted(found), list(unknown)


def _called(graph_module: GraphModule) -> Iterator[Any]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node.target for node in module.graph.nodes if node.op == "call_function")
