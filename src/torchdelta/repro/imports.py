"""How a script imports what is not torch: installed packages by name, files from where they lie."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from torchdelta.errors import ReproUnwritable
from torchdelta.repro.code import RESERVED


@dataclass(frozen=True, kw_only=True)
class ImportLines:
    """Lines that import something, and what it is called then."""

    lines: tuple[str, ...]
    name: str


def import_named(spec: str, script: Path) -> ImportLines:
    """Return how a script gets at what `path/file.py:name` or `package.module:name` names."""
    place, _, name = spec.rpartition(":")
    first, _, rest = name.partition(".")
    alias = f"given_{first}" if first in RESERVED else first
    wanted = f"{first} as {alias}" if alias != first else first
    if place.endswith(".py"):
        file = Path(place).resolve()
        if not file.is_file():
            raise ReproUnwritable(f"there is no file {place} that a script could load {name} from")
        lines = _from_file(file, script, wanted, alias, first)
    else:
        lines = (*_search_path(place, script), f"from {place} import {wanted}")
    return ImportLines(lines=lines, name=f"{alias}.{rest}" if rest else alias)


def import_module(module: str, script: Path) -> tuple[str, ...]:
    """Return what imports a module, given by name or by file."""
    if module.endswith(".py"):
        given = Path(module).resolve()
        if not given.is_file() or not _is_importable(given):
            raise ReproUnwritable(f"a script cannot import {module}: it must be a file that has a name of its own")
        return _inserted(given.parent, script), f"import {given.stem}"
    file = _file_of(module)
    if module == "__main__":
        raise ReproUnwritable("what is defined in __main__ is in another file in another process: move it to a module")
    if file is not None and "." not in module and file.stem not in (module, "__init__"):
        # it was loaded from a file under a name that nobody else has
        return (*import_module(str(file), script)[:1], f"import {file.stem} as {module}")
    return (*_search_path(module, script), f"import {module}")


def _search_path(module: str, script: Path) -> tuple[str, ...]:
    """Return what makes a module importable in a script: nothing where it is installed."""
    file = _file_of(module)
    installed = {Path(folder).resolve() for key, folder in sysconfig.get_paths().items() if key.endswith("lib")}
    if file is None or "site-packages" in file.parts or any(folder in file.parents for folder in installed):
        return ()
    depth = module.count(".") + (file.name == "__init__.py")
    return (_inserted(file.parents[depth], script),)


def _file_of(module: str) -> Path | None:
    """Return the file of a module; None of one that is built in."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = getattr(sys.modules.get(module), "__spec__", None)
    if found is None and module not in sys.modules:
        raise ReproUnwritable(f"there is no module {module} that a script could import")
    is_source = found is not None and found.origin is not None and found.origin.endswith(".py")
    return Path(str(found.origin)).resolve() if found is not None and is_source else None


def _is_importable(file: Path) -> bool:
    return file.stem.isidentifier() and file.stem not in {*sys.stdlib_module_names, *RESERVED}


def _from_file(file: Path, script: Path, wanted: str, alias: str, first: str) -> tuple[str, ...]:
    if _is_importable(file):
        return _inserted(file.parent, script), f"from {file.stem} import {wanted}"
    # its name is that of another module, or none at all
    place = f"pathlib.Path(__file__).parent / {json.dumps(_relative(file, script))}"
    return (
        "import importlib.util",
        f'spec = importlib.util.spec_from_file_location("given", {place})',
        "given = importlib.util.module_from_spec(spec)",
        "spec.loader.exec_module(given)",
        f"{alias} = given.{first}",
    )


def _inserted(folder: Path, script: Path) -> str:
    relative = _relative(folder, script)
    here = "pathlib.Path(__file__).resolve().parent"
    return f"sys.path.insert(0, str({here}{'' if relative == '.' else f' / {json.dumps(relative)}'}))"


def _relative(target: Path, script: Path) -> str:
    try:
        return Path(os.path.relpath(target, script.resolve().parent)).as_posix()
    except ValueError:  # on another drive
        return target.as_posix()
