"""Taking values apart and pairing their leaves: whatever differs somewhere inside is found, and nothing is dropped."""

import collections
import collections.abc
import copy
import enum
import functools
import pathlib
import types
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

import torchdelta as td
from torchdelta import Verdict
from torchdelta.compare.leaves import Container, align, leaves_of

EQUIVALENT, DIVERGED, INCONCLUSIVE = Verdict.EQUIVALENT, Verdict.DIVERGED, Verdict.INCONCLUSIVE

ONE, TWO = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])


def verdict_of(reference, candidate, **options):
    return td.compare(reference, candidate, **options).verdict


def paths_of(value):
    return [path for path, leaf in leaves_of(value).items() if not isinstance(leaf, Container)]


class Point(NamedTuple):
    x: torch.Tensor
    y: int


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Outcome:
    loss: torch.Tensor
    name: str = "loss"

    def __post_init__(self):
        self.hidden = self.loss * 2


class Plain:
    def __init__(self, inner):
        self.inner = inner

    def read(self):
        return self.inner


class Slotted:
    __slots__ = ("__secret", "open")

    def __init__(self, inner):
        self.open = 1
        self.__secret = inner


class Fresh(collections.abc.Sequence):
    """Makes its only item when asked, and keeps it nowhere."""

    def __init__(self, depth):
        self.depth = depth

    def __len__(self):
        return 1

    def __getitem__(self, index):
        if index:
            raise IndexError
        return Fresh(self.depth - 1) if self.depth > 1 else ONE


class NamedList(list):
    pass


class NamedDict(dict):
    pass


class Mine(torch.Tensor):
    pass


class Pair(torch.Tensor):
    """A traceable wrapper: two tensors that look like one."""

    @staticmethod
    def __new__(cls, first, second, tag="tag"):
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)

    def __init__(self, first, second, tag="tag"):
        self.first, self.second, self.tag = first, second, tag

    def __tensor_flatten__(self):
        return ["first", "second"], {"tag": self.tag}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Pair(inner["first"], inner["second"], context["tag"])

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        raise NotImplementedError(str(function))


class Opaque(torch.Tensor):
    """A wrapper that does not say what it is made of."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        raise NotImplementedError(str(function))


def sparse(indices, values, size):
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=True)


def cache_of(tensor):
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(tensor.reshape(1, 1, 1, -1), torch.ones(1, 1, 1, 2), layer)
    return cache


def module_of(tensor):
    module = nn.BatchNorm1d(2)
    module.running_mean = tensor
    return module


def array_of(*items, shape=None):
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array if shape is None else array.reshape(shape)


def tagged(tensor, tag):
    mine = tensor.clone().as_subclass(Mine)
    mine.tag = tag
    return mine


def with_attribute(container, attribute):
    container.attribute = attribute
    return container


HOLDERS = {
    "list": lambda inner: [0, inner],
    "tuple": lambda inner: (inner, "text"),
    "dict": lambda inner: {"a": inner, "b": None},
    "dict of tuple keys": lambda inner: {(1, "a"): inner},
    "dict with tensor keys": lambda inner: {torch.ones(2): 1, torch.zeros(2): inner},
    "ordered dict": lambda inner: collections.OrderedDict(a=inner),
    "default dict": lambda inner: collections.defaultdict(int, a=inner),
    "user dict": lambda inner: collections.UserDict(a=inner),
    "mapping proxy": lambda inner: types.MappingProxyType({"a": inner}),
    "user list": lambda inner: collections.UserList([inner]),
    "named tuple": lambda inner: Point(x=inner, y=1),
    "deque": lambda inner: collections.deque([inner]),
    "dataclass": lambda inner: Outcome(inner),
    "object": lambda inner: Plain(inner),
    "object with private slots": lambda inner: Slotted(inner),
    "namespace": lambda inner: types.SimpleNamespace(inner=inner),
    "list with an attribute": lambda inner: with_attribute(NamedList([1]), inner),
    "dict with an attribute": lambda inner: with_attribute(NamedDict(a=1), inner),
    "partial": lambda inner: functools.partial(torch.add, inner, alpha=2),
    "bound method": lambda inner: Plain(inner).read,
    "parameter list": lambda inner: nn.ParameterList([nn.Parameter(inner)]),
    "parameter dict": lambda inner: nn.ParameterDict({"a": nn.Parameter(inner)}),
    "module": module_of,
    "module list": lambda inner: nn.ModuleList([module_of(inner)]),
    "hugging face output": lambda inner: BaseModelOutputWithPast(last_hidden_state=inner),
    "dynamic cache": cache_of,
    "hugging face output with a cache": lambda inner: BaseModelOutputWithPast(past_key_values=cache_of(inner)),
    "distribution": lambda inner: torch.distributions.Normal(inner, 1.0),
    "independent distribution": lambda inner: torch.distributions.Independent(
        torch.distributions.Normal(inner, 1.0), 1
    ),
    "categorical distribution": lambda inner: torch.distributions.Categorical(logits=inner),
    "packed sequence": lambda inner: nn.utils.rnn.pack_sequence([inner]),
    "object array": lambda inner: array_of(1, inner, None, "x", shape=(2, 2)),
    "nested": lambda inner: [{"a": (Plain([inner]),)}],
    "wrapper subclass": lambda inner: Pair(torch.ones(2), inner),
    "opaque wrapper subclass": lambda inner: Opaque(inner),
    "masked tensor": lambda inner: torch.masked.masked_tensor(inner.clone(), torch.tensor([True, True])),
    "subclass": lambda inner: inner.clone().as_subclass(Mine),
    "subclass with an attribute": lambda inner: tagged(torch.ones(2), inner),
    "parameter": nn.Parameter,
    "nested tensor": lambda inner: torch.nested.nested_tensor([inner, torch.ones(3)]),
    "jagged tensor": lambda inner: torch.nested.nested_tensor([inner, torch.ones(3)], layout=torch.jagged),
    "sparse COO": lambda inner: sparse([[0, 2]], inner, (4,)),
    "uncoalesced sparse COO": lambda inner: sparse([[2, 2]], inner, (4,)),
    "sparse CSR": lambda inner: torch.diag(inner).to_sparse_csr(),
    "sparse CSC": lambda inner: torch.diag(inner).to_sparse_csc(),
    "sparse BSR": lambda inner: torch.diag(inner).to_sparse_bsr((2, 2)),
    "sparse BSC": lambda inner: torch.diag(inner).to_sparse_bsc((1, 1)),
    "MKL-DNN": lambda inner: inner.to_mkldnn(),
    "quantized": lambda inner: torch.quantize_per_tensor(inner, 0.1, 3, torch.quint8),
    "quantized per channel": lambda inner: torch.quantize_per_channel(
        torch.diag(inner), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 1, torch.qint8
    ),
    "numpy": lambda inner: inner.numpy(),
    "read-only numpy": lambda inner: np.broadcast_to(inner.numpy(), (3, 2)),
    "backward numpy": lambda inner: inner.numpy()[::-1],
    "big-endian numpy": lambda inner: inner.numpy().astype(">f4"),
    "masked numpy": lambda inner: np.ma.array(inner.numpy(), mask=[True, False]),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.filterwarnings("ignore:.*(MaskedTensor|nested|Sparse|sparse|quantiz|jagged).*")
class TestATensorInside:
    def test_is_found_when_it_differs(self, hold):
        assert verdict_of(hold(ONE), hold(TWO)) is DIVERGED

    def test_is_found_to_be_the_same(self, hold):
        assert verdict_of(hold(ONE), hold(ONE.clone())) is EQUIVALENT

    def test_is_the_same_as_itself(self, hold):
        value = hold(ONE)

        assert verdict_of(value, value) is EQUIVALENT

    def test_is_not_the_container_itself(self, hold):
        assert verdict_of(hold(ONE), [hold(ONE)]) is DIVERGED


LEAVES = {
    "None": (None, False),
    "bool": (True, False),
    "int": (3, 4),
    "huge int": (2**70, 2**70 + 1),
    "int against huge int": (1, 2**70),
    "float": (0.5, 0.75),
    "float against int": (1.0, 1),
    "float against NaN": (1.0, float("nan")),
    "complex": (1 + 2j, 1 - 2j),
    "string": ("mean", "sum"),
    "bytes": (b"a", b"b"),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "range": (range(10**9), range(10**9 + 1)),
    "slice": (slice(1, 2), slice(1, 3)),
    "path": (pathlib.Path("a"), pathlib.Path("b")),
    "enum": (Colour.RED, Colour.BLUE),
    "class": (int, float),
    "dtype": (torch.float32, torch.float64),
    "device": (torch.device("cpu"), torch.device("meta")),
    "layout": (torch.strided, torch.sparse_coo),
    "size": (torch.Size([2, 3]), torch.Size([3, 2])),
    "set of numbers": ({1, 2}, {1, 3}),
    "set of strings": ({"a", "b"}, {"a"}),
    "frozen set of tuples": (frozenset({(1, "a")}), frozenset({(1, "b")})),
    "numpy float": (np.float32(1), np.float32(2)),
    "numpy integer": (np.int8(1), np.int8(2)),
    "numpy unsigned integer": (np.uint64(2**64 - 1), np.uint64(2**64 - 2)),
    "numpy bool": (np.bool_(True), np.bool_(False)),
    "numpy long double": (np.longdouble(1), np.longdouble(1) + np.finfo(np.longdouble).eps),
    "numpy string": (np.str_("a"), np.str_("b")),
    "numpy date": (np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
    "array of strings": (np.array(["a", "a"]), np.array(["a", "b"])),
    "array of dates": (np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]")),
    "structured array": (np.array([(1, 2.0)], "i4,f4"), np.array([(1, 3.0)], "i4,f4")),
    "wide strings": (np.array(["a"], "U1"), np.array(["a"], "U2")),
}


@pytest.mark.parametrize(("value", "other"), LEAVES.values(), ids=LEAVES)
class TestALeaf:
    def test_differs_from_another(self, value, other):
        assert verdict_of([ONE, value], [ONE, other]) is DIVERGED

    def test_is_the_same_as_its_copy(self, value, other):
        assert verdict_of([ONE, value], [ONE, copy.deepcopy(value)]) is EQUIVALENT

    def test_is_no_tensor(self, value, other):
        assert verdict_of([ONE, value], [ONE, torch.tensor(1)]) is DIVERGED


CONTAINERS = {
    "a list and a tuple": lambda: ([ONE], (ONE,)),
    "a tuple and a size": lambda: ((2, 3), torch.Size([2, 3])),
    "a dict and an ordered dict": lambda: ({"a": ONE}, collections.OrderedDict(a=ONE)),
    "a list and a deque": lambda: ([ONE], collections.deque([ONE])),
    "a set and a frozen set": lambda: ({1}, frozenset({1})),
    "a tuple and a named tuple": lambda: ((ONE, 1), Point(ONE, 1)),
    "a dataclass and its fields": lambda: (Outcome(ONE), Outcome(ONE).__dict__),
    "an output and its dict": lambda: (BaseModelOutputWithPast(last_hidden_state=ONE), {"last_hidden_state": ONE}),
    "None and a tensor": lambda: ((None,), (torch.ones(3),)),
    "None and a list": lambda: (None, []),
    "a tensor and a number": lambda: (torch.tensor(1.0), 1.0),
    "a tensor and an array": lambda: (ONE, ONE.numpy()),
    "an array and a number": lambda: (np.array(1.0), 1.0),
    "a numpy number and a number": lambda: (np.float64(1.0), 1.0),
    "a renamed key": lambda: ({"a": ONE}, {"b": ONE}),
    "a key of another type": lambda: ({1: ONE}, {"1": ONE}),
    "a missing key": lambda: ({"a": ONE, "b": ONE}, {"a": ONE}),
    "an extra item": lambda: ([ONE], [ONE, ONE]),
    "an extra field": lambda: (Plain(ONE), with_attribute(Plain(ONE), ONE)),
    "an empty list and nothing": lambda: ([ONE, []], [ONE]),
    "an empty list and an empty dict": lambda: ([ONE, []], [ONE, {}]),
    "a sparse and a dense tensor": lambda: (torch.eye(2).to_sparse(), torch.eye(2)),
    "two sparse layouts": lambda: (torch.eye(2).to_sparse_csr(), torch.eye(2).to_sparse_csc()),
    "sparse tensors of two shapes": lambda: (
        sparse([[0]], [1.0], (2,)),
        sparse([[0]], [1.0], (3,)),
    ),
    "sparse tensors with values elsewhere": lambda: (
        sparse([[0]], [1.0], (3,)),
        sparse([[1]], [1.0], (3,)),
    ),
    "quantizers of two scales": lambda: (
        torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(ONE * 2, 0.2, 0, torch.qint8),
    ),
    "a subclass and a plain tensor": lambda: (ONE.as_subclass(Mine), ONE),
    "wrappers with two contexts": lambda: (Pair(ONE, ONE, "a"), Pair(ONE, ONE, "b")),
    "object arrays of two shapes": lambda: (array_of(1, 2), array_of(1, 2, shape=(2, 1))),
    "an object array and one that would broadcast to it": lambda: (array_of("a", "a"), array_of("a")),
    "an array of strings and one that would broadcast to it": lambda: (np.array(["a", "a"]), np.array(["a"])),
    "an array and one with a dimension more": lambda: (np.array(3.0), np.array([3.0])),
    "an array and a masked array": lambda: (np.ones(2), np.ma.array(np.ones(2), mask=[True, False])),
    "arrays with two masks": lambda: (
        np.ma.array(np.ones(2), mask=[True, False]),
        np.ma.array(np.ones(2), mask=[False, True]),
    ),
    "a distribution by probabilities and one by logits": lambda: (
        torch.distributions.Bernoulli(probs=torch.tensor([0.5])),
        torch.distributions.Bernoulli(logits=torch.tensor([0.5])),
    ),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|quantiz).*")
class TestAnotherStructure:
    def test_has_diverged(self, make):
        reference, candidate = make()

        assert verdict_of(reference, candidate) is DIVERGED

    def test_has_diverged_the_other_way_round(self, make):
        reference, candidate = make()

        assert verdict_of(candidate, reference) is DIVERGED


def test_the_order_of_a_dict_counts_unless_it_is_ignored():
    first, second = {"a": ONE, "b": TWO}, {"b": TWO.clone(), "a": ONE.clone()}

    assert verdict_of(first, second) is DIVERGED
    assert td.compare(first, second, ignore="order").verdict is EQUIVALENT


class TestWhatDoesNotCount:
    def test_a_parameter_that_comes_back_as_a_tensor_is_no_change(self):
        assert verdict_of(nn.Parameter(ONE), ONE.clone().requires_grad_()) is EQUIVALENT

    def test_rounding_does_not_reorder_a_set_of_numbers(self):
        assert verdict_of({9.99999999, 10.5, 2.0}, {10.00000001, 10.5, 2.0}) is EQUIVALENT

    def test_a_coalesced_tensor_is_the_same_as_before(self):
        uncoalesced = sparse([[2, 0, 2]], [1.0, 2.0, 3.0], (4,))

        assert verdict_of(uncoalesced, uncoalesced.coalesce()) is EQUIVALENT

    def test_what_a_masked_array_hides_is_not_compared(self):
        hidden = [np.ma.array(values, mask=[True, False]) for values in ([1.0, 2.0], [777.0, 2.0])]

        assert verdict_of(*hidden) is EQUIVALENT

    def test_what_a_distribution_computed_and_kept_is_not_compared(self):
        used, unused = (torch.distributions.Categorical(logits=ONE.clone()) for _ in range(2))
        used.log_prob(torch.tensor(1))
        assert used.probs is not None

        assert verdict_of(used, unused) is EQUIVALENT
        assert verdict_of(unused, used) is EQUIVALENT

    def test_a_cached_property_is_not_compared(self):
        class Lazy:
            def __init__(self):
                self.inner = ONE

            @functools.cached_property
            def double(self):
                return self.inner * 2

        used, unused = Lazy(), Lazy()
        assert used.double is not None

        assert verdict_of(used, unused) is EQUIVALENT

    def test_an_unset_slot_is_no_leaf(self):
        unset = Slotted(ONE)
        del unset.open

        assert paths_of(unset) == ["value._Slotted__secret"]


class TestPaths:
    @pytest.mark.parametrize(
        ("value", "paths"),
        [
            (ONE, ["value"]),
            ([ONE, {"a": 1}], ["value[0]", "value[1]['a']"]),
            (Point(ONE, 1), ["value.x", "value.y"]),
            (Outcome(ONE), ["value.loss", "value.name", "value.hidden"]),
            ({(1, "a"): 2}, ["value[(1, 'a')]"]),
            ({"x", "y"}, ["value{0}", "value{1}"]),
            (array_of(1, 2, shape=(1, 2)), ["value[0, 0]", "value[0, 1]"]),
            (BaseModelOutputWithPast(last_hidden_state=ONE), ["value['last_hidden_state']"]),
            (sparse([[0]], [1.0], (2,)), ["value.indices()", "value.values()"]),
            (tagged(ONE, 3), ["value", "value.tag"]),
        ],
    )
    def test_read_like_python(self, value, paths):
        assert paths_of(value) == paths

    def test_a_cache_is_taken_apart_to_its_layers(self):
        found = paths_of(cache_of(ONE))

        assert {f"value.layers[{layer}].{part}" for layer in (0, 1) for part in ("keys", "values")} <= set(found)

    def test_two_leaves_never_share_a_path(self):
        clash = types.SimpleNamespace(a=types.SimpleNamespace(b=1))
        setattr(clash, "a.b", 2)

        assert sorted(leaf for leaf in leaves_of(clash).values() if isinstance(leaf, int)) == [1, 2]

    def test_keys_that_read_alike_are_all_found(self):
        alike = {torch.full((2,), 1.00001): 1, torch.full((2,), 1.00002): 2}

        assert [leaf for leaf in leaves_of(alike).values() if isinstance(leaf, int)] == [1, 2]

    def test_the_leaf_that_differs_is_the_one_named(self):
        report = td.compare({"a": [ONE, ONE], "b": ONE}, {"a": [ONE, TWO], "b": ONE})

        assert [seen.path for seen in report.comparisons if seen.verdict is DIVERGED] == ["value['a'][1]"]

    def test_leaves_without_partner_are_named_with_their_side(self):
        report = td.compare({"a": ONE, "b": 5}, {"a": ONE, "c": [ONE]})

        assert [(leaf.side, leaf.path, leaf.what) for leaf in report.unmatched] == [
            ("reference", "value['b']", "5"),
            ("candidate", "value['c']", "list"),
            ("candidate", "value['c'][0]", "float32 tensor of shape (2,)"),
        ]
        assert {leaf.path for leaf in report.unmatched} <= {seen.path for seen in report.comparisons}


class TestValuesInsideThemselves:
    def test_end(self):
        assert verdict_of(_ring(ONE), _ring(ONE.clone())) is EQUIVALENT

    def test_are_compared(self):
        assert verdict_of(_ring(ONE), _ring(TWO)) is DIVERGED

    def test_are_not_an_empty_list(self):
        assert verdict_of(_ring(ONE), [ONE, []]) is DIVERGED

    def test_differ_by_where_they_close(self):
        outer, inner = [ONE], [ONE]
        outer.append([outer])
        inner.append([])
        inner[1].append(inner[1])

        assert verdict_of(outer, inner) is DIVERGED

    def test_objects_may_point_at_each_other(self):
        def couple(tensor):
            one, other = Plain(tensor), Plain(None)
            one.partner, other.partner = other, one
            return one

        assert verdict_of(couple(ONE), couple(ONE.clone())) is EQUIVALENT
        assert verdict_of(couple(ONE), couple(TWO)) is DIVERGED

    def test_a_tensor_may_be_an_attribute_of_itself(self):
        def selfish(tensor):
            mine = tagged(tensor, tensor)
            mine.myself = mine
            return mine

        assert verdict_of(selfish(ONE), selfish(ONE.clone())) is EQUIVALENT
        assert verdict_of(selfish(ONE), selfish(TWO)) is DIVERGED

    def test_are_not_mistaken_for_values_that_are_made_anew_at_the_same_address(self):
        assert len(leaves_of(Fresh(50))) == 51

    def test_a_value_that_occurs_twice_is_no_ring(self):
        assert paths_of([[ONE], [ONE]]) == paths_of([shared := [ONE], shared]) == ["value[0][0]", "value[1][0]"]

    def test_depth_has_no_limit(self):
        def buried(tensor):
            return functools.reduce(lambda inner, _: [inner], range(3000), tensor)

        assert verdict_of(buried(ONE), buried(ONE.clone())) is EQUIVALENT
        assert verdict_of(buried(ONE), buried(TWO)) is DIVERGED


def _ring(tensor):
    ring = [tensor]
    ring.append(ring)
    return ring


class Refuses:
    """Neither taken apart nor compared."""

    __slots__ = ()

    def __eq__(self, other):
        raise ValueError("not today")

    __hash__ = None


class BrokenMapping(dict):
    def items(self):
        raise KeyError("lost")


class Mute:
    __slots__ = ()

    def __repr__(self):
        raise RuntimeError("no words")


class HiddenState(torch.Generator):
    """An extension's object with a `__dict__`: its attributes are not all of its state."""


INCOMPARABLE = {
    "sentinels": object,
    "objects whose equality raises": Refuses,
    "functions": lambda: lambda: 1,
    "generators": lambda: (item for item in ()),
    "random generators": torch.Generator,
    "subclasses of an extension's class": HiddenState,
    "containers that raise": lambda: BrokenMapping(a=1),
    "objects without words": Mute,
    "uninitialized parameters": nn.UninitializedParameter,
    "sparse tensors of a dtype that cannot be coalesced": lambda: sparse(
        [[0, 0]], torch.ones(2).to(torch.float8_e5m2), (3,)
    ),
}


@pytest.mark.parametrize("make", INCOMPARABLE.values(), ids=INCOMPARABLE)
class TestWhatCannotBeCompared:
    def test_is_inconclusive_and_says_why(self, make):
        report = td.compare([ONE, make()], [ONE, make()])

        (doubt,) = [seen for seen in report.comparisons if seen.verdict is not EQUIVALENT]
        assert report.verdict is INCONCLUSIVE
        assert "cannot be" in doubt.reason

    def test_hides_no_divergence(self, make):
        assert verdict_of([ONE, make()], [TWO, make()]) is DIVERGED

    def test_without_a_partner_has_diverged(self, make):
        assert verdict_of([ONE, make()], [ONE]) is DIVERGED


class TestNothingAtAll:
    @pytest.mark.parametrize("nothing", [[], {}, (), [[], {}], Plain.__new__(Plain)])
    def test_is_inconclusive(self, nothing):
        report = td.compare(nothing, copy.deepcopy(nothing))

        assert report.verdict is INCONCLUSIVE
        assert "nothing was compared" in report.stage("values").reason


numbers = st.integers(-5, 5) | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text(max_size=3)
tensors = st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=4).map(torch.tensor)
trees = st.recursive(
    numbers | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3) | st.integers(-3, 3), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Plain, inner),
        st.lists(inner, max_size=2).map(collections.deque),
    ),
    max_leaves=8,
)


class TestAlignment:
    @given(trees, trees)
    @settings(max_examples=80, deadline=None)
    def test_every_leaf_ends_in_one_pair_or_is_unmatched_on_its_side(self, reference, candidate):
        left, right = leaves_of(reference), leaves_of(candidate)

        pairs, unmatched = align(left, right)

        paired = [pair.path for pair in pairs]
        same = [path for path in left if path not in paired and isinstance(left[path], Container)]
        for side, leaves in (("reference", left), ("candidate", right)):
            alone = [leaf.path for leaf in unmatched if leaf.side == side]
            assert sorted([*paired, *alone, *(path for path in same if path in right)]) == sorted(leaves)
        assert all(pair.reference is left[pair.path] and pair.candidate is right[pair.path] for pair in pairs)

    @given(trees)
    @settings(max_examples=80, deadline=None)
    def test_a_tree_is_equivalent_to_its_copy(self, tree):
        report = td.compare(tree, copy.deepcopy(tree), policy="bitwise")

        assert report.verdict is (EQUIVALENT if paths_of(tree) else INCONCLUSIVE)
        assert len(report.comparisons) == len(paths_of(tree))
        assert not report.unmatched

    @given(st.data())
    @settings(max_examples=80, deadline=None)
    def test_a_tree_with_any_one_leaf_changed_is_not(self, data):
        tree = data.draw(trees.filter(paths_of))
        changed = data.draw(st.sampled_from(paths_of(tree)))

        report = td.compare(tree, _changed_at(changed, tree), policy="bitwise")

        assert [seen.path for seen in report.comparisons if seen.verdict is not EQUIVALENT] == [changed]
        assert report.verdict is DIVERGED

    @given(trees, trees)
    @settings(max_examples=40, deadline=None)
    def test_which_side_is_the_reference_does_not_change_the_bitwise_verdict(self, one, other):
        assert verdict_of(one, other, policy="bitwise") is verdict_of(other, one, policy="bitwise")


def _changed_at(path, value, here="value"):
    """Return a copy of the value whose leaf at the path is another."""
    if here == path:
        if isinstance(value, torch.Tensor):
            return torch.cat([value[:-1], value[-1:] + 1])
        return value + "x" if isinstance(value, str) else "another"
    if isinstance(value, dict):
        return {key: _changed_at(path, item, f"{here}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Point):
        return Point(_changed_at(path, value.x, f"{here}.x"), _changed_at(path, value.y, f"{here}.y"))
    if isinstance(value, Plain):
        return Plain(_changed_at(path, value.inner, f"{here}.inner"))
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value)(_changed_at(path, item, f"{here}[{index}]") for index, item in enumerate(value))
    return value


def test_the_limit_of_a_deque_is_part_of_its_kind():
    two, three = (collections.deque([1], maxlen=length) for length in (2, 3))

    assert td.compare(two, three).verdict is Verdict.DIVERGED
    assert td.compare(two, collections.deque([1], maxlen=2)).verdict is Verdict.EQUIVALENT
