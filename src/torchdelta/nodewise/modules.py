"""Where another implementation goes wrong: each module of it, fed what the reference's module was given.

The reference runs once with hooks on its modules. Whenever one returns, the candidate's module that it is matched
with is called on the same inputs and judged at once, so that no activation is kept. The culprit is the innermost
module that diverges by itself while what it is made of does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdelta._torch import tensors
from torchdelta._torch.process import runtime
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import Leaves, brief, leaves_of
from torchdelta.compare.policy import Bitwise, Policy, Tolerance
from torchdelta.compare.policy_parser import parse
from torchdelta.errors import ProgramError
from torchdelta.nodewise.module_calls import (
    ModuleCall,
    ModuleMatch,
    ModuleMatcher,
    ModuleSurvey,
    modules_of,
    state_prints,
    survey,
)
from torchdelta.nodewise.module_judge import ModuleJudge, ModuleJudgement, raised
from torchdelta.nodewise.module_runs import ModuleInputs, Runner, left_by, take_inputs, versions_of
from torchdelta.program.copies import copy_together
from torchdelta.program.restore import restored
from torchdelta.program.sides import Side, state_holders
from torchdelta.records.comparison import Comparison
from torchdelta.records.location import NodeRecord, Row
from torchdelta.records.report import Coverage
from torchdelta.records.verdict import Verdict, worst_of

LIMIT_BYTES = 1 << 30
"""How much of what the candidate's modules return in its own run is kept, to show inherited errors."""
_GUILTY = (Verdict.DIVERGED, Verdict.CRASHED)
_OTHER_INTERFACE = "the candidate gives its module other tensors than the reference does, so it was not fed those"


@dataclass(frozen=True, kw_only=True)
class ModuleLocation:
    """What each pair of modules does by itself."""

    rows: tuple[Row, ...]
    """Every matched pair of calls, in the order in which the reference calls them."""
    culprits: tuple[Row, ...]
    """The first is the one that the reference calls first."""
    unmatched_reference: tuple[NodeRecord, ...]
    unmatched_candidate: tuple[NodeRecord, ...]
    coverage: Coverage
    notes: tuple[str, ...] = ()


def locate_modules(
    reference: Side,
    candidate: Side,
    *,
    seed: int = 0,
    gradients: bool = True,
    policy: str | Policy = "noise",
    limit_bytes: int = LIMIT_BYTES,
) -> ModuleLocation:
    """Find the first module of the candidate that diverges given the reference's inputs.

    Both sides are run as they are, and their state, inputs and hooks are as before afterwards.
    """
    judging = parse(policy) if isinstance(policy, str) else policy
    with runtime.preserved():
        return _Search(
            reference=reference,
            candidate=candidate,
            seed=seed,
            judge=ModuleJudge(policy=judging, runner=Runner(seed=seed, gradients=gradients)),
            limit_bytes=limit_bytes,
        ).run()


@dataclass(kw_only=True)
class _Search:
    reference: Side
    candidate: Side
    seed: int
    judge: ModuleJudge
    limit_bytes: int
    notes: list[str] = field(default_factory=list)
    found: list[tuple[ModuleMatch, Row]] = field(default_factory=list)

    def run(self) -> ModuleLocation:
        ours, theirs, failure = self._survey()
        modules = {**_by_id(self.reference), **_by_id(self.candidate)}
        matches = ModuleMatcher(reference=ours, candidate=theirs, state=state_prints(modules)).run()
        kept = self._own_outputs(matches) if matches else {}
        self._judge(matches, kept, failure)
        hows = Counter(match.how for match in matches)
        self.found.sort(key=lambda each: each[0].reference.order)
        return ModuleLocation(
            rows=tuple(row for _, row in self.found),
            culprits=tuple(self._culprits()),
            unmatched_reference=_left_over(ours, [match.reference for match in matches]),
            unmatched_candidate=_left_over(theirs, [match.candidate for match in matches]),
            coverage=Coverage(
                matched=2 * len(matches),
                total=len(ours) + len(theirs),
                how={how: 2 * count for how, count in hows.items()},
            ),
            notes=tuple(dict.fromkeys([*self.notes, *self.judge.notes])),
        )

    def _survey(self) -> tuple[list[ModuleCall], list[ModuleCall], Exception | None]:
        of_reference, of_candidate = modules_of(self.reference), modules_of(self.candidate)
        # what has its path and class on both sides is matched by them, and its values need no look
        plain = {
            path
            for path, module in of_reference.items()
            if path in of_candidate and type(of_candidate[path]).__name__ == type(module).__name__
        }
        ours, outputs, failed = survey(self.reference, self.seed, is_printed=lambda path: path not in plain)
        if failed is not None:
            raise ProgramError(
                f"the reference fails when run eagerly: {type(failed).__name__}: {failed}. Mend it first"
            ) from failed
        theirs, _, failure = survey(self.candidate, self.seed, is_printed=lambda path: path not in plain)
        if failure is not None:
            self.notes.append(brief(f"the candidate raised {type(failure).__name__}: {failure}"))
            self.notes.append("modules that the candidate had not called before it raised were not judged")
        self._note_influence(outputs)
        for side, calls in (("reference", ours), ("candidate", theirs)):
            if not calls:
                self.notes.append(f"the {side} calls no module, so there is nothing to look at inside of it")
        return ours, theirs, failure

    def _note_influence(self, hooked: Any) -> None:
        """Say so where the reference computes something else with hooks than without: torch has such fast paths."""
        with restored(holder for _, holder in state_holders(self.reference.call)):
            args, kwargs = copy_together((self.reference.args, self.reference.kwargs), name="the inputs")
            runtime.seed_everything(self.seed)
            plain = self.reference.call(*args, **kwargs)
        seen, _ = Judge(policy=Bitwise()).compare(leaves_of(plain, "outputs"), leaves_of(hooked, "outputs"))
        if worst_of(each.verdict for each in seen) is Verdict.DIVERGED:
            self.notes.append(
                "the reference computes other bits with hooks on its modules than without: it is not deterministic, or "
                "it has a fast path that hooks switch off"
            )

    def _own_outputs(self, matches: Sequence[ModuleMatch]) -> dict[int, Leaves]:
        """Run the candidate by itself and keep what its matched modules return, by the order of their calls."""
        wanted = {match.candidate.order for match in matches}
        kept: dict[int, Leaves] = {}
        total = 0

        def left(call: ModuleCall, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
            nonlocal total
            leaves = leaves_of(output, "outputs")
            size = sum(leaf.numel() * leaf.itemsize for leaf in leaves.values() if isinstance(leaf, torch.Tensor))
            if call.order in wanted and total + size <= self.limit_bytes:
                total += size
                kept[call.order] = {path: _snapshot(leaf) for path, leaf in leaves.items()}

        try:
            ModuleSurvey(side=self.candidate, entered=lambda *_: None, left=left).run(self.seed)
        except Exception as error:
            self.notes.append(brief(f"the candidate raised {type(error).__name__}: {error}"))
        missing = sum(match.candidate.signature is not None and match.candidate.order not in kept for match in matches)
        if missing:
            self.notes.append(
                f"the inherited error of {missing} calls is not shown: what the candidate returned there does not fit "
                f"in {self.limit_bytes} bytes"
            )
        return kept

    def _judge(self, matches: Sequence[ModuleMatch], kept: dict[int, Leaves], failure: Exception | None) -> None:
        partners = {match.reference.order: match for match in matches}
        given: dict[int, tuple[ModuleInputs, dict[str, int]] | str] = {}

        def entered(call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if call.order not in partners:
                return
            try:
                given[call.order] = take_inputs(args, kwargs, partners[call.order].roots), versions_of(args, kwargs)
            except ProgramError as error:
                given[call.order] = brief(str(error))

        def left(call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if call.order not in partners:
                return
            match, taken = partners[call.order], given.pop(call.order)
            outputs = leaves_of(output, "outputs")
            inherited = _inherited(self.judge.policy, outputs, kept.pop(match.candidate.order, None))
            if isinstance(taken, str):
                verdict = ModuleJudgement(reason=taken)
            elif match.reference.interface != match.candidate.interface:
                verdict = ModuleJudgement(reason=_OTHER_INTERFACE)
            else:
                inputs, versions = taken
                recorded = left_by(output, (args, kwargs), versions)
                with boundaries.unhooked(), runtime.preserved():
                    verdict = self.judge.judge(
                        call.module, match.candidate.module, inputs, recorded, is_brief=self._has_culprit_in(call)
                    )
            self.found.append((match, _row(match, verdict, inherited, failure)))

        boundaries = ModuleSurvey(side=self.reference, entered=entered, left=left)
        boundaries.run(self.seed)

    def _has_culprit_in(self, call: ModuleCall) -> bool:
        """Tell whether a module inside diverged, and one around that did too: what is above need not be told apart."""
        guilty = [
            match.reference for match, row in self.found if _verdict(row) in _GUILTY and match.reference.is_within(call)
        ]
        return any(inner.is_within(outer) for inner in guilty for outer in guilty)

    def _culprits(self) -> list[Row]:
        guilty = [(match, row) for match, row in self.found if _verdict(row) in _GUILTY]
        innermost = [
            (match, row)
            for match, row in guilty
            if not any(other.reference.is_within(match.reference) for other, _ in guilty)
        ]
        named = []
        for match, row in innermost:
            same = self._same_around(match.reference)
            if same is None:
                named.append(row)
            else:
                self.notes.append(
                    f"{row.reference.name} differs by itself, but {same.reference.name} around it computes the same: "
                    "the work is divided in another way there"
                )
        return named

    def _same_around(self, call: ModuleCall) -> Row | None:
        """Return the innermost module around a call that computes the same, if there is one."""
        around = [
            (match.reference.order, row)
            for match, row in self.found
            if call.is_within(match.reference) and not row.reason and _verdict(row) is Verdict.EQUIVALENT
        ]
        return max(around, key=lambda each: each[0])[1] if around else None


def _row(
    match: ModuleMatch, verdict: ModuleJudgement, inherited: tuple[Comparison, ...], failure: Exception | None
) -> Row:
    local = verdict.local
    # a module that raises although the candidate as a whole does not was only fed in another way than it is used to
    if failure is not None and verdict.reason == raised(failure):
        local = (Comparison(path="outputs", verdict=Verdict.CRASHED, reason=verdict.reason, kind="object"),)
    return Row(
        reference=match.reference.record,
        candidate=match.candidate.record,
        how=match.how,
        local=local,
        local_gradients=verdict.gradients,
        inherited=inherited,
        reason=verdict.reason,
    )


def _verdict(row: Row) -> Verdict:
    """Return what a module is blamed for.

    One that returns something more or less than the other, such as weights that nobody asked for, is not blamed as
    long as what both return is the same: if somebody misses it, a module around diverges.
    """
    values = [seen for seen in row.local if seen.kind != "structure"]
    return worst_of(seen.verdict for seen in (*(values or row.local), *row.local_gradients))


def _inherited(policy: Policy, reference: Leaves, candidate: Leaves | None) -> tuple[Comparison, ...]:
    if candidate is None:
        return ()
    # there is no truth of a whole run here: what is inherited is shown, and never blamed
    shown = Tolerance() if policy.needs_truth else policy
    judge = Judge(policy=shown, terms=Terms(ignore=frozenset({"requires_grad"})))
    return tuple(judge.compare(reference, candidate)[0])


def _snapshot(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) and tensors.has_values(leaf) else leaf


def _by_id(side: Side) -> dict[str, torch.nn.Module]:
    return {f"{id(module)}": module for module in modules_of(side).values()}


def _left_over(calls: Sequence[ModuleCall], matched: Sequence[ModuleCall]) -> tuple[NodeRecord, ...]:
    taken = {call.order for call in matched}
    return tuple(call.record for call in calls if call.order not in taken)
