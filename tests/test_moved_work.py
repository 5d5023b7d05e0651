"""Rewrites that keep the function are not culprits, and one wrong rewrite among them is the only one."""

import operator

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta.records.comparison import LESS_ACCURATE


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.1)
        self.first, self.second = nn.Parameter(torch.randn(36, 5)), nn.Parameter(torch.randn(5, 4))
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.1, 1.0)
        self.eval().requires_grad_(False)

    def forward(self, image):
        h = torch.relu(self.norm(self.conv(image)))
        h = torch.matmul(h.reshape(4, 36) * 0.5, self.first)
        h = torch.matmul(torch.tanh(h), self.second)
        h = torch.sigmoid(h) * (2.0 * 3.0) + 1.0
        return torch.softmax(h / 4.0, -1)


X = (torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


def calls(graph_module, *names):
    return [
        node
        for node in list(graph_module.graph.nodes)
        if node.op == "call_function" and getattr(node.target, "__name__", "") in names
    ]


def put_instead(node, build):
    """Replace a node by what `build` makes of it: it gets a function that adds a call."""
    graph = node.graph
    with graph.inserting_before(node):
        made = build(lambda target, *args, **kwargs: graph.call_function(target, args, kwargs))
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def swap_operands(graph_module):
    for node in calls(graph_module, "add", "mul"):
        node.args = node.args[::-1]


def move_scale_behind_matmul(graph_module, factor=None):
    for node in calls(graph_module, "matmul"):
        scale = node.args[0]
        if scale in calls(graph_module, "mul"):
            weight, (source, number) = node.args[1], sorted(scale.args, key=lambda arg: isinstance(arg, float))
            put_instead(node, lambda call: call(operator.mul, call(torch.matmul, source, weight), factor or number))  # noqa: B023


def evaluate_transposed(graph_module):
    for node in calls(graph_module, "matmul"):
        if node.args[0] in calls(graph_module, "tanh"):
            left, right = node.args
            put_instead(node, lambda call: call(torch.t, call(torch.matmul, call(torch.t, right), call(torch.t, left))))  # noqa: B023


def fold_batch_norm(graph_module, eps=None):
    for node in calls(graph_module, "batch_norm"):
        conv, mean, var, weight, bias = node.args[:5]
        source, kernel, shift, *rest = conv.args
        epsilon = node.args[7] if eps is None else eps

        def build(call):
            scale = call(torch.mul, weight, call(torch.rsqrt, call(torch.add, var, epsilon)))  # noqa: B023
            scaled = call(torch.mul, kernel, call(torch.reshape, scale, (-1, 1, 1, 1)))  # noqa: B023
            moved = call(torch.add, call(torch.mul, call(torch.sub, shift, mean), scale), bias)  # noqa: B023
            return call(conv.target, source, scaled, moved, *rest)  # noqa: B023

        put_instead(node, build)
        graph_module.graph.erase_node(conv)


def fold_constants(graph_module):
    for node in calls(graph_module, "truediv"):
        put_instead(node, lambda call: call(operator.mul, node.args[0], 0.25))  # noqa: B023


def write_tanh_with_exponentials(graph_module):
    for node in calls(graph_module, "tanh"):
        source = node.args[0]
        put_instead(
            node,
            lambda call: call(
                operator.sub,
                call(operator.mul, call(torch.sigmoid, call(operator.mul, source, 2.0)), 2.0),  # noqa: B023
                1.0,
            ),
        )


def write_relu_as_clamp(graph_module):
    for node in calls(graph_module, "relu"):
        put_instead(node, lambda call: call(torch.clamp, node.args[0], min=0.0))  # noqa: B023


def add_zero(graph_module):
    for node in calls(graph_module, "sigmoid"):
        source = node.args[0]
        put_instead(node, lambda call: call(operator.add, call(torch.sigmoid, source), 0.0))  # noqa: B023


def shift_softmax(graph_module):
    for node in calls(graph_module, "softmax"):
        source, *rest = node.args
        put_instead(node, lambda call: call(torch.softmax, call(operator.sub, source, 3.0), *rest))  # noqa: B023


def split_scale(graph_module):
    for node in calls(graph_module, "mul"):
        if node.args[1] == 6.0:
            source = node.args[0]
            put_instead(node, lambda call: call(operator.mul, call(operator.mul, source, 2.0), 3.0))  # noqa: B023


REWRITES = (
    *(move_scale_behind_matmul, evaluate_transposed, fold_batch_norm, fold_constants, write_tanh_with_exponentials),
    *(write_relu_as_clamp, add_zero, shift_softmax, split_scale, swap_operands),
)


def passing(*changes):
    def change_all(graph_module, example_inputs):
        for change in changes:
            change(graph_module)
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module

    return change_all


def is_right(report):
    kinds = {each.kind for each in report.comparisons if each.verdict is Verdict.DIVERGED}
    return report.verdict is Verdict.EQUIVALENT or kinds == {LESS_ACCURATE}


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.__name__)
def test_a_rewrite_that_keeps_the_function_is_right_and_has_no_culprit(rewrite):
    assert is_right(td.check(Net(), X, transform=passing(rewrite)))
    location = td.locate(Net(), X, transform=passing(rewrite))

    assert location.culprits == () or location.verdict is Verdict.DIVERGED
    assert location.verdict is not Verdict.DIVERGED or is_right(td.check(Net(), X, transform=passing(rewrite)))


def off_relu(graph_module):
    for node in calls(graph_module, "relu", "clamp"):
        with graph_module.graph.inserting_after(node):
            off = graph_module.graph.call_function(operator.add, (node, 0.01))
        node.replace_all_uses_with(off, lambda user: user is not off)  # noqa: B023


def off_softmax(graph_module):
    for node in calls(graph_module, "softmax"):
        node.args = (node.args[0], 0)


def off_scale(graph_module):
    move_scale_behind_matmul(graph_module, factor=0.6)


def off_fold(graph_module):
    fold_batch_norm(graph_module, eps=1e-5)


WRONG = (
    (off_relu, "relu", [write_relu_as_clamp]),
    (off_softmax, "softmax", [shift_softmax]),
    (off_scale, "mul", [move_scale_behind_matmul]),
    (off_fold, "batch_norm", [fold_batch_norm]),
)


@pytest.mark.parametrize(("fault", "op", "instead_of"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_one_wrong_rewrite_among_correct_ones_is_the_only_culprit(fault, op, instead_of):
    others = [each for each in REWRITES if each not in instead_of]
    location = td.locate(Net(), X, transform=passing(*others, fault))

    (culprit,) = location.culprits
    assert op in (culprit.op, *culprit.region)


def test_a_scale_that_is_moved_wrongly_is_one_culprit_with_a_region():
    (culprit,) = td.locate(Net(), X, transform=passing(off_scale)).culprits

    assert culprit.region == ("mul", "matmul")


def test_two_faults_are_two_culprits():
    culprits = td.locate(Net(), X, transform=passing(off_relu, off_softmax)).culprits

    assert [culprit.op for culprit in culprits] == ["relu", "softmax"]


def fold_modules(graph_module, eps=None):
    """Fold batch norm into the convolution before it, as a pass on modules does."""
    norm, conv = graph_module.norm, graph_module.conv
    scale = norm.weight / torch.sqrt(norm.running_var + (norm.eps if eps is None else eps))
    conv.weight.mul_(scale[:, None, None, None])
    conv.bias.copy_((conv.bias - norm.running_mean) * scale + norm.bias)
    (node,) = [node for node in graph_module.graph.nodes if node.target == "norm"]
    node.replace_all_uses_with(node.args[0])
    graph_module.graph.erase_node(node)
    graph_module.recompile()


def test_weights_that_a_pass_folds_are_its_own():
    report = td.check(Net(), X, transform=fold_modules, options={"graph": "symbolic"})

    assert report.verdict is Verdict.EQUIVALENT
    assert any("other initial values" in note for note in report.notes)


def test_batch_norm_that_a_pass_on_modules_folds_with_another_epsilon_is_one_region():
    def fold_wrongly(graph_module):
        fold_modules(graph_module, 1e-5)

    location = td.locate(Net(), X, transform=fold_wrongly, options={"graph": "symbolic"})

    assert location.verdict is Verdict.DIVERGED
    assert [culprit.region for culprit in location.culprits] == [("conv", "norm")]


class Twice(nn.Module):
    def forward(self, x):
        y = torch.sin(x)
        return torch.cos(y) + y


def test_a_node_whose_own_row_is_right_is_not_the_culprit():
    def read_other(graph_module):
        (cosine,), (sine,) = calls(graph_module, "cos"), calls(graph_module, "sin")
        cosine.args = (sine.args[0],)

    location = td.locate(Twice(), (torch.linspace(0.1, 1.0, 5),), transform=passing(read_other))
    right = {
        row.reference.name
        for row in location.table
        if row.reference is not None and all(each.verdict is Verdict.EQUIVALENT for each in row.local)
    }

    assert [culprit.op for culprit in location.culprits] == ["cos"]
    assert not right & {culprit.node for culprit in location.culprits}


def test_a_fault_that_the_next_node_hides_has_not_moved_its_work():
    def leak(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            if getattr(node.target, "__name__", "") == "relu":
                node.target = torch.nn.functional.leaky_relu
        graph_module.recompile()
        return graph_module

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))

    report = td.check(lambda x: torch.relu(x).argmax(-1), (x,), transform=leak, thorough=True)

    assert report.verdict is td.Verdict.DIVERGED


class TwoFolds(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.first_norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.second, self.second_norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        for norm in (self.first_norm, self.second_norm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.01, 0.1)
        self.eval().requires_grad_(False)

    def forward(self, image):
        h = torch.relu(self.first_norm(self.first(image)))
        return torch.flatten(torch.relu(self.second_norm(self.second(h))), 1)


@pytest.mark.parametrize("wrong", ["first", "second", None])
def test_of_two_batch_norms_that_are_folded_only_the_wrong_one_is_blamed(wrong):
    def fold(graph_module, example_inputs):
        for node in list(graph_module.graph.nodes):
            if str(node.target).endswith("_norm"):
                conv = node.args[0]
                norm = graph_module.get_submodule(node.target)
                norm.eps = 1e-2 if conv.target == wrong else norm.eps
                folded = torch.nn.utils.fusion.fuse_conv_bn_eval(graph_module.get_submodule(conv.target), norm)
                setattr(graph_module, conv.target, folded)
                node.replace_all_uses_with(conv)
                graph_module.graph.erase_node(node)
        graph_module.recompile()
        return graph_module

    location = td.locate(TwoFolds(), X, transform=fold, options={"graph": "symbolic"})

    assert [culprit.region for culprit in location.culprits] == ([(wrong, f"{wrong}_norm")] if wrong else [])


class Chain(nn.Module):
    """A rewritten part between two nodes on each side."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.part = part
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.requires_grad_(False)

    def forward(self, x):
        h = torch.sin(torch.cos(x))
        h = torch.tanh(self.part(h, self.weight, self.bias))
        return torch.matmul(torch.sigmoid(h), self.weight)


def scale_then_multiply(h, weight, bias):
    return torch.matmul(h * 0.5, weight)


def multiply_then_scale(h, weight, bias):
    return torch.matmul(h, weight) * 2.0


def scale_then_relu(h, weight, bias):
    return torch.relu(h * 2.0)


def multiply_and_add(h, weight, bias):
    return torch.addmm(bias, h, weight)


def normalize(h, weight, bias):
    return torch.nn.functional.layer_norm(h, (6,), bias, bias)


def scale_in_place_of_its_reader(graph_module):
    """Move a scale behind its reader, and keep the node."""
    (scale,) = calls(graph_module, "mul")
    (reader,) = scale.users
    source, factor = scale.args
    reader.replace_input_with(scale, source)
    reader.append(scale)
    reader.replace_all_uses_with(scale)
    scale.args = (reader, factor)


def scale_the_weight(graph_module):
    (scale,) = calls(graph_module, "mul")
    product, factor = scale.args
    with graph_module.graph.inserting_before(product):
        product.args = (product.args[0], graph_module.graph.call_function(operator.mul, (product.args[1], factor)))
    scale.replace_all_uses_with(product)
    graph_module.graph.erase_node(scale)


def split_addmm(graph_module):
    (node,) = calls(graph_module, "addmm")
    bias, left, right = node.args
    put_instead(node, lambda call: call(operator.add, call(torch.mm, left, right), bias))


def write_norm_with_means(graph_module):
    (node,) = calls(graph_module, "layer_norm")
    source, _, weight, bias = node.args[:4]

    def build(call):
        centered = call(operator.sub, source, call(torch.mean, source, -1, True))
        variance = call(torch.mean, call(operator.mul, centered, centered), -1, True)
        normal = call(operator.mul, centered, call(torch.rsqrt, call(operator.add, variance, 1e-5)))
        return call(operator.add, call(operator.mul, normal, weight), bias)

    put_instead(node, build)


PARTS = (
    (scale_then_multiply, scale_in_place_of_its_reader),
    (scale_then_relu, scale_in_place_of_its_reader),
    (multiply_then_scale, scale_the_weight),
    (multiply_and_add, split_addmm),
    (normalize, write_norm_with_means),
)
OTHER_FUNCTIONS = {"cos": torch.atan, "sin": torch.erf, "tanh": torch.nn.functional.silu, "sigmoid": torch.exp}
CHAIN_X = (torch.randn(5, 6, generator=torch.Generator().manual_seed(0)),)


def call_another_function(op):
    def change(graph_module):
        (node,) = calls(graph_module, op)
        node.target = OTHER_FUNCTIONS[op]

    return change


def put_another_function_instead(op):
    def change(graph_module):
        (node,) = calls(graph_module, op)
        put_instead(node, lambda call: call(OTHER_FUNCTIONS[op], *node.args))

    return change


@pytest.mark.parametrize("fault", [call_another_function, put_another_function_instead])
@pytest.mark.parametrize("op", OTHER_FUNCTIONS)
@pytest.mark.parametrize(("part", "rewrite"), PARTS, ids=lambda value: value.__name__)
def test_a_correct_rewrite_next_to_a_wrong_node_is_not_blamed(part, rewrite, op, fault):
    location = td.locate(Chain(part), CHAIN_X, transform=passing(rewrite, fault(op)))

    assert [(culprit.op, culprit.region) for culprit in location.culprits] == [(op, ())]


@pytest.mark.parametrize(("part", "rewrite"), PARTS, ids=lambda value: value.__name__)
def test_wrong_nodes_on_both_sides_of_a_correct_rewrite_are_two_culprits(part, rewrite):
    faults = (call_another_function("sin"), call_another_function("tanh"))
    location = td.locate(Chain(part), CHAIN_X, transform=passing(rewrite, *faults))

    assert [culprit.op for culprit in location.culprits] == ["sin", "tanh"]


def test_a_scale_that_is_moved_wrongly_in_front_of_a_wrong_node_is_blamed_too():
    def scale_more(graph_module):
        (scale,) = calls(graph_module, "mul")
        scale.args = (scale.args[0], 0.7)

    changes = (scale_in_place_of_its_reader, scale_more, call_another_function("tanh"))
    location = td.locate(Chain(scale_then_multiply), CHAIN_X, transform=passing(*changes))

    assert location.culprits[-1].op == "tanh"
    assert any("mul" in (culprit.op, *culprit.region) for culprit in location.culprits[:-1])


def test_a_node_that_gives_nan_is_the_culprit_although_all_other_elements_are_equal():
    def lose_one(graph_module):
        (node,) = calls(graph_module, "cos")
        put_instead(node, lambda call: call(torch.cos, call(torch.log, call(torch.exp, node.args[0]))))

    x = CHAIN_X[0].clone()
    x[0, 0] = 100.0  # its exponential is Inf
    location = td.locate(Chain(multiply_and_add), (x,), transform=passing(lose_one))

    assert [culprit.op for culprit in location.culprits] == ["cos"]
