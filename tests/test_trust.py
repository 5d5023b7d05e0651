"""A recording is data: code that it names runs only if it is installed, or where the user trusts it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import torchdelta as td
from torchdelta._torch.compile.settings import is_harmless
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
