"""`torchdelta op NAME`: an operator by its name, in a process of its own."""

import os
import sys

import pytest

from torchdelta import cli

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("op_cli")]

OPERATORS = """
import os, signal, torch

@torch.library.custom_op("of_a_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@doubled.register_fake
def _(x):
    return torch.empty_like(x)

@torch.library.custom_op("of_a_test::wrong", mutates_args=())
def wrong(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@wrong.register_fake
def _(x):
    return torch.empty(3)

@torch.library.custom_op("of_a_test::deadly", mutates_args=())
def deadly(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)

@torch.library.custom_op("of_a_test::deadly_to_trace", mutates_args=())
def deadly_to_trace(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@deadly_to_trace.register_fake
def _(x):
    os.kill(os.getpid(), signal.SIGSEGV)

def inputs():
    return (torch.ones(4),), {}

def cubed(x):
    return x**3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "operators.py"
    path.write_text(OPERATORS)
    return path


@pytest.fixture
def run(monkeypatch, capfd):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["torchdelta", "op", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        return exited.value.code, capfd.readouterr()

    return run


def test_an_operator_of_torch_is_checked_by_its_name(run, tmp_path):
    code, printed = run("aten.sin.default", "--args", "float32[3, 4]", "--json", tmp_path / "op.json")

    assert code == 0
    assert "equivalent  aten.sin.default(float32[3, 4])" in printed.out
    assert "= aot/dynamic/min-cut" in printed.out
    assert (tmp_path / "op.json").exists()


def test_one_of_a_users_own_is_checked_on_what_a_factory_gives(run, file):
    code, printed = run("of_a_test::doubled", "--import", file, "--inputs", f"{file}:inputs", "--gradients", "no")

    assert code == 0
    assert "(float32[4])" in printed.out


def test_a_wrong_fake_kernel_is_found(run, file):
    code, printed = run(
        "of_a_test::wrong", "--import", file, "--args", "float32[5]", "--gradients", "no", "--probes", "fake"
    )

    assert code == 1
    assert "≠ fake/given" in printed.out


def test_a_function_in_a_file_is_one_too(run, file):
    code, printed = run(f"{file}:cubed", "--args", "float32[5]", "--probes", "repeat,aot/static/min-cut")

    assert code == 0
    assert "= aot/static/min-cut" in printed.out


def test_an_operator_that_dies_when_it_is_traced_has_crashed(run, file):
    words = ("--import", file, "--args", "float32[5]", "--gradients", "no", "--probes", "aot")

    code, printed = run("of_a_test::deadly_to_trace", *words)

    assert code == 4
    assert "! aot/static/min-cut  the process was ended by SIGSEGV" in printed.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("aten.sinn", "--args", "float32[3]"), "there is no operator 'aten.sinn'"),
        (("aten.sin.default", "--args", "float32[3], float32[3]"), "the arguments do not fit"),
        (("aten.mm.default", "--args", "float32[3, 4], float32[3, 4]"), "fails when run eagerly"),
        (("aten._cudnn_init_dropout_state", "--args", "0.5, True, 3"), "cannot run on cpu"),
        (("of_a_test::deadly", "--import", "FILE", "--args", "float32[3]"), "ended by SIGSEGV"),
        (("aten.sin.default", "--args", "float32[3]", "--probes", "fakes"), "there is no probe 'fakes'"),
        (("aten.sin.default", "--args", "float32[3"), "cannot be read"),
        (("aten.sin.default", "--inputs", "FILE:nowhere"), "has no 'nowhere'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(run, file, arguments, said):
    code, printed = run(*(each.replace("FILE", os.fspath(file)) for each in arguments))

    assert code == 2
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
