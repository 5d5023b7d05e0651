"""Whether random numbers are drawn, from whatever generator.

The process's global state as far as torch programs see it: taken, and put back.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DrawWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations that draw; what a branch, a loop or an operator of the user's own draws it does not see."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what torch says of it."""
        self.has_drawn |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


_PATIENCE_S = 5.0
_COMPILING = threading.Event()
"""Whether a compilation did not end in time, and has not since."""

# config modules of the compiler stack; one that is not loaded has nothing to put back
_CONFIGS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
)


@contextmanager
def preserved() -> Iterator[None]:
    """Leave random generators, flags, environment and compiler settings as they were, exceptions included."""
    with _between_compilations():
        flags = _take_flags()
        environment = dict(os.environ)
        configs = {name: sys.modules[name].get_config_copy() for name in _CONFIGS if name in sys.modules}
    with preserved_generators():
        try:
            yield
        finally:
            with _between_compilations():
                for name, saved in configs.items():
                    _put_config(sys.modules[name], saved)
                if dict(os.environ) != environment:
                    os.environ.clear()
                    os.environ.update(environment)
                _put_flags(flags)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave random generators as they were."""
    generators = _take_generators()
    try:
        yield
    finally:
        _put_generators(generators)


Drawn = tuple[torch.Tensor, ...]
"""Where torch's generators stand: those of operations, which is all that a node of a graph can draw from."""


def drawn() -> Drawn:
    """Return where torch's generators stand."""
    return torch.get_rng_state(), *_accelerator_states()


def has_drawn_since(state: Drawn) -> bool:
    """Tell whether an operation drew random numbers since then."""
    return not all(torch.equal(before, now) for before, now in zip(state, drawn(), strict=True))


@contextmanager
def drawing_from(state: Drawn | None = None) -> Iterator[None]:
    """Draw as one did who stood there, or as one does now; afterwards the generators stand where they did."""
    now = drawn()
    _put_drawn(state or now)
    try:
        yield
    finally:
        _put_drawn(now)


def autocast() -> tuple[str, str] | None:
    """Return the device and the dtype of the autocast that is on; None where none is."""
    accelerator = torch.accelerator.current_accelerator()
    for device in ("cpu", *([accelerator.type] if accelerator is not None else [])):
        if torch.is_autocast_enabled(device):
            return device, str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def seed_everything(seed: int) -> None:
    """Rewind the generators of torch (every device), random and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> tuple[Any, ...]:
    """Return something that changes exactly when a global generator was drawn from."""
    devices = [bytes(state.numpy()) for state in _accelerator_states()]
    torch_state = bytes(torch.get_rng_state().numpy())
    # to write its numbers out as text would take longer than most programs do
    return (torch_state, *devices, random.getstate(), pickle.dumps(np.random.get_state(legacy=False)))


def synchronise() -> None:
    """Wait for the accelerator, so that a fault shows in the run that caused it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def release_memory() -> None:
    """Give cached accelerator memory back."""
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


@contextmanager
def preserved_flags() -> Iterator[None]:
    """Leave torch's flags as they were."""
    with _between_compilations():
        flags = _take_flags()
    try:
        yield
    finally:
        with _between_compilations():
            _put_flags(flags)


def use_deterministic() -> None:
    """Ask for deterministic algorithms, with the workspace that cuBLAS needs for them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _put_config(config: Any, saved: dict[str, Any]) -> None:
    # only what changed is written: torch warns about each deprecated setting that is touched
    for name, value in config.get_config_copy().items():
        if name in saved and value != saved[name]:
            setattr(config, name, saved[name])


def _accelerator_states() -> list[torch.Tensor]:
    if not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return [module.get_rng_state(index).cpu() for index in range(torch.accelerator.device_count())]


def _take_generators() -> tuple[Any, ...]:
    return drawn(), random.getstate(), np.random.get_state()


def _put_drawn(state: Drawn) -> None:
    cpu, *devices = state
    torch.set_rng_state(cpu)
    for index, device_state in enumerate(devices):
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(device_state, index)


def _put_generators(state: tuple[Any, ...]) -> None:
    drawn_state, python, numpy = state
    _put_drawn(drawn_state)
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def _between_compilations() -> Iterator[None]:
    """Hold while no other thread compiles: a compilation sets flags for its own while, which would stay for good."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    # a compilation may take minutes, or wait for this thread itself: it is waited for once
    is_held = lock is not None and lock.acquire(timeout=0.0 if _COMPILING.is_set() else _PATIENCE_S)
    (_COMPILING.clear if is_held or lock is None else _COMPILING.set)()
    try:
        yield
    finally:
        if is_held:
            lock.release()


def _take_flags() -> dict[str, Any]:
    return {
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "precision": _matmul_precision(),
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")},
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
    }


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set per backend, which this setting cannot express
        return None


def _put_flags(flags: dict[str, Any]) -> None:
    enabled, warn_only = flags["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = flags["fill"]  # type: ignore[attr-defined]
    torch.set_default_dtype(flags["dtype"])
    if torch.get_default_device() != flags["device"]:
        torch.set_default_device(flags["device"])
    torch.set_grad_enabled(flags["grad"])
    torch.set_anomaly_enabled(*flags["anomaly"])
    # torch keeps two kinds of this setting that must not be mixed: one that is as it was is not written
    if _matmul_precision() != flags["precision"] and flags["precision"] is not None:
        torch.set_float32_matmul_precision(flags["precision"])
    # a process in which torch's own tests are imported may not set these otherwise
    with torch.backends.__allow_nonbracketed_mutation():
        for name, value in flags["cudnn"].items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)
        torch.backends.mkldnn.enabled = flags["mkldnn"]
    if torch.get_num_threads() != flags["threads"]:
        torch.set_num_threads(flags["threads"])
