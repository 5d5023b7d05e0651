"""Tasks for workers in tests: some answer, and the others fail in every way that a task can."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

from torchdelta.errors import UsageError


class TooOdd(UsageError):
    pass


def echo(request, place):
    return {"request": request, "process": os.getpid()}


def describe(request, place):
    (place.scratch / "mine").write_text("")
    return {
        "scratch": str(place.scratch),
        "files": [path.name for path in place.scratch.iterdir()],
        "cache": os.environ["TORCHINDUCTOR_CACHE_DIR"],
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "process": os.getpid(),
        "parent": os.getppid(),
        "can_fork": hasattr(os, "fork"),
    }


def segfault(request, place):
    place.tell("compile")
    place.tell("run")
    print("the last words")
    ctypes.string_at(0)


def abort(request, place):
    os.abort()


def send_itself(request, place):
    os.kill(os.getpid(), signal.Signals[request["signal"]])
    time.sleep(60)


def hang(request, place):
    place.tell(f"asleep {os.getpid()}")
    time.sleep(request.get("seconds", 600))
    return {}


def hang_ignoring_sigterm(request, place):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def hang_in_c(request, place):
    place.tell(f"asleep {os.getpid()}")
    # PyDLL keeps the interpreter's lock: no thread of Python runs meanwhile
    ctypes.PyDLL(None).sleep(600)


def leave(request, place):
    os._exit(request["status"])


def exit_by_exception(request, place):
    sys.exit(request["status"])


def exit_with_message(request, place):
    sys.exit("no such thing")


def eat(request, place):
    blocks = []
    for _ in range(request["mebibytes"]):
        blocks.append(b"x" * 2**20)
        time.sleep(0.0005)
    return {"bytes": len(blocks) << 20}


def eat_in_a_child(request, place):
    code = f"import time; held = [(b'x' * 2**20, time.sleep(0.0005)) for _ in range({request['mebibytes']})]"
    subprocess.run([sys.executable, "-c", code], check=False)
    return {}


def eat_at_once(request, place):
    import torch

    return {"bytes": torch.ones(request["mebibytes"] << 18).nbytes}


def write(request, place):
    line = b"x" * 1023 + b"\n"
    for _ in range(request["kibibytes"]):
        os.write(1, line)
    return {}


def write_everywhere(request, place):
    print("python")
    print("python's errors", file=sys.stderr)
    os.write(2, b"descriptor\n")
    ctypes.CDLL(None).puts(b"c")
    subprocess.run(["echo", "child"], check=True)
    return {}


def fail(request, place):
    raise {"ValueError": ValueError, "UsageError": UsageError, "TooOdd": TooOdd}[request["type"]](request["message"])


def answer_oddly(request, place):
    return {"list": [1], "nan": {"x": float("nan")}, "object": {"x": object()}}[request["what"]]


def replace_its_parts(request, place):
    place.tell("before")
    place.parts.unlink()
    if request["by"] == "directory":
        place.parts.mkdir()
    else:
        os.mkfifo(place.parts)
    time.sleep(0.5)
    return {}


def leave_a_child(request, place):
    """Leave a child process behind, in this process group or, with `daemon`, in a session of its own."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=request["daemon"])
    return {"child": child.pid}


def kill_zygote(request, place):
    """Kill the zygote, unless the file `unless` exists; with `once`, make that file first."""
    if not os.path.exists(request["unless"]):
        if request["once"]:
            open(request["unless"], "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return {"process": os.getpid()}


def is_imported(request, place):
    return {"is_imported": request["name"] in sys.modules}


def threads_of_parent(request, place):
    with open(f"/proc/{os.getppid()}/status") as file:
        return {"threads": int(next(line.split()[1] for line in file if line.startswith("Threads:")))}


def compile_relu(request, place):
    import torch

    from torchdelta._torch.process import forking

    x = torch.linspace(-1, 1, 70_000, requires_grad=True)  # enough for several threads
    result = torch.compile(lambda x: torch.relu(x) * request["factor"])(x)
    result.sum().backward()
    return {
        "is_right": bool((result == torch.relu(x) * request["factor"]).all()),
        "graphs": sum(path.is_file() for path in place.cache.rglob("fxgraph/**/*")),
        "hits": torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"],
        "headers": sorted(path.name for path in forking.headers_directory().glob("*.gch")),
        "new_headers": sorted(path.name for path in place.directory.rglob("*.gch")),
    }


def compile_two_kernels(request, place):
    """Compile two kernels that only get compiled if both are given to the C++ compiler at the same time."""
    import torch
    from torch._inductor import cpp_builder

    from torchdelta.isolate.process_groups import children_of

    both, compile_one = threading.Barrier(2, timeout=60), cpp_builder.run_compile_cmd

    def compile_with_the_other(*args, **kwargs):
        if ".main." in str((args, kwargs)):
            both.wait()
        return compile_one(*args, **kwargs)

    cpp_builder.run_compile_cmd = compile_with_the_other
    weight = torch.randn(4, 4)
    torch.compile(lambda x: torch.tanh(torch.relu(x * request["factor"]) @ weight))(torch.randn(4, 4))
    return {"children": children_of(os.getpid())}
