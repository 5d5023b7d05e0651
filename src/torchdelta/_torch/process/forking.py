"""Inductor in processes that fork: shared state is prepared before the fork, and private state is set apart after it.

`warm_up` runs before forks, `use_private_cache` after. `probe` finds the vector instructions of this machine in forks,
because inductor itself starts a new Python for each kind. This file imports nothing of torchdelta: a process that must
not contain torchdelta runs `probe` by the path of this file.
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

_PROBE_TIMEOUT_S = 60


def probe() -> None:
    """Find the vector instructions that inductor may use; inductor remembers them for every later compile.

    Each kind is tried in a fork of this process.
    """
    with mock.patch.object(VecISA, "_probe_load", _is_loaded):
        pick_vec_isa()


def _is_loaded(_: VecISA, library: str) -> bool:
    """Tell whether a library of vector instructions can be loaded here; a fork tries, because that may kill it.

    It cannot if the load raises, kills the fork or takes longer than `_PROBE_TIMEOUT_S`.
    """
    process = os.fork()
    if process == 0:
        try:
            signal.alarm(_PROBE_TIMEOUT_S)
            ctypes.CDLL(library)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0


def compile_alone() -> None:
    """Let this process and its forks compile by themselves, without helper processes or threads."""
    torch._inductor.config.compile_threads = 1


def compile_in_threads() -> None:
    """Let this process compile as many C++ kernels at once as torch would, in threads and not in helper processes."""
    torch._inductor.config.compile_threads = torch._inductor.config.decide_compile_threads()
    # kernels of Triton are compiled here too, for which torch has the helper processes
    AsyncCompile.use_process_pool = classmethod(lambda _: False)  # type: ignore[method-assign,assignment]
    AsyncCompile.warm_pool = classmethod(lambda _: None)  # type: ignore[method-assign,assignment]


def headers_directory() -> Path:
    """Return the directory of inductor's precompiled C++ headers, which all processes share, whatever their caches."""
    return Path(torch._inductor.codecache._HEADER_DIR)


def warm_up(backend: str) -> None:
    """Compile a small function with a backend, so that later forks find most of a compile's preparations done.

    A C++ kernel is not compiled, because that prepares nothing for others, and no backward is run, because the autograd
    engine must not see a fork. The user's cache is used, except that of graphs. Afterwards this process compiles
    without helpers (`compile_alone`) and has no monitor of progress bars, and dynamo and its counters are reset. What
    the compile raises passes through.
    """
    # a progress bar would start a thread, and a process with threads must not fork
    torch.hub.tqdm.monitor_interval = 0  # type: ignore[attr-defined]
    compile_alone()
    torch._inductor.codecache.torch_key()  # a hash over all of torch, which every cache key starts with
    if backend == "inductor":
        probe()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        mock.patch.object(CppPythonBindingsCodeCache, "load_pybinding", _prepare_kernel),
        contextlib.suppress(_WarmedUp),
    ):
        torch.compile(_small, backend=backend)(torch.zeros(8, requires_grad=True))
    torch._dynamo.reset()
    counters.clear()


def use_private_cache(directory: Path, *, scratch: Path | None = None) -> None:
    """Set the directory of inductor's cache for this process, and that of temporary files if `scratch` is given.

    Both are set by environment variables, which child processes inherit. Inductor's caches in memory are dropped.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    if scratch is not None:
        os.environ["TMPDIR"] = str(scratch)
        tempfile.tempdir = None
    clear_caches()
    torch._inductor.codecache.CacheBase.get_local_cache_path.cache_clear()


class _WarmedUp(BaseException):
    """Ends a compile before its C++ compiler runs; no handler of compile errors catches it."""


def _prepare_kernel(*args: Any, **kwargs: Any) -> NoReturn:
    """Prepare a kernel, precompiled headers included, and end the compile by `_WarmedUp`."""
    CppPythonBindingsCodeCache.load_pybinding_async(*args, **kwargs)
    raise _WarmedUp


def _small(x: torch.Tensor) -> torch.Tensor:
    """Return relu(x) + 1; this is the function that `warm_up` compiles."""
    return torch.relu(x) + 1
