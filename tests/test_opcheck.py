"""An operator is checked as a compiler will use it: what is planted is found, and what is right passes.

`torch.library.opcheck` is asked beside it, so that the table says which of the planted ones it does not see.
"""

import contextlib
import functools
import io
import logging
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from programs import bad_ops, good_ops
from programs.bad_ops import BAD
from programs.good_ops import GOOD
from torchdelta.errors import ProgramError, UsageError
from torchdelta.operators.check import check_op
from torchdelta.records.verdict import Verdict

pytestmark = [
    pytest.mark.slow,
    # what torch says of two of the planted ones, and only torch
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*must not also be an input to this custom operator:UserWarning"),
]

EXPECTED = {
    "wrong_backward": (
        "derivative",
        Verdict.DIVERGED,
        r"changes by -?\d+\.\d+ .* gradient says -?\d+\.\d+",
        "backward",
    ),
    "missing_fake": ("aot/static/min-cut", Verdict.CRASHED, "no fake impl", "register a fake kernel"),
    "hard_coded_shape": ("fake/resized", Verdict.DIVERGED, r"\(6, 4\), really \(8, 5\)", "register_fake"),
    "undeclared_mutation": ("schema", Verdict.DIVERGED, "changes its argument x", "mutates_args"),
    "mutates_for_some_values": ("schema", Verdict.DIVERGED, "changes its argument x", "mutates_args"),
    "mutates_at_random": ("schema", Verdict.DIVERGED, "changes its argument x", "mutates_args"),
    "undeclared_alias": ("schema", Verdict.DIVERGED, "returns memory of its argument x", "copy"),
    "baked_constant": (
        "aot/static/min-cut",
        Verdict.DIVERGED,
        r"reference -?\d.*candidate -?\d",
        "constant of the trace",
    ),
    "drifts": ("repeat", Verdict.DIVERGED, r"-?\d\S* and then -?\d", "between calls"),
    "wrong_dtype_in_fake": ("fake/given", Verdict.DIVERGED, "dtype float64, really float32", "register_fake"),
    "wrong_strides_in_fake": ("fake/given", Verdict.DIVERGED, r"stride \(4, 1\), really \(1, 3\)", "register_fake"),
    "layout_in_fake": ("fake/layout", Verdict.DIVERGED, r"transposed .* \(1, 3\), really \(4, 1\)", "register_fake"),
    "blind_to_strides": ("layout", Verdict.DIVERGED, r"another outputs: \d\S* of its largest", "x.contiguous()"),
    "gradient_none": ("derivative", Verdict.DIVERGED, r"args\[1\].* its gradient says None", "backward"),
    "no_autograd": ("registration", Verdict.DIVERGED, "gradients are recorded inside", "register_autograd"),
    "symbols_refused": ("fake/symbolic", Verdict.CRASHED, "TypeError: unhashable type", "SymInt"),
    "symbols_specialised": ("fake/symbolic", Verdict.INCONCLUSIVE, "", "SymInt"),
}
UNSEEN_BY_TORCH = {
    "wrong_backward",
    "hard_coded_shape",
    "mutates_for_some_values",
    "mutates_at_random",
    "baked_constant",
    "drifts",
    "gradient_none",
    "symbols_specialised",
    "layout_in_fake",
    "blind_to_strides",
}
MANY = (
    "schema",
    "repeat",
    "layout",
    "gradients",
    "registration",
    "backward",
    "derivative",
    "fake",
    "aot/static/min-cut",
    "aot/dynamic/default",
)


RAISES_IN_META = """
import gc
import torch
from torchdelta.operators.check import check_op

library = torch.library.Library("td_peeking", "FRAGMENT")
library.define("peeks(Tensor x) -> Tensor")
library.impl("peeks", lambda x: x * 2, "CPU")
library.impl("peeks", lambda x: x.new_empty(int(x.sum().item())), "Meta")
report = check_op(torch.ops.td_peeking.peeks.default, (torch.ones(3),), gradients=False)
gc.collect()
print(report.verdict.value)
print(len({probe.reason for probe in report.probes if probe.name.startswith("aot/static")}), "reason")
print("gradients pass" if (torch.ones(2, requires_grad=True) * 2).requires_grad else "gradients are lost")
"""


@pytest.fixture(autouse=True)
def quiet():
    """Torch logs what a fake kernel raises, with its traceback."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.NOTSET)


@functools.cache
def probed(name):
    op, args, kwargs = BAD[name]()
    return check_op(op, args, kwargs, probes=EXPECTED[name][0])


def said_by_torch(factory):
    """What `torch.library.opcheck` answers: the tests that fail, and with which words."""
    op, args, kwargs = factory()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            answer = torch.library.opcheck(op, args, kwargs, raise_exception=False)
        except ValueError as error:
            return str(error).partition(", got")[0]
    failed = [f"{test}: {str(said).splitlines()[0]}" for test, said in answer.items() if said != "SUCCESS"]
    return "; ".join(failed) or "SUCCESS"


def asked_for_gradients(args):
    """Gradients are asked for where an input requires grad; operators without any are not asked for them."""
    leaves = torch.utils._pytree.tree_leaves(args)
    return "auto" if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves) else False


class TestPlanted:
    def test_each_has_a_probe_that_must_find_it(self):
        assert EXPECTED.keys() == BAD.keys()

    @pytest.mark.parametrize("name", BAD)
    def test_is_found_with_evidence_and_a_remedy(self, name):
        probe, verdict, reason, remedy = EXPECTED[name]
        found = probed(name).probe(probe)

        assert found.verdict is verdict, found
        assert probed(name).verdict is verdict
        assert re.search(reason, found.reason), found.reason
        assert remedy in found.remedy

    def test_the_table_beside_torchs_own_check(self):
        """`pytest -s` shows it."""
        rows = [("operator", "torchdelta", "torch.library.opcheck")]
        for name in BAD:
            probe = probed(name).probe(EXPECTED[name][0])
            rows.append((name, f"{probe.verdict.value}: {probe.name}", said_by_torch(BAD[name])[:80]))
        for row in rows:
            print(" | ".join(cell.ljust(width) for cell, width in zip(row, (24, 30, 80), strict=True)))

        assert {name for name, _, said in rows[1:] if said == "SUCCESS"} == UNSEEN_BY_TORCH

    def test_the_verdict_of_all_probes_is_the_worst(self):
        op, args, kwargs = BAD["hard_coded_shape"]()
        report = check_op(op, args, kwargs, gradients=False)

        assert report.verdict is Verdict.DIVERGED
        assert report.worst.name == "fake/resized"
        assert report.probe("fake/given").verdict is Verdict.EQUIVALENT
        assert "sizes" in report.worst.reason

    def test_a_missing_fake_kernel_is_inconclusive_by_itself(self):
        op, args, kwargs = BAD["missing_fake"]()
        report = check_op(op, args, kwargs, probes="fake")

        assert {probe.verdict for probe in report.probes} == {Verdict.INCONCLUSIVE}
        assert all("register a fake kernel" in probe.remedy for probe in report.probes)

    def test_every_crash_of_a_trace_says_what_to_mend(self):
        op, args, kwargs = BAD["symbols_refused"]()
        (probe,) = check_op(op, args, kwargs, probes="aot/dynamic/min-cut").probes

        assert probe.verdict is Verdict.CRASHED
        assert "unhashable" in probe.reason
        assert "SymInt" in probe.remedy


class TestSchema:
    """What an operator does undeclared, in all the places where it may."""

    @pytest.mark.parametrize(
        ("schema", "kernel", "said"),
        [
            ("twice(Tensor x, Tensor y) -> (Tensor, Tensor)", lambda x, y: (made := x + y, made), "same memory twice"),
            ("another(Tensor(a!) x, Tensor y) -> ()", lambda x, y: (x.add_(1), y.add_(1), None)[2], "argument y"),
            ("turned(Tensor x, Tensor y) -> Tensor", lambda x, y: (y.t_(), x + 1)[1], "argument y"),
            ("second(Tensor x, Tensor y) -> Tensor[]", lambda x, y: [x + 1, y[1:]], "memory of its argument y"),
        ],
        ids=lambda value: value.partition("(")[0] if isinstance(value, str) else None,
    )
    def test_is_found(self, schema, kernel, said):
        with torch.library._scoped_library("td_scoped", "FRAGMENT") as library:
            library.define(schema)
            name = schema.partition("(")[0]
            library.impl(name, kernel, "CompositeExplicitAutograd")
            op = getattr(torch.ops.td_scoped, name).default
            report = check_op(op, (torch.randn(3, 3), torch.randn(3, 3)), gradients=False, probes="schema")

        assert report.verdict is Verdict.DIVERGED
        assert said in report.worst.reason

    def test_of_an_operator_made_of_others_is_looked_at_too(self):
        with torch.library._scoped_library("td_scoped", "FRAGMENT") as library:
            library.define("composed(Tensor x) -> Tensor")
            library.impl("composed", lambda x: x.add_(1).clone(), "CompositeImplicitAutograd")
            report = check_op(torch.ops.td_scoped.composed.default, (torch.randn(3),), gradients=False, probes="schema")

        assert report.verdict is Verdict.DIVERGED
        assert "changes its argument x" in report.worst.reason


class TestHealthy:
    @pytest.mark.parametrize(
        "name",
        GOOD,
    )
    def test_passes(self, name):
        op, args, kwargs = GOOD[name]()
        report = check_op(op, args, kwargs, gradients=asked_for_gradients(args), probes=MANY)

        bad = [probe for probe in report.probes if probe.verdict is not Verdict.EQUIVALENT]
        assert not bad
        assert report.verdict is Verdict.EQUIVALENT

    def test_passes_every_probe_there_is(self):
        op, args, kwargs = GOOD["pointwise"]()
        report = check_op(op, args, kwargs)

        assert report.verdict is Verdict.EQUIVALENT
        assert not report.unasked
        assert len(report.probes) == 17
        assert report.arguments == ("float32[3, 4]",)

    def test_arguments_are_what_they_were_afterwards(self):
        op, (total, x), kwargs = GOOD["declared_mutation"]()
        before, state = total.clone(), torch.get_rng_state()
        check_op(op, (total, x), kwargs, gradients=False, probes=MANY)

        assert torch.equal(total, before)
        assert x.grad is None
        assert torch.equal(torch.get_rng_state(), state)

    def test_torch_is_what_it_was_after_a_fake_kernel_that_raised(self):
        """A guard of torch's dies with the traceback, and would put back what was so inside of the trace."""
        ended = subprocess.run([sys.executable, "-c", RAISES_IN_META], capture_output=True, text=True, check=True)

        assert ended.stdout.splitlines() == ["crashed", "1 reason", "gradients pass"]

    def test_what_has_no_elements_is_inconclusive(self):
        op, args, kwargs = good_ops.no_elements()
        report = check_op(op, args, kwargs, probes="aot/static/min-cut")

        assert report.verdict is Verdict.INCONCLUSIVE
        assert "nothing was compared" in report.probes[0].reason

    @pytest.mark.parametrize("name", ["pointwise", "two_outputs_one_without_gradient", "function_of_trees"])
    def test_passes_inductor(self, name):
        op, args, kwargs = GOOD[name]()
        report = check_op(op, args, kwargs, backends="inductor", probes="backend")

        assert report.verdict is Verdict.EQUIVALENT
        assert [probe.name for probe in report.probes] == ["backend/inductor/static", "backend/inductor/dynamic"]


class TestJudging:
    def test_tolerances_of_zero_mean_zero(self):
        op, args, kwargs = bad_ops.off_by_the_last_bit()
        ask = functools.partial(check_op, op, args, kwargs, gradients=False, probes="aot/static/min-cut")

        assert ask().verdict is Verdict.EQUIVALENT
        assert ask(policy="rtol=1e-6,atol=0").verdict is Verdict.EQUIVALENT
        strict = ask(policy="rtol=0,atol=0")
        assert strict.verdict is Verdict.DIVERGED
        assert "reference" in strict.worst.reason
        assert torch.library.opcheck(op, args, kwargs, rtol=0, atol=0)["test_aot_dispatch_dynamic"] == "SUCCESS"

    def test_a_function_of_the_users_judges_instead(self):
        op, args, kwargs = GOOD["pointwise"]()
        seen = []

        def never(reference, candidate):
            seen.append((reference.dtype, candidate.shape))
            return False

        def insulted(reference, candidate):
            raise AssertionError("3 of 12 are not to my liking")

        ask = functools.partial(check_op, op, args, kwargs, probes="aot/static/min-cut")
        assert ask(compare=lambda reference, candidate: None).verdict is Verdict.EQUIVALENT
        assert ask(compare=torch.testing.assert_close).verdict is Verdict.EQUIVALENT
        assert ask(compare=never).verdict is Verdict.DIVERGED
        assert seen[0] == (torch.float32, (3, 4))
        assert "3 of 12 are not to my liking" in ask(compare=insulted).worst.reason

    def test_a_function_of_the_users_forgives_what_we_would_not(self):
        op, args, kwargs = BAD["baked_constant"]()
        ask = functools.partial(check_op, op, args, kwargs, gradients=False, probes="aot/static/min-cut")

        assert ask().verdict is Verdict.DIVERGED
        assert ask(compare=lambda reference, candidate: True).verdict is Verdict.EQUIVALENT

    def test_a_function_of_the_users_that_fails_is_named(self):
        def broken(reference, candidate):
            raise KeyError("tolerance")

        op, args, kwargs = GOOD["pointwise"]()
        with pytest.raises(UsageError, match=r"broken.*KeyError"):
            check_op(op, args, kwargs, probes="aot/static/min-cut", compare=broken)

    def test_without_correctness_it_only_has_to_trace_and_run(self):
        op, args, kwargs = BAD["baked_constant"]()
        report = check_op(op, args, kwargs, correctness=False, probes="aot/static")

        assert report.verdict is Verdict.EQUIVALENT
        assert all("nothing was compared" in probe.reason for probe in report.probes)

    def test_without_correctness_a_crash_is_one_all_the_same(self):
        op, args, kwargs = BAD["missing_fake"]()
        report = check_op(op, args, kwargs, correctness=False, probes="aot/static/min-cut")

        assert report.verdict is Verdict.CRASHED
        assert "register a fake kernel" in report.worst.remedy

    def test_data_that_eager_rejects_is_never_held_against_it(self):
        op, args, kwargs = bad_ops.only_positive()

        assert check_op(op, args, kwargs, probes=MANY).verdict is Verdict.EQUIVALENT

    def test_sizes_that_eager_rejects_leave_dynamic_shapes_undecided(self):
        def only_four(x):
            if x.shape[0] != 4:
                raise ValueError("four, please")
            return x * 2

        x = torch.randn(4, requires_grad=True)
        report = check_op(only_four, (x,), probes=("fake", "aot/dynamic/min-cut"))
        assert report.verdict is Verdict.INCONCLUSIVE
        assert "rejects every other size" in report.probe("aot/dynamic/min-cut").reason
        assert "others=" in report.probe("aot/dynamic/min-cut").remedy
        assert "fake/resized" in report.unasked

    def test_other_sizes_may_be_given(self):
        def halves(x):
            if x.shape[0] % 100:
                raise ValueError("hundreds, please")
            return x[: x.shape[0] // 2] * 2

        x, longer = torch.randn(100, requires_grad=True), torch.randn(700, requires_grad=True)
        report = check_op(halves, (x,), probes="aot/dynamic/min-cut", others=[((longer,), {})])
        assert report.verdict is Verdict.EQUIVALENT


class TestGradients:
    def test_no_input_that_requires_grad_is_inconclusive_although_torch_is_content(self):
        op, _, kwargs = BAD["wrong_backward"]()
        x = torch.randn(3, 4)
        report = check_op(op, (x,), kwargs, probes=("gradients", "derivative"))

        assert report.verdict is Verdict.INCONCLUSIVE
        assert "no input requires grad" in report.worst.reason
        assert "requires_grad=True" in report.worst.remedy
        assert set(torch.library.opcheck(op, (x,), kwargs).values()) == {"SUCCESS"}

    def test_left_out_on_request(self):
        op, args, kwargs = BAD["wrong_backward"]()
        report = check_op(op, args, kwargs, gradients=False, probes=MANY)

        assert report.verdict is Verdict.EQUIVALENT
        assert "on request" in report.unasked["derivative"]

    def test_integers_are_not_asked_for_any(self):
        op, args, kwargs = GOOD["integers_only"]()
        report = check_op(op, args, kwargs, probes=("derivative", "aot/static/min-cut"))

        assert report.verdict is Verdict.EQUIVALENT
        assert "has gradients" in report.unasked["derivative"]

    def test_of_a_correct_operator_are_a_probe_that_can_be_asked_by_itself(self):
        report = check_op(torch.ops.aten.sin.default, (torch.randn(3, requires_grad=True),), probes="gradients")

        assert report.verdict is Verdict.EQUIVALENT
        assert report.probe("gradients").reason == "its backward runs eagerly"

    def test_insisted_on_where_there_are_none(self):
        report = check_op(torch.sign, (torch.randn(3),), gradients=True, probes=("gradients", "aot/static/min-cut"))

        assert report.verdict is Verdict.INCONCLUSIVE

    def test_an_output_cut_off_from_its_input_has_none_on_both_sides(self):
        report = check_op(lambda x: x.detach() * 2, (torch.randn(3, requires_grad=True),), probes=MANY)

        assert report.verdict is Verdict.EQUIVALENT
        assert "requires grad" in report.unasked["derivative"]

    def test_what_raises_without_a_gradient_raises_so_on_both_sides(self):
        def slope(x):
            (grad,) = torch.autograd.grad(x.square().sum(), x)
            return grad

        with pytest.raises(ProgramError, match="does not require grad"):
            check_op(slope, (torch.randn(3),))

    def test_one_output_in_three_without_a_formula_for_it(self):
        def of_three(x, y):
            return x * y, (x + y).detach(), [y.argmax(), None]

        args = (torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True))
        assert check_op(of_three, args, probes=MANY).verdict is Verdict.EQUIVALENT

    def test_a_wrong_complex_backward_is_found(self):
        class Conjugate(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * (2 + 1j)

            @staticmethod
            def backward(ctx, grad):
                return grad * (2 + 1j)  # it is the conjugate that belongs here

        x = torch.randn(4, dtype=torch.complex64, requires_grad=True)
        report = check_op(lambda x: Conjugate.apply(x), (x,), probes="derivative")

        assert report.verdict is Verdict.DIVERGED

    @pytest.mark.parametrize(
        ("function", "values"),
        [
            # half of it is no number, before and after
            (torch.log, torch.linspace(-1, 2, 12)),
            # all of it lies on the kink, and there are no other values to be drawn
            (torch.relu, torch.zeros(5)),
            (torch.abs, torch.tensor([0.0, 1.0, -2.0])),
            (lambda x: x * 2, torch.tensor([[1.0, 2.0, 3.0]]).expand(3, 3)),  # three rows in one place
        ],
        ids=["nan", "kink", "kink in part", "expanded"],
    )
    def test_a_function_without_differences_has_no_wrong_derivative(self, function, values):
        report = check_op(function, (values.requires_grad_(),), probes="derivative")

        assert report.verdict is not Verdict.DIVERGED, report.worst

    def test_indices_and_running_means_do_not_stand_in_the_way_of_a_derivative(self):
        weight, indices = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 4, 2])
        x = torch.randn(4, 3, requires_grad=True)
        embedded = check_op(torch.ops.aten.embedding.default, (weight, indices), probes="derivative")
        normalised = check_op(
            torch.nn.functional.batch_norm, (x, torch.zeros(3), torch.ones(3)), {"training": True}, probes="derivative"
        )

        assert embedded.verdict is Verdict.EQUIVALENT, embedded.worst
        assert normalised.verdict is Verdict.EQUIVALENT, normalised.worst

    def test_a_wrong_backward_of_an_expanded_input_is_found(self):
        op, _, kwargs = BAD["wrong_backward"]()
        x = torch.tensor([[1.0, 2.0, 3.0]]).expand(3, 3).requires_grad_()

        assert check_op(op, (x,), kwargs, probes="derivative").verdict is Verdict.DIVERGED


class TestInputs:
    def test_that_are_not_leaves_stay_so(self):
        leaf = torch.randn(3, 4, requires_grad=True)
        inner = leaf * 2
        report = check_op(torch.ops.aten.mul_.Tensor, (inner, torch.full((3, 4), 3.0)), probes=MANY)

        assert report.verdict is Verdict.EQUIVALENT
        assert leaf.grad is None

    def test_the_same_tensor_twice(self):
        x = torch.randn(3, requires_grad=True)

        assert check_op(torch.ops.aten.mul.Tensor, (x, x), probes=MANY).verdict is Verdict.EQUIVALENT

    def test_none_at_all(self):
        report = check_op(lambda: torch.ones(3), (), probes=MANY)

        assert report.verdict is Verdict.EQUIVALENT
        assert report.arguments == ()

    def test_a_packet_finds_its_overload(self):
        x = torch.randn(3, requires_grad=True)

        assert check_op(torch.ops.aten.add, (x, 2.0), probes=MANY).verdict is Verdict.EQUIVALENT

    def test_what_is_no_tensor_stays_what_it_is(self):
        class Settings:
            power = 2

        x, weights = torch.randn(3, requires_grad=True), np.ones(3, dtype=np.float32)
        report = check_op(
            lambda x, weights, settings: x**settings.power * torch.from_numpy(weights),
            (x, weights, Settings),
            probes="aot/static/min-cut",
        )
        assert report.verdict is Verdict.EQUIVALENT, report.worst

    def test_a_module_is_no_operator(self):
        with pytest.raises(UsageError, match=r"has parameters of its own .*torchdelta\.check"):
            check_op(torch.nn.Linear(4, 2), (torch.randn(3, 4),))

    def test_a_number_that_comes_out_may_follow_the_sizes(self):
        report = check_op(lambda x: (x.shape[0], x * 2), (torch.randn(3, requires_grad=True),), probes=MANY)

        assert report.verdict is Verdict.EQUIVALENT, report.worst

    def test_a_python_number_that_is_baked_in_is_no_fault(self):
        x = torch.randn(3, requires_grad=True)

        assert check_op(torch.pow, (x, 3), probes=("aot",)).verdict is Verdict.EQUIVALENT


class TestMistakes:
    def test_a_tensor_in_the_place_of_a_tuple(self):
        with pytest.raises((UsageError, ProgramError), match=r"\(x,\)"):
            check_op(torch.relu, torch.randn(3))

    def test_arguments_that_do_not_fit_the_schema(self):
        with pytest.raises((UsageError, ProgramError), match=r"aten::add\.Tensor\(Tensor self, Tensor other"):
            check_op(torch.ops.aten.add.Tensor, (torch.randn(3), "x"))

    def test_an_operator_that_raises_eagerly(self):
        op, _, kwargs = bad_ops.only_positive()

        with pytest.raises(ProgramError, match="ValueError: only positive"):
            check_op(op, (-torch.ones(3),), kwargs)

    def test_a_probe_that_does_not_exist(self):
        with pytest.raises(UsageError, match=r"no probe 'fakes'.*fake/given"):
            check_op(torch.relu, (torch.randn(3),), probes="fakes")

    def test_a_probe_that_does_not_apply_is_said_not_to(self):
        with pytest.raises(UsageError, match="derivative: no input requires grad"):
            check_op(torch.relu, (torch.randn(3),), probes="derivative")

    def test_a_backend_that_does_not_exist(self):
        with pytest.raises(UsageError, match="indictor"):
            check_op(torch.relu, (torch.randn(3),), gradients=False, backends="indictor")

    def test_gradients_that_are_neither(self):
        with pytest.raises(UsageError, match="'auto'"):
            check_op(torch.relu, (torch.randn(3),), gradients="yes")

    def test_two_ways_to_judge(self):
        with pytest.raises(UsageError, match="either"):
            check_op(torch.relu, (torch.randn(3),), policy="bitwise", compare=torch.equal)

    @pytest.mark.parametrize(
        ("op", "words", "said"),
        [
            ("aten.sin", {}, r"torch\.ops\.aten\.sin"),
            (torch.sin, {"others": torch.ones(2)}, r"others\[0\] is not a pair"),
            (torch.sin, {"others": [((torch.ones(2),), [1])]}, r"others\[0\] is not a pair"),
            (torch.sin, {"probes": 5}, "probes are names"),
            (torch.sin, {"backends": [5]}, "backends are names"),
            (torch.sin, {"seed": "a"}, "seed must be from 0"),
            (torch.sin, {"seed": 2**70}, "seed must be from 0"),
            (torch.sin, {"gradients": torch.ones(2)}, "'auto'"),
        ],
    )
    def test_in_what_else_is_told_is_one_sentence(self, op, words, said):
        with pytest.raises(UsageError, match=said):
            check_op(op, (torch.ones(2),), **words)
