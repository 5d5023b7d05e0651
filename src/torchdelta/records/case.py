"""The question of a caller: `CheckOptions` as it was asked, `Case` as a report has it, `SearchLimits` of a search.

The one idea: a face (Python, the command line) reads its arguments once, into `CheckOptions`, and every function below
takes that record. A record may hold live objects, such as a transform that is a function. `case_of` turns it into the
`Case`, which has names only, so that it fits into a report and can be asked again:

    options = CheckOptions(transform="inductor", stages=("forward",))
    case_of("model.py:build", options)                # Case(program="model.py:build", transform="inductor", …)

Where both records have a field, its default stands in `Case`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torchdelta.errors import UsageError
from torchdelta.records.comparison import Scalar

STAGES = ("forward", "gradients", "steps")
DYNAMO, AOT = LEVELS = ("dynamo", "aot")
"""Whose graphs a search makes smaller: those that dynamo captures, or those that AOTAutograd makes of them."""
DEFAULT_STAGES = ("forward", "gradients")
VALUES = "values"
"""The only stage of a comparison of two values, for which nothing is run."""
IGNORABLE = ("aliasing", "device", "dtype", "integers", "order", "requires_grad", "stride")
STRICT = ("casts", "stride")
"""Clauses that are reported and do not decide, unless a case holds them strictly."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question in names, complete enough to be asked again."""

    program: str
    transform: str
    options: dict[str, Scalar] = field(default_factory=dict)
    """Options of the transform."""
    stages: tuple[str, ...] = DEFAULT_STAGES
    policy: str = "noise"
    seed: int = 0
    ignore: tuple[str, ...] = ()
    """Clauses of the contract that do not decide."""
    strict: tuple[str, ...] = ()
    """Clauses that decide although by default they are only reported."""
    iterations: int = 1
    steps: int = 3
    optimizer: str = "adamw"
    loss: str | None = None
    deterministic: bool = False
    anomaly: bool = False
    semantic: bool = True
    """Whether to ask the semantic question too, which takes a second application of the transform."""
    thorough: bool = False
    """Whether to ask the local question too: each node by itself."""

    def __post_init__(self) -> None:
        """Sort the stages into the order in which they run, each once; raise UsageError if a field makes no sense.

        Unknown stages and clauses, no stage, the stage `values` beside another one, and numbers out of range are
        refused. Names of the program, transform, policy, optimizer and loss are not checked.
        """
        known_stages = STAGES if self.stages != (VALUES,) else (VALUES,)
        _require_known("stage", self.stages, known_stages)
        _require_known("clause to ignore", self.ignore, IGNORABLE)
        _require_known("clause to hold strictly", self.strict, STRICT)
        if not self.stages:
            raise UsageError(f"no stage was asked for: name at least one of {', '.join(STAGES)}")
        # a stage builds on the one before it, so the order in which a caller names them means nothing
        object.__setattr__(self, "stages", tuple(stage for stage in known_stages if stage in self.stages))
        for name in ("iterations", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        require_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Everything that `torchdelta.check` takes besides the program, its arguments and `progress`.

    The codec can encode the record if `is_named` is true; another process then decodes it and asks the same.
    """

    transform: Any = None
    """A name, a `Transform` or a pass; None asks the recording of the program."""
    candidate: Any = None
    """Another implementation, in place of a transform."""
    options: dict[str, Scalar] = field(default_factory=dict)
    stages: tuple[str, ...] | None = None
    """None compares the default stages, and leaves out those that do not apply to the program."""
    policy: str | None = None
    """None is the policy of the program's recording, or else the default one."""
    ignore: tuple[str, ...] = Case.ignore
    strict: tuple[str, ...] = Case.strict
    seed: int = Case.seed
    iterations: int = Case.iterations
    steps: int = Case.steps
    optimizer: Any = Case.optimizer
    """A name, or a factory of an optimizer."""
    loss: Any = Case.loss
    """A name, or a function of the outputs."""
    deterministic: bool = Case.deterministic
    anomaly: bool = Case.anomaly
    semantic: bool = Case.semantic
    thorough: bool = Case.thorough

    @classmethod
    def read(cls, **words: Any) -> CheckOptions:
        """Return the record of the keywords of `torchdelta.check`, with lists of names as tuples.

        `stages`, `ignore` and `strict` may each be a sequence of names, or one text with commas between them. `options`
        is copied, and None becomes an empty dict. TypeError if a keyword is unknown, UsageError if both a transform and
        a candidate are named.
        """
        for name in ("stages", "ignore", "strict"):
            if words.get(name) is not None:
                words[name] = words_of(words[name])
        words["options"] = dict(words.get("options") or {})
        return cls(**words)

    def __post_init__(self) -> None:
        """Raise UsageError if both a transform and a candidate are named."""
        if self.candidate is not None and self.transform is not None:
            raise UsageError("name either a transform or a candidate, not both")

    @property
    def is_named(self) -> bool:
        """Whether transform and optimizer are names, and the loss is a name or None.

        Another process can then build them from this record.
        """
        has_names = isinstance(self.optimizer, str) and (self.loss is None or isinstance(self.loss, str))
        return has_names and isinstance(self.transform, str)


def case_of(program: object, options: CheckOptions) -> Case:
    """Return the case of a program and its options, with names in place of live objects.

    The options must name a policy, and a transform or a candidate, as after `recording.complete`. With a candidate the
    transform is called `candidate`. Stages of None become the default ones. UsageError if `Case` refuses a value.
    """
    shared = {each.name for each in fields(Case)} & {each.name for each in fields(CheckOptions)}
    words = {name: getattr(options, name) for name in shared}
    words |= {
        "transform": "candidate" if options.candidate is not None else name_of(options.transform),
        "stages": options.stages if options.stages is not None else DEFAULT_STAGES,
        "optimizer": name_of(options.optimizer),
        "loss": name_of(options.loss) if options.loss is not None else None,
    }
    return Case(program=name_of(program), **words)


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Which failure a search follows, in which graphs, and at which cost."""

    timeout_s: float = 600.0
    """The deadline of the first query; that of a later one depends on how long others took."""
    memory_bytes: int | None = None
    """The memory that a worker may hold."""
    queries: int | None = None
    seconds: float | None = None
    match: str | None = None
    """A regular expression: of several failures, the search follows the first whose signature it matches."""
    level: str = DYNAMO

    def __post_init__(self) -> None:
        """Raise UsageError if a limit is not a finite number above 0, unless it is None.

        Raise UsageError also if the level is unknown, or if `match` is not a regular expression.
        """
        for name in ("timeout_s", "memory_bytes", "queries", "seconds"):
            require_positive(name, getattr(self, name))
        require_level(self.level)
        try:
            re.compile(self.match or "")
        except re.error as error:
            raise UsageError(f"match {self.match!r} is not a regular expression: {error}") from error

    def is_meant(self, signature: object) -> bool:
        """Tell whether `match` is found in the text of a failure's signature; True if `match` is None."""
        return self.match is None or re.search(self.match, str(signature)) is not None


def name_of(thing: Any) -> str:
    """Return the name of a program, transform, optimizer or loss: itself if it is a text.

    Otherwise it is the `__qualname__` of the function or class, or that of the object's class.
    """
    if isinstance(thing, str):
        return thing
    return getattr(thing, "__qualname__", None) or type(thing).__qualname__


def words_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names in a sequence, or in a text that has them between commas.

    In a text, spaces around names and empty names are dropped. A sequence becomes a tuple and is not changed otherwise.
    """
    return tuple(name.strip() for name in names.split(",") if name.strip()) if isinstance(names, str) else tuple(names)


def _require_known(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise UsageError if one of the names is not among the known ones; `what` says in the message what they are."""
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}: it is one of {', '.join(known)}")


def require_positive(name: str, value: float | None) -> None:
    """Raise UsageError if a limit is neither a finite number above 0 nor None; `name` stands in the message."""
    if value is not None and not 0 < value < math.inf:  # False for NaN
        raise UsageError(f"{name} is a number above 0, not {value:g}")


def require_seed(seed: object) -> None:
    """Raise UsageError if a seed is not a whole number that torch takes: from 0 to 2**63 - 1."""
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"seed must be from 0 to 2**63 - 1, not {seed!r}")


def require_level(level: str) -> None:
    """Raise UsageError if the level is not one of `LEVELS`."""
    if level not in LEVELS:
        raise UsageError(f"there is no level {level!r} of graphs: it is one of {', '.join(LEVELS)}")
