"""Settings of the compiler stack that differ from torch's defaults: read here, applied in another process.

A failure may need such a setting, so reports and scripts carry them by their full names, such as
`torch._inductor.config.max_autotune`. A setting may name a program that a compiler starts, so one that comes out of a
file is set only if it is harmless (`is_harmless`).
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

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
_OPTIONS = {"config": INDUCTOR, "dynamo": "torch._dynamo.config", "functorch": "torch._functorch.config"}
"""The first part of an option that is a setting, and the config module of it."""
_BACKENDS = frozenset(("ATEN", "TRITON", "CPP", "CUTLASS", "CUTEDSL", "NVGEMM", "CK", "CKTILE"))
_INJECTED_BUGS = frozenset(("accuracy", "compile_error", "runtime_error"))
_TEXTS: Mapping[str, frozenset[str]] = {
    "torch._inductor.config.cpp.enable_floating_point_contract_flag": frozenset(("off", "on", "fast")),
    "torch._inductor.config.cpp.inject_log1p_bug_TESTING_ONLY": frozenset(("accuracy",)),
    "torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY": _INJECTED_BUGS,
    "torch._inductor.config.cpp.march": frozenset(("native",)),
    "torch._inductor.config.layout_opt_default": frozenset(("0", "1")),
    "torch._inductor.config.max_autotune_conv_backends": _BACKENDS,
    "torch._inductor.config.max_autotune_conv_bwd_input_backends": _BACKENDS,
    "torch._inductor.config.max_autotune_conv_bwd_weight_backends": _BACKENDS,
    "torch._inductor.config.max_autotune_gemm_backends": _BACKENDS,
    "torch._inductor.config.test_configs.distort_benchmarking_result": frozenset(("", "inverse", "random")),
    "torch._inductor.config.triton.inject_relu_bug_TESTING_ONLY": _INJECTED_BUGS,
    "torch._inductor.config.worker_start_method": frozenset(("subprocess", "fork", "spawn")),
    "torch._dynamo.config.numpy_default_complex": frozenset(("complex64", "complex128")),
    "torch._dynamo.config.numpy_default_float": frozenset(("float16", "float32", "float64")),
    "torch._dynamo.config.numpy_default_int": frozenset(("int8", "int16", "int32", "int64")),
    "torch._dynamo.config.side_effect_replay_policy": frozenset(("info", "silent", "warn", "error")),
    "torch._functorch.config.activation_memory_budget_runtime_estimator": frozenset(("flops", "profile", "testing")),
    "torch._functorch.config.activation_memory_budget_solver": frozenset(
        ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
    ),
    "torch._functorch.config.backward_pass_autocast": frozenset(("same_as_forward", "off")),
    "torch._functorch.config.saved_tensors_hooks_filtering_mode": frozenset(("donated", "no_static", "all")),
}
"""The texts that torch knows for a setting, whose type says only that it is a text. Of `_BACKENDS`, a list with commas.

A setting whose type is a `Literal` has its texts in its type.
"""
_MOST = 2**63
"""The largest number that a file may set."""
_MOST_THREADS = 1024
"""The largest number of threads or processes that a file may set."""


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


def settings_among(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are settings, such as `config.max_autotune`, by the full names of the settings."""
    parts = {key: key.partition(".") for key in options}
    return {f"{_OPTIONS[part]}.{name}": options[key] for key, (part, _, name) in parts.items() if part in _OPTIONS}


def is_known(full: str) -> bool:
    """Tell whether this torch has a setting of that full name."""
    return _find(full) is not None


def has_wrong_type(full: str, value: Any) -> bool:
    """Tell whether a value is of another type than the setting, if that is a truth value, a number or a text.

    It may be one of several such types, or None. A float may be a whole number. LookupError if this torch has no such
    setting.
    """
    _, _, entry = _entry_of(full)
    kind = entry.value_type
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    # of a None without another type, and of a pair or a callable, torch often takes more than it says
    is_plain = all(each in (NoneType, bool, int, float, str) or get_origin(each) is Literal for each in kinds)
    return is_plain and kinds != (NoneType,) and not _fits(value, kind, lambda _: True)


def is_harmless(full: str, value: Any) -> bool:
    """Tell whether a setting may be taken from a file of another user: it cannot name a program or a place.

    That is so for truth values and numbers, alone or in lists, where the setting is one (numbers up to a bound), for
    texts that are known for the setting, and for the value that it has already, here or by default. It is not so for a
    setting that reaches another machine. LookupError if this torch has no such setting.
    """
    config, key, entry = _entry_of(full)
    present = entry.default if entry.deprecated else getattr(config, key)  # which would warn
    if any(_is_same(value, each) for each in (present, entry.default)):
        return True
    if "remote" in key:
        return False
    most = _MOST_THREADS if key.endswith("threads") else _MOST

    def is_known_value(leaf: Any) -> bool:
        if isinstance(leaf, str):
            known = _TEXTS.get(full, frozenset())
            return leaf in known or (known is _BACKENDS and known.issuperset(leaf.split(",")))
        return leaf is None or (isinstance(leaf, (int, float)) and math.isfinite(leaf) and abs(leaf) <= most)

    return _fits(value, entry.value_type, is_known_value)


def _is_same(value: Any, present: Any) -> bool:
    """Tell whether a value from JSON is that of a setting; the items of a set come in any order."""
    if isinstance(present, (set, frozenset)):
        return isinstance(value, list) and all(isinstance(each, str) for each in value) and set(value) == present
    return bool(value == _as_json(present))


def _fits(value: Any, kind: Any, accepts: Callable[[Any], bool]) -> bool:
    """Tell whether a value from JSON is of a type, and `accepts` holds for each number, text and None in it.

    The texts of a `Literal` are accepted, and a value whose type may be any goes to `accepts` as a whole. Types that
    JSON does not have, such as callables, fit no value.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return accepts(value)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_fits(value, each, accepts) for each in arguments)
    if (origin or kind) in (list, tuple, set):
        kinds = set(arguments) - {...}
        return isinstance(value, (list, tuple)) and all(
            any(_fits(item, each, accepts) for each in kinds or {bool, int, float, str, None}) for item in value
        )
    if (origin or kind) is dict:
        key, inner = arguments or (str, Any)
        return isinstance(value, dict) and all(
            _fits(name, key, accepts) and _fits(item, inner, accepts) for name, item in value.items()
        )
    if kind is float:
        return type(value) in (int, float) and accepts(value)
    kind = NoneType if kind is None else kind
    return kind in (NoneType, bool, int, str) and type(value) is kind and accepts(value)


def _as_json(value: Any) -> Any:
    """Return a value as JSON would give it back: tuples and sets are lists."""
    return [_as_json(item) for item in value] if isinstance(value, (tuple, list, set)) else value


def apply(settings: Mapping[str, Any]) -> None:
    """Set settings from now on, each by its full name; raise LookupError for one that this torch does not have.

    Those before a missing one stay set. A list is set as a tuple if the setting has one.
    """
    for full, value in settings.items():
        config, key, _ = _entry_of(full)
        present = getattr(config, key)
        if isinstance(present, tuple) and isinstance(value, list):
            value = tuple(value)
        if present != value:
            setattr(config, key, value)


def _entry_of(full: str) -> tuple[Any, str, Any]:
    """Return a setting's config module, its name there, and torch's record of it; LookupError if there is none."""
    if (entry := _find(full)) is None:
        raise LookupError(f"this torch has no setting {full}")
    return entry


def _find(full: str) -> tuple[Any, str, Any] | None:
    """Return a setting's config module, its name there, and torch's record of it; None if there is none."""
    for name in _CONFIGS:
        if full.startswith(f"{name}."):
            config, key = importlib.import_module(name), full.removeprefix(f"{name}.")
            if key in config._config:
                return config, key, config._config[key]
    return None


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
