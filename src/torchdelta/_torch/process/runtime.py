"""The global state of a process as torch programs see it: saved, restored, seeded.

`preserved` restores everything after its body: random generators, flags, environment variables, compiler settings.
The smaller contexts restore a part. `generator_states` and `drawing_from` handle torch's random generators alone, and
`DrawWatch` notices operations that draw.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DrawWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations that draw random numbers, except inside of a branch, a loop or a custom operator."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and return its result; set `has_drawn` if its tags say that it draws."""
        self.has_drawn |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


_COMPILATION_TIMEOUT_S = 5.0
"""The longest wait for the compilation of another thread."""
_COMPILING = threading.Event()
"""Set while a compilation runs that did not end within the timeout."""

_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
"""Kernels of attention that can be switched off, for every device."""

# config modules of the compiler stack; a module that is not loaded has nothing to restore
_CONFIGS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore generators, flags, environment, working directory and compiler settings after the body.

    That holds even if it raises. The generators are those of torch, random and numpy, and the flags those of
    `_read_flags`. The settings are those of dynamo, inductor, functorch and symbolic shapes, as far as they were
    imported before the body. A working directory that is gone is not restored.
    """
    with _between_compilations():
        place = _working_directory()
        flags = _read_flags()
        environment = dict(os.environ)
        configs = {name: sys.modules[name].get_config_copy() for name in _CONFIGS if name in sys.modules}
    with preserved_generators():
        try:
            yield
        finally:
            with _between_compilations():
                for name, saved in configs.items():
                    _restore_config(sys.modules[name], saved)
                if dict(os.environ) != environment:
                    os.environ.clear()
                    os.environ.update(environment)
                if place is not None and _working_directory() != place:
                    with suppress(OSError):
                        os.chdir(place)
                _restore_flags(flags)


def _working_directory() -> str | None:
    """Return the working directory, or None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators of torch (on every device), random and numpy after the body, even if it raises."""
    states = generator_states()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        _set_generator_states(states)
        random.setstate(python)
        np.random.set_state(numpy)


GeneratorStates = tuple[torch.Tensor, ...]
"""The states of torch's generators, that of the CPU first: a node of a graph can draw from no other ones."""


def generator_states() -> GeneratorStates:
    """Return the present states of torch's generators: that of the CPU, then one for each accelerator device."""
    return torch.get_rng_state(), *_accelerator_states()


def has_drawn_since(states: GeneratorStates) -> bool:
    """Tell whether torch's generators have other states than these, as after an operation that drew random numbers."""
    return not all(torch.equal(before, now) for before, now in zip(states, generator_states(), strict=True))


@contextmanager
def drawing_from(states: GeneratorStates | None = None) -> Iterator[None]:
    """Run the body with torch's generators in these states, or as they are if None; afterwards they are as before.

    The generators of random and numpy are left alone.
    """
    now = generator_states()
    _set_generator_states(states or now)
    try:
        yield
    finally:
        _set_generator_states(now)


def autocast() -> tuple[str, str] | None:
    """Return the device and the dtype of the active autocast, as in ("cpu", "bfloat16"); None if there is none.

    The CPU's counts first, then the accelerator's.
    """
    settings = _autocast_settings().items()
    return next(((device, dtype) for device, (is_enabled, dtype) in settings if is_enabled), None)


def _autocast_settings() -> dict[str, tuple[bool, str]]:
    """Return for the CPU and the accelerator whether autocast is on, and its dtype by name."""
    accelerator = torch.accelerator.current_accelerator()
    return {
        device: (torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in ("cpu", *([accelerator.type] if accelerator is not None else []))
    }


def seed_everything(seed: int) -> None:
    """Seed the generators of torch (on every device), random and numpy; numpy takes the lower 32 bits."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> tuple[Any, ...]:
    """Return a value that changes if a global generator of torch, random or numpy is drawn from or seeded anew."""
    devices = [bytes(state.numpy()) for state in _accelerator_states()]
    torch_state = bytes(torch.get_rng_state().numpy())
    # pickled, because its text takes longer than most programs run
    return (torch_state, *devices, random.getstate(), pickle.dumps(np.random.get_state(legacy=False)))


def synchronise() -> None:
    """Wait for the accelerator, so that an error is raised in the run that caused it; do nothing without one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def release_memory() -> None:
    """Free the cached memory of the accelerator; do nothing without one."""
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def plain_flags() -> dict[str, Any]:
    """Return torch's global flags as JSON takes them to another process, where `apply_flags` sets them."""
    flags = _read_flags()
    return {**flags, "dtype": str(flags["dtype"]).removeprefix("torch."), "device": str(flags["device"])}


def apply_flags(plain: dict[str, Any]) -> None:
    """Set torch's global flags to those that `plain_flags` returned, perhaps in another process.

    Autocast stays as it is, because it holds for a region of a program and not for a process.
    """
    own = {
        "dtype": getattr(torch, plain["dtype"]),
        "device": torch.device(plain["device"]),
        "autocast": _autocast_settings(),
    }
    _restore_flags({**plain, **own})


@contextmanager
def preserved_flags() -> Iterator[None]:
    """Restore torch's flags after the body, even if it raises: those that `_read_flags` returns."""
    with _between_compilations():
        flags = _read_flags()
    try:
        yield
    finally:
        with _between_compilations():
            _restore_flags(flags)


def use_deterministic() -> None:
    """Switch deterministic algorithms on, and set the environment variable of the workspace that cuBLAS needs for them.

    A variable that is set already stays.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _restore_config(config: Any, saved: dict[str, Any]) -> None:
    """Set each setting of a config module that differs from `saved` back to its value there."""
    # only changed settings are written, because torch warns about each deprecated setting that is
    for name, value in config.get_config_copy().items():
        if name in saved and value != saved[name]:
            setattr(config, name, saved[name])


def _accelerator_states() -> list[torch.Tensor]:
    """Return the states of the accelerator's generators, one for each device; none without an accelerator."""
    if not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return [module.get_rng_state(index).cpu() for index in range(torch.accelerator.device_count())]


def _set_generator_states(states: GeneratorStates) -> None:
    """Set torch's generators to states that `generator_states` returned."""
    cpu, *devices = states
    torch.set_rng_state(cpu)
    for index, device_state in enumerate(devices):
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(device_state, index)


@contextmanager
def _between_compilations() -> Iterator[None]:
    """Wait until no other thread compiles, and let none begin while the body runs.

    A compilation changes flags for its duration, which would be saved or restored as if they were the user's. If it
    does not end within `_COMPILATION_TIMEOUT_S`, the body runs all the same, and later bodies do not wait for it.
    """
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    # one wait at most, because a compilation may take minutes, or wait for this thread itself
    is_held = lock is not None and lock.acquire(timeout=0.0 if _COMPILING.is_set() else _COMPILATION_TIMEOUT_S)
    (_COMPILING.clear if is_held or lock is None else _COMPILING.set)()
    try:
        yield
    finally:
        if is_held:
            lock.release()


def _read_flags() -> dict[str, Any]:
    """Return torch's global flags by name, as `_restore_flags` takes them.

    They are deterministic algorithms, filling of uninitialised memory, default dtype and device, grad mode, autocast,
    anomaly mode, the precision of matrix products, flags of cuDNN and MKLDNN, the kernels and the fast path of
    attention, the number of threads, and whether the processor flushes subnormal numbers to zero.
    """
    return {
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "autocast": _autocast_settings(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "precision": _matmul_precision(),
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")},
        "mkldnn": torch.backends.mkldnn.enabled,
        "attention": {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in _ATTENTION},
        "fast_path": torch.backends.mha.get_fastpath_enabled(),
        "threads": torch.get_num_threads(),
        "flush_denormal": _flushes_denormal(),
    }


def _flushes_denormal() -> bool:
    """Tell whether the processor flushes subnormal numbers to zero in this thread, as `torch.set_flush_denormal` sets.

    Torch cannot read the setting, so it is measured, on a float of Python: the setting is the same for all types.
    """
    return sys.float_info.min / 2.0 == 0.0


def _matmul_precision() -> str | None:
    """Return the precision of float32 matrix products, or None if it is set for each backend separately."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the precision is set per backend, which this setting cannot express
        return None


def _restore_flags(flags: dict[str, Any]) -> None:
    """Set torch's global flags to the values that `_read_flags` returned; a precision of None is not set."""
    enabled, warn_only = flags["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = flags["fill"]  # type: ignore[attr-defined]
    torch.set_default_dtype(flags["dtype"])
    if torch.get_default_device() != flags["device"]:
        torch.set_default_device(flags["device"])
    torch.set_grad_enabled(flags["grad"])
    for device, (is_enabled, dtype) in flags["autocast"].items():
        if _autocast_settings().get(device) != (is_enabled, dtype):
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, getattr(torch, dtype))
            torch.clear_autocast_cache()  # of weights that were cast meanwhile
    torch.set_anomaly_enabled(*flags["anomaly"])
    # written only if changed, because torch has two forms of this setting that must not be mixed
    if _matmul_precision() != flags["precision"] and flags["precision"] is not None:
        torch.set_float32_matmul_precision(flags["precision"])
    # the context is needed in a process that has imported torch's own tests
    with torch.backends.__allow_nonbracketed_mutation():
        for name, value in flags["cudnn"].items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)
        torch.backends.mkldnn.enabled = flags["mkldnn"]
    for name, value in flags["attention"].items():
        getattr(torch.backends.cuda, f"enable_{name}")(value)
    torch.backends.mha.set_fastpath_enabled(flags["fast_path"])
    if torch.get_num_threads() != flags["threads"]:
        torch.set_num_threads(flags["threads"])
    if _flushes_denormal() != flags["flush_denormal"]:
        torch.set_flush_denormal(flags["flush_denormal"])
