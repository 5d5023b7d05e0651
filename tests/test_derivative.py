import pytest
import torch
from torch import Tensor

from torchdelta import Verdict, check_op

D = {"probes": "derivative"}


def drawn(*shape, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), **options).requires_grad_()


def operator(name, forward, backward):
    """Return an operator of one tensor, whose backward gets that tensor and the gradient."""

    def call(x: Tensor) -> Tensor:
        return forward(x)

    made = torch.library.custom_op(f"td_derivative::{name}", call, mutates_args=())
    made.register_fake(torch.empty_like)
    made.register_autograd(
        lambda ctx, gradient: backward(ctx.saved_tensors[0], gradient),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return made


class TestARightBackward:
    @pytest.mark.parametrize(
        ("function", "args"),
        [
            (lambda x, w: (x.bfloat16() @ w.bfloat16()).to(x.dtype), (drawn(8, 16), drawn(16, 8))),
            (lambda x, w: torch.nn.functional.linear(x.half(), w.half()).float(), (drawn(4, 16), drawn(8, 16))),
            (lambda x: x - 1e10, (drawn(8),)),
            (lambda x: (1000 * x).sin(), (drawn(3, 4),)),
            (lambda x: x.clamp(-0.5, 0.5), (drawn(64),)),
            (torch.fft.rfft, (drawn(16),)),
            (lambda x: x.amax(1), (torch.cat([torch.ones(1, 2), drawn(40, 2).detach()]).requires_grad_(),)),
            (lambda x: x * x, (torch.full((64,), 1e-3).requires_grad_(),)),
        ],
        ids=["casts", "half", "cancels", "steep", "kinked", "complex", "one tie of many", "bent"],
    )
    def test_is_told_so(self, function, args):
        report = check_op(function, args, **D)
        assert report.verdict is Verdict.EQUIVALENT, report.worst

    def test_of_a_kernel_that_rounds_inside_is_not_accused(self):
        rounding = operator(
            "rounding", lambda x: x.bfloat16().sin().to(x.dtype), lambda x, g: g * x.bfloat16().cos().to(x.dtype)
        )
        for size in (1, 3, 64):
            report = check_op(rounding, (drawn(size),), **D)
            assert report.verdict is not Verdict.DIVERGED, report.worst

    def test_of_an_output_without_a_gradient_in_float64_is_not_vouched_for(self):
        report = check_op(lambda x: x.detach() * 2 if x.dtype is torch.float64 else x * 2, (drawn(3),), **D)

        assert report.verdict is Verdict.INCONCLUSIVE
        assert "no output requires grad" in report.worst.reason


class TestAWrongBackward:
    def test_of_a_kernel_that_rounds_inside_is_not_acquitted(self):
        flat = operator("flat", lambda x: x.bfloat16().sin().to(x.dtype), lambda x, g: g * 0)

        for size in (1, 3, 64):
            assert check_op(flat, (drawn(size),), **D).verdict is not Verdict.EQUIVALENT

    def test_is_found_beside_an_input_whose_gradient_is_right(self):
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(x, y)
                return x.relu() * y

            @staticmethod
            def backward(ctx, gradient):
                x, y = ctx.saved_tensors
                return gradient * 7 * y * (x > 0), gradient * x.relu()

        half_zero = torch.tensor([0.0, 1.0, 0.0, 2.0]).requires_grad_()
        assert check_op(Product.apply, (half_zero, drawn(4)), **D).verdict is not Verdict.EQUIVALENT

    def test_is_found_at_the_given_inputs_although_it_is_right_at_others(self):
        def backward(x, g):
            return g * 2 * x * (9 if x[0] > 5 else 1)

        sometimes = operator("sometimes", lambda x: x * x, backward)
        x = torch.tensor([6.0, -1.0, -1.0, -2.0]).requires_grad_()

        assert check_op(sometimes, (x,), **D).verdict is Verdict.DIVERGED

    def test_is_found_at_fresh_values_although_it_is_right_at_the_given_ones(self):
        sometimes = operator("lucky", lambda x: x * x, lambda x, g: g * 2 * x * (1 if x[0] > 2 else 9))
        x = torch.tensor([3.0, -1.0, -1.0, -2.0]).requires_grad_()
        report = check_op(sometimes, (x,), **D)

        assert report.verdict is Verdict.DIVERGED
        assert "with fresh values" in report.worst.reason

    def test_is_found_at_other_sizes_although_it_is_right_at_the_given_one(self):
        """As of a kernel that was written for one block."""

        def backward(x, g):
            one_block = torch.zeros_like(x)
            one_block[:8] = 2 * x[:8] * g[:8]
            return one_block

        report = check_op(operator("one_block", lambda x: x * x, backward), (drawn(8),), **D)

        assert report.verdict is Verdict.DIVERGED
        assert "with other sizes" in report.worst.reason

    def test_is_found_by_fresh_values_where_the_given_ones_lie_on_a_kink(self):
        steep = operator("steep", lambda x: x.relu(), lambda x, g: 5 * g * (x > 0))

        assert check_op(steep, (torch.zeros(5).requires_grad_(),), **D).verdict is Verdict.DIVERGED

    def test_that_writes_to_what_it_saved_is_no_matter_of_where_it_started(self):
        def backward(x, g):
            with torch.no_grad():
                x.detach().add_(1)
            return g * 3

        writing = operator("writing", lambda x: x * 2, backward)

        assert check_op(writing, (drawn(4),), **D).verdict is Verdict.DIVERGED
