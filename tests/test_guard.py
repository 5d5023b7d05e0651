"""A guard sees what a compiler gets wrong in the user's own run, and changes nothing of a run that is right."""

import gc
import json
import math
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace
from torch.overrides import TorchFunctionMode

import torchdelta as td
from programs import broken
from torchdelta._torch.graphs import graphs
from torchdelta.guard import graph as guarded_graph
from torchdelta.guard.config import PRESETS
from torchdelta.guard.findings import GuardFindings
from torchdelta.guard.graph import NO_ERROR
from torchdelta.records import trust
from torchdelta.records.verdict import Verdict
from torchdelta.transforms.wrappers import SAME_RANDOM


@pytest.fixture(autouse=True)
def afresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a guard leaves what nobody named a place for
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Draws, trains, and counts in a buffer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        made = self.second(self.dropout(torch.relu(self.first(x))))
        self.seen.add_(made.detach().mean(0))
        return made


def trained(backend, *, dropout=0.0, steps=3):
    """Return the losses of a run, and what else it left behind."""
    torch.manual_seed(0)
    model = Net(dropout)
    compiled = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = compiled(torch.randn(3, 8)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.seen.tolist(), torch.rand(2).tolist()


def seen_by(guard):
    return list(guard.findings.records.values())


def guarded(backend, tmp_path, **words):
    return td.guard(backend, out=tmp_path / "guard", **words)


class TestHealthyRun:
    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    @pytest.mark.parametrize("graph", ["dynamo", "aten"])
    def test_is_bitwise_as_without_a_guard(self, graph, dropout):
        guard = td.guard("aot_eager", graph=graph)

        assert trained(guard, dropout=dropout) == trained("aot_eager", dropout=dropout)
        assert {seen.verdict for seen in seen_by(guard)} == {Verdict.EQUIVALENT}
        assert guard.summary.out is None  # there was nothing to write

    @pytest.mark.slow
    @pytest.mark.parametrize("graph", ["dynamo", "aten"])
    def test_is_bitwise_as_without_a_guard_under_inductor(self, graph):
        guard = td.guard("inductor", graph=graph, every=2)

        assert trained(guard) == trained("inductor")
        assert guard.summary.verdicts == {"equivalent": guard.summary.graphs}

    @pytest.mark.slow
    def test_that_draws_is_checked_on_a_second_compile_and_runs_the_first(self):
        guard = td.guard("inductor", on_failure="report")

        assert trained(guard, dropout=0.3) == trained("inductor", dropout=0.3)
        assert guard.summary.verdicts == {"equivalent": 1}

    def test_of_graphs_after_aot_has_a_forward_and_a_backward(self):
        guard = td.guard("aot_eager", graph="aten")
        trained(guard)

        assert [seen.level for seen in seen_by(guard)] == ["forward", "backward"]

    def test_resize_and_graph_breaks_is_checked_each_time(self):
        guard = td.guard("aot_eager")

        def program(x):
            made = torch.sin(x)
            torch._dynamo.graph_break()
            return torch.cos(made)

        compiled = torch.compile(program, backend=guard)
        for size in (3, 4, 5):
            compiled(torch.randn(size))

        assert guard.summary.graphs >= 4
        assert guard.summary.verdicts == {"equivalent": guard.summary.graphs}

    @pytest.mark.parametrize(
        "around",
        [
            pytest.param(torch.no_grad, id="no_grad"),
            pytest.param(torch.inference_mode, id="inference_mode"),
            pytest.param(lambda: torch.autocast("cpu", dtype=torch.bfloat16), id="autocast"),
        ],
    )
    def test_leaves_the_modes_around_it_as_they_are(self, around):
        guard = td.guard("aot_eager")
        model, x = nn.Linear(4, 4), torch.randn(2, 4)

        def run(backend):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=backend)
            with around():
                made = compiled(x)
                modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
            return made.tolist(), made.dtype, made.requires_grad, made.is_inference(), modes

        assert run(guard) == run("aot_eager")
        assert guard.summary.verdicts == {"equivalent": 1}

    def test_in_several_threads_is_as_in_one(self):
        guard = td.guard("aot_eager")
        programs = [lambda x, by=by: torch.sin(x) * by for by in range(4)]
        made = {}

        def run(by):
            made[by] = torch.compile(programs[by], backend=guard)(torch.ones(3)).tolist()

        threads = [threading.Thread(target=run, args=(by,)) for by in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert made == {by: (torch.sin(torch.ones(3)) * by).tolist() for by in range(4)}
        assert guard.summary.verdicts == {"equivalent": guard.summary.graphs}

    def test_with_a_compile_in_a_compile_and_a_part_that_is_not_compiled(self):
        guard = td.guard("aot_eager")
        inner = torch.compile(torch.cos, backend=guard)

        @torch.compiler.disable
        def left_alone(x):
            return x.tolist()[0]

        def program(x):
            first = torch.sin(inner(x))
            return first + left_alone(x)

        x = torch.randn(3)

        assert torch.equal(torch.compile(program, backend=guard)(x), torch.sin(torch.cos(x)) + x[0].item())
        assert guard.summary.verdicts == {"equivalent": guard.summary.graphs}

    def test_leaves_gradients_hooks_and_their_tensors_alone(self):
        calls = []
        model = nn.Linear(4, 4)
        model.weight.register_hook(lambda grad: calls.append("hook"))
        model.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
        model.weight.grad = torch.full_like(model.weight, 7.0)
        compiled = torch.compile(model, backend=td.guard("aot_eager"))
        made = compiled(torch.ones(2, 4))

        assert calls == []
        assert model.weight.grad.unique().tolist() == [7.0]
        made.sum().backward()
        assert calls == ["hook", "after"]
        assert model.weight.grad.unique().tolist() == [9.0]

    def test_calls_no_hooks_of_the_users_besides_its_own(self):
        calls = []

        def run(backend):
            torch._dynamo.reset()
            calls.clear()
            weight = torch.ones(4, requires_grad=True)
            compiled = torch.compile(lambda x: torch.sin(x * weight), backend=backend)
            hook = nn.modules.module.register_module_forward_hook(lambda *_: calls.append("module"))
            try:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: (calls.append("saved"), t)[1], lambda t: t):
                    compiled(torch.ones(2, 4)).sum().backward()
            finally:
                hook.remove()
            return sorted(calls)

        def as_it_is(graph_module, example_inputs):
            graph_module.real_recompile()
            return graph_module.forward  # what was made calls no module itself

        guard = td.guard(as_it_is)

        assert run(guard) == run(as_it_is)
        assert "saved" in calls
        assert guard.summary.verdicts == {"equivalent": 1}

    def test_under_a_mode_that_changes_functions_is_no_difference(self):
        class Doubling(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                made = function(*args, **(kwargs or {}))
                return made * 2 if function is torch.sin else made

        guard = td.guard("aot_eager")
        with Doubling():
            made = torch.compile(lambda x: torch.sin(x), backend=guard)(torch.ones(2))

        assert torch.equal(made, torch.sin(torch.ones(2)) * 2)
        assert guard.summary.verdicts == {"equivalent": 1}

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_that_writes_to_what_is_differentiated_is_checked(self):
        guard = td.guard("aot_eager")
        weight = torch.ones(3, requires_grad=True)
        made = torch.compile(lambda x: x.relu_() * 2, backend=guard)(weight * 1)
        made.sum().backward()

        assert weight.grad.tolist() == [2.0, 2.0, 2.0]
        assert guard.summary.verdicts == {"equivalent": 1}

    def test_is_checked_on_its_first_call_that_has_values(self):
        guard = td.guard("eager")
        made = guard(symbolic_trace(lambda x: torch.sin(x)), [torch.ones(2)])
        with FakeTensorMode() as fake:
            made(fake.from_tensor(torch.ones(2)))
        assert guard.summary.checked == 0
        made(torch.ones(2))

        assert guard.summary.verdicts == {"equivalent": 1}

    def test_of_aten_graphs_frees_what_was_saved_as_early_as_without(self):
        def alive_at_the_end(backend):
            torch._dynamo.reset()
            found = []

            def frees(graph_module, example_inputs):
                def run(args):
                    held = [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
                    made = graph_module.forward(*args)
                    args.clear()
                    gc.collect()
                    found.append(sum(each() is not None for each in held))
                    return made

                run._boxed_call = True
                return run

            def compiled_by(graph_module, example_inputs):
                return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=frees)(
                    graph_module, example_inputs
                )

            call = torch.compile(lambda x: torch.sin(torch.exp(x)), backend=backend(compiled_by))
            for _ in range(3):
                found.clear()
                call(torch.randn(3, requires_grad=True)).sum().backward()
            return found

        assert alive_at_the_end(lambda plain: td.guard(plain, graph="aten")) == alive_at_the_end(lambda plain: plain)

    def test_in_a_process_group_of_one_is_checked(self, tmp_path):
        program = """
            import torch, torch.distributed as dist, torchdelta as td
            import torch.distributed._functional_collectives as funcol
            dist.init_process_group("gloo", init_method="file://{file}", rank=0, world_size=1)
            guard = td.guard("aot_eager")
            made = torch.compile(lambda x: funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, backend=guard)
            print(made(torch.ones(3)).tolist(), guard.summary.verdicts, dist.get_world_size())
            dist.destroy_process_group()
        """
        ran = run_script(tmp_path, program.format(file=tmp_path / "store"))

        assert ran.stdout.splitlines()[-1] == "[3.0, 3.0, 3.0] {'equivalent': 1} 1", ran.stderr


def run_script(tmp_path, text, *options):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *options, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False
    )


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("there is none")


def without_backward(x):
    return NoBackward.apply(x)


def wrong_decomposition(graph_module, example_inputs):
    """AOTAutograd with a decomposition of silu that is another function."""
    table = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x) * 1.01}
    as_it_is = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), decompositions=table)
    return as_it_is(graph_module, example_inputs)


def forgets_to_write(graph_module, example_inputs):
    """What a graph writes to its inputs is written to copies."""
    return lambda *args: graph_module(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))


class TestFinding:
    @pytest.mark.slow
    def test_a_wrong_value_raises_with_the_evidence(self, tmp_path):
        guard = guarded(broken.relu_is_off, tmp_path)

        with pytest.raises(td.Diverged, match="relu") as raised:
            trained(guard)

        assert raised.value.report.verdict is Verdict.DIVERGED
        (finding,) = guard.summary.findings
        assert finding.culprit.op == "relu"
        assert "torch.relu(self.first(x))" in finding.culprit.source_line
        assert finding.culprit.source_line in str(raised.value)
        assert td.read_report(tmp_path / "guard" / "0001-dynamo" / "report.json").verdict is Verdict.DIVERGED

    def test_a_wrong_decomposition_is_caught(self, tmp_path):
        guard = guarded(wrong_decomposition, tmp_path, on_failure="report")
        torch.compile(lambda x: torch.nn.functional.silu(x), backend=guard)(torch.randn(4))

        assert guard.summary.verdicts == {"diverged": 1}

    def test_a_bug_that_reaches_only_a_mutated_input_is_caught(self, tmp_path):
        guard = guarded(forgets_to_write, tmp_path, on_failure="report")
        torch.compile(lambda x, total: (total.add_(x), x + 1)[1], backend=guard)(torch.ones(3), torch.zeros(3))

        assert guard.summary.verdicts == {"diverged": 1}
        report = td.read_report(tmp_path / "guard" / "0001-dynamo" / "report.json")
        assert [seen.path for seen in report.comparisons if seen.verdict is Verdict.DIVERGED] == ["args[0]"]

    def test_a_bug_behind_dropout_is_caught_on_a_second_compile(self, tmp_path):
        guard = guarded(broken.relu_is_off, tmp_path, on_failure="report")
        trained(guard, dropout=0.5, steps=1)

        assert guard.summary.verdicts == {"diverged": 1}
        assert SAME_RANDOM in td.read_report(tmp_path / "guard" / "0001-dynamo" / "report.json").notes

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_a_bug_that_reaches_only_what_is_written_midway_is_caught(self, tmp_path):
        guard = guarded(forgets_to_write, tmp_path, on_failure="report")
        weight = torch.ones(3, requires_grad=True)
        torch.compile(lambda x: (x.mul_(3), torch.ones(2))[1], backend=guard)(weight * 1)

        assert guard.summary.verdicts == {"diverged": 1}

    def test_a_bug_in_a_branch_is_caught_although_the_graph_was_changed_in_place(self, tmp_path):
        def cos_for_sin(graph_module, example_inputs):
            for module in graph_module.modules():
                for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                    if broken.is_called(node, "sin"):
                        node.target = torch.cos if node.op == "call_function" else "cos"
                if isinstance(module, torch.fx.GraphModule):
                    module.recompile()
            return graph_module

        guard = guarded(cos_for_sin, tmp_path, on_failure="report")
        call = torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.tanh, (x,)), backend=guard)
        call(torch.ones(2))

        assert guard.summary.verdicts == {"diverged": 1}

    def test_what_has_no_backward_has_its_forward_checked(self, tmp_path):
        graph = torch.fx.Graph()
        made = graph.call_function(without_backward, (graph.placeholder("x"),))
        graph.output((graph.call_function(torch.relu, (made,)),))
        guard = guarded(broken.relu_is_off, tmp_path, on_failure="report")
        given = torch.ones(2, requires_grad=True)
        guard(torch.fx.GraphModule(nn.Module(), graph), [given])(given)

        assert guard.summary.verdicts == {"diverged": 1}

    @pytest.mark.parametrize("on_failure", ["report", "fallback"])
    def test_a_finding_stays_one_whatever_later_calls_say(self, tmp_path, on_failure):
        def off_for_large(graph_module, example_inputs):
            return lambda *args: tuple(value + 0.1 * bool(args[0].sum() > 5) for value in graph_module(*args))

        guard = guarded(off_for_large, tmp_path, every=1, on_failure=on_failure)
        compiled = torch.compile(lambda x: torch.sin(x), backend=guard)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for value in (3.0, 0.0, 4.0):
                compiled(torch.full((4,), value))

        (finding,) = guard.summary.findings
        assert finding.call == 1
        report = td.read_report(tmp_path / "guard" / "0001-dynamo" / "report.json")
        assert report.comparisons[0].worst.reference == pytest.approx(math.sin(3.0))

    def test_want_of_memory_for_a_check_is_nobodys_failure(self, tmp_path):
        def hungry(graph_module, example_inputs):
            calls = []

            def run(*args):
                calls.append(None)
                if len(calls) == 1:
                    raise torch.OutOfMemoryError("no more")
                return graph_module(*args)

            return run

        guard = guarded(hungry, tmp_path)
        torch.compile(lambda x: torch.sin(x), backend=guard)(torch.ones(2))

        assert guard.summary.checked == 0
        assert "not enough memory" in next(iter(guard.summary.unchecked))

    def test_a_mistake_of_our_own_does_not_end_the_run(self, tmp_path, monkeypatch):
        def broken_off(*_, **__):
            raise LookupError("nobody thought of this")

        for module, name in ((graphs, "copy_nodes"), (guarded_graph, "prepare")):
            torch._dynamo.reset()
            monkeypatch.setattr(module, name, broken_off)
            guard = guarded("aot_eager", tmp_path)

            assert trained(guard) == trained("aot_eager")
            assert guard.summary.checked == 0
            monkeypatch.undo()

    def test_a_place_that_is_gone_does_not_end_the_run(self, tmp_path):
        guard = guarded(broken.relu_is_off, tmp_path, on_failure="report")
        (tmp_path / "guard").rmdir()

        assert trained(guard) == trained(broken.relu_is_off)
        assert guard.summary.verdicts == {"diverged": 1}
        assert any("could not be written" in note for note in guard.summary.notes)

    def test_a_bug_in_a_backward_graph_is_caught_at_both_levels(self, tmp_path):
        def backward_is_off(graph_module, example_inputs):
            return aot_autograd(
                fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
                bw_compiler=lambda graph, _: make_boxed_func(lambda *args: [value * 1.5 for value in graph(*args)]),
            )(graph_module, example_inputs)

        x = torch.randn(3, requires_grad=True)
        found = {}
        for graph in ("dynamo", "aten"):
            torch._dynamo.reset()
            guard = td.guard(backward_is_off, graph=graph, on_failure="report", out=tmp_path / graph)
            torch.compile(lambda x: torch.sin(x), backend=guard)(x).sum().backward()
            found[graph] = [(seen.level, seen.verdict) for seen in seen_by(guard)]

        assert found == {
            "dynamo": [("dynamo", Verdict.DIVERGED)],
            "aten": [("forward", Verdict.EQUIVALENT), ("backward", Verdict.DIVERGED)],
        }

    def test_only_reporting_changes_nothing_of_the_run(self, tmp_path):
        guard = guarded(broken.relu_is_off, tmp_path, on_failure="report")

        assert trained(guard) == trained(broken.relu_is_off)
        assert guard.summary.verdicts == {"diverged": 1}

    def test_falling_back_goes_on_with_eagers_numbers_and_warns_once(self, tmp_path):
        guard = guarded(broken.relu_is_off, tmp_path, on_failure="fallback")

        with pytest.warns(UserWarning, match="runs eagerly from now on"):
            assert trained(guard) == trained(None)
        # filters make another warning an error
        torch.compile(lambda x: torch.relu(x), backend=guard)(torch.ones(2))
        assert guard.summary.verdicts == {"diverged": 2}

    def test_falling_back_goes_on_where_warnings_are_errors(self, tmp_path):
        guard = guarded(broken.relu_is_off, tmp_path, on_failure="fallback")

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert trained(guard) == trained(None)

    def test_a_compiler_that_raises_is_told_apart_from_a_difference(self, tmp_path):
        with pytest.raises(td.CompilerFailed, match="relu is not supported"):
            trained(guarded(broken.relu_raises, tmp_path))

    def test_a_compiler_that_raises_is_fallen_back_from(self, tmp_path):
        guard = guarded(broken.relu_raises, tmp_path, on_failure="fallback")

        with pytest.warns(UserWarning, match="relu is not supported"):
            assert trained(guard) == trained(None)
        assert guard.summary.verdicts == {"crashed": 1}

    def test_a_compiler_that_raises_does_so_as_without_a_guard_where_only_a_report_is_wanted(self, tmp_path):
        guard = guarded(broken.relu_raises, tmp_path, on_failure="report")

        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="relu is not supported"):
            trained(guard)
        assert guard.summary.verdicts == {"crashed": 1}

    def test_a_compiler_that_raises_behind_aot_does_so_as_without_a_guard(self, tmp_path):
        def raises_behind_aot(graph_module, example_inputs):
            def refuse(graph, inputs):
                raise RuntimeError("no such kernel")

            return aot_autograd(fw_compiler=refuse)(graph_module, example_inputs)

        guard = guarded(raises_behind_aot, tmp_path, graph="aten", on_failure="report")
        with torch._dynamo.config.patch(suppress_errors=True):
            made = torch.compile(lambda x: torch.sin(x), backend=guard)(torch.ones(2))

        assert torch.equal(made, torch.sin(torch.ones(2)))
        assert guard.summary.verdicts == {"crashed": 1}

    def test_a_compiler_that_raises_is_fallen_back_from_although_nothing_can_be_checked(self, tmp_path):
        guard = guarded(broken.relu_raises, tmp_path, on_failure="fallback", budget_s=1e-9)
        given = torch.randn(3, 8)
        torch.compile(lambda x: torch.sin(x), backend=guard)(given)

        with pytest.warns(UserWarning, match="relu is not supported"):
            assert trained(guard) == trained(None)

    def test_what_a_compiler_was_given_when_it_raised_is_let_go_of(self, tmp_path):
        guard = guarded(broken.relu_raises, tmp_path, on_failure="fallback")
        x = torch.randn(4)
        given = weakref.ref(x)
        with pytest.warns(UserWarning, match="relu is not supported"):
            torch.compile(lambda x: torch.relu(x), backend=guard)(x)
        del x
        gc.collect()

        assert given() is None

    @pytest.mark.parametrize("check", ["values", "errors"])
    def test_what_raises_when_it_runs_is_fallen_back_from(self, tmp_path, check):
        def raises_when_run(graph_module, example_inputs):
            def run(*args):
                raise RuntimeError("no such kernel")

            return run

        guard = guarded(raises_when_run, tmp_path, on_failure="fallback", check=check)

        with pytest.warns(UserWarning, match="no such kernel"):
            assert trained(guard) == trained(None)

    def test_what_raises_in_a_later_call_is_fallen_back_from(self, tmp_path):
        calls = []

        def tires(graph_module, example_inputs):
            def run(*args):
                calls.append(len(calls))
                if args[0].sum() > 5:
                    raise RuntimeError("too much")
                return graph_module(*args)

            return run

        guard = guarded(tires, tmp_path, on_failure="fallback")
        compiled = torch.compile(lambda x: torch.sin(x), backend=guard)
        compiled(torch.zeros(4))

        with pytest.warns(UserWarning, match="too much"):
            assert torch.equal(compiled(torch.full((4,), 3.0)), torch.sin(torch.full((4,), 3.0)))

    @pytest.mark.parametrize("check", ["values", "errors"])
    def test_a_mistake_of_the_users_stays_the_users(self, tmp_path, check):
        guard = guarded("aot_eager", tmp_path, check=check)
        compiled = torch.compile(lambda table, rows: table[rows], backend=guard)

        with pytest.raises(IndexError):
            compiled(torch.randn(3), torch.tensor([7]))
        assert guard.summary.checked == 0

    def test_a_bug_of_a_later_call_is_caught_when_it_is_its_turn(self, tmp_path):
        calls = []

        def drifts(graph_module, example_inputs):
            def run(*args):
                calls.append(None)
                return tuple(value + 0.1 * (len(calls) > 3) for value in graph_module(*args))

            return run

        guard = guarded(drifts, tmp_path, every=4, on_failure="report")
        compiled = torch.compile(lambda x: torch.sin(x), backend=guard)
        for _ in range(4):
            compiled(torch.randn(3))

        (finding,) = guard.summary.findings
        assert finding.call == 4

    def test_errors_alone_say_nothing_about_values(self, tmp_path):
        guard = guarded(broken.relu_is_off, tmp_path, check="errors")
        trained(guard)

        assert guard.summary.unchecked == {NO_ERROR: 1}


class TestConfig:
    def test_only_graphs_that_were_asked_for_are_checked(self):
        for only in ((100, 200), lambda graph: False):
            torch._dynamo.reset()
            guard = td.guard(broken.relu_is_off, only=only)
            trained(guard)

            assert guard.summary.checked == 0

    def test_graphs_that_were_asked_for_are_checked(self):
        for only in ((1, 200), lambda graph: True):
            torch._dynamo.reset()
            guard = td.guard("aot_eager", only=only)
            trained(guard)

            assert guard.summary.checked == 1

    def test_nothing_is_checked_when_the_budget_is_spent(self):
        guard = td.guard("aot_eager", budget_s=1e-9)
        compiled = torch.compile(lambda x: torch.sin(x), backend=guard, dynamic=False)
        compiled(torch.randn(2))
        compiled(torch.randn(3))

        assert guard.summary.verdicts == {"equivalent": 1}
        assert guard.summary.unchecked == {"the budget of 1e-09 s was spent": 1}

    def test_off_is_off(self):
        guard = td.guard(broken.relu_is_off, check="off")
        trained(guard)

        assert guard.summary.checked == 0

    def test_guarding_twice_is_refused(self):
        with pytest.raises(td.UsageError, match="guarded already"):
            td.guard(td.guard("aot_eager"))

    def test_guarding_twice_by_a_detour_is_refused(self):
        inner = td.guard("aot_eager")
        outer = td.guard(lambda graph_module, example_inputs: inner(graph_module, example_inputs))

        with pytest.raises(td.UsageError, match="guarded already"):
            outer(symbolic_trace(lambda x: torch.sin(x)), [torch.ones(2)])

    @pytest.mark.parametrize(
        "words",
        [
            {"check": "all"},
            {"on_failure": "ignore"},
            {"record": "never"},
            {"graph": "fx"},
            {"every": -1},
            {"budget_s": 0},
            {"only": (5, 2)},
            {"policy": "nearly"},
            {"seed": -1},
            {"seed": 0.5},
            {"colour": "red"},
        ],
    )
    def test_words_that_make_no_sense_are_refused(self, words):
        with pytest.raises(td.UsageError):
            td.guard("aot_eager", **words)

    def test_a_backend_that_there_is_not_is_refused(self):
        with pytest.raises(td.UsageError, match="aot_eager"):
            td.guard("aot_eagre")

    @pytest.mark.parametrize("level", [1, 2, 3])
    def test_a_preset_below_four_looks_for_errors_only(self, level, tmp_path):
        trained(td.guard.preset(level, broken.relu_is_off, out=tmp_path / "values"))
        torch._dynamo.reset()

        with pytest.raises(td.CompilerFailed):
            trained(td.guard.preset(level, broken.relu_raises, out=tmp_path / "errors", minify=False))

    def test_the_third_preset_alone_records_what_did_not_fail(self, tmp_path):
        for level in (1, 3):
            torch._dynamo.reset()
            trained(td.guard.preset(level, "aot_eager", out=tmp_path / str(level)))

        assert not (tmp_path / "1" / "0001-dynamo").exists()
        assert (tmp_path / "3" / "0001-dynamo" / "recording.json").exists()

    def test_the_second_and_the_fourth_preset_make_small_what_they_find(self):
        assert {level for level, words in PRESETS.items() if words.get("minify")} == {2, 4}

    def test_the_fourth_preset_looks_at_values(self, tmp_path):
        guard = td.guard.preset(4, broken.relu_is_off, on_failure="report", minify=False, out=tmp_path / "guard")
        trained(guard)

        assert guard.summary.verdicts == {"diverged": 1}

    def test_there_are_four_presets(self):
        with pytest.raises(td.UsageError, match="repro level"):
            td.guard.preset(5)


class TestRecords:
    @pytest.mark.slow
    def test_many_graphs_leave_one_index_and_nothing_alive(self, tmp_path):
        guard = guarded("eager", tmp_path)
        given = []
        for number in range(60):
            x = torch.randn(4)
            given.append(weakref.ref(x))
            torch.compile(lambda x, number=number: torch.sin(x) + number, backend=guard)(x)
            torch._dynamo.reset()
            del x
        gc.collect()

        lines = (tmp_path / "guard" / "index.jsonl").read_text().splitlines()
        assert len(lines) == 60
        assert all(json.loads(line)["verdict"] == "equivalent" for line in lines)
        assert [path.name for path in (tmp_path / "guard").iterdir()] == ["index.jsonl"]
        assert not any(reference() is not None for reference in given)

    @pytest.mark.slow
    def test_what_is_found_is_made_small_in_the_background(self, tmp_path):
        guard = guarded(broken.relu_is_off, tmp_path, on_failure="report", minify=True)

        assert trained(guard) == trained(broken.relu_is_off)
        (finding,) = guard.finish().findings
        assert finding.culprit.op == "relu"
        assert pathlib.Path(finding.repro).is_file()

    @pytest.mark.slow
    @pytest.mark.parametrize("when", [pytest.param("compiles", marks=pytest.mark.long), "runs"])
    def test_what_ends_the_process_leaves_behind_what_a_diagnosis_needs(self, tmp_path, when, monkeypatch):
        backend = {"compiles": "relu_segfaults", "runs": "relu_segfaults_when_run"}[when]
        program = f"""
            import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
            import torch, torchdelta as td
            from programs import broken
            guard = td.guard(broken.{backend}, record="always", out="recorded")
            torch.compile(lambda x: torch.relu(torch.sin(x) + 1).exp(), backend=guard)(torch.randn(4))
        """
        died = run_script(tmp_path, program)
        assert died.returncode == -signal.SIGSEGV, died.stderr

        monkeypatch.setattr(trust, "_TRUSTED", [])
        td.trust(pathlib.Path(__file__).parent)
        report = td.diagnose(str(tmp_path / "recorded" / "0001-dynamo"), out=tmp_path / "diagnosis")

        assert report.verdict is Verdict.CRASHED
        assert report.failure.type == "SIGSEGV"
        assert report.reduction.nodes_after == 3
        assert report.repro.confirmed

    def test_a_call_that_is_recorded_and_not_checked_leaves_the_record_to_the_checked_call(self, tmp_path):
        guard = guarded("aot_eager", tmp_path, record="always", every=2, budget_s=1e-9)
        compiled = torch.compile(lambda x: torch.sin(x), backend=guard, dynamic=False)
        for _ in range(2):
            compiled(torch.randn(3))

        (record,) = guard.findings.records.values()
        assert (record.verdict, record.call) == (Verdict.EQUIVALENT, 1)
        assert record.directory == str(tmp_path / "guard" / "0001-dynamo")
        assert (tmp_path / "guard" / "0001-dynamo-2").is_dir()

    def test_a_call_that_cannot_be_recorded_does_not_name_the_recording_of_another(self, tmp_path, monkeypatch):
        guard = guarded("aot_eager", tmp_path, record="always", every=2, check="off")
        compiled = torch.compile(lambda x: torch.sin(x), backend=guard, dynamic=False)
        compiled(torch.randn(3))
        monkeypatch.setattr(guarded_graph.recordings, "write", lambda *_: 1 / 0)
        compiled(torch.randn(3))

        (record,) = guard.findings.records.values()
        assert (record.call, record.directory) == (2, None)

    def test_two_guards_with_one_directory_keep_both_findings(self, tmp_path):
        first, second = (guarded(broken.relu_is_off, tmp_path, on_failure="report") for _ in range(2))
        for guard in (first, second):
            torch._dynamo.reset()
            torch.compile(lambda x: torch.relu(x), backend=guard)(torch.linspace(-1, 1, 5))

        (one,), (other,) = (guard.findings.records.values() for guard in (first, second))
        assert one.directory == str(tmp_path / "guard" / "0001-dynamo")
        assert other.directory == str(tmp_path / "guard" / "0001-dynamo.2")
        for directory in (one.directory, other.directory):
            assert td.read_report(pathlib.Path(directory) / "report.json").verdict is Verdict.DIVERGED

    def test_a_warning_without_a_recording_names_no_place(self, tmp_path):
        for out, where in ((None, ""), (tmp_path, f". Its recording is in {tmp_path}, and so are those of others")):
            with pytest.warns(UserWarning, match="it runs eagerly") as caught:
                GuardFindings(out=out).warn_once("it runs eagerly")
            assert str(caught[0].message) == f"torchdelta: it runs eagerly{where}"

    def test_what_cannot_be_recorded_is_said(self, tmp_path):
        class Opaque:
            def __deepcopy__(self, memo):
                return self

        def program(x, opaque):
            return torch.relu(x)

        guard = guarded(broken.relu_is_off, tmp_path, on_failure="report")
        made = guard(symbolic_trace(program), [torch.ones(2), Opaque()])
        made(torch.ones(2), Opaque())

        assert guard.summary.verdicts == {"diverged": 1}
        assert any("Opaque" in note for note in guard.summary.notes)

    def test_a_directory_that_cannot_be_made_is_refused_at_once(self, tmp_path):
        (tmp_path / "file").write_text("")

        with pytest.raises(td.UsageError, match="name another place"):
            td.guard("eager", out=tmp_path / "file" / "guard")
