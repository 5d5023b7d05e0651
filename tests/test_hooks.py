"""The module of another implementation that goes wrong is named, and of a correct one none is."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchdelta import Verdict
from torchdelta.errors import ProgramError
from torchdelta.nodewise.modules import locate_modules
from torchdelta.program.programs import Program
from torchdelta.program.sides import Side

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        q, k, v = (split(project(x)) for project in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class AttentionByHand(Attention):
    scale = 1.0

    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) * (self.scale / math.sqrt(q.shape[-1]))
        return torch.softmax(scores, dim=-1) @ v


class WronglyScaledAttention(AttentionByHand):
    scale = 1.01


class Swapped(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(k, q, v)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x  # and not twice that


class Activation(nn.Module):
    def forward(self, x):
        return x * x


class WrongBackward(nn.Module):
    def forward(self, x):
        return Square.apply(x)


class Block(nn.Module):
    def __init__(self, attention=Attention, activation=Activation):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), activation(), nn.ReLU(inplace=True))

    def forward(self, x, *, scale=1.0):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x) * scale


class Stack(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**parts) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


class Renamed(nn.Module):
    """The same stack with other names, another class of block, and the attention written out."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = AttentionByHand()
            self.feed = nn.Sequential(nn.Linear(WIDTH, WIDTH), Activation(), nn.ReLU(inplace=True))
            self.ln = nn.LayerNorm(WIDTH)

        def forward(self, x, scale):
            x = self.attn(self.ln(x)) + x
            return self.feed(x) * scale + x

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, 0.5)
        return x

    def take(self, stack):
        for layer, block in zip(self.layers, stack.blocks, strict=True):
            layer.attn.load_state_dict(block.attention.state_dict())
            layer.feed.load_state_dict(block.mlp.state_dict())
            layer.ln.load_state_dict(block.norm.state_dict())
        return self


def side(module, *args, **kwargs):
    return Side.copied_from(Program(name="program", call=module, args=args, kwargs=kwargs))


def inputs():
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def found_in(reference, candidate, *args, **options):
    args = args or (inputs(),)
    return locate_modules(side(reference, *args), side(candidate, *args), **options)


def stack(**parts):
    torch.manual_seed(0)
    made = Stack(**parts)
    if parts:
        made.load_state_dict(stack().state_dict())
    return made


def named(found):
    return [row.reference.module_path for row in found.culprits]


def test_names_the_layer_norm_whose_epsilon_was_changed():
    candidate = stack()
    candidate.blocks[2].norm.eps = 1e-4

    found = found_in(stack(), candidate)

    assert named(found) == ["blocks.2.norm"]
    assert found.culprits[0].candidate.op == "LayerNorm"
    assert found.coverage.matched == found.coverage.total


def test_what_comes_behind_a_fault_inherits_it_and_is_not_blamed():
    candidate = stack()
    candidate.blocks[1].norm.eps = 1e-2

    found = found_in(stack(), candidate, gradients=False)

    later = next(row for row in found.rows if row.reference.module_path == "blocks.3")
    assert [seen.verdict for seen in later.inherited] == [Verdict.DIVERGED]
    assert [seen.verdict for seen in later.local] == [Verdict.EQUIVALENT]


@pytest.mark.parametrize("attention", [WronglyScaledAttention, Swapped])
def test_names_every_attention_that_computes_something_else(attention):
    found = found_in(stack(), stack(attention=attention))

    assert named(found) == [f"blocks.{index}.attention" for index in range(4)]


def test_an_attention_written_by_hand_is_no_fault():
    found = found_in(stack(), stack(attention=AttentionByHand))

    assert named(found) == []
    attention = next(row for row in found.rows if row.reference.module_path == "blocks.0.attention")
    assert attention.candidate.op == "AttentionByHand"
    assert any(seen.measurement.mismatches for seen in attention.local)


def test_names_the_module_whose_backward_is_wrong_and_forward_right():
    reference, candidate = stack(), stack()
    candidate.blocks[3].mlp[1] = WrongBackward()

    found = found_in(reference, candidate)

    assert named(found) == ["blocks.3.mlp.1"]
    (culprit,) = found.culprits
    assert {seen.verdict for seen in culprit.local} == {Verdict.EQUIVALENT}
    assert {seen.verdict for seen in culprit.local_gradients} == {Verdict.DIVERGED}
    assert named(found_in(reference, candidate, gradients=False)) == []


def test_renamed_modules_are_matched_and_none_is_named():
    reference = stack()

    found = found_in(reference, Renamed().take(reference))

    assert named(found) == []
    assert found.coverage.matched == found.coverage.total == 2 * len(found.rows)
    assert found.unmatched_candidate == ()
    pairs = {row.reference.module_path: row.candidate.module_path for row in found.rows}
    assert pairs["blocks.2.attention.k"] == "layers.2.attn.k"
    assert pairs["blocks.1.norm"] == "layers.1.ln"


def test_a_fault_among_renamed_modules_is_named():
    reference = stack()
    candidate = Renamed().take(reference)
    candidate.layers[1].ln.eps = 1e-3

    found = found_in(reference, candidate)

    assert named(found) == ["blocks.1.norm"]
    assert found.culprits[0].candidate.module_path == "layers.1.ln"


def test_a_stale_weight_is_named_where_it_is_used():
    candidate = stack()
    with torch.no_grad():
        candidate.blocks[1].mlp[0].weight[3] *= 1.1

    assert named(found_in(stack(), candidate)) == ["blocks.1.mlp.0"]


class WithoutResidual(Block):
    def forward(self, x, *, scale=1.0):
        x = self.attention(self.norm(x))
        return x + self.mlp(x) * scale


def test_a_fault_in_the_code_of_a_container_names_the_container():
    candidate = stack()
    candidate.blocks[2].__class__ = WithoutResidual

    assert named(found_in(stack(), candidate)) == ["blocks.2"]


def test_a_fault_that_bfloat16_hides_is_named_by_float64():
    candidate = stack()
    candidate.blocks[2].norm.eps = 1e-4
    reference = stack().bfloat16()

    found = locate_modules(side(reference, inputs().bfloat16()), side(candidate.bfloat16(), inputs().bfloat16()))

    assert named(found) == ["blocks.2.norm"]


def test_correct_modules_in_bfloat16_are_not_named():
    found = found_in(stack().bfloat16(), stack(attention=AttentionByHand).bfloat16(), inputs().bfloat16())

    assert named(found) == []


class Divided(nn.Module):
    """Whether the residual is inside or outside of `inner` is nobody's business."""

    def __init__(self, is_inside):
        super().__init__()
        self.inner = Residual() if is_inside else Plain()
        self.is_inside = is_inside

    def forward(self, x):
        return self.inner(x) if self.is_inside else self.inner(x) + x


class Residual(nn.Module):
    def forward(self, x):
        return x.sin() + x


class Plain(nn.Module):
    def forward(self, x):
        return x.sin()


def test_another_division_of_the_work_is_no_fault():
    found = found_in(Divided(False), Divided(True))

    assert named(found) == []
    assert "inner differs by itself, but Divided around it computes the same" in "\n".join(found.notes)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(self.second(self.norm(self.first(x))))


def test_a_shared_module_is_judged_at_each_call_and_its_state_is_left_alone():
    torch.manual_seed(0)
    model = Shared()
    reference, candidate = side(model, inputs()), side(model, inputs())

    found = locate_modules(reference, candidate)

    calls = [row.reference.name for row in found.rows if row.reference.op == "Linear"]
    assert calls == ["first", "first (call 2)"]
    assert named(found) == []
    for one in (reference, candidate):
        assert int(one.call.norm.num_batches_tracked) == 0
        assert torch.equal(one.call.norm.running_mean, torch.zeros(5))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total += x.mean()
        return x + self.total


class CountsTwice(nn.Module):
    def __init__(self, factor=1.0, activation=nn.Tanh):
        super().__init__()
        self.count, self.activation, self.factor = Counting(), activation(), factor

    def forward(self, x):
        return self.count(self.activation(self.count(x) * self.factor))


@pytest.mark.parametrize("gradients", [True, False])
def test_a_module_that_reads_state_of_its_earlier_calls_is_not_judged_and_not_blamed(gradients):
    def names(**changes):
        return named(found_in(CountsTwice(), CountsTwice(**changes), gradients=gradients))

    assert names() == []
    assert "count" not in names(factor=1.1)
    assert names(activation=nn.Sigmoid) == ["activation"]


def test_dropout_draws_the_same_on_both_sides_and_the_generator_is_as_before():
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    before = torch.get_rng_state()

    found = found_in(reference, reference)

    assert named(found) == []
    assert all(not seen.measurement.mismatches for row in found.rows for seen in (*row.local, *row.inherited))
    assert torch.equal(torch.get_rng_state(), before)


def hooks_of(module):
    return [len(inner._forward_hooks) + len(inner._forward_pre_hooks) for inner in module.modules()]


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("too late")


def test_no_hook_is_left_behind_even_by_a_side_that_raises():
    reference, candidate = side(stack(), inputs()), side(stack(activation=Raises), inputs())

    found = locate_modules(reference, candidate)

    assert named(found) == ["blocks.0.mlp.1"]
    assert found.culprits[0].local[0].verdict is Verdict.CRASHED
    assert not any(hooks_of(reference.call) + hooks_of(candidate.call))
    with pytest.raises(ProgramError, match="too late"):
        locate_modules(candidate, reference)
    assert not any(hooks_of(reference.call) + hooks_of(candidate.call))


class Many(nn.Module):
    def forward(self, x, *, flag):
        return {"twice": x * 2, "parts": (x + 1, None, 3 if flag else 4), "index": x.argmax()}


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        found = self.inner(x, flag=True)
        return found["twice"] + found["parts"][0]


class ManyWrong(Many):
    def forward(self, x, *, flag):
        return {**super().forward(x, flag=flag), "index": x.argmin()}


def test_outputs_of_every_kind_are_compared():
    (outer, inner) = found_in(Outer(Many()), Outer(Many())).rows

    assert [seen.path for seen in inner.local] == [
        "outputs['twice']",
        "outputs['parts'][0]",
        "outputs['parts'][1]",
        "outputs['parts'][2]",
        "outputs['index']",
    ]
    assert {seen.verdict for seen in (*inner.local, *outer.local)} == {Verdict.EQUIVALENT}


def test_a_wrong_output_that_nobody_uses_is_told_and_not_blamed():
    found = found_in(Outer(Many()), Outer(ManyWrong()))

    inner = found.rows[1]
    assert [seen.path for seen in inner.local if seen.verdict is Verdict.DIVERGED] == ["outputs['index']"]
    assert named(found) == []


class ReturnsWeights(nn.Module):
    """As attention of one implementation does, and that of another does not."""

    def __init__(self, returns_weights):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.returns_weights = returns_weights

    def forward(self, x, mask):
        projected = self.project(x)
        scores = projected @ projected.mT if mask is None else projected @ projected.mT + mask
        weights = scores.softmax(-1)
        return weights @ projected, (weights if self.returns_weights else None)


class Masked(nn.Module):
    def __init__(self, *, returns_weights=False, has_mask=False, epsilon=1e-5):
        super().__init__()
        self.attention = ReturnsWeights(returns_weights)
        self.norm = nn.LayerNorm(WIDTH, epsilon)
        self.has_mask = has_mask

    def forward(self, x):
        # one implementation masks, the other knows that there is nothing to mask
        mask = x.new_zeros(x.shape[1], x.shape[1]) if self.has_mask else None
        return self.norm(self.attention(x, mask)[0])


@pytest.mark.parametrize("other", [{"returns_weights": True}, {"has_mask": True}])
def test_modules_that_take_or_return_something_more_are_not_blamed(other):
    assert named(found_in(Masked(), Masked(**other))) == []
    assert named(found_in(Masked(), Masked(**other, epsilon=1e-3))) == ["norm"]


def test_a_module_that_is_given_other_tensors_is_not_judged_and_says_so():
    found = found_in(Masked(), Masked(has_mask=True))

    row = next(row for row in found.rows if row.reference.module_path == "attention")
    assert row.local == ()
    assert "other tensors than the reference does" in row.reason


class Cached(nn.Module):
    def forward(self, x, cache):
        cache.add_(x)
        return x * 2


class ForgetsTheCache(nn.Module):
    def forward(self, x, cache):
        return x * 2


class UsesCache(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        cache = torch.zeros_like(x)
        return self.inner(x, cache) + cache


def test_a_module_that_does_not_write_what_it_should_is_named():
    assert named(found_in(UsesCache(Cached()), UsesCache(ForgetsTheCache()))) == ["inner"]
    assert named(found_in(UsesCache(Cached()), UsesCache(Cached()))) == []


def test_a_candidate_without_modules_has_no_culprit_and_says_so():
    reference = stack()

    found = locate_modules(side(reference, inputs()), side(torch.sin, inputs()))

    assert (found.culprits, found.rows, found.coverage.matched) == ((), (), 0)
    assert "the candidate calls no module, so there is nothing to look at inside of it" in found.notes
    assert len(found.unmatched_reference) == found.coverage.total


def test_what_does_not_fit_in_memory_is_not_shown_and_said():
    found = found_in(stack(), stack(), limit_bytes=0, gradients=False)

    assert not any(row.inherited for row in found.rows)
    assert any("do not fit in 0 bytes" in note for note in found.notes)


def test_a_policy_without_truth_judges_by_itself():
    candidate = stack()
    candidate.blocks[2].norm.eps = 1e-1

    assert named(found_in(stack(), candidate, policy="sqnr>=10", gradients=False)) == []
    assert named(found_in(stack(), candidate, policy="sqnr>=80", gradients=False)) == ["blocks.2.norm"]
