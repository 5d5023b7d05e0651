"""The tasks that a worker runs for `torchdelta op`.

`check_operator` checks one call of an operator that a user named. `sweep_operator` checks an operator of torch's
database (OpInfo) in one dtype, on a few of its samples. `list_operators` returns the names of that database.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchdelta import errors
from torchdelta._torch.operators import lookup, opinfo
from torchdelta.check.values import compare_values
from torchdelta.check.worker import collected_warnings
from torchdelta.check.worker import get_ready as get_check_ready
from torchdelta.compare.torch_kernels import CPU_PIECE
from torchdelta.errors import EagerFails, EnvironmentUnfit, ProgramError, TorchDeltaError, UsageError
from torchdelta.isolate.directories import QueryDirectory
from torchdelta.operators.arguments import build, describe_all
from torchdelta.operators.check import check_op
from torchdelta.operators.sweep import AT
from torchdelta.program.loading import import_place
from torchdelta.program.programs import load_callable
from torchdelta.records.codec import encode
from torchdelta.records.operators import OpReport, SweepRow
from torchdelta.records.verdict import Verdict, worst_of


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """An operator with its arguments."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def named_op(op: str, *, imports: Sequence[str], arguments: Any, inputs: str | None, seed: int) -> OpCall:
    """Import the modules of `imports`, and return the operator named `op` with its arguments.

    `op` is a registered name, or `file.py:function`. The arguments are those that the factory `inputs`
    (`file.py:function`) returns; if it is None, those that `arguments` describes, with values drawn by the seed. Raises
    UsageError if no such name is registered, if the described arguments cannot be made, or if the operator does not
    take the arguments; ProgramError if a module or file does not import or has no such function, or if the factory
    raises or returns neither a tuple nor a list.
    """
    for module in imports:
        import_place(module)
    operator = load_callable(op, what="operator") if _is_in_a_file(op) else lookup.operator_named(op)
    args, kwargs = build(arguments, seed) if inputs is None else _arguments_of(inputs)
    lookup.require_fitting(operator, args, kwargs)
    return OpCall(op=operator, args=args, kwargs=kwargs)


def _is_in_a_file(name: str) -> bool:
    """Tell whether a name has a single colon, as `file.py:function` has, and not only `namespace::operator`."""
    return ":" in name.replace("::", "")


def _arguments_of(spec: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the factory that `spec` names as `file.py:function`, without arguments, and return args and kwargs from it.

    A pair of a tuple or list and a mapping is args and kwargs; any other tuple or list is args alone. ProgramError if
    the factory raises, or returns neither a tuple nor a list.
    """
    factory = load_callable(spec, what="factory of arguments")
    try:
        built = factory()
    except errors.caught_from_user_code() as error:
        raise ProgramError(f"{spec}: the factory raised {type(error).__name__}: {error}") from error
    if not isinstance(built, (tuple, list)):
        raise ProgramError(f"{spec}: the factory must return args or (args, kwargs), not {type(built).__name__}")
    if len(built) == 2 and isinstance(built[0], (tuple, list)) and isinstance(built[1], Mapping):
        return tuple(built[0]), dict(built[1])
    return tuple(built), {}


def check_operator(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Check the operator of a request that `check_op_isolated` wrote; return `report`, encoded, and `warnings`, texts.

    `place` is told the name of each probe before it is asked. Errors of `named_op` and `check_op` are raised.
    """
    seed = request["seed"]
    with collected_warnings() as texts:
        named = named_op(request["op"], seed=seed, **request["call"])
        report = check_op(named.op, named.args, named.kwargs, seed=seed, progress=place.tell, **request["words"])
    return {"report": encode(report), "warnings": texts}


SAMPLES = "its samples"
"""The part that a worker reports before any probe."""


def get_ready() -> None:
    """Import the database, load the compiled loops and check a sine, so that forked workers have this behind them.

    Objects are assumed to be frozen from then on (`memory.expect_frozen`). If the database cannot be imported, return
    without an error, and do none of it.
    """
    try:
        opinfo.operators()
    except EnvironmentUnfit:  # the first task raises it again, and its caller gets it
        return
    get_check_ready()
    # compiled loops are loaded for large tensors only, and pay for a sweep of many operators
    zeros = torch.zeros(CPU_PIECE + 1)
    compare_values(zeros, zeros + 1, truth=zeros.double())
    # without gradients, because the autograd engine does not survive a fork
    check_op(torch.ops.aten.sin.default, (torch.ones(3),), gradients=False)


def list_operators(request: Mapping[str, Any], _: QueryDirectory) -> dict[str, Any]:
    """Return a dict with one item, `operators`: the dtypes of each operator in the database, by the operator's name.

    First a sine is checked with the keywords `request["words"]`, and what that raises is raised: UsageError if they
    make no sense.
    """
    # a sine shows mistakes in the questions before hundreds of operators are checked: every probe applies to it
    check_op(torch.ops.aten.sin.default, (torch.ones(3, requires_grad=True),), **request["words"])
    return {"operators": {name: list(dtypes) for name, dtypes in opinfo.operators().items()}}


def sweep_operator(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Check an operator of the database in one dtype, on some of its samples; return its row as `swept`, encoded.

    At most `request["samples"]` samples are checked (`opinfo.choose`). `place` is told each part that begins. A
    TorchDeltaError of the database is raised; if it raises anything else, the row is inconclusive and says so. Of the
    errors of checks, only EnvironmentUnfit is raised. This process has one thread of torch afterwards.
    """
    began = time.monotonic()
    # workers run side by side, and samples are small
    torch.set_num_threads(1)
    name, dtype, seed = request["op"], request["dtype"], request["seed"]
    place.tell(SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            offer = opinfo.draw_samples(name, dtype, seed=seed)
        except TorchDeltaError:
            raise
        except Exception as error:
            why = f"the database does not give its samples: {_summary(error)}"
            return _answer(_Findings(left_out={}), name, dtype, began, why=why)
        findings = _Findings(left_out=offer.left_out)
        for sample in opinfo.choose(offer.samples, request["samples"]):
            findings.add(sample, _words_for(name, sample, request["words"]), seed, place)
    return _answer(findings, name, dtype, began)


def _words_for(name: str, sample: opinfo.OpSample, words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `check_op` for one sample: `words`, adapted to what the database says about it.

    "auto" gradients become False if no tensor of the sample requires grad. `correctness` is added: False if the
    operator returns uninitialised memory.
    """
    has_none = words["gradients"] == "auto" and not sample.has_gradient
    return {
        **words,
        "gradients": False if has_none else words["gradients"],
        "correctness": name not in opinfo.WITHOUT_VALUES,
    }


class _Findings:
    """The results of an operator so far, sample by sample.

    `reports` has those that were checked, `rejected` the errors of those that eager itself rejects, and `unchecked` the
    arguments and the error of those that could not be checked. `left_out` says how many samples cannot be checked at
    all, by the reason.
    """

    def __init__(self, left_out: Mapping[str, int]) -> None:
        self.left_out = dict(left_out)
        self.reports: list[OpReport] = []
        self.rejected: list[str] = []
        self.unchecked: list[tuple[str, str]] = []

    def add(self, sample: opinfo.OpSample, words: Mapping[str, Any], seed: int, place: QueryDirectory) -> None:
        """Check one sample with the keywords `words`, and append its report to `reports`, or why there is none.

        If the operator fails eagerly, the error goes to `rejected`; any other error goes to `unchecked`, with the
        arguments. EnvironmentUnfit alone is raised. `place` is told each probe, with the arguments, before it is asked.
        """
        shown = ", ".join(describe_all(sample.args, sample.kwargs))
        place.tell(f"the arguments{AT}{shown}")
        try:
            report = check_op(
                sample.call,
                sample.args,
                sample.kwargs,
                seed=seed,
                progress=lambda part: place.tell(f"{part}{AT}{shown}"),
                **words,
            )
        except EagerFails as error:
            self.rejected.append(_summary(error))
        except (ProgramError, UsageError) as error:
            self.unchecked.append((shown, _summary(error)))
        except EnvironmentUnfit:
            raise
        except Exception as error:
            # one operator that torchdelta cannot handle must not end a sweep of hundreds
            self.unchecked.append((shown, f"the check itself failed: {_summary(error)}"))
        else:
            self.reports.append(report)

    def by_probe(self) -> dict[str, Verdict]:
        """Return the worst verdict of each probe over all reports, by the probe's name; empty without reports."""
        by_name: dict[str, list[Verdict]] = {}
        for report in self.reports:
            for probe in report.probes:
                by_name.setdefault(probe.name, []).append(probe.verdict)
        return {name: worst_of(verdicts) for name, verdicts in by_name.items()}


def _answer(findings: _Findings, name: str, dtype: str, began: float, why: str = "") -> dict[str, Any]:
    """Return the row of an operator as `swept`, encoded; `why` is the reason for having no samples, if that is known.

    The verdict is the worst of the reports; inconclusive without any, and if a sample could not be checked while no
    report is a failure. Unless it is equivalent, the row says why. `began` is the `time.monotonic` of the start.
    """
    reports = findings.reports
    verdict = worst_of([report.verdict for report in reports])
    evidence: dict[str, Any] = {}
    if findings.unchecked and not verdict.is_failure:
        verdict = Verdict.INCONCLUSIVE
        evidence = {"sample": findings.unchecked[0][0], "reason": findings.unchecked[0][1]}
    elif not reports:
        evidence = {"reason": why or _nothing_checked(findings)}
    elif verdict is not Verdict.EQUIVALENT:
        evidence = _evidence(reports, verdict)
    swept = SweepRow(
        op=name,
        dtype=dtype,
        samples=len(reports),
        verdict=verdict,
        probes=findings.by_probe(),
        unasked=len(findings.rejected),
        left_out=findings.left_out,
        seconds=time.monotonic() - began,
        **evidence,
    )
    return {"swept": encode(swept)}


def _evidence(reports: Sequence[OpReport], verdict: Verdict) -> dict[str, str]:
    """Return sample, probe, reason and remedy of the first report that has this verdict, as fields of a row.

    The sample is the report's arguments, the others are those of its worst probe; without such a probe only the sample.
    """
    guilty = next(report for report in reports if report.verdict is verdict)
    sample = ", ".join(guilty.arguments)
    probe = guilty.worst
    if probe is None:
        return {"sample": sample}
    return {"sample": sample, "probe": probe.name, "reason": probe.reason, "remedy": probe.remedy}


def _nothing_checked(findings: _Findings) -> str:
    """Return why no sample has a report: how many eager rejects with the first error, and how many were left out."""
    parts = [f"{many} times {why}" for why, many in findings.left_out.items()]
    if findings.rejected:
        parts.insert(0, f"eager itself rejects {len(findings.rejected)}: {findings.rejected[0]}")
    return f"no sample could be checked: {'; '.join(parts) or 'the database has none'}"


def _summary(error: Exception) -> str:
    """Return the first line of an error, with its class if it is not one of torchdelta's own."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first if isinstance(error, TorchDeltaError) else f"{type(error).__name__}: {first}"
