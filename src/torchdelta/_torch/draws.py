"""Whether random numbers are drawn, from whatever generator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations that draw; what a branch, a loop or an operator of the user's own draws it does not see."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what torch says of it."""
        self.has_drawn |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))
