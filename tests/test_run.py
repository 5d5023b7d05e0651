"""`torchdelta run` from outside: a script is what it is under python, and what was compiled in it is told."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from torchdelta.cli.options import EXIT_OF
from torchdelta.records.guard import GuardedGraphRecord, GuardSummary
from torchdelta.records.passes import PassFinding, PassSummary
from torchdelta.records.report import Culprit
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.guard import print_guard_summary

TRAIN = Path(__file__).parent / "programs" / "train.py"

FACTS = """
import json, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": globals().get("__file__"),
    "package": __package__, "spec": __spec__ and __spec__.name, "cached": bool(globals().get("__cached__")),
    "main": sys.modules["__main__"].__dict__ is globals(), "builtins": type(__builtins__).__name__,
    "loader": getattr(__loader__, "__name__", type(__loader__).__name__), "torch": "torch" in sys.modules,
}))
"""

BACKENDS = """
import ctypes
import torch


def healthy(graph_module, example_inputs):
    return graph_module


def wrong(graph_module, example_inputs):
    for node in list(graph_module.graph.nodes):
        if "relu" in str(node.target):
            with graph_module.graph.inserting_after(node):
                off = graph_module.graph.call_function(torch.add, (node, 0.1))
            node.replace_all_uses_with(off, lambda user: user is not off)
    graph_module.recompile()
    return graph_module


def gives_up(graph_module, example_inputs):
    raise NotImplementedError("this backend knows no relu")


def dies(graph_module, example_inputs):
    if any("relu" in str(node.target) for node in graph_module.graph.nodes):
        return lambda *args: ctypes.string_at(0)
    return graph_module
"""

COMPILES = """
import sys
import torch
import backends

def call(x):
    return torch.relu(x) * 2

for name in sys.argv[1].split(","):
    backend = getattr(backends, name, name)
    print(torch.compile(call, backend=backend)(torch.linspace(-1, 1, 5)).tolist())
    torch._dynamo.reset()
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
"""
EAGERLY = "[0.0, 0.0, 0.0, 1.0, 2.0]\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's directory: a script, a package, a module, backends."""
    (tmp_path / "facts.py").write_text(FACTS)
    (tmp_path / "backends.py").write_text(BACKENDS)
    (tmp_path / "compiles.py").write_text(COMPILES)
    for package in ("package", "bare"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "facts.py").write_text(FACTS)
    (tmp_path / "package" / "__main__.py").write_text(FACTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(*command, **options):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)


def python(*arguments, **options):
    return ran(sys.executable, *arguments, **options)


def torchdelta(*arguments, **options):
    return python("-m", "torchdelta", *arguments, **options)


def run(*arguments, **options):
    return torchdelta("run", *arguments, **options)


def summary_of(ended):
    """What torchdelta itself said, without the spaces that fill its columns."""
    assert ended.stderr.count("torchdelta run  ") == 1, ended.stderr
    told = ended.stderr[ended.stderr.index("torchdelta run  ") :]
    return "\n".join(line.rstrip() for line in told.splitlines())


class TestAScriptIsWhatItIsUnderPython:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["facts.py"],
            ["facts.py", "--guard", "-m", "--strict", "--", "x"],
            ["package/facts.py"],
            ["package"],
            ["-m", "facts", "--out", "-c"],
            ["-m", "package.facts", "x"],
            ["-m", "package"],
            ["-c", FACTS, "-m", "--help"],
        ],
        ids=" ".join,
    )
    @pytest.mark.usefixtures("folder")
    def test_in_what_it_sees(self, arguments):
        plain, guarded = python(*arguments), run(*arguments)

        assert json.loads(plain.stdout)["torch"] is False
        assert json.loads(guarded.stdout) == json.loads(plain.stdout)
        assert (guarded.returncode, plain.returncode, plain.stderr) == (0, 0, "")

    def test_by_the_installed_command_too(self, folder):
        command = shutil.which("torchdelta", path=os.path.dirname(sys.executable))

        guarded = ran(command, "run", "--", "package/facts.py", "x")

        assert json.loads(guarded.stdout) == json.loads(python("package/facts.py", "x").stdout)

    @pytest.mark.parametrize(
        "ending",
        [
            "pass",
            "sys.exit()",
            "sys.exit(3)",
            "sys.exit(-1)",
            "sys.exit(True)",
            "sys.exit('that was it')",
            "sys.exit(('a', 1))",
            "raise SystemExit(4)",
            "raise ValueError('mine')",
            "raise KeyboardInterrupt",
            "os._exit(7)",
            "os.kill(os.getpid(), signal.SIGTERM)",
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); os.kill(os.getpid(), signal.SIGTERM)",
            "sys.excepthook = lambda kind, error, trace: print('hooked', kind.__name__, trace.tb_lineno); 1 / 0",
            "sys.excepthook = lambda *_: sys.exit(3)\n1 / 0",
            "sys.excepthook = lambda *_: sys.exit('that was it')\n1 / 0",
            "class Odd(BaseException): pass\nraise Odd",
            "class Odd:\n    __str__ = None\nsys.exit(Odd())",
            "sys.stderr = None\nsys.exit('that was it')",
            "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError from error",
            "import no_such_module",
            "this is no Python",
            "atexit.register(print, 'after all')\nsys.exit(5)",
            "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start(); sys.exit(6)",
            "futures.ThreadPoolExecutor().submit(print, 'pooled')",
            "print('\\u2260')",
        ],
    )
    def test_in_how_it_ends(self, folder, ending):
        imported = "import atexit, os, signal, sys, threading, time\nfrom concurrent import futures\n"
        (folder / "script.py").write_text(f"{imported}print('begun', flush=True)\n{ending}")
        ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}

        plain, guarded = (command("script.py", env=ascii_only, timeout=60) for command in (python, run))

        assert (guarded.returncode, guarded.stdout) == (plain.returncode, plain.stdout)
        assert guarded.stderr.startswith(plain.stderr)
        if "_exit" not in ending and plain.returncode != -signal.SIGTERM:
            assert summary_of(guarded) == guarded.stderr[len(plain.stderr) :].rstrip()
        else:
            assert guarded.stderr == ""

    @pytest.mark.parametrize(
        "ending", ["sys.exit('that was it')", "def hook(*_): raise OSError\nsys.excepthook = hook\n1 / 0"]
    )
    def test_when_it_closes_its_stderr(self, folder, ending):
        (folder / "script.py").write_text(f"import sys\nsys.stderr.close()\n{ending}")

        plain, guarded = python("script.py"), run("script.py")

        assert (guarded.returncode, guarded.stdout) == (plain.returncode, plain.stdout) == (1, "")
        assert "torchdelta" not in guarded.stderr

    def test_when_its_stdout_cannot_be_flushed(self, folder):
        tee = "class Tee:\n    def write(self, text): sys.__stdout__.write(text)\nsys.stdout = Tee()"
        (folder / "script.py").write_text(f"import sys\n{tee}\nprint('begun')\nsys.exit(3)")

        plain, guarded = python("script.py"), run("script.py")

        assert (guarded.returncode, guarded.stdout) == (plain.returncode, plain.stdout)
        assert "nothing in it was compiled" in summary_of(guarded)
        assert "torchdelta itself" not in guarded.stderr

    def test_when_it_is_interrupted_while_its_threads_work(self, folder):
        wait = "import threading, time\nthreading.Thread(target=time.sleep, args=(2,)).start()\n"
        (folder / "script.py").write_text(f"{wait}print('begun', flush=True)")
        command = [sys.executable, "-m", "torchdelta", "run", "script.py"]

        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)

        assert process.returncode == 0  # as Python itself
        assert "KeyboardInterrupt" in stderr
        assert "nothing in it was compiled" in stderr

    def test_when_a_thread_of_it_starts_another(self, folder):
        late = "def late():\n    time.sleep(0.5)\n    print('late', file=sys.stderr, flush=True)\n"
        early = "def early():\n    time.sleep(0.3)\n    threading.Thread(target=late).start()\n"
        (folder / "script.py").write_text(
            f"import sys, threading, time\n{late}{early}threading.Thread(target=early).start()"
        )

        guarded = run("script.py")

        assert guarded.stderr.startswith("late\n")
        assert "nothing in it was compiled" in summary_of(guarded)

    def test_when_a_thread_of_it_uses_a_pool_after_its_end(self, folder):
        imports = "import threading, time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        work = "def work():\n    time.sleep(0.3)\n    ThreadPoolExecutor(1).submit(int).result()\n"
        (folder / "script.py").write_text(f"{imports}{work}threading.Thread(target=work).start()")

        guarded = run("script.py", timeout=60)

        assert guarded.returncode == 0
        assert "nothing in it was compiled" in summary_of(guarded)

    def test_when_it_forks(self, folder):
        (folder / "script.py").write_text(
            "import os, sys\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nelse:\n    sys.exit(0)\n"
        )

        assert "nothing in it was compiled" in summary_of(run("script.py"))

    def test_when_its_package_fails_to_import(self, folder):
        (folder / "package" / "__init__.py").write_text("import no_such_module")

        guarded = run("-m", "package.facts")

        assert guarded.returncode == 1
        assert "ModuleNotFoundError: No module named 'no_such_module'" in guarded.stderr
        assert "torchdelta/" not in guarded.stderr


@pytest.mark.usefixtures("folder")
class TestWrongUsage:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["nope.py"], "there is no script 'nope.py'"),
            (["-m", "nope"], "there is no module 'nope'"),
            (["-m", "nope.deeper"], "there is no module 'nope.deeper'"),
            (["-m", "bare"], "bare is a package without __main__"),
            (["bare"], "no __main__.py in bare"),
            (["-m", "-c", "facts"], "-m and -c exclude each other"),
            (["--check", "vlaues", "facts.py"], "--check vlaues: it is one of values, errors, off"),
            (["--on-failure", "cry", "facts.py"], "--on-failure cry: it is one of raise, fallback, report"),
            (["--record", "never", "facts.py"], "--record never: it is one of on_failure, always"),
            (["--graph", "fx", "facts.py"], "--graph fx: it is one of dynamo, aten"),
            (["--every", "-1", "facts.py"], "--every is a number of calls from 0, not -1"),
            (["--budget", "0", "facts.py"], "--budget is a number above 0, not 0"),
            (["--only-nodes", "few", "facts.py"], "malformed range of node counts 'few'"),
            (["--only-nodes", "9:3", "facts.py"], "no number from 9 to 3"),
            (["--out", "facts.py", "facts.py"], "cannot make the directory facts.py"),
            (["--watch-passes", "--every", "3", "facts.py"], "--every concerns guarded graphs"),
            (["--watch-passes", "--on-failure", "raise", "facts.py"], "--on-failure concerns guarded graphs"),
            (["--watch-passes", "--budget", "3", "facts.py"], "--budget concerns guarded graphs"),
            (["--watch-passes", "--only-nodes", "3:", "facts.py"], "--only-nodes concerns guarded graphs"),
            (["--watch-passes", "--out", "found", "facts.py"], "--out concerns guarded graphs"),
        ],
    )
    def test_is_one_sentence_before_anything_runs(self, arguments, said):
        ended = run(*arguments)

        assert (ended.returncode, ended.stdout) == (2, ""), ended
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert said in ended.stderr

    @pytest.mark.parametrize("arguments", [[], ["--wat", "facts.py"], ["--strict"]])
    def test_of_options_runs_nothing(self, arguments):
        ended = run(*arguments)

        assert (ended.returncode, ended.stdout) == (2, "")

    @pytest.mark.slow
    def test_of_a_policy_is_said_at_the_first_compile(self):
        ended = run("--policy", "rtol=tiny", "compiles.py", "healthy")

        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == "torchdelta: malformed policy 'rtol=tiny': put a number in place of 'tiny'\n"


@pytest.mark.slow
class TestEveryCompile:
    def test_of_a_healthy_backend_is_checked_and_leaves_nothing_behind(self, folder):
        before = {*folder.iterdir(), folder / "__pycache__"}

        guarded = run("--strict", "compiles.py", "healthy,aot_eager")

        assert (guarded.stdout, guarded.returncode) == (EAGERLY * 2, 0)
        assert "torchdelta run  equivalent\n  graphs  2 seen, 2 checked: 2 equivalent" in summary_of(guarded)
        assert {*folder.iterdir()} <= before

    def test_of_a_wrong_backend_is_told_with_its_culprit_and_made_small_and_the_script_goes_on(self, folder):
        plain = python("compiles.py", "wrong,healthy")

        guarded = run("--strict", "--minify", "compiles.py", "wrong,healthy")

        assert (guarded.stdout, guarded.returncode) == (plain.stdout, 1)
        told = summary_of(guarded)
        assert "torchdelta run  diverged\n  graphs  2 seen, 2 checked: 1 diverged, 1 equivalent" in told
        assert "≠ diverged  graph 1 on its first call: wrong, dynamo" in told
        assert re.search(r"culprit  .*relu.*\n\s+compiles\.py:7\n\s+return torch\.relu\(x\) \* 2", told)
        (found,) = (path / "0001-dynamo" for path in folder.glob("torchdelta-run-*"))
        place = found.relative_to(folder)
        assert f"report   {place}" in told
        assert f"repro    {place}/diagnosis/repro.py" in told
        assert (found / "report.json").exists()
        assert "relu" in (found / "diagnosis" / "repro.py").read_text()
        assert all(len(line) <= 80 for line in guarded.stderr.splitlines())
        assert "\x1b" not in guarded.stderr

    @pytest.mark.long
    @pytest.mark.usefixtures("folder")
    def test_that_ends_the_process_leaves_behind_what_a_diagnosis_needs(self):
        died = run("--record", "always", "--out", "found", "compiles.py", "dies")
        diagnosed = torchdelta("diagnose", "found/0001-dynamo", "-o", "small")

        assert (died.returncode, died.stdout) == (-signal.SIGSEGV, "")
        assert diagnosed.returncode == EXIT_OF[Verdict.CRASHED], diagnosed.stderr
        assert diagnosed.stdout.splitlines()[-1] == "small/repro.py"
        report = json.loads(Path("small/report.json").read_text())
        assert report["failure"]["type"] == "SIGSEGV"
        assert report["repro"]["confirmed"]

    @pytest.mark.usefixtures("folder")
    def test_that_fails_is_told_although_the_script_survives_it(self):
        fallen_back = run("--strict", "--on-failure", "fallback", "compiles.py", "gives_up", 3)
        reported = run("compiles.py", "gives_up")

        assert (fallen_back.returncode, fallen_back.stdout) == (3, EAGERLY)
        assert "! crashed  graph 1" in summary_of(fallen_back)
        assert "NotImplementedError: this backend knows no relu" in summary_of(fallen_back)
        assert reported.returncode == 1
        assert "! crashed  graph 1 when it was compiled" in summary_of(reported)

    @pytest.mark.usefixtures("folder")
    def test_ends_the_script_where_it_is_to_raise(self):
        ended = run("--on-failure", "raise", "compiles.py", "gives_up")

        assert (ended.returncode, ended.stdout) == (1, "")
        assert "torchdelta.errors.CompilerFailed" in ended.stderr
        assert "! crashed  graph 1" in summary_of(ended)

    @pytest.mark.usefixtures("folder")
    def test_that_is_not_checked_is_counted_with_why(self):
        told = summary_of(
            run("--guard", "aot_eager", "--check", "off", "compiles.py", "aot_eager,healthy,healthy,wrong")
        )

        assert "4 seen, 0 checked" in told
        assert re.search(r"not checked  2: not guarded, its backend is healthy\n", told)
        assert re.search(r"\n\s+1: not guarded, its backend is wrong(\n|$)", told)
        assert re.search(r"\n\s+1: checks are off(\n|$)", told)

    @pytest.mark.usefixtures("folder")
    def test_of_none_that_was_asked_for_is_said(self):
        told = summary_of(run("--guard", "indcutor", "compiles.py", "healthy"))

        assert told.startswith("torchdelta run  nothing was checked")
        assert "--guard indcutor: nothing that was compiled has that backend" in " ".join(told.split())

    def test_in_a_thread_that_outlives_a_script_that_failed_is_checked(self, folder):
        (folder / "script.py").write_text(
            "import threading, time, torch, backends\n"
            "def late():\n"
            "    time.sleep(0.5)\n"
            "    torch.compile(lambda x: x * 2, backend=backends.healthy)(torch.ones(2))\n"
            "threading.Thread(target=late).start()\n"
            "1 / 0\n"
        )

        ended = run("script.py")

        assert ended.returncode == 1
        assert "ZeroDivisionError" in ended.stderr
        assert "1 seen, 1 checked: 1 equivalent" in summary_of(ended)

    def test_that_is_guarded_already_is_refused(self, folder):
        (folder / "script.py").write_text(
            "import torch, torchdelta as td\n"
            "print(torch.compile(torch.relu, backend=td.guard('aot_eager'))(torch.ones(2)))"
        )

        twice, once = run("script.py"), run("--watch-passes", "script.py")

        assert (twice.returncode, twice.stdout) == (2, "")
        assert twice.stderr == (
            "torchdelta: the script guards aot_eager by itself, and --guard would do so again: leave one of them out\n"
        )
        assert (once.returncode, once.stdout) == (0, "tensor([1., 1.])\n")


@pytest.mark.slow
@pytest.mark.xdist_group("inductor-run")
@pytest.mark.usefixtures("folder")
class TestTraining:
    def test_under_a_healthy_compiler_is_bitwise_the_same(self):
        plain = python(TRAIN, "--status", 5)

        guarded = run("--guard", "inductor", "--strict", TRAIN, "--status", 5)

        assert len(plain.stdout.splitlines()) == 5
        assert (guarded.stdout, guarded.returncode) == (plain.stdout, 5)
        assert "1 seen, 1 checked: 1 equivalent" in summary_of(guarded)

    @pytest.mark.long
    def test_under_a_compiler_with_a_wrong_relu_names_it_on_the_first_call(self):
        guarded = run("--guard", "inductor", "--strict", TRAIN, "--bug", "accuracy")

        told = summary_of(guarded)
        assert guarded.returncode == 1
        assert len(guarded.stdout.splitlines()) == 5
        assert "≠ diverged  graph 1 on its first call: inductor" in told
        line = next(at for at, code in enumerate(TRAIN.read_text().splitlines(), 1) if "torch.relu" in code)
        assert re.search(rf"culprit  .*relu.*(\n.*)?\n.*train\.py:{line}\n\s+hidden = torch\.relu\(", told)

    @pytest.mark.parametrize("bug", [pytest.param("compile_error", marks=pytest.mark.long), "runtime_error"])
    def test_goes_on_with_the_numbers_of_eager_where_the_compiler_fails(self, bug):
        eager = python(TRAIN, "--backend", "eager")

        guarded = run("--on-failure", "fallback", TRAIN, "--bug", bug)

        assert (guarded.stdout, guarded.returncode) == (eager.stdout, 0)
        assert "1 seen, 1 checked: 1 crashed" in summary_of(guarded)


PASSES = """
import sys
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

class Pass(CustomGraphPass):
    def __call__(self, graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten.relu.default and sys.argv[1] == "wrong":
                node.target = torch.ops.aten.sigmoid.default

    def uuid(self):
        return sys.argv[1]

config.post_grad_custom_post_pass = Pass()

@torch.compile
def call(x):
    return torch.relu(x) + 1

with torch.no_grad():
    call(torch.linspace(-1, 1, 5))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("inductor-run")
class TestWatchedPasses:
    @pytest.mark.parametrize(("kind", "status"), [("wrong", 1), pytest.param("healthy", 0, marks=pytest.mark.long)])
    def test_are_named_where_they_change_what_is_computed(self, folder, kind, status):
        (folder / "script.py").write_text(PASSES)

        ended = run("--watch-passes", "--strict", "script.py", kind)

        told = summary_of(ended)
        assert ended.returncode == status
        assert re.search(r"passes  [1-9]\d* over \d+ graphs", told)
        assert "graphs  " not in told
        assert ("pass post_grad_custom_post_pass (Pass), post-grad" in told) == (kind == "wrong")
        assert bool(re.search(r"culprit  .*relu", told)) == (kind == "wrong")


CULPRIT = Culprit(
    op="aten.relu.default",
    node="relu_1",
    module_path="blocks.0",
    source_line=os.path.join(os.getcwd(), "net.py") + ":31: x = self.act(x)",
    local_error=0.4,
    noise=1e-7,
    stage="forward",
)


def seen(number, **fields):
    known = {"name": "net.py:3: x", "backend": "inductor", "level": "dynamo", "nodes": 12, "call": 1, "unchecked": ""}
    return GuardedGraphRecord(number=number, **{**known, "verdict": Verdict.DIVERGED, **fields})


def shown(summary, watched=None):
    printed = io.StringIO()
    print_guard_summary(summary, watched, Console(width=80, file=printed))
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


class TestTheSummary:
    def test_names_each_finding_with_culprit_source_line_and_place(self):
        where = os.path.join(os.getcwd(), "found", "0002-dynamo")
        finding = seen(2, culprit=CULPRIT, directory=where, repro=os.path.join(where, "repro.py"), call=20)

        told = shown(GuardSummary(graphs=3, checked=3, verdicts={"equivalent": 2, "diverged": 1}, findings=(finding,)))

        assert told.splitlines()[0] == "torchdelta run  diverged"
        assert "graphs  3 seen, 3 checked: 2 equivalent, 1 diverged" in told
        assert "≠ diverged  graph 2 on call 20: inductor, dynamo, 12 nodes" in told
        assert "culprit  aten.relu.default  relu_1 of blocks.0, in forward" in told
        assert "net.py:31\n               x = self.act(x)" in told
        assert "report   found/0002-dynamo" in told
        assert "repro    found/0002-dynamo/repro.py" in told

    def test_says_why_where_nobody_is_to_blame(self):
        crashed = seen(1, verdict=Verdict.CRASHED, reason="RuntimeError: no", call=0)

        told = shown(GuardSummary(graphs=1, checked=1, verdicts={"crashed": 1}, findings=(crashed,)))

        assert "! crashed  graph 1 when it was compiled" in told
        assert "from  net.py:3: x" in told
        assert "why   RuntimeError: no" in told

    def test_is_one_screen_whatever_was_found(self):
        many = tuple(seen(number, culprit=CULPRIT, directory=f"run/{number:04d}-dynamo") for number in range(1, 101))
        unchecked = {f"reason {number}": number for number in range(1, 21)}
        notes = tuple(f"note {number}" for number in range(20))

        told = shown(
            GuardSummary(
                graphs=500, checked=100, verdicts={"diverged": 100}, unchecked=unchecked, findings=many, notes=notes,
                out="run", seconds=3.21,
            )
        )  # fmt: skip

        assert len(told.splitlines()) < 60
        assert all(len(line) <= 80 for line in told.splitlines())
        assert "and 96 more: run/index.jsonl" in told
        assert "not checked  20: reason 20" in told
        assert told.count("and 15 more") == 2
        assert "checks took 3.2 s" in told

    def test_of_nothing_does_not_sound_as_if_all_were_well(self):
        nothing = shown(GuardSummary(graphs=0, checked=0))
        unchecked = shown(GuardSummary(graphs=2, checked=0, unchecked={"checks are off": 2}))
        unwatched = shown(GuardSummary(graphs=0, checked=0), PassSummary(passes=3, graphs=1, changed=1))

        assert nothing == "torchdelta run  nothing was checked\n  graphs  none: nothing in it was compiled"
        assert unchecked.startswith("torchdelta run  nothing was checked\n  graphs       2 seen, 0 checked\n")
        assert unwatched.startswith(
            "torchdelta run  nothing was checked\n  passes  3 over 1 graph (1 changed, 0 checked)"
        )

    def test_has_the_passes_that_were_watched(self):
        found = PassFinding(name="fold (mine)", phase="joint", graph="graph 0", culprit=CULPRIT, reason="")
        wrong = PassSummary(passes=30, graphs=2, changed=2, checked=2, findings=[found], notes=["one does not run"])
        healthy = PassSummary(passes=30, graphs=2, changed=2, checked=2)
        nothing = GuardSummary(graphs=0, checked=0)

        assert "none changes what is computed" in shown(nothing, healthy)
        assert shown(nothing, healthy).startswith("torchdelta run  no pass changes what is computed")
        told = shown(nothing, wrong)
        assert "30 over 2 graphs (2 changed, 2 checked): 1 pass changes" in told
        assert "≠ diverged  pass fold (mine), joint, of graph 0\n  culprit  aten.relu.default" in told
        assert "note  one does not run" in told
