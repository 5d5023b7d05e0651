"""The command line from outside: exit codes, what it says about mistakes, and what it leaves on the disk."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import get_args

import pytest

import torchdelta.cli
from programs import reports
from torchdelta.cli import options, show
from torchdelta.cli.options import read_option
from torchdelta.errors import UsageError
from torchdelta.records.codec import Saved, read_report, write_report
from torchdelta.records.verdict import Verdict

PROGRAMS = """
import sys
import time
import warnings

import torch


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), (torch.randn(3, 4),)


def scale(graph_module, example_inputs):
    return lambda *args: tuple(output * 1.01 for output in graph_module(*args))


def give_up(graph_module, example_inputs):
    raise NotImplementedError("this pass knows no Linear")


def rescale(x, factor):
    return x * factor


def lstm():
    return torch.nn.LSTM(4, 4), (torch.randn(2, 3, 4),)


class Unsteady(torch.nn.Module):
    def forward(self, x):
        return {"steady": x * 2, "drifting": x + time.perf_counter_ns() % 1_000_003}


def unsteady():
    return Unsteady(), (torch.ones(5),)


class Warns(torch.nn.Module):
    def forward(self, x):
        warnings.warn("careful with this", stacklevel=1)
        return x * 2


def warns():
    return Warns(), (torch.ones(5),)


def raises():
    raise OSError("weights.pt is not here")


def exits():
    sys.exit(0)


class Panic(BaseException):
    pass


def panics():
    raise Panic


def panics_in_colour():
    raise Panic("\\x1b[8mhidden")


def leaves_its_directory():
    import os

    os.chdir("/")
    return build()


def interrupted():
    raise KeyboardInterrupt


def sleeps():
    print("asleep", flush=True)
    time.sleep(60)


def only_a_module():
    return torch.nn.Linear(4, 2)


def four_things():
    return torch.nn.Linear(4, 2), (), {}, None


def bare_argument():
    return torch.nn.Linear(4, 2), torch.ones(4)


def no_callable():
    return "a model", (torch.ones(4),)


def too_many_arguments():
    return torch.nn.Linear(4, 2), (torch.ones(4), torch.ones(4))


def wrong_keyword():
    return rescale, (torch.ones(4),), {"faktor": 2}


def fails_eagerly():
    return torch.nn.Linear(4, 2), (torch.ones(3, 5),)
"""


DEADLY = """
import ctypes, os, time
import torch

def segfaults(graph_module, example_inputs):
    ctypes.string_at(0)

def exits(graph_module, example_inputs):
    os._exit(0)

def hangs(graph_module, example_inputs):
    while True:
        time.sleep(1)

def eats_memory(graph_module, example_inputs):
    held = []
    while True:
        held.append(b"x" * (64 << 20))

def dies():
    return (lambda x: ctypes.string_at(0)), (torch.ones(2),)

def talks():
    print("hello from the factory")
    return torch.relu, (torch.ones(2),)
"""


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def command_line(tmp_path, monkeypatch, capsys):
    """Run a command line in this process, in a folder that has programs.py; a check too, unless asked otherwise."""
    (tmp_path / "programs.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        here = ["--no-isolated"] if arguments[:1] == ("check",) and "--isolated" not in arguments else []
        monkeypatch.setattr(sys, "argv", ["torchdelta", *arguments, *here])
        with pytest.raises(SystemExit) as exited:
            torchdelta.cli.main()
        return Ran(exited.value.code, *capsys.readouterr())

    return run


class TestExitCodes:
    @pytest.mark.parametrize(
        ("program", "transform", "verdict", "code"),
        [
            ("build", "eager", Verdict.EQUIVALENT, 0),
            ("build", "aot_eager", Verdict.EQUIVALENT, 0),
            ("build", "programs.py:scale", Verdict.DIVERGED, 1),
            ("lstm", "eager", Verdict.INCONCLUSIVE, 3),
            ("build", "programs.py:give_up", Verdict.CRASHED, 4),
        ],
    )
    def test_of_each_verdict(self, command_line, tmp_path, program, transform, verdict, code):
        ran = command_line("check", f"programs.py:{program}", "-t", transform, "--json", "report.json")

        assert (ran.code, ran.out.split()[0]) == (code, verdict.value)
        assert ran.err == ""
        report = read_report(tmp_path / "report.json")
        assert report.verdict is verdict
        assert report.case.program == f"programs.py:{program}"
        assert command_line("show", "report.json") == ran

    def test_of_a_check_that_timed_out(self, command_line, tmp_path):
        stage = reports.Stage(name="forward", verdict=Verdict.TIMED_OUT)
        write_report(reports.report(stage), tmp_path / "report.json")

        assert command_line("show", "report.json").code == 4

    def test_every_record_that_can_be_read_has_a_printer(self):
        assert set(show.PRINTERS) == set(get_args(Saved))

    def test_of_a_crash_shows_what_was_raised(self, command_line):
        ran = command_line("check", "programs.py:build", "-t", "programs.py:give_up")

        assert "NotImplementedError: this pass knows no Linear" in ran.out
        assert "Traceback" not in ran.out

    def test_of_a_mistake_in_run_is_no_verdict(self, command_line, monkeypatch):
        monkeypatch.setattr(show, "read_report", lambda *_: 1 / 0)

        ran = command_line("show", "report.json")

        assert ran.code == 70
        assert "ZeroDivisionError" in ran.err
        assert ran.err.splitlines()[-1].startswith("torchdelta: this is a mistake of torchdelta itself")

    def test_of_help_and_version(self, command_line):
        assert command_line("--help").code == 0
        assert command_line("--version") == Ran(0, f"torchdelta {torchdelta.__version__}\n", "")

    @pytest.mark.parametrize("arguments", [["check"], ["check", "x.py:f"], ["chekc"], ["show"], ["show", "x", "--wat"]])
    def test_of_a_command_line_that_is_none(self, command_line, arguments):
        ran = command_line(*arguments)

        assert ran.code == 2
        assert "Traceback" not in ran.err


BUILD = ("programs.py:build", "-t", "cast:float64")


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            # the program
            (["programs.py:biuld", "-t", "eager"], "programs.py has no 'biuld'"),
            (
                ["programs.py:raises", "-t", "eager"],
                "the factory raised OSError: weights.pt is not here",
            ),
            (["programs.py:exits", "-t", "eager"], "programs.py:exits: the factory raised SystemExit"),
            (["programs.py:only_a_module", "-t", "eager"], r"must return \(callable, args\) or .*, not Linear"),
            (["programs.py:four_things", "-t", "eager"], r"must return \(callable, args\) or .*, not tuple of 4"),
            (["programs.py:bare_argument", "-t", "eager"], r"must be a tuple, not Tensor; write \(x,\) for one"),
            (["programs.py:no_callable", "-t", "eager"], "str cannot be called"),
            (["programs.py:too_many_arguments", "-t", "eager"], r"do not fit .*: too many .*; it takes \(input"),
            (["programs.py:wrong_keyword", "-t", "eager"], r"do not fit .*'factor'; it takes \(x, factor\)"),
            (["programs.py:fails_eagerly", "-t", "eager"], "fails when run eagerly.*3x5 and 4x2"),
            (["no_such.module:build", "-t", "eager"], "no module 'no_such.module'"),
            (["no_such.py:build", "-t", "eager"], "no file no_such.py"),
            (["programs.py", "-t", "eager"], "'programs.py' does not name a program factory: write path/file.py:name"),
            # the transform
            (["programs.py:build", "-t", "inductr"], "unknown transform 'inductr': did you mean inductor"),
            (["programs.py:build", "-t", "backend:aot_eagr"], "no backend 'aot_eagr': did you mean aot_eager"),
            (["programs.py:build", "-t", "programs.py:scael"], "programs.py has no 'scael'"),
            (["programs.py:build", "-t", "cast:int8"], "'int8' is not a floating-point dtype: try bfloat16"),
            (["programs.py:build", "-t", "cast"], "is written cast:DTYPE"),
            # its options
            ([*BUILD, "-O", "dynamic"], "malformed option 'dynamic': write -O key=value"),
            ([*BUILD, "-O", "=true"], "malformed option '=true': write -O key=value"),
            (
                ["programs.py:build", "-t", "eager", "-O", "dynamc=1"],
                "no option 'dynamc': it has dynamic, fullgraph",
            ),
            (["programs.py:build", "-t", "eager", "-O", "dynamic=5"], "option dynamic is True or False, not 5"),
            (["programs.py:build", "-t", "inductor", "-O", "config.max_fusion=1"], "did you mean max_fusion_size"),
            # how it is judged
            ([*BUILD, "--policy", "rtol=tiny"], "malformed policy 'rtol=tiny': put a number in place of 'tiny'"),
            ([*BUILD, "--policy", "exact"], "unknown policy 'exact': it is noise, noise.K, bitwise, close"),
            ([*BUILD, "--policy", "sqnr>=lots"], "malformed policy 'sqnr>=lots': put a number in place of 'lots'"),
            ([*BUILD, "--policy", "snr>=35"], "unknown metric 'snr': did you mean sqnr"),
            ([*BUILD, "--stages", "forward,backward"], "unknown stage 'backward': it is one of forward, gradients"),
            ([*BUILD, "--stages", ","], "no stage was asked for: name at least one of forward"),
            ([*BUILD, "--ignore", "colour"], "unknown clause to ignore 'colour': it is one of aliasing"),
            ([*BUILD, "--strict", "dtype"], "unknown clause to hold strictly 'dtype': it is one of casts, stride"),
            ([*BUILD, "--optimizer", "adam"], "unknown optimizer 'adam': did you mean adamw"),
            ([*BUILD, "--loss", "mse"], "'mse' does not name a loss: write path/file.py:name"),
            ([*BUILD, "--iterations", "0"], "iterations must be at least 1, not 0"),
            ([*BUILD, "--seed", str(10**30)], "seed must be from 0 to"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_gets_one_sentence_and_leaves_nothing(self, command_line, tmp_path, arguments, said):
        ran = command_line("check", *arguments, "--json", "report.json")

        assert_one_sentence(ran, said)
        assert not list(tmp_path.glob("*.json"))
        assert not list(tmp_path.glob(".*"))

    @pytest.mark.parametrize(
        ("place", "said"),
        [
            ("none/report.json", "no directory none; make it first"),
            (".", "it is a directory; name a file in it"),
            ("programs.py/report.json", "no directory programs.py"),
        ],
    )
    def test_an_unwritable_place_is_found_before_anything_runs(self, command_line, place, said):
        ran = command_line("check", "programs.py:interrupted", "-t", "eager", "--json", place)

        assert_one_sentence(ran, f"^torchdelta: cannot write {place}: .*{said}")

    def test_a_report_that_cannot_be_written_in_the_end_is_still_printed(self, command_line, monkeypatch):
        def fail(*_):
            raise UsageError("cannot write report.json: No space left on device")

        monkeypatch.setattr(options, "write_report", fail)

        ran = command_line("check", *BUILD, "--json", "report.json")

        assert (ran.code, ran.err) == (2, "torchdelta: cannot write report.json: No space left on device\n")
        assert ran.out.startswith("equivalent")

    def test_a_report_of_a_newer_schema(self, command_line, tmp_path):
        newer = {"schema_version": torchdelta.SCHEMA_VERSION + 1, "something": "new"}
        (tmp_path / "report.json").write_text(json.dumps(newer))

        assert_one_sentence(command_line("show", "report.json"), "report.json: this report has schema .*: upgrade")

    @pytest.mark.parametrize(
        ("content", "said"), [("", "is not JSON"), ("{}", "no schema_version"), (None, "No such file or directory")]
    )
    def test_a_file_that_is_no_report(self, command_line, tmp_path, content, said):
        if content is not None:
            (tmp_path / "report.json").write_text(content)

        assert_one_sentence(command_line("show", "report.json"), f"report.json: .*{said}")

    def test_a_reference_that_is_not_deterministic_is_inconclusive_and_names_the_tensor(self, command_line):
        ran = command_line("check", "programs.py:unsteady", "-t", "cast:float32")

        assert ran.code == 3
        note = next(line for line in ran.out.splitlines() if "not deterministic" in line)
        assert "outputs['drifting']" in note
        assert "outputs['steady']" not in note

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("check",), "the program raised Panic, which is not an Exception"),
            (("minify", "-o", "out"), "programs.py:panics: the factory raised Panic (no message)"),
        ],
    )
    def test_a_panic_of_the_program_is_no_verdict(self, words, said, command_line):
        ran = command_line(*words, "programs.py:panics", "-t", "eager")

        assert ran.code == 2
        assert ran.err.splitlines()[-1] == f"torchdelta: {said}"

    def test_the_traceback_of_a_panic_has_no_control_characters(self, command_line):
        ran = command_line("check", "programs.py:panics_in_colour", "-t", "eager")

        assert ran.code == 2
        assert r"Panic: \x1b[8mhidden" in ran.err
        assert "\x1b" not in ran.err

    def test_a_program_that_leaves_the_working_directory_does_not_move_the_report(self, command_line, tmp_path):
        ran = command_line("check", "programs.py:leaves_its_directory", "-t", "eager", "--json", "report.json")

        assert ran.code == 0
        assert os.getcwd() == str(tmp_path)
        assert read_report(tmp_path / "report.json").verdict is Verdict.EQUIVALENT

    def test_with_debug_has_its_traceback(self, command_line):
        ran = command_line("check", "programs.py:raises", "-t", "eager", "--debug")

        assert ran.code == 2
        assert 'programs.py", line' in ran.err
        assert "OSError: weights.pt is not here" in ran.err
        assert ran.err.splitlines()[-1].startswith("torchdelta: programs.py:raises: the factory raised OSError")


def assert_one_sentence(ran, said):
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("torchdelta: ")
    assert len(ran.err.splitlines()) == 1
    assert "Traceback" not in ran.err
    assert re.search(said, ran.err), ran.err


class TestOptions:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("true", True),
            ("False", False),
            ("3", 3),
            ("-2.5e-3", -0.0025),
            ("inf", float("inf")),
            ("max-autotune", "max-autotune"),
            ("{[]:1}", "{[]:1}"),
            ("a=b", "a=b"),
            ("", ""),
        ],
    )
    def test_are_numbers_truths_or_text(self, text, value):
        found = read_option(f"key={text}")

        assert found == ("key", value)
        assert type(found[1]) is type(value)

    def test_reach_the_report(self, command_line, tmp_path):
        command_line(
            *("check", "programs.py:build", "-t", "eager", "-O", "dynamic=false", "--stages", "gradients, forward"),
            *("--policy", "close", "--ignore", "dtype,stride", "--seed", "7", "--json", "report.json"),
        )

        case = read_report(tmp_path / "report.json").case
        assert case.options == {"dynamic": False}
        assert case.stages == ("forward", "gradients")
        assert (case.policy, case.ignore, case.seed) == ("close", ("dtype", "stride"), 7)


class TestWarnings:
    def test_are_counted_on_one_line(self, command_line):
        ran = command_line("check", "programs.py:warns", "-t", "cast:float64", "--ignore", "dtype")

        assert ran.code == 0
        assert ran.err in ("1 warning; --verbose shows it\n", "3 warnings; --verbose shows them\n")

    def test_are_shown_when_verbose(self, command_line):
        with pytest.warns(UserWarning, match="careful with this"):
            ran = command_line("check", "programs.py:warns", "-t", "cast:float64", "--ignore", "dtype", "--verbose")

        assert "--verbose" not in ran.err


def start(arguments, cwd, **environment):
    """Start the command line in a process of its own."""
    (cwd / "programs.py").write_text(PROGRAMS)
    return subprocess.Popen(
        [sys.executable, "-c", "import torchdelta.cli; torchdelta.cli.main()", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class TestInterrupted:
    def test_leaves_with_130(self, command_line):
        assert command_line("check", "programs.py:interrupted", "-t", "eager") == Ran(130, "", "")

    def test_by_a_real_signal_leaves_with_130(self, tmp_path):
        check = ["check", "programs.py:sleeps", "-t", "eager", "--json", "report.json", "--no-isolated"]
        process = start(check, tmp_path)
        assert process.stderr.readline() == "asleep\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)

        assert (process.returncode, out, err) == (130, "", "")
        assert [entry.name for entry in tmp_path.iterdir() if entry.suffix != ""] == ["programs.py"]


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
class TestInAProcessOfItsOwn:
    def test_a_check_is_what_it_is_in_this_one(self, command_line):
        there, here = (
            command_line("check", "programs.py:build", "-t", "programs.py:scale", how)
            for how in ("--isolated", "--no-isolated")
        )

        assert there.code == here.code == 1
        assert there.out == here.out

    @pytest.mark.parametrize(
        ("transform", "options", "code", "said"),
        [
            ("segfaults", (), 4, "the process was ended by SIGSEGV"),
            ("exits", (), 4, "the process exited with status 0 and no answer"),
            ("hangs", ("--timeout", "15"), 4, "not finished after 15 s"),
            ("eats_memory", ("--memory", "2GB"), 4, "more than 1907 MiB of memory"),
        ],
    )
    def test_whose_candidate_ends_it_has_a_verdict(self, command_line, tmp_path, transform, options, code, said):
        (tmp_path / "deadly.py").write_text(DEADLY)
        ran = command_line("check", "programs.py:build", "-t", f"deadly.py:{transform}", "--isolated", *options)

        assert ran.code == code
        assert said in ran.out
        assert ("timed_out" if transform == "hangs" else "crashed") in ran.out

    def test_a_program_that_dies_by_itself_is_the_users_mistake(self, command_line, tmp_path):
        (tmp_path / "deadly.py").write_text(DEADLY)

        assert_one_sentence(
            command_line("check", "deadly.py:dies", "-t", "eager", "--isolated"), "fails when run eagerly"
        )

    def test_a_mistake_is_the_sentence_that_it_is_in_this_one(self, command_line):
        assert_one_sentence(command_line("check", "programs.py:raises", "-t", "eager", "--isolated"), "factory raised")

    def test_what_the_program_prints_goes_to_stderr(self, command_line, tmp_path):
        (tmp_path / "deadly.py").write_text(DEADLY)
        ran = command_line("check", "deadly.py:talks", "-t", "eager", "--isolated")

        assert ran.code == 0
        assert "hello from the factory" in ran.err

    @pytest.mark.parametrize("option", ["--timeout=5", "--memory=2GB"])
    def test_its_limits_are_refused_without_it(self, command_line, option):
        assert_one_sentence(command_line("check", "programs.py:build", "-t", "eager", option), "process of its own")


def test_a_terminal_without_unicode_gets_the_report_all_the_same(tmp_path):
    write_report(reports.diverged(), tmp_path / "report.json")

    process = start(["show", "report.json"], tmp_path, PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (1, "")
    assert "\\u2260  parameters['worst'].grad" in out


@pytest.mark.slow
def test_without_a_cpp_compiler_inductor_is_refused_with_a_sentence(tmp_path):
    process = start(
        ["check", "programs.py:build", "-t", "inductor", "--json", "report.json"],
        tmp_path,
        CXX="/nonexistent",
        PATH="/nonexistent",
        # nothing compiled earlier may stand in
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    out, err = process.communicate(timeout=300)

    assert_one_sentence(Ran(process.returncode, out, err), "C.. compiler .*: install g")
    assert not (tmp_path / "report.json").exists()
