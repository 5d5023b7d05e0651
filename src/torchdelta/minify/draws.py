"""Numbers that stand for the user's: an expression makes them again, for each shape others."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How an input is made instead of kept."""

    by: str
    """`randn`, `zeros` or `ones`."""
    seed: int = 0
    """What random numbers are drawn from."""

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Return numbers in the place of a tensor's own."""
        if self.by == "randn":
            made = torch.randn(value.shape, generator=torch.Generator().manual_seed(self.seed)).to(value.dtype)
        else:
            made = getattr(torch, self.by)(value.shape, dtype=value.dtype)
        return made.to(value.device).requires_grad_(value.requires_grad)

    def text(self, value: torch.Tensor) -> str:
        """Return the expression that makes them on the CPU."""
        shape = tuple(value.shape)
        if self.by != "randn":
            return f"torch.{self.by}({shape}, dtype={value.dtype})"
        sizes = ", ".join(map(str, shape)) or "()"
        drawn = f"torch.randn({sizes}, generator=torch.Generator().manual_seed({self.seed}))"
        return drawn if value.dtype is torch.float32 else f"{drawn}.to({value.dtype})"
