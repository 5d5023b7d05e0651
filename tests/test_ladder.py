"""Which rung of a compiler's ladder goes wrong first, which node on it, and which setting it needs."""

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.backends import common
from torch._dynamo.backends.common import aot_autograd

import torchdelta as td
from programs import live_bugs
from torchdelta._torch.compile import aot
from torchdelta._torch.compile.seams import hand_on
from torchdelta.transforms.compiler import Compiler

aten = torch.ops.aten


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


def gated():
    torch.manual_seed(0)
    return Gated(), (torch.randn(4, 8),)


def shifted(x):
    return torch.nn.functional.silu(x + torch.tensor([1.0, 2.0, 3.0, 4.0]))


def wrong_silu(x):
    return x * torch.sigmoid(x) + 0.1


def right_silu(x):
    return x * torch.sigmoid(x)


def backend(decompositions):
    """A backend on AOTAutograd that runs what it is given, with decompositions of its own."""

    def compiler(graph_module, inputs):
        def call(args):
            return graph_module(*args)

        call._boxed_call = True
        return call

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=decompositions)


def rungs_of(found):
    return {rung.name: rung.verdict.value for rung in found.rungs}


class TestDecompositions:
    def test_a_wrong_one_of_a_backend_is_named_with_its_rung(self):
        model, inputs = gated()
        found = td.locate(model, inputs, transform=Compiler(backend({aten.silu.default: wrong_silu}), {}))

        assert rungs_of(found) == {"dynamo": "equivalent", "aot": "equivalent", "decomposed": "diverged"}
        assert [(culprit.op, culprit.rung) for culprit in found.culprits] == [("aten.silu.default", "decomposed")]
        assert "silu(self.up(x))" in found.culprits[0].source_line

    def test_right_ones_are_not(self):
        model, inputs = gated()
        found = td.locate(model, inputs, transform=Compiler(backend({aten.silu.default: right_silu}), {}))

        assert found.verdict is td.Verdict.EQUIVALENT
        assert found.culprits == ()
        assert found.coverage.matched == found.coverage.total > 0

    def test_a_wrong_one_in_the_users_own_table_is_named(self, tmp_path):
        table = tmp_path / "table.py"
        table.write_text(
            "import torch\n"
            "def silu(x):\n    return x * torch.sigmoid(x) + 0.1\n"
            "TABLE = {torch.ops.aten.silu.default: silu}\n"
        )
        model, inputs = gated()
        found = td.locate(model, inputs, transform="decompose", options={"table": f"{table}:TABLE"})
        found_among_constants = td.locate(
            shifted, (torch.randn(4),), transform="decompose", options={"table": f"{table}:TABLE"}
        )

        assert [culprit.op for culprit in found_among_constants.culprits] == ["aten.silu.default"]
        assert rungs_of(found) == {"export": "equivalent", "decompose": "diverged"}
        assert [(culprit.op, culprit.rung) for culprit in found.culprits] == [("aten.silu.default", "decompose")]


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope * 1.01


def spoil_backward(x):
    return WrongBackward.apply(x)


def spoiling(target, replacement):
    """A backend that runs every graph after AOTAutograd, but for one operator."""

    def compiler(graph_module, inputs):
        for node in graph_module.graph.nodes:
            if node.target is target:
                node.target = replacement
        graph_module.recompile()

        def call(args):
            return graph_module(*args)

        call._boxed_call = True
        return call

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def overwriting(x):
    inner = torch.sin(x)
    inner.mul_(2.0)
    return torch.cos(inner)


def black_box_with(method, instead):
    """A backend that is not built on AOTAutograd and calls another method in place of one."""

    def compiler(graph_module, inputs):
        for node in graph_module.graph.nodes:
            if node.target == method:
                node.target = instead
        graph_module.recompile()
        return lambda *args: graph_module(*args)

    return compiler


class TestBackends:
    def test_an_operator_that_is_wrong_in_the_forward_only_is_named(self):
        model, inputs = gated()
        transform = Compiler(spoiling(aten.silu.default, lambda x: aten.silu.default(x) * 1.01), {})
        found = td.locate(model, inputs, transform=transform)

        assert rungs_of(found)["backend"] == "diverged"
        assert (found.culprits[0].op, found.culprits[0].stage) == ("aten.silu.default", "forward")
        assert found.compiles <= 3

    def test_one_that_is_wrong_in_the_backward_only_is_named_as_that(self):
        model, inputs = gated()
        wrong = lambda *args: aten.silu_backward.default(*args) * 1.01  # noqa: E731
        found = td.locate(model, inputs, transform=Compiler(spoiling(aten.silu_backward.default, wrong), {}))

        assert [(culprit.op, culprit.stage) for culprit in found.culprits] == [
            ("aten.silu_backward.default", "gradients")
        ]

    def test_a_black_box_that_is_not_built_on_aot_is_tapped_as_it_is(self):
        def black_box(graph_module, inputs):
            for node in graph_module.graph.nodes:
                if getattr(node.target, "__name__", "") == "silu":
                    node.target = torch.nn.functional.gelu
                    node.kwargs = {}
            graph_module.recompile()
            return lambda *args: graph_module(*args)

        model, inputs = gated()
        found = td.locate(model, inputs, transform=Compiler(black_box, {}))

        assert [culprit.op for culprit in found.culprits] == ["silu"]

    def test_a_node_that_cannot_run_on_values_of_another_dtype_is_noted_and_the_one_before_it_is_named(self):
        def black_box(graph_module, inputs):
            graph = graph_module.graph
            for node in list(graph.nodes):
                if getattr(node.target, "__name__", "") == "silu":
                    with graph.inserting_after(node):
                        narrow = graph.call_method("bfloat16", (node,))
                    with graph.inserting_after(narrow):
                        back = graph.call_method("to", (narrow, inputs[0].dtype))
                    for user in [user for user in node.users if user is not narrow]:
                        user.replace_input_with(node, back if user.target is torch._C._nn.linear else narrow)
            graph_module.recompile()
            return lambda *args: graph_module(*args)

        model, inputs = gated()
        found = td.locate(model, inputs, transform=Compiler(black_box, {}))

        assert (found.verdict, [culprit.op for culprit in found.culprits]) == (td.Verdict.DIVERGED, ["silu"])
        assert any("cannot run on the values that the candidate fed it" in note for note in found.notes)

    def test_a_black_box_whose_gradient_alone_is_wrong_is_found_by_gates(self):
        def black_box(graph_module, inputs):
            for node in list(graph_module.graph.nodes):
                if getattr(node.target, "__name__", "") == "silu":
                    with graph_module.graph.inserting_after(node):
                        spoiled = graph_module.graph.call_function(spoil_backward, (node,))
                    node.replace_all_uses_with(spoiled, lambda user, spoiled=spoiled: user is not spoiled)
            graph_module.recompile()
            return lambda *args: graph_module(*args)

        model, inputs = gated()
        found = td.locate(model, inputs, transform=Compiler(black_box, {}))

        assert [(culprit.op, culprit.stage) for culprit in found.culprits] == [("silu", "gradients")]

    def test_gates_take_their_hooks_off_again(self):
        given = []

        def black_box(graph_module, inputs):
            def call(*args):
                given.extend(args)
                return graph_module(*args)

            return call

        model, inputs = gated()
        td.locate(model, inputs, transform=Compiler(black_box, {}))
        trained = [value for value in given if value.is_leaf and value.requires_grad]

        assert len(trained) >= 4
        assert all(not leaf._post_accumulate_grad_hooks for leaf in trained)

    def test_what_is_written_in_place_is_tapped_as_it_is_then(self):
        found = td.locate(overwriting, (torch.randn(8),), transform=Compiler(black_box_with("mul_", "div_"), {}))

        assert [culprit.op for culprit in found.culprits] == ["mul_"]

    def test_what_is_written_in_place_and_right_has_no_culprit(self):
        found = td.locate(overwriting, (torch.randn(8),), transform=Compiler(black_box_with("mul_", "mul_"), {}))

        assert (found.verdict, found.culprits) == (td.Verdict.EQUIVALENT, ())
        assert found.coverage.matched == found.coverage.total

    def test_what_is_written_under_another_name_is_said_to_be_left_out(self):
        def through_a_view(x):
            inner = torch.sin(x)
            inner[1:3].mul_(2.0)
            return torch.cos(inner) * 2.0

        found = td.locate(through_a_view, (torch.randn(8),), transform=Compiler(black_box_with("mul_", "mul_"), {}))

        assert found.culprits == ()
        assert any("were not judged: cos" in note for note in found.notes)
        assert found.coverage.matched == found.coverage.total - 1

    def test_the_gradients_of_what_is_overwritten_are_left_out_and_nobody_is_blamed(self):
        weight = torch.nn.Parameter(torch.randn(8))

        def trained(x):
            inner = torch.sin(x * weight) * 1.5
            inner.mul_(2.0)
            return torch.cos(inner)

        found = td.locate(trained, (torch.randn(8),), transform=Compiler(black_box_with("mul_", "mul_"), {}))

        assert (found.verdict, found.culprits) == (td.Verdict.EQUIVALENT, ())
        assert any("that are overwritten or get other strides were not compared: inner" in note for note in found.notes)

    @pytest.mark.parametrize("compiler", ["black box", "aot"])
    @pytest.mark.parametrize(
        "x", [torch.arange(16.0)[::2], torch.arange(8.0)], ids=["memory that is not the input's", "the input's own"]
    )
    def test_memory_that_no_tap_shows_is_not_judged(self, compiler, x):
        def strided(x):
            return torch.as_strided(torch.sin(x)[2:], (3,), (2,), 1) + torch.as_strided(x, (3,), (2,), 1)

        made = black_box_with("mul_", "mul_") if compiler == "black box" else backend({})
        found = td.locate(strided, (x,), transform=Compiler(made, {}))

        assert (found.verdict, found.culprits) == (td.Verdict.EQUIVALENT, ())
        left_out = [note for note in found.notes if "which a tap does not show: not judged" in note]
        assert len(left_out) == (1 if x.is_contiguous() else 2)

    def test_taps_that_do_not_fit_are_said_to_be_missing(self):
        model, inputs = gated()
        transform = Compiler(spoiling(aten.silu.default, lambda x: aten.silu.default(x) * 1.01), {})
        found = td.locate(model, inputs, transform=transform, memory_bytes=200)

        assert any("have no tap: their values do not fit into 200 bytes" in note for note in found.notes)
        assert found.coverage.matched < found.coverage.total

    def test_a_failure_that_every_tap_hides_is_said_to_be_hidden(self):
        def only_when_nobody_looks(graph_module, inputs):
            silu = [node for node in graph_module.graph.nodes if getattr(node.target, "__name__", "") == "silu"]
            if silu and all(len(node.users) == 1 for node in silu):
                silu[0].target, silu[0].kwargs = torch.nn.functional.gelu, {}
            graph_module.recompile()
            return lambda *args: graph_module(*args)

        model, inputs = gated()
        found = td.locate(model, inputs, transform=Compiler(only_when_nobody_looks, {}))

        assert found.verdict is td.Verdict.DIVERGED
        assert any("the verdict is equivalent" in note for note in found.notes)

    def test_leaves_the_compiler_as_it_was_although_something_raised(self):
        stock = vars(common)["aot_module_simplified"]

        def fail_inside():
            with aot.intercepting(hand_on):
                assert vars(common)["aot_module_simplified"] is not stock
                raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            fail_inside()

        assert vars(common)["aot_module_simplified"] is stock


@pytest.mark.slow
@pytest.mark.xdist_group("inductor-live-bugs")
class TestInductor:
    @pytest.mark.long
    def test_names_relu_in_a_gpt2_within_three_compiles(self):
        from transformers import GPT2Config, GPT2Model

        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, activation_function="relu", use_cache=False
        )
        model = GPT2Model(config).eval()

        def last_state(tokens):
            return model(tokens).last_hidden_state

        with inductor_config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
            found = td.locate(last_state, (torch.randint(0, 64, (2, 8)),), transform="inductor")

        assert found.culprits[0].op == "aten.relu.default"
        assert found.culprits[0].rung == "backend"
        assert found.culprits[0].module_path.endswith("h.0.mlp.act")
        assert found.compiles <= 3
        assert {culprit.op for culprit in found.culprits} == {"aten.relu.default"}

    def test_names_the_floor_division(self):
        found = td.locate(*live_bugs.pt197895_floor_divide(), transform="inductor")

        assert [culprit.op for culprit in found.culprits] == ["aten.div.Tensor_mode"]

    @pytest.mark.long
    @pytest.mark.usefixtures("two_threads")
    def test_names_the_layout_as_the_cause_of_what_lies_between_two_graphs(self):
        found = td.locate(*live_bugs.pt185509_interpolate_gradient(), transform="inductor")

        assert {culprit.stage for culprit in found.culprits} == {"gradients"}
        assert {culprit.rung for culprit in found.culprits} == {"backend"}
        assert "layout_optimization=False" in found.culprits[0].cause

    def test_names_the_elided_cast_as_the_cause(self):
        found = td.locate(*live_bugs.pt181568_bf16_cast_elided(), transform="inductor", strict="casts")

        assert "emulate_precision_casts=True" in found.culprits[0].cause
