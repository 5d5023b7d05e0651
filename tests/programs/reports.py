"""Reports of every kind, made by hand: nothing here needs torch."""

from dataclasses import replace

from torchdelta.records.case import Case
from torchdelta.records.comparison import Breach, Comparison, Measurement, Worst
from torchdelta.records.failure import Failure
from torchdelta.records.report import Cost, Environment, Graphs, Report, Stage
from torchdelta.records.verdict import Verdict, worst_of

ENVIRONMENT = Environment(torch="2.13.0", python="3.11.2", platform="Linux x86_64")

MEASUREMENT = Measurement(
    numel=12,
    finite=12,
    mismatches=3,
    misplaced=0,
    nan_reference=0,
    nan_candidate=0,
    inf_reference=0,
    inf_candidate=0,
    max_abs=2.5e-7,
    max_rel=1.25e-6,
    square_error=1e-13,
    square_reference=12.0,
    square_candidate=12.0,
    dot=12.0,
    max_ulp=2,
    beyond=0,
    worst=7,
)


def comparison(path, verdict=Verdict.EQUIVALENT, *, error=1e-7, allowed=1e-6, reason="", contract=()):
    """A leaf that was measured."""
    return Comparison(
        path=path,
        verdict=verdict,
        reason=reason or f"rms error is {error / allowed:.3g} times what is allowed",
        dtype="float32",
        shape=(3, 4),
        contract=contract,
        error=error,
        noise=allowed / 16,
        allowed=allowed,
        resolution=1e-5,
        worst=Worst(index=(1, 3), reference=0.25, candidate=0.25 + error, truth=0.25),
        measurement=MEASUREMENT,
        details={"statistic": "rms"},
    )


def report(*stages, **changes):
    """A report of these stages."""
    facts = {
        "verdict": worst_of(stage.verdict for stage in stages),
        "environment": ENVIRONMENT,
        "case": Case(program="models/mlp.py:build", transform="inductor", stages=tuple(stage.name for stage in stages)),
        "stages": stages,
        "graphs": Graphs(captured=1, transformed_calls=2),
        "cost": Cost(seconds={"reference": 0.125, "candidate": 3.5}, peak_bytes=300 * 2**20),
    }
    return Report(**{**facts, **changes})


def equivalent():
    """A healthy transformer with long names, many leaves, and as many notes as a real one has."""
    layers = [f"parameters['transformer.layers.{index}.attention.projection.weight']" for index in range(12)]
    forward = Stage.of("forward", (comparison("outputs['logits']"), *(comparison(path) for path in layers)))
    gradients = Stage.of("gradients", tuple(comparison(f"{path}.grad", error=2e-7) for path in layers))
    return report(
        forward,
        gradients,
        notes=(
            "the program draws random numbers: the candidate was compiled with fallback_random, "
            "so that it draws the same ones",
            "part of the program ran eagerly: Attempted to wrap RNN, GRU, or LSTM",
        ),
    )


def diverged():
    """One wrong gradient among right ones, one leaf of the wrong shape, and an excused stride."""
    shape = Breach(clause="shape", reference="(3, 4)", candidate="(3,)")
    stride = Breach(clause="stride", reference="(4, 1)", candidate="(1, 3)", excused=True)
    forward = Stage.of("forward", (comparison("outputs", contract=(stride,)),))
    gradients = Stage.of(
        "gradients",
        (
            comparison("parameters['near'].grad", error=9e-7),
            comparison("parameters['worse'].grad", Verdict.DIVERGED, error=3.0),
            comparison("parameters['worst'].grad", Verdict.DIVERGED, error=7.0),
            comparison("parameters['unsure'].grad", Verdict.INCONCLUSIVE, reason="there is no truth"),
            Comparison(path="args[0].grad", verdict=Verdict.DIVERGED, reason=str(shape), contract=(shape,)),
        ),
    )
    return report(forward, gradients, notes=("gradients of the input were asked for",))


def crashed():
    """A backend that could not lower an operation."""
    error = NotImplementedError("backend='acme' raised:\nLoweringError: aten.foo has no lowering\nhint: file an issue")
    failure = Failure.of(error, stage="forward", traceback='Traceback:\n  File "acme.py", line 7, in lower\n')
    stage = Stage(name="forward", verdict=Verdict.CRASHED, reason=f"{failure.type}: {failure.message}")
    made = report(stage, failure=failure)
    return replace(made, case=replace(made.case, stages=("forward", "gradients")))


def inconclusive():
    """A transform that did not happen, in both stages."""
    reason = "the transform did not happen: no transformed code ran at all"
    stages = [Stage.of(name, (comparison(f"{name}.leaf", error=0.0),), reason) for name in ("forward", "gradients")]
    return report(*stages, graphs=Graphs(captured=0, transformed_calls=0, untransformed_calls=2))


ALL = (equivalent, diverged, crashed, inconclusive)
