"""Corners in which an answer was wrong, a search did not end or a mistake of the user was blamed on torchdelta."""

import operator
import re
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import torchdelta as td
from torchdelta import Verdict
from torchdelta._torch.compile.aot_dispatch import AotTrace
from torchdelta._torch.graphs.lift_graph import lift_graph
from torchdelta._torch.graphs.nodes import may_share, writes_to
from torchdelta._torch.modes.decisions import DecisionRecord, DecisionReplay
from torchdelta._torch.modes.dtype_answers import DtypeRecord, DtypeReplay
from torchdelta._torch.process.exceptions import without_frames
from torchdelta.cli.op_arguments import read_arguments
from torchdelta.compare.contract import Terms
from torchdelta.compare.policy import Judgement
from torchdelta.compare.policy_parser import parse
from torchdelta.compare.statistics import compare_statistics, statistics_of
from torchdelta.errors import ProgramError, ReproUnwritable, UsageError
from torchdelta.guard.compiles import GuardedCompiles
from torchdelta.guard.findings import GuardFindings
from torchdelta.guard.followup import Followup, FollowupCommand
from torchdelta.minify.edits import Edit
from torchdelta.minify.subject import Name
from torchdelta.program.examples import redraw
from torchdelta.program.programs import Program, load_module
from torchdelta.records.guard import GuardedGraphRecord
from torchdelta.repro.script import _wrap


class TestAPassThatFolds:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count.add_(x.mean(0))  # of an operand that is traced: symbolic_trace computes any other write at once
            return self.linear(x) * 2

    @staticmethod
    def fold(graph_module, *, drops_count):
        """Fold the factor into the layer, and leave the write to the buffer out if asked to."""
        with torch.no_grad():
            graph_module.linear.weight.mul_(2)
            graph_module.linear.bias.mul_(2)
        for node in list(graph_module.graph.nodes):
            if node.target is operator.mul:
                node.replace_all_uses_with(node.args[0])
                graph_module.graph.erase_node(node)
            elif drops_count and node.target == "add_":
                graph_module.graph.erase_node(node)
        if drops_count:
            for node in graph_module.graph.find_nodes(op="get_attr", target="count"):
                graph_module.graph.erase_node(node)
            del graph_module.count
        graph_module.recompile()
        return graph_module

    @pytest.mark.parametrize(("drops_count", "verdict"), [(False, Verdict.EQUIVALENT), (True, Verdict.DIVERGED)])
    def test_must_keep_the_state_that_the_program_writes(self, drops_count, verdict):
        report = td.check(
            self.Counting(),
            (torch.randn(2, 3),),
            transform=lambda graph_module: self.fold(graph_module, drops_count=drops_count),
            options={"graph": "symbolic"},
            stages=["forward"],
        )

        assert report.verdict is verdict


class TestAPassThatWidens:
    @staticmethod
    def upcast(graph_module, example_inputs, *, by="float"):
        for node in list(graph_module.graph.nodes):
            if node.target is F.softmax:
                with graph_module.graph.inserting_before(node):
                    wide = graph_module.graph.call_method(by, (node.args[0],))
                node.args = (wide, *node.args[1:])
                with graph_module.graph.inserting_after(node):
                    back = graph_module.graph.call_method("to", (node, example_inputs[0].dtype))
                node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
        graph_module.recompile()
        return graph_module

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_is_the_same_function(self, dtype):
        x, w = torch.randn(16, 32).to(dtype), torch.randn(32, 8).to(dtype)
        program = lambda x, w: F.softmax(x @ w, dim=-1)  # noqa: E731 — a program of one line

        assert td.check(program, (x, w), transform=self.upcast).verdict is Verdict.EQUIVALENT

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_is_another_one_if_it_narrows(self, dtype):
        x, w = torch.randn(16, 32).to(dtype), torch.randn(32, 8).to(dtype)
        program = lambda x, w: F.softmax(x @ w, dim=-1)  # noqa: E731 — a program of one line
        by = "float" if dtype is torch.float64 else "half"

        report = td.check(program, (x, w), transform=lambda *given: self.upcast(*given, by=by))

        assert report.verdict is Verdict.DIVERGED


def test_an_operator_without_float64_that_only_the_candidate_has_is_no_other_function():
    library = torch.library.Library("corners", "DEF")
    library.define("product(Tensor a, Tensor b) -> Tensor")

    def product(a, b):
        if a.dtype is torch.float64:
            raise NotImplementedError("\"product\" not implemented for 'Double'")
        return a @ b

    library.impl("product", product, "CompositeExplicitAutograd")
    library.impl("product", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")
    try:
        x = torch.randn(8, 8)
        report = td.check(
            lambda x: x @ x,
            (x,),
            candidate=lambda x: torch.ops.corners.product(x, x),
            stages=["forward"],
        )
    finally:
        library._destroy()

    assert report.verdict is not Verdict.DIVERGED
    assert "has no float64" in report.questions.semantic


class Negative(nn.Module):
    def forward(self, x):
        return -x


@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.zeros(3, dtype=torch.complex64)])
def test_inputs_that_cannot_be_drawn_otherwise_end_the_draws(value):
    reports = []
    thread = threading.Thread(target=lambda: reports.append(td.check(Negative(), (value,), transform="export")))
    thread.daemon = True
    thread.start()
    thread.join(60)

    assert [report.verdict for report in reports] in ([Verdict.EQUIVALENT], [Verdict.INCONCLUSIVE])


def test_a_failing_optimizer_is_named_and_not_the_iterations():
    calls = []

    def failing(parameters):
        calls.append(1)
        raise ValueError("no such optimizer")

    with pytest.raises(ProgramError, match=r"steps: ValueError: no such optimizer"):
        td.check(nn.Linear(2, 2), (torch.randn(3, 2),), transform="export", stages="steps", optimizer=failing)
    assert len(calls) <= 4


def test_a_loss_that_is_no_tensor_is_the_users_mistake():
    with pytest.raises(ProgramError, match="the loss is a float, and has to be a tensor"):
        td.check(nn.Linear(2, 2), (torch.randn(3, 2),), transform="eager", loss=lambda _: 1.0, stages="gradients")


def test_infinities_among_the_inputs_stay_and_the_largest_integer_can_be_drawn():
    program = Program(
        name="p", call=lambda x, n: (-x, n), args=(torch.tensor([-torch.inf, 0.0, 1.0]), torch.tensor([0, 2**63 - 1]))
    )

    draws = [draw.args for draw in redraw(program, seed=0)]

    assert len(draws) > 1
    assert all(floats[0] == -torch.inf and floats[1:].isfinite().all() for floats, _ in draws)


def test_a_missing_package_of_a_module_is_named(tmp_path, monkeypatch):
    (tmp_path / "missinglib_models.py").write_text("import missinglib\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ProgramError, match="No module named 'missinglib'"):
        load_module("missinglib_models", what="program")


class TestAnEdit:
    def test_that_would_read_a_node_which_is_gone_is_ignored(self):
        from torchdelta.minify.subject import Subject

        module = symbolic_trace(lambda x, w: (x.sigmoid().neg() * w,))
        subject = Subject.of(module, (torch.randn(3), torch.randn(3)))
        gone = Edit(replacements={"mul": Name("there_is_no_such_node")})

        assert gone.apply(subject) is not None


def test_an_input_that_nothing_reads_does_not_end_the_lockstep():
    from torchdelta.nodewise.local import LocalJudge
    from torchdelta.nodewise.lockstep_seam import compare_graphs

    ours = symbolic_trace(lambda x, unused: x.sin())
    theirs = symbolic_trace(lambda x, unused: x.tan())
    x = torch.randn(3)

    comparison = compare_graphs(ours, theirs, [x, x], LocalJudge(seed=0), "given", {"sin": "tan"})

    assert [judgement.culprit.name for judgement in comparison.judgements if judgement.culprit is not None] == ["sin"]


class TestWrites:
    @pytest.mark.parametrize(
        ("function", "writes"),
        [
            (lambda x: F.leaky_relu(x, 0.2, True), True),
            (lambda x: F.leaky_relu(x, 0.2, False), False),
            (lambda x: F.dropout(x, 0.5, True, True), True),
            (lambda x: operator.ifloordiv(x, 2), True),
            (lambda x: operator.ipow(x, 2), True),
            (lambda x: operator.iand(x, x), True),
            (lambda x: operator.invert(x), False),
            (lambda x: operator.add(x, 2), False),
        ],
    )
    def test_are_seen_by_position_and_by_operator(self, function, writes):
        assert writes_to(_call_of(function)) is writes

    @pytest.mark.parametrize("name", ["permute", "narrow", "chunk", "movedim", "unbind", "t"])
    def test_of_views_reach_their_source(self, name):
        graph = Graph()
        x = graph.placeholder("x")

        assert may_share(graph.call_function(getattr(torch, name), (x,)))
        assert not may_share(graph.call_function(torch.sin, (x,)))


def _call_of(function):
    """Return the node of the one call that a function makes, with a recorded call in place of a traced one."""
    from unittest import mock

    calls = []

    def recorder(target):
        def record(*args, **kwargs):
            calls.append((target, args, kwargs))

        return record

    names = ("leaky_relu", "dropout")
    operators = ("ifloordiv", "ipow", "iand", "invert", "add")
    with (
        mock.patch.multiple(F, **{name: recorder(getattr(F, name)) for name in names}),
        mock.patch.multiple(operator, **{name: recorder(getattr(operator, name)) for name in operators}),
    ):
        function("x")
    ((target, args, kwargs),) = calls
    graph = Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, tuple(x if each == "x" else each for each in args), kwargs)


class TestALiftedGraph:
    def test_of_aten_computes_roots_of_integers_in_float64(self):
        graph = Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.arange(1, 5)
        root = graph.call_function(torch.ops.aten.sqrt.default, (x,))
        root.meta["val"] = torch.arange(1, 5).sqrt()
        graph.output(root)
        lifted = lift_graph(GraphModule({}, graph))

        assert torch.equal(lifted(torch.arange(1, 5)), torch.arange(1.0, 5.0, dtype=torch.float64).sqrt())

    def test_leaves_sizes_as_they_are(self):
        graph = Graph()
        x, size = graph.placeholder("x"), graph.placeholder("size")
        x.meta["example_value"], size.meta["example_value"] = torch.arange(1, 5), 4
        mean = graph.call_function(operator.truediv, (x, size))
        mean.meta["example_value"] = torch.arange(1, 5) / 4
        graph.output(mean)
        lifted = lift_graph(GraphModule({}, graph))

        assert torch.equal(lifted(torch.arange(1, 5), 4), torch.arange(1, 5).double() / 4)


class TestReplayedChoices:
    def test_beside_a_mask_constant_are_not_all_within_rounding(self):
        for masked in (-1.0, -1e9, -torch.inf):
            values = torch.tensor([[0.0, 5.0, masked]])
            with DecisionReplay([torch.tensor([0])], unit=2.0**-24):
                assert values.argmax(-1).item() == 1

    def test_of_more_values_are_not_taken_for_fewer(self):
        with DecisionRecord() as record:
            torch.arange(6.0).argmax()
        with DecisionReplay(record.indices):
            assert torch.arange(2.0).argmax().item() == 1


def test_a_cast_that_made_a_copy_natively_makes_one_in_float64():
    def program(x):
        wide = x.double()
        wide += 1
        return x + wide

    with DtypeRecord() as record:
        native = program(torch.ones(2))
    with DtypeReplay(record.answers):
        lifted = program(torch.ones(2, dtype=torch.float64))

    assert torch.equal(native.double(), lifted)


class TestAnAotTrace:
    @staticmethod
    def traced(function):
        from torchdelta._torch.compile.dynamo import Witness

        return AotTrace(function, dynamic=False, partitioner="default", functionalised=True, witness=Witness())

    def test_is_not_used_for_other_strides(self):
        trace = self.traced(lambda x: x + x.stride(0))

        assert trace(torch.zeros(2, 3))[0, 0] == 3
        assert trace(torch.zeros(3, 2).t())[0, 0] == 1

    def test_is_not_used_for_an_input_that_requires_grad(self):
        trace = self.traced(lambda x: x * 2)
        trace(torch.zeros(3))

        assert trace(torch.zeros(3, requires_grad=True)).requires_grad

    def test_that_was_made_without_gradients_is_not_used_where_they_are_on(self):
        trace = self.traced(lambda x: x * 2)
        x = torch.zeros(3, requires_grad=True)
        with torch.no_grad():
            assert not trace(x).requires_grad

        assert trace(x).requires_grad
        with torch.no_grad():
            assert not trace(x).requires_grad
        assert len(trace.traces) == 2

    def test_that_was_made_under_autocast_is_not_used_outside_of_it(self):
        trace = self.traced(lambda x: x @ x)
        x = torch.ones(3, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert trace(x).dtype is torch.bfloat16

        assert trace(x).dtype is torch.float32


def test_an_infinite_error_ranks_first_where_nothing_is_allowed():
    def judged(error, allowed):
        return Judgement(Verdict.DIVERGED, "", error, 0.0, allowed)

    ranks = [judged(1.0, 0.5).rank, judged(2.0, 0.0).rank, judged(float("inf"), 0.0).rank, judged(0.0, 0.0).rank]

    assert max(ranks) in (ranks[1], ranks[2])
    assert min(ranks) == ranks[3]


@pytest.mark.parametrize(("policy", "verdict"), [("sqnr<=35", Verdict.INCONCLUSIVE), ("sqnr>=35", Verdict.DIVERGED)])
def test_statistics_are_judged_by_the_direction_of_a_bound(policy, verdict):
    sides = (statistics_of(torch.ones(3)), statistics_of(2 * torch.ones(3)))

    assert compare_statistics("x", *sides, parse(policy), Terms()).verdict is verdict


def test_integers_that_are_ignored_may_differ_in_statistics_too():
    whole, terms = torch.arange(4), Terms(ignore=frozenset({"integers"}))

    def compared(*sides, terms):
        return compare_statistics("x", *map(statistics_of, sides), parse("noise"), terms)

    ignored = compared(whole, whole + 1, terms=terms)
    assert ignored.verdict is Verdict.EQUIVALENT
    assert [(breach.clause, breach.excused) for breach in ignored.contract] == [("integers", True)]
    assert compared(whole, whole + 1, terms=Terms()).verdict is Verdict.DIVERGED
    assert compared(whole, torch.arange(5), terms=terms).verdict is Verdict.DIVERGED
    assert compared(whole.float(), whole.float() + 1, terms=terms).verdict is Verdict.INCONCLUSIVE


def test_a_bound_beyond_all_numbers_is_judged():
    assert td.compare(torch.ones(3), torch.ones(3) * 2, policy="sqnr>=-7000").verdict is Verdict.EQUIVALENT


def test_a_tensor_has_one_range():
    with pytest.raises(UsageError, match="one range"):
        read_arguments("f32(0, 1)(2, 3)[4]")


def test_a_ctrl_c_while_culprits_are_named_leaves_no_command_behind(tmp_path, monkeypatch):
    line = [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)"]
    monkeypatch.setattr(FollowupCommand, "line", line)
    record = GuardedGraphRecord(
        number=1, name="a", backend="b", level="dynamo", nodes=1, verdict=Verdict.DIVERGED, directory=str(tmp_path)
    )
    findings = GuardFindings(out=tmp_path)
    findings.update(record)
    compiles = GuardedCompiles()
    compiles._findings = findings

    def interrupt(self, record, command):
        self.begin(record, command)
        while not (tmp_path / "locate.log").exists() or not (tmp_path / "locate.log").read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(Followup, "wait_for", interrupt)
    compiles.finish(tell=lambda _: None)

    assert findings.followup.process.wait(timeout=30) != 0
    assert "KeyboardInterrupt" in (tmp_path / "locate.log").read_text()
    assert any("interrupted while culprits were named" in note for note in compiles.summary().notes)
    later = findings.followup.begin(replace(record, directory=str(tmp_path / "later")), "locate")
    assert later.wait(30)
    assert not (tmp_path / "later").exists()


def test_a_followup_whose_directory_is_gone_does_not_end_the_thread(tmp_path, monkeypatch):
    def fail(self):
        raise FileNotFoundError(2, "no such directory")

    monkeypatch.setattr(FollowupCommand, "start", fail)
    followup = Followup()
    records = [SimpleNamespace(directory=str(tmp_path / "gone" / str(number))) for number in range(2)]
    ends = [followup.begin(record, "locate") for record in records]

    assert all(end.wait(10) for end in ends)


def test_frames_of_a_context_beside_a_cause_are_dropped_too():
    def fail():
        try:
            try:
                raise KeyError("context")
            except KeyError:
                raise ValueError("error") from IndexError("cause")
        except ValueError as error:
            return error

    error = without_frames(fail())

    assert error.__traceback__ is None
    assert error.__context__.__traceback__ is None


class TestAScript:
    def test_does_not_break_a_line_in_a_text(self):
        text = "value = 'one two  three ' + " + " + ".join(f"'{'word ' * 8}{index}'" for index in range(6))

        assert eval(" ".join(line.strip() for line in _wrap(text))[8:]) == eval(text[8:])
        assert max(map(len, _wrap(text))) < len(text)

    def test_has_no_control_characters_in_its_docstring(self):
        from torchdelta.repro.issue import _escape

        compile(f'"""{_escape("a" + chr(0) + "b" + chr(27) + "c")}"""', "script", "exec")
        assert re.search(r"\\\\x00", _escape("a\0b"))

    def test_keeps_a_conjugate_that_shares_memory(self):
        from torchdelta.repro.values import write_tensors

        x = torch.tensor([1 + 2j, 3 - 1j])
        source = write_tensors({"x": x, "y": x.conj()}, data=True)
        names = {"torch": torch}
        exec("\n".join(source.setup), names)
        written = {name: eval(expression, names) for name, expression in source.expressions.items()}

        assert torch.equal(written["x"], x)
        assert torch.equal(written["y"], x.conj())

    def test_refuses_memory_that_is_negated_in_part(self):
        from torchdelta.repro.values import write_tensors

        x = torch.tensor([1 + 2j, 3 - 1j])
        with pytest.raises(ReproUnwritable, match="negated"):
            write_tensors({"x": torch.view_as_real(x)[..., 1], "y": x.conj().imag}, data=True)


class TestAThoroughCheckInFloat64:
    def test_is_left_out_where_float64_could_not_be_asked(self):
        def other_in_float64(graph_module, example_inputs):
            for node in list(graph_module.graph.nodes):
                if node.target is torch.tanh and example_inputs[0].dtype is torch.float64:
                    with graph_module.graph.inserting_after(node):
                        scaled = graph_module.graph.call_function(torch.mul, (node, 1.5))
                    node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
                elif node.target is operator.add:
                    node.args = (node.args[1], node.args[0])
            graph_module.recompile()
            return graph_module

        report = td.check(lambda x: torch.tanh(x) + x, (torch.randn(4, 8),), transform=other_in_float64, thorough=True)

        assert report.questions.semantic.startswith("not asked")
        assert report.verdict is Verdict.EQUIVALENT


class TestManyElementsOfOneDecision:
    def test_are_one_decision(self):
        generator = torch.Generator().manual_seed(0)
        x, w = torch.randn(64, 256, generator=generator), torch.randn(256, generator=generator)
        x[0] -= (x[0] @ w) / (w @ w) * w  # the sum of this row is rounding alone

        def mask(sums):
            return (sums > 0)[:, None].expand(64, 512)

        for sign in (1, -1):
            report = td.check(
                lambda x, w, sign=sign: mask((x @ w) * sign),
                (x, w),
                candidate=lambda x, w, sign=sign: mask((x * w).sum(-1) * sign),
            )
            assert report.verdict is not Verdict.DIVERGED

    def test_of_a_sort_of_equal_values_may_come_in_any_order(self):
        generator = torch.Generator().manual_seed(0)
        x, w = torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
        report = td.check(
            lambda x, w: torch.relu(x @ w).sort(stable=True).indices,
            (x, w),
            candidate=lambda x, w: torch.relu(x @ w).flip(-1).sort(stable=True).indices.neg().add(63),
        )

        assert report.stages[0].comparisons[0].measurement.mismatches > 100
        assert report.verdict is Verdict.INCONCLUSIVE


class TestAShapeThatDependsOnData:
    @staticmethod
    def matrices():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(4096, 64, generator=generator).bfloat16(), torch.randn(64, generator=generator).bfloat16()

    def test_may_not_change_on_another_axis(self):
        x, w = self.matrices()
        report = td.check(
            lambda x, w: x[(x @ w) > 0], (x, w), candidate=lambda x, w: x[((x.double() @ w.double()) > 0)][:, :62]
        )

        assert report.verdict is Verdict.DIVERGED

    def test_that_differs_in_float64_too_is_another_function(self):
        x, w = self.matrices()
        report = td.check(lambda x, w: x[(x @ w) > 0], (x, w), candidate=lambda x, w: x[(x @ w) > 0][:-3])

        assert report.verdict is Verdict.DIVERGED


class TestAPassOnAProgramThatNamesFloat32:
    def test_leaves_the_programs_own_dtypes_alone(self):
        def swapped(graph_module, example_inputs):
            for node in graph_module.graph.nodes:
                if node.target is torch.ops.aten.add.Tensor:
                    node.args = (node.args[1], node.args[0])
            graph_module.recompile()
            return graph_module

        def program(x):
            return torch.tanh(x) + torch.rand_like(x, dtype=torch.float32).to(x.dtype)

        report = td.check(program, (torch.randn(64).bfloat16(),), transform=swapped, options={"graph": "export"})

        assert report.verdict is Verdict.EQUIVALENT

    def test_has_no_memory_of_another_program(self):
        from torchdelta.transforms.fx_pass import FxPass

        one = FxPass(TestAPassThatWidens.upcast, {})
        x, w = torch.randn(16, 32), torch.randn(32, 8)
        td.check(lambda x, w: F.softmax(x.double() @ w.double(), dim=-1).float(), (x, w), transform=one)

        report = td.check(lambda x, w: F.softmax(x @ w, dim=-1), (x.bfloat16(), w.bfloat16()), transform=one)

        assert report.verdict is Verdict.EQUIVALENT


def test_operators_that_are_wrong_before_the_candidate_are_not_blamed_on_it():
    library = torch.library.Library("aten", "IMPL")
    library.impl("abs", torch.zeros_like, "CPU")
    try:
        with pytest.raises(td.EnvironmentUnfit, match="before the candidate runs"):
            td.check(lambda x: x + 1, (torch.ones(3),), candidate=lambda x: 1 + x)
    finally:
        library._destroy()


def test_inplace_is_seen_through_keywords_of_any_name():
    def function(x, **settings):
        return x

    graph = Graph()
    x = graph.placeholder("x")

    assert writes_to(graph.call_function(function, (x,), {"inplace": True}))
    assert not writes_to(graph.call_function(function, (x,), {"inplace": False}))
