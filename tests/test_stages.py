"""Forward, gradients and optimizer steps: what each leaves behind, and what the truth sees of it."""

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.modes import lift
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side
from torchdelta.program.stages import Plan, cotangent_for, observe


class Small(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        return self.drop(self.linear(x))


def paths(report, stage):
    return [seen.path for seen in report.stage(stage).comparisons]


def test_steps_leave_parameters_buffers_and_optimizer_state_after_each_step():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    report = td.check(model, (torch.randn(5, 4),), transform="eager", stages=["steps"], steps=2, optimizer="adamw")

    found = paths(report, "steps")
    assert report.verdict is Verdict.EQUIVALENT
    for step in (0, 1):
        assert f"steps[{step}].parameters['0.weight']" in found
        assert f"steps[{step}].buffers['1.running_mean']" in found
        assert f"steps[{step}].optimizer['0.weight']['exp_avg']" in found


def test_a_parameter_that_is_not_updated_shows_in_the_steps():
    class Frozen(Small):
        def forward(self, x):
            return nn.functional.linear(x, self.linear.weight.detach(), self.linear.bias)

    report = td.check(Small(), (torch.randn(5, 4),), candidate=Frozen(), stages=["steps"], optimizer="sgd")

    guilty = {seen.path for seen in report.comparisons if seen.verdict is Verdict.DIVERGED}
    assert "steps[0].parameters['linear.weight']" in guilty
    assert "steps[0].parameters['linear.bias']" not in guilty


def test_any_optimizer_factory_trains():
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    report = td.check(Small(), (torch.randn(5, 4),), transform="eager", stages=["steps"], optimizer=momentum)

    assert report.verdict is Verdict.EQUIVALENT
    assert "steps[2].optimizer['linear.weight']['momentum_buffer']" in paths(report, "steps")


def test_an_unknown_optimizer_is_a_mistake_that_names_the_known_ones():
    with pytest.raises(td.UsageError, match="adamw"):
        td.check(Small(), (torch.randn(5, 4),), transform="eager", optimizer="adam")


def test_a_loss_of_the_users_takes_the_place_of_random_cotangents():
    def first_column(output):
        return output[:, 0].sum()

    report = td.check(Small(), (torch.ones(5, 4),), transform="eager", loss=first_column)
    gradient = next(seen for seen in report.comparisons if seen.path == "parameters['linear.bias'].grad")

    assert report.verdict is Verdict.EQUIVALENT
    assert gradient.measurement.square_reference == 25.0


def test_gradients_that_were_asked_for_by_name_but_do_not_exist_are_inconclusive():
    report = td.check(lambda x: x + 1, (torch.ones(2),), transform="eager", stages=["forward", "gradients"])

    assert report.stage("forward").verdict is Verdict.EQUIVALENT
    assert report.stage("gradients").verdict is Verdict.INCONCLUSIVE
    assert "requires grad" in report.stage("gradients").reason


def test_gradients_that_do_not_exist_are_left_out_with_a_note_by_default():
    report = td.check(lambda x: x + 1, (torch.ones(2),), transform="eager")

    assert report.verdict is Verdict.EQUIVALENT
    assert [stage.name for stage in report.stages] == ["forward"]
    assert any("gradients were not compared" in note for note in report.notes)


def test_a_cotangent_is_the_same_for_every_side_and_another_for_every_output():
    output = torch.empty(4, 5)

    assert torch.equal(cotangent_for(output, "a", 0).double(), cotangent_for(output.double(), "a", 0))
    assert torch.equal(cotangent_for(output, "a", 0), cotangent_for(output.bfloat16(), "a", 0).float())
    assert not torch.equal(cotangent_for(output, "a", 0), cotangent_for(output, "b", 0))


def test_a_cotangent_has_all_digits_of_the_dtype_that_it_is_exact_in():
    output = torch.empty(400)
    fine = cotangent_for(output.double(), "a", 0, torch.float32)

    assert torch.equal(fine, cotangent_for(output, "a", 0, torch.float32).double())
    assert not torch.equal(fine, fine.bfloat16().double())
    assert not torch.equal(cotangent_for(output.double(), "a", 0, torch.float64), fine)


class Narrowed(torch.autograd.Function):
    """An identity whose backward narrows the gradient."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype).to(gradient.dtype), None


@pytest.mark.parametrize(
    ("dtype", "narrow", "verdict"),
    [
        (torch.float32, torch.bfloat16, Verdict.DIVERGED),
        (torch.float32, torch.float64, Verdict.EQUIVALENT),
        (torch.float64, torch.float32, Verdict.DIVERGED),
        (torch.bfloat16, torch.float32, Verdict.EQUIVALENT),
        (torch.float16, torch.bfloat16, Verdict.DIVERGED),
    ],
)
def test_a_backward_that_narrows_the_gradient_of_an_output_diverges(dtype, narrow, verdict):
    x = torch.linspace(-1, 1, 64, dtype=dtype, requires_grad=True)

    report = td.check(lambda x: x * 3, (x,), candidate=lambda x: Narrowed.apply(x * 3, narrow))

    assert report.verdict is verdict


def test_complex_outputs_are_differentiated():
    x = torch.randn(4, dtype=torch.complex64, requires_grad=True)

    assert td.check(lambda x: x * x, (x,), candidate=lambda x: x.pow(2)).verdict is Verdict.EQUIVALENT
    assert td.check(lambda x: x * x, (x,), candidate=lambda x: x * x.detach()).verdict is Verdict.DIVERGED


def lifted(call, *args, drawn_in=torch.float32):
    plan = Plan(stages=("forward",), seed=0, iterations=1, steps=1, optimizer=torch.optim.SGD)
    program = Program(name="test", call=call, args=args)
    side = Side.copied_from(program, convert=lift.widened)
    observation = observe(side, plan, Side.of(call, args, {}), lambda: lift.Lift(drawn_in))
    return observation.stages["forward"]["outputs"]


def plain(call, *args):
    torch.manual_seed(0)
    return call(*args)


def test_casts_inside_the_program_do_not_round_the_truth():
    x = torch.randn(50)

    truth = lifted(lambda x: (x.to(torch.bfloat16) * 3).float().half(), x)

    assert truth.dtype is torch.float64
    assert torch.equal(truth, x.double() * 3)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(9) + 0 * x,
        lambda x: torch.randn_like(x),
        lambda x: torch.nn.functional.dropout(x, 0.5),
        lambda x: torch.empty_like(x).uniform_(),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.normal(x, 1.0),
        lambda x: x[torch.randperm(9)],
    ],
)
def test_the_truth_draws_the_same_random_numbers(draw):
    x = torch.randn(9)

    assert torch.allclose(lifted(draw, x), plain(draw, x).double(), rtol=1e-6, atol=1e-6)


def test_a_constant_of_the_program_keeps_the_programs_rounding_in_the_truth():
    truth = lifted(lambda x: x + torch.tensor(0.1), torch.zeros(1))

    assert truth.item() == torch.tensor(0.1).double().item()


def test_autocast_inside_the_program_does_not_round_the_truth():
    def call(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ w

    x, w = torch.randn(4, 8), torch.randn(8, 4)

    assert torch.allclose(lifted(call, x, w), x.double() @ w.double(), rtol=1e-12)


def test_a_program_that_fails_eagerly_is_the_users_and_never_the_transforms():
    with pytest.raises(td.ProgramError, match=r"fails when run eagerly.*mat1 and mat2"):
        td.check(lambda x: x @ x, (torch.ones(2, 3),), transform="eager")


def test_anomaly_mode_is_on_only_when_asked_for():
    def look(x):
        return x + torch.is_anomaly_enabled()

    def output(**options):
        report = td.check(look, (torch.ones(2),), candidate=look, **options)
        return next(seen.worst.reference for seen in report.comparisons if seen.path == "outputs")

    assert output() == 1.0
    assert output(anomaly=True) == 2.0
    assert not torch.is_anomaly_enabled()


def test_peak_memory_and_seconds_are_on_the_report():
    report = td.check(Small(), (torch.ones(5, 4),), transform="eager")

    assert report.cost.peak_bytes > 10 * 2**20
    assert set(report.cost.seconds) >= {"reference", "candidate", "truth", "comparison"}


def test_sparse_gradients_are_compared():
    table = nn.Embedding(5, 4, sparse=True)
    stages = ["forward", "gradients", "steps"]
    report = td.check(table, (torch.tensor([1, 2]),), transform="eager", stages=stages, optimizer="sgd")

    assert report.verdict is Verdict.EQUIVALENT


def test_a_loss_that_requires_no_gradient_is_inconclusive():
    report = td.check(Small(), (torch.ones(5, 4),), transform="eager", loss=lambda output: output.detach().sum())

    assert report.stage("gradients").verdict is Verdict.INCONCLUSIVE
    assert "the loss" in report.stage("gradients").reason


class TwoMatrices(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 32, bias=False, dtype=dtype)
        self.outer = nn.Linear(32, 8, bias=False, dtype=dtype)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class NarrowSgd(torch.optim.Optimizer):
    """Computes its update in bfloat16."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_((parameter.grad.bfloat16() * 0.01).to(parameter.dtype))


def muon(parameters):
    return torch.optim.Muon(parameters, lr=0.02)


def unchanged(graph, inputs):
    return graph.forward


def with_larger_gradient(graph, inputs):
    class Larger(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.01

    return lambda *args: tuple(Larger.apply(output) for output in graph.forward(*args))


def rows(dtype=torch.float32):
    return (torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).to(dtype),)


@pytest.mark.parametrize("optimizer", [muon, NarrowSgd])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestAnOptimizerWithLowPrecision:
    def test_is_equivalent_under_a_pass_that_changes_nothing(self, optimizer, dtype):
        report = td.check(
            TwoMatrices(dtype),
            rows(dtype),
            transform=unchanged,
            options={"unchanged": "ok"},
            stages=["forward", "gradients", "steps"],
            optimizer=optimizer,
        )

        assert report.verdict is Verdict.EQUIVALENT

    def test_does_not_hide_a_gradient_that_is_wrong(self, optimizer, dtype):
        report = td.check(
            TwoMatrices(dtype),
            rows(dtype),
            transform=with_larger_gradient,
            stages=["forward", "gradients", "steps"],
            optimizer=optimizer,
        )

        assert report.stage("forward").verdict is Verdict.EQUIVALENT
        assert report.stage("gradients").verdict is Verdict.DIVERGED


def test_a_parameter_that_is_wrong_after_a_step_with_low_precision_is_found():
    class Written(TwoMatrices):
        def forward(self, x):
            output = super().forward(x)
            with torch.no_grad():
                self.outer.weight.data.mul_(1.001)
            return output

    report = td.check(TwoMatrices(), rows(), candidate=Written(), stages=["steps"], optimizer=muon)

    guilty = {each.path for each in report.comparisons if each.verdict is Verdict.DIVERGED}
    assert "steps[0].parameters['outer.weight']" in guilty


class TwoLayers(nn.Module):
    def __init__(self, names=("first", "second"), scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.names, self.scale = names, scale
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        for name in self.names:
            x = torch.tanh(self.get_submodule(name)(x)) * self.scale
        return x


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.Adam(reversed(parameters)),
        lambda parameters: torch.optim.Adam([each for each in parameters if each.dim() == 1]),
        lambda parameters: torch.optim.Adam([{"params": parameters[2:]}, {"params": parameters[:2], "lr": 0.1}]),
    ],
    ids=["in another order", "only some", "in groups"],
)
def test_optimizer_state_goes_by_the_name_of_its_parameter(optimizer):
    model, x = TwoLayers(), torch.randn(3, 4)
    report = td.check(model, (x,), transform="eager", stages="steps", optimizer=optimizer, steps=1)

    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    states = {each.path: each.shape for each in report.comparisons if each.path.endswith("['exp_avg']")}
    assert report.verdict is Verdict.EQUIVALENT
    assert states
    for path, shape in states.items():
        assert shapes[path.split("'")[1]] == shape


def test_optimizer_state_of_tensors_that_are_not_parameters_goes_by_their_place():
    def flat(parameters):
        joined = torch.cat([each.detach().flatten() for each in parameters]).requires_grad_()
        joined.grad = torch.ones_like(joined)
        return torch.optim.Adam([joined])

    report = td.check(TwoLayers(), (torch.randn(3, 4),), transform="eager", stages="steps", optimizer=flat, steps=1)

    assert "steps[0].optimizer['params[0]']['exp_avg']" in paths(report, "steps")


def test_layers_with_other_names_are_listed_and_do_not_diverge_in_the_steps():
    x = torch.randn(3, 4)
    renamed = td.check(TwoLayers(), (x,), candidate=TwoLayers(("first", "other")), stages=["steps"])
    wrong = td.check(TwoLayers(), (x,), candidate=TwoLayers(("first", "other"), scale=1.01), stages=["steps"])

    assert renamed.verdict is Verdict.EQUIVALENT
    assert "steps[1].gradients['second.weight']" in {leaf.path for leaf in renamed.unmatched}
    assert wrong.verdict is Verdict.DIVERGED


def test_gradients_that_were_asked_for_and_cannot_be_paired_are_inconclusive():
    x, other = torch.randn(3, 4), TwoLayers(("one", "two"))
    named = td.check(TwoLayers(), (x,), candidate=other, stages="forward,gradients")
    by_default = td.check(TwoLayers(), (x,), candidate=other)
    of_an_input = td.check(TwoLayers(), (x.requires_grad_(),), candidate=other, stages="forward,gradients")

    assert named.stage("forward").verdict is Verdict.EQUIVALENT
    assert named.stage("gradients").verdict is Verdict.INCONCLUSIVE
    assert by_default.verdict is Verdict.EQUIVALENT
    assert any(note.startswith("gradients were not compared") for note in by_default.notes)
    assert of_an_input.verdict is Verdict.EQUIVALENT


def folded(model, error=0.0):
    """Return two linear layers as one, whose weight has the name of another one."""
    first, second = model
    one = nn.Linear(4, 4)
    with torch.no_grad():
        one.weight.copy_(second.weight @ first.weight + error)
        one.bias.copy_(second.weight @ first.bias + second.bias)
    return nn.Sequential(one)


def test_initial_values_of_another_implementation_are_no_difference():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    report = td.check(model, (x,), candidate=folded(model))

    assert report.verdict is Verdict.EQUIVALENT
    assert "parameters['0.weight']" in {leaf.path for leaf in report.unmatched}
    assert any("other initial values" in note for note in report.notes)
    assert td.check(model, (x,), candidate=folded(model, error=0.01)).verdict is Verdict.DIVERGED


def test_fused_layers_are_another_implementation():
    from torch.fx.experimental.optimization import fuse

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    model[1].running_var.uniform_(1, 2)
    fused, x = fuse(model), torch.randn(2, 3, 8, 8)

    assert td.check(model, (x,), candidate=fused).verdict is Verdict.EQUIVALENT
    with torch.no_grad():
        next(fused.parameters()).mul_(1.01)
    assert td.check(model, (x,), candidate=fused).verdict is Verdict.DIVERGED


def in_one_buffer(graph_module, _):
    """Return the graph with results that every call writes to the same memory."""
    results = []

    def call(*args):
        outputs = graph_module(*args)
        results.extend(torch.empty_like(output) for output in outputs[len(results) :])
        return tuple(result.copy_(output) for result, output in zip(results, outputs, strict=True))

    return call


class Ring(nn.Module):
    """Returns a buffer that later calls write to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 4))

    def forward(self, x):
        self.rows.copy_(torch.stack([self.rows[1], x.sin()]))
        return self.rows


def test_a_result_that_a_later_call_overwrites_has_diverged():
    report = td.check(torch.sin, (torch.randn(4),), transform=in_one_buffer, iterations=2)

    assert report.verdict is Verdict.DIVERGED
    assert "shares memory with the results of a later call in the candidate" in report.stages[0].comparisons[0].reason


def test_a_result_that_the_program_itself_overwrites_is_no_difference():
    report = td.check(Ring(), (torch.randn(4),), transform="aot_eager", iterations=3)

    assert report.verdict is Verdict.EQUIVALENT


class OverwritesResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.kept = [y]
        return y

    @staticmethod
    def backward(ctx, gradient):
        ctx.kept[0].data.zero_()
        return gradient * 2


def test_a_result_that_the_backward_overwrites_has_diverged():
    x = torch.randn(4, requires_grad=True)

    report = td.check(lambda x: x * 2, (x,), candidate=lambda x: OverwritesResult.apply(x))

    assert report.verdict is Verdict.DIVERGED
