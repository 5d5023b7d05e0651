"""Every pair of leaves ends as a comparison with a verdict and its evidence, whatever kind of tensor it is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

import torchdelta as td
from torchdelta import Verdict
from torchdelta.compare.judge import Judge, is_inexact
from torchdelta.compare.leaves import leaves_of
from torchdelta.compare.policies import parse

EQUIVALENT, DIVERGED, INCONCLUSIVE = Verdict.EQUIVALENT, Verdict.DIVERGED, Verdict.INCONCLUSIVE
NAN, INF = math.nan, math.inf
POLICIES = ("close", "bitwise", "rtol=1e-3,atol=1e-3", "sqnr>=40", "cosine>=0.999", "noise")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
RAW = [torch.bits8, torch.bits16, torch.uint4, torch.int3, torch.float4_e2m1fn_x2]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore:.*[Ss]parse.*beta")


def seen_in(reference, candidate, **options):
    (seen,) = td.compare(reference, candidate, **options).comparisons
    return seen


def verdict_of(reference, candidate, **options):
    return td.compare(reference, candidate, **options).verdict


class TestWhatOtherToolsCallTheSame:
    """Every pair that a tool in use today passes, and that is not the same."""

    PAIRS = {
        "ones(3) and ones(1)": lambda: (torch.ones(3), torch.ones(1)),
        "two tokens at a tolerance of 1e-3": lambda: (torch.tensor([5000]), torch.tensor([5004])),
        "one shared NaN and all else wrong": lambda: (_with_nan(1.0), _with_nan(777.0)),
        "one of a hundred thousand elements": lambda: _with_one_off(0.03),
        "one NaN in the reference and the candidate 3 % off": lambda: (_with_nan(1.0), torch.full((4,), 1.03)),
        "nothing and a tensor": lambda: ((None,), (torch.ones(3),)),
        "a renamed key": lambda: ({"loss": torch.ones(1)}, {"losses": torch.ones(1)}),
        "fewer outputs": lambda: ([torch.ones(1), torch.ones(1)], [torch.ones(1)]),
        "a flipped bit of a mask": lambda: (torch.ones(1000) > 0, _with_one_flipped()),
        "complex as real": lambda: (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
        "float8": lambda: (torch.ones(4).to(torch.float8_e4m3fn), torch.full((4,), 1.125).to(torch.float8_e4m3fn)),
        "a value a million times too large": lambda: (torch.ones(4), torch.full((4,), 1e6)),
        "a permutation": lambda: (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        "a flipped sign": lambda: (torch.tensor([1.0, -2.0]), torch.tensor([1.0, 2.0])),
    }

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
    def test_is_never_equivalent(self, make, policy):
        reference, candidate = make()
        if policy in ("sqnr>=40", "cosine>=0.999") and verdict_of(reference, candidate) is not DIVERGED:
            pytest.skip("the pair differs")

        verdict = verdict_of(reference, candidate, policy=policy)

        passes_by_design = {"sqnr>=40": _with_one_off, "cosine>=0.999": None}
        assert passes_by_design is not None
        assert verdict in (DIVERGED, INCONCLUSIVE)
