"""What passes made of a graph, one version after the other, judged on the inputs of a real call.

The last version is held against the first; only where they differ are those between looked at, for the first pass that
introduces a difference.

Watch inductor's passes in the user's own run: the first that changes the numbers is named, and nothing else changes.

While a graph is compiled only copies of it are kept, one for each pass that changed it. They are judged when what was
compiled is first called, and dropped then. Whatever the watcher itself raises becomes a note.
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
from torchdelta._torch.compile.seams import Boxed, HandedGraph, as_boxed
from torchdelta._torch.graphs.nodes import talks_to_others
from torchdelta._torch.modes import outside
from torchdelta._torch.process import runtime
from torchdelta.compare.policy_parser import parse
from torchdelta.errors import TorchDeltaError
from torchdelta.passes.real_calls import TALKS, have_values, inputs_of
from torchdelta.passes.succession import GraphVersion, Succession
from torchdelta.program.stages import cotangent_for
from torchdelta.records.case import CheckOptions
from torchdelta.records.passes import PassFinding, PassSummary
from torchdelta.records.report import reason_of
from torchdelta.records.verdict import Verdict

PACKED = "weights are packed for a library, and can be read by nobody else,"


@dataclass(kw_only=True)
class ChainJudge:
    """Judges one chain; what it finds and what it cannot tell is in its lists."""

    chain: Chain
    label: str
    """Which graph it is."""
    options: CheckOptions
    """How two graphs are compared."""
    findings: list[PassFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_checked: bool = True
    """Whether an answer was found for all of it."""

    def judge(self, values: Mapping[str, Any]) -> None:
        """Judge on what the graph is called with, by the names of its inputs."""
        if talks_to_others(self.chain.versions[0].built):
            self._leave_open(f"not checked: {TALKS}")
            return
        with _aside(self.chain.phase):
            inputs = self._inputs(values)
            for part in self._comparable():
                if len(part) > 1:
                    self._judge_part(part, inputs)

    def _judge_part(self, part: list[Version], inputs: tuple[Any, ...]) -> None:
        options = self.options
        if self.chain.phase != inductor_passes.PRE_GRAD:
            # who shares memory with whom is settled by AOTAutograd, outside of its graphs
            options = replace(options, stages=("forward",), ignore=("aliasing",))
        succession = Succession(original=part[0].built, inputs=inputs, options=options)
        report = succession.held(part[-1].built)
        if report.verdict is Verdict.EQUIVALENT:
            return
        before, skipped = part[0], list[str]()
        for after in part[1:]:
            step = succession.step(before.built, after.built)
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

    def _finding(self, skipped: list[str], name: str, step: GraphVersion) -> PassFinding:
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
        """Yield versions in a row that draw the same random numbers; who draws others cannot be held against them."""
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
        """Return what the graphs are called with; a joint graph gets random tangents too."""
        chain, first = self.chain, self.chain.versions[0].inputs
        names = [node.name for node in first]
        for version in chain.versions[1:]:
            if [node.name for node in version.inputs] != names:
                raise TorchDeltaError(f"{version.name} changes what the graph is called with")
        given = dict(zip(values, inputs_of([*values.values()]), strict=True))
        for node in first:
            is_tensor = isinstance(node.meta.get("val", node.meta.get("example_value")), torch.Tensor)
            if node.name not in given and chain.phase == inductor_passes.JOINT:
                room = inductor_passes.room_for(node, first, given)
                given[node.name] = room.copy_(cotangent_for(room, node.name, self.options.seed))
            elif node.name not in given or (is_tensor and given[node.name] is None):
                # a compiler that makes constants of the parameters drops them
                raise TorchDeltaError(f"{node.name} is among its inputs, and is not there when it is called")
        return tuple(given[name] for name in names)

    def _leave_open(self, why: str) -> None:
        self.is_checked = False
        self.notes.append(f"{self.chain.phase} passes of {self.label}: {why}")


@contextmanager
def _aside(phase: str) -> Iterator[None]:
    """Run graphs out of sight of the user's modes, and leave generators, flags and settings as they were."""
    is_recorded = (
        phase == inductor_passes.PRE_GRAD and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    )
    casts = nullcontext() if phase == inductor_passes.PRE_GRAD else inductor_passes.without_autocast()
    with (
        runtime.preserved(),
        torch.set_grad_enabled(is_recorded),
        outside.as_nobody(),
        casts,
        stances.eager_here(),
    ):
        yield


NOTHING_SEEN = (
    "no pass was seen: nothing was compiled by inductor in here; what was compiled before is not compiled again"
)


@contextmanager
def watch_passes(*, policy: str = "noise", seed: int = 0) -> Iterator[PassSummary]:
    """Watch every pass that inductor runs over graphs that are compiled while the context is open.

    `findings` has each pass behind which a graph computes something else on the inputs of its first call, with the
    node; `notes` says what could not be checked; both are complete when the context is left. The run itself is as
    without, and nothing in here breaks it.
    """
    parse(policy)  # what is misspelt is said before anything runs
    watcher = _Watcher(watched=PassSummary(), options=CheckOptions(policy=policy, seed=seed))
    with ExitStack() as stack:
        stack.enter_context(inductor_passes.noting(watcher.take, watcher.fail))
        stack.enter_context(aot.intercepting(watcher.at_seam))
        stack.enter_context(inductor_passes.around_programs(watcher.around))
        stack.callback(watcher.close)
        yield watcher.watched


@dataclass(kw_only=True, eq=False)
class _Compiled:
    """A graph on its way through the compiler, and what passes made of it."""

    label: str
    inputs: tuple[str, ...]
    """The names of its placeholders."""
    number: int
    whole: _Compiled | None = None
    """Of a forward graph, the program whose joint graph it was a part of."""
    chains: list[Chain] = field(default_factory=list)

    def taken(self, phase: str = "") -> list[Chain]:
        """Let go of the chains of a phase, or of all, and return them."""
        found = [chain for chain in self.chains if not phase or chain.phase == phase]
        self.chains = [chain for chain in self.chains if chain not in found]
        return found


@dataclass(kw_only=True, eq=False)
class _Watcher:
    watched: PassSummary
    options: CheckOptions
    is_open: bool = True
    waiting: list[_Compiled] = field(default_factory=list)
    """Those with something to judge."""
    numbers: dict[int | None, int] = field(default_factory=dict)
    """Which program it is that AOTAutograd has a number for."""
    programs: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    threads: threading.local = field(default_factory=threading.local)

    @property
    def stack(self) -> list[_Compiled]:
        """What this thread is compiling, the innermost last."""
        return self.threads.__dict__.setdefault("stack", [])  # type: ignore[no-any-return]

    def fail(self, what: str, error: Exception) -> None:
        """Note what the watcher could not do."""
        words = str(error).splitlines()[0] if str(error) else ""
        kind = "" if isinstance(error, TorchDeltaError) else f"{type(error).__name__}: "
        self.watched.note(f"{what}: {kind}{words}".removesuffix(": "))

    def take(self, chain: Chain) -> None:
        """Keep what the passes of a phase made of a graph, for when there are inputs."""
        is_changed = len(chain.versions) > 1
        with self.lock:
            self.watched.passes += chain.passes
            self.watched.graphs += 1
            self.watched.changed += is_changed
            if is_changed and not self.stack:
                self.watched.note(f"{chain.phase} passes of a graph that nobody calls in this process: not checked")
            elif is_changed:
                self.stack[-1].chains.append(chain)

    def around(self, compiled: Callable[[], Callable[..., Any]], module: GraphModule) -> Callable[..., Any]:
        """Compile a captured graph; the first call of what comes of it has the inputs of its pre-grad graph."""
        with self._compiling(lambda: self._program(module)) as whole:
            made = compiled()
        if not any(chain.phase == inductor_passes.PRE_GRAD for chain in whole.chains):
            return made
        look = self._looking(whole, made, inductor_passes.PRE_GRAD)

        @functools.wraps(made)
        def program(*args: Any) -> Any:
            return look(list(args))

        return program

    def at_seam(self, handed: HandedGraph) -> Callable[..., Any]:
        """Compile a graph of AOTAutograd's; the first call of what comes of it has its inputs."""
        with self._compiling(lambda: self._part(handed)) as part:
            made = handed.on()
        return Boxed(self._looking(part, made)) if part.chains or part.whole is not None else made

    def _program(self, module: GraphModule) -> _Compiled:
        with self.lock:
            number, self.programs = self.programs, self.programs + 1
        return _Compiled(label=f"graph {number}", inputs=_names(module), number=number)

    def _part(self, handed: HandedGraph) -> _Compiled:
        whole = self.stack[-1] if self.stack else None
        with self.lock:
            # a backward may be compiled long after its forward, and by then nobody else knows whose it is
            number = self.numbers.setdefault(
                inductor_passes.number_of_graph(), whole.number if whole is not None else -1
            )
        return _Compiled(
            label=f"graph {number} ({handed.level})" if number >= 0 else f"a {handed.level} graph",
            inputs=_names(handed.graph),
            number=number,
            whole=whole if handed.level == "forward" else None,
        )

    @contextmanager
    def _compiling(self, begin: Callable[[], _Compiled]) -> Iterator[_Compiled]:
        try:
            compiled = begin()
        except Exception as error:
            self.fail("a graph could not be followed", error)
            compiled = _Compiled(label="a graph", inputs=(), number=-1)
        self.stack.append(compiled)
        try:
            yield compiled
        finally:
            self.stack.remove(compiled)
        with self.lock:
            self.waiting += [compiled] if compiled.chains else []

    def _looking(self, compiled: _Compiled, made: Callable[..., Any], phase: str = "") -> Callable[[list[Any]], Any]:
        run = as_boxed(made)
        has_looked = False

        def call(args: list[Any]) -> Any:
            nonlocal has_looked
            if not has_looked and self.is_open and have_values(args):
                has_looked = True
                try:
                    self._look(compiled, tuple(args), phase)
                except Exception as error:  # a mistake of ours must not cost the user the run
                    self.fail(f"{compiled.label} was not checked", error)
            # the list itself: who gets it may empty it, and free what nobody needs any more
            return run(args)

        return call

    def _look(self, compiled: _Compiled, args: Sequence[Any], phase: str) -> None:
        with self.lock:
            ready = [(chain, compiled.label) for chain in compiled.taken(phase)]
            if compiled.whole is not None:
                # the outermost is the last: those inside of it are parted before
                joint = compiled.whole.taken(inductor_passes.JOINT)
                ready += [(chain, f"{compiled.whole.label} (joint)") for chain in joint[-1:]]
                if joint[:-1]:
                    self.watched.note(
                        f"{compiled.whole.label}: {len(joint) - 1} joint graphs inside of another were not checked: "
                        "nobody calls them with values of their own"
                    )
            self.waiting = [each for each in self.waiting if each.chains]
            values = dict(zip(compiled.inputs, args, strict=True))
            for chain, label in ready:
                self._judge(chain, label, values)
        if ready:
            gc.collect()  # what a check leaves in cycles holds what the call was given

    def _judge(self, chain: Chain, label: str, values: Mapping[str, Any]) -> None:
        judge = ChainJudge(chain=chain, label=label, options=self.options)
        try:
            judge.judge(values)
            self.watched.checked += judge.is_checked
        except Exception as error:
            self.fail(f"{chain.phase} passes of {label} were not checked", error)
        self.watched.findings += judge.findings
        for note in judge.notes:
            self.watched.note(note)

    def close(self) -> None:
        """Drop what was never called, and say so."""
        with self.lock:
            self.is_open = False
            left = [chain for compiled in self.waiting for chain in compiled.taken()]
            self.waiting.clear()
            if left:
                self.watched.note(f"{len(left)} graphs were not called while they were watched, and were not checked")
            if not self.watched.graphs:
                self.watched.note(NOTHING_SEEN)


def _names(module: GraphModule) -> tuple[str, ...]:
    return tuple(node.name for node in module.graph.nodes if node.op == "placeholder")
