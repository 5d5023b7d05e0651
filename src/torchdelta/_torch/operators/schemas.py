"""An operator's effects compared with its schema: which arguments it writes to, and whose memory it returns.

Start with `DeclaredEffects`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchdelta._torch.operators.lookup import is_built_in, overloads_of
from torchdelta._torch.tensors import storage_key


class DeclaredEffects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operators while they are dispatched, and collects undeclared effects in `breaches`, a sentence each.

    Torch's own operators are not watched, except for the one in question, because some are known to break their schema.
    """

    def __init__(self, op: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.breaches: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator that is dispatched, and return its results; watch it if it is `op` or not torch's own."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or (is_built_in(func) and not self._is_in_question(func)):
            return func(*args, **kwargs)
        return self._watch(func, args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the operator in question, watch it, count it in `calls`, and return its results; the mode must be on.

        It is watched from here, because a composite operator is not dispatched itself.
        """
        self.calls += 1
        return self._watch(_overload_for(self.op, args, kwargs), args, kwargs)

    def _watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and return its results; note undeclared writes and aliases in `breaches`, each sentence once.

        A write is a change of values, sizes, strides, offset or dtype of an argument. Where an argument overlaps one
        that is declared as written, its values may change.
        """
        arguments = dict(_arguments(func, args, kwargs))
        # another argument may share memory with one that is declared as written, and then changes with it
        declared = [value for argument, value in arguments.values() if _is_written(argument)]
        written = [_Span(tensor) for tensor in _tensors_in(declared)]
        before = {
            name: [
                (tensor, _Snapshot(tensor, has_values=not any(_Span(tensor).overlaps(span) for span in written)))
                for tensor in _tensors_in(value)
            ]
            for name, (argument, value) in arguments.items()
            if not _is_written(argument)
        }
        returned = func(*args, **kwargs)
        for name, snapshots in before.items():
            if not all(snapshot.matches(tensor) for tensor, snapshot in snapshots):
                self._note(f"{func} changes its argument {name}, which its schema does not declare")
        for sentence in _undeclared_aliases(func, arguments, returned):
            self._note(sentence)
        return returned

    def _is_in_question(self, func: OpOverload) -> bool:
        """Tell whether an overload is `op`, or one of its overloads if `op` is a packet."""
        return func is self.op or func.overloadpacket is self.op

    def _note(self, sentence: str) -> None:
        """Add a sentence to `breaches`, unless it is there already."""
        if sentence not in self.breaches:
            self.breaches.append(sentence)


class _Snapshot:
    """A tensor's layout in memory and, with `has_values`, its values."""

    def __init__(self, tensor: torch.Tensor, *, has_values: bool) -> None:
        self.bits = _bits(tensor) if has_values else None
        self.form = _form(tensor)

    def matches(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor still has the form (see `_form`) and the bits of the snapshot.

        Only the form decides if the snapshot has no values, or if the tensor has no plain memory.
        """
        if self.form != _form(tensor):
            return False
        if self.bits is None:
            return True
        now = _bits(tensor)
        return now is None or bool(torch.equal(self.bits, now))


class _Span:
    """The bytes of a storage between the first and the last element of a tensor; none for a tensor without memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Set `storage` to the tensor's `storage_key`, and `begin` and `end` to its bytes there, unless it has none."""
        self.storage = storage_key(tensor)
        if self.storage:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            self.begin = tensor.storage_offset() * tensor.element_size()
            self.end = self.begin + (last + 1) * tensor.element_size()

    def overlaps(self, other: _Span) -> bool:
        """Tell whether both spans lie in one storage and have bytes in common."""
        return (
            bool(self.storage) and self.storage == other.storage and self.begin < other.end and other.begin < self.end
        )


def as_operator(op: Any) -> Any:
    """Return the overload of a custom-op definition, or of a packet with one overload; anything else unchanged."""
    if isinstance(op, OpOverloadPacket) and len(overloads := overloads_of(op)) == 1:
        return overloads[0]
    return op._opoverload if isinstance(op, CustomOpDef) else op


def has_autograd_kernel(op: Any, device: str) -> bool:
    """Tell whether every overload of an operator has an autograd kernel for a device such as `cpu`, or is composite.

    It is true of a Python function, which has no overloads. Torch's fallback does not count as a kernel.
    """
    keys = (f"Autograd{device.upper()}", "Autograd", "CompositeImplicitAutograd")
    return all(
        any(torch._C._dispatch_has_kernel_for_dispatch_key(overload._name, key) for key in keys)
        for overload in overloads_of(op)
    )


@contextmanager
def without_autograd_fallback() -> Iterator[None]:
    """Switch off torch's fallback for operators without an autograd kernel, and restore it after the body.

    So their results come as the kernel returned them.
    """
    before = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("nothing")
    try:
        yield
    finally:
        torch._C._set_autograd_fallback_mode(before)


def written_by(op: Any) -> frozenset[str]:
    """Return the names of the arguments that an operator declares to change; those of any overload of a packet.

    The set is empty for a Python function.
    """
    declared = (argument for overload in overloads_of(op) for argument in overload._schema.arguments)
    return frozenset(each.name for each in declared if each.alias_info is not None and each.alias_info.is_write)


def positions_of(op: Any) -> dict[str, int]:
    """Return the position of each argument of an operator, by its name; empty for a Python function.

    If overloads of a packet differ, the last one counts.
    """
    return {each.name: place for overload in overloads_of(op) for place, each in enumerate(overload._schema.arguments)}


def _overload_for(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpOverload:
    """Return the overload that the dispatcher would call with these arguments; torch raises if none fits."""
    if isinstance(op, OpOverload):
        return op
    packet = op._opoverload.overloadpacket if isinstance(op, CustomOpDef) else op
    return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))  # type: ignore[no-any-return]


def _is_written(argument: Any) -> bool:
    """Tell whether the schema declares an argument as written to."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _arguments(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the name of each argument that a call gives, with its declaration in the schema and its value."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument.name, (argument, value)
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            yield argument.name, (argument, kwargs[argument.name])


def _undeclared_aliases(func: OpOverload, arguments: Mapping[str, tuple[Any, Any]], returned: Any) -> Iterator[str]:
    """Yield a sentence each time a result shares memory with an argument or earlier result without declaring it.

    `arguments` has the declaration and the value of each argument by its name. A result with an alias annotation may
    share memory with earlier results, and with the arguments that `_may_alias` allows.
    """
    results = returned if isinstance(returned, tuple) else (returned,)
    declared = func._schema.returns
    memory: dict[int, str] = {}
    for place, result in enumerate(results):
        info = declared[place].alias_info if place < len(declared) else None
        own = _storages_of(result)
        allowed: set[int] = set()
        for argument, value in arguments.values():
            allowed |= _storages_of(value) if _may_alias(info, argument.alias_info) else set()
        for name, (_, value) in arguments.items():
            if own & _storages_of(value) - allowed:
                yield f"{func} returns memory of its argument {name}, which its schema does not declare"
        for at, tensor in enumerate(_tensors_in(result)):
            here = f"output {place}[{at}]" if isinstance(result, (list, tuple)) else f"output {place}"
            if not (key := storage_key(tensor)):
                continue
            if key in memory and info is None:
                yield f"{func} returns the same memory twice, as {memory[key]} and as {here}"
            memory.setdefault(key, here)


def _may_alias(some: Any, other: Any) -> bool:
    """Tell whether a result's alias annotation `some` and an argument's `other` declare that they may share memory.

    They do if they have a set in common, or if the result's is `*`. A missing annotation (None) shares nothing; one
    without a set, as a list has, shares with every other annotation.
    """
    if some is None or other is None:
        return False
    if not some.before_set or not other.before_set:
        return True  # for a list torch only tells that its elements have an annotation, and not which
    return "*" in some.before_set | some.after_set or bool(some.before_set & (other.before_set | other.after_set))


def _storages_of(value: Any) -> set[int]:
    """Return the `storage_key` of each tensor in nested values; tensors without one are left out."""
    return {key for tensor in _tensors_in(value) if (key := storage_key(tensor))}


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a description of a tensor's layout, to compare by equality: dtype, sizes, strides and offset.

    Of a nested tensor it is layout and dtype, of any other that is not strided layout and sizes.
    """
    if tensor.is_nested:
        return (tensor.layout, tensor.dtype)
    if tensor.layout is not torch.strided:
        return (tensor.layout, tuple(tensor.shape))
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a tensor's values as a flat tensor of bytes, or None if it has no plain memory."""
    if tensor.layout is not torch.strided or not storage_key(tensor):
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
