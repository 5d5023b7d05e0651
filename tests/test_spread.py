"""How far a run lies from the truth, block by block."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdelta.compare import numba_spread, spread
from torchdelta.compare.spread import block_length, lost_masks, sizes

SHAPES = [(), (1,), (7,), (64,), (3, 5), (7, 33), (2, 3, 16, 4), (0,), (4, 0)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def both_ways(truth, run, mask=spread.MASK):
    flat_truth, flat_run = spread._flat(truth).double(), spread._flat(run)
    length = spread._length(truth)
    found = []
    for scan in (numba_spread.scan, spread.scan_with_torch):
        squares = np.zeros(flat_truth.numel() // length)
        found.append((*scan(flat_truth, flat_run, length, mask, squares), squares))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_mean_square_of_each_block_and_the_largest_distance(shape, dtype):
    torch.manual_seed(0)
    truth = torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    run = truth.to(dtype) * 1.01
    seen = spread.spread(truth, run)

    error = (run.to(truth.dtype) - truth).reshape(-1)
    error = torch.view_as_real(error) if error.is_complex() else error
    assert seen.rms == pytest.approx(float(error.square().mean().sqrt()) if error.numel() else 0.0)
    assert seen.peak == pytest.approx(float(error.abs().max()) if error.numel() else 0.0)
    assert (seen.skipped, seen.masked) == (0, 0)


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(
        st.tuples(
            st.floats(allow_nan=True, allow_infinity=True, width=64),
            st.floats(allow_nan=True, allow_infinity=True, width=32),
        ),
        min_size=1,
        max_size=70,
    )
)
def test_the_compiled_loop_and_torch_agree_on_anything(values):
    truth = torch.tensor([pair[0] for pair in values], dtype=torch.float64)
    run = torch.tensor([pair[1] for pair in values], dtype=torch.float32)
    (peak, _, skipped, masked, squares), by_torch = both_ways(truth, run)

    assert (skipped, masked) == by_torch[2:4]
    assert peak == by_torch[0]
    np.testing.assert_allclose(squares, by_torch[4], rtol=1e-12)


def test_a_block_has_whole_trailing_dimensions_and_enough_elements():
    assert block_length(torch.Size([8, 64])) == 64
    assert block_length(torch.Size([8, 4, 3, 16])) == 48
    assert block_length(torch.Size([5])) == 5
    assert block_length(torch.Size([])) == 1


def test_one_bad_row_shows_in_its_block_and_hides_in_the_whole():
    truth = torch.randn(1000, 64, dtype=torch.float64)
    run = truth.clone()
    run[7] += 1e-3
    seen = spread.spread(truth, run)

    assert int(seen.squares.argmax()) == 7
    assert math.sqrt(seen.squares[7]) == pytest.approx(1e-3)
    assert seen.rms < 1e-4


def test_a_mask_constant_lies_at_no_distance_and_is_held_to_the_reference():
    truth = torch.tensor([1.0, -1e308, 1e31, 2.0], dtype=torch.float64)
    reference = torch.tensor([1.0, -3e38, 1e31, 2.0])

    assert spread.spread(truth, reference).masked == 2
    assert spread.spread(truth, reference).peak == 0.0
    assert lost_masks(truth, reference, torch.tensor([5.0, -2e38, 1e31, 2.0])) == 0
    assert lost_masks(truth, reference, torch.tensor([1.0, 3e38, 1e31, 2.0])) == 1
    assert lost_masks(truth, reference, torch.tensor([1.0, -3e38, 2e31, 2.0])) == 1


def test_many_blocks_are_scanned_by_threads_into_the_same_numbers(monkeypatch):
    monkeypatch.setattr(spread, "_SPAN", 2**20)
    truth = torch.randn(3, 2**20, dtype=torch.float64)
    run = truth.float()
    run[2, 12345] += 1.0
    seen = spread.spread(truth, run)

    assert seen.at == 2 * 2**20 + 12345
    assert seen.rms == pytest.approx(float((run.double() - truth).square().mean().sqrt()))


@pytest.mark.parametrize("span", [1, 100, 2**20])
@pytest.mark.parametrize("tile", [1, 40, 2**16])
def test_several_runs_are_scanned_together_into_the_same_numbers(span, tile, monkeypatch):
    truth = torch.randn(37, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = truth.float(), truth.bfloat16()
    first[36, 7], first[3, 4], second[20, 1] = 9.0, math.nan, math.inf
    apart = [sizes(truth), spread.spread(truth, first), spread.spread(truth, second)]
    monkeypatch.setattr(spread, "_SPAN", span)
    monkeypatch.setattr(spread, "_TILE", tile)
    together = spread.spreads(truth, (None, first, second))

    for one, other in zip(apart, together, strict=True):
        assert one[1:] == other[1:]
        np.testing.assert_array_equal(one.squares, other.squares)
    assert together[1].at == 36 * 40 + 7
    assert [each.skipped for each in together] == [0, 1, 1]


def test_a_quartile_is_that_of_the_finite_distances_where_the_truth_is_not_zero():
    truth = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, math.nan], dtype=torch.float64)
    run = torch.tensor([9.0, 1.5, 2.25, 3.75, 4.0, 1.0])

    assert spread.quartile_distances(truth, (run, truth)) == [0.75, 0.0]
    assert spread.quartile_distances(torch.zeros(2, dtype=torch.float64), (torch.ones(2),)) == [0.0]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e5m2])
def test_one_element_that_is_not_finite_is_seen(dtype, number):
    assert spread.is_finite(torch.ones(3).to(dtype))
    assert spread.is_finite(torch.empty(0, dtype=dtype))
    assert not spread.is_finite(torch.tensor([1.0, number, 2.0]).to(dtype))


def test_the_sizes_of_a_complex_tensor_are_those_of_its_components():
    assert sizes(torch.tensor([3 + 4j], dtype=torch.complex128)).rms == pytest.approx(math.sqrt(12.5))


def test_two_shapes_do_not_lie_around_each_other():
    with pytest.raises(ValueError, match="does not lie around"):
        spread.spread(torch.zeros(3, dtype=torch.float64), torch.zeros(4))
