"""Contexts that take code out of the modes around it, so that it handles real tensors while a compiler is at work.

`outside_modes` takes off the modes alone, `without_modes_or_hooks` also the hooks on tensors that autograd saves.
`preserved_dispatch` puts the dispatcher back after a kernel raised.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def without_modes_or_hooks() -> Iterator[None]:
    """Run the body without any mode around it, and without a hook on the tensors that autograd saves.

    Inference mode is off too; autocast and the recording of gradients stay as they are.
    """
    is_recording = torch.is_grad_enabled()
    # a compiler needs the overrides of tensor functions, so only the modes go
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
    """Take every `__torch_function__` mode off its stack while the body runs, and put them back afterwards."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def preserved_dispatch() -> Iterator[None]:
    """Leave torch's dispatch state after the body as it was before, even if a kernel written in Python raises there.

    Torch puts that state back only when the traceback of such a kernel is freed, so garbage is collected after the
    body.
    """
    before = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*before):
        try:
            yield
        finally:
            gc.collect()


@contextmanager
def outside_modes() -> Iterator[None]:
    """Run the body without modes, overrides of tensor functions and inference mode, so that its tensors are real.

    Gradients are recorded in the body, even within `torch.no_grad()`.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        yield
