"""Calls of modules: record which modules a run calls, and match the calls of two models.

A model that is not a graph can still be observed at the boundaries of its modules. `survey` runs a side with hooks on
every module and returns a `ModuleCall` for each call. `ModuleMatcher` then finds the pairs of calls that do the same
work:

1. by path, if class or output shapes agree;
2. by name: the same class and output shapes, told apart by the weights, by the values, or by the order of the calls;
3. by value alone: the same inputs and the same outputs, whatever the class. Two classes that were matched this way
   count as the same class in the rest of the model, and step 2 is repeated.

Values are not kept. A `Fingerprint` of a few numbers is enough to recognise them. Start with `survey` and
`ModuleMatcher.run`.
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

_POOL_SIZE = 1 << 16
"""Random numbers that a fingerprint projects on, used again and again in shifted order."""


class TensorFingerprint(NamedTuple):
    """A few numbers by which the values of a tensor can be recognised."""

    shape: tuple[int, ...]
    numbers: tuple[float, ...]
    """The root mean square and two random projections."""
    exactness: float
    """The relative difference up to which two fingerprints are taken for the same values."""


Fingerprint = tuple[TensorFingerprint, ...]


@dataclass(kw_only=True, eq=False)
class ModuleCall:
    """One call of one module."""

    path: str
    index: int
    """The number of earlier calls of the same module."""
    order: int
    """The number of earlier calls of all modules."""
    module: torch.nn.Module
    parent: ModuleCall | None
    signature: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    """The path and shape of each tensor that the call returned; None if it did not return."""
    kinds: tuple[str, ...] = ()
    interface: tuple[tuple[tuple[int, ...], bool], ...] = ()
    """The shape of each input tensor and whether its dtype is rounded, sorted, so that keywords do not matter."""
    inputs: Fingerprint = ()
    outputs: Fingerprint = ()

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    @property
    def key(self) -> tuple[str, int]:
        """The path and index, which identify a call without its values."""
        return self.path, self.index

    @property
    def record(self) -> NodeRecord:
        """The call as a plain record, named by its path, or by its class if the path is empty.

        From the second call of a module on, the name has the number of the call: `norm (call 2)`.
        """
        name = self.path or self.kind
        return NodeRecord(
            name=f"{name} (call {self.index + 1})" if self.index else name,
            op=self.kind,
            kinds=self.kinds,
            module_path=self.path,
            source_line=_source_line(self.module),
        )

    def is_within(self, other: ModuleCall) -> bool:
        """Tell whether this call happened inside of the other one, directly or not; no call is within itself."""
        above = self.parent
        while above is not None and above is not other:
            above = above.parent
        return above is other


def _source_line(module: torch.nn.Module) -> str:
    """Return the first line of a module's `forward`, or of its decorator, as `file:number: text`.

    Empty for torch's own code and for code without source.
    """
    forward = type(module).forward
    if (forward.__module__ or "torch").split(".")[0] == "torch":  # generated code has no module
        return ""
    try:
        file, (lines, number) = inspect.getsourcefile(forward), inspect.getsourcelines(forward)
    except (OSError, TypeError):
        return ""
    return f"{file}:{number}: {lines[0].strip()}"


OnEnter = Callable[[ModuleCall, tuple[Any, ...], dict[str, Any]], None]
"""Is called before a module runs, with the call and its arguments."""
OnReturn = Callable[[ModuleCall, tuple[Any, ...], dict[str, Any], Any], None]


def survey(
    side: Side, seed: int, *, needs_values: Callable[[str], bool]
) -> tuple[list[ModuleCall], Any, Exception | None]:
    """Run a side and return its module calls, its outputs, and the exception that it raised, or None.

    `needs_values` tells for which paths the calls get fingerprints of their inputs and outputs. After an exception the
    outputs are None, and the calls are those that were begun. The side's inputs and state, and the generators, are left
    as they were.
    """
    outputs: Any = None
    failure: Exception | None = None

    def on_enter(call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = leaves_of((args, kwargs))
        tensor_leaves = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]
        call.interface = tuple(sorted((tuple(leaf.shape), is_inexact(leaf.dtype)) for leaf in tensor_leaves))
        if needs_values(call.path):
            call.inputs = fingerprint(leaves)

    def on_return(call: ModuleCall, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
        if needs_values(call.path):
            call.outputs = fingerprint(leaves_of(output))

    module_survey = ModuleSurvey(side=side, on_enter=on_enter, on_return=on_return)
    try:
        outputs = module_survey.run(seed)
    except Exception as error:
        failure = error
    return module_survey.calls, outputs, failure


@dataclass(kw_only=True)
class ModuleSurvey:
    """Hooks on every module that a side reaches, which exist only while `run` runs the side."""

    side: Side
    on_enter: OnEnter
    on_return: OnReturn
    calls: list[ModuleCall] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    running: list[ModuleCall] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, seed: int) -> Any:
        """Call the side on copies of its inputs, with hooks on all its modules, and return its outputs.

        Each module call is added to `calls`. The generators are seeded with `seed`. Afterwards they and the side's
        state are put back and the hooks are removed, even if the side raises.
        """
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
        """Run the block without the hooks, so that copies of modules have none and further calls are not recorded."""
        self._unhook()
        try:
            yield
        finally:
            self._hook()

    def _hook(self) -> None:
        """Put hooks on every module of the side, before and after the user's own, and add the handles to `handles`."""
        for path, module in modules_of(self.side).items():
            # outside of the user's own hooks, because their changes are a part of the module's work
            pre_hook, post_hook = self._pre_hook(path), self._post_hook()
            self.handles.append(module.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=True))
            self.handles.append(module.register_forward_hook(post_hook, with_kwargs=True))

    def _unhook(self) -> None:
        """Remove all hooks from the modules, and empty `handles`."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _pre_hook(self, path: str) -> Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """Return a hook for the module at this path that adds each call to `calls` before it runs.

        The innermost call that runs at that time becomes its parent. Then `on_enter` is called.
        """

        def pre_hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            self.on_enter(call, args, kwargs)

        return pre_hook

    def _post_hook(self) -> Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        """Return a hook that adds shapes and kinds of the outputs to a call after it ran, and calls `on_return`.

        It ends the call in `running`, and also those inside of it that raised.
        """

        def post_hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self.running.pop()
            while call.module is not module:  # one inside raised, and the exception was caught
                call = self.running.pop()
            leaves = leaves_of(output, "outputs")
            tensor_leaves = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
            call.signature = tuple((path, tuple(leaf.shape)) for path, leaf in tensor_leaves.items())
            call.kinds = tuple(f"{tensors.dtype_name(leaf.dtype)}{list(leaf.shape)}" for leaf in tensor_leaves.values())
            self.on_return(call, args, kwargs, output)

        return post_hook


def modules_of(side: Side) -> dict[str, torch.nn.Module]:
    """Return every module that the side's callable reaches, nested ones too, by path; of two at one path, the first."""
    modules: dict[str, torch.nn.Module] = {}
    for name, holder in state_holders(side.call):
        if isinstance(holder, torch.nn.Module):
            for inner, module in holder.named_modules():
                modules.setdefault(f"{name}.{inner}".strip("."), module)
    return modules


@dataclass(frozen=True, kw_only=True)
class ModuleMatch:
    """Two calls that do the same work, and the evidence: `path`, `name` or `value`."""

    reference: ModuleCall
    candidate: ModuleCall
    how: str

    @property
    def roots(self) -> frozenset[str]:
        """The paths of the tensors that both calls return; of a call that raised, those of the other one."""
        sides = [call.signature for call in (self.reference, self.candidate) if call.signature is not None]
        paths = [frozenset(path for path, _ in side) for side in sides]
        return frozenset.intersection(*paths) if paths else frozenset()


@dataclass(kw_only=True)
class ModuleMatcher:
    """Matches the calls of two runs, the surest evidence first."""

    reference: Sequence[ModuleCall]
    candidate: Sequence[ModuleCall]
    state: dict[int, tuple[str, ...]]
    """The `state_fingerprints` of all modules of both sides."""
    matches: list[ModuleMatch] = field(default_factory=list)
    matched_ids: set[int] = field(default_factory=set)
    same_class: dict[str, str] = field(default_factory=dict)
    """The candidate's class that takes the place of a class of the reference, by name."""

    def run(self) -> list[ModuleMatch]:
        """Match the calls of both sides, and return the matches in the order of the reference's calls.

        Calls of the same path and number come first, if their classes or output shapes agree or the candidate's call
        raised. Then calls are matched by class and output shapes, and then by values alone. From these matches it is
        learnt which classes correspond, and the step by class is repeated.
        """
        self._match_by_path(lambda one, other: one.kind == other.kind)
        # the outputs of a call that raised are not known, so they cannot disagree
        self._match_by_path(lambda one, other: other.signature in (one.signature, None))
        self._match_by_name()
        self._match_by_value()
        self._learn_classes()
        self._match_by_name()
        return sorted(self.matches, key=lambda match: match.reference.order)

    def _match_by_path(self, agrees: Callable[[ModuleCall, ModuleCall], bool]) -> None:
        """Match unmatched calls of the same path and index if `agrees(reference's call, candidate's call)` holds."""
        others = {call.key: call for call in self._unmatched(self.candidate)}
        for call in self._unmatched(self.reference):
            other = others.get(call.key)
            if other is not None and agrees(call, other):
                self._add(call, other, "path")

    def _match_by_name(self) -> None:
        """Match unmatched calls of the same class: by weights and output shapes, by values, and by output shapes alone.

        A class of the reference counts as its partner in `same_class`, if it has one there. `_match_groups` and
        `_close_pairs` say which calls are left out.
        """
        self._match_groups(lambda call: self.state.get(id(call.module)) or None)
        for one, other in self._close_pairs(lambda one, other: self._class_of(one) == other.kind):
            self._add(one, other, "name")
        self._match_groups(lambda _: True)

    def _match_groups(self, trait: Callable[[ModuleCall], Hashable]) -> None:
        """Match unmatched calls with the same class, output shapes and trait, in the order of the calls.

        They are matched only if both sides have equally many of them. A call whose `trait` is None, or that did not
        return, is left out. A class of the reference counts as its partner in `same_class`, if it has one there.
        """
        groups: dict[Hashable, tuple[list[ModuleCall], list[ModuleCall]]] = defaultdict(lambda: ([], []))
        for side, calls in enumerate((self.reference, self.candidate)):
            for call in self._unmatched(calls):
                if (key := trait(call)) is not None and call.signature is not None:
                    kind = call.kind if side else self._class_of(call)
                    groups[kind, call.signature, key][side].append(call)
        for ours, theirs in groups.values():
            if len(ours) == len(theirs):
                for one, other in zip(ours, theirs, strict=True):
                    self._add(one, other, "name")

    def _match_by_value(self) -> None:
        """Match unmatched calls of any class whose inputs and outputs have close fingerprints (`_close_pairs`)."""
        for one, other in self._close_pairs(lambda *_: True):
            self._add(one, other, "value")

    def _close_pairs(self, agrees: Callable[[ModuleCall, ModuleCall], bool]) -> list[tuple[ModuleCall, ModuleCall]]:
        """Return the unmatched pairs for which `agrees` holds and whose inputs and outputs have close fingerprints.

        A call that fits more than one partner is left out, on either side. A call without fingerprints fits none.
        """
        ours, theirs = self._unmatched(self.reference), self._unmatched(self.candidate)
        partners = {
            id(one): [other for other in theirs if agrees(one, other) and _is_same_function(one, other)] for one in ours
        }
        all_partners = [id(other) for candidates in partners.values() for other in candidates]
        return [
            (one, partners[id(one)][0])
            for one in ours
            if len(partners[id(one)]) == 1 and all_partners.count(id(partners[id(one)][0])) == 1
        ]

    def _learn_classes(self) -> None:
        """Replace `same_class` by a new dict, from classes of the reference to classes of the candidate.

        It has each class of the reference whose matched calls all have partners of one class.
        """
        partner_kinds: dict[str, set[str]] = defaultdict(set)
        for match in self.matches:
            partner_kinds[match.reference.kind].add(match.candidate.kind)
        self.same_class = {kind: next(iter(others)) for kind, others in partner_kinds.items() if len(others) == 1}

    def _class_of(self, call: ModuleCall) -> str:
        """Return the class of a reference's call, or the candidate's class that takes its place in `same_class`."""
        return self.same_class.get(call.kind, call.kind)

    def _unmatched(self, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
        return [call for call in calls if id(call) not in self.matched_ids]

    def _add(self, reference: ModuleCall, candidate: ModuleCall, how: str) -> None:
        self.matched_ids |= {id(reference), id(candidate)}
        self.matches.append(ModuleMatch(reference=reference, candidate=candidate, how=how))


def _is_same_function(one: ModuleCall, other: ModuleCall) -> bool:
    """Tell whether the inputs of two calls have close fingerprints, and their outputs too."""
    return is_close_fingerprint(one.inputs, other.inputs) and is_close_fingerprint(one.outputs, other.outputs)


def state_fingerprints(modules: dict[str, torch.nn.Module]) -> dict[int, tuple[str, ...]]:
    """Return the shapes and checksums of each module's parameters and buffers as sorted texts, by the module's id.

    Those of the modules inside of it are included. A tensor without plain memory has a shape and no checksum.
    """
    sums: dict[int, str] = {}

    def checksum(tensor: torch.Tensor) -> str:
        if id(tensor) not in sums:
            sums[id(tensor)] = statistics_of(tensor).checksum if tensors.has_own_buffer(tensor) else ""
        return f"{tuple(tensor.shape)} {sums[id(tensor)]}"

    return {
        id(module): tuple(sorted(checksum(tensor) for tensor in (*module.parameters(), *module.buffers())))
        for module in modules.values()
    }


def fingerprint(leaves: Leaves) -> Fingerprint:
    """Return a fingerprint of each tensor among leaves, by which its values can be recognised.

    Other leaves, and tensors without plain memory such as fake or sparse ones, are left out.
    """
    return tuple(
        _tensor_fingerprint(leaf)
        for leaf in leaves.values()
        if isinstance(leaf, torch.Tensor) and tensors.has_own_buffer(leaf)
    )


def is_close_fingerprint(first: Fingerprint, second: Fingerprint) -> bool:
    """Tell whether two fingerprints can be those of the same values, up to rounding.

    They must be of equally many tensors with the same shapes. Return False if there are no tensors, or if a number is
    NaN.
    """
    if not first or len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return False
        tolerance = max(one.exactness, other.exactness) * max(one.numbers[0], other.numbers[0])
        if any(
            not abs(number - other_number) <= tolerance
            for number, other_number in zip(one.numbers, other.numbers, strict=True)
        ):
            return False
    return True


def _tensor_fingerprint(tensor: torch.Tensor) -> TensorFingerprint:
    """Return the shape, root mean square and two random projections of a tensor, computed in float64.

    The random numbers are the same in every call. The exactness is the root of the dtype's epsilon, or 1e-6 for
    integers and complex numbers.
    """
    whole = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(whole) if whole.is_complex() else whole).reshape(-1).to("cpu", torch.float64)
    exactness = math.sqrt(torch.finfo(tensor.dtype).eps) if tensor.dtype.is_floating_point else 1e-6
    size = float(flat.square().mean().sqrt()) if flat.numel() else 0.0
    generator = torch.Generator().manual_seed(0)
    projections = []
    for _ in range(2):
        pool = torch.randn(_POOL_SIZE + 1, generator=generator, dtype=torch.float64)
        total = 0.0
        # the pool is shifted from piece to piece, so that two rows that change places change the sum
        for start in range(0, flat.numel(), _POOL_SIZE):
            piece = flat[start : start + _POOL_SIZE]
            total += float(torch.dot(piece, pool.roll(start // _POOL_SIZE)[: piece.numel()]))
        projections.append(total / math.sqrt(max(flat.numel(), 1)))
    return TensorFingerprint(tuple(tensor.shape), (size, *projections), exactness)
