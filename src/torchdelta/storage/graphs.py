"""A graph in a file: one strict JSON file, and one safetensors file beside it; nothing is pickled.

Reading one runs no code from the file. It imports modules that callables are named to be in, where that is allowed
(torch, operator, math, some builtins, and what the caller allows), looks attributes up in them, and lets torch generate
the code of the graph from names that were checked to be names. What a graph calls is called when the graph is: run a
graph from someone whose programs you would run.

Values that a graph is given, in a file: as a graph that returns them.

So strides, gradients asked for and shared memory are kept, by whatever keeps those of a graph's own tensors.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.fx import Graph, GraphModule

from torchdelta._torch.graphs import targets
from torchdelta._torch.modes import outside
from torchdelta.errors import ReportUnreadable, TorchDeltaError, UsageError
from torchdelta.records.codec import decode, encode
from torchdelta.storage.graph_modules import ModuleWriter, read_modules
from torchdelta.storage.graph_nodes import refer_to_callable
from torchdelta.storage.tensors import StorageRow, TensorRow, TensorWriter, read_tensors, refuse_special
from torchdelta.storage.values import encode_value

GRAPH_VERSION = 1
_FORMAT = "torchdelta graph"


def write_graph(graph_module: GraphModule, path: str | os.PathLike[str]) -> None:
    """Write a graph with its tensors and handles: JSON to the path, tensors to `<path>.safetensors`.

    UsageError says what in the graph cannot be written; then no file is touched.
    """
    if not isinstance(graph_module, GraphModule):
        raise UsageError(f"{type(graph_module).__name__} is no graph: trace it, or take the `module()` of an export")
    with outside.outside_modes():
        tensors = TensorWriter()
        modules = ModuleWriter(tensors)
        modules.add(graph_module)
        rows, storages, data = tensors.rows()
    document = {
        "format": _FORMAT,
        "graph_version": GRAPH_VERSION,
        "torch": torch.__version__,
        "modules": modules.records,
        "tensors": encode(rows),
        "storages": encode(storages),
    }
    text = json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n"
    # the JSON comes last: it has the checksums of the other
    _replace(tensors_path(path), lambda file: save_file(data, file))
    _replace(Path(path), lambda file: file.write_text(text, encoding="utf-8"))


def read_graph(path: str | os.PathLike[str], *, allow: Iterable[str] = ()) -> GraphModule:
    """Read a graph; `allow` names the packages beyond torch whose functions and classes it may use.

    ReportUnreadable says what is wrong with the file, or which function was not allowed.
    """
    if isinstance(allow, str):
        raise UsageError(f"allow is a sequence of packages: pass ({allow!r},)")
    document = _read_document(Path(path))
    try:
        rows = decode(tuple[TensorRow, ...], document.get("tensors"), "tensors")
        storages = decode(tuple[StorageRow, ...], document.get("storages"), "storages")
        with outside.outside_modes():
            tensors = read_tensors(rows, storages, _read_data(tensors_path(path)))
            return read_modules(document.get("modules"), tensors, _finder(tuple(allow)))
    except RecursionError as error:
        raise ReportUnreadable(f"{os.fspath(path)}: it is nested too deeply") from error
    except TorchDeltaError as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from error


def modules_named(graph_module: GraphModule) -> list[str]:
    """Return where the functions and classes are that a graph uses: who reads it elsewhere has to allow them."""
    inner = list(graph_module.modules())
    nodes = (node for module in inner if isinstance(module, GraphModule) for node in module.graph.nodes)
    called = (node.target for node in nodes if node.op == "call_function")
    classes = (type(module) for module in inner if not isinstance(module, GraphModule))
    return sorted({place for each in (*called, *classes) if (place := _module_naming(each)) is not None})


def _module_naming(target: Any) -> str | None:
    try:
        kind, _, rest = targets.name_target(target).partition(" ")
    except ValueError:  # what has no name cannot be written either, and who tries to is told
        return None
    return rest.partition(":")[0] if kind == "function" else None


def tensors_path(path: str | os.PathLike[str]) -> Path:
    """Return where the tensors of the graph at this path are."""
    return Path(f"{os.fspath(path)}.safetensors")


def _finder(allow: tuple[str, ...]) -> Callable[[str, str], Any]:
    found: dict[str, Any] = {}

    def find(name: str, where: str) -> Any:
        if name not in found:
            try:
                found[name] = targets.find_target(name, allow)
            except LookupError as error:
                raise ReportUnreadable(f"{where}: {error.args[0]}") from error
        return found[name]

    return find


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ReportUnreadable(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ReportUnreadable(f"{path}: this is no JSON, or not all of it: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ReportUnreadable(f"{path}: this is JSON, but no graph that write_graph wrote")
    version = document.get("graph_version")
    if version != GRAPH_VERSION:
        is_newer = isinstance(version, int) and version > GRAPH_VERSION
        remedy = "upgrade torchdelta to read it" if is_newer else "write the graph again"
        raise ReportUnreadable(
            f"{path}: it has version {version!r}, and this torchdelta reads {GRAPH_VERSION}: {remedy}"
        )
    return document


def _read_data(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ReportUnreadable(f"its tensors in {path.name} cannot be read: {error}") from error


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all."""
    unfinished = path.parent / f".torchdelta-{os.urandom(8).hex()}"
    try:
        write(unfinished)
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def write_values(values: Any, path: str | os.PathLike[str]) -> None:
    """Write tensors and plain values in tuples, lists and dicts; UsageError says which cannot be written."""
    write_graph(_holding(values), path)


def read_values(path: str | os.PathLike[str], *, allow: Iterable[str] = ()) -> Any:
    """Read what `write_values` wrote; ReportUnreadable says what is wrong with the file."""
    return read_graph(path, allow=allow)()


def require_writable(value: Any) -> None:
    """Raise Unwritable where a value cannot be written, before anything is."""

    def refer(inner: Any) -> dict[str, Any] | None:
        if not isinstance(inner, torch.Tensor):
            return refer_to_callable(inner)
        refuse_special(inner)
        return {}

    encode_value(value, refer)


def _holding(values: Any) -> GraphModule:
    graph, root = Graph(), torch.nn.Module()
    numbers = itertools.count()

    def held(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = f"input_{next(numbers)}"
            setattr(root, name, value)
            return graph.get_attr(name)
        if type(value) is tuple:
            return tuple(map(held, value))
        if isinstance(value, list):
            return list(map(held, value))
        if isinstance(value, dict):
            return {key: held(item) for key, item in value.items()}
        return value

    graph.output(held(values))
    return GraphModule(root, graph)
