"""Registered operators: what is one, and which module registered it."""

from __future__ import annotations

import sys
from typing import Any

from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket

_BUILT_IN = frozenset(
    {"aten", "higher_order", "inductor", "mkldnn", "onednn", "prim", "prims", "profiler", "quantized"}
)
_DECOMPOSED = "quantized_decomposed"


def is_operator(target: Any) -> bool:
    """Tell whether a callable is one overload of a registered operator."""
    return isinstance(target, OpOverload)


def registered_by(target: Any) -> str | None:
    """Return the module that registered an operator; None of torch's own and of what is no operator.

    LookupError where somebody else did, and nobody wrote down who.
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
