"""Programs on which torch 2.13.0 (CPU) is wrong itself; the number is that of the public pytorch issue."""

import torch
import torch.nn.functional as F


def pt181568_bf16_cast_elided():
    """The compiled program drops the rounding of `.to(bfloat16)`: it is closer to the truth than the reference."""
    torch.manual_seed(0)

    def call(x, w, b):
        y = (x @ w).to(torch.bfloat16) + b
        return y, y.mean(-1)

    return call, (torch.randn(2, 15, 32), torch.randn(32, 17), torch.randn(17))


def _features(x, w, b):
    y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)[:, :, 1:7, 1:8]
    conv = F.conv2d(y, w, b, padding=1)
    return conv, F.max_pool2d(conv, 3, 1, 1)


def _select(x, w, b, mask):
    conv, pool = _features(x, w, b)
    return torch.where(mask, conv, pool)


def pt185509_interpolate_gradient():
    """The forward agrees, and the compiled gradients are off by tens."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    w = torch.randn(4, 3, 3, 3, requires_grad=True)
    b = torch.randn(4, requires_grad=True)
    conv, pool = _features(x, w, b)
    mask = (conv > pool.mean(dim=(2, 3), keepdim=True)).detach()
    return _select, (x, w, b, mask)


def pt187018_uint8_negate():
    """The compiled uint8 negation does not wrap."""

    def call(x):
        y = -x.abs()
        return torch.cat([y, y]).sum()

    return call, (torch.tensor([200, 200], dtype=torch.uint8),)


def pt191308_int8_matmul_dtype():
    """The compiled int8 batched matmul returns int64; the values agree."""
    a, b = torch.ones((1, 1, 2), dtype=torch.int8), torch.ones((1, 2, 2), dtype=torch.int8)
    return (lambda a, b: torch.matmul(a, b)), (a, b)


def pt197895_floor_divide():
    """The compiled float `//` is floor(a / b): 1.0 // 0.1 gives 10 where eager gives 9."""
    return (lambda a, b: a // b), (torch.tensor([1.0, 0.5, 6.0]), torch.tensor([0.1, 0.1, 0.2]))
