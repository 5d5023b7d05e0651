"""The exception that a program raises is a result: a candidate that does not raise it has diverged."""

import json

import pytest
import torch

import torchdelta as td
from torchdelta import Verdict

X = (torch.ones(4),)


def needs_three(x):
    if x.shape[0] != 3:
        raise ValueError("three rows, please")
    return x * 2


def asserts_three(x):
    if x.shape[0] != 3:
        raise AssertionError("three rows")
    return x * 2


def looks_up(x):
    return [x][x.shape[0]] * 2


def unchecked(x):
    return x * 2


class NeedsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        raise RuntimeError("there is no backward")


def raises_in_backward(x):
    return NeedsBackward.apply(x) * 2


def raising(error):
    def candidate(x):
        raise error

    return candidate


@pytest.mark.parametrize(
    ("program", "raised"),
    [
        (needs_three, "ValueError: three rows, please"),
        (asserts_three, "AssertionError: three rows"),
        (looks_up, "IndexError: list index out of range"),
    ],
)
def test_a_candidate_that_drops_a_check_has_diverged(program, raised):
    report = td.check(program, X, candidate=unchecked)
    stage = report.stage("forward")
    comparison = stage.comparisons[0]

    assert report.verdict is stage.verdict is Verdict.DIVERGED
    assert (comparison.path, comparison.contract[0].clause) == ("exception", "exception")
    assert comparison.contract[0].reference == f"raised {raised}"
    assert comparison.contract[0].candidate == "returned float32 tensor of shape (4,)"


def test_assert_equivalent_says_what_both_sides_do():
    with pytest.raises(td.Diverged, match=r"raised ValueError: three rows, please in the reference, returned float32"):
        td.assert_equivalent(needs_three, X, candidate=unchecked)


class Precise(ValueError):
    """A subclass."""


@pytest.mark.parametrize("error", [ValueError("another text"), Precise("four")])
def test_a_candidate_that_raises_the_same_kind_leaves_the_program_to_be_mended(error):
    with pytest.raises(td.ProgramError, match=r"fails when run eagerly.*three rows.*The candidate raises the same"):
        td.check(needs_three, X, candidate=raising(error))


@pytest.mark.parametrize("error", [TypeError("no"), Exception("no"), RuntimeError("no")])
def test_a_candidate_that_raises_another_kind_has_diverged(error):
    report = td.check(needs_three, X, candidate=raising(error))

    assert report.verdict is Verdict.DIVERGED
    assert report.stage("forward").comparisons[0].contract[0].candidate == f"raised {type(error).__name__}: no"


def raises_anything(x):
    raise Exception("something")


def test_a_program_that_raises_a_bare_exception_is_not_that_which_raises_another_kind():
    report = td.check(raises_anything, X, candidate=raising(KeyError("no")))

    assert report.verdict is Verdict.DIVERGED
    with pytest.raises(td.ProgramError, match="The candidate raises the same"):
        td.check(raises_anything, X, candidate=raising(Exception("other")))


def test_a_compiler_that_fails_leaves_the_program_to_be_mended_and_says_both():
    def broken(graph, inputs):
        raise KeyError("no such pass")

    def program(x):
        return torch.index_add(x, 0, torch.tensor([9]), x[:1])

    with pytest.raises(td.ProgramError, match=r"fails when run eagerly.*(?s:.*)The candidate fails too.*no such pass"):
        td.check(program, X, transform=broken)


def test_a_pass_that_drops_an_operation_which_raises_has_diverged():
    def program(x):
        torch._assert_async((x > 2).all())
        return x * 2

    def dropping(graph, inputs):
        for node in list(graph.graph.nodes):
            if "assert" in str(node.target):
                graph.graph.erase_node(node)
        graph.recompile()
        return graph.forward

    def keeping(graph, inputs):
        return graph.forward

    assert td.check(program, X, transform=dropping).verdict is Verdict.DIVERGED
    with pytest.raises(td.ProgramError, match="The candidate raises the same"):
        td.check(program, X, transform=keeping)


def test_an_exception_of_the_backward_is_compared_after_the_forward():
    x = (torch.ones(4, requires_grad=True),)
    report = td.check(raises_in_backward, x, candidate=unchecked_clone)

    assert report.stage("forward").verdict is Verdict.EQUIVALENT
    assert report.stage("gradients").verdict is Verdict.DIVERGED
    assert "there is no backward" in report.stage("gradients").comparisons[0].reason
    with pytest.raises(td.ProgramError, match="leave the stage gradients out"):
        td.check(raises_in_backward, x, candidate=lambda x: NeedsBackward.apply(x) * 2)


def unchecked_clone(x):
    return x.clone() * 2


def test_a_compiler_that_traces_the_exception_of_the_backward_with_the_forward_raises_the_same():
    def program(x):
        exponential = x.exp()
        exponential.add_(1)
        return exponential * 1

    with pytest.raises(td.ProgramError, match=r"modified by an inplace operation.*The candidate raises the same"):
        td.check(program, (torch.ones(4, requires_grad=True),), transform="aot_eager")


def test_a_candidate_that_fails_before_the_stage_of_the_exception_has_crashed():
    x = (torch.ones(4, requires_grad=True),)
    report = td.check(raises_in_backward, x, candidate=raising(TypeError("at once")))

    assert report.verdict is Verdict.CRASHED
    assert report.failure.type == "TypeError"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        RuntimeError("\"inverse\" not implemented for 'Half'"),
        NotImplementedError("Could not run 'aten::mm' with arguments from the 'SomeDevice' backend."),
    ],
)
def test_a_lack_of_the_machine_is_not_a_result(error):
    with pytest.raises(td.ProgramError, match="fails when run eagerly"):
        td.check(raising(error), X, candidate=unchecked)


def test_a_program_that_does_not_raise_each_time_is_not_compared(tmp_path):
    mark = tmp_path / "ran"  # unlike a counter, a file is not put back between two runs

    def raises_once(x):
        if not mark.exists():
            mark.touch()
            raise ValueError("the first time")
        return x * 2

    with pytest.raises(td.ProgramError, match="the first time"):
        td.check(raises_once, X, candidate=unchecked)


def test_an_error_of_deterministic_algorithms_is_not_a_result():
    def program(x):
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("it does not have a deterministic implementation")
        return x * 2

    with pytest.raises(td.ProgramError, match="deterministic implementation"):
        td.check(program, X, candidate=unchecked, deterministic=True)


def test_random_inputs_that_the_reference_rejects_are_no_divergence():
    def program(x):
        if x[0] != 0:
            raise ValueError("not sorted")
        return x * 2

    report = td.check(program, (torch.arange(64.0),), candidate=unchecked, iterations=2)

    assert report.verdict is Verdict.INCONCLUSIVE
    assert "rejects random inputs" in report.stage("forward").reason


def test_locate_says_that_there_are_no_values_to_compare():
    location = td.locate(needs_three, X, candidate=unchecked)

    assert location.verdict is Verdict.DIVERGED
    assert not location.culprits
    assert any("the program raises when run eagerly" in note for note in location.notes)


def test_the_local_question_is_not_asked():
    report = td.check(needs_three, X, candidate=unchecked, thorough=True)

    assert report.verdict is Verdict.DIVERGED
    assert report.questions.local == "not asked: the program raises when run eagerly"


@pytest.mark.slow
def test_diagnose_keeps_the_report_and_minifies_nothing(tmp_path):
    def program(x, index, source):
        return torch.index_add(x, 0, index, source)

    inputs = (torch.zeros(4, 3), torch.tensor([0, -1]), torch.ones(2, 3))
    report = td.diagnose(program, inputs, transform="inductor", out=tmp_path)

    assert report.verdict is Verdict.DIVERGED
    assert any("a difference of exceptions is not made smaller" in note for note in report.notes)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "diverged"
    with pytest.raises(
        td.TorchDeltaError, match="a program that does not run without the candidate is not made smaller"
    ):
        td.minify(program, inputs, transform="inductor")


def test_an_exception_that_cannot_say_its_message_is_compared_by_its_kind():
    class Mute(RuntimeError):
        def __str__(self):
            raise TypeError("no text")

    def raises(x):
        raise Mute

    report = td.check(raises, (torch.ones(2),), candidate=lambda x: x)

    assert report.verdict is Verdict.DIVERGED
    assert "Mute" in report.comparisons[0].reason
    with pytest.raises(td.errors.ProgramError):
        td.check(raises, (torch.ones(2),), candidate=raises)
