"""Every compile of a process passes whoever stands there, and is otherwise what it was."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import get_compiler_fn

from torchdelta._torch.compile.backends import guarding_every
from torchdelta._torch.compile.dynamo import origin_of


def double(x):
    return x * 2


def healthy(graph_module, example_inputs):
    return graph_module


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def passed():
    """The names of backends that passed, and of those that were given a graph."""
    names, graphs = [], []

    def wrap(backend, name):
        names.append(name)

        def wrapped(graph_module, example_inputs, **options):
            graphs.append(name)
            return backend(graph_module, example_inputs, **options)

        return wrapped

    with guarding_every(wrap):
        yield names, graphs


def by_decorator(backend):
    @torch.compile(backend=backend)
    def decorated(x):
        return x * 2

    return decorated


def by_module(backend):
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

    module = Double()
    module.compile(backend=backend)
    return module


def by_stance(backend):
    def call(x):
        with torch.compiler.set_stance(force_backend=backend):
            return torch.compile(double, backend="eager")(x)

    return call


WAYS = {
    "torch.compile": lambda backend: torch.compile(double, backend=backend),
    "fullgraph": lambda backend: torch.compile(double, backend=backend, fullgraph=True),
    "dynamic": lambda backend: torch.compile(double, backend=backend, dynamic=True),
    "decorator": by_decorator,
    "Module.compile": by_module,
    "dynamo.optimize": lambda backend: torch._dynamo.optimize(backend)(double),
    "stance": by_stance,
}


class TestACompilePasses:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(("backend", "name"), [("aot_eager", "aot_eager"), (healthy, "healthy")])
    def test_whichever_way_it_is_asked_for(self, passed, way, backend, name):
        made = WAYS[way](backend)

        assert torch.equal(made(torch.ones(3)), torch.full((3,), 2.0))
        assert passed[1] == [name]

    def test_with_a_backend_that_torch_helped_to_make(self, passed):
        made = torch.compile(double, backend=aot_autograd(fw_compiler=healthy))

        made(torch.ones(3))

        assert len(passed[1]) == 1

    def test_with_a_backend_that_somebody_registered(self, passed, monkeypatch):
        monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
        monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
        registry.register_backend(healthy, name="registered")

        torch.compile(double, backend="registered")(torch.ones(3))

        assert passed[1] == ["registered"]

    def test_before_torch_is_imported_and_does_not_import_it(self):
        script = (
            "import sys\n"
            "from torchdelta._torch.compile.backends import guarding_every\n"
            "finders = list(sys.meta_path)\n"
            "with guarding_every(lambda backend, name: print(name) or backend):\n"
            "    print('torch' in sys.modules)\n"
            "    import torch\n"
            "    torch.compile(torch.relu, backend='aot_eager')\n"
            "torch.compile(torch.relu, backend='aot_eager')\n"
            "print(sys.meta_path == [*(set(sys.meta_path) - set(finders)), *finders] and finders[0] in sys.meta_path)\n"
        )

        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

        assert ran.stdout.splitlines() == ["False", "aot_eager", "True"]


class TestLeftAlone:
    def test_is_what_does_not_compile(self, passed):
        torch.compile(double, backend="eager")(torch.ones(3))
        torch.compile(double, backend="aot_eager", disable=True)(torch.ones(3))

        assert passed == ([], [])

    def test_is_what_torch_captures_for_itself(self, passed):
        torch.export.export(torch.nn.Linear(3, 3), (torch.ones(3),), strict=True)
        torch._dynamo.explain(double)(torch.ones(3))
        torch.cond(torch.tensor(True), double, lambda x: x + 1, (torch.ones(3),))

        assert passed == ([], [])

    def test_is_everything_afterwards(self):
        before = torch._dynamo.eval_frame.get_compiler_fn

        with pytest.raises(ZeroDivisionError), guarding_every(lambda backend, name: 1 / 0):
            torch.compile(double, backend="aot_eager")

        assert torch._dynamo.eval_frame.get_compiler_fn is before is get_compiler_fn


class TestWhatDynamoReads:
    def test_is_what_the_backend_has(self):
        backend = torch._TorchCompileInductorWrapper("max-autotune-no-cudagraphs", None, None)
        plain = get_compiler_fn(backend)

        with guarding_every(lambda backend, name: lambda *_: None):
            guarded = torch._dynamo.eval_frame.get_compiler_fn(backend)

        assert guarded is not plain
        had = {name: value for name, value in vars(plain).items() if name != "get_compiler_config"}
        assert {name: vars(guarded)[name] for name in had} == had
        assert guarded.get_compiler_config()["max_autotune"] is True

    @pytest.mark.usefixtures("passed")
    def test_of_mode_and_options_reaches_the_user(self):
        made = torch.compile(double, options={"max_autotune": True})

        assert made.get_compiler_config()["max_autotune"] is True

    def test_tells_compiled_code_of_one_backend_from_that_of_another(self, passed):
        for backend in ("aot_eager", "aot_eager", healthy, "aot_eager", healthy):
            torch.compile(double, backend=backend)(torch.ones(3))

        assert passed[0] == ["aot_eager", "aot_eager", "healthy", "aot_eager", "healthy"]
        assert passed[1] == ["aot_eager", "healthy"]

    def test_is_left_as_it_is_where_nothing_is_put_in_its_place(self):
        with guarding_every(lambda backend, name: backend):
            found = torch._dynamo.eval_frame.get_compiler_fn("aot_eager")

        assert type(found) is type(get_compiler_fn("aot_eager"))


@dataclass
class ConfiguredBackend:
    """A user's backend, with a `config` of its own; a dataclass cannot be hashed."""

    config: Any

    def __call__(self, graph_module, example_inputs):
        return graph_module


class TestTheOriginOfABackend:
    def test_has_the_settings_that_were_passed_to_inductor(self):
        origin = origin_of(torch._TorchCompileInductorWrapper(None, {"max_autotune": True}, None))

        assert origin.is_inductor
        assert origin.config["max_autotune"] is True

    @pytest.mark.parametrize(
        ("config", "settings"), [({"max_autotune": True}, {"max_autotune": True}), (object(), {}), (7, {}), (None, {})]
    )
    def test_has_the_settings_of_a_users_backend_if_they_are_a_mapping(self, config, settings):
        backend = ConfiguredBackend(config)

        origin = origin_of(backend)

        assert origin.backend is backend
        assert (origin.name, origin.config) == ("ConfiguredBackend", settings)
