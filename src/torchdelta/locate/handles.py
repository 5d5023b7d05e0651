"""Handles: ids on the nodes of a graph that survive copies and rewrites, so that two graphs can be matched.

Torch carries them through export, re-export, decomposition and `node_copy`; pickling a graph loses them, and
`execute/graph_files.py` writes them to a file.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from torchdelta._torch import provenance
from torchdelta._torch.provenance import handles_of, merge_handles
from torchdelta.errors import UsageError

__all__ = ["assign_handles", "handles_of", "merge_handles"]


def assign_handles(program: GraphModule | torch.export.ExportedProgram) -> None:
    """Give every node but placeholders and outputs, nested graphs included, an id; those that have one keep it."""
    if not isinstance(program, (GraphModule, torch.export.ExportedProgram)):
        raise UsageError(
            f"handles are for the nodes of a graph module or an exported program, and {type(program).__name__} has "
            "none: trace or export it first"
        )
    provenance.assign_handles(program)
