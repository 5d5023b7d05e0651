"""A sweep over torch's database of operators: whatever one of them does, there is a table of all of them."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from programs import reports
from torchdelta import cli
from torchdelta.errors import UsageError
from torchdelta.isolate.pool import Pool
from torchdelta.operators.sweep import NAME, SweepRequest, pool_for_sweep, sweep, swept_of
from torchdelta.records.codec import from_json, to_json, write_report
from torchdelta.records.operators import OpReport, Probe, Sweep, SweepRow
from torchdelta.records.verdict import Verdict

pytestmark = pytest.mark.xdist_group("sweep")  # its workers are started once

SAMPLE = (
    *("add", "exp", "clamp", "where", "nn.functional.gelu"),
    *("sum", "var_mean.unbiased", "logsumexp", "cumsum"),
    *("matmul", "bmm", "einsum"),
    *("nn.functional.conv2d", "nn.functional.max_pool2d"),
    *("nn.functional.layer_norm", "nn.functional.batch_norm", "softmax"),
    *("index_select", "gather", "scatter_add", "index_put", "nn.functional.embedding"),
    *("zero_", "normal.in_place", "bernoulli", "nn.functional.dropout"),
    *("linalg.cholesky", "linalg.svd", "linalg.solve"),
    *("transpose", "unfold", "expand", "split"),
    *("fft.fft", "complex"),
    *("sort", "topk"),
    *("nonzero", "unique", "masked_select"),
)
"""Pointwise, reductions, products, convolutions, norms, indices, in place, random, linear algebra, views, and more."""
KNOWN = {"nn.functional.dropout"}
"""With p=0 it returns its input, and a clone of it where it is traced: so it is in torch 2.13."""
ALSO = {
    "bfloat16": ("add", "matmul", "softmax", "cumsum"),
    "complex64": ("mul", "matmul", "view_as_real", "linalg.eigh"),
    "int64": ("add", "sum", "sort", "index_select"),
}


@pytest.fixture(scope="module", autouse=True)
def importable_tasks():
    sys.path.insert(0, str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def stubs(importable_tasks):
    """Workers that need no torch for what they are asked."""
    with Pool(workers=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def real(importable_tasks):
    with pool_for_sweep() as pool:
        yield pool


def swept(pool, *operators, dtypes=("float32",), task="sweep_tasks", **limits):
    asked = SweepRequest(operators=operators, dtypes=dtypes, samples=1)
    return sweep(asked, pool=pool, task=task, **limits)


def run_cli(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["torchdelta", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    return exited.value.code, capsys.readouterr()


# what becomes of each operator


def test_every_operator_has_a_verdict_in_every_dtype_that_it_supports(stubs):
    found = swept(stubs, "all", dtypes=("float32", "int64"), timeout_s=3)

    assert {(each.op, each.dtype): each.verdict.value for each in found.swept} == {
        ("fine", "float32"): "equivalent",
        ("fine", "int64"): "equivalent",
        ("wrong", "float32"): "diverged",
        ("dies", "float32"): "crashed",
        ("hangs", "float32"): "timed_out",
        ("split.sections", "int64"): "equivalent",
        ("split.list", "int64"): "equivalent",
    }
    assert found.total == 7
    assert found.verdict is Verdict.CRASHED


def test_a_worker_that_dies_says_of_what_and_where_it_was(stubs):
    (dead,) = swept(stubs, "dies").swept

    assert dead.verdict is Verdict.CRASHED
    assert dead.reason == "the process was ended by SIGSEGV"
    assert dead.probe == "aot/static/min-cut"
    assert dead.sample == "float32[3, 4], dim=1"
    assert dead.probes == {"aot/static/min-cut": Verdict.CRASHED}


def test_a_worker_that_hangs_has_timed_out(stubs):
    (late,) = swept(stubs, "hangs", timeout_s=1).swept

    assert (late.verdict, late.reason) == (Verdict.TIMED_OUT, "not finished after 1 s")


def test_a_name_stands_for_its_variants(stubs):
    found = swept(stubs, "split", dtypes=("int64",))

    assert [each.op for each in found.swept] == ["split.sections", "split.list"]


def test_a_pattern_stands_for_all_that_it_fits(stubs):
    assert [each.op for each in swept(stubs, "*i*e", "fine").swept] == ["fine"]


@pytest.mark.parametrize(
    ("operators", "dtypes", "said"),
    [
        (("fina",), ("float32",), "no operator 'fina'; near it are fine"),
        (("fine",), ("float31",), "no operator of the database supports a dtype 'float31'; there are float32, int64"),
        (("wrong",), ("int64",), "wrong supports none of int64"),
    ],
)
def test_what_the_database_does_not_have_is_said_at_once(stubs, operators, dtypes, said):
    with pytest.raises(UsageError, match=said):
        swept(stubs, *operators, dtypes=dtypes)


def test_no_samples_at_all_make_no_sense():
    with pytest.raises(UsageError, match="at least one sample"):
        SweepRequest(samples=0)


# going on


def test_a_sweep_goes_on_where_it_was(stubs, tmp_path):
    first = swept(stubs, "fine", "wrong", out=tmp_path)
    lines = (tmp_path / NAME).read_text().splitlines()
    (tmp_path / NAME).write_text("\n".join([*lines[:2], lines[2][:20]]))  # killed while it wrote

    second = swept(stubs, "fine", "wrong", out=tmp_path, resume=True)

    assert second.swept == first.swept
    assert second.notes == ("1 of them were swept before, and are not swept again",)
    assert len((tmp_path / NAME).read_text().splitlines()) == 3


def test_what_was_swept_before_is_not_asked_again(stubs, tmp_path):
    swept(stubs, "fine", out=tmp_path)
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(text.replace('"seconds": 0.0', '"seconds": 123.0'))

    (again,) = swept(stubs, "fine", out=tmp_path, resume=True).swept

    assert again.seconds == 123.0


def test_a_sweep_that_is_there_is_not_mixed_with_another_by_accident(stubs, tmp_path):
    swept(stubs, "fine", out=tmp_path)

    with pytest.raises(UsageError, match="has a sweep: continue it by --resume"):
        swept(stubs, "fine", out=tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"samples": 3}, "was asked with samples 2, not 3"),
        ({"policy": "bitwise"}, "was asked with policy none, not bitwise"),
        ({"dtypes": ("int64",)}, "was asked with dtypes float32, not int64"),
    ],
)
def test_other_words_are_refused(stubs, tmp_path, other, said):
    asked = {"operators": ("fine",), "dtypes": ("float32",)}
    sweep(SweepRequest(**asked), pool=stubs, task="sweep_tasks", out=tmp_path)

    with pytest.raises(UsageError, match=said):
        sweep(SweepRequest(**{**asked, **other}), pool=stubs, task="sweep_tasks", out=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\n", "line 1, is not JSON"),
        ("[]\n", "line 1, is not a record of a sweep"),
        ("{}\n", "not a sweep that this torchdelta can continue"),
        ("half a line", "is not a sweep"),
    ],
)
def test_a_file_that_is_no_sweep_is_left_as_it_is(stubs, tmp_path, text, said):
    (tmp_path / NAME).write_text(text)

    with pytest.raises(UsageError, match=said):
        swept(stubs, "fine", out=tmp_path, resume=True)
    assert (tmp_path / NAME).read_text() == text


def test_an_interruption_keeps_what_there_is(stubs, tmp_path):
    def told(done, total, what):
        if done == 1:
            raise KeyboardInterrupt

    found = swept(stubs, "fine", "hangs", out=tmp_path, tell=told)

    assert [each.op for each in found.swept] == ["fine"]
    assert found.total == 2
    assert found.notes == ("interrupted: 1 of 2 were not swept",)
    assert swept(stubs, "fine", "hangs", out=tmp_path, resume=True, timeout_s=1).total == 2


def test_each_operator_is_on_disk_before_the_next_is_asked_for(stubs, tmp_path):
    seen = []

    def told(done, total, what):
        seen.append((done, len((tmp_path / NAME).read_text().splitlines()) - 1))

    swept(stubs, "fine", "wrong", "dies", out=tmp_path, tell=lambda *each: each[1] and told(*each))

    assert seen
    assert all(done == kept for done, kept in seen)


# the record


SAME = {"repeat": Verdict.EQUIVALENT}


def a_sweep():
    return Sweep(
        swept=(
            SweepRow(op="add", dtype="float32", samples=2, verdict=Verdict.EQUIVALENT, probes=SAME),
            SweepRow(
                op="empty",
                dtype="float32",
                samples=1,
                verdict=Verdict.DIVERGED,
                probes={"repeat": Verdict.DIVERGED},
                probe="repeat",
                reason="called again, outputs is another",
                sample="float32[3]",
            ),
            SweepRow(
                op="spmm",
                dtype="int64",
                samples=0,
                verdict=Verdict.INCONCLUSIVE,
                probes={},
                reason="no sample could be checked",
                unasked=1,
                left_out={"a nested tensor cannot be copied": 2},
            ),
        ),
        total=4,
        environment=reports.ENVIRONMENT,
        words={"operators": "all", "samples": "2"},
        notes=("interrupted: 1 of 4 were not swept",),
    )


def an_operator():
    return OpReport(
        op="mylib.op",
        arguments=("float32[3, 4]", "dim=1"),
        verdict=Verdict.DIVERGED,
        probes=(
            Probe(name="repeat", verdict=Verdict.EQUIVALENT),
            Probe(
                name="fake/given",
                verdict=Verdict.DIVERGED,
                reason="the fake kernel says 3",
                remedy="mend it",
                report=reports.diverged(),
            ),
        ),
        unasked={"schema": "it is a function"},
        notes=(),
        environment=reports.ENVIRONMENT,
        seconds=1.5,
    )


@pytest.mark.parametrize("make", [a_sweep, an_operator])
def test_what_is_written_is_read_back(make):
    assert from_json(to_json(make()), None) == make()


def test_show_prints_a_sweep_and_exits_as_it_did(monkeypatch, capsys, tmp_path):
    write_report(a_sweep(), tmp_path / "sweep.json")

    code, printed = run_cli(monkeypatch, capsys, "show", tmp_path / "sweep.json")

    assert code == 130  # it was interrupted
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert "diverged 3 operators of torch's database, 3 of 4 with a dtype" in lines
    assert "float32 2 1 0 1 0 0" in lines
    assert "int64 1 0 1 0 0 0" in lines
    assert "all 3 1 1 1 0 0" in lines
    assert "repeat 2 1 0 1 0 0" in lines
    assert "≠ empty float32 repeat on float32[3]: called again, outputs is another" in lines
    assert "1× samples: no sample could be checked" in lines
    assert "note 2 samples left out: a nested tensor cannot be copied" in lines
    assert "1 sample not asked, because eager itself rejects them" in printed.out
    assert "interrupted: 1 of 4 were not swept" in printed.out


def test_verbose_lists_what_is_inconclusive(monkeypatch, capsys, tmp_path):
    write_report(a_sweep(), tmp_path / "sweep.json")

    _, printed = run_cli(monkeypatch, capsys, "show", tmp_path / "sweep.json", "--verbose")

    assert "? spmm int64  its samples: no sample could be checked" in printed.out


def test_show_prints_an_operator_and_exits_as_it_did(monkeypatch, capsys, tmp_path):
    write_report(an_operator(), tmp_path / "op.json")

    code, printed = run_cli(monkeypatch, capsys, "show", tmp_path / "op.json")

    assert code == 1
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert "diverged mylib.op(float32[3, 4], dim=1)" in lines
    assert "= repeat" in lines
    assert "≠ fake/given the fake kernel says 3" in lines
    assert "→ mend it" in lines
    assert "1 probe not asked (--verbose)" in lines


def test_what_nobody_could_decide_does_not_make_a_sweep_fail():
    undecided = a_sweep().swept[2]
    found = Sweep(swept=(a_sweep().swept[0], undecided), total=2, environment=reports.ENVIRONMENT, words={})

    assert found.verdict is Verdict.EQUIVALENT


def test_a_sweep_in_which_no_operator_is_equivalent_is_not():
    undecided = a_sweep().swept[2]

    found = Sweep(swept=(undecided,), total=1, environment=reports.ENVIRONMENT, words={})

    assert found.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("total", "code"), [(1, 0), (2, 130)])
def test_show_exits_by_the_verdict_of_a_sweep_unless_it_was_interrupted(monkeypatch, capsys, tmp_path, total, code):
    same = a_sweep().swept[0]
    write_report(Sweep(swept=(same,), total=total, environment=reports.ENVIRONMENT, words={}), tmp_path / "sweep.json")

    assert run_cli(monkeypatch, capsys, "show", tmp_path / "sweep.json")[0] == code


def test_nothing_swept_is_no_success():
    assert Sweep(swept=(), total=3, environment=reports.ENVIRONMENT, words={}).verdict is Verdict.INCONCLUSIVE


# the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name an operator, or operators of torch's database"),
        (("--dtypes", "float32"), "name an operator, or operators of torch's database"),
        (("aten.sin", "--opinfo", "all"), "aten.sin and --opinfo exclude each other"),
        (("--opinfo", "all", "--args", "3"), "--args is an option of one operator"),
        (("aten.sin", "--samples", "3"), "--samples is an option of a sweep"),
        (("--opinfo", "all", "--resume"), "name it by -o"),
        (("--opinfo", "all", "--workers", "0"), "--workers is a number above 0"),
        (("--opinfo", "all", "--samples", "0"), "at least one sample"),
        (("--opinfo", "all", "--gradients", "maybe"), "--gradients is auto, yes or no"),
        (("--opinfo", "all", "--seed", "-1"), "seed must be from 0"),
        (("aten.sin", "--args", "f32[3]", "--seed", str(2**70)), "seed must be from 0"),
        (("--opinfo", "all", "--timeout", "-1"), "--timeout is a number above 0"),
        (("aten.sin", "--args", "float32[3]", "--inputs", "a.py:b"), "leave one out"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(monkeypatch, capsys, arguments, said):
    code, printed = run_cli(monkeypatch, capsys, "op", *arguments)

    assert code == 2
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(("operators", "code"), [("fine", 0), ("fine,wrong", 1), ("wrong,dies", 4), ("wrong,hangs", 4)])
def test_exits_by_what_was_seen(stubs, monkeypatch, capsys, tmp_path, operators, code):
    monkeypatch.setattr(
        "torchdelta.cli.op.sweep", lambda *asked, **words: sweep(*asked, **words, pool=stubs, task="sweep_tasks")
    )
    file = tmp_path / "sweep.json"

    left, _ = run_cli(
        monkeypatch, capsys, "op", "--opinfo", operators, "--dtypes", "float32", "--timeout", "2", "--json", file
    )

    assert left == code
    assert [each["op"] for each in json.loads(file.read_text())["swept"]] == operators.split(",")


# torch's database


@pytest.fixture(scope="module")
def opinfo():
    from torchdelta._torch.operators import opinfo

    return opinfo


class TestTheDatabase:
    def test_has_hundreds_of_operators_each_by_a_name_of_its_own(self, opinfo):
        found = opinfo.operators()

        assert len(found) > 600
        assert {"add", "var_mean.unbiased", *SAMPLE} <= found.keys()
        assert "complex64" in found["matmul"]
        assert all("float32" in found[name] for name in SAMPLE)

    def test_gives_the_same_samples_whatever_was_drawn_before(self, opinfo):
        import torch

        first = opinfo.draw_samples("nn.functional.conv2d", "float32", seed=3).samples
        torch.rand(7)
        second = opinfo.draw_samples("nn.functional.conv2d", "float32", seed=3).samples

        assert len(first) == len(second) > 3
        for one, other in zip(first, second, strict=True):
            for left, right in zip(one.tensors, other.tensors, strict=True):
                assert torch.equal(left, right)

    def test_leaves_generators_and_flags_as_they_were(self, opinfo):
        import torch

        state = torch.get_rng_state()
        opinfo.draw_samples("add", "float32", seed=3)

        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.backends.flags_frozen()

    def test_asks_for_gradients_where_there_are_any(self, opinfo):
        assert all(sample.has_gradient for sample in opinfo.draw_samples("exp", "float32", seed=0).samples)
        assert not any(sample.has_gradient for sample in opinfo.draw_samples("add", "int64", seed=0).samples)
        assert not any(sample.has_gradient for sample in opinfo.draw_samples("nonzero", "float32", seed=0).samples)

    def test_chooses_samples_that_tell_something(self, opinfo):
        samples = opinfo.draw_samples("sum", "float32", seed=0).samples

        assert not samples[0].is_substantial
        assert all(sample.is_substantial for sample in opinfo.choose(samples, 4))
        assert any(sample.has_gradient for sample in opinfo.choose(samples, 1))

    def test_chooses_all_over_the_list(self, opinfo):
        samples = opinfo.draw_samples("nn.functional.max_pool2d", "float32", seed=0).samples

        first, second = (sample.number for sample in opinfo.choose(samples, 2))

        assert first < len(samples) / 2 < second

    def test_chooses_everything_where_more_is_wanted(self, opinfo):
        samples = opinfo.draw_samples("add", "float32", seed=0).samples

        assert opinfo.choose(samples, 1000) == samples

    def test_says_which_samples_are_left_out(self, opinfo):
        found = opinfo.draw_samples("sparse.sampled_addmm", "float32", seed=0)

        assert found.samples == ()
        assert set(found.left_out) == {"a tensor of layout sparse_csr cannot be copied"}

    def test_does_not_seed_inside_of_an_operator(self, opinfo):
        import torch

        (sample,) = opinfo.choose(opinfo.draw_samples("bernoulli", "float32", seed=0).samples, 1)
        with torch.no_grad():
            drawn = [sample.call(*sample.args, **sample.kwargs) for _ in range(20)]

        assert not all(torch.equal(each, drawn[0]) for each in drawn)

    def test_says_what_is_missing_to_read_it(self):
        code = """
import sys
sys.modules["expecttest"] = None
from torchdelta._torch.operators import opinfo
from torchdelta.errors import EnvironmentUnfit
try:
    opinfo.operators()
except EnvironmentUnfit as error:
    print(error)
"""
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

        assert "needs expecttest" in ran.stdout
        assert "pip install 'torchdelta[ops]'" in ran.stdout


def swept_here(monkeypatch, call, *args):
    """What a worker says of an operator whose only sample is this call."""
    import torch

    from torchdelta.operators import worker

    sample = SimpleNamespace(call=call, args=args, kwargs={}, has_gradient=False)
    database = SimpleNamespace(
        draw_samples=lambda name, dtype, seed: SimpleNamespace(samples=(sample,), left_out={}),
        choose=lambda samples, many: samples,
        WITHOUT_VALUES=(),
    )
    monkeypatch.setattr(worker, "opinfo", database)
    monkeypatch.setattr(torch, "set_num_threads", lambda many: None)
    words = {"gradients": "auto", "probes": ("repeat",), "backends": (), "policy": None}
    request = {"op": "mine", "dtype": "float32", "seed": 0, "samples": 1, "words": words}
    return worker.sweep_operator(request, SimpleNamespace(tell=lambda part: None))["swept"]


class TestWhatIsNotChecked:
    def test_eager_rejects_it(self, monkeypatch):
        def choosy(x):
            raise ValueError("four, please")

        found = swept_here(monkeypatch, choosy, torch_ones())

        assert found["unasked"] == 1
        assert "eager itself rejects 1" in found["reason"]

    def test_it_cannot_be_copied(self, monkeypatch):
        found = swept_here(monkeypatch, lambda x, lock: x, torch_ones(), threading.Lock())

        assert found["unasked"] == 0
        assert "cannot be copied" in found["reason"]
        assert found["verdict"] == "inconclusive"


def torch_ones():
    import torch

    return torch.ones(3)


@pytest.mark.slow
class TestTheRealThing:
    def test_finds_no_fault_in_a_sample_of_forty(self, real):
        assert len(set(SAMPLE)) == 40

        found = sweep(SweepRequest(operators=tuple(SAMPLE), dtypes=("float32",), samples=1), pool=real)

        assert len(found.swept) == 40
        assert {name: said for name, said in failures(found).items() if name not in KNOWN} == {}
        (dropout,) = (each for each in found.swept if each.op == "nn.functional.dropout")
        failed = {probe for probe, verdict in dropout.probes.items() if verdict is Verdict.DIVERGED}
        assert {"fake/layout", "aot/static/min-cut"} <= failed
        assert "in memory" in dropout.reason
        assert found.by_verdict()[Verdict.EQUIVALENT] >= 30

    @pytest.mark.parametrize("dtype", ALSO)
    def test_finds_no_fault_in_other_dtypes(self, real, dtype):
        found = sweep(SweepRequest(operators=ALSO[dtype], dtypes=(dtype,), samples=1), pool=real)

        assert [each.op for each in found.swept] == list(ALSO[dtype])
        assert failures(found) == {}

    def test_names_the_probe_and_the_sample_at_which_a_worker_died(self, real):
        request = SweepRequest(samples=1).query("exp", "float32")

        outcome = real.ask("sweep_tasks:die_in_a_check", request, deadline_s=60)
        found = swept_of(outcome, "exp", "float32")

        assert (found.verdict, found.probe) == (Verdict.CRASHED, "aot/dynamic/min-cut")
        assert found.reason == "the process was ended by SIGILL"
        assert found.sample.startswith("float32[")

    def test_a_mistake_in_one_check_does_not_end_the_sweep(self, real):
        request = SweepRequest(samples=1).query("exp", "float32")

        found = swept_of(real.ask("sweep_tasks:fail_in_a_check", request, deadline_s=60), "exp", "float32")

        assert found.verdict is Verdict.INCONCLUSIVE
        assert found.reason == "the check itself failed: ZeroDivisionError: somebody's mistake"

    @pytest.mark.parametrize(
        ("words", "said"), [({"policy": "nois"}, "nois"), ({"probes": ("fak/given",)}, "there is no probe 'fak/given'")]
    )
    def test_what_is_misspelt_is_said_before_any_operator_is_asked(self, real, words, said):
        with pytest.raises(UsageError, match=said):
            sweep(SweepRequest(operators=("exp",), **words), pool=real)

    def test_an_operator_without_a_sample_is_inconclusive(self, real):
        (found,) = sweep(SweepRequest(operators=("sparse.sampled_addmm",), dtypes=("float32",)), pool=real).swept

        assert found.verdict is Verdict.INCONCLUSIVE
        assert "a tensor of layout sparse_csr cannot be copied" in found.reason
        assert sum(found.left_out.values()) > 0

    def test_memory_as_it_was_found_is_not_compared(self, real):
        (found,) = sweep(SweepRequest(operators=("empty_like",), dtypes=("float32",)), pool=real).swept

        assert found.verdict is Verdict.EQUIVALENT
        assert "repeat" not in found.probes


def failures(found):
    return {each.op: f"{each.probe}: {each.reason}" for each in found.swept if each.verdict.is_failure}
