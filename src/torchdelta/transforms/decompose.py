"""Export, then decomposition: the program in smaller operators.

The seam gets the exported graph before it is decomposed. Start with `Decompose.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from torchdelta import errors
from torchdelta._torch.compile.seams import HandedGraph, Seam, hand_on
from torchdelta._torch.graphs import graphs
from torchdelta._torch.graphs.keys import content_key
from torchdelta.errors import ProgramError, UsageError
from torchdelta.program.programs import load_object
from torchdelta.program.sides import Side
from torchdelta.transforms.base import (
    Options,
    TransformedSide,
    accepts_unchanged,
    require_known,
)
from torchdelta.transforms.export import ExportBase, ExportedProgram


class Decompose(ExportBase):
    """`export` and `run_decompositions`, by torch's own table or by `table=file.py:name`."""

    traits = replace(ExportBase.traits, has_seam=True)

    def __init__(self, options: Options) -> None:
        """Read the options `dynamic`, `strict`, `unchanged`, and `table`, which is loaded at once.

        UsageError if an option is unknown or wrong; UsageError or ProgramError if the table cannot be loaded.
        """
        require_known("decompose", options, ("dynamic", "strict", "table", "unchanged"))
        super().__init__(options)
        self.must_change = not accepts_unchanged("decompose", options)
        self.table = _load_table(str(options["table"])) if "table" in options else None

    @contextmanager
    def apply(
        self, side: Side, *, draws_random: bool, lifted: bool = False, seam: Seam = hand_on
    ) -> Iterator[TransformedSide]:
        """Yield the side with its call exported and decomposed; its calls count as transformed, with one graph.

        A `seam` other than `hand_on` gets the exported graph, and the graph that it hands on is exported once more and
        decomposed. The other keywords are not used.
        """
        changes: list[bool] = []
        if seam is hand_on:
            yield TransformedSide.counting_calls(self._decompose(side, changes), captured=1, changes=changes)
            return
        module, exported = self.export(side)

        def make(graph: GraphModule, _: Sequence[Any]) -> GraphModule:
            # the graph is exported once more, because that keeps the metadata that the seam wrote on its nodes
            return self._decompose(replace(exported, call=graph, owner=graph), changes).call  # type: ignore[return-value]

        call = seam(HandedGraph(graph=module, example_inputs=side.args, make=make, level="export"))
        yield TransformedSide.counting_calls(replace(exported, call=call), captured=1, changes=changes)

    def _decompose(self, side: Side, changes: list[bool]) -> Side:
        """Export a side and decompose the exported program by the table; return the side that runs it.

        In its graph, updated buffers and inputs are read through copies (`graphs.read_before_update`), so that a
        backward can run. Whether the decomposition changed the graph is appended to `changes`, unless the user accepts
        an unchanged graph.
        """

        def decompose(program: ExportedProgram) -> ExportedProgram:
            decomposed: ExportedProgram = program.run_decompositions(self.table)
            if self.must_change:
                changes.append(content_key(decomposed.graph_module) != content_key(program.graph_module))
            return decomposed

        module, decomposed = self.export(side, decompose)
        graphs.read_before_update(module)
        return decomposed


def _load_table(spec: str) -> dict[Any, Callable[..., Any]]:
    """Return the decomposition table that `file.py:name` is, or, if it is a function, that it returns, as a new dict.

    UsageError if it is not a mapping; UsageError or ProgramError if it cannot be loaded; ProgramError if the function
    raises.
    """
    loaded = load_object(spec, what="decomposition table")
    try:
        table = loaded() if callable(loaded) else loaded
    except errors.caught_from_user_code() as error:
        raise ProgramError(f"the decomposition table {spec} raises {errors.describe(error)}") from error
    if not isinstance(table, Mapping):
        raise UsageError(
            f"{spec} is not a decomposition table but {type(table).__name__}: a table maps operators to functions"
        )
    return dict(table)
