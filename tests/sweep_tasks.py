"""What the workers of a sweep do in tests: a small database, with operators that take their process with them."""

import os
import signal
import time

from torchdelta.records.codec import encode
from torchdelta.records.operators import SweepRow
from torchdelta.records.verdict import Verdict

OPERATORS = {
    "fine": ["float32", "int64"],
    "wrong": ["float32"],
    "dies": ["float32"],
    "hangs": ["float32"],
    "split.sections": ["int64"],
    "split.list": ["int64"],
}


def list_operators(request, place):
    return {"operators": OPERATORS}


def sweep_operator(request, place):
    name = request["op"]
    place.tell("aot/static/min-cut on float32[3, 4], dim=1")
    if name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        time.sleep(600)
    verdict = Verdict.DIVERGED if name == "wrong" else Verdict.EQUIVALENT
    swept = SweepRow(
        op=name,
        dtype=request["dtype"],
        samples=request["samples"],
        verdict=verdict,
        probes={"fake/given": verdict, "repeat": Verdict.EQUIVALENT},
        reason="" if name == "fine" else "the fake kernel says: 3",
    )
    return {"swept": encode(swept), "process": os.getpid()}


def die_in_a_check(request, place):
    """Sweep an operator of the real database with a check that dies at a probe."""
    from torchdelta.operators import worker

    def check_op(*_, progress, **__):
        progress("aot/dynamic/min-cut")
        os.kill(os.getpid(), signal.SIGILL)

    worker.check_op = check_op
    return worker.sweep_operator(request, place)


def fail_in_a_check(request, place):
    """Sweep an operator of the real database with a check that has a mistake."""
    from torchdelta.operators import worker

    def check_op(*_, **__):
        raise ZeroDivisionError("somebody's mistake")

    worker.check_op = check_op
    return worker.sweep_operator(request, place)
