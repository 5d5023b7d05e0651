"""Whether two tensors have the same bits, wherever they lie in memory."""

import math

import pytest
import torch

import torchdelta as td
from torchdelta._torch import tensors
from torchdelta.errors import ProgramError
from torchdelta.program.copies import originals_unchanged

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("offsets", [(0, 0), (0, 1), (1, 0), (3, 1)])
def test_the_same_bits_are_found_in_any_place_of_memory(dtype, offsets):
    values = torch.randint(0, 2, (24,)).to(dtype)
    first, second = (torch.zeros(32, dtype=dtype)[offset : offset + 24] for offset in offsets)
    first.copy_(values)
    second.copy_(values)

    assert tensors.has_same_bits(first, second)
    assert tensors.has_same_bits(first.reshape(4, 6).t(), second.reshape(4, 6).t().contiguous())
    second[-1] = (1 - values[-1].to(torch.complex64).real).to(dtype)
    assert not tensors.has_same_bits(first, second)


@pytest.mark.parametrize("view", [lambda t: t[:1, 0], lambda t: t[:0, 0], lambda t: t[1, 2], lambda t: t[:, :1]])
def test_strides_that_have_no_effect_are_no_difference(view):
    values = torch.randn(3, 5)

    assert tensors.has_same_bits(view(values), view(values).clone())


def test_bits_dtype_and_shape_are_what_is_the_same():
    nan = torch.tensor([math.nan])

    assert tensors.has_same_bits(nan, nan.clone())
    assert not tensors.has_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not tensors.has_same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not tensors.has_same_bits(torch.zeros(2, 1), torch.zeros(1, 2))
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert tensors.has_same_bits(conjugate, conjugate.resolve_conj())


def test_an_input_from_the_middle_of_a_buffer_is_no_write_to_it():
    report = td.check(torch.nn.Linear(4, 4), (torch.randn(9)[1:].reshape(2, 4),), transform="aot_eager")

    assert report.verdict is td.Verdict.EQUIVALENT


class FirstColumn(torch.nn.Module):
    """Returns one element, whose stride has no effect."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)[:, 0]


def test_a_single_element_of_a_column_is_compared():
    program, x = FirstColumn(), torch.randn(1, 4)
    wrong = FirstColumn()
    wrong.load_state_dict(program.state_dict())
    report = td.check(program, (x,), candidate=lambda x: wrong(x) * 1.01, stages=("forward",))

    assert report.verdict is td.Verdict.DIVERGED


def test_an_original_that_a_copy_gave_another_shape_is_put_back():
    original = torch.arange(6.0).reshape(2, 3)
    with pytest.raises(ProgramError, match="writes to 1 tensors"), originals_unchanged([original], name="program"):
        original.data = original.data.reshape(6)

    assert original.shape == (2, 3)


def test_a_tensor_without_a_buffer_of_its_own_has_the_bits_of_none():
    sparse = torch.eye(3).to_sparse()

    assert not tensors.has_same_bits(sparse, sparse)
    assert not tensors.has_same_bits(torch.empty(2, device="meta"), torch.empty(2, device="meta"))
