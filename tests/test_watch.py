"""Inductor's passes are watched in the user's own run: a wrong one is named, and the run is as without."""

import contextlib
import gc
import threading

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends import common
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.codecache import FxGraphCache
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.multiprocessing.reductions import StorageWeakRef

import torchdelta as td
from torchdelta._torch.compile import aot, inductor_passes
from torchdelta._torch.compile.graph_versions import Chain, Version
from torchdelta._torch.compile.seams import BoxedCall, as_boxed
from torchdelta.passes.watch import NOTHING_SEEN, ChainJudge

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("watch")]

aten = torch.ops.aten
HOOKS = {
    "pre_grad_custom_pass": "pre-grad",
    "joint_custom_pre_pass": "joint",
    "joint_custom_post_pass": "joint",
    "post_grad_custom_pre_pass": "post-grad",
    "post_grad_custom_post_pass": "post-grad",
}
RELUS = (aten.relu.default, torch.relu, F.relu)


@pytest.fixture(autouse=True)
def compiled_afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.second(hidden + torch.sin(hidden)) * 2


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.queries = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 32)
        self.narrow = nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.queries(self.norm(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
        x = x + self.out((self.dropout(weights) @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(x)))


class Transformer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.block = Block(dropout)
        self.head = nn.Linear(16, 30)

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


def trained(dropout=0.0, steps=3):
    """Train a small transformer, and return what a user would see of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    compiled = torch.compile(model)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 30, (2, 8))
        loss = F.cross_entropy(compiled(tokens).view(-1, 30), tokens.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()


def is_same(one, other):
    return (
        one[0] == other[0]
        and all(torch.equal(ours, theirs) for ours, theirs in zip(one[1], other[1], strict=True))
        and torch.equal(one[2], other[2])
    )


def wrong_relu(graph):
    for node in graph.nodes:
        if node.target in RELUS:
            node.target = aten.sigmoid.default if node.target is aten.relu.default else torch.sigmoid


def doubled_sum(graph):
    """Write what is right in another way."""
    for node in list(graph.nodes):
        if node.target is aten.mul.Tensor and node.args[1] == 2:
            with graph.inserting_before(node):
                made = graph.call_function(aten.add.Tensor, (node.args[0], node.args[0]))
                made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def batch(**options):
    return torch.linspace(-2, 2, 32).reshape(4, 8).cos().requires_grad_(options.get("requires_grad", False))


def watched_run(run, **config):
    with inductor_config.patch(config), td.watch_passes() as watched:
        run()
    return watched


def in_training():
    torch.compile(Small())(batch()).sum().backward()


def in_inference():
    with torch.no_grad():
        torch.compile(Small())(batch())


def alive_behind_backward(context):
    """How much of what a backward is given is still there when what was compiled of it has run."""
    alive = []

    def counting(handed):
        run = as_boxed(handed.on())

        def count(args):
            given = [StorageWeakRef(arg.untyped_storage()) for arg in args]
            made = run(args)
            alive.append(sum(not storage.expired() for storage in given))
            return made

        return BoxedCall(count if handed.level == "backward" else run)

    torch._dynamo.reset()
    with inductor_config.patch(post_grad_custom_post_pass=doubled_sum), context(), aot.intercepting(counting):
        compiled = torch.compile(Small())
        for _ in range(2):
            compiled(batch()).sum().backward()
    return alive


class TestAWrongPass:
    @pytest.mark.parametrize("hook", HOOKS)
    def test_is_named_with_its_node_in_whichever_phase_it_runs(self, hook):
        watched = watched_run(in_inference, **{hook: wrong_relu})
        (finding,) = watched.findings

        assert finding.name == f"{hook} (wrong_relu)"
        assert finding.phase == HOOKS[hook]
        assert finding.graph.startswith("graph 0")
        assert "relu" in finding.culprit.op
        assert "torch.relu(self.first(x))" in finding.culprit.source_line
        assert finding.error > finding.noise

    @pytest.mark.parametrize("hook", ["pre_grad_custom_pass", "joint_custom_post_pass", "post_grad_custom_post_pass"])
    def test_is_named_in_training(self, hook):
        watched = watched_run(in_training, **{hook: wrong_relu})

        assert {finding.name for finding in watched.findings} == {f"{hook} (wrong_relu)"}
        assert {finding.phase for finding in watched.findings} == {HOOKS[hook]}
        assert all("relu" in finding.culprit.op for finding in watched.findings)

    def test_is_named_where_only_a_backward_has_it(self):
        def wrong_cosine(graph):
            if any(node.name.startswith("tangents") for node in graph.nodes):
                for node in graph.nodes:
                    if node.target is aten.cos.default:
                        node.target = aten.sin.default

        (finding,) = watched_run(in_training, post_grad_custom_post_pass=wrong_cosine).findings

        assert finding.graph == "graph 0 (backward)"
        assert finding.culprit.op == "aten.cos.default"

    def test_is_named_where_it_drops_a_node(self):
        def without_sum(graph):
            for node in list(graph.nodes):
                if node.target is aten.add.Tensor:
                    node.replace_all_uses_with(node.args[0])
                    graph.erase_node(node)

        (finding,) = watched_run(in_inference, joint_custom_post_pass=without_sum).findings

        assert finding.culprit.op == "aten.add.Tensor"

    def test_is_named_although_another_one_before_it_is_right(self):
        both = {"joint_custom_pre_pass": doubled_sum, "joint_custom_post_pass": wrong_relu}
        (finding,) = watched_run(in_inference, **both).findings

        assert finding.name == "joint_custom_post_pass (wrong_relu)"

    def test_is_nobody_where_all_are_right(self):
        watched = watched_run(in_training, joint_custom_pre_pass=doubled_sum, post_grad_custom_post_pass=doubled_sum)

        assert watched.findings == []
        assert watched.changed >= 1
        assert watched.checked == watched.changed
        assert watched.notes == []

    def test_is_named_behind_dropout_and_a_right_one_is_not(self):
        class Dropping(Small):
            def forward(self, x):
                return F.dropout(super().forward(x), 0.3) * 2

        def more(graph):
            for node in graph.nodes:
                if node.target is aten.mul.Tensor and node.args[1] == 2:
                    node.args = (node.args[0], 2.001)

        def run():
            torch.compile(Dropping())(batch())

        caught = watched_run(run, post_grad_custom_post_pass=more)
        torch._dynamo.reset()
        missed = watched_run(run, post_grad_custom_post_pass=doubled_sum)

        assert [finding.phase for finding in caught.findings] == ["post-grad"]
        # truth and reference drop the same elements, or nothing so small could be told natively
        assert caught.findings[0].reason.startswith(("rms error", "max error"))
        assert missed.findings == []
        assert missed.changed > 1

    def test_is_named_for_sizes_that_are_symbols(self):
        def run():
            compiled = torch.compile(Small(), dynamic=True)
            for size in (3, 5):
                compiled(torch.ones(size, 8)).sum().backward()

        watched = watched_run(run, joint_custom_post_pass=wrong_relu)

        assert {finding.phase for finding in watched.findings} == {"joint"}


class TestTheRunItself:
    def test_of_a_transformer_in_training_is_the_same_to_the_bit_and_nothing_is_found(self):
        without = trained()
        with td.watch_passes() as watched:
            within = trained()

        assert is_same(within, without)
        assert watched.findings == []
        assert watched.passes >= 20
        assert watched.graphs == 4
        assert watched.checked == watched.changed > 0
        assert str(watched.passes) in watched.seen

    def test_with_dropout_is_the_same_to_the_bit_and_other_draws_are_said_not_to_be_checked(self):
        without = trained(dropout=0.1)
        with td.watch_passes() as watched:
            within = trained(dropout=0.1)

        assert is_same(within, without)
        assert watched.findings == []
        assert any("draws other random numbers" in note for note in watched.notes)

    def test_keeps_modes_and_settings(self):
        settings = inductor_config.get_config_copy()
        with td.watch_passes() as watched, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            made = torch.compile(Small())(batch())
            inside = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        assert inside == (False, True, torch.bfloat16)
        assert made.dtype is torch.bfloat16
        assert watched.findings == []
        assert inductor_config.get_config_copy() == settings

    def test_in_inference_mode_is_looked_at_too(self):
        def run():
            with torch.inference_mode():
                assert torch.compile(Small())(batch()).is_inference()

        (finding,) = watched_run(run, post_grad_custom_post_pass=wrong_relu).findings

        assert finding.phase == "post-grad"

    def test_in_several_threads_is_looked_at_in_each(self):
        def run():
            with inductor_config.patch(joint_custom_post_pass=wrong_relu):  # settings hold for one thread
                in_inference()

        threads = [threading.Thread(target=run) for _ in range(2)]
        with td.watch_passes() as watched:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert watched.graphs == 6
        assert sorted(finding.graph for finding in watched.findings) == ["graph 0 (inference)", "graph 1 (inference)"]

    def test_frees_what_a_backward_was_given_as_early_as_without(self):
        # all but the weights, which are the user's
        assert alive_behind_backward(contextlib.nullcontext) == [1, 1]
        assert alive_behind_backward(td.watch_passes) == [1, 1]

    def test_is_not_reset(self, monkeypatch):
        monkeypatch.setattr(torch._dynamo, "reset", lambda: pytest.fail("the user's compiler was reset"))

        assert len(watched_run(in_inference, post_grad_custom_post_pass=wrong_relu).findings) == 1

    @pytest.mark.parametrize(
        ("kind", "method"), [(ChainJudge, "judge"), (Chain, "look"), (Version, "draws"), (Chain, "end")]
    )
    def test_goes_on_when_the_watcher_breaks(self, kind, method, monkeypatch):
        def breaks(*args):
            raise RuntimeError("a mistake of ours")

        reference = torch.compile(Small())(batch())
        torch._dynamo.reset()
        monkeypatch.setattr(kind, method, property(breaks) if method == "draws" else breaks)
        with inductor_config.patch(joint_custom_pre_pass=doubled_sum), td.watch_passes() as watched:
            made = torch.compile(Small())(batch())

        assert torch.allclose(made, reference)
        assert watched.findings == []
        assert any("a mistake of ours" in note for note in watched.notes)

    def test_raises_what_a_pass_raises(self):
        def raises(graph):
            raise ValueError("no such graph")

        with pytest.raises(Exception, match="no such graph"):
            watched_run(in_inference, joint_custom_pre_pass=raises)

        assert not inductor_passes.is_watching()


class TestTheWatcher:
    def patched(self):
        functions = [vars(compile_fx)[name] for name in inductor_passes._FUNCTIONS]
        methods = [vars(GraphTransformObserver)[name] for name in inductor_passes._METHODS]
        return [*functions, *methods, vars(common)["aot_module_simplified"], vars(FxGraphCache)["_check_can_cache"]]

    def test_puts_everything_back(self):
        before = self.patched()
        with td.watch_passes():
            assert not any(one is other for one, other in zip(before, self.patched(), strict=True))
        with pytest.raises(KeyError), td.watch_passes():
            raise KeyError

        assert all(one is other for one, other in zip(before, self.patched(), strict=True))

    def test_refuses_to_be_nested(self):
        with td.watch_passes(), pytest.raises(td.UsageError, match="watched already"), td.watch_passes():
            pytest.fail("two watchers at once")

        assert not inductor_passes.is_watching()

    def test_refuses_a_policy_that_there_is_not(self):
        with pytest.raises(td.UsageError, match="seed must be from 0"), td.watch_passes(seed=-1):
            pass
        with pytest.raises(td.UsageError), td.watch_passes(policy="nosie"):
            pytest.fail("watched by no policy")

    def test_keeps_no_copy_when_the_graphs_were_called(self):
        def kept():
            gc.collect()
            return sum(type(each) in (Version, Chain) for each in gc.get_objects())

        with inductor_config.patch(joint_custom_pre_pass=doubled_sum), td.watch_passes() as watched:
            in_training()
            while_open = kept()

        assert watched.checked >= 1
        assert while_open == 0

    def test_says_that_nothing_was_compiled(self):
        with td.watch_passes() as watched:
            Small()(batch())

        assert watched.notes == [NOTHING_SEEN]

    def test_says_what_was_not_called(self):
        def run():
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                torch.compile(Small())(batch())  # its backward is compiled, and never run

        watched = watched_run(run, post_grad_custom_post_pass=wrong_relu)

        assert any("not called while they were watched" in note for note in watched.notes)

    def test_leaves_what_only_a_library_can_read_alone(self):
        def run():
            with torch.no_grad():
                torch.compile(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval())(batch())

        watched = watched_run(run, freezing=True)

        assert watched.findings == []
        assert watched.checked == 0
        assert any("packed for a library" in note for note in watched.notes)

    def test_sees_what_a_cache_has_already(self):
        in_inference()
        torch._dynamo.reset()

        assert watched_run(in_inference).graphs == 3
