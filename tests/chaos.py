"""Disturb commands at random, and check that nothing is lost and nothing is left behind.

    python tests/chaos.py --seconds 600 --seed 1

A round runs one command on a small program, and disturbs it once: a random process of it is killed, the user presses
Ctrl-C, its output is closed, or its disk is full. Afterwards:

- no process of it is left, and no file but the answer;
- its exit code is that of an undisturbed run, or one of a typed failure; never 70, and no traceback is printed;
- a report that is there can be read;
- a reduction that was ended is continued by `--resume`, and ends as an undisturbed one.

A round depends on the seed and its number alone, except for the moment at which a process is hit. `play` is one round.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

DAMAGE = Path(__file__).parent / "programs" / "damage.py"
SCRIPT = """
import sys
import torch
from damage import off

print(torch.compile(lambda x: torch.relu(x), backend=off)(torch.ones(3)))
sys.exit(7)
"""
COMMANDS = {
    "check equal": (["check", "damage.py:build", "-t", "damage.py:equal", "--json", "out.json"], 0),
    "check off": (["check", "damage.py:build", "-t", "damage.py:off", "--json", "out.json"], 1),
    "check deletes": (["check", "damage.py:build", "-t", "damage.py:deletes", "--json", "out.json"], 4),
    "minify off": (["minify", "damage.py:build", "-t", "damage.py:off", "-o", "out"], 1),
    "diagnose off": (["diagnose", "damage.py:build", "-t", "damage.py:off", "-o", "out"], 1),
    "run": (["run", "script.py"], 7),
}
"""The commands, and the exit code of each if it is not disturbed."""
DISTURBANCES = ("kill main", "kill other", "interrupt", "close output", "fill disk")
TYPED = {2, 4}
"""The exit codes of a typed failure: an error in one sentence, and a candidate that crashed or timed out."""
LONGEST_S = 180.0


@dataclass(frozen=True)
class Round:
    """One command, what is done to it, and after which time."""

    command: str
    disturbance: str
    delay_s: float

    @classmethod
    def drawn(cls, seed: int, number: int) -> Round:
        """Return the round of a number; each has random numbers of its own."""
        source = random.Random(f"{seed} {number}")
        return cls(source.choice(list(COMMANDS)), source.choice(DISTURBANCES), source.uniform(0.2, 9.0))


class ChaosFailure(AssertionError):
    """A promise that was broken in a round."""


def play(chosen: Round, home: Path) -> str:
    """Play one round in an empty directory; return how it ended, and raise ChaosFailure if a promise was broken."""
    shutil.copy(DAMAGE, home)
    (home / "script.py").write_text(SCRIPT)
    temporary = home / "tmp"
    temporary.mkdir()
    words, usual = COMMANDS[chosen.command]
    mark = f"TORCHDELTA_CHAOS={os.urandom(8).hex()}"
    process = _start(words, home, mark, small_disk=chosen.disturbance == "fill disk")
    hit = _disturb(chosen, process, mark)
    out, err = process.communicate(timeout=LONGEST_S)
    code = process.returncode
    allowed = {usual, *TYPED}
    if chosen.disturbance == "kill main":
        allowed |= {-signal.SIGKILL}
    if chosen.disturbance == "interrupt":
        allowed |= {130, -signal.SIGINT}
    if chosen.command == "run":
        # python itself ends with 120 if the script's output cannot be written, and an import fails on a full disk
        allowed |= {1, 120}
    _require(code in allowed, f"exit code {code}, not {sorted(allowed)}\n{out}\n{err}")
    if chosen.command != "run":
        _require("Traceback (most recent call last)" not in err, err)
    _require_gone(mark)
    _require_readable(home)
    if words[0] in ("minify", "diagnose") and code != usual:
        _resume(words, usual, home)
    _require_clean(home)
    return f"{hit}, exit code {code}"


def _start(words, home, mark, *, small_disk=False):
    name, _, value = mark.partition("=")
    environment = {**os.environ, "TMPDIR": str(home / "tmp"), "PYTHONPATH": str(home), name: value}
    command = [sys.executable, "-m", "torchdelta", *words]
    if small_disk and can_mount():
        # so small that a worker's compiler or its answer may not fit
        fill = 'mount -t tmpfs -o size=200k none tmp && exec "$@"'
        command = ["unshare", "-m", "bash", "-c", fill, "bash", *command]
    return subprocess.Popen(
        command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def can_mount() -> bool:
    """Tell whether this user may mount a small disk that only one process sees."""
    if shutil.which("unshare") is None:
        return False
    probe = "mount -t tmpfs -o size=1m none /mnt"
    return subprocess.run(["unshare", "-m", "sh", "-c", probe], capture_output=True, check=False).returncode == 0


def _disturb(chosen: Round, process, mark: str) -> str:
    """Disturb a process after its delay, unless it has ended; return in words what was done."""
    if chosen.disturbance == "fill disk":
        return "full disk"
    if chosen.disturbance == "close output":
        process.stdout.close()
        process.stdout = None
        return "closed output"
    try:
        process.wait(chosen.delay_s)
        return "ended before"
    except subprocess.TimeoutExpired:
        pass
    if chosen.disturbance == "interrupt":
        process.send_signal(signal.SIGINT)
        return "interrupted"
    if chosen.disturbance == "kill main":
        process.kill()
        return "killed"
    others = sorted(family(mark) - {process.pid})
    if not others:
        return "no other process"
    # of those alive now, which differ from run to run
    victim = others[int(chosen.delay_s * 1000) % len(others)]
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return "no other process"
    return "killed a child"


def family(mark: str) -> set[int]:
    """Return the processes that have the mark of a round in their environment, zombies excepted."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:  # it ended, or belongs to another user
            continue
    return found


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ChaosFailure(message)


def _require_gone(mark: str) -> None:
    deadline = time.monotonic() + 15
    while family(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    _require(not family(mark), f"processes are left: {family(mark)}")


def _require_readable(home: Path) -> None:
    from torchdelta.records.codec import read_report

    for path in (home / "out.json", home / "out" / "report.json"):
        if path.exists():
            read_report(path)


def _require_clean(home: Path) -> None:
    """Require that no file of a pool is left, once the next pool has swept, and no unfinished file of ours."""
    from torchdelta.isolate.directories import sweep

    for root in (home / "tmp").glob("torchdelta-*"):
        if root.is_dir():
            sweep(root)
            _require(not list(root.iterdir()), f"files are left: {list(root.rglob('*'))[:20]}")
    unfinished = [path for path in home.rglob(".torchdelta*") if "earlier" not in str(path)]
    _require(not unfinished or not (home / "out").exists(), f"unfinished files are left: {unfinished}")


def _resume(words, usual: int, home: Path) -> None:
    """Continue an ended reduction, and require the result of an undisturbed one."""
    mark = f"TORCHDELTA_CHAOS={os.urandom(8).hex()}"
    process = _start([*words, "--resume"], home, mark)
    _, err = process.communicate(timeout=LONGEST_S)
    _require(process.returncode == usual, f"--resume: exit code {process.returncode}, not {usual}\n{err}")
    result, undisturbed = _result(home), _undisturbed(tuple(words))
    _require(result == undisturbed, f"--resume: {result}, not {undisturbed}")
    _require_gone(mark)


def _result(home: Path) -> dict[str, object]:
    """Return what a reduction found: the verdict, the size of the graph, and whether the script shows the failure."""
    report = json.loads((home / "out" / "report.json").read_text())
    nodes = report["reduction"]["nodes_after"]
    return {"verdict": report["verdict"], "nodes": nodes, "confirmed": report["repro"]["confirmed"]}


@functools.cache
def _undisturbed(words: tuple[str, ...]) -> dict[str, object]:
    """Return the result of a command that nothing disturbs."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as home:
        shutil.copy(DAMAGE, home)
        (Path(home) / "tmp").mkdir()
        _start(words, Path(home), "TORCHDELTA_CHAOS=undisturbed").communicate(timeout=LONGEST_S)
        return _result(Path(home))


def main(seconds: float, seed: int, tell=print) -> int:
    """Play rounds for so many seconds; return how many. ChaosFailure names the seed, the number and the round."""
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        chosen = Round.drawn(seed, number)
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as home:
            try:
                ending = play(chosen, Path(home))
            except (ChaosFailure, subprocess.TimeoutExpired) as error:
                raise ChaosFailure(f"seed {seed}, round {number}, {chosen}: {error}") from error
        tell(f"round {number}: {chosen.command}, {chosen.disturbance} after {chosen.delay_s:.1f} s: {ending}")
        number += 1
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    typed = parser.parse_args()
    print(f"{main(typed.seconds, typed.seed)} rounds, and every promise held")
