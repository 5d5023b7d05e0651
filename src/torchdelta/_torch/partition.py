"""A partitioner that recomputes nothing: what the backward needs, the forward saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._functorch.partitioners import default_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule


class SaveEverything(CustomPartitionerFn):
    """In place of inductor's own, which trades memory for work."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Split the joint graph."""
        kwargs.pop("compiler", None)
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Name what it does, for the compiler's cache."""
        return "save everything"
