"""Real bugs of torch 2.13.0 under inductor are seen for what they are."""

import pathlib
import re

import pytest

import torchdelta as td
from torchdelta import Verdict
from torchdelta.minify.journal import Journal

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("inductor-live-bugs")]

LIVE_BUGS = pathlib.Path(__file__).parent / "programs" / "live_bugs.py"


def checked(name, **options):
    return td.check(f"{LIVE_BUGS}:{name}", transform="inductor", **options)


def test_an_elided_narrowing_cast_brings_the_candidate_closer_to_the_truth_and_is_no_divergence():
    report = checked("pt181568_bf16_cast_elided")
    seen = next(seen for seen in report.comparisons if seen.path == "outputs[0]")

    assert report.verdict is Verdict.EQUIVALENT
    assert seen.measurement.mismatches > 0
    assert seen.error < seen.noise
    note = next(note for note in report.notes if "narrowing casts were elided" in note)
    assert re.search(r"live_bugs\.py:\d+ \(to bfloat16\)", note)


def test_an_elided_narrowing_cast_diverges_when_casts_are_held_strictly():
    report = checked("pt181568_bf16_cast_elided", strict="casts")

    assert report.verdict is Verdict.DIVERGED
    assert "rounds at live_bugs.py:" in report.stage("forward").comparisons[0].reason


@pytest.mark.usefixtures("two_threads")
def test_wrong_gradients_behind_a_right_forward_have_diverged():
    report = checked("pt185509_interpolate_gradient")

    assert report.stage("forward").verdict is Verdict.EQUIVALENT
    assert report.stage("gradients").verdict is Verdict.DIVERGED


def test_a_uint8_that_does_not_wrap_has_diverged():
    report = checked("pt187018_uint8_negate")
    outputs = next(seen for seen in report.comparisons if seen.path == "outputs")

    assert report.verdict is Verdict.DIVERGED
    assert (outputs.worst.reference, outputs.worst.candidate) == (224, -800)


def test_another_integer_dtype_has_diverged_although_the_values_agree():
    report = checked("pt191308_int8_matmul_dtype")
    outputs = next(seen for seen in report.comparisons if seen.path == "outputs")

    assert report.verdict is Verdict.DIVERGED
    assert [breach.clause for breach in outputs.contract] == ["dtype"]
    assert outputs.measurement.mismatches == 0
    assert checked("pt191308_int8_matmul_dtype", ignore=["dtype"]).verdict is Verdict.EQUIVALENT


def test_a_floor_division_by_division_has_diverged():
    report = checked("pt197895_floor_divide")

    assert report.verdict is Verdict.DIVERGED
    assert (report.comparisons[0].worst.reference, report.comparisons[0].worst.candidate) == (9.0, 10.0)


def diagnosed(name, out, **options):
    """Diagnose; return the report and what is left of the program."""
    report = td.diagnose(f"{LIVE_BUGS}:{name}", transform="inductor", out=out, **options)
    return report, Journal(directory=out / "minify").read()[0]


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("pt197895_floor_divide", {}, 1),
        ("pt191308_int8_matmul_dtype", {}, 1),
        pytest.param("pt187018_uint8_negate", {}, 4, marks=pytest.mark.long),
        pytest.param("pt181568_bf16_cast_elided", {"strict": "casts"}, 2, marks=pytest.mark.long),
    ],
)
def test_a_diagnosis_ends_in_a_confirmed_script_of_a_few_operations(name, options, most, workers, tmp_path):
    report, small = diagnosed(name, tmp_path, workers=workers, **options)

    assert report.verdict is Verdict.DIVERGED
    assert len(small.nodes) <= most
    assert report.repro is not None, report.notes
    assert report.repro.confirmed


@pytest.mark.long
@pytest.mark.usefixtures("two_threads")
def test_a_diagnosis_of_what_is_wrong_between_two_graphs_keeps_both(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    report, small = diagnosed("pt185509_interpolate_gradient", tmp_path)

    assert report.stage("gradients").verdict is Verdict.DIVERGED
    assert len(small.nodes) <= 4
    assert report.repro.confirmed
    assert "backward" in (tmp_path / "repro.py").read_text()
