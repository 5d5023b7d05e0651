"""An audit plants faults in a program and counts those that a check catches."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

import torchdelta.cli
from torchdelta.audit.audit import audit
from torchdelta.audit.faults import FAULTS
from torchdelta.errors import ProgramError, UsageError
from torchdelta.records.audit import Audit, FaultTrial, Place, TrialOutcome
from torchdelta.records.case import Case, CheckOptions
from torchdelta.records.verdict import Verdict
from torchdelta.report.terminal.audit import print_audit

PROGRAMS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))

def net():
    return Net(), (torch.randn(3, 4),)

def positive():
    return lambda x: torch.relu(x.exp()) * 2, (torch.randn(3, 4),)

class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x

def branches():
    return Branches(), (torch.randn(3, 4),)

def scaled(graph_module, example_inputs):
    return lambda *args: tuple(output * 1.01 for output in graph_module(*args))

def unscaled(graph_module, example_inputs):
    for node in graph_module.graph.nodes:
        if "leaky" in str(node.target):
            raise NotImplementedError("this pass knows no leaky relu")
"""


@pytest.fixture
def programs(tmp_path):
    file = tmp_path / "programs.py"
    file.write_text(PROGRAMS)
    return file


def run_audit(program, *, kinds=(), per_kind=1, **words):
    """Return the audit under the options of these words."""
    return audit(program, options=CheckOptions.read(**words), kinds=kinds, per_kind=per_kind)


def outcomes(found):
    return {trial.place.kind: trial.outcome for trial in found.trials}


OPTIONS = {"graph": "export", "unchanged": "ok"}


class TestAudit:
    def test_counts_what_is_caught_and_what_does_not_apply(self, programs):
        found = run_audit(
            f"{programs}:net", transform="export", kinds=["residual_dropped", "relu_leaky", "top_k_smallest"]
        )

        assert found.control is Verdict.EQUIVALENT
        assert outcomes(found) == {"residual_dropped": TrialOutcome.CAUGHT, "relu_leaky": TrialOutcome.CAUGHT}
        assert found.inapplicable == ("top_k_smallest",)
        assert found.catch_rate == 1.0

    def test_plants_a_kind_at_several_places_and_no_more_than_there_are(self, programs):
        found = run_audit(f"{programs}:net", transform="export", kinds=["bias_dropped"], per_kind=5)

        assert {trial.place.module_path for trial in found.trials} == {"first", "second"}
        assert len(found.trials) == 2

    def test_a_lenient_policy_misses(self, programs):
        found = run_audit(f"{programs}:net", transform="export", kinds=["scale_by_1_00001"], policy="rtol=0.1,atol=0.1")

        assert outcomes(found) == {"scale_by_1_00001": TrialOutcome.MISSED}
        assert found.catch_rate == 0.0

    def test_a_fault_without_effect_is_not_missed(self, programs):
        found = run_audit(f"{programs}:positive", transform="export", kinds=["relu_leaky"])

        assert outcomes(found) == {"relu_leaky": TrialOutcome.NO_EFFECT}
        assert found.catch_rate is None

    def test_without_gradients_a_fault_in_them_has_no_effect(self, programs):
        kinds = ["parameter_stale"]

        assert outcomes(run_audit(f"{programs}:net", transform="export", kinds=kinds, stages=["forward"])) == {
            "parameter_stale": TrialOutcome.NO_EFFECT
        }
        assert outcomes(run_audit(f"{programs}:net", transform="export", kinds=kinds)) == {
            "parameter_stale": TrialOutcome.CAUGHT
        }

    def test_the_transform_is_applied_to_the_faulty_program(self, programs):
        found = run_audit(f"{programs}:net", transform=f"{programs}:unscaled", options=OPTIONS, kinds=["relu_leaky"])

        assert found.control is Verdict.EQUIVALENT
        assert outcomes(found) == {"relu_leaky": TrialOutcome.CRASHED}
        assert "this pass knows no leaky relu" in found.trials[0].reason

    def test_a_control_that_diverges_is_told(self, programs):
        found = run_audit(f"{programs}:net", transform=f"{programs}:scaled", kinds=["relu_leaky"])

        assert found.control is Verdict.DIVERGED
        assert "outputs" in found.control_reason

    def test_a_program_that_cannot_be_exported_has_no_place_for_a_fault(self, programs):
        with pytest.raises(ProgramError, match="branches cannot be exported, so no fault can be planted in it"):
            run_audit(f"{programs}:branches", transform="eager")

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"kinds": ["relu_leek"]}, "unknown fault 'relu_leek': did you mean relu_leaky"),
            ({"per_kind": 0}, "per_kind is the number of faults of each kind: at least 1, not 0"),
            ({"policy": "lenient"}, "lenient"),
            ({"transform": "inductr"}, "inductor"),
        ],
    )
    def test_a_mistake_of_the_user_is_told(self, programs, wrong, message):
        with pytest.raises(UsageError, match=message):
            run_audit(f"{programs}:net", **{"transform": "export", **wrong})

    @pytest.mark.slow
    def test_every_kind_is_tried_where_none_is_named(self, programs):
        found = run_audit(f"{programs}:net", transform="aot_eager")

        assert {*found.kinds, *found.inapplicable} == set(FAULTS)
        assert found.catch_rate > 0.8


def trial(kind, outcome):
    place = Place(kind=kind, node="add", op="aten.add.Tensor", module_path="blocks.1", source_line="net.py:3: x + y")
    return FaultTrial(place=place, outcome=outcome, reason="" if outcome is TrialOutcome.MISSED else "too far off")


def shown(capsys, *, verbose=False, control=Verdict.EQUIVALENT, trials=()):
    case = Case(program="net.py:build", transform="inductor")
    found = Audit(
        case=case, control=control, control_reason="forward outputs: off", trials=tuple(trials), inapplicable=("b", "c")
    )
    print_audit(found, Console(width=160), verbose=verbose)
    return capsys.readouterr().out


class TestOnATerminal:
    TRIALS = (trial("a", TrialOutcome.CAUGHT), trial("a", TrialOutcome.MISSED), trial("d", TrialOutcome.NO_EFFECT))

    def test_counts_by_kind_and_in_total(self, capsys):
        out = shown(capsys, trials=self.TRIALS)

        assert out.startswith("1 of 2 faults caught (50%)  net.py:build under inductor")
        rows = {line.split("  ")[0]: line.split()[-5:] for line in out.splitlines()}
        assert rows["a"] == ["2", "1", "1", "0", "0"]
        assert rows["d"] == ["1", "0", "0", "0", "1"]
        assert rows["total, 50% caught"] == ["3", "1", "1", "0", "1"]
        assert "no place for  b, c" in out
        assert "crashed" not in out

    def test_says_loudly_that_catches_mean_nothing(self, capsys):
        out = shown(capsys, trials=self.TRIALS, control=Verdict.DIVERGED)

        assert "without a fault  diverged  forward outputs: off" in out
        assert "THE CATCHES BELOW MEAN NOTHING" in out

    def test_shows_where_on_request(self, capsys):
        assert "blocks.1" not in shown(capsys, trials=self.TRIALS)
        assert "missed        a at add (aten.add.Tensor) of blocks.1, net.py:3: x + y" in shown(
            capsys, trials=self.TRIALS, verbose=True
        )

    def test_says_that_there_was_nothing_to_catch(self, capsys):
        assert shown(capsys).startswith("no fault could be planted")
        assert shown(capsys, trials=self.TRIALS[2:]).startswith("no fault had an effect")


def run_cli(*arguments):
    command = [sys.executable, "-c", "import torchdelta.cli; torchdelta.cli.main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class TestTheCommand:
    @pytest.mark.slow
    def test_prints_the_table_writes_json_and_ends_with_0(self, programs, tmp_path):
        file = tmp_path / "audit.json"
        ran = run_cli(
            *("audit", f"{programs}:net", "-t", "export", "--kinds", "residual_dropped,relu_leaky", "--json", file)
        )

        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith("2 of 2 faults caught (100%)")
        written = json.loads(file.read_text())
        assert written["control"] == "equivalent"
        assert [trial["outcome"] for trial in written["trials"]] == ["caught", "caught"]
        assert written["trials"][0]["place"]["op"] == "aten.add.Tensor"

    @pytest.mark.slow
    def test_a_mistake_is_one_sentence_and_2(self, programs):
        ran = run_cli("audit", f"{programs}:net", "-t", "export", "--kinds", "relu_leek")

        assert ran.returncode == 2
        assert ran.stderr.strip() == "torchdelta: unknown fault 'relu_leek': did you mean relu_leaky?"

    def test_is_there_without_loading_torch(self):
        assert "audit" in {command.name for command in torchdelta.cli.app.registered_commands}


# what float64 shows not to matter, or to be less than a rounding: a factor that a softmax divides by, a lost last digit
IMMATERIAL = {
    "tabular": {"round_toward_zero"},
    "float_mask": {"round_toward_zero", "cast_through_float16", "scale_by_1_001"},
    "mask_constant": {"round_toward_zero", "matmul_low_precision"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMMATERIAL)
def test_faults_beside_exact_values_are_caught(name):
    result = audit(f"tests/programs/exact_values.py:{name}", options=CheckOptions(transform="eager"), per_kind=2)

    not_caught = {trial.place.kind for trial in result.trials if trial.outcome is TrialOutcome.MISSED}
    assert result.control is Verdict.EQUIVALENT
    assert not_caught <= IMMATERIAL[name]
    assert result.catch_rate > 0.8
