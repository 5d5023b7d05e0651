"""Export, then decomposition: the program in smaller operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchdelta._torch import graphs
from torchdelta.errors import UsageError
from torchdelta.execute.programs import load_object
from torchdelta.execute.sides import Side
from torchdelta.transforms.base import Options, Transform, Transformed, require_known
from torchdelta.transforms.compiler import flag
from torchdelta.transforms.export import exported


class Decompose(Transform):
    """`export` and `run_decompositions`, by torch's own table or by `table=file.py:name`."""

    def __init__(self, options: Options) -> None:
        require_known("decompose", options, ("strict", "table"))
        self.strict = bool(flag(options, "strict"))
        self.table = _table(str(options["table"])) if "table" in options else None

    @contextmanager
    def applied(self, side: Side, *, draws_random: bool, lifted: bool = False) -> Iterator[Transformed]:  # noqa: ARG002 — runs eagerly
        """Export the side and decompose it."""
        module, made = exported(side, strict=self.strict, then=lambda program: program.run_decompositions(self.table))
        graphs.read_before_update(module)
        yield Transformed.whole(made, captured=1)


def _table(spec: str) -> dict[Any, Callable[..., Any]]:
    found = load_object(spec, what="decomposition table")
    table = found() if callable(found) else found
    if not isinstance(table, Mapping):
        raise UsageError(f"{spec} is no decomposition table but {type(table).__name__}: it maps operators to functions")
    return dict(table)
