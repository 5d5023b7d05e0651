"""Faults are named exactly: each is planted among twenty correct rewrites, in the open or behind a black box."""

import pytest
import torch

import torchdelta as td
from programs import models
from programs.hidden import Hidden
from torchdelta.audit.faults import FAULTS
from torchdelta.transforms.fx_pass import FxPass

# model, kind, seed: each kind once at least, and each model in the open and behind a black box; `benchmarks/locate.py`
# has them all
CASES = [
    ("bert", "epsilon_1e_3", 1),
    ("bert", "residual_dropped", 2),
    ("bert", "attention_scale_dropped", 1),
    ("bert", "gradient_detached", 1),
    ("bert", "softmax_dimension", 1),
    ("gpt2", "causal_mask_off_by_one", 1),
    ("gpt2", "matmul_operands_swapped", 1),
    ("gpt2", "gelu_coefficient", 1),
    ("gpt2", "cast_through_float16", 1),
    ("gpt2", "layer_norm_unbiased_variance", 1),
    ("vit", "view_order", 1),
    ("vit", "slice_off_by_one", 1),
    ("vit", "gelu_approximation", 1),
    ("vit", "tail_element", 1),
    ("resnet", "padding_asymmetric", 1),
    ("resnet", "relu_leaky", 1),
    ("resnet", "mean_over_n_minus_1", 1),
    ("resnet", "parameter_stale", 1),
    ("resnet", "scale_by_1_001", 1),
    ("lstm", "add_to_subtract", 1),
    ("lstm", "bias_dropped", 1),
    ("lstm", "embedding_padding", 1),
    ("lstm", "cast_through_bfloat16", 1),
    ("lstm", "matmul_low_precision", 1),
]
BLACK_BOXES = [CASES[index] for index in (0, 3, 5, 8, 11, 13, 15, 17, 19, 21)]


def located(name, hidden):
    model, inputs = models.build(name, probing=True)
    return td.locate(model, inputs, transform=FxPass(hidden, {"graph": "export"}))


def test_at_least_twenty_kinds_of_fault_are_planted_and_all_of_them_exist():
    kinds = {kind for _, kind, _ in CASES}

    assert len(kinds) >= 20
    assert kinds <= set(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "seed"), CASES)
def test_names_exactly_the_planted_node_in_the_open(name, kind, seed):
    hidden = Hidden(kind, seed=seed)
    found = located(name, hidden)

    assert found.verdict is td.Verdict.DIVERGED
    assert hidden.rewritten >= 20
    assert [culprit.node for culprit in found.culprits] == [hidden.planted]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "seed"), BLACK_BOXES)
def test_names_exactly_the_planted_node_behind_a_black_box(name, kind, seed):
    hidden = Hidden(kind, seed=seed, is_black_box=True)
    found = located(name, hidden)

    assert found.verdict is td.Verdict.DIVERGED
    assert [culprit.node for culprit in found.culprits] == [hidden.planted]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_black_box"),
    [*((name, False) for name in ("bert", "gpt2", "vit", "resnet", "lstm")), ("gpt2", True), ("resnet", True)],
)
def test_names_nobody_where_nothing_was_planted(name, is_black_box):
    found = located(name, Hidden(is_black_box=is_black_box))

    assert found.verdict is td.Verdict.EQUIVALENT
    assert found.culprits == ()
    assert found.coverage.matched > 0.9 * found.coverage.total


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)) * 2.0).sigmoid()


def test_says_in_which_module_and_line_of_the_users_own_code():
    torch.manual_seed(0)
    found = td.locate(
        Chain(), (torch.randn(4, 8),), transform=FxPass(Hidden("bias_dropped", rewrites=0), {"graph": "export"})
    )

    (culprit,) = found.culprits
    assert culprit.op == "aten.linear.default"
    assert culprit.module_path in ("first", "second")
    assert f"{__file__}:" in culprit.source_line
    assert "self.second(torch.relu(self.first(x)) * 2.0)" in culprit.source_line
    assert culprit.stage == "forward"
    assert culprit.local_error > 100 * culprit.noise
