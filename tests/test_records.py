"""What the records promise by themselves."""

import dataclasses
import inspect
import itertools
import math
import pickle

import pytest

from programs import reports
from torchdelta import errors
from torchdelta.errors import UsageError
from torchdelta.records import case, comparison, failure, report
from torchdelta.records.case import Case
from torchdelta.records.comparison import Breach, Comparison, Measurement
from torchdelta.records.failure import Failure, normalise
from torchdelta.records.report import Stage
from torchdelta.records.verdict import Verdict, worst_of

RECORDS = [
    record
    for module in (case, comparison, failure, report)
    for _, record in inspect.getmembers(module, dataclasses.is_dataclass)
    if record.__module__ == module.__name__
]


class TestVerdict:
    @pytest.mark.parametrize("verdict", Verdict)
    def test_has_no_truth_value(self, verdict):
        with pytest.raises(TypeError, match="no truth value"):
            _ = 1 if verdict else 0
        with pytest.raises(TypeError, match=f"Verdict.{verdict.name}"):
            _ = not verdict
        with pytest.raises(TypeError, match="compare it"):
            _ = verdict or Verdict.EQUIVALENT

    def test_crashed_is_worse_than_timed_out_than_diverged_than_inconclusive_than_equivalent(self):
        order = ["crashed", "timed_out", "diverged", "inconclusive", "equivalent"]

        assert sorted(Verdict, key=lambda verdict: -verdict.severity) == [Verdict(name) for name in order]

    @pytest.mark.parametrize(("one", "other"), list(itertools.product(Verdict, Verdict)))
    def test_the_worst_of_two_does_not_depend_on_their_order(self, one, other):
        assert worst_of([one, other]) is worst_of([other, one])
        assert worst_of([one, other]).severity == max(one.severity, other.severity)

    def test_the_worst_of_none_is_inconclusive(self):
        assert worst_of([]) is Verdict.INCONCLUSIVE
        assert worst_of(iter(())) is Verdict.INCONCLUSIVE


class TestEveryRecord:
    @pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
    def test_is_keyword_only(self, record):
        parameters = inspect.signature(record).parameters.values()

        assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}

    @pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
    def test_is_frozen(self, record):
        made = object.__new__(record)

        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, dataclasses.fields(record)[0].name, "changed")

    def test_all_of_them_are_looked_at(self):
        assert {record.__name__ for record in RECORDS} >= {"Case", "Comparison", "Failure", "Report", "Stage"}


class TestCase:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"stages": ("forward", "backward")}, "unknown stage 'backward': it is one of forward, gradients, steps"),
            ({"stages": ("forward", "values")}, "unknown stage 'values'"),
            ({"stages": ()}, "no stage was asked for"),
            ({"ignore": ("colour",)}, "unknown clause to ignore 'colour': it is one of aliasing, "),
            ({"ignore": ("shape",)}, "unknown clause to ignore 'shape'"),
            ({"strict": ("dtype",)}, "unknown clause to hold strictly 'dtype'"),
            ({"iterations": 0}, "iterations must be at least 1, not 0"),
            ({"steps": -2}, "steps must be at least 1, not -2"),
            ({"seed": -1}, "seed must be from 0"),
            ({"seed": 2**63}, "seed must be from 0"),
        ],
    )
    def test_refuses_what_it_does_not_know(self, wrong, said):
        with pytest.raises(UsageError, match="^" + said):
            Case(program="p", transform="t", **wrong)

    def test_takes_every_known_stage_and_clause(self):
        made = Case(program="p", transform="t", stages=case.STAGES, ignore=case.IGNORABLE, strict=case.STRICT)

        assert made.stages == ("forward", "gradients", "steps")

    def test_two_values_have_a_stage_of_their_own(self):
        assert Case(program="p", transform="t", stages=("values",)).stages == ("values",)

    def test_stages_come_in_the_order_they_run_and_once(self):
        made = Case(program="p", transform="t", stages=("steps", "forward", "steps"))

        assert made.stages == ("forward", "steps")


class TestStage:
    def test_of_nothing_is_inconclusive(self):
        assert Stage.of("forward", ()).verdict is Verdict.INCONCLUSIVE

    def test_is_as_bad_as_its_worst_comparison(self):
        seen = (reports.comparison("a"), reports.comparison("b", Verdict.DIVERGED), reports.comparison("c"))

        assert Stage.of("forward", seen).verdict is Verdict.DIVERGED

    def test_with_a_reason_is_at_best_inconclusive(self):
        seen = (reports.comparison("a"),)

        assert Stage.of("forward", seen, "no transformed code ran").verdict is Verdict.INCONCLUSIVE
        worse = (reports.comparison("a", Verdict.DIVERGED),)
        assert Stage.of("forward", worse, "no transformed code ran").verdict is Verdict.DIVERGED


class TestReport:
    def test_gives_a_stage_by_name(self):
        made = reports.diverged()

        assert made.stage("gradients") is made.stages[1]
        with pytest.raises(KeyError):
            made.stage("steps")

    def test_gives_every_comparison(self):
        assert len(reports.diverged().comparisons) == 6


class TestComparison:
    @pytest.mark.parametrize(
        ("error", "allowed", "ratio"),
        [
            (3.0, 2.0, 1.5),
            (0.0, 2.0, 0.0),
            (None, 2.0, 0.0),
            (3.0, None, 0.0),
            (3.0, 0.0, math.inf),
            (math.nan, 1.0, math.inf),
            (math.inf, math.inf, math.inf),
        ],
    )
    def test_the_ratio_is_a_number_that_can_be_sorted_by(self, error, allowed, ratio):
        made = Comparison(path="x", verdict=Verdict.DIVERGED, reason="", error=error, allowed=allowed)

        assert made.ratio == ratio

    def test_ranks_by_verdict_then_contract_then_misplaced_then_ratio_then_error(self):
        broken = (Breach(clause="dtype", reference="float32", candidate="float16"),)
        excused = (dataclasses.replace(broken[0], excused=True),)
        misplaced = dataclasses.replace(reports.MEASUREMENT, misplaced=1)
        worst_first = [
            reports.comparison("diverged, broken", Verdict.DIVERGED, error=0.0, contract=broken),
            dataclasses.replace(reports.comparison("misplaced", Verdict.DIVERGED, error=0.0), measurement=misplaced),
            reports.comparison("not a number", Verdict.DIVERGED, error=math.nan),
            reports.comparison("far", Verdict.DIVERGED, error=5.0, contract=excused),
            reports.comparison("less far", Verdict.DIVERGED, error=4.0),
            dataclasses.replace(reports.comparison("unbounded", Verdict.DIVERGED, error=9.0), allowed=None),
            reports.comparison("inconclusive", Verdict.INCONCLUSIVE, error=8.0),
            reports.comparison("equivalent", error=1e-7),
        ]

        for shuffled in (worst_first[::-1], worst_first[3:] + worst_first[:3]):
            assert sorted(shuffled, key=lambda seen: seen.rank, reverse=True) == worst_first


class TestMeasurement:
    def measurement(self, **numbers) -> Measurement:
        return dataclasses.replace(reports.MEASUREMENT, **numbers)

    def test_signal_to_noise_is_ten_decibels_a_decade(self):
        assert self.measurement(square_reference=1.0, square_error=1e-4).sqnr_db == pytest.approx(40.0)

    def test_signal_to_noise_of_no_error_and_of_no_signal_are_infinite(self):
        assert self.measurement(square_error=0.0).sqnr_db == math.inf
        assert self.measurement(square_reference=0.0, square_error=1.0).sqnr_db == -math.inf

    def test_signal_to_noise_survives_ratios_beyond_a_float(self):
        assert self.measurement(square_reference=1e-300, square_error=1e300).sqnr_db == pytest.approx(-6000.0)
        assert self.measurement(square_reference=1e300, square_error=1e-300).sqnr_db == pytest.approx(6000.0)

    @pytest.mark.parametrize(("reference", "candidate", "cosine"), [(0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)])
    def test_cosine_of_zeros_is_defined(self, reference, candidate, cosine):
        numbers = {"square_reference": reference, "square_candidate": candidate, "dot": 0.0}

        assert self.measurement(**numbers).cosine == cosine

    def test_an_empty_measurement_divides_by_nothing(self):
        assert self.measurement(finite=0, square_error=0.0, square_reference=0.0).rms_error == 0.0


class TestErrors:
    @pytest.mark.parametrize("kind", [errors.Diverged, errors.Crashed, errors.TimedOut, errors.Inconclusive])
    def test_a_verdict_that_is_raised_is_a_failed_assertion_and_brings_its_report(self, kind):
        error = pickle.loads(pickle.dumps(kind("it differs", report=reports.diverged())))

        assert isinstance(error, AssertionError)
        assert isinstance(error, errors.NotEquivalent)
        assert error.report == reports.diverged()
        assert str(error) == "it differs"

    def test_all_have_one_root(self):
        kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]

        assert len(kinds) == 16
        assert all(issubclass(kind, errors.TorchDeltaError) for kind in kinds)
        assert errors.UsageError("what, where and what to do").report is None


def failed(message, error=RuntimeError, stage="forward"):
    return Failure.of(error(message), stage=stage).signature


class TestSignature:
    @pytest.mark.parametrize(
        ("once", "again"),
        [
            ("object at 0x7f3a9c00 is gone", "object at 0x55d01bEEF is gone"),
            ("mat1 is 3x4, mat2 is 50x6", "mat1 is 128x7, mat2 is 9x1"),
            ("tolerance 1e-05 exceeded by 2.25", "tolerance 0.001 exceeded by 3"),
            ("dim -1 of relu_3", "dim 0 of relu_12"),
            ("cannot open /tmp/a.cpp", "cannot open /home/user/run-7/.cache/~x/a.cpp"),
            ("in model.py:3", "in src/models/model.py:44"),
            ("see /tmp/x/ for logs", "see /var/tmp/elsewhere/ for logs"),
            ("two\n  lines", "two lines\n"),
        ],
    )
    def test_does_not_see_addresses_numbers_directories_and_line_breaks(self, once, again):
        assert failed(once) == failed(again)

    @pytest.mark.parametrize(
        ("once", "again"),
        [
            (failed("no kernel for aten.foo"), failed("no kernel for aten.bar")),
            (failed("x", ValueError), failed("x", TypeError)),
            (failed("x", stage="forward"), failed("x", stage="gradients")),
            (failed("cannot open /tmp/a.cpp"), failed("cannot open /tmp/b.cpp")),
        ],
    )
    def test_sees_everything_else(self, once, again):
        assert once != again

    def test_names_an_exception_by_its_module_unless_it_is_a_builtin(self):
        assert failed("x").type == "RuntimeError"
        assert failed("x", UsageError).type == "torchdelta.errors.UsageError"

    def test_a_failure_keeps_the_message_as_it_was(self):
        made = Failure.of(RuntimeError("at 0x7f\nline 2"), stage="forward", traceback="Traceback …")

        assert made.message == "at 0x7f\nline 2"
        assert made.signature.message == "at … line #"
        assert str(made.signature) == "exception/forward/RuntimeError: at … line #"

    def test_takes_an_address_without_its_prefix_for_a_number(self):
        assert normalise("cannot lower it at 7f5e301c22d0") == normalise("cannot lower it at 0139884512345678")
        assert normalise("cannot lower it at 7f5e301c22d0") == "cannot lower it at #"
        assert normalise("defaced facade beef1") == "defaced facade beef#"

    def test_takes_a_fraction_of_many_digits_for_one_number(self):
        assert normalise("an error of 1.2345678e-07") == normalise("an error of 1.5") == "an error of #"

    def test_a_long_word_does_not_take_forever(self):
        assert normalise("a" * 200_000) == "a" * 200_000
