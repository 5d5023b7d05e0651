"""Every test runs as a user's program would, on machines with and without wide vector units."""

import os
import pathlib
import signal

import pytest

_CACHE = pathlib.Path(__file__).parent.parent / ".cache"
# set before torch is imported: compiled kernels are kept between tests and runs
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "inductor"))
os.environ.setdefault("NUMBA_CACHE_DIR", str(_CACHE / "numba"))
# oneDNN's bf16 matmul dies with SIGILL on some x86 machines
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# whoever runs the tests in the background runs them deaf to Ctrl-C, and their children with them
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# the tests themselves run side by side; threads of theirs beside that would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
# so would a compiler's helper processes, which each process that compiles anything starts, and which import torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def same_numbers_whatever_ran_before():
    """A test that draws without a seed draws the same alone, and behind any other."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def workers():
    """Workers for whoever shares them: they take longer to get ready than most queries take."""
    from torchdelta.minify.workers import pool_for

    with pool_for("inductor") as pool:
        yield pool


@pytest.fixture
def two_threads():
    """For bugs that only kernels split over threads have."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
