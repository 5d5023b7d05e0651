"""The question of a script: the stage that it runs, the leaf that it looks at, and the function `main` that decides.

A `Question` collects everything about one script before `script.py` puts it together. Below it come the kinds of `main`
(`ask_values`, `ask_exact`, `ask_contract`, `ask_exception`, `ask_child`), each a `ScriptMain`, and the function `run`
(`write_run`), which takes one side from its inputs to the value that is compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.graphs.graphs import output_builder
from torchdelta._torch.graphs.lift_graph import lift_graph
from torchdelta._torch.graphs.nodes import op_name
from torchdelta._torch.modes.lift import is_narrow, widened
from torchdelta.compare.leaves import leaves_of
from torchdelta.errors import ReproUnwritable
from torchdelta.program.copies import copy_together
from torchdelta.records.failure import Failure
from torchdelta.repro.code import write_program
from torchdelta.repro.finding import Bound, Divergence, Evidence, Finding, bound_of, graph_divergence, key_of
from torchdelta.repro.imports import ScriptImports
from torchdelta.repro.transform import TransformSource, write_transform
from torchdelta.repro.values import write_tensors, write_text

_CALLS = ("call_function", "call_method", "call_module")


class Question:
    """All parts of one script besides the program itself: the divergence that it shows, its transform and its `main`.

    `GraphQuestion` is about a graph; `whole_program.ProgramQuestion` is about the user's own program.
    """

    finding: Evidence
    imports: ScriptImports
    applied: TransformSource
    divergence: Divergence | None
    """The divergence that the script shows, or None if the report has a failure instead."""
    main: ScriptMain
    module_imports: Sequence[Sequence[str]] = ()
    """The lines that import each module that the program needs."""
    is_replaced = False
    """Whether random numbers replace some of the values that the failure was found with."""
    operations: tuple[str, ...] = ()
    """The names of the operations that the program calls, each once; empty if they are not known."""

    @property
    def stage(self) -> str:
        """The last stage that a script runs: that of the divergence, or of the candidate's exception.

        For a candidate that died or hung, it is the last stage of the case, because the stage of a death is not known.
        Raise ReproUnwritable if it is the stage `steps`.
        """
        if self.divergence is not None:
            stage = self.divergence.stage
        else:
            failure = self.finding.report.failure
            assert failure is not None
            # a worker that died may have died in any of the stages
            stage = failure.signature.stage if failure.kind == "exception" else self.finding.case.stages[-1]
        if stage == "steps":
            raise ReproUnwritable("it shows in an optimizer's steps, and a script takes none: check the gradients")
        return stage

    @property
    def is_cast(self) -> bool:
        """Whether the script needs the function `cast`."""
        return any("cast(inputs()" in line for line in self.main.statements)

    def _ask(self, sides: ScriptSides, around: Mapping[str, str]) -> ScriptMain:
        """Return the source of the `main` that fits the finding.

        For an exception `ask_exception`, for another failure `ask_child`; for a diverged leaf `ask_contract` if
        `Divergence.clause` is set, `ask_exact` if it `is_exact`, and else `ask_values` with the bound of `bound_of`.
        `around` has the expressions of the leaves that may share memory with the diverged one, by path. Raise
        ReproUnwritable if a script cannot ask about that clause or that failure.
        """
        finding, divergence = self.finding, self.divergence
        if divergence is None:
            failure = finding.report.failure
            assert failure is not None
            if failure.kind == "exception":
                return ask_exception(failure, sides)
            return ask_child(failure, sides, deadline_s=finding.deadline_s, memory_bytes=finding.memory_bytes)
        if divergence.clause is not None:
            return ask_contract(divergence, sides, around)
        if divergence.is_exact:
            return ask_exact(divergence, sides)
        comparison = divergence.comparison
        measurement = comparison.measurement
        largest = measurement.max_abs if measurement is not None and not measurement.misplaced else None
        error = comparison.error if divergence.is_lifted or largest is None else largest
        return ask_values(divergence, sides, bound_of(divergence, error or 0.0))


class GraphQuestion(Question):
    """All parts of the script of a graph: program, inputs, transform, the divergence that it shows, and its `main`.

    Raise ReproUnwritable if no script of torch alone can show the finding.
    """

    finding: Finding

    def __init__(self, finding: Finding, path: Path, *, data: bool) -> None:
        """Write the parts of the script for a finding; raise ReproUnwritable if no script of torch alone can show it.

        `path` is the script's path, to which its imports are relative; no file is written. Without `data`, random
        numbers replace the user's values. If the divergence shows in float64 only, the attribute `finding` is a copy in
        float64. Raise UsageError if an expression of `inputs_from` is used and gives other values than the input has;
        what `write_transform` raises passes through.
        """
        if finding.case.loss is not None:
            raise ReproUnwritable(
                f"the gradients are those of {finding.case.loss}: make the loss a part of the graph, and check that"
            )
        self.outputs = outputs_of(finding.graph)
        is_lifted = finding.report.failure is None and shown_divergence(finding).is_lifted
        self.finding = finding = _in_float64(finding) if is_lifted else finding
        tensors = [value for value in finding.inputs if isinstance(value, torch.Tensor)]
        self.imports = ScriptImports(script=path)
        device = next((each.device.type for each in tensors), "cpu")
        self.applied = write_transform(finding.case, self.imports, device)
        self.program = write_program(finding.graph, finding.inputs, finding.imports, keeps_names=finding.keeps_names)
        self.divergence = self._divergence()
        names = self.program.inputs
        places = zip(names, finding.inputs, strict=True)
        input_tensors = {name: value for name, value in places if isinstance(value, torch.Tensor)}
        _refuse_shared(input_tensors, self.program.tensors)
        recipes = {names[place]: text for place, text in finding.inputs_from.items()}
        self.inputs = write_tensors(input_tensors, recipes=recipes, data=data)
        # one file has both, and an input may have the name of a parameter
        self.state = write_tensors(self.program.tensors, data=data, taken=self.inputs.saved)
        self.module_imports = [self.imports.of_module(module) for module in sorted(self.program.imports)]
        self.is_replaced = self.inputs.is_replaced or self.state.is_replaced
        called = (node for node in finding.graph.graph.nodes if node.op in _CALLS)
        self.operations = tuple(dict.fromkeys(name for node in called if (name := op_name(node)) != "getitem"))
        arguments = {f"args[{place}]": f"args[{place}]" for place in range(len(finding.inputs))}
        self.main = self._ask(self._sides(), {**self.outputs, **arguments})

    def _divergence(self) -> Divergence | None:
        """Return the divergence that the script shows, or None if the report has a failure instead.

        It is the worst leaf that a script can reach, of the first stage in which such a leaf diverged. Raise
        ReproUnwritable if no leaf diverged, or if a script can reach none of those that did.
        """
        if self.finding.report.failure is not None:
            return None
        return graph_divergence(self.finding.report, self.outputs, dict(self._state_expressions()))

    def _state_expressions(self) -> Iterator[tuple[str, str]]:
        """Yield the path in the graph module of each tensor and called module, with the script's expression for it.

        The expression begins with `call`, the script's name for the program or candidate. It reads an attribute, or
        calls `get_parameter` or `get_buffer` if the candidate is a new module.
        """
        for path, name in self.program.paths.items():
            if not self.applied.is_rebuilt:
                yield path, f"call.{name}"
            else:
                kind = "parameter" if isinstance(self.program.tensors.get(name), torch.nn.Parameter) else "buffer"
                yield path, f'call.get_{kind}("{name.replace("[", ".").replace("]", "")}")'

    def _sides(self) -> ScriptSides:
        """Return the source of the calls of `run` for reference, candidate and truth, or None for a missing truth.

        A transform that casts is written as a run of the program in its dtype.
        """
        program = "Program()" if self.program.is_module else "program"
        dtype, applied = self.applied.dtype, self.applied
        candidate = f"run({applied.call.format(program)}, inputs())"
        return ScriptSides(
            reference=f"run({program}, inputs())",
            candidate=candidate if dtype is None else self._run_in(dtype),
            truth=self._run_in("torch.float64") if self._has_truth() else None,
            label=applied.label,
        )

    def _run_in(self, dtype: str) -> str:
        """Return the source of a call of `run` in which the program and its floating-point inputs are cast to a dtype.

        A program that is a function is not cast. `dtype` is source text, such as `torch.float64`.
        """
        program = f"Program().to({dtype})" if self.program.is_module else "program"
        is_plain = all(
            isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad
            for value in self.finding.inputs
        )
        args = f"[x.to({dtype}) for x in inputs()]" if is_plain else f"cast(inputs(), {dtype})"
        return f"run({program}, {args})"

    def _has_truth(self) -> bool:
        """Tell whether the script can compute and print the value in float64.

        The report must have a divergence, with a truth at its worst element. False for a divergence that shows in
        float64 only, and if tensors are complex or share memory, or the graph names a dtype that float64 would widen.
        """
        divergence = self.divergence
        if divergence is None or divergence.is_lifted:
            return False
        worst = divergence.comparison.worst
        if worst is None or worst.truth is None:
            return False
        # casts would lose shared memory, and a program that names a narrow dtype would still round to it
        if self.inputs.is_shared or self.state.is_shared or _names_narrow(self.finding.graph):
            return False
        values = (*self.finding.inputs, *self.program.tensors.values())
        return not any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


def shown_divergence(finding: Finding) -> Divergence:
    """Return the worst diverged leaf that a script can reach, of the first stage of the report that has such a leaf.

    If the leaf is a parameter, a buffer or a gradient of one, its expression has only a placeholder for the module's
    state. Raise ReproUnwritable if no leaf diverged, or if a script can reach none of those that did.
    """
    names = (*dict(finding.graph.named_parameters()), *dict(finding.graph.named_buffers()))
    return graph_divergence(finding.report, outputs_of(finding.graph), dict.fromkeys(names, "call"))


def _in_float64(finding: Finding) -> Finding:
    """Return a copy of the finding with graph and inputs in float64, without `inputs_from` and with the same report."""
    graph, inputs = copy_together((finding.graph, finding.inputs), name="the finding", convert=widened)
    return replace(finding, graph=lift_graph(graph), inputs=inputs, inputs_from={})


def _names_narrow(graph_module: GraphModule) -> bool:
    """Tell whether an argument of a node is or has a dtype that lifting to float64 would widen.

    Lists and tuples are searched at any depth; dicts, slices and inner graphs are not.
    """

    def flatten(values: Any) -> Iterator[Any]:
        """Yield a value, or the items of a list or tuple at any depth."""
        if isinstance(values, (list, tuple)):
            for value in values:
                yield from flatten(value)
        else:
            yield values

    return any(
        isinstance(value, torch.dtype) and is_narrow(value)
        for node in graph_module.graph.nodes
        for value in flatten((*node.args, *node.kwargs.values()))
    )


def _refuse_shared(inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """Raise ReproUnwritable if an input shares memory with a tensor of the graph's state; both are given by name.

    Empty inputs, and tensors of another layout than strided, are not looked at.
    """
    strided = {name: tensor for name, tensor in inputs.items() if tensor.layout is torch.strided}
    memory = {tensor.untyped_storage().data_ptr(): name for name, tensor in strided.items() if tensor.numel()}
    for name, tensor in state.items():
        if tensor.layout is torch.strided and (other := memory.get(tensor.untyped_storage().data_ptr())) is not None:
            raise ReproUnwritable(f"the input {other} shares memory with {name} of the graph: make that an input too")


SURVIVED = 42
"""The exit status of a child that came to its end."""
OUTPUT_BYTES = 16 * 2**20
"""A child that prints so much prints without end."""


@dataclass(frozen=True, kw_only=True)
class ScriptSides:
    """The calls of `run` for each side, and the word for the candidate's values, such as `compiled`."""

    reference: str
    candidate: str
    truth: str | None
    """None if the script has no truth."""
    label: str


@dataclass(frozen=True, kw_only=True)
class ScriptMain:
    """The statements of `main`, which returns whether the bug is there, and what they need."""

    statements: tuple[str, ...]
    returns: tuple[str, ...] = ()
    """The last statements of `run`."""
    constants: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


def ask_values(divergence: Divergence, sides: ScriptSides, bound: Bound) -> ScriptMain:
    """Return the source of a `main` that tells whether any element of the leaf differs by more than the bound.

    It compares the candidate with the reference, and prints the worst element of both, and of the truth if there is
    one. NaN on both sides counts as equal, and NaN on one side as beyond any bound. Different shapes are an error of
    the script.
    """
    wide = "to(torch.complex128)" if (divergence.comparison.dtype or "").startswith("complex") else "double()"
    truth = ", {truth[worst].item()} in float64" if sides.truth else ""
    return ScriptMain(
        constants=(f"BOUND = {bound.value:.3g}  # {bound.reason}",),
        returns=(f"return {divergence.leaf}.detach().{wide}",),
        statements=(
            *_both(sides),
            *([f"truth = {sides.truth}"] if sides.truth else []),
            _SAME_SHAPE,
            "same = (candidate == reference) | (candidate.isnan() & reference.isnan())",
            "error = (candidate - reference).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0)",
            "worst = torch.unravel_index(error.argmax(), error.shape)",
            f'print(f"{_at(divergence, "[int(i) for i in worst]")}: {{reference[worst].item()}} eagerly, "',
            f'      f"{{candidate[worst].item()}} {sides.label}{truth}")',
            "return error[worst].item() > BOUND",
        ),
    )


def ask_exact(divergence: Divergence, sides: ScriptSides) -> ScriptMain:
    """Return the source of a `main` that tells whether any element of the leaf differs; it prints the first that does.

    Sides of different shapes are an error of the script.
    """
    return ScriptMain(
        returns=(f"return torch.as_tensor({divergence.leaf})",),
        statements=(
            *_both(sides),
            _SAME_SHAPE,
            "differing = (candidate != reference).nonzero().tolist()",
            "for index in differing[:1]:",
            f'    print(f"{_at(divergence, "index")}: {{reference[tuple(index)].item()}} eagerly, "',
            f'          f"{{candidate[tuple(index)].item()}} {sides.label}")',
            "return bool(differing)",
        ),
    )


_TRAITS = {
    "dtype": "{}.dtype",
    "shape": "tuple({}.shape)",
    "device": "{}.device",
    "requires_grad": "{}.requires_grad",
    "stride": "[step for size, step in zip({0}.shape, {0}.stride()) if size > 1]",
    "value": "{}",
}
_STRUCTURE = (
    "def structure(value):",
    "    if isinstance(value, (list, tuple)):",
    "        return type(value).__name__, [structure(item) for item in value]",
    "    if isinstance(value, dict):",
    "        return type(value).__name__, {key: structure(item) for key, item in value.items()}",
    "    return type(value).__name__",
)


def ask_contract(divergence: Divergence, sides: ScriptSides, around: Mapping[str, str]) -> ScriptMain:
    """Return the source of a `main` that tells whether the sides still differ in the clause that the leaf breaks.

    It prints both sides of the clause; for `aliasing`, these are the paths of the values that share memory with the
    leaf, among those in `around`, which has expressions by path. Raise ReproUnwritable for a clause that a script
    cannot compare.
    """
    clause, leaf = divergence.clause, divergence.leaf
    definitions: tuple[str, ...] = ()
    returns: tuple[str, ...]
    if clause == "structure":
        whole = "outputs" if leaf.startswith("outputs") else leaf
        returns, definitions = (f"return structure({whole})",), _STRUCTURE
    elif clause == "aliasing":
        others = ", ".join(f"{write_text(path)}: {reach}" for path, reach in around.items() if reach != leaf)
        returns = (
            f"memory = {leaf}.untyped_storage().data_ptr()",
            f"others = {{{others}}}",
            "others = {name: value for name, value in others.items() if torch.is_tensor(value)}",
            "return [name for name, value in others.items() if value.untyped_storage().data_ptr() == memory]",
        )
    elif clause in _TRAITS:
        returns = (f"return {_TRAITS[clause].format(leaf)}",)
    else:
        raise ReproUnwritable(f"{divergence.comparison.path} breaks {clause}, which a script has no words for")
    what = "shares memory with" if clause == "aliasing" else clause
    return ScriptMain(
        returns=returns,
        definitions=definitions,
        statements=(
            *_both(sides),
            f'print(f"{_at(divergence)}, {what}: {{reference}} eagerly, {{candidate}} {sides.label}")',
            "return candidate != reference",
        ),
    )


def ask_exception(failure: Failure, sides: ScriptSides) -> ScriptMain:
    """Return the source of a `main` that tells whether the candidate still raises this exception.

    It is the same one if its type has the same name and its message, with any white space as one space, has the piece
    that `key_of` returns; if that is empty, the type alone counts. The script runs the reference first, and lets any
    other exception through, so that it exits with 2.
    """
    name, key = failure.type.rpartition(".")[2], " ".join(key_of(failure).split())
    # a message may be wrapped otherwise
    is_other = f'type(error).__name__ != "{name}"' + (' or SAID not in " ".join(str(error).split())' if key else "")
    return ScriptMain(
        constants=(f"SAID = {write_text(key)}",) if key else (),
        statements=(
            sides.reference,
            "try:",
            f"    {sides.candidate}",
            "except BaseException as error:",
            f"    if {is_other}:",
            "        raise",
            '    print(f"{type(error).__name__}: {error}"[:2000])',
            "    return True",
            "return False",
        ),
    )


def ask_child(failure: Failure, sides: ScriptSides, *, deadline_s: float, memory_bytes: int) -> ScriptMain:
    """Return the source of a `main` that tells whether the candidate, in a child process, still fails in this way.

    By the failure's kind: the child prints without end, takes longer than `deadline_s`, dies of the signal, exits with
    the status, or runs out of memory if allowed `memory_bytes` more than it starts with. The parent runs the reference
    first. The script raises if the child fails in another way, and also, except for a timeout, if it takes longer than
    `deadline_s`; for endless output neither is looked at. Raise ReproUnwritable for any other kind of failure.
    """
    start = "[sys.executable, __file__, CHILD]"
    run: tuple[str, ...] = (sides.candidate,)
    imports = ["import subprocess"]
    constants = ['CHILD = "--child"']
    if failure.kind == "output":
        constants.append(f"LIMIT = {OUTPUT_BYTES}  # bytes, more than any program prints")
        decision = [
            f"with subprocess.Popen({start}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:",
            "    printed = len(child.stdout.read(LIMIT))",
            "    child.kill()",
            'print(f"the child printed {printed} bytes, or more")',
            "return printed == LIMIT",
        ]
    elif failure.kind == "timeout":
        constants.append(f"DEADLINE_S = {deadline_s:g}")
        decision = [
            "try:",
            f"    ended = subprocess.run({start}, timeout=DEADLINE_S).returncode",
            "except subprocess.TimeoutExpired:",
            '    print(f"the child did not end within {DEADLINE_S} s")',
            "    return True",
            *_SURVIVAL,
        ]
    else:
        constants.append(f"DEADLINE_S = {deadline_s:g}")
        died = _death(failure)
        imports += ["import signal"] if failure.kind == "signal" else []
        if failure.kind == "memory":
            imports.append("import resource")
            run = (*_LIMITED, "try:", f"    {sides.candidate}", *_OUT_OF_MEMORY)
            constants.append(f"LIMIT = {memory_bytes}  # bytes, beside what the child starts with")
        decision = [
            f"ended = subprocess.run({start}, timeout=DEADLINE_S).returncode",
            'print(f"the child ended with status {ended}")',
            f"if {died}:",
            "    return True",
            *_SURVIVAL,
        ]
    child = (
        "if CHILD in sys.argv:",
        *(f"    {line}" for line in run),
        f"    sys.exit({SURVIVED})  # it came to its end",
    )
    return ScriptMain(
        statements=(*child, sides.reference, *decision),
        constants=tuple(constants),
        imports=tuple(imports),
    )


_SURVIVAL = (
    f"if ended != {SURVIVED}:",
    '    raise RuntimeError(f"the child failed in another way, with status {ended}")',
    "return False",
)
_LIMITED = (
    'held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()',
    "resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT, held + LIMIT))",
)
_OUT_OF_MEMORY = (
    "except Exception as error:",
    '    if not any(word in repr(error).lower() for word in ("memory", "alloc")):',
    "        raise",
    "    sys.exit(3)  # out of memory",
)


def _death(failure: Failure) -> str:
    """Return the script's condition on `ended`, the child's exit status, under which it died as the candidate did.

    A child that ran out of memory exits with 3 or dies of any signal. Raise ReproUnwritable unless the failure's kind
    is `signal`, `exit` or `memory`.
    """
    if failure.kind == "signal":
        return f"ended == -signal.{failure.type}"
    if failure.kind == "exit":
        return f"ended == {int(failure.type or 0)}"
    if failure.kind == "memory":
        return "ended == 3 or ended < 0"
    raise ReproUnwritable(f"a candidate that failed by {failure.kind} has no script that shows it")


def _both(sides: ScriptSides) -> tuple[str, str]:
    """Return the two statements that run reference and candidate."""
    return f"reference = {sides.reference}", f"candidate = {sides.candidate}"


_SAME_SHAPE = "assert candidate.shape == reference.shape"


def _at(divergence: Divergence, index: str = "") -> str:
    """Return a leaf's path for an f-string of the script, with the expression `index` after it if the leaf has axes."""
    path = divergence.comparison.path.replace("{", "{{").replace("}", "}}").replace('"', "'")
    return f"{path}{{{index}}}" if index and divergence.comparison.shape else path


def write_cotangent(dtypes: Collection[str], *, is_cast: bool) -> list[str]:
    """Return the lines that define `cotangent(output, seed)`, which draws the numbers that the check had.

    `dtypes` are those of the outputs in the native run. If the script runs in float64 too (`is_cast`), the numbers are
    rounded to the coarsest of them, or to bfloat16 if none is known, so that both runs get the same.
    """
    floats = {getattr(torch, name) for name in dtypes if name.startswith(("float", "bfloat", "complex"))}
    coarsest = max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.bfloat16).to_real()
    rounded = f".to({coarsest})" if is_cast and coarsest is not torch.float64 else ""
    why = "  # the same numbers in both runs" if rounded else ""
    drawn = "torch.randn({}, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)"
    if not any(dtype.is_complex for dtype in floats):
        return [
            "def cotangent(output, seed):",
            f"    drawn = {drawn.format('output.shape')}",
            f"    return drawn{rounded}.to(output){why}",
        ]
    return [
        "def cotangent(output, seed):",
        "    shape = (*output.shape, 2) if output.is_complex() else output.shape",
        f"    drawn = {drawn.format('shape')}{rounded}{'.double()' if rounded else ''}{why}",
        "    return (torch.view_as_complex(drawn) if output.is_complex() else drawn).to(output)",
    ]


CAST = (
    "def cast(args, dtype):",
    "    def is_float(x):",
    "        return torch.is_tensor(x) and x.is_floating_point()",
    "",
    "    return [x.detach().to(dtype).requires_grad_(x.requires_grad) if is_float(x) else x for x in args]",
)


def write_run(
    outputs: Mapping[str, str], *, seed: int, has_backward: bool, is_differentiable: bool, returns: Sequence[str]
) -> list[str]:
    """Return the lines that define `run(call, args)`, which end with the statements `returns`.

    `run` seeds torch with `seed` and calls `call(*args)`. With `has_backward` it then runs backward from every output
    that requires grad; each cotangent has a seed made of `seed` and the output's path. `outputs` has the expression of
    each output leaf by its path in a report. With `is_differentiable`, a single output is known to require grad, and
    the script need not check it.
    """
    lines = ["def run(call, args):", f"    torch.manual_seed({seed})", "    outputs = call(*args)"]
    if has_backward:
        seeds = {expression: seed ^ zlib.crc32(path.encode()) for path, expression in outputs.items()}
        is_single = is_differentiable and len(seeds) == 1
        lines += [f"    {line}" for line in (_backward_of_one(seeds) if is_single else _backward(seeds))]
    elif not returns:
        lines[-1] = "    call(*args)"
    return [*lines, *(f"    {line}" for line in returns)]


def _backward_of_one(seeds: Mapping[str, int]) -> Iterator[str]:
    """Yield the statement that runs backward from the only output.

    `seeds` has one entry: the seed of the output's cotangent by the output's expression.
    """
    ((output, seed),) = seeds.items()
    yield f"{output}.backward(cotangent({output}, {seed}))"


def _backward(seeds: Mapping[str, int]) -> Iterator[str]:
    """Yield the statements that run backward from every output that is a tensor and requires grad, if there are any.

    `seeds` has the seed of each output's cotangent by the output's expression.
    """
    yield f"seeded = [{', '.join(f'({output}, {seed})' for output, seed in seeds.items())}]"
    yield "roots = [pair for pair in seeded if torch.is_tensor(pair[0]) and pair[0].requires_grad]"
    yield "if roots:"
    yield "    torch.autograd.backward([output for output, _ in roots], [cotangent(*pair) for pair in roots])"


def outputs_of(graph_module: GraphModule) -> dict[str, str]:
    """Return the script's expression of each leaf that a graph returns, by its path in a report.

    The path follows the structure that the graph's caller gets; the expression indexes the values that the graph itself
    returns, as `outputs[0]`. Leaves of the caller's structure that the graph does not return are left out.
    """
    returned: Any = graph_module.graph.output_node().args[0]
    if not isinstance(returned, (list, tuple)):
        return _leaves_within(returned, "outputs", "outputs")
    # the graph's caller may get another structure than the graph returns
    structure = leaves_of(output_builder(graph_module)(list(range(len(returned)))), "outputs")
    expressions: dict[str, str] = {}
    for path, place in structure.items():
        if type(place) is int:
            expressions |= _leaves_within(returned[place], path, f"outputs[{place}]")
    return expressions


def _leaves_within(returned: Any, path: str, expression: str) -> dict[str, str]:
    """Return the script's expression of each leaf within a returned value, by its path.

    `path` and `expression` are those of the value itself. Lists, tuples and dicts are entered; anything else is a leaf.
    """
    if not isinstance(returned, (list, tuple, dict)):
        return {path: expression}
    items = returned.items() if isinstance(returned, dict) else enumerate(returned)
    expressions: dict[str, str] = {}
    for key, item in items:
        expressions |= _leaves_within(item, f"{path}[{key!r}]", f"{expression}[{key!r}]")
    return expressions
