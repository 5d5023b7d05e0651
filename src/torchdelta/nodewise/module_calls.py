"""Calls of modules: who called whom, with what, and how each is told from the others.

Which call of one model's modules does the work of which call of the other's.

By path first. Then what is of the same class and returns the same shapes, told apart by the weights it holds, by its
values, or by its place in the order of calls. Then by values alone: the same inputs and the same outputs. A class that
was matched so stands for the other class in the rest of the model.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchdelta._torch import tensors
from torchdelta._torch.process import runtime
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.leaves import Leaves, leaves_of
from torchdelta.compare.statistics import statistics_of
from torchdelta.program.copies import copy_together
from torchdelta.program.restore import restored
from torchdelta.program.sides import Side, state_holders
from torchdelta.records.location import NodeRecord

_POOL = 1 << 16


class TensorPrint(NamedTuple):
    """What is remembered of a tensor to know it again."""

    shape: tuple[int, ...]
    numbers: tuple[float, ...]
    """Its root mean square and two random projections."""
    exactness: float


Print = tuple[TensorPrint, ...]


@dataclass(kw_only=True, eq=False)
class ModuleCall:
    """One call of one module."""

    path: str
    index: int
    """How often the module had been called before."""
    order: int
    module: torch.nn.Module
    parent: ModuleCall | None
    signature: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    """The path and shape of each tensor that it returned; None of a call that did not return."""
    kinds: tuple[str, ...] = ()
    interface: tuple[tuple[tuple[int, ...], bool], ...] = ()
    """The shape of each tensor that it was given, and whether that is rounded; by place or by keyword is the same."""
    given: Print = ()
    returned: Print = ()

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__name__

    @property
    def key(self) -> tuple[str, int]:
        """What is told of it without looking at values."""
        return self.path, self.index

    @property
    def record(self) -> NodeRecord:
        """The call as another process can read it."""
        name = self.path or self.kind
        return NodeRecord(
            name=f"{name} (call {self.index + 1})" if self.index else name,
            op=self.kind,
            kinds=self.kinds,
            module_path=self.path,
            source_line=_source_line(self.module),
        )

    def is_within(self, other: ModuleCall) -> bool:
        """Tell whether the other was running when this one was made."""
        above = self.parent
        while above is not None and above is not other:
            above = above.parent
        return above is other


Entered = Callable[[ModuleCall, tuple[Any, ...], dict[str, Any]], None]
Left = Callable[[ModuleCall, tuple[Any, ...], dict[str, Any], Any], None]


@dataclass(kw_only=True)
class ModuleSurvey:
    """Hooks on every module that a side reaches, in place only while it is run through here."""

    side: Side
    entered: Entered
    left: Left
    calls: list[ModuleCall] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    running: list[ModuleCall] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, seed: int) -> Any:
        """Call the side on copies of its inputs; its state, generators and hooks are as before afterwards."""
        with runtime.preserved(), restored(holder for _, holder in state_holders(self.side.call)):
            args, kwargs = copy_together((self.side.args, self.side.kwargs), name="the inputs")
            self._hook()
            try:
                runtime.seed_everything(seed)
                return self.side.call(*args, **kwargs)
            finally:
                self._unhook()

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Take the hooks away for a while: a copy of a module would take them with it, and a call would be heard."""
        self._unhook()
        try:
            yield
        finally:
            self._hook()

    def _hook(self) -> None:
        for path, module in modules_of(self.side).items():
            # before and after all hooks of the user: what they change is a part of what the module does
            before, after = self._before(path), self._after()
            self.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _before(self, path: str) -> Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = ModuleCall(
                path=path,
                index=self.counts[path],
                order=len(self.calls),
                module=module,
                parent=self.running[-1] if self.running else None,
            )
            self.counts[path] += 1
            self.calls.append(call)
            self.running.append(call)
            self.entered(call, args, kwargs)

        return before

    def _after(self) -> Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self.running.pop()
            while call.module is not module:  # one inside raised, and the exception was caught
                call = self.running.pop()
            found = leaves_of(output, "outputs")
            shaped = {path: leaf for path, leaf in found.items() if isinstance(leaf, torch.Tensor)}
            call.signature = tuple((path, tuple(leaf.shape)) for path, leaf in shaped.items())
            call.kinds = tuple(f"{tensors.dtype_name(leaf.dtype)}{list(leaf.shape)}" for leaf in shaped.values())
            self.left(call, args, kwargs, output)

        return after


def modules_of(side: Side) -> dict[str, torch.nn.Module]:
    """Return every module that the side's callable reaches by its path, each once."""
    found: dict[str, torch.nn.Module] = {}
    for name, holder in state_holders(side.call):
        if isinstance(holder, torch.nn.Module):
            for inner, module in holder.named_modules():
                found.setdefault(f"{name}.{inner}".strip("."), module)
    return found


def survey(
    side: Side, seed: int, *, is_printed: Callable[[str], bool]
) -> tuple[list[ModuleCall], Any, Exception | None]:
    """Run a side and return its calls, its outputs, and what it raised; values are printed of the modules asked for."""
    outputs: Any = None
    failure: Exception | None = None

    def entered(call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = leaves_of((args, kwargs))
        shaped = [leaf for leaf in found.values() if isinstance(leaf, torch.Tensor)]
        call.interface = tuple(sorted((tuple(leaf.shape), is_inexact(leaf.dtype)) for leaf in shaped))
        if is_printed(call.path):
            call.given = print_of(found)

    def left(call: ModuleCall, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
        if is_printed(call.path):
            call.returned = print_of(leaves_of(output))

    boundaries = ModuleSurvey(side=side, entered=entered, left=left)
    try:
        outputs = boundaries.run(seed)
    except Exception as error:
        failure = error
    return boundaries.calls, outputs, failure


def print_of(leaves: Leaves) -> Print:
    """Reduce the tensors among leaves to numbers that equal values share, and others by luck only."""
    return tuple(
        _print_of_tensor(leaf)
        for leaf in leaves.values()
        if isinstance(leaf, torch.Tensor) and tensors.has_own_buffer(leaf)
    )


def is_near(first: Print, second: Print) -> bool:
    """Tell whether two prints may be of the same values, rounded differently."""
    if not first or len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return False
        tolerance = max(one.exactness, other.exactness) * max(one.numbers[0], other.numbers[0])
        if any(not abs(ours - theirs) <= tolerance for ours, theirs in zip(one.numbers, other.numbers, strict=True)):
            return False
    return True


def state_prints(modules: dict[str, torch.nn.Module]) -> dict[int, tuple[str, ...]]:
    """Return what each module holds, parameters and buffers of all inside it, whatever their names are."""
    sums: dict[int, str] = {}

    def checksum(tensor: torch.Tensor) -> str:
        if id(tensor) not in sums:
            sums[id(tensor)] = statistics_of(tensor).checksum if tensors.has_own_buffer(tensor) else ""
        return f"{tuple(tensor.shape)} {sums[id(tensor)]}"

    return {
        id(module): tuple(sorted(checksum(tensor) for tensor in (*module.parameters(), *module.buffers())))
        for module in modules.values()
    }


def _print_of_tensor(tensor: torch.Tensor) -> TensorPrint:
    whole = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(whole) if whole.is_complex() else whole).reshape(-1).to("cpu", torch.float64)
    exactness = math.sqrt(torch.finfo(tensor.dtype).eps) if tensor.dtype.is_floating_point else 1e-6
    size = float(flat.square().mean().sqrt()) if flat.numel() else 0.0
    generator = torch.Generator().manual_seed(0)
    projected = []
    for _ in range(2):
        pool = torch.randn(_POOL + 1, generator=generator, dtype=torch.float64)
        total = 0.0
        # the pool is shifted from piece to piece, so that no two rows that change places leave the same sum
        for start in range(0, flat.numel(), _POOL):
            piece = flat[start : start + _POOL]
            total += float(torch.dot(piece, pool.roll(start // _POOL)[: piece.numel()]))
        projected.append(total / math.sqrt(max(flat.numel(), 1)))
    return TensorPrint(tuple(tensor.shape), (size, *projected), exactness)


def _source_line(module: torch.nn.Module) -> str:
    forward = type(module).forward
    if (forward.__module__ or "torch").split(".")[0] == "torch":  # generated code has no module
        return ""
    try:
        file, (lines, number) = inspect.getsourcefile(forward), inspect.getsourcelines(forward)
    except (OSError, TypeError):
        return ""
    return f"{file}:{number}: {lines[0].strip()}"


@dataclass(frozen=True, kw_only=True)
class ModuleMatch:
    """Two calls, and how they were found to belong together: `path`, `name` or `value`."""

    reference: ModuleCall
    candidate: ModuleCall
    how: str

    @property
    def roots(self) -> frozenset[str]:
        """The paths of what both return; a call that raised would have returned what the other did."""
        sides = [call.signature for call in (self.reference, self.candidate) if call.signature is not None]
        paths = [frozenset(path for path, _ in side) for side in sides]
        return frozenset.intersection(*paths) if paths else frozenset()


@dataclass(kw_only=True)
class ModuleMatcher:
    """Matches the calls of two runs; `state` is what each module holds, by its id."""

    reference: Sequence[ModuleCall]
    candidate: Sequence[ModuleCall]
    state: dict[int, tuple[str, ...]]
    matches: list[ModuleMatch] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    same_class: dict[str, str] = field(default_factory=dict)
    """Classes of the candidate by those of the reference that they stand for."""

    def run(self) -> list[ModuleMatch]:
        """Return the matches in the order of the reference's calls."""
        self._by_path(lambda one, other: one.kind == other.kind)
        # what a call would have returned that raised, nobody knows
        self._by_path(lambda one, other: other.signature in (one.signature, None))
        self._by_name()
        self._by_value()
        self._learn_classes()
        self._by_name()
        return sorted(self.matches, key=lambda match: match.reference.order)

    def _by_path(self, agrees: Callable[[ModuleCall, ModuleCall], bool]) -> None:
        others = {call.key: call for call in self._free(self.candidate)}
        for call in self._free(self.reference):
            other = others.get(call.key)
            if other is not None and agrees(call, other):
                self._add(call, other, "path")

    def _by_name(self) -> None:
        self._in_groups(lambda call: self.state.get(id(call.module)) or None)
        for one, other in self._near(lambda one, other: self._class_of(one) == other.kind):
            self._add(one, other, "name")
        self._in_groups(lambda _: True)

    def _in_groups(self, trait: Callable[[ModuleCall], Hashable]) -> None:
        """Match what is of one class, shape and trait, in order, where both sides have as many of it."""
        groups: dict[Hashable, tuple[list[ModuleCall], list[ModuleCall]]] = defaultdict(lambda: ([], []))
        for side, calls in enumerate((self.reference, self.candidate)):
            for call in self._free(calls):
                if (found := trait(call)) is not None and call.signature is not None:
                    kind = call.kind if side else self._class_of(call)
                    groups[kind, call.signature, found][side].append(call)
        for ours, theirs in groups.values():
            if len(ours) == len(theirs):
                for one, other in zip(ours, theirs, strict=True):
                    self._add(one, other, "name")

    def _by_value(self) -> None:
        for one, other in self._near(lambda *_: True):
            self._add(one, other, "value")

    def _near(self, agrees: Callable[[ModuleCall, ModuleCall], bool]) -> list[tuple[ModuleCall, ModuleCall]]:
        """Return pairs with the same inputs and outputs, where nothing else has them."""
        ours, theirs = self._free(self.reference), self._free(self.candidate)
        partners = {
            id(one): [other for other in theirs if agrees(one, other) and _is_same_function(one, other)] for one in ours
        }
        wanted = [id(other) for found in partners.values() for other in found]
        return [
            (one, partners[id(one)][0])
            for one in ours
            if len(partners[id(one)]) == 1 and wanted.count(id(partners[id(one)][0])) == 1
        ]

    def _learn_classes(self) -> None:
        found: dict[str, set[str]] = defaultdict(set)
        for match in self.matches:
            found[match.reference.kind].add(match.candidate.kind)
        self.same_class = {kind: next(iter(others)) for kind, others in found.items() if len(others) == 1}

    def _class_of(self, call: ModuleCall) -> str:
        return self.same_class.get(call.kind, call.kind)

    def _free(self, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
        return [call for call in calls if id(call) not in self.taken]

    def _add(self, reference: ModuleCall, candidate: ModuleCall, how: str) -> None:
        self.taken |= {id(reference), id(candidate)}
        self.matches.append(ModuleMatch(reference=reference, candidate=candidate, how=how))


def _is_same_function(one: ModuleCall, other: ModuleCall) -> bool:
    return is_near(one.given, other.given) and is_near(one.returned, other.returned)
