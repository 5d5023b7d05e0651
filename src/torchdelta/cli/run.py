"""`torchdelta run`: run a user's script unedited, and guard every `torch.compile` in it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text

from torchdelta.cli.options import EXIT_OF, Debug, Policy, require_directory, require_torch, taking
from torchdelta.cli.output import tolerant
from torchdelta.errors import UsageError
from torchdelta.guard.compiles import ALL, GuardedCompiles
from torchdelta.guard.script import CODE, FILE, MODULE, Script, ScriptEnding, run_script
from torchdelta.records.case import Case, require_positive
from torchdelta.records.guard import CHOICES, GuardSummary
from torchdelta.records.passes import PassSummary
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.guard import console_for_summary, print_guard_summary
from torchdelta.report.terminal.style import console_for

SETTINGS = {"allow_interspersed_args": False}
"""How the command line is read: arguments behind the script are the script's own."""


class Interrupted(BaseException):
    """Ctrl-C ended the script. It is not a KeyboardInterrupt, because typer would turn that into an exit code."""


def read_guard_options(
    check: Annotated[str, typer.Option(help="What is looked for: values, errors or off.")] = "values",
    on_failure: Annotated[
        str, typer.Option(help="raise ends the script, fallback goes on with the graph itself, report as before.")
    ] = "report",
    record: Annotated[
        str, typer.Option(help="on_failure, or always: before it runs, so that a segfault leaves its graph behind.")
    ] = "on_failure",
    minify: Annotated[bool, typer.Option("--minify", help="Make what is found small, in other processes.")] = False,
    graph: Annotated[str, typer.Option(help="Whose graphs are guarded: dynamo, or aten.")] = "dynamo",
    every: Annotated[int, typer.Option(help="Check every so many calls too, besides the first.")] = 0,
    budget: Annotated[float | None, typer.Option(help="Seconds that all checks together may take.")] = None,
    only_nodes: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only graphs that have from A to B nodes.")
    ] = None,
    policy: Policy = Case.policy,
) -> dict[str, Any]:
    """Return the keywords of a guard by name; `only_nodes` is called `only` there, a pair of numbers or None for all.

    `budget` is called `budget_s`. UsageError for a value that makes no sense; the policy is not checked here.
    """
    if every < 0:
        raise UsageError(f"--every is a number of calls from 0, not {every}")
    require_positive("--budget", budget)
    words = {
        "check": check,
        "on_failure": on_failure,
        "record": record,
        "minify": minify,
        "graph": graph,
        "every": every,
        "budget_s": budget,
        "only": _range(only_nodes) if only_nodes is not None else None,
        "policy": policy,
    }
    for word, known in CHOICES.items():
        if words[word] not in known:
            listed = ", ".join(map(str, known))
            raise UsageError(f"--{word.replace('_', '-')} {words[word]}: it is one of {listed}")
    return words


@taking(guard_options=read_guard_options)
def command(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script; with -m a module, with -c code.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    code: Annotated[bool, typer.Option("-c", help="SCRIPT is code, as for python -c.")] = False,
    guard: Annotated[
        str | None, typer.Option(help="The backend to guard, or all; all unless only passes are watched.")
    ] = None,
    watch_passes: Annotated[
        bool,
        typer.Option(
            "--watch-passes",
            help="Name the pass of inductor that changes what is computed; graphs are compared only with --guard then.",
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if anything diverged or failed.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where findings are written.")] = None,
    *,
    guard_options: dict[str, Any],
    debug: Debug = False,  # noqa: ARG001 — read in main
) -> NoReturn:
    """Run a script as python would; compare its compiled graphs with eager runs of them, or watch inductor's passes."""
    if module and code:
        raise UsageError("-m and -c exclude each other: name a module or write code")
    if watch_passes and guard is None:
        _refuse_guard_options({**guard_options, "out": out})
    program = Script(kind=MODULE if module else CODE if code else FILE, text=script, arguments=tuple(arguments or ()))
    require_torch("a guarded run")
    if out is not None:
        require_directory(out)
        # the script may change its working directory
        out = out.absolute()
    compiles = GuardedCompiles(
        out=out,
        words=guard_options,
        wanted=guard or (None if watch_passes else ALL),
        is_watching=watch_passes,
    )
    if context.obj is not None:
        context.obj()  # the script's streams are those that it would have without torchdelta
    started_in = os.getpid()
    with compiles.guard_all():
        ending = run_script(program)
    # a child that the script forked comes here too, and prints no summary
    if os.getpid() == started_in:
        ending = _sum_up(compiles, ending, strict=strict)
    if ending.is_interrupted:
        raise Interrupted
    sys.exit(ending.status)


def _sum_up(compiles: GuardedCompiles, ending: ScriptEnding, *, strict: bool) -> ScriptEnding:
    """Finish the guards, print their summary to stderr, and return how this process has to end.

    That is the script's `ending` itself; only with `strict`, if the script's status is 0 but a guarded graph failed or
    a watched pass changed a result, it is an ending with status 1. After Ctrl-C guards are not finished, so that
    culprits are not looked for.
    """
    _flush_stdout()
    if not ending.is_interrupted:
        with console_for(tolerant(sys.__stderr__)).status("looking into what was found", spinner="dots") as status:
            compiles.finish(tell=lambda part: status.update(Text(part)))
    summary, watched = compiles.summary(), compiles.pass_summary()
    # a script that closed its stderr gets no summary
    stderr = tolerant(sys.__stderr__)
    print_guard_summary(summary, watched, console_for_summary(stderr))
    stderr.flush()
    if strict and ending.status == 0 and _is_wrong(summary, watched):
        return ScriptEnding(status=EXIT_OF[Verdict.DIVERGED])
    return ending


def _flush_stdout() -> None:
    """Flush `sys.stdout` if it can be: it may be closed, None, or a stream of the script's own without `flush`."""
    try:
        sys.stdout.flush()
    except Exception:  # Python itself reports it when it exits
        return


def _is_wrong(summary: GuardSummary, watched: PassSummary | None) -> bool:
    """Tell whether a guarded graph failed, or a watched pass changed what is computed."""
    failed = any(Verdict(name).is_failure for name, many in summary.verdicts.items() if many)
    return failed or bool(watched is not None and watched.findings)


def _refuse_guard_options(words: dict[str, Any]) -> None:
    """Raise UsageError if an option was typed that concerns guarded graphs alone; the policy concerns passes too.

    `words` has the result of `read_guard_options`, and `out`. An option with its default value counts as not typed.
    """
    defaults = {**read_guard_options(), "out": None}
    names = {"budget_s": "budget", "only": "only-nodes"}
    for word, value in words.items():
        if word != "policy" and value != defaults[word]:
            option = names.get(word, word).replace("_", "-")
            raise UsageError(f"--{option} concerns guarded graphs, and --watch-passes guards none: add --guard all")


def _range(text: str) -> tuple[int, int]:
    """Return the least and the largest number of nodes of a range `A:B`, in which either may be left out.

    They are then 0 and `sys.maxsize`. UsageError if the range is malformed or empty, or if both are left out.
    """
    match = re.fullmatch(r"(\d*):(\d*)", text.strip())
    if match is None or text.strip() == ":":
        raise UsageError(f"malformed range of node counts {text!r}: write --only-nodes 10:500, 10: or :500")
    least, largest = int(match[1] or 0), int(match[2] or sys.maxsize)
    if least > largest:
        raise UsageError(f"--only-nodes {text}: there is no number from {least} to {largest}")
    return least, largest
