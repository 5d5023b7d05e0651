"""Run one side through its stages, and record what each stage leaves behind.

- `forward`: the outputs; the inputs, parameters and buffers after the call; all other state that the call changed;
- `gradients`: those of every tensor that requires grad, under a seeded random cotangent for each differentiable value
  that the call left behind;
- `steps`: state and optimizer state after each optimizer step, and the gradients of the later steps.

An observation shares no memory with the side, with one exception: state that the run did not change is represented by
the original's tensor, which it still equals. That costs neither memory nor time. Unregistered state that the run did
not change is kept apart, in `untouched`, because there is much of it and few programs change any.

Start reading at `observe`; `_Observer.run` is the order of events.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from torchdelta import errors
from torchdelta._torch import tensors
from torchdelta._torch.process import runtime
from torchdelta.compare.judge import is_inexact
from torchdelta.compare.kernels import measure
from torchdelta.compare.leaves import Container, Leaves, leaves_of, step_to
from torchdelta.program.copies import Convert, copy_together
from torchdelta.program.examples import randomise
from torchdelta.program.hidden_state import GENERATORS, hidden_state
from torchdelta.program.sides import Side, registered_in
from torchdelta.program.unregistered import PLAIN, UnregisteredState, attributes_of, is_attribute, name_of
from torchdelta.registry import Registry

_ABSENT = Container("nothing")
"""Stands for state that a run has removed."""
_LATER = "the results of a later call"
"""Stands among the values that share memory with an output for what a later call or backward writes there."""

OptimizerFactory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimizer")
"""The optimizers of the `steps` stage, by name."""
OPTIMIZERS.add("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.01))
OPTIMIZERS.add("adamw", lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which stages to run, with which seed, iterations, steps and optimizer; the same for every side of a case."""

    stages: tuple[str, ...]
    seed: int
    iterations: int
    steps: int
    optimizer: OptimizerFactory
    loss: Loss | None = None
    differentiates_state: bool = True
    """Whether state and inputs that a call computed have cotangents, and not only its outputs."""
    cotangent_dtypes: Mapping[str, torch.dtype] | None = None
    """The dtypes in which cotangents are exact, by the path of what they are for; None: in that of the tensor itself.

    These are the reference's, so that other sides get the same numbers, whatever dtype they compute in.
    """
    further: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = ()
    """Other arguments and keywords of the program; each is one more iteration, behind those with random values."""


@dataclass
class Observation:
    """The results of one side: the leaves of each stage by path, and which of them share memory."""

    stages: dict[str, Leaves] = field(default_factory=dict)
    aliases: dict[str, frozenset[str]] = field(default_factory=dict)
    state_names: set[str] = field(default_factory=set)
    """The paths of all parameters, buffers and attributes of the side, also those that no stage records."""
    start_names: set[str] = field(default_factory=set)
    """The names that the side had before its run, of the same kinds as `state_names`."""
    other_starts: set[str] = field(default_factory=set)
    """Those of `state_names` that have other values before the run than in the program: another implementation's."""
    written: set[str] = field(default_factory=set)
    """The paths of parameters and buffers that a call or its backward changed."""
    untouched: dict[str, Leaves] = field(default_factory=dict)
    """Unregistered state and plain inputs that a stage left as they were, by stage and path."""
    draws_random: bool = False
    random_states: list[int] = field(default_factory=list)
    """The hash of the state in which each call left the process's random generators."""
    is_differentiable: bool = False
    cotangent_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtypes of the tensors that had a cotangent, by path."""

    @property
    def new_names(self) -> set[str]:
        """Those of `state_names` that the run itself made."""
        return self.state_names - self.start_names

    def complete(self, stage: str, paths: Iterable[str]) -> None:
        """Add the leaves at these paths from `untouched` to a stage; do nothing if the stage did not run.

        A path that the stage has already, or that is not among its untouched leaves, is skipped.
        """
        if stage in self.stages:
            leaves, untouched = self.stages[stage], self.untouched.get(stage, {})
            leaves.update({path: untouched[path] for path in paths if path in untouched and path not in leaves})


class SideFailed(Exception):
    """A side raised an exception: the stage and iteration, the exception, and the observation up to then."""

    def __init__(self, stage: str, iteration: int, observation: Observation, error: BaseException) -> None:
        """Keep the arguments as attributes; the message is made of the stage and the error."""
        super().__init__(f"{stage}: {type(error).__name__}: {errors.message_of(error)}")
        self.stage = stage
        self.iteration = iteration
        self.observation = observation
        self.error = error


Scope = Callable[[], AbstractContextManager[Any]]


Keeps = Callable[[str, str], bool]
"""Returns whether to record a leaf, given its stage and path."""
BeforeStep = Callable[[int, Mapping[str, torch.Tensor]], None]
"""Is called with a step's number and its gradients, by parameter name, before the optimizer takes the step."""


def observe(
    side: Side,
    plan: Plan,
    original: Side,
    scope: Scope = nullcontext,
    convert: Convert = lambda dtype: dtype,
    keeps: Keeps = lambda *_: True,
    before_step: BeforeStep = lambda *_: None,
    uncompiled_scope: Scope = nullcontext,
) -> Observation:
    """Run the side through the stages of the plan and return the observation. Raise SideFailed if the side raises.

    User code runs within `scope`; loss and optimizer, which no compiler is given, run within `uncompiled_scope` too.
    `original` is a side of the program that was not run; its tensors represent those that the run did not change.
    `convert` maps the original's dtypes to this side's. `keeps` tells by stage (`forward` or `gradients`) and path
    whether to record an input, parameter or buffer. `before_step` may change the gradients of an optimizer step in
    place.
    """
    return _Observer(side, plan, original, scope, convert, keeps, before_step, uncompiled_scope).run()


class _Observer:
    """Runs one side and fills its observation."""

    def __init__(
        self,
        side: Side,
        plan: Plan,
        original: Side,
        scope: Scope,
        convert: Convert,
        keeps: Keeps,
        before_step: BeforeStep,
        uncompiled_scope: Scope,
    ) -> None:
        """Keep the arguments of `observe`, copy the loss, and look up inputs and state before the run; run nothing.

        The inputs are those of the original. The state is that of the side's own start, or the original's without one.
        """
        self.side = side
        self.plan = plan
        self.original = original
        self.scope = scope
        self.convert = convert
        self.keeps = keeps
        self.before_step = before_step
        self.uncompiled_scope = uncompiled_scope
        self.loss = copy_together(plan.loss, name="the loss", convert=convert) if plan.loss else None
        self.start = side.start or original
        self.original_tensors = _tensors_in({**_inputs(original), **_registered(self.start)})
        # a side whose state has names of its own has other unregistered state than the original
        is_known = side.names is None or side.start is not None
        unrun = self.start.unrun if is_known else UnregisteredState()
        self.original_installed = unrun.installed
        self.original_unregistered = {**_plain_leaves(_inputs(original)), **unrun.leaves, **unrun.installed}
        self.given = original.args, original.kwargs
        """The user's inputs, or the last random ones, as they were before a call: steps take copies of them."""
        self.observation = Observation()
        self.iteration = 0
        self.unregistered: Leaves = {}
        """The side's unregistered state, and the plain values in its inputs, after the last call."""
        self.old_graphs: dict[int, Any] = {}
        """The autograd nodes of values that the side kept from earlier calls, by id."""
        self.returned: dict[str, torch.Tensor] = {}
        """The tensors that the last recorded call returned, by path: the caller may still read them."""

    def run(self) -> Observation:
        """Run all iterations of forward and gradients, then the optimizer steps, and return the observation.

        The first iteration has the given inputs, later ones random inputs, and the last ones those of `plan.further`;
        paths of all but the first begin with `iterations[N].`. Gradients and steps are left out if the plan does not
        have them, or if neither the loss nor a value that the call left behind requires grad. State that all sides
        share is put back at the end, even if SideFailed is raised.
        """
        try:
            return self._run()
        finally:
            self.original.unrun.shared.put_back()
            self.start.unrun.shared.put_back()

    def _run(self) -> Observation:
        """Run the stages of the plan in their order and return the observation; SideFailed if user code raises.

        The `start_names` of the observation are set first, and `other_starts` if the side has a start of its own.
        """
        unregistered = map(name_of, filter(is_attribute, self.original_unregistered))
        self.observation.start_names = {*registered_in(self.start.state), *unregistered}
        if self.side.start is not None:
            self.observation.other_starts = self._find_other_starts(self.side.start)
        for iteration in range(self.plan.iterations + len(self.plan.further)):
            # the first iteration has the user's own inputs, and its paths have no prefix
            prefix = f"iterations[{iteration}]." if iteration else ""
            self.iteration = iteration
            if iteration and self.plan.stages != ("forward",):
                self._clear_gradients()  # those of the last iteration are ours, and not the call's
            if iteration >= self.plan.iterations:
                self._take_inputs(*self.plan.further[iteration - self.plan.iterations])
            elif iteration:
                self.given = self._draw_inputs(iteration)
                self._take_inputs(*self.given)
            outputs = self._call("forward", self.plan.seed + iteration)
            self._record_forward(outputs, prefix)
            if self.plan.stages != ("forward",):
                self._backward("gradients", outputs, prefix)
            if "gradients" in self.plan.stages and self.observation.is_differentiable:
                self._record_gradients(prefix)
        if "steps" in self.plan.stages and self.observation.is_differentiable:
            self._take_steps()
        return self.observation

    def _leaves(self, stage: str) -> Leaves:
        """Return the dict of a stage's leaves in the observation; an empty one is added if the stage has none."""
        return self.observation.stages.setdefault(stage, {})

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Run the block within the scope, and wait for the device; raise SideFailed if user code in it raises.

        SideFailed has the stage `name`, the iteration and the observation so far.
        """
        try:
            with self.scope():
                yield
            runtime.synchronise()
        except errors.caught_from_user_code() as error:
            raise SideFailed(name, self.iteration, self.observation, error) from error

    def _call(self, stage: str, seed: int) -> Any:
        """Call the side with all generators seeded and return its outputs.

        Each call appends a hash of the generators' state after it to the observation's `random_states`, and sets
        `draws_random` if it drew random numbers. If it raises, SideFailed names the `stage`. Sets `old_graphs` before
        the call, and after it `unregistered`, which also has the flags of the process that the call changed. Notices
        outputs of an earlier call that it has overwritten.
        """
        nodes = (tensor.grad_fn for tensor in self._kept_tensors().values())
        self.old_graphs = {id(node): node for node in nodes if node is not None}
        runtime.seed_everything(seed)
        before = runtime.random_state()
        with self._stage(stage):
            flags = runtime.plain_flags()
            outputs = self.side.call(*self.side.args, **self.side.kwargs)
            changed = {name: flag for name, flag in runtime.plain_flags().items() if flag != flags[name]}
        after = runtime.random_state()
        self.observation.draws_random |= after != before
        self.observation.random_states.append(hash(after))
        # flags are state of the process, and the scope has put them back by now
        of_process = {f"process['{name}']": str(flag) for name, flag in changed.items()}
        self.unregistered = {**self._read_unregistered(), **of_process}
        self._notice_overwritten()
        return outputs

    def _notice_overwritten(self) -> None:
        """Add `_LATER` to the aliases of each output of the last recorded call that is not what it was."""
        leaves, aliases = self.observation.stages.get("forward", {}), self.observation.aliases
        for path, tensor in self.returned.items():
            if not tensors.has_same_bits(leaves[path], tensor):
                aliases[path] = aliases.get(path, frozenset()) | {_LATER}

    def _read_unregistered(self) -> Leaves:
        """Return the side's unregistered state as it is now, and the plain values in its inputs, by path.

        Plain values of installed packages that were not there before the run are left out, and those that are gone are
        as they were: a package may keep caches of its own.
        """
        now = self.side.reach()
        installed = {path: now.installed.get(path, value) for path, value in self.original_installed.items()}
        return {**_plain_leaves(_inputs(self.side)), **now.leaves, **installed}

    def _draw_inputs(self, iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the original's inputs with random values, drawn in the original's dtypes.

        Seed and iteration choose the values, so every side gets the same ones.
        """
        args, kwargs = copy_together((self.original.args, self.original.kwargs), name="the inputs")
        randomise((args, kwargs), seed=self.plan.seed + iteration)
        return args, kwargs

    def _take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replace the side's inputs by copies of other ones, converted from the original's dtypes.

        `original_tensors` and `original_unregistered` then have these inputs too, so that changes to them are noticed.
        """
        other = Side.of(self.original.call, args, kwargs)
        self.original_tensors = _tensors_in({**_inputs(other), **_registered(self.start)})
        self.original_unregistered = {**self.original_unregistered, **_plain_leaves(_inputs(other))}
        args, kwargs = copy_together((args, kwargs), name="the inputs", convert=self.convert)
        self.side = replace(self.side, args=args, kwargs=kwargs)

    def _find_other_starts(self, start: Side) -> set[str]:
        """Return the names, such as `buffers['mean']`, of state that has other values in `start` than in the program.

        State that only one of them has is left out.
        """
        return _names_of_differences(
            {**registered_in(self.original.state), **self.original.unrun.leaves},
            {**registered_in(start.state), **start.unrun.leaves},
        )

    def _record_forward(self, outputs: Any, prefix: str) -> None:
        """Record the outputs, the inputs and state after the call, and which outputs share memory with them.

        Inputs, parameters and buffers for which `keeps` returns False are left out; those that did not change are
        represented by the original's tensor. Plain inputs and unregistered state are recorded only if they changed.
        Gradients that the call itself left are recorded too. All paths begin with `prefix`. Adds to `aliases`,
        `state_names`, `written` and `untouched` of the observation, and sets `returned`.
        """
        leaves = self._leaves("forward")
        for path, value in {**leaves_of(outputs, "outputs"), **_attributes_in({"outputs": outputs})}.items():
            leaves[prefix + path] = _snapshot(value)
        around = _tensors_in(_inputs_and_state(self.side))
        for path, tensor in around.items():
            original = self.original_tensors.get(path)
            if self.keeps("forward", prefix + path):
                is_unchanged = self._is_unchanged(tensor, original)
                leaves[prefix + path] = original if is_unchanged else _snapshot(tensor)
                self.observation.written.update(() if is_unchanged else (path,))
        # a call may run a backward of its own
        for path, tensor in self._kept_tensors().items():
            if tensor.is_leaf and tensor.grad is not None:
                leaves.update(_snapshots(tensor.grad, f"{prefix}{path}.grad"))
        self.observation.state_names.update(registered_in(self.side.state))
        self._record_unregistered("forward", prefix, self.original_unregistered)
        kept = {path: leaf for path, leaf in self.unregistered.items() if isinstance(leaf, torch.Tensor)}
        returned = _tensors_in({"outputs": outputs})
        self.returned = {
            prefix + path: tensor.detach() for path, tensor in returned.items() if tensors.has_own_buffer(tensor)
        }
        aliases = _aliases(returned, around, kept)
        self.observation.aliases.update({prefix + path: others for path, others in aliases.items()})

    def _record_unregistered(self, stage: str, prefix: str, before: Leaves) -> None:
        """Record the unregistered state and plain inputs that are not as in `before`; list the rest in `untouched`.

        The state is that in `unregistered`, and is not read anew. Paths begin with `prefix`. State in `before` that was
        removed is recorded as `Container("nothing")`, unless an input has a tensor in its place now. The names of
        attributes are added to `state_names`.
        """
        leaves, untouched = self._leaves(stage), self.observation.untouched.setdefault(stage, {})
        for path, leaf in self.unregistered.items():
            if path in before and self._is_same(leaf, before[path]):
                untouched[prefix + path] = before[path]
            elif isinstance(leaf, torch.Tensor):
                leaves.update(_snapshots(leaf, prefix + path))
            else:
                leaves[prefix + path] = _snapshot(leaf)
        present = self.unregistered.keys() | _tensors_in(_inputs(self.side)).keys()
        removed = [path for path in before if path not in present]
        leaves.update({prefix + path: _ABSENT for path in removed})
        self.observation.state_names.update(map(name_of, filter(is_attribute, (*self.unregistered, *removed))))

    def _is_same(self, leaf: Any, original: Any) -> bool:
        """Tell whether a leaf equals the original's: a tensor by `_is_unchanged`, any other by `_is_equal`."""
        if isinstance(leaf, torch.Tensor):
            return isinstance(original, torch.Tensor) and self._is_unchanged(leaf, original)
        return _is_equal(leaf, original)

    def _kept_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors among the side's inputs and state, by path.

        Unregistered ones are those of `unregistered`, as it was read last.
        """
        unregistered = {path: leaf for path, leaf in self.unregistered.items() if isinstance(leaf, torch.Tensor)}
        return {**_tensors_in(_inputs_and_state(self.side)), **unregistered}

    def _is_unchanged(self, tensor: torch.Tensor, original: torch.Tensor | None) -> bool:
        """Tell whether a tensor equals the original's in values, dtype, shape, strides, device and requires_grad.

        The dtype to equal is the original's after `convert`. Return False without an original, and for tensors without
        a plain buffer.
        """
        return (
            original is not None
            and tensor.shape == original.shape
            and tensor.dtype == self.convert(original.dtype)
            and tensor.stride() == original.stride()
            and tensor.device == original.device
            and tensor.requires_grad == original.requires_grad
            and tensors.has_own_buffer(tensor)
            and tensors.has_own_buffer(original)
            # values of another dtype or with other bits may still be equal: NaN has many
            and (tensors.has_same_bits(original, tensor) or measure(original, tensor).mismatches == 0)
        )

    def _backward(self, stage: str, outputs: Any, prefix: str = "") -> None:
        """Run a backward from the loss, or from the `_roots` with a random cotangent each; return nothing.

        Gradients of the tensors that `_trained` returns are cleared first. `is_differentiable` of the observation
        becomes whether the loss or a root requires grad; if not, no backward runs. Seed, `prefix` and the root's path
        choose the cotangent. If user code raises, or the loss is not a tensor, SideFailed names the `stage`.
        """
        self._clear_gradients()
        if self.loss is not None:
            with self._stage(stage), self.uncompiled_scope():
                roots = {"loss": self.loss(outputs)}
                if not isinstance(roots["loss"], torch.Tensor):
                    raise TypeError(f"the loss is a {type(roots['loss']).__name__}, and has to be a tensor")
            cotangents = [torch.ones_like(roots["loss"])]
        else:
            roots = self._roots(outputs)
            cotangents = [self._cotangent(value, prefix + path) for path, value in roots.items()]
        self.observation.is_differentiable = any(root.requires_grad for root in roots.values())
        if self.observation.is_differentiable:
            with self._stage(stage):
                torch.autograd.backward(list(roots.values()), cotangents)
            self._notice_overwritten()

    def _clear_gradients(self) -> None:
        """Remove the gradients of the tensors that `_trained` returns."""
        for tensor in self._trained().values():
            tensor.grad = None

    def _cotangent(self, root: torch.Tensor, path: str) -> torch.Tensor:
        """Return the random cotangent of a root, exact in the dtype that the plan has for its path.

        A path that the plan's dtypes lack gets one that is exact in every dtype. The root's own dtype is recorded.
        """
        self.observation.cotangent_dtypes[path] = root.dtype
        dtypes = self.plan.cotangent_dtypes
        exact_in = root.dtype if dtypes is None else dtypes.get(path, COARSEST)
        return cotangent_for(root, path, self.plan.seed, exact_in)

    def _roots(self, outputs: Any) -> dict[str, torch.Tensor]:
        """Return the differentiable tensors that the last call left behind, by path.

        These are the outputs and, if the plan differentiates state, the tensors among inputs and state that the call
        computed. Of the latter, those that depend on the graph of an earlier call are left out, because its backward
        has run already.
        """
        returned = {path: leaf for path, leaf in leaves_of(outputs, "outputs").items() if _is_differentiable(leaf)}
        if not self.plan.differentiates_state:
            return returned
        kept = self._kept_tensors().items()
        computed = {path: tensor for path, tensor in kept if _is_differentiable(tensor) and not tensor.is_leaf}
        fresh = {path: tensor for path, tensor in computed.items() if not _reaches(tensor.grad_fn, self.old_graphs)}
        return {**returned, **fresh}

    def _record_gradients(self, prefix: str) -> None:
        """Record the gradients of the tensors that `_trained` returns, None without one, and what the backward changed.

        Inputs and state that it changed are recorded, parameters, buffers and tensor inputs only if `keeps` says so;
        those that it did not change are added to `untouched`. Also adds to `written` and `state_names`, and reads
        `unregistered` anew. Paths begin with `prefix`.
        """
        leaves = self._leaves("gradients")
        for path, tensor in self._trained().items():
            leaves.update(_snapshots(tensor.grad, f"{prefix}{path}.grad"))
        forward = {**self.observation.untouched["forward"], **self.observation.stages["forward"]}
        untouched = self.observation.untouched.setdefault("gradients", {})
        for path, tensor in _tensors_in(_inputs_and_state(self.side)).items():
            after_forward = forward.get(prefix + path, self.original_tensors.get(path))
            # a place in an input may have had a number before it got a tensor
            if isinstance(after_forward, torch.Tensor) and self._is_unchanged(tensor, after_forward):
                untouched[prefix + path] = after_forward
            elif self.keeps("gradients", prefix + path):
                leaves[prefix + path] = _snapshot(tensor)
                self.observation.written.add(path)
        before = {path: forward[prefix + path] for path in self.unregistered if prefix + path in forward}
        self.unregistered = self._read_unregistered()
        self._record_unregistered("gradients", prefix, before)

    def _trained(self) -> dict[str, torch.Tensor]:
        """Return the tensors among inputs and state that get a gradient, by path: leaves, and others that retain it."""
        kept = self._kept_tensors().items()
        return {
            path: tensor for path, tensor in kept if tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad)
        }

    def _take_steps(self) -> None:
        """Take the optimizer's steps; record gradients before each, and state and optimizer state after.

        The first step uses the gradients of the last iteration, which are recorded here only if the stage `gradients`
        is not planned; after further inputs they are computed anew. `before_step` may change the gradients after they
        are recorded. Unregistered state is recorded as it was after the last call, not after the step. Nothing happens
        if no parameter requires grad.
        """
        parameters = self.side.state.parameters
        trained = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad and tensor.is_leaf}
        if not trained:
            return
        with self._stage("steps"), self.uncompiled_scope():
            optimizer = self.plan.optimizer(list(trained.values()))
        leaves = self._leaves("steps")
        for step in range(self.plan.steps):
            # the first step uses the gradients of the last iteration, unless that had further inputs
            is_computed = bool(step or self.plan.further)
            if is_computed:
                self._take_inputs(*self.given)  # a call may have changed its inputs, such as a cache
                # the first step draws as the last iteration before the further ones did
                seed = self.plan.seed + self.plan.iterations + (step or -1)
                self._backward("steps", self._call("steps", seed))
            gradients = {name: tensor.grad for name, tensor in trained.items() if tensor.grad is not None}
            if is_computed or "gradients" not in self.plan.stages:
                leaves.update(_named_snapshots(gradients, f"steps[{step}].gradients"))
            self.before_step(step, gradients)
            with self._stage("steps"), self.uncompiled_scope():
                optimizer.step()
            state, now = _optimizer_state(optimizer, trained), self.side.state
            after = {"parameters": now.parameters, "buffers": now.buffers, "optimizer": state}
            for name, values in after.items():
                leaves.update(_named_snapshots(values, f"steps[{step}].{name}"))
            self._record_unregistered("steps", f"steps[{step}].", self.original_unregistered)


def _optimizer_state(optimizer: torch.optim.Optimizer, trained: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return an optimizer's state by the names of the trained parameters, in their order.

    An optimizer may have only some of them, in an order of its own. State of any other tensor goes by its place among
    the optimizer's parameters, and other entries go by their keys, or by `step_to` them.
    """
    names = {id(tensor): name for name, tensor in trained.items()}
    own = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for index, tensor in enumerate(own):
        names.setdefault(id(tensor), f"params[{index}]")
    state = {
        key if isinstance(key, str) else names.get(id(key), step_to(key, index)): entry
        for index, (key, entry) in enumerate(optimizer.state.items())
    }
    return {name: state[name] for name in (*trained, *state) if name in state}


COARSEST = torch.bfloat16
"""The values of this dtype are exact in every dtype that a side may have, but for the range of float16."""


def cotangent_for(output: torch.Tensor, path: str, seed: int, exact_in: torch.dtype = COARSEST) -> torch.Tensor:
    """Return a random cotangent for an output: the same numbers for the same path, shape, seed and `exact_in`.

    It has the output's shape, dtype and device; its values are those of the dtype `exact_in`, or of its real parts.
    Complex outputs get other numbers.
    """
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(path.encode()))
    shape = (*output.shape, 2) if output.is_complex() else tuple(output.shape)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    drawn = drawn.to(exact_in.to_real()).to(torch.float64)
    if output.is_complex():
        drawn = torch.view_as_complex(drawn)
    return drawn.to(device=output.device, dtype=output.dtype)


def _is_differentiable(value: Any) -> bool:
    """Tell whether a value is a float or complex tensor that requires grad."""
    return isinstance(value, torch.Tensor) and value.requires_grad and is_inexact(value.dtype)


def _inputs(side: Side) -> dict[str, Any]:
    """Return the side's `args` and `kwargs`, by these names."""
    return {"args": side.args, "kwargs": side.kwargs}


def _registered(side: Side) -> dict[str, Any]:
    """Return the side's `parameters` and `buffers`, each a dict of tensors, by these names."""
    state = side.state
    return {"parameters": state.parameters, "buffers": state.buffers}


def _inputs_and_state(side: Side) -> dict[str, Any]:
    """Return the side's `args`, `kwargs`, `parameters` and `buffers`, by these names."""
    return {**_inputs(side), **_registered(side)}


def _names_of_differences(first: Leaves, second: Leaves) -> set[str]:
    """Return the names, such as `buffers['mean']`, that both sides have and below which their leaves differ.

    Leaves differ if a path is on one side only, or if their values are not equal (`_has_equal_values`).
    """
    names = {name_of(path) for path in first} & {name_of(path) for path in second}
    return {
        name
        for path in dict.fromkeys((*first, *second))
        if (name := name_of(path)) in names
        and not (path in first and path in second and _has_equal_values(first[path], second[path]))
    }


def _has_equal_values(first: Any, second: Any) -> bool:
    """Tell whether two leaves are equal; for two tensors, whether shape, device and values are, in any dtype.

    Tensors without a plain buffer are equal if their components are, and not if they cannot be taken apart.
    """
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return _is_equal(first, second)
    if first.shape != second.shape or first.device != second.device:
        return False
    if tensors.has_own_buffer(first) and tensors.has_own_buffer(second):
        return measure(first, second).mismatches == 0
    parts, others = leaves_of(first), leaves_of(second)
    return parts.keys() == others.keys() and len(parts) > 1 and all(map(_is_equal, parts.values(), others.values()))


def _reaches(node: Any, targets: Mapping[int, Any]) -> bool:
    """Tell whether an autograd node is among the targets, which are by id, or was computed from one of them."""
    waiting, visited = [node], {}
    while targets and waiting:
        current = waiting.pop()
        if current is None or id(current) in visited:
            continue
        if id(current) in targets:
            return True
        visited[id(current)] = current
        waiting.extend(inner for inner, _ in current.next_functions)
    return False


def _tensors_in(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors within named values, by path; each path begins with the name of the value."""
    return {
        path: leaf
        for name, value in values.items()
        for path, leaf in leaves_of(value, name).items()
        if isinstance(leaf, torch.Tensor)
    }


def _plain_leaves(values: Mapping[str, Any]) -> Leaves:
    """Return the containers, plain values, NumPy arrays and generators within named values, by path.

    Of inputs, these may change too: a call may append to a list, for example. A generator is represented by its state.
    Tensors are left out, except for the state of a torch generator; of their attributes, `_attributes_in` is added.
    """
    leaves = _attributes_in(values)
    for name, value in values.items():
        for path, leaf in leaves_of(value, name).items():
            if isinstance(leaf, (Container, np.ndarray, *PLAIN)):
                leaves[path] = leaf
            elif isinstance(leaf, GENERATORS) and (state := hidden_state(leaf)) is not None:
                leaves.update({f"{path}{step}": part for step, part in state})
    return leaves


def _attributes_in(values: Mapping[str, Any]) -> Leaves:
    """Return what the user's code keeps in attributes of the tensors within named values, by path: `outputs.scale`.

    Only tensors, containers, plain values and arrays among these are returned.
    """
    leaves: Leaves = {}
    for name, value in values.items():
        for path, leaf in leaves_of(value, name).items():
            attributes = attributes_of(leaf) if isinstance(leaf, torch.Tensor) else {}
            for attribute, item in attributes.items():
                below = leaves_of(item, f"{path}.{attribute}").items()
                kinds = (torch.Tensor, Container, np.ndarray, *PLAIN)
                leaves.update({place: part for place, part in below if isinstance(part, kinds)})
    return leaves


def _is_equal(value: Any, original: Any) -> bool:
    """Tell whether two leaves are of one class and equal; a NaN equals a NaN. Dtypes of tensors and arrays count."""
    if type(value) is not type(original):
        return False
    if isinstance(value, torch.Tensor):
        return value.dtype == original.dtype and _has_equal_values(value, original)
    if isinstance(value, np.ndarray):
        is_alike = value.dtype == original.dtype and value.shape == original.shape
        return is_alike and bool(np.all((value == original) | ((value != value) & (original != original))))
    return value is original or bool(value == original or (value != value and original != original))


def _aliases(
    returned: Mapping[str, torch.Tensor], around: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]
) -> dict[str, frozenset[str]]:
    """Return, for the path of each returned or kept tensor, the paths of all other tensors that share its storage.

    Those of an output are other outputs, and the inputs, parameters and buffers in `around`. Those of unregistered
    state, `kept`, may be such state too. The set is empty if there are none.
    """
    by_storage: dict[int, list[str]] = {}
    keys = {path: tensors.storage_key(tensor) for path, tensor in (*returned.items(), *around.items(), *kept.items())}
    for path, key in keys.items():
        if key:
            by_storage.setdefault(key, []).append(path)
    partners = {path: frozenset(by_storage.get(keys[path] or 0, ())) - {path} for path in (*returned, *kept)}
    return {path: paths - kept.keys() if path in returned else paths for path, paths in partners.items()}


def _named_snapshots(values: Mapping[str, Any], path: str) -> Leaves:
    """Return copies of the leaves of each value, by paths that begin with `path['name']`.

    There is no leaf for the mapping itself, so the order of the names does not count.
    """
    leaves: Leaves = {}
    for name, value in values.items():
        leaves.update(_snapshots(value, f"{path}[{name!r}]"))
    return leaves


def _snapshots(value: Any, path: str) -> Leaves:
    """Return copies (`_snapshot`) of the leaves of a value, by paths that begin with `path`."""
    return {place: _snapshot(leaf) for place, leaf in leaves_of(value, path).items()}


def _snapshot(value: Any) -> Any:
    """Return a copy of a leaf that later runs cannot change; a tensor loses its autograd history, not requires_grad.

    NumPy arrays are copied; other non-tensors are returned as they are. A plain tensor keeps its strides, unless its
    elements overlap otherwise than by expanding.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, torch.Tensor):
        return value
    detached = value.detach()
    if not tensors.has_own_buffer(value) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return detached.clone().requires_grad_(value.requires_grad)
    # an expanded dimension is copied once and expanded again
    steps = list(zip(detached.size(), detached.stride(), strict=True))
    compact = detached[tuple(slice(0, 1) if stride == 0 and size > 1 else slice(None) for size, stride in steps)]
    span = 1 + sum((size - 1) * stride for size, stride in zip(compact.size(), compact.stride(), strict=True))
    if span >= compact.numel():
        duplicate = torch.empty_strided(compact.size(), compact.stride(), dtype=detached.dtype, device=detached.device)
        duplicate.copy_(compact)
    else:  # elements overlap, as in a sliding window, so a tensor of this layout cannot be written to
        duplicate = compact.clone()
    return duplicate.expand(detached.size()).requires_grad_(value.requires_grad)
