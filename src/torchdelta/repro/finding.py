"""What a script has to show: a graph, its inputs, how it was transformed, and what came of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from torchdelta.errors import UsageError
from torchdelta.records.case import Case
from torchdelta.records.report import Report


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A failure of one graph; the report is that of a check of exactly this graph on exactly these inputs."""

    graph: GraphModule
    inputs: tuple[Any, ...]
    """In the order of the placeholders: tensors, numbers, text and None."""
    case: Case
    report: Report
    deadline_s: float = 60.0
    """How long a candidate that hangs or dies is waited for."""
    memory_bytes: int = 4 * 2**30
    """How much more memory than it starts with a candidate may take that ran out of it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the compiler that were not as torch ships them, by their full names."""
    inputs_from: Mapping[int, str] = field(default_factory=dict)
    """Expressions of torch alone that give the very values of an input, by its place."""
    tries: int = 1
    """How often a script tries: what fails now and then need not fail at once."""
    imports: tuple[str, ...] = ()
    """Modules whose import registers the operators that the graph calls."""

    def __post_init__(self) -> None:
        wanted = sum(node.op == "placeholder" for node in self.graph.graph.nodes)
        if wanted != len(self.inputs):
            raise UsageError(f"the graph has {wanted} placeholders and {len(self.inputs)} inputs were given")
        if not self.report.verdict.is_failure:
            raise UsageError(f"the report says {self.report.verdict.value}: there is nothing to reproduce")
        for place in self.inputs_from:
            if not 0 <= place < len(self.inputs):
                raise UsageError(f"there is no input {place}: the graph has {len(self.inputs)}")
