"""What a tensor promises besides its values: every clause has a breach that must be seen, and a twin that is none."""

import pytest
import torch
import transformers
from torch import nn

import torchdelta as td
from torchdelta import UsageError, Verdict
from torchdelta.compare.contract import Terms
from torchdelta.compare.judge import Judge
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policy import Tolerance

EQUIVALENT, DIVERGED, INCONCLUSIVE = Verdict.EQUIVALENT, Verdict.DIVERGED, Verdict.INCONCLUSIVE

VALUES = torch.arange(6.0).reshape(2, 3)


def broken_by(reference, candidate, **options):
    """Return the verdict, and which clauses were broken and whether each is excused."""
    report = td.compare(reference, candidate, **options)
    clauses = {breach.clause: breach.excused for seen in report.comparisons for breach in seen.contract}
    return report.verdict, clauses


def judged(reference, candidate, *, aliases=({}, {}), **terms):
    judge = Judge(policy=Tolerance(), terms=Terms(**terms))
    comparisons, _ = judge.compare(leaves_of(reference), leaves_of(candidate), None, aliases)
    return comparisons


class TestAContractThatIsKept:
    @pytest.mark.parametrize(
        "candidate",
        [
            VALUES.clone(),
            nn.Parameter(VALUES, requires_grad=False),
            VALUES.clone()[None][0],
            VALUES.to_sparse().to_dense(),
        ],
    )
    def test_names_nothing(self, candidate):
        assert broken_by(VALUES, candidate) == (EQUIVALENT, {})


class TestDtype:
    def test_that_changed_is_a_divergence_though_values_agree(self):
        assert broken_by(VALUES, VALUES.double()) == (DIVERGED, {"dtype": False})

    def test_says_what_it_is_on_each_side(self):
        (seen,) = td.compare(VALUES, VALUES.to(torch.bfloat16)).comparisons

        assert seen.reason == "dtype: float32 in the reference, bfloat16 in the candidate"

    def test_can_be_ignored_and_stays_on_the_report(self):
        assert broken_by(VALUES, VALUES.double(), ignore=["dtype"]) == (EQUIVALENT, {"dtype": True})

    def test_that_is_ignored_hides_no_other_values(self):
        assert broken_by(VALUES, VALUES.double() + 1, ignore=["dtype"])[0] is DIVERGED

    def test_of_integers_is_compared_by_value_when_ignored(self):
        integers = VALUES.long()

        assert broken_by(integers, VALUES, ignore=["dtype"]) == (EQUIVALENT, {"dtype": True})
        assert broken_by(integers, VALUES + 0.25, ignore=["dtype"])[0] is DIVERGED
        assert broken_by(integers, integers.to(torch.uint16), ignore=["dtype"])[0] is EQUIVALENT

    @pytest.mark.parametrize("ignore", [(), ("dtype",)])
    def test_of_real_values_in_place_of_complex_ones_ends_in_a_verdict(self, ignore):
        values = torch.complex(VALUES, VALUES + 1)

        def program(x):
            return x * 2.5

        def real(x):
            return (x * 2.5).real

        def complex_of_real(x):
            return torch.complex(x * 2.5, x)

        expected = INCONCLUSIVE if ignore else DIVERGED
        assert td.check(program, (values,), candidate=real, ignore=ignore).verdict is expected
        assert td.check(program, (VALUES,), candidate=complex_of_real, ignore=ignore).verdict is expected
        assert td.check(program, (values,), candidate=lambda x: x / 0.4, ignore=ignore).verdict is EQUIVALENT

    def test_of_a_truth_that_is_complex_where_the_values_are_real_leaves_no_truth(self):
        truth = torch.complex(VALUES, VALUES).to(torch.complex128)

        assert td.compare(VALUES, VALUES + 1, truth=truth).verdict is INCONCLUSIVE
        assert td.compare(VALUES, VALUES + 1, truth=truth.real).verdict is DIVERGED

    def test_may_be_lowered_by_a_transform_that_does_so_on_purpose(self):
        (seen,) = judged(VALUES, VALUES.bfloat16(), lowered_to=torch.bfloat16)

        assert seen.verdict is EQUIVALENT
        assert [(breach.clause, breach.excused) for breach in seen.contract] == [("dtype", True)]

    @pytest.mark.parametrize(
        ("reference", "candidate"),
        [(VALUES, VALUES.half()), (VALUES.long(), VALUES.bfloat16()), (VALUES > 1, (VALUES > 1).bfloat16())],
        ids=["to another one", "of integers", "of booleans"],
    )
    def test_may_not_be_lowered(self, reference, candidate):
        (seen,) = judged(reference, candidate, lowered_to=torch.bfloat16)

        assert seen.verdict is DIVERGED

    def test_of_a_cache_is_lowered_with_its_tensors(self):
        def cache(dtype):
            filled = transformers.DynamicCache()
            filled.update(torch.ones(1, 1, 2, 2, dtype=dtype), torch.ones(1, 1, 2, 2, dtype=dtype), 0)
            return filled

        lowered = judged(cache(torch.float32), cache(torch.bfloat16), lowered_to=torch.bfloat16)
        held = judged(cache(torch.float32), cache(torch.bfloat16))

        assert {seen.verdict for seen in lowered} == {EQUIVALENT}
        assert {seen.path for seen in held if seen.verdict is DIVERGED} == {
            f"value.layers[0].{part}" for part in ("keys", "values", "dtype")
        }

    def test_of_a_sparse_tensor_is_a_clause_and_no_structure(self):
        sparse = torch.eye(3).to_sparse()

        assert broken_by(sparse, sparse.double()) == (DIVERGED, {"dtype": False})
        assert broken_by(sparse, sparse.double(), ignore=["dtype"]) == (EQUIVALENT, {"dtype": True})


class TestShape:
    @pytest.mark.parametrize(
        ("reference", "candidate"),
        [
            (torch.ones(3), torch.ones(1)),
            (torch.ones(3), torch.ones(())),
            (torch.ones(3), torch.ones(1, 3)),
            (torch.ones(2, 3), torch.ones(3, 2)),
            (torch.ones(3), torch.ones(0)),
            (torch.ones(0, 3), torch.ones(0, 4)),
        ],
        ids=lambda tensor: str(list(tensor.shape)),
    )
    def test_is_never_broadcast(self, reference, candidate):
        assert broken_by(reference, candidate) == (DIVERGED, {"shape": False})
        assert broken_by(candidate, reference) == (DIVERGED, {"shape": False})

    def test_cannot_be_ignored(self):
        with pytest.raises(UsageError, match="unknown clause to ignore 'shape': it is one of aliasing, "):
            td.compare(torch.ones(3), torch.ones(1), ignore=["shape"])

    def test_and_dtype_are_both_named(self):
        (seen,) = td.compare(torch.ones(3), torch.ones(1, dtype=torch.int32)).comparisons

        assert seen.reason == (
            "dtype: float32 in the reference, int32 in the candidate; "
            "shape: (3,) in the reference, (1,) in the candidate"
        )


class TestDevice:
    def test_that_changed_is_a_divergence(self):
        assert broken_by(VALUES, VALUES.to("meta")) == (DIVERGED, {"device": False})

    def test_that_is_ignored_leaves_no_values_to_compare(self):
        assert broken_by(VALUES, VALUES.to("meta"), ignore=["device"]) == (INCONCLUSIVE, {"device": True})

    def test_itself_as_a_value_follows_the_same_clause(self):
        sides = [VALUES, torch.device("cpu")], [VALUES, torch.device("meta")]

        assert broken_by(*sides) == (DIVERGED, {"device": False})
        assert broken_by(*sides, ignore=["device"]) == (EQUIVALENT, {"device": True})


class TestRequiresGrad:
    def test_that_was_lost_is_a_divergence(self):
        trained = VALUES.clone().requires_grad_()

        assert broken_by(trained, VALUES) == (DIVERGED, {"requires_grad": False})
        assert broken_by(VALUES, trained) == (DIVERGED, {"requires_grad": False})
        assert broken_by(trained, trained * 1) == (EQUIVALENT, {})

    def test_can_be_ignored_and_stays_on_the_report(self):
        trained = VALUES.clone().requires_grad_()

        assert broken_by(trained, VALUES, ignore=["requires_grad"]) == (EQUIVALENT, {"requires_grad": True})

    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
    @pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
    def test_of_a_sparse_tensor_counts_too(self, layout):
        sparse = torch.eye(3).to_sparse(layout=layout)

        assert broken_by(sparse.clone().requires_grad_(), sparse)[1]["requires_grad"] is False


class TestStride:
    def test_is_reported_and_does_not_decide(self):
        assert broken_by(VALUES, VALUES.t().contiguous().t()) == (EQUIVALENT, {"stride": True})

    def test_decides_when_held_strictly(self):
        assert broken_by(VALUES, VALUES.t().contiguous().t(), strict={"stride"}) == (DIVERGED, {"stride": False})
        assert broken_by(VALUES, VALUES.clone(), strict={"stride"}) == (EQUIVALENT, {})

    def test_of_an_expanded_tensor_differs_from_that_of_a_copy(self):
        expanded = torch.ones(1, 3).expand(2, 3)

        assert broken_by(expanded, expanded.clone(), strict={"stride"}) == (DIVERGED, {"stride": False})

    @pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 1, 3), (0, 3), ()])
    def test_that_is_never_stepped_along_does_not_count(self, shape):
        odd = torch.empty_strided(shape, tuple(7 if size == 1 else step for size, step in _steps(shape))).fill_(1.0)

        assert broken_by(torch.ones(shape), odd, strict={"stride"}) == (EQUIVALENT, {})

    def test_hides_no_other_values(self):
        assert broken_by(VALUES, (VALUES + 1).t().contiguous().t())[0] is DIVERGED

    def test_is_the_only_clause_to_hold_strictly(self):
        with pytest.raises(UsageError, match="unknown clause to hold strictly 'dtype': it is one of casts, stride"):
            td.compare(VALUES, VALUES, strict=["dtype"])


def _steps(shape):
    return list(zip(shape, torch.ones(shape).stride(), strict=True))


class TestAliasing:
    OF_INPUT = ({"value": frozenset({"args[0]"})}, {"value": frozenset()})

    def test_that_was_lost_is_a_divergence(self):
        (seen,) = judged(VALUES, VALUES.clone(), aliases=self.OF_INPUT)

        assert seen.verdict is DIVERGED
        assert seen.reason == (
            "aliasing: shares memory with args[0] in the reference, has memory of its own in the candidate"
        )

    def test_that_appeared_is_a_divergence(self):
        (seen,) = judged(VALUES, VALUES.clone(), aliases=self.OF_INPUT[::-1])

        assert seen.verdict is DIVERGED

    def test_of_one_and_the_same_tensor_counts_too(self):
        (seen,) = judged(VALUES, VALUES, aliases=self.OF_INPUT)

        assert seen.verdict is DIVERGED

    @pytest.mark.parametrize("partners", [{"value": frozenset({"args[0]"})}, {}])
    def test_that_is_the_same_is_none(self, partners):
        (seen,) = judged(VALUES, VALUES.clone(), aliases=(partners, partners or {"value": frozenset()}))

        assert seen.verdict is EQUIVALENT
        assert seen.contract == ()

    def test_can_be_ignored_and_stays_on_the_report(self):
        (seen,) = judged(VALUES, VALUES.clone(), aliases=self.OF_INPUT, ignore=frozenset({"aliasing"}))

        assert seen.verdict is EQUIVALENT
        assert [(breach.clause, breach.excused) for breach in seen.contract] == [("aliasing", True)]


class TestIntegers:
    def test_can_be_ignored_and_stay_on_the_report(self):
        verdict, clauses = broken_by(torch.tensor([5000]), torch.tensor([5004]), ignore=["integers"])

        assert (verdict, clauses) == (EQUIVALENT, {"integers": True})

    def test_that_agree_are_not_on_the_report(self):
        assert broken_by(torch.tensor([5000]), torch.tensor([5000]), ignore=["integers"]) == (EQUIVALENT, {})

    def test_that_are_ignored_hide_no_shape(self):
        assert broken_by(torch.tensor([5]), torch.tensor([5, 5]), ignore=["integers"])[0] is DIVERGED

    def test_that_are_ignored_hide_no_floats(self):
        sides = [torch.tensor([1]), torch.tensor([1.0])], [torch.tensor([2]), torch.tensor([2.0])]

        assert broken_by(*sides, ignore=["integers"])[0] is DIVERGED


def test_what_is_ignored_is_part_of_the_case():
    report = td.compare(VALUES, VALUES, ignore=["dtype", "stride"], strict=["stride"])

    assert (report.case.ignore, report.case.strict) == (("dtype", "stride"), ("stride",))
