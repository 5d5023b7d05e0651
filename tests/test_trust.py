"""A recording is data: code that it names runs only if it is installed, or where the user trusts it."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchdelta as td
from torchdelta._torch.compile.settings import is_harmless
from torchdelta._torch.graphs.computations import find_other_calls, is_computation
from torchdelta.program import recordings
from torchdelta.program.recordings import trust_flags
from torchdelta.records import trust
from torchdelta.records.recording import RECORDING, Recording, read_recording
from torchdelta.records.trust import require_trusted

EVIL = """
import pathlib
pathlib.Path(__file__).with_name("ran").write_text("it ran")


def evil(graph_module, example_inputs):
    return graph_module
"""


MARCH = "torch._inductor.config.cpp.march"
WRAPPER = "native -wrapper evil"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a file that leaves a trace when it is imported, and a recording beside it."""
    monkeypatch.setattr(trust, "_TRUSTED", [])
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "evil.py").write_text(EVIL)
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    recordings.write(tmp_path / "recorded", graph, [torch.randn(4)], Recording(name="test", level="dynamo"))
    return tmp_path


def changed(place, **fields):
    file = place / "recorded" / RECORDING
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return str(place / "recorded")


def has_run(place):
    return (place / "theirs" / "ran").exists()


def hostile(place):
    evil = place / "theirs" / "evil.py"
    return {
        "a file among the imports": {"imports": [str(evil)]},
        "a file by a path with dots": {"imports": [f"{place}/recorded/../theirs/evil.py"]},
        "a module in a folder that it names": {"imports": ["evil"], "path": [str(evil.parent)]},
        "a module of a package in such a folder": {"imports": ["evil.inner"], "path": [str(evil.parent)]},
        "the pass as a file": {"transform": f"{evil}:evil"},
        "the pass in a folder that it names": {"transform": "evil:evil", "path": [str(evil.parent)]},
        "another module as candidate": {"transform": f"module:{evil}:evil"},
        "a table of decompositions": {"transform": "decompose", "options": {"table": f"{evil}:evil"}},
        "the compiler's own compiler": {"settings": {"torch._inductor.config.cpp.cxx": [str(evil)]}},
        "a place to write to": {"settings": {"torch._inductor.config.trace.debug_dir": str(evil.parent)}},
        "the flags of the compiler's own compiler": {"settings": {MARCH: WRAPPER}},
        "another name of it": {"settings": {"torch._inductor.config.cpp.cxx": [None, "evil"]}},
        "a setting among the options": {"transform": "inductor", "options": {"config.cpp.march": WRAPPER}},
        "a compiler among the options": {"transform": "inductor", "options": {"config.cpp.cxx": str(evil)}},
        "a place among dynamo's options": {
            "transform": "inductor",
            "options": {"dynamo.debug_dir_root": str(evil.parent)},
        },
        "a text for a number": {"settings": {"torch._inductor.config.cpp.threads": "x"}},
        "a text for a number among the options": {"transform": "inductor", "options": {"config.cpp.threads": "x"}},
        "a million threads": {"settings": {"torch._inductor.config.compile_threads": 1_000_000}},
        "a cache on another machine": {"settings": {"torch._inductor.config.fx_graph_remote_cache": True}},
        "os": {"imports": ["os"]},
        "subprocess": {"imports": ["subprocess"]},
        "a module of the library with dots": {"imports": ["importlib.util"]},
        "a module that nobody has": {"imports": ["no_such_module_anywhere"]},
    }


NAMES = list(hostile(pathlib.Path()))


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_cannot_run_code_of_its_own(place, name):
    directory = changed(place, **hostile(place)[name])

    with pytest.raises((td.UsageError, td.ReportUnreadable)):
        td.check(directory, **({} if "transform" in hostile(place)[name] else {"transform": "eager"}))

    assert not has_run(place)
    assert str(place / "theirs") not in sys.path


def calling(target, *args):
    """Return the record of a node that calls a function or an operator, the last of `args` being the place to write."""
    return {"op": "call_function", "target": target, "args": list(args)}


def method(name, *args):
    return {"op": "call_method", "target": name, "args": [{"node": "first"}, *args]}


TOUCH = "touch ran"
SOURCE = "open('ran', 'w')"
CHECKPOINT = "function torch.utils.checkpoint:checkpoint"
SHAPES = "torch.fx.experimental.symbolic_shapes"
SYMPIFY = "function sympy.core.sympify:sympify"
EXPRESSION = "__import__('os').system('touch ran')"
HOSTILE_CALLS = {
    "a function of torch that starts a program": [calling("function torch.utils.collect_env:run", TOUCH)],
    "one that runs text": [calling("function torch.fx.graph_module:_exec_with_source", SOURCE, {"dict": []})],
    "one that is in a class": [calling("function torch._inductor.codecache:PyCodeCache.load", SOURCE)],
    "a method that runs text": [calling(f"function {SHAPES}:ShapeEnv.evaluate_guards_expression", 1, EXPRESSION, "")],
    "a module that a function returns": [
        calling(f"{CHECKPOINT.removesuffix('checkpoint')}_get_device_module", "os"),
        method("rename", "theirs", "ran"),
    ],
    "one that imports a module": [calling("function torch.nn.attention._fa3:_fa3_import_module", "theirs.evil")],
    "one that writes a file": [calling("function torch:from_file", "ran", True, 1)],
    "an operator that writes a file": [calling("operator aten::from_file", "ran", True, 1)],
    "a method of an array": [{**method("numpy"), "args": [{"node": "x"}]}, method("tofile", "ran")],
    "a method of a storage": [
        {**method("untyped_storage"), "args": [{"node": "x"}]},
        method("from_file", "ran", True, 1),
    ],
    "a method of the graph": [{"op": "call_module", "target": "to_folder", "args": ["ran"]}],
    "a method of the graph that another function calls": [
        {"op": "get_attr", "target": "to_folder", "args": []},
        calling(CHECKPOINT, {"node": "first"}, "ran"),
    ],
    "a method that another function calls": [
        calling("function builtins:getattr", {"node": "x"}, "numpy"),
        calling(CHECKPOINT, {"node": "first"}),
    ],
    "a function that an operator calls": [
        calling("function operator:methodcaller", "numpy"),
        calling("function operator:call", {"node": "first"}, {"node": "x"}),
    ],
    "an attribute with underscores": [calling("function builtins:getattr", {"node": "x"}, "__class__")],
    "a function of an installed package": [calling(SYMPIFY, EXPRESSION)],
    "a function of torch that it imports": [calling("function torch.hub:load", ".", "x")],
}
"""Nodes before the others of a graph whose input is `x`; the first of them is called `first`."""


def with_nodes(place, file, added):
    path = place / "recorded" / file
    document = json.loads(path.read_text())
    named = [{"name": name, "kwargs": {}, **node} for name, node in zip(("first", "second"), added, strict=False)]
    nodes = document["modules"][-1]["nodes"]
    nodes[1:1] = named  # behind the input
    path.write_text(json.dumps(document))
    return str(place / "recorded")


def test_a_recorded_graph_hides_no_function_among_the_keys_of_an_attribute(place):
    changed(place, imports=["sympy"])
    path = place / "recorded" / "graph.json"
    document = json.loads(path.read_text())
    document["modules"][-1]["attributes"] = {"hidden": {"dict": [[{"target": SYMPIFY}, 1]]}}
    path.write_text(json.dumps(document))
    directory = with_nodes(place, "graph.json", [{"op": "get_attr", "target": "hidden", "args": []}])

    with pytest.raises(td.UsageError, match="first reads hidden"):
        td.check(directory, transform="eager")


@pytest.mark.parametrize("name", HOSTILE_CALLS)
def test_a_recorded_graph_may_only_call_what_computes(place, name, monkeypatch):
    monkeypatch.chdir(place)
    changed(place, imports=["sympy", "torch.hub"])
    directory = with_nodes(place, "graph.json", HOSTILE_CALLS[name])

    # some are not even looked up
    with pytest.raises(
        (td.UsageError, td.ReportUnreadable),
        match=rf"graph\.json: .*( --trust {directory}|, which no traced graph does)",
    ):
        td.check(directory, transform="eager")
    assert not pathlib.Path("ran").exists()


def test_recorded_inputs_are_read_and_not_computed(place, monkeypatch):
    monkeypatch.chdir(place)
    directory = with_nodes(place, "inputs.json", HOSTILE_CALLS["one that writes a file"])

    with pytest.raises(td.ReportUnreadable, match="first is computed, and values are only read"):
        td.check(directory, transform="eager")
    assert not pathlib.Path("ran").exists()


def test_recorded_inputs_are_in_no_structure_that_is_built_by_a_call(place, monkeypatch):
    monkeypatch.chdir(place)
    changed(place, imports=["sympy"])
    tree = {"type": "namedtuple", "context": {"target": SYMPIFY}, "children": [None]}
    empty = [{"type": kind, "context": context, "children": []} for kind, context in (("tuple", None), ("dict", []))]
    taken = {"type": "tuple", "context": None, "children": empty}
    path = place / "recorded" / "inputs.json"
    document = json.loads(path.read_text())
    document["modules"][-1]["convention"] = {"names": [], "taken": taken, "returned": {"tree": tree}}
    document["modules"][-1]["nodes"][-1]["args"] = [[EXPRESSION]]
    path.write_text(json.dumps(document))

    with pytest.raises(td.UsageError, match=r"the graph takes or returns a structure, and calls sympy"):
        td.check(str(place / "recorded"), transform="eager")
    assert not pathlib.Path("ran").exists()


def test_a_trusted_recording_may_call_what_it_likes(place, monkeypatch):
    monkeypatch.chdir(place)
    directory = with_nodes(place, "graph.json", HOSTILE_CALLS["a function of torch that starts a program"])
    assert trust_flags(directory) == ["--trust", directory]
    td.trust(directory)

    td.check(directory, transform="eager")

    assert pathlib.Path("ran").exists()


def attends(x):
    scores = torch.nn.functional.scaled_dot_product_attention(x, x.mT, x) / math.sqrt(x.shape[-1])
    with torch.autocast("cpu"), torch.no_grad():
        rows = torch.vmap(torch.func.grad(lambda row: row.pow(2).sum()))(scores @ x)
    pooled = torch.nn.functional.max_pool2d(rows[None, None], 2).real
    chosen = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    chosen[0, 1:2] = torch.linalg.norm(pooled)
    return checkpoint(lambda value: value.exp(), chosen, use_reentrant=False), torch.zeros(3, device=x.device)


def chooses(x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def derives(x):
    return torch.func.jvp(torch.sin, (x,), (x,))


def reads_data(x):
    return x.data * 2


def is_jagged(x):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4])).sin().values()


def test_a_type_of_an_input_needs_no_trust(place):
    path = place / "recorded" / "graph.json"
    document = json.loads(path.read_text())
    document["modules"][-1]["nodes"][0]["type"] = "function torch._subclasses.fake_tensor:FakeTensor"
    path.write_text(json.dumps(document, separators=(",", ":")))  # as torchdelta writes it

    assert trust_flags(place / "recorded") == []
    recordings.read(place / "recorded")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")  # torch's own, of forward derivatives
@pytest.mark.parametrize("program", [attends, chooses, derives, reads_data, is_jagged])
def test_graphs_that_dynamo_makes_need_no_trust(program):
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, dynamic=True)(torch.randn(4, 4, requires_grad=True))

    assert [list(find_other_calls(graph)) for graph in graphs] == [[]]


def test_functions_of_tensors_compute():
    refused = {
        function.__name__
        for functions in torch.overrides.get_overridable_functions().values()
        for function in functions
        if type(function).__name__ != "method-wrapper" and not is_computation(function)
    }

    assert {"numpy", "untyped_storage", "apply_"} <= refused
    assert len(refused) < 30
    for function in (torch.zeros, torch.nn.functional.max_pool2d, torch.linalg.inv, torch.manual_seed, math.sqrt):
        assert is_computation(function)
    for function in (torch.from_file, torch.load, torch.compile, torch.hub.load, os.system, getattr):
        assert not is_computation(function)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "locate", "minify", "diagnose"])
def test_no_command_runs_it_and_the_refusal_says_which_file_and_what_to_add(place, command):
    directory = changed(place, imports=[str(place / "theirs" / "evil.py")])
    out = ["-o", str(place / "out")] if command in ("minify", "diagnose") else []

    ran = subprocess.run(
        [sys.executable, "-m", "torchdelta", command, directory, "-t", "eager", *out],
        capture_output=True,
        text=True,
        cwd=place,
        env={**os.environ, "COLUMNS": "300"},
    )

    assert ran.returncode == 2
    assert f"{place}/theirs/evil.py" in ran.stderr
    assert f"--trust {place}/theirs" in ran.stderr
    assert not has_run(place)


ORDINARY = {
    "torch._inductor.config.max_autotune": True,
    "torch._inductor.config.max_autotune_gemm_backends": "ATEN,CPP",
    "torch._inductor.config.cpp.simdlen": 256,
    "torch._inductor.config.cpp.threads": 2,
    "torch._inductor.config.cpp.descriptive_names": "torch",
    "torch._inductor.config.triton.cudagraph_capture_sizes": [1, [2, 4]],
    "torch._dynamo.config.cache_size_limit": 32,
    "torch._functorch.config.activation_memory_budget": 1,
}
"""Settings that users change, and that no recording needs trust for."""


@pytest.mark.parametrize("name", ORDINARY)
def test_a_setting_that_users_change_needs_no_trust(place, name):
    recording = read_recording(changed(place, settings={name: ORDINARY[name]}))

    recordings.require_harmless(recording, place / "recorded")
    assert trust_flags(place / "recorded") == []


def test_no_setting_at_its_present_value_needs_trust(place):
    for config in ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config"):
        for name, value in sys.modules[config].get_config_copy().items():
            as_written = list(value) if isinstance(value, (tuple, set)) else value
            assert is_harmless(f"{config}.{name}", as_written), name


def test_the_refusal_of_a_setting_names_the_file_and_the_setting_and_what_to_add(place):
    directory = changed(place, settings={MARCH: WRAPPER})

    with pytest.raises(td.UsageError, match=rf"{directory}/recording.json sets {MARCH} .* --trust {directory}$"):
        td.check(directory, transform="eager")
    assert trust_flags(directory) == ["--trust", directory]


def test_a_trusted_recording_may_set_what_it_likes_of_the_right_type(place):
    directory = changed(place, settings={MARCH: WRAPPER, "torch._inductor.config.cpp.cxx": "clang++"})
    td.trust(directory)
    recordings.require_harmless(read_recording(directory), directory)

    changed(place, settings={"torch._inductor.config.cpp.threads": "x"})
    with pytest.raises(td.UsageError, match="not of the setting's type"):
        recordings.require_harmless(read_recording(directory), directory)


@pytest.mark.slow
def test_what_the_user_trusts_is_run(place):
    directory = changed(place, imports=[str(place / "theirs" / "evil.py")])

    ran = subprocess.run(
        [sys.executable, "-m", "torchdelta", "check", directory, "-t", "eager", "--trust", str(place / "theirs")],
        cwd=place,
        check=False,
    )

    assert ran.returncode == 0
    assert has_run(place)


def test_a_trusted_directory_holds_for_what_is_below_it_alone(place, monkeypatch):
    monkeypatch.setattr(trust, "_TRUSTED", [])
    td.trust(place / "theirs")

    require_trusted(str(place / "theirs" / "evil.py"), (), named_by="a test")
    with pytest.raises(td.UsageError, match="--trust"):
        require_trusted(str(place / "other.py"), (), named_by="a test")
    with pytest.raises(td.UsageError, match="--trust"):
        require_trusted(str(place / "theirs" / ".." / "other.py"), (), named_by="a test")
    with pytest.raises(td.UsageError, match="there is no directory"):
        td.trust(place / "nowhere")


def test_installed_packages_need_no_trust(monkeypatch):
    monkeypatch.setattr(trust, "_TRUSTED", [])

    require_trusted("numpy.linalg", (), named_by="a test")
    require_trusted("torch.nn", (), named_by="a test")


def test_a_command_for_a_recording_has_the_flags_that_it_needs(place):
    directory = changed(place, imports=[str(place / "theirs" / "evil.py"), "numpy"])

    assert trust_flags(directory) == ["--trust", str(place / "theirs")]
    assert trust_flags(changed(place, imports=["numpy"])) == []
