"""Registered operators: found by name, and asked for their module, name, devices, overloads and schema.

Start with `operator_named` and `overloads_of`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from torchdelta.errors import EnvironmentUnfit, UsageError
from torchdelta.registry import nearest

_BUILT_IN = frozenset(
    {"aten", "higher_order", "inductor", "mkldnn", "onednn", "prim", "prims", "profiler", "quantized"}
)
_DECOMPOSED = "quantized_decomposed"


def is_operator(target: Any) -> bool:
    """Tell whether a callable is one overload of a registered operator."""
    return isinstance(target, OpOverload)


def is_built_in(target: OpOverload) -> bool:
    """Tell by its namespace whether an operator is torch's own; one that begins with an underscore is, too."""
    return target.namespace in _BUILT_IN or target.namespace.startswith("_")


def registered_by(target: Any) -> str | None:
    """Return the name of the module or package that registered an operator, so that importing it makes it known.

    It is the module of a custom operator's Python function, or else the operator's namespace if a module of that name
    is imported; for `quantized_decomposed`, torch's module. None for other operators of torch, and for anything that is
    not an overload or a packet. LookupError if the module is unknown.
    """
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        return None
    name = target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
    namespace = name.partition("::")[0]
    if namespace in _BUILT_IN or namespace.startswith("_"):
        return None
    if namespace == _DECOMPOSED:
        return "torch.ao.quantization.fx._decomposed"
    if name not in OPDEFS:
        if namespace in sys.modules:  # a package that registers operators in C++ gives them its own name
            return namespace
        raise LookupError(f"{name} is registered by a package that torch does not know the name of")
    return str(OPDEFS[name]._init_fn.__module__)


def operator_named(name: str) -> Callable[..., Any]:
    """Return the operator, packet or function of that name; UsageError names near ones if there is none.

    A name is `aten.add.Tensor`, `mylib::op`, `torch.ops.mylib.op` or `torch.nn.functional.gelu`. Without an overload it
    stands for the packet of all overloads.
    """
    path = name.strip().removeprefix("torch.ops.").replace("::", ".", 1)
    namespace, _, rest = path.partition(".")
    if namespace in ("torch", "nn") and "::" not in name:
        return _function_of_torch(path)
    known = _registered_names()
    if namespace not in known:
        raise UsageError(_explain_unknown_namespace(name, namespace, rest, known))
    op, _, overload = rest.partition(".")
    if op not in known[namespace]:
        names = [f"{namespace}.{each}" for each in sorted(known[namespace])]
        raise UsageError(f"there is no operator {name!r}: {nearest(f'{namespace}.{op}', names)}")
    packet: OpOverloadPacket = getattr(getattr(torch.ops, namespace), op)
    if not overload:
        return packet
    if overload not in _names_of_overloads(packet):
        overloads = [str(each) for each in overloads_of(packet)]
        raise UsageError(
            f"{namespace}.{op} has no overload {overload!r}: there {'is' if len(overloads) == 1 else 'are'} "
            + ", ".join(overloads)
        )
    return getattr(packet, overload)  # type: ignore[no-any-return]


def _registered_names() -> dict[str, set[str]]:
    """Return the names of all registered operators, without their overloads, as a set for each namespace."""
    names: dict[str, set[str]] = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        names.setdefault(namespace, set()).add(rest.partition(".")[0])
    return names


def _explain_unknown_namespace(name: str, namespace: str, rest: str, known: Mapping[str, Iterable[str]]) -> str:
    """Return the message of an error about a name whose namespace is not registered, with what may be meant.

    `rest` is the name after the namespace; if it is empty, `namespace` may be the name of an operator of aten, prims or
    torch. `known` has the names of all registered operators by namespace.
    """
    if not rest:
        names = [f"{each}.{namespace}" for each in ("aten", "prims") if namespace in known.get(each, ())]
        names += [f"torch.{namespace}"] if hasattr(torch, namespace) else []
        near = f"did you mean {' or '.join(names)}?" if names else "write namespace.operator, such as aten.add"
        return f"{name!r} names no operator: {near}"
    if namespace == "higher_order":
        return f"{name!r} has no schema to check it by: call it in a function of yours, and name that as file.py:fn"
    return (
        f"the namespace {namespace!r} of {name!r} is not registered: import the module that registers it (--import); "
        + nearest(namespace, sorted(known))
    )


def _function_of_torch(name: str) -> Callable[..., Any]:
    """Return a function of torch by its dotted name, with or without `torch.` at its beginning.

    UsageError, with near names, if there is none; also if the name is that of a class, a module or a plain value.
    """
    value: Any = torch
    path = "torch"
    for step in name.removeprefix("torch.").split("."):
        if not hasattr(value, step):
            public = [each for each in dir(value) if not each.startswith("_")]
            raise UsageError(f"{path} has no {step!r}: {nearest(step, public)}")
        value, path = getattr(value, step), f"{path}.{step}"
    if isinstance(value, (type, ModuleType)) or not callable(value):
        kind = "class" if isinstance(value, type) else type(value).__name__
        raise UsageError(f"{path} is a {kind}, and not a function that can be checked as an operator")
    return value  # type: ignore[no-any-return]


_ANYWHERE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_LAYOUTS = ("", "Sparse", "SparseCsr", "Quantized", "NestedTensor")
_KEYS = {
    "CPU": ("MkldnnCPU", *(f"{layout}CPU" for layout in _LAYOUTS)),
    "CUDA": tuple(f"{layout}CUDA" for layout in _LAYOUTS),
    **{device: (device,) for device in ("MPS", "XPU", "HPU", "XLA", "MTIA", "PrivateUse1")},
}


def devices_of(op: Any) -> frozenset[str] | None:
    """Return the devices (`cpu`, `cuda`) that an operator has a kernel for here, or None if it runs on any device.

    None is for a Python function and for an operator with a composite overload. Otherwise the devices of all overloads
    are taken together; the set may be empty.
    """
    devices: set[str] = set()
    for name in (each._name for each in overloads_of(op)):
        if any(_has_kernel(name, key) for key in _ANYWHERE):
            return None
        devices |= {device.lower() for device, keys in _KEYS.items() if any(_has_kernel(name, key) for key in keys)}
    return frozenset(devices) if is_registered(op) else None


def require_kernel(op: Any, device: str) -> None:
    """Raise EnvironmentUnfit if an operator has no kernel for this type of device, such as `cuda`; see `devices_of`."""
    devices = devices_of(op)
    if devices is None or device in devices:
        return
    where = f"has a kernel for {' and '.join(sorted(devices))} only" if devices else "has no kernel in this process"
    raise EnvironmentUnfit(
        f"{name_of(op)} {where}, and cannot run on {device}: run it where it has one, or register one for {device}"
    )


def is_registered(op: Any) -> bool:
    """Tell whether this is an operator that torch knows by name, and not a Python function."""
    return isinstance(op, (OpOverload, OpOverloadPacket, CustomOpDef))


def name_of(op: Any) -> str:
    """Return an operator's name: `aten.add.Tensor`, `mylib.op`, `torch.nn.functional.gelu` or a Python function's own.

    A function within a function is named without the outer one. An object without a name has that of its class.
    """
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return str(op)
    if isinstance(op, CustomOpDef):
        return str(op._opoverload.overloadpacket)
    known = _public_name(op) or resolve_name(op) if callable(op) else None
    return known or str(getattr(op, "__qualname__", type(op).__qualname__)).rpartition("<locals>.")[2]


_NAMESPACES = (
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.linalg", torch.linalg),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
)


def _public_name(op: Any) -> str | None:
    """Return the path of a function in one of torch's public `_NAMESPACES`, such as `torch.linalg.inv`, or None.

    None if no namespace has the function under its own name, without a prefix such as `linalg_`; the first that has it
    counts.
    """
    own = str(getattr(op, "__name__", ""))
    # the C++ function of torch.linalg.inv calls itself linalg_inv
    places = [(path, space, own.removeprefix(f"{path.rpartition('.')[2]}_")) for path, space in _NAMESPACES]
    return next((f"{path}.{name}" for path, space, name in places if vars(space).get(name) is op), None)


class _Fits(BaseException):
    """Raised when the arguments were accepted and a kernel is about to run."""


class _BeforeAnyKernel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        """Raise `_Fits` in place of any operation."""
        raise _Fits


def require_fitting(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError if the arguments do not fit the operator's schema; it is called only as far as its first kernel.

    The arguments of a Python function must fit its signature, if it has one. RuntimeError, TypeError and ValueError
    that are not about the fit are ignored here, because running the operator will show them.
    """
    if not is_registered(op):
        return _require_binding(op, args, kwargs)
    target = op._opoverload if isinstance(op, CustomOpDef) else op
    try:
        with warnings.catch_warnings(), torch.no_grad(), _BeforeAnyKernel():  # type: ignore[no-untyped-call]
            # with many overloads torch tries to convert each argument for each of them, and warns
            warnings.simplefilter("ignore")
            target(*args, **kwargs)
    except _Fits:
        return None
    except (RuntimeError, TypeError, ValueError) as error:
        if (mismatch := _mismatch_in(str(error))) is None:  # a kernel's error, which running the operator will show
            return None
        schemas = "; or ".join(str(each._schema) for each in overloads_of(op))
        raise UsageError(f"{name_of(op)}: the arguments do not fit {schemas}: {mismatch}") from error
    return None


def _mismatch_in(message: str) -> str | None:
    """Return why arguments do not fit, by the message of torch's error, or None if the error is another one.

    That is the message's first line without the schema, or `they match none of these` if torch tried several schemas.
    """
    if "failed to match any schema" in message:
        return "they match none of these"
    if "Declaration: " in message or "Schema: " in message or "Expected a proper Tensor but got None" in message:
        return message.split("\n")[0].split(" Declaration: ")[0].split(" Schema: ")[0].rstrip(".")
    return None


def _require_binding(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError if the arguments do not fit a Python function's signature; do nothing if it has none."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise UsageError(f"{name}: the arguments do not fit: {error}; it takes {signature}") from error


def overloads_of(op: Any) -> list[OpOverload]:
    """Return the overloads of a packet or custom operator, or an overload itself, in a list; empty for a function.

    Of a packet, overloads without a kernel are left out, and so are out= forms if there are others.
    """
    if isinstance(op, CustomOpDef):
        return [op._opoverload]
    if isinstance(op, OpOverloadPacket):
        # overloads without a kernel are TorchScript's, for numbers and strings
        overloads = [getattr(op, each) for each in _names_of_overloads(op)]
        dispatched = [each for each in overloads if torch._C._dispatch_has_kernel(each._name)]
        return [each for each in dispatched if not _is_out_form(each)] or dispatched
    return [op] if isinstance(op, OpOverload) else []


def _names_of_overloads(packet: OpOverloadPacket) -> list[str]:
    return packet.overloads()  # type: ignore[no-any-return, no-untyped-call]


def _is_out_form(op: OpOverload) -> bool:
    """Tell whether an overload has an `out` argument."""
    return any(argument.is_out for argument in op._schema.arguments)


def _has_kernel(name: str, key: str) -> bool:
    """Tell whether an operator of this name has a kernel of its own for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
