"""What a script asks of its program: which stage is run, which leaf is looked at, and what decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.lift import is_narrow, widened
from torchdelta._torch.lift_graph import lift_graph
from torchdelta.errors import ReproUnwritable
from torchdelta.execute.copies import copy_together
from torchdelta.repro.applied import write_transform
from torchdelta.repro.code import write_program
from torchdelta.repro.evidence import Divergence, bound_of, divergence_of
from torchdelta.repro.finding import Finding
from torchdelta.repro.running import outputs_of
from torchdelta.repro.tensors import write_tensors
from torchdelta.repro.verdicts import Sides, Verdict, ask_child, ask_contract, ask_exact, ask_exception, ask_values


class Asked:
    """Everything that is known about one script before it is put together."""

    def __init__(self, finding: Finding, path: Path, *, data: bool) -> None:
        if finding.case.loss is not None:
            raise ReproUnwritable(
                f"the gradients are those of {finding.case.loss}: make the loss a part of the graph, and check that"
            )
        self.outputs = outputs_of(finding.graph)
        is_lifted = finding.report.failure is None and shown_by(finding).is_lifted
        self.finding = finding = _in_float64(finding) if is_lifted else finding
        tensors = [value for value in finding.inputs if isinstance(value, torch.Tensor)]
        self.applied = write_transform(finding.case, path, next((each.device.type for each in tensors), "cpu"))
        self.program = write_program(finding.graph, finding.inputs, finding.imports)
        self.divergence = self._divergence()
        names = self.program.inputs
        places = zip(names, finding.inputs, strict=True)
        given = {name: value for name, value in places if isinstance(value, torch.Tensor)}
        _refuse_shared(given, self.program.tensors)
        recipes = {names[place]: text for place, text in finding.inputs_from.items()}
        self.inputs = write_tensors(given, recipes=recipes, data=data)
        self.state = write_tensors(self.program.tensors, data=data)
        self.verdict = self._verdict()

    @property
    def stage(self) -> str:
        """The last stage that a script runs."""
        if self.divergence is not None:
            stage = self.divergence.stage
        else:
            failure = self.finding.report.failure
            assert failure is not None
            # who died without a word may have died in any of them
            stage = failure.signature.stage if failure.kind == "exception" else self.finding.case.stages[-1]
        if stage == "steps":
            raise ReproUnwritable("it shows in an optimizer's steps, and a script takes none: check the gradients")
        return stage

    @property
    def is_replaced(self) -> bool:
        """Whether the script has other values than the failure was seen with."""
        return self.inputs.is_replaced or self.state.is_replaced

    @property
    def is_cast(self) -> bool:
        """Whether the script needs a function that casts inputs."""
        return any("cast(inputs()" in line for line in self.verdict.main)

    def _divergence(self) -> Divergence | None:
        if self.finding.report.failure is not None:
            return None
        return divergence_of(self.finding.report, self.outputs, dict(self._reached()))

    def _reached(self) -> Iterator[tuple[str, str]]:
        """Yield how a script reaches what the program holds: a candidate may hold it by itself, under the same name."""
        for path, name in self.program.paths.items():
            if not self.applied.is_rebuilt:
                yield path, f"call.{name}"
            else:
                kind = "parameter" if isinstance(self.program.tensors.get(name), torch.nn.Parameter) else "buffer"
                yield path, f'call.get_{kind}("{name.replace("[", ".").replace("]", "")}")'

    def _verdict(self) -> Verdict:
        finding, divergence, sides = self.finding, self.divergence, self._sides()
        if divergence is None:
            failure = finding.report.failure
            assert failure is not None
            if failure.kind == "exception":
                return ask_exception(failure, sides)
            return ask_child(failure, sides, deadline_s=finding.deadline_s, memory_bytes=finding.memory_bytes)
        if divergence.clause is not None:
            arguments = {f"args[{place}]": f"args[{place}]" for place in range(len(finding.inputs))}
            return ask_contract(divergence, sides, {**self.outputs, **arguments})
        if divergence.is_exact:
            return ask_exact(divergence, sides)
        seen = divergence.comparison
        largest = seen.measurement.max_abs if seen.measurement is not None and not seen.measurement.misplaced else None
        error = seen.error if divergence.is_lifted or largest is None else largest
        return ask_values(divergence, sides, bound_of(divergence, error or 0.0))

    def _sides(self) -> Sides:
        program = "Program()" if self.program.is_module else "program"
        dtype, applied = self.applied.dtype, self.applied
        candidate = f"run({applied.call.format(program)}, inputs())"
        return Sides(
            reference=f"run({program}, inputs())",
            candidate=candidate if dtype is None else self._run_in(dtype),
            truth=self._run_in("torch.float64") if self._has_truth() else None,
            label=applied.label,
        )

    def _run_in(self, dtype: str) -> str:
        program = f"Program().to({dtype})" if self.program.is_module else "program"
        is_plain = all(
            isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad
            for value in self.finding.inputs
        )
        args = f"[x.to({dtype}) for x in inputs()]" if is_plain else f"cast(inputs(), {dtype})"
        return f"run({program}, {args})"

    def _has_truth(self) -> bool:
        divergence = self.divergence
        if divergence is None or divergence.is_lifted:
            return False
        worst = divergence.comparison.worst
        if worst is None or worst.truth is None:
            return False
        # copies in float64 share no memory, and a program that names a lower dtype rounds to it
        if self.inputs.is_shared or self.state.is_shared or _names_narrow(self.finding.graph):
            return False
        held = (*self.finding.inputs, *self.program.tensors.values())
        return not any(isinstance(value, torch.Tensor) and value.is_complex() for value in held)


def shown_by(finding: Finding) -> Divergence:
    """Return the divergence that a script of a finding shows, before it is known how the script gets at it."""
    held = (*dict(finding.graph.named_parameters()), *dict(finding.graph.named_buffers()))
    return divergence_of(finding.report, outputs_of(finding.graph), dict.fromkeys(held, "call"))


def _in_float64(finding: Finding) -> Finding:
    """Return the finding as the semantic question has it: nothing in it rounds below float64."""
    graph, inputs = copy_together((finding.graph, finding.inputs), name="the finding", convert=widened)
    return replace(finding, graph=lift_graph(graph), inputs=inputs, inputs_from={})


def _names_narrow(graph_module: GraphModule) -> bool:
    def named(values: Any) -> Iterator[Any]:
        if isinstance(values, (list, tuple)):
            for value in values:
                yield from named(value)
        else:
            yield values

    return any(
        isinstance(value, torch.dtype) and is_narrow(value)
        for node in graph_module.graph.nodes
        for value in named((*node.args, *node.kwargs.values()))
    )


def _refuse_shared(given: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> None:
    strided = {name: tensor for name, tensor in given.items() if tensor.layout is torch.strided}
    memory = {tensor.untyped_storage().data_ptr(): name for name, tensor in strided.items() if tensor.numel()}
    for name, tensor in held.items():
        if tensor.layout is torch.strided and (other := memory.get(tensor.untyped_storage().data_ptr())) is not None:
            raise ReproUnwritable(f"the input {other} shares memory with {name} of the graph: make that an input too")
