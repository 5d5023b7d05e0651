"""Recorded graphs: what is kept and what is said to be lacking, and a recorded directory as a program."""

import json
import random
import re
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.fx.experimental._backward_state import BackwardState

import torchdelta as td
from torchdelta._torch.compile import settings
from torchdelta._torch.graphs.graphs import after_aot
from torchdelta._torch.process import runtime
from torchdelta.program import recordings
from torchdelta.program.loading import load_program
from torchdelta.records.recording import RECORDING, AutocastSetting, Recording, read_recording, write_recording

pytestmark = pytest.mark.usefixtures("trusted")

RELU_BUG = {"torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}
PASSES = """
import ctypes

import torch


def healthy(graph_module, example_inputs):
    return lambda *args: graph_module(*[arg.clone() for arg in args])  # a pass that changes nothing is not tested


def relu_segfaults(graph_module, example_inputs):
    if any("relu" in str(node.target) for node in graph_module.graph.nodes):
        ctypes.string_at(0)
    return graph_module


def relu_is_off(graph_module, example_inputs):
    for node in list(graph_module.graph.nodes):
        if "relu" in str(node.target):
            with graph_module.graph.inserting_after(node):
                off = graph_module.graph.call_function(torch.add, (node, 0.1))
            node.replace_all_uses_with(off, lambda user, off=off: user is not off)
    graph_module.recompile()
    return graph_module
"""


def build():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Sigmoid()
    return torch.nn.Sequential(*layers)


def graph_of(function):
    return torch.fx.symbolic_trace(function)


def first_of_two(first, second):
    return first * 2


def record(directory, graph_module, inputs, **words):
    return recordings.write(directory, graph_module, inputs, Recording(name="test", **{"level": "dynamo", **words}))


def around():
    """What is on where a graph is called."""
    on = runtime.autocast()
    autocast = AutocastSetting(device=on[0], dtype=on[1]) if on is not None else None
    return {"is_grad_enabled": torch.is_grad_enabled(), "autocast": autocast}


def record_compiled(directory, call, *inputs, **words):
    """Record the graph that dynamo hands over, when it is called, as a guard would."""
    written = []

    def backend(graph_module, _):
        def run(*args):
            written.append(record(directory, graph_module, args, **around(), **words))
            return graph_module(*args)

        return run

    torch._dynamo.reset()
    torch.compile(call, backend=backend)(*inputs)
    torch._dynamo.reset()
    (only,) = written
    return only


def run_python(code, cwd):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def imported_state(monkeypatch):
    """What loading a recording sets holds from then on: here until the end of the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with runtime.preserved():
        yield


@pytest.fixture
def passes(tmp_path):
    file = tmp_path / "passes.py"
    file.write_text(PASSES)
    return file


@pytest.fixture
def command_line(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "torchdelta", *map(str, arguments), "--trust", str(tmp_path)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def assert_one_sentence(ran, said):
    assert ran.returncode == 2, ran
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert re.search(said, ran.stderr), ran.stderr


class TestRoundTrip:
    def test_a_recorded_graph_is_a_program_that_computes_the_same_to_the_bit(self, tmp_path):
        model, x = build(), torch.randn(3, 4)
        written = record_compiled(tmp_path, model, x)

        program, recording = recordings.read(tmp_path)

        (output,) = program.call(*program.args)
        assert torch.equal(output, model(x))
        assert recording == written
        assert recording.lacks == ()
        assert recording.nodes == len(program.call.graph.nodes)
        assert program.name == str(tmp_path)

    def test_strides_gradients_asked_for_and_parameters_are_kept(self, tmp_path):
        def both(first, second, third):
            return first + second + third

        inputs = (
            torch.randn(3, 4).t(),
            torch.randn(4, 3, requires_grad=True),
            torch.nn.Parameter(torch.randn(4, 3), requires_grad=False),
        )
        record(tmp_path, graph_of(both), inputs)

        args = recordings.read(tmp_path)[0].args

        for given, read in zip(inputs, args, strict=True):
            assert torch.equal(given, read)
            assert given.stride() == read.stride()
            assert given.requires_grad == read.requires_grad
            assert type(given) is type(read)

    def test_inputs_that_alias_each_other_do_so_again(self, tmp_path):
        def three(first, second, third):
            return first + second + third

        whole = torch.arange(6.0)
        record(tmp_path, graph_of(three), (whole, whole[2:3], whole))

        first, second, third = recordings.read(tmp_path)[0].args

        assert first is third
        first[2] = 100.0
        assert second.item() == 100.0

    def test_a_parameter_and_a_view_of_it_share_memory_again(self, tmp_path):
        parameter = torch.nn.Parameter(torch.arange(6.0))
        record(tmp_path, graph_of(first_of_two), (parameter, parameter[4:]))

        first, second = recordings.read(tmp_path)[0].args
        with torch.no_grad():
            first[5] = 100.0

        assert second[1].item() == 100.0
        assert second.requires_grad

    def test_aliases_among_what_was_computed_under_autograd_do_so_again(self, tmp_path):
        computed = torch.ones(4, requires_grad=True) * 3
        record(tmp_path, graph_of(lambda first, second: first + second), (computed, computed))

        first, second = recordings.read(tmp_path)[0].args

        assert first is second
        assert first.is_leaf
        assert first.requires_grad

    def test_numbers_and_nested_values_are_kept(self, tmp_path):
        inputs = (3, 2.5, None, [torch.ones(2), (torch.zeros(1), float("inf"))])
        record(tmp_path, graph_of(lambda a, b, c, d: a), inputs)

        number, real, nothing, nested = recordings.read(tmp_path)[0].args

        assert (number, real, nothing, nested[1][1]) == (3, 2.5, None, float("inf"))
        assert torch.equal(nested[0], torch.ones(2))
        assert torch.equal(nested[1][0], torch.zeros(1))

    def test_symbols_are_the_numbers_that_they_were(self, tmp_path):
        def doubled(x):
            return x * x.shape[0]

        written = []

        def backend(graph_module, _):
            return lambda *args: written.append(record(tmp_path, graph_module, args)) or graph_module(*args)

        torch._dynamo.reset()
        torch.compile(doubled, backend=backend, dynamic=True)(torch.ones(5))
        program = recordings.read(tmp_path)[0]

        assert [record.lacks for record in written] == [()]
        assert 5 in program.args
        assert torch.equal(program.call(*program.args)[0], torch.full((5,), 5.0))

    def test_graphs_behind_aot_are_programs_too(self, tmp_path):
        returned = {}

        def compiler(graph_module, _, level):
            def run(*args):
                assert record(tmp_path / level, graph_module, args, level=level).lacks == ()
                returned[level] = graph_module(*args)
                return returned[level]

            return run

        x = torch.randn(3, 4, requires_grad=True)
        torch._dynamo.reset()
        torch.compile(build(), backend=after_aot(compiler))(x).sum().backward()

        assert returned.keys() == {"forward", "backward"}
        for level, outputs in returned.items():
            program = recordings.read(tmp_path / level)[0]
            again = program.call(*program.args)
            assert [None if value is None else value.tolist() for value in again] == [
                None if value is None else value.tolist() for value in outputs
            ]

    def test_a_graph_behind_aot_asks_for_no_gradients(self, tmp_path):
        record(tmp_path, graph_of(first_of_two), (torch.ones(2, requires_grad=True), torch.ones(2)), level="forward")

        assert not any(value.requires_grad for value in recordings.read(tmp_path)[0].args)

    @pytest.mark.parametrize(
        "recording",
        [
            Recording(name="bare", level="backward"),
            Recording(
                name="nan",
                level="dynamo",
                transform="inductor",
                options={"dynamic": True, "mode": "max-autotune"},
                stages=("forward",),
                policy="rtol=1e-3,atol=1e-4",
                nodes=7,
                settings={"torch._inductor.config.a": None, "b": [1, "inf", {"c": 2.5}], "d": "\\nan", "e": True},
                imports=("package.module", "file.py"),
                path=("folder",),
                is_grad_enabled=False,
                autocast=AutocastSetting(device="cpu", dtype="bfloat16"),
                lacks=("something",),
            ),
        ],
        ids=lambda recording: recording.name,
    )
    def test_a_record_is_read_as_it_was_written(self, tmp_path, recording):
        write_recording(recording, tmp_path)

        assert read_recording(tmp_path) == recording

    @pytest.mark.parametrize(
        ("words", "said"),
        [({"level": "triton"}, "'triton'"), ({"level": "dynamo", "stages": ("sideways",)}, "sideways")],
    )
    def test_a_record_of_what_cannot_be_asked_is_refused(self, words, said):
        with pytest.raises(td.UsageError, match=said):
            Recording(name="wrong", **words)

    def test_an_input_too_few_is_refused(self, tmp_path):
        with pytest.raises(td.UsageError, match="takes 2 inputs and was given 1"):
            record(tmp_path, graph_of(first_of_two), (torch.ones(2),))

        assert not (tmp_path / RECORDING).exists()


class TestWritingChangesNothing:
    def test_of_tensors_gradients_hooks_and_random_numbers(self, tmp_path):
        called = []
        parameter = torch.nn.Parameter(torch.randn(3))
        parameter.register_hook(lambda gradient: called.append("hook"))
        parameter.register_post_accumulate_grad_hook(lambda tensor: called.append("accumulated"))
        parameter.grad = torch.ones(3)
        computed = parameter * 2
        before = [(value.detach().clone(), value._version) for value in (parameter, computed)]
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

        written = record(tmp_path, graph_of(first_of_two), (parameter, computed))

        assert written.lacks == ()
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert (np.random.get_state()[1] == states[2]).all()
        for value, (then, version) in zip((parameter, computed), before, strict=True):
            assert torch.equal(value, then)
            assert value._version == version
        assert torch.equal(parameter.grad, torch.ones(3))
        assert computed.grad_fn is not None
        assert called == []
        computed.sum().backward()
        assert called == ["hook", "accumulated"]

    def test_and_what_is_read_has_neither_the_gradient_nor_the_hooks(self, tmp_path):
        called = []
        parameter = torch.nn.Parameter(torch.randn(3))
        parameter.register_hook(lambda gradient: called.append("hook"))
        parameter.grad = torch.ones(3)
        record(tmp_path, graph_of(first_of_two), (parameter, torch.ones(3)))

        program = recordings.read(tmp_path)[0]
        assert program.args[0].grad is None
        program.call(*program.args).sum().backward()

        assert torch.equal(program.args[0].grad, torch.full((3,), 2.0))
        assert called == []

    @pytest.mark.parametrize(
        "surrounding",
        [
            torch.no_grad,
            torch.inference_mode,
            lambda: torch.autocast("cpu", torch.bfloat16),
            lambda: FakeTensorMode(allow_non_fake_inputs=True),
        ],
        ids=["no_grad", "inference_mode", "autocast", "fake"],
    )
    def test_wherever_it_is_written(self, tmp_path, surrounding):
        computed = torch.randn(3, requires_grad=True) * 2
        inputs, graph = (computed, computed[1:]), graph_of(first_of_two)
        with surrounding():
            grad_mode, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            written = record(tmp_path, graph, inputs)
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad_mode, inference)

        assert written.lacks == ()
        assert torch.equal(recordings.read(tmp_path)[0].args[0], computed)

    def test_of_tensors_that_were_made_in_inference_mode(self, tmp_path):
        with torch.inference_mode():
            made = torch.arange(3.0)
            written = record(tmp_path, graph_of(first_of_two), (made, made[1:]), is_grad_enabled=False)

        program = recordings.read(tmp_path)[0]

        assert written.lacks == ()
        assert torch.equal(program.call(*program.args), torch.tensor([0.0, 2.0, 4.0]))


class TestWhatWasOnAroundIt:
    def test_autocast_is_on_again(self, tmp_path):
        model, x = build(), torch.randn(3, 4)
        with torch.autocast("cpu", torch.bfloat16):
            under = model(x)
            record_compiled(tmp_path / "under", model, x)
        record_compiled(tmp_path / "outside", model, x)

        there, outside = (recordings.read(tmp_path / name)[0] for name in ("under", "outside"))

        assert under.dtype is torch.bfloat16
        assert torch.equal(there.call(*there.args)[0], under)
        assert torch.equal(outside.call(*outside.args)[0], model(x))
        assert not torch.is_autocast_enabled("cpu")

    def test_gradients_are_off_again(self, tmp_path):
        model, x = build(), torch.randn(3, 4)
        with torch.no_grad():
            record_compiled(tmp_path / "off", model, x)
        record_compiled(tmp_path / "on", model, x)

        off, on = (recordings.read(tmp_path / name)[0] for name in ("off", "on"))

        assert not off.call(*off.args)[0].requires_grad
        assert on.call(*on.args)[0].requires_grad
        assert torch.is_grad_enabled()


class Subclass(torch.Tensor):
    pass


class Opaque:
    def __repr__(self):
        raise RuntimeError("nobody looks at me")

    def __getattr__(self, name):
        raise RuntimeError(f"nobody asks for {name}")


def fake_tensor():
    with FakeTensorMode():
        return torch.ones(2)


def script_object():
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(weight, None)


def process_group():
    return dist.ProcessGroup(0, 1)


UNKEEPABLE = {
    "opaque object": (Opaque, "Opaque"),
    "generator": (torch.Generator, "Generator"),
    "process group": (process_group, "ProcessGroup"),
    "backward state": (BackwardState, "BackwardState"),
    "fake tensor": (fake_tensor, "FakeTensor"),
    "tensor subclass": (lambda: torch.ones(2).as_subclass(Subclass), "Subclass"),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), "not strided"),
    "quantized tensor": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    "script object": (script_object, "ScriptObject"),
    "lambda": (lambda: lambda x: x, "lambda"),
}


class TestWhatIsLacking:
    @pytest.mark.filterwarnings("ignore:.*[qQ]uantiz.*")
    @pytest.mark.parametrize("kind", UNKEEPABLE)
    def test_an_input_that_cannot_be_written_is_left_out_alone(self, tmp_path, kind):
        make, said = UNKEEPABLE[kind]
        other = torch.randn(3)

        written = record(tmp_path, graph_of(first_of_two), (other, make()))

        (lack,) = written.lacks
        assert "the input second" in lack
        assert said in lack
        values = recordings.read_values(tmp_path / recordings.INPUTS)
        assert list(values) == ["first"]
        assert torch.equal(values["first"], other)
        with pytest.raises(
            td.ProgramError, match=r"has no second to run its graph on; the input second .* is left out"
        ):
            recordings.read(tmp_path)

    def test_nothing_is_lacking_where_all_can_be_written(self, tmp_path):
        assert record(tmp_path, graph_of(first_of_two), (torch.randn(3), torch.randn(3))).lacks == ()

    def test_what_was_said_to_be_lacking_before_stays_said(self, tmp_path):
        inputs = (torch.randn(3), torch.Generator())

        assert record(tmp_path, graph_of(first_of_two), inputs, lacks=("its data",)).lacks[0] == "its data"

    def test_a_graph_that_no_file_can_hold_is_left_as_code_to_read(self, tmp_path):
        def local(x):
            return x

        graph = torch.fx.Graph()
        graph.output(graph.call_function(local, (graph.placeholder("x"),)))

        written = record(tmp_path, torch.fx.GraphModule({}, graph), (torch.ones(2),))

        (lack,) = written.lacks
        assert "inside of a function" in lack
        assert "local" in (tmp_path / recordings.READABLE).read_text()
        with pytest.raises(td.ProgramError, match="has no graph that could be run; the graph cannot be run elsewhere"):
            recordings.read(tmp_path)

    def test_an_operator_of_main_is_said_to_be_nowhere_else(self, tmp_path):
        ran = run_python(
            """
            import torch
            from torchdelta.program import recordings as recorded
            from torchdelta.records.recording import Recording

            @torch.library.custom_op("of_main::double", mutates_args=())
            def double(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            graph = torch.fx.Graph()
            graph.output(graph.call_function(torch.ops.of_main.double.default, (graph.placeholder("x"),)))
            module = torch.fx.GraphModule({}, graph)
            print(recorded.write("there", module, [torch.ones(2)], Recording(name="test", level="dynamo")).lacks)
            """,
            tmp_path,
        )

        assert "__main__ is another file in another process" in ran.stdout, ran.stderr
        with pytest.raises(td.ReportUnreadable, match=r"no operator of_main::double is registered .* __main__"):
            recordings.read(tmp_path / "there")

    def test_a_transform_of_main_is_none_that_another_process_could_find(self, tmp_path):
        written = record(tmp_path, graph_of(first_of_two), (torch.ones(2),) * 2, transform="__main__:a_pass")

        assert written.transform is None
        assert "__main__" in written.lacks[0]


OPERATORS = """
import torch


@torch.library.custom_op("of_a_module::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)
"""


class TestWhatAnotherProcessNeeds:
    @pytest.mark.parametrize("way", ["by name", "by file"])
    def test_operators_and_passes_of_a_module_are_found_in_another_folder(self, tmp_path, way):
        code, elsewhere = tmp_path / "code", tmp_path / "elsewhere"
        code.mkdir()
        elsewhere.mkdir()
        (code / "my_operators.py").write_text(OPERATORS)
        (code / "my_passes.py").write_text(PASSES)
        loaded = "load_module('my_operators.py', what='test')" if way == "by file" else "import my_operators"
        wrote = run_python(
            f"""
            import torch
            from torchdelta.program import recordings as recorded
            from torchdelta.program.programs import load_module
            from torchdelta.records.recording import Recording
            import my_passes
            {loaded}

            graph = torch.fx.Graph()
            graph.output((graph.call_function(torch.ops.of_a_module.double.default, (graph.placeholder("x"),)),))
            module = torch.fx.GraphModule({{}}, graph)
            asked = Recording(name="test", level="dynamo", transform="my_passes:healthy")
            print(recorded.write("../there", module, [torch.ones(2)], asked))
            """,
            code,
        )
        assert "lacks=()" in wrote.stdout, wrote.stderr

        read = run_python(
            "import torchdelta as td; td.trust('../code'); print(td.check('../there', stages='forward').verdict.value)",
            elsewhere,
        )

        assert read.stdout == "equivalent\n", read.stderr
        assert (
            str(code / "my_operators.py" if way == "by file" else "my_operators")
            in (tmp_path / "there" / RECORDING).read_text()
        )

    @pytest.mark.usefixtures("imported_state")
    def test_settings_hold_once_it_was_loaded(self, tmp_path):
        record(tmp_path, graph_of(first_of_two), (torch.ones(2),) * 2, settings=RELU_BUG)
        assert settings.changed_settings().keys().isdisjoint(RELU_BUG)

        load_program(str(tmp_path))

        assert RELU_BUG.items() <= settings.changed_settings().items()

    @pytest.mark.usefixtures("imported_state")
    @pytest.mark.parametrize("name", ["os.environ", "torch._inductor.config.no_such_thing"])
    def test_a_setting_that_is_none_of_torchs_is_refused(self, tmp_path, name):
        record(tmp_path, graph_of(first_of_two), (torch.ones(2),) * 2, settings={name: 1})

        with pytest.raises(td.ProgramError, match=f"no setting {name}"):
            load_program(str(tmp_path))

    def test_a_module_that_is_gone_is_named(self, tmp_path):
        record(tmp_path, graph_of(first_of_two), (torch.ones(2),) * 2, imports=("no_such_module_anywhere",))

        with pytest.raises(
            td.UsageError, match="names the module no_such_module_anywhere, and no installed package has it"
        ):
            load_program(str(tmp_path))


class TestHalfWritten:
    def test_who_dies_before_the_end_leaves_nothing_that_looks_whole(self, tmp_path, monkeypatch):
        def die(*_):
            raise KeyboardInterrupt

        record(tmp_path, graph_of(first_of_two), (torch.ones(2),) * 2)
        load_program(str(tmp_path))
        for step in ("write_values", "write_recording"):
            monkeypatch.setattr(recordings, step, die)
            with pytest.raises(KeyboardInterrupt):
                record(tmp_path, graph_of(first_of_two), (torch.zeros(2),) * 2)

            with pytest.raises(
                td.ReportUnreadable, match=r"has no recording\.json: nothing was recorded there, or the"
            ):
                load_program(str(tmp_path))
            monkeypatch.undo()

    def test_a_recording_over_a_readable_one_leaves_nothing_of_that(self, tmp_path):
        graph = torch.fx.Graph()
        graph.output(graph.call_function(lambda x: x, (graph.placeholder("x"),)))
        record(tmp_path, torch.fx.GraphModule({}, graph), (torch.ones(2),))
        assert (tmp_path / recordings.READABLE).exists()

        record(tmp_path, graph_of(first_of_two), (torch.ones(2),) * 2)

        assert not (tmp_path / recordings.READABLE).exists()
        load_program(str(tmp_path))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('{"format": "torchdelta rec', "not JSON, or not all of it: .*; record the graph again"),
            ("[]", "not a recording"),
            ('{"schema_version": 5}', "not a recording"),
            ('{"format": "torchdelta recording", "recording_version": 2}', "version 2, .*: upgrade torchdelta"),
            ('{"format": "torchdelta recording", "recording_version": 0}', "version 0, .*: record the graph again"),
            ('{"format": "torchdelta recording", "recording_version": 1}', "missing; record the graph again"),
        ],
    )
    def test_what_is_no_record_says_what_to_do(self, tmp_path, text, said):
        (tmp_path / RECORDING).write_text(text)

        with pytest.raises(td.ReportUnreadable, match=said):
            load_program(str(tmp_path))

    def test_a_directory_whose_inputs_are_gone_is_refused(self, tmp_path):
        record(tmp_path, graph_of(first_of_two), (torch.ones(2),) * 2)
        (tmp_path / recordings.INPUTS).unlink()

        with pytest.raises(td.ReportUnreadable, match=r"cannot read .*inputs.json"):
            load_program(str(tmp_path))

    def test_a_place_that_cannot_be_written_to_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")

        with pytest.raises(td.UsageError, match=r"cannot write to .*file.*name another place"):
            record(tmp_path / "file", graph_of(first_of_two), (torch.ones(2),) * 2)


class TestAskedFromPython:
    @pytest.fixture
    def directory(self, tmp_path, passes):
        place = tmp_path / "recorded"
        record_compiled(
            place, build(), torch.randn(3, 4), transform=f"{passes}:relu_is_off", stages=("forward",), policy="close"
        )
        return str(place)

    def test_transform_stages_and_policy_are_those_of_the_recording(self, directory, passes):
        report = td.check(directory)

        assert report.verdict is td.Verdict.DIVERGED
        assert report.case.transform == f"{passes}:relu_is_off"
        assert report.case.stages == ("forward",)
        assert report.case.policy == "close"

    def test_unless_others_are_given(self, directory, passes):
        report = td.check(directory, transform=f"{passes}:healthy", stages="forward,gradients", policy="bitwise")

        assert report.verdict is td.Verdict.EQUIVALENT
        assert report.case.stages == ("forward", "gradients")
        assert report.case.policy == "bitwise"

    def test_options_belong_to_the_transform_that_was_recorded(self, directory, passes):
        recording = read_recording(directory)
        write_recording(replace(recording, options={"no_such_option": 1}), directory)

        with pytest.raises(td.UsageError, match="no option 'no_such_option'"):
            td.check(directory)
        assert td.check(directory, options={"dynamic": True}).case.options == {"dynamic": True}
        assert td.check(directory, transform=f"{passes}:healthy").case.options == {}

    def test_the_culprit_is_located(self, directory):
        assert "relu" in td.locate(directory).culprits[0].op

    def test_one_that_was_on_its_way_to_something_alive_needs_a_transform(self, tmp_path):
        record_compiled(tmp_path, build(), torch.randn(3, 4))

        with pytest.raises(td.UsageError, match="a transform that no other process can import: name one"):
            td.check(str(tmp_path))
        assert td.check(str(tmp_path), transform="eager").verdict is td.Verdict.EQUIVALENT

    def test_it_brings_its_own_arguments(self, directory):
        with pytest.raises(td.UsageError, match="brings its own arguments"):
            td.check(directory, (torch.ones(1),))


class TestCommandLine:
    @pytest.mark.parametrize("command", ["check", "locate", "minify", "diagnose"])
    def test_another_program_needs_a_transform(self, command_line, passes, command):
        out = ("-o", "out") if command in ("minify", "diagnose") else ()

        assert_one_sentence(command_line(command, "passes.py:build", *out), "name a transform")

    @pytest.mark.parametrize("command", ["check", "locate", "minify", "diagnose"])
    def test_a_directory_without_a_record_is_refused_at_once(self, command_line, tmp_path, command):
        (tmp_path / "half").mkdir()
        out = ("-o", "out") if command in ("minify", "diagnose") else ()

        assert_one_sentence(command_line(command, "half", *out), "half has no recording.json")

    @pytest.mark.slow
    def test_what_is_lacking_is_said(self, command_line, tmp_path, passes):
        place = tmp_path / "lacking"
        record(place, graph_of(first_of_two), (torch.ones(2), torch.Generator()), transform=f"{passes}:healthy")

        assert_one_sentence(command_line("check", "lacking"), "has no second .* is left out")

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "exits"), [("healthy", 0), ("relu_is_off", 1), ("relu_segfaults", 4)])
    def test_a_check_exits_by_the_verdict(self, command_line, tmp_path, passes, name, exits):
        record_compiled(tmp_path / "recorded", build(), torch.randn(3, 4), transform=f"{passes}:{name}")

        ran = command_line("check", "recorded", "--json", "report.json")

        assert ran.returncode == exits, ran.stderr
        case = json.loads((tmp_path / "report.json").read_text())["case"]
        assert case["program"] == "recorded"
        assert case["transform"] == f"{passes}:{name}"

    @pytest.mark.slow
    @pytest.mark.parametrize(("recorded_settings", "exits"), [(RELU_BUG, 1), ({}, 0)], ids=["bug", "none"])
    def test_inductor_is_wrong_where_its_settings_made_it_wrong(self, command_line, tmp_path, recorded_settings, exits):
        record_compiled(
            tmp_path / "recorded", torch.relu, torch.randn(64), transform="inductor", settings=recorded_settings
        )

        ran = command_line("check", "recorded")

        assert ran.returncode == exits, (ran.stdout, ran.stderr)


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
class TestDiagnosed:
    def test_what_segfaults_leaves_its_own_repro_behind(self, command_line, tmp_path, passes):
        place = tmp_path / "recorded"
        record_compiled(place, build(), torch.randn(3, 4), transform=f"{passes}:relu_segfaults")

        ran = command_line("diagnose", "recorded", "-o", "out")

        assert ran.returncode == 4, ran.stderr
        assert ran.stdout.splitlines()[-1] == "out/repro.py"
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["failure"]["type"] == "SIGSEGV"
        assert report["reduction"]["nodes_after"] == 3
        assert report["repro"]["confirmed"]
        assert "relu" in (tmp_path / "out" / "repro.py").read_text()

    def test_under_autocast_and_without_gradients_too(self, tmp_path, passes, workers):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            record_compiled(tmp_path / "recorded", build(), torch.randn(3, 4), transform=f"{passes}:relu_is_off")

        report = td.diagnose(str(tmp_path / "recorded"), out=tmp_path / "out", workers=workers)

        assert report.verdict is td.Verdict.DIVERGED
        assert "relu" in report.culprits[0].op
        assert report.repro.confirmed

    @pytest.mark.usefixtures("imported_state")
    def test_operators_of_a_module_go_with_its_graphs_to_the_workers(self, tmp_path, passes, workers, monkeypatch):
        code = tmp_path / "code"
        code.mkdir()
        (code / "operators_for_workers.py").write_text(OPERATORS.replace("of_a_module", "for_workers"))
        monkeypatch.syspath_prepend(code)
        import operators_for_workers  # noqa: F401

        record_compiled(
            tmp_path / "recorded",
            lambda x: torch.relu(torch.ops.for_workers.double(x)),
            torch.randn(3, 4),
            transform=f"{passes}:relu_is_off",
        )

        small = td.minify(str(tmp_path / "recorded"), out=tmp_path / "out", workers=workers)

        assert small.reduction.nodes_after == 3
        assert small.reduction.is_minimal
