"""Fifty checks in one process leave nothing behind."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchdelta as td

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="descriptors and memory are read from /proc"),
]
CHECKS = 50
MOST_OBJECTS = 8
"""Objects that may stay after a check. With torch 2.13, 4 were measured: weak references of dynamo. There were 440 for
the pass before dynamo's guards were dropped with the code that they guard, and 26 before the sources that fx generates,
the tracebacks of dynamo's metrics and the context variables of temporary settings were."""
MOST_MEMORY_KIB = 20 << 10

# in a process of its own, because pytest keeps every line that torch logs
SCRIPT = """
import gc, json, os, sys, threading
import torch
import torchdelta as td
from torchdelta._torch.modes import numba_rounding  # noqa: F401 — imported by a check once it pays
from torchdelta.compare import numba_measure, numba_spread  # noqa: F401
from programs import broken

def held():
    gc.collect()
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE") >> 10
    objects = len(gc.get_objects()) + gc.get_freeze_count()
    return [objects, len(os.listdir("/proc/self/fd")), threading.active_count(), memory]

transform = {"pass": broken.relu_is_off}.get(sys.argv[1], sys.argv[1])
program, args = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), (torch.randn(2, 4),)
for _ in range(40):  # during the first checks, torch itself fills caches of a fixed size
    td.check(program, args, transform=transform)
before = held()
for _ in range(int(sys.argv[2])):
    td.check(program, args, transform=transform)
print(json.dumps([after - then for then, after in zip(before, held())]))
"""


@pytest.mark.parametrize("transform", ["pass", "aot_eager"])
def test_memory_descriptors_threads_and_objects_are_flat(transform):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, transform, str(CHECKS)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    objects, descriptors, threads, memory = json.loads(ran.stdout.splitlines()[-1])
    assert (descriptors, threads) == (0, 0)
    assert objects <= MOST_OBJECTS * CHECKS
    assert memory <= MOST_MEMORY_KIB


def test_a_check_leaves_no_values_to_the_garbage_collector():
    program, args = torch.nn.Linear(300, 300), (torch.randn(2, 300),)
    td.check(program, args, transform="aot_eager")
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in gc.get_objects()}
        td.check(program, args, transform="aot_eager")
        # torch leaves fake tensors in cycles, which hold no memory
        left = [
            each
            for each in gc.get_objects()
            if id(each) not in before and type(each) in (torch.Tensor, torch.nn.Parameter) and each.numel() > 300
        ]
        assert [tuple(each.shape) for each in left] == []
    finally:
        gc.enable()


HOLDING = """
import os, time
import torch
import torchdelta as td
from programs import broken

program, args = broken.stack()
held = td.minify(program, args, transform=broken.relu_is_off)
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    left = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    if not left:
        break
    time.sleep(0.1)
print(len(left), held.reduction.nodes_after)
"""


def test_a_result_of_minify_that_is_held_keeps_no_process():
    ran = subprocess.run(
        [sys.executable, "-c", HOLDING],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout.splitlines()[-1:] == ["0 3"], ran.stderr
