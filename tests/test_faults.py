"""Every kind of fault changes a program that has a place for it, and is refused by one that has none."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.modes import lift
from torchdelta.audit.faults import FAULTS, NotPlantable, PlaceLost, eligible_places, plant
from torchdelta.errors import UsageError
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.program.stages import cotangent_for
from torchdelta.transforms.cast import Cast
from torchdelta.transforms.compiler import Compiler
from torchdelta.transforms.export import Export
from torchdelta.transforms.replacement import Replacement

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TOKENS = torch.tensor([[1, 2, 3, 0], [3, 3, 1, 2]])
HEADS = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(2))


class Computes(nn.Module):
    """A function with two trained layers around it, so that there is always a gradient to get wrong."""

    def __init__(self, function, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.inner = nn.Linear(width, width, bias=False)
        self.outer = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.function(self.outer(self.inner(x)))


def written_out_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def masked_scores(x):
    positions = torch.arange(x.shape[-1])
    return x.masked_fill(positions[None, :] > 2, 0.0) * (positions[None, :] <= positions[:4, None])


def attention(x):
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def repeated_heads(x):
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, 3, length, width).reshape(batch, 3 * heads, length, width)


def read_again(x):
    total = x + 2 * x
    return total * x


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    def __init__(self, number=3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def embedding(padding_idx=None):
    torch.manual_seed(0)
    return nn.Embedding(5, 3, padding_idx=padding_idx)


def convolution():
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3, padding=1)


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 5)


def layer_norm(x):
    return functional.layer_norm(x, (6,))


APPLIES = [
    ("gelu_approximation", Computes(functional.gelu), X),
    ("gelu_coefficient", Computes(written_out_gelu), X),
    ("relu_leaky", Computes(torch.relu), X),
    ("activation_approximated", Computes(functional.silu), X),
    ("activation_approximated", Computes(torch.tanh), X),
    ("activation_approximated", Computes(torch.sigmoid), X),
    ("attention_scale_dropped", Computes(attention, 4), HEADS),
    ("attention_scale_dropped", Computes(lambda x: (x @ x.mT) * 0.5, 4), HEADS),
    ("attention_scale_dropped", Computes(lambda x: (x @ x.mT) / 2.0, 4), HEADS),
    ("causal_mask_off_by_one", Computes(attention, 4), HEADS),
    ("causal_mask_off_by_one", Computes(lambda x: x.tril()), X),
    ("causal_mask_off_by_one", Computes(lambda x: x.triu(1)), X),
    ("causal_mask_off_by_one", Computes(masked_scores), X),
    ("softmax_dimension", Computes(lambda x: x.softmax(-1)), X),
    ("softmax_dimension", Computes(lambda x: x.softmax(0)), X),
    ("head_order", Computes(repeated_heads, 4), HEADS),
    ("epsilon_divided_by_10", Computes(layer_norm), X),
    ("epsilon_divided_by_10", Computes(rms_norm), X * 1e-2),
    ("epsilon_1e_3", nn.BatchNorm2d(3).eval(), IMAGE),
    ("epsilon_1e_3", nn.GroupNorm(3, 3), IMAGE),
    ("epsilon_1e_3", nn.RMSNorm(6, eps=1e-6), X),
    ("layer_norm_unbiased_variance", nn.LayerNorm(6), X),
    ("layer_norm_unbiased_variance", Computes(lambda x: functional.layer_norm(x, (4, 6))), X),
    ("layer_norm_epsilon_outside_root", nn.LayerNorm(6), X),
    ("slice_off_by_one", Computes(lambda x: x[:, 1:4]), X),
    ("slice_off_by_one", Computes(lambda x: x[:, -3:]), X),
    ("slice_off_by_one", Computes(lambda x: x[1:4:2]), X),
    ("slice_off_by_one", Computes(lambda x: x[:, -1]), X),
    ("view_order", Computes(lambda x: x.t().reshape(-1)), X),
    ("tail_element", Computes(torch.sin), X),
    ("integer_off_by_one", Computes(lambda x: x * torch.arange(6)), X),
    ("integer_off_by_one", Computes(lambda x: x[:, torch.arange(6) // 2]), X),
    ("embedding_padding", embedding(), TOKENS),
    ("embedding_padding", embedding(padding_idx=1), TOKENS),
    ("top_k_smallest", Computes(lambda x: x.topk(2)[0]), X),
    ("padding_asymmetric", convolution(), IMAGE),
    ("add_to_subtract", Computes(lambda x: x + x.sin()), X),
    ("residual_dropped", Computes(lambda x: x + x.sin()), X),
    ("residual_dropped", Computes(lambda x: x.sin() + x), X),
    ("bias_dropped", linear(), X),
    ("bias_dropped", convolution(), IMAGE),
    ("bias_dropped", lambda x, y: torch.addmm(x, x, y), (X[:, :4], X[:, 1:5])),
    ("matmul_operands_swapped", Computes(torch.sin), X),
    ("matmul_operands_swapped", lambda x, y: x @ y, (X[:, :4], X[:, 1:5])),
    ("matmul_operands_swapped", lambda x, y: torch.addmm(x, x, y), (X[:, :4], X[:, 1:5])),
    ("negation_dropped", Computes(lambda x: torch.cat((x, -x))), X),
    ("mean_over_n_minus_1", Computes(lambda x: x.mean(-1)), X),
    ("mean_over_n_minus_1", Computes(lambda x: x.mean()), X),
    ("clamp_bound", Computes(lambda x: x.clamp(-0.1, 0.1)), X),
    ("clamp_bound", Computes(lambda x: x.clamp(min=0)), X),
    ("scale_by_1_001", Computes(torch.sin), X),
    ("scale_by_1_00001", Computes(torch.sin), X),
    ("matmul_low_precision", linear(), X),
    ("matmul_low_precision", Computes(lambda x: x @ x.mT, 4), HEADS),
    ("matmul_low_precision", lambda x, y: torch.addmm(x, x, y), (X[:, :4], X[:, 1:5])),
    ("matmul_low_precision", torch.mm, (X[:, :4], X[:, 1:5].T)),
    ("cast_through_float16", Computes(torch.sin), X),
    ("cast_through_bfloat16", Computes(torch.sin), X),
    ("rsqrt_one_newton_step", Computes(rms_norm), X),
    ("rsqrt_two_newton_steps", Computes(rms_norm), X),
    ("round_toward_zero", Computes(torch.sin), X),
    ("nan_lost", lambda x: x.sqrt(), X),
    ("gradient_detached", Computes(torch.sin), X),
    ("parameter_stale", linear(), X),
    ("dropout_active", nn.Sequential(linear(), nn.Dropout(0.5)).eval(), X),
    ("dropout_active", nn.Sequential(linear(), nn.Dropout(0.0)), X),
    ("operand_overwritten", Computes(read_again), X),
]
BY_FUNCTIONS_OF_OURS = [
    ("activation_approximated", Computes(torch.tanh), X),
    ("causal_mask_off_by_one", Computes(attention, 4), HEADS),
    ("layer_norm_unbiased_variance", nn.LayerNorm(6), X),
    ("slice_off_by_one", Computes(lambda x: x[:, 1:4]), X),
    ("tail_element", Computes(torch.sin), X),
    ("matmul_low_precision", linear(), X),
    ("rsqrt_one_newton_step", Computes(rms_norm), X),
    ("round_toward_zero", Computes(torch.sin), X),
]
NEARLY_APPLIES = [
    ("gelu_coefficient", lambda x: x * 0.05, X),
    ("attention_scale_dropped", lambda x: x * 0.5, X),
    ("attention_scale_dropped", lambda x: (x @ x.t()) * 1.0, X),
    ("causal_mask_off_by_one", lambda x: functional.scaled_dot_product_attention(x, x, x), HEADS),
    ("causal_mask_off_by_one", lambda x: x <= x.t(), X[:, :4]),
    ("softmax_dimension", lambda x: x.softmax(-1), X[0]),
    ("head_order", lambda x: x.reshape(8, 3), X),
    ("epsilon_1e_3", lambda x: x + 0.5, X),
    ("slice_off_by_one", lambda x: x[:, 0:6] * 1, X),
    ("slice_off_by_one", lambda x: x[:, :, 0], TOKENS[..., None]),
    ("view_order", lambda x: x.t() * 2, X),
    ("integer_off_by_one", lambda x: x * torch.arange(6.0), X),
    ("padding_asymmetric", nn.Conv2d(3, 4, 3), IMAGE),
    ("residual_dropped", lambda x: x + 1, X),
    ("residual_dropped", lambda x: x + x[0], X),
    ("bias_dropped", nn.Linear(6, 5, bias=False), X),
    ("matmul_operands_swapped", nn.Linear(6, 5), X),
    ("mean_over_n_minus_1", lambda x: x[:, :1].mean(-1), X),
    ("clamp_bound", lambda x: x.clamp(0, 2), TOKENS),
    ("matmul_low_precision", lambda x: x[0] @ x[1], X),
    ("cast_through_bfloat16", lambda x: x.sin(), X.bfloat16()),
    ("cast_through_float16", lambda x: x.sin(), X.half()),
    ("round_toward_zero", lambda x: x.sin(), X.double()),
    ("tail_element", lambda x: x.sum(), X),
    ("dropout_active", nn.Dropout(0.5).train(), X),
    ("operand_overwritten", lambda x: x + x.sin(), X),
]


def side_of(program, given, **options):
    args = given if isinstance(given, tuple) else (given,)
    return Side.copied_from(Program(name="program", call=program, args=args), **options)


def run(transform, program, given):
    """Return the output and the gradients of what a transform makes of a program."""
    with transform.apply(side_of(program, given), draws_random=False) as transformed:
        torch.manual_seed(0)
        output = transformed.side.call(*transformed.side.args)
        if output.requires_grad:
            output.backward(cotangent_for(output, "output", 0))
        gradients = {name: parameter.grad for name, parameter in transformed.side.state.parameters.items()}
        return {"output": output.detach(), **gradients}


def place_in(planted, program, given, **options):
    with planted.apply(side_of(program, given, **options), draws_random=False, lifted=bool(options)):
        return planted.place


def is_same(first, second):
    return first is second if first is None or second is None else torch.equal(first, second)


def exported(program, *args):
    return torch.export.export(program, args, strict=False).module()


def kind_of(case):
    return case if isinstance(case, str) else ""


class TestEveryKind:
    def test_is_tried_here(self):
        assert {kind for kind, _, _ in APPLIES} == set(FAULTS)

    @pytest.mark.parametrize("kind", list(FAULTS))
    def test_says_what_it_is_in_one_line(self, kind):
        fault = FAULTS.get(kind)

        assert fault.name == kind
        assert kind.isidentifier()
        assert fault.summary
        assert "\n" not in fault.summary

    @pytest.mark.parametrize(("kind", "program", "given"), APPLIES, ids=kind_of)
    def test_changes_what_the_program_computes_or_learns(self, kind, program, given):
        clean = run(Export({}), program, given)
        faulty = run(plant(kind), program, given)

        assert clean.keys() == faulty.keys()
        assert not all(map(is_same, clean.values(), faulty.values()))
        assert faulty["output"].shape == clean["output"].shape
        assert faulty["output"].dtype == clean["output"].dtype

    @pytest.mark.parametrize(("kind", "program", "given"), APPLIES, ids=kind_of)
    def test_keeps_shapes_and_dtypes_in_half_precision(self, kind, program, given):
        if kind == "cast_through_bfloat16":
            pytest.skip("in bfloat16 there is nothing to cast")
        args = given if isinstance(given, tuple) else (given,)
        given = tuple(arg.bfloat16() if arg.is_floating_point() else arg for arg in args)
        program = copy.deepcopy(program).bfloat16() if isinstance(program, nn.Module) else program

        clean = run(Export({}), program, given)
        faulty = run(plant(kind), program, given)

        assert faulty["output"].shape == clean["output"].shape
        assert faulty["output"].dtype == clean["output"].dtype

    @pytest.mark.parametrize(("kind", "program", "given"), APPLIES, ids=kind_of)
    def test_is_planted_at_the_same_node_in_float64(self, kind, program, given):
        planted = plant(kind)
        native = place_in(planted, program, given)

        assert place_in(planted, program, given, convert=lift.widened) == native

    @pytest.mark.parametrize(("kind", "program", "given"), NEARLY_APPLIES, ids=kind_of)
    def test_is_refused_where_it_makes_no_sense(self, kind, program, given):
        with pytest.raises(NotPlantable, match=f"{kind} cannot be planted: it needs a"):
            place_in(plant(kind), program, given)

    @pytest.mark.parametrize("kind", list(FAULTS))
    def test_is_refused_where_nothing_is_computed(self, kind):
        with pytest.raises(NotPlantable, match=kind):
            place_in(plant(kind), lambda x: x.reshape(-1), X)

    @pytest.mark.parametrize(("kind", "program", "given"), BY_FUNCTIONS_OF_OURS, ids=kind_of)
    def test_leaves_a_graph_of_importable_functions(self, kind, program, given):
        with plant(kind).apply(side_of(program, given), draws_random=False) as transformed:
            graph = transformed.side.owner.graph

        targets = [node.target for node in graph.nodes if node.op == "call_function"]
        ours = [target for target in targets if target.__module__.startswith("torchdelta")]
        assert len(ours) == 1
        assert getattr(importlib.import_module(ours[0].__module__), ours[0].__name__) is ours[0]


class TestWhere:
    def test_the_same_seed_gives_the_same_place(self):
        assert place_in(plant("tail_element", seed=3), Blocks(), X) == place_in(
            plant("tail_element", seed=3), Blocks(), X
        )

    def test_other_seeds_reach_every_place(self):
        places = {place_in(plant("residual_dropped", seed=seed), Blocks(), X).node for seed in range(12)}

        assert places == {"add", "add_1", "add_2"}

    def test_excluded_nodes_are_left_alone(self):
        first = place_in(plant("residual_dropped"), Blocks(2), X)
        second = place_in(plant("residual_dropped", excluding=[first.node]), Blocks(2), X)

        assert {first.node, second.node} == {"add", "add_1"}
        with pytest.raises(NotPlantable, match="all 2 places of the program are excluded"):
            place_in(plant("residual_dropped", excluding=["add", "add_1"]), Blocks(2), X)

    def test_a_place_names_operator_module_and_line(self):
        place = place_in(plant("gelu_approximation", excluding=["gelu", "gelu_2"]), Blocks(), X)

        assert (place.kind, place.node, place.op) == ("gelu_approximation", "gelu_1", "aten.gelu.default")
        assert place.module_path == "blocks.1.mlp.1"
        assert "test_faults.py:" in place.source_line
        assert place.source_line.endswith("return x + self.mlp(self.norm(x))")

    def test_a_parameter_is_placed_by_its_module_and_first_reader(self):
        place = place_in(plant("parameter_stale", excluding=["weight"]), linear(), X)

        assert (place.node, place.op, place.module_path) == ("bias", "get_attr", "")
        assert place_in(plant("parameter_stale"), Blocks(), X).module_path.startswith("blocks.")

    def test_a_module_that_a_function_calls_has_the_name_it_has_there(self):
        model = Blocks()

        place = place_in(plant("gelu_approximation", excluding=["gelu", "gelu_1"]), lambda x: model(x) * 2, X)

        assert place.module_path == "model.blocks.2.mlp.1"

    def test_a_node_that_nothing_depends_on_is_no_place(self):
        def wasteful(x):
            torch.relu(x)
            return x * 2

        with pytest.raises(NotPlantable, match="relu_leaky cannot be planted: it needs a relu"):
            place_in(plant("relu_leaky"), wasteful, X)

    def test_places_can_be_counted(self):
        places = eligible_places("bias_dropped", exported(Blocks(), X))

        assert [place.module_path for place in places] == [f"blocks.{i}.mlp.{j}" for i in range(3) for j in (0, 3)]
        assert eligible_places("relu_leaky", exported(Blocks(), X)) == ()

    def test_it_is_on_the_notes(self):
        with plant("bias_dropped").apply(side_of(linear(), X), draws_random=False) as transformed:
            assert transformed.notes[0].startswith(
                "a fault was planted on purpose: bias_dropped at linear (aten.linear"
            )

    def test_a_program_that_is_another_in_float64_has_no_such_place(self):
        planted = plant("relu_leaky")
        place_in(planted, lambda x: torch.relu(x) if x.dtype == torch.float32 else x.abs(), X)

        with pytest.raises(PlaceLost, match=r"relu_leaky was planted at relu .*float64 has no such node"):
            place_in(
                planted,
                lambda x: torch.relu(x) if x.dtype == torch.float32 else x.abs(),
                X,
                convert=lift.widened,
            )


class TestTraining:
    @pytest.mark.parametrize("kind", ["tail_element", "round_toward_zero", "cast_through_bfloat16", "bias_dropped"])
    def test_gradients_reach_what_the_clean_program_trains(self, kind):
        clean = run(Export({}), Blocks(), X)
        faulty = run(plant(kind), Blocks(), X)

        without = [name for name, gradient in faulty.items() if gradient is None]
        assert clean.keys() == faulty.keys() == {"output", *dict(Blocks().named_parameters())}
        assert len(without) == (1 if kind == "bias_dropped" else 0)

    def test_a_stale_parameter_does_not_learn(self):
        with plant("parameter_stale", excluding=["bias"]).apply(side_of(linear(), X), draws_random=False) as faulty:
            side = faulty.side
            before = side.call(X)
            with torch.no_grad():
                side.state.parameters["weight"].add_(1.0)

            assert torch.equal(side.call(X), before)
            assert list(side.state.buffers) == []

    def test_rounding_toward_zero_clears_one_bit_and_keeps_the_gradient(self):
        clean = run(Export({}), Computes(torch.sin), X)
        faulty = run(plant("round_toward_zero", excluding=["linear", "linear_1"]), Computes(torch.sin), X)

        cleared = clean["output"].view(torch.int32) & -2
        assert torch.equal(faulty["output"].view(torch.int32), cleared)
        assert torch.equal(faulty["inner.weight"], clean["inner.weight"])

    @pytest.mark.parametrize(("kind", "error"), [("rsqrt_one_newton_step", 1.8e-3), ("rsqrt_two_newton_steps", 4.8e-6)])
    def test_newton_steps_leave_the_error_that_they_are_known_for(self, kind, error):
        x = torch.logspace(-20, 20, 1001, dtype=torch.float64)

        relative = (run(plant(kind), lambda x: x.rsqrt(), x)["output"] * x.sqrt() - 1).abs().max()

        assert error / 2 < relative < error


class TestThen:
    @pytest.mark.parametrize("then", ["export", "decompose", "eager", "aot_eager"])
    @pytest.mark.parametrize("kind", ["residual_dropped", "matmul_low_precision"])
    def test_what_follows_is_given_the_faulty_program(self, kind, then):
        planted = plant(kind, then=then)

        report = td.check(Blocks().eval(), (X,), transform=planted)

        assert report.verdict is Verdict.DIVERGED
        assert planted.place.kind == kind
        assert any("a fault was planted on purpose" in note for note in report.notes)

    @pytest.mark.parametrize("then", ["export", "decompose", "eager"])
    def test_the_state_keeps_its_names(self, then):
        model = Blocks().eval()

        report = td.check(lambda x: model(x) * 2, (X,), transform=plant("parameter_stale", then=then))

        paths = [seen.path for seen in report.comparisons if seen.verdict is Verdict.DIVERGED]
        diverged = {path.removeprefix("iterations[1].") for path in paths}  # an export is run with other inputs too
        assert len(diverged) == 1
        assert diverged.pop().startswith("parameters['model.blocks.")

    def test_a_cast_copies_the_faulty_program(self):
        planted = plant("residual_dropped", then="cast:bfloat16")

        report = td.check(Blocks().eval(), (X,), transform=planted)

        assert report.verdict is Verdict.DIVERGED
        assert not report.unmatched

    def test_it_is_what_follows_that_the_caller_has_to_know_about(self):
        assert plant("tail_element").traits.is_compiler is False
        assert plant("tail_element", then=Compiler("eager", {})).traits.is_compiler is True
        assert plant("tail_element", then=Cast("bfloat16", {})).traits.lowered_to is torch.bfloat16

    def test_another_program_has_no_fault(self):
        with pytest.raises(UsageError, match="tail_element cannot be planted under Replacement"):
            plant("tail_element", then=Replacement(torch.sin))

    @pytest.mark.slow
    @pytest.mark.xdist_group("inductor-b")
    @pytest.mark.parametrize(
        ("kind", "program", "given"),
        [
            case
            for case in APPLIES
            if case[0] in ("rsqrt_one_newton_step", "causal_mask_off_by_one", "slice_off_by_one")
        ],
        ids=kind_of,
    )
    def test_inductor_compiles_it(self, kind, program, given):
        compiled = run(plant(kind, then="inductor"), program, given)
        eager = run(plant(kind), program, given)

        for name, value in eager.items():
            torch.testing.assert_close(compiled[name], value)


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UsageError, match="unknown fault 'residual_drop': did you mean residual_dropped"):
        plant("residual_drop")


def test_it_is_part_of_the_public_face():
    assert td.faults.plant is plant
