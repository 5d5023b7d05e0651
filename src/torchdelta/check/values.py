"""Two values compared without running anything, for `torchdelta.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdelta._torch.process import versions
from torchdelta.check import steadiness
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policy_parser import parse
from torchdelta.records.case import VALUES, Case, words_of
from torchdelta.records.report import Questions, Report, Stage


def compare_values(
    reference: Any,
    candidate: Any,
    *,
    truth: Any = None,
    policy: str | None = None,
    ignore: str | Sequence[str] = (),
    strict: str | Sequence[str] = (),
) -> Report:
    """Return the report on two values of any structure; `torchdelta.compare` explains the parameters.

    Without a policy it is `noise` if `truth` is not None, or else `close`, with a note. Two empty containers of one
    kind are inconclusive, and so is a leaf that passes only because its noise is as large as its values. UsageError if
    the policy or a clause is unknown.
    """
    has_truth = truth is not None
    policy_name = policy if policy is not None else "noise" if has_truth else "close"
    case = Case(
        program="two values",
        transform="none",
        stages=(VALUES,),
        policy=policy_name,
        ignore=words_of(ignore),
        strict=words_of(strict),
    )
    terms = Terms(ignore=frozenset(words_of(ignore)), strict=frozenset(words_of(strict)))
    judge = Judge(policy=parse(policy_name), terms=terms)
    comparisons, unmatched = judge.compare(
        leaves_of(reference), leaves_of(candidate), leaves_of(truth) if has_truth else None
    )
    stage = Stage.of(VALUES, tuple(comparisons), "" if comparisons else "nothing was compared: both are empty")
    stage = steadiness.doubt_coarse(stage)
    unasked = "not asked: nothing was run"
    if not has_truth:
        questions = Questions(native="not asked: no truth was given", semantic=unasked)
    elif not judge.policy.needs_truth:
        questions = Questions(native=f"not asked: the policy {policy_name} needs no truth", semantic=unasked)
    else:
        questions = Questions(semantic=unasked)
    return Report(
        verdict=stage.verdict,
        environment=versions.environment(),
        case=case,
        stages=(stage,),
        questions=questions,
        unmatched=tuple(unmatched),
        notes=() if policy is not None or has_truth else ("no truth was given: judged by torch.testing's tolerances",),
    )
