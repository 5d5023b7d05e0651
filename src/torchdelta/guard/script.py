"""A user's script, run in this process as `python` would run it: arguments, paths, `__main__`, and how it ends.

`torchdelta run` has to be in the same process as the script, so that its guards are there when the script compiles.
Start with `run_script`.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType

from torchdelta.errors import Refused, UsageError

FILE, MODULE, CODE = KINDS = ("file", "module", "code")
_RUNS_AS = "__main__"


@dataclass(frozen=True, kw_only=True)
class Script:
    """What `python` would run: a file, `-m` a module or `-c` code."""

    kind: str
    text: str
    """The path, the module's name, or the code itself."""
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise UsageError if the kind is unknown or the file does not exist."""
        if self.kind not in KINDS:
            raise UsageError(f"a script is one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.kind == FILE and not os.path.exists(self.text):
            raise UsageError(f"there is no script {self.text!r}: name a file, or -m a module or -c code")


@dataclass(frozen=True, kw_only=True)
class ScriptEnding:
    """How a script ended."""

    status: int
    """The exit status that Python would have."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended it."""


def run_script(script: Script) -> ScriptEnding:
    """Run a script in this process as `__main__`, and return its exit status and whether Ctrl-C ended it.

    `sys.argv`, `sys.path` and the module `__main__` become the script's and stay so. An exception of the script is
    printed and gives the status 1; a `sys.exit` gives its own. Threads are awaited as Python does; a Ctrl-C then ends
    the waiting and is printed. Refused if the script cannot be run, or if a guard raises it within the script.
    """
    try:
        module, code = _load(script)
        sys.modules[_RUNS_AS] = module
        exec(code, vars(module))
        ending = ScriptEnding(status=0)
    except Refused:
        raise
    except SystemExit as exited:
        ending = _ending_of_exit(exited)
    except BaseException as error:  # any exception of a script ends its process
        ending = _print_error(error)
    try:
        _await_threads()
    except KeyboardInterrupt:
        # as in Python, an interrupt in this place does not change the status
        _print_to_stderr(f"Exception ignored in: {threading!r}\n{traceback.format_exc().rstrip()}")
    return ending


def _load(script: Script) -> tuple[ModuleType, CodeType]:
    """Set `sys.argv` and `sys.path[0]` as Python would; return a `__main__` module and its code, not run yet.

    Of a folder or a zip file, the code is that of `__main__.py`. For `-m`, parent packages are imported. Refused if
    there is no such code or it cannot be read; a SyntaxError, and an error in importing a parent, pass through.
    """
    if script.kind == CODE:
        _set_paths("", ("-c", *script.arguments))
        return _as_main(None, importlib.machinery.BuiltinImporter), _compile(script.text, "<string>")
    if script.kind == MODULE:
        _set_paths(os.getcwd(), ("-m", *script.arguments))
        return _from_spec(_module_spec(script.text), sys.argv)
    path = os.path.abspath(script.text)
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _set_paths(path, (script.text, *script.arguments))
        spec = importlib.machinery.PathFinder.find_spec(_RUNS_AS, [path])
        if spec is None:
            raise Refused(f"there is no __main__.py in {script.text}, so it cannot be run")
        return _from_spec(spec, [])
    _set_paths(os.path.dirname(os.path.realpath(path)), (script.text, *script.arguments))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise Refused(f"cannot read the script {script.text}: {error.strerror or error}") from error
    return _as_main(path, importlib.machinery.SourceFileLoader(_RUNS_AS, path)), _compile(source, path)


def _set_paths(first_place: str, argv: tuple[str, ...]) -> None:
    """Replace the content of `sys.argv`, and `sys.path[0]` unless Python runs with -P."""
    sys.argv[:] = argv
    # with -P Python adds no directory, so ours is not there to be replaced
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first_place


def _compile(source: str | bytes, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def _as_main(path: str | None, loader: object) -> ModuleType:
    """Return a new `__main__` module with `__builtins__`, `__loader__`, and with a path `__file__` and `__cached__`."""
    module = ModuleType(_RUNS_AS)
    vars(module).update(__builtins__=builtins, __loader__=loader)
    if path is not None:
        vars(module).update(__file__=path, __cached__=None)
    return module


def _module_spec(name: str) -> importlib.machinery.ModuleSpec:
    """Return the spec of a module that `-m` names; if it is a package, that of `__main__` in it.

    Refused if there is none. An import error of the script's own, within a parent package, passes through.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # only a missing parent package means that there is no such module; any other import error is the script's
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError as error:
        raise Refused(f"-m {name} cannot be run: {error}") from error
    if spec is not None and spec.submodule_search_locations is not None:
        within = f"{name}.{_RUNS_AS}"
        if (spec := importlib.util.find_spec(within)) is None:
            raise Refused(f"-m {name} is a package without {_RUNS_AS}, and cannot be run")
    if spec is None:
        raise Refused(f"there is no module {name!r}: name one that can be imported from here")
    return spec


def _from_spec(spec: importlib.machinery.ModuleSpec, argv: list[str]) -> tuple[ModuleType, CodeType]:
    """Return a `__main__` module and the code of a spec; Refused if it has no Python code.

    The first item of `argv` is replaced in place by the file of the spec, if that is known; an empty `argv` stays
    empty.
    """
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise Refused(f"{spec.name} is not written in Python, and cannot be run")
    if argv:
        argv[0] = spec.origin or argv[0]
    module = _as_main(spec.origin, spec.loader)
    vars(module).update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    return module, code


def _ending_of_exit(exited: SystemExit) -> ScriptEnding:
    """Return the ending of a `sys.exit`: its status if that is an int, and 0 if it is None.

    Any other value is printed to stderr, and the status is 1.
    """
    if exited.code is None or isinstance(exited.code, int):
        return ScriptEnding(status=int(exited.code or 0))
    _print_to_stderr(exited.code)
    return ScriptEnding(status=1)


def _print_to_stderr(value: object) -> None:
    """Print a value and a line break to `sys.stderr`, or to the process's own stderr if that is None.

    As in Python, what cannot be printed is left out: all if stderr is closed, the value if its `__str__` raises.
    """
    stderr = sys.stderr if sys.stderr is not None else sys.__stderr__
    if stderr is None:
        return
    for each in (value, "\n"):
        try:
            print(each, file=stderr, end="")
        except Exception:  # any, because the stream and the value may be the script's own
            continue


def _print_error(error: BaseException) -> ScriptEnding:
    """Print an exception by `sys.excepthook`, without our first frames, and return an ending with the status 1.

    If the hook itself raises SystemExit, the ending is that of the exit; after any other exception of it, both are
    printed. If `error` is a KeyboardInterrupt, the ending is an interrupted one. The traceback of `error` is cut in
    place.
    """
    if error.__traceback__ is not None:
        error.with_traceback(_first_of_script(error.__traceback__))
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as exited:
        return _ending_of_exit(exited)
    except BaseException:  # the script's own hook failed: print what Python prints then
        _print_to_stderr(f"Error in sys.excepthook:\n{traceback.format_exc()}\nOriginal exception was:")
        sys.__excepthook__(type(error), error, error.__traceback__)
    return ScriptEnding(status=1, is_interrupted=isinstance(error, KeyboardInterrupt))


def _first_of_script(trace: TracebackType) -> TracebackType | None:
    """Return the traceback from the first frame that is not ours, or None if all are ours."""
    return next((each for each in _frames(trace) if each.tb_frame.f_code.co_filename != __file__), None)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield a traceback and all that follow it, from the outermost frame to the innermost."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _await_threads() -> None:
    """Wait for all other threads except daemons and workers of pools, as Python does before it ends.

    Threads that these start are waited for too.
    """
    # a thread may start others before it ends
    while threads := [each for each in threading.enumerate() if not each.daemon and each not in _spared_threads()]:
        for thread in threads:
            thread.join()


def _spared_threads() -> set[threading.Thread]:
    """Return this thread and the workers of pools so far.

    Python itself ends the workers of a pool at exit: waiting for them here would never end.
    """
    pools = sys.modules.get("concurrent.futures.thread")
    return {threading.current_thread(), *getattr(pools, "_threads_queues", ())}
