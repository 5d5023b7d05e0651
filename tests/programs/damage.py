"""Passes that damage the process, the files or the machine that they run in."""

import ctypes
import os
import shutil
import tempfile
import time

import torch


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).requires_grad_(False), (torch.randn(2, 4),)


def _directory():
    return os.path.dirname(tempfile.gettempdir())


def equal(graph_module, example_inputs):
    return lambda *args: tuple(value.clone() for value in graph_module(*args))


def off(graph_module, example_inputs):
    return lambda *args: tuple(value + 1e-3 for value in graph_module(*args))


def dies_later(graph_module, example_inputs):
    # memory that the candidate damaged ends the process in a part after it
    from torchdelta.check.baseline import Baseline

    def die(self, part):
        self.progress(part)
        ctypes.string_at(0)

    def run(*args):
        Baseline.timed = die
        return graph_module(*args)

    return run


def deletes(graph_module, example_inputs):
    shutil.rmtree(_directory())
    return graph_module


def deletes_when_run(graph_module, example_inputs):
    def run(*args):
        shutil.rmtree(_directory(), ignore_errors=True)
        return graph_module(*args)

    return run


def replaces_its_directory_by_a_file(graph_module, example_inputs):
    shutil.rmtree(_directory())
    with open(_directory(), "w"):
        time.sleep(0.5)  # so that the command asks for its part meanwhile
    return graph_module


def answers(graph_module, example_inputs):
    with open(os.path.join(_directory(), "answer.json"), "w") as file:
        file.write("{}")
    return equal(graph_module, example_inputs)


def answers_with_a_pipe(graph_module, example_inputs):
    os.mkfifo(os.path.join(_directory(), "answer.json"))
    return equal(graph_module, example_inputs)


def fills(graph_module, example_inputs):
    try:
        with open(os.path.join(tempfile.gettempdir(), "large"), "wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
    except OSError:
        return equal(graph_module, example_inputs)


def leaves_a_daemon(graph_module, example_inputs):
    import signal

    zygote = os.getppid()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open("daemon.txt", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not os.path.exists("daemon.txt") or os.path.getsize("daemon.txt") == 0:
        time.sleep(0.01)
    os.kill(zygote, signal.SIGKILL)
    time.sleep(600)


def segfaults_when_built():
    ctypes.string_at(0)


def reads_the_command_line():
    import argparse

    argparse.ArgumentParser().parse_args()
    return build()


def leaves_a_thread():
    import threading

    threading.Thread(target=time.sleep, args=(600,)).start()
    return build()


def raises_long(graph_module, example_inputs):
    raise ValueError("first " + "x" * (50 << 20) + " last")


def runs_out_of_memory(graph_module, example_inputs):
    raise MemoryError


def raises_long_when_built():
    raises_long(None, ())
