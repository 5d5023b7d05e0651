"""What an operator does against what its schema declares: which arguments it writes to, whose memory it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchdelta._torch.operators import is_built_in, overloads_of
from torchdelta._torch.tensors import storage_key


class Declared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operators while they are dispatched; what they do undeclared is in `breaches`, a sentence each.

    Torch's own operators are not watched unless one is asked about: some of them are known to be written so.
    """

    def __init__(self, op: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.breaches: list[str] = []
        self.watched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator between two looks at its arguments."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or (is_built_in(func) and not self._is_asked_about(func)):
            return func(*args, **kwargs)
        return self._watch(func, args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the operator in question; one that is made of others is not dispatched, and is watched from here."""
        return self._watch(self.op, args, kwargs) if isinstance(self.op, OpOverload) else self.op(*args, **kwargs)

    def _watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.watched += 1
        given = dict(_arguments(func, args, kwargs))
        before = {name: [_Look(tensor) for tensor in _tensors_in(value)] for name, (_, value) in given.items()}
        returned = func(*args, **kwargs)
        for name, (argument, value) in given.items():
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not is_written and any(
                not look.holds(tensor) for look, tensor in zip(before[name], _tensors_in(value), strict=True)
            ):
                self._note(f"{func} changes its argument {name}, which its schema does not declare")
        for sentence in _undeclared_aliases(func, given, returned):
            self._note(sentence)
        return returned

    def _is_asked_about(self, func: OpOverload) -> bool:
        return func is self.op or func.overloadpacket is self.op

    def _note(self, sentence: str) -> None:
        if sentence not in self.breaches:
            self.breaches.append(sentence)


class _Look:
    """A tensor as it is now."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.bits = _bits(tensor)
        self.form = _form(tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        if self.form != _form(tensor):
            return False
        now = _bits(tensor)
        return now is None or self.bits is None or bool(torch.equal(self.bits, now))


def as_operator(op: Any) -> Any:
    """Return the one operator that a definition or a name stands for; anything else as it is."""
    if isinstance(op, OpOverloadPacket) and len(overloads := overloads_of(op)) == 1:
        return overloads[0]
    return op._opoverload if isinstance(op, CustomOpDef) else op


def has_autograd_kernel(op: Any, device: str) -> bool:
    """Tell whether every overload of an operator says by itself how gradients pass it."""
    keys = (f"Autograd{device.upper()}", "Autograd", "CompositeImplicitAutograd")
    return all(
        any(torch._C._dispatch_has_kernel_for_dispatch_key(overload._name, key) for key in keys)
        for overload in overloads_of(op)
    )


@contextmanager
def without_autograd_fallback() -> Iterator[None]:
    """Let an operator that has no autograd kernel return what it does, as if nobody stood in for it."""
    before = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("nothing")
    try:
        yield
    finally:
        torch._C._set_autograd_fallback_mode(before)


def written_by(op: Any) -> frozenset[str]:
    """Return the names of the arguments that an operator declares to change; those of any overload of a packet."""
    declared = (argument for overload in overloads_of(op) for argument in overload._schema.arguments)
    return frozenset(each.name for each in declared if each.alias_info is not None and each.alias_info.is_write)


def positions_of(op: Any) -> dict[str, int]:
    """Return where each argument of an operator stands."""
    return {each.name: place for overload in overloads_of(op) for place, each in enumerate(overload._schema.arguments)}


def _arguments(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument.name, (argument, value)
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            yield argument.name, (argument, kwargs[argument.name])


def _undeclared_aliases(func: OpOverload, given: Mapping[str, tuple[Any, Any]], returned: Any) -> Iterator[str]:
    results = returned if isinstance(returned, tuple) else (returned,)
    declared = func._schema.returns
    memory: dict[int, str] = {}
    for place, result in enumerate(results):
        info = declared[place].alias_info if place < len(declared) else None
        own = _storages_of(result)
        for name, (argument, value) in given.items():
            if own & _storages_of(value) and not _are_one(info, argument.alias_info):
                yield f"{func} returns memory of its argument {name}, which its schema does not declare"
        for key in own:
            if key in memory and info is None and len(results) > 1:
                yield f"{func} returns the same memory twice, as {memory[key]} and as output {place}"
            memory.setdefault(key, f"output {place}")


def _are_one(some: Any, other: Any) -> bool:
    if some is None or other is None:
        return False
    return "*" in some.before_set | some.after_set or bool(some.before_set & (other.before_set | other.after_set))


def _storages_of(value: Any) -> set[int]:
    return {key for tensor in _tensors_in(value) if (key := storage_key(tensor))}


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.layout, tuple(tensor.shape))
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.layout is not torch.strided or not storage_key(tensor):
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
