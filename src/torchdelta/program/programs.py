"""A program: a callable with its example arguments. And loading an object by its name.

    Program(name="mlp", call=model, args=(x,))          # alive
    load_callable("models.py:build", what="program factory")

`loading.py` builds a `Program` from a name; `sides.py` makes the independent copies that are run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torchdelta import errors
from torchdelta._torch.compile import dynamo
from torchdelta.errors import ProgramError, UsageError
from torchdelta.records.trust import workplace
from torchdelta.registry import nearest


@dataclass(frozen=True, kw_only=True)
class Program:
    """A callable and its arguments. They are never run themselves, because every side is a copy of them."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    lifted_call: Callable[..., Any] | None = None
    """The callable in float64, if it is not `call` itself: a graph may name the dtypes of its constants."""

    @property
    def lifted(self) -> Program:
        """The program to copy in float64: with `lifted_call` as its call, or this one itself if that is None."""
        return self if self.lifted_call is None else replace(self, call=self.lifted_call)

    def __post_init__(self) -> None:
        """Replace a callable that torch.compile wrapped by its original; raise ProgramError if the parts do not fit.

        They do not if `call` is not callable, `args` is not a tuple, `kwargs` is not a mapping with names as keys, or
        the arguments do not fit the signature.
        """
        # reference and transform both start from the program as it was written, not from a compiled one
        object.__setattr__(self, "call", dynamo.uncompiled(self.call))
        if not callable(self.call):
            raise ProgramError(f"{self.name}: {type(self.call).__name__} cannot be called")
        if not isinstance(self.args, tuple):
            raise ProgramError(
                f"{self.name}: the arguments must be a tuple, not {type(self.args).__name__}; write (x,) for one"
            )
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(key, str) for key in self.kwargs):
            raise ProgramError(f"{self.name}: the keyword arguments must be a dict with names as keys")
        self._require_fit()

    def _require_fit(self) -> None:
        """Raise ProgramError if the callable's signature, or that of a module's `forward`, does not take the arguments.

        A builtin without a signature is not checked.
        """
        target = getattr(self.call, "forward", self.call)
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):  # builtins and C++ functions have no signature
            return
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise ProgramError(
                f"{self.name}: the arguments do not fit the callable: {error}; it takes {signature}"
            ) from error


def own_path() -> tuple[str, ...]:
    """Return the entries of `sys.path` outside of the Python installation, where the user's modules are, made absolute.

    A relative entry is left out if the working directory was deleted.
    """
    installed = (sys.prefix, sys.base_prefix)
    places = [Path(place) for place in sys.path if not place.startswith(installed)]
    return tuple(str(place.resolve()) for place in places if place.is_absolute() or workplace() is not None)


def load_callable(spec: str, *, what: str) -> Callable[..., Any]:
    """Return the callable, such as a function or a class, that `path/file.py:name` or `package.module:name` names.

    `what` says in error messages what it is for. Raise UsageError if `spec` has another form or names something that
    cannot be called, and ProgramError if the module does not import or has no such name.
    """
    value = load_object(spec, what=what)
    if not callable(value):
        raise UsageError(f"{spec} is a {type(value).__name__}: a {what} must be callable")
    return value  # type: ignore[no-any-return]


def load_object(spec: str, *, what: str) -> Any:
    """Return the object that `path/file.py:name` or `package.module:name` names; the name may have dots.

    `what` says in error messages what it is for. Raise UsageError if `spec` has another form, and ProgramError if the
    module does not import or has no such name.
    """
    place, name = _place_and_name(spec, what)
    module = load_module(place, what=what)
    value: Any = module
    for step in name.split("."):
        try:
            value = getattr(value, step)
        except AttributeError:
            public = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
            raise ProgramError(f"{place} has no {name!r}: {nearest(name, public)}") from None
    return value


def require_module(spec: str, *, what: str) -> None:
    """Raise UsageError if `spec` is not of the form `path/file.py:name` or `package.module:name`.

    Raise ProgramError if there is no such file or module; the name in it is not looked for. `what` says in messages
    what it is for. Nothing is imported but the packages around a module.
    """
    place, _ = _place_and_name(spec, what)
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ProgramError(f"there is no file {place} for the {what}")
        return
    try:
        is_known = place in sys.modules or importlib.util.find_spec(place) is not None
    except (ImportError, ValueError):
        is_known = False
    if not is_known:
        raise ProgramError(f"there is no module {place!r} for the {what}")


def _place_and_name(spec: str, what: str) -> tuple[str, str]:
    """Return the module or file and the name in it; UsageError if `spec` has no colon or a part is empty."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{spec!r} does not name a {what}: write path/file.py:name or package.module:name")
    return place, name


def load_module(place: str, *, what: str) -> ModuleType:
    """Import a module by file or by name and return it; a file can import from its own folder while it loads.

    A file is loaded once as long as its content is the same, and is in `sys.modules` under a name of its own. `what`
    says in error messages what the module is for. Raise ProgramError if it does not exist or does not import.
    """
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and f"{place}.".startswith(f"{error.name}."):
                raise ProgramError(f"there is no module {place!r} for the {what}") from None
            raise ProgramError(f"{place} does not import: {error}") from error
        except errors.caught_from_user_code() as error:
            raise ProgramError(f"{place} does not import: {type(error).__name__}: {error}") from error
    path = Path(place).resolve()
    if not path.is_file():
        raise ProgramError(f"there is no file {place} for the {what}")
    # dynamo finds functions by the name of their module, so the name must be importable and unique to this file
    name = f"{path.stem}_{hashlib.sha256(bytes(path) + path.read_bytes()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        specification.loader.exec_module(module)
    except errors.caught_from_user_code() as error:
        del sys.modules[name]
        raise ProgramError(f"{place} does not load: {type(error).__name__}: {error}") from error
    finally:
        with contextlib.suppress(ValueError):  # the module may have removed it itself
            sys.path.remove(str(path.parent))
    return module
