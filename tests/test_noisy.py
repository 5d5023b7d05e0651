"""Noisy runs: every rounding lands elsewhere, and nothing else changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchdelta._torch.modes.noisy import Noisy


def run_noisily(function, *tensors, seed=0, unit=None):
    moved = [tensor.clone() for tensor in tensors]
    mode = Noisy(seed=seed, unit=unit)
    mode.start_from(moved)
    with mode:
        return function(*moved)


def relative_move(noisy, plain):
    return float((noisy.double() - plain.double()).norm() / plain.double().norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_computed_moves_by_a_few_units_in_the_last_place(dtype):
    torch.manual_seed(0)
    x = torch.randn(64, 64).to(dtype)

    move = relative_move(run_noisily(lambda x: x * 3.0 + 1.0, x), x * 3.0 + 1.0)

    assert 0.1 * torch.finfo(dtype).eps < move < 4 * torch.finfo(dtype).eps


def test_the_same_seed_rounds_the_same_way_and_another_one_does_not():
    x = torch.randn(100)

    assert torch.equal(run_noisily(torch.exp, x, seed=1), run_noisily(torch.exp, x, seed=1))
    assert not torch.equal(run_noisily(torch.exp, x, seed=1), run_noisily(torch.exp, x, seed=2))


def test_what_depends_on_constants_only_is_left_alone():
    def buckets(x):
        distance = torch.arange(64.0)
        return x.sum() + 0, torch.log(distance + 1.0) * 3.3

    assert torch.equal(run_noisily(buckets, torch.randn(4))[1], torch.log(torch.arange(64.0) + 1.0) * 3.3)


def test_what_moves_or_selects_values_does_not_round_them():
    x = torch.randn(32, 32)
    mode = Noisy(seed=0)
    mode.start_from([x])
    before = x.clone()
    with mode:
        kept = torch.cat([x.t(), x.relu(), x[x > 0].reshape(1, -1).expand(32, -1)[:, :32], x.clone()])

    assert torch.equal(kept[:32], before.t())
    assert torch.equal(kept[32:64], before.relu())
    assert torch.equal(kept[96:], before)


def test_a_long_sum_accumulates_its_roundings():
    torch.manual_seed(0)
    x = torch.rand(1, 2**20)

    long = abs(float(run_noisily(lambda x: x.sum(-1), x)) - float(x.double().sum())) / float(x.double().sum())

    # far above the rounding of one operation, and within what a running sum may be off by
    assert 5 * torch.finfo(torch.float32).eps < long < 2**20 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("function", [torch.mean, lambda x: torch.var_mean(x)[1], lambda x: torch.std_mean(x)[1]])
def test_a_mean_is_moved_by_the_rounding_of_its_sum_however_it_is_taken(function):
    torch.manual_seed(0)
    x = torch.randn(2**16)

    moves = [abs(float(run_noisily(function, x, seed=seed) - function(x))) for seed in range(8)]

    # of the size of the terms, and not of the mean, which is near zero
    assert max(moves) > 0.1 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x, (64,)),
        lambda x: torch.softmax(x, -1),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x[..., None], 4),
        lambda x: torch.log_softmax(x, -1),
        lambda x: F.gelu(x),
        lambda x: F.silu(x),
    ],
)
def test_fused_norms_and_softmax_are_moved_inside_and_stay_right(function):
    torch.manual_seed(0)
    x = torch.randn(32, 64)

    assert 0 < relative_move(run_noisily(function, x), function(x)) < 1e-5


@pytest.mark.parametrize("function", [lambda x: F.layer_norm(x, (64,)) @ x, lambda x: F.linear(x.softmax(-1), x)])
def test_noise_in_inference_mode_is_that_of_a_program_without_gradients(function):
    torch.manual_seed(0)
    x = torch.randn(64, 64)

    with torch.no_grad():
        without_gradients = run_noisily(function, x)
    with torch.inference_mode():
        in_inference_mode = run_noisily(function, x)

    assert torch.equal(in_inference_mode, without_gradients)


def test_the_backward_is_moved_too():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)), torch.randn(8, 16)
    weight = torch.randn(8, 16)
    (model(x) * weight).sum().backward()
    plain = model[0].weight.grad.clone()
    model.zero_grad()
    mode = Noisy(seed=0)
    mode.start_from([x])
    with mode:
        (model(x) * weight).sum().backward()

    assert 0 < relative_move(model[0].weight.grad, plain) < 1e-4


def test_a_mask_constant_at_the_end_of_the_range_stays_finite():
    x = torch.zeros(8, 8)
    low = torch.finfo(torch.float32).min

    masked = run_noisily(lambda x: x.masked_fill(torch.ones(8, 8).triu(1).bool(), low) * 1.0, x)

    assert masked.isfinite().all()
    assert (masked[0, 1:] < low / 2).all()


def test_a_unit_of_ones_own_takes_the_place_of_the_dtypes():
    x = torch.randn(64, 64, dtype=torch.float64)

    move = relative_move(run_noisily(lambda x: x * 2.0, x, unit=2.0**-7), x * 2.0)

    assert 2.0**-9 < move < 2.0**-6


def test_two_views_of_one_memory_move_together():
    torch.manual_seed(0)
    x = torch.randn(1000)
    alone, shared = x.clone(), x.clone()
    Noisy(seed=0).start_from([alone])
    Noisy(seed=0).start_from([shared[:500], shared])

    # a view that came first moves the whole memory, and the whole is not moved again
    assert torch.equal(shared, alone)
    assert not torch.equal(shared, x)


def test_integers_are_never_moved():
    count = torch.arange(10)
    mode = Noisy(seed=0)
    mode.start_from([count])
    with mode:
        doubled = count * 2

    assert torch.equal(doubled, torch.arange(10) * 2)


def test_it_remembers_that_the_program_narrows():
    x = torch.randn(4)
    for function, narrowest in (
        (lambda x: x.half().float().to(torch.bfloat16).float().half(), torch.bfloat16),
        (lambda x: x.double().abs(), None),
    ):
        mode = Noisy(seed=0)
        mode.start_from([x])
        with mode:
            function(x)
        assert mode.narrowed_to is narrowest
