"""Clean models raise no alarm, planted faults do, and at the edges of arithmetic the verdict is still the right one.

A sample of what `benchmarks/verdicts.py` measures at large.
"""

import copy

import pytest
import torch
from torch import nn

import torchdelta as td
from programs import extremes, models
from torchdelta import Verdict
from torchdelta.audit.faults import NotPlantable, plant
from torchdelta.check.baseline import Baseline
from torchdelta.check.check import Check
from torchdelta.compare.policy_parser import parse
from torchdelta.program.programs import Program
from torchdelta.program.stages import OPTIMIZERS, Plan
from torchdelta.records.case import Case

pytestmark = [
    pytest.mark.slow,
    # what torch and transformers say about themselves while they trace
    pytest.mark.filterwarnings("ignore"),
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPILED = ("recommender", "lstm")
"""Inductor takes minutes for the others; here they are decomposed, or traced by AOTAutograd."""
TRACED = ("gpt2", "bert", "t5", "resnet")
"""torch 2.13 cannot run a decomposed GPT-2; the others are there so that both ways are."""


def transform_of(name):
    if name in COMPILED:
        return "inductor"
    return "aot_eager" if name in TRACED else "decompose"


def clean_cases():
    for name in models.MODELS:
        for dtype in DTYPES:
            yield pytest.param(name, dtype, marks=[pytest.mark.long] if name in COMPILED else [], id=f"{name}-{dtype}")


@pytest.mark.parametrize(("name", "dtype"), list(clean_cases()))
def test_a_clean_model_raises_no_alarm(name, dtype):
    model, args = models.build(name, dtype=DTYPES[dtype], seed=1)

    report = td.assert_equivalent(model, args, transform=transform_of(name))

    assert report.questions.semantic == "asked"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["recommender", "vit"])
def test_a_clean_model_raises_no_alarm_while_it_is_trained(name, dtype):
    model, args = models.build(name, dtype=DTYPES[dtype], seed=1, train=True)

    td.assert_equivalent(model, args, transform="decompose", stages=["forward", "gradients", "steps"])


FAULTY = {
    "recommender": (
        "activation_approximated",
        "bias_dropped",
        "cast_through_bfloat16",
        "cast_through_float16",
        "clamp_bound",
        "dropout_active",
        "epsilon_1e_3",
        "epsilon_divided_by_10",
        "gradient_detached",
        "integer_off_by_one",
        "layer_norm_epsilon_outside_root",
        "layer_norm_unbiased_variance",
        "matmul_low_precision",
        "mean_over_n_minus_1",
        "parameter_stale",
        "relu_leaky",
        "scale_by_1_00001",
        "scale_by_1_001",
        "tail_element",
    ),
    "llama": (
        "add_to_subtract",
        "attention_scale_dropped",
        "causal_mask_off_by_one",
        "head_order",
        "matmul_operands_swapped",
        "negation_dropped",
        "residual_dropped",
        "rsqrt_one_newton_step",
        "rsqrt_two_newton_steps",
        "slice_off_by_one",
        "softmax_dimension",
        "view_order",
    ),
    "moe": ("gelu_approximation", "top_k_smallest"),
}


def verdicts_on_faults(name, dtype, kinds):
    """Return the verdict on each kind of fault that can be planted in a model; all share one baseline."""
    seed = 3
    model, args = models.build(name, dtype=DTYPES[dtype], seed=seed, probing=True)
    stages = ("forward", "gradients")
    plan = Plan(stages=stages, seed=0, iterations=1, steps=1, optimizer=OPTIMIZERS.get("sgd"))
    baseline = Baseline(program=Program(name=name, call=model, args=args), plan=plan)
    found = {}
    for kind in kinds:
        check = Check(
            case=Case(program=name, transform=kind, stages=stages),
            transform=plant(kind, seed=seed),
            policy=parse("noise"),
            baseline=baseline,
            stages_by_default=False,
        )
        try:
            found[kind] = check.run().verdict
        except NotPlantable:
            continue
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "planted", "least"),
    [
        ("recommender", "float32", 19, 19),
        # nobody has seen bfloat16 accumulated in bfloat16, and going through float16 loses nothing of it
        ("recommender", "bfloat16", 18, 16),
        pytest.param("llama", "float32", 12, 12, marks=pytest.mark.long),
        pytest.param("llama", "bfloat16", 12, 12, marks=pytest.mark.long),
        ("moe", "float32", 2, 2),
        ("moe", "bfloat16", 2, 2),
    ],
)
def test_planted_faults_are_caught(name, dtype, planted, least):
    found = verdicts_on_faults(name, dtype, FAULTY[name])
    missed = {kind: verdict.value for kind, verdict in found.items() if verdict is not Verdict.DIVERGED}

    assert len(found) == planted
    assert len(found) - len(missed) >= least, missed


class Halved(nn.Linear):
    """A linear layer that sums in another order: right, and rounded otherwise."""

    def forward(self, x):
        half = self.in_features // 2
        summed = x[..., half:] @ self.weight[:, half:].T + x[..., :half] @ self.weight[:, :half].T
        return summed if self.bias is None else summed + self.bias


class Scaled(nn.Linear):
    """A linear layer that is wrong by a hundredth."""

    def forward(self, x):
        return super().forward(x) * 1.01


def as_kind(module, kind):
    """Return a copy of a module that computes as another class does."""
    changed = copy.deepcopy(module)
    changed.__class__ = kind
    return changed


def with_linears(model, kind, chosen=slice(None)):
    """Return a copy in which the chosen linear layers are of another kind."""
    changed = copy.deepcopy(model)
    for layer in [module for module in changed.modules() if type(module) is nn.Linear][chosen]:
        layer.__class__ = kind
    return changed


def extreme(name, dtype):
    model, args = getattr(extremes, name)()
    args = tuple(arg.to(DTYPES[dtype]) if arg.is_floating_point() else arg for arg in args)
    return model.to(DTYPES[dtype]), args


EXTREMES = ["chaotic", "dead_relus", "zero_gradients", "tiny_inputs", "huge_inputs", "one_nan"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXTREMES)
def test_another_order_of_sums_is_no_divergence_at_the_edges_of_arithmetic(name, dtype):
    model, args = extreme(name, dtype)

    report = td.check(model, args, candidate=with_linears(model, Halved))

    assert report.verdict is Verdict.EQUIVALENT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in EXTREMES if name != "zero_gradients"])
def test_a_wrong_last_layer_has_diverged_at_the_edges_of_arithmetic(name, dtype):
    model, args = extreme(name, dtype)

    report = td.check(model, args, candidate=with_linears(model, Scaled, slice(-1, None)))

    assert report.verdict is Verdict.DIVERGED


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_layer_in_front_of_a_chaotic_recurrence_is_seen_in_float64(dtype):
    model, args = extreme("chaotic", dtype)

    report = td.check(model, args, candidate=with_linears(model, Scaled, slice(0, 1)))

    assert report.verdict is Verdict.DIVERGED


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_where_there_should_be_none_has_diverged(dtype):
    model, args = extreme("zero_gradients", dtype)

    class Leaking(type(model)):
        def forward(self, x):
            multiplied, ones = super().forward(x)
            return multiplied + 1e-6 * self.inner(x)[:, :8], ones

    report = td.check(model, args, candidate=as_kind(model, Leaking))

    assert report.stage("gradients").verdict is Verdict.DIVERGED


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replacement", [0.0, float("inf")])
def test_a_nan_that_is_lost_has_diverged(dtype, replacement):
    model, args = extreme("one_nan", dtype)

    class Lost(type(model)):
        def forward(self, x, is_missing):
            return torch.nan_to_num(super().forward(x, is_missing), nan=replacement)

    report = td.check(model, args, candidate=as_kind(model, Lost))

    assert report.stage("forward").verdict is Verdict.DIVERGED


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_another_place_has_diverged(dtype):
    model, args = extreme("one_nan", dtype)

    class Moved(type(model)):
        def forward(self, x, is_missing):
            return super().forward(x, is_missing.roll(1, 0))

    report = td.check(model, args, candidate=as_kind(model, Moved))

    assert report.stage("forward").verdict is Verdict.DIVERGED
