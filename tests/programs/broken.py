"""Passes that are wrong in one way each, and programs in which the operation that they are wrong for is one of many."""

import ctypes
import itertools
import os
import random
import time

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend


def is_called(node, *names):
    """Tell whether a node of any kind of graph calls one of these."""
    target = getattr(node.target, "__name__", str(node.target))
    return node.op in ("call_function", "call_method") and target.partition(".")[0] in names


def calls(graph_module, *names):
    return [node for node in graph_module.graph.nodes if is_called(node, *names)]


def shifted(graph_module, nodes, by=0.1):
    """Let readers of these nodes read something larger."""
    for node in nodes:
        with graph_module.graph.inserting_after(node):
            off = graph_module.graph.call_function(torch.add, (node, by))
        node.replace_all_uses_with(off, lambda user, off=off: user is not off)
    graph_module.recompile()
    return graph_module


def healthy(graph_module, example_inputs):
    return graph_module


def relu_is_off(graph_module, example_inputs):
    return shifted(graph_module, calls(graph_module, "relu"))


def relu_raises(graph_module, example_inputs):
    if calls(graph_module, "relu"):
        raise RuntimeError("relu is not supported on line 17 at 0x7f00")
    return graph_module


def relu_segfaults(graph_module, example_inputs):
    if calls(graph_module, "relu"):
        ctypes.string_at(0)
    return graph_module


def relu_segfaults_when_run(graph_module, example_inputs):
    is_there = bool(calls(graph_module, "relu"))
    return lambda *args: ctypes.string_at(0) if is_there else graph_module(*args)


def relu_hangs(graph_module, example_inputs):
    while calls(graph_module, "relu"):
        time.sleep(0.01)
    return graph_module


def relu_eats_memory(graph_module, example_inputs):
    held = (
        [b"x" * (64 << 20) for _ in itertools.count() if calls(graph_module, "relu")]
        if calls(graph_module, "relu")
        else []
    )
    return graph_module if not held else None


def relu_exits(graph_module, example_inputs):
    if calls(graph_module, "relu"):
        os._exit(0)
    return graph_module


class Panic(BaseException):
    """As extensions in Rust raise it."""


def relu_panics(graph_module, example_inputs):
    if calls(graph_module, "relu"):
        raise Panic("called `Option::unwrap()` on a `None` value")
    return graph_module


def relu_interrupts(graph_module, example_inputs):
    if calls(graph_module, "relu"):
        raise KeyboardInterrupt
    return graph_module


@register_backend
def off_after_aot(graph_module, example_inputs):
    """A backend that is wrong for one operation of the forward graphs and one of the backward graphs."""

    def compiled(graph, _):
        return make_boxed_func(shifted(graph, calls(graph, "tanh", "threshold_backward")).forward)

    return aot_autograd(fw_compiler=compiled)(graph_module, example_inputs)


def two_bugs(graph_module, example_inputs):
    """Raise A for relu, and B for a sine of an input: what a reduction may slip to."""
    for node in calls(graph_module, "relu", "sin"):
        if is_called(node, "sin") and node.args[0].op == "placeholder":
            raise RuntimeError("B: sin of an input")
    if calls(graph_module, "relu"):
        raise RuntimeError("A: relu")
    return graph_module


def fused_wrongly(graph_module, example_inputs):
    """Be wrong for a product that is added to what it was made of."""
    wrong = [
        node
        for node in calls(graph_module, "add")
        for source in node.all_input_nodes
        if is_called(source, "mul") and set(source.all_input_nodes) & set(node.all_input_nodes)
    ]
    return shifted(graph_module, wrong)


def wrong_backward(graph_module, example_inputs):
    """Change only graphs in which a threshold goes backward."""
    return shifted(graph_module, calls(graph_module, "threshold_backward"))


def wrong_when_dynamic(graph_module, example_inputs):
    """Be wrong for relu where some size is a symbol."""
    is_dynamic = any(isinstance(value, torch.SymInt) for value in example_inputs)
    return shifted(graph_module, calls(graph_module, "relu")) if is_dynamic else graph_module


def wrong_for_thirteen(graph_module, example_inputs):
    """Be wrong only where an element is exactly 13."""
    for node in calls(graph_module, "relu"):
        with graph_module.graph.inserting_after(node):
            off = graph_module.graph.call_function(_off_at_thirteen, (node,))
        node.replace_all_uses_with(off, lambda user, off=off: user is not off)
    graph_module.recompile()
    return graph_module


def _off_at_thirteen(x):
    return torch.where(x == 13, x + 1, x)


def mutation_dropped(graph_module, example_inputs):
    """Compute what is written to an argument, and do not write it."""
    for node in calls(graph_module, "add_", "iadd"):
        node.op, node.target = "call_function", torch.add
    graph_module.recompile()
    return graph_module


def failing_every(period):
    """Return a pass that is wrong for relu once in so many times, the first time among them."""
    times = itertools.count()

    def flaky(graph_module, example_inputs):
        nodes = calls(graph_module, "relu")
        return shifted(graph_module, nodes) if nodes and next(times) % period == 0 else graph_module

    return flaky


class Stack(nn.Module):
    """Linear layers with one relu among many other things."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = torch.relu(x) if index == 2 else torch.tanh(x)
        return x.softmax(-1)


def stack():
    torch.manual_seed(0)
    return Stack(), (torch.randn(4, 8),)


def frozen_stack():
    model, args = stack()
    return model.requires_grad_(False), args


def fused():
    def program(x, y):
        a = torch.sin(x) * y
        b = a * y
        c = b + y
        return torch.tanh(c) + torch.cos(x)

    return program, (torch.randn(4, 8), torch.randn(4, 8))


def one_in_a_thousand():
    x = torch.randn(10, 100)
    x[7, 31] = 13.0

    def program(x):
        return torch.relu(x) * 2 + torch.cos(x)

    return program, (x,)


def mutating():
    def program(x, y):
        z = torch.tanh(y)
        x.add_(torch.sin(z))
        return torch.cos(y) * z

    return program, (torch.randn(4), torch.randn(4))


def random_program(seed):
    """Return a random graph of operations in which one is a relu, and every sine is of something computed."""
    generator = random.Random(seed)
    operations = [generator.choice([torch.cos, torch.tanh, torch.sigmoid, torch.sin, torch.exp]) for _ in range(10)]
    operations.insert(generator.randrange(1, len(operations)), torch.relu)
    # the first reads the inputs, and everybody else what was computed
    reads = [generator.randrange(place) for place in range(1, len(operations) + 1)]

    def program(x, y):
        values = [x * y]
        for operation, read in zip(operations, reads, strict=True):
            values.append(operation(values[read]))
        return sum(values)

    torch.manual_seed(seed)
    return program, (torch.randn(2, 3), torch.randn(2, 3))


def asserting(graph_module, example_inputs):
    """Fail alike at two places, which only their lines tell apart."""
    for node in calls(graph_module, "relu"):
        assert not node.users
    for node in calls(graph_module, "sin"):
        assert node.args[0].op != "placeholder"
    return graph_module


def two_are_off(graph_module, example_inputs):
    """Be wrong for sine and for relu, by different amounts."""
    shifted(graph_module, calls(graph_module, "sin"), by=0.01)
    return shifted(graph_module, calls(graph_module, "relu"), by=0.5)


def two_wrong():
    def program(x):
        y = torch.sin(x).exp()
        z = torch.relu(y - 1)
        return z * 2

    return program, (torch.randn(8),)


def wrong_for_odd_rows(graph_module, example_inputs):
    """Be wrong for what is left over where rows are taken in pairs."""

    def run(*args):
        return tuple(value + value.shape[0] % 2 for value in graph_module(*args))

    return run


def two_apart():
    def program(x):
        y = torch.sin(x).exp()
        z = torch.relu(x)
        return y, z

    return program, (torch.randn(8),)


def off_and_wide(graph_module, example_inputs):
    """Be wrong by value for sine, and by dtype for relu."""
    for node in calls(graph_module, "relu"):
        with graph_module.graph.inserting_after(node):
            wide = graph_module.graph.call_method("double", (node,))
        node.replace_all_uses_with(wide, lambda user, wide=wide: user is not wide)
    return shifted(graph_module, calls(graph_module, "sin"), by=0.01)


@torch.compiler.allow_in_graph
def halved(x):
    return x * 0.5


class CallsOwnFunction(nn.Module):
    """Has a function of this module in its graph, which no compiler looks into."""

    def forward(self, x):
        return torch.relu(halved(x.sin())).exp()
