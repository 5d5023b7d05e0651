"""Nothing is lost and nothing is blamed wrongly: real limits of the machine, full disks, closed pipes, daemons.

docs/reliability.md names the promise that each test holds.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from programs import reports
from torchdelta import errors
from torchdelta.errors import LONGEST, describe, shortened
from torchdelta.records import codec
from torchdelta.records.failure import Failure
from torchdelta.records.verdict import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]
DAMAGE = Path(__file__).parent / "programs" / "damage.py"
TORCHDELTA = f"{sys.executable} -m torchdelta"


def _can_mount():
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    probe = "mount -t tmpfs -o size=1m none /mnt"
    return subprocess.run(["unshare", "-m", "sh", "-c", probe], capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(not _can_mount(), reason="this user may not mount a small disk")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="a limit or a file of Linux")


@pytest.fixture
def shell(tmp_path):
    """Run a line of bash in a folder that has damage.py; `$torchdelta` is the command."""
    shutil.copy(DAMAGE, tmp_path)

    def run(line, **environment):
        return subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "torchdelta": TORCHDELTA, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def on_small_disk(line, size="4m"):
    """Return a line of bash that runs another one with a small disk at `small`, which then vanishes."""
    return f"mkdir -p small; unshare -m bash -c 'mount -t tmpfs -o size={size} none small; {line}'"


class TestOutput:
    """The exit code is the verdict's, and files are complete, wherever the output goes."""

    @pytest.mark.parametrize(
        "output",
        ["| true", ">&-", "2>&-", ">&- 2>&- <&-", pytest.param("> /dev/full", marks=needs_linux)],
    )
    @pytest.mark.parametrize(("transform", "code"), [("equal", 0), ("off", 1)])
    def test_that_cannot_be_written_changes_nothing_else(self, shell, tmp_path, output, transform, code):
        check = f"$torchdelta check damage.py:build -t damage.py:{transform} --json report.json"
        ran = shell(f"{check} {output}; exit ${{PIPESTATUS[0]}}")

        assert ran.returncode == code, ran
        assert "Traceback" not in ran.stderr
        assert codec.read_report(tmp_path / "report.json").verdict.value == ("equivalent", "diverged")[code]

    @needs_linux
    def test_on_a_full_disk_is_said_to_be_incomplete(self, shell, tmp_path):
        codec.write_report(reports.diverged(), tmp_path / "report.json")
        ran = shell("$torchdelta show report.json > /dev/full")

        assert (ran.returncode, ran.stderr) == (
            1,
            "torchdelta: the output could not be written: No space left on device\n",
        )

    @needs_mount
    def test_of_a_file_on_a_full_disk_is_printed_all_the_same(self, shell):
        line = "$torchdelta check damage.py:build -t damage.py:off --json small/report.json"
        ran = shell(on_small_disk(f"dd if=/dev/zero of=small/rest 2>/dev/null; {line}", size="64k"))

        assert ran.returncode == 2
        assert ran.stdout.startswith("diverged")
        assert "cannot write small/report.json: No space left on device" in ran.stderr


LEAVER = """
import os, shutil, sys, tempfile
import torch

def wrong(graph_module, example_inputs):
    return lambda *args: tuple(value + 1 for value in graph_module(*args))

compiled = torch.compile(lambda x: torch.relu(x), backend=wrong)
place = tempfile.mkdtemp()
os.chdir(place)
if "delete" in sys.argv:
    shutil.rmtree(place)
compiled(torch.ones(3))
sys.exit(7)
"""


class TestRun:
    @pytest.mark.parametrize("argument", ["leave", "delete"])
    def test_a_script_that_leaves_its_working_directory_keeps_its_status(self, shell, tmp_path, argument):
        (tmp_path / "leaver.py").write_text(LEAVER)
        ran = shell(f"$torchdelta run leaver.py {argument}")

        assert ran.returncode == 7, ran
        assert "diverged  graph 1" in ran.stderr
        assert len(list(tmp_path.glob("torchdelta-run-*/index.jsonl"))) == 1

    @pytest.mark.parametrize("output", ["2>&1 | true", "2>&-", pytest.param("2> /dev/full", marks=needs_linux)])
    def test_a_summary_that_cannot_be_written_keeps_the_status_of_the_script(self, shell, tmp_path, output):
        (tmp_path / "script.py").write_text("import sys; sys.exit(7)")
        ran = shell(f"$torchdelta run script.py {output}; exit ${{PIPESTATUS[0]}}")

        assert ran.returncode == 7, ran


@needs_linux
class TestLimitsOfTheMachine:
    def test_a_hard_limit_of_the_address_space_is_not_exceeded(self, shell):
        ran = shell("ulimit -v 12000000; $torchdelta check damage.py:build -t damage.py:off")

        assert ran.stdout.startswith("diverged"), ran
        assert ran.returncode == 1

    def test_a_worker_that_cannot_begin_is_neither_the_programs_fault_nor_a_pass(self, tmp_path):
        from torchdelta import errors
        from torchdelta.isolate.pool import Pool

        with Pool(root=tmp_path) as pool:
            # the request is unreadable, so that the worker fails before its task
            pool._starter.start = _spoiling_requests(pool._starter.start)
            with pytest.raises(errors.EnvironmentUnfit, match=r"ended before its task began.*FileNotFound"):
                pool.ask("isolate_tasks:echo", {}, deadline_s=60)

    @pytest.mark.parametrize("command", ["check", "minify"])
    def test_memory_that_is_too_small_for_the_program_is_an_error_with_its_reason(self, shell, command):
        out = "-o out" if command == "minify" else ""
        ran = shell(f"$torchdelta {command} damage.py:build -t damage.py:off --memory 1KB {out}")

        assert ran.returncode == 2
        assert "needs too much memory by itself" in ran.stderr
        assert "eagerly" not in ran.stderr

    def test_memory_that_is_noticed_late_is_not_blamed_on_the_candidate(self, monkeypatch):
        from torchdelta.check.isolated import check_isolated
        from torchdelta.errors import ProgramError
        from torchdelta.isolate import supervisor
        from torchdelta.records.case import CheckOptions

        monkeypatch.setattr(supervisor, "_CHECK_LIMITS_S", 600.0)
        options = CheckOptions.read(transform=f"{DAMAGE}:off")
        with pytest.raises(ProgramError, match="needs too much memory by itself"):
            check_isolated(f"{DAMAGE}:build", options, memory_bytes=1000)

    def test_memory_beyond_every_machine_is_no_limit(self, shell):
        ran = shell("$torchdelta check damage.py:build -t damage.py:equal --memory 99999999TB")

        assert ran.returncode == 0, ran


def _spoiling_requests(start):
    def spoiled(order):
        (Path(order.directory) / "request.json").unlink()
        return start(order)

    return spoiled


class TestLoading:
    """No command runs code of the program in its own process."""

    @pytest.mark.parametrize("command", ["minify", "diagnose"])
    def test_a_factory_that_dies_is_an_error_of_the_program(self, shell, command):
        ran = shell(f"$torchdelta {command} damage.py:segfaults_when_built -t damage.py:off -o out")

        assert ran.returncode == 2, ran
        assert "while it was loaded: the process was ended by SIGSEGV" in ran.stderr

    @pytest.mark.parametrize("command", ["check", "minify", "diagnose"])
    @pytest.mark.parametrize("factory", ["reads_the_command_line", "leaves_a_thread"])
    def test_a_factory_sees_no_arguments_of_ours_and_does_not_keep_the_command_alive(self, shell, command, factory):
        out = "" if command == "check" else "-o out"
        ran = shell(f"timeout 120 $torchdelta {command} damage.py:{factory} -t damage.py:off {out}")

        assert ran.returncode == 1, ran


class TestLongMessages:
    def test_are_cut_in_the_report_and_whole_in_a_file(self, shell, tmp_path):
        check = "$torchdelta check damage.py:build -t damage.py:raises_long --timeout 60 --json report.json"
        ran = shell(f"mkdir tmp; TMPDIR=$PWD/tmp {check} --verbose")

        assert ran.returncode == 4, ran.returncode
        assert len(ran.stdout) < 200_000
        report = codec.read_report(tmp_path / "report.json")
        assert (tmp_path / "report.json").stat().st_size < 500_000
        path = re.search(r"the whole text is in (\S+)]", report.failure.message)[1]
        assert Path(path).is_relative_to(tmp_path / "tmp")
        assert Path(path).stat().st_size > 50 << 20

    def test_of_a_factory_are_cut_too(self, shell):
        ran = shell("$torchdelta check damage.py:raises_long_when_built -t eager")

        assert ran.returncode == 2
        assert "the factory raised ValueError: first xxx" in ran.stderr
        assert "characters are left out here; the whole text is in" in ran.stderr
        assert len(ran.stderr) < 10_000

    def test_an_exception_without_a_message_has_words(self):
        assert describe(ValueError()) == "ValueError (no message)"
        assert str(Failure.of(ValueError(), stage="forward")) == "ValueError: (no message)"
        assert str(Failure.of_refused_memory("", stage="forward")) == "out of memory"

    def test_are_not_written_where_a_link_leads(self, tmp_path, monkeypatch):
        text = "y" * (1 << 20)
        monkeypatch.setattr(errors, "_full_texts", tmp_path)
        path = Path(re.search(r"the whole text is in (\S+)]", shortened(text))[1])
        assert path.read_text() == text
        path.unlink()
        path.symlink_to(tmp_path / "theirs")

        assert "they could not be written to" in shortened(text)
        assert not (tmp_path / "theirs").exists()

    def test_a_text_is_cut_once(self):
        cut = shortened("x" * (1 << 20))

        assert len(cut) < LONGEST + 500
        assert shortened(cut) == cut


class TestBlame:
    def test_a_death_after_the_candidate_began_is_the_candidates(self, shell):
        ran = shell("$torchdelta check damage.py:build -t damage.py:dies_later --json report.json")

        assert ran.returncode == 4, ran
        assert "was ended by SIGSEGV (in its part 'comparison')" in ran.stdout

    @pytest.mark.parametrize(
        ("transform", "reason"),
        [
            ("deletes", "the directory of its query was deleted"),
            ("deletes_when_run", "the directory of its query was deleted"),
            ("replaces_its_directory_by_a_file", "the directory of its query was deleted"),
            ("answers", "the file of its answer is damaged"),
            ("answers_with_a_pipe", "the file of its answer is damaged"),
        ],
    )
    def test_damage_to_its_own_files_is_a_failure_of_the_candidate(self, shell, tmp_path, transform, reason):
        ran = shell(f"$torchdelta check damage.py:build -t damage.py:{transform} --json report.json")

        assert ran.returncode == 4, ran
        report = codec.read_report(tmp_path / "report.json")
        assert (report.verdict, report.failure.kind) == (Verdict.CRASHED, "files")
        assert reason in report.failure.message

    @needs_mount
    def test_a_disk_that_the_candidate_filled_is_its_failure(self, shell, tmp_path):
        check = "TMPDIR=$PWD/small $torchdelta check damage.py:build -t damage.py:fills --json report.json"
        ran = shell(on_small_disk(f"{check}; code=$?; ls small/torchdelta-*; exit $code"))

        assert ran.returncode == 4, ran
        report = codec.read_report(tmp_path / "report.json")
        assert report.failure.kind == "files"
        assert "is full" in report.failure.message

    @needs_linux
    def test_a_daemon_whose_parent_killed_the_zygote_does_not_survive(self, shell, tmp_path):
        ran = shell("$torchdelta check damage.py:build -t damage.py:leaves_a_daemon")

        assert ran.returncode == 4, ran
        process = int((tmp_path / "daemon.txt").read_text())
        assert not Path(f"/proc/{process}").exists()
