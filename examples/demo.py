"""`make demo`: the main job on two small programs, one that survives the compiler and one that does not."""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
TORCHDELTA = pathlib.Path(sys.executable).with_name("torchdelta")


def show(*words: str) -> int:
    print(f"\n$ torchdelta {' '.join(words)}", flush=True)
    return subprocess.run([TORCHDELTA, *words], cwd=HERE.parent, check=False).returncode


def main() -> int:
    print("Does a compiled transformer block still compute the same, forward and backward?")
    healthy = show("check", "examples/transformer.py:build", "-t", "inductor")
    print("\nAnd floor division? (torch 2.13 gets it wrong.)")
    wrong = show("check", "examples/floor_divide.py:build", "-t", "inductor")
    print("\nAnd a pass that takes gelu for its tanh approximation?")
    approximate = show("check", "examples/transformer.py:build", "-t", "examples/passes.py:gelu_by_tanh")
    return 0 if (healthy, wrong, approximate) == (0, 1, 1) else 1


if __name__ == "__main__":
    sys.exit(main())
