"""A recorded graph: a graph with its inputs in a directory, and a program of them again.

A guard records a graph before it runs, so the recording is there even if running it ends the process. The directory
also says which modules another process has to import, and where they are.

    recorded/graph.json, inputs.json     as `storage.graphs` writes them, with their tensors beside
    recorded/recording.json              written last: a directory that has it is complete

Start reading at `write` and `read`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.compile import dynamo, settings
from torchdelta._torch.graphs import computations, graphs, targets
from torchdelta._torch.modes import outside
from torchdelta._torch.operators import lookup
from torchdelta.errors import ProgramError, ReportUnreadable, UsageError
from torchdelta.program.copies import is_installed_module
from torchdelta.program.programs import Program, load_module
from torchdelta.records.recording import (
    RECORDING,
    AutocastSetting,
    Recording,
    places_of_code,
    read_recording,
    write_recording,
)
from torchdelta.records.trust import is_trusted, require_trusted, untrusted_folders
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
    """Its name, or its file if only this process knows it by its name."""
    folder: str | None = None
    """The folder that contains its package; None if every process searches there anyway."""


def origin_of(module: str) -> ModuleOrigin:
    """Return how another process imports a module of this one; raise LookupError for `__main__`, which none can.

    Installed, built-in and unknown modules have a name alone. A module whose file has another name goes by its file.
    Any other has its name and the folder that contains its outermost package.
    """
    if module == "__main__":
        raise LookupError("__main__ is another file in another process: move the definition to a module")
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
    """Return the modules that another process needs for a graph's functions, classes and operators; problems as texts.

    The modules are sorted names, without those of torch's own functions. There is a problem for each operator of which
    it is unknown which module registered it.
    """
    owners = {name for name in modules_named(graph_module) if not targets.is_torchs_own(name)}
    problems: dict[str, None] = {}
    for target in _find_functions(graph_module):
        try:
            module = lookup.registered_by(target)
        except LookupError as error:
            problems[str(error.args[0])] = None
        else:
            owners.update({module} if module is not None else ())
    return sorted(owners), list(problems)


def _find_functions(graph_module: GraphModule) -> Iterator[Any]:
    """Yield the target of each `call_function` node of a graph and of the graphs in it."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node.target for node in module.graph.nodes if node.op == "call_function")


GRAPH, INPUTS = "graph.json", "inputs.json"
READABLE = "graph.txt"
"""The text of a graph that cannot be written as JSON, for a human."""


def write(
    directory: str | os.PathLike[str], graph_module: GraphModule, inputs: Sequence[Any], recording: Recording
) -> Recording:
    """Write a graph with its inputs and its record; return the record, completed with nodes, imports, path and lacks.

    Files of an earlier recording in the directory are replaced. A graph that cannot be written is written as text, and
    an input that no file can hold is left out; `lacks` then says so. Inputs lose their autograd history, and behind
    AOTAutograd `requires_grad` too. `transform` is made absolute, or None if no other process can import it. Raise
    UsageError if the directory cannot be written to, if there is not one input for each placeholder, or if the
    transform names an unknown backend.
    """
    place = Path(directory)
    # a backend may be called in a mode that makes every tensor fake, and a graph in one that refuses `detach`
    with outside.outside_modes():
        needs = _Needs(lacks=list(recording.lacks))
        try:
            _clear_directory(place)
            _write_graph(graph_module, place, needs)
            _write_inputs(graph_module, inputs, place, needs, keeps_grad=recording.level == "dynamo")
            _add_owners(graph_module, recording, needs)
            complete = replace(
                recording,
                nodes=len(graph_module.graph.nodes),
                transform=_make_absolute(recording.transform, needs),
                imports=_merge(recording.imports, needs.imports),
                path=_merge(recording.path, needs.path),
                lacks=tuple(needs.lacks),
            )
            write_recording(complete, place)
        except OSError as error:
            raise UsageError(f"cannot write to {place}: {error.strerror or error}; name another place") from error
    return complete


def read(directory: str | os.PathLike[str]) -> tuple[Program, Recording]:
    """Return a recorded graph as a program, and its record.

    The program runs under the autocast that was recorded, and without gradients if they were off. `make_ready` is
    called, so imports and compiler settings of the recording last for the rest of the process; its errors are raised.
    Raise ProgramError if the recording lacks its graph or an input, and ReportUnreadable if its files are missing or
    damaged.
    """
    place = Path(directory)
    recording = read_recording(place)
    if not (place / GRAPH).exists():
        raise ProgramError(f"{place} has no graph that could be run{_explain_lacks(recording)}")
    allow = make_ready(recording, place)
    if is_trusted(place):  # then its graph may call what no traced graph calls, too
        allow = (*allow, *targets.ROOTS)
    try:
        graph = graphs.flatten_signature(read_graph(place / GRAPH, allow=allow))
        _require_computing(graph, place / GRAPH)
        values = read_values(
            place / INPUTS, allow=allow, require=lambda of_values: _require_computing(of_values, place / INPUTS)
        )
    except ReportUnreadable as error:
        raise ReportUnreadable(f"{error}{_explain_lacks(recording)}") from error
    names = [node.name for node in _placeholders(graph)]
    if missing := [name for name in names if name not in values]:
        raise ProgramError(f"{place} has no {', '.join(missing)} to run its graph on{_explain_lacks(recording)}")
    call: torch.nn.Module = graph
    if recording.autocast is not None:
        call = _UnderAutocast(call, recording.autocast)
    if not recording.is_grad_enabled:
        call = _WithoutGradients(call)
    return Program(name=os.fspath(directory), call=call, args=tuple(values[name] for name in names)), recording


def _require_computing(graph: GraphModule, file: Path) -> None:
    """Raise UsageError if a graph of a recording may do more than compute, and the user does not trust it.

    The user may trust the directory of the recording, or that of the code of a function. `file` is that of the graph.
    """
    if is_trusted(file.parent):
        return
    for call in computations.find_other_calls(graph, _is_trusted_code):
        raise UsageError(
            f"{file}: {call}, which may do more than compute, such as run a program or write a file. It would be run: "
            f"read the file, and if you trust it, add --trust {file.parent.resolve()}"
        )


def _is_trusted_code(target: Any) -> bool:
    """Tell whether the user trusts the file of the module in which a function or a class is defined."""
    file = getattr(sys.modules.get(str(targets.home_of(target))), "__file__", None)
    return file is not None and is_trusted(file)


def make_findable(recording: Recording) -> None:
    """Put the folders of a recording's modules that the user trusts first in `sys.path`, until the process ends.

    Folders that are in `sys.path` already stay where they are.
    """
    folders = [folder for folder in recording.path if is_trusted(folder)]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def make_ready(recording: Recording, directory: str | os.PathLike[str]) -> tuple[str, ...]:
    """Import the modules that a recorded graph needs, apply its compiler settings, and return the modules' names.

    The folders of its modules that the user trusts are put first in `sys.path`. All of it lasts for the rest of the
    process. `directory` is that of the recording. Raise UsageError if a module is neither installed nor trusted, or as
    `require_harmless` does, and ProgramError if a module does not import or a setting is unknown.
    """
    for place in recording.imports:
        require_trusted(place, recording.path, named_by=f"the recording of {recording.name}")
    require_harmless(recording, directory)
    make_findable(recording)
    names = tuple(load_module(place, what="recorded graph").__name__ for place in recording.imports)
    try:
        settings.apply(recording.settings)
    except (LookupError, AssertionError, TypeError, ValueError) as error:
        raise ProgramError(f"{recording.name} was recorded under settings that cannot be set here: {error}") from error
    return names


def require_harmless(recording: Recording, directory: str | os.PathLike[str]) -> None:
    """Raise UsageError if a setting of the compiler is not harmless, or has the wrong type.

    These are the recording's settings, and those among the options of its transform. What is not harmless may be set if
    the user trusts `directory`, that of the recording; a wrong type is always refused. Settings that this torch does
    not have are not looked at.
    """
    file = Path(directory) / RECORDING
    for name, value in _settings_of(recording):
        if settings.has_wrong_type(name, value):
            raise UsageError(f"{file} sets {name} to {value!r}, which is not of the setting's type: correct it")
        if not settings.is_harmless(name, value) and not is_trusted(directory):
            raise UsageError(
                f"{file} sets {name} to {value!r}, and only known values of a setting are harmless: this one may make "
                "the compiler start a program, or write somewhere. Read the file, and if you trust it, add --trust "
                f"{Path(directory).resolve()}"
            )


def trust_flags(directory: str | os.PathLike[str]) -> list[str]:
    """Return the flags `--trust FOLDER` for all that a recording names and that is not harmless.

    That is code that is not installed, and the directory itself if a setting or a call of the graph needs it. Folders
    that are trusted already have a flag too. The list is empty if the recording cannot be read.
    """
    try:
        recording = read_recording(directory)
    except ReportUnreadable:
        return []
    folders = untrusted_folders(places_of_code(recording), recording.path)
    is_harmless = all(settings.is_harmless(name, value) for name, value in _settings_of(recording))
    if not is_harmless or _calls_installed_code(Path(directory) / GRAPH, recording):
        folders.append(str(Path(directory).resolve()))
    return [text for folder in folders for text in ("--trust", folder)]


def _calls_installed_code(file: Path, recording: Recording) -> bool:
    """Tell whether a graph names an installed function that may do more than compute; False if it cannot be read.

    Functions of code that is not installed do not count, because the folder of that code has to be trusted anyway.
    """
    try:
        # an annotation of a node is a type, and is not called
        names = set(re.findall(r'(?<!"type":)"(function [\w.]+:[\w.]+)"', file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
    for name in sorted(names):
        module = name.removeprefix("function ").partition(":")[0]
        try:
            target = targets.find_target(name, (module,))
        except LookupError:
            continue
        is_known = target is getattr or computations.is_computation(target)
        if not is_known and (targets.is_torchs_own(module) or not untrusted_folders([module], recording.path)):
            return True
    return False


def _settings_of(recording: Recording) -> list[tuple[str, Any]]:
    """Return the settings of a recording that this torch has, with those among its options, by their full names."""
    every = (*recording.settings.items(), *settings.settings_among(recording.options).items())
    return [(name, value) for name, value in every if settings.is_known(name)]


@dataclass(kw_only=True)
class _Needs:
    """The modules and folders that another process needs for a recording, and sentences on what it lacks."""

    imports: list[str] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    def add_module(self, module: str, content: str) -> None:
        """Add a module's name or file to `imports`, and the folder to find it in, if it needs one, to `path`.

        `__main__` cannot be imported by another process: a sentence that begins with `content` is added to `lacks`
        instead. `content` says what is lacking without the module.
        """
        try:
            origin = origin_of(module)
        except LookupError as error:
            self.lacks.append(f"{content} cannot be found by another process: {error.args[0]}")
            return
        self.imports.append(origin.place)
        if origin.folder is not None:
            self.path.append(origin.folder)


class _UnderAutocast(torch.nn.Module):
    """Runs a graph under the autocast that it was recorded under."""

    def __init__(self, graph: torch.nn.Module, autocast: AutocastSetting) -> None:
        """Keep the graph and the setting; raise ReportUnreadable if torch has no dtype of that name."""
        super().__init__()
        dtype = getattr(torch, autocast.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ReportUnreadable(f"it was recorded under autocast to {autocast.dtype!r}, which is not a dtype here")
        self.graph, self.device, self.dtype = graph, autocast.device, dtype

    def forward(self, *values: Any) -> Any:
        """Run the graph under the autocast, and return its outputs."""
        with torch.autocast(self.device, dtype=self.dtype):
            return self.graph(*values)


class _WithoutGradients(torch.nn.Module):
    """Runs a graph without gradients, because it was recorded so."""

    def __init__(self, graph: torch.nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *values: Any) -> Any:
        """Run the graph under `no_grad`, and return its outputs."""
        with torch.no_grad():
            return self.graph(*values)


def _clear_directory(place: Path) -> None:
    """Create the directory and its parents if needed; remove the files of an earlier recording, and no others."""
    place.mkdir(parents=True, exist_ok=True)
    # the record goes first, because a directory without it is not a recording
    for name in (RECORDING, GRAPH, INPUTS, READABLE):
        (place / name).unlink(missing_ok=True)
    for name in (GRAPH, INPUTS):
        tensors_path(place / name).unlink(missing_ok=True)


def _write_graph(graph_module: GraphModule, place: Path, needs: _Needs) -> None:
    """Write the graph as JSON; if that is impossible, write it as text and add the reason to `needs.lacks`."""
    try:
        write_graph(graph_module, place / GRAPH)
    except UsageError as error:
        text = graph_module.print_readable(print_output=False)
        (place / READABLE).write_text(f"{text.rstrip()}\n", encoding="utf-8")
        needs.lacks.append(f"the graph cannot be run elsewhere, only read in {READABLE}: {error}")


def _write_inputs(
    graph_module: GraphModule, inputs: Sequence[Any], place: Path, needs: _Needs, *, keeps_grad: bool
) -> None:
    """Write the inputs by the names of their placeholders, without those that no file can hold.

    Each of those adds a sentence to `needs.lacks`. Plain tensors are written as leaves, which keep `requires_grad` only
    with `keeps_grad`. UsageError if there is not one input for each placeholder.
    """
    nodes = _placeholders(graph_module)
    if len(nodes) != len(inputs):
        raise UsageError(f"the graph takes {len(nodes)} inputs and was given {len(inputs)}: give one for each")
    values: dict[str, Any] = {}
    leaves: dict[int, Any] = {}
    for node, value in zip(nodes, inputs, strict=True):
        try:
            leaf = leaves.setdefault(id(value), _as_leaf(value, keeps_grad=keeps_grad))
            require_writable(leaf)
        except Exception as error:  # an opaque object may raise any exception when its attributes are read
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            needs.lacks.append(f"the input {node.name} ({kind}) is left out, because no file can hold it: {error}")
        else:
            values[node.name] = leaf
    write_values(values, place / INPUTS)


def _as_leaf(value: Any, *, keeps_grad: bool) -> Any:
    """Return a tensor without autograd history; subclasses and values that are not tensors are returned themselves.

    Its `requires_grad` is that of the tensor, or False without `keeps_grad`. It shares memory with the tensor, or is
    the tensor itself, unless that is lazily negated.
    """
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value
    requires_grad = value.requires_grad and keeps_grad
    if value.is_leaf and value.requires_grad == requires_grad and not value.is_neg():
        return value
    return value.resolve_neg().detach().requires_grad_(requires_grad)


def _add_owners(graph_module: GraphModule, recording: Recording, needs: _Needs) -> None:
    """Add to `needs` the modules that define the graph's functions, and that of the backend it was recorded for.

    The backend counts if the transform is `backend:NAME` and not torch's own; UsageError if there is none of that name.
    A module that another process cannot import, and a function whose module is unknown, add a sentence to
    `needs.lacks`.
    """
    owners, problems = owners_of(graph_module)
    for module in owners:
        needs.add_module(module, f"functions of {module} that the graph calls")
    needs.lacks += [f"functions that the graph calls may be missing elsewhere: {problem}" for problem in problems]
    kind, _, name = (recording.transform or "").partition(":")
    if kind == "backend":
        owner = getattr(dynamo.backend_named(name), "__module__", "torch")
        if owner.partition(".")[0] != "torch":
            needs.add_module(owner, f"the backend {name}")


def _make_absolute(spec: str | None, needs: _Needs) -> str | None:
    """Return a transform's name so that a process in any directory finds it; None if no other process can.

    Of `file.py:name` the file becomes absolute. Of `module:name`, if the module is loaded, the module becomes its name
    or file, and the folder to import it from, if it needs one, is added to `needs.path`; if no other process can import
    it, `needs.lacks` says so. Any other name, and None, is returned unchanged.
    """
    place, _, name = (spec or "").rpartition(":")
    if place.endswith(".py"):
        return f"{Path(place).resolve()}:{name}"
    if place not in sys.modules:
        return spec
    try:
        origin = origin_of(place)
    except LookupError as error:
        needs.lacks.append(f"the transform {spec} cannot be found by another process: {error.args[0]}")
        return None
    needs.path += [origin.folder] if origin.folder is not None else []
    return f"{origin.place}:{name}"


def _placeholders(graph_module: GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]


def _merge(first: Iterable[str], second: Iterable[str]) -> tuple[str, ...]:
    """Return the texts of both, in their order, each once."""
    return tuple(dict.fromkeys((*first, *second)))


def _explain_lacks(recording: Recording) -> str:
    """Return the end of an error message: what the recording lacks, or to record it again if it lacks nothing."""
    return "".join(f"; {each}" for each in recording.lacks) + ("" if recording.lacks else ": record it again")
