"""Custom operators that are wrong in one way each; a name gives the operator and arguments that seem to work."""

import functools
import random
import types

import torch
from torch import Tensor

BAD = {}
_LIBRARY = torch.library.Library("td_bad", "FRAGMENT")


def _planted(build):
    def factory():
        torch.manual_seed(0)
        return build()

    BAD[build.__name__] = functools.update_wrapper(factory, build)
    return factory


def _drawn(*sizes, requires_grad=True):
    return torch.randn(*sizes, requires_grad=requires_grad)


def _save_first(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


# Wrong backward: what belongs to the first factor only.


@torch.library.custom_op("td_bad::wrong_backward", mutates_args=())
def _wrong_backward(x: Tensor) -> Tensor:
    return x * x.sin()


@_wrong_backward.register_fake
def _(x):
    return torch.empty_like(x)


def _of_one_factor(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * x.sin()


_wrong_backward.register_autograd(_of_one_factor, setup_context=_save_first)


@_planted
def wrong_backward():
    return _wrong_backward, (_drawn(3, 4),), {}


# No fake kernel.


@torch.library.custom_op("td_bad::missing_fake", mutates_args=())
def _missing_fake(x: Tensor) -> Tensor:
    return x.cos()


_missing_fake.register_autograd(lambda ctx, grad: -grad * ctx.saved_tensors[0].sin(), setup_context=_save_first)


@_planted
def missing_fake():
    return _missing_fake, (_drawn(3, 4),), {}


# The fake kernel has the sizes that its author tried.


@torch.library.custom_op("td_bad::hard_coded_shape", mutates_args=())
def _hard_coded_shape(x: Tensor) -> Tensor:
    return x.repeat(2, 1)


@_hard_coded_shape.register_fake
def _(x):
    return x.new_empty(6, 4)


@_planted
def hard_coded_shape():
    return _hard_coded_shape, (_drawn(3, 4, requires_grad=False),), {}


# Mutation that the schema does not declare: always, for some values, and at random.


def _registered_mutation(name, is_time_to):
    @torch.library.custom_op(f"td_bad::{name}", mutates_args=(), schema="(Tensor x) -> Tensor")
    def op(x):
        made = x * 2
        if is_time_to(x):
            x.mul_(0.5)
        return made

    op.register_fake(torch.empty_like)
    return op


_always = _registered_mutation("undeclared_mutation", lambda x: True)
_for_some_values = _registered_mutation("mutates_for_some_values", lambda x: bool(x.flatten()[0] < 0))
_DICE = random.Random()
_at_random = _registered_mutation("mutates_at_random", lambda x: _DICE.random() < 0.5)


@_planted
def undeclared_mutation():
    return _always, (_drawn(3, 4, requires_grad=False),), {}


@_planted
def mutates_for_some_values():
    values = torch.linspace(-1, 1, 12).reshape(3, 4).flip(0)  # the first of them is not negative
    return _for_some_values, (values,), {}


@_planted
def mutates_at_random():
    _DICE.seed(0)  # the first two throws are high ones
    return _at_random, (_drawn(3, 4, requires_grad=False),), {}


# An alias that the schema does not declare. What `custom_op` makes refuses to return one, a library does not.


def _in_library(schema, key, kernel):
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, kernel, key)
    return getattr(torch.ops.td_bad, name).default


_undeclared_alias = _in_library("undeclared_alias(Tensor x) -> Tensor", "CompositeExplicitAutograd", lambda x: x.t())


@_planted
def undeclared_alias():
    return _undeclared_alias, (_drawn(3, 4, requires_grad=False),), {}


# A value of the data comes through a side channel: right in eager, and a constant in any trace.

_TRACED_WITH = types.SimpleNamespace(length=1.0)


def _of_length_one(x):
    is_real = type(x) in (Tensor, torch.nn.Parameter)
    return x / (float(x.detach().norm()) if is_real else _TRACED_WITH.length)


_baked_constant = _in_library("baked_constant(Tensor x) -> Tensor", "CompositeImplicitAutograd", _of_length_one)


@_planted
def baked_constant():
    x = _drawn(3, 4)
    _TRACED_WITH.length = float(x.detach().norm())
    return _baked_constant, (x,), {}


# Each answer is a little off the one before.

_CALLS = types.SimpleNamespace(count=0)


@torch.library.custom_op("td_bad::drifts", mutates_args=())
def _drifts(x: Tensor) -> Tensor:
    _CALLS.count += 1
    return x + 8e-6 * _CALLS.count


_drifts.register_fake(torch.empty_like)


@_planted
def drifts():
    return _drifts, (_drawn(3, 4, requires_grad=False),), {}


# The fake kernel says float64.


@torch.library.custom_op("td_bad::wrong_dtype_in_fake", mutates_args=())
def _wrong_dtype_in_fake(x: Tensor) -> Tensor:
    return x.double().cumsum(0).to(x.dtype)


@_wrong_dtype_in_fake.register_fake
def _(x):
    return torch.empty_like(x, dtype=torch.float64)


@_planted
def wrong_dtype_in_fake():
    return _wrong_dtype_in_fake, (_drawn(3, 4, requires_grad=False),), {}


# The fake kernel says row by row, what it makes is column by column.


@torch.library.custom_op("td_bad::wrong_strides_in_fake", mutates_args=())
def _wrong_strides_in_fake(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format).t()


@_wrong_strides_in_fake.register_fake
def _(x):
    return torch.empty_like(x)


@_planted
def wrong_strides_in_fake():
    return _wrong_strides_in_fake, (_drawn(3, 4, requires_grad=False),), {}


# The fake kernel keeps the layout, which the real one does only for what is contiguous.


@torch.library.custom_op("td_bad::layout_in_fake", mutates_args=())
def _layout_in_fake(x: Tensor) -> Tensor:
    return x.contiguous() * 2


_layout_in_fake.register_fake(torch.empty_like)


@_planted
def layout_in_fake():
    return _layout_in_fake, (_drawn(3, 4, requires_grad=False),), {}


# Reads its memory in order, as a kernel does that is given a pointer and a number.


@torch.library.custom_op("td_bad::blind_to_strides", mutates_args=())
def _blind_to_strides(x: Tensor) -> Tensor:
    return torch.as_strided(x, (x.numel(),), (1,)).reshape(x.shape) * 2


_blind_to_strides.register_fake(lambda x: x.new_empty(x.shape))


@_planted
def blind_to_strides():
    return _blind_to_strides, (_drawn(3, 4, requires_grad=False),), {}


# The backward leaves the weight without a gradient.


@torch.library.custom_op("td_bad::gradient_none", mutates_args=())
def _gradient_none(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


@_gradient_none.register_fake
def _(x, weight):
    return torch.empty_like(x)


def _save_weight(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


_gradient_none.register_autograd(lambda ctx, grad: (grad * ctx.saved_tensors[0], None), setup_context=_save_weight)


@_planted
def gradient_none():
    return _gradient_none, (_drawn(3, 4), _drawn(3, 4)), {}


# No autograd formula at all: gradients stop there, although numbers go through.

_no_formula = _in_library("no_autograd(Tensor x) -> Tensor", "CPU", lambda x: x.exp())
_LIBRARY.impl("no_autograd", torch.empty_like, "Meta")


@_planted
def no_autograd():
    return _no_formula, (_drawn(3, 4),), {}


# The fake kernel looks its sizes up in a cache, which symbolic ones cannot be a key of.


@functools.cache
def _halved(size):
    return (size + 1) // 2


@torch.library.custom_op("td_bad::symbols_refused", mutates_args=())
def _symbols_refused(x: Tensor) -> Tensor:
    return x[::2].clone()


@_symbols_refused.register_fake
def _(x):
    return x.new_empty(_halved(x.shape[0]), x.shape[1])


@_planted
def symbols_refused():
    return _symbols_refused, (_drawn(3, 4, requires_grad=False),), {}


# The fake kernel counts with the sizes, and so nails them down.


@torch.library.custom_op("td_bad::symbols_specialised", mutates_args=())
def _symbols_specialised(x: Tensor) -> Tensor:
    return x.repeat(2, 1)


@_symbols_specialised.register_fake
def _(x):
    return x.new_empty(sum(2 for _ in range(x.shape[0])), x.shape[1])


@_planted
def symbols_specialised():
    return _symbols_specialised, (_drawn(3, 4, requires_grad=False),), {}


# Another rounding when traced: the last bit only, and nothing that noise or torch's default tolerances would mind.


def _thirds(x):
    return x / 3 if type(x) is Tensor else x * (1 / 3)


_off_by_the_last_bit = _in_library("off_by_the_last_bit(Tensor x) -> Tensor", "CompositeImplicitAutograd", _thirds)


def off_by_the_last_bit():
    torch.manual_seed(0)
    return _off_by_the_last_bit, (_drawn(64, requires_grad=False),), {}


# Raises for what a square root does not take.


@torch.library.custom_op("td_bad::only_positive", mutates_args=())
def _only_positive(x: Tensor) -> Tensor:
    if (x <= 0).any():
        raise ValueError("only positive numbers have a root here")
    return x.sqrt()


_only_positive.register_fake(torch.empty_like)
_only_positive.register_autograd(lambda ctx, grad: grad / (2 * ctx.saved_tensors[0].sqrt()), setup_context=_save_first)


def only_positive():
    torch.manual_seed(0)
    return _only_positive, ((torch.rand(3, 4) + 0.01).requires_grad_(),), {}
