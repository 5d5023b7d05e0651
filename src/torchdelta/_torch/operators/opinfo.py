"""Torch's own database of operators with sample inputs, which it has for its tests.

It is imported on first use, because that takes seconds. Start with `draw_samples` and `choose`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.backends
from torch.utils._pytree import tree_leaves, tree_map_only

from torchdelta._torch.process import runtime
from torchdelta.errors import EnvironmentUnfit

DEVICE = "cpu"
WITHOUT_VALUES = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)
"""Operators that return uninitialised memory, so that two runs may differ."""


@dataclass(frozen=True, kw_only=True)
class OpSample:
    """One sample call of an operator from the database."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    """Its place among all samples of the operator in this dtype, the same in every process."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    @property
    def has_gradient(self) -> bool:
        """Whether one of its tensors requires grad."""
        return any(tensor.requires_grad for tensor in self.tensors)

    @property
    def is_substantial(self) -> bool:
        """Whether there are enough values to show a mistake: no tensor is empty, and one has several elements."""
        sizes = [tensor.numel() for tensor in self.tensors]
        return bool(sizes) and min(sizes) > 0 and max(sizes) > 1


@dataclass(frozen=True, kw_only=True)
class OperatorOffer:
    """The samples that the database has for an operator in one dtype."""

    samples: tuple[OpSample, ...]
    left_out: dict[str, int]
    """How many samples cannot be checked, by the reason."""


def operators() -> dict[str, tuple[str, ...]]:
    """Return the names of the dtypes that each operator of the database supports on the CPU, by the operator's name.

    EnvironmentUnfit if a module that the database needs is not installed.
    """
    return {
        name: tuple(sorted(_name_of(dtype) for dtype in entry.supported_dtypes(DEVICE)))
        for name, entry in _database().items()
    }


def draw_samples(name: str, dtype: str, *, seed: int) -> OperatorOffer:
    """Return the samples of an operator in a dtype (`float32`), drawn anew from the seed; generators are restored.

    Inputs may require grad if the operator has gradients in this dtype. Samples that cannot be checked (`_why_not`) are
    only counted, in `left_out`, by the reason. KeyError if the database has no such operator, EnvironmentUnfit if it
    cannot be imported; also raises what the database raises.
    """
    entry = _database()[name]
    of_dtype = getattr(torch, dtype)
    has_gradient = bool(entry.supports_autograd) and of_dtype in entry.supported_backward_dtypes(DEVICE)
    with runtime.preserved_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runtime.seed_everything(seed)
        drawn = list(entry.sample_inputs(DEVICE, of_dtype, requires_grad=has_gradient))
    samples, left_out = [], dict[str, int]()
    for number, each in enumerate(drawn):
        sample = _sample_of(entry, each, number)
        if why := _why_not(sample):
            left_out[why] = left_out.get(why, 0) + 1
        else:
            samples.append(sample)
    return OperatorOffer(samples=tuple(samples), left_out=left_out)


def choose(samples: Sequence[OpSample], most: int) -> tuple[OpSample, ...]:
    """Choose at most `most` samples, substantial ones before others, and return them in the order of the database.

    A sample is substantial if its `is_substantial` is true. The chosen ones of either kind are spread over all of that
    kind, because neighbours in the database resemble each other. If substantial samples have gradients, at least one of
    those is chosen, unless `most` is 0.
    """
    substantial = [sample for sample in samples if sample.is_substantial]
    picked = list(_spread(substantial, most))
    with_gradient = [sample for sample in substantial if sample.has_gradient]
    if with_gradient and picked and not any(sample.has_gradient for sample in picked):
        picked[0] = with_gradient[len(with_gradient) // 2]
    rest = [sample for sample in samples if not sample.is_substantial]
    picked += _spread(rest, most - len(picked))
    return tuple(sorted(picked, key=lambda sample: sample.number))


def _spread(samples: Sequence[OpSample], most: int) -> Iterator[OpSample]:
    """Yield at most `most` of the samples, in their order and at equal distances."""
    many = min(most, len(samples))
    for index in range(many):
        yield samples[(2 * index + 1) * len(samples) // (2 * many)]


@cache
def _database() -> dict[str, Any]:
    """Import the database on the first call, and return its entries by their full names, such as `div.floor_rounding`.

    That changes the process: some operators of the database no longer set a seed, and flags of torch's backends may be
    set although the import forbids it. EnvironmentUnfit if a module that the database needs is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal import common_methods_invocations
    except ModuleNotFoundError as error:
        raise EnvironmentUnfit(
            f"torch's database of operators needs {error.name}, which is not installed: "
            "run pip install 'torchdelta[ops]'"
        ) from error
    # a seed that the operator sets itself would be set while it is traced, and not when the trace runs
    vars(common_methods_invocations)["wrapper_set_seed"] = _call_unchanged
    # importing torch's test utilities forbids setting flags of its backends, which this process has to do
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return {_full_name(entry): entry for entry in common_methods_invocations.op_db}


def _call_unchanged(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator and return its result; replaces a function of the database that sets a seed first."""
    return operator(*args, **kwargs)


def _full_name(entry: Any) -> str:
    """Return the name of an entry, with its variant behind a dot if it has one."""
    variant = entry.variant_test_name
    return f"{entry.name}.{variant}" if variant else str(entry.name)


def _name_of(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _sample_of(entry: Any, drawn: Any, number: int) -> OpSample:
    """Return a sample of the database as a call; `number` is its place among all samples of the operator's `entry`.

    A tensor that is not an autograd leaf becomes one, of the same memory and with the same requires_grad.
    """
    # the inputs of a graph are leaves, so an input that the database computed from others becomes one
    args, kwargs = tree_map_only(torch.Tensor, _as_leaf, ((drawn.input, *drawn.args), dict(drawn.kwargs)))
    return OpSample(call=_call(entry, drawn), args=args, kwargs=kwargs, number=number)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return an autograd leaf as it is; of any other tensor a detached one, with the same memory and requires_grad."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _call(entry: Any, drawn: Any) -> Callable[..., Any]:
    """Return the operator itself, or, if the entry changes inputs or outputs, a function that calls it with changes.

    Some operators are defined for symmetric inputs only, and some outputs only up to a sign, such as eigenvectors.
    """
    operator: Callable[..., Any] = entry.op
    prepare, process = entry.gradcheck_wrapper, drawn.output_process_fn_grad
    if _only_calls(prepare) and _is_identity(process):
        return operator

    def call(*args: Any, **kwargs: Any) -> Any:
        return process(prepare(operator, *args, **kwargs))

    call.__name__ = call.__qualname__ = str(entry.name).rpartition(".")[2]
    return call


def _is_identity(function: Callable[[Any], Any]) -> bool:
    """Tell whether a function returns its argument unchanged, by calling it; it does not if it raises."""
    argument = object()
    try:
        return function(argument) is argument
    except Exception:  # it uses its argument
        return False


def _only_calls(wrapper: Callable[..., Any]) -> bool:
    """Tell, by a call, whether a wrapper changes neither arguments nor result of its operator; False if it raises."""
    argument = object()
    try:
        return wrapper(lambda only: only, argument) is argument
    except Exception:  # it uses the argument
        return False


def _why_not(sample: OpSample) -> str:
    """Return why a sample cannot be checked, or an empty text if it can.

    It cannot if one of its tensors is nested, quantized or not strided.
    """
    for tensor in sample.tensors:
        if tensor.is_nested:
            return "a nested tensor cannot be copied"
        if tensor.layout is not torch.strided:
            return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} cannot be copied"
        if tensor.is_quantized:
            return "a quantized tensor cannot be copied"
    return ""
