"""When a difference is a divergence: each policy against a pair that it must pass and one that it must not."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import torchdelta as td
from torchdelta import UsageError, Verdict
from torchdelta.compare.kernels import measure
from torchdelta.compare.noise import Noise, unit_roundoff
from torchdelta.compare.policy import METRICS, Bitwise, Sample, Threshold, Tolerance
from torchdelta.compare.policy_parser import parse

EQUIVALENT, DIVERGED, INCONCLUSIVE = Verdict.EQUIVALENT, Verdict.DIVERGED, Verdict.INCONCLUSIVE
NAN, INF = math.nan, math.inf


def seen_in(reference, candidate, policy=None, truth=None):
    (seen,) = td.compare(reference, candidate, policy=policy, truth=truth).comparisons
    return seen


def verdict_of(reference, candidate, policy=None, truth=None):
    return seen_in(reference, candidate, policy, truth).verdict


class TestWords:
    @pytest.mark.parametrize(
        ("words", "policy"),
        [
            ("noise", Noise()),
            ("bitwise", Bitwise()),
            ("close", Tolerance()),
            (" close ", Tolerance()),
            ("rtol=1e-3,atol=1e-5", Tolerance(1e-3, 1e-5)),
            ("atol = 1e-5, rtol = 0", Tolerance(0.0, 1e-5)),
            ("rtol=0,atol=0", Tolerance(0.0, 0.0)),
            ("rtol=0.5", Tolerance(0.5, 0.0)),
            ("sqnr>=35", Threshold("sqnr", True, 35.0)),
            ("cosine >= 0.999", Threshold("cosine", True, 0.999)),
            ("max_abs<=1e-3", Threshold("max_abs", False, 1e-3)),
            ("sqnr>=-3", Threshold("sqnr", True, -3.0)),
        ],
    )
    def test_name_a_policy(self, words, policy):
        assert parse(words) == policy

    @pytest.mark.parametrize(
        ("words", "remedy"),
        [
            ("", "unknown policy '': it is noise, noise.K, bitwise, close"),
            ("exact", "unknown policy 'exact': it is noise, noise.K, bitwise, close"),
            ("sqnr", "unknown policy 'sqnr': it is noise, .* or METRIC>=X such as sqnr>=35"),
            ("sqnr>35", "unknown policy 'sqnr>35': it is .* METRIC>=X"),
            ("sqnr=>35", "unknown policy 'sqnr=>35': it is .* METRIC>=X"),
            ("sqnr=35", "malformed policy 'sqnr=35': it is .*rtol=R,atol=A"),
            ("sqnr>=", "malformed policy 'sqnr>=': put a number in place of ''"),
            ("sqnr>=high", "malformed policy 'sqnr>=high': put a number in place of 'high'"),
            ("sqnr>=nan", "put a number in place of 'nan'"),
            ("snr>=35", "unknown metric 'snr': did you mean sqnr"),
            ("zzz>=35", "unknown metric 'zzz': there are cosine, max_abs, max_rel, rms, sqnr"),
            ("rtol", "unknown policy 'rtol': it is .*rtol=R,atol=A"),
            ("cosine>=2", "cosine is from -1 to 1, so this bound decides nothing"),
            ("cosine>=-1", "this bound decides nothing"),
            ("cosine<=1", "this bound decides nothing"),
            ("max_abs<=-0.1", "max_abs is from 0 to inf"),
            ("rms>=0", "this bound decides nothing"),
            ("rtol=", "malformed policy 'rtol=': put a number in place of ''"),
            ("rtol=small", "put a number in place of 'small'"),
            ("rtol=nan", "put a number in place of 'nan'"),
            ("atol=inf", "put a number in place of 'inf'"),
            ("rtol=-1", "malformed policy 'rtol=-1': a tolerance is zero or more"),
            ("rtol=1,rtol=2", "malformed policy 'rtol=1,rtol=2': it is .*rtol=R,atol=A"),
            ("rtol=1,", "malformed policy 'rtol=1,': it is .*rtol=R,atol=A"),
            ("tol=1", "malformed policy 'tol=1': it is .*rtol=R,atol=A"),
            ("close,atol=1", "malformed policy 'close,atol=1': it is "),
        ],
    )
    def test_that_make_no_sense_are_answered_with_what_to_write(self, words, remedy):
        with pytest.raises(UsageError, match=remedy):
            td.compare(torch.ones(1), torch.ones(1), policy=words)

    def test_are_chosen_by_what_is_given(self):
        one = torch.ones(1)
        without, given_one, named = (
            td.compare(one, one),
            td.compare(one, one, truth=one.double()),
            td.compare(one, one, policy="bitwise", truth=one.double()),
        )

        assert [report.case.policy for report in (without, given_one, named)] == ["close", "noise", "bitwise"]
        assert without.notes == ("no truth was given: judged by torch.testing's tolerances",)
        assert given_one.notes == named.notes == ()
        assert [report.questions.native for report in (without, given_one, named)] == [
            "not asked: no truth was given",
            "asked",
            "not asked: the policy bitwise needs no truth",
        ]


class TestBitwise:
    @pytest.mark.parametrize("value", [0.0, -0.0, 1.5, INF, -INF, NAN])
    def test_passes_what_is_identical(self, value):
        assert verdict_of(torch.tensor([value]), torch.tensor([value]), "bitwise") is EQUIVALENT

    @pytest.mark.parametrize(
        ("reference", "candidate"),
        [(0.0, -0.0), (1.0, 1.0 + 2**-23), (INF, -INF), (NAN, 1.0), (1.0, NAN), (0.0, 1e-45)],
    )
    def test_sees_a_single_bit(self, reference, candidate):
        assert verdict_of(torch.tensor([1.0, reference]), torch.tensor([1.0, candidate]), "bitwise") is DIVERGED

    def test_takes_any_nan_for_any_other(self):
        negative = torch.tensor([NAN]).view(torch.int32).bitwise_xor(-(2**31)).view(torch.float32)

        assert verdict_of(torch.tensor([NAN]), negative, "bitwise") is EQUIVALENT

    def test_counts_what_differs(self):
        seen = seen_in(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 4.0]), "bitwise")

        assert seen.reason == "2 of 3 elements differ"
        assert (seen.error, seen.allowed, seen.resolution) == (1.0, 0.0, 0.0)


# numbers on a grid of 2**-8, and tolerances on one of 2**-6: every sum and product below is exact in float32
grid = st.integers(-(2**9), 2**9).map(lambda step: step / 2**8)
elements = grid | st.sampled_from([NAN, INF, -INF, 0.0, -0.0])
tolerances = st.integers(0, 2**6).map(lambda step: step / 2**6)


class TestTolerance:
    @given(st.lists(st.tuples(elements, elements), min_size=1, max_size=5), tolerances, tolerances)
    @settings(max_examples=200, deadline=None)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_means_what_torch_means(self, dtype, pairs, rtol, atol):
        reference, candidate = torch.tensor(pairs, dtype=dtype).unbind(1)

        near = torch.isclose(candidate, reference, rtol=rtol, atol=atol, equal_nan=True)
        seen = seen_in(reference, candidate, f"rtol={rtol},atol={atol}")

        assert seen.verdict is (EQUIVALENT if near.all() else DIVERGED)
        assert seen.measurement.beyond == (~near).sum()

    @given(st.lists(st.tuples(grid, grid, grid, grid), min_size=1, max_size=3), tolerances, tolerances)
    @settings(max_examples=100, deadline=None)
    def test_holds_the_modulus_of_complex_numbers_as_torch_does(self, quads, rtol, atol):
        parts = torch.tensor(quads, dtype=torch.float64)
        reference, candidate = torch.complex(parts[:, 0], parts[:, 1]), torch.complex(parts[:, 2], parts[:, 3])
        excess = (candidate - reference).abs() - atol - rtol * reference.abs()
        assume((excess.abs() > 1e-12).all())  # a root is not exact, whoever takes it

        near = torch.isclose(candidate, reference, rtol=rtol, atol=atol)

        assert verdict_of(reference, candidate, f"rtol={rtol},atol={atol}") is (EQUIVALENT if near.all() else DIVERGED)

    def test_of_a_complex_and_a_real_number_is_by_modulus_too(self):
        reference, candidate = torch.tensor([100.0]), torch.tensor([100 + 1j])

        for policy, verdict in (("rtol=0.1", EQUIVALENT), ("rtol=0.001", DIVERGED)):
            assert td.compare(reference, candidate, policy=policy, ignore=["dtype"]).verdict is verdict

    def test_of_zero_means_exactly_zero(self):
        one = torch.ones(3)

        assert verdict_of(one, one.clone(), "rtol=0,atol=0") is EQUIVALENT
        assert verdict_of(one, one + 2**-23, "rtol=0,atol=0") is DIVERGED
        assert verdict_of(torch.zeros(1), torch.full((1,), 1e-45), "rtol=1e-3") is DIVERGED

    def test_of_the_reference_and_not_of_the_candidate(self):
        small, large = torch.tensor([1.0]), torch.tensor([2.0])

        assert verdict_of(large, small, "rtol=0.5") is EQUIVALENT
        assert verdict_of(small, large, "rtol=0.5") is DIVERGED

    @pytest.mark.parametrize("policy", ["close", "rtol=1,atol=1"])
    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    def test_never_covers_a_nan_or_an_infinity(self, policy, value):
        odd, even = torch.tensor([1.0, value]), torch.tensor([1.0, 1.0])

        assert verdict_of(odd, even, policy) is DIVERGED
        assert verdict_of(even, odd, policy) is DIVERGED
        assert verdict_of(odd, odd.clone(), policy) is EQUIVALENT
        assert seen_in(odd, even, policy).error == INF
        assert math.isfinite(seen_in(odd, even, policy).allowed)

    def test_tells_a_nan_in_one_component_from_one_in_the_other(self):
        one, other = torch.tensor([complex(NAN, 1.0)]), torch.tensor([complex(1.0, NAN)])

        assert verdict_of(one, one.clone(), "close") is EQUIVALENT
        assert verdict_of(one, other, "close") is DIVERGED

    def test_says_what_was_allowed_at_the_worst_element(self):
        seen = seen_in(torch.tensor([1000.0, 1.0]), torch.tensor([1000.0, 1.5]), "rtol=0.25,atol=0.125")

        assert seen.verdict is DIVERGED
        assert (seen.error, seen.allowed, seen.worst.index) == (0.5, 0.375, (1,))
        assert seen.reason == "1 of 2 elements are beyond rtol=0.25, atol=0.125"
        assert seen.details == {"rtol": 0.25, "atol": 0.125}

    @given(st.lists(st.tuples(grid, grid), min_size=1, max_size=4), tolerances, tolerances)
    @settings(max_examples=60, deadline=None)
    def test_that_holds_has_no_error_beyond_what_is_allowed(self, pairs, rtol, atol):
        seen = seen_in(*torch.tensor(pairs).unbind(1), f"rtol={rtol},atol={atol}")

        assert seen.verdict is DIVERGED or seen.error <= seen.allowed


# (value, a step that torch.testing passes, a step that it does not)
STEPS = {
    torch.float16: (1.0, 2**-10, 2**-9),
    torch.bfloat16: (1.0, 2**-6, 3 * 2**-7),
    torch.float32: (1.0, 90 * 2**-23, 100 * 2**-23),
    torch.float64: (1.0, 1.9e-7, 2.1e-7),
    torch.complex32: (1 + 0j, 2**-10, 2**-9),
    torch.complex64: (1j, 1.1e-5, 1.2e-5),
    torch.complex128: (3 + 4j, 5.5e-7, 6.5e-7),
    torch.float8_e4m3fn: (1.0, 0.0, 0.125),
    torch.float8_e5m2: (1.0, 0.0, 0.25),
    torch.int64: (5000, 0, 1),
    torch.uint8: (5, 0, 1),
    torch.bool: (False, 0, 1),
}


class TestClose:
    @pytest.mark.parametrize("dtype", STEPS, ids=str)
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_passes_and_fails_where_torch_testing_does(self, dtype):
        value, passing, failing = STEPS[dtype]
        for step, verdict in ((0.0, EQUIVALENT), (passing, EQUIVALENT), (failing, DIVERGED)):
            reference, candidate = (_exactly([1, value + offset], dtype) for offset in (0, step))

            assert _verdict_of_torch_testing(reference, candidate) is verdict
            assert verdict_of(reference, candidate, "close") is verdict

    @pytest.mark.parametrize(
        ("reference", "step", "verdict"),
        [(1 + 1j, 1.12e-5 * (1 + 1j), DIVERGED), (100j, 1e-4, EQUIVALENT)],
        ids=["each component is close and the number is not", "the number is close and a component is not"],
    )
    def test_takes_a_complex_number_as_one_number(self, reference, step, verdict):
        reference, candidate = torch.tensor([reference]), torch.tensor([reference + step])

        assert _verdict_of_torch_testing(reference, candidate) is verdict
        assert verdict_of(reference, candidate, "close") is verdict

    @pytest.mark.parametrize("pair", [(0.1 + 0.2, 0.3), (1.0, 1.0 + 3e-7), (NAN, NAN), (1j, 1j + 3e-7)], ids=str)
    def test_holds_for_numbers_too(self, pair):
        assert verdict_of(*pair, "close") is _verdict_of_torch_testing(*pair)

    def test_of_two_dtypes_takes_the_coarser(self):
        reference, candidate = torch.tensor([1.0]), torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)
        (seen,) = td.compare(reference, candidate, ignore=["dtype"]).comparisons

        assert seen.verdict is EQUIVALENT
        assert seen.details == {"rtol": 1.6e-2, "atol": 1e-5}


def _exactly(values, dtype):
    return torch.tensor(values, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def _verdict_of_torch_testing(reference, candidate):
    try:
        torch.testing.assert_close(candidate, reference, equal_nan=True)
    except AssertionError:
        return DIVERGED
    return EQUIVALENT


class TestThreshold:
    SIGNAL = torch.tensor([3.0, -4.0, 0.0, 5.0])

    @pytest.mark.parametrize(
        ("policy", "scale", "verdict"),
        [
            ("sqnr>=35", 1.01, EQUIVALENT),
            ("sqnr>=35", 1.1, DIVERGED),
            ("sqnr>=35", 1e6, DIVERGED),
            ("cosine>=0.999", 7.0, EQUIVALENT),
            ("cosine>=0.999", -1.0, DIVERGED),
            ("max_abs<=0.25", 1.05, EQUIVALENT),
            ("max_abs<=0.25", 1.1, DIVERGED),
            ("max_rel<=0.07", 1.0625, EQUIVALENT),
            ("max_rel<=0.05", 1.0625, DIVERGED),
            ("rms<=1", 1.25, EQUIVALENT),
            ("rms<=1", 1.5, DIVERGED),
        ],
    )
    def test_bounds_a_metric(self, policy, scale, verdict):
        assert verdict_of(self.SIGNAL, self.SIGNAL * scale, policy) is verdict

    @pytest.mark.parametrize("policy", ["sqnr>=300", "cosine>=1", "max_abs<=0", "max_rel<=0", "rms<=0"])
    @given(values=st.lists(grid, min_size=0, max_size=5))
    @settings(max_examples=40, deadline=None)
    def test_passes_what_is_identical(self, policy, values):
        assert verdict_of(torch.tensor(values), torch.tensor(values), policy) is EQUIVALENT

    @pytest.mark.parametrize("policy", ["sqnr>=-1000", "cosine>=-0.99", "max_abs<=1e9"])
    def test_never_covers_a_nan_or_an_infinity(self, policy):
        odd = torch.tensor([3.0, NAN, 0.0, 5.0])
        seen = seen_in(self.SIGNAL, odd, policy)

        assert seen.verdict is DIVERGED
        assert seen.reason.startswith("NaN or Inf out of place at 1 elements")
        assert verdict_of(odd, odd.clone(), policy) is EQUIVALENT

    def test_one_wrong_zero_is_all_noise(self):
        assert verdict_of(torch.zeros(4), torch.full((4,), 1e-30), "sqnr>=1") is DIVERGED
        assert verdict_of(torch.zeros(4), torch.full((4,), 1e-30), "cosine>=0.1") is DIVERGED

    def test_says_the_metric_and_what_was_allowed(self):
        seen = seen_in(self.SIGNAL, self.SIGNAL * 1.1, "sqnr>=40")

        assert seen.details["bound"] == 40.0
        assert seen.details["sqnr"] == pytest.approx(20.0, abs=1e-4)
        assert seen.reason == "sqnr is 20, asked for >= 40"
        assert seen.resolution == pytest.approx(0.01)
        assert seen.ratio == pytest.approx(10.0, rel=1e-4)

    def test_takes_any_registered_metric(self, monkeypatch):
        monkeypatch.setitem(METRICS._known, "ulps", lambda seen: seen.max_ulp)
        neighbour = torch.nextafter(self.SIGNAL, torch.tensor(INF))

        assert verdict_of(self.SIGNAL, neighbour, "ulps<=1") is EQUIVALENT
        assert verdict_of(self.SIGNAL, neighbour, "ulps<=0") is DIVERGED

    def test_a_metric_that_is_no_number_is_no_pass(self, monkeypatch):
        monkeypatch.setitem(METRICS._known, "broken", lambda seen: NAN)

        assert verdict_of(self.SIGNAL, self.SIGNAL.clone(), "broken>=0") is DIVERGED
        assert verdict_of(self.SIGNAL, self.SIGNAL.clone(), "broken<=0") is DIVERGED


TRUTH = torch.linspace(-3.0, 3.0, 1000, dtype=torch.float64)


def rounded(offset_ulps, dtype=torch.float32):
    """Return the truth, off by so many units in the last place."""
    error = TRUTH.abs() * offset_ulps * torch.finfo(dtype).eps
    return (TRUTH + error).to(dtype)


class TestNoise:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_passes_a_candidate_as_far_from_the_truth_as_the_reference(self, dtype):
        assert verdict_of(rounded(1, dtype), rounded(-1, dtype), "noise", TRUTH) is EQUIVALENT

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_sees_a_candidate_that_is_further(self, dtype):
        assert verdict_of(rounded(1, dtype), rounded(40, dtype), "noise", TRUTH) is DIVERGED

    def test_passes_a_candidate_that_is_closer(self):
        assert verdict_of(rounded(4000), rounded(0), "noise", TRUTH) is EQUIVALENT
        assert verdict_of(rounded(0), rounded(4000), "noise", TRUTH) is DIVERGED

    def test_sees_a_single_element(self):
        candidate = rounded(1)
        candidate[500] += 2e-5  # too little to show in the root mean square
        seen = seen_in(rounded(1), candidate, "noise", TRUTH)

        assert (seen.verdict, seen.details["statistic"], seen.worst.index) == (DIVERGED, "max", (500,))

    def test_allows_a_few_units_in_the_last_place_where_the_reference_is_exact(self):
        exact = torch.full((1000,), 2.0)

        assert verdict_of(exact, exact + 2**-22, "noise", exact.double()) is EQUIVALENT
        assert verdict_of(exact, exact + 2**-15, "noise", exact.double()) is DIVERGED

    def test_allows_the_units_of_the_dtype_that_a_transform_lowers_to(self):
        reference, lowered = TRUTH.float(), TRUTH.bfloat16()
        samples = [_sample(reference, lowered, lowered_to) for lowered_to in (None, torch.bfloat16)]

        assert [Noise().judge(sample).verdict for sample in samples] == [DIVERGED, EQUIVALENT]

    def test_gives_the_evidence(self):
        seen = seen_in(rounded(1), rounded(40), "noise", TRUTH)

        assert seen.error > seen.allowed > seen.noise > 0.0
        assert seen.ratio > 1.0
        assert 0.0 < seen.resolution < 1e-4
        assert seen.worst.truth == TRUTH[seen.worst.index].item()
        assert seen.worst.candidate - seen.worst.reference == pytest.approx(39 * 2**-23 * 3, rel=0.05)
        assert "times the noise" in seen.reason
        assert seen.details["statistic"] in ("rms", "max")

    def test_holds_for_numbers_and_complex_tensors(self):
        spiral = torch.complex(TRUTH, -TRUTH)

        assert verdict_of(0.1, 0.1 + 1e-17, "noise", 0.1) is EQUIVALENT
        assert verdict_of(0.1, 0.1001, "noise", 0.1) is DIVERGED
        assert verdict_of(spiral.to(torch.complex64), spiral.to(torch.complex64) + 1e-8, "noise", spiral) is EQUIVALENT
        assert verdict_of(spiral.to(torch.complex64), spiral.to(torch.complex64) + 1e-2j, "noise", spiral) is DIVERGED

    def test_of_zeros_is_zero(self):
        zeros = torch.zeros(5)

        assert verdict_of(zeros, zeros.clone(), "noise", zeros.double()) is EQUIVALENT
        assert verdict_of(zeros, zeros + 1e-30, "noise", zeros.double()) is DIVERGED


class TestNoiseWithoutTruth:
    def test_is_inconclusive(self):
        seen = seen_in(rounded(0), rounded(1), "noise")

        assert seen.verdict is INCONCLUSIVE
        assert "there is no truth" in seen.reason
        assert seen.error > 0.0

    def test_is_equivalent_where_both_are_bitwise_identical(self):
        assert verdict_of(rounded(0), rounded(0), "noise") is EQUIVALENT

    @pytest.mark.parametrize(
        "truth", [TRUTH[:10], TRUTH.to("meta"), [TRUTH], "truth"], ids=["short", "meta", "elsewhere", "text"]
    )
    def test_is_what_a_truth_of_another_kind_comes_to(self, truth):
        assert verdict_of(rounded(0), rounded(1), "noise", truth) is INCONCLUSIVE


class TestNoiseOfWhatIsNotFinite:
    def judged(self, reference, candidate, truth):
        fill = [0.1] * 20
        sides = [torch.tensor([*fill, value]) for value in (reference, candidate)]
        return verdict_of(*sides, "noise", torch.tensor([*fill, truth], dtype=torch.float64))

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    def test_in_place_on_every_side_is_no_difference(self, value):
        assert self.judged(value, value, value) is EQUIVALENT

    @pytest.mark.parametrize(("reference", "candidate"), [(1.0, NAN), (1.0, INF), (INF, -INF), (NAN, 1.0), (INF, NAN)])
    def test_out_of_place_in_the_candidate_is_a_divergence(self, reference, candidate):
        assert self.judged(reference, candidate, reference) is DIVERGED

    def test_that_the_reference_alone_has_is_not_the_candidates_fault(self):
        assert self.judged(INF, 1e5, 1e5) is EQUIVALENT
        assert self.judged(INF, 7e5, 1e5) is DIVERGED

    def test_where_neither_has_what_the_truth_has_decides_nothing(self):
        assert self.judged(INF, NAN, 1e5) is INCONCLUSIVE

    def test_does_not_hide_a_second_one(self):
        reference, candidate = torch.tensor([INF, 1.0, 2.0]), torch.tensor([NAN, NAN, 2.0])

        assert (
            verdict_of(reference, candidate, "noise", torch.tensor([1e39, 1.0, 2.0], dtype=torch.float64)) is DIVERGED
        )

    @pytest.mark.parametrize(
        ("reference", "candidate", "truth"), [(NAN, NAN, NAN), (INF, NAN, 1e39), (1.0, 2.0, NAN), (INF, 1e38, 1e38)]
    )
    def test_does_not_hide_other_elements(self, reference, candidate, truth):
        sides = torch.tensor([reference, 1.0, 1.0]), torch.tensor([candidate, 777.0, 777.0])

        assert verdict_of(*sides, "noise", torch.tensor([truth, 1.0, 1.0], dtype=torch.float64)) is DIVERGED

    def test_in_the_truth_alone_leaves_that_element_unjudged(self):
        assert self.judged(1.0, 777.0, NAN) is INCONCLUSIVE
        assert self.judged(1.0, 1.0, NAN) is EQUIVALENT

    @pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, -1e35])
    def test_a_mask_constant_does_not_excuse_the_rest(self, mask):
        reference = torch.tensor([mask, 0.1, 0.2, 0.3])
        wrong, right = (reference + torch.tensor([0.0, 0.0, error, 0.0]) for error in (5.0, 1e-8))
        truth = reference.double() + torch.tensor([0.0, 1e-9, 1e-9, 1e-9])

        assert verdict_of(reference, wrong, "noise", truth) is DIVERGED
        assert verdict_of(reference, right, "noise", truth) is EQUIVALENT

    def test_numbers_whose_squares_overflow_do_not_pass_for_that(self):
        reference = torch.full((10,), 1e200, dtype=torch.float64)

        assert verdict_of(reference, reference * 2, "noise", reference) is DIVERGED
        assert verdict_of(reference, reference.clone(), "noise", reference) is EQUIVALENT
        assert verdict_of(reference * 2, reference * 3, "noise", reference) is not EQUIVALENT


def _sample(reference, candidate, lowered_to):
    return Sample(
        reference=reference,
        candidate=candidate,
        truth=TRUTH,
        measurement=measure(reference, candidate),
        worst=None,
        rtol=0.0,
        atol=0.0,
        lowered_to=lowered_to,
    )


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8), (torch.complex64, 24)],
    ids=str,
)
def test_half_a_unit_in_the_last_place_is_the_largest_error_of_rounding(dtype, bits):
    assert unit_roundoff(dtype) == 2.0**-bits
