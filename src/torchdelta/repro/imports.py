"""Import statements of a script for modules other than torch: installed packages by name, files by their path."""

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
    """The lines that import an object, and the expression for it afterwards."""

    lines: tuple[str, ...]
    name: str


def import_named(spec: str, script: Path) -> ImportLines:
    """Return the lines by which a script imports the object that `spec` names, and the expression for it afterwards.

    `spec` is `path/file.py:name` or `package.module:name`, where the name may be dotted; `script` is the path of the
    script, to which paths are relative. Raise ReproUnwritable if there is no such file or module; the name in it is not
    looked up.
    """
    place, _, name = spec.rpartition(":")
    first, _, rest = name.partition(".")
    alias = f"given_{first}" if first in RESERVED else first
    import_as = f"{first} as {alias}" if alias != first else first
    if place.endswith(".py"):
        file = Path(place).resolve()
        if not file.is_file():
            raise ReproUnwritable(f"there is no file {place} that a script could load {name} from")
        lines = _from_file(file, script, import_as, alias, first)
    else:
        lines = (*_search_path(place, script), f"from {place} import {import_as}")
    return ImportLines(lines=lines, name=f"{alias}.{rest}" if rest else alias)


def import_module(module: str, script: Path) -> tuple[str, ...]:
    """Return the lines that import a module, named by `package.module` or by a path to a `.py` file.

    `script` is the path of the script, to which paths are relative. A line that extends `sys.path` comes first, unless
    the module is installed or has no source file. Raise ReproUnwritable for `__main__`, for what does not exist, and
    for a file whose name cannot be that of a module, or is that of a standard module or of a name in the script.
    """
    if module.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file() or not _is_importable(path):
            raise ReproUnwritable(f"a script cannot import {module}: it must be a file that has a name of its own")
        return _add_to_path(path.parent, script), f"import {path.stem}"
    file = _file_of(module)
    if module == "__main__":
        raise ReproUnwritable("what is defined in __main__ is in another file in another process: move it to a module")
    if file is not None and "." not in module and file.stem not in (module, "__init__"):
        # torchdelta loaded it from a file, under a name made for it
        return (*import_module(str(file), script)[:1], f"import {file.stem} as {module}")
    return (*_search_path(module, script), f"import {module}")


def _search_path(module: str, script: Path) -> tuple[str, ...]:
    """Return a tuple of one line, which adds the folder above a module's top package to `sys.path`, or an empty tuple.

    It is empty if the module is installed or has no source file. `script` is the path of the script, to which the
    folder is relative. Raise ReproUnwritable if there is no such module.
    """
    file = _file_of(module)
    installed = {Path(folder).resolve() for key, folder in sysconfig.get_paths().items() if key.endswith("lib")}
    if file is None or "site-packages" in file.parts or any(folder in file.parents for folder in installed):
        return ()
    depth = module.count(".") + (file.name == "__init__.py")
    return (_add_to_path(file.parents[depth], script),)


def _file_of(module: str) -> Path | None:
    """Return the source file of a module, or None if it has none, like a built-in or compiled module.

    A module that is only in `sys.modules` counts too. Raise ReproUnwritable if there is no such module.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None and module not in sys.modules:
        raise ReproUnwritable(f"there is no module {module} that a script could import")
    is_source = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return Path(str(spec.origin)).resolve() if spec is not None and is_source else None


def _is_importable(file: Path) -> bool:
    return file.stem.isidentifier() and file.stem not in {*sys.stdlib_module_names, *RESERVED}


def _from_file(file: Path, script: Path, import_as: str, alias: str, first: str) -> tuple[str, ...]:
    """Return the lines that import the name `first` from a file, under the name `alias`.

    `import_as` is the text for an import statement: `first`, or `first as alias`. A file that `_is_importable` refuses
    is loaded by its path relative to `script` instead.
    """
    if _is_importable(file):
        return _add_to_path(file.parent, script), f"from {file.stem} import {import_as}"
    # the file's name is not an identifier, or is the name of another module
    place = f"pathlib.Path(__file__).parent / {json.dumps(_relative(file, script))}"
    return (
        "import importlib.util",
        f'spec = importlib.util.spec_from_file_location("given", {place})',
        "given = importlib.util.module_from_spec(spec)",
        "spec.loader.exec_module(given)",
        f"{alias} = given.{first}",
    )


def _add_to_path(folder: Path, script: Path) -> str:
    relative = _relative(folder, script)
    here = "pathlib.Path(__file__).resolve().parent"
    return f"sys.path.insert(0, str({here}{'' if relative == '.' else f' / {json.dumps(relative)}'}))"


def _relative(target: Path, script: Path) -> str:
    try:
        return Path(os.path.relpath(target, script.resolve().parent)).as_posix()
    except ValueError:  # on another drive
        return target.as_posix()
