"""Healthy programs, trained three steps under three transforms, raise no alarm."""

import pathlib

import pytest

import torchdelta as td
from torchdelta import Verdict

HEALTHY = pathlib.Path(__file__).parent / "programs" / "healthy.py"
NAMES = ["mlp", "conv_net", "lstm", "vit", "bert", "llama", "t5"]
COMPILED = {"mlp": "a", "conv_net": "a"}
"""Those that inductor compiles in a minute, by the worker that does; the others are run on demand."""

pytestmark = [
    pytest.mark.slow,
    # what torch and transformers say about themselves while they trace
    pytest.mark.filterwarnings("ignore"),
]


def checked(name, transform, **options):
    return td.check(f"{HEALTHY}:{name}", transform=transform, **options)


def require_healthy(report):
    assert [(stage.name, stage.verdict) for stage in report.stages] == [
        ("forward", Verdict.EQUIVALENT),
        ("gradients", Verdict.EQUIVALENT),
        ("steps", Verdict.EQUIVALENT),
    ]
    assert not report.unmatched
    assert not [seen.path for seen in report.comparisons if any(not breach.excused for breach in seen.contract)]
    assert any(seen.path.startswith("steps[2].optimizer") for seen in report.stage("steps").comparisons)


@pytest.mark.parametrize("transform", ["aot_eager", "decompose"])
@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_program_survives(name, transform):
    require_healthy(checked(name, transform, stages=["forward", "gradients", "steps"]))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.xdist_group(f"inductor-{COMPILED[name]}") if name in COMPILED else pytest.mark.long,
        )
        for name in NAMES
    ],
)
def test_a_healthy_program_survives_inductor(name):
    require_healthy(checked(name, "inductor", stages=["forward", "gradients", "steps"]))


@pytest.mark.parametrize("name", ["mlp", pytest.param("bert", marks=pytest.mark.long)])
def test_dropout_is_compared_like_for_like_and_said_to_be(name):
    for transform in ("inductor", "aot_eager_decomp_partition"):
        report = checked(name, transform)

        assert report.verdict is Verdict.EQUIVALENT
        assert any("fallback_random" in note for note in report.notes)


def test_a_bare_lstm_gives_dynamo_no_graph_and_is_inconclusive():
    report = checked("bare_lstm", "inductor")

    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.graphs.captured == 0


def test_an_lstm_inside_a_module_runs_eagerly_and_is_noted():
    report = checked("lstm", "aot_eager")

    assert report.verdict is Verdict.EQUIVALENT
    assert report.graphs.captured == 2
    assert any("LSTM" in note for note in report.notes)


def test_gpt2_decomposed_raises_inside_torch_and_has_crashed():
    report = checked("gpt2_eval", "decompose")

    assert report.verdict is Verdict.CRASHED
    assert "Cannot view a tensor" in report.failure.message


def test_a_cache_in_the_outputs_is_taken_apart():
    report = checked("gpt2_with_cache", "aot_eager")

    assert report.verdict is Verdict.EQUIVALENT
    assert any("past_key_values" in seen.path and "keys" in seen.path for seen in report.comparisons)


@pytest.mark.parametrize("transform", ["cast:bfloat16", "autocast:bfloat16"])
@pytest.mark.parametrize("name", ["mlp", "llama", "vit"])
def test_lower_precision_on_purpose_is_held_to_its_own_noise(name, transform):
    report = checked(name, transform, stages=["forward"])

    assert report.verdict is Verdict.EQUIVALENT
