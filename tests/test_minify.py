"""The smallest graph that fails in the same way, whatever that way is."""

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import torchdelta as td
from programs import broken, reports
from torchdelta import Verdict
from torchdelta.check.check import Check
from torchdelta.errors import UsageError
from torchdelta.isolate.pool import Query
from torchdelta.isolate.supervisor import Outcome
from torchdelta.minify import capture, queries
from torchdelta.minify import result as minified_of
from torchdelta.minify.edits import Edit, merge_edits
from torchdelta.minify.passes import PASSES, STRATEGIES
from torchdelta.minify.reducer import REPEATS, Budget, FlakyFailure, Reducer
from torchdelta.minify.search import Answer, Search
from torchdelta.minify.speculation import Speculation
from torchdelta.minify.subject import Draw, Name, Subject
from torchdelta.records.case import Case
from torchdelta.records.codec import encode
from torchdelta.records.failure import Failure, Signature
from torchdelta.records.report import Stage
from torchdelta.repro.confirm import confirm

# the package's own `diagnose` is the function
DIAGNOSE = importlib.import_module("torchdelta.diagnose")

WANTED = Signature(kind="exception", stage="forward", type="RuntimeError", message="A")
OTHER = Signature(kind="exception", stage="forward", type="RuntimeError", message="B")


OFF = "programs.broken:relu_is_off"


def subject_of(function, *inputs):
    return Subject.of(symbolic_trace(function), inputs)


def ops(graph_module):
    """Return what a graph calls, by short names."""
    named = (node for node in graph_module.graph.nodes if node.op not in ("placeholder", "output", "get_attr"))
    return [getattr(node.target, "__name__", str(node.target)) for node in named]


def reduced(subject, is_failing, **options):
    """Reduce by an oracle in this process; return the reducer and the smallest subject."""

    def ask(asked):
        try:
            asked.values  # noqa: B018 — runs it
        except RuntimeError:
            return Answer()
        seen = is_failing(asked)
        signatures = seen if isinstance(seen, tuple) else (WANTED,) if seen else ()
        return Answer(signatures=signatures, has_passed=not signatures)

    reducer = Reducer(ask=ask, wanted=WANTED, **options)
    return reducer, reducer.run(subject, Answer(signatures=(WANTED,)), strategies=STRATEGIES, passes=PASSES)


class SlowPool:
    """Who is asked several things at once, and answers only when there is nothing else to ask, or nobody to ask it."""

    def __init__(self, is_failing, workers=2):
        self.is_failing, self.workers = is_failing, workers
        self.begun, self.ahead = [], {}

    @property
    def unused_count(self):
        return len(self.ahead)

    def begin(self, subject):
        self.begun.append(ops(subject.graph))
        shown = (WANTED,) if self.is_failing(subject) else ()
        return SlowAnswer(Answer(signatures=shown, has_passed=not shown))

    def find(self, subject):
        return self.now if subject.key == self.key else self.ahead.get(subject.key)

    def ask(self, subject, foresee):
        self.now, self.key = self.ahead.pop(subject.key, None) or self.begin(subject), subject.key
        while not self.now.is_there:
            at_work = [asked for asked in (self.now, *self.ahead.values()) if not asked.is_there]
            if len(at_work) < self.workers and (foreseen := foresee()) is not None:
                self.ahead[foreseen.key] = self.begin(foreseen)
            else:
                at_work[-1].is_there = True
        return self.now()

    def __call__(self, subject):
        return self.ask(subject, lambda: None)


class SlowAnswer:
    def __init__(self, answer):
        self.answer, self.is_there = answer, False

    def is_done(self):
        return self.is_there

    def __call__(self):
        return self.answer


def reduced_by_pool(subject, is_failing, workers=2, **options):
    pool = SlowPool(is_failing, workers)
    reducer = Reducer(ask=pool, pool=pool, wanted=WANTED, **options)
    return pool, reducer.run(subject, Answer(signatures=(WANTED,)), strategies=STRATEGIES, passes=PASSES)


def captured_graph(function, *args):
    """Return the graph that dynamo captures."""
    found = []

    def keep(graph_module, _):
        found.append(graph_module)
        return graph_module.forward

    torch.compile(function, backend=keep)(*args)
    return found[0]


class TestSubject:
    def test_a_constant_of_the_graph_is_an_input(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))

            def forward(self, x):
                return x * self.weight

        subject = subject_of(Scaled(), torch.ones(3))

        assert [node.op for node in subject.graph.graph.nodes] == [
            "placeholder",
            "placeholder",
            "call_function",
            "output",
        ]
        assert torch.equal(subject.graph(*subject.inputs)[0], torch.ones(3))

    def test_values_are_those_before_anything_wrote_to_them(self):
        def program(x):
            y = x + 1
            y.mul_(5)
            return y

        subject = subject_of(program, torch.zeros(2))

        assert subject.values["add"].tolist() == [1, 1]
        assert subject.values["mul_"].tolist() == [5, 5]
        assert subject.inputs[0].tolist() == [0, 0]

    def test_two_of_the_same_have_the_same_key_whatever_their_nodes_are_called(self):
        one = subject_of(lambda x: torch.sin(x), torch.ones(2))
        other = subject_of(lambda value: torch.sin(value), torch.ones(2))

        assert one.key == other.key
        assert one.key != subject_of(lambda x: torch.cos(x), torch.ones(2)).key
        assert one.key != subject_of(lambda x: torch.sin(x), torch.zeros(2)).key
        assert one.key != subject_of(lambda x: torch.sin(x), torch.ones(2, requires_grad=True)).key

    def test_comes_back_from_files(self, tmp_path):
        shared = torch.randn(4, 4)
        subject = subject_of(lambda x, y, n: torch.cat([x, y]) * n, shared[:2].t(), shared[1:3].t().requires_grad_(), 3)
        subject.write(tmp_path)
        read = Subject.read(tmp_path)

        assert read.key == subject.key
        assert read.inputs[0].stride() == subject.inputs[0].stride()
        assert read.inputs[1].requires_grad
        assert read.inputs[0].untyped_storage().data_ptr() == read.inputs[1].untyped_storage().data_ptr()


class TestEdits:
    subject = subject_of(lambda x, y: torch.cos(torch.sin(x) + y), torch.ones(2), torch.ones(2))

    def test_a_cut_gives_readers_the_value_of_the_reference(self):
        made = Edit(cut=frozenset({"add"})).apply(self.subject)

        assert ops(made.graph) == ["cos"]
        assert torch.equal(made.inputs[0], torch.sin(torch.ones(2)) + 1)

    def test_a_node_that_is_returned_stays_behind_a_cut(self):
        made = Edit(cut=frozenset({"sin"}), outputs=("sin", "add")).apply(self.subject)

        assert ops(made.graph) == ["sin", "add"]
        assert len(made.inputs) == 3

    def test_an_operand_stands_for_an_operation(self):
        made = Edit(replacements={"add": Name("sin")}).apply(self.subject)

        assert ops(made.graph) == ["sin", "cos"]
        assert len(made.inputs) == 1

    def test_what_several_change_is_changed_by_their_merger(self):
        made = merge_edits([Edit(cut=frozenset({"sin"})), Edit(replacements={"cos": Name("add")})]).apply(self.subject)

        assert ops(made.graph) == ["add"]

    def test_nothing_is_left_of_a_subject_that_returns_nothing(self):
        assert Edit(outputs=()).apply(self.subject) is None

    def test_what_writes_stays_until_it_is_dropped(self):
        def program(x, y):
            x.add_(1)
            return torch.sin(y)

        subject = subject_of(program, torch.ones(2), torch.ones(2))

        assert ops(Edit(outputs=("sin",)).apply(subject).graph) == ["add_", "sin"]
        assert ops(Edit(dropped=frozenset({"add_"})).apply(subject).graph) == ["sin"]

    def test_sizes_change_in_inputs_and_in_what_nodes_are_called_with(self):
        subject = subject_of(lambda x: x.view(24).reshape(4, 6), torch.arange(24.0).view(4, 6))
        made = Edit(sizes={6: 2}).apply(subject)

        assert made.graph(*made.inputs)[0].tolist() == [[0, 1], [6, 7], [12, 13], [18, 19]]


class TestReducer:
    def test_ends_at_the_one_operation_that_fails(self):
        subject = subject_of(lambda x: torch.cos(torch.relu(torch.sin(x)).exp()).tanh(), torch.randn(8, 4))
        reducer, small = reduced(subject, lambda asked: "relu" in ops(asked.graph))

        assert ops(small.graph) == ["relu"]
        assert small.size == 3
        assert reducer.is_minimal
        assert small.inputs[0].shape == (2, 2)

    def test_ends_at_two_that_fail_only_together(self):
        def fails(asked):
            return any(
                node.target is torch.cos and node.args[0].op != "placeholder" and node.args[0].target is torch.sin
                for node in asked.nodes
            )

        subject = subject_of(lambda x: torch.exp(torch.cos(torch.sin(x.tanh() + 1)).abs() * 2), torch.randn(3))
        _, small = reduced(subject, fails)

        assert ops(small.graph) == ["sin", "cos"]

    def test_ends_at_two_that_are_far_apart(self):
        def program(x):
            for _ in range(10):
                x = torch.relu(torch.sin(x)) + 1
            return torch.floor(x)

        subject = subject_of(lambda x: torch.ceil(program(torch.round(x))), torch.randn(3))
        _, small = reduced(subject, lambda asked: {"round", "ceil"} <= set(ops(asked.graph)))

        assert sorted(ops(small.graph)) == ["ceil", "round"]

    @pytest.mark.parametrize(("failing", "refused"), [("relu", []), ("cos", [["relu"]]), ("sin", [["relu"], ["cos"]])])
    def test_of_operations_that_say_nothing_rare_ones_are_asked_about_first(self, failing, refused):
        asked = []

        def fails(subject):
            asked.append(ops(subject.graph))
            return failing in asked[-1]

        subject = subject_of(lambda x: x.sin().cos().sin().cos().sin().relu(), torch.randn(8, 8))
        reduced(subject, fails)

        assert asked[:1] == [["sin", "cos", "relu"]]
        assert [each for each in asked[1:] if failing not in each] == refused

    def test_what_was_asked_about_together_is_suspected_last(self):
        asked = []

        def fails(subject):
            asked.append([node.name for node in subject.nodes])
            return "sin_2" in asked[-1]

        subject = subject_of(lambda x: x.sin().cos().sin().relu().sin().exp(), torch.randn(8, 8))
        reduced(subject, fails)

        # one of each kind passes, and all together fail: the two that were not in the first are the first half's
        assert asked[:3] == [
            ["sin", "cos", "relu", "exp"],
            ["sin", "cos", "sin_1", "relu", "sin_2", "exp"],
            ["sin", "sin_1", "sin_2"],
        ]

    def test_the_same_operations_are_the_same_question_in_whatever_order(self):
        asked = []

        def fails(subject):
            asked.append((sorted(ops(subject.graph)), len(subject.outputs)))
            return {"exp", "sin"} <= set(ops(subject.graph))

        subject = subject_of(lambda x: x.cos().sin().cos().exp().exp().exp().tanh().tanh().tanh(), torch.randn(8, 8))
        reduced(subject, fails)

        assert asked.count((["cos", "sin"], 2)) == 1

    def test_an_operation_may_have_the_name_of_what_is_given(self):
        graph = torch.fx.Graph()
        value = graph.placeholder("x")
        for name, function in {"a": torch.sin, "a_given": torch.cos, "b": torch.relu, "c": torch.exp}.items():
            value = graph.create_node("call_function", function, (value,), name=name)
        graph.output(value)
        subject = Subject.of(torch.fx.GraphModule(nn.Module(), graph), (torch.randn(8, 8),))
        _, small = reduced(subject, lambda asked: "cos" in ops(asked.graph))

        assert ops(small.graph) == ["cos"]

    def test_another_failure_is_noted_and_never_followed(self):
        def seen(asked):
            called = ops(asked.graph)
            if "sin" in called and "relu" in called:
                return (WANTED,)
            return (OTHER,) if "sin" in called else ()

        reducer, small = reduced(subject_of(lambda x: torch.relu(torch.sin(x.exp())).tanh(), torch.randn(2)), seen)

        assert ops(small.graph) == ["sin", "relu"]
        assert OTHER in reducer.also_seen

    def test_a_dead_random_operation_of_many_results_goes(self):
        def program(x):
            torch.ops.aten.native_dropout(x, 0.5, True)
            return torch.relu(x)

        _, small = reduced(subject_of(program, torch.randn(2)), lambda asked: "relu" in ops(asked.graph))

        assert ops(small.graph) == ["relu"]

    def test_numbers_that_are_only_sizes_become_literals(self):
        def program(x, y):
            return x.view(y.size(0), y.size(1))

        subject = subject_of(program, torch.randn(4), torch.randn(2, 2))
        _, small = reduced(subject, lambda asked: "view" in ops(asked.graph))

        assert ops(small.graph) == ["view"]
        assert len(small.inputs) == 1

    def test_values_become_plain_where_the_failure_survives_that(self):
        subject = subject_of(
            lambda table, rows: torch.relu(table[rows]), torch.randn(4, 2, dtype=torch.float64), torch.tensor([3, 1])
        )
        _, small = reduced(subject, lambda asked: {"getitem", "relu"} <= set(ops(asked.graph)))

        assert [value.dtype for value in small.inputs] == [torch.float32, torch.int64]
        assert small.inputs[1].tolist() == [0, 0]
        assert small.drawn == {"table": Draw(by="randn"), "rows": Draw(by="zeros")}
        assert small.drawn["rows"].text(small.inputs[1]) == "torch.zeros((2,), dtype=torch.int64)"
        assert torch.equal(eval(small.drawn["table"].text(small.inputs[0])), small.inputs[0])

    def test_what_needs_much_of_something_is_halved_until_it_fails_no_more(self):
        subject = subject_of(lambda x: torch.relu(x), torch.ones(2, 16, 128))
        reducer, small = reduced(subject, lambda asked: asked.inputs[0].numel() >= 1024)

        assert small.inputs[0].numel() == 1024
        # twice whether it comes again; random and small, random; halved twice, each halved; and nothing of it once more
        assert reducer.queries == REPEATS + 2 + 2 + 2

    def test_what_only_the_graph_decides_takes_one_query_for_all_values(self):
        subject = subject_of(lambda x, rows: torch.take(x, rows), torch.ones(8, 4), torch.tensor([1, 1, 1]))
        reducer, small = reduced(subject, lambda asked: "take" in ops(asked.graph))

        assert [tuple(value.shape) for value in small.inputs] == [(2, 2), (2,)]
        assert set(small.drawn) == {"x", "rows"}
        assert reducer.queries == REPEATS + 1

    def test_a_size_that_has_to_stay_holds_up_no_other(self):
        subject = subject_of(lambda x: torch.relu(x), torch.randn(48, 16, 5))
        _, small = reduced(subject, lambda asked: asked.inputs[0].shape[1] == 16)

        assert small.inputs[0].shape == (2, 16, 2)

    def test_random_numbers_do_not_tell_which_way_a_subject_came(self):
        subject = subject_of(lambda x: torch.relu(x), torch.randn(8, 4))
        drawn, small = Edit(draws={"x": Draw(by="randn")}), Edit(sizes={8: 2})
        first = small.apply(drawn.apply(subject))

        assert first.key == drawn.apply(small.apply(subject)).key
        assert first.key != small.apply(subject).key

    def test_values_that_the_failure_needs_stay(self):
        subject = subject_of(lambda rows: torch.relu(rows), torch.tensor([3, 1]))
        _, small = reduced(subject, lambda asked: 3 in asked.inputs[0].tolist() and "relu" in ops(asked.graph))

        assert small.inputs[0].tolist() == [3, 1]

    def test_stops_when_its_budget_is_spent_and_has_the_best_so_far(self):
        subject = subject_of(lambda x: torch.cos(torch.relu(torch.sin(x)).exp()).tanh(), torch.randn(8, 4))
        reducer, small = reduced(subject, lambda asked: "relu" in ops(asked.graph), budget=Budget(queries=2))

        assert reducer.queries == 2  # both showed it, and none was refused: it has come again
        assert not reducer.is_minimal
        assert small.size < subject.size

    def test_asks_nothing_again_but_twice_whether_the_failure_comes_again(self):
        asked = []

        def fails(subject):
            asked.append(subject.key)
            return "relu" in ops(subject.graph)

        reduced(subject_of(lambda x: torch.cos(torch.relu(torch.sin(x)).exp()).tanh(), torch.randn(8, 4)), fails)

        assert len(asked) == len(set(asked)) + 2

    def test_what_was_never_refused_has_come_again_already(self):
        asked = []

        def fails(subject):
            asked.append(subject.key)
            return "relu" in ops(subject.graph)

        _, small = reduced(subject_of(lambda x: torch.relu(x).exp().tanh().cos(), torch.randn(8, 4)), fails)

        assert ops(small.graph) == ["relu"]
        assert len(asked) == len(set(asked))

    def test_what_does_not_come_again_is_not_followed_in_small_steps(self):
        shown = iter([True])

        with pytest.raises(FlakyFailure):
            reduced(
                subject_of(lambda x: torch.relu(x).exp().tanh().cos(), torch.randn(8, 4)), lambda _: next(shown, False)
            )

    @pytest.mark.parametrize("good", range(4))
    def test_queries_that_break_sooner_or_later_lose_nothing(self, good):
        left = iter(range(good))

        def fails(subject):
            next(left)
            return "relu" in ops(subject.graph)

        def broken_off(subject):
            try:
                return fails(subject)
            except StopIteration:
                raise OSError("no worker") from None

        subject = subject_of(lambda x: torch.relu(x.sin().exp()).cos().tanh(), torch.randn(8, 4))
        reducer, small = reduced(subject, broken_off)

        assert small.size <= subject.size
        assert not reducer.is_minimal

    @pytest.mark.parametrize("queries", [1, 2, 4])
    def test_a_spent_budget_is_no_reason_to_believe_that_it_comes_each_time(self, queries):
        times = iter(range(100))
        subject = subject_of(lambda x: torch.relu(x.sin().exp()).cos().tanh(), torch.randn(8, 4))

        with pytest.raises(FlakyFailure):
            reduced(subject, lambda _: next(times) % 3 == 2, budget=Budget(queries=queries))

    def test_a_query_that_breaks_says_nothing_about_whether_the_failure_comes_again(self):
        asked = []

        def fails(subject):
            asked.append(subject.key)
            if len(asked) > len(set(asked)):
                raise OSError("no worker")
            return "relu" in ops(subject.graph)

        _, small = reduced(subject_of(lambda x: torch.relu(x.sin()).exp(), torch.randn(8, 4)), fails)

        assert ops(small.graph) == ["relu"]


class TestForesight:
    @pytest.mark.parametrize("workers", [1, 2, 3, 5])
    @pytest.mark.parametrize("failing", ["cos", "sin", "relu", "tanh", "exp"])
    def test_guesses_change_nothing_but_the_time_it_takes(self, failing, workers):
        def is_failing(asked):
            return failing in ops(asked.graph)

        subject = subject_of(lambda x: torch.exp(torch.tanh(torch.relu(torch.sin(torch.cos(x))))), torch.randn(8, 8))
        pool, small = reduced_by_pool(subject, is_failing, workers)
        alone, expected = reduced(subject, is_failing)

        assert small.key == expected.key
        assert len(pool.begun) <= alone.queries + 2 * (workers - 1)

    def test_the_first_small_step_is_asked_beside_the_last_leap(self):
        subject = subject_of(lambda x: x.cos().sin().relu().cos().sin().relu(), torch.randn(8, 8))
        pool, _ = reduced_by_pool(subject, lambda asked: "relu" in ops(asked.graph), workers=3)

        # one of each kind; the first, second and third of them at once; and once it is clear that it is the third, its
        # first small step and twice whether it comes again
        assert pool.begun == [["cos", "sin", "relu"], ["cos"], ["sin"], ["relu"], ["relu"], ["relu"], ["relu"]]

    def test_what_is_rarest_is_the_one_to_bet_on(self):
        subject = subject_of(lambda x: x.cos().sin().cos().relu().sin(), torch.randn(8, 8))
        pool, _ = reduced_by_pool(subject, lambda asked: "relu" in ops(asked.graph))

        # one of each kind, the rarest, and its first small step beside it; that was never refused, so it has come again
        assert pool.begun == [["cos", "sin", "relu"], ["relu"], ["relu"]]

    def test_what_was_answered_meanwhile_is_followed_before_the_rest_is_there(self):
        asked, answers = [], {}
        subject = subject_of(lambda x: x.cos().sin().relu().cos().sin().relu(), torch.randn(8, 8))
        search = Search(subject=subject, answer=Answer(), wanted=WANTED)
        foresight = Speculation(
            find=lambda subject: answers.get(subject.key), search=search, strategies=STRATEGIES, passes=PASSES
        )
        while (foreseen := foresight()) is not None and len(asked) < 5:
            asked.append((ops(foreseen.graph), tuple(foreseen.inputs[0].shape)))
            shown = (WANTED,) if "relu" in ops(foreseen.graph) else ()
            answers[foreseen.key] = SlowAnswer(Answer(signatures=shown))
            answers[foreseen.key].is_there = True

        assert asked == [
            (["cos", "sin", "relu"], (8, 8)),
            (["cos"], (8, 8)),
            (["sin"], (8, 8)),
            (["relu"], (8, 8)),
            (["relu"], (2, 2)),
        ]
        assert search.subject is subject

    def test_what_broke_tells_nothing(self):
        class Broken(SlowAnswer):
            def __call__(self):
                raise OSError("no worker")

        broken = Broken(None)
        broken.is_there = True
        subject = subject_of(lambda x: torch.relu(torch.sin(torch.sin(torch.cos(x)))), torch.randn(8, 8))
        search = Search(subject=subject, answer=Answer(), wanted=WANTED)

        assert Speculation(find=lambda _: broken, search=search, strategies=STRATEGIES, passes=PASSES)() is None

    @pytest.mark.parametrize("queries", [2, 3, 4, 5])
    def test_no_more_is_asked_ahead_than_the_budget_allows(self, queries):
        subject = subject_of(lambda x: torch.relu(torch.sin(torch.sin(torch.cos(x)))), torch.randn(8, 8))
        budget = Budget(queries=queries)
        pool, _ = reduced_by_pool(subject, lambda asked: "relu" in ops(asked.graph), workers=5, budget=budget)

        # whether it comes again is not a question of the budget
        assert len(pool.begun) <= queries + REPEATS

    def test_what_it_will_end_with_is_told_before_it_is_known_whether_it_comes_each_time(self):
        told = []
        subject = subject_of(lambda x: torch.relu(torch.sin(torch.sin(torch.cos(x)))), torch.randn(8, 8))
        _, small = reduced_by_pool(
            subject, lambda asked: "relu" in ops(asked.graph), on_likely_result=lambda subject, _: told.append(subject)
        )

        assert told == [small]


class FakePool:
    """Takes queries, and leaves it to the test when each has its outcome."""

    workers = 2

    def __init__(self, directory):
        self.directory, self.futures = directory, []

    def submit(self, task, request, **limits):
        self.futures.append(Future())
        return Query(place=None, future=self.futures[-1], is_cancelled=threading.Event())

    def answer(self, number):
        report = encode(reports.report(Stage.of("forward", (reports.comparison("outputs"),))))
        self.futures[number].set_result(Outcome(answer={"report": report}))

    def break_off(self, number):
        failure = Failure.of_exception("OSError", "no room", stage="")
        self.futures[number].set_result(Outcome(failure=failure))


class TestAsking:
    one, other, third = (
        subject_of(function, torch.ones(2)) for function in (lambda x: x.sin(), lambda x: x.cos(), lambda x: x.exp())
    )

    @pytest.fixture
    def pool(self, tmp_path):
        return FakePool(tmp_path)

    @pytest.fixture
    def ask(self, pool):
        workers = queries.WorkerOracle(pool=pool, case=Case(program="subject", transform="inductor"), timeout_s=1.0)
        yield workers
        workers.end()

    def test_a_worker_with_nothing_to_do_is_asked_what_is_foreseen(self, ask, pool):
        foreseen = iter([self.other])

        def foresee():
            found = next(foreseen, None)
            if found is None:
                pool.answer(0)
            return found

        pool.workers = 3
        assert ask.ask(self.one, foresee).has_passed
        assert ask.find(self.other) is not None
        assert ask.find(self.one) is not None
        assert ask.find(self.third) is None
        pool.answer(1)
        assert ask(self.other).has_passed
        assert ask.begun == 2

    def test_what_was_asked_by_another_case_is_asked_again(self, ask, pool):
        ask.ahead[self.one.key] = ask.begin(self.one, replace(ask.case, stages=("forward",)))
        pool.answer(0)

        assert ask.find(self.one) is None
        assert ask.find(self.one, replace(ask.case, stages=("forward",))) is not None

    def test_a_guess_that_cannot_be_made_says_nothing_about_what_is_needed(self, ask, pool):
        def foresee():
            pool.answer(0)
            raise OSError("no room")

        assert ask.ask(self.one, foresee).has_passed

    def test_what_broke_says_so_each_time(self, ask, pool):
        pending = ask.begin(self.one)
        pool.break_off(0)

        for _ in range(2):
            with pytest.raises(RuntimeError, match="no room"):
                pending()
        assert not list(pool.directory.iterdir())

    def test_of_what_is_given_up_nothing_is_left_once_it_has_ended(self, ask, pool):
        ask.ahead[self.one.key] = ask.begin(self.one)
        pool.futures[0].set_running_or_notify_cancel()
        begun = ask._needed(self.other)

        assert ask.find(self.one) is None
        assert len(list(pool.directory.iterdir())) == 2
        pool.answer(0)
        ask.begin(self.third)
        assert len(list(pool.directory.iterdir())) == 2
        assert len(ask.at_work) == 2
        pool.answer(1)
        assert begun().has_passed


def minified(factory, transform, **options):
    program, args = factory()
    return td.minify(program, args, transform=transform, isolated=False, semantic=False, **options)


class TestMinify:
    def test_a_difference(self):
        small = minified(broken.stack, broken.relu_is_off)

        assert ops(small.graph) == ["relu"]
        assert small.report.verdict is Verdict.DIVERGED
        assert small.reduction.is_minimal

    def test_the_larger_graphs_of_a_reduction_are_not_minimal(self):
        larger = list(minified(broken.stack, broken.relu_is_off).fallbacks())

        assert larger
        assert not any(each.reduction.is_minimal for each in larger)

    def test_an_exception(self):
        small = minified(broken.stack, broken.relu_raises)

        assert ops(small.graph) == ["relu"]
        assert "relu is not supported" in small.report.failure.message

    def test_a_pass_that_is_right_has_nothing_to_minify(self):
        with pytest.raises(td.NothingToMinify, match="none of the 1 graphs"):
            minified(broken.stack, broken.healthy)

    def test_what_is_wrong_only_together_is_widened_to(self):
        small = minified(broken.fused, broken.fused_wrongly)

        assert ops(small.graph) == ["mul", "add"]

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(20))
    def test_never_ends_on_another_bug(self, seed):
        small = minified(lambda: broken.random_program(seed), broken.two_bugs)

        assert ops(small.graph) == ["relu"]
        assert "A: relu" in small.report.failure.message

    def test_what_is_wrong_only_in_the_backward_graph(self):
        small = minified(broken.stack, broken.wrong_backward, options={"graph": "aten"})

        assert ops(small.graph) == ["relu"]
        assert small.signature.stage == "gradients"

    def test_what_is_wrong_only_with_dynamic_shapes(self):
        small = minified(broken.stack, broken.wrong_when_dynamic, options={"dynamic": True})

        assert ops(small.graph) == ["relu"]

    def test_one_value_in_a_thousand_is_not_randomised_away(self):
        small = minified(broken.one_in_a_thousand, broken.wrong_for_thirteen)

        assert ops(small.graph) == ["relu"]
        assert 13.0 in small.inputs[0].flatten().tolist()

    def test_a_write_to_an_argument_that_is_dropped(self):
        small = minified(broken.mutating, broken.mutation_dropped)

        assert ops(small.graph) == ["add_"]

    def test_a_flaky_failure_is_said_to_be_one_and_is_run_again_and_again(self):
        small = minified(broken.stack, broken.failing_every(3))

        assert "relu" in ops(small.graph)
        assert small.reduction.rate == pytest.approx(1 / 3, abs=0.1)
        assert any("it fails in 3 of 8 runs" in note for note in small.notes)

    @pytest.mark.parametrize("queries", [4, 6, 9, 20])
    def test_a_flaky_failure_is_not_run_more_often_than_the_queries_allow(self, queries):
        small = minified(broken.stack, broken.failing_every(3), queries=queries)

        assert small.reduction.queries <= queries
        assert not small.reduction.is_minimal
        assert small.reduction.rate < 1.0

    def test_a_failure_that_hardly_ever_comes_is_not_minified(self):
        with pytest.raises(td.NothingToMinify, match="it came in 1 of 8 runs"):
            minified(broken.stack, broken.failing_every(100))

    def test_of_several_failures_the_one_that_is_meant(self):
        def program(x):
            return torch.relu(torch.sin(x))

        with pytest.raises(td.NothingToMinify, match="matches none"):
            td.minify(program, (torch.randn(2),), transform=broken.two_bugs, isolated=False, match="C: cos")

    def test_two_that_say_the_same_are_told_apart_by_their_lines(self):
        def program(x):
            return torch.relu(torch.sin(torch.exp(x))) + 1

        small = td.minify(program, (torch.randn(2),), transform=broken.asserting, isolated=False, semantic=False)

        assert ops(small.graph)[0] == "relu"
        assert "sin" not in ops(small.graph)

    def test_arguments_by_keyword_and_in_structures_reach_an_exported_graph(self):
        class Model(nn.Module):
            def forward(self, pair, *, scale):
                return torch.relu(pair["a"] * scale) + pair["b"]

        pair = {"a": torch.randn(3), "b": torch.randn(3)}
        small = td.minify(
            Model(),
            (pair,),
            {"scale": torch.full((3,), 2.0)},
            transform=broken.relu_is_off,
            options={"graph": "export"},
            isolated=False,
            semantic=False,
        )

        assert ops(small.graph) == ["relu.default"]

    def test_what_is_returned_as_it_was_given_is_part_of_the_subject(self):
        def passed_on_wrongly(graph_module, example_inputs):
            return lambda *args: tuple(value + 1 if value is args[0] else value for value in graph_module(*args))

        class Model(nn.Module):
            def forward(self, x):
                return x, torch.sin(x)

        options = {"options": {"graph": "export"}, "isolated": False, "semantic": False}
        small = td.minify(Model(), (torch.randn(2),), transform=passed_on_wrongly, **options)

        assert small.report.verdict is Verdict.DIVERGED

    def test_a_failure_of_a_later_call_of_the_same_graph(self):
        @torch.compiler.disable
        def apart(x):
            return x

        def inner(x):
            return torch.relu(x) * 2

        def program(x):
            y = inner(x)
            return inner(apart(torch.full_like(y, 13.0)))

        small = td.minify(
            program, (torch.randn(3),), transform=broken.wrong_for_thirteen, isolated=False, semantic=False
        )

        assert 13.0 in small.inputs[0].flatten().tolist()

    def test_of_two_bugs_each_culprit_has_its_own_script(self, tmp_path):
        program, args = broken.two_wrong()
        report = td.diagnose(program, args, transform=broken.two_are_off, out=tmp_path, every=True, semantic=False)

        scripts = [(tmp_path / name).read_text() for name in ("repro.py", "repro-2.py")]
        assert [culprit.op for culprit in report.culprits] == ["sin", "relu"]
        assert "torch.sin(" in scripts[0]
        assert "torch.relu(" not in scripts[0]
        assert "torch.relu(" in scripts[1]

    def test_what_fails_for_odd_sizes_only_keeps_the_smallest(self):
        small = td.minify(
            lambda x: x * 2, (torch.randn(7, 4),), transform=broken.wrong_for_odd_rows, isolated=False, semantic=False
        )

        assert small.inputs[0].shape == (3, 2)

    def test_complex_numbers_are_drawn_too(self):
        numbers = torch.randn(4, 4, dtype=torch.complex128)
        small = td.minify(
            lambda x: torch.sin(x), (numbers,), transform=broken.two_are_off, isolated=False, semantic=False
        )

        assert "torch.randn(2, 2, dtype=torch.complex64" in small.drawn[0]

    def test_of_two_kinds_of_failure_each_culprit_has_its_own(self, tmp_path):
        program, args = broken.two_apart()
        report = td.diagnose(program, args, transform=broken.off_and_wide, out=tmp_path, every=True, semantic=False)

        scripts = [(tmp_path / name).read_text() for name in ("repro.py", "repro-2.py")]
        assert [culprit.op for culprit in report.culprits] == ["sin", "relu"]
        assert "gives other outputs than eager PyTorch for sin." in scripts[0]
        assert "gives outputs of another dtype than eager PyTorch for relu." in scripts[1]

    def test_resumes_for_the_failure_that_it_began_with(self, tmp_path):
        first = minified(broken.stack, broken.relu_is_off, out=tmp_path, queries=1, match="gradients")
        second = minified(broken.stack, broken.relu_is_off, out=tmp_path, resume=True)

        assert first.signature.stage == second.signature.stage == "gradients"

    def test_another_implementation_has_no_graph(self):
        with pytest.raises(td.UsageError, match="no graph to make smaller"):
            td.minify(nn.ReLU(), (torch.randn(2),), candidate=nn.Tanh(), isolated=False)

    def test_the_best_so_far_is_on_disk_and_gone_on_from(self, tmp_path):
        first = minified(broken.stack, broken.relu_is_off, out=tmp_path, queries=1)
        assert not first.reduction.is_minimal
        journal = json.loads((tmp_path / "journal.json").read_text())

        second = minified(broken.stack, broken.relu_is_off, out=tmp_path, resume=True)

        assert journal["nodes_before"] == first.reduction.nodes_before
        assert ops(second.graph) == ["relu"]
        assert second.reduction.nodes_before == first.reduction.nodes_before
        assert second.reduction.queries > first.reduction.queries


class TestLevels:
    @pytest.mark.parametrize(
        ("activation", "op", "origin"),
        [("tanh", "tanh.default", "forward"), ("relu", "threshold_backward.default", "backward")],
    )
    def test_a_graph_of_aot_is_made_smaller_by_itself(self, activation, op, origin):
        program = nn.Sequential(nn.Linear(4, 4), nn.Tanh() if activation == "tanh" else nn.ReLU(), nn.Linear(4, 4))
        small = td.minify(
            program,
            (torch.randn(2, 4),),
            transform="backend:off_after_aot",
            isolated=False,
            semantic=False,
            level="aot",
        )

        assert ops(small.graph) == [op]
        assert any(f"({origin})" in note for note in small.notes)

    def test_a_pass_on_aten_graphs_has_them_too(self):
        def spoils(graph_module, example_inputs):
            return broken.shifted(graph_module, broken.calls(graph_module, "threshold_backward"))

        def factory():
            return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (torch.randn(2, 4),)

        small = minified(factory, spoils, level="aot", options={"graph": "aten"})

        assert ops(small.graph) == ["threshold_backward.default"]

    def test_a_reduction_is_resumed_at_its_own_level(self, tmp_path):
        minified(broken.stack, broken.relu_is_off, out=tmp_path, queries=1)

        with pytest.raises(UsageError, match="no level 'nonsense'"):
            minified(broken.stack, broken.relu_is_off, out=tmp_path, resume=True, level="nonsense")
        with pytest.raises(UsageError, match=r"is about minify of .*, or was asked with other options"):
            minified(broken.stack, "backend:off_after_aot", out=tmp_path, resume=True, level="aot")

    def test_a_pass_has_no_such_graphs(self):
        with pytest.raises(UsageError, match="only a compiler and a pass on ATen graphs"):
            minified(broken.stack, broken.relu_is_off, level="aot")


@pytest.mark.slow
class TestDraft:
    """The script is run while it is still asked whether the failure comes each time."""

    def test_what_was_begun_is_waited_for_and_then_put_where_it_belongs(self, tmp_path):
        (tmp_path / "repro.py").write_text("the script of an earlier run")
        small = minified(broken.stack, OFF)
        draft = small.begin(tmp_path / "repro.py")
        before = (tmp_path / "repro.py").read_text(), draft.written.path.stat().st_ino
        repro = replace(small, draft=draft).write(tmp_path / "repro.py")

        assert repro.confirmed
        assert before == ("the script of an earlier run", (tmp_path / "repro.py").stat().st_ino)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["repro.py", "repro_code"]

    @pytest.mark.parametrize(("name", "data"), [("other.py", True), ("repro.py", False)])
    def test_another_script_is_written_instead_and_nothing_is_left_of_the_first(self, name, data, tmp_path):
        small = minified(broken.one_in_a_thousand, "programs.broken:wrong_for_thirteen")
        draft = small.begin(tmp_path / "repro.py")

        assert replace(small, draft=draft).write(tmp_path / name, data=data).confirmed is data
        assert draft.runner.is_over
        assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
        assert (tmp_path / "repro.py").exists() is (name == "repro.py")
        assert (tmp_path / "repro.pt").exists() is False

    def test_tensors_beside_it_come_along(self, tmp_path):
        small = minified(lambda: (broken.stack()[0], (torch.randn(64, 8),)), OFF, queries=1)
        draft = small.begin(tmp_path / "repro.py")
        repro = replace(small, draft=draft).write(tmp_path / "repro.py")

        assert draft.written.tensors_path is not None
        assert repro.confirmed
        assert sorted(path.name for path in tmp_path.iterdir()) == ["repro.pt", "repro.py", "repro_code"]
        assert "in repro.pt beside it" in " ".join((tmp_path / "repro.py").read_text().split())
        assert confirm(tmp_path / "repro.py", deadline_s=60.0).is_there

    def test_it_is_run_again_by_whoever_writes_it_twice(self, tmp_path):
        small = minified(broken.stack, OFF)
        drafted = replace(small, draft=small.begin(tmp_path / "repro.py"))

        assert [drafted.write(tmp_path / "repro.py").confirmed for _ in range(2)] == [True, True]

    def test_where_the_failure_does_not_come_again_it_is_as_if_there_had_been_none(self, tmp_path, monkeypatch):
        (tmp_path / "repro.py").write_text("the script of an earlier run")

        def run(self, subject, answer, **_):
            self.search = Search(subject=subject, answer=answer, wanted=self.wanted)
            self.on_likely_result(subject, answer)
            assert len(list(tmp_path.glob("*.py"))) == 2
            raise td.NothingToMinify("it came once")

        monkeypatch.setattr(Reducer, "run", run)
        with pytest.raises(td.NothingToMinify):
            minified(broken.stack, OFF, script=tmp_path / "repro.py")

        assert [path.name for path in tmp_path.iterdir()] == ["repro.py"]
        assert (tmp_path / "repro.py").read_text() == "the script of an earlier run"

    def test_where_no_script_can_be_written_there_is_none_yet(self, tmp_path, monkeypatch):
        def run(self, subject, answer, **_):
            self.search = Search(subject=subject, answer=answer, wanted=self.wanted)
            self.on_likely_result(subject, answer)

        def of_this_process(graph_module, example_inputs):
            return broken.relu_is_off(graph_module, example_inputs)

        monkeypatch.setattr(Reducer, "run", run)
        small = minified(broken.stack, of_this_process, script=tmp_path / "repro.py")

        assert small.draft is None
        with pytest.raises(td.ReproUnwritable):
            small.write(tmp_path / "repro.py")


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
class TestInWorkers:
    def test_a_graph_that_calls_the_users_own_function(self, workers):
        program, args = broken.CallsOwnFunction(), (torch.randn(4),)
        small = td.minify(program, args, transform=broken.relu_is_off, semantic=False, workers=workers)

        assert ops(small.graph) == ["relu"]

    def test_a_function_of_the_users_own_in_a_body_is_found_in_a_worker(self, tmp_path):
        def checkpointed(x):
            return torch.utils.checkpoint.checkpoint(lambda y: broken.halved(y.sin()).relu(), x, use_reentrant=False)

        subject = Subject.of(captured_graph(checkpointed, torch.randn(4, requires_grad=True)), (torch.randn(4),))
        subject.write(tmp_path)

        assert "programs.broken" in subject.modules
        assert Subject.read(tmp_path, allow=subject.modules).size == subject.size

    def test_of_refused_memory_is_one_failure_however_it_ends(self):
        refused = Failure.of_refused_memory("can't allocate memory", stage="forward").signature
        ended = Failure.of_memory(1 << 30, stage="candidate").signature

        assert refused.is_same_as(ended)

    @pytest.mark.parametrize(
        ("transform", "kind"),
        [
            (broken.relu_segfaults, "signal"),
            pytest.param(broken.relu_hangs, "timeout", marks=pytest.mark.long),
            (broken.relu_eats_memory, "memory"),
            (broken.relu_exits, "exit"),
        ],
    )
    def test_whatever_a_pass_does_to_its_process_it_ends_at_the_operation(
        self, transform, kind, tmp_path, monkeypatch, workers
    ):
        monkeypatch.setattr(queries, "LEAST_S", 2.0)
        if kind == "timeout":
            monkeypatch.setattr(minified_of, "HUNG_S", 12.0)
        program, args = broken.frozen_stack()
        report = td.diagnose(
            program,
            args,
            transform=transform,
            out=tmp_path,
            timeout_s=8,
            memory_bytes=1 << 30,
            semantic=False,
            workers=workers,
        )

        assert report.failure.kind == kind
        assert report.verdict is (Verdict.TIMED_OUT if kind == "timeout" else Verdict.CRASHED)
        assert report.reduction.nodes_after == 3
        assert report.repro.confirmed
        assert "relu" in (tmp_path / "repro.py").read_text()

    @pytest.mark.parametrize(
        ("transform", "name"), [(broken.relu_panics, "Panic"), (broken.relu_interrupts, "KeyboardInterrupt")]
    )
    def test_in_a_worker_nobody_else_waits_for_what_is_no_exception(self, transform, name, tmp_path, workers):
        found = td.minify(*broken.frozen_stack(), transform=transform, workers=workers)

        assert found.report.verdict is Verdict.CRASHED
        assert found.report.failure.type.endswith(name)
        assert found.reduction.nodes_after == 3
        assert found.write(tmp_path / "repro.py").confirmed

    def test_graphs_that_locate_captured_are_not_captured_again(self, tmp_path, monkeypatch, workers):
        monkeypatch.setattr(DIAGNOSE, "capture_isolated", lambda *_, **__: pytest.fail("they were"))
        report = td.diagnose(
            "programs.broken:stack", transform="backend:off_after_aot", out=tmp_path, semantic=False, workers=workers
        )

        assert report.culprits
        assert report.reduction.nodes_after == 3

    def test_a_live_program_is_prepared_and_captured_and_checked_once(self, tmp_path, monkeypatch, workers):
        done = []

        def note(owner, name):
            plain = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args, **words: (done.append(name), plain(*args, **words))[1])

        note(DIAGNOSE, "prepare")
        note(capture, "subjects_of")
        note(Check, "run")
        program, args = broken.frozen_stack()
        report = td.diagnose(program, args, transform=broken.relu_is_off, out=tmp_path, workers=workers)

        assert done == ["prepare", "subjects_of", "run"]
        assert "relu" in report.culprits[0].op
        assert report.reduction.nodes_after == 3

    def test_a_parent_that_is_killed_leaves_the_best_so_far(self, tmp_path, workers):
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(
                """
                import sys
                import torchdelta as td
                from programs import broken

                program, args = broken.frozen_stack()
                def tell(progress):
                    print(progress.queries, progress.nodes, flush=True)
                td.minify(program, args, transform=broken.relu_raises, out=sys.argv[1], progress=tell)
                """
            )
        )
        out = tmp_path / "out"
        process = subprocess.Popen(
            [sys.executable, str(script), str(out)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
        )
        with process:
            for line in process.stdout:
                if line.startswith("2 "):
                    process.send_signal(signal.SIGKILL)
                    break
        entry = json.loads((out / "journal.json").read_text())
        program, args = broken.frozen_stack()
        small = td.minify(program, args, transform=broken.relu_raises, out=out, resume=True, workers=workers)

        assert entry["queries"] >= 1
        assert ops(small.graph) == ["relu"]


@pytest.mark.parametrize("error", ["EagerFails", "ProgramError"])
def test_a_subject_that_fails_eagerly_in_a_worker_says_nothing(error):
    failure = Failure.of_exception(error, "it fails when run eagerly", stage="forward")

    assert queries.answer_of(Outcome(error=error, failure=failure), case=None) == Answer()
