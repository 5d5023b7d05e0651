"""Float floor division: torch 2.13 compiles `a // b` to floor(a / b), so 1.0 // 0.1 is 10, and eagerly it is 9."""

import torch


def build():
    a = torch.tensor([1.0, 0.5, 6.0, 7.0])
    b = torch.tensor([0.1, 0.1, 0.2, 2.0])
    return (lambda a, b: a // b), (a, b)
