"""`make demo`: check three small programs, of which one is equivalent and two diverge, and diagnose the last."""

import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
TORCHDELTA = pathlib.Path(sys.executable).with_name("torchdelta")


def show(*words: str) -> int:
    """Print a torchdelta command, run it and return its exit code."""
    print(f"\n$ torchdelta {' '.join(words)}", flush=True)
    return subprocess.run([TORCHDELTA, *words], cwd=HERE.parent, check=False).returncode


def main() -> int:
    """Run the demo; return 0 if every command exited as expected, else 1."""
    print("Does a compiled transformer block still compute the same, forward and backward?")
    healthy = show("check", "examples/transformer.py:build", "-t", "inductor")
    print("\nAnd floor division? (torch 2.13 gets it wrong.)")
    wrong = show("check", "examples/floor_divide.py:build", "-t", "inductor")
    print("\nAnd a pass that replaces gelu by its tanh approximation? Which operation is wrong, and what shows it?")
    with tempfile.TemporaryDirectory() as out:
        words = ("examples/transformer.py:build", "-t", "examples/passes.py:gelu_by_tanh", "-o", out)
        approximate = show("diagnose", *words)
        print(f"\n$ cat {out}/repro.py\n{pathlib.Path(out, 'repro.py').read_text()}")
    return 0 if (healthy, wrong, approximate) == (0, 1, 1) else 1


if __name__ == "__main__":
    sys.exit(main())
