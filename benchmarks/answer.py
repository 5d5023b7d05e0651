"""Measure the time to an answer: each command beside a bare script that compiles the program and compares by hand.

    python benchmarks/answer.py --programs small bert --commands check

Bare script and command run by turns in new processes, with an empty compiler cache (cold) and with the one that the
cold run left (warm). Ratios are those of one run. CPU time is that of all processes; memory is the largest sum over
them, pages that they share counted once, as sampled twice a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS_FILE = Path(__file__).with_name("answer_programs.py")
MODELS = ("small", "bert", "gpt2", "t5", "vit")
PASSES = ("pass128", "pass512")
PROGRAMS = (*MODELS, "gpt2_small", *PASSES)
COMMANDS = ("check", "locate", "diagnose", "run")
MARK = "TORCHDELTA_BENCHMARK"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process and its children cost."""

    wall_s: float
    cpu_s: float
    peak_gib: float
    code: int
    error: str


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the selected programs and commands, and print a row for each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*MODELS, *PASSES])
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    options = parser.parse_args(argv)
    print("| program | command | cache | bare s | s | ratio | CPU s | GiB | where the time went |")
    print("|---|---|---|---:|---:|---:|---:|---:|---|", flush=True)
    for program in options.programs:
        for command in options.commands:
            for row in measure(program, command):
                print(row, flush=True)


def measure(program: str, command: str) -> Iterator[str]:
    """Yield a row for an empty compiler cache, and one for the cache that the run before left.

    Nothing is yielded for `run` on a program of a pass, and for `diagnose` on one without a planted bug.
    """
    if (command == "run" and program in PASSES) or (command == "diagnose" and program not in MODELS):
        return
    with tempfile.TemporaryDirectory(prefix="answer-") as directory:
        for cache in ("cold", "warm"):
            # each side has a cache of its own, so that none is warm by the other
            bare = run([sys.executable, str(PROGRAMS_FILE), program], Path(directory) / "bare")
            report = Path(directory) / f"{cache}.json"
            out = Path(directory) / f"out-{cache}"
            ours = run(words_of(program, command, report, out), Path(directory) / "ours")
            report = out / "report.json" if command == "diagnose" else report
            expected = (1,) if command == "diagnose" else (0,)
            parts = parts_of(report) if ours.code in expected else f"exit code {ours.code}: {ours.error}"
            yield (
                f"| {program} | {command} | {cache} | {bare.wall_s:.1f} | {ours.wall_s:.1f} "
                f"| {ours.wall_s / bare.wall_s:.2f} | {ours.cpu_s:.1f} | {ours.peak_gib:.2f} | {parts} |"
            )


def words_of(program: str, command: str, report: Path, out: Path) -> list[str]:
    """Return the command line of a command on a program; its report is written to `report`, or into `out`."""
    torchdelta = [sys.executable, "-m", "torchdelta", command]
    if command == "run":
        return [*torchdelta, "--json", str(report), str(PROGRAMS_FILE), program]
    transform = f"{PROGRAMS_FILE}:rewritten" if program in PASSES else "inductor"
    if command == "diagnose":
        return [*torchdelta, f"{PROGRAMS_FILE}:{program}_bug", "-t", transform, "-o", str(out)]
    return [*torchdelta, f"{PROGRAMS_FILE}:{program}", "-t", transform, "--json", str(report)]


def parts_of(report: Path) -> str:
    """Return the seconds of the parts of a check or search, the longest first; parts under 0.05 s are left out."""
    cost = json.loads(report.read_text()).get("cost") if report.exists() else None
    parts = sorted((cost or {}).get("seconds", {}).items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= 0.05)


def run(words: Sequence[str], cache: Path) -> Measured:
    """Run a command with a directory for the compiler's caches, and return what it cost."""
    mark = os.urandom(8).hex()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), MARK: mark}
    started = time.monotonic()
    with tempfile.TemporaryFile() as error:
        process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=error)
        watch = MemoryWatch(mark)
        watch.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - started
        watch.end()
        process.returncode = os.waitstatus_to_exitcode(status)
        error.seek(0)
        last = error.read().decode(errors="replace").strip().splitlines()[-1:]
    return Measured(
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_gib=watch.peak_kib / (1 << 20),
        code=process.returncode,
        error="".join(last),
    )


class MemoryWatch(threading.Thread):
    """Samples the memory of all processes with a mark in their environment."""

    def __init__(self, mark: str, interval_s: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.mark = f"{MARK}={mark}".encode()
        self.interval_s = interval_s
        self.has_ended = threading.Event()
        self.peak_kib = 0

    def run(self) -> None:
        """Keep the largest sum in `peak_kib`."""
        while not self.has_ended.wait(self.interval_s):
            self.peak_kib = max(self.peak_kib, sum(map(self._kib_of, Path("/proc").glob("[0-9]*"))))

    def _kib_of(self, process: Path) -> int:
        """Return the proportional set size of a process: each shared page is divided among those that share it."""
        try:
            if self.mark not in (process / "environ").read_bytes():
                return 0
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:  # it ended, or belongs to another user
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)

    def end(self) -> None:
        """Stop sampling."""
        self.has_ended.set()
        self.join()


if __name__ == "__main__":
    main()
