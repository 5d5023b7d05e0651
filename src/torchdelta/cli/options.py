"""The parts that commands share: typed options, which are read into records, exit codes, and the work around a run.

A command takes the options of a reader such as `read_check_options` by the decorator `taking`:

    @taking(options=read_check_options)
    def command(*, program: Program, options: CheckOptions) -> None: ...
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import inspect
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from torchdelta.cli.progress import ProgressLine, stdout_set_aside
from torchdelta.errors import EnvironmentUnfit, UsageError
from torchdelta.isolate.pool import Pool
from torchdelta.isolate.worker import import_all
from torchdelta.isolate.zygote_start import is_forkable
from torchdelta.minify.warm_workers import pool_for
from torchdelta.records import trust as records_trust
from torchdelta.records.case import CheckOptions, SearchLimits, require_positive
from torchdelta.records.codec import to_json, write_report
from torchdelta.records.comparison import Scalar
from torchdelta.records.operators import Sweep
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.style import console_for

Program = Annotated[
    str, typer.Argument(help="path/file.py:factory, package.module:factory, or a directory that a guard recorded.")
]
Transform = Annotated[str, typer.Option("--transform", "-t", help="inductor, export, cast:bfloat16, file.py:fn, …")]
TransformIfAny = Annotated[
    str | None,
    typer.Option(
        "--transform", "-t", help="inductor, export, cast:bfloat16, file.py:fn, …; a recorded directory has its own."
    ),
]
Options = Annotated[list[str] | None, typer.Option("--option", "-O", help="An option of the transform, key=value.")]
Stages = Annotated[str | None, typer.Option(help="Of forward,gradients,steps; default forward,gradients.")]
_POLICIES = "noise, noise*K, bitwise, close, rtol=R,atol=A, sqnr>=X, cosine>=X."
Policy = Annotated[str, typer.Option(help=_POLICIES)]
PolicyIfAny = Annotated[str | None, typer.Option(help=f"{_POLICIES[:-1]}; default noise.")]
Seed = Annotated[int, typer.Option(help="Of every random number.")]
STDOUT = Path("-")
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write what was found there; - is stdout, which has nothing else then.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in (("b", 1000), ("ib", 1024))
}


def read_check_options(
    option: Options = None,
    stages: Stages = None,
    policy: PolicyIfAny = None,
    ignore: Annotated[str, typer.Option(help="Clauses that don't count: dtype,stride,integers,aliasing,…")] = "",
    strict: Annotated[str, typer.Option(help="Clauses that count although by default they don't: casts,stride.")] = "",
    strict_casts: Annotated[
        bool, typer.Option("--strict-casts", help="A narrowing cast that the candidate elides is a divergence.")
    ] = False,
    semantic: Annotated[
        bool,
        typer.Option("--semantic/--no-semantic", help="Ask in float64 too: one more application, compile included."),
    ] = CheckOptions.semantic,
    seed: Seed = CheckOptions.seed,
    iterations: Annotated[
        int, typer.Option(help="Runs, all but the first on fresh random inputs.")
    ] = CheckOptions.iterations,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the stage steps.")] = CheckOptions.steps,
    optimizer: Annotated[
        str, typer.Option(help="adamw, sgd, or file.py:factory of one from parameters.")
    ] = CheckOptions.optimizer,
    loss: Annotated[
        str | None, typer.Option(help="file.py:fn of the outputs, instead of random cotangents.")
    ] = CheckOptions.loss,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With deterministic algorithms.")
    ] = CheckOptions.deterministic,
    anomaly: Annotated[bool, typer.Option("--anomaly", help="With autograd's anomaly mode.")] = CheckOptions.anomaly,
    trust: Annotated[
        list[Path] | None, typer.Option(help="A directory whose code a recording may name, and so run.")
    ] = None,
) -> CheckOptions:
    """Return the options of a check that were typed, without a transform, which the command adds.

    `stages`, `ignore` and `strict` are split at commas; `strict_casts` adds `casts` to `strict`. Directories in `trust`
    are trusted from then on. UsageError if an option of the transform is not `key=value`, or a directory is missing.
    Other values are not checked here.
    """
    for directory in trust or ():
        records_trust.trust(directory)
    return CheckOptions.read(
        options=read_options(option),
        stages=stages,
        policy=policy,
        ignore=ignore,
        strict=f"{strict},casts" if strict_casts else strict,
        semantic=semantic,
        seed=seed,
        iterations=iterations,
        steps=steps,
        optimizer=optimizer,
        loss=loss,
        deterministic=deterministic,
        anomaly=anomaly,
    )


Command = Callable[..., None]


def taking(**readers: Callable[..., Any]) -> Callable[[Command], Command]:
    """Return a decorator that replaces an argument of a command by the parameters of the reader that returns it.

    `readers` has the reader of each argument, by the argument's name. The decorated command takes keywords only. When
    it is called, each reader gets its own, and the command gets the reader's result as the argument.
    """
    shared = {name: inspect.signature(read, eval_str=True).parameters for name, read in readers.items()}

    def decorate(command: Command) -> Command:
        """Return the command with the readers' parameters in place of the arguments that they return."""
        own = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def run(**typed: Any) -> None:
            read = {name: readers[name](**{each: typed.pop(each) for each in shared[name]}) for name in readers}
            command(**typed, **read)

        # the options take the argument's place, so that `--help` lists them there
        parameters = [each for name in own for each in (shared[name].values() if name in shared else (own[name],))]
        signature = inspect.Signature([each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters])
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


@contextmanager
def running(transform: str, json_file: Path | None, *, verbose: bool) -> Iterator[ProgressLine]:
    """Show on stderr what a run is doing; yield the `ProgressLine`, which is called with the name of each part.

    `transform` begins each line. What the program prints meanwhile goes to stderr too, because stdout is for the
    answer. `json_file` is only checked: UsageError at once if it is a file that cannot be written. Without `verbose`,
    warnings are only counted, and their number is printed at the end, unless the block raises. The working directory is
    put back at the end.
    """
    if json_file is not None and json_file != STDOUT:
        require_writable(json_file)
    console = console_for(sys.stderr)
    with (
        keeping_directory(),
        stdout_set_aside(),
        nullcontext() if verbose else counting_warnings(console),
        ProgressLine(transform, console) as progress,
    ):
        yield progress


@contextmanager
def keeping_directory() -> Iterator[None]:
    """Return a context manager that puts the working directory back at its end, unless that is gone.

    A program that runs in this process may leave it, and the paths that the user typed are relative to it.
    """
    before = None
    with suppress(OSError):  # the command may be started in a directory that is gone
        before = os.getcwd()
    try:
        yield
    finally:
        with suppress(OSError):
            if before is not None:
                os.chdir(before)


def require_torch(what: str) -> None:
    """Raise EnvironmentUnfit if torch is not installed, without importing it, which takes seconds.

    `what` names in the message what needs torch.
    """
    with needing_torch(what):
        if importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError(name="torch")


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """Return a context manager that turns a ModuleNotFoundError in its block into EnvironmentUnfit.

    The message says that `what` needs the missing module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(f"{what} needs {error.name}, which is not installed: install it first") from error


def read_options(texts: list[str] | None) -> dict[str, Scalar]:
    """Return the options of a transform by name, each typed as `key=value`; an empty dict for None.

    A name that was typed twice has the last value. UsageError if a text is not `key=value`.
    """
    return dict(read_option(text) for text in texts or ())


def read_option(text: str) -> tuple[str, Scalar]:
    """Return name and value of `key=value`; a value that reads as a number or truth value is one, and any other a text.

    UsageError if there is no `=` or no name.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"malformed option {text!r}: write -O key=value")
    return name, _scalar(value)


def _scalar(text: str) -> Scalar:
    """Return the truth value (`true` or `false` in any case), int or float that a text reads as, or else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_bytes(text: str) -> int:
    """Return an amount of memory, such as `2GB`, `1.5 GiB` or a plain number of bytes, in whole bytes.

    `KB` is 1000 bytes and `KiB` 1024, and so on up to `TB` and `TiB`, in upper or lower case. UsageError if the text is
    malformed (`2G`), less than a byte or too large for a float.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    amount = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= amount < math.inf:
        raise UsageError(f"malformed amount of memory {text!r}: write it as 2GB, 512MiB or a number of bytes")
    return int(amount)


def read_mapping(path: Path) -> dict[str, str]:
    """Return the JSON object in a file as a dict, from names of the reference's nodes to names of the candidate's.

    UsageError if the file cannot be read, is not an object of texts, or has a name of the reference twice.
    """
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda items: _unique(items, path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the mapping {path}: {getattr(error, 'strerror', None) or 'it is not text'}"
        ) from error
    except json.JSONDecodeError as error:
        raise UsageError(f"the mapping {path} is not JSON (line {error.lineno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the mapping {path} is not JSON that can be read: {error}") from error
    if not isinstance(pairs, dict) or not all(isinstance(name, str) for name in pairs.values()):
        raise UsageError(
            f"the mapping {path} is not an object of names: "
            'write {"node of the reference": "node of the candidate"}, with both names as text'
        )
    return pairs


def _unique(items: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """Return the items of a JSON object as a dict; UsageError if a name comes twice.

    `path` is the file that they are from, for the message.
    """
    pairs = dict(items)
    for name in pairs:
        if (times := sum(name == other for other, _ in items)) > 1:
            raise UsageError(f"the mapping {path} names {name!r} {times} times: a node has one partner")
    return pairs


@contextmanager
def counting_warnings(console: Console) -> Iterator[None]:
    """Return a context manager that keeps warnings from the terminal, and at its end prints their number to `console`.

    Nothing is printed if there was none, or if the block raises. A warning that one line of code repeats counts once.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    print_warning_count(len(caught), console)


def print_warning_count(count: int, console: Console) -> None:
    """Print how many warnings were not shown, with a hint at `--verbose`; print nothing if `count` is 0."""
    if count:
        text = "1 warning; --verbose shows it" if count == 1 else f"{count} warnings; --verbose shows them"
        console.print(text, style="dim", highlight=False)


def pass_on(output: str, texts: Sequence[str], *, verbose: bool) -> None:
    """Print to stderr a worker's output, which is that of the program, and then warnings or their number.

    The `texts` of the warnings are printed if `verbose`, and otherwise only how many there are.
    """
    sys.stderr.write(output)
    for text in texts if verbose else ():
        sys.stderr.write(text)
    if not verbose:
        print_warning_count(len(texts), console_for(sys.stderr))


def deliver(
    result: Any, json_file: Path | None, show: Callable[[], None], aside: Callable[[], None] = lambda: None
) -> None:
    """Write the result of a command to its file, if there is one; then call `aside`, and print the result by `show`.

    `aside` prints to stderr what goes with the result. With `-` for the file, the JSON is printed on stdout in place of
    `show`. If the file cannot be written, the rest happens all the same, and then UsageError is raised.
    """
    try:
        if json_file is not None and json_file != STDOUT:
            write_report(result, json_file)
    finally:
        aside()
        if json_file == STDOUT:
            sys.stdout.write(to_json(result))
        else:
            show()


def require_writable(path: Path) -> None:
    """Raise UsageError if the file cannot be written: it is a directory, or its directory is missing or not writable.

    A pipe or device is accepted.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory; name a file in it")
    if path.exists() and not path.is_file():  # a pipe or device is written to in place
        return
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: {path.parent} is not writable; name another place")


USAGE = 2
INTERNAL = 70
"""A mistake of torchdelta's own: EX_SOFTWARE of sysexits, because 1, Python's own, means that a program diverged."""

EXIT_OF = {
    Verdict.EQUIVALENT: 0,
    Verdict.DIVERGED: 1,
    Verdict.INCONCLUSIVE: 3,
    Verdict.CRASHED: 4,
    Verdict.TIMED_OUT: 4,
}
_INTERRUPTED = 130
"""The exit code of a sweep that Ctrl-C ended early: 128 + SIGINT, as shells have it."""


def exit_of_sweep(sweep: Sweep) -> int:
    """Return the exit code of a sweep: that of its verdict, or 130 if it has not all rows."""
    return EXIT_OF[sweep.verdict] if len(sweep.swept) == sweep.total else _INTERRUPTED


OutDirectory = Annotated[Path, typer.Option("--out", "-o", help="The directory for everything that is found.")]
Memory = Annotated[str | None, typer.Option(help="What a worker may hold: 2GB, 512MiB, …")]
NoData = Annotated[bool, typer.Option("--no-data", help="Random numbers stand for weights and data in the script.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what is in the directory.")]
WithIssue = Annotated[bool, typer.Option("--issue", help="Write the text of an issue beside the script.")]


def read_limits(
    match: Annotated[
        str | None, typer.Option(help="A regular expression: of several failures, the one that is meant.")
    ] = SearchLimits.match,
    level: Annotated[str, typer.Option(help="Whose graphs are made smaller: dynamo, or aot.")] = SearchLimits.level,
    timeout: Annotated[float, typer.Option(help="Seconds that the first query may take.")] = SearchLimits.timeout_s,
    queries: Annotated[int | None, typer.Option(help="At most so many queries.")] = SearchLimits.queries,
    seconds: Annotated[float | None, typer.Option(help="At most so long.")] = SearchLimits.seconds,
    memory: Memory = None,
) -> SearchLimits:
    """Return the typed limits of a search as a record: which failure it follows, in which graphs, and at which cost.

    UsageError if a number is not above 0, `match` is not a regular expression, `level` is unknown, or `memory` is
    malformed.
    """
    for name, value in (("timeout", timeout), ("queries", queries), ("seconds", seconds)):
        require_positive(f"--{name}", value)
    return SearchLimits(
        match=match,
        level=level,
        timeout_s=timeout,
        queries=queries,
        seconds=seconds,
        memory_bytes=read_bytes(memory) if memory is not None else None,
    )


@contextmanager
def workers_for(transform: str, *, what: str, preload: Sequence[str] = ()) -> Iterator[Pool]:
    """Import torchdelta with torch into this process, start a pool of workers for the transform, and yield the pool.

    The workers, which also import the modules `preload`, end with the context. They are forked from this process if
    that was possible before torch was imported. EnvironmentUnfit if a package is missing; `what` is the command's name
    in the message. `OMP_WAIT_POLICY` is set to `passive` in this process unless it has a value. Objects that are alive
    at the end of this process are not garbage-collected.
    """
    was_forkable = is_forkable()
    # torch reads this when it is imported: idle threads then sleep, and leave the cores to other workers
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # objects that are alive at the end go with the process; collecting garbage among them first takes a second
    atexit.register(gc.freeze)
    # without a spinner, because that has a thread, and a process with threads must not fork
    with (
        needing_torch(what),
        Live("loading torch", console=console_for(sys.stderr), auto_refresh=False, transient=True),
    ):
        import_all(["torchdelta.api"])
    with pool_for(transform, preload=preload, from_here=was_forkable) as pool:
        yield pool


def require_directory(path: Path) -> None:
    """Make a directory and its parents, unless it is there; UsageError if it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory {path}: {error.strerror or error}; name another place") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"cannot write into {path}: name another place")
