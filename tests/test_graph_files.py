"""A graph is read as it was written, in any process, and a file runs nothing."""

import collections
import functools
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.overrides
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from torchdelta._torch.graphs.graphs import after_aot
from torchdelta._torch.graphs.nodes import module_path, source_line
from torchdelta._torch.graphs.targets import find_target, name_target
from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.nodewise.matching import assign_handles, handles_of
from torchdelta.nodewise.node_records import node_records
from torchdelta.storage.graphs import read_graph, tensors_path, write_graph
from torchdelta.storage.values import Unwritable, decode_value, encode_value

# what torch does itself while it traces
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

Pair = collections.namedtuple("Pair", "first second")
X = torch.linspace(-1, 1, 12).reshape(3, 4)
HERE = __name__.partition(".")[0]


class Net(nn.Module):
    """Attention, normalisation, a branch, a buffer that is written to, tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, *, scale=2.0):
        hidden = self.norm(self.second(torch.relu(self.first(x)))) * scale
        chosen = torch.cond(x.sum() > 0, lambda value: value.sin(), lambda value: value.cos(), (hidden,))
        return {"chosen": chosen, "rest": [hidden[:, 1:3], x.shape[0] * x]}


def round_trip(graph, directory, **options):
    write_graph(graph, directory / "graph.json")
    return read_graph(directory / "graph.json", **options)


def graphs_in(graph):
    return {path: module for path, module in graph.named_modules() if isinstance(module, GraphModule)}


def nodes_of(graph):
    return [node for node in graph.graph.nodes if node.target != "_guards_fn"]


def code_of(graph):
    return [line for line in graph.code.splitlines() if "_guards_fn" not in line]


def assert_same(read, written):
    """Hold everything but values and state: code, names, handles, and where each node comes from."""
    assert list(graphs_in(read)) == list(graphs_in(written))
    for one, other in zip(graphs_in(read).values(), graphs_in(written).values(), strict=True):
        assert code_of(one) == code_of(other)
        for node, original in zip(nodes_of(one), nodes_of(other), strict=True):
            assert (node.op, node.name, node.target) == (original.op, original.name, original.target)
            assert str((node.args, node.kwargs)) == str((original.args, original.kwargs))
            assert handles_of(node) == handles_of(original)
            assert source_line(node) == source_line(original)
            assert module_path(node) == module_path(original)
            assert node.meta.get("seq_nr") == original.meta.get("seq_nr")
            assert node.meta.get("partitioner_tag") == original.meta.get("partitioner_tag")
    assert node_records(read) == node_records(written)
    assert_same_state(read, written)


def assert_same_state(read, written):
    for kind in ("named_parameters", "named_buffers"):
        before = dict(getattr(written, kind)(remove_duplicate=False))
        after = dict(getattr(read, kind)(remove_duplicate=False))
        assert list(after) == list(before)
        for name, tensor in after.items():
            assert_same_tensor(tensor, before[name])


def assert_same_tensor(read, written):
    assert (read.dtype, read.shape, read.device) == (written.dtype, written.shape, written.device)
    assert (read.stride(), read.requires_grad, type(read)) == (written.stride(), written.requires_grad, type(written))
    assert bits(read) == bits(written)


def bits(tensor):
    """Return the elements as bytes: NaNs and negative zeros have theirs."""
    if tensor.is_meta:
        return None
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def captured(function, *args, after=None, dynamic=False):
    """Return each graph that dynamo, or AOTAutograd, hands over, with a call that it got."""
    seen = []

    def keep(graph, _, level="dynamo"):
        def run(*values):
            seen.append((level, graph, [v.clone() if isinstance(v, torch.Tensor) else v for v in values]))
            return graph(*values)

        return run

    torch._dynamo.reset()
    result = torch.compile(function, backend=after_aot(keep) if after == "aot" else keep, dynamic=dynamic)(*args)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if getattr(leaf, "requires_grad", False)]
    if leaves:
        sum(leaf.sum() for leaf in leaves).backward()
    return seen


def outputs(graph, values):
    torch.manual_seed(3)
    copies = [v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in values]
    found = torch.utils._pytree.tree_leaves(graph(*copies))
    return [bits(value) if isinstance(value, torch.Tensor) else value for value in found]


def assert_round_trips(seen, directory):
    for _, graph, values in seen:
        assign_handles(graph)
        read = round_trip(graph, directory)
        assert_same(read, graph)
        assert outputs(read, values) == outputs(graph, values)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def mixed(x):
    with torch.autocast("cpu", torch.bfloat16):
        low = torch.nn.functional.dropout(x @ x.T, 0.5)
    with torch.no_grad():
        still = torch.sin(low.float()) * math.pi
    kept = checkpoint(lambda value: value.exp() / math.inf, x, use_reentrant=False)
    mapped = torch.vmap(torch.func.grad(lambda row: row.pow(2).sum()))(x)
    pooled = torch.nn.functional.max_pool2d(x[None], 2)
    changed = x.clone()
    changed[0, 1:2] = 3
    return still.to(torch.float16), kept, mapped, pooled, changed[..., None], Doubled.apply(x), x.new_zeros(2)


class TestAGraphOfDynamo:
    def test_comes_back_with_modes_transforms_and_functions_of_autograd(self, tmp_path):
        seen = captured(mixed, X.clone().requires_grad_())

        assert {"_enter_autocast", "_vmap_increment_nesting", "autograd_function_apply"} <= {
            node.name for node in seen[0][1].graph.nodes
        }
        assert_round_trips(seen, tmp_path)

    def test_comes_back_with_a_branch_and_a_written_buffer(self, tmp_path):
        seen = captured(Net(), X)

        assert any("cond" in path for path in graphs_in(seen[0][1]))
        assert_round_trips(seen, tmp_path)

    def test_comes_back_with_sizes_that_are_symbols(self, tmp_path):
        ((_, graph, values),) = captured(lambda x: (x.view(-1) + x.shape[0], x[: x.shape[1] - 1]), X, dynamic=True)

        read = round_trip(graph, tmp_path)

        assert_same(read, graph)
        assert [node.type for node in read.graph.nodes][:2] == [torch.SymInt] * 2
        assert outputs(read, values) == outputs(graph, values)
        larger = [5, 7, torch.ones(5, 7)]
        assert outputs(read, larger) == outputs(graph, larger)


class TestAGraphAfterAot:
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_comes_back_forward_and_backward(self, dynamic, tmp_path):
        seen = captured(Net(), X, after="aot", dynamic=dynamic)

        assert [level for level, _, _ in seen] == ["forward", "backward"]
        assert any(node.meta.get("fwd_nn_module_stack") for node in seen[1][1].graph.nodes)
        assert_round_trips(seen, tmp_path)

    def test_comes_back_with_operators_of_higher_order(self, tmp_path):
        def attend(x):
            query = x.reshape(1, 1, 3, 4)
            return flex_attention(query, query, query, score_mod=lambda score, b, h, q, k: score + q - k)

        seen = captured(attend, X, after="aot")

        assert any("flex_attention" in str(node.target) for node in seen[0][1].graph.nodes)
        assert_round_trips(seen, tmp_path)


class TestAnExportedGraph:
    @staticmethod
    def exported(dynamic=True):
        rows = torch.export.Dim("rows", min=2, max=9)
        shapes = {"x": {0: rows} if dynamic else None, "scale": None}
        program = torch.export.export(Net(), (X,), {"scale": 3.0}, dynamic_shapes=shapes)
        assign_handles(program)
        return program

    def test_comes_back_as_it_is_called(self, tmp_path):
        graph = self.exported().module()
        read = round_trip(graph, tmp_path)

        assert_same(read, graph)
        assert code_of(read) == [line for line in graph.code.splitlines() if "_guards_fn" not in line]
        found, known = read(X, scale=3.0), graph(X, scale=3.0)
        assert list(found) == ["chosen", "rest"]
        assert torch.equal(found["chosen"], known["chosen"])
        assert all(map(torch.equal, found["rest"], known["rest"]))
        assert torch.equal(read(X[:2], scale=3.0)["rest"][1], 2 * X[:2])

    def test_comes_back_without_its_guards(self, tmp_path):
        graph = self.exported().module()

        assert "_guards_fn" in dict(graph.named_modules())
        read = round_trip(graph, tmp_path)

        assert "_guards_fn" not in dict(read.named_modules())
        assert read(torch.ones(12, 4), scale=3.0)["chosen"].shape == (12, 4)
        with pytest.raises(Exception, match=r"rows|Guard|<= 9"):
            graph(torch.ones(12, 4), scale=3.0)

    def test_comes_back_lifted(self, tmp_path):
        graph = self.exported().graph_module

        assert_same(round_trip(graph, tmp_path), graph)

    def test_keeps_tied_parameters_tied(self, tmp_path):
        read = round_trip(self.exported().module(), tmp_path)

        read.first.weight.data.zero_()
        assert not read.second.weight.any()

    def test_keeps_structures_of_other_packages_that_are_allowed(self, tmp_path):
        class Named(nn.Module):
            def forward(self, pair):
                return Pair(pair.first + 1, collections.OrderedDict(b=pair.second, a=pair.first))

        graph = torch.export.export(Named(), (Pair(X, X + 1),)).module()
        write_graph(graph, tmp_path / "graph.json")

        with pytest.raises(ReportUnreadable, match=rf"pass allow=\('{HERE}',\)"):
            read_graph(tmp_path / "graph.json")
        found = read_graph(tmp_path / "graph.json", allow=(HERE,))(Pair(X, X + 1))
        assert type(found) is Pair
        assert list(found.second) == ["b", "a"]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.LSTM(4, 4)
        self.heads = nn.Sequential(nn.Linear(4, 4), nn.GELU("tanh"), nn.MultiheadAttention(4, 2))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor, low: float = -math.inf, *, kind=torch.float32):
        hidden = self.heads[1](self.heads[0](self.body(x)[0])) + self.shift
        return self.heads[2](hidden, hidden, hidden)[0].clamp(low).to(kind)


class TestATracedGraph:
    def test_comes_back_with_whole_modules_and_defaults(self, tmp_path):
        graph = symbolic_trace(Recurrent().eval())
        assign_handles(graph)
        read = round_trip(graph, tmp_path)

        assert_same(read, graph)
        assert outputs(read, [X[None]]) == outputs(graph, [X[None]])
        assert type(read.body) is nn.LSTM
        assert read.body._flat_weights[0] is read.body.weight_ih_l0
        assert [module.training for module in read.modules()] == [module.training for module in graph.modules()]
        assert not read.body.training
        assert list(read.state_dict()) == list(graph.state_dict())
        read.train()
        assert read.body.training

    def test_calls_a_function_of_a_module_that_is_allowed(self, tmp_path):
        made = Graph()
        x = made.placeholder("x")
        made.output(made.call_function(somewhere_function, (x,)))
        graph = GraphModule({}, made)
        write_graph(graph, tmp_path / "graph.json")

        with pytest.raises(ReportUnreadable, match=rf"nodes\[1\]\.target: {__name__} is not allowed"):
            read_graph(tmp_path / "graph.json")
        assert torch.equal(read_graph(tmp_path / "graph.json", allow=(__name__,))(X), X + 3)

    def test_keeps_what_shape_propagation_noted(self, tmp_path):
        graph = symbolic_trace(nn.ReLU())
        ShapeProp(graph).propagate(X)
        read = round_trip(graph, tmp_path)

        assert [node.meta["tensor_meta"] for node in read.graph.nodes] == [
            node.meta["tensor_meta"] for node in graph.graph.nodes
        ]
        assert_same(read, graph)

    def test_keeps_a_module_that_is_held_twice_one(self, tmp_path):
        made = Graph()
        made.output(made.call_module("second", (made.call_module("first", (made.placeholder("x"),)),)))
        layer = nn.Linear(4, 4)
        read = round_trip(GraphModule({"first": layer, "second": layer}, made), tmp_path)

        assert read.first is read.second
        assert torch.equal(read(X), layer(layer(X)))

    def test_keeps_names_that_torch_would_not_give(self, tmp_path):
        graph = symbolic_trace(lambda x: torch.relu(torch.sin(x)))
        for node, name in zip(graph.graph.nodes, ("value", "sum", "relu_7", "output"), strict=True):
            node._rename(name) if name != "sum" else setattr(node, "name", name)
        read = round_trip(graph, tmp_path)

        assert [node.name for node in read.graph.nodes] == ["value", "sum", "relu_7", "output"]
        assert torch.equal(read(X), graph(X))
        read.graph.inserting_before(next(iter(reversed(read.graph.nodes))))
        assert read.graph.call_function(torch.relu, (), name="relu_7").name != "relu_7"


def somewhere_function(x):
    return x + 3


def test_another_process_reads_it(tmp_path):
    graph = TestAnExportedGraph.exported().module()
    write_graph(graph, tmp_path / "graph.json")
    code = (
        "import sys, torch; from torchdelta.storage.graphs import read_graph; "
        "x = torch.linspace(-1, 1, 12).reshape(3, 4); "
        "print(read_graph(sys.argv[1])(x, scale=3.0)['chosen'].detach().numpy().tobytes().hex())"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path / "graph.json")], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == bits(graph(X, scale=3.0)["chosen"]).hex()


@pytest.mark.parametrize(
    "mode",
    [FakeTensorMode, torch.inference_mode, lambda: torch.device("meta"), torch.no_grad],
    ids=["fake", "inference", "device", "no_grad"],
)
def test_modes_that_are_active_change_nothing(mode, tmp_path):
    graph = holding(weight=nn.Parameter(torch.arange(4.0)), shift=torch.ones(2)[1:])
    with mode():
        read = round_trip(graph, tmp_path)

    assert_same_tensor(read.weight, graph.weight)
    assert_same_tensor(read.shift, graph.shift)
    assert not read.shift.is_inference()


def test_a_backend_can_write_and_read_what_it_is_given(tmp_path):
    read = []

    def keep(graph, _, level):
        read.append((round_trip(graph, tmp_path), graph))
        return read[-1][0].forward

    constant = torch.arange(4.0)
    found = torch.compile(lambda x: torch.relu(x) + constant.sin() + torch.tensor([1.5]), backend=after_aot(keep))(X)

    assert torch.equal(found, torch.relu(X) + constant.sin() + 1.5)
    assert any(node.op == "get_attr" for node in read[0][1].graph.nodes)
    assert_same(*read[0])


class Holder(nn.Module):
    """Holds tensors, each read by a node."""

    def __init__(self, **held):
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


def holding(**held):
    made = Graph()
    made.output(tuple(made.get_attr(name) for name in held))
    root = Holder(**held)
    graph = GraphModule(root, made)
    for name, value in held.items():  # torch makes a buffer of every tensor
        if not isinstance(value, nn.Parameter):
            graph._buffers.pop(name, None)
            setattr(graph, name, value)
    return graph


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


class TestTensors:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_of_every_dtype_keep_their_bits(self, dtype, tmp_path):
        content = torch.tensor(list(range(7, 39)), dtype=torch.uint8)
        tensor = (content % 2).bool() if dtype is torch.bool else content.view(dtype)

        assert_same_tensor(round_trip(holding(held=tensor), tmp_path).held, tensor)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.empty(0),
            torch.empty(2, 0, 3)[:, :, 1:],
            torch.tensor(2.5),
            torch.tensor([math.nan, -0.0, math.inf]),
            torch.ones(1).expand(5),
            torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
            torch.arange(100.0)[17:90:3],
            torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.complex(X, X + 1).conj(),
            torch.empty(3, 4, device="meta"),
            nn.Parameter(torch.arange(6.0).reshape(2, 3).T),
            nn.Parameter(torch.ones(2), requires_grad=False),
            torch.ones(2).requires_grad_(),
        ],
        ids=lambda tensor: f"{tuple(tensor.shape)}{tensor.stride()}",
    )
    def test_of_every_form_come_back(self, tensor, tmp_path):
        read = round_trip(holding(held=tensor), tmp_path).held

        assert_same_tensor(read, tensor)
        assert read.is_conj() == tensor.is_conj()

    def test_that_share_memory_still_do(self, tmp_path):
        whole = torch.arange(1000.0)
        first, second, apart = whole[200:206].reshape(2, 3), whole[203:209].view(torch.int32), torch.ones(3)
        read = round_trip(holding(first=first, second=second, apart=apart, again=first), tmp_path)

        assert_same_tensor(read.second, second)
        read.first[1, 0] = 7.0
        assert read.second.view(torch.float32)[0] == 7.0
        assert read.again is read.first
        assert read.apart.untyped_storage().data_ptr() != read.first.untyped_storage().data_ptr()

    def test_take_only_the_bytes_that_they_can_reach(self, tmp_path):
        write_graph(holding(held=torch.ones(1 << 20)[1000:1010]), tmp_path / "graph.json")

        assert tensors_path(tmp_path / "graph.json").stat().st_size < 1000

    def test_that_are_written_to_leave_the_file_alone(self, tmp_path):
        read = round_trip(holding(held=torch.ones(3)), tmp_path)
        read.held.zero_()

        assert torch.equal(read_graph(tmp_path / "graph.json").held, torch.ones(3))

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda: torch.eye(3).to_sparse(), "not strided"),
            (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
            (lambda: torch.ones(2, requires_grad=True) * 2, "detach it"),
            (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
            (nn.UninitializedParameter, "class UninitializedParameter"),
        ],
        ids=["sparse", "quantized", "computed", "negated", "uninitialized"],
    )
    def test_that_are_more_than_strided_are_refused(self, make, why, tmp_path):
        with pytest.raises(UsageError, match=why):
            write_graph(holding(held=make()), tmp_path / "graph.json")
        assert not list(tmp_path.iterdir())


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(["nan", "inf", "-inf", "\\nan", "\\\\-inf", ""]),
    st.complex_numbers(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex32, torch.bool]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.sampled_from([torch.strided, torch.sparse_coo, torch.channels_last, torch.preserve_format]),
    st.sampled_from([torch.per_tensor_affine, Ellipsis]),
    st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.text(), st.integers()))
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


def exact(value):
    """Return what tells a value apart from every other, by type too."""
    if isinstance(value, float):
        return struct.pack("d", value) if not math.isnan(value) else "nan"
    if isinstance(value, complex):
        return "complex", exact(value.real), exact(value.imag)
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, slice):
        return slice, [exact(part) for part in (value.start, value.stop, value.step)]
    return type(value), value


class TestLiterals:
    @given(VALUES)
    def test_come_back_exactly(self, value):
        written = json.dumps(encode_value(value), allow_nan=False)

        assert exact(decode_value(json.loads(written), "here")) == exact(value)

    @given(VALUES)
    def test_come_back_as_arguments_of_a_node(self, tmp_path_factory, value):
        made = Graph()
        made.output(made.call_function(torch.relu, (value,), {"key": [value]}))
        graph = GraphModule({}, Graph())
        vars(graph)["_graph"] = made  # not all of them make code, and no code is needed to write a graph
        path = tmp_path_factory.getbasetemp() / "literals.json"
        write_graph(graph, path)
        document = json.loads(path.read_text())

        node = document["modules"][0]["nodes"][0]
        argument = next(iter(made.nodes)).args[0]  # torch makes plain tuples of sizes
        assert exact(plain(decode_value(node["args"][0], "here"))) == exact(plain(argument))
        assert exact(plain(decode_value(node["kwargs"]["key"], "here"))) == exact([plain(argument)])

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (Pair(1, 2), "named tuple"),
            (torch.Generator(), "Generator"),
            ({1, 2}, "set"),
            (b"bytes", "bytes"),
            (functools.partial(torch.relu), "partial"),
            (lambda x: x, "inside of a function"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_that_are_no_data_are_refused(self, value, what, tmp_path):
        made = Graph()
        node = made.call_function(torch.relu, (1,))
        made.output(node)
        graph = GraphModule({}, made)
        node._update_args_kwargs((value,), {}) if not isinstance(value, Pair) else setattr(node, "args", (value,))

        with pytest.raises(UsageError, match=rf"relu has an argument that cannot be written.*{what}"):
            write_graph(graph, tmp_path / "graph.json")

    def test_keep_operators_and_members_of_enumerations(self, tmp_path):
        made = Graph()
        x = made.placeholder("x")
        held = (torch.ops.aten.relu.default, CheckpointPolicy.MUST_SAVE, slice(None, x))
        made.output(made.call_function(somewhere_function, (x, held)))
        read = round_trip(GraphModule({}, made), tmp_path, allow=(__name__,))

        operator, policy, part = list(read.graph.nodes)[1].args[1]
        assert (operator, policy) == (torch.ops.aten.relu.default, CheckpointPolicy.MUST_SAVE)
        assert part.stop is next(iter(read.graph.nodes))

    @pytest.mark.parametrize(
        "data",
        [
            {"tuple": 3},
            {"range": [1, 0, 0]},
            {"dtype": "float33"},
            {"dtype": "load"},
            {"device": "nowhere"},
            {"dict": [[[1], 2]]},
            {"dict": [["a", 1], ["a", 2]]},
            {"complex": ["x", 1]},
            {"pickle": "gASVHgAAAAAAAACMBXBvc2l4"},
            {"tuple": [], "dict": []},
        ],
        ids=str,
    )
    def test_that_nobody_wrote_are_not_read(self, data):
        with pytest.raises(ReportUnreadable, match=r"^here"):
            decode_value(data, "here")

    def test_are_told_apart_from_what_refers_to_something(self):
        with pytest.raises(Unwritable, match=r"function"):
            encode_value([somewhere_function])


def plain(value):
    """Return a value with torch's containers as Python's own."""
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return slice(plain(value.start), plain(value.stop), plain(value.step)) if isinstance(value, slice) else value


class TestCallables:
    def test_of_torch_are_all_found_again(self):
        every = [
            function
            for functions in torch.overrides.get_overridable_functions().values()
            for function in functions
            if type(function).__name__ != "method-wrapper"
        ]

        assert len(every) > 1000
        for function in every:
            assert find_target(name_target(function)) is function

    @pytest.mark.parametrize(
        ("target", "why"),
        [
            (lambda x: x, "inside of a function"),
            (functools.partial(torch.relu), "object of partial"),
            (nn.ReLU(), "object of ReLU"),
        ],
        ids=["lambda", "partial", "module"],
    )
    def test_that_have_no_name_are_refused(self, target, why, tmp_path):
        made = Graph()
        x = made.placeholder("x")
        made.output(made.create_node("call_function", target, (x,), name="odd"))
        graph = GraphModule({}, Graph())
        vars(graph)["_graph"] = made

        with pytest.raises(UsageError, match=rf"odd calls a function that another process would not find: .*{why}"):
            write_graph(graph, tmp_path / "graph.json")

    def test_of_the_main_script_are_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(somewhere_function, "__module__", "__main__")

        with pytest.raises(ValueError, match="move it to a module"):
            name_target(somewhere_function)

    @pytest.mark.parametrize(
        "name",
        [
            "function os:system",
            "function posix:system",
            "function torch:os.system",
            "function torch.nn.functional:torch.os.system",
            "function torch:load",
            "function torch.hub:load",
            "function torch:ops.load_library",
            "function torch.utils.cpp_extension:load_inline",
            "function torch.utils.collect_env:run",
            "function torch.utils.benchmark:Timer",
            "function torch.fx.graph_module:_exec_with_source",
            "function operator:attrgetter",
            "function operator:methodcaller",
            "function builtins:eval",
            "function builtins:exec",
            "function builtins:__import__",
            "function builtins:list.__class__",
            "function operator:attrgetter.__class__",
            "function torch.functional:Sequence",
            "function torch:float32",
            "function torch:nothing",
            "function ..torch:relu",
            "function torch.nowhere:relu",
            "packet load_library::x",
            "packet aten::__class__",
            "operator aten::relu.__class__",
            "operator nobody::knows",
            "higher_order nothing os",
            "higher_order nothing torch",
            "pickle x",
            "",
        ],
    )
    def test_that_are_not_allowed_are_not_found(self, name):
        with pytest.raises(LookupError):
            find_target(name)

    def test_are_allowed_by_package_and_not_by_the_start_of_its_name(self):
        name = f"function {__name__}:somewhere_function"

        assert find_target(name, (__name__,)) is somewhere_function
        with pytest.raises(LookupError, match="not allowed"):
            find_target(name, (__name__[:-1],))
        with pytest.raises(LookupError, match=r"has no os\.system"):
            find_target(f"function {__name__}:os.system", (__name__,))

    def test_allowed_as_text_are_a_mistake(self, tmp_path):
        with pytest.raises(UsageError, match=r"pass \('torch',\)"):
            read_graph(tmp_path / "graph.json", allow="torch")


class Special(nn.Module):
    def __init__(self):
        super().__init__()
        self.callback = lambda x: x

    def forward(self, x):
        return x


class TestModules:
    def test_with_attributes_that_are_no_data_are_refused(self, tmp_path):
        made = Graph()
        made.output(made.call_module("special", (made.placeholder("x"),)))
        graph = GraphModule({"special": Special()}, made)

        with pytest.raises(UsageError, match=r"special \(Special\) cannot be written.*inside of a function.*Trace"):
            write_graph(graph, tmp_path / "graph.json")

    def test_with_hooks_are_refused(self, tmp_path):
        graph = symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
        getattr(graph, "0").register_forward_hook(lambda *_: None)

        with pytest.raises(UsageError, match=r"0 has hooks .*remove them"):
            write_graph(graph, tmp_path / "graph.json")

    def test_that_are_no_graph_are_refused(self, tmp_path):
        with pytest.raises(UsageError, match="Linear is not a graph: trace it"):
            write_graph(nn.Linear(2, 2), tmp_path / "graph.json")

    def test_that_are_not_in_order_are_refused(self, tmp_path):
        graph = symbolic_trace(lambda x: torch.relu(torch.sin(x)))
        _, sine, relu, _ = graph.graph.nodes
        relu.append(sine)

        with pytest.raises(UsageError, match=r"relu uses sin.*sort the graph"):
            write_graph(graph, tmp_path / "graph.json")

    def test_run_no_constructor(self, tmp_path, monkeypatch):
        write_graph(symbolic_trace(nn.Sequential(nn.Linear(2, 2))), tmp_path / "graph.json")
        monkeypatch.setattr(nn.Linear, "__init__", lambda *_: pytest.fail("it was constructed"))

        assert read_graph(tmp_path / "graph.json")(torch.ones(1, 2)).shape == (1, 2)

    def test_have_values_described_by_fake_tensors(self, tmp_path):
        read = round_trip(TestAnExportedGraph.exported().module(), tmp_path)

        linear = next(node for node in read.graph.nodes if node.name == "linear")
        assert isinstance(linear.meta["val"], FakeTensor)
        assert (linear.meta["val"].dtype, linear.meta["val"].shape[1]) == (torch.float32, 4)
        assert isinstance(linear.meta["val"].shape[0], torch.SymInt)


@pytest.fixture
def written(tmp_path):
    """A graph in a file, and what writes it again with a change."""
    path = tmp_path / "graph.json"
    write_graph(holding(weight=nn.Parameter(torch.arange(4.0))), path)
    document = json.loads(path.read_text())

    def change(edit):
        edit(document)
        path.write_text(json.dumps(document))
        return path

    return change


def nodes(document):
    return document["modules"][0]["nodes"]


def add_call(document, **changes):
    call = {"op": "call_function", "name": "call", "target": "function torch:relu", "args": [], "kwargs": {}}
    nodes(document).insert(1, {**call, **changes})


MARK = "__import__('pathlib').Path('MARK').touch()"


class TestAHostileFile:
    @pytest.mark.parametrize(
        "changes",
        [
            {"target": "function os:system", "args": ["touch MARK"]},
            {"target": "function builtins:exec", "args": [MARK]},
            {"name": f"x={MARK}"},
            {"name": "x\n    pass"},
            {"op": "call_method", "target": f"relu({MARK}).x", "args": [{"node": "weight"}]},
            {"op": "placeholder", "target": f"x={MARK}"},
            {"op": "placeholder", "target": f"x: {MARK}"},
            {"op": "get_attr", "target": f'weight.0", {MARK}) #'},
            {"op": "call_module", "target": f"weight({MARK})"},
            {"kwargs": {f"x={MARK},y": 1}},
            {"kwargs": {"lambda": 1}},
            {"target": "function builtins:getattr", "args": [{"node": "weight"}, "__class__"]},
            {"target": "function builtins:getattr", "args": [{"node": "weight"}, {"node": "weight"}]},
            {"op": "call_method", "target": "__getattribute__", "args": [{"node": "weight"}, "__class__"]},
            {"type": "function os:system"},
            {"args": [{"target": "function os:system"}]},
            {"args": [{"enum": ["function torch:relu", "x"]}]},
            {"args": [{"node": "later"}]},
            {"meta": {"val": {"described": {"tensor": ["load", [1], [1], "cpu", False]}}}},
            {"meta": {"val": {"target": "function os:system"}}},
            {"op": "run"},
            {"code": MARK},
        ],
        ids=str,
    )
    def test_is_refused_node_by_node(self, changes, written, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        path = written(lambda document: add_call(document, **changes))

        with pytest.raises(ReportUnreadable, match=r"graph\.json: modules\[0\]\.nodes"):
            read_graph(path)
        assert not Path("MARK").exists()

    def test_may_read_an_attribute_by_its_name(self, written):
        call = {"target": "function builtins:getattr", "args": [{"node": "weight"}, "shape"]}

        assert list(read_graph(written(lambda document: add_call(document, **call))).graph.nodes)[1].target is getattr

    def test_has_a_call_that_is_only_data(self, written, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        target = {"target": "function os:system", "args": ["touch MARK"]}
        path = written(lambda document: add_call(document, **target))
        home = os.system.__module__

        graph = read_graph(path, allow=("os", home))

        assert not Path("MARK").exists()
        assert list(graph.graph.nodes)[1].target is os.system

    @pytest.mark.parametrize("name", ["recompile", "_graph", "forward", "named_children", "_parameters", "meta"])
    def test_puts_nothing_in_place_of_what_reading_calls(self, name, written):
        def shadow(document):
            document["modules"][0]["attributes"][name] = {"target": "function torch:set_default_dtype"}

        with pytest.raises(ReportUnreadable, match=f"{name} is torch's own"):
            read_graph(written(shadow))

    def test_cannot_cut_code_at_a_default(self, written):
        def plant(document):
            nodes(document).insert(0, {"op": "placeholder", "name": "x", "target": "x", "args": ["a: b"], "kwargs": {}})
            leaf = {"type": "tuple", "context": None, "children": [None]}
            document["modules"][0]["convention"] = {"names": ["x"], "taken": leaf, "returned": None}

        with pytest.raises(ReportUnreadable, match="convention: x has a default"):
            read_graph(written(plant))

    @pytest.mark.parametrize("where", ["names", "keys"])
    def test_cannot_name_arguments_by_code(self, where, written):
        def plant(document):
            name, key = (MARK, "x") if where == "names" else ("x", f"x': {MARK}, 'y")
            empty = {"type": "tuple", "context": None, "children": []}
            keywords = {"type": "dict", "context": [key], "children": [None]}
            taken = {"type": "tuple", "context": None, "children": [empty, keywords]}
            nodes(document).insert(0, {"op": "placeholder", "name": "x", "target": "x", "args": [], "kwargs": {}})
            document["modules"][0]["convention"] = {"names": [name], "taken": taken, "returned": None}

        with pytest.raises(ReportUnreadable, match="is not the name of an argument"):
            read_graph(written(plant))


class TestADamagedFile:
    @pytest.mark.parametrize(
        ("edit", "what"),
        [
            (lambda d: d.update(graph_version=2), "upgrade torchdelta"),
            (lambda d: d.update(graph_version=0), "write the graph again"),
            (lambda d: d.update(format="something"), "not a graph that torchdelta wrote"),
            (lambda d: d.pop("modules"), "modules: expected a list"),
            (lambda d: d["modules"].clear(), "not a graph"),
            (lambda d: d["modules"][0].update(modules={"child": 0}), "among the 0 before it"),
            (lambda d: d["modules"][0].update(parameters={}), "reads or calls weight"),
            (lambda d: d["modules"][0].update(parameters={"weight": 1}), "among the 1 before it"),
            (lambda d: d["modules"][0].update(name=None), "not the name of a class"),
            (lambda d: d["modules"][0].update(convention="none"), "convention"),
            (lambda d: nodes(d).append(nodes(d)[0]), "or is another's"),
            (lambda d: nodes(d)[0].pop("args"), r"nodes\[0\]\.args"),
            (lambda d: d["tensors"][0].update(shape=[5]), "beyond its storage"),
            (lambda d: d["tensors"][0].update(offset=-1), "negative"),
            (lambda d: d["tensors"][0].update(shape=[0], stride=[2**70]), r"tensors\[0\]"),
            (lambda d: d["tensors"][0].update(shape=[2**63], stride=[0]), r"tensors\[0\]"),
            (lambda d: d["storages"][0].update(device="meta", size=2**70), r"storages\[0\]"),
            (lambda d: d["tensors"][0].update(dtype="load"), "no dtype"),
            (lambda d: d["tensors"][0].update(storage=3), r"tensors\[0\]"),
            (lambda d: d["tensors"][0].update(is_parameter=False), "not a parameter"),
            (lambda d: d["tensors"][0].update(extra=1), "unknown extra"),
            (lambda d: d["storages"][0].update(size=8), "does not have its 8 bytes"),
            (lambda d: d["storages"][0].update(checksum=1), "not those that were written"),
            (lambda d: d["storages"][0].update(device="nowhere"), "nowhere"),
        ],
    )
    def test_is_told_with_the_place(self, edit, what, written):
        with pytest.raises(ReportUnreadable, match=rf"graph\.json: .*{what}"):
            read_graph(written(edit))

    def test_may_be_cut_off_anywhere(self, written):
        path = written(lambda document: None)
        text = path.read_text()
        for length in (0, 1, len(text) // 2, len(text) - 2):
            path.write_text(text[:length])
            with pytest.raises(ReportUnreadable, match=r"graph\.json: this is not JSON"):
                read_graph(path)

    @pytest.mark.parametrize("content", ["NaN", "[]", '{"format": "torchdelta graph", "x": Infinity}', "[" * 100_000])
    def test_may_be_something_else(self, content, tmp_path):
        (tmp_path / "graph.json").write_text(content)

        with pytest.raises(ReportUnreadable, match=r"graph\.json: this is"):
            read_graph(tmp_path / "graph.json")

    def test_may_be_bytes_or_missing(self, tmp_path):
        (tmp_path / "graph.json").write_bytes(b"\x80\x04\x95")

        with pytest.raises(ReportUnreadable, match="this is not JSON"):
            read_graph(tmp_path / "graph.json")
        with pytest.raises(ReportUnreadable, match=r"cannot read .*absent\.json: No such file"):
            read_graph(tmp_path / "absent.json")

    def test_may_lack_its_tensors(self, written):
        path = written(lambda document: None)
        beside = tensors_path(path)
        content = beside.read_bytes()

        for damaged in (content[:-1], content[:20], b""):
            beside.write_bytes(damaged)
            with pytest.raises(ReportUnreadable, match=r"graph\.json\.safetensors cannot be read"):
                read_graph(path)
        beside.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ReportUnreadable, match="not those that were written"):
            read_graph(path)
        beside.unlink()
        with pytest.raises(ReportUnreadable, match=r"graph\.json\.safetensors cannot be read"):
            read_graph(path)

    def test_cannot_be_left_behind_by_a_failed_write(self, tmp_path):
        with pytest.raises(UsageError, match=r"cannot write .*nowhere"):
            write_graph(holding(held=torch.ones(2)), tmp_path / "nowhere" / "graph.json")
        write_graph(holding(held=torch.ones(2)), tmp_path / "graph.json")
        with pytest.raises(UsageError):
            write_graph(holding(held=torch.eye(2).to_sparse()), tmp_path / "graph.json")

        assert torch.equal(read_graph(tmp_path / "graph.json").held, torch.ones(2))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.json", "graph.json.safetensors"]
