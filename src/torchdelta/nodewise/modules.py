"""Modules: find the module of another implementation that goes wrong, without any graph.

The reference runs once with hooks on its modules. Whenever a module returns, the matching module of the candidate is
called on the same inputs and judged at once, so that no activation is kept. The culprit is the innermost module that
diverges by itself while the modules inside of it do not.

    located = locate_modules(reference_side, candidate_side)
    located.culprits[0].reference.module_path       # "blocks.2.norm"

Start with `locate_modules`. `module_calls` records and matches the calls, `module_judge` judges one pair.
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
    state_fingerprints,
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
"""The memory for outputs of the candidate's modules in its own run, which are kept to show inherited errors."""
_FAILURES = (Verdict.DIVERGED, Verdict.CRASHED)
_OTHER_INPUTS = "the candidate calls its module with other tensors than the reference does, so it was not judged"


@dataclass(frozen=True, kw_only=True)
class ModuleLocation:
    """The judgement of each matched pair of module calls, and the culprits among them."""

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
    """Judge every matched call of a module on the reference's inputs; return all judgements and the culprits.

    A culprit is a module that fails by itself while those inside of it do not. With `gradients` the gradients of each
    module are judged too. `limit_bytes` is the memory for outputs of the candidate's own run. Raise ProgramError if the
    reference fails, and UsageError for an unknown policy; a candidate that fails is judged as far as it came.
    """
    judging = parse(policy) if isinstance(policy, str) else policy
    with runtime.preserved():
        return _ModuleSearch(
            reference=reference,
            candidate=candidate,
            seed=seed,
            judge=ModuleJudge(policy=judging, runner=Runner(seed=seed, gradients=gradients)),
            limit_bytes=limit_bytes,
        ).run()


@dataclass(kw_only=True)
class _ModuleSearch:
    """One comparison of two sides: survey both, match their calls, judge each pair."""

    reference: Side
    candidate: Side
    seed: int
    judge: ModuleJudge
    limit_bytes: int
    notes: list[str] = field(default_factory=list)
    judged_calls: list[tuple[ModuleMatch, Row]] = field(default_factory=list)

    def run(self) -> ModuleLocation:
        """Survey both sides, match their calls, judge each pair, and return the rows and culprits.

        The result also has the calls without a match, the notes, and the coverage, which counts calls of both sides.
        """
        ours, theirs, failure = self._survey()
        modules = {**_modules_by_id(self.reference), **_modules_by_id(self.candidate)}
        matches = ModuleMatcher(reference=ours, candidate=theirs, state=state_fingerprints(modules)).run()
        own_outputs = self._record_own_outputs(matches) if matches else {}
        self._judge(matches, own_outputs, failure)
        hows = Counter(match.how for match in matches)
        self.judged_calls.sort(key=lambda each: each[0].reference.order)
        return ModuleLocation(
            rows=tuple(row for _, row in self.judged_calls),
            culprits=tuple(self._culprits()),
            unmatched_reference=_unmatched_records(ours, [match.reference for match in matches]),
            unmatched_candidate=_unmatched_records(theirs, [match.candidate for match in matches]),
            coverage=Coverage(
                matched=2 * len(matches),
                total=len(ours) + len(theirs),
                how={how: 2 * count for how, count in hows.items()},
            ),
            notes=tuple(dict.fromkeys([*self.notes, *self.judge.notes])),
        )

    def _survey(self) -> tuple[list[ModuleCall], list[ModuleCall], Exception | None]:
        """Run both sides and return their module calls, and the exception that the candidate raised, if any.

        Raise ProgramError if the reference raises. Notes are added if the candidate raises, if a side calls no module,
        and if hooks change the reference's outputs.
        """
        of_reference, of_candidate = modules_of(self.reference), modules_of(self.candidate)
        # a module with the same path and class on both sides is matched by these, so its values are not needed
        matched_paths = {
            path
            for path, module in of_reference.items()
            if path in of_candidate and type(of_candidate[path]).__name__ == type(module).__name__
        }
        ours, outputs, reference_failure = survey(
            self.reference, self.seed, needs_values=lambda path: path not in matched_paths
        )
        if reference_failure is not None:
            raise ProgramError(
                f"the reference fails when run eagerly: {type(reference_failure).__name__}: {reference_failure}. "
                "Mend it first"
            ) from reference_failure
        theirs, _, candidate_failure = survey(
            self.candidate, self.seed, needs_values=lambda path: path not in matched_paths
        )
        if candidate_failure is not None:
            self.notes.append(brief(f"the candidate raised {type(candidate_failure).__name__}: {candidate_failure}"))
            self.notes.append("modules that the candidate had not called before it raised were not judged")
        self._note_effect_of_hooks(outputs)
        for side, calls in (("reference", ours), ("candidate", theirs)):
            if not calls:
                self.notes.append(f"the {side} calls no module, so there is nothing to look at inside of it")
        return ours, theirs, candidate_failure

    def _note_effect_of_hooks(self, hooked: Any) -> None:
        """Run the reference without hooks, and add a note if its outputs differ from those in `hooked`, with hooks.

        Torch has fast paths that hooks switch off.
        """
        with restored(holder for _, holder in state_holders(self.reference.call)):
            args, kwargs = copy_together((self.reference.args, self.reference.kwargs), name="the inputs")
            runtime.seed_everything(self.seed)
            unhooked = self.reference.call(*args, **kwargs)
        comparisons, _ = Judge(policy=Bitwise()).compare(leaves_of(unhooked, "outputs"), leaves_of(hooked, "outputs"))
        if worst_of(each.verdict for each in comparisons) is Verdict.DIVERGED:
            self.notes.append(
                "the reference computes other bits with hooks on its modules than without: it is not deterministic, or "
                "it has a fast path that hooks switch off"
            )

    def _record_own_outputs(self, matches: Sequence[ModuleMatch]) -> dict[int, Leaves]:
        """Run the candidate on its own values; return copies of its matched calls' outputs, by the `order` of the call.

        Outputs that do not fit into `limit_bytes` with those kept before are left out; smaller ones after them may fit.
        If the candidate raises, the exception is noted and the outputs so far are returned. A note counts the matched
        calls that have no outputs here although they returned before, and says that they do not fit.
        """
        matched_orders = {match.candidate.order for match in matches}
        own_outputs: dict[int, Leaves] = {}
        total_bytes = 0

        def on_return(call: ModuleCall, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
            nonlocal total_bytes
            leaves = leaves_of(output, "outputs")
            size = sum(leaf.numel() * leaf.itemsize for leaf in leaves.values() if isinstance(leaf, torch.Tensor))
            if call.order in matched_orders and total_bytes + size <= self.limit_bytes:
                total_bytes += size
                own_outputs[call.order] = {path: _snapshot(leaf) for path, leaf in leaves.items()}

        try:
            ModuleSurvey(side=self.candidate, on_enter=lambda *_: None, on_return=on_return).run(self.seed)
        except Exception as error:
            self.notes.append(brief(f"the candidate raised {type(error).__name__}: {error}"))
        missing = sum(
            match.candidate.signature is not None and match.candidate.order not in own_outputs for match in matches
        )
        if missing:
            self.notes.append(
                f"the inherited error of {missing} calls is not shown: the candidate's outputs there do not fit in "
                f"{self.limit_bytes} bytes"
            )
        return own_outputs

    def _judge(self, matches: Sequence[ModuleMatch], own_outputs: dict[int, Leaves], failure: Exception | None) -> None:
        """Run the reference, and judge the candidate's module at each matched call; the rows go to `judged_calls`.

        A pair is not judged, and its row has a reason, if the inputs cannot be copied, or if the candidate calls its
        module with tensors of other shapes, or with integers where the reference has floats or the other way round.
        A call in which a culprit is known already (`_has_culprit_in`) gets a brief judgement. `own_outputs` has the
        candidate's outputs by the `order` of its calls, and loses those that get a row. `failure` is the exception that
        the candidate raised in its own run, or None.
        """
        partners = {match.reference.order: match for match in matches}
        inputs_by_call: dict[int, tuple[ModuleInputs, dict[str, int]] | str] = {}

        def on_enter(call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if call.order not in partners:
                return
            try:
                inputs = take_inputs(args, kwargs, partners[call.order].roots)
                inputs_by_call[call.order] = inputs, versions_of(args, kwargs)
            except ProgramError as error:
                inputs_by_call[call.order] = brief(str(error))

        def on_return(call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if call.order not in partners:
                return
            match, recorded_inputs = partners[call.order], inputs_by_call.pop(call.order)
            outputs = leaves_of(output, "outputs")
            inherited = _inherited_comparisons(self.judge.policy, outputs, own_outputs.pop(match.candidate.order, None))
            if isinstance(recorded_inputs, str):
                judgement = ModuleJudgement(reason=recorded_inputs)
            elif match.reference.interface != match.candidate.interface:
                judgement = ModuleJudgement(reason=_OTHER_INPUTS)
            else:
                inputs, versions = recorded_inputs
                result = left_by(output, (args, kwargs), versions)
                with module_survey.unhooked(), runtime.preserved():
                    judgement = self.judge.judge(
                        call.module, match.candidate.module, inputs, result, is_brief=self._has_culprit_in(call)
                    )
            self.judged_calls.append((match, _table_row(match, judgement, inherited, failure)))

        module_survey = ModuleSurvey(side=self.reference, on_enter=on_enter, on_return=on_return)
        module_survey.run(self.seed)

    def _has_culprit_in(self, call: ModuleCall) -> bool:
        """Tell whether two modules inside of a call failed, one within the other, so that a brief judgement will do."""
        failures = [
            match.reference
            for match, row in self.judged_calls
            if _own_verdict(row) in _FAILURES and match.reference.is_within(call)
        ]
        return any(inner.is_within(outer) for inner in failures for outer in failures)

    def _culprits(self) -> list[Row]:
        """Return the rows of the innermost modules that failed, without those inside of an equivalent module.

        Failed modules diverged or crashed by themselves. For each innermost one in an equivalent module a note is
        added.
        """
        failures = [(match, row) for match, row in self.judged_calls if _own_verdict(row) in _FAILURES]
        innermost = [
            (match, row)
            for match, row in failures
            if not any(other.reference.is_within(match.reference) for other, _ in failures)
        ]
        culprits = []
        for match, row in innermost:
            outer = self._equivalent_around(match.reference)
            if outer is None:
                culprits.append(row)
            else:
                self.notes.append(
                    f"{row.reference.name} differs by itself, but {outer.reference.name} around it computes the same: "
                    "the work is divided in another way there"
                )
        return culprits

    def _equivalent_around(self, call: ModuleCall) -> Row | None:
        """Return the row of the innermost module around a call that was judged and is equivalent by itself, or None."""
        around = [
            (match.reference.order, row)
            for match, row in self.judged_calls
            if call.is_within(match.reference) and not row.reason and _own_verdict(row) is Verdict.EQUIVALENT
        ]
        return max(around, key=lambda each: each[0])[1] if around else None


def _table_row(
    match: ModuleMatch, judgement: ModuleJudgement, inherited: tuple[Comparison, ...], failure: Exception | None
) -> Row:
    """Return the row of one matched pair; a module that raises the same exception as the candidate itself has crashed.

    `failure` is the exception of the candidate's own run, or None. A crashed module has one local comparison, which is
    CRASHED. A module that raises something else has a reason, and no local comparisons.
    """
    local = judgement.local
    # a module that raises although the candidate as a whole does not is only called in another way than usual
    if failure is not None and judgement.reason == raised(failure):
        local = (Comparison(path="outputs", verdict=Verdict.CRASHED, reason=judgement.reason, leaf="object"),)
    return Row(
        reference=match.reference.record,
        candidate=match.candidate.record,
        how=match.how,
        local=local,
        local_gradients=judgement.gradients,
        inherited=inherited,
        reason=judgement.reason,
    )


def _own_verdict(row: Row) -> Verdict:
    """Return the worst verdict of a module by itself, over values and gradients; INCONCLUSIVE if it was not judged.

    Outputs that only one side returns, such as attention weights, do not count, unless there are no other comparisons
    of values.
    """
    values = [comparison for comparison in row.local if comparison.leaf != "structure"]
    return worst_of(comparison.verdict for comparison in (*(values or row.local), *row.local_gradients))


def _inherited_comparisons(policy: Policy, reference: Leaves, candidate: Leaves | None) -> tuple[Comparison, ...]:
    """Return the comparisons of a call's outputs in both sides' own runs; none if the candidate's were not kept.

    A policy that needs a truth is replaced by fixed tolerances.
    """
    if candidate is None:
        return ()
    # there is no truth of a whole run here; fixed tolerances are enough, because inherited errors are never blamed
    fixed_policy = Tolerance() if policy.needs_truth else policy
    judge = Judge(policy=fixed_policy, terms=Terms(ignore=frozenset({"requires_grad"})))
    return tuple(judge.compare(reference, candidate)[0])


def _snapshot(leaf: Any) -> Any:
    """Return a detached copy of a tensor that has values; any other leaf is returned itself."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) and tensors.has_values(leaf) else leaf


def _modules_by_id(side: Side) -> dict[str, torch.nn.Module]:
    """Return the modules that a side reaches, by their ids as texts."""
    return {f"{id(module)}": module for module in modules_of(side).values()}


def _unmatched_records(calls: Sequence[ModuleCall], matched: Sequence[ModuleCall]) -> tuple[NodeRecord, ...]:
    """Return the records of those calls that are not in `matched`, told by their `order`."""
    matched_orders = {call.order for call in matched}
    return tuple(call.record for call in calls if call.order not in matched_orders)
