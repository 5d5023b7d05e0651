"""Which vector instructions inductor may use, found out in forks of this process.

Inductor itself starts a new Python that loads torch for each kind. This needs nothing of torchdelta: a process that is
to have nothing of it runs this file by its path.

Inductor before a fork and after it: what processes share is made ready, what they must not share is set apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.codecache
import torch._inductor.compile_fx
import torch._inductor.config
import torch.hub
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa
from torch._inductor.utils import clear_caches

_PATIENCE_S = 60


def probe() -> None:
    """Find out once what every compile asks; it is remembered by inductor."""
    with mock.patch.object(VecISA, "_probe_load", _is_loaded):
        pick_vec_isa()


def _is_loaded(_: VecISA, library: str) -> bool:
    """Tell whether a library of vector instructions can be loaded here, which may end the process that tries."""
    process = os.fork()
    if process == 0:
        try:
            signal.alarm(_PATIENCE_S)
            ctypes.CDLL(library)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0


def compile_alone() -> None:
    """Have this process, and those forked from it, compile without helpers that would outlive it or have threads."""
    torch._inductor.config.compile_threads = 1


def compile_in_threads() -> None:
    """Have this process compile as many C++ kernels at once as torch would, without helpers that would outlive it."""
    torch._inductor.config.compile_threads = torch._inductor.config.decide_compile_threads()
    # what helpers are for, kernels of Triton, is compiled here
    AsyncCompile.use_process_pool = classmethod(lambda _: False)  # type: ignore[method-assign,assignment]
    AsyncCompile.warm_pool = classmethod(lambda _: None)  # type: ignore[method-assign,assignment]


def headers_directory() -> Path:
    """Return where inductor keeps precompiled C++ headers: one place for all, whatever their caches are."""
    return Path(torch._inductor.codecache._HEADER_DIR)


def warm_up(backend: str) -> None:
    """Compile something small, so that those forked afterwards find headers, patterns and probed instructions ready.

    It has too few elements for a second thread. The backward is left out: the autograd engine must not see a fork.
    The cache is the user's own, where the instructions may have been probed before; a graph that was found there would
    warm nothing. What every key of a cache starts with is a hash over all of torch. The C++ compiler itself has nothing
    to get warm: it is given the headers, and not the kernel.
    """
    # a progress bar would start a thread, and nobody forks beside one
    torch.hub.tqdm.monitor_interval = 0  # type: ignore[attr-defined]
    compile_alone()
    torch._inductor.codecache.torch_key()
    if backend == "inductor":
        probe()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        mock.patch.object(CppPythonBindingsCodeCache, "load_pybinding", _prepare_kernel),
        contextlib.suppress(_Enough),
    ):
        torch.compile(_small, backend=backend)(torch.zeros(8, requires_grad=True))
    torch._dynamo.reset()
    counters.clear()


def use_private_cache(directory: Path, *, scratch: Path | None = None) -> None:
    """Keep what is compiled from now on in a directory of this process, and temporary files in its scratch."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    if scratch is not None:
        os.environ["TMPDIR"] = str(scratch)
        tempfile.tempdir = None
    clear_caches()
    torch._inductor.codecache.CacheBase.get_local_cache_path.cache_clear()


class _Enough(BaseException):
    """Everything but the C++ compiler has run; whoever handles errors of a compile is passed by."""


def _prepare_kernel(*args: Any, **kwargs: Any) -> NoReturn:
    """Do what comes before the kernel is compiled, the headers included, and no more."""
    CppPythonBindingsCodeCache.load_pybinding_async(*args, **kwargs)
    raise _Enough


def _small(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1
