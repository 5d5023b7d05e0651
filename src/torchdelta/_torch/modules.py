"""Attributes of an `nn.Module` that are torch's own: its registries and hooks, and what a compiler adds to it.

`own_attributes` returns the others, which are the user's; `hooks_of` returns the functions that a user has registered;
`compiled_call_of` returns what a module that was compiled in place runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_REGISTRIES = frozenset(vars(torch.nn.Module())) - {"training"}
_OF_SCRIPTS = frozenset(("_actual_script_module", "_c", "_concrete_type", "_initializing", "_name", "forward"))
"""What a module of TorchScript keeps of itself in Python."""
_HOOKS = tuple(sorted(name for name in _REGISTRIES if name.endswith("_hooks")))
_COMPILERS = ("_torchdynamo", "_dynamo", "_is_torch_compile", "_compiled_call_impl")
"""How the names begin of the attributes that torch.compile adds to a module or a function."""


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module by name, without torch's registries and without those that a compiler added.

    So parameters, buffers, submodules and hooks are left out, and `training` is not. Of a `GraphModule` only tensors
    are returned: the rest is the graph itself, which no run changes. Of a module of TorchScript, what
    `script_attributes` returns is left out.
    """
    is_graph = isinstance(module, torch.fx.GraphModule)
    of_torch = _REGISTRIES | _OF_SCRIPTS if isinstance(module, torch.jit.ScriptModule) else _REGISTRIES
    return {
        name: value
        for name, value in vars(module).items()
        if name not in of_torch and not is_of_compiler(name) and (not is_graph or isinstance(value, torch.Tensor))
    }


def is_of_compiler(name: str) -> bool:
    """Tell whether an attribute of this name is one that torch.compile adds to a module or a function."""
    return name.startswith(_COMPILERS)


def compiled_call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what a module that was compiled in place, by its method `compile`, calls; None for any other module."""
    return vars(module).get("_compiled_call_impl")


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Make a module call this, as if its method `compile` had returned it."""
    vars(module)["_compiled_call_impl"] = call


def registries_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dicts themselves in which a module keeps its parameters, buffers and submodules by name.

    A module of TorchScript keeps them in C++, and has none.
    """
    registries = (vars(module).get(name) for name in ("_parameters", "_buffers", "_modules"))
    return [registry for registry in registries if isinstance(registry, dict)]


def hooks_of(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return all hooks of every kind that are registered on the module itself, not those of its submodules."""
    registries = (vars(module).get(name) or {} for name in _HOOKS)
    return [hook for hooks in registries for hook in hooks.values() if callable(hook)]


def script_attributes(module: torch.jit.ScriptModule) -> dict[str, Any]:
    """Return the attributes of a module of TorchScript by name, without parameters, buffers and submodules.

    They are kept in C++; `own_attributes` returns those in Python.
    """
    registered = {*dict(module.named_parameters()), *dict(module.named_buffers()), *dict(module.named_children())}
    known = {*registered, "_is_full_backward_hook"}
    # a frozen module is not told its type in Python
    concrete: Any = vars(module).get("_concrete_type") or torch._C.ConcreteModuleType.from_jit_type(module._c._type())
    names = sorted(concrete.get_attributes())  # they come in no order
    return {name: module._c.getattr(name) for name in names if name not in known}
