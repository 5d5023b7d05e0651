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
            dtype = torch.complex64 if value.is_complex() else torch.float32
            generator = torch.Generator().manual_seed(self.seed)
            made = torch.randn(value.shape, dtype=dtype, generator=generator).to(value.dtype)
        else:
            made = getattr(torch, self.by)(value.shape, dtype=value.dtype)
        return made.to(value.device).requires_grad_(value.requires_grad)

    def text(self, value: torch.Tensor) -> str:
        """Return the expression that makes them on the CPU."""
        shape = tuple(value.shape)
        if self.by != "randn":
            return f"torch.{self.by}({shape}, dtype={value.dtype})"
        sizes = ", ".join(map(str, shape)) or "()"
        generator = f"generator=torch.Generator().manual_seed({self.seed})"
        drawn = f"torch.randn({sizes}, {'dtype=torch.complex64, ' if value.is_complex() else ''}{generator})"
        return drawn if value.dtype in (torch.float32, torch.complex64) else f"{drawn}.to({value.dtype})"
