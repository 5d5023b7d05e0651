"""Where modules come from: what another process needs in order to import what this one has.

A recorded graph: written before it runs, so that whatever running it does leaves it behind, and a program again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.compile import dynamo, settings
from torchdelta._torch.graphs import graphs, targets
from torchdelta._torch.modes import outside
from torchdelta._torch.operators import lookup
from torchdelta.errors import ProgramError, ReportUnreadable, UsageError
from torchdelta.program.copies import is_installed_module
from torchdelta.program.programs import Program, load_module
from torchdelta.records.recording import RECORDING, AutocastSetting, Recording, read_recording, write_recording
from torchdelta.storage.graphs import (
    modules_named,
    read_graph,
    read_values,
    require_writable,
    tensors_path,
    write_graph,
    write_values,
)


@dataclass(frozen=True, kw_only=True)
class ModuleOrigin:
    """How another process imports a module."""

    place: str
    """Its name, or its file where it was loaded under a name that only this process has for it."""
    folder: str | None = None
    """Where its package lies; None where every process looks anyway."""


def origin_of(module: str) -> ModuleOrigin:
    """Return how another process imports a module of this one; LookupError of what is bound to this process."""
    if module == "__main__":
        raise LookupError("what is defined in __main__ is in another file in another process: move it to a module")
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if loaded is None or file is None or is_installed_module(loaded):
        return ModuleOrigin(place=module)
    path = Path(file).resolve()
    if path.suffix == ".py" and path.stem not in (module.rpartition(".")[2], "__init__"):
        return ModuleOrigin(place=str(path))
    depth = module.count(".") + (path.name == "__init__.py")
    return ModuleOrigin(place=module, folder=str(path.parents[depth]))


def owners_of(graph_module: GraphModule) -> tuple[list[str], list[str]]:
    """Return the modules that define what a graph calls and torch does not, and what nobody knows the module of."""
    found = {name for name in modules_named(graph_module) if not targets.is_torchs_own(name)}
    unknown: dict[str, None] = {}
    for target in _called(graph_module):
        try:
            module = lookup.registered_by(target)
        except LookupError as error:
            unknown[str(error.args[0])] = None
        else:
            found.update({module} if module is not None else ())
    return sorted(found), list(unknown)


def _called(graph_module: GraphModule) -> Iterator[Any]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node.target for node in module.graph.nodes if node.op == "call_function")


GRAPH, INPUTS = "graph.json", "inputs.json"
READABLE = "graph.txt"
"""A graph that cannot be read back, for a human."""


def write(
    directory: str | os.PathLike[str], graph_module: GraphModule, inputs: Sequence[Any], recording: Recording
) -> Recording:
    """Write a graph with its inputs, and last of all its record: with what others need to import, and what is lacking.

    Nothing is run and nothing changed. Gradients that were computed and hooks are not kept, and what was computed
    under autograd is a leaf when it is read; a graph behind AOTAutograd asks for no gradients. UsageError where the
    directory cannot be written to.
    """
    place = Path(directory)
    # a backend may be called where every tensor is fake, and a graph where none may be detached
    with outside.outside_modes():
        found = _Found(lacks=list(recording.lacks))
        try:
            _make_room(place)
            _write_graph(graph_module, place, found)
            _write_inputs(graph_module, inputs, place, found, asks_gradients=recording.level == "dynamo")
            _find_owners(graph_module, recording, found)
            whole = replace(
                recording,
                nodes=len(graph_module.graph.nodes),
                transform=_found_from_anywhere(recording.transform, found),
                imports=_united(recording.imports, found.imports),
                path=_united(recording.path, found.path),
                lacks=tuple(found.lacks),
            )
            write_recording(whole, place)
        except OSError as error:
            raise UsageError(f"cannot write to {place}: {error.strerror or error}; name another place") from error
    return whole


def read(directory: str | os.PathLike[str]) -> tuple[Program, Recording]:
    """Return a recorded graph as a program that runs as it did when it was recorded; see `make_ready` for what is set.

    ProgramError says what it lacks, ReportUnreadable what is wrong with its files.
    """
    place = Path(directory)
    recording = read_recording(place)
    if not (place / GRAPH).exists():
        raise ProgramError(f"{place} has no graph that could be run{_lacking(recording)}")
    allow = make_ready(recording)
    try:
        graph = graphs.flatten_signature(read_graph(place / GRAPH, allow=allow))
        values = read_values(place / INPUTS, allow=allow)
    except ReportUnreadable as error:
        raise ReportUnreadable(f"{error}{_lacking(recording)}") from error
    names = [node.name for node in _placeholders(graph)]
    if missing := [name for name in names if name not in values]:
        raise ProgramError(f"{place} has no {', '.join(missing)} to run its graph on{_lacking(recording)}")
    call: torch.nn.Module = graph
    if recording.autocast is not None:
        call = _UnderAutocast(call, recording.autocast)
    if not recording.is_grad_enabled:
        call = _WithoutGradients(call)
    return Program(name=os.fspath(directory), call=call, args=tuple(values[name] for name in names)), recording


def make_ready(recording: Recording) -> tuple[str, ...]:
    """Let this process import what a recorded graph needs, and set what was set: from now on, as an import does.

    Returns the names of the modules. ProgramError where one does not import, or a setting cannot be set.
    """
    sys.path[:0] = [folder for folder in recording.path if folder not in sys.path]
    names = tuple(load_module(place, what="recorded graph").__name__ for place in recording.imports)
    try:
        settings.apply(recording.settings)
    except (LookupError, AssertionError, TypeError, ValueError) as error:
        raise ProgramError(f"{recording.name} was recorded under settings that cannot be set here: {error}") from error
    return names


@dataclass(kw_only=True)
class _Found:
    """What is found out while a recording is written."""

    imports: list[str] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    def need(self, module: str, what: str) -> None:
        """Note how another process imports a module."""
        try:
            origin = origin_of(module)
        except LookupError as error:
            self.lacks.append(f"{what} cannot be found by another process: {error.args[0]}")
            return
        self.imports.append(origin.place)
        if origin.folder is not None:
            self.path.append(origin.folder)


class _UnderAutocast(torch.nn.Module):
    """A graph that was recorded under autocast, under it."""

    def __init__(self, graph: torch.nn.Module, autocast: AutocastSetting) -> None:
        super().__init__()
        dtype = getattr(torch, autocast.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ReportUnreadable(f"it was recorded under autocast to {autocast.dtype!r}, which is no dtype here")
        self.graph, self.device, self.dtype = graph, autocast.device, dtype

    def forward(self, *values: Any) -> Any:
        """Run the graph."""
        with torch.autocast(self.device, dtype=self.dtype):
            return self.graph(*values)


class _WithoutGradients(torch.nn.Module):
    """A graph that was recorded while no gradients were, without them."""

    def __init__(self, graph: torch.nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *values: Any) -> Any:
        """Run the graph."""
        with torch.no_grad():
            return self.graph(*values)


def _make_room(place: Path) -> None:
    """Make the directory; what an earlier recording left in it must not be taken for part of this one."""
    place.mkdir(parents=True, exist_ok=True)
    # the record goes first: without it nothing else counts
    for name in (RECORDING, GRAPH, INPUTS, READABLE):
        (place / name).unlink(missing_ok=True)
    for name in (GRAPH, INPUTS):
        tensors_path(place / name).unlink(missing_ok=True)


def _write_graph(graph_module: GraphModule, place: Path, found: _Found) -> None:
    try:
        write_graph(graph_module, place / GRAPH)
    except UsageError as error:
        text = graph_module.print_readable(print_output=False)
        (place / READABLE).write_text(f"{text.rstrip()}\n", encoding="utf-8")
        found.lacks.append(f"the graph cannot be run elsewhere, only read in {READABLE}: {error}")


def _write_inputs(
    graph_module: GraphModule, inputs: Sequence[Any], place: Path, found: _Found, *, asks_gradients: bool
) -> None:
    nodes = _placeholders(graph_module)
    if len(nodes) != len(inputs):
        raise UsageError(f"the graph takes {len(nodes)} inputs and was given {len(inputs)}: give one for each")
    kept: dict[str, Any] = {}
    leaves: dict[int, Any] = {}
    for node, value in zip(nodes, inputs, strict=True):
        try:
            leaf = leaves.setdefault(id(value), _leaf(value, asks_gradients=asks_gradients))
            require_writable(leaf)
        except Exception as error:  # an opaque object may raise whatever it likes when it is looked at
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            found.lacks.append(f"the input {node.name} ({kind}) is left out, since no file can hold it: {error}")
        else:
            kept[node.name] = leaf
    write_values(kept, place / INPUTS)


def _leaf(value: Any, *, asks_gradients: bool) -> Any:
    """Return a tensor of the same memory that has no history; what is none as it is."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value
    requires_grad = value.requires_grad and asks_gradients
    if value.is_leaf and value.requires_grad == requires_grad and not value.is_neg():
        return value
    return value.resolve_neg().detach().requires_grad_(requires_grad)


def _find_owners(graph_module: GraphModule, recording: Recording, found: _Found) -> None:
    owners, unknown = owners_of(graph_module)
    for module in owners:
        found.need(module, f"what the graph calls of {module}")
    found.lacks += [f"what the graph calls may be missing elsewhere: {why}" for why in unknown]
    kind, _, name = (recording.transform or "").partition(":")
    if kind == "backend":
        owner = getattr(dynamo.backend_named(name), "__module__", "torch")
        if owner.partition(".")[0] != "torch":
            found.need(owner, f"the backend {name}")


def _found_from_anywhere(spec: str | None, found: _Found) -> str | None:
    """Return the name of a user's own transform as any process finds it, wherever it runs."""
    place, _, name = (spec or "").rpartition(":")
    if place.endswith(".py"):
        return f"{Path(place).resolve()}:{name}"
    if place not in sys.modules:
        return spec
    try:
        origin = origin_of(place)
    except LookupError as error:
        found.lacks.append(f"the transform {spec} cannot be found by another process: {error.args[0]}")
        return None
    found.path += [origin.folder] if origin.folder is not None else []
    return f"{origin.place}:{name}"


def _placeholders(graph_module: GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]


def _united(given: Iterable[str], found: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*given, *found)))


def _lacking(recording: Recording) -> str:
    return "".join(f"; {each}" for each in recording.lacks) + ("" if recording.lacks else ": record it again")
