"""Run a program with other roundings, as another correct implementation of it might round.

Each element that an operation rounded moves by one unit in the last place: up, down, or half of the time not at all.
Inputs, buffers and constants are given and not computed, so they stay. So does an element that was computed without
rounding: the sum of a mask, a quotient of two whole numbers, a product with one. Otherwise a comparison or a `floor`
behind it would jump, and everything behind that would be noise. Whether an element was rounded is told by its value,
which `exactness.run_beside_float64` computes once more in float64.

Values that depend on constants alone stay too (a table of position buckets is not rounded). Fused norms and softmax
round inside, so they run decomposed. A long sum rounds at each of its terms, so it gets the error of a plain running
sum.

    mode = Noisy(seed=0)
    mode.depend_on(parameters_and_inputs)
    with mode:
        noisy = program(inputs)

Start reading at `Noisy.operate`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from torchdelta._torch import tensors
from torchdelta._torch.modes.base import OperationMode
from torchdelta._torch.modes.decisions import is_choice
from torchdelta._torch.modes.elided_casts import coarser, is_narrowing
from torchdelta._torch.modes.exactness import (
    compiled_loops,
    is_beside,
    long_elements,
    rounded_elements,
    run_beside_float64,
)

aten = torch.ops.aten

# operations that move, select, compare or draw values: they do not round
# fmt: off
_EXACT = frozenset(
    {
        "_to_copy", "_unsafe_view", "abs", "alias", "amax", "amin", "arange", "argmax", "argmin",
        "as_strided_scatter", "bernoulli", "bernoulli_", "bitwise_and", "bitwise_not", "bitwise_or", "cat",
        "ceil", "clamp", "clamp_", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy", "copy_",
        "detach", "embedding", "empty", "empty_like", "empty_strided", "eq", "expand", "eye", "fill", "fill_",
        "flip", "floor", "fmod", "full", "full_like", "gather", "ge", "gt", "hardtanh", "index", "index_copy",
        "index_fill", "index_put", "index_put_", "index_select", "isfinite", "isinf", "isnan", "le",
        "lift_fresh", "lift_fresh_copy", "logical_and", "logical_not", "logical_or", "lt", "masked_fill",
        "masked_fill_", "masked_select", "max", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
        "maximum", "min", "minimum", "nan_to_num", "native_dropout", "ne", "neg", "new_empty",
        "new_empty_strided", "new_full", "new_ones", "new_zeros", "nonzero", "normal_", "one_hot", "ones",
        "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "relu", "relu_",
        "remainder", "repeat", "repeat_interleave", "roll", "round", "scalar_tensor", "scatter",
        "select_backward", "select_scatter", "set_", "sgn", "sign", "slice_backward", "slice_scatter", "sort",
        "stack", "threshold", "threshold_backward", "topk", "tril", "triu", "trunc", "unfold_backward",
        "uniform_", "unique_dim", "value_selecting_reduction_backward", "view", "where", "zero_", "zeros",
        "zeros_like",
    }
)
# fmt: on
_ROUND_INSIDE = get_decompositions(
    [
        aten._log_softmax,
        aten._log_softmax_backward_data,
        aten._softmax,
        aten._softmax_backward_data,
        aten.gelu_backward,
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten.native_group_norm,
        aten.native_group_norm_backward,
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.sigmoid_backward,
        aten.silu_backward,
        aten.tanh_backward,
    ]
)
# for each output of a reduction: the sum of its terms, their mean, or a root of a sum of squares
_REDUCTIONS = {
    "linalg_vector_norm": ("root",),
    "mean": ("mean",),
    "std": ("root",),
    "std_mean": ("root", "mean"),
    "sum": ("sum",),
    "var": ("root",),
    "var_mean": ("root", "mean"),
}
# operations that sum the gradient of a parameter over the batch inside
_SUM_INSIDE = frozenset({"convolution_backward", "embedding_dense_backward", "mkldnn_rnn_layer_backward"})
# operations of these dtypes accumulate in float32, and round to their own dtype once
_NARROW = (torch.bfloat16, torch.float16)

_POOL = 1 << 20
"""Steps that are drawn in advance for each dtype."""
EXAGGERATION = math.sqrt(6.0)
"""How much larger the noise is than real rounding, in standard deviations.

A step of a whole unit, taken half of the time, has a variance of 1/2; a rounding of up to half a unit has 1/12. A
running sum is exaggerated by the same factor. `compare/noise.py` divides noisy runs by an exaggeration again.
"""


class Noisy(OperationMode):
    """While active, results that depend on the sources given to `start_from` or `depend_on` are rounded anew.

    The same seed rounds the same way. With a `unit`, every dtype is rounded to that relative precision instead of its
    own.
    """

    def __init__(self, *, seed: int, unit: float | None = None) -> None:
        """Begin without sources: until `depend_on` or `start_from` names some, no value is rounded anew.

        `unit` is the relative size of the roundings; None is the epsilon of each value's dtype.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = Steps(seed, unit)
        self.dependent: set[StorageWeakRef] = set()
        self.has_chosen = False
        """Whether the program chooses among floats."""
        self.narrowed_to: torch.dtype | None = None
        """The coarsest dtype that the program casts something finer to."""

    def depend_on(self, sources: Iterable[torch.Tensor]) -> None:
        """Round values anew, from now on, that are computed from the sources; the sources themselves stay exact.

        A source without plain memory, such as a sparse tensor, has no effect.
        """
        for tensor in sources:
            self._mark(tensor)

    def start_from(self, sources: Iterable[torch.Tensor]) -> None:
        """Round the sources anew, in place, and from now on results that are computed from them.

        This is for values that another correct program may have rounded otherwise, such as the output of another node.
        Elements of few digits, such as whole numbers, stay: see `long_elements`. A source is rounded in its whole
        storage, and once: not again if its storage depends on a source already. Sources of integers, complex numbers or
        floats of one byte are not rounded, but results that depend on them are. A source without plain memory, such as
        a sparse tensor, has no effect.
        """
        for tensor in sources:
            if tensors.storage_key(tensor) and tensors.storage_reference(tensor) not in self.dependent:
                self._mark(tensor)
                if _is_rounded(tensor):
                    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                    with torch.no_grad():
                        self.steps.take(whole, long_elements(whole))

    def operate(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation; if an operand depends on a source, round its result anew in place; return the result.

        Elements that the operation did not round stay. Results of views and of operations in `_EXACT`, which move,
        select or compare values, are not rounded, but depend on the sources too. Fused norms, softmax and the like
        (`_ROUND_INSIDE`) run decomposed, so that each of their steps is rounded. `has_chosen` and `narrowed_to` are
        updated.
        """
        kwargs = kwargs or {}
        self.has_chosen |= is_choice(func, args)
        if is_narrowing(func, args, kwargs):
            self.narrowed_to = coarser(self.narrowed_to, kwargs["dtype"])
        if not self._is_dependent((args, kwargs)):
            return func(*args, **kwargs)
        if func in _ROUND_INSIDE:
            with self:
                return _ROUND_INSIDE[func](*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name in _EXACT or func.is_view:
            result = func(*args, **kwargs)
            self._mark_all(result)
            return result
        result, wide = run_beside_float64(func, args, kwargs)
        self._mark_all(result)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for index, (output, slot) in enumerate(zip(outputs, func._schema.returns, strict=False)):
            is_new = slot.alias_info is None or slot.alias_info.is_write
            if isinstance(output, torch.Tensor) and is_new and _is_rounded(output):
                self._move(name, index, args, output, wide[index])
        return result

    def _move(self, name: str, index: int, args: tuple[Any, ...], output: torch.Tensor, wide: Any) -> None:
        """Add noise to one output of an operation, in place: a step of rounding, after an error of summing if it sums.

        The operations that get the error of summing are `_REDUCTIONS` and `_SUM_INSIDE`, and not matrix products. Half
        dtypes get the step alone, because their sums are taken in float32. Elements that were not rounded stay. `index`
        is the place of the output among those of the operation, and `wide` is the output in float64, or None if that is
        not known.
        """
        if output.dtype in _NARROW or name not in (*_REDUCTIONS, *_SUM_INSIDE):
            self.steps.take_beside(output, wide)
            return
        rounded = rounded_elements(output, wide)
        if name in _REDUCTIONS:
            self._add_error_of_sum(name, _REDUCTIONS[name][index], args, output, rounded)
        else:
            self._add_error_of_inner_sum(args, output, rounded)
        self.steps.take(output, rounded)

    def _add_error_of_sum(
        self, name: str, kind: str, args: tuple[Any, ...], output: torch.Tensor, rounded: torch.Tensor | None
    ) -> None:
        """Add a random error to the rounded elements of an output, in place, as large as that of its sum: Σ S_k·δ_k.

        S_k are the partial sums, term by term. `kind` says what the output is of its terms: their `sum`, their `mean`,
        or a `root` of the sum of their squares. With terms of mean μ and variance σ², E S_k² = k²μ² + kσ², so the sum
        itself need not be run. Nothing is added for fewer than two terms, or for terms that are not floats. `rounded`
        is a mask; None is all elements.
        """
        terms = args[0]
        count = terms.numel() // output.numel()
        if not terms.is_floating_point() or count < 2:
            return
        dims = _reduced_dims(name, args, terms.dim())
        if kind == "root":
            terms = terms * terms
        variance, mean = torch.var_mean(terms, dims, correction=0)
        spread = torch.sqrt(count**3 * mean * mean / 3 + count**2 * variance / 2)
        error = spread * self.steps.normal(spread) * (EXAGGERATION * self.steps.unit_of(output) / 2 / math.sqrt(3))
        if kind == "mean":
            error = error / count
        elif kind == "root":  # a norm or a variance is half as wrong, relatively, as the sum of squares in it
            total = (mean * count).clamp_min(torch.finfo(mean.dtype).tiny)
            error = 0.5 * error / total * output.reshape(error.shape)
        error = torch.nan_to_num(error, nan=0.0, posinf=0.0, neginf=0.0).reshape(output.shape)
        output.add_(error if rounded is None else error * rounded)

    def _add_error_of_inner_sum(
        self, args: tuple[Any, ...], output: torch.Tensor, rounded: torch.Tensor | None
    ) -> None:
        """Add a random error to the rounded elements of an output, in place, as of a long sum inside the operation.

        The number of terms is taken to be the elements of the largest tensor argument for each element of the output;
        under 8, nothing is added.
        """
        terms = max((arg.numel() for arg in args if isinstance(arg, torch.Tensor)), default=1) / output.numel()
        if terms < 8:
            return
        size = float(output.square().mean().sqrt())
        error = self.steps.normal(output) * (0.15 * self.steps.unit_of(output) * math.sqrt(terms) * size)
        output.add_(error if rounded is None else error * rounded)

    def _mark_all(self, result: Any) -> None:
        """Note that every tensor in a result depends on a source."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._mark(leaf)

    def _mark(self, tensor: torch.Tensor) -> None:
        """Note that a tensor and all others of its storage depend on a source; do nothing if it has no memory."""
        if tensors.storage_key(tensor):
            self.dependent.add(tensors.storage_reference(tensor))

    def _is_dependent(self, values: Any) -> bool:
        """Tell whether a tensor in these nested values has the storage of one that depends on a source."""
        return any(
            isinstance(leaf, torch.Tensor)
            and tensors.storage_key(leaf) is not None
            and tensors.storage_reference(leaf) in self.dependent
            for leaf in tree_leaves(values)
        )


class Steps:
    """A seeded supply of roundings: one pool of random steps for each dtype, read from random places."""

    def __init__(self, seed: int, unit: float | None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.unit = unit
        self.pools: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, tensor: torch.Tensor, rounded: torch.Tensor | None = None) -> None:
        """Multiply elements in place: half of the time by 1, a quarter each by one unit more or less than 1.

        `rounded` is a mask of the elements that are multiplied; None is all. An element that would become infinite
        stays as it is.
        """
        pieces = _pieces(tensor)
        masks = [None] * len(pieces) if rounded is None else _pieces(_laid_out_like(tensor, rounded))
        for piece, mask in zip(pieces, masks, strict=True):
            factors = self._factors(piece) if mask is None else torch.where(mask, self._factors(piece), 1.0)
            if mask is None and (loops := _loops_for(piece)) is not None:
                loops.step(piece.numpy(), factors.numpy())
                continue
            # a mask constant near the largest float must not become infinite
            lowest, highest = torch.aminmax(piece)
            # not `>`: with a NaN among the elements, the extremes are NaN
            if not max(-float(lowest), float(highest)) <= torch.finfo(piece.dtype).max / 2:
                moved = piece * factors
                piece.copy_(torch.where(torch.isfinite(moved), moved, piece))
            else:
                piece.mul_(factors)

    def take_beside(self, tensor: torch.Tensor, wide: Any) -> None:
        """Multiply the elements that were rounded, in place, as `take` does; all of them if that is not known.

        Those that differ from `wide`, the tensor in float64, were rounded. If the tensor is in float64 itself, it is
        those that float32 cannot hold. Nothing is known of another tensor if `wide` is None or has another shape.
        """
        pieces = _pieces(tensor)
        if not is_beside(tensor, wide) or _loops_for(pieces[0]) is None:
            self.take(tensor, rounded_elements(tensor, wide))
            return
        for piece, beside in zip(pieces, _pieces(_laid_out_like(tensor, wide)), strict=True):
            loops = _loops_for(piece)
            assert loops is not None
            loops.step_beside(piece.numpy(), beside.numpy(), self._factors(piece).numpy())

    def unit_of(self, tensor: torch.Tensor) -> float:
        """Return the relative size of one step: `unit`, or else the epsilon of the tensor's dtype."""
        return self.unit if self.unit is not None else float(torch.finfo(tensor.dtype).eps)

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        """Return normal random numbers of the tensor's shape, dtype and device, from the seeded generator."""
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype).to(like.device)

    def _factors(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a factor for each element of a piece: 1, or 1 plus or minus one unit, to multiply it by.

        It is a view of a pool, which is drawn on first use, so it must not be written to.
        """
        key = piece.dtype, piece.device
        if key not in self.pools:
            state = bytes(self.generator.get_state().numpy())
            self.pools[key], after = _draw_pool(state, self.unit_of(piece), *key)
            self.generator.set_state(after)
        start = int(torch.randint(0, _POOL, (), generator=self.generator))
        return self.pools[key][start : start + piece.numel()].view(piece.shape)


@functools.lru_cache(maxsize=2)
def _draw_pool(
    state: bytes, unit: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pool of factors that a generator in this state draws, and the generator's state afterwards.

    Noisy runs of one seed begin with the same pool, which takes longer to draw than a small program takes to run.
    """
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    drawn = torch.randint(0, 4, (2 * _POOL,), generator=generator, dtype=torch.int8)
    # in place, because a pool is large beside the values that lockstep holds
    step = (drawn == 0).to(dtype).sub_((drawn == 1).to(torch.int8))
    return step.mul_(unit).add_(1).to(device), generator.get_state()


def _loops_for(piece: torch.Tensor) -> ModuleType | None:
    """Return the compiled loops for a flat piece; None if it is not flat, or `compiled_loops` has none for it."""
    return compiled_loops(piece) if piece.dim() == 1 else None


def _laid_out_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the other tensor, of the same shape, with the strides of the first: both are cut into the same pieces.

    It is a copy, or the other tensor itself if it has these strides.
    """
    if other.stride() == tensor.stride():
        return other
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=other.dtype, device=other.device).copy_(other)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of at most `_POOL` elements that cover the tensor, in memory order if its memory has no gaps."""
    strides = tensor.stride()
    dense = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: strides[dim], reverse=True))
    if dense.is_contiguous():
        flat = dense.view(-1)
        return [flat[start : start + _POOL] for start in range(0, flat.numel(), _POOL)]
    if tensor.numel() <= _POOL:
        return [tensor]
    return [piece for row in tensor.unbind() for piece in _pieces(row)]


def _reduced_dims(name: str, args: tuple[Any, ...], rank: int) -> list[int]:
    """Return the dimensions that the reduction `name` sums over, by its `args`; all of the `rank` if they name none."""
    position = 2 if name == "linalg_vector_norm" else 1
    dims = args[position] if len(args) > position else None
    if isinstance(dims, int):
        return [dims]
    return list(dims) if dims else list(range(rank))


def _is_rounded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is strided, not empty, and of floats of two or more bytes, which arithmetic rounds."""
    # a float of a single byte has no arithmetic: it was cast from a wider one
    return tensor.is_floating_point() and tensor.itemsize > 1 and tensor.layout == torch.strided and tensor.numel() > 0
