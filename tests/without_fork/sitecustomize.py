"""Make this Python one without `os.fork`, as on Windows. It is on `PYTHONPATH` under `TORCHDELTA_TEST_SPAWN=1`.

Python imports a module of this name when it starts, so every process that a test starts lacks `os.fork` too.
"""

import os

if hasattr(os, "fork"):
    del os.fork
