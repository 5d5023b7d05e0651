"""Real tensors handled as such, although a tracer or a compiler is at work around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_modes() -> Iterator[None]:
    """Run what is inside as if no mode were active: a backend is called with one that makes every tensor fake."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        yield
