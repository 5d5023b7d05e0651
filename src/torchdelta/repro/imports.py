"""Imports of a script for modules other than torch: installed packages by name, the user's own files as copies.

A script is sent to people who do not have the user's files. So each file of the user's that a script imports, and each
one of the same folder that this file imports, is copied to a folder beside the script, which is named after it:

    imports = ScriptImports(Path("out/repro.py"))
    imports.of_object("passes/fold.py:fold")    # from fold import fold
    imports.copies                              # {out/repro_code/fold.py: passes/fold.py}

A file that is beside the script already is not copied. `ScriptImports.copies` only lists the copies; `copy_all` makes
them.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torchdelta.errors import ReproUnwritable
from torchdelta.repro.code import RESERVED
from torchdelta.repro.values import write_text


@dataclass(frozen=True, kw_only=True)
class ImportLines:
    """The lines that import an object, and the expression for it afterwards."""

    lines: tuple[str, ...]
    """The last one imports; those before it make the module known."""
    name: str
    modules: tuple[str, ...] = ()
    """The names of the user's own modules that are imported on the way; empty if a file is loaded by its path."""


@dataclass(kw_only=True)
class ScriptImports:
    """Writes the import statements of one script, and lists the files that have to be copied for them."""

    script: Path
    """The path of the script, to which all paths in it are relative."""
    copies: dict[Path, Path] = field(default_factory=dict)
    """The user's file of each copy, by the path of the copy."""

    def of_object(self, spec: str) -> ImportLines:
        """Return the lines by which the script imports the object that `spec` names, and the expression for it.

        `spec` is `path/file.py:name` or `package.module:name`, where the name may be dotted. Files of the user's that
        have to be copied are added to `copies`. Raise ReproUnwritable if there is no such file or module, or if two
        copies would have one path; the name in the module is not looked up.
        """
        place, _, name = spec.rpartition(":")
        first, _, rest = name.partition(".")
        alias = f"given_{first}" if first in RESERVED else first
        import_as = f"{first} as {alias}" if alias != first else first
        if place.endswith(".py"):
            file = Path(place).resolve()
            if not file.is_file():
                raise ReproUnwritable(f"there is no file {place} that a script could load {name} from")
            lines = self._from_file(file, import_as, alias, first)
            modules = _module_names(file, file.parent) if _is_importable(file) else ()
        else:
            lines = (*self._search_path(place), f"from {place} import {import_as}")
            own = _own_file_of(place)
            modules = _module_names(*own) if own is not None else ()
        return ImportLines(lines=lines, name=f"{alias}.{rest}" if rest else alias, modules=modules)

    def of_module(self, module: str) -> tuple[str, ...]:
        """Return the lines that import a module, named by `package.module` or by a path to a `.py` file.

        A line that extends `sys.path` comes first, unless the module is installed or has no source file. A module that
        was loaded from a file of another name is imported by the file's name, `as` its own. Files to copy are added to
        `copies`. Raise ReproUnwritable for `__main__`, for a module that does not exist, for a file whose
        name cannot be that of a module, or is that of a standard module or of a name in the script, and if two copies
        would have one path.
        """
        if module.endswith(".py"):
            path = Path(module).resolve()
            if not path.is_file() or not _is_importable(path):
                raise ReproUnwritable(f"a script cannot import {module}: it must be a file that has a name of its own")
            return self._add_to_path(path, path.parent), f"import {path.stem}"
        file = _file_of(module)
        if module == "__main__":
            raise ReproUnwritable(
                "what is defined in __main__ is in another file in another process: move it to a module"
            )
        if file is not None and "." not in module and file.stem not in (module, "__init__"):
            # torchdelta loaded it from a file, under a name made for it
            return (*self.of_module(str(file))[:1], f"import {file.stem} as {module}")
        return (*self._search_path(module), f"import {module}")

    def copy_all(self) -> tuple[Path, ...]:
        """Copy all files of `copies`, over existing ones too; return the paths of the copies that did not exist.

        A file that lies in its place already stays as it is.
        """
        added = tuple(copy for copy in self.copies if not copy.exists())
        for copy, source in self.copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists() or not copy.samefile(source):
                shutil.copyfile(source, copy)
        return added

    def describe_copies(self) -> str:
        """Return a sentence that names the copies, or an empty text if there are none."""
        names = [_relative(copy, self.script) for copy in self.copies]
        return f"Beside it is the user's own code, which it imports: {', '.join(names)}." if names else ""

    def _from_file(self, file: Path, import_as: str, alias: str, first: str) -> tuple[str, ...]:
        """Return the lines that import the name `first` from a file, under the name `alias`.

        `import_as` is the text for an import statement: `first`, or `first as alias`. A file that `_is_importable`
        refuses is loaded by its path relative to the script instead. Files to copy are added to `copies`. Raises what
        `_folder_for` raises.
        """
        if _is_importable(file):
            return self._add_to_path(file, file.parent), f"from {file.stem} import {import_as}"
        # the file's name is not an identifier, or is the name of another module
        folder = self._folder_for(file, file.parent)
        # the file may import others of its folder
        search_path = self._add_to_path(file, file.parent)
        place = f"pathlib.Path(__file__).parent / {write_text(_relative(folder / file.name, self.script))}"
        return (
            search_path,
            "import importlib.util",
            f'spec = importlib.util.spec_from_file_location("given", {place})',
            "given = importlib.util.module_from_spec(spec)",
            "spec.loader.exec_module(given)",
            f"{alias} = given.{first}",
        )

    def _search_path(self, module: str) -> tuple[str, ...]:
        """Return a tuple of one line, which adds the folder of a module's copy to `sys.path`, or an empty tuple.

        It is empty if the module is installed or has no source file. Raise ReproUnwritable if there is no such module.
        """
        own = _own_file_of(module)
        return (self._add_to_path(*own),) if own is not None else ()

    def _add_to_path(self, file: Path, root: Path) -> str:
        """Return the line that adds the folder of a file's copy to `sys.path`; the files to copy are added to `copies`.

        The file's place in that folder is its place below `root`. Raises what `_folder_for` raises.
        """
        relative = _relative(self._folder_for(file, root), self.script)
        here = "pathlib.Path(__file__).resolve().parent"
        return f"sys.path.insert(0, str({here}{'' if relative == '.' else f' / {write_text(relative)}'}))"

    def _folder_for(self, file: Path, root: Path) -> Path:
        """Return the folder that stands for `root` beside the script, and add the files that it needs to `copies`.

        It is one that is named after the script, so that no copy replaces a file of the user's; or the script's own
        folder if that is `root`: then there is nothing to copy. Raise ReproUnwritable if another file has the path of a
        copy already.
        """
        beside = self.script.resolve().parent
        if beside == root:
            return beside
        folder = beside / f"{self.script.stem}_code"
        copies = {folder / source.relative_to(root): source for source in _sources(file, root)}
        for copy, source in copies.items():
            if self.copies.get(copy, source) != source:
                raise ReproUnwritable(
                    f"{self.copies[copy]} and {source} have one name, and a script can import one of them: rename one"
                )
        self.copies.update(copies)
        return folder


def _sources(file: Path, root: Path) -> list[Path]:
    """Return a file and all files below `root` that it imports, directly or through others; itself comes first.

    The `__init__.py` files of the packages around each of them count as imported.
    """
    sources = {file: None}
    waiting = [file]
    while waiting:
        source = waiting.pop()
        for name in (*_packages(source, root), *_imported_names(source, root)):
            for found in _files_named(name, root):
                if found not in sources:
                    sources[found] = None
                    waiting.append(found)
    return list(sources)


def _packages(file: Path, root: Path) -> tuple[str, ...]:
    """Return a tuple of one dotted name, that of the package a file is in; empty if the file lies in `root` itself."""
    parts = file.relative_to(root).parts[:-1]
    return (".".join(parts),) if parts else ()


def _imported_names(file: Path, root: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, as seen from `root`; of `from a import b` both `a` and `a.b`.

    Nothing is yielded for a file that this Python cannot parse.
    """
    package = file.relative_to(root).parts[:-1]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # for another Python, and not imported by this one
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield from (".".join(filter(None, (base, *tail))) for tail in ((), *((each.name,) for each in node.names)))


def _files_named(name: str, root: Path) -> Iterator[Path]:
    """Yield the files below `root` that importing a dotted name runs: those of the packages around it, and its own.

    Modules of Python's own library and torch are not looked for.
    """
    parts = name.split(".")
    if not name or parts[0] in {*sys.stdlib_module_names, "torch"}:
        return
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                yield file


def _file_of(module: str) -> Path | None:
    """Return the source file of a module, or None if it has none, like a built-in or compiled module.

    A module that is only in `sys.modules` counts too. The packages around the module are imported here. Raise
    ReproUnwritable if there is no such module.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None and module not in sys.modules:
        raise ReproUnwritable(f"there is no module {module} that a script could import")
    is_source = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return Path(str(spec.origin)).resolve() if spec is not None and is_source else None


def _own_file_of(module: str) -> tuple[Path, Path] | None:
    """Return the source file of a module of the user's own and the folder above its top package.

    None if the module is installed or has no source file. Raise ReproUnwritable if there is no such module.
    """
    file = _file_of(module)
    installed = {Path(folder).resolve() for key, folder in sysconfig.get_paths().items() if key.endswith("lib")}
    if file is None or "site-packages" in file.parts or any(folder in file.parents for folder in installed):
        return None
    return file, file.parents[module.count(".") + (file.name == "__init__.py")]


def _module_names(file: Path, root: Path) -> tuple[str, ...]:
    """Return the dotted names of a file and of all files below `root` that it imports."""
    parts = (source.relative_to(root).with_suffix("").parts for source in _sources(file, root))
    return tuple(".".join(each[:-1] if each[-1] == "__init__" else each) for each in parts)


def _is_importable(file: Path) -> bool:
    """Tell whether a file's name can be that of a module, and is not that of a standard module or in `RESERVED`."""
    return file.stem.isidentifier() and file.stem not in {*sys.stdlib_module_names, *RESERVED}


def _relative(target: Path, script: Path) -> str:
    """Return a path relative to the script's folder, with forward slashes; on another drive, the path itself."""
    try:
        return Path(os.path.relpath(target, script.resolve().parent)).as_posix()
    except ValueError:  # on another drive
        return target.as_posix()
