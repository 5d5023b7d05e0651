"""Which elements were rounded: only those move in a noisy run."""

import pytest
import torch

import torchdelta as td
from torchdelta._torch.modes import exactness, noisy
from torchdelta._torch.modes.exactness import long_elements, rounded_elements, run_beside_float64
from torchdelta._torch.modes.noisy import Noisy
from torchdelta.records.verdict import Verdict

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def run_noisily(function, *tensors, seed=0):
    mode = Noisy(seed=seed)
    copies = [tensor.clone() for tensor in tensors]
    mode.depend_on(copies)
    with mode:
        return function(*copies)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda mask: mask.sum(-1),
        lambda mask: mask.mean(),
        lambda mask: mask * 0.25 / 0.125,
        lambda mask: torch.exp(mask - mask),
        lambda mask: mask @ mask,
        lambda mask: torch.cumsum(mask, -1),
        lambda mask: (mask + 2.0).sqrt().square().round() - mask,
        lambda mask: torch.clone(mask).add_(3.0),
    ],
)
def test_whole_numbers_in_floats_stay_what_they_are(function, dtype):
    mask = torch.ones(8, 8).triu().to(dtype)

    plain = function(mask)

    assert all(torch.equal(run_noisily(function, mask, seed=seed), plain) for seed in range(4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_one_hot_product_selects_and_does_not_round(dtype):
    torch.manual_seed(0)
    table = torch.randn(16, 24, dtype=torch.float64).to(torch.bfloat16).to(dtype)
    chosen = torch.nn.functional.one_hot(torch.tensor([3, 0, 15]), 16).to(dtype)

    assert torch.equal(run_noisily(lambda one_hot: one_hot @ table, chosen), table[[3, 0, 15]])


def test_rounded_elements_move_and_exact_ones_beside_them_stay():
    torch.manual_seed(0)
    values = torch.randn(64)
    values[::2] = torch.arange(32.0)

    moved = torch.stack([run_noisily(lambda x: x / 3 * 3 - x * 3, values, seed=seed) for seed in range(8)])
    thirds = torch.stack([run_noisily(lambda x: x * 3, values, seed=seed) for seed in range(8)])

    assert bool((moved.var(0) > 0).any())
    assert bool((thirds[:, ::2] == values[::2] * 3).all())
    assert bool((thirds[:, 1::2] != values[1::2] * 3).any())


def test_an_operation_on_complex_numbers_keeps_their_imaginary_part():
    numbers = torch.tensor([3.0 + 4.0j, 5.0 + 12.0j, 0.1 + 0.3j])

    sizes, (wide,) = run_beside_float64(aten.abs.default, (numbers,), {})

    assert rounded_elements(sizes, wide).tolist() == [False, False, True]


def test_an_operation_that_writes_runs_once_on_its_operand():
    counts = torch.zeros(4)

    result, (wide,) = run_beside_float64(aten.add_.Tensor, (counts, torch.full((4,), 0.1)), {})
    rounded = rounded_elements(result, wide)

    assert result is counts
    assert torch.equal(counts, torch.full((4,), 0.1))
    assert rounded is not None
    assert not rounded.any()


def test_random_numbers_are_drawn_once():
    torch.manual_seed(0)
    expected = torch.empty(4).exponential_()
    torch.manual_seed(0)
    drawn = torch.empty(4)

    run_beside_float64(aten.exponential_.default, (drawn,), {})

    assert torch.equal(drawn, expected)


def test_products_of_many_digits_are_not_run_twice(monkeypatch):
    calls = []
    real = aten.mm.default

    class Counting:
        _schema, tags = real._schema, real.tags

        def __call__(self, *args, **kwargs):
            calls.append(args[0].dtype)
            return real(*args, **kwargs)

    torch.manual_seed(0)
    run_beside_float64(Counting(), (torch.randn(4, 8), torch.randn(8, 4)), {})
    assert calls == [torch.float32]
    run_beside_float64(Counting(), (torch.randn(4, 8).round(), torch.randn(8, 4)), {})
    assert calls == [torch.float32, torch.float64, torch.float32]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mm", [(64, 1100), (1100, 64)]),
        ("bmm", [(2, 64, 600), (2, 600, 64)]),
        ("mv", [(70, 1000), (1000,)]),
        ("convolution", [(8, 4, 48, 48), (8, 4, 3, 3)]),
    ],
)
def test_the_compiled_loops_find_the_same_short_rows_as_torch(name, shapes, monkeypatch):
    torch.manual_seed(0)
    long = [torch.randn(shape) for shape in shapes]
    selecting = [long[0].clone(), long[1]]
    selecting[0][-1] = 0
    selecting[0][-1].view(-1)[5] = 1.0
    zeros = [long[0].clone(), long[1]]
    zeros[0][0] = 0

    compiled = [exactness._may_be_exact(name, tuple(each)) for each in (long, selecting, zeros)]
    monkeypatch.setattr(exactness, "compiled_loops", lambda tensor: None)
    by_torch = [exactness._may_be_exact(name, tuple(each)) for each in (long, selecting, zeros)]

    assert compiled == by_torch == [False, True, False]


def test_large_tensors_are_stepped_as_small_ones_are(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(300, 300)
    x[::2] = x[::2].round()
    compiled = run_noisily(lambda x: (x * 3 + 1.0).t() * 1.1, x)
    monkeypatch.setattr(noisy, "compiled_loops", lambda tensor: None)

    assert torch.equal(compiled, run_noisily(lambda x: (x * 3 + 1.0).t() * 1.1, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_few_digits_are_told_from_others(dtype):
    torch.manual_seed(0)
    values = torch.randn(1000, dtype=torch.float64).to(dtype)
    whole = torch.tensor([0.0, 1.0, -2.0, 0.5, 12.0]).to(dtype)

    is_long = long_elements(torch.cat([whole, values]))

    assert is_long is not None
    assert not is_long[:5].any()
    assert is_long[5:].double().mean() > 0.9


# programs in which a noisy run used to flip decisions about exact values


def masked_mean(x, mask):
    keep = torch.eq(mask, 1.0)
    return (x * keep).sum(1) / mask.sum(1, keepdim=True)


def embedded_category(x, table):
    return table[x[:, 0].long()] + x[:, 1:]


def quantized(x, step):
    return torch.floor(x / step) * step


def ranked(x):
    return x.sort(-1).indices.float() + x * 0.1


def counted(mask, x):
    length = mask.sum(-1).long()
    return x.cumsum(-1).gather(-1, (length - 1)[:, None])


torch.manual_seed(0)
MASK = (torch.arange(10) < torch.tensor([[3], [6], [10]])).float()
CASES = {
    "masked_mean": (masked_mean, (torch.randn(3, 10), MASK), lambda x, mask: x.sum(1) / mask.sum(1, keepdim=True)),
    "category": (
        embedded_category,
        (torch.cat([torch.arange(6.0)[:, None], torch.randn(6, 4)], 1), torch.randn(7, 4)),
        lambda x, table: table[x[:, 0].long() + 1] + x[:, 1:],
    ),
    "quantized": (
        quantized,
        (torch.arange(32.0) * 0.25, torch.tensor(0.25)),
        lambda x, step: (torch.floor(x / step) - 1) * step,
    ),
    "ranked": (ranked, (torch.arange(12.0).flip(0),), lambda x: x.sort(-1, descending=True).indices.float() + x * 0.1),
    "counted": (
        counted,
        (MASK, torch.randn(3, 10)),
        lambda mask, x: x.cumsum(-1).gather(-1, (mask.sum(-1).long() - 2)[:, None]),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_behind_an_exact_decision_is_seen(name, dtype):
    program, inputs, wrong = CASES[name]
    inputs = tuple(each.to(dtype) for each in inputs)

    assert td.check(program, inputs, candidate=wrong).verdict is Verdict.DIVERGED
    assert td.check(program, inputs, candidate=lambda *args: program(*args)).verdict is Verdict.EQUIVALENT
