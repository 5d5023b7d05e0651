"""Export, then decomposition: the program in smaller operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch.compile.seams import HandedGraph, Seam, hand_on
from torchdelta._torch.graphs import graphs
from torchdelta.errors import UsageError
from torchdelta.program.programs import load_object
from torchdelta.program.sides import Side
from torchdelta.transforms.base import Options, Transform, Transformed, require_known
from torchdelta.transforms.compiler import flag
from torchdelta.transforms.export import exported


class Decompose(Transform):
    """`export` and `run_decompositions`, by torch's own table or by `table=file.py:name`."""

    has_seam = True

    def __init__(self, options: Options) -> None:
        require_known("decompose", options, ("strict", "table"))
        self.strict = bool(flag(options, "strict"))
        self.table = _table(str(options["table"])) if "table" in options else None

    @contextmanager
    def applied(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[Transformed]:
        """Export the side and decompose it."""
        if seam is hand_on:
            yield Transformed.whole(self._decomposed(side), captured=1)
            return
        module, made = exported(side, strict=self.strict)

        def make(graph: GraphModule, _: Sequence[Any]) -> GraphModule:
            # what the one at the seam wrote on the nodes is kept by exporting them once more
            return self._decomposed(replace(made, call=graph, owner=graph)).call  # type: ignore[return-value]

        call = seam(HandedGraph(graph=module, example_inputs=side.args, make=make, level="export"))
        yield Transformed.whole(replace(made, call=call), captured=1)

    def _decomposed(self, side: Side) -> Side:
        module, made = exported(side, strict=self.strict, then=lambda program: program.run_decompositions(self.table))
        graphs.read_before_update(module)
        return made


def _table(spec: str) -> dict[Any, Callable[..., Any]]:
    found = load_object(spec, what="decomposition table")
    table = found() if callable(found) else found
    if not isinstance(table, Mapping):
        raise UsageError(f"{spec} is no decomposition table but {type(table).__name__}: it maps operators to functions")
    return dict(table)
