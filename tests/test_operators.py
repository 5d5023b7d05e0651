"""Operators are found by whatever name a user has for them; what is none, or takes other arguments, is said so."""

import pytest
import torch

from torchdelta._torch.operators.lookup import devices_of, name_of, operator_named, require_fitting, require_kernel
from torchdelta.errors import EnvironmentUnfit, UsageError

_LIBRARY = torch.library.Library("td_named", "FRAGMENT")
_LIBRARY.define("only_cuda(Tensor x) -> Tensor")
_LIBRARY.impl("only_cuda", lambda x: x, "CUDA")
_LIBRARY.define("nowhere(Tensor x) -> Tensor")


@torch.library.custom_op("td_named::everywhere", mutates_args=())
def everywhere(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    raise AssertionError("no kernel is run to find out what fits")


class TestNames:
    @pytest.mark.parametrize(
        ("name", "op"),
        [
            ("aten.add.Tensor", torch.ops.aten.add.Tensor),
            ("aten::add.Tensor", torch.ops.aten.add.Tensor),
            ("aten.add", torch.ops.aten.add),
            ("aten::add", torch.ops.aten.add),
            ("torch.ops.aten.add", torch.ops.aten.add),
            ("torch.ops.aten.add.Tensor", torch.ops.aten.add.Tensor),
            (" aten.relu.default ", torch.ops.aten.relu.default),
            ("td_named::everywhere", torch.ops.td_named.everywhere),
            ("td_named.everywhere.default", torch.ops.td_named.everywhere.default),
            ("torch.ops.td_named.everywhere", torch.ops.td_named.everywhere),
            ("torch.add", torch.add),
            ("torch.nn.functional.gelu", torch.nn.functional.gelu),
            ("nn.functional.gelu", torch.nn.functional.gelu),
            ("torch.linalg.norm", torch.linalg.norm),
            ("torch.Tensor.add", torch.Tensor.add),
        ],
    )
    def test_every_spelling_is_understood(self, name, op):
        assert operator_named(name) is op

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("aten.addd", r"did you mean aten\.add or"),
            ("aten.add.Tensors", r"no overload 'Tensors': there are aten\.add\.Tensor, aten\.add\.Scalar$"),
            ("td_named.everywhere.x", r"there is td_named\.everywhere\.default$"),
            ("td_nmaed::everywhere", r"the namespace 'td_nmaed' of .* is not registered.*--import.*td_named"),
            ("add", r"did you mean aten\.add or prims\.add or torch\.add"),
            ("flurb", r"write namespace\.operator"),
            ("", r"write namespace\.operator"),
            ("::", r"write namespace\.operator"),
            ("aten.", r"there is no operator 'aten\.'"),
            ("torch.nn.functional.gelo", r"torch\.nn\.functional has no 'gelo': did you mean gelu"),
            ("torch.nn.Linear", r"torch\.nn\.Linear is a class"),
            ("torch.nn.functional", "is a module"),
            ("torch.pi", "is a float"),
            ("torch.ops.higher_order.cond", r"call it in a function of yours"),
        ],
    )
    def test_what_is_none_is_said_so_with_the_nearest(self, name, said):
        with pytest.raises(UsageError, match=said):
            operator_named(name)

    def test_an_operator_is_called_by_its_name(self):
        assert name_of(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
        assert name_of(everywhere) == "td_named.everywhere"
        assert name_of(lambda x: x) == "<lambda>"

    @pytest.mark.parametrize(
        "name",
        ["torch.mm", "torch.nn.functional.gelu", "torch.linalg.inv", "torch.special.expit", "torch.Tensor.add_"],
    )
    def test_a_function_of_torch_is_called_as_users_call_it(self, name):
        assert name_of(operator_named(name)) == name


class TestDevices:
    def test_a_kernel_for_one_device_only(self):
        assert devices_of(torch.ops.td_named.only_cuda) == {"cuda"}
        assert devices_of(torch.ops.td_named.only_cuda.default) == {"cuda"}
        assert devices_of(torch.ops.td_named.nowhere) == frozenset()

    @pytest.mark.parametrize("op", [torch.ops.aten.linear, torch.ops.aten.add.Tensor, torch.add, everywhere])
    def test_what_is_made_of_others_runs_anywhere(self, op):
        assert devices_of(op) is None

    def test_torchs_own_have_one_for_the_cpu(self):
        assert "cpu" in devices_of(torch.ops.aten.relu.default)
        assert "cpu" in devices_of(torch.ops.aten.mkldnn_linear)

    def test_one_that_is_missing_here_is_said_so(self):
        with pytest.raises(EnvironmentUnfit, match=r"td_named\.only_cuda has a kernel for cuda only.*run on cpu"):
            require_kernel(torch.ops.td_named.only_cuda, "cpu")
        with pytest.raises(EnvironmentUnfit, match="has no kernel in this process"):
            require_kernel(torch.ops.td_named.nowhere, "cpu")

    def test_one_that_is_there_is_no_reason_to_complain(self):
        require_kernel(torch.ops.td_named.only_cuda, "cuda")
        require_kernel(torch.ops.aten.relu, "cpu")
        require_kernel(everywhere, "cpu")


class TestFitting:
    @pytest.mark.parametrize(
        ("args", "kwargs", "said"),
        [
            ((torch.ones(3), "x"), {}, "'other' but instead found type 'str'"),
            ((torch.ones(3),), {}, "missing value for argument 'other'"),
            ((torch.ones(3),) * 4, {}, "received 4"),
            ((torch.ones(3),) * 2, {"beta": 1}, "'beta'"),
            ((None, torch.ones(3)), {}, "got None"),
        ],
    )
    def test_what_does_not_fit_is_said_with_the_schema(self, args, kwargs, said):
        with pytest.raises(UsageError) as caught:
            require_fitting(torch.ops.aten.add.Tensor, args, kwargs)

        assert "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor" in str(caught.value)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_of_several_overloads_those_are_listed_that_tensors_can_reach(self):
        with pytest.raises(
            UsageError, match=r"aten::add\.Tensor\(.*; or aten::add\.Scalar\(.*they match none"
        ) as caught:
            require_fitting(torch.ops.aten.add, (torch.ones(3), "x"), {})

        assert "aten::add.str" not in str(caught.value)

    def test_no_kernel_is_run_to_find_out(self):
        total = torch.ones(3)
        require_fitting(everywhere, (total,), {"by": 2.0})
        require_fitting(torch.ops.aten.add_.Tensor, (total, 1), {})

        assert torch.equal(total, torch.ones(3))
        with pytest.raises(UsageError, match=r"td_named::everywhere\(Tensor x, float by=1\.\) -> Tensor"):
            require_fitting(everywhere, (total, "two"), {})

    def test_sizes_that_do_not_fit_are_the_operators_own_business(self):
        require_fitting(torch.ops.aten.mm, (torch.ones(2, 3), torch.ones(2, 3)), {})

    def test_a_function_has_a_signature(self):
        require_fitting(torch.add, (torch.ones(3), "x"), {})
        with pytest.raises(UsageError, match=r"missing a required argument: 'y'; it takes \(x, y\)"):
            require_fitting(lambda x, y: x, (1,), {})
