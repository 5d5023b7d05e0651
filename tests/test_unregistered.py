"""State outside of parameters and buffers: what a run changed in it is compared, wherever the program keeps it.

For each place there is a candidate that forgets to write to it, or writes something else, and a correct twin.
"""

import argparse
import array
import collections
import ctypes
import dataclasses
import functools
import io
import itertools
import random
import threading
import time
import types
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta.program.sides import state_of

DIVERGED, EQUIVALENT = Verdict.DIVERGED, Verdict.EQUIVALENT
total = 0
log = []
shared_random, shared_generator, shared_numpy = random.Random(0), torch.Generator(), np.random.default_rng(0)
X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)


def diverged(report):
    """Return the paths of the leaves that have diverged."""
    return [each.path for each in report.comparisons if each.verdict is DIVERGED]


@dataclasses.dataclass
class Record:
    count: int = 0
    last: torch.Tensor | None = None


class Keeper(nn.Module):
    """A module that keeps state in every place but a buffer; `write` is what its forward does to it."""

    calls = 0

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.write = write
        self.steps = 0
        self.mode = "fresh"
        self.cache = {"keys": torch.zeros(2, 3)}
        self.history = []
        self.recent = collections.deque(maxlen=2)
        self.record = Record()
        self.table = {"a": 1, "b": 2}
        self.generator = torch.Generator().manual_seed(0)
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.array = np.zeros(3)
        self.scratch = 1.0

    def forward(self, x):
        y = self.linear(x)
        self.write(self, y)
        return torch.tanh(y)


def write_nothing(module, y):
    pass


def count(module, y):
    module.steps += 1


def count_twice(module, y):
    module.steps += 2


def set_mode(module, y):
    module.mode = "used"


def set_other_mode(module, y):
    module.mode = "spent"


def fill_cache(module, y):
    module.cache["keys"].copy_(y.detach())


def fill_cache_negated(module, y):
    module.cache["keys"].copy_(-y.detach())


def append(module, y):
    module.history.append(y * 2)


def append_another(module, y):
    module.history.append(y * 3)


def append_to_deque(module, y):
    module.recent.append(y.detach())


def append_twice_to_deque(module, y):
    module.recent.extend((y.detach(), y.detach()))


def fill_record(module, y):
    module.record.count += 1
    module.record.last = y.detach()


def fill_half_of_the_record(module, y):
    module.record.count += 1


def reorder(module, y):
    module.table["a"] = module.table.pop("a")


def count_in_the_class(module, y):
    type(module).calls += 1


def count_twice_in_the_class(module, y):
    type(module).calls += 2


def draw(module, y):
    torch.rand(2, generator=module.generator)


def draw_more(module, y):
    torch.rand(20, generator=module.generator)


def draw_in_python(module, y):
    module.random.random()


def draw_in_numpy(module, y):
    module.numpy.random()


def write_to_an_array(module, y):
    module.array[0] += 1


def add_an_attribute(module, y):
    module.extra = 3


def remove_an_attribute(module, y):
    if hasattr(module, "scratch"):
        del module.scratch


def keep_a_number(module, y):
    module.scratch = float(y.detach().sum())


def keep_another_number(module, y):
    module.scratch = float(y.detach().sum()) + 1e-3


def leave_training(module, y):
    module.linear.eval()


FAULTS = [
    (count, write_nothing, "attributes['steps']"),
    (count, count_twice, "attributes['steps']"),
    (write_nothing, count, "attributes['steps']"),
    (set_mode, write_nothing, "attributes['mode']"),
    (set_mode, set_other_mode, "attributes['mode']"),
    (fill_cache, write_nothing, "attributes['cache']['keys']"),
    (fill_cache, fill_cache_negated, "attributes['cache']['keys']"),
    (append, write_nothing, "attributes['history'][0]"),
    (append, append_another, "attributes['history'][0]"),
    (append_to_deque, write_nothing, "attributes['recent'][0]"),
    (append_to_deque, append_twice_to_deque, "attributes['recent'][1]"),
    (fill_record, write_nothing, "attributes['record'].count"),
    (fill_record, fill_half_of_the_record, "attributes['record'].last"),
    (reorder, write_nothing, "attributes['table']"),
    (count_in_the_class, write_nothing, "attributes['Keeper.calls']"),
    (count_in_the_class, count_twice_in_the_class, "attributes['Keeper.calls']"),
    (draw, write_nothing, "attributes['generator']"),
    (draw, draw_more, "attributes['generator']"),
    (draw_in_python, write_nothing, "attributes['random']"),
    (draw_in_numpy, write_nothing, "attributes['numpy']"),
    (write_to_an_array, write_nothing, "attributes['array']"),
    (remove_an_attribute, write_nothing, "attributes['scratch']"),
    (keep_a_number, keep_another_number, "attributes['scratch']"),
    (leave_training, write_nothing, "attributes['linear.training']"),
]
WRITES = sorted({write for pair in FAULTS for write in pair[:2]} | {add_an_attribute}, key=lambda each: each.__name__)


@pytest.mark.parametrize(
    ("right", "wrong", "path"), FAULTS, ids=[f"{right.__name__}-{wrong.__name__}" for right, wrong, _ in FAULTS]
)
def test_state_that_the_candidate_leaves_otherwise_is_seen(right, wrong, path):
    report = td.check(Keeper(right), (X,), candidate=Keeper(wrong))

    assert report.verdict is DIVERGED
    assert path in diverged(report)
    assert Keeper.calls == 0


@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_state_that_both_sides_leave_alike_is_no_difference(write):
    assert td.check(Keeper(write), (X,), candidate=Keeper(write)).verdict is EQUIVALENT
    assert Keeper.calls == 0


@pytest.mark.filterwarnings("ignore")  # dynamo warns where it breaks a graph
@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_a_compiler_that_keeps_the_writes_is_equivalent(write):
    report = td.check(Keeper(write), (X,), transform="eager", stages="forward,gradients")

    assert report.verdict is EQUIVALENT, report.comparisons
    assert Keeper.calls == 0


class Tally:
    """An object of the user's that is not a module."""

    def __init__(self):
        self.count = 0


def closing_over(step):
    """Return a function that counts in its closure, in an object there, and in a list there."""
    count, tally, seen, generator = 0, Tally(), [], random.Random(0)

    def program(x):
        nonlocal count
        count += step
        tally.count += step
        seen.append(step)
        for _ in range(step):
            generator.random()
        return x * 2

    return program


def test_counters_in_a_closure_are_compared_and_each_run_has_its_own():
    report = td.check(closing_over(1), (X,), candidate=closing_over(2))

    paths = {"attributes['count']", "attributes['tally'].count", "attributes['seen'][0]", "attributes['generator']"}
    assert paths <= set(diverged(report))
    assert td.check(closing_over(1), (X,), candidate=closing_over(1)).verdict is EQUIVALENT
    assert td.check(closing_over(1), (X,), transform="eager", iterations=2).verdict is EQUIVALENT


def adding_to_globals(step):
    def program(x):
        global total
        total += step
        log.append(step)
        return x * 2

    return program


def doubled(x):
    return x * 2


def quadrupled(x):
    return x * 4


scaled = doubled


def replaces_a_function(x):
    global scaled
    scaled, before = quadrupled, scaled
    return before(x)


def test_a_global_function_that_a_program_replaces_is_put_back():
    assert td.check(replaces_a_function, (X,), transform="eager").verdict is EQUIVALENT
    assert diverged(td.check(replaces_a_function, (X,), candidate=quadrupled)) == ["outputs"]
    assert scaled is doubled


def test_globals_are_compared_and_put_back():
    report = td.check(adding_to_globals(1), (X,), candidate=adding_to_globals(2))

    assert {"attributes['total']", "attributes['log'][0]"} <= set(diverged(report))
    assert td.check(adding_to_globals(1), (X,), candidate=adding_to_globals(1)).verdict is EQUIVALENT
    assert td.check(adding_to_globals(1), (X,), transform="eager").verdict is EQUIVALENT
    assert (total, log) == (0, [])


class WritesGlobals(nn.Module):
    seen: ClassVar = []

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x):
        global total
        total += self.step
        self.seen.append(self.step)
        return x * 2


def test_globals_that_a_method_writes_and_a_list_of_its_class_are_compared_and_put_back():
    report = td.check(WritesGlobals(1), (X,), candidate=WritesGlobals(2))

    assert {"attributes['total']", "attributes['WritesGlobals.seen'][0]"} <= set(diverged(report))
    assert td.check(WritesGlobals(1), (X,), candidate=WritesGlobals(1)).verdict is EQUIVALENT
    assert td.check(WritesGlobals(1), (X,), transform="eager", iterations=2).verdict is EQUIVALENT
    assert (total, WritesGlobals.seen) == (0, [])


class DrawsFromGlobals(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            shared_random.random()
            torch.rand(1, generator=shared_generator)
            shared_numpy.random()
        return x * 2


def test_generators_at_module_level_are_compared_and_rewound():
    before = shared_random.getstate(), shared_generator.get_state(), repr(shared_numpy.bit_generator.state)
    report = td.check(DrawsFromGlobals(1), (X,), candidate=DrawsFromGlobals(2))
    twin = td.check(DrawsFromGlobals(2), (X,), candidate=DrawsFromGlobals(2))

    names = {"attributes['shared_random']", "attributes['shared_generator']", "attributes['shared_numpy']"}
    assert names <= set(diverged(report))
    assert twin.verdict is EQUIVALENT
    assert before[0] == shared_random.getstate()
    assert torch.equal(before[1], shared_generator.get_state())
    assert before[2] == repr(shared_numpy.bit_generator.state)


def counts_its_calls(x):
    counts_its_calls.calls += 1
    return x * 2


def counts_its_calls_twice(x):
    counts_its_calls.calls += 2
    return x * 2


counts_its_calls.calls = 0


def test_an_attribute_of_a_function_is_compared_and_put_back():
    report = td.check(counts_its_calls, (X,), candidate=counts_its_calls_twice)

    assert diverged(report) == ["attributes['calls']"]
    assert td.check(counts_its_calls, (X,), candidate=counts_its_calls).verdict is EQUIVALENT
    assert counts_its_calls.calls == 0


def make_counter(step):
    count = 0

    def counter():
        nonlocal count
        count += step
        return count

    return counter


count_one, count_two = make_counter(1), make_counter(2)


def calls_count_one(x):
    return x * 2 + 0 * count_one()


def calls_count_two(x):
    return x * 2 + 0 * count_two()


def test_the_closure_of_a_function_that_is_called_is_compared_and_put_back():
    report = td.check(calls_count_one, (X,), candidate=calls_count_two)

    assert diverged(report) == ["attributes['count']"]
    assert td.check(calls_count_one, (X,), candidate=calls_count_one).verdict is EQUIVALENT
    assert (count_one(), count_two()) == (1, 2)


def closing_over_immutable_holders(step):
    tally, pair, space = Tally(), (Tally(), []), types.SimpleNamespace(count=0)

    def add():
        tally.count += step

    bound = types.MethodType(lambda self: setattr(self, "count", self.count + step), Tally())

    def program(x):
        add()
        bound()
        pair[0].count += step
        pair[1].append(step)
        space.count += step
        return x * 2

    return program


def test_state_in_tuples_methods_and_namespaces_is_copied_and_compared():
    report = td.check(closing_over_immutable_holders(1), (X,), candidate=closing_over_immutable_holders(2))

    names = ("tally'].count", "bound'].count", "pair'][0].count", "pair'][1][0]", "space'].count")
    assert {f"attributes['{name}" for name in names} <= set(diverged(report))
    right = closing_over_immutable_holders(1)
    assert td.check(right, (X,), candidate=right).verdict is EQUIVALENT
    assert td.check(right, (X,), candidate=closing_over_immutable_holders(1)).verdict is EQUIVALENT


def drawing(times):
    def program(x, generator, numbers, record):
        torch.rand(times, generator=generator)
        numbers.pop()
        record.count += times
        return x * 2

    return program


def keeping_the_numbers(x, generator, numbers, record):
    torch.rand(1, generator=generator)
    record.count += 1
    return x * 2


def test_generators_numbers_and_objects_among_the_arguments_are_compared():
    arguments = (X, torch.Generator().manual_seed(0), [1, 2, 3], Record())

    assert diverged(td.check(drawing(1), arguments, candidate=drawing(20))) == ["args[1]", "args[3].count"]
    assert diverged(td.check(drawing(1), arguments, candidate=keeping_the_numbers)) == ["args[2][2]"]
    assert td.check(drawing(2), arguments, candidate=drawing(2)).verdict is EQUIVALENT


def test_a_list_that_a_hook_fills_is_compared():
    def hooked(factor):
        torch.manual_seed(0)
        model, kept = nn.Linear(3, 3), []
        model.register_forward_hook(lambda module, args, output: kept.append(output.detach() * factor))
        return model

    assert diverged(td.check(hooked(1), (X,), candidate=hooked(2))) == ["attributes['kept'][0]"]
    assert td.check(hooked(1), (X,), candidate=hooked(1)).verdict is EQUIVALENT


def test_state_that_the_backward_changes_is_compared():
    def counting(step):
        class Count(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, counts):
                ctx.counts = counts
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                ctx.counts["backward"] += step
                return gradient * 2, None

        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.counts = {"backward": 0}

            def forward(self, x):
                return Count.apply(x, self.counts)

        return Counting()

    x = X.clone().requires_grad_()
    report = td.check(counting(1), (x,), candidate=counting(2))

    assert diverged(report) == ["attributes['counts']['backward']"]
    assert td.check(counting(1), (x,), candidate=counting(1)).verdict is EQUIVALENT


class Marks(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.when = when

    def forward(self, x):
        if self.when():
            self.mark = 1
        return x * 2


def test_an_attribute_that_only_the_compiled_program_adds_is_seen():
    report = td.check(Marks(torch.compiler.is_compiling), (X,), transform="eager")

    assert diverged(report) == ["attributes['mark']"]
    assert td.check(Marks(lambda: True), (X,), transform="eager").verdict is EQUIVALENT
    assert td.check(Marks(lambda: False), (X,), transform="aot_eager").verdict is EQUIVALENT


# gradients


class Listed(nn.Module):
    """Keeps its weights in a list, where they are not registered."""

    def __init__(self, detach=False):
        super().__init__()
        torch.manual_seed(0)
        self.weights = [torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)]
        self.detach = detach

    def forward(self, x):
        first, second = self.weights
        return x * (first.detach() if self.detach else first) + second


def test_a_lost_gradient_of_a_tensor_in_a_list_is_seen():
    report = td.check(Listed(), (X,), candidate=Listed(detach=True))

    assert diverged(report) == ["attributes['weights'][0].grad"]
    assert td.check(Listed(), (X,), candidate=Listed()).verdict is EQUIVALENT
    assert td.check(Listed(), (X,), transform="aot_eager").verdict is EQUIVALENT


def writing(factor):
    """Return a function whose weight reaches no output, only a mutated argument."""

    def program(x, weight):
        # the value is the same for every factor; the gradient is not
        x.add_(weight * factor - weight.detach() * (factor - 1))
        return x.detach() + 1

    return program


def appending(factor):
    def program(x, weight, seen):
        seen.append(x * (weight * factor - weight.detach() * (factor - 1)))
        return x + 1

    return program


def keeping(factor):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(3))
            self.last = None

        def forward(self, x):
            self.last = x * (self.weight * factor - self.weight.detach() * (factor - 1))
            return x + 1

    return Keeping()


@pytest.mark.parametrize(
    ("make", "inputs", "path"),
    [
        (writing, lambda: (X.clone(), torch.ones(3, requires_grad=True)), "args[1].grad"),
        (appending, lambda: (X.clone(), torch.ones(3, requires_grad=True), []), "args[1].grad"),
        (keeping, lambda: (X.clone(),), "parameters['weight'].grad"),
    ],
    ids=["a mutated argument", "an appended tensor", "an attribute"],
)
def test_a_gradient_flows_from_everything_that_the_call_leaves_behind(make, inputs, path):
    report = td.check(make(1), inputs(), candidate=make(2))

    assert diverged(report) == [path]
    assert td.check(make(1), inputs(), candidate=make(1)).verdict is EQUIVALENT
    assert td.check(make(1), inputs(), transform="aot_eager").verdict is EQUIVALENT


@pytest.mark.filterwarnings("ignore")  # dynamo reads the gradients of tensors that are not leaves
@pytest.mark.parametrize("stages", ["forward,gradients", "steps"])
def test_graphs_that_state_keeps_from_earlier_calls_are_not_run_again(stages):
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(3, 3)
            self.history, self.mean = [], torch.zeros(2, 3)

        def forward(self, x):
            y = self.linear(x)
            self.history.append(y)
            self.mean = self.mean * 0.5 + y
            return y * 2

    report = td.check(Remembers(), (X,), transform="eager", stages=stages, iterations=3)

    assert report.verdict is EQUIVALENT


def test_state_whose_gradient_fails_eagerly_is_left_out_of_the_backward():
    class Overwrites(nn.Module):
        def __init__(self, scale=1.0):
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.scale = nn.Linear(3, 3), scale

        def forward(self, x):
            y = self.linear(x)
            self.square = y * y
            y.add_(1)  # the gradient of the square needs the value that is overwritten here
            return y * self.scale

    report = td.check(Overwrites(), (X,), transform="eager")

    assert report.verdict is EQUIVALENT
    assert report.stage("gradients").comparisons
    assert any(note.startswith("no gradients flow from state") for note in report.notes)
    assert td.check(Overwrites(), (X,), candidate=Overwrites(1.1)).verdict is DIVERGED


# unsteady state


class Stamped(nn.Module):
    def __init__(self, write, factor=2):
        super().__init__()
        self.write, self.factor = write, factor
        self.log = {}
        self.when = 0.0

    def forward(self, x):
        self.write(self)
        return x * self.factor


def stamp(module):
    module.when = time.perf_counter()


def stamp_with_a_text(module):
    module.when = f"run {time.perf_counter_ns()}"


def stamp_a_key(module):
    module.log[time.perf_counter_ns()] = 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [stamp, stamp_with_a_text, stamp_a_key], ids=lambda each: each.__name__)
def test_state_that_differs_between_two_runs_of_the_reference_is_noted_and_not_compared(write):
    name = "log" if write is stamp_a_key else "when"
    for candidate in ({"candidate": Stamped(write)}, {"transform": "eager"}):
        report = td.check(Stamped(write), (X,), **candidate)

        assert report.verdict is EQUIVALENT
        assert any("unsteady" in note and f"attributes['{name}']" in note for note in report.notes)
    assert diverged(td.check(Stamped(write), (X,), candidate=Stamped(write, factor=3))) == ["outputs"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kept", ["total", "missing"])
def test_steady_state_beside_an_unsteady_entry_is_compared(kept):
    def stamp_and_count(by):
        def write(module):
            module.log[time.perf_counter_ns()] = 1
            if by:
                module.log["total"] = torch.full((3,), float(by))

        return write

    candidate = Stamped(stamp_and_count(2 if kept == "total" else 0))
    wrong = td.check(Stamped(stamp_and_count(1)), (X,), candidate=candidate)
    right = td.check(Stamped(stamp_and_count(1)), (X,), candidate=Stamped(stamp_and_count(1)))

    assert diverged(wrong) == ["attributes['log']['total']"]
    assert right.verdict is EQUIVALENT


# the order of a dict


def ordered(*keys):
    return lambda x: dict.fromkeys(keys, x * 2)


def test_the_order_of_a_dict_is_a_clause_that_can_be_ignored():
    report = td.check(ordered("a", "b"), (X,), candidate=ordered("b", "a"))

    assert report.comparisons[0].contract[0].clause == "order"
    assert report.verdict is DIVERGED
    assert td.check(ordered("a", "b"), (X,), candidate=ordered("b", "a"), ignore="order").verdict is EQUIVALENT
    assert td.check(ordered("b", "a"), (X,), candidate=ordered("b", "a")).verdict is EQUIVALENT
    for transform in ("export", "aot_eager"):
        assert td.check(ordered("b", "a"), (X,), transform=transform).verdict is EQUIVALENT


def test_a_large_list_that_is_changed_is_one_leaf():
    class Large(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.numbers, self.value = list(range(5000)), value

        def forward(self, x):
            self.numbers[2500] = self.value
            return x * 2

    assert diverged(td.check(Large(1), (X,), candidate=Large(2))) == ["attributes['numbers']"]
    assert td.check(Large(1), (X,), candidate=Large(1)).verdict is EQUIVALENT


class CountBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.buffer.add_(grad.abs().amax())
        return grad, None


class WritesInBackward(nn.Module):
    def __init__(self, *, counts=True):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.counts = nn.Linear(8, 8), counts
        self.register_buffer("largest", torch.zeros(8))

    def forward(self, x):
        y = self.layer(x)
        return CountBackward.apply(y, self.largest) if self.counts else y * 1


@pytest.mark.parametrize(
    ("reference", "candidate", "verdict"),
    [(True, False, DIVERGED), (False, True, DIVERGED), (True, True, EQUIVALENT)],
)
def test_state_that_the_backward_writes_is_compared(reference, candidate, verdict):
    sides = [WritesInBackward(counts=counts) for counts in (reference, candidate)]
    sides[1].counts = sides[0].counts if verdict is EQUIVALENT else sides[1].counts

    assert td.check(sides[0], (torch.ones(4, 8),), candidate=sides[1]).verdict is verdict


def test_an_optimizer_step_in_the_backward_is_compared():
    def step(parameter):
        parameter.data.sub_(parameter.grad * 0.1)

    stepping, still = WritesInBackward(counts=False), WritesInBackward(counts=False)
    stepping.layer.weight.register_post_accumulate_grad_hook(step)

    assert td.check(stepping, (torch.ones(4, 8),), candidate=still).verdict is DIVERGED
    assert td.check(stepping, (torch.ones(4, 8),), candidate=stepping).verdict is EQUIVALENT


class Retains(nn.Module):
    def __init__(self, *, retains):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.hidden = nn.Linear(8, 8), None
        self.retain = torch.Tensor.retain_grad if retains else torch.Tensor.detach

    def forward(self, x):
        self.hidden = torch.tanh(self.layer(x))
        self.retain(self.hidden)
        return self.hidden * 2


def test_a_gradient_that_is_retained_for_a_kept_activation_is_compared():
    report = td.check(Retains(retains=True), (torch.ones(4, 8),), candidate=Retains(retains=False))

    assert report.verdict is DIVERGED
    assert "attributes['hidden'].grad" in {each.path for each in report.comparisons if each.verdict is DIVERGED}


def count_in(module, gradient):
    module()._count()


class ReachesItself(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))
        if way == "weak reference":
            self.parent = weakref.ref(self)
        elif way == "hook":
            self.layer.weight.register_hook(lambda grad: self._count())
        elif way == "partial":
            self.layer.weight.register_hook(functools.partial(count_in, weakref.ref(self)))

    def _count(self):
        self.count.add_(1)

    def forward(self, x):
        if hasattr(self, "parent"):
            self.parent()._count()
        return self.layer(x)


@pytest.mark.parametrize("way", ["weak reference", "hook"])
def test_a_copy_reaches_itself(way):
    program = ReachesItself(way)

    assert td.check(program, (torch.ones(4, 8),), transform="eager").verdict is EQUIVALENT
    assert not program.count.any()


def test_a_program_whose_copy_writes_to_the_original_is_refused_and_stays_as_it_was():
    program = ReachesItself("partial")

    with pytest.raises(td.TorchDeltaError, match="writes to 1 tensors of the original"):
        td.check(program, (torch.ones(4, 8),), transform="eager")

    assert not program.count.any()
    assert td.check(ReachesItself("not at all"), (torch.ones(4, 8),), transform="eager").verdict is EQUIVALENT


class Logs(nn.Module):
    def __init__(self, *, call, kind):
        super().__init__()
        self.log, self.call, self.kind = None, call, kind

    def forward(self, x):
        y = self.call(torch.tanh(x))
        numbers = y.flatten().tolist()
        self.log = dict(enumerate(numbers)) if self.kind is dict else ["loss", *numbers]
        return y


def in_order(y):
    return y / 7 * 3


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize(
    ("call", "verdict"), [(lambda y: y * 3 / 7, EQUIVALENT), (lambda y: y / 7 * 3 + (y > 0.9) * 0.1, DIVERGED)]
)
def test_floats_in_a_large_container_are_judged_as_numbers(kind, call, verdict):
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    program, other = Logs(call=in_order, kind=kind), Logs(call=in_order, kind=kind)
    object.__setattr__(other, "call", call)

    report = td.check(program, (x,), candidate=other)

    logged = [each for each in report.comparisons if each.path.startswith("attributes['log']")]
    assert logged
    assert {each.verdict for each in logged} >= {verdict}
    assert report.verdict is verdict


def advance(iterator, count):
    for _ in range(count):
        next(iterator)


HIDDEN = {
    "text": (io.StringIO, lambda value, more: value.write("ac" if more else "ab")),
    "bytes": (io.BytesIO, lambda value, more: value.write(b"ac" if more else b"ab")),
    "array": (lambda: array.array("d", [0.0, 1.0]), lambda value, more: value.append(2.0 + more)),
    "ctypes": (ctypes.c_int * 2, lambda value, more: value.__setitem__(0, value[0] + 1 + more)),
    "count": (itertools.count, lambda value, more: [next(value) for _ in range(1 + more)]),
    "list": (lambda: iter([1, 2, 3, 4, 5, 6]), lambda value, more: [next(value) for _ in range(1 + more)]),
    "zip": (
        lambda: zip(range(9), "abcdefghi", strict=True),
        lambda value, more: [next(value) for _ in range(1 + more)],
    ),
}
shared_text, shared_numbers, shared_items = io.StringIO(), array.array("d"), iter([1, 2, 3, 4, 5, 6, 7, 8, 9])


class Hiding(nn.Module):
    """Keeps state in an object without attributes."""

    def __init__(self, kind, more):
        super().__init__()
        make, self.use = HIDDEN[kind]
        self.hidden, self.more = make(), more

    def forward(self, x):
        self.use(self.hidden, self.more)
        return x * 2


def hiding(kind, more):
    """A function that keeps such an object in its closure."""
    make, use = HIDDEN[kind]
    hidden = make()

    def call(x):
        use(hidden, more)
        return x * 2

    return call


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("make", [Hiding, hiding])
def test_an_object_without_attributes_is_compared(make, kind):
    assert td.check(make(kind, 0), (X,), candidate=make(kind, 1)).verdict is DIVERGED
    assert td.check(make(kind, 0), (X,), candidate=make(kind, 0)).verdict is EQUIVALENT


def test_a_global_object_without_attributes_is_put_back_before_each_run():
    def write(x):
        shared_text.write("a")
        shared_numbers.append(1.0)
        next(shared_items)
        return x * 2

    def write_more(x):
        shared_text.write("b")
        shared_numbers.append(1.0)
        next(shared_items)
        return x * 2

    assert diverged(td.check(write, (X,), candidate=write_more)) == ["attributes['shared_text'].text"]
    assert td.check(write, (X,), candidate=lambda x: write(x) * 1).verdict is EQUIVALENT
    assert (shared_text.getvalue(), len(shared_numbers), next(shared_items)) == ("", 0, 1)


user_list, namespace, local = collections.UserList(), argparse.Namespace(steps=0), threading.local()
local.steps = 0


@pytest.mark.parametrize(
    ("path", "write"),
    [
        ("attributes['user_list'][0]", lambda more: user_list.append(1 + more)),
        ("attributes['namespace'].steps", lambda more: setattr(namespace, "steps", namespace.steps + 1 + more)),
        ("attributes['local']['steps']", lambda more: setattr(local, "steps", local.steps + 1 + more)),
    ],
)
def test_data_in_a_class_of_the_standard_library_is_compared_and_put_back(path, write):
    def program(more):
        def call(x):
            write(more)
            return x * 2

        return call

    assert diverged(td.check(program(0), (X,), candidate=program(1))) == [path]
    assert td.check(program(0), (X,), candidate=program(0)).verdict is EQUIVALENT
    assert (len(user_list), namespace.steps, local.steps) == (0, 0, 0)


@functools.lru_cache
def table(size):
    return torch.arange(size)


def test_a_cache_of_results_is_named_because_it_cannot_be_read():
    report = td.check(lambda x: x + table(3), (X,), candidate=lambda x: table(3) + x)

    assert report.verdict is EQUIVALENT
    assert any("cannot read was not compared: attributes['table']" in note for note in report.notes)


def test_state_that_python_cannot_read_is_named():
    numbers = (number for number in range(9))

    def call(x):
        return x + 0 * next(numbers)

    report = td.check(call, (X,), candidate=lambda x: x + 0)

    assert any("cannot read was not compared: attributes['numbers'] (generator)" in note for note in report.notes)
    assert not any("cannot read" in note for note in td.check(lambda x: x, (X,), candidate=lambda x: x).notes)


def test_attributes_of_outputs_and_inputs_are_compared():
    def mark(x, output, given):
        y = x + 1
        y.scale, x.seen = torch.tensor(output), given
        return y

    def check(output, given):
        return td.check(lambda x: mark(x, 1.0, "a"), (X.clone(),), candidate=lambda x: mark(x, output, given))

    assert diverged(check(2.0, "a")) == ["outputs.scale"]
    assert diverged(check(1.0, "b")) == ["args[0].seen"]
    assert check(1.0, "a").verdict is EQUIVALENT


counts = {"n": 0}


class Counting(nn.Module):
    def forward(self, x):
        counts["n"] += 1
        return x * 2


class CountingTwice(Counting):
    def forward(self, x):
        counts["n"] += 2
        return x * 2


class CountingAlike(Counting):
    def forward(self, x):
        counts["n"] += 1
        return 2 * x


def test_a_global_that_methods_of_two_classes_use_is_one_leaf():
    assert diverged(td.check(Counting(), (X,), candidate=CountingTwice())) == ["attributes['counts']['n']"]
    assert td.check(Counting(), (X,), candidate=CountingAlike()).verdict is EQUIVALENT


class Numbered(nn.Module):
    """Counts its calls by an iterator of its class, which cannot go back to an earlier number."""

    ids = itertools.count()

    def forward(self, x):
        next(self.ids)
        return x * 2


class Drawing(nn.Module):
    """Draws from generators of the process by their builtin methods."""

    def __init__(self):
        super().__init__()
        self.draw, self.draw_in_numpy = random.random, np.random.rand

    def forward(self, x):
        return x * self.draw() + self.draw_in_numpy()


@pytest.mark.parametrize("program", [Numbered, Drawing])
def test_an_iterator_of_a_class_and_generators_of_the_process_are_no_difference(program):
    report = td.check(program(), (X,), candidate=program())

    assert report.verdict is EQUIVALENT
    assert not any("changed how this process" in note for note in report.notes)


def with_lock():
    return {"lock": threading.Lock(), "scale": 2.0}.get


def stale_iterator():
    numbers = {"a": 1}
    iterator = iter(numbers)
    numbers["b"] = 2
    return iterator


def detached():
    text = io.TextIOWrapper(io.BytesIO())
    text.detach()
    return text


def lent():
    data = io.BytesIO(b"abc")
    return data, data.getbuffer()


@pytest.mark.parametrize("make", [with_lock, stale_iterator, detached, lent, lambda: ((ctypes.c_int * 2) * 0)()])
def test_an_object_that_cannot_be_read_or_copied_does_not_end_the_check(make):
    kept = make()

    def call(x):
        return x * (2.0 if kept is not None else 3.0)

    assert td.check(call, (X,), candidate=call).verdict is EQUIVALENT


class Label:
    pass


def keyed_by(kind, factor, order=1):
    """Return a function that sums its outputs in a dict whose key is an object, an id or a parameter."""
    torch.manual_seed(0)
    linear, label = nn.Linear(3, 3, bias=False), Label()
    sums = {}

    def call(x):
        y = linear(x[::order] if order > 0 else x.flip(0))
        key = {"object": label, "id": id(linear), "parameter": linear.weight}[kind]
        with torch.no_grad():
            sums[key] = sums.get(key, torch.zeros(3)) + factor * y.square().mean(0)
        return y.sum(0)

    return call


@pytest.mark.parametrize("kind", ["object", "id", "parameter"])
def test_a_dict_keyed_by_objects_or_ids_is_compared_by_its_values(kind):
    right = td.check(keyed_by(kind, 1.0), (X,), transform="aot_eager")
    reordered = td.check(keyed_by(kind, 1.0), (X,), candidate=keyed_by(kind, 1.0, order=-1))
    wrong = td.check(keyed_by(kind, 1.0), (X,), candidate=keyed_by(kind, 1.05))

    assert (right.verdict, reordered.verdict) == (EQUIVALENT, EQUIVALENT)
    assert wrong.verdict is DIVERGED
    assert "buffers['sums.values()[0]']" in diverged(wrong)


def test_values_that_two_functions_capture_by_one_name_are_both_state():
    def scaled(weight):
        return lambda x: x * weight

    parts = [scaled(torch.full((3,), 2.0)), scaled(torch.full((3,), 3.0))]

    state = state_of(lambda x: parts[0](x) + parts[1](x))

    assert sorted(state.buffers) == ["weight", "weight′"]


def advancing(make, count):
    """Return a function that takes `count` items from an iterator of its own."""
    batches = make()

    def call(x):
        for _ in range(count):
            next(batches)
        return x * 2

    return call


@pytest.mark.parametrize(
    "make",
    [
        lambda: zip([1.0] * 9, [2.0] * 9, strict=True),
        lambda: itertools.chain([1.0] * 9, [2.0]),
        lambda: enumerate(zip([1.0] * 9, [2] * 9, strict=True)),
        lambda: zip(enumerate([1.0] * 9), reversed([2] * 9), strict=True),
    ],
    ids=["zip", "chain", "nested", "zipped"],
)
def test_the_position_of_an_iterator_within_another_is_compared(make):
    assert td.check(advancing(make, 2), (X,), candidate=advancing(make, 1)).verdict is DIVERGED
    assert td.check(advancing(make, 2), (X,), candidate=advancing(make, 2)).verdict is EQUIVALENT


class Trains(nn.Module):
    """A training step that may forget its scheduler."""

    def __init__(self, *, has_schedule):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.linear.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.steps_of = [self.schedule] if has_schedule else []

    def forward(self, x):
        self.optimizer.zero_grad()
        loss = self.linear(x).square().mean()
        loss.backward()
        self.optimizer.step()
        for schedule in self.steps_of:
            schedule.step()
        return loss.detach()


@pytest.mark.filterwarnings("ignore")  # dynamo warns where it breaks a graph
def test_a_number_that_the_run_changes_in_an_object_of_a_package_is_compared():
    dropped = td.check(Trains(has_schedule=True), (X,), candidate=Trains(has_schedule=False))
    kept = td.check(Trains(has_schedule=True), (X,), candidate=Trains(has_schedule=True))
    compiled = td.check(Trains(has_schedule=True), (X,), transform="aot_eager")

    assert dropped.verdict is DIVERGED
    assert "attributes['optimizer'].param_groups[0]['lr']" in diverged(dropped)
    assert "attributes['schedule'].last_epoch" in diverged(dropped)
    assert (kept.verdict, compiled.verdict) == (EQUIVALENT, EQUIVALENT)


class Makes(nn.Module):
    """A module whose call makes a counter and a buffer, as often as `makes` has items."""

    def __init__(self, makes):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.makes = makes

    def forward(self, x):
        y = self.linear(x)
        for _ in self.makes:
            self.steps = getattr(self, "steps", 0) + 1
            self.register_buffer("last", y.detach())
        return torch.tanh(y)


class MakesNothing(Makes):
    def forward(self, x):
        return torch.tanh(self.linear(x))


def test_state_that_the_run_of_the_reference_makes_is_missed():
    dropped = td.check(Makes([1]), (X,), candidate=MakesNothing([1]))
    kept = td.check(Makes([1]), (X,), candidate=Makes([1]))
    own = td.check(MakesNothing([1]), (X,), candidate=Makes([1]))

    assert dropped.verdict is Verdict.INCONCLUSIVE
    assert "the run made this state" in dropped.stages[0].reason
    assert kept.verdict is EQUIVALENT
    # another implementation may keep what it likes, but not without a word
    assert own.verdict is EQUIVALENT
    assert {leaf.path for leaf in own.unmatched} >= {"buffers['last']", "attributes['steps']"}


def test_state_that_a_run_makes_has_to_be_there_behind_a_pass():
    def program(x):
        program.last = x.sin().detach()
        return x.cos()

    wrong = td.check(program, (X,), transform=lambda graph, _: lambda *args: [2 * y for y in graph.forward(*args)])
    right = td.check(program, (X,), transform="aot_eager")

    assert "buffers['last']" in diverged(wrong)
    assert right.verdict is EQUIVALENT


class Shares(nn.Module):
    """A module that keeps its weight and its argument, each as `keep` returns it."""

    def __init__(self, keep):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.keep = keep
        self.target = None
        self.last = None

    def forward(self, x):
        self.target = self.keep(self.linear.weight.detach())
        self.last = self.keep(x)
        return self.linear(x).tanh()


@pytest.mark.parametrize("transform", ["aot_eager", "inductor"])
def test_state_that_shares_memory_is_no_difference_under_a_compiler(transform):
    assert td.check(Shares(torch.Tensor.detach), (X,), transform=transform).verdict is EQUIVALENT


def test_state_that_shares_memory_on_one_side_alone_is_seen():
    gained = td.check(Shares(torch.clone), (X,), candidate=Shares(torch.Tensor.detach))
    lost = td.check(Shares(torch.Tensor.detach), (X,), candidate=Shares(torch.clone))

    assert gained.verdict is DIVERGED
    assert diverged(gained) == ["attributes['target']", "attributes['last']"]
    assert lost.verdict is Verdict.INCONCLUSIVE
    assert "only in the reference it shares memory with what the program is given" in lost.stages[0].reason


class Watched(nn.Module):
    """Keeps what each layer returns, some of which eager does not compute anew."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Linear(3, 3), nn.Dropout(0.1))
        self.kept = {}
        for index, layer in enumerate(self.net):
            layer.register_forward_hook(functools.partial(self.keep, index))

    def keep(self, index, layer, args, output):
        self.kept[index] = output.detach()

    def forward(self, x):
        return self.net(x)


def test_a_copy_where_eager_keeps_one_tensor_twice_is_noted():
    report = td.check(Watched().eval(), (X,), transform="aot_eager")

    assert report.verdict is EQUIVALENT
    assert any("memory that is shared in the reference is not in the candidate" in note for note in report.notes)


class Scripted(nn.Module):
    def __init__(self, text):
        super().__init__()
        torch.manual_seed(0)
        self.text = text
        self.zcount = 4
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        self.zcount += 1
        return self.linear(x)


class ScriptedWithoutCount(Scripted):
    def forward(self, x):
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("text", ["plain", "a submodules { b", "a\nlr = 3\n    nosuch = 3\n"])
def test_attributes_of_a_module_of_torchscript_are_compared_whatever_its_texts_say(text):
    user = torch.jit.script(Scripted(text))

    dropped = td.check(user, (X,), candidate=torch.jit.script(ScriptedWithoutCount(text)))
    kept = td.check(user, (X,), candidate=torch.jit.script(Scripted(text)))

    assert dropped.verdict is DIVERGED
    assert diverged(dropped) == ["attributes['zcount']"]
    assert kept.verdict is EQUIVALENT


class CountingDict(collections.UserDict):
    def __init__(self):
        super().__init__()
        self.hits = 0


class CountingList(collections.UserList):
    def __init__(self):
        super().__init__()
        self.hits = 0


shared_dict, shared_list = CountingDict(), CountingList()


class CountsHits(nn.Module):
    def __init__(self, cache, step=1):
        super().__init__()
        self.cache, self.step = cache, step

    def forward(self, x):
        counter = shared_dict if self.cache == "dict" else shared_list
        counter.hits += self.step
        return x * min(counter.hits, 2)


@pytest.mark.parametrize("cache", ["dict", "list"])
def test_an_attribute_beside_the_data_of_a_global_container_is_put_back(cache):
    assert td.check(CountsHits(cache), (X,), candidate=CountsHits(cache)).verdict is EQUIVALENT
    assert td.check(CountsHits(cache), (X,), candidate=CountsHits(cache, 2)).verdict is DIVERGED
    assert (shared_dict.hits, shared_list.hits) == (0, 0)


locks, system_random = iter([threading.Lock(), threading.Lock()]), random.SystemRandom()


class UsesUncopyable(nn.Module):
    def __init__(self, factor=2):
        super().__init__()
        self.own = random.SystemRandom()
        self.factor = factor

    def forward(self, x):
        next(locks, None)
        system_random.random()
        return x * self.factor


def test_a_global_object_whose_copy_fails_is_named_and_does_not_end_the_check():
    report = td.check(UsesUncopyable(), (X,), candidate=UsesUncopyable())

    assert report.verdict is EQUIVALENT
    assert any("system_random" in note for note in report.notes)
    assert td.check(UsesUncopyable(), (X,), candidate=UsesUncopyable(3)).verdict is DIVERGED
    assert next(locks, None) is not None


def double(module, args, output):
    return 2 * output


class Swaps(nn.Module):
    """A module whose call swaps its activation, or registers a hook."""

    def __init__(self, swap):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.act = torch.sin
        self.swap = swap

    def forward(self, x):
        y = self.act(self.linear(x))
        self.swap(self)
        return y


def swap_activation(module):
    module.act = torch.cos


def register_hook(module):
    module.linear.register_forward_hook(double)


@pytest.mark.filterwarnings("ignore")  # dynamo warns where it breaks a graph
@pytest.mark.parametrize(
    ("swap", "path"),
    [(swap_activation, "attributes['act']"), (register_hook, "attributes['linear.hooks[0]']")],
    ids=["activation", "hook"],
)
def test_functions_that_a_run_stores_are_compared(swap, path):
    dropped = td.check(Swaps(swap), (X,), candidate=Swaps(id))
    kept = td.check(Swaps(swap), (X,), candidate=Swaps(swap))
    compiled = td.check(Swaps(swap), (X,), transform="aot_eager")

    # another implementation may do without a hook that the run registers, but then the two are not known to be the same
    assert dropped.verdict is (DIVERGED if swap is swap_activation else Verdict.INCONCLUSIVE)
    assert path in [*diverged(dropped), *(leaf.path for leaf in dropped.unmatched)]
    assert (kept.verdict, compiled.verdict) == (EQUIVALENT, EQUIVALENT)


@pytest.mark.filterwarnings("ignore")  # torch warns that TorchScript is deprecated
def test_a_frozen_script_module_is_compared():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).eval()
    frozen = torch.jit.freeze(torch.jit.script(net))

    assert td.check(net, (X,), candidate=frozen, stages="forward", ignore=("requires_grad",)).verdict is EQUIVALENT
    wrong = torch.jit.freeze(torch.jit.script(nn.Sequential(net[0], nn.Sigmoid()).eval()))
    assert td.check(net, (X,), candidate=wrong, stages="forward", ignore=("requires_grad",)).verdict is DIVERGED


def fill_list(x, slots, scale=2):
    slots[0] = x * scale
    return x + 1


def fill_dict(x, entries, scale=2):
    entries["total"] = x * scale
    return x + 1


@pytest.mark.parametrize(
    ("fill", "empty", "path"),
    [(fill_list, [None], "args[1][0]"), (fill_dict, {"total": 0.0}, "args[1]['total']")],
)
def test_a_tensor_in_the_place_of_a_number_or_none_in_an_argument_is_compared(fill, empty, path):
    wrong = td.check(fill, (X, empty), candidate=functools.partial(fill, scale=3))
    right = td.check(fill, (X, empty), candidate=lambda x, slots: fill(x, slots))

    assert diverged(wrong) == [path]
    assert right.verdict is EQUIVALENT


def keep_gradient(x, kept, scale=2):
    y = x * scale
    y.register_hook(lambda gradient: kept.update(gradient=gradient * scale))
    return y


def test_a_tensor_that_the_backward_puts_in_the_place_of_a_number_in_an_argument_is_compared():
    x = X.clone().requires_grad_()
    wrong = td.check(keep_gradient, (x, {"gradient": 0.0}), candidate=functools.partial(keep_gradient, scale=3))
    right = td.check(keep_gradient, (x, {"gradient": 0.0}), candidate=lambda x, kept: keep_gradient(x, kept))

    assert "args[1]['gradient']" in diverged(wrong)
    assert right.verdict is EQUIVALENT


tally, marks = np.zeros(2), bytearray(2)
helper = nn.Identity()
helper.calls = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    calls: int = 0


slotted = Slotted()


def counted(method):
    calls = 0

    @functools.wraps(method)
    def counting(self, x):
        nonlocal calls
        calls += self.step
        return method(self, x) * calls

    return counting


class CountsInAnArray(nn.Module):
    step = 1

    def forward(self, x):
        tally[0] += self.step
        return x * float(tally[0])


class CountsInBytes(CountsInAnArray):
    def forward(self, x):
        marks[0] += self.step
        return x * marks[0]


class CountsInASlot(CountsInAnArray):
    def forward(self, x):
        slotted.calls += self.step
        return x * slotted.calls


class CountsInAModule(CountsInAnArray):
    def forward(self, x):
        helper.calls += self.step
        return x * helper.calls


class CountsInADecorator(CountsInAnArray):
    @counted
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("program", "path"),
    [
        (CountsInAnArray, "attributes['tally']"),
        (CountsInBytes, "attributes['marks']"),
        (CountsInASlot, "attributes['slotted'].calls"),
        (CountsInAModule, "attributes['helper.calls']"),
        (CountsInADecorator, "attributes['calls']"),
    ],
)
def test_what_methods_share_is_compared_and_put_back_before_each_run(program, path):
    wrong = program()
    wrong.step = 2

    assert td.check(program(), (X,), candidate=program()).verdict is EQUIVALENT
    assert path in diverged(td.check(program(), (X,), candidate=wrong))
    assert (tally[0], marks[0], slotted.calls, helper.calls) == (0, 0, 0, 0)


class Hooked(nn.Module):
    """Counts its backwards in a hook of its weight, and keeps each gradient in the closure of another."""

    def __init__(self, scale=1, step=1):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3))
        counts, kept = [], []

        def scaled(gradient):
            counts.extend([1] * step)
            return gradient * scale * len(counts)

        self.weight.register_hook(scaled)
        self.weight.register_post_accumulate_grad_hook(lambda weight: kept.append(weight.grad * step))
        self.frozen.register_hook(scaled)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return x * self.weight + self.frozen


def test_state_that_hooks_of_parameters_close_over_is_copied_and_compared():
    report = td.check(Hooked(), (X,), candidate=Hooked(scale=0.5, step=2))

    assert "attributes['kept'][0]" in diverged(report)
    assert td.check(Hooked(), (X,), candidate=Hooked()).verdict is EQUIVALENT
    assert td.check(Hooked(), (X,), transform="aot_eager").verdict is EQUIVALENT


class TrainsItself(nn.Module):
    """Runs a backward in its call, and returns a loss without one."""

    def __init__(self, baked=None, scale=1):
        super().__init__()
        self.weight, self.held = nn.Parameter(torch.ones(3)), [torch.ones(3, requires_grad=True)]
        self.baked, self.scale = baked, scale

    def forward(self, x):
        with torch.enable_grad():
            used = x if self.baked is None else self.baked
            (used * self.weight).square().sum().backward()
            (x * self.held[0] * self.scale).sum().backward()
        return (x * self.weight.detach()).square().sum()


@pytest.mark.parametrize("stages", [("forward",), None])
def test_gradients_that_a_later_call_leaves_are_compared(stages):
    words = {"iterations": 2, "stages": stages}
    report = td.check(TrainsItself(), (X,), candidate=TrainsItself(baked=X.clone()), **words)

    assert "iterations[1].parameters['weight'].grad" in diverged(report)
    assert td.check(TrainsItself(), (X,), candidate=TrainsItself(), **words).verdict is EQUIVALENT


def test_gradients_that_a_call_leaves_on_unregistered_tensors_are_compared():
    report = td.check(TrainsItself(), (X,), candidate=TrainsItself(scale=2))

    assert "attributes['held'][0].grad" in diverged(report)


class AnyAttribute:
    """An object that has every attribute, as a proxy or a lenient configuration has."""

    def __getattr__(self, name):
        if name.startswith("__") and name != "__wrapped__":
            raise AttributeError(name)
        return AnyAttribute()


class Configured(nn.Module):
    settings = AnyAttribute()

    def forward(self, x):
        return x.sin()


def test_an_object_of_a_class_that_has_every_attribute_is_not_unwrapped_for_ever():
    assert td.check(Configured(), (X,), candidate=torch.sin).verdict is EQUIVALENT


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1  # another tensor, and not the same one in place
        return x * self.calls


replacing = Replacing()


class UsesReplacing(nn.Module):
    def forward(self, x):
        return replacing(x)


def test_a_buffer_that_a_global_module_replaces_is_put_back_before_each_run():
    assert td.check(UsesReplacing(), (X,), transform="aot_eager", iterations=2).verdict is EQUIVALENT
    assert replacing.calls == 0


large_table = np.zeros(4)


class WritesTable(nn.Module):
    def forward(self, x):
        large_table[0] += 1
        return x.sin()


def test_a_global_array_too_large_to_be_put_back_is_named(monkeypatch):
    monkeypatch.setattr("torchdelta.program.unregistered._LARGEST_COPY", 8)

    report = td.check(WritesTable(), (X,), candidate=WritesTable())

    assert any("was not compared" in note and "large_table" in note for note in report.notes)
