"""Every pair of leaves ends as a comparison with a verdict and its evidence, whatever kind of tensor it is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

import torchdelta as td
from torchdelta import Verdict
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policy_parser import parse
from torchdelta.compare.protocol import JudgingSteps
from torchdelta.records.comparison import Comparison

EQUIVALENT, DIVERGED, INCONCLUSIVE = Verdict.EQUIVALENT, Verdict.DIVERGED, Verdict.INCONCLUSIVE
NAN, INF = math.nan, math.inf
POLICIES = ("close", "bitwise", "rtol=1e-3,atol=1e-3", "sqnr>=40", "cosine>=0.999", "noise")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
RAW = [torch.bits8, torch.bits16, torch.uint4, torch.int3, torch.float4_e2m1fn_x2]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore:.*[Ss]parse.*beta")


def seen_in(reference, candidate, **options):
    (seen,) = td.compare(reference, candidate, **options).comparisons
    return seen


def verdict_of(reference, candidate, **options):
    return td.compare(reference, candidate, **options).verdict


SAID_TO_BE_THE_SAME = {
    "ones(3) and ones(1)": lambda: (torch.ones(3), torch.ones(1)),
    "two tokens at a tolerance of 1e-3": lambda: (torch.tensor([5000]), torch.tensor([5004])),
    "one shared NaN and all else wrong": lambda: (_with_nan(1.0), _with_nan(777.0)),
    "one of a hundred thousand elements": lambda: _with_one_off(0.03),
    "one NaN in the reference and the candidate 3 % off": lambda: (_with_nan(1.0), torch.full((4,), 1.03)),
    "nothing and a tensor": lambda: ((None,), (torch.ones(3),)),
    "a renamed key": lambda: ({"loss": torch.ones(1)}, {"losses": torch.ones(1)}),
    "fewer outputs": lambda: ([torch.ones(1), torch.ones(1)], [torch.ones(1)]),
    "a flipped bit of a mask": lambda: (torch.ones(1000) > 0, _with_one_flipped()),
    "complex as real": lambda: (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
    "float8": lambda: (torch.ones(4).to(torch.float8_e4m3fn), torch.full((4,), 1.125).to(torch.float8_e4m3fn)),
    "a value a million times too large": lambda: (torch.ones(4), torch.full((4,), 1e6)),
    "a permutation": lambda: (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
    "a flipped sign": lambda: (torch.tensor([1.0, -2.0]), torch.tensor([1.0, 2.0])),
}


class TestWhatOtherToolsCallTheSame:
    """Every pair that a tool in use today passes, and that is not the same."""

    @pytest.mark.parametrize("policy", ["close", "bitwise", "rtol=1e-3,atol=1e-3"])
    @pytest.mark.parametrize("make", SAID_TO_BE_THE_SAME.values(), ids=SAID_TO_BE_THE_SAME)
    def test_has_diverged(self, make, policy):
        reference, candidate = make()

        assert verdict_of(reference, candidate, policy=policy) is DIVERGED

    @pytest.mark.parametrize("make", SAID_TO_BE_THE_SAME.values(), ids=SAID_TO_BE_THE_SAME)
    def test_has_diverged_from_the_truth_too(self, make):
        reference, candidate = make()

        too_coarse = isinstance(reference, torch.Tensor) and reference.dtype in FLOAT8
        verdict = verdict_of(reference, candidate, truth=_widened(reference))

        assert verdict is (INCONCLUSIVE if too_coarse else DIVERGED)

    @pytest.mark.parametrize("make", SAID_TO_BE_THE_SAME.values(), ids=SAID_TO_BE_THE_SAME)
    def test_is_never_equivalent_without_a_truth(self, make):
        reference, candidate = make()

        assert verdict_of(reference, candidate, policy="noise") in (DIVERGED, INCONCLUSIVE)


def _with_nan(value):
    return torch.tensor([NAN, value, value, value])


def _with_one_off(error):
    reference = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    candidate = reference.clone()
    candidate[77_777] += error
    return reference, candidate


def _with_one_flipped():
    mask = torch.ones(1000) > 0
    mask[999] = False
    return mask


def _widened(value):
    if isinstance(value, (list, tuple)):
        return type(value)(map(_widened, value))
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor) and is_inexact(value.dtype):
        return value.to(torch.complex128 if value.is_complex() else torch.float64)
    return value


def _of(dtype, *values):
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, *COMPLEX, *INTEGERS], ids=str)
class TestEveryDtype:
    def test_is_the_same_as_its_copy(self, dtype, policy):
        values = _of(dtype, 1, 0, 1, 4)

        assert verdict_of(values, values.clone(), policy=policy) is EQUIVALENT

    def test_differs_in_one_element(self, dtype, policy):
        reference, candidate = _of(dtype, 1, 0, 1, 1), _of(dtype, 1, 0, 1, 0)
        truth = _widened(reference) if policy == "noise" else None
        seen = seen_in(reference, candidate, policy=policy, truth=truth)

        too_coarse = policy == "noise" and dtype in FLOAT8
        assert seen.verdict is (INCONCLUSIVE if too_coarse else DIVERGED)
        assert seen.worst.index == (3,)
        assert seen.measurement.mismatches == 1

    def test_may_be_empty_or_a_scalar(self, dtype, policy):
        for shape in ((0,), (2, 0, 3), ()):
            values = torch.zeros(shape, dtype=torch.uint8).to(dtype)

            assert verdict_of(values, values.clone(), policy=policy) is EQUIVALENT

    def test_is_nothing_on_the_meta_device(self, dtype, policy):
        reference, candidate = (torch.zeros(3, dtype=dtype, device="meta") for _ in range(2))

        assert verdict_of(reference, candidate, policy=policy) is INCONCLUSIVE
        assert verdict_of(reference, reference, policy=policy) is INCONCLUSIVE


@pytest.mark.parametrize("dtype", RAW, ids=str)
class TestDtypesThatTorchCannotRead:
    def make(self, dtype, *values):
        wide = torch.uint16 if dtype.itemsize == 2 else torch.uint8
        return torch.tensor(values, dtype=torch.uint8).to(wide).view(dtype)

    def test_are_compared_by_their_bits(self, dtype):
        assert verdict_of(self.make(dtype, 1, 2, 3), self.make(dtype, 1, 2, 3)) is EQUIVALENT
        assert verdict_of(self.make(dtype, 1, 2, 3), self.make(dtype, 1, 2, 4)) is DIVERGED

    def test_are_not_the_bits_themselves(self, dtype):
        other = torch.bits1x8 if dtype.itemsize == 1 else torch.uint16

        assert verdict_of(self.make(dtype, 1), self.make(dtype, 1).view(other)) is DIVERGED


class TestIntegers:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize(
        ("reference", "candidate", "dtype"),
        [
            (5000, 5004, torch.int64),
            (2**62, 2**62 + 1, torch.int64),
            (-(2**63), 2**63 - 1, torch.int64),
            (2**24, 2**24 + 1, torch.int32),
            (2**64 - 1, 2**64 - 2, torch.uint64),
            (2**32 - 1, 0, torch.uint32),
            (2**16 - 1, 2**16 - 2, torch.uint16),
            (0, 255, torch.uint8),
            (-1, 1, torch.int8),
            (True, False, torch.bool),
        ],
    )
    def test_are_exact_under_every_policy(self, reference, candidate, dtype, policy):
        reference, candidate = (
            torch.tensor([7, value]).to(dtype) if dtype is torch.bool else _integers(value, dtype)
            for value in (reference, candidate)
        )
        seen = seen_in(reference, candidate, policy=policy, truth=reference if policy == "noise" else None)

        assert seen.verdict is DIVERGED
        assert seen.reason == "1 of 2 elements differ, and integers have no rounding noise"
        assert (seen.worst.reference, seen.worst.candidate) == (reference[1].item(), candidate[1].item())
        assert (seen.allowed, seen.resolution) == (0.0, 0.0)


def _integers(value, dtype):
    return torch.tensor([1, value], dtype=dtype)


LAYOUTS = {
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "strided": lambda tensor: tensor.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda tensor: torch.cat([torch.zeros(1, 4), tensor])[1:],
    "requiring grad": lambda tensor: tensor.clone().requires_grad_(),
    "a parameter": lambda tensor: nn.Parameter(tensor.clone()),
    "an intermediate": lambda tensor: tensor.clone().requires_grad_() * 1,
    "lazily negated": lambda tensor: torch.complex(torch.zeros(()), -tensor).conj().imag,
    "channels last": lambda tensor: tensor.reshape(1, 1, 3, 4).to(memory_format=torch.channels_last),
    "in a storage of bytes": lambda tensor: tensor.contiguous().view(torch.uint8).clone().view(torch.float32),
}


@pytest.mark.parametrize("laid_out", LAYOUTS.values(), ids=LAYOUTS)
class TestEveryLayout:
    VALUES = torch.arange(12.0).reshape(3, 4)

    def test_holds_the_same_values(self, laid_out):
        reference, candidate = laid_out(self.VALUES), laid_out(self.VALUES.clone())

        assert verdict_of(reference, candidate, policy="bitwise") is EQUIVALENT

    def test_and_a_plain_one_hold_the_same_values(self, laid_out):
        reference = laid_out(self.VALUES)
        candidate = self.VALUES.reshape(reference.shape).clone()

        assert verdict_of(reference, candidate, policy="bitwise", ignore=["requires_grad"]) is EQUIVALENT

    def test_names_the_element_that_differs(self, laid_out):
        wrong = self.VALUES.clone()
        wrong[1, 2] = -5.0
        seen = seen_in(laid_out(self.VALUES), laid_out(wrong))

        assert seen.verdict is DIVERGED
        assert (seen.worst.index[-2:], seen.worst.reference, seen.worst.candidate) == ((1, 2), 6.0, -5.0)


class TestConjugatesThatAreABit:
    """A lazy conjugate or negative is compared by the numbers that it stands for, also against a truth."""

    @pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.EQUIVALENT), (1.1, Verdict.DIVERGED)])
    def test_are_judged_by_their_values(self, factor, verdict):
        numbers = torch.randn(4, 4, dtype=torch.complex64)
        truth = numbers.to(torch.complex128).conj()

        assert td.compare(numbers.conj(), factor * numbers.conj().resolve_conj(), truth=truth).verdict is verdict
        assert td.compare(numbers.conj().imag, factor * -numbers.imag, truth=truth.imag).verdict is verdict


class TestExpandedTensors:
    def test_are_compared_at_every_index(self):
        reference = torch.tensor([[1.0], [2.0]]).expand(2, 3)
        wrong = reference.clone()
        wrong[1, 2] = 5.0

        assert verdict_of(reference, reference.clone()) is EQUIVALENT
        assert seen_in(reference, wrong).worst.index == (1, 2)


class TestSubclasses:
    class Rewrites(torch.Tensor):
        """Says that every operator returns zeros."""

        @classmethod
        def __torch_function__(cls, function, kinds, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **(kwargs or {}))
                return torch.zeros_like(result) if isinstance(result, torch.Tensor) else result

    def test_are_measured_without_their_operators(self):
        reference, candidate = (torch.tensor(values).as_subclass(self.Rewrites) for values in ([1.0, 2.0], [1.0, 3.0]))
        seen = seen_in(reference, candidate)

        assert seen.verdict is DIVERGED
        assert (seen.worst.reference, seen.worst.candidate) == (2.0, 3.0)


class TestTensorsWithoutValues:
    def test_that_are_fake_are_inconclusive(self):
        with FakeTensorMode():
            fake, other = torch.ones(3), torch.ones(3)

        assert verdict_of(fake, other) is INCONCLUSIVE
        assert verdict_of(fake, fake) is INCONCLUSIVE

    def test_are_inconclusive_inside_a_sparse_tensor(self):
        def sparse():
            indices, values = torch.zeros(1, 2, dtype=torch.long, device="meta"), torch.ones(2, device="meta")
            return torch.sparse_coo_tensor(indices, values, (4,), check_invariants=False)

        assert verdict_of(sparse(), sparse()) is INCONCLUSIVE

    def test_still_keep_their_contract(self):
        assert verdict_of(torch.ones(3, device="meta"), torch.ones(4, device="meta")) is DIVERGED
        assert verdict_of(torch.ones(3, device="meta"), torch.ones(3, device="meta").long()) is DIVERGED

    @pytest.mark.parametrize("transform", ["export", "aot_eager_decomp_partition"])
    def test_beside_a_choice_and_a_cast_are_inconclusive_in_a_program(self, transform):
        def program(x, like):
            largest, chosen = (x * 1.1).topk(2)
            wide = x.float().sin().to(x.dtype) * 1.1
            return largest, chosen, wide, torch.empty_like(like), torch.empty_like(like, dtype=torch.long)

        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.empty(3, device="meta")
        report = td.check(program, inputs, transform=transform)

        verdicts = {each.path: each.verdict for each in report.stage("forward").comparisons}
        assert report.verdict is INCONCLUSIVE
        assert {verdicts["outputs[0]"], verdicts["outputs[1]"], verdicts["outputs[2]"]} == {EQUIVALENT}
        assert {verdicts["outputs[3]"], verdicts["outputs[4]"]} == {INCONCLUSIVE}

    def test_do_not_hide_a_divergence_beside_them(self):
        def program(x, like):
            return x.sin(), torch.empty_like(like)

        inputs = torch.ones(4), torch.empty(3, device="meta")
        report = td.check(program, inputs, candidate=lambda x, like: (x.sin() * 1.01, torch.empty_like(like)))

        assert report.verdict is DIVERGED

    def test_make_no_tree_equivalent(self):
        meta = torch.ones(3, device="meta")

        assert verdict_of([torch.ones(1), meta], [torch.ones(1), meta]) is INCONCLUSIVE


class TestEvidence:
    FINITE = ("error", "allowed", "resolution")

    @pytest.mark.parametrize("policy", ["close", "bitwise", "rtol=1e-3,atol=1e-3", "sqnr>=40"])
    @pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, *COMPLEX], ids=str)
    @pytest.mark.parametrize("last", [1, 2], ids=["equivalent", "diverged"])
    def test_is_on_every_comparison_of_floats(self, dtype, policy, last):
        reference, candidate = _of(dtype, 4, 2, 1), _of(dtype, 4, 2, last)
        seen = seen_in(reference, candidate, policy=policy)

        assert all(math.isfinite(getattr(seen, name)) for name in self.FINITE)
        assert (seen.ratio > 1.0) == (seen.verdict is DIVERGED)
        assert seen.worst is not None
        assert seen.measurement.numel == (6 if dtype.is_complex else 3)  # components count each
        assert (seen.dtype, seen.shape) == (str(dtype).removeprefix("torch."), (3,))
        assert seen.reason

    @pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, *COMPLEX], ids=str)
    @pytest.mark.parametrize("last", [1, 2], ids=["equivalent", "diverged"])
    def test_has_noise_and_three_values_where_there_is_a_truth(self, dtype, last):
        reference, candidate = _of(dtype, 4, 2, 1), _of(dtype, 4, 2, last)
        seen = seen_in(reference, candidate, truth=_widened(reference))

        assert all(math.isfinite(getattr(seen, name)) for name in (*self.FINITE, "noise"))
        assert None not in (seen.worst.reference, seen.worst.candidate, seen.worst.truth)
        if last == 2 and dtype in FLOATS:
            assert seen.verdict is DIVERGED
            assert (seen.worst.index, seen.worst.reference, seen.worst.candidate, seen.worst.truth) == ((2,), 1, 2, 1)

    def test_of_complex_numbers_is_written_as_python_writes_them(self):
        seen = seen_in(torch.tensor([1j, 2 + 1j]), torch.tensor([1j, 2 + 5j]))

        assert (seen.worst.index, seen.worst.reference, seen.worst.candidate) == ((1,), "(2+1j)", "(2+5j)")

    def test_points_at_what_is_not_finite_before_anything_else(self):
        seen = seen_in(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([[9.0, 1.0], [NAN, 3.0]]))

        assert seen.worst.index == (1, 0)
        assert seen.worst.reference == 2.0
        assert math.isnan(seen.worst.candidate)
        assert (seen.error, seen.ratio) == (INF, INF)

    def test_of_nothing_is_no_element(self):
        seen = seen_in(torch.ones(0, 3), torch.ones(0, 3))

        assert (seen.verdict, seen.worst, seen.error) == (EQUIVALENT, None, 0.0)

    def test_of_one_and_the_same_tensor_needs_no_pass(self):
        one = torch.ones(3)
        seen = seen_in(one, one)

        assert (seen.verdict, seen.measurement) == (EQUIVALENT, None)
        assert (seen.error, seen.allowed, seen.resolution) == (0.0, 0.0, 0.0)

    def test_of_a_difference_in_kind_names_both(self):
        seen = seen_in(torch.ones(2, 3), None)

        assert seen.leaf == "structure"
        assert seen.reason == "structure: float32 tensor of shape (2, 3) in the reference, None in the candidate"

    def test_of_strings_names_both(self):
        seen = seen_in("mean", "sum")

        assert (seen.leaf, seen.reason) == ("object", "value: 'mean' in the reference, 'sum' in the candidate")

    def test_of_long_objects_is_short(self):
        seen = seen_in("a" * 1000, "b" * 1000)

        assert len(seen.reason) < 200

    def test_of_an_array_of_strings_names_the_first_that_differs(self):
        seen = seen_in(np.array([["a", "b"], ["c", "d"]]), np.array([["a", "x"], ["y", "d"]]))

        assert "at [0, 1], the first of 2 that differ" in seen.reason

    def test_survives_json(self):
        sides = [[torch.tensor([1.0, value]), torch.tensor([1j]), 3, None] for value in (NAN, INF)]
        written = td.to_json(td.compare(*sides))

        assert td.to_json(td.from_json(written)) == written


class TestNumbers:
    @pytest.mark.parametrize(
        ("reference", "candidate", "verdict"),
        [
            (0.1 + 0.2, 0.3, EQUIVALENT),
            (0.3, 0.30001, DIVERGED),
            (1.0, NAN, DIVERGED),
            (NAN, NAN, EQUIVALENT),
            (INF, INF, EQUIVALENT),
            (np.float32(0.1), np.float32(0.1) + np.float32(1e-8), EQUIVALENT),
            (np.longdouble(NAN), np.longdouble(NAN), EQUIVALENT),
            (5, 6, DIVERGED),
            (2**80, 2**80, EQUIVALENT),
        ],
    )
    def test_are_held_to_the_policy_as_tensors_are(self, reference, candidate, verdict):
        assert verdict_of(reference, candidate) is verdict


class TestTheVerdictOfAWhole:
    def test_is_that_of_its_worst_leaf(self):
        good, bad, unknown = torch.ones(1), torch.zeros(1), torch.ones(1, device="meta")

        assert verdict_of([good, good], [good, good.clone()]) is EQUIVALENT
        assert verdict_of([good, unknown], [good, unknown]) is INCONCLUSIVE
        assert verdict_of([good, unknown, good], [good, unknown, bad]) is DIVERGED

    @given(st.lists(st.sampled_from([0.0, 1.0, NAN, INF]), max_size=6), st.data())
    @settings(max_examples=60, deadline=None)
    def test_is_equivalent_exactly_when_every_leaf_is(self, values, data):
        changed = data.draw(st.lists(st.sampled_from([0.0, 1.0, NAN, INF]), min_size=len(values), max_size=len(values)))
        reference, candidate = ([torch.tensor(value) for value in side] for side in (values, changed))
        same = [str(first) == str(second) for first, second in zip(values, changed, strict=True)]

        comparisons, unmatched = Judge(policy=parse("bitwise")).compare(leaves_of(reference), leaves_of(candidate))

        assert [seen.verdict is EQUIVALENT for seen in comparisons] == same
        assert not unmatched


class Stepwise(JudgingSteps[str]):
    """A subject whose error is `ratios[n]` times the allowed one, by the number n of noisy runs."""

    def __init__(self, ratios):
        self.ratios = ratios
        self.counts = []

    reference, truth = "reference", lambda self: "truth"

    def judge_by_bits(self):
        return None

    def noisy(self, count):
        return ["noisy"] * count

    def compare(self, stage, yardstick):
        count = len(yardstick.noisy)
        self.counts.append(count)
        ratio = self.ratios[count]
        verdict = DIVERGED if ratio > 1 else EQUIVALENT
        return [
            Comparison(path="x", verdict=verdict, reason="", error=ratio, allowed=1.0, details={"noisy_runs": count})
        ]

    def excuse_integers(self, stages, yardstick):
        return stages


@pytest.mark.parametrize(
    ("ratios", "counts", "verdict"),
    [
        ({1: 0.2}, [1], EQUIVALENT),
        ({1: 0.8, 3: 0.7}, [1, 3], EQUIVALENT),
        ({1: 1.9, 3: 1.1, 8: 0.4}, [1, 3, 8], EQUIVALENT),
        ({1: 1.9, 3: 1.2, 8: 1.2}, [1, 3, 8], DIVERGED),
        ({1: 4.0, 3: 3.0}, [1, 3], DIVERGED),
        ({1: 9.0}, [1], DIVERGED),
    ],
)
def test_more_noise_is_asked_for_the_nearer_an_error_is_to_the_threshold(ratios, counts, verdict):
    subject = Stepwise(ratios)

    (stage,) = subject.judge()

    assert (subject.counts, stage.verdict) == (counts, verdict)
