"""One check of an operator, or of a function of tensors: is it what compilers take it for?

A compiler never calls an operator the way its author does: it traces and functionalises it, partitions its gradient and
runs it on other data and sizes. Each of these is a probe with a verdict of its own. The probes are a table in
`operators/probes/__init__.py`; `OpCheck.run` walks it. Start with `check_op`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdelta import transforms
from torchdelta._torch.operators import fake_kernels, lookup, schemas
from torchdelta._torch.process import runtime, versions
from torchdelta._torch.pytree import tree_leaves
from torchdelta.check.baseline import Progress
from torchdelta.compare.policy import ByFunction
from torchdelta.compare.policy_parser import parse
from torchdelta.errors import ProgramError, UsageError
from torchdelta.operators.arguments import describe_all
from torchdelta.operators.inputs import OpInputs, RaisedOnceMore
from torchdelta.operators.probes import probes_with
from torchdelta.operators.probes.base import OpSubject, ProbeEntry
from torchdelta.program.memory import living_set_aside
from torchdelta.program.programs import Program
from torchdelta.program.sides import state_of
from torchdelta.records.case import DEFAULT_STAGES, require_seed, words_of
from torchdelta.records.operators import OpReport, Probe
from torchdelta.records.verdict import Verdict, worst_of

Compare = Callable[[torch.Tensor, torch.Tensor], Any]


def check_op(
    op: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    gradients: bool | str = "auto",
    backends: str | Sequence[str] = (),
    probes: str | Sequence[str] | None = None,
    policy: str | None = None,
    compare: Compare | None = None,
    correctness: bool = True,
    ignore: str | Sequence[str] = (),
    others: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]] = (),
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> OpReport:
    """Check an operator, or a function of tensors, as a compiler will use it, and return a report of the probes.

    It is compared with its schema, its fake kernel, the derivative of its forward, and its trace by AOTAutograd with
    static and with dynamic shapes; `backends` adds what these compile. `probes` selects probes by the beginnings of
    their names. `gradients` is False to leave gradients out; "auto" leaves them out if no input is of floats.
    `compare(reference, candidate)` judges values instead of `policy`: it raises or returns False if they are not the
    same. Without `correctness` no values are compared. `ignore` names clauses of the contract that no trace is held to.
    `others`, pairs of args and kwargs, replace the other sizes that are made up here, and the fresh values that traces
    run on. `progress` gets the name of each probe before it is asked.

    Raises UsageError for a wrong argument, and what `OpCheck.run` raises.
    """
    if not callable(op):
        raise UsageError(f"an operator is called, which {op!r} cannot be: name it like torch.ops.aten.sin.default")
    if not isinstance(gradients, bool) and gradients != "auto":
        raise UsageError(f"gradients is True, False or 'auto', not {gradients!r}")
    if compare is not None and policy is not None:
        raise UsageError("name either a policy or a function that compares, not both")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"the arguments are a tuple, not {type(args).__name__}: write (x,) for one")
    if not isinstance(kwargs, Mapping | None):
        raise UsageError(f"the keyword arguments are a dict, not {type(kwargs).__name__}: write {{'dim': 1}}")
    require_seed(seed)
    _require_pairs(others)
    for what, names in (("probes", probes), ("backends", backends), ("ignore", ignore)):
        if not _are_names(names):
            raise UsageError(f"{what} are names, in one text or in a list, not {names!r}")
    inputs = OpInputs(
        op=schemas.as_operator(op),
        args=tuple(args),
        kwargs=dict(kwargs or {}),
        others=others,
        stages=DEFAULT_STAGES if gradients else ("forward",),
        seed=seed,
    )
    subject = OpSubject(
        inputs=inputs,
        gradients=gradients,
        policy=ByFunction(compare) if compare is not None else parse(policy or "noise"),
        policy_words=f"compare={lookup.name_of(compare)}" if compare is not None else policy or "noise",
        ignore=words_of(ignore),
        correctness=correctness,
    )
    check = OpCheck(
        subject=subject,
        backends=words_of(backends),
        wanted=words_of(probes) if probes is not None else ("",),
        progress=progress,
    )
    return check.run()


@dataclass(kw_only=True)
class OpCheck:
    """One operator with its arguments, and the probes to ask about it."""

    subject: OpSubject
    backends: tuple[str, ...]
    wanted: tuple[str, ...]
    """The beginnings of the names of the probes to ask."""
    progress: Progress
    unasked: dict[str, str] = field(default_factory=dict)
    """Why a wanted probe does not apply, by its name."""

    def run(self) -> OpReport:
        """Ask every probe that is wanted and applies; return a report whose verdict is the worst of theirs.

        The operator is run eagerly first. Raises ProgramError if its forward raises then, or if a probe needs the
        user's `others` and the operator rejects one; EnvironmentUnfit if it has no kernel for the device of its inputs,
        or if torch is too old; UsageError if it has parameters of its own, if a probe or a backend is unknown, or if no
        probe returns a verdict.
        """
        versions.require_supported()
        started = time.perf_counter()
        self._require_known_probes()
        program = self._run_eagerly()
        if parameters := state_of(program.call).parameters:
            raise UsageError(
                f"{program.name} is not an operator: it has parameters of its own ({', '.join(parameters)}); "
                "check it with torchdelta.check, transform='aot'"
            )
        with runtime.preserved(), living_set_aside(), fake_kernels.silent():
            probes = tuple(self._ask_all())
        if not probes:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.unasked.items())
            raise UsageError(f"none of the probes {', '.join(self.wanted)} applies: {reasons}")
        return OpReport(
            op=program.name,
            arguments=describe_all(self.subject.inputs.args, self.subject.inputs.kwargs),
            verdict=worst_of(probe.verdict for probe in probes),
            probes=probes,
            unasked=self.unasked,
            notes=tuple(dict.fromkeys(note for probe in probes if probe.report for note in probe.report.notes)),
            environment=versions.environment(),
            seconds=time.perf_counter() - started,
        )

    def _run_eagerly(self) -> Program:
        """Run the operator on the user's inputs and return the program that calls it with them.

        If only the backward raises, the program is returned all the same. Raises ProgramError if an argument lies on
        the device meta or the forward raises, but EnvironmentUnfit if it raises because the operator has no kernel for
        a device of its input tensors; without input tensors, for the devices among its arguments or the default one.
        """
        inputs = self.subject.inputs
        leaves = tree_leaves((inputs.args, inputs.kwargs))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if "meta" in devices:
            name = lookup.name_of(inputs.op)
            raise ProgramError(f"{name}: an argument lies on the device meta and has no values: give one that has some")
        try:
            with runtime.preserved(), living_set_aside():
                return inputs.own.program
        except ProgramError as error:
            if isinstance(error.__cause__, NotImplementedError):
                # an operator without tensor inputs makes tensors on the device that it is given, or on the default one
                named = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
                for device in devices or named or {torch.get_default_device().type}:
                    lookup.require_kernel(inputs.op, device)
            raise

    def _ask_all(self) -> Iterator[Probe]:
        """Yield the answers of the wanted probes that apply, in the order of the table.

        If a condition of a probe is not met, or if its answer is a text, the reason is noted in `unasked`. If the
        operator raises although it ran before, the answer is INCONCLUSIVE. `progress` gets the name of each probe
        before it is asked.
        """
        for entry in probes_with(self.backends):
            if not self._is_wanted(entry):
                continue
            if reason := next(filter(None, (is_met(self.subject) for is_met in entry.needs)), ""):
                self.unasked[entry.name] = reason
                continue
            self.progress(entry.name)
            try:
                answer = entry.ask(self.subject)
            except RaisedOnceMore as why:
                answer = Probe(name=entry.name, verdict=Verdict.INCONCLUSIVE, reason=str(why))
            if isinstance(answer, Probe):
                yield answer
            else:
                self.unasked[entry.name] = answer

    def _is_wanted(self, entry: ProbeEntry) -> bool:
        """Tell whether a probe is to be asked: whether its name begins with one of the texts in `wanted`.

        Without `correctness`, a probe that compares values is never asked.
        """
        is_possible = self.subject.correctness or not entry.compares_values
        return is_possible and any(entry.name.startswith(prefix) for prefix in self.wanted)

    def _require_known_probes(self) -> None:
        """Raise UsageError if `wanted` is empty or a backend is unknown.

        Raise it too if any text in `wanted` begins no probe's name.
        """
        names = [entry.name for entry in probes_with(self.backends)]
        if not self.wanted:
            raise UsageError(f"no probe was named: they are {', '.join(names)}; probes=None asks all")
        for backend in self.backends:
            transforms.build(f"backend:{backend}", {})
        for prefix in self.wanted:
            if not any(name.startswith(prefix) for name in names):
                raise UsageError(f"there is no probe {prefix!r}: they are {', '.join(names)}")


def _require_pairs(others: object) -> None:
    """Raise UsageError unless `others` is a list or tuple, empty or of pairs of args and kwargs; kwargs may be None."""
    pairs = others if isinstance(others, (tuple, list)) else [others]
    for place, other in enumerate(pairs):
        is_pair = isinstance(other, (tuple, list)) and len(other) == 2
        if not is_pair or not isinstance(other[0], (tuple, list)) or not isinstance(other[1], Mapping | None):
            raise UsageError(f"others[{place}] is not a pair of args and kwargs: write others=[((x,), {{}})]")


def _are_names(value: object) -> bool:
    """Tell whether a value is None, a text, or a list or tuple of texts."""
    is_list = isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, str) or is_list
