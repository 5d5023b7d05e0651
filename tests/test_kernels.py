"""`measure` against an oracle that looks at one element after the other, exactly and slowly."""

import contextlib
import functools
import math
import os
import struct
import subprocess
import sys
import textwrap
from fractions import Fraction
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdelta.compare import kernels, torch_kernels
from torchdelta.compare.kernels import measure
from torchdelta.records.comparison import Measurement

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
INTEGERS = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS]
RAW = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

on_both_paths = pytest.mark.parametrize("path", ["fused", "chunked"])
# a power of two: then no path rounds rtol·|reference|, and all agree on what lies exactly at the limit
TOLERANCES = [(0.0, 0.0), (2.0**-7, 0.0), (2.0**-7, 0.1), (0.0, 1.0)]


# ----------------------------------------------------------------------------------------------------------- the oracle


def oracle(reference, candidate, rtol=0.0, atol=0.0):
    """Every number from the definitions, in exact arithmetic."""
    is_complex = reference.is_complex() or candidate.is_complex()
    r_values, c_values = elements(reference, is_complex), elements(candidate, is_complex)
    same_float = reference.dtype == candidate.dtype and reference.dtype not in INTEGERS
    if same_float:
        component = COMPLEX.get(reference.dtype, reference.dtype)
        r_bits, c_bits = bits(reference), bits(candidate)
        ulps = [
            abs(ordinal(r, component) - ordinal(c, component))
            for r, c in zip(r_values, c_values, strict=True)
            if not (math.isnan(r) or math.isnan(c))
        ]
        mismatches = sum(
            x != y and not (math.isnan(r) and math.isnan(c))
            for x, y, r, c in zip(r_bits, c_bits, r_values, c_values, strict=True)
        )
    pairs = list(zip(r_values, c_values, strict=True))
    finite = [(r, c) for r, c in pairs if math.isfinite(r) and math.isfinite(c)]
    misplaced = [is_misplaced(r, c) for r, c in pairs]
    distances = [distance(r, c) if math.isfinite(r) and math.isfinite(c) else 0.0 for r, c in pairs]
    if not pairs:
        worst = -1
    elif any(misplaced):
        worst = misplaced.index(True)
    else:
        worst = distances.index(max(distances))
    return Measurement(
        numel=len(pairs),
        finite=len(finite),
        mismatches=mismatches if same_float else sum(r != c and not (r != r and c != c) for r, c in pairs),
        misplaced=sum(misplaced),
        nan_reference=sum(math.isnan(r) for r in r_values),
        nan_candidate=sum(math.isnan(c) for c in c_values),
        inf_reference=sum(math.isinf(r) for r in r_values),
        inf_candidate=sum(math.isinf(c) for c in c_values),
        max_abs=max(distances, default=0.0),
        max_rel=max((ratio(r, c) for r, c in finite), default=0.0),
        square_error=to_float(sum((Fraction(c) - Fraction(r)) ** 2 for r, c in finite)),
        square_reference=to_float(sum(Fraction(r) ** 2 for r, _ in finite)),
        square_candidate=to_float(sum(Fraction(c) ** 2 for _, c in finite)),
        dot=to_float(sum(Fraction(r) * Fraction(c) for r, c in finite)),
        max_ulp=max(ulps, default=0) if same_float else None,
        beyond=sum(misplaced) + sum(not distance(r, c) <= atol + rtol * abs(float(r)) for r, c in finite),
        worst=worst // 2 if is_complex and pairs else worst,
    )


def elements(tensor, is_complex):
    """Python numbers in flat order, the components of complex ones one after the other."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
        return tensor.double().flatten().tolist()
    values = (tensor if tensor.dtype in INTEGERS else tensor.double()).flatten().tolist()
    return [part for value in values for part in (value, 0)] if is_complex else values


def bits(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().view(RAW[tensor.itemsize]).flatten().tolist()


def ordinal(value, dtype):
    """The place of a number among all that the dtype can hold, in order."""
    if dtype in (torch.float32, torch.float64):
        float_code, integer_code = ("f", "i") if dtype == torch.float32 else ("d", "q")
        (magnitude,) = struct.unpack(integer_code, struct.pack(float_code, abs(value)))
        return -magnitude if value < 0 else magnitude
    return numbers_of(dtype)[value]


@functools.cache
def numbers_of(dtype):
    raw = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int64).to(RAW[dtype.itemsize])
    values = raw.view(dtype).double()
    return {value: place for place, value in enumerate(sorted(set(values[~values.isnan()].tolist())))}


def is_misplaced(r, c):
    if math.isfinite(r) and math.isfinite(c):
        return False
    return not (r == c or (math.isnan(r) and math.isnan(c)))


def distance(r, c):
    return to_float(abs(Fraction(c) - Fraction(r)))


def ratio(r, c):
    if r == c:
        return 0.0
    return distance(r, c) / abs(float(r)) if r else math.inf


def to_float(exact):
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def assert_agrees(measured, expected):
    exactly = ["numel", "finite", "mismatches", "misplaced", "nan_reference", "nan_candidate", "inf_reference"]
    exactly += ["inf_candidate", "max_ulp", "beyond", "worst"]
    assert {name: getattr(measured, name) for name in exactly} == {name: getattr(expected, name) for name in exactly}
    assert measured.max_abs == pytest.approx(expected.max_abs, rel=1e-15, abs=0.0)
    assert measured.max_rel == pytest.approx(expected.max_rel, rel=1e-15, abs=0.0)
    largest = max(expected.square_reference, expected.square_candidate, expected.square_error)
    # squares of float64 overflow above 1e154 and lose digits below 1e-146
    if largest < 1e300:
        for name in ("square_error", "square_reference", "square_candidate"):
            assert getattr(measured, name) == pytest.approx(getattr(expected, name), rel=1e-12, abs=1e-290)
        assert measured.dot == pytest.approx(expected.dot, rel=1e-12, abs=1e-12 * largest + 1e-290)


@contextlib.contextmanager
def on(path, *, piece=None, span=None):
    """Take one of the two paths, with pieces and spans so small that a few elements have many."""
    cpu_measure = kernels._cpu_measure(2**20) if path == "fused" else torch_kernels.measure_span
    with (
        mock.patch.object(kernels, "_cpu_measure", return_value=cpu_measure),
        mock.patch.object(torch_kernels, "CPU_PIECE", piece or torch_kernels.CPU_PIECE),
        mock.patch.object(kernels, "_SPAN", span or kernels._SPAN),
    ):
        yield


# --------------------------------------------------------------------------------------------------- tensors to measure


def from_bits(raw, dtype):
    if dtype in COMPLEX:
        return torch.view_as_complex(from_bits([raw, raw[::-1]], COMPLEX[dtype]).T.contiguous())
    words = torch.tensor(raw, dtype=torch.int64)
    if dtype == torch.bool:
        return words % 2 == 1
    return words.to(RAW[dtype.itemsize]).view(dtype)


def words_of(dtype):
    """Bit patterns: any, small integers, and the neighbourhoods of zero, one, the largest number and infinity."""
    width = 8 * COMPLEX.get(dtype, dtype).itemsize
    if dtype in FLOATS and dtype != torch.float8_e8m0fnu:
        special = torch.tensor([0.0, 1.0, math.inf, math.nan, 1e-30, 1e30, 0.1], dtype=torch.float64).to(dtype)
        anchors = special.view(RAW[dtype.itemsize]).tolist()
    else:
        anchors = [0, 2 ** (width - 1), 2**53, -(2**53)]
    near = st.builds(int.__add__, st.sampled_from(anchors), st.integers(-2, 2))
    signs = st.sampled_from([0, -(2 ** (width - 1))])
    word = st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1) | st.builds(int.__xor__, near, signs)
    return word.map(lambda each: (each + 2 ** (width - 1)) % 2**width - 2 ** (width - 1))


@st.composite
def sides(draw, dtypes):
    """Two tensors of the same length: candidates are the reference's bits, their neighbours, or anything."""
    dtype = draw(st.sampled_from(dtypes))
    reference = draw(st.lists(words_of(dtype), min_size=1, max_size=12))
    changes = st.sampled_from([None, None, 1, -1, 3])
    candidate = [
        draw(words_of(dtype)) if change is None and draw(st.booleans()) else word ^ (change or 0)
        for word, change in ((word, draw(changes)) for word in reference)
    ]
    return from_bits(reference, dtype), from_bits(candidate, dtype)


# --------------------------------------------------------------------------------------------------- against the oracle


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_both_paths
def test_agrees_with_the_oracle_on_any_bits_of_a_dtype(dtype, path):
    @settings(max_examples=25, deadline=None)
    @given(sides([dtype]), st.sampled_from(TOLERANCES))
    def agrees(pair, tolerance):
        rtol, atol = tolerance
        with on(path):
            assert_agrees(measure(*pair, rtol=rtol, atol=atol), oracle(*pair, rtol, atol))

    agrees()


@settings(max_examples=300, deadline=None)
@given(sides(DTYPES), sides(DTYPES), st.sampled_from(TOLERANCES), st.sampled_from(["fused", "chunked"]))
def test_agrees_with_the_oracle_between_any_two_dtypes(first, second, tolerance, path):
    rtol, atol = tolerance
    length = min(len(first[0]), len(second[0]))
    reference, candidate = first[0][:length], second[0][:length]

    with on(path):
        assert_agrees(measure(reference, candidate, rtol=rtol, atol=atol), oracle(reference, candidate, rtol, atol))


@settings(max_examples=100, deadline=None)
@given(sides(DTYPES), st.integers(1, 5), st.integers(1, 7), st.sampled_from(["fused", "chunked"]))
def test_pieces_and_spans_join_into_the_whole(pair, piece, span, path):
    with on(path, piece=piece, span=span):
        assert_agrees(measure(*pair), oracle(*pair))


VIEWS = {
    "transposed": lambda x: x.reshape(6, 4, 5).transpose(0, 2),
    "every other": lambda x: x.reshape(6, 20)[:, ::2],
    "expanded": lambda x: x[:6].reshape(6, 1).expand(6, 20),
    "channels last": lambda x: x.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "a parameter": lambda x: torch.nn.Parameter(x) if x.is_floating_point() else x,
    "a scalar": lambda x: x[7],
    "conjugated": lambda x: x.reshape(6, 20).t().conj(),
    "negated": lambda x: torch.complex(x.float(), x.float()).conj().imag if x.is_floating_point() else x,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint16, torch.complex64], ids=str)
@on_both_paths
def test_reads_every_view_in_flat_order(view, dtype, path):
    values = torch.randn(120, generator=torch.Generator().manual_seed(0)) * 9
    reference, candidate = values.to(dtype), (values + values.roll(1) / 8).to(dtype)

    for r, c in [
        (VIEWS[view](reference), VIEWS[view](candidate)),
        (VIEWS[view](reference), VIEWS[view](candidate).clone()),
    ]:
        with on(path, piece=7, span=31):
            measured = measure(r, c)

        assert_agrees(measured, oracle(r, c))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32], ids=str)
@on_both_paths
def test_blocks_and_pieces_of_a_long_tensor_add_up(dtype, path):
    generator = torch.Generator().manual_seed(0)
    reference = (torch.randn(9_001, generator=generator) * 50).to(dtype)
    candidate = (reference.double() + torch.randn(9_001, generator=generator) / 40).to(dtype)
    if dtype.is_floating_point:
        reference[4_095:7_000:500] = math.nan
        candidate[4_095:5_000:500] = math.nan
        reference[8_192] = candidate[8_192] = -math.inf
        reference[100], candidate[100] = 0.0, -0.0

    with on(path, piece=5_000):
        assert_agrees(measure(reference, candidate, rtol=2.0**-9), oracle(reference, candidate, rtol=2.0**-9))


# -------------------------------------------------------------------------------------------- what each number must say


@on_both_paths
def test_an_empty_tensor_has_no_worst_element(path):
    with on(path):
        assert measure(torch.ones(0, 3), torch.ones(0, 3)) == oracle(torch.ones(0, 3), torch.ones(0, 3))
        assert measure(torch.ones(0), torch.ones(0)).worst == -1
        assert measure(torch.ones(0), torch.ones(0).int()).max_ulp is None


def test_shapes_that_differ_are_an_error_even_if_they_broadcast():
    with pytest.raises(ValueError, match=r"\(3,\).*\(1,\)"):
        measure(torch.ones(3), torch.ones(1))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_tensor_without_plain_elements_is_an_error_that_says_so():
    quantized = torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)
    for unmeasurable in (quantized, torch.ones(3).to_sparse()):
        with pytest.raises(TypeError, match="dequantize it, or make it dense"):
            measure(torch.ones(3), unmeasurable)


@on_both_paths
def test_the_sign_of_zero_is_a_mismatch_of_bits_but_no_difference(path):
    with on(path):
        measured = measure(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
        between_dtypes = measure(torch.tensor([0.0]), torch.tensor([-0.0], dtype=torch.float64))

    assert (measured.mismatches, measured.max_abs, measured.max_rel, measured.max_ulp) == (1, 0.0, 0.0, 0)
    assert measured.beyond == 0
    assert between_dtypes.mismatches == 0


@on_both_paths
def test_steps_are_counted_across_zero_and_to_infinity(path):
    smallest, largest = 2.0**-149, torch.finfo(torch.float32).max
    with on(path):
        assert measure(torch.tensor([-smallest]), torch.tensor([2 * smallest])).max_ulp == 3
        assert measure(torch.tensor([largest]), torch.tensor([math.inf])).max_ulp == 1
        assert measure(torch.tensor([-math.inf]), torch.tensor([math.inf])).max_ulp == 2 * 0x7F800000


@on_both_paths
def test_integers_beyond_float64_are_told_apart(path):
    huge = torch.tensor([2**62, 2**62, -(2**63)])
    with on(path):
        measured = measure(huge, huge + torch.tensor([0, 1, 0]))
        unsigned = measure(torch.tensor([2**63 + 1], dtype=torch.uint64), torch.tensor([-(2**63) + 1]))
        against_float = measure(torch.tensor([2**53 + 1]), torch.tensor([2.0**53], dtype=torch.float64))
        near_float = measure(torch.tensor([-1]), torch.tensor([-1 + 2.0**-53], dtype=torch.float64))

    assert (measured.mismatches, measured.max_abs, measured.worst) == (1, 1.0, 1)
    assert (unsigned.mismatches, unsigned.max_abs) == (1, 2.0**64)
    assert (against_float.mismatches, against_float.max_abs) == (1, 1.0)
    assert (near_float.mismatches, near_float.max_abs) == (1, 2.0**-53)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@on_both_paths
def test_squares_of_float32_neither_vanish_nor_overflow(scale, path):
    reference = torch.full((10,), scale)
    with on(path):
        measured = measure(reference, reference * 2)

    assert measured.square_reference == pytest.approx(10 * float(reference[0]) ** 2, rel=1e-12)
    assert measured.square_error == pytest.approx(measured.square_reference, rel=1e-12)


@pytest.mark.parametrize("place", [1, 9_000])
@on_both_paths
def test_a_ratio_of_the_smallest_numbers_is_not_rounded_away(place, path):
    # 0.6 times the smallest number rounds up to that number, which would hide the ratio of 1
    reference = torch.full((10_000,), 1.0, dtype=torch.float64)
    candidate = reference.clone()
    candidate[0] = 1.6
    reference[place], candidate[place] = 5e-324, 1e-323
    with on(path):
        assert measure(reference, candidate).max_rel == 1.0


@on_both_paths
def test_a_misplaced_element_is_worse_than_any_difference(path):
    reference = torch.zeros(10_000)
    candidate = torch.zeros(10_000)
    candidate[10], candidate[9_000], candidate[9_500] = 1e30, math.inf, math.nan
    with on(path):
        measured = measure(reference, candidate, rtol=1.0, atol=1e38)

    assert (measured.worst, measured.misplaced, measured.beyond) == (9_000, 2, 2)


@on_both_paths
def test_of_equal_differences_the_first_is_the_worst(path):
    reference, candidate = torch.zeros(50_000), torch.zeros(50_000)
    candidate[[20_000, 20_001, 45_000]] = torch.tensor([3.0, -3.0, 3.0])
    with on(path, span=10_000):
        assert measure(reference, candidate).worst == 20_000
        assert measure(reference, reference).worst == 0


@on_both_paths
def test_infinity_in_place_of_a_number_is_beyond_any_tolerance(path):
    with on(path):
        assert measure(torch.tensor([math.inf]), torch.tensor([5.0]), rtol=1.0).beyond == 1
        assert measure(torch.tensor([math.inf]), torch.tensor([math.inf])).beyond == 0
        assert measure(torch.tensor([math.nan]), torch.tensor([math.nan])).beyond == 0


@on_both_paths
def test_the_worst_complex_element_has_its_own_index_and_not_that_of_a_component(path):
    reference = torch.zeros(4, dtype=torch.complex64)
    candidate = reference.clone()
    candidate[3] = 1j
    with on(path):
        measured = measure(reference, candidate)

    assert (measured.worst, measured.numel, measured.mismatches) == (3, 8, 1)


@on_both_paths
def test_the_tensors_are_left_as_they_were(path):
    reference = torch.tensor([-0.0, math.nan, 1.0])
    candidate = reference.double()
    with on(path):
        measure(reference, candidate)

    assert bits(reference) == bits(torch.tensor([-0.0, math.nan, 1.0]))
    assert bits(candidate) == bits(torch.tensor([-0.0, math.nan, 1.0]).double())


# -------------------------------------------------------------------------------------------- how it treats the machine


def run_python(script, *, timeout_s=60):
    """A process of its own: what is asked of memory, imports and forks must not depend on the tests before."""
    source = "import math, os, sys\nimport torch\n" + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=timeout_s, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_numba_is_not_imported_before_the_first_large_measurement():
    script = """
        from torchdelta.compare.kernels import measure
        measure(torch.ones(3), torch.ones(3))
        before = "numba" in sys.modules
        measure(torch.ones(2**15), torch.ones(2**15))
        print(before, "numba" in sys.modules)
    """
    assert run_python(script) == "False True"


def test_measures_without_numba():
    script = """
        sys.modules["numba"] = None
        from torchdelta.compare.kernels import measure
        candidate = torch.ones(2**15)
        candidate[7] = 2.0
        print(measure(torch.ones(2**15), candidate).worst)
    """
    assert run_python(script) == "7"


def test_memory_beyond_the_tensors_stays_below_64_mb():
    # tensors are filled in place, so that their own construction sets no higher peak
    script = """
        from torchdelta.compare import torch_kernels
        from torchdelta.compare.kernels import measure
        from torchdelta.program.memory import peak_bytes

        def peak_mb():
            return peak_bytes() / 2**20

        def views(x):
            n = x.numel() // 4
            yield "contiguous", x
            yield "transposed", x[:n].view(4096, -1).t()
            yield "expanded", x[:1024].expand(n // 1024, 1024).t()
            yield "bfloat16", x.view(torch.bfloat16)
            yield "int8", x[: n // 2].view(torch.int8)
            yield "huge integers", x[:n].view(torch.int64)
            yield "conjugated", x[:n].view(torch.complex64).conj()

        small = torch.ones(4096 * 4), torch.full((4096 * 4,), 1.25)
        large = torch.empty(2**27).fill_(1.0), torch.empty(2**27).fill_(1.25)
        for (_, r), (_, c) in zip(views(small[0]), views(small[1])):
            measure(r, c)
        before = peak_mb()
        for (name, r), (_, c) in zip(views(large[0]), views(large[1])):
            measure(r, c, rtol=1e-3)
            print(name, peak_mb() - before)
        torch_kernels.measure_span(large[0][: 2**24], large[1][: 2**24], 0.0, 0.0)
        print("without numba", peak_mb() - before)
    """
    grown_mb = dict(line.rsplit(" ", 1) for line in run_python(script).splitlines())

    assert len(grown_mb) == 8
    assert {name: mb for name, mb in grown_mb.items() if float(mb) >= 64} == {}


def test_a_forked_child_measures_after_its_parent_did():
    script = """
        import time
        from torchdelta.compare.kernels import measure

        ones = torch.ones(2**22)
        pairs = [(ones.to(dtype), ones.to(dtype)) for dtype in (torch.float32, torch.int8)]
        pairs.append((ones.view(2048, -1).t(), ones.clone().view(2048, -1).t()))
        # small enough for the main thread, whose OpenMP threads, started above, the child does not have
        pairs.append((ones[: 2**20].to(torch.int8), ones[: 2**20].to(torch.int8)))
        for pair in pairs:
            measure(*pair)
        child = os.fork()
        if child == 0:
            os._exit(0 if all(measure(*pair).mismatches == 0 for pair in pairs) else 1)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                print(os.waitstatus_to_exitcode(status))
                break
            time.sleep(0.02)
        else:
            os.kill(child, 9)
            print("the child hung")
    """
    assert run_python(script) == "0"


# ------------------------------------------------------------------------------------------------ when numba is loaded


class TestLoading:
    @pytest.fixture(autouse=True)
    def nothing_measured(self, monkeypatch):
        """As in a process that has measured nothing yet."""
        for name in ("numba_measure", "numba_spread"):
            monkeypatch.delitem(sys.modules, f"torchdelta.compare.{name}", raising=False)
        monkeypatch.setattr(kernels._Small, "measured", 0)

    def test_a_few_small_tensors_are_measured_without_it(self):
        assert all(kernels.compiled("numba_measure", torch_kernels.CPU_PIECE) is None for _ in range(kernels._MANY))
        assert "torchdelta.compare.numba_measure" not in sys.modules

    def test_a_large_one_is_worth_it_and_from_then_on_it_is_there_for_small_ones(self):
        assert kernels.compiled("numba_measure", 4) is None
        assert (
            kernels.compiled("numba_measure", torch_kernels.CPU_PIECE + 1)
            is kernels.compiled("numba_measure", 4)
            is not None
        )

    def test_many_small_ones_are_worth_it_together(self):
        found = [kernels.compiled(name, 4) for name in ("numba_measure", "numba_spread") * kernels._MANY]

        assert found[: kernels._MANY] == [None] * kernels._MANY
        assert None not in found[kernels._MANY :]
