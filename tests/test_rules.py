"""The ten rules that make an answer trustworthy, each against a program that breaks it."""

import asyncio
import functools
import itertools
import os
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.process import runtime

EQUIVALENT, DIVERGED, INCONCLUSIVE, CRASHED = (
    Verdict.EQUIVALENT,
    Verdict.DIVERGED,
    Verdict.INCONCLUSIVE,
    Verdict.CRASHED,
)


def replaced(**targets):
    """Return a pass that puts another function in place of each named one in a dynamo graph."""

    def rewrite(graph_module, example_inputs):
        hits = 0
        for node in graph_module.graph.nodes:
            name = getattr(node.target, "__name__", node.target)
            if name in targets:
                node.target, node.op = targets[name], "call_function"
                hits += 1
        assert hits, f"none of {sorted(targets)} in the graph"
        graph_module.recompile()
        return graph_module

    return rewrite


def identity_pass(graph_module, example_inputs):
    return graph_module


def verdict_of(report, path):
    return next(seen.verdict for seen in report.comparisons if seen.path == path)


def clauses_of(report, path):
    return {breach.clause for seen in report.comparisons if seen.path == path for breach in seen.contract}


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


# 1. nothing passes vacuously


def test_a_program_that_returns_nothing_is_inconclusive():
    report = td.check(lambda x: None, (torch.ones(2),), transform=identity_pass, stages=["forward"])

    assert report.verdict is INCONCLUSIVE
    assert "nothing was compared" in report.stage("forward").reason


def test_a_program_that_returns_an_empty_tensor_is_inconclusive():
    report = td.check(lambda x: x[:0] * 2, (torch.ones(2),), transform=identity_pass, stages=["forward"])

    assert report.verdict is INCONCLUSIVE


def test_a_program_that_only_changes_its_input_is_compared_by_that():
    def fill(x):
        x.add_(1)

    report = td.check(fill, (torch.ones(2),), candidate=fill)

    assert report.verdict is EQUIVALENT


def test_a_candidate_that_raises_has_crashed():
    def broken(x):
        raise RuntimeError("no such kernel")

    report = td.check(lambda x: x + 1, (torch.ones(2),), candidate=broken)

    assert report.verdict is CRASHED
    assert report.failure.type == "RuntimeError"
    assert report.failure.message == "no such kernel"
    assert report.failure.signature.stage == "forward"


def test_a_candidate_that_exits_has_crashed():
    def leaves(x):
        raise SystemExit(0)

    assert td.check(lambda x: x + 1, (torch.ones(2),), candidate=leaves).verdict is CRASHED


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, pytest.skip.Exception, asyncio.CancelledError])
def test_what_is_meant_for_somebody_else_reaches_them(error):
    def leaves(x):
        raise error

    with pytest.raises(error):
        td.check(lambda x: x + 1, (torch.ones(2),), candidate=leaves)


def test_a_pass_that_raises_has_crashed():
    def broken(graph_module, example_inputs):
        raise ValueError("cannot lower this")

    report = td.check(lambda x: x + 1, (torch.ones(2),), transform=broken)

    assert report.verdict is CRASHED
    assert "cannot lower this" in report.failure.message


def test_a_candidate_that_raises_in_its_backward_keeps_what_the_forward_showed():
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError("no backward")

    x = torch.ones(3, requires_grad=True)
    report = td.check(lambda x: x * 2, (x,), candidate=NoBackward.apply)

    assert report.verdict is CRASHED
    assert report.stage("forward").verdict is EQUIVALENT
    assert report.stage("gradients").verdict is CRASHED


def test_an_output_without_a_partner_has_diverged_and_is_named():
    report = td.check(lambda x: (x + 1, x + 2), (torch.ones(2),), candidate=lambda x: (x + 1,))

    assert report.verdict is DIVERGED
    assert [(leaf.path, leaf.side) for leaf in report.unmatched] == [("outputs[1]", "reference")]


def test_a_truth_that_cannot_be_computed_is_noted_and_nothing_that_differs_passes():
    def only_float32(x):
        assert x.detach().numpy().itemsize == 4, "float32 only"
        return x.exp()

    report = td.check(only_float32, (torch.ones(3),), candidate=lambda x: x.double().exp().float() * (1 + 2**-23))

    assert report.verdict is INCONCLUSIVE
    assert any("no truth" in note and "float32 only" in note for note in report.notes)


# 2. the reference is the original eager program


def test_a_wrong_decomposition_is_seen_because_the_reference_is_not_decomposed(tmp_path):
    (tmp_path / "table.py").write_text(
        "import torch\ndef wrong():\n    return {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(1.01 * x)}\n"
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    options = {"table": f"{tmp_path}/table.py:wrong"}

    assert td.check(model, (torch.randn(3, 4),), transform="decompose", options=options).verdict is DIVERGED


# 3. the contract is more than values


def test_ones_of_three_is_not_ones_of_one():
    report = td.check(lambda x: torch.ones(3) * x, (torch.ones(()),), candidate=lambda x: torch.ones(1) * x)

    assert report.verdict is DIVERGED
    assert "shape" in clauses_of(report, "outputs")


def test_another_dtype_with_equal_values_has_diverged():
    report = td.check(lambda x: x + 1, (torch.ones(3),), candidate=lambda x: (x + 1).double())

    assert report.verdict is DIVERGED
    assert "dtype" in clauses_of(report, "outputs")


def test_an_output_that_lost_requires_grad_has_diverged():
    x = torch.ones(3, requires_grad=True)
    report = td.check(lambda x: x * 2, (x,), candidate=lambda x: (x * 2).detach(), stages=["forward"])

    assert report.verdict is DIVERGED
    assert "requires_grad" in clauses_of(report, "outputs")


def test_a_dropped_input_mutation_has_diverged():
    def shift(x):
        x.add_(1)
        return x * 2

    report = td.check(shift, (torch.ones(3),), candidate=lambda x: (x + 1) * 2)

    assert verdict_of(report, "outputs") is EQUIVALENT
    assert verdict_of(report, "args[0]") is DIVERGED


def test_a_dropped_buffer_update_has_diverged():
    class Counter(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.step = step
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count.add_(self.step)
            return x * 2

    report = td.check(Counter(1.0), (torch.ones(3),), candidate=Counter(0.0))

    assert verdict_of(report, "buffers['count']") is DIVERGED


def test_a_view_returned_as_a_copy_has_diverged():
    report = td.check(lambda x: x.view(-1), (torch.ones(2, 2),), candidate=lambda x: x.view(-1).clone())

    assert report.verdict is DIVERGED
    assert clauses_of(report, "outputs") == {"aliasing"}


def test_two_outputs_that_share_memory_in_one_side_only_have_diverged():
    def shared(x):
        y = x + 1
        return y, y[0]

    report = td.check(shared, (torch.ones(2, 2),), candidate=lambda x: (x + 1, (x + 1)[0]))

    assert report.verdict is DIVERGED


def test_other_strides_are_reported_and_decide_only_on_request():
    def columns(x):
        return (x + 1).t().contiguous().t()

    report = td.check(lambda x: x + 1, (torch.ones(2, 3),), candidate=columns)
    strict = td.check(lambda x: x + 1, (torch.ones(2, 3),), candidate=columns, strict=["stride"])

    assert report.verdict is EQUIVALENT
    assert clauses_of(report, "outputs") == {"stride"}
    assert strict.verdict is DIVERGED


def test_one_shared_nan_does_not_hide_that_all_else_is_wrong():
    def poisoned(value):
        def call(x):
            y = torch.full_like(x, value)
            y[0] = float("nan")
            return y

        return call

    assert td.check(poisoned(1.0), (torch.ones(5),), candidate=poisoned(1.0)).verdict is EQUIVALENT
    assert td.check(poisoned(1.0), (torch.ones(5),), candidate=poisoned(777.0)).verdict is DIVERGED


def test_a_lost_nan_has_diverged():
    x = torch.tensor([1.0, float("nan")])

    assert td.check(lambda x: x + 1, (x,), candidate=lambda x: (x + 1).nan_to_num(0.0)).verdict is DIVERGED


# 4. the sides share nothing, and the world is as before


def test_a_candidate_that_spoils_its_parameters_does_not_spoil_the_reference():
    def spoil(graph_module, example_inputs):
        def call(*args):
            with torch.no_grad():
                for value in args:
                    if isinstance(value, nn.Parameter):
                        value.zero_()
            return graph_module(*args)

        return call

    model = Linear()
    before = model.linear.weight.detach().clone()
    report = td.check(model, (torch.ones(2, 4),), transform=spoil)

    assert report.verdict is DIVERGED
    assert verdict_of(report, "parameters['linear.weight']") is DIVERGED
    assert torch.equal(model.linear.weight, before)


def test_a_zero_gradient_is_seen_although_the_parameters_have_the_same_name():
    class Detached(Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.linear.weight.detach(), self.linear.bias)

    report = td.check(Linear(), (torch.ones(2, 4),), candidate=Detached())

    assert verdict_of(report, "outputs") is EQUIVALENT
    assert verdict_of(report, "parameters['linear.weight'].grad") is DIVERGED


def test_the_users_own_tensors_modules_and_gradients_are_never_touched():
    model = Linear()
    x = torch.ones(2, 4, requires_grad=True)
    x.grad = torch.full((2, 4), 7.0)

    td.check(model, (x,), transform=identity_pass, stages=["forward", "gradients", "steps"])

    assert torch.equal(x.grad, torch.full((2, 4), 7.0))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.linear.weight, Linear().linear.weight)


@pytest.mark.parametrize("is_flushing", [False, True])
def test_subnormal_numbers_are_flushed_afterwards_as_they_were_before(is_flushing):
    def flushes():
        return float(np.float32(1e-40) * np.float32(1.0)) == 0.0

    def vandal(x):
        torch.set_flush_denormal(not is_flushing)
        return x * 1.0

    try:
        torch.set_flush_denormal(is_flushing)
        td.check(lambda x: x * 1.0, (torch.ones(2),), candidate=vandal)
        assert flushes() is is_flushing
        vandal(torch.ones(2))
        assert flushes() is not is_flushing
    finally:
        torch.set_flush_denormal(False)


def test_a_setting_of_subnormal_numbers_that_a_run_leaves_behind_is_a_difference():
    def vandal(x):
        torch.set_flush_denormal(True)
        return x * 1.0

    assert td.check(lambda x: x * 1.0, (torch.ones(2),), candidate=vandal).verdict is Verdict.DIVERGED


def leaves_autocast_on(x):
    torch.set_autocast_enabled("cpu", True)
    return x * 1.0


def uses_autocast(x):
    with torch.autocast("cpu", dtype=torch.float16):
        return x * 1.0


@pytest.mark.parametrize(
    ("candidate", "verdict"), [(leaves_autocast_on, Verdict.DIVERGED), (uses_autocast, Verdict.EQUIVALENT)]
)
def test_autocast_that_a_run_leaves_on_is_a_difference_and_is_put_back(candidate, verdict):
    with torch.autocast("cpu", enabled=False):
        report = td.check(lambda x: x * 1.0, (torch.ones(2),), candidate=candidate)

        assert report.verdict is verdict
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_random_generators_and_flags_are_as_before_even_after_a_crash():
    def vandal(x):
        torch.manual_seed(1234)
        random.seed(5)
        np.random.seed(5)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        torch.set_anomaly_enabled(True)
        torch.set_float32_matmul_precision("medium")
        os.environ["TORCHDELTA_TEST_VANDAL"] = "1"
        torch._inductor.config.fallback_random = True
        torch._dynamo.config.verbose = True
        raise RuntimeError("and now this")

    import torch._dynamo
    import torch._inductor.config

    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)

    report = td.check(lambda x: x + torch.rand(2), (torch.ones(2),), candidate=vandal, deterministic=True)

    assert report.verdict is CRASHED
    assert torch.equal(torch.rand(2), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_anomaly_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert "TORCHDELTA_TEST_VANDAL" not in os.environ
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert not torch._inductor.config.fallback_random
    assert not torch._dynamo.config.verbose


def test_what_a_compilation_in_another_thread_sets_for_a_while_does_not_stay():
    is_compiling, is_compared = threading.Event(), threading.Event()

    def backend(graph_module, example_inputs):
        with torch.autograd.set_detect_anomaly(True):
            is_compiling.set()
            is_compared.wait(1)
        return graph_module

    def compared(x):
        is_compared.set()
        compiling.join(10)
        return x * 2

    compiling = threading.Thread(target=torch.compile(lambda x: x + 1, backend=backend), args=(torch.ones(2),))
    compiling.start()
    is_compiling.wait(60)
    report = td.check(lambda x: x * 2, (torch.ones(2),), candidate=compared)

    assert report.verdict is EQUIVALENT
    assert not torch.is_anomaly_enabled()


def test_a_compilation_in_another_thread_that_does_not_end_is_waited_for_once(monkeypatch):
    import torch._dynamo.convert_frame

    patience = []

    class Held:
        def acquire(self, timeout):
            patience.append(timeout)
            return False

    monkeypatch.setattr(torch._dynamo.convert_frame, "compile_lock", Held())
    report = td.check(lambda x: x * 2, (torch.ones(2),), candidate=lambda x: x + x)
    monkeypatch.undo()
    td.check(lambda x: x * 2, (torch.ones(2),), candidate=lambda x: x + x)

    assert report.verdict is EQUIVALENT
    assert len(patience) > 1
    assert [seconds for seconds in patience if seconds] == patience[:1]
    assert not runtime._COMPILING.is_set()


def test_both_sides_see_the_same_random_numbers():
    report = td.check(lambda x: x * torch.rand(5), (torch.ones(5),), candidate=lambda x: torch.rand(5) * x)

    assert report.verdict is EQUIVALENT


# 5. gradients use random cotangents


class _ZeroBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.softmax(x, -1)

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


def test_softmax_with_a_zero_backward_has_diverged():
    x = torch.randn(3, 5, requires_grad=True)
    report = td.check(lambda x: torch.softmax(x, -1), (x,), candidate=_ZeroBackward.apply)

    assert report.stage("forward").verdict is EQUIVALENT
    assert report.stage("gradients").verdict is DIVERGED


def test_the_second_output_is_differentiated_too():
    def detached(x):
        return x * 2, (x * 3).detach() + 0 * x

    x = torch.randn(4, requires_grad=True)
    report = td.check(lambda x: (x * 2, x * 3), (x,), candidate=detached)

    assert verdict_of(report, "args[0].grad") is DIVERGED


def test_no_gradient_is_not_a_zero_gradient():
    x = torch.randn(4, requires_grad=True)
    y = torch.randn(4, requires_grad=True)
    report = td.check(lambda x, y: x * 2 + 0 * y, (x, y), candidate=lambda x, y: x * 2)

    assert report.stage("forward").verdict is EQUIVALENT
    assert verdict_of(report, "args[1].grad") is DIVERGED


# 6. integers and booleans are exact


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_an_integer_off_by_one_has_diverged(dtype):
    x = torch.tensor([5, 100], dtype=dtype)

    def off_by_one(x):
        y = x * 1
        y[1] += 1
        return y

    assert td.check(lambda x: x * 1, (x,), candidate=off_by_one).verdict is DIVERGED
    assert td.check(lambda x: x * 1, (x,), candidate=off_by_one, ignore=["integers"]).verdict is EQUIVALENT


def test_a_flipped_boolean_has_diverged():
    x = torch.tensor([0.5, 1.5])

    assert td.check(lambda x: x > 1, (x,), candidate=lambda x: x >= 0.5).verdict is DIVERGED


# 7. a verdict carries its evidence


def test_the_evidence_names_the_worst_element_and_the_three_values_there():
    def spike(x):
        y = x * 2
        return torch.cat([y[:3], y[3:4] + 0.5, y[4:]])

    report = td.check(lambda x: x * 2, (torch.arange(6.0),), candidate=spike)
    seen = next(seen for seen in report.comparisons if seen.path == "outputs")

    assert seen.worst.index == (3,)
    assert (seen.worst.reference, seen.worst.candidate, seen.worst.truth) == (6.0, 6.5, 6.0)
    assert seen.error == pytest.approx({"max": 0.5, "rms": 0.5 / 6**0.5}[seen.details["statistic"]])
    assert 0 < seen.noise < seen.allowed < seen.error


# 8. measured raw: see test_codec.py for the strict JSON


def test_a_non_finite_error_reaches_the_file_as_it_is():
    x = torch.tensor([1.0, 2.0])
    report = td.check(lambda x: x / x, (x,), candidate=lambda x: x / (x - x))

    assert report.verdict is DIVERGED
    assert td.from_json(td.to_json(report)) == report
    assert next(seen for seen in report.comparisons if seen.path == "outputs").worst.candidate == float("inf")


# 9. a transform that did not happen is not a pass


def test_a_backend_that_never_got_a_graph_is_inconclusive():
    report = td.check(nn.LSTM(4, 4), (torch.randn(2, 3, 4),), transform="eager", stages=["forward"])

    assert report.verdict is INCONCLUSIVE
    assert "did not happen" in report.stage("forward").reason
    assert any("LSTM" in note for note in report.notes)
    assert report.graphs.transformed_calls == 0


def test_a_function_that_refuses_compilation_is_inconclusive():
    @torch._dynamo.disable
    def hidden(x):
        return x + 1

    assert td.check(lambda x: hidden(x), (torch.ones(2),), transform="eager").verdict is INCONCLUSIVE


def test_a_reached_recompile_limit_is_inconclusive():
    class Restless(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls if self.calls % 2 else x + self.calls

    import torch._dynamo.config

    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        report = td.check(Restless(), (torch.ones(2),), transform="eager", iterations=6, stages=["forward"])

    assert report.verdict is INCONCLUSIVE
    assert "recompile limit" in " ".join((report.stage("forward").reason, *report.notes))


def test_graph_breaks_and_several_graphs_are_followed_and_noted():
    def broken_up(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    report = td.check(broken_up, (torch.ones(2),), transform="eager")

    assert report.verdict is EQUIVALENT
    assert report.graphs.captured == 2
    assert any("ran eagerly" in note for note in report.notes)


def test_what_handles_an_exception_is_no_part_of_the_program_that_ran_eagerly():
    def raising(graph_module, example_inputs):
        def run(*args):
            raise RuntimeError("not today")

        return run

    # the call of a graph module catches what its code raises, to say where
    report = td.check(torch.fx.symbolic_trace(torch.nn.ReLU()), (torch.ones(2),), transform=raising)

    assert report.verdict is CRASHED
    assert not any("ran eagerly" in note for note in report.notes)


# 10. the instrument does not change the program


def test_the_native_run_keeps_the_users_flags_and_deterministic_mode_is_asked_for():
    def look(x):
        return x + torch.are_deterministic_algorithms_enabled()

    def output(report):
        return next(seen.worst.reference for seen in report.comparisons if seen.path == "outputs")

    assert output(td.check(look, (torch.ones(2),), candidate=look)) == 1.0
    report = td.check(look, (torch.ones(2),), candidate=look, deterministic=True)
    assert output(report) == 2.0
    assert report.case.deterministic
    assert any("not the native run" in note for note in report.notes)


def test_the_same_random_numbers_under_a_compiler_are_said_to_be_an_extra():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    report = td.check(model.train(), (torch.randn(3, 4),), transform="aot_eager_decomp_partition")

    assert report.verdict is EQUIVALENT
    assert any("fallback_random" in note for note in report.notes)


def test_a_reference_that_differs_between_two_runs_is_inconclusive_and_the_tensor_is_named():
    def unsteady(x):
        return x + 1, x + int.from_bytes(os.urandom(2), "big")

    report = td.check(unsteady, (torch.ones(3),), candidate=lambda x: (x + 1, x + 50))

    assert report.verdict is INCONCLUSIVE
    assert verdict_of(report, "outputs[0]") is EQUIVALENT
    assert any("outputs[1]" in note and "not deterministic" in note for note in report.notes)


def test_a_candidate_that_crashes_before_the_stage_asked_for_has_crashed_all_the_same():
    def broken(x):
        raise RuntimeError("no such kernel")

    x = torch.ones(2, requires_grad=True)

    assert td.check(lambda x: x * 2, (x,), candidate=broken, stages=["gradients"]).verdict is CRASHED


def test_a_list_that_the_reference_appends_to_is_part_of_what_the_call_left_behind():
    def append(x, seen):
        seen.append(x * 2)
        return x + 1

    assert td.check(append, (torch.ones(2), []), candidate=append).verdict is EQUIVALENT
    assert td.check(append, (torch.ones(2), []), candidate=lambda x, seen: x + 1).verdict is DIVERGED


def test_the_exception_of_an_assertion_carries_the_report_and_its_evidence():
    x = torch.arange(3.0)
    with pytest.raises(td.Diverged, match=r"outputs.*worst at \[2\].*candidate 3\.0, truth 2\.0") as caught:
        td.assert_equivalent(lambda x: x * 1, (x,), candidate=lambda x: torch.cat([x[:2], x[2:] + 1]))

    assert caught.value.report.verdict is DIVERGED
    assert isinstance(caught.value, AssertionError)
    assert td.assert_equivalent(lambda x: x * 1, (x,), candidate=lambda x: x * 1).verdict is EQUIVALENT


def test_what_ran_eagerly_in_an_earlier_check_is_not_said_of_a_later_one():
    td.check(nn.LSTM(4, 4), (torch.randn(2, 3, 4),), transform="eager", stages="forward")
    report = td.check(Linear(), (torch.ones(2, 4),), transform="cast:float64", stages="forward")

    assert not any("LSTM" in note for note in report.notes)


# what an earlier version took for equivalent


def test_a_truth_that_takes_another_branch_lets_nothing_pass():
    def by_dtype(x):
        return x * 2 if x.detach().numpy().itemsize == 4 else x * 3

    x = torch.randn(4, 4)

    assert td.check(by_dtype, (x,), candidate=lambda x: x * 2.9).verdict is INCONCLUSIVE
    # in float64 this one is another function, which says nothing of float32
    assert td.check(by_dtype, (x,), candidate=lambda x: x * 2).verdict is INCONCLUSIVE
    assert td.check(by_dtype, (x,), candidate=by_dtype).verdict is EQUIVALENT
    far = td.compare(torch.ones(100), torch.full((100,), 5.0), truth=torch.full((100,), 3.0, dtype=torch.float64))
    assert far.verdict is INCONCLUSIVE


def test_a_gradient_that_is_zero_but_for_rounding_is_no_reason_for_doubt():
    def attention(x, w, key_bias):
        keys = x @ w + key_bias
        return torch.softmax(x @ keys.transpose(-1, -2), -1) @ x

    def reordered(x, w, key_bias):
        return attention(x.flip(-1), w.flip(0).flip(1), key_bias.flip(0)).flip(-1)

    torch.manual_seed(0)
    x, w, key_bias = torch.randn(2, 6, 8), torch.randn(8, 8), torch.zeros(8)
    inputs = tuple(value.requires_grad_() for value in (x, w, key_bias))
    report = td.check(attention, inputs, candidate=reordered)

    assert verdict_of(report, "args[2].grad") is EQUIVALENT


class Averages(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.register_buffer("run", torch.zeros(4))
        self.rate = rate
        self.plain = torch.zeros(4)

    def forward(self, x):
        self.run = self.run * 0.9 + self.rate * x.mean(0)
        return x * 2


def test_a_buffer_that_is_replaced_and_not_written_to_is_seen():
    x = torch.randn(3, 4)

    assert td.check(Averages(1.0), (x,), candidate=Averages(1.0)).verdict is EQUIVALENT
    assert verdict_of(td.check(Averages(1.0), (x,), candidate=Averages(7.0)), "buffers['run']") is DIVERGED


def test_a_tensor_that_a_module_keeps_unregistered_is_seen():
    class Plain(Averages):
        def forward(self, x):
            self.plain = self.plain + self.rate * x.mean(0)
            return x * 2

    x = torch.randn(3, 4)

    assert td.check(Plain(1.0), (x,), candidate=Plain(1.0)).verdict is EQUIVALENT
    assert verdict_of(td.check(Plain(1.0), (x,), candidate=Plain(7.0)), "attributes['plain']") is DIVERGED
    # one that never updates it leaves nothing behind for it, and that is a difference too
    assert verdict_of(td.check(Plain(1.0), (x,), candidate=Averages(0.0)), "attributes['plain']") is DIVERGED


def test_gradients_that_the_call_itself_leaves_are_seen():
    class TrainsItself(Linear):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            (self.linear(x).sum() * self.scale).backward()
            return self.linear(x).detach()

    x = torch.randn(2, 4)

    assert td.check(TrainsItself(1.0), (x,), candidate=TrainsItself(1.0)).verdict is EQUIVALENT
    assert td.check(TrainsItself(1.0), (x,), candidate=TrainsItself(5.0)).verdict is DIVERGED


def test_a_hook_on_a_parameter_is_part_of_the_program():
    hooked = Linear()
    hooked.linear.weight.register_hook(lambda gradient: gradient * 3)
    x = torch.randn(2, 4)

    assert td.check(hooked, (x,), candidate=Linear()).verdict is DIVERGED
    assert td.check(hooked, (x,), candidate=hooked).verdict is EQUIVALENT


def test_a_compiler_failure_that_the_user_suppresses_has_crashed_all_the_same():
    import torch._dynamo.config

    def broken_up(x):
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return torch.sigmoid(y)

    def refuses_sigmoid(graph_module, example_inputs):
        if any("sigmoid" in str(node.target) for node in graph_module.graph.nodes):
            raise ValueError("cannot lower sigmoid")
        return graph_module

    with torch._dynamo.config.patch(suppress_errors=True):
        assert td.check(broken_up, (torch.ones(2),), transform=refuses_sigmoid).verdict is CRASHED


def test_a_program_that_compiles_itself_is_run_eagerly_as_the_reference():
    def wrong(graph_module, example_inputs):
        return lambda *args: tuple(value + 1 for value in graph_module(*args))

    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend=wrong)

    assert td.check(compiled, (torch.randn(4),), transform=wrong).verdict is DIVERGED


def test_a_reference_that_wavers_by_little_is_found_out():
    class Wavering(nn.Module):
        calls = itertools.count()  # of the class, so that all sides share it

        def forward(self, x):
            return x * (1 + 0.005 * next(self.calls))

    report = td.check(Wavering(), (torch.randn(64, 64),), candidate=lambda x: x * 1.05)

    assert report.verdict is INCONCLUSIVE
    assert any("not deterministic" in note for note in report.notes)


def test_a_buffer_of_another_dtype_with_equal_values_has_diverged():
    class Scaled(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.register_buffer("scale", torch.tensor([1.0, 2.0], dtype=dtype))

        def forward(self, x):
            return x * self.scale.float()

    assert td.check(Scaled(torch.float32), (torch.ones(2),), candidate=Scaled(torch.float16)).verdict is DIVERGED


def test_an_array_argument_that_is_changed_is_part_of_what_the_call_left_behind():
    def writes(x, array):
        array[0] = 9
        return x + 1

    assert td.check(writes, (torch.ones(2), np.zeros(3)), candidate=writes).verdict is EQUIVALENT
    assert td.check(writes, (torch.ones(2), np.zeros(3)), candidate=lambda x, array: x + 1).verdict is DIVERGED


def test_settings_of_matmul_precision_are_left_alone():
    before = torch.backends.mkldnn.matmul.fp32_precision
    td.check(Linear(), (torch.ones(2, 4),), transform="eager")
    assert torch.backends.mkldnn.matmul.fp32_precision == before

    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert td.check(Linear(), (torch.ones(2, 4),), transform="eager").verdict is EQUIVALENT
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_a_factory_leaves_the_generators_alone_and_draws_from_the_seed(tmp_path):
    (tmp_path / "program.py").write_text(
        "import numpy, torch\n"
        "def build():\n"
        "    torch.manual_seed(5)\n"
        "    return (lambda x: x * float(numpy.random.rand())), (torch.randn(3),)\n"
    )
    state = torch.get_rng_state()
    reports = [td.check(f"{tmp_path}/program.py:build", candidate=torch.relu, seed=seed) for seed in (1, 1)]

    assert torch.equal(torch.get_rng_state(), state)
    assert reports[0].comparisons[0].worst == reports[1].comparisons[0].worst


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rounding_in_bfloat16_is_no_reason_for_doubt():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(torch.bfloat16)
    report = td.check(model, (torch.randn(8, 16, dtype=torch.bfloat16),), transform="inductor")

    assert any(seen.measurement and seen.measurement.mismatches for seen in report.comparisons)
    assert report.verdict is EQUIVALENT


def test_what_a_programs_module_sets_when_it_is_imported_holds_while_it_is_checked(tmp_path):
    import torch._inductor.config as settings

    (tmp_path / "setting.py").write_text(
        "import torch, torch._inductor.config\n"
        "torch._inductor.config.epilogue_fusion = False\n"
        "def build():\n"
        "    return torch.relu, (torch.randn(4),)\n"
        "def tells(graph_module, example_inputs):\n"
        "    assert torch._inductor.config.epilogue_fusion is False\n"
        "    return lambda *args: [each.clone() for each in graph_module(*args)]\n"
    )
    before = settings.epilogue_fusion
    try:
        report = td.check(f"{tmp_path}/setting.py:build", transform=f"{tmp_path}/setting.py:tells")
    finally:
        settings.epilogue_fusion = before

    assert before is True
    assert report.verdict is EQUIVALENT


def branching(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) + 1


def looping(x):
    return torch.while_loop(lambda count, _: count < 3, lambda count, x: (count + 1, x.sin()), (torch.tensor(0), x))[1]


@pytest.mark.parametrize("program", [branching, looping])
def test_branches_and_loops_have_truth_and_noise(program):
    def shifted(graph_module, example_inputs):
        return lambda *args: tuple(value + 1e-4 for value in graph_module(*args))

    x = torch.linspace(-1, 3, 16)
    assert td.check(program, (x,), transform="aot_eager").verdict is EQUIVALENT
    assert td.check(program, (x,), transform=shifted).verdict is DIVERGED


# what an attack took for equivalent, or for diverged


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def test_another_implementation_that_cuts_every_gradient_diverges():
    class Cut(Net):
        def forward(self, x):
            return super().forward(x).detach().requires_grad_()

    x = torch.randn(5, 8)

    assert td.check(Net(), (x,), candidate=Cut()).verdict is DIVERGED
    assert td.check(Net(), (x,), candidate=Net()).verdict is EQUIVALENT


def without(*targets):
    def dropping(graph_module, example_inputs):
        for node in list(graph_module.graph.nodes):
            if node.target in targets:
                node.replace_all_uses_with(node.args[0])
                graph_module.graph.erase_node(node)
        graph_module.recompile()
        return graph_module

    return dropping


def test_a_dropped_update_of_a_buffer_that_bfloat16_hardly_shows_diverges():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(32).bfloat16())

        def forward(self, x):
            self.mean.copy_(self.mean * 0.99 + x.mean(0) * 0.01)
            return x * 2

    torch.manual_seed(0)
    x = (torch.randn(64, 32) + 0.7).bfloat16()

    assert td.check(Mean(), (x,), transform=without("copy_")).verdict is DIVERGED
    assert td.check(Mean(), (x,), transform=without(), options={"unchanged": "ok"}).verdict is EQUIVALENT


def test_state_that_a_parameter_carries_is_compared():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.weight.total = torch.zeros(4, 4)

        def forward(self, x):
            self.weight.total.add_(x.detach())
            return x @ self.weight

    x = torch.randn(4, 4)

    assert td.check(Counting(), (x,), transform=without("add_")).verdict is DIVERGED
    assert td.check(Counting(), (x,), transform=without(), options={"unchanged": "ok"}).verdict is EQUIVALENT


def test_float64_does_not_vouch_for_a_pass_that_does_something_else_there():
    def chaotic(x):
        for _ in range(12):
            x = 3.9 * x * (1 - x)
        return x

    def wrong_in_bfloat16(graph_module, example_inputs):
        is_narrow = any(each.dtype is torch.bfloat16 for each in example_inputs)
        output = graph_module.graph.output_node()
        with graph_module.graph.inserting_before(output):
            target, rest = (torch.full_like, (0.5,)) if is_narrow else (torch.clone, ())
            other = graph_module.graph.call_function(target, (output.args[0][0], *rest))
        output.args = ((other,),)
        graph_module.recompile()
        return graph_module

    torch.manual_seed(0)
    report = td.check(chaotic, (torch.rand(64).bfloat16(),), transform=wrong_in_bfloat16)

    assert report.verdict is INCONCLUSIVE
    assert "other operations" in report.questions.semantic


def test_a_truth_that_branches_on_a_dtype_unseen_is_doubted_in_bfloat16():
    def clamped(x):
        y = x * 3
        return (y.clamp(-4, 4) if torch.result_type(y, 1.0) == torch.bfloat16 else y).sum(-1)

    torch.manual_seed(0)
    x = torch.randn(8, 64).bfloat16()

    assert td.check(clamped, (x,), candidate=lambda x: (x * 3).sum(-1)).verdict is not EQUIVALENT


def test_a_cached_table_is_not_taken_for_another_function():
    @functools.cache
    def table(size):
        return torch.arange(size, dtype=torch.float32).mul(0.1).cos()

    report = td.check(lambda x: x * table(x.shape[-1]), (torch.randn(8, 32),), transform="aot_eager")

    assert report.verdict is not DIVERGED


def test_another_implementation_may_round_weights_of_its_own():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval().bfloat16()

    folded = nn.Sequential(torch.nn.utils.fusion.fuse_conv_bn_eval(*build()))
    wrong = nn.Sequential(torch.nn.utils.fusion.fuse_conv_bn_eval(*build()))
    wrong[0].bias.data += 0.1
    x = torch.randn(2, 3, 8, 8).bfloat16()

    assert td.check(build(), (x,), candidate=folded, stages="forward").verdict is EQUIVALENT
    assert td.check(build(), (x,), candidate=wrong, stages="forward").verdict is DIVERGED


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_floats_of_one_byte_are_compared(dtype):
    x = torch.randn(8, 32)

    assert td.check(lambda x: (x * 2).to(dtype), (x,), candidate=lambda x: (x * 3).to(dtype)).verdict is not EQUIVALENT
    assert td.check(lambda x: (x * 2).to(dtype), (x,), candidate=lambda x: (x + x).to(dtype)).verdict is EQUIVALENT


def test_subnormal_numbers_of_float64_are_compared():
    x = torch.rand(64, dtype=torch.float64) + 1

    assert td.check(lambda x: x * 1e-310, (x,), candidate=lambda x: x * 2e-310).verdict is DIVERGED
