import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from torchdelta import ProgramError, UsageError, Verdict, check_op
from torchdelta.program import examples
from torchdelta.program.programs import Program

AOT = ("aot/static/min-cut", "aot/dynamic/min-cut")


def operator(name, forward, fake, backward=None):
    def call(x: Tensor) -> Tensor:
        return forward(x)

    made = torch.library.custom_op(f"td_inputs::{name}", call, mutates_args=())
    made.register_fake(fake)
    if backward is not None:
        made.register_autograd(backward)
    return made


class TestExpandedInputs:
    @pytest.mark.parametrize(
        "expanded",
        [
            torch.tensor(True).expand(4, 4),
            torch.tensor(2.0).expand(4, 4),
            torch.tensor([3, 4]).expand(4, 2),
            torch.randn(4, 1, generator=torch.Generator().manual_seed(0)).expand(4, 4),
        ],
        ids=["constant mask", "constant", "sorted", "random"],
    )
    def test_are_drawn_anew_and_stay_expanded(self, expanded):
        program = Program(name="added", call=lambda x: x + 1, args=(expanded,))
        drawn = list(examples.redraw(program, seed=1))

        assert drawn
        assert all(each.args[0].stride() == expanded.stride() for each in drawn)
        assert not torch.equal(drawn[0].args[0], expanded)


class TestOtherSizes:
    def test_part_sizes_that_happen_to_be_the_same(self):
        transposed = operator("transposed", lambda x: x.t().contiguous(), torch.empty_like)
        report = check_op(transposed, (torch.randn(4, 4),), gradients=False, probes="fake")

        assert report.probe("fake/given").verdict is Verdict.EQUIVALENT
        assert report.probe("fake/resized").verdict is Verdict.DIVERGED

    def test_leap_where_the_next_one_is_too_near(self):
        def padded(x):
            return torch.nn.functional.pad(x, (0, -x.shape[0] % 8))

        padding = operator("padding", padded, lambda x: x.new_empty(8))
        report = check_op(padding, (torch.randn(3),), gradients=False, probes="fake/resized")

        assert report.verdict is Verdict.DIVERGED

    def test_that_only_the_forward_takes_are_the_backwards_fault(self):
        def backward(ctx, gradient):
            return gradient.expand(3, 4)

        summed = operator("summed", lambda x: x.sum(0), lambda x: x.new_empty(x.shape[1:]), backward)
        report = check_op(summed, (torch.randn(3, 4, requires_grad=True),), probes=("gradients", "fake"))

        assert "its backward raises for inputs that its forward takes" in report.probe("gradients").reason
        assert report.probe("fake/resized").verdict is Verdict.EQUIVALENT

    def test_of_memory_that_inputs_share_there_are_none(self):
        base = torch.randn(3, 4)
        program = Program(name="sum", call=torch.add, args=(base, base.view(3, 4)))

        assert list(examples.resize(program, seed=0)) == []

    def test_of_indices_leap_together_with_what_they_index(self):
        program = Program(
            call=torch.gather, args=(torch.randn(4, 5), 0, torch.randint(0, 4, (4, 5))), kwargs={}, name=""
        )
        made = [each.args for tries in examples.resize(program, seed=0) for each in tries]

        assert made
        assert all(data.shape == indices.shape for data, _, indices in made)

    def test_are_not_out_of_all_proportion(self):
        program = Program(call=torch.neg, args=(torch.zeros(20, 20, 20, 20, 20),), kwargs={}, name="neg")
        sizes = [made.args[0].numel() for tries in examples.resize(program, seed=0) for made in tries]

        assert 0 < max(sizes) <= 4 * 20**5

    def test_given_by_the_user_are_asked(self):
        def chunked(x):
            return x.reshape(3, -1) * (2 if x.shape[0] == 6 else 3)

        given = (torch.randn(6),)
        report = check_op(chunked, given, gradients=False, others=[((torch.randn(9),), {})], probes="aot/dynamic")
        assert report.verdict is Verdict.EQUIVALENT, report.worst

    @pytest.mark.parametrize(
        ("others", "error", "message"),
        [
            ([(torch.randn(3),)], UsageError, r"others\[0\] is not a pair"),
            ([((torch.randn(3), 1, 2),)], UsageError, r"others\[0\] is not a pair"),
            ([((torch.randn(3), 1), {})], ProgramError, r"others\[0\]: "),
        ],
    )
    def test_that_are_none_are_said_so(self, others, error, message):
        with pytest.raises(error, match=message):
            check_op(torch.sin, (torch.randn(3),), gradients=False, others=others, probes=AOT)

    def test_with_a_number_of_another_kind_are_traced_anew(self):
        x, y = torch.arange(4), torch.arange(5)
        report = check_op(lambda x, k: x * k, (x, 2), gradients=False, others=[((y, 2.0), {})], probes=("aot", "fake"))

        assert report.verdict is Verdict.EQUIVALENT, report.worst

    def test_of_another_dtype_say_nothing_of_symbols(self):
        others = [((torch.randn(5, dtype=torch.float64),), None)]
        report = check_op(torch.sin, (torch.randn(4),), gradients=False, others=others, probes="fake")

        assert report.verdict is Verdict.EQUIVALENT, report.worst


class TestFreshValues:
    def test_are_drawn_of_what_is_all_the_same(self):
        baked = {}

        def scaled(x):
            is_real = type(x) is Tensor
            return x * baked.setdefault("largest", 1.0) if not is_real else x * float(x.max())

        assert check_op(scaled, (torch.ones(3, 4),), gradients=False, probes=AOT).verdict is Verdict.DIVERGED

    def test_that_cannot_be_drawn_leave_it_open(self):
        def picky(x):
            if not isinstance(x, torch._subclasses.FakeTensor) and int(x.detach()) != 3:
                raise ValueError("three, and nothing else")
            return x + 1

        report = check_op(operator("picky", picky, torch.empty_like), (torch.tensor(3),), probes="aot/static/min-cut")

        assert report.verdict is Verdict.INCONCLUSIVE
        assert "rejects all other values" in report.worst.reason

    @pytest.mark.parametrize("given", [torch.tensor(3), torch.tensor(0), torch.tensor([True]), torch.full((4,), 7)])
    def test_are_drawn_of_integers_that_are_all_the_same(self, given):
        (drawn,) = next(examples.redraw(Program(call=torch.neg, args=(given,), kwargs={}, name="neg"), seed=0)).args

        assert drawn.dtype is given.dtype
        assert not torch.equal(drawn, given)
        assert drawn.min() >= 0

    def test_of_integers_in_order_are_in_order(self):
        offsets = torch.tensor([0, 2, 5, 9])
        program = Program(call=torch.diff, args=(offsets,), kwargs={}, name="diff")
        drawn = [next(examples.redraw(program, seed=seed)) for seed in range(4)]
        drawn += [made for tries in examples.resize(program, seed=0) for made in tries]

        assert all(torch.equal(made.args[0].sort().values, made.args[0]) for made in drawn)

    @pytest.mark.filterwarnings("ignore:ComplexHalf")
    def test_of_a_dtype_that_torch_cannot_compare(self):
        x = torch.randn(4, dtype=torch.complex64).to(torch.complex32)
        report = check_op(lambda x: x.view(2, 2), (x,), gradients=False, probes=AOT)

        assert report.verdict in (Verdict.EQUIVALENT, Verdict.INCONCLUSIVE), report.worst


class TestViews:
    @pytest.mark.parametrize("pair", [lambda b: (b, b.view(-1)), lambda b: (b[1:], b[:2])])
    def test_of_one_tensor_stay_so(self, pair):
        def add_to_the_first(x, y):
            x.add_(1)
            return y * 2

        report = check_op(add_to_the_first, pair(torch.randn(3, 4)), gradients=False, probes=AOT)
        assert not report.verdict.is_failure, report.worst


class TestWhatIsReturned:
    def test_besides_tensors_is_what_it_is(self):
        def mixed(x):
            return x.shape, x.dtype, x * 2, {"a": None, "b": "text"}, x.shape[0]

        report = check_op(mixed, (torch.randn(3, requires_grad=True),), probes=AOT)
        assert report.verdict is Verdict.EQUIVALENT, report.worst

    def test_in_an_object_of_the_users_is_not_told_to_be_right(self):
        @dataclasses.dataclass
        class Pair:
            first: Tensor

        report = check_op(lambda x: Pair(x * 2), (torch.randn(3, requires_grad=True),), probes=AOT)
        assert report.verdict is not Verdict.EQUIVALENT


class TestComparing:
    @pytest.mark.parametrize("same", [lambda a, b: (a == b).all(), lambda a, b: np.bool_(torch.equal(a, b))])
    def test_takes_whatever_has_a_truth_value(self, same):
        def traced_otherwise(x):
            return x * 2 if type(x) is Tensor else x * 3

        x = torch.randn(3)
        assert check_op(traced_otherwise, (x,), gradients=False, probes=AOT, compare=same).verdict is Verdict.DIVERGED
        assert check_op(torch.sin, (x,), gradients=False, probes=AOT, compare=same).verdict is Verdict.EQUIVALENT
