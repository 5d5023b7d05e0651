"""A script shows what was found, with torch alone: it exits 1 with the bug, 0 without, 2 where it cannot run."""

import importlib.util
import math
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import torchdelta as td
from programs import reports
from torchdelta import Verdict
from torchdelta._torch.compile.settings import changed_settings
from torchdelta._torch.process import versions
from torchdelta.errors import ReproUnwritable, UsageError
from torchdelta.minify.subject import Draw
from torchdelta.program.programs import load_callable
from torchdelta.records.case import Case
from torchdelta.records.comparison import Worst
from torchdelta.records.failure import Failure
from torchdelta.records.report import Report, Stage
from torchdelta.repro.code import write_module, write_program
from torchdelta.repro.confirm import CleanProcess, confirm
from torchdelta.repro.finding import Finding, key_of
from torchdelta.repro.imports import ScriptImports
from torchdelta.repro.issue import issue_text
from torchdelta.repro.script import write
from torchdelta.repro.transform import write_transform
from torchdelta.repro.values import write_contiguous, write_tensors

PLANTED = """
import ctypes, os, time, torch
IS_BROKEN = True

def instead(gm, made):
    return made if IS_BROKEN else gm

def wrong_values(gm, inputs):
    for node in gm.graph.nodes:
        if IS_BROKEN and "relu" in str(node.target):
            node.target = torch.ops.aten.abs.default if "aten" in str(node.target) else torch.abs

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

def wrong_gradients(gm, inputs):
    return instead(gm, lambda *args: tuple(Doubled.apply(out) for out in gm(*args)))

def wrong_mutation(gm, inputs):
    def run(*args):
        made = gm(*args)
        args[0].add_(1.0)
        return made
    return instead(gm, run)

def wrong_dtype(gm, inputs):
    return instead(gm, lambda *args: tuple(out.double() for out in gm(*args)))

def wrong_integers(gm, inputs):
    return instead(gm, lambda *args: tuple(out + (out == 2) for out in gm(*args)))

def wrong_nan(gm, inputs):
    return instead(gm, lambda *args: tuple(out.log() for out in gm(*args)))

def wrong_aliasing(gm, inputs):
    return instead(gm, lambda *args: tuple(out.clone() for out in gm(*args)))

def wrong_structure(gm, inputs):
    return instead(gm, lambda *args: tuple(None if i else out for i, out in enumerate(gm(*args))))

def raises(gm, inputs):
    if IS_BROKEN:
        raise NotImplementedError(f"there is no relu for {id(gm)} at {hex(id(gm))}, try another")
    return gm

def segfaults(gm, inputs):
    return instead(gm, lambda *args: ctypes.string_at(0))

def hangs(gm, inputs):
    return instead(gm, lambda *args: time.sleep(600))

def leaves(gm, inputs):
    return instead(gm, lambda *args: os._exit(0))

def eats(gm, inputs):
    return instead(gm, lambda *args: [torch.ones(2**27) for _ in range(64)])

def prints(gm, inputs):
    return instead(gm, lambda *args: [print("again " * 2**16) for _ in range(2**20)])
"""


@pytest.fixture
def planted(tmp_path, request):
    """The name of a pass in a file of its own: each test's module has another name."""
    file = tmp_path / f"planted_{abs(hash(request.node.name))}.py"
    file.write_text(PLANTED)
    return lambda name: f"{file}:{name}"


def mend(spec):
    file = spec.rpartition(":")[0]
    with open(file) as source:
        text = source.read().replace("IS_BROKEN = True", "IS_BROKEN = False")
    with open(file, "w") as target:
        target.write(text)


def captured(call, *args, dynamic=None):
    """The graph that dynamo makes of a callable, and its inputs."""
    seen = []

    def keep(graph_module, example_inputs):
        def run(*inputs):
            # dynamo runs a part of what it made itself eagerly, when it meets that again
            seen[:] = [GraphModule(graph_module, graph_module.graph), inputs]
            return graph_module(*inputs)

        return run

    torch._dynamo.reset()
    torch.compile(call, backend=keep, dynamic=dynamic)(*args)
    return seen[0], tuple(seen[1])


def traced(call, *args):
    return symbolic_trace(call), args


def found(graph, inputs, transform, **words):
    """The finding of a check that really failed."""
    kept = {name: words.pop(name) for name in ("inputs_from", "config", "tries", "imports") if name in words}
    report = td.check(graph, inputs, transform=transform, **words)
    assert report.verdict.is_failure, report
    return Finding(graph=graph, inputs=inputs, case=report.case, report=report, **kept)


def dead(graph, inputs, transform, failure, **words):
    """The finding of a candidate that took its process with it."""
    case = Case(program="subject", transform=transform, stages=("forward",))
    verdict = Verdict.TIMED_OUT if failure.kind == "timeout" else Verdict.CRASHED
    stage = Stage(name="forward", verdict=verdict)
    report = Report(verdict=verdict, environment=versions.environment(), case=case, stages=(stage,), failure=failure)
    return Finding(graph=graph, inputs=inputs, case=case, report=report, **words)


RUNNER = """
import runpy, sys
sys.modules["torchdelta"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(path):
    """Run a script in a fresh process that ignores the environment, and in which torchdelta cannot be imported."""
    command = [sys.executable, "-I", "-c", RUNNER, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd="/")


@pytest.fixture
def shows(monkeypatch):
    """Whether a script says, in this process, that the bug is there."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def ask(path):
        for name in [name for name in sys.modules if name.startswith("planted_")]:
            del sys.modules[name]
        torch._dynamo.reset()
        # the compiler looks functions up by their module's name
        specification = importlib.util.spec_from_file_location("planted_script", path)
        script = importlib.util.module_from_spec(specification)
        sys.modules["planted_script"] = script
        specification.loader.exec_module(script)
        return script.main()

    return ask


def relu(x):
    return torch.relu(x)


X = (torch.tensor([-1.0, 2.0, 0.25]),)


GOLDEN = '''\
"""torch.compile(backend="inductor", dynamic=True) gives other outputs than eager PyTorch for relu.

outputs[0][1] is 0.0 eagerly, 1.5 compiled, 0.0 in float64. Found with torch 2.13.0, Python 3.11.2, Linux
x86_64. It embeds values of the tensors that it was found with. Exits with 1 while the bug is there, 0 once it
is gone, 2 if it cannot run here.
"""

import sys

# an error on the way says nothing about the bug: it exits with 2
sys.excepthook = lambda *error: sys.exit(sys.__excepthook__(*error) or 2)

import torch
import torch._inductor.config

torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"

BOUND = 0.0015  # between what rounding explains (1.5e-06) and what was seen (1.5e+00)


def inputs():
    return (torch.tensor([-1.0, -1.5]),)


def program(x):
    # model.py:31 in forward, module h.0.mlp.act
    return (torch.relu(x),)


def run(call, args):
    torch.manual_seed(0)
    outputs = call(*args)
    return outputs[0].detach().double()


def main():
    reference = run(program, inputs())
    candidate = run(torch.compile(program, backend="inductor", dynamic=True), inputs())
    truth = run(program, [x.to(torch.float64) for x in inputs()])
    assert candidate.shape == reference.shape
    same = (candidate == reference) | (candidate.isnan() & reference.isnan())
    error = (candidate - reference).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0)
    worst = torch.unravel_index(error.argmax(), error.shape)
    print(f"outputs[0]{[int(i) for i in worst]}: {reference[worst].item()} eagerly, "
          f"{candidate[worst].item()} compiled, {truth[worst].item()} in float64")
    return error[worst].item() > BOUND


if __name__ == "__main__":
    is_there = main()
    print("the bug is there" if is_there else "the bug is gone")
    sys.exit(int(is_there))
'''


def test_a_small_script_reads_like_this(tmp_path):
    graph = Graph()
    x = graph.placeholder("L_x_")
    made = graph.call_function(torch.relu, (x,))
    made.meta["stack_trace"] = 'File "/home/somebody/model.py", line 31, in forward\n    return torch.relu(x)\n'
    made.meta["nn_module_stack"] = {"1": ("h.0.mlp.act", nn.ReLU)}
    graph.output((made,))
    seen = replace(
        reports.comparison("outputs[0]", Verdict.DIVERGED, error=1.06, allowed=1.5e-6),
        worst=Worst(index=(1,), reference=0.0, candidate=1.5, truth=0.0),
        measurement=replace(reports.MEASUREMENT, max_abs=1.5),
    )
    options = {"dynamic": True, "config.cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}
    case = Case(program="subject", transform="inductor", options=options)
    finding = Finding(
        graph=GraphModule({}, graph),
        inputs=(torch.tensor([-1.0, -1.5]),),
        case=case,
        report=reports.report(Stage.of("forward", (seen,)), case=case),
    )

    written = write(finding, tmp_path / "repro.py")

    assert written.path.read_text() == GOLDEN
    assert written.tensors_path is None
    assert written.embeds_data


KINDS = {
    "wrong_values": (relu, X),
    "wrong_gradients": (relu, (torch.tensor([-1.0, 2.0], requires_grad=True),)),
    "wrong_mutation": (relu, X),
    "wrong_dtype": (relu, X),
    "raises": (relu, X),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_exits_1_with_the_bug_and_0_without(kind, planted, tmp_path):
    call, args = KINDS[kind]
    finding = found(*captured(call, *args), planted(kind), semantic=False)
    path = write(finding, tmp_path / "repro.py").path

    broken = run_alone(path)
    assert broken.returncode == 1, broken.stderr
    assert broken.stdout.endswith("the bug is there\n")

    mend(planted(kind))
    mended = run_alone(path)
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.endswith("the bug is gone\n")


DEATHS = {
    "segfaults": Failure.of_signal("SIGSEGV", stage="candidate"),
    "hangs": Failure.of_timeout(8.0, stage="candidate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEATHS)
def test_a_script_of_a_candidate_that_dies_survives_it(kind, planted, tmp_path):
    deadline_s = 8.0 if kind == "hangs" else 300.0
    finding = dead(*captured(relu, *X), planted(kind), DEATHS[kind], deadline_s=deadline_s)
    path = write(finding, tmp_path / "repro.py").path

    broken = run_alone(path)
    assert broken.returncode == 1, broken.stderr[-2000:]
    assert broken.stdout.endswith("the bug is there\n")

    mend(planted(kind))
    # a machine that is busy takes long to import torch
    path.write_text(path.read_text().replace("DEADLINE_S = 8\n", "DEADLINE_S = 300\n"))
    mended = run_alone(path)
    assert mended.returncode == 0, mended.stderr


OTHER_DEATHS = {
    "leaves": Failure.of_exit(0, stage="candidate"),
    "eats": Failure.of_memory(2**30, stage="candidate"),
    "prints": Failure.of_output(2**20, stage="candidate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_DEATHS)
def test_every_kind_of_death_has_its_script(kind, planted, tmp_path, shows):
    finding = dead(*captured(relu, *X), planted(kind), OTHER_DEATHS[kind], deadline_s=300.0, memory_bytes=2**30)
    path = write(finding, tmp_path / "repro.py").path

    assert shows(path)
    mend(planted(kind))
    assert not shows(path)


@pytest.mark.slow
def test_torchdelta_is_out_of_reach_of_a_script_that_runs_alone(tmp_path):
    script = tmp_path / "imports.py"
    script.write_text("import torchdelta\n")

    assert "ModuleNotFoundError" in run_alone(script).stderr


@pytest.mark.slow
def test_a_script_that_cannot_run_here_exits_2(planted, tmp_path):
    spec = planted("wrong_values")
    path = write(found(*captured(relu, *X), spec), tmp_path / "repro.py").path
    (tmp_path / spec.rpartition(":")[0]).unlink()

    ended = run_alone(path)

    assert ended.returncode == 2
    assert "ModuleNotFoundError" in ended.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("inductor")
def test_a_bug_of_inductor_is_shown_by_a_short_script_that_is_confirmed(tmp_path):
    graph, inputs = captured(nn.Sequential(nn.ReLU()), *X)
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        finding = found(graph, inputs, "inductor", config=changed_settings())
    path = write(finding, tmp_path / "repro.py").path

    confirmed = confirm(path, deadline_s=300.0)

    assert confirmed.is_there, confirmed.output
    assert len(path.read_text().splitlines()) < 60
    text = path.read_text()
    path.write_text(text.replace("torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY", "unused"))
    assert confirm(path, deadline_s=300.0).status == 0


@pytest.mark.slow
def test_only_a_script_that_says_so_is_confirmed(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def main(:\n")
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(100)\n")
    right = tmp_path / "right.py"
    right.write_text("import sys\nprint('the bug is there')\nsys.exit(1)\n")

    assert confirm(broken, deadline_s=60.0).status == 1  # Python's own
    assert not confirm(broken, deadline_s=60.0).is_there
    assert confirm(slow, deadline_s=0.5).status is None
    assert confirm(right, deadline_s=60.0).is_there


def test_who_waits_for_a_script_does_beforehand_what_it_was_told(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import faulthandler, sys\nprint('the bug is there')\nsys.exit(faulthandler.is_enabled())\n")

    assert confirm(path, deadline_s=60.0, clean=CleanProcess(("faulthandler:enable",))).is_there
    assert not confirm(path, deadline_s=60.0, clean=CleanProcess(("faulthandler",))).is_there


@pytest.mark.parametrize("step", ["no_such_module", "sys:exit"])
def test_a_script_is_run_although_who_waited_for_it_is_gone(step, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import sys\nprint('the bug is there')\nsys.exit(1)\n")
    gone = CleanProcess((step,))
    while gone.is_waiting:
        time.sleep(0.01)

    assert confirm(path, deadline_s=60.0, clean=gone).is_there


def two_outputs(x, y):
    return x.view(-1), y * 2


OTHERS = {
    "wrong_integers": (lambda x: x + 1, (torch.tensor([0, 1, 5]),)),
    "wrong_nan": (relu, X),
    "wrong_aliasing": (two_outputs, (torch.ones(2, 2), torch.ones(2))),
    "wrong_structure": (two_outputs, (torch.ones(2, 2), torch.ones(2))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_of_difference_has_its_script(kind, planted, tmp_path, shows):
    call, args = OTHERS[kind]
    path = write(found(*captured(call, *args), planted(kind), semantic=False), tmp_path / "repro.py").path

    assert shows(path)
    mend(planted(kind))
    assert not shows(path)


@pytest.mark.parametrize("graph", ["dynamo", "aten", "export"])
def test_a_pass_is_given_the_graph_that_it_asked_for(graph, planted, tmp_path, shows):
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    finding = found(*captured(relu, x), planted("wrong_values"), options={"graph": graph})
    path = write(finding, tmp_path / "repro.py").path

    assert shows(path)
    mend(planted("wrong_values"))
    assert not shows(path)


@pytest.mark.parametrize("transform", ["aot_eager", "backend:aot_eager", "export", "decompose", "eager"])
def test_a_transform_that_does_what_it_should_shows_nothing(transform, tmp_path, shows):
    graph, inputs = captured(relu, *X)
    seen = reports.comparison("outputs[0]", Verdict.DIVERGED, error=1.0)
    case = Case(program="subject", transform=transform)
    report = reports.report(Stage.of("forward", (seen,)), case=case)

    path = write(Finding(graph=graph, inputs=inputs, case=case, report=report), tmp_path / "repro.py").path

    assert not shows(path)


@pytest.mark.parametrize("transform", ["cast:bfloat16", "autocast:bfloat16"])
def test_a_program_that_does_not_survive_a_lower_precision(transform, tmp_path, shows):
    def cancel(x, weight):
        return (x @ weight) * 1000.0

    torch.manual_seed(0)
    inputs = (torch.randn(4, 8), torch.randn(8, 4))
    finding = found(symbolic_trace(cancel), inputs, transform, policy="rtol=0,atol=1e-3", ignore=("dtype",))

    path = write(finding, tmp_path / "repro.py").path

    assert shows(path)


def test_what_shows_in_float64_only_is_shown_there(planted, tmp_path, shows):
    def slightly(x):
        return (x.to(torch.bfloat16) * 1.0).float()

    file = tmp_path / "planted_slightly.py"
    file.write_text(
        textwrap.dedent(
            """
            import operator
            IS_BROKEN = True
            def scaled(gm, inputs):
                for node in gm.graph.nodes:
                    if IS_BROKEN and node.target is operator.mul:
                        node.args = (node.args[0], 1.0001)
            """
        )
    )
    finding = found(*captured(slightly, torch.linspace(1, 2, 8)), f"{file}:scaled")
    assert finding.report.comparisons[0].details["question"] == "semantic"

    path = write(finding, tmp_path / "repro.py").path

    assert shows(path)
    assert "float64" in path.read_text().partition('"""\n\n')[0]
    mend(f"{file}:scaled")
    assert not shows(path)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x):
        return torch.relu(self.norm(self.net(x)) * self.scale + self.shift)


@pytest.mark.parametrize("graph", ["dynamo", "export"])
def test_a_graph_with_modules_and_parameters_is_a_module(graph, planted, tmp_path, shows):
    traced_block = symbolic_trace(Block().train())
    finding = found(
        traced_block, (torch.randn(4, 3),), planted("wrong_values"), options={"graph": graph}, semantic=False
    )

    path = write(finding, tmp_path / "repro.py").path

    assert shows(path)
    text = path.read_text()
    assert "self.net_0 = torch.nn.Linear(in_features=3, out_features=3, bias=True)" in text
    assert "self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))" in text
    assert 'self.register_buffer("shift", torch.tensor(0.5))' in text
    mend(planted("wrong_values"))
    assert not shows(path)


def test_the_gradient_of_a_parameter_is_read_where_the_candidate_holds_it(planted, tmp_path, shows):
    finding = found(symbolic_trace(nn.Sequential(nn.Linear(2, 2))), (torch.ones(3, 2),), planted("wrong_gradients"))
    path = write(finding, tmp_path / "repro.py").path

    assert "return call._0.weight.grad" in path.read_text() or "return call._0.bias.grad" in path.read_text()
    assert shows(path)
    mend(planted("wrong_gradients"))
    assert not shows(path)


def test_names_are_those_that_a_person_would_give(tmp_path, planted):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.outer = nn.Linear(2, 2)

        def forward(self, x, count: int):
            return torch.relu(self.outer(self.inner(x)))[..., 1:] * count

    torch._dynamo.reset()
    graph, inputs = captured(Layer(), torch.ones(3, 2), 7, dynamic=True)
    text = write(found(graph, inputs, planted("wrong_dtype"), semantic=False), tmp_path / "repro.py").path.read_text()

    signature = next(line for line in text.splitlines() if line.startswith("def program("))
    assert signature == "def program(weight, bias, size, x, outer_weight, outer_bias, count):"
    assert "[..., 1:]" in text
    assert "L_self" not in text
    assert "# test_repro.py:" in text
    assert str(tmp_path) not in text


def test_a_graph_in_a_graph_is_a_function_in_the_function(planted, tmp_path, shows):
    def branch(x):
        return torch.cond(x.sum() > 0, lambda x: torch.relu(x), lambda x: torch.relu(-x), (x,))

    finding = found(*captured(branch, torch.tensor([-1.0, 3.0])), planted("wrong_dtype"), semantic=False)
    path = write(finding, tmp_path / "repro.py").path

    assert "def cond_true_0(" in path.read_text()
    assert shows(path)
    mend(planted("wrong_dtype"))
    assert not shows(path)


OPERATOR = """
import torch

@torch.library.custom_op("planted_library::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return 3 * x

@thrice.register_fake
def _(x):
    return torch.empty_like(x)
"""


@pytest.mark.slow
def test_an_operator_of_the_users_is_registered_by_the_module_that_defines_it(planted, tmp_path):
    file = tmp_path / "planted_operators.py"
    file.write_text(OPERATOR)
    thrice = load_callable(f"{file}:thrice", what="operator")
    graph, inputs = captured(lambda x: torch.relu(torch.ops.planted_library.thrice(x)), *X)
    finding = found(graph, inputs, planted("wrong_values"), semantic=False)
    path = write(finding, tmp_path / "repro.py").path

    ended = run_alone(path)

    assert "torch.ops.planted_library.thrice(x)" in path.read_text()
    assert ended.returncode == 1, ended.stderr
    assert thrice is not None


def test_large_tensors_lie_beside_the_script(planted, tmp_path, shows):
    torch.manual_seed(0)
    finding = found(*captured(relu, torch.randn(50, 40)), planted("wrong_values"))

    written = write(finding, tmp_path / "repro.py")

    assert written.tensors_path == tmp_path / "repro.pt"
    assert "repro.pt" in written.path.read_text()
    assert shows(written.path)
    assert "repro.pt" in issue_text(finding, written.path)


def test_a_large_input_and_a_large_parameter_of_one_name_each_keep_their_values(planted, tmp_path, shows):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(50, 40))

        def forward(self, weight):
            return torch.relu(weight + self.weight)

    torch.manual_seed(0)
    module, weight = Weighted(), torch.randn(50, 40)
    finding = found(symbolic_trace(module), (weight,), planted("wrong_values"), semantic=False)
    written = write(finding, tmp_path / "repro.py")

    assert shows(written.path)
    script = sys.modules["planted_script"]
    assert torch.equal(script.inputs()[0], weight)
    assert torch.equal(script.Program().weight, module.weight)


def test_a_large_tensor_named_memory_is_not_the_memory_that_others_share():
    base, alone = torch.randn(500), torch.randn(500)

    tensors = read_back(write_tensors({"memory": alone, "x": base[:400], "y": base[100:]}))

    assert torch.equal(tensors["memory"], alone)
    assert torch.equal(tensors["x"], base[:400])
    assert torch.equal(tensors["y"], base[100:])


def test_without_data_nothing_of_the_user_is_in_the_script(planted, tmp_path, shows):
    torch.manual_seed(0)
    finding = found(*captured(relu, torch.randn(50, 40) + 0.123), planted("wrong_values"))

    written = write(finding, tmp_path / "repro.py", data=False)

    assert not written.embeds_data
    assert written.tensors_path is None
    text = written.path.read_text()
    assert "torch.randn((50, 40))" in text
    assert shows(written.path)
    worst = finding.report.comparisons[0].worst
    for told in (text, issue_text(finding, written.path, data=False)):
        assert "times the noise" in told
        assert str(worst.candidate) not in told
    assert str(worst.candidate) in issue_text(finding, written.path)


def test_an_input_may_come_with_the_expression_that_draws_it(planted, tmp_path):
    recipe = "torch.randn(5, 4, generator=torch.Generator().manual_seed(3))"
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    graph, inputs = captured(relu, x)
    finding = found(graph, inputs, planted("wrong_values"), inputs_from={0: recipe})

    written = write(finding, tmp_path / "repro.py")

    assert not written.embeds_data
    assert f"return ({recipe},)" in written.path.read_text()
    other = Finding(
        graph=graph,
        inputs=(x + 1,),
        case=finding.case,
        report=finding.report,
        inputs_from={0: recipe},
    )
    with pytest.raises(UsageError, match="does not give the values"):
        write(other, tmp_path / "other.py")


def test_what_fails_now_and_then_is_tried_again(planted, tmp_path):
    finding = found(*captured(relu, *X), planted("wrong_values"), tries=12)

    assert "any(main() for _ in range(12))" in write(finding, tmp_path / "repro.py").path.read_text()


def test_an_issue_says_what_where_and_how(planted, tmp_path):
    finding = found(*captured(relu, *X), planted("wrong_values"))
    path = write(finding, tmp_path / "repro.py").path

    text = issue_text(finding, path)

    assert text.startswith(
        "# The pass wrong_values on the dynamo graph gives other outputs than eager PyTorch for relu\n"
    )
    assert path.read_text().strip() in text
    assert f"torch {torch.__version__}" in text
    assert "| `outputs[0][0]` | 0.0 | 1.0 | 0.0 |" in text


def test_another_exception_is_not_the_bug(planted, tmp_path, shows):
    finding = found(*captured(relu, *X), planted("raises"))
    path = write(finding, tmp_path / "repro.py").path
    assert shows(path)

    file = planted("raises").rpartition(":")[0]
    with open(file) as source:
        text = source.read().replace("there is no relu", "out of paper")
    with open(file, "w") as target:
        target.write(text)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="out of paper"):
        shows(path)


def test_the_key_of_an_exception_has_nothing_that_changes_from_run_to_run():
    message = (
        "backend='inductor' raised:\nLoweringError: cannot lower aten.foo of node 17 at 0x7fab in /tmp/x1/y.py, sorry\n"
    )

    assert key_of(Failure.of(RuntimeError(message), stage="forward")) == "LoweringError: cannot lower aten.foo of node"


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        ("quantize:x86", "another program"),
        ("module:file.py:build", "another program"),
        ("candidate", "lives in this process only"),
        ("nowhere.py:fn", "there is no file"),
    ],
)
def test_what_no_script_can_do_is_refused_with_a_reason(transform, why, tmp_path):
    graph, inputs = traced(relu, *X)
    case = Case(program="subject", transform=transform)
    stage = Stage.of("forward", (reports.comparison("outputs", Verdict.DIVERGED, error=1.0),))
    finding = Finding(graph=graph, inputs=inputs, case=case, report=reports.report(stage, case=case))

    with pytest.raises(ReproUnwritable, match=why):
        write(finding, tmp_path / "repro.py")


def test_a_call_that_no_script_can_make_is_refused_by_name(tmp_path):
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(lambda x: x, (x,)))
    case = Case(program="subject", transform="inductor")
    stage = Stage.of("forward", (reports.comparison("outputs", Verdict.DIVERGED, error=1.0),))
    finding = Finding(graph=GraphModule({}, graph), inputs=X, case=case, report=reports.report(stage, case=case))

    with pytest.raises(ReproUnwritable, match="lambda"):
        write(finding, tmp_path / "repro.py")


MARK = "__import__('pathlib').Path('MARK').touch()"


class TestAGraphFromAHostileFile:
    """A file may have any text as an attribute, a path or a place in the source, and a script must not run it."""

    def test_has_modules_whose_attributes_are_not_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        linear = nn.Linear(3, 3)
        assert write_module(linear, "linear") == "torch.nn.Linear(in_features=3, out_features=3, bias=True)"

        linear.in_features = f"{MARK} or 3"

        with pytest.raises(ReproUnwritable, match="does not say all"):
            write_module(linear, "linear")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("keeps_names", [False, True])
    def test_has_parameters_whose_names_are_not_run(self, keeps_names):
        graph = GraphModule({"layers": nn.Sequential(nn.ReLU())}, calling("layers"))
        graph.layers._parameters[f"x = {MARK} #"] = nn.Parameter(torch.ones(2))

        with pytest.raises(ReproUnwritable, match="not a name in Python"):
            write_program(graph, (torch.ones(2),), keeps_names=keeps_names)

    def test_has_paths_that_are_not_run(self):
        path = "x = exit(1) #"
        graph = GraphModule({}, Graph())
        graph._buffers[path] = torch.ones(2)
        graph.graph = reading(path)

        (name,) = write_program(graph, (torch.ones(2),)).tensors
        assert name.isidentifier()
        with pytest.raises(ReproUnwritable, match="not a name in Python"):
            write_program(graph, (torch.ones(2),), keeps_names=True)

    def test_has_places_that_stay_comments(self):
        graph, inputs = traced(lambda x: torch.relu(x), torch.ones(2))
        node = list(graph.graph.nodes)[1]
        node.meta["nn_module_stack"] = {"": (f"layer\n{MARK}", "torch.nn.ReLU")}
        node.meta["stack_trace"] = f'File "model\r{MARK}#\ud800", line 3, in f\n    code\n'

        *comments, statement = write_program(graph, inputs).body

        assert statement == "return torch.relu(x)"
        assert "\n".join(comments).isprintable()
        assert "module layer" in comments[0]

    def test_has_options_that_are_not_run(self, tmp_path):
        options = {"device": f'cpu" + {MARK} + "'}
        case = Case(program="recorded", transform="autocast:bfloat16", options=options)

        source = write_transform(case, ScriptImports(script=tmp_path / "repro.py"), "cpu")

        assert f"torch.autocast({options['device']!r}, torch.bfloat16)(program)" in source.lines[2]

    def test_has_draws_that_are_not_run(self):
        with pytest.raises(UsageError, match="drawn by randn, zeros or ones"):
            Draw(by="os.system('touch MARK') or torch.zeros")


def calling(path):
    """Return a graph that calls the module at a path."""
    graph = Graph()
    graph.output(graph.call_module(path, (graph.placeholder("x"),)))
    return graph


def reading(path):
    """Return a graph that adds the attribute at a path to its input."""
    graph = Graph()
    x, read = graph.placeholder("x"), graph.create_node("get_attr", path, name="read")
    graph.output(graph.call_function(torch.add, (x, read)))
    return graph


def test_a_folder_with_an_emoji_is_found_by_a_script(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "my-🔥.py").write_text("def fold(gm): ...\n", encoding="utf-8")

    lines = ScriptImports(script=tmp_path / "repro.py").of_object(f"{tmp_path}/elsewhere/my-🔥.py:fold").lines

    assert 'pathlib.Path(__file__).parent / "repro_code/my-🔥.py"' in lines[2]


def test_a_long_assignment_is_not_broken_at_its_sign(tmp_path):
    name = "some_rather_long_name_of_a_weight_that_a_pass_looks_for"
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.randn(100)))
    module.forward = lambda x: x + getattr(module, name)
    graph = GraphModule(module, reading(name))
    case = Case(program="subject", transform="inductor")
    stage = Stage.of("forward", (reports.comparison("outputs", Verdict.DIVERGED, error=1.0),))
    report = reports.report(stage, case=case)
    finding = Finding(graph=graph, inputs=(torch.ones(100),), case=case, report=report, keeps_names=True)

    path = write(finding, tmp_path / "repro.py").path

    compile(path.read_text(), str(path), "exec")
    assert f'self.{name} = torch.nn.Parameter(saved["{name}"])' in path.read_text()


def test_a_finding_must_be_of_something_that_failed():
    graph, inputs = traced(relu, *X)

    with pytest.raises(UsageError, match="nothing to reproduce"):
        Finding(graph=graph, inputs=inputs, case=reports.equivalent().case, report=reports.equivalent())
    with pytest.raises(UsageError, match="1 placeholders and 0 inputs"):
        Finding(graph=graph, inputs=(), case=reports.diverged().case, report=reports.diverged())


def test_settings_that_were_changed_are_found_and_no_others():
    before = changed_settings()
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy", "compile_threads": 3}):
        during = changed_settings()

    assert {name: value for name, value in during.items() if before.get(name) != value} == {
        "torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY": "accuracy"
    }


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.bool, torch.complex64, torch.complex128),
)


@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 3), max_size=3))
@settings(max_examples=150, deadline=None)
def test_every_bit_of_a_tensor_is_read_back(data, dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)

    made = eval(write_contiguous(tensor), {"torch": torch})

    assert made.dtype == dtype
    assert made.shape == tensor.shape
    assert bytes(made.reshape(-1).view(torch.uint8).tolist()) == bytes(raw)


@pytest.mark.parametrize(
    ("dtype", "values", "text"),
    [
        (torch.float32, [0.1, -2.5e-9], "torch.tensor([0.1, -2.5e-09])"),
        (torch.float16, [0.1, 3.0], "torch.tensor([0.1, 3.0], dtype=torch.float16)"),
        (torch.bfloat16, [0.1, 256.0], "torch.tensor([0.1, 256.0], dtype=torch.bfloat16)"),
        (torch.float64, [0.1, math.nan], "torch.tensor([0.1, torch.nan], dtype=torch.float64)"),
        (torch.float32, [-math.inf, -0.0], "torch.tensor([-torch.inf, -0.0])"),
        (torch.int64, [[1], [2]], "torch.tensor([[1], [2]])"),
        (torch.int8, [[0, 0]], "torch.zeros((1, 2), dtype=torch.int8)"),
        (torch.float32, [[0.5, 0.5]], "torch.full((1, 2), 0.5)"),
    ],
)
def test_numbers_are_written_as_a_person_would(dtype, values, text):
    assert write_contiguous(torch.tensor(values, dtype=dtype)) == text


def read_back(source):
    scope = {"torch": torch, "saved": source.saved}
    for line in source.setup:
        exec(line, scope)
    return {name: eval(text, scope) for name, text in source.expressions.items()}


BASE = torch.arange(24.0)
LAYOUTS = {
    "contiguous": torch.randn(2, 3),
    "transposed": torch.randn(2, 3).t(),
    "channels_last": torch.randn(1, 2, 3, 2).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3).expand(2, 3),
    "sliced": torch.randn(4, 6)[1:, ::2],
    "overlapping": torch.arange(6.0).as_strided((3, 2), (2, 0)),
    "trained": torch.randn(3, requires_grad=True),
    "large and sliced": torch.randn(40, 40)[:, 3:7],
    "large and transposed": torch.randn(40, 30).t(),
    "scalar": torch.tensor(0.1),
    "empty": torch.empty(0, 3),
    "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "mask": torch.tensor([True, False]),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_and_values_of_a_tensor_are_kept(name):
    tensor = LAYOUTS[name]

    made = read_back(write_tensors({"x": tensor}))["x"]

    assert type(made) is type(tensor)
    assert (made.dtype, made.shape, made.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert made.requires_grad == tensor.requires_grad
    assert made.is_leaf
    assert made.is_conj() == tensor.is_conj()
    if tensor.layout is torch.strided:
        assert made.stride() == tensor.stride()
        assert torch.equal(made, tensor)


@pytest.mark.parametrize("size", [8, 500])
@pytest.mark.parametrize("data", [True, False])
def test_tensors_that_share_memory_still_do(size, data):
    base = torch.randn(size) + 5.0
    given = {"x": base[:4].requires_grad_(), "y": base[2:6], "z": torch.ones(2)}

    made = read_back(write_tensors(given, data=data))

    assert made["x"].untyped_storage().data_ptr() == made["y"].untyped_storage().data_ptr()
    assert made["z"].untyped_storage().data_ptr() != made["x"].untyped_storage().data_ptr()
    assert torch.equal(made["x"][2:].detach(), made["y"][:2])
    assert made["x"].requires_grad
    assert not made["y"].requires_grad
    assert torch.equal(made["x"], given["x"]) is data
