"""Real tensors handled as such, although a tracer or a compiler is at work around it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run what is inside as if nobody stood around it: no mode, and no hook on what autograd saves.

    Whether gradients are recorded stays as it is; where nothing can record them, nothing does.
    """
    is_recording = torch.is_grad_enabled()
    # functions of tensors keep their overrides, which a compiler needs: only the modes go
    with (
        _disable_current_modes(),
        _without_function_modes(),
        torch.inference_mode(False),
        torch.set_grad_enabled(is_recording),
    ):
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            yield


@contextmanager
def _without_function_modes() -> Iterator[None]:
    taken = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(taken):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def dispatch_kept() -> Iterator[None]:
    """Leave the dispatcher as it was, although a kernel written in Python raises inside.

    What torch sets for the call of such a kernel it puts back when the traceback is gone, which may be much later.
    """
    before = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*before):
        try:
            yield
        finally:
            gc.collect()


@contextmanager
def outside_modes() -> Iterator[None]:
    """Run what is inside as if no mode were active: a backend is called with one that makes every tensor fake."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        yield
