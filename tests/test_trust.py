"""A recording is data: code that it names runs only if it is installed, or where the user trusts it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import torchdelta as td
from torchdelta.program import recordings
from torchdelta.records import trust
from torchdelta.records.recording import RECORDING, Recording, trust_flags
from torchdelta.records.trust import require_trusted

EVIL = """
import pathlib
pathlib.Path(__file__).with_name("ran").write_text("it ran")


def evil(graph_module, example_inputs):
    return graph_module
"""


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
