"""Inductor's passes, watched in the user's own run: the first pass that changes the numbers is named.

    with td.watch_passes() as passes:
        compiled(x)

While a graph is compiled, a copy of it is kept behind each pass that changed it: a chain of versions. The chain is
judged on the inputs of the first call of the compiled graph, and then dropped. The last version is compared with the
first; only if they differ are the versions in between compared. Errors of the watcher itself become notes.

Start with `watch_passes`, then `ChainJudge.judge`.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from torchdelta._torch.compile import aot, inductor_passes, stances
from torchdelta._torch.compile.graph_versions import Chain, Version
from torchdelta._torch.compile.seams import BoxedCall, HandedGraph, as_boxed
from torchdelta._torch.graphs.nodes import needs_other_processes
from torchdelta._torch.modes import outside
from torchdelta._torch.process import runtime
from torchdelta.compare.policy_parser import parse
from torchdelta.errors import TorchDeltaError
from torchdelta.passes.real_calls import TALKS, detach_inputs, have_values
from torchdelta.passes.succession import PassStep, Succession
from torchdelta.program.stages import cotangent_for
from torchdelta.records.case import CheckOptions, require_seed
from torchdelta.records.passes import PassFinding, PassSummary
from torchdelta.records.report import reason_of
from torchdelta.records.verdict import Verdict

PACKED = "weights are packed for a library that alone can read them,"


@dataclass(kw_only=True)
class ChainJudge:
    """Judges one chain; the results are its `findings`, and `notes` about parts that could not be judged."""

    chain: Chain
    label: str
    """The name of the graph in messages."""
    options: CheckOptions
    """How two graphs are compared."""
    findings: list[PassFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_checked: bool = True
    """Whether every part of the chain could be judged."""

    def judge(self, values: Mapping[str, Any]) -> None:
        """Judge the chain of graph versions on the inputs of a call, and add to `findings` and `notes`.

        `values` has the inputs by the names of the graph's placeholders. A part that is not judged gets a note and
        clears `is_checked`; a graph that needs other processes is not judged at all. Raise TorchDeltaError if a pass
        changes the inputs of the graph, or if one has no value.
        """
        if needs_other_processes(self.chain.versions[0].as_module):
            self._leave_open(f"not checked: {TALKS}")
            return
        with _isolated(self.chain.phase):
            inputs = self._inputs(values)
            for part in self._comparable():
                if len(part) > 1:
                    self._judge_part(part, inputs)

    def _judge_part(self, part: list[Version], inputs: tuple[Any, ...]) -> None:
        """Compare versions that draw the same random numbers; add a finding for the first pass that makes them diverge.

        Nothing is added if the last version is equivalent to the first. Otherwise each version is judged against the
        one before it (`Succession.judge_step`). A version that crashes is skipped with a note. If no single pass
        diverges, a note has the verdict of the last version against the first, unless that is CRASHED. A note clears
        `is_checked`.
        """
        options = self.options
        if self.chain.phase != inductor_passes.PRE_GRAD:
            # AOTAutograd restores aliasing outside of its graphs
            options = replace(options, stages=("forward",), ignore=("aliasing",))
        succession = Succession(original=part[0].as_module, inputs=inputs, options=options)
        report = succession.compare(part[-1].as_module)
        if report.verdict is Verdict.EQUIVALENT:
            return
        before, skipped = part[0], list[str]()
        for after in part[1:]:
            step = succession.judge_step(before.as_module, after.as_module)
            if step.against_original is Verdict.CRASHED:
                self._leave_open(f"the graph behind {after.name} does not run eagerly ({step.reason})")
                skipped.append(after.name)
                continue
            if step.introduced is Verdict.DIVERGED:
                self.findings.append(self._finding(skipped, after.name, step))
                return
            before, skipped = after, []
        if report.verdict is not Verdict.CRASHED:
            self._leave_open(f"{report.verdict.value} together, and by no single one: {reason_of(report)}")

    def _finding(self, skipped: list[str], name: str, step: PassStep) -> PassFinding:
        """Return the finding on the pass `name`, with the error and noise of the worst comparison, if there is one.

        `skipped` are the passes just before it whose graphs do not run; the reason says that one of them may be guilty
        instead.
        """
        unsure = f"; or {', '.join(skipped)} before it, whose graphs do not run eagerly" if skipped else ""
        return PassFinding(
            name=name,
            phase=self.chain.phase,
            graph=self.label,
            culprit=step.culprit,
            reason=f"{step.reason}{unsure}",
            error=step.worst.error if step.worst is not None else None,
            noise=step.worst.noise if step.worst is not None else None,
        )

    def _comparable(self) -> Iterator[list[Version]]:
        """Yield the versions in successive lists that draw the same random numbers, because others cannot be compared.

        A note is added where the numbers change. Versions from the first one with packed weights on are left out, with
        a note. The last list may be empty.
        """
        part: list[Version] = []
        for version in self.chain.versions:
            if version.is_packed:
                # copied, or run in float64, such a graph may end the process
                self._leave_open(f"{PACKED} from {version.name or 'the beginning'} on")
                break
            if part and version.draws != part[-1].draws:
                self._leave_open(f"{version.name} draws other random numbers than the graph before it")
                yield part
                part = []
            part.append(version)
        yield part

    def _inputs(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the inputs of the graphs in the order of their placeholders; tensors are detached aliases.

        `values` has them by name. An input of a joint graph without a value is a tangent, and gets seeded random
        numbers. Raise TorchDeltaError if versions have different placeholders, or if another input has no value.
        """
        chain, first = self.chain, self.chain.versions[0].inputs
        names = [node.name for node in first]
        for version in chain.versions[1:]:
            if [node.name for node in version.inputs] != names:
                raise TorchDeltaError(f"{version.name} changes the inputs of the graph")
        inputs = dict(zip(values, detach_inputs([*values.values()]), strict=True))
        for node in first:
            is_tensor = isinstance(node.meta.get("val", node.meta.get("example_value")), torch.Tensor)
            if node.name not in inputs and chain.phase == inductor_passes.JOINT:
                tangent = inductor_passes.empty_input(node, first, inputs)
                inputs[node.name] = tangent.copy_(cotangent_for(tangent, node.name, self.options.seed))
            elif node.name not in inputs or (is_tensor and inputs[node.name] is None):
                # a compiler that turns parameters into constants drops them from its calls
                raise TorchDeltaError(f"{node.name} is among its inputs, and is not there when it is called")
        return tuple(inputs[name] for name in names)

    def _leave_open(self, why: str) -> None:
        """Add a note with the reason why a part of the chain could not be judged, and clear `is_checked`."""
        self.is_checked = False
        self.notes.append(f"{self.chain.phase} passes of {self.label}: {why}")


@contextmanager
def _isolated(phase: str) -> Iterator[None]:
    """Run the body eagerly and outside of the user's modes; put generators, flags and settings back afterwards.

    In the phase "pre-grad" gradients are recorded if the caller records them. In the others they are not, and autocast
    is off.
    """
    has_grad = phase == inductor_passes.PRE_GRAD and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    casts = nullcontext() if phase == inductor_passes.PRE_GRAD else inductor_passes.without_autocast()
    with (
        runtime.preserved(),
        torch.set_grad_enabled(has_grad),
        outside.without_modes_or_hooks(),
        casts,
        stances.eager_here(),
    ):
        yield


NOTHING_SEEN = (
    "no pass was seen: nothing was compiled by inductor in here; what was compiled before is not compiled again"
)


@contextmanager
def watch_passes(*, policy: str = "noise", seed: int = 0) -> Iterator[PassSummary]:
    """Watch the passes that inductor runs over graphs that are compiled while the context is open; yield a summary.

    Its `findings` name passes behind which a graph computes something else on the inputs of its first call: of each
    graph the first in each phase, with the node if it is found (`ChainJudge.judge`). Its `notes` say what could not be
    checked. Both are complete when the context is left. An error of the watcher does not end the run. UsageError if the
    policy or the seed is wrong or passes are watched already. `policy` and `seed` are those of `check`.
    """
    # a wrong word raises before anything runs
    parse(policy)
    require_seed(seed)
    watcher = _Watcher(summary=PassSummary(), options=CheckOptions(policy=policy, seed=seed))
    with ExitStack() as stack:
        stack.enter_context(inductor_passes.watching(watcher.take, watcher.fail))
        stack.enter_context(aot.intercepting(watcher.compile_part))
        stack.enter_context(inductor_passes.around_programs(watcher.compile_program))
        stack.callback(watcher.close)
        yield watcher.summary


@dataclass(kw_only=True, eq=False)
class _CompiledGraph:
    """A graph on its way through the compiler, with a chain of versions for each phase of passes."""

    label: str
    inputs: tuple[str, ...]
    """The names of its placeholders."""
    number: int
    whole: _CompiledGraph | None = None
    """For a forward graph, the program whose joint graph contains it."""
    chains: list[Chain] = field(default_factory=list)

    def pop_chains(self, phase: str = "") -> list[Chain]:
        """Remove the chains of a phase, or all of them without one, and return them."""
        popped = [chain for chain in self.chains if not phase or chain.phase == phase]
        self.chains = [chain for chain in self.chains if chain not in popped]
        return popped


@dataclass(kw_only=True, eq=False)
class _Watcher:
    """Keeps the chains of all graphs that are being compiled, and judges each in the first call of its graph."""

    summary: PassSummary
    options: CheckOptions
    is_open: bool = True
    waiting: list[_CompiledGraph] = field(default_factory=list)
    """The graphs with chains to judge."""
    numbers: dict[int | None, int] = field(default_factory=dict)
    """The number of the program, by AOTAutograd's number of the graph."""
    programs: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    threads: threading.local = field(default_factory=threading.local)

    @property
    def stack(self) -> list[_CompiledGraph]:
        """The graphs that this thread is compiling, the innermost last."""
        return self.threads.__dict__.setdefault("stack", [])  # type: ignore[no-any-return]

    def fail(self, what: str, error: Exception) -> None:
        """Add the note `WHAT: ERROR` to the summary, unless it is there already.

        `what` says what was not done, such as "graph 0 was not checked". ERROR is the first line of the error's
        message, with its class before it unless it is a TorchDeltaError.
        """
        words = str(error).splitlines()[0] if str(error) else ""
        kind = "" if isinstance(error, TorchDeltaError) else f"{type(error).__name__}: "
        self.summary.note(f"{what}: {kind}{words}".removesuffix(": "))

    def take(self, chain: Chain) -> None:
        """Count the chain of a phase that is over, and keep it with the graph that this thread is compiling.

        A chain without changes is only counted. If this thread is not compiling a graph, a note says that it is not
        checked.
        """
        is_changed = len(chain.versions) > 1
        with self.lock:
            self.summary.passes += chain.passes
            self.summary.graphs += 1
            self.summary.changed += is_changed
            if is_changed and not self.stack:
                self.summary.note(f"{chain.phase} passes of a graph that is not called in this process: not checked")
            elif is_changed:
                self.stack[-1].chains.append(chain)

    def compile_program(
        self, compile_module: Callable[[], Callable[..., Any]], module: GraphModule
    ) -> Callable[..., Any]:
        """Compile a captured graph; return a callable that runs it, and judges its pre-grad passes in the first call.

        The first call is the first with values. `compile_module` compiles `module`. If no pre-grad pass changed the
        graph, the compiled callable itself is returned.
        """
        with self._compiling(lambda: self._begin_program(module)) as program:
            compiled = compile_module()
        if not any(chain.phase == inductor_passes.PRE_GRAD for chain in program.chains):
            return compiled
        call_boxed = self._judging_first_call(program, compiled, inductor_passes.PRE_GRAD)

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            return call_boxed(list(args))

        return call

    def compile_part(self, handed: HandedGraph) -> Callable[..., Any]:
        """Compile a graph of AOTAutograd's; return a callable that runs it, and judges its passes in the first call.

        The first call is the first with values. The compiled callable itself is returned if no pass changed the graph
        and it is not the forward of a program.
        """
        with self._compiling(lambda: self._begin_part(handed)) as part:
            compiled = handed.on()
        has_chains = part.chains or part.whole is not None
        return BoxedCall(self._judging_first_call(part, compiled)) if has_chains else compiled

    def _begin_program(self, module: GraphModule) -> _CompiledGraph:
        """Return the entry of a captured graph with the next number, and count it in `programs`."""
        with self.lock:
            number, self.programs = self.programs, self.programs + 1
        return _CompiledGraph(label=f"graph {number}", inputs=_names(module), number=number)

    def _begin_part(self, handed: HandedGraph) -> _CompiledGraph:
        """Return the entry of a forward, backward or inference graph, with the number of its program, or -1 if unknown.

        A backward that is compiled later gets the number of its forward. A forward also refers to the program that this
        thread is compiling, if any, as its `whole`.
        """
        whole = self.stack[-1] if self.stack else None
        with self.lock:
            # a backward may be compiled long after its forward, when its program is not on the stack any more
            number = self.numbers.setdefault(
                inductor_passes.current_graph_number(), whole.number if whole is not None else -1
            )
        return _CompiledGraph(
            label=f"graph {number} ({handed.level})" if number >= 0 else f"a {handed.level} graph",
            inputs=_names(handed.graph),
            number=number,
            whole=whole if handed.level == "forward" else None,
        )

    @contextmanager
    def _compiling(self, begin: Callable[[], _CompiledGraph]) -> Iterator[_CompiledGraph]:
        """Put the entry of a graph on this thread's stack while the body compiles the graph; yield the entry.

        `begin` builds the entry; if it raises, a note is added, and an empty entry takes its place. When the body has
        ended without an exception, the entry is added to `waiting` if it got chains.
        """
        try:
            compiled = begin()
        except Exception as error:
            self.fail("a graph could not be followed", error)
            compiled = _CompiledGraph(label="a graph", inputs=(), number=-1)
        self.stack.append(compiled)
        try:
            yield compiled
        finally:
            self.stack.remove(compiled)
        with self.lock:
            self.waiting += [compiled] if compiled.chains else []

    def _judging_first_call(
        self, compiled: _CompiledGraph, run_compiled: Callable[..., Any], phase: str = ""
    ) -> Callable[[list[Any]], Any]:
        """Return a callable that judges the passes of a graph in its first call with values, and runs it in every call.

        It takes its arguments in a list, which the compiled graph may empty. `phase` picks the chains to judge, all if
        it is empty. Nothing is judged once the watcher is closed. An error in judging becomes a note, and the graph is
        not judged again.
        """
        run = as_boxed(run_compiled)
        is_judged = False

        def call(args: list[Any]) -> Any:
            """Judge the first call with values, while the watcher is open; then run the compiled graph."""
            nonlocal is_judged
            if not is_judged and self.is_open and have_values(args):
                is_judged = True
                try:
                    self._judge_call(compiled, tuple(args), phase)
                except Exception as error:  # a mistake of ours must not cost the user the run
                    self.fail(f"{compiled.label} was not checked", error)
            # the list itself, because the compiled graph may empty it to free its inputs early
            return run(args)

        return call

    def _judge_call(self, compiled: _CompiledGraph, args: Sequence[Any], phase: str) -> None:
        """Judge the chains of versions of a graph on the arguments of a call, and add the results to the summary.

        The chains of `phase`, or all if it is empty, are popped, so that each is judged once. For a forward graph those
        of its program's joint graphs are popped too; only the last of them is judged, and a note counts the others.
        """
        with self.lock:
            ready = [(chain, compiled.label) for chain in compiled.pop_chains(phase)]
            if compiled.whole is not None:
                # the outermost joint graph is the last, because those inside of it are partitioned before
                joint = compiled.whole.pop_chains(inductor_passes.JOINT)
                ready += [(chain, f"{compiled.whole.label} (joint)") for chain in joint[-1:]]
                if joint[:-1]:
                    self.summary.note(
                        f"{compiled.whole.label}: {len(joint) - 1} joint graphs inside of another were not checked: "
                        "they are not called with values of their own"
                    )
            self.waiting = [each for each in self.waiting if each.chains]
            values = dict(zip(compiled.inputs, args, strict=True))
            for chain, label in ready:
                self._judge(chain, label, values)
        if ready:
            gc.collect()  # reference cycles that a check leaves hold the inputs of the call

    def _judge(self, chain: Chain, label: str, values: Mapping[str, Any]) -> None:
        """Judge one chain, and add its findings and notes to the summary; an exception becomes a note.

        The chain is counted as checked if every part of it could be judged. `values` has the inputs by the names of
        placeholders.
        """
        judge = ChainJudge(chain=chain, label=label, options=self.options)
        try:
            judge.judge(values)
            self.summary.checked += judge.is_checked
        except Exception as error:
            self.fail(f"{chain.phase} passes of {label} were not checked", error)
        self.summary.findings += judge.findings
        for note in judge.notes:
            self.summary.note(note)

    def close(self) -> None:
        """End the watch: drop the chains that were not judged, since their graphs were not called; a note counts them.

        If no graph was seen at all, a note says so. Later calls of compiled graphs are not judged.
        """
        with self.lock:
            self.is_open = False
            uncalled = [chain for compiled in self.waiting for chain in compiled.pop_chains()]
            self.waiting.clear()
            if uncalled:
                self.summary.note(
                    f"{len(uncalled)} graphs were not called while they were watched, and were not checked"
                )
            if not self.summary.graphs:
                self.summary.note(NOTHING_SEEN)


def _names(module: GraphModule) -> tuple[str, ...]:
    """Return the names of a graph's placeholders, in order."""
    return tuple(node.name for node in module.graph.nodes if node.op == "placeholder")
