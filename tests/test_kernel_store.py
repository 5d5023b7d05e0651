"""Compiled kernels are kept between workers and runs, and an entry that may be wrong is never taken."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchdelta._torch.compile import kernel_store
from torchdelta._torch.compile.kernel_store import Compilation, KernelStore, is_private
from torchdelta.check.isolated import check_isolated
from torchdelta.records.case import CheckOptions
from torchdelta.records.verdict import Verdict

pytestmark = pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")


class Compiler:
    """Runs g++ for a store, and counts how often."""

    def __init__(self, directory, **settings):
        self.calls = 0
        self.directory = directory
        self.store = KernelStore(directory / "store", self.run, **settings)
        self.store.directory.mkdir(exist_ok=True)

    def run(self, command, cwd):
        self.calls += 1
        subprocess.run(command.split(), cwd=cwd, check=True, capture_output=True)

    def answer(self, value=1, *, flags="", header=None, name="kernel"):
        """Compile a function that returns the value, load it, and return what it returns."""
        source, result = self.directory / f"{name}.cpp", self.directory / f"{name}{self.calls}.so"
        include = f'#include "{header}"\n' if header else f"#define VALUE {value}\n"
        source.write_text(f'{include}extern "C" int answer() {{ return VALUE; }}\n')
        result.unlink(missing_ok=True)
        self.store.compile(f"g++ {source} -shared -fPIC {flags} -o {result}", str(self.directory))
        # a copy, because a library is loaded once by its path
        copy = shutil.copy(result, self.directory / f"loaded-{os.urandom(4).hex()}.so")
        return ctypes.CDLL(str(copy)).answer()

    @property
    def entries(self):
        return sorted(self.store.directory.iterdir())


@pytest.fixture
def compiler(tmp_path):
    return Compiler(tmp_path)


def test_the_same_source_is_compiled_once_wherever_it_lies(compiler):
    assert [compiler.answer(3), compiler.answer(3), compiler.answer(3, name="elsewhere")] == [3, 3, 3]
    assert compiler.calls == 1


def test_another_source_and_other_flags_are_compiled_by_themselves(compiler):
    answers = [compiler.answer(3), compiler.answer(4), compiler.answer(3, flags="-O2"), compiler.answer(3)]

    assert answers == [3, 4, 3, 3]
    assert compiler.calls == 3


def test_another_environment_of_the_compiler_is_compiled_by_itself(compiler, monkeypatch):
    compiler.answer(3)
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/nowhere")

    assert compiler.answer(3) == 3
    assert compiler.calls == 2


def test_a_changed_header_is_compiled_anew(compiler, tmp_path):
    header = tmp_path / "value.h"
    header.write_text("#define VALUE 5\n")
    first = [compiler.answer(header=header), compiler.answer(header=header)]
    header.write_text("#define VALUE 6\n")

    assert (first, compiler.calls) == ([5, 5], 1)
    assert compiler.answer(header=header) == 6
    header.unlink()
    with pytest.raises(subprocess.CalledProcessError):
        compiler.answer(header=header)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_an_entry_that_was_cut_short_is_compiled_anew(compiler, share):
    compiler.answer(3)
    (entry,) = compiler.entries
    content = entry.read_bytes()
    entry.write_bytes(content[: int(share * len(content))])

    assert compiler.answer(3) == 3
    assert compiler.calls == 2
    assert entry.read_bytes() == content


def test_an_entry_with_another_byte_is_compiled_anew(compiler):
    compiler.answer(3)
    (entry,) = compiler.entries
    content = bytearray(entry.read_bytes())
    content[-100] ^= 1
    entry.write_bytes(content)

    assert compiler.answer(3) == 3
    assert compiler.calls == 2


def test_a_compile_that_fails_raises_and_is_not_kept(compiler):
    with pytest.raises(subprocess.CalledProcessError):
        compiler.answer("no number")

    assert compiler.entries == []


@pytest.mark.parametrize("obstacle", ["missing", "a file"])
def test_without_a_directory_to_write_to_the_compiler_runs(compiler, obstacle):
    compiler.store.directory.rmdir()
    if obstacle == "a file":
        compiler.store.directory.write_text("")

    assert [compiler.answer(3), compiler.answer(3)] == [3, 3]
    assert compiler.calls == 2


def test_on_a_full_disk_the_compiler_runs_and_no_part_is_left(compiler, monkeypatch):
    def fail(source, target):
        if Path(target).parent == compiler.store.directory:
            raise OSError(28, "No space left on device")
        return replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", fail)

    assert [compiler.answer(3), compiler.answer(3)] == [3, 3]
    assert (compiler.calls, compiler.entries) == (2, [])


def test_a_full_store_loses_what_was_used_longest_ago(tmp_path):
    probe = Compiler(tmp_path)
    probe.answer(0)
    (entry,) = probe.entries
    # room for three entries, of which two are kept
    compiler = Compiler(tmp_path, max_bytes=int(3.5 * entry.stat().st_size))
    entry.unlink()
    for value in (1, 2, 3):
        compiler.answer(value)
    oldest, second, third = sorted(compiler.entries, key=lambda path: path.stat().st_mtime_ns)
    os.utime(oldest)  # as a use of it does
    compiler.answer(4)

    assert len(compiler.entries) == 2
    assert oldest in compiler.entries
    assert not {second, third} & set(compiler.entries)


def test_a_compiler_that_is_a_script_is_called_each_time(tmp_path, monkeypatch):
    script = tmp_path / "bin" / "g++"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    kernel_store._stamps_of_compiler.cache_clear()
    compiler = Compiler(tmp_path)
    try:
        assert [compiler.answer(3), compiler.answer(3)] == [3, 3]
    finally:
        kernel_store._stamps_of_compiler.cache_clear()

    assert compiler.calls == 2


@pytest.mark.parametrize(
    "command",
    ["g++ a.cpp -E -o a.i", "g++ a.h -o a.h.gch", "g++ --version", "g++ a.cpp -o", "g++ -o a.so", "g++ a.cpp -shared"],
)
def test_commands_that_make_no_library_are_left_alone(command):
    assert Compilation.of(command) is None


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    assert is_private(tmp_path)
    assert not is_private(shared)


PROGRAM = """
import torch
import torch._inductor.config


def build():
    return (lambda x: torch.relu(x) * {number}), (torch.linspace(-1, 1, 64),)


def build_with_bug():
    torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"
    return build()
"""


@pytest.mark.slow
def test_workers_compile_a_kernel_once_and_never_take_that_of_another_source(workers, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(number=1 + int.from_bytes(os.urandom(3), "big")))
    directory = kernel_store.directory_of_kernels()

    def check(factory):
        """Return the verdict, and the entries of the store that the check added or used."""
        before = times_of_use()
        report = check_isolated(f"{file}:{factory}", CheckOptions.read(transform="inductor"), pool=workers).report
        after = times_of_use()
        return (
            report.verdict,
            {key for key in after if key not in before},
            {key for key in before if after.get(key, 0) > before[key]},
        )

    def times_of_use():
        return {path.name: path.stat().st_mtime_ns for path in directory.glob("*")}

    first, added, _ = check("build")
    again, _, used = check("build")
    wrong, added_by_bug, _ = check("build_with_bug")

    assert (first, again, wrong) == (Verdict.EQUIVALENT, Verdict.EQUIVALENT, Verdict.DIVERGED)
    # natively and in float64; other tests may add entries at the same time
    assert len(added & used) >= 2
    assert added_by_bug - added
