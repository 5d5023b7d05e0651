"""What an operator is asked besides whether it compiles: each question finds what it asks for, and nothing else."""

import contextlib
import functools
import itertools
import random
import sys

import pytest
import torch

from torchdelta._torch.operators.schemas import DeclaredEffects
from torchdelta.errors import EnvironmentUnfit, ProgramError, UsageError
from torchdelta.operators.check import check_op
from torchdelta.operators.probes.fake import SYMBOLS, remedy_of
from torchdelta.records.verdict import Verdict

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def registered(schema, kernel, key="CompositeExplicitAutograd", **kernels):
    """An operator of this schema, for as long as the test takes; what dispatches to which kernel."""
    with torch.library._scoped_library("td_probed", "FRAGMENT") as library:
        library.define(schema)
        name = schema.partition("(")[0]
        for each, function in {key: kernel, **kernels}.items():
            library.impl(name, function, each)
        yield getattr(torch.ops.td_probed, name).default


def asked(op, *args, probes, **words):
    return check_op(op, args, words.pop("kwargs", {}), probes=probes, **{"gradients": False, **words})


class TestSchema:
    def test_what_shares_memory_with_what_is_declared_is_excused(self):
        x = torch.randn(3, 4)

        assert asked(torch.ops.aten.add_.Tensor, x, x, probes="schema").verdict is Verdict.EQUIVALENT
        assert asked(torch.ops.aten.add_.Tensor, x, x.view(3, 4), probes="schema").verdict is Verdict.EQUIVALENT
        assert asked(torch.ops.aten.add.out, x, x, kwargs={"out": x}, probes="schema").verdict is Verdict.EQUIVALENT

    def test_another_part_of_the_same_memory_is_not(self):
        def both(x, y):
            x.add_(1)
            y.add_(1)

        base = torch.randn(2, 3)
        with registered("both(Tensor(a!) x, Tensor y) -> ()", both) as op:
            report = asked(op, base[0], base[1], probes="schema")

        assert report.verdict is Verdict.DIVERGED
        assert "changes its argument y" in report.worst.reason

    def test_a_list_with_the_same_memory_twice(self):
        with registered("listed(Tensor x) -> Tensor[]", lambda x: [made := x + 1, made.view(-1)]) as op:
            report = asked(op, torch.randn(3, 4), probes="schema")

        assert report.verdict is Verdict.DIVERGED
        assert "same memory twice, as output 0[0] and as output 0[1]" in report.worst.reason

    def test_a_list_of_views_that_are_declared(self):
        assert asked(torch.ops.aten.split.Tensor, torch.randn(6), 2, probes="schema").verdict is Verdict.EQUIVALENT

    @pytest.mark.parametrize(
        "kernel",
        [lambda x: (x.add_(1) if x.shape[0] != 3 else x).clone(), lambda x: x if x.shape[0] != 3 else x.clone()],
        ids=["mutation", "alias"],
    )
    def test_only_at_other_sizes(self, kernel):
        with registered("elsewhere(Tensor x) -> Tensor", kernel) as op:
            report = asked(op, torch.randn(3), probes="schema")

        assert report.verdict is Verdict.DIVERGED
        assert "argument x" in report.worst.reason

    def test_calls_are_counted_once(self):
        calls = []
        with registered("counted(Tensor x) -> Tensor", lambda x: (calls.append(x), x + 1)[1], "CPU") as op:
            watching = DeclaredEffects(op)
            with watching:
                watching.call((torch.randn(3),), {})
                watching.call((torch.randn(4),), {})

        assert watching.calls == len(calls) == 2

    def test_a_name_of_several_overloads_that_are_made_of_others_is_watched(self):
        with torch.library._scoped_library("td_probed", "FRAGMENT") as library:
            library.define("overloaded.one(Tensor x) -> Tensor")
            library.define("overloaded.two(Tensor x, int y) -> Tensor")
            library.impl("overloaded.one", lambda x: x + 1, "CompositeImplicitAutograd")
            library.impl("overloaded.two", lambda x, y: x.add_(y).clone(), "CompositeImplicitAutograd")
            right = asked(torch.ops.td_probed.overloaded, torch.randn(3), probes="schema")
            wrong = asked(torch.ops.td_probed.overloaded, torch.randn(3), 2, probes="schema")

        assert right.verdict is Verdict.EQUIVALENT
        assert wrong.verdict is Verdict.DIVERGED


class TestRepeat:
    @pytest.mark.parametrize("probe", ["schema", "repeat", "registration", "fake/given"])
    @pytest.mark.parametrize("error", [RuntimeError("called too often"), SystemExit(3)], ids=repr)
    def test_an_operator_that_raises_when_it_is_called_again_is_inconclusive(self, probe, error):
        asked_already = []

        def runs_at_first(x):
            if asked_already:
                raise error
            return x + 1

        with registered("runs_at_first(Tensor x) -> Tensor", runs_at_first, "CPU", Meta=torch.empty_like) as op:
            x = torch.randn(3, requires_grad=True)
            report = asked(op, x, probes=probe, gradients=True, progress=asked_already.append)
        answer = report.probe(probe)

        assert answer.verdict is Verdict.INCONCLUSIVE
        assert f"called once more it raises {type(error).__name__}" in answer.reason

    @pytest.mark.parametrize("change", [1, -1])
    def test_an_operator_that_returns_another_number_of_tensors_does_not_repeat_itself(self, change):
        lengths = itertools.count(5, change)
        report = asked(lambda x: [x + 1 for _ in range(next(lengths))], torch.randn(3), probes="repeat")

        assert report.verdict is Verdict.DIVERGED
        assert "is there only once" in report.worst.reason

    def test_a_counter_that_is_added_into_an_argument(self):
        calls = []

        def counting(x):
            calls.append(0)
            x.add_(len(calls))

        with registered("counting(Tensor(a!) x) -> ()", counting) as op:
            report = asked(op, torch.randn(3), probes="repeat")

        assert report.verdict is Verdict.DIVERGED
        assert "what it leaves in args[0] is another" in report.worst.reason

    def test_a_declared_mutation_that_is_the_same_each_time(self):
        report = asked(torch.ops.aten.add_.Tensor, torch.randn(3), torch.randn(3), probes="repeat")

        assert report.verdict is Verdict.EQUIVALENT

    def test_results_that_nobody_can_count_with(self):
        calls = []

        def unsteady(x):
            calls.append(0)
            return (x * len(calls)).to(torch.float8_e5m2)

        report = asked(unsteady, torch.ones(3), probes="repeat")

        assert "is another" in report.worst.reason


class _Scaled(torch.autograd.Function):
    """The sine, with a backward that writes where it is told to."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.save_for_backward(x)
        ctx.place = place
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = x.cos()
        if ctx.place == "gradient":
            return grad.mul_(slope), None
        if ctx.place == "input":
            x.data.zero_()
        return grad * slope, None


class _Taken(torch.autograd.Function):
    """The identity, whose backward takes a gradient its own way."""

    @staticmethod
    def forward(ctx, x, taking):
        ctx.taking = taking
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.taking(grad), None


def _read_as_if_dense(grad):
    is_turned = grad.stride(0) < grad.stride(1)
    strides = (1, grad.shape[0]) if is_turned else (grad.shape[1], 1)
    return grad.as_strided(grad.shape, strides)


class TestBackward:
    @pytest.mark.parametrize(("place", "said"), [("gradient", "the gradient of outputs"), ("input", "args[0]")])
    def test_that_writes_to_what_it_is_given(self, place, said):
        x = torch.randn(3, 4, requires_grad=True)
        report = asked(lambda x: _Scaled.apply(x, place), x, probes="backward", gradients="auto")

        assert report.verdict is Verdict.DIVERGED
        assert f"writes to {said}," in report.worst.reason
        assert "return a new tensor" in report.worst.remedy

    @pytest.mark.parametrize(
        "function", [lambda x: _Scaled.apply(x, "nowhere"), lambda x: x + 1, lambda x: (x, x.exp(), x.T @ x)]
    )
    def test_that_does_not(self, function):
        x = torch.randn(3, 4, requires_grad=True)

        assert asked(function, x, probes="backward", gradients="auto").verdict is Verdict.EQUIVALENT

    @pytest.mark.parametrize(
        ("taking", "verdict", "said"),
        [
            (lambda grad: grad.as_strided(grad.shape, (4, 1)), Verdict.DIVERGED, "not contiguous (transposed)"),
            (_read_as_if_dense, Verdict.DIVERGED, "not contiguous (with gaps)"),
            (lambda grad: grad.view(-1).view(grad.shape), Verdict.CRASHED, "raises RuntimeError: view size"),
            (lambda grad: grad if grad.is_contiguous() else None, Verdict.DIVERGED, "float32[3, 4], and then None"),
            (lambda grad: grad * (1 + (grad.stride() == (0, 0))), Verdict.DIVERGED, "(a single number expanded)"),
            (lambda grad: grad * (1 + (grad.stride() == (0, 1))), Verdict.DIVERGED, "(expanded along its first axis)"),
            (lambda grad: grad * (1 + (grad.stride() == (1, 0))), Verdict.DIVERGED, "(expanded along its last axis)"),
        ],
        ids=["takes rows for granted", "takes density for granted", "views", "gives up", "expanded", "rows", "columns"],
    )
    def test_that_minds_how_a_gradient_lies_in_memory(self, taking, verdict, said):
        x = torch.randn(3, 4, requires_grad=True)
        report = asked(lambda x: _Taken.apply(x, taking), x, probes="backward", gradients="auto")

        assert report.verdict is verdict
        assert said in report.worst.reason
        assert "grad.contiguous()" in report.worst.remedy

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
    def test_that_adds_up_in_another_order_is_right(self, dtype):
        x, y = torch.randn(3, 64, requires_grad=True, dtype=dtype), torch.randn(64, 5, requires_grad=True, dtype=dtype)

        assert asked(torch.matmul, x, y, probes="backward", gradients="auto").verdict is Verdict.EQUIVALENT

    def test_that_draws_random_numbers_is_undecided(self):
        x = torch.randn(3, 4, requires_grad=True)
        report = asked(
            lambda x: _Taken.apply(x, lambda grad: grad * torch.rand_like(grad)), x, probes="backward", gradients="auto"
        )

        assert report.verdict is Verdict.INCONCLUSIVE
        assert "draws random numbers" in report.worst.reason

    def test_into_a_narrow_dtype_is_asked_for_too(self):
        x = torch.randn(3, 4, requires_grad=True)
        report = asked(lambda x: x.to(torch.float8_e4m3fn), x, probes="backward", gradients="auto")

        assert report.verdict is Verdict.EQUIVALENT

    def test_that_writes_to_the_output_that_was_saved(self):
        class Exp(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.made = x.exp()
                return ctx.made

            @staticmethod
            def backward(ctx, grad):
                with torch.no_grad():
                    return ctx.made.mul_(grad).clone()

        report = asked(Exp.apply, torch.randn(3, requires_grad=True), probes="backward", gradients="auto")

        assert report.verdict is Verdict.DIVERGED
        assert "writes to outputs," in report.worst.reason

    def test_that_writes_to_a_gradient_only_in_another_layout(self):
        x = torch.randn(3, 4, requires_grad=True)
        report = asked(
            lambda x: _Taken.apply(x, lambda grad: grad.t().contiguous().mul_(2).t()),
            x,
            probes="backward",
            gradients="auto",
        )

        assert report.verdict is Verdict.DIVERGED
        assert "writes to the gradient of outputs" in report.worst.reason

    @pytest.mark.parametrize(
        ("function", "sizes"),
        [
            (lambda x, scale: torch.nn.functional.normalize(x * scale, dim=-1), [(8, 16), ()]),
            (
                lambda x, w, b: torch.nn.functional.batch_norm(torch.conv2d(x, w, b), None, None, training=True),
                [(4, 3, 8, 8), (5, 3, 3, 3), (5,)],
            ),
        ],
        ids=["scale", "bias before a norm"],
    )
    def test_whose_gradient_is_nothing_but_rounding_is_right(self, function, sizes):
        drawn = [torch.randn(size, requires_grad=True) for size in sizes]

        assert asked(function, *drawn, probes="backward", gradients="auto").verdict is Verdict.EQUIVALENT

    def test_that_torch_runs_only_as_a_whole_is_asked_like_that(self):
        def recomputed(x):
            return torch.utils.checkpoint.checkpoint(lambda y: (y * y).sin(), x, use_reentrant=True)

        x = torch.randn(3, 4, requires_grad=True)
        assert asked(recomputed, x, probes="backward", gradients="auto").verdict is Verdict.EQUIVALENT

    def test_that_is_sparse_is_compared_too(self):
        indices, weight = torch.tensor([1, 1, 3]), torch.randn(5, 4, requires_grad=True)
        embed = functools.partial(torch.nn.functional.embedding, sparse=True)

        assert asked(embed, indices, weight, probes="backward", gradients="auto").verdict is Verdict.EQUIVALENT

    def test_after_a_forward_that_changes_an_input(self):
        x, y = torch.randn(3, requires_grad=True), torch.randn(3)
        report = asked(torch.ops.aten.mul_.Tensor, x * 2, y, probes="backward", gradients="auto")

        assert report.verdict is Verdict.EQUIVALENT


class _Own(torch.Tensor):
    pass


def _in_order(x):
    """Reads memory as if it were dense."""
    return torch.as_strided(x, (x.numel(),), (1,)).reshape(x.shape)


def _fails_at_random(x):
    random.seed(int(torch.initial_seed()))
    if random.random() < 0.5:
        raise ValueError("unlucky")
    return x * 2


class TestLayout:
    @pytest.mark.parametrize(
        ("op", "inputs"),
        [
            (torch.sum, [torch.randn(300, 400)]),
            (torch.nn.functional.layer_norm, [torch.randn(3, 4), (4,)]),
            (torch.matmul, [torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, 5, dtype=torch.bfloat16)]),
            (torch.ops.aten.add_.Tensor, [torch.randn(3, 4), torch.randn(3, 4)]),
            (torch.where, [torch.randn(3, 4) > 0, torch.randn(3, 4, dtype=torch.complex64), torch.zeros(())]),
            (torch.Tensor.view, [torch.randn(3, 4), 12]),
            (lambda x: x.t() @ x - x.t() @ x.clone(), [torch.randn(64, 64)]),
            (torch.sin, [torch.randn(4, 3).t()]),
        ],
        ids=["sum", "layer_norm", "matmul", "add_", "where", "view", "cancels out", "given transposed"],
    )
    def test_that_makes_no_difference(self, op, inputs):
        report = asked(op, *inputs, probes=["layout", "fake/layout"])

        assert [probe.verdict for probe in report.probes] == [Verdict.EQUIVALENT] * 2

    @pytest.mark.parametrize(
        ("op", "inputs", "said"),
        [
            (lambda x: _in_order(x).sum(), [torch.randn(5)], "with gaps in memory"),
            (lambda x: _in_order(x).sum(), [torch.randint(1, 9, (3, 4))], "with gaps in memory"),
            (lambda x: _in_order(x).amax(), [torch.tensor([5.0, 1.0, 2.0])], "5, and then nan"),
            (lambda x: torch.as_strided(x, x.shape, x.stride(), 0), [torch.randn(3, 4)], "with gaps in memory"),
            (lambda x: torch.acos(_in_order(x)), [torch.tensor([[1.0, 1.0], [0.5, 0.1]])], "transposed in memory"),
            (lambda x: torch.floor(_in_order(x)), [torch.arange(12.0).reshape(3, 4)], "transposed in memory"),
            (
                lambda x, y: x + torch.as_strided(y, y.shape, x.stride()),
                [torch.randn(3, 4), torch.randn(3, 4)],
                "transposed by turns in memory",
            ),
            (lambda x: float(_in_order(x)[0, 1]), [torch.randn(3, 4)], "transposed in memory"),
            (lambda x: [x] * (2 - x.is_contiguous()), [torch.randn(3, 4)], "outputs[1]: missing, and then there"),
            (lambda x: x * 0 + (not x.is_contiguous()), [torch.randn(3, 4)], "outputs: 0, and then 1"),
            (
                lambda x: x * (2 + x.is_contiguous(memory_format=torch.channels_last)),
                [torch.randn(2, 3, 4, 5)],
                "channels last in memory",
            ),
        ],
        ids=[
            "sum",
            "integers",
            "amax",
            "offset",
            "edge of a domain",
            "floor",
            "strides of another",
            "number",
            "number of outputs",
            "zeros",
            "channels last",
        ],
    )
    def test_that_a_kernel_takes_for_granted(self, op, inputs, said):
        report = asked(op, *inputs, probes="layout")

        assert report.verdict is Verdict.DIVERGED
        assert said in report.worst.reason
        assert "x.contiguous()" in report.worst.remedy

    def test_that_changes_what_is_written_to_an_input(self):
        def doubled(x):
            torch.as_strided(x, (x.numel(),), (1,)).mul_(torch.arange(x.numel()))

        report = asked(doubled, torch.randn(3, 4), probes="layout")

        assert report.verdict is Verdict.DIVERGED
        assert "another args[0]" in report.worst.reason

    @pytest.mark.parametrize(
        ("op", "inputs", "why"),
        [
            (torch.rand_like, [torch.randn(3, 4)], "draws random numbers"),
            (
                lambda x: torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(3)),
                [torch.randn(3, 4)],
                "draws random numbers",
            ),
            (lambda x: x + random.random(), [torch.randn(3, 4)], "with another seed, it returns something else"),
            (torch.sin, [torch.randn(3, 4).as_subclass(_Own)], "no input has another layout"),
            (torch.sin, [torch.randn(())], "no input has another layout"),
            (torch.sin, [torch.randn(3, 0)], "no input has another layout"),
        ],
        ids=[
            "random",
            "of its own generator",
            "of another library",
            "of a type of its own",
            "a single number",
            "nothing at all",
        ],
    )
    def test_is_not_asked_for_where_it_tells_nothing(self, op, inputs, why):
        report = asked(op, *inputs, probes=["layout", "fake/given"])

        assert why in report.unasked["layout"]

    def test_of_what_raises_now_and_then_is_undecided(self):
        report = asked(_fails_at_random, torch.randn(3, 4), probes="layout")

        assert report.verdict is Verdict.INCONCLUSIVE
        assert "once more it raises ValueError: unlucky" in report.worst.reason

    def test_that_is_rejected_is_not_asked_for_and_the_error_told(self):
        def particular(x):
            if not x.is_contiguous():
                raise ValueError("rows only")
            return x * 2

        report = asked(particular, torch.randn(3, 4), probes=["layout", "fake"])

        assert report.verdict is Verdict.EQUIVALENT
        assert "ValueError: rows only" in report.unasked["layout"]
        assert "ValueError: rows only" in report.unasked["fake/layout"]

    def test_in_which_memory_of_an_argument_is_returned_undeclared(self):
        with registered(
            "rows_of(Tensor x) -> Tensor", lambda x: x.clone() if x.is_contiguous() else x, "CPU", Meta=torch.empty_like
        ) as op:
            report = asked(op, torch.randn(3, 4), probes="schema")

        assert report.verdict is Verdict.DIVERGED
        assert "returns memory of its argument x" in report.worst.reason


class TestRegistration:
    def test_is_not_asked_for_where_nothing_that_is_returned_has_a_gradient(self):
        with registered(
            "best(Tensor x) -> Tensor", lambda x: x.argmax(), "CPU", Meta=lambda x: x.new_empty((), dtype=torch.int64)
        ) as op:
            report = asked(op, torch.randn(3, requires_grad=True), probes="registration", gradients="auto")

        assert report.verdict is Verdict.EQUIVALENT


class TestFakeKernel:
    @pytest.mark.parametrize(("more", "verdict"), [(0, Verdict.EQUIVALENT), (1, Verdict.DIVERGED)])
    @pytest.mark.parametrize("probe", ["fake/given", "fake/resized", "fake/symbolic"])
    def test_that_returns_a_number(self, probe, more, verdict):
        with registered(
            "rows(Tensor x) -> (Tensor, SymInt)",
            lambda x: (x + 1, x.shape[0]),
            "CPU",
            Meta=lambda x: (torch.empty_like(x), x.shape[0] + more),
        ) as op:
            report = asked(op, torch.randn(3, 4), probes=probe)

        assert report.verdict is verdict, report
        assert not more or f"outputs[1] is {4 + (probe != 'fake/given')}, really" in report.worst.reason

    def test_that_is_wrong_for_the_given_layout_is_told_without_another(self):
        with registered("longer(Tensor x) -> Tensor", torch.sin, "CPU", Meta=lambda x: x.new_empty(7)) as op:
            report = asked(op, torch.randn(3, 4), probes="fake/layout")

        assert report.verdict is Verdict.DIVERGED
        assert report.worst.reason.startswith("the fake kernel says: outputs has sizes (7,)")

    def test_that_exits_has_crashed(self):
        def leave(x):
            sys.exit("no fakes today")

        with registered("leaving(Tensor x) -> Tensor", lambda x: x + 1, "CPU", Meta=leave) as op:
            report = asked(op, torch.randn(3), probes="fake")

        assert {probe.verdict for probe in report.probes} == {Verdict.CRASHED}
        assert "SystemExit: no fakes today" in report.worst.reason

    def test_on_another_device_is_found_with_symbols_too(self):
        def elsewhere(x):
            return torch.empty_like(x, device="cuda")

        @torch.library.custom_op("td_probed::moved", mutates_args=())
        def moved(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        moved.register_fake(elsewhere)
        report = asked(moved, torch.randn(3), probes="fake/symbolic")

        assert report.verdict is Verdict.DIVERGED
        assert "device cuda" in report.worst.reason
        assert "really cpu" in report.worst.reason

    @pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
    def test_of_inputs_that_torch_has_no_fakes_of_is_undecided(self):
        quantized = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8)
        report = asked(torch.ops.aten.dequantize.self, quantized, probes="fake")

        assert {probe.verdict for probe in report.probes} == {Verdict.INCONCLUSIVE}
        assert "no fake tensors like its inputs" in report.worst.reason
        assert not report.worst.remedy

    @pytest.mark.parametrize(
        ("message", "is_of_symbols"),
        [
            ("unhashable type: non-nested SymInt", True),
            ("'SymInt' object cannot be interpreted as an integer", True),
            ("Cannot call sizes() on tensor with symbolic sizes/strides", True),
            ("Detected that you are using FX to symbolically trace a dynamo-optimized function.", False),
            (
                "Declaration: aten::expand(Tensor(a) self, SymInt[] size, SymInt? n=1, SymInt step=1) -> Tensor(a)",
                False,
            ),
            ("a symbolic gesture", False),
        ],
    )
    def test_a_remedy_is_given_for_what_was_said(self, message, is_of_symbols):
        assert remedy_of(message) == (SYMBOLS if is_of_symbols else "")


class TestMistakes:
    def test_keyword_arguments_that_are_no_dict(self):
        with pytest.raises(UsageError, match="keyword arguments are a dict, not list"):
            check_op(torch.relu, (torch.ones(3),), [1])

    def test_no_probe_at_all(self):
        with pytest.raises(UsageError, match="no probe was named: they are schema"):
            check_op(torch.relu, (torch.ones(3),), probes=())

    def test_a_tensor_without_values(self):
        with pytest.raises(ProgramError, match=r"torch\.relu: .*meta and has no values"):
            check_op(torch.relu, (torch.empty(3, device="meta"),))

    def test_an_operator_of_another_device(self):
        with (
            registered("only_there(Tensor x) -> Tensor", lambda x: x, "CUDA") as op,
            pytest.raises(EnvironmentUnfit, match="has a kernel for cuda only, and cannot run on cpu"),
        ):
            check_op(op, (torch.ones(3),))

    def test_an_operator_whose_only_kernel_is_that_of_autograd_is_checked(self):
        with registered("on_top(Tensor x) -> Tensor", lambda x: x * 2, "Autograd") as op:
            assert asked(op, torch.ones(3), probes="repeat").verdict is Verdict.EQUIVALENT

    def test_its_own_complaint_is_not_taken_for_the_want_of_a_kernel(self):
        def choosy(x):
            raise ValueError("four, please")

        with (
            registered("choosy(Tensor x) -> Tensor", choosy, "Autograd") as op,
            pytest.raises(ProgramError, match="four, please"),
        ):
            check_op(op, (torch.ones(3),))

    @pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
    def test_a_nested_tensor_is_an_argument_like_any_other(self):
        nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
        report = asked(torch.ops.aten.relu.default, nested, probes=("schema", "repeat", "fake"))

        assert report.arguments == ("nested float32",)
        assert report.probe("schema").verdict is Verdict.EQUIVALENT
        assert "no fake tensors like its inputs" in report.probe("fake/given").reason
        assert report.verdict is Verdict.INCONCLUSIVE
