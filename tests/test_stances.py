"""Compilation is switched off in the thread that asks for it, and in no other."""

import threading

import pytest
import torch
from torch._dynamo import eval_frame

from torchdelta._torch.compile.stances import eager_here


@pytest.fixture
def compiled():
    """A compiled function, and how often what was compiled ran."""
    torch._dynamo.reset()
    runs = []

    def counting(graph_module, example_inputs):
        def run(*args):
            runs.append(threading.get_ident())
            return graph_module.forward(*args)

        return run

    @torch.compile(backend=counting, fullgraph=True)
    def double(x):
        return x * 2

    double(torch.ones(2))
    runs.clear()
    yield double, runs
    torch._dynamo.reset()


def in_another_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_what_was_compiled_runs_eagerly_here(compiled):
    double, runs = compiled

    with eager_here():
        here = double(torch.ones(2))
        double(torch.ones(2, 3))

    assert torch.equal(here, torch.full((2,), 2.0))
    assert runs == []
    double(torch.ones(2))
    assert len(runs) == 1


def test_another_thread_runs_what_was_compiled_meanwhile_and_compiles(compiled):
    double, runs = compiled

    with eager_here():
        in_another_thread(lambda: (double(torch.ones(2)), double(torch.ones(2, 3))))

    assert len(runs) == 2


def test_the_stance_is_put_back_whoever_leaves_first():
    before = eval_frame._stance
    first, second = eager_here(), eager_here()

    first.__enter__()
    in_another_thread(second.__enter__)
    first.__exit__(None, None, None)
    assert eval_frame._stance.stance == before.stance
    second.__exit__(None, None, None)

    assert eval_frame._stance is before


def test_a_stance_that_another_thread_sets_is_its_own(compiled):
    double, runs = compiled
    is_set, is_left = threading.Event(), threading.Event()

    def sets():
        with torch.compiler.set_stance("force_eager"):
            is_set.set()
            is_left.wait(60)
            double(torch.ones(2))

    thread = threading.Thread(target=sets)
    with eager_here():
        thread.start()
        is_set.wait(60)
    is_left.set()
    thread.join()

    assert runs == []
    assert eval_frame._stance.stance == "default"
    with eager_here():
        pass
    assert type(eval_frame._stance) is eval_frame.DynamoStance


def test_it_ends_with_an_exception_too(compiled):
    double, runs = compiled

    with pytest.raises(KeyError), eager_here():
        raise KeyError

    double(torch.ones(2))
    assert len(runs) == 1
