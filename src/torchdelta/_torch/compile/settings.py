"""Settings of the compiler stack that are not as torch ships them: a failure may need them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.fx.experimental._config",
)


def changed_settings() -> dict[str, Any]:
    """Return each setting that differs from its default, by its full name; what no result depends on is left out."""
    return {
        f"{name}.{key}": value
        for name in _CONFIGS
        if name in sys.modules
        for key, value in sys.modules[name].get_config_copy().items()
        if _is_changed(sys.modules[name], key, value)
    }


def _is_changed(config: Any, key: str, value: Any) -> bool:
    entry = config._config[key]
    # torch says itself which of them its caches need not look at: folders, numbers of processes, traces
    idle = (*getattr(config, "_save_config_ignore", ()), *getattr(config, "_cache_config_ignore_prefix", ()))
    if entry.alias is not None or entry.hide or key.startswith(tuple(idle)) or key.rpartition(".")[2].startswith("_"):
        return False
    return bool(value != entry.default) and not config._is_default(key)


def apply(settings: Mapping[str, Any]) -> None:
    """Set settings from now on; LookupError of one that this torch does not have."""
    for full, value in settings.items():
        name = next((name for name in _CONFIGS if full.startswith(f"{name}.")), None)
        config = importlib.import_module(name) if name is not None else None
        key = full.removeprefix(f"{name}.")
        if config is None or key not in config._config:
            raise LookupError(f"this torch has no setting {full}")
        if getattr(config, key) != value:
            setattr(config, key, value)


@contextmanager
def applied(settings: Mapping[str, Any]) -> Iterator[None]:
    """Hold settings that `changed_settings` found, here or in another process."""
    with ExitStack() as stack:
        for full, value in settings.items():
            name = next(name for name in _CONFIGS if full.startswith(f"{name}."))
            stack.enter_context(importlib.import_module(name).patch({full.removeprefix(f"{name}."): value}))
        yield
