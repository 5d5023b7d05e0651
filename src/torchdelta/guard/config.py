"""The options of `torchdelta.guard` as one record: which calls are checked, and what is done about a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from torchdelta.compare.policy_parser import parse
from torchdelta.errors import UsageError
from torchdelta.records.case import require_positive, require_seed
from torchdelta.records.guard import CHOICES

Only = Callable[[GraphModule], bool] | tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The options of `torchdelta.guard`, checked when built."""

    check: str = "values"
    """`values` compares with eager and truth; `errors` only asks whether the compiled graph runs; or `off`."""
    on_failure: str = "raise"
    """`raise`, `fallback` to the graph itself, or only `report`."""
    record: str = "on_failure"
    """Whether a graph is written to disk `on_failure`, or `always`, before it runs."""
    minify: bool | str = False
    """Whether findings are minified in the background; with `wait` the run waits for it."""
    graph: str = "dynamo"
    """Which graphs are checked: those that `dynamo` captures, or the `aten` graphs behind AOTAutograd."""
    only: Only | None = None
    """A predicate on graphs, or the least and the largest number of nodes."""
    budget_s: float | None = None
    """How long all checks together may take; later calls are not checked."""
    every: int = 0
    """Besides the first call of a graph, each call whose number is a multiple of this is checked."""
    policy: str = "noise"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for a value that an option cannot have, such as an unknown choice or a malformed policy."""
        require_seed(self.seed)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                listed = ", ".join(map(str, known))
                raise UsageError(f"a guard has no {name}={getattr(self, name)!r}: it is one of {listed}")
        if self.every < 0:
            raise UsageError(f"every is a number of calls from 0, not {self.every}")
        require_positive("budget_s", self.budget_s)
        if isinstance(self.only, tuple) and (len(self.only) != 2 or self.only[0] > self.only[1]):
            raise UsageError(f"only={self.only} is not a range of node counts: give the least and the largest")
        if self.only is not None and not isinstance(self.only, tuple) and not callable(self.only):
            raise UsageError("only is a predicate on graphs, or the least and the largest number of nodes")
        parse(self.policy)

    def concerns(self, graph_module: GraphModule) -> bool:
        """Tell whether a graph is one of those to check, by `only`; without `only` all of them are.

        A pair holds the least and the largest number of nodes, both included; placeholders and the output count too.
        """
        if self.only is None:
            return True
        if isinstance(self.only, tuple):
            least, largest = self.only
            return least <= len(graph_module.graph.nodes) <= largest
        return bool(self.only(graph_module))

    def is_over_budget(self, seconds: float) -> bool:
        """Tell whether checks that took `seconds` so far have used up `budget_s`; never if that is None."""
        return self.budget_s is not None and seconds >= self.budget_s


PRESETS: dict[int, dict[str, object]] = {
    1: {"check": "errors"},
    2: {"check": "errors", "minify": True},
    3: {"check": "errors", "record": "always"},
    4: {"check": "values", "minify": True},
}
"""The options that do what PyTorch's repro levels (`TORCHDYNAMO_REPRO_LEVEL`) are for."""
