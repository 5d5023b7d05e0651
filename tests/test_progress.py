"""stdout has the answer alone; stderr says what is under way, and has what the program prints."""

import io
import json
import os
import pty
import subprocess
import sys
import textwrap
import time

import pytest
from rich.console import Console

from torchdelta.cli.progress import ProgressLine

PROGRAM = """
import os
import sys
import torch

print("loaded")


def build():
    def noisy(x):
        print("on stdout")
        print("on stderr", file=sys.stderr)
        os.write(1, b"by the descriptor\\n")
        return x + 1

    return noisy, (torch.ones(3),)


def same(graph_module, example_inputs):
    return graph_module


def wrong(graph_module, example_inputs):
    return lambda *args: (args[0] + 2,)
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))

    def run(*words, **options):
        words = [sys.executable, "-m", "torchdelta", *words]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, **options)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("words", [("check",), ("check", "--no-isolated"), ("locate",), ("audit",)], ids=" ".join)
def test_stdout_has_the_answer_and_nothing_that_the_program_prints(command, words):
    transform = ("-t", "export", "--kinds", "tail_element") if words[0] == "audit" else ("-t", "program.py:wrong")
    ran = command(*words, "program.py:build", *transform, "--json", "-")

    assert ran.stdout, ran.stderr
    assert json.loads(ran.stdout)["case"]["program"] == "program.py:build"
    for line in ("loaded", "on stdout", "on stderr", "by the descriptor"):
        assert line in ran.stderr


@pytest.mark.slow
def test_the_terminal_report_stands_alone_on_stdout_too(command):
    ran = command("check", "program.py:build", "-t", "program.py:wrong")

    assert ran.returncode == 1
    assert ran.stdout.startswith("diverged  program.py:build")
    assert "on stdout" not in ran.stdout
    assert "on stdout" in ran.stderr


def test_elsewhere_than_on_a_terminal_a_plain_line_comes_now_and_then():
    stream = io.StringIO()
    with ProgressLine("inductor", Console(file=stream), plain_every_s=0.05) as progress:
        time.sleep(0.12)
        progress("candidate")
        time.sleep(0.12)
    lines = stream.getvalue().splitlines()

    assert lines[0] == "torchdelta: inductor: loading torch, 0 s; next: reference"
    assert lines[-1] == "torchdelta: inductor: candidate, 0 s; next: semantic"
    assert 2 <= len(lines) <= 6


def test_a_short_command_prints_no_plain_line():
    stream = io.StringIO()
    with ProgressLine("inductor", Console(file=stream)) as progress:
        progress("candidate")

    assert stream.getvalue() == ""


def test_a_part_without_a_known_successor_is_shown_without_one():
    progress = ProgressLine("op", Console(file=io.StringIO()))
    progress("aot/static")

    assert progress.line == "op: aot/static, 0 s"


def test_control_characters_of_a_name_are_shown_escaped():
    assert "\x1b" not in ProgressLine("\x1b]0;title\x07", Console(file=io.StringIO())).line


def test_on_a_terminal_a_line_shows_the_part_and_what_is_next():
    terminal, end = pty.openpty()
    with os.fdopen(end, "w") as stream:
        console = Console(file=stream, force_terminal=True, width=100)
        with ProgressLine("inductor", console) as progress:
            progress("candidate")
            time.sleep(0.4)
        stream.flush()
        shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)

    assert "inductor: candidate, 0 s; next: semantic" in shown
