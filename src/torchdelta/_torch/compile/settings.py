"""Settings of the compiler stack that differ from torch's defaults: read here, applied in another process.

A failure may need such a setting, so reports and scripts carry them by their full names, such as
`torch._inductor.config.max_autotune`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torchdelta.records.strict_json import from_text, to_text

INDUCTOR = "torch._inductor.config"
"""The full names of inductor's settings begin with this."""
AOT_AUTOGRAD_IMPORT = "from torch._dynamo.backends.common import aot_autograd"
"""The statement by which a script gets AOTAutograd around a compiler of its own."""
_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    INDUCTOR,
    "torch.fx.experimental._config",
)


def changed_settings() -> dict[str, Any]:
    """Return the value of each setting that differs from its default, by full name, except those no result depends on.

    They are the settings of dynamo, AOTAutograd, inductor and fx, as far as these are imported.
    """
    return {
        f"{name}.{key}": value
        for name in _CONFIGS
        if name in sys.modules
        for key, value in sys.modules[name].get_config_copy().items()
        if _is_changed(sys.modules[name], key, value)
    }


def _is_changed(config: Any, key: str, value: Any) -> bool:
    """Tell whether a setting of a config module differs from its default, and may change a result.

    Aliases, hidden and private settings do not count, nor those that torch leaves out of its cache keys.
    """
    entry = config._config[key]
    # settings that torch leaves out of its cache keys change no result: folders, numbers of processes, traces
    idle = (*getattr(config, "_save_config_ignore", ()), *getattr(config, "_cache_config_ignore_prefix", ()))
    if entry.alias is not None or entry.hide or key.startswith(tuple(idle)) or key.rpartition(".")[2].startswith("_"):
        return False
    return bool(value != entry.default) and not config._is_default(key)


def apply(settings: Mapping[str, Any]) -> None:
    """Set settings from now on, each by its full name; raise LookupError for one that this torch does not have.

    Those before a missing one stay set.
    """
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
    """Set settings, each by its full name, while the context is open, and put the old values back afterwards.

    All settings must exist in this torch.
    """
    with ExitStack() as stack:
        for full, value in settings.items():
            name = next(name for name in _CONFIGS if full.startswith(f"{name}."))
            stack.enter_context(importlib.import_module(name).patch({full.removeprefix(f"{name}."): value}))
        yield


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that JSON carries to another process unchanged; all others, such as tuples, are left out."""

    def is_plain(value: Any) -> bool:
        try:
            return bool(from_text(to_text(value)) == value)
        except (TypeError, ValueError):
            return False

    return {name: value for name, value in settings.items() if is_plain(value)}
