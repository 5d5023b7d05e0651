"""Every test runs as a user's program would, on machines with and without wide vector units."""

import os
import pathlib

_CACHE = pathlib.Path(__file__).parent.parent / ".cache"
# set before torch is imported: compiled kernels are kept between tests and runs
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "inductor"))
os.environ.setdefault("NUMBA_CACHE_DIR", str(_CACHE / "numba"))
# oneDNN's bf16 matmul dies with SIGILL on some x86 machines
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
