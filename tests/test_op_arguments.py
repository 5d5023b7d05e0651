"""Arguments are read as they are typed, and never evaluated; what cannot be read is shown with its place."""

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchdelta.cli.op_arguments import DTYPES, read_arguments
from torchdelta.errors import UsageError
from torchdelta.operators.arguments import MOST_SHOWN, build, describe, describe_all


def values(text, seed=0):
    """What a text becomes, on its way through JSON."""
    return build(json.loads(json.dumps(read_arguments(text), allow_nan=False)), seed)


def only(text):
    (value,), kwargs = values(text)
    assert not kwargs
    return value


class TestReading:
    def test_tensors_numbers_strings_and_names_in_one_line(self):
        args, kwargs = values("f32[3, 4], bf16[4], [1, 2.5], 'mean', None, dim=1, dtype=torch.bfloat16, keepdim=True")

        assert [describe(each) for each in args] == ["float32[3, 4]", "bfloat16[4]", "[1, 2.5]", "'mean'", "None"]
        assert kwargs == {"dim": 1, "dtype": torch.bfloat16, "keepdim": True}
        assert describe_all(args, kwargs)[-3:] == ("dim=1", "dtype=torch.bfloat16", "keepdim=True")

    def test_nothing_is_no_arguments(self):
        assert values("") == ((), {})
        assert values("  # nothing") == ((), {})

    @pytest.mark.parametrize("name", DTYPES)
    def test_every_dtype_is_torchs(self, name):
        tensor = only(f"{name}[2, 3]")

        assert tensor.dtype == getattr(torch, DTYPES[name])
        assert tensor.shape == (2, 3)
        assert tensor.requires_grad == (tensor.is_floating_point() or tensor.is_complex())

    def test_what_has_a_gradient_is_asked_for_one_unless_it_is_switched_off(self):
        assert only("f32[3]").requires_grad
        assert only("c64[3]").requires_grad
        assert not only("i64[3]").requires_grad
        assert not only("f32[3].no_grad").requires_grad
        assert only("f32[3].no_grad.requires_grad").requires_grad
        assert only("f32[3, 4].t").is_leaf

    def test_a_scalar_tensor_and_one_without_elements(self):
        assert only("f32[()]").shape == ()
        assert only("f32[0, 4]").shape == (0, 4)

    def test_a_transposed_layout_has_the_sizes_that_were_asked_for(self):
        tensor = only("f32[2, 3, 4].t")

        assert tensor.shape == (2, 3, 4)
        assert tensor.stride() == (12, 1, 3)

    def test_a_range_holds(self):
        integers, floats, bytes_ = values("i64(-3, 4)[1000], f32(-1, 1)[1000], u8(250, 256)[1000]")[0]

        assert sorted(set(integers.tolist())) == list(range(-3, 4))
        assert -1 <= floats.min() < -0.9
        assert 0.9 < floats.max() < 1
        assert set(bytes_.tolist()) == set(range(250, 256))
        assert only("c64(2, 3)[5]").imag.min() >= 2

    def test_integers_are_small_and_truth_values_both(self):
        assert set(only("i64[1000]").tolist()) == set(range(10))
        assert set(only("bool[100]").tolist()) == {False, True}

    def test_the_same_seed_draws_the_same_and_another_other_values(self):
        (first,), _ = values("f32[8]", seed=1)
        (again,), _ = values("f32[8]", seed=1)
        (other,), _ = values("f32[8]", seed=2)

        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_two_tensors_alike_have_values_of_their_own(self):
        (first, second), _ = values("f32[8], f32[8]")

        assert not torch.equal(first, second)

    def test_drawing_leaves_the_users_generator_alone(self):
        before = torch.get_rng_state()
        values("f32[8], i64[8], f32(0, 1)[8], bool[8]")

        assert torch.equal(before, torch.get_rng_state())

    def test_containers_nest(self):
        value = only("{'a': [f32[2], (1, None)], 3: {'b': i64[1]}, 'c': ()}")

        assert describe(value) == "{'a': [float32[2], (1, None)], 3: {'b': int64[1]}, 'c': ()}"

    def test_numbers_of_every_kind(self):
        assert only("[-1, +2, 1e-3, -2.5e10, 1j, 1+2j, -1-0.5j, True]") == [
            -1,
            2,
            1e-3,
            -2.5e10,
            1j,
            1 + 2j,
            -1 - 0.5j,
            True,
        ]
        assert only("[inf, -inf, torch.inf, 1e999]") == [math.inf, -math.inf, math.inf, math.inf]
        assert math.isnan(only("nan"))

    def test_what_torch_has_names_for(self):
        assert only("torch.device('cuda:0')") == torch.device("cuda", 0)
        assert only("torch.channels_last") is torch.channels_last
        assert only("torch.float32") is torch.float32
        assert only("torch.float32[3]").dtype is torch.float32

    def test_torch_is_not_needed_to_read(self):
        code = "import sys; from torchdelta.cli.op_arguments import read_arguments; print('torch' in sys.modules)"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

        assert ended.stdout.strip() == "False"


MISTAKES = [
    ("f32[3, 4], foo", "column 12", "'foo'"),
    ("f23[3]", "column 1", "did you mean f32"),
    ("f32[]", "column", "f32[()]"),
    ("f32", "column 1", "f32[()]"),
    ("f32(0, 1)", "column 1", "sizes"),
    ("f32[3", "at its end", "does not match opening"),
    ("f32[3])", "column 7", "closes nothing"),
    ("1,\n 2), 3", "line 2, column 3", "closes nothing"),
    ("1) + (2", "column 2", "closes nothing"),
    ("1)(2", "column 2", "closes nothing"),
    ("f32[-1]", "column 5", "size"),
    ("f32[2.5]", "column 5", "size"),
    ("f32[True]", "column 5", "size"),
    ("f32[n]", "column 5", "size"),
    ("f32[1:2]", "column 5", "size"),
    ("f32[3].tt", "column 1", "did you mean t?"),
    ("f32[3].t", "column 1", "two sizes"),
    ("i64[3].requires_grad", "column 1", "no gradients"),
    ("i64(0)[3]", "column 1", "two numbers"),
    ("i64(0, high=3)[3]", "column 1", "two numbers"),
    ("i64(3, 3)[3]", "column 1", "no value is at least 3 and below 3"),
    ("i64(0.5, 3)[3]", "column 5", "int64"),
    ("u8(-1, 3)[3]", "column 4", "uint8"),
    ("i8(0, 129)[3]", "column 7", "int8"),
    ("f32(0, inf)[3]", "column 8", "finite"),
    ("bool(0, 1)[3]", "column 1", "range"),
    ("dim=1, 2", "at its end", "positional"),
    ("dim=1, dim=2", "", "dim"),
    ("*[1]", "column 1", ""),
    ("**{'a': 1}", "column 3", "unpack"),
    ("{**a}", "column 1", "unpack"),
    ("{[1]: 2}", "column 2", "key"),
    ("{1, 2}", "column 1", "an argument is"),
    ("[x for x in y]", "column 1", "an argument is"),
    ("f'{1}'", "column 1", "an argument is"),
    ("b'x'", "column 1", "an argument is"),
    ("...", "column 1", "an argument is"),
    ("lambda: 1", "column 1", "an argument is"),
    ("1 + 1", "column 1", "nothing is computed"),
    ("2 * 3", "column 1", "an argument is"),
    ("-'a'", "column 2", "not a number"),
    ("-True", "column 2", "not a number"),
    ("__import__('os')", "column 1", "an argument is"),
    ("os.system('true')", "column 1", "an argument is"),
    ("torch.load('x')", "column 1", "an argument is"),
    ("torch.float31", "column 1", "float32"),
    ("torch.device(0)", "column 1", "torch.device('cpu')"),
    ("x := 1", "column", ""),
    ("f32[3], 'Grüße', f33[4]", "column 18", "f33"),
    ("\x00", "", "null"),
    ("1,\n  foo", "line 2, column 3", "'foo'"),
    ("(" * 300, "", ""),
    ("-" * 5000 + "1", "", ""),
    ("f32[3]" + ".t" * 5000, "", ""),
    ("1" * 5000, "", ""),
    ("\ud800", "", ""),
]


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "place", "hint"),
        MISTAKES,
        ids=[text[:20].encode("ascii", "replace").decode().replace("\x00", "null") for text, *_ in MISTAKES],
    )
    def test_is_shown_with_its_place(self, text, place, hint):
        with pytest.raises(UsageError) as caught:
            read_arguments(text)

        assert str(caught.value).startswith("--args: ")
        assert place in str(caught.value)
        assert hint in str(caught.value)

    def test_more_elements_than_there_is_memory_for(self):
        with pytest.raises(UsageError, match=r"float32\[1000000000, 1000000000, 1000\] cannot be made on cpu"):
            values("f32[1000000000, 1000000000, 1000]")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
    def test_a_device_that_is_not_there(self):
        with pytest.raises(UsageError, match=r"float32\[3\] cannot be made on cuda"):
            values("f32[3].cuda")

    def test_a_device_that_nobody_knows(self):
        with pytest.raises(UsageError, match="there is no device 'abacus'"):
            values("torch.device('abacus')")

    @given(st.text(max_size=40) | st.text("f32[]()., '=-1x", max_size=30))
    def test_any_text_is_read_or_refused(self, text):
        try:
            args, kwargs = read_arguments(text)
        except UsageError:
            return
        json.dumps([args, kwargs], allow_nan=False)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False, allow_infinity=False).map(lambda number: number + 0)  # no zero with a sign
    | st.text(max_size=5)
    | st.sampled_from([torch.float16, torch.bool, torch.strided, torch.channels_last, torch.device("cuda:1")])
)
TENSORS = st.builds(
    lambda dtype, sizes: torch.zeros(sizes, dtype=getattr(torch, dtype)),
    st.sampled_from(sorted(set(DTYPES.values()))),
    st.lists(st.integers(0, 3), max_size=3),
)
TREES = st.recursive(
    SCALARS | TENSORS,
    lambda each: (
        st.lists(each, max_size=MOST_SHOWN)
        | st.lists(each, max_size=MOST_SHOWN).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), each, max_size=3)
    ),
    max_leaves=10,
)


class TestDescribing:
    @given(TREES)
    @example(-1j + 0)
    def test_what_is_described_is_read_back_alike(self, value):
        assert describe(only(f"{describe(value)},")) == describe(value)

    @given(SCALARS)
    def test_what_is_no_tensor_is_read_back_the_same(self, value):
        assert only(f"{describe(value)},") == value

    def test_long_lists_are_cut(self):
        assert describe(list(range(20))) == "[0, 1, 2, 3, 4, 5, 6, 7, … 12 more]"

    def test_what_has_no_short_form_is_named_by_its_type(self):
        assert describe(torch.Generator()) == "Generator"
        assert describe(torch.nn.Parameter(torch.zeros(3))) == "float32[3]"
        assert describe(torch.Size([1, 2])) == "[1, 2]"
