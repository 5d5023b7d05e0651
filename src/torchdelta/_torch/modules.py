"""Attributes of an `nn.Module` that are torch's own: its registries and hooks, and what a compiler adds to it.

`own_attributes` returns the others, which are the user's; `hooks_of` returns the functions that a user has registered.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

_REGISTRIES = frozenset(vars(torch.nn.Module())) - {"training"}
_HOOKS = tuple(sorted(name for name in _REGISTRIES if name.endswith("_hooks")))
_COMPILERS = ("_torchdynamo", "_dynamo", "_is_torch_compile", "_compiled_call_impl")
"""How the names begin of the attributes that torch.compile adds to a module or a function."""


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module by name, without torch's registries and without those that a compiler added.

    So parameters, buffers, submodules and hooks are left out, and `training` is not. Of a `GraphModule` only tensors
    are returned: the rest is the graph itself, which no run changes.
    """
    is_graph = isinstance(module, torch.fx.GraphModule)
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _REGISTRIES and not is_of_compiler(name) and (not is_graph or isinstance(value, torch.Tensor))
    }


def is_of_compiler(name: str) -> bool:
    """Tell whether an attribute of this name is one that torch.compile adds to a module or a function."""
    return name.startswith(_COMPILERS)


def hooks_of(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return all hooks of every kind that are registered on the module itself, not those of its submodules."""
    registries = (vars(module).get(name) or {} for name in _HOOKS)
    return [hook for hooks in registries for hook in hooks.values() if callable(hook)]


def script_attributes(module: torch.jit.ScriptModule) -> dict[str, Any]:
    """Return the attributes of a module of TorchScript by name, without parameters, buffers, submodules and flags."""
    registered = {*dict(module.named_parameters()), *dict(module.named_buffers()), *dict(module.named_children())}
    text = module._c.dump_to_str(False, True, False)
    # attributes stand below those of the module itself, one level in; submodules have a text of their own
    names = re.findall(r"^    (\w+) = ", text.partition("submodules {")[0], flags=re.MULTILINE)
    known = {*registered, "training", "_is_full_backward_hook"}
    return {name: module._c.getattr(name) for name in names if name not in known}
