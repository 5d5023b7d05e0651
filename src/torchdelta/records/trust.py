"""Which code may a file name? A recording is data that people send each other, and must not run what it pleases.

Code that a file names is imported only if it is part of an installed package, or if it lies below a directory that the
user trusts: `torchdelta check DIR --trust PROJECT`, or `torchdelta.trust(PROJECT)`. Modules of Python's own library are
never needed for a graph, and are refused. A pool tells its workers which directories are trusted. Start with
`require_trusted`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from torchdelta.errors import UsageError

_TRUSTED: list[Path] = []
"""The directories that the user trusts, in this process."""


def trust(directory: str | os.PathLike[str]) -> None:
    """Let recordings name code below a directory, in this process and in its workers.

    UsageError if there is no such directory.
    """
    place = Path(directory).resolve()
    if not place.is_dir():
        raise UsageError(f"there is no directory {os.fspath(directory)} to trust")
    if place not in _TRUSTED:
        _TRUSTED.append(place)


def trusted_directories() -> tuple[Path, ...]:
    """Return the directories that the user trusts."""
    return tuple(_TRUSTED)


def require_trusted(place: str, folders: Iterable[str], *, named_by: str) -> None:
    """Raise UsageError if a recording may not name this code: a module by its name, or a file of Python source.

    It may if the module is part of an installed package, or if the code lies below a directory that the user trusts.
    `folders` are those in which the recording says that modules are; `named_by` is the recording, for the message.
    """
    origin = _origin_of(place, folders)
    if origin is not None and _is_installed(place, origin):
        return
    if origin is not None and is_trusted(origin):
        return
    if origin is None and not place.endswith(".py"):
        top = place.partition(".")[0]
        if top in sys.stdlib_module_names:
            raise UsageError(f"{named_by} names {place} of Python's own library, which no graph calls")
        raise UsageError(f"{named_by} names the module {place}, and no installed package has it: it is not imported")
    file = origin if origin is not None else Path(place).resolve()
    raise UsageError(
        f"{named_by} names code that is not installed here: {file}. It would be run: read it, and if you trust it, add "
        f"--trust {_folder_of(file)}"
    )


def is_trusted(place: str | os.PathLike[str]) -> bool:
    """Tell whether a file or a directory is one that the user trusts, or lies below one."""
    resolved = Path(place).resolve()
    return any(resolved.is_relative_to(directory) for directory in trusted_directories())


def untrusted_folders(places: Iterable[str], folders: Iterable[str]) -> list[str]:
    """Return the folders of all places (files and modules) that are not installed, each once, even if they are trusted.

    A command that runs them needs `--trust` for each. Modules that are not found, and Python's own, are left out.
    `folders` are searched for modules after the search path.
    """
    searched = list(folders)
    found: dict[str, None] = {}
    for place in places:
        origin = _origin_of(place, searched)
        if origin is not None and not _is_installed(place, origin):
            found[str(_folder_of(origin))] = None
    return list(found)


def _folder_of(origin: Path) -> Path:
    """Return the folder from which the code of a file is imported: of a package, the one around it."""
    return origin.parent.parent if origin.name == "__init__.py" else origin.parent


def _origin_of(place: str, folders: Iterable[str]) -> Path | None:
    """Return the file of a place, or of the outermost package of a module; None if it is not found or Python's own.

    A package without a file has its folder. A file is not looked for: its absolute path is returned. Nothing is
    imported. A module of the search path comes before one in `folders`.
    """
    if place.endswith(".py"):
        return Path(place).resolve()
    top = place.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    for path in (None, list(folders)):
        spec = PathFinder.find_spec(top, path)
        if spec is not None:
            origins = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
            return Path(origins[0]).resolve() if origins else None
    return None


def _is_installed(place: str, origin: Path) -> bool:
    """Tell whether a module is part of an installed package; `origin` is the file of its package.

    That is below site-packages, or, for one that is installed editable, outside of the working directory. A place that
    is a file (`.py`) is never installed.
    """
    if place.endswith(".py"):
        return False
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    if any(origin.is_relative_to(Path(library).resolve()) for library in libraries):
        return True
    top = place.partition(".")[0]
    here = workplace()
    is_in_workplace = here is not None and origin.is_relative_to(here)
    return top in metadata.packages_distributions() and not is_in_workplace


def workplace() -> Path | None:
    """Return the working directory, or None if it was deleted."""
    try:
        return Path.cwd().resolve()
    except FileNotFoundError:
        return None
