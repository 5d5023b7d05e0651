"""Faults among correct rewrites, in the open or behind a black box."""

import random

from torchdelta._torch.graphs.nodes import drop_metadata_assertions
from torchdelta.audit.faults import FAULTS
from torchdelta.audit.faults.base import eligible_nodes

from .rewrites import rewrite


class Hidden:
    """A pass on an exported graph: rewrites many places correctly, and one wrongly if it has a fault."""

    def __init__(self, kind=None, *, seed=0, is_black_box=False, rewrites=20):
        self.kind = kind
        self.seed = seed
        self.is_black_box = is_black_box
        self.rewrites = rewrites
        self.planted = None
        self.rewritten = 0
        self.__name__ = f"hidden_{kind}"

    def __call__(self, graph_module, inputs):
        drop_metadata_assertions(graph_module)
        if self.kind is not None:
            fault = FAULTS.get(self.kind)
            names = [node.name for node in eligible_nodes(fault, graph_module.graph)]
            self.planted = self.planted or random.Random(f"{self.kind} {self.seed}").choice(names)
            fault.plant(next(node for node in graph_module.graph.nodes if node.name == self.planted))
        self.rewritten = rewrite(graph_module, self.rewrites, seed=self.seed, sparing=self.planted)
        return (lambda *args: graph_module(*args)) if self.is_black_box else graph_module


def kinds_that_fit(graph_module):
    """Return the kinds of fault that have a place in an exported graph."""
    return [kind for kind in FAULTS if eligible_nodes(FAULTS.get(kind), graph_module.graph)]
