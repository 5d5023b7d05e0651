"""An operator, checked the way a compiler will use it: traced, functionalised, partitioned, with other data and sizes.

Everything that runs it twice is a check like any other. What it was traced with and what it is run on are two things:
a trace of the given inputs is run on fresh values, and with dynamic shapes on other sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchdelta import transforms
from torchdelta._torch.operators import fake_kernels, lookup, schemas
from torchdelta._torch.process import runtime, versions
from torchdelta._torch.pytree import tree_leaves
from torchdelta.check.baseline import Baseline, Progress
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.policy import ByFunction
from torchdelta.compare.policy_parser import parse
from torchdelta.errors import ProgramError, UsageError
from torchdelta.operators.arguments import described_all
from torchdelta.operators.inputs import OpInputs
from torchdelta.operators.probes import backward, eager, fake, layouts
from torchdelta.operators.probes.traces import Tracing, traces_with
from torchdelta.program.memory import living_set_aside
from torchdelta.program.sides import state_of
from torchdelta.records.case import DEFAULT_STAGES, words_of
from torchdelta.records.operators import OWN_PROBES, OpReport, Probe
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
    """Check an operator, or a function of tensors, as a compiler will use it.

    It is held against its schema, its fake kernel, the derivative of its forward, and what AOTAutograd makes of it,
    with static and with dynamic shapes; with `backends` also against what these compile. `probes` are the beginnings of
    the names of those to ask. `gradients` are compared where an input requires grad ("auto"), always or never.
    `compare(reference, candidate)` judges values in the place of a policy: it raises or returns False where they are
    not the same; without `correctness` it is only asked whether everything traces and runs. `others` are arguments
    of other sizes, where those that are made up here are not to the operator's liking.
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
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"seed must be from 0 to 2**63 - 1, not {seed!r}")
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
    tracing = Tracing(
        inputs=inputs,
        policy=ByFunction(compare) if compare is not None else parse(policy or "noise"),
        policy_words=f"compare={lookup.name_of(compare)}" if compare is not None else policy or "noise",
        ignore=words_of(ignore),
        correctness=correctness,
    )
    checking = OpCheck(
        inputs=inputs,
        tracing=tracing,
        gradients=gradients,
        backends=words_of(backends),
        wanted=words_of(probes) if probes is not None else ("",),
        progress=progress,
    )
    return checking.run()


@dataclass(kw_only=True)
class OpCheck:
    """One operator with its arguments, and what is wanted to know of it."""

    inputs: OpInputs
    tracing: Tracing
    gradients: bool | str
    backends: tuple[str, ...]
    wanted: tuple[str, ...]
    """The beginnings of the names of the probes to ask."""
    progress: Progress
    unasked: dict[str, str] = field(default_factory=dict)

    def run(self) -> OpReport:
        """Ask every probe that is wanted and applies; what the operator raises eagerly is raised as ProgramError."""
        versions.require_supported()
        started = time.perf_counter()
        self._require_known_probes()
        leaves = tree_leaves((self.inputs.args, self.inputs.kwargs))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if "meta" in devices:
            name = lookup.name_of(self.inputs.op)
            raise ProgramError(f"{name}: an argument lies on the device meta and has no values: give one that has some")
        try:
            with runtime.preserved(), living_set_aside():
                program = self.inputs.given.program  # what does not run eagerly is not asked anything
        except ProgramError as error:
            if isinstance(error.__cause__, NotImplementedError):
                # what takes no tensor makes them on the device that it is told, or on the usual one
                told = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
                for device in devices or told or {torch.get_default_device().type}:
                    lookup.require_kernel(self.inputs.op, device)
            raise
        if trained := state_of(program.call).parameters:
            raise UsageError(
                f"{program.name} is no operator: it has parameters of its own ({', '.join(trained)}); "
                "check it with torchdelta.check, transform='aot'"
            )
        with runtime.preserved(), living_set_aside(), fake_kernels.silent():
            probes = tuple(self._probes())
        if not probes:
            raise UsageError(f"none of the probes {', '.join(self.wanted)} applies: {_listed(self.unasked)}")
        return OpReport(
            op=self.inputs.given.program.name,
            arguments=described_all(self.inputs.args, self.inputs.kwargs),
            verdict=worst_of(probe.verdict for probe in probes),
            probes=probes,
            unasked=self.unasked,
            notes=tuple(dict.fromkeys(note for probe in probes if probe.report for note in probe.report.notes)),
            environment=versions.environment(),
            seconds=time.perf_counter() - started,
        )

    def _probes(self) -> Iterator[Probe]:
        if self.tracing.correctness:
            yield from self._of_itself()
            yield from self._of_its_gradients()
        yield from self._of_its_fake_kernel()
        for trace in traces_with(self.backends):
            if not self._is_wanted(trace.name):
                continue
            if trace.transform == "aot" and trace.is_dynamic and self.inputs.are_shared:
                self.unasked[trace.name] = "inputs share memory, to which AOTAutograd alone gives no symbols"
                continue
            self.progress(trace.name)
            yield self.tracing.probe(trace)

    def _of_itself(self) -> Iterator[Probe]:
        if self._is_wanted("schema"):
            if lookup.is_registered(self.inputs.op):
                self.progress("schema")
                others = (*self.inputs.resized, *self.inputs.laid_out.values())
                yield eager.schema(self.inputs.op, self.inputs.given, *others)
            else:
                self.unasked["schema"] = "it is a function, and declares nothing"
        if self._is_wanted("repeat"):
            self.progress("repeat")
            yield eager.repeat(self.inputs.given)
        if self._is_wanted("layout"):
            self.progress("layout")
            laid_out = self.inputs.laid_out
            answer = layouts.layout(self.inputs.given, laid_out) if laid_out else self.inputs.no_other_layouts
            if isinstance(answer, str):
                self.unasked["layout"] = answer
            else:
                rejected = f"; {self.inputs.rejected_layout}" if self.inputs.rejected_layout else ""
                yield replace(answer, reason=answer.reason + rejected)

    def _of_its_gradients(self) -> Iterator[Probe]:
        names = [name for name in ("gradients", "registration", "backward", "derivative") if self._is_wanted(name)]
        if not self.gradients:
            self.unasked.update(dict.fromkeys(names, "gradients were left out on request"))
            return
        if not self.inputs.floats and self.gradients == "auto":
            self.unasked.update(dict.fromkeys(names, "no input is of a kind that has gradients"))
            return
        if not any(tensor.requires_grad for tensor in self.inputs.floats):
            self.unasked.update({name: "no input requires grad" for name in names if name != "gradients"})
            if "gradients" in names:
                yield Probe(
                    name="gradients",
                    verdict=Verdict.INCONCLUSIVE,
                    reason="no input requires grad, so nothing can be told of its gradients",
                    remedy="give inputs with requires_grad=True, or ask without gradients",
                )
            return
        if "registration" in names:
            if lookup.is_registered(self.inputs.op):
                self.progress("registration")
                yield eager.registration(self.inputs.op, self.inputs.given)
            else:
                self.unasked["registration"] = "it is a function, and autograd sees what it is made of"
        if "gradients" in names and self.inputs.no_backward:
            yield Probe(
                name="gradients",
                verdict=Verdict.INCONCLUSIVE,
                reason=f"its backward raises eagerly: {self.inputs.no_backward}",
                remedy="mend it, or register one with torch.library.register_autograd; or ask without gradients",
            )
        elif "gradients" in names and self.inputs.resized and self.inputs.rejected_backward:
            yield Probe(
                name="gradients",
                verdict=Verdict.INCONCLUSIVE,
                reason=f"its backward does not take what its forward takes: {self.inputs.rejected_backward}",
                remedy="mend the backward: it may have taken a size for granted",
            )
        elif "gradients" in names and not self.inputs.given.reference.is_differentiable:
            # that what is traced requires no grad either is a clause of the contract
            reason = "no output requires grad: a backward is refused, and so it is where every trace is equivalent"
            if self.gradients == "auto":
                self.unasked["gradients"] = "no output requires grad"
            else:
                yield Probe(name="gradients", verdict=Verdict.EQUIVALENT, reason=reason)
        if "backward" in names:
            if self.inputs.no_backward:
                self.unasked["backward"] = "it raises"
            elif self.inputs.given.reference.is_differentiable:
                self.progress("backward")
                yield backward.backward(self.inputs.given)
            else:
                self.unasked["backward"] = "no output requires grad"
        if "derivative" in names:
            if self.inputs.no_backward:
                self.unasked["derivative"] = "the backward raises"
            elif self.inputs.given.reference.is_differentiable:
                self.progress("derivative")
                yield eager.derivative(self.inputs.given, self._others_to_differentiate())
            else:
                self.unasked["derivative"] = "no output requires grad"

    def _others_to_differentiate(self) -> dict[str, Sequence[Baseline]]:
        """Return other inputs by what they are; none beside integers, which might pick an element twice."""
        leaves = tree_leaves((self.inputs.args, self.inputs.kwargs))
        if any(isinstance(leaf, torch.Tensor) and not is_inexact(leaf.dtype) for leaf in leaves):
            return {}
        return {"with fresh values": self.inputs.fresh, "with other sizes": self.inputs.resized}

    def _of_its_fake_kernel(self) -> Iterator[Probe]:
        if self._is_wanted("fake/given"):
            self.progress("fake/given")
            yield fake.fake("fake/given", self.inputs.given)
        if self._is_wanted("fake/layout"):
            self.progress("fake/layout")
            if self.inputs.laid_out:
                yield layouts.fake_layout(self.inputs.given, self.inputs.laid_out)
            else:
                self.unasked["fake/layout"] = self.inputs.no_other_layouts
        for name in ("fake/resized", "fake/symbolic"):
            if not self._is_wanted(name):
                continue
            self.progress(name)
            inputs = self.inputs
            answers: list[Probe | str]
            if name == "fake/resized":
                answers = [fake.fake(name, other) for other in inputs.resized]
            else:
                answers = [fake.symbolic(name, inputs.given, other) for other in inputs.resized_alike]
            if found := [answer for answer in answers if isinstance(answer, Probe)]:
                yield max(found, key=lambda probe: probe.verdict.severity)
            else:
                self.unasked[name] = str(answers[0]) if answers else inputs.no_other_sizes

    def _is_wanted(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix in self.wanted)

    def _require_known_probes(self) -> None:
        known = [*OWN_PROBES, *(trace.name for trace in traces_with(self.backends))]
        if not self.wanted:
            raise UsageError(f"no probe was named: they are {', '.join(known)}; probes=None asks all")
        for backend in self.backends:
            transforms.build(f"backend:{backend}", {})
        for prefix in self.wanted:
            if not any(name.startswith(prefix) for name in known):
                raise UsageError(f"there is no probe {prefix!r}: they are {', '.join(known)}")


def _require_pairs(others: object) -> None:
    """Raise UsageError where arguments of other sizes are none."""
    pairs = others if isinstance(others, (tuple, list)) else [others]
    for place, other in enumerate(pairs):
        is_pair = isinstance(other, (tuple, list)) and len(other) == 2
        if not is_pair or not isinstance(other[0], (tuple, list)) or not isinstance(other[1], Mapping | None):
            raise UsageError(f"others[{place}] is no pair of args and kwargs: write others=[((x,), {{}})]")


def _are_names(given: object) -> bool:
    is_list = isinstance(given, (tuple, list)) and all(isinstance(name, str) for name in given)
    return given is None or isinstance(given, str) or is_list


def _listed(unasked: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in unasked.items())
