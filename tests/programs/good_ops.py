"""Custom operators that are right, each of another kind; a name gives the operator and its arguments."""

import functools

import torch
from torch import Tensor

GOOD = {}
_LIBRARY = torch.library.Library("td_good", "FRAGMENT")


def _planted(build):
    def factory():
        torch.manual_seed(0)
        return build()

    GOOD[build.__name__] = functools.update_wrapper(factory, build)
    return factory


def _drawn(*sizes, **how):
    return torch.randn(*sizes, requires_grad=True, **how)


def _save_first(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


@torch.library.custom_op("td_good::pointwise", mutates_args=())
def _pointwise(x: Tensor) -> Tensor:
    return x * x.sigmoid()


_pointwise.register_fake(torch.empty_like)


def _pointwise_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    gate = x.sigmoid()
    return grad * gate * (1 + x * (1 - gate))


_pointwise.register_autograd(_pointwise_backward, setup_context=_save_first)


@_planted
def pointwise():
    return _pointwise, (_drawn(3, 4),), {}


@_planted
def in_bfloat16():
    return _pointwise, (_drawn(8, 16, dtype=torch.bfloat16),), {}


@_planted
def transposed():
    return _pointwise, (torch.randn(4, 3).t().requires_grad_(),), {}


def no_elements():
    return _pointwise, (_drawn(0, 4),), {}


# Two outputs, of which integers have no gradient.


@torch.library.custom_op("td_good::largest", mutates_args=())
def _largest(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    values, indices = x.max(dim)
    return values, indices


@_largest.register_fake
def _(x, dim):
    sizes = [size for at, size in enumerate(x.shape) if at != dim % x.dim()]
    return x.new_empty(sizes), x.new_empty(sizes, dtype=torch.int64)


def _largest_saved(ctx, inputs, output):
    x, ctx.dim = inputs
    ctx.sizes = x.shape
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _largest_backward(ctx, grad, _):
    (indices,) = ctx.saved_tensors
    spread = grad.new_zeros(ctx.sizes).scatter(ctx.dim, indices.unsqueeze(ctx.dim), grad.unsqueeze(ctx.dim))
    return spread, None


_largest.register_autograd(_largest_backward, setup_context=_largest_saved)


@_planted
def two_outputs_one_without_gradient():
    return _largest, (_drawn(3, 4), 1), {}


# What it mutates, it declares.


@torch.library.custom_op("td_good::accumulate", mutates_args=("total",))
def _accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x.square())


_accumulate.register_fake(lambda total, x: None)


@_planted
def declared_mutation():
    return _accumulate, (torch.randn(3, 4), torch.randn(3, 4)), {}


@torch.library.custom_op("td_good::accumulate_and_count", mutates_args=("total",))
def _accumulate_and_count(total: Tensor, x: Tensor) -> Tensor:
    total.add_(x)
    return (x > 0).sum()


_accumulate_and_count.register_fake(lambda total, x: x.new_empty((), dtype=torch.int64))


@_planted
def declared_mutation_with_output():
    return _accumulate_and_count, (torch.randn(3, 4), torch.randn(3, 4)), {}


# A list of tensors goes in, and one comes out.


@torch.library.custom_op("td_good::scaled_all", mutates_args=())
def _scaled_all(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return [tensor * factor for tensor in tensors]


_scaled_all.register_fake(lambda tensors, factor: [torch.empty_like(tensor) for tensor in tensors])


def _keep_factor(ctx, inputs, output):
    ctx.factor = inputs[1]


_scaled_all.register_autograd(
    lambda ctx, grads: ([grad * ctx.factor for grad in grads], None), setup_context=_keep_factor
)


@_planted
def list_of_tensors():
    return _scaled_all, ([_drawn(3, 4), _drawn(5)], 0.5), {}


@torch.library.custom_op("td_good::rotated", mutates_args=())
def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    return x * torch.polar(torch.ones_like(angle), angle)


_rotated.register_fake(lambda x, angle: torch.empty_like(x))


def _rotated_saved(ctx, inputs, output):
    ctx.save_for_backward(inputs[1], output)


def _rotated_backward(ctx, grad):
    angle, output = ctx.saved_tensors
    return grad * torch.polar(torch.ones_like(angle), -angle), (grad * (1j * output).conj()).real


_rotated.register_autograd(_rotated_backward, setup_context=_rotated_saved)


@_planted
def complex_numbers():
    return _rotated, (_drawn(3, 4, dtype=torch.complex64), _drawn(3, 4)), {}


# Everything that a schema can say of an argument.


@torch.library.custom_op("td_good::reduced", mutates_args=())
def _reduced(
    x: Tensor,
    weight: Tensor | None,
    dims: list[int],
    *,
    scale: float = 1.0,
    mode: str = "sum",
    keep: bool = False,
    limit: int | None = None,
) -> Tensor:
    made = x if weight is None else x * weight
    made = made.sum(dims, keepdim=keep) if mode == "sum" else made.mean(dims, keepdim=keep)
    made = made * scale
    return made if limit is None else made.clamp(max=limit)


@_reduced.register_fake
def _(x, weight, dims, *, scale=1.0, mode="sum", keep=False, limit=None):
    reduced = {dim % x.dim() for dim in dims}
    sizes = [1 if at in reduced else size for at, size in enumerate(x.shape) if keep or at not in reduced]
    return x.new_empty(sizes)


@_planted
def arguments_of_every_kind():
    return _reduced, (torch.randn(3, 4, 5), None, [0, 2]), {"scale": 0.5, "mode": "mean", "keep": True}


@_planted
def optional_tensor_given():
    return _reduced, (torch.randn(3, 4, 5), torch.randn(4, 5), [1]), {"limit": 2}


# Told which dtype and device to make.


@torch.library.custom_op("td_good::ramp", mutates_args=())
def _ramp(size: int, step: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(size, device=device).to(dtype) * step


_ramp.register_fake(lambda size, step, dtype, device: torch.empty(size, dtype=dtype, device=device))


@_planted
def dtype_and_device():
    return _ramp, (7, 0.5, torch.float64, torch.device("cpu")), {}


# No operator but a function: arguments and outputs are trees.


def attended(inputs, *, heads):
    query, key = inputs["query"], inputs["rest"][0]
    scores = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1)
    return {"mixed": scores @ inputs["rest"][1], "of": (heads, scores.argmax(-1)), "unused": None}


@_planted
def function_of_trees():
    inputs = {"query": _drawn(2, 3, 8), "rest": [_drawn(2, 5, 8), _drawn(2, 5, 8)], "name": "self"}
    return attended, (inputs,), {"heads": 2}


# How large the output is depends on the data.


@torch.library.custom_op("td_good::positive_indices", mutates_args=())
def _positive_indices(x: Tensor) -> Tensor:
    return torch.nonzero(x > 0).contiguous()  # as it is, it lies column by column


@_positive_indices.register_fake
def _(x):
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty((size, x.dim()), dtype=torch.int64)


@_planted
def data_dependent_size():
    return _positive_indices, (torch.randn(3, 4),), {}


# Random numbers of a seed that is an argument.


@torch.library.custom_op("td_good::seeded_dropout", mutates_args=())
def _seeded_dropout(x: Tensor, seed: int, p: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(x.device).manual_seed(seed)
    kept = (torch.rand(x.shape, generator=generator, device=x.device) >= p).to(x.dtype) / (1 - p)
    return x * kept, kept


_seeded_dropout.register_fake(lambda x, seed, p: (torch.empty_like(x), x.new_empty(x.shape)))


def _keep_mask(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


_seeded_dropout.register_autograd(
    lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None, None), setup_context=_keep_mask
)


@_planted
def seeded_random():
    return _seeded_dropout, (_drawn(8, 16), 7, 0.25), {}


@_planted
def torch_random():
    """Draws from torch's own generator, which every run finds in the same state."""
    return torch.nn.functional.dropout, (_drawn(8, 16),), {"p": 0.25}


@torch.library.custom_op("td_good::popcount", mutates_args=())
def _popcount(x: Tensor) -> Tensor:
    return sum((x >> bit) & 1 for bit in range(8))


_popcount.register_fake(torch.empty_like)


@_planted
def integers_only():
    return _popcount, (torch.randint(0, 255, (3, 4)),), {}


def _shifted_in_place(x, by):
    y = x * 1.0
    y.add_(by)
    return y.mul_(2).sum(-1)


@_planted
def in_place_on_what_is_no_leaf():
    return _shifted_in_place, (_drawn(3, 4) * 2, _drawn(4)), {}


# One input does not matter, and its gradient is None in every run.


def _ignoring_second(x, unused):
    return x.exp()


@_planted
def unused_input():
    return _ignoring_second, (_drawn(3, 4), _drawn(2)), {}


# A view that the schema does declare.

_LIBRARY.define("transposed(Tensor(a) x) -> Tensor(a)")
_LIBRARY.impl("transposed", lambda x: x.t(), "CompositeImplicitAutograd")


@_planted
def declared_alias():
    return torch.ops.td_good.transposed.default, (_drawn(3, 4),), {}


@_planted
def torchs_own():
    return torch.ops.aten.native_layer_norm.default, (_drawn(3, 4), [4], _drawn(4), _drawn(4), 1e-5), {}


@_planted
def torchs_own_in_place():
    return torch.ops.aten.add_.Tensor, (torch.randn(3, 4), torch.randn(3, 4)), {"alpha": 2}
