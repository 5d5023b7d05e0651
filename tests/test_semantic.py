"""The semantic question: what a native run in a narrow dtype cannot see shows in float64, and rounding does not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta.check.baseline import Baseline
from torchdelta.compare.kernels import measure
from torchdelta.compare.protocol import Yardstick, answer_in_float64
from torchdelta.records.comparison import Comparison

EQUIVALENT, DIVERGED, INCONCLUSIVE = Verdict.EQUIVALENT, Verdict.DIVERGED, Verdict.INCONCLUSIVE


def narrow_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16)).to(torch.bfloat16)


X = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


class Changed(nn.Module):
    """The net with one step of it replaced."""

    def __init__(self, change):
        super().__init__()
        self.net = narrow_net()
        self.change = change

    def forward(self, x):
        hidden = self.net[0](x)
        return self.change(self.net, hidden)


def as_it_is(net, hidden):
    return net[3](net[2](net[1](hidden)))


def scaled(net, hidden):
    return net[3](net[2](net[1](hidden)) * 1.001)


def by_tanh(net, hidden):
    return net[3](net[2](F.gelu(hidden, approximate="tanh")))


def epsilon_lost(net, hidden):
    return net[3](F.layer_norm(net[1](hidden), (64,), net[2].weight, net[2].bias, 1e-6))


@pytest.mark.parametrize("change", [scaled, by_tanh, epsilon_lost])
def test_a_change_below_the_rounding_of_bfloat16_is_seen(change):
    reference, candidate = Changed(as_it_is), Changed(change)

    report = td.check(reference, (X,), candidate=candidate)
    output = next(seen for seen in report.comparisons if seen.path == "outputs")

    assert report.questions.semantic == "asked"
    assert output.verdict is DIVERGED
    assert output.details["question"] == "semantic"
    assert "not the same function" in output.reason
    assert output.error > output.allowed > 0
    assert td.check(reference, (X,), candidate=candidate, semantic=False).stage("forward").verdict is EQUIVALENT


def test_another_order_of_the_same_sums_is_the_same_function():
    def reordered(net, hidden):
        return F.linear(net[2](net[1](hidden)).flip(-1), net[3].weight.flip(1), net[3].bias)

    assert td.check(Changed(as_it_is), (X,), candidate=Changed(reordered)).verdict is EQUIVALENT


@pytest.mark.parametrize("transform", ["aot_eager", "decompose", "export"])
def test_the_question_is_asked_of_every_transform_that_keeps_the_precision(transform):
    report = td.check(narrow_net(), (X,), transform=transform)

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


def test_a_pass_that_is_wrong_by_a_hair_is_seen_on_each_graph():
    def scale_linears(graph_module, _):
        for node in list(graph_module.graph.nodes):
            if "linear" in str(node.target) or "addmm" in str(node.target):
                with graph_module.graph.inserting_after(node):
                    scaled = graph_module.graph.call_function(torch.mul, (node, 1.001))
                node.replace_all_uses_with(scaled, lambda user, made=scaled: user is not made)

    for graph in ("dynamo", "aten", "export"):
        report = td.check(narrow_net(), (X,), transform=scale_linears, options={"graph": graph}, stages="forward")
        assert (graph, report.verdict) == (graph, DIVERGED)


def test_internal_casts_are_lifted_for_a_compiler_too():
    class Norm(nn.Module):
        def forward(self, x):
            wide = x.to(torch.float32)
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    report = td.check(Norm(), (X,), transform="aot_eager_decomp_partition")

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


def test_a_transform_that_lowers_precision_is_not_asked():
    report = td.check(nn.Linear(4, 4), (torch.randn(2, 4),), transform="cast:bfloat16")

    assert report.questions.semantic == "not asked: the transform lowers precision on purpose"


def is_double(x):
    # no question to torch, which would be answered as natively
    return x.detach().numpy().itemsize == 8


def test_a_candidate_that_refuses_float64_is_not_asked_and_says_why():
    def refusing(x):
        if is_double(x):
            raise TypeError("no kernel for float64")
        return x * 2

    report = td.check(lambda x: x * 2, (torch.randn(4),), candidate=refusing)

    assert report.verdict is EQUIVALENT
    assert "fails on the program in float64 (TypeError: no kernel for float64)" in report.questions.semantic


def test_a_program_that_refuses_float64_has_no_truth_and_is_inconclusive_where_it_differs():
    def refusing(x):
        if is_double(x):
            raise TypeError("no kernel for float64")
        return torch.exp(x)

    def nearly(x):
        return torch.exp(x) * (1 + 1e-6)

    x = torch.randn(64)
    report = td.check(refusing, (x,), candidate=nearly)

    assert report.verdict is INCONCLUSIVE
    assert "does not run in float64" in report.questions.semantic
    assert any("no truth" in note for note in report.notes)
    assert td.check(refusing, (x,), candidate=torch.exp).verdict is EQUIVALENT


def test_random_programs_draw_the_same_numbers_in_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    report = td.check(model, (torch.randn(8, 16),), transform="aot_eager")

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


def draws_in_the_dtype_of_its_input(x):
    return x * torch.rand(x.shape, dtype=x.dtype)


def draws_in_float32(x):
    return x * torch.rand_like(x, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", [draws_in_the_dtype_of_its_input, draws_in_float32])
def test_a_dtype_that_is_named_for_random_numbers_is_lifted_on_both_sides(program, dtype):
    report = td.check(program, (torch.randn(8, 16).to(dtype),), transform="aot_eager")

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, EQUIVALENT), (1.00001, DIVERGED)])
def test_it_does_not_matter_how_the_same_random_numbers_are_asked_for(factor, verdict):
    def candidate(x):
        return draws_in_the_dtype_of_its_input(x) * factor

    report = td.check(lambda x: x * torch.rand_like(x), (torch.randn(8, 16),), candidate=candidate)

    assert (report.verdict, report.questions.semantic) == (verdict, "asked")


class Casts(nn.Module):
    def forward(self, x):
        return (x.to(torch.bfloat16) * 0.3).float().exp()


@pytest.mark.parametrize(("scale", "verdict"), [(0.3, EQUIVALENT), (0.3 + 1e-6, DIVERGED)])
def test_float64_is_asked_about_an_exported_program_that_asserts_its_dtypes(scale, verdict):
    def set_scale(graph_module, _):
        for node in graph_module.graph.nodes:
            node.args = tuple(scale if arg == 0.3 else arg for arg in node.args)
        return graph_module

    torch.manual_seed(0)
    program = torch.export.export(Casts(), (torch.randn(64),)).module()
    report = td.check(program, (torch.randn(64),), transform=set_scale, options={"unchanged": "ok"})

    assert (report.verdict, report.questions.semantic) == (verdict, "asked")


def test_steps_are_asked_about_too():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)
    report = td.check(model, (x,), transform="aot_eager", stages="steps")

    assert report.verdict is EQUIVALENT
    assert all("semantic_error" in seen.details for seen in report.comparisons if seen.details)


class Counting(nn.Module):
    """Counts its calls in a single number; AOTAutograd of old torch drops writes to one, but only in float64."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * 2


DROPS_WRITES = torch.__version__ < (2, 15)


@pytest.mark.parametrize(
    ("dtype", "verdict"), [(torch.float32, EQUIVALENT), (torch.float64, DIVERGED if DROPS_WRITES else EQUIVALENT)]
)
def test_a_write_that_is_dropped_in_float64_alone_is_no_other_function(dtype, verdict):
    report = td.check(Counting().to(dtype), (torch.randn(3, dtype=dtype),), transform="aot_eager")

    assert report.verdict is verdict


# what must not pass because float64 was asked


def times_1_2_in_float32(graph_module, _):
    for node in list(graph_module.graph.nodes):
        if node.op == "output":
            for value in node.all_input_nodes:
                with graph_module.graph.inserting_before(node):
                    wrong = graph_module.graph.call_function(_wrong_in_float32, (value,))
                node.replace_input_with(value, wrong)


def _wrong_in_float32(value):
    return value * 1.2 if value.dtype is torch.float32 else value * 1.0


def test_a_truth_of_another_program_lets_nothing_pass():
    def by_precision(x):
        return x * torch.finfo(x.dtype).eps * 1e7

    x = torch.randn(64)

    assert td.check(by_precision, (x,), transform=times_1_2_in_float32).verdict is not EQUIVALENT
    by_dtype = td.check(lambda x: x * 1.1 if x.dtype is torch.float32 else x * 1.2, (x,), candidate=lambda x: x * 1.2)
    assert by_dtype.verdict is not EQUIVALENT


def test_what_float64_alone_vouches_for_is_said():
    def chaotic(x):
        for _ in range(60):
            x = 3.9 * x * (1 - x)
        return x

    def reordered(x):
        for _ in range(60):
            x = 3.9 * (x - x * x)
        return x

    report = td.check(chaotic, (torch.rand(64),), candidate=reordered)

    assert report.verdict is not DIVERGED
    is_said = any("float64 alone vouches" in note for note in report.notes)
    assert is_said or report.verdict is INCONCLUSIVE


def test_a_candidate_that_compiles_itself_is_not_asked():
    x = torch.randn(4, 4)
    model = nn.Linear(4, 4)
    report = td.check(model, (x,), candidate=torch.compile(model, backend="eager"))

    assert "the candidate was compiled before" in report.questions.semantic


@pytest.mark.parametrize("in_float64", [lambda x: x * 1.1 * torch.nan, lambda x: (x * 1.1)[:2], lambda x: (x * 1.1, x)])
def test_nan_shape_and_structure_in_float64_are_not_dropped(in_float64):
    def candidate(x):
        return in_float64(x) if is_double(x) else x * 1.1

    assert td.check(lambda x: x * 1.1, (torch.randn(8),), candidate=candidate).verdict is not EQUIVALENT


def test_large_values_that_are_no_masks_are_compared():
    x = torch.randn(100)
    x[:40] *= 1e31

    def doubled(x):
        return x * 1.5 * torch.where(x.abs() > 1e30, 2.0, 1.0)

    assert td.check(lambda x: x * 1.5, (x,), candidate=doubled).verdict is DIVERGED
    assert td.check(lambda x: x * 1.5, (x,), candidate=lambda x: x + x * 0.5).verdict is EQUIVALENT


# what must not diverge because float64 was asked


def test_a_loss_that_casts_is_lifted_with_a_compiler():
    report = td.check(
        nn.Linear(8, 8), (torch.randn(4, 8),), transform="aot_eager", loss=lambda out: out.float().square().mean()
    )

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


def test_a_part_that_is_not_compiled_does_not_make_another_function():
    @torch.compiler.disable
    def helper(x):
        return x.float() * 1.5

    report = td.check(lambda x: helper(x * 2) + 1, (torch.randn(8, 8),), transform="aot_eager")

    assert report.verdict is EQUIVALENT


@pytest.mark.parametrize(
    "constant", [lambda: torch.tensor(1.1), lambda: torch.full((1,), 1.1), lambda: torch.linspace(1.1, 1.1, 8)]
)
def test_a_constant_that_is_kept_in_float32_is_no_other_function(constant):
    assert td.check(lambda x: x * 1.1, (torch.randn(8),), candidate=lambda x: x * constant()).verdict is EQUIVALENT


@pytest.mark.parametrize("transform", ["decompose", "aot_eager_decomp_partition"])
def test_a_line_of_numbers_is_made_in_float64_on_both_sides(transform):
    report = td.check(lambda x: x * torch.linspace(0, 1, 16), (torch.randn(4, 16),), transform=transform)

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


@pytest.mark.parametrize(
    "masked",
    [
        lambda x: x + torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9),
        lambda x: x * torch.where(torch.ones(4, 4).triu(1).bool(), torch.ones(4, 4), torch.zeros(4, 4)),
        lambda x: x * torch.ones(32)[torch.arange(4)],
        lambda x: x * torch.where(torch.ones(4, 4).triu(1).bool(), 0.1, 0.3),
        lambda x: x * x.new_zeros(4).type("torch.FloatTensor"),
    ],
)
def test_masks_and_indices_of_constants_can_be_lifted(masked):
    report = td.check(masked, (torch.randn(4, 4),), transform="aot_eager")

    assert (report.verdict, report.questions.semantic) == (EQUIVALENT, "asked")


def test_an_operation_without_float64_leaves_the_native_question():
    codes = torch.randint(-100, 100, (16, 16), dtype=torch.int8)
    scales = torch.rand(16)

    def packed(x):
        return torch.ops.aten._weight_int8pack_mm(x, codes, scales) * 1.5

    def summed(x):
        made = torch.ops.aten._weight_int8pack_mm(x, codes, scales)
        return made + made * 0.5

    x = torch.randn(4, 16)
    report = td.check(packed, (x,), candidate=summed)

    assert report.verdict is EQUIVALENT
    assert "_weight_int8pack_mm has no float64" in report.questions.semantic
    assert any("the truth is not all in float64" in note for note in report.notes)
    assert td.check(packed, (x,), candidate=lambda x: packed(x) * 1.01).verdict is DIVERGED


def test_float8_is_named_as_what_cannot_be_lifted():
    x = torch.randn(16, 16)

    def rounded(x):
        return x.to(torch.float8_e4m3fn).float() * 2

    report = td.check(rounded, (x,), candidate=lambda x: rounded(x) + 0.0)
    given = td.check(lambda x: x.float() * 2, (x.to(torch.float8_e4m3fn),), candidate=lambda x: x.float() + x.float())

    assert (report.verdict, given.verdict) == (EQUIVALENT, EQUIVALENT)
    assert "float8_e4m3fn" in report.questions.semantic
    assert any("float8_e4m3fn" in note for note in given.notes)


def test_a_change_far_below_float32_is_seen_in_what_a_transform_made_of_the_program():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16, eps=1e-12), nn.Linear(16, 4))
    x = torch.randn(8, 16)

    clean = td.check(model, (x,), transform="export")
    faulty = td.check(model, (x,), transform=td.faults.plant("epsilon_divided_by_10"))

    assert (clean.verdict, faulty.verdict) == (EQUIVALENT, DIVERGED)


def replaced(name, function):
    """Return a pass that calls another function in place of the one with this name."""

    def change(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            if getattr(node.target, "__name__", "") == name:
                node.target = function
        graph_module.recompile()
        return graph_module

    return change


@pytest.mark.parametrize("cast", [torch.Tensor.double, torch.Tensor.bfloat16, torch.Tensor.float])
@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (lambda x: F.gelu(x, approximate="tanh"), DIVERGED),
        (lambda x: F.gelu(x) * 1.01, DIVERGED),
        (lambda x: F.gelu(x) * 1.0, EQUIVALENT),
    ],
)
def test_a_result_that_is_cast_up_has_not_the_noise_of_its_dtype(cast, function, verdict):
    generator = torch.Generator().manual_seed(0)
    args = (
        torch.randn(16, 32, generator=generator).bfloat16(),
        torch.randn(32, 32, generator=generator).div(6).bfloat16(),
    )

    report = td.check(lambda x, w: cast(F.gelu(x @ w)), args, transform=replaced("gelu", function))

    assert report.verdict is verdict


@pytest.mark.parametrize(
    "as_number",
    [
        torch.Tensor.item,
        lambda x: x.detach().numpy().astype("float64"),
        lambda x: x.detach().numpy().astype("float64").sum(),
    ],
)
def test_a_number_has_not_the_noise_of_the_dtype_from_which_it_comes(as_number):
    x = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 1

    def program(x):
        return as_number((x * 1.1).sum())

    def slightly_off(x):
        return as_number((x * 1.1).sum() * (1 + 2e-6))

    def in_halves(x):
        return as_number((x[::2] * 1.1).sum() + (x[1::2] * 1.1).sum())

    assert td.check(program, (x,), candidate=slightly_off).verdict is DIVERGED
    assert td.check(program, (x,), candidate=in_halves).verdict is EQUIVALENT


class Alike(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        vars(self).update(attributes)

    def forward(self, x):
        approximate, factor = getattr(self, "approximate", "none"), getattr(self, "factor", 1.0)
        return F.gelu(self.layer(x), approximate=approximate) * factor


@pytest.mark.parametrize(
    ("attributes", "verdict"),
    [
        ({"approximate": "tanh"}, DIVERGED),
        ({"factor": 1.005}, DIVERGED),
        ({"approximate": "none", "factor": 1.0}, EQUIVALENT),
        ({"factor": torch.ones((), dtype=torch.bfloat16)}, EQUIVALENT),
    ],
)
def test_a_text_or_number_of_another_implementation_is_not_rounded_to_its_dtype(attributes, verdict):
    program, other = Alike().bfloat16(), Alike(**attributes).bfloat16()
    other.load_state_dict(program.state_dict())

    assert td.check(program, (X,), candidate=other).verdict is verdict


def with_ties(k, x):
    """Take the floor of whole numbers that were divided and multiplied: rounding decides it, in float64 too."""
    return torch.cat([torch.floor(k / 3 * 3) - k + 1, torch.sin(x)], -1)


def one_negated(x):
    y = torch.sin(x)
    return y * torch.ones_like(y).index_fill(-1, torch.tensor(5), -1.0)


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (lambda x: torch.sin(x) * 1.2, DIVERGED),
        (lambda x: torch.sin(x) * 1.0001, DIVERGED),
        (one_negated, INCONCLUSIVE),
        (lambda x: torch.sin(x) * 1.0, EQUIVALENT),
    ],
)
def test_elements_that_jump_do_not_hide_an_error_of_all_others(function, verdict):
    generator = torch.Generator().manual_seed(0)
    args = (
        torch.randint(4, 500, (1, 16), generator=generator).float(),
        torch.randn(1, 240, generator=generator),
    )

    report = td.check(with_ties, args, transform=replaced("sin", function))

    assert report.verdict is verdict


class UnderAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(F.gelu(self.first(x)))


@pytest.mark.parametrize(("approximate", "verdict"), [("tanh", DIVERGED), ("none", EQUIVALENT)])
def test_float64_is_asked_about_a_pass_over_a_program_under_autocast(approximate, verdict):
    other = replaced("gelu", lambda x: F.gelu(x, approximate=approximate))

    report = td.check(UnderAutocast(), (X.float(),), transform=other)

    assert report.questions.semantic == "asked"
    assert report.verdict is verdict


class Shifted(nn.Module):
    """Softmax of scores that a bias shifts as a whole: the bias has a gradient of rounding alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return F.softmax(x @ self.weight + self.bias, dim=-1) @ self.weight


def test_noise_in_float64_is_not_measured_for_a_gradient_that_is_zero(monkeypatch):
    asked = []
    run_noisy = Baseline._run_noisy

    def recorded(self, index, lifted, *how):
        asked.append(lifted)
        return run_noisy(self, index, lifted, *how)

    def rounded_otherwise(graph_module, inputs):
        (x,) = [node for node in graph_module.graph.nodes if node.op == "placeholder" and node.name.endswith("x_")]
        with graph_module.graph.inserting_after(x):
            third = graph_module.graph.call_function(torch.mul, (x, 1 / 3))
        with graph_module.graph.inserting_after(third):
            x.replace_all_uses_with(graph_module.graph.call_function(torch.mul, (third, 3.0)))
        third.args = (x, 1 / 3)
        graph_module.recompile()
        return graph_module

    monkeypatch.setattr(Baseline, "_run_noisy", recorded)
    report = td.check(Shifted(), (X.float()[:, :8],), transform=rounded_otherwise)

    assert report.verdict is EQUIVALENT
    assert asked == [False]


@pytest.mark.parametrize(
    ("stage", "size", "resolution", "allowed", "is_asked"),
    [
        ("gradients", 1.0, 5.0, 5.0, True),
        ("gradients", 1e-6, 5.0, 5e-6, True),
        ("gradients", 1e-15, 5.0, 5e-15, False),
        ("forward", 1e-15, 5.0, 5e-15, True),
        ("gradients", 1e-15, 1e13, 1e-2, True),
        ("gradients", 1.0, 1e-9, 1e-9, False),
    ],
)
@pytest.mark.parametrize("other", [1e-9, 0.1])
def test_float64_itself_is_asked_unless_it_could_show_nothing(stage, size, resolution, allowed, is_asked, other):
    def answer(path, size, resolution, allowed):
        values = torch.full((2,), size, dtype=torch.float64)
        return Comparison(
            path=path,
            verdict=EQUIVALENT,
            reason="",
            dtype="float64",
            shape=(2,),
            resolution=resolution,
            allowed=allowed,
            measurement=measure(values, values * 1.5),
        )

    answers = {stage: {"w": answer("w", 1.0, other, other), "bias": answer("bias", size, resolution, allowed)}}
    asked = []
    answer_in_float64(lambda _: answers, Yardstick(reference=0), lambda: asked.append("float64"))

    is_coarse = resolution > 1.0
    assert asked == ["float64"] * (is_asked or (is_coarse and other == 0.1))


class Joined(nn.Module):
    """The same three layers as one, with names of its own."""

    def __init__(self, layers, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))
        self.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]))
        self.scale = scale

    def forward(self, x):
        query, key, value = F.linear(x, self.weight, self.bias).chunk(3, -1)
        return (query @ key.t() * self.scale).softmax(-1) @ value


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        query, key, value = (layer(x) for layer in self.layers)
        return (query @ key.t()).softmax(-1) @ value


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, EQUIVALENT), (1.005, DIVERGED)])
def test_weights_that_are_copies_under_other_names_are_not_rounded(scale, verdict):
    reference = Apart().to(torch.bfloat16)

    report = td.check(reference, (X,), candidate=Joined(reference.layers, scale), stages="forward")

    assert report.verdict is verdict


class Widening(nn.Module):
    """Two layers of different widths, with biases of zeros."""

    def __init__(self, scale=1.0, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.scale = scale

    def forward(self, x):
        narrow, wide = self.children()
        return wide(narrow(x).tanh() * self.scale).softmax(-1)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, EQUIVALENT), (1.005, DIVERGED)])
def test_copies_of_zeros_of_several_lengths_are_not_rounded(scale, verdict):
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.Linear(32, 64)]
    for layer in layers:
        nn.init.zeros_(layer.bias)
    reference = Widening(narrow=layers[0], wide=layers[1]).to(torch.bfloat16)
    candidate = Widening(scale, first=copy.deepcopy(layers[0]), second=copy.deepcopy(layers[1]))

    report = td.check(reference, (X,), candidate=candidate, stages="forward")

    assert report.verdict is verdict


def test_weights_that_were_folded_are_rounded_to_their_dtype():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.scale = nn.Linear(32, 32, bias=False), nn.Parameter(torch.rand(32) + 0.5)

        def forward(self, x):
            return self.layer(x * self.scale)

    reference = Scaled().to(torch.bfloat16)
    folded = nn.Linear(32, 32, bias=False).to(torch.bfloat16)
    folded.weight = nn.Parameter((reference.layer.weight * reference.scale).detach())

    assert td.check(reference, (X,), candidate=folded, stages="forward").verdict is not DIVERGED
