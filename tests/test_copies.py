"""Two copies of a program share nothing, and each keeps its own aliasing, strides and requires_grad."""

import functools
import weakref

import pytest
import torch
from torch import nn

import torchdelta as td
from torchdelta.errors import ProgramError
from torchdelta.program.copies import copy_together
from torchdelta.program.sides import state_of

SHARED = nn.Linear(2, 2)
TABLE = torch.ones(3)


def copied(value):
    return copy_together(value, name="test")


def test_tensors_that_share_memory_still_do_in_the_copy_and_not_with_the_original():
    base = torch.arange(6.0)
    view = base[2:]

    base_copy, view_copy = copied((base, view))
    view_copy[0] = 99

    assert base_copy[2] == 99
    assert base[2] == 2


def test_strides_offsets_and_requires_grad_are_kept():
    x = torch.arange(12.0).reshape(3, 4).t()[1:].requires_grad_()
    duplicate = copied(x)

    assert duplicate.stride() == x.stride()
    assert duplicate.storage_offset() == x.storage_offset()
    assert duplicate.requires_grad
    assert duplicate.is_leaf
    assert torch.equal(duplicate, x)


def test_an_expanded_tensor_stays_expanded():
    assert copied(torch.ones(1, 3).expand(4, 3)).stride() == (0, 1)


def test_a_tensor_that_is_not_a_leaf_becomes_one():
    x = torch.ones(3, requires_grad=True) * 2
    duplicate = copied(x)

    assert duplicate.is_leaf
    assert duplicate.requires_grad
    assert duplicate.grad_fn is None


def test_tied_parameters_stay_tied_and_parameters_stay_parameters():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight

    duplicate = copied(model)

    assert duplicate[1].weight is duplicate[0].weight
    assert isinstance(duplicate[0].weight, nn.Parameter)
    assert duplicate[0].weight.data_ptr() != model[0].weight.data_ptr()


def test_two_parameters_over_one_storage_stay_over_one_storage():
    flat = torch.zeros(4)
    pair = nn.ParameterList([nn.Parameter(flat[:2]), nn.Parameter(flat[2:])])

    first, second = copied(pair)

    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != flat.data_ptr()


def test_an_argument_that_is_a_parameter_of_the_module_is_the_same_one_in_the_copy():
    model = nn.Linear(3, 3)
    duplicate, (weight,) = copied((model, (model.weight,)))

    assert duplicate.weight is weight


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype_is_copied_exactly(dtype):
    x = torch.tensor([0, 1, 1]).to(dtype)
    duplicate = copied(x)

    assert duplicate.dtype is dtype
    assert torch.equal(duplicate.to(torch.complex64), x.to(torch.complex64))


def test_sparse_empty_and_conjugated_tensors_are_copied():
    sparse = torch.eye(3).to_sparse()
    conjugated = torch.tensor([1 + 2j]).conj()

    assert torch.equal(copied(sparse).to_dense(), torch.eye(3))
    assert torch.equal(copied(conjugated), conjugated)
    assert copied(torch.empty(0, 3)).shape == (0, 3)


def test_a_closure_over_a_module_is_copied_with_it():
    model = nn.Linear(2, 2)
    duplicate = copied(lambda x: model(x))
    parameters = state_of(duplicate).parameters

    assert list(parameters) == ["model.weight", "model.bias"]
    assert parameters["model.weight"] is not model.weight
    assert torch.equal(duplicate(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_functions_that_call_each_other_through_closures_are_copied_together():
    scale = torch.ones(1)

    def inner(x):
        return x * scale

    def outer(x, depth=1):
        return outer(inner(x), depth - 1) if depth else x

    duplicate = copied(outer)
    scale.fill_(100)

    assert duplicate(torch.ones(1)).item() == 1


def uses_shared(x):
    return helper(x) + TABLE.sum()


def helper(x):
    return SHARED(x)


def test_module_level_state_that_a_function_uses_is_copied_too():
    duplicate = copied(uses_shared)
    parameters, buffers = state_of(duplicate).parameters, state_of(duplicate).buffers

    assert parameters["SHARED.weight"] is not SHARED.weight
    assert buffers["TABLE"] is not TABLE
    assert torch.equal(duplicate(torch.ones(1, 2)), uses_shared(torch.ones(1, 2)))
    with torch.no_grad():
        parameters["SHARED.weight"].zero_()
    assert torch.equal(duplicate(torch.ones(1, 2)), (SHARED.bias + 3).unsqueeze(0))


def test_defaults_partials_and_bound_methods_are_copied():
    weight = torch.ones(2)

    def scaled(x, w=weight):
        return x * w

    class Holder:
        def __init__(self):
            self.weight = torch.ones(2)

        def run(self, x):
            return x * self.weight

    holder = Holder()
    for call in (scaled, functools.partial(torch.mul, weight), holder.run):
        duplicate = copied(call)
        weight.fill_(5), holder.weight.fill_(5)
        assert torch.equal(duplicate(torch.ones(2)), torch.ones(2))
        weight.fill_(1), holder.weight.fill_(1)


def test_a_function_without_state_is_left_alone():
    def plain(x):
        return torch.relu(x)

    assert copied(plain) is plain


class UsesGlobalParameter(nn.Module):
    def forward(self, x):
        return SHARED(x)


def test_a_method_that_trains_a_module_level_parameter_is_refused():
    with pytest.raises(td.ProgramError, match=r"SHARED\.weight.*both sides would share"):
        td.check(UsesGlobalParameter(), (torch.ones(1, 2),), transform="eager")


class CountsInGlobal(nn.Module):
    def forward(self, x):
        TABLE.add_(1)
        return x + TABLE


def test_a_method_that_changes_a_module_level_tensor_is_refused():
    try:
        with pytest.raises(td.ProgramError, match="TABLE"):
            td.check(CountsInGlobal(), (torch.ones(3),), candidate=CountsInGlobal())
    finally:
        TABLE.fill_(1)


def test_what_cannot_be_copied_is_refused_with_a_reason():
    import threading

    model = nn.Linear(2, 2)
    model.lock = threading.Lock()

    with pytest.raises(td.ProgramError, match=r"cannot be copied.*lock"):
        td.check(model, (torch.ones(1, 2),), transform="eager")


def test_dtypes_are_converted_on_the_way_with_the_aliasing_kept():
    base = torch.arange(4.0)
    wide, view = copy_together(
        (base, base[1:]), name="test", convert=lambda dtype: torch.float64 if dtype.is_floating_point else dtype
    )

    assert wide.dtype is view.dtype is torch.float64
    assert wide.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert view.tolist() == [1, 2, 3]


def test_a_module_with_uninitialized_parameters_is_refused_with_a_reason():
    with pytest.raises(td.ProgramError, match="cannot be copied"):
        td.check(nn.LazyLinear(3), (torch.ones(2, 2),), transform="eager")


def test_a_closure_over_an_imported_module_is_no_obstacle():
    import math

    model = nn.Linear(2, 2)

    def call(x):
        return model(x) * math.pi

    assert td.check(call, (torch.ones(1, 2),), transform="eager").verdict is td.Verdict.EQUIVALENT


weight = torch.ones(3, requires_grad=True)


def test_an_attribute_is_not_taken_for_a_global_of_the_same_name():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.weight

    assert td.check(Scaled(), (torch.ones(2),), transform="eager").verdict is td.Verdict.EQUIVALENT


def test_a_forward_that_was_replaced_on_the_instance_is_copied_with_it():
    import types

    model = nn.Linear(2, 2)
    old = model.forward
    model.forward = types.MethodType(lambda self, x: old(x) * 2, model)
    td.check(model, (torch.ones(1, 2),), transform="eager")

    assert model.weight.grad is None


def test_caches_and_counters_in_a_closure_are_copied():
    cache, counted = {}, 0

    def call(x):
        nonlocal counted
        counted += 1
        cache["last"] = x
        return x + counted

    assert td.check(call, (torch.ones(2),), candidate=call).verdict is td.Verdict.EQUIVALENT
    assert (cache, counted) == ({}, 0)


def test_a_bound_method_of_a_tensor_is_copied_with_its_tensor():
    w = torch.ones(2, 2, requires_grad=True)
    td.check(w.matmul, (torch.ones(2, 2),), candidate=lambda x: torch.ones(2, 2) @ x, stages="forward")

    assert w.grad is None


def test_a_trained_tensor_of_a_class_is_refused():
    class Shared(nn.Module):
        w = torch.ones(2, requires_grad=True)

        def forward(self, x):
            return x * self.w

    with pytest.raises(td.ProgramError, match=r"Shared\.w"):
        td.check(Shared(), (torch.ones(2),), transform="eager")


def test_the_model_of_another_module_is_refused(tmp_path, monkeypatch):
    (tmp_path / "holds_model.py").write_text("import torch\nnet = torch.nn.Linear(2, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import holds_model

    namespace = {"holds_model": holds_model}
    exec("def foreign(x):\n    return holds_model.net(x)\n", namespace)
    with pytest.raises(td.ProgramError, match=r"holds_model\.net\.weight"):
        td.check(namespace["foreign"], (torch.ones(1, 2),), transform="eager")


def test_a_large_list_beside_the_model_costs_no_time_to_speak_of():
    numbers, model = list(range(30_000)), nn.Linear(2, 2)

    def call(x):
        return model(x) + numbers[0]

    assert td.check(call, (torch.ones(1, 2),), candidate=call).verdict is td.Verdict.EQUIVALENT


def test_a_lock_or_a_logger_beside_the_model_is_no_obstacle():
    import logging
    import threading

    lock, logger, model, notes = (
        threading.Lock(),
        logging.getLogger("test"),
        nn.Linear(2, 2),
        {"lock": threading.Lock()},
    )

    def call(x):
        with lock, notes["lock"]:
            logger.debug("called")
            return model(x)

    assert td.check(call, (torch.ones(1, 2),), candidate=call).verdict is td.Verdict.EQUIVALENT


class Logging(nn.Module):
    """Appends to a list by a builtin method that it keeps."""

    def __init__(self, added=1):
        super().__init__()
        self.log, self.added = [], added
        self.push = self.log.append

    def forward(self, x):
        self.push(self.added)
        return x * 2


def test_a_builtin_method_of_a_copy_works_on_the_copied_list():
    original = Logging()
    duplicate = copied(original)
    duplicate(X)

    assert duplicate.log == [1]
    assert original.log == []


def test_a_list_that_is_changed_by_a_builtin_method_is_compared():
    user = Logging()

    assert td.check(user, (X,), candidate=Logging(2)).verdict is td.Verdict.DIVERGED
    assert td.check(user, (X,), candidate=Logging(1)).verdict is td.Verdict.EQUIVALENT
    assert user.log == []


class Scaled(nn.Module):
    def __init__(self, slope: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.slope = nn.Linear(2, 2), slope

    def forward(self, x):
        y = self.layer(x)
        return y.detach() + (y - y.detach()) * self.slope


X = torch.linspace(-1, 1, 6).reshape(3, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("script", [torch.jit.script, lambda module: torch.jit.trace(module, (X,))])
def test_a_module_of_torchscript_has_gradients_of_its_own(script):
    user = script(Scaled())

    assert td.check(user, (X,), candidate=script(Scaled())).verdict is td.Verdict.EQUIVALENT
    assert td.check(user, (X,), candidate=Scaled()).verdict is td.Verdict.EQUIVALENT
    assert td.check(user, (X,), candidate=script(Scaled(1.5))).verdict is td.Verdict.DIVERGED
    assert all(parameter.grad is None for parameter in user.parameters())


class Indirect(nn.Module):
    """Reaches its layer by a weak reference and by a cached method."""

    def __init__(self, slope=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.slope = nn.Linear(2, 2), slope
        self.weak = weakref.ref(self.layer)
        self.cached = functools.lru_cache(None)(self.get)

    def get(self):
        return self.layer

    def forward(self, x):
        y = x @ self.weak().weight + self.cached().bias
        return y.detach() + (y - y.detach()) * self.slope


def test_weak_references_and_cached_methods_of_a_copy_reach_the_copy():
    user, other = Indirect(), Indirect(1.5)

    assert td.check(user, (X,), candidate=Indirect()).verdict is td.Verdict.EQUIVALENT
    assert td.check(user, (X,), candidate=other).verdict is td.Verdict.DIVERGED
    assert all(parameter.grad is None for module in (user, other) for parameter in module.parameters())


def test_a_program_whose_copies_train_the_original_is_refused():
    user = nn.Linear(2, 2)
    everywhere = weakref.WeakValueDictionary(layer=user)

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = user

        def forward(self, x):
            return everywhere["layer"](x)

    with pytest.raises(ProgramError, match="of the original"):
        td.check(Hidden(), (X,), candidate=Hidden())
    assert user.weight.grad is None


class ReadOnlyDict(dict):
    def update(self, *args, **kwargs):
        raise TypeError("read only")


class ReadOnlyList(list):
    def __setitem__(self, index, value):
        raise TypeError("read only")


def test_containers_that_refuse_writes_are_copied_and_refer_to_the_copies():
    layer = torch.nn.Linear(2, 2)
    containers = ReadOnlyDict(a=weakref.ref(layer), b=torch.ones(2)), ReadOnlyList([weakref.ref(layer), 1])

    duplicate, (mapping, items) = copy_together((layer, containers), name="program")

    assert duplicate is not layer
    assert mapping["a"]() is duplicate
    assert items[0]() is duplicate
    assert (type(mapping), type(items)) == (ReadOnlyDict, ReadOnlyList)


def test_a_weak_reference_in_a_tuple_refers_to_the_copy():
    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    layer.references = (1, (weakref.ref(layer),), weakref.ref(other))

    duplicate = copy_together(layer, name="program")

    assert duplicate.references[1][0]() is duplicate
    assert duplicate.references[2]() is other
    assert layer.references[1][0]() is layer
