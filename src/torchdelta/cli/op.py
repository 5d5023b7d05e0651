"""`torchdelta op`: check one operator as compilers will use it, or with `--opinfo` those of torch's own database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdelta.cli.op_arguments import read_arguments
from torchdelta.cli.options import (
    EXIT_OF,
    Debug,
    JsonFile,
    Memory,
    PolicyIfAny,
    Resume,
    Seed,
    deliver,
    exit_of_sweep,
    pass_on,
    read_bytes,
    require_directory,
    require_torch,
    running,
    taking,
)
from torchdelta.errors import UsageError
from torchdelta.operators.isolated import IsolatedOpCheck, check_op_isolated
from torchdelta.operators.sweep import DTYPES, GRADIENTS, SweepRequest, sweep
from torchdelta.records.case import require_positive, require_seed, words_of
from torchdelta.records.operators import Sweep
from torchdelta.report.terminal.operators import print_operator, print_sweep

TIMEOUT_S = 180.0
"""How long one operator of a sweep may take by default."""
_SAMPLES = 2
_WORKERS = 2


def read_sweep(
    opinfo: Annotated[
        str | None,
        typer.Option(metavar="NAME|all", help="Operators of torch's database: names and patterns with commas, or all."),
    ] = None,
    dtypes: Annotated[
        str | None, typer.Option(help=f"Of a sweep: in which dtypes; default {','.join(DTYPES)}.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help=f"Of a sweep: on how many samples; default {_SAMPLES}.")] = None,
    workers: Annotated[int | None, typer.Option(help=f"Of a sweep: how many at a time; default {_WORKERS}.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Of a sweep: the directory that keeps what is found as it comes.")
    ] = None,
    resume: Resume = False,
) -> dict[str, Any]:
    """Return the options of a sweep by name, as they were typed; None for those that were not, `resume` included.

    UsageError if `workers` is below 1, or if there is `resume` without `out`.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is a number above 0, not {workers}")
    if resume and out is None:
        raise UsageError("--resume continues the sweep of a directory: name it by -o")
    typed = {"opinfo": opinfo, "dtypes": dtypes, "samples": samples, "workers": workers, "out": out}
    return {**typed, "resume": resume or None}


def run_sweep(
    typed: Mapping[str, Any],
    words: Mapping[str, Any],
    *,
    timeout_s: float | None,
    memory_bytes: int | None,
    progress: Callable[[str], None],
) -> Sweep:
    """Run the sweep that was typed, and return its result; options that are None get their defaults.

    `typed` is the result of `read_sweep`, and `words` that of `read_questions`. `timeout_s` (None means `TIMEOUT_S`)
    and `memory_bytes` hold for each operator. `progress` gets a line with the number of operators that are done. The
    directory `out`, if typed, is made. UsageError if the request makes no sense.
    """
    request = SweepRequest(
        operators=words_of(typed["opinfo"]),
        dtypes=DTYPES if typed["dtypes"] is None else words_of(typed["dtypes"]),
        samples=_SAMPLES if typed["samples"] is None else typed["samples"],
        **words,
    )
    if typed["out"] is not None:
        require_directory(typed["out"])
    return sweep(
        request,
        out=typed["out"],
        resume=bool(typed["resume"]),
        workers=typed["workers"] or _WORKERS,
        timeout_s=timeout_s or TIMEOUT_S,
        memory_bytes=memory_bytes,
        tell=lambda done, total, what: progress(f"{done} of {total}, {what}" if total else what),
    )


def read_call(
    args: Annotated[str | None, typer.Option(help="Its arguments: 'float32[3, 4], dim=1'.")] = None,
    inputs: Annotated[str | None, typer.Option(help="file.py:factory of args, or of (args, kwargs).")] = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="A module or file that registers the operator.")
    ] = None,
) -> dict[str, Any]:
    """Return the options of one call as they were typed, by name (`args`, `inputs`, `import`); None if one was not.

    UsageError if both `args` and `inputs` were typed.
    """
    if args is not None and inputs is not None:
        raise UsageError("--args and --inputs both give the arguments: leave one out")
    return {"args": args, "inputs": inputs, "import": imports or None}


def read_questions(
    probes: Annotated[str, typer.Option(help="Only these: schema, repeat, fake, aot/static, …, with commas.")] = "",
    backends: Annotated[str, typer.Option(help="Backends to compile it with too: inductor, …, with commas.")] = "",
    policy: PolicyIfAny = None,
    gradients: Annotated[str, typer.Option(help="auto, yes or no.")] = "auto",
    seed: Seed = 0,
) -> dict[str, Any]:
    """Return these options by name: `probes` and `backends` split at commas into tuples, the others as they were typed.

    The tuples are empty by default. UsageError if `gradients` is not auto, yes or no, or if the seed is negative or too
    large. Other values are not checked here.
    """
    require_seed(seed)
    if gradients not in GRADIENTS:
        raise UsageError(f"--gradients is auto, yes or no, not {gradients!r}")
    words = {"probes": words_of(probes), "backends": words_of(backends), "policy": policy, "gradients": gradients}
    return {**words, "seed": seed}


@taking(call=read_call, sweep=read_sweep, questions=read_questions)
def command(
    *,
    name: Annotated[
        str | None, typer.Argument(help="aten.add.Tensor, mylib::op, torch.nn.functional.gelu, or file.py:fn.")
    ] = None,
    call: dict[str, Any],
    sweep: dict[str, Any],
    questions: dict[str, Any],
    timeout: Annotated[
        float | None, typer.Option(help=f"Seconds for an operator; of a sweep {TIMEOUT_S:g} by default.")
    ] = None,
    memory: Memory = None,
    json_file: JsonFile = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Everything that there is.")] = False,
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> None:
    """Does an operator do what compilers take it to do?

    Of one operator the exit code is that of its verdict. Of a sweep (--opinfo) it is 4 if any operator crashed or timed
    out, else 1 if any diverged, else 0 if any is equivalent: of a whole database many are inconclusive. It is 3 if all
    are. An interrupted sweep exits with 130.
    """
    if name is not None and sweep["opinfo"] is not None:
        raise UsageError(f"{name} and --opinfo exclude each other: name one operator, or those of torch's")
    if name is None and sweep["opinfo"] is None:
        raise UsageError("name an operator, or operators of torch's database by --opinfo NAME or --opinfo all")
    require_positive("--timeout", timeout)
    limits: dict[str, Any] = {"timeout_s": timeout, "memory_bytes": read_bytes(memory) if memory is not None else None}
    require_torch("a check of an operator")
    if name is None:
        _refuse(call, "one operator, and --opinfo names those of torch's database")
        with running("sweep", json_file, verbose=verbose) as progress:
            result = run_sweep(sweep, questions, progress=progress, **limits)
        deliver(result, json_file, lambda: print_sweep(result, verbose=verbose))
        raise typer.Exit(exit_of_sweep(result))
    _refuse(sweep, "a sweep over torch's database, and needs --opinfo")
    with running(name, json_file, verbose=verbose) as progress:
        checked = _check(name, call, questions, limits, progress)
    report = checked.report
    deliver(
        report,
        json_file,
        lambda: print_operator(report, verbose=verbose),
        lambda: pass_on(checked.output, checked.warnings, verbose=verbose),
    )
    raise typer.Exit(EXIT_OF[report.verdict])


def _refuse(typed: Mapping[str, Any], of_what: str) -> None:
    """Raise UsageError if a value in `typed` is not None: that option was typed, and belongs only to `of_what`."""
    for option, value in typed.items():
        if value is not None:
            raise UsageError(f"--{option} is an option of {of_what}")


def _check(
    name: str,
    call: Mapping[str, Any],
    questions: Mapping[str, Any],
    limits: Mapping[str, Any],
    progress: Callable[[str], None],
) -> IsolatedOpCheck:
    """Check one operator in a worker; return the report with the worker's output and warnings.

    `call` is the result of `read_call`, `questions` that of `read_questions`, and `limits` has `timeout_s` and
    `memory_bytes`.
    """
    return check_op_isolated(
        name,
        arguments=None if call["inputs"] is not None else read_arguments(call["args"] or ""),
        inputs=call["inputs"],
        imports=call["import"] or (),
        words={
            "probes": list(questions["probes"]) or None,
            "backends": list(questions["backends"]),
            "policy": questions["policy"],
            "gradients": GRADIENTS[questions["gradients"]],
        },
        seed=questions["seed"],
        progress=progress,
        **limits,
    )
