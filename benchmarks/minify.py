"""Compare torchdelta's minifier with stock PyTorch's, in size and time, on inductor's own planted relu bug.

Torchdelta runs every query in a worker. Stock PyTorch writes a launcher at repro level 4 after AOT, and minifies with a
new process for each query (`--isolate`) or all in one. Both start from the same script, which has run once before,
because a user who minifies has seen it fail, and the compiler's cache then knows the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

KINDS = ("accuracy", "compile_error", "runtime_error")
MODELS = ("mlp", "bert")
WAYS = ("ours", "stock", "stock isolated")
SCRIPT = """
import torch
import torch._inductor.config
from torch import nn

torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "{kind}"


def build():
    torch.manual_seed(0)
    if "{model}" == "mlp":
        layers = [layer for place in range(10) for layer in (nn.Linear(16, 16), nn.ReLU() if place == 3 else nn.Tanh())]
        return nn.Sequential(*layers).eval().requires_grad_(False), (torch.randn(4, 16),)
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=128,
        max_position_embeddings=64, hidden_act="relu",
    )
    return BertModel(config).eval().requires_grad_(False), (torch.randint(0, 128, (2, 16)),)


if __name__ == "__main__":
    model, args = build()
    torch.compile(model)(*args)
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the selected models, bugs and minifiers one after the other, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    options = parser.parse_args(argv)
    print("| model | bug | way | nodes | queries | seconds |\n|---|---|---|---:|---:|---:|")
    for model in options.models:
        for kind in options.kinds:
            for way in options.ways:
                with tempfile.TemporaryDirectory() as folder:
                    (Path(folder) / "program.py").write_text(SCRIPT.format(model=model, kind=kind))
                    _run([sys.executable, "program.py"], Path(folder))
                    row = _ours(Path(folder)) if way == "ours" else _stock(Path(folder), kind, way)
                print(f"| {model} | {kind} | {way} | {' | '.join(row)} |", flush=True)


def _ours(folder: Path) -> tuple[str, str, str]:
    """Run torchdelta; return nodes, queries and seconds as texts."""
    command = [sys.executable, "-m", "torchdelta", "minify", "program.py:build", "-t", "inductor", "-o", "out"]
    started = time.perf_counter()
    ran = _run(command, folder)
    seconds = time.perf_counter() - started
    path = folder / "out" / "report.json"
    if not path.exists():
        return "-", "-", f"{seconds:.1f} (failed: {_last(ran)})"
    report = json.loads(path.read_text())
    reduction = report["reduction"]
    note = "" if report["repro"]["confirmed"] else " (not confirmed)"
    return str(reduction["nodes_after"]), str(reduction["queries"]), f"{seconds:.1f}{note}"


def _stock(folder: Path, kind: str, way: str) -> tuple[str, str, str]:
    """Run stock PyTorch's minifier; return nodes, queries and seconds as texts."""
    level = "4" if kind == "accuracy" else "2"
    settings = {"TORCHDYNAMO_REPRO_AFTER": "aot", "TORCHDYNAMO_REPRO_LEVEL": level}
    # without caches, because stock PyTorch does not check a graph that comes from one
    settings |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    settings["TORCH_COMPILE_DEBUG_DIR"] = str(folder / "debug")
    started = time.perf_counter()
    ran = _run([sys.executable, "program.py"], folder, settings)
    launcher = next(folder.rglob("minifier_launcher.py"), None)
    if launcher is None:
        return "-", "-", f"{time.perf_counter() - started:.1f} (no launcher: {_last(ran)})"
    isolated = ["--isolate"] if way == "stock isolated" else ["--no-isolate"]
    ran = _run([sys.executable, str(launcher), "minify", *isolated], folder, settings)
    seconds = time.perf_counter() - started
    text = ran.stdout + ran.stderr
    sizes = list(_sizes(folder, text))
    queries = re.findall(r"(?:Number|#) of queries: (\d+)", text)
    note = "" if ran.returncode == 0 else f" (exit {ran.returncode}: {_last(ran)})"
    return str(min(sizes, default=0) or "-"), max(queries, key=int, default="-"), f"{seconds:.1f}{note}"


def _sizes(folder: Path, text: str) -> Iterator[int]:
    """Yield every number of nodes in the minifier's log and in the names of its checkpoints."""
    yield from (int(number) for number in re.findall(r"to (\d+) nodes", text))
    for checkpoint in folder.rglob("*.py"):
        if match := re.fullmatch(r"(\d+)\.py", checkpoint.name):
            yield int(match[1])


def _run(command: list[str], folder: Path, settings: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(settings or {}), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    # bytecode is written, because an installed torchdelta has its own, as torch does
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def _last(ran: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
    return lines[-1].strip()[:80] if lines else f"exit {ran.returncode}"


if __name__ == "__main__":
    main()
