"""The directory of a run: whose results are in it, and that no other run writes into it or takes them for its own."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchdelta as td
from programs import broken
from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records.case import Case
from torchdelta.storage.run_directory import DIAGNOSIS, RunDirectory, RunQuestion

QUESTION = RunQuestion(command="diagnose", case=Case(program="a.py:build", transform="inductor"))


def opened(path, question=QUESTION, names=DIAGNOSIS, **options):
    return RunDirectory(path, question=question, names=names, **options)


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


def test_a_run_in_progress_has_its_directory_for_itself(tmp_path):
    with opened(tmp_path):
        script = f"""
            from torchdelta.errors import UsageError
            from torchdelta.records.case import Case
            from torchdelta.storage.run_directory import DIAGNOSIS, RunDirectory, RunQuestion
            from pathlib import Path
            question = RunQuestion(command="minify", case=Case(program="b", transform="c"))
            try:
                RunDirectory(Path({str(tmp_path)!r}), question=question, names=DIAGNOSIS).__enter__()
            except UsageError as error:
                print(error)
        """
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
        )
    assert "another run of torchdelta is writing into" in ran.stdout
    assert files(tmp_path) == ["run.json"]


def test_a_killed_run_leaves_no_lock(tmp_path):
    script = f"""
        import os
        from tests.test_run_directory import opened
        from pathlib import Path
        opened(Path({str(tmp_path)!r})).__enter__()
        os.kill(os.getpid(), 9)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent.parent)])}
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, env=environment)

    assert ran.returncode == -signal.SIGKILL
    with opened(tmp_path, resume=True) as run:
        assert run.is_continued


@pytest.mark.parametrize(
    "other",
    [
        replace(QUESTION, case=replace(QUESTION.case, program="b.py:build")),
        replace(QUESTION, case=replace(QUESTION.case, transform="aot_eager")),
        replace(QUESTION, case=replace(QUESTION.case, seed=1)),
        replace(QUESTION, level="aot"),
        replace(QUESTION, command="minify"),
    ],
)
def test_another_question_is_not_resumed(tmp_path, other):
    with opened(tmp_path):
        (tmp_path / "found.json").write_text("{}")

    with pytest.raises(UsageError, match=r"is about diagnose of a\.py:build under inductor"):
        opened(tmp_path, other, resume=True).__enter__()
    assert files(tmp_path) == ["found.json", "run.json"]


def test_results_of_an_earlier_run_are_moved_away(tmp_path):
    for number in range(3):
        with opened(tmp_path, replace(QUESTION, case=replace(QUESTION.case, seed=number))) as run:
            (tmp_path / "repro.py").write_text(str(number))
            (tmp_path / "minify").mkdir()
            (tmp_path / "minify" / "journal.json").write_text("{}")
            (tmp_path / "notes.txt").write_text("the user's")

    assert run.notes == (f"the results of an earlier run are in {tmp_path / 'earlier-2'}",)
    assert (tmp_path / "earlier-1" / "repro.py").read_text() == "0"
    assert (tmp_path / "earlier-2" / "repro.py").read_text() == "1"
    assert json.loads((tmp_path / "earlier-2" / "run.json").read_text())["case"]["seed"] == 1
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["repro.py", "report.json", "minify/thesis.txt"])
def test_files_that_no_run_wrote_are_refused_and_stay(tmp_path, name, resume):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("the user's")

    with pytest.raises(UsageError, match="no run of torchdelta is known to have written"):
        opened(tmp_path, resume=resume).__enter__()
    assert files(tmp_path) == [name]
    assert path.read_text() == "the user's"


@pytest.mark.parametrize("name", ["repro.py", "report.json"])
def test_a_directory_in_place_of_a_file_is_refused_also_beside_an_earlier_run(tmp_path, name):
    with opened(tmp_path):
        pass
    (tmp_path / name).mkdir()

    with pytest.raises(UsageError, match="is not a file that torchdelta wrote"):
        opened(tmp_path).__enter__()
    assert (tmp_path / name).is_dir()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with opened(tmp_path / "out"):
        pass
    (tmp_path / "out" / "minify").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(UsageError, match="is not a directory that torchdelta wrote"):
        opened(tmp_path / "out").__enter__()


@pytest.mark.parametrize("content", ["", "{}", '{"format": "theirs"}'])
def test_another_programs_run_json_is_refused_and_stays(tmp_path, content):
    (tmp_path / "run.json").write_text(content)

    with pytest.raises(ReportUnreadable):
        opened(tmp_path).__enter__()
    assert (tmp_path / "run.json").read_text() == content


def test_unfinished_files_of_a_killed_run_are_removed_and_others_are_not(tmp_path):
    with opened(tmp_path):
        (tmp_path / f".torchdelta-{'0a' * 8}").write_text("half a report")
        (tmp_path / ".torchdelta-notes").write_text("the user's")
    with opened(tmp_path, resume=True):
        assert files(tmp_path) == [".torchdelta-notes", ".torchdelta.lock", "run.json"]


class TestReductions:
    def minified(self, out, factory=broken.stack, transform=broken.relu_is_off, **options):
        program, args = factory()
        return td.minify(program, args, transform=transform, out=out, isolated=False, semantic=False, **options)

    def test_a_program_without_a_failure_does_not_get_that_of_another(self, tmp_path):
        self.minified(tmp_path, queries=1)

        with pytest.raises(UsageError, match="is about minify"):
            self.minified(tmp_path, lambda: (torch.nn.Tanh(), (torch.randn(2),)), resume=True)

    def test_an_edited_program_of_the_same_name_is_another_program(self, tmp_path):
        def of(*layers):
            return lambda: (torch.nn.Sequential(*layers), (torch.randn(2, 4),))

        self.minified(tmp_path, of(torch.nn.ReLU(), torch.nn.Tanh()), queries=1)

        with pytest.raises(UsageError, match="because it was edited since or is another program"):
            self.minified(tmp_path, of(torch.nn.ReLU(), torch.nn.Sigmoid()), resume=True)

    def test_a_new_run_begins_with_a_journal_of_its_own(self, tmp_path):
        first = self.minified(tmp_path, queries=1)
        second = self.minified(tmp_path)

        assert second.reduction.is_minimal
        journal = json.loads((tmp_path / "journal.json").read_text())
        assert journal["nodes_before"] == first.reduction.nodes_before == second.reduction.nodes_before
        assert f"the results of an earlier run are in {tmp_path / 'earlier-1'}" in second.notes

    def test_a_run_that_was_killed_before_its_first_result_begins_anew(self, tmp_path):
        self.minified(tmp_path)
        (tmp_path / "journal.json").unlink()

        small = self.minified(tmp_path, resume=True)

        assert any("this one began anew" in note for note in small.notes)
        assert small.reduction.is_minimal

    def test_directories_that_only_look_like_ours_are_kept(self, tmp_path):
        (tmp_path / "best-of-all").mkdir()
        self.minified(tmp_path)

        assert (tmp_path / "best-of-all").is_dir()

    def test_no_process_waits_for_a_script_that_is_not_named(self, tmp_path):
        small = self.minified(tmp_path)

        assert small.clean is None
