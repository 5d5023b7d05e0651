"""From what a user names to a call of an operator that can be checked.

What a worker does for a sweep: one operator in one dtype, on a few of the samples that the database has of it.
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
    """Return the operator of that name, with arguments as they are described, or as a factory gives them."""
    for module in imports:
        import_place(module)
    found = load_callable(op, what="operator") if _is_in_a_file(op) else lookup.operator_named(op)
    args, kwargs = build(arguments, seed) if inputs is None else _given_by(inputs)
    lookup.require_fitting(found, args, kwargs)
    return OpCall(op=found, args=args, kwargs=kwargs)


def _is_in_a_file(name: str) -> bool:
    return ":" in name.replace("::", "")


def _given_by(spec: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
    """Check an operator that is named; return its report and the warnings that were raised."""
    seed = request["seed"]
    with collected_warnings() as texts:
        named = named_op(request["op"], seed=seed, **request["call"])
        report = check_op(named.op, named.args, named.kwargs, seed=seed, progress=place.tell, **request["words"])
    return {"report": encode(report), "warnings": texts}


SAMPLES = "its samples"
"""What a worker is at before it is at any probe."""


def get_ready() -> None:
    """Import the database, and do once what every check does."""
    try:
        opinfo.operators()
    except EnvironmentUnfit:  # whoever asks is told; from here nobody would be
        return
    get_check_ready()
    # so many operators are worth the compiled loops, which are loaded for what is not small
    zeros = torch.zeros(CPU_PIECE + 1)
    compare_values(zeros, zeros + 1, truth=zeros.double())
    # without gradients: the autograd engine must not see a fork
    check_op(torch.ops.aten.sin.default, (torch.ones(3),), gradients=False)


def list_operators(request: Mapping[str, Any], _: QueryDirectory) -> dict[str, Any]:
    """Return what the database has: names, and the dtypes of each. Raises what is wrong about the words."""
    # what is misspelt is said before hundreds are asked; every probe applies to a sine
    check_op(torch.ops.aten.sin.default, (torch.ones(3, requires_grad=True),), **request["words"])
    return {"operators": {name: list(dtypes) for name, dtypes in opinfo.operators().items()}}


def sweep_operator(request: Mapping[str, Any], place: QueryDirectory) -> dict[str, Any]:
    """Check an operator in a dtype, on its samples."""
    began = time.monotonic()
    # workers run side by side, and samples are small
    torch.set_num_threads(1)
    name, dtype, seed = request["op"], request["dtype"], request["seed"]
    place.tell(SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = opinfo.draw_samples(name, dtype, seed=seed)
        except TorchDeltaError:
            raise
        except Exception as error:
            why = f"the database does not give its samples: {_said(error)}"
            return _answer(_Findings(left_out={}), name, dtype, began, why=why)
        findings = _Findings(left_out=found.left_out)
        for sample in opinfo.choose(found.samples, request["samples"]):
            findings.add(sample, _words_for(name, sample, request["words"]), seed, place)
    return _answer(findings, name, dtype, began)


def _words_for(name: str, sample: opinfo.OpSample, words: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sample is asked: what the database knows that it has not is not looked for."""
    has_none = words["gradients"] == "auto" and not sample.has_gradient
    return {
        **words,
        "gradients": False if has_none else words["gradients"],
        "correctness": name not in opinfo.WITHOUT_VALUES,
    }


class _Findings:
    """What was seen of an operator so far."""

    def __init__(self, left_out: Mapping[str, int]) -> None:
        self.left_out = dict(left_out)
        self.reports: list[OpReport] = []
        self.rejected: list[str] = []
        self.unchecked: list[tuple[str, str]] = []

    def add(self, sample: opinfo.OpSample, words: Mapping[str, Any], seed: int, place: QueryDirectory) -> None:
        """Check one sample."""
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
            self.rejected.append(_said(error))
        except (ProgramError, UsageError) as error:
            self.unchecked.append((shown, _said(error)))
        except EnvironmentUnfit:
            raise
        except Exception as error:
            # of hundreds of operators, one that torchdelta cannot handle is told of, and the others are checked
            self.unchecked.append((shown, f"the check itself failed: {_said(error)}"))
        else:
            self.reports.append(report)

    def by_probe(self) -> dict[str, Verdict]:
        """Return the worst verdict of each probe."""
        seen: dict[str, list[Verdict]] = {}
        for report in self.reports:
            for probe in report.probes:
                seen.setdefault(probe.name, []).append(probe.verdict)
        return {name: worst_of(verdicts) for name, verdicts in seen.items()}


def _answer(findings: _Findings, name: str, dtype: str, began: float, why: str = "") -> dict[str, Any]:
    reports = findings.reports
    verdict = worst_of([report.verdict for report in reports])
    told: dict[str, Any] = {}
    if findings.unchecked and not verdict.is_failure:
        verdict = Verdict.INCONCLUSIVE
        told = {"sample": findings.unchecked[0][0], "reason": findings.unchecked[0][1]}
    elif not reports:
        told = {"reason": why or _nothing_checked(findings)}
    elif verdict is not Verdict.EQUIVALENT:
        told = _evidence(reports, verdict)
    swept = SweepRow(
        op=name,
        dtype=dtype,
        samples=len(reports),
        verdict=verdict,
        probes=findings.by_probe(),
        unasked=len(findings.rejected),
        left_out=findings.left_out,
        seconds=time.monotonic() - began,
        **told,
    )
    return {"swept": encode(swept)}


def _evidence(reports: Sequence[OpReport], verdict: Verdict) -> dict[str, str]:
    guilty = next(report for report in reports if report.verdict is verdict)
    sample = ", ".join(guilty.arguments)
    probe = guilty.worst
    if probe is None:
        return {"sample": sample}
    return {"sample": sample, "probe": probe.name, "reason": probe.reason, "remedy": probe.remedy}


def _nothing_checked(findings: _Findings) -> str:
    parts = [f"{many} times {why}" for why, many in findings.left_out.items()]
    if findings.rejected:
        parts.insert(0, f"eager itself rejects {len(findings.rejected)}: {findings.rejected[0]}")
    return f"no sample could be checked: {'; '.join(parts) or 'the database has none'}"


def _said(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first if isinstance(error, TorchDeltaError) else f"{type(error).__name__}: {first}"
