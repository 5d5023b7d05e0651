"""Every test runs as a user's program would, on machines with and without wide vector units."""

import os
import pathlib
import runpy
import signal
import sys

import pytest

_CACHE = pathlib.Path(__file__).parent.parent / ".cache"
# set before torch is imported: compiled kernels are kept between tests and runs
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "inductor"))
os.environ.setdefault("NUMBA_CACHE_DIR", str(_CACHE / "numba"))
# oneDNN's bf16 matmul dies with SIGILL on some x86 machines
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# a shell starts background jobs with Ctrl-C ignored, and their children inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# the tests themselves run side by side: more threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
# so would inductor's helper processes, which every process that compiles starts, and which import torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# `make test-spawn`: this process, and every Python that it starts, is on a system without `os.fork`
if os.environ.get("TORCHDELTA_TEST_SPAWN"):
    _WITHOUT_FORK = str(pathlib.Path(__file__).parent / "without_fork")
    runpy.run_path(f"{_WITHOUT_FORK}/sitecustomize.py")
    sys.path.insert(0, _WITHOUT_FORK)  # some tests hand their `sys.path` to a process as its PYTHONPATH
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_WITHOUT_FORK, os.environ.get("PYTHONPATH"))))


def pytest_unconfigure():
    """Take the finalizer from the locks that torch's caches keep for ever: at the very end it fails, with a message."""
    if hasattr(getattr(sys.modules.get("filelock"), "BaseFileLock", None), "__del__"):
        del sys.modules["filelock"].BaseFileLock.__del__


@pytest.fixture(autouse=True)
def same_numbers_whatever_ran_before():
    """A test that draws without a seed draws the same alone, and behind any other."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def workers():
    """Workers that many tests share, because they take longer to get ready than most queries take."""
    from torchdelta.minify.warm_workers import pool_for

    with pool_for("inductor") as pool:
        yield pool


@pytest.fixture
def trusted(tmp_path, monkeypatch):
    """For recordings that name code of a test: that below the tests, and in the test's own directory."""
    from torchdelta.records import trust

    monkeypatch.setattr(trust, "_TRUSTED", [pathlib.Path(__file__).parent.resolve(), tmp_path.resolve()])


@pytest.fixture
def two_threads():
    """For bugs that only kernels split over threads have."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
