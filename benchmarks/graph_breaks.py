"""Measure the recall on models that a compiler breaks into several graphs, beside models of one graph.

Both groups are Hugging Face models in bfloat16, captured by dynamo. A fault is planted in one of the captured graphs,
as a compiler's mistake is. A run resumes after an interruption. Start reading at `run`; `GraphBench` runs one trial.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from torchdelta._torch.graphs.lift_graph import form_of
from torchdelta.audit.faults import FAULTS, NotPlantable, PlaceLost
from torchdelta.audit.faults.base import Fault, eligible_nodes, place_of
from torchdelta.check.baseline import Baseline
from torchdelta.program.programs import Program, load_module
from torchdelta.program.stages import Observation
from torchdelta.records.audit import Place
from torchdelta.transforms.base import Transform
from torchdelta.transforms.fx_pass import FxPass
from verdict_cases import CONTROL, FAULT, FAULT_STAGES, Subject, Trial
from verdict_records import DONE, OURS, Ledger, Record
from verdict_runs import Bench, baseline_of

MODELS_FILE = Path(__file__).parent.parent / "tests" / "programs" / "graph_breaks.py"
DEFAULT_OUT = Path("build/graph-breaks")
DTYPE = "bfloat16"
KINDS = (
    *("add_to_subtract", "bias_dropped", "epsilon_1e_3", "gelu_approximation", "gradient_detached"),
    *("residual_dropped", "scale_by_1_001", "scale_by_1_00001", "softmax_dimension", "tail_element"),
)
SEEDS = (0, 1)
UNCHANGED = "unchanged"

Form = tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the trials that have no record yet, then print the table of all records."""
    groups = models_file().GROUPS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where cases.jsonl and table.md are")
    names = [model for group in groups.values() for model in group]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # torch and transformers warn about their own code while they trace
    ledger = Ledger(options.out)
    run(ledger, options.models, options.seeds)
    text = as_markdown(list(ledger.records.values()), groups)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text)


def run(ledger: Ledger, models: Sequence[str], seeds: Sequence[int]) -> None:
    """Run every trial that has no record yet, all trials of a model in a row."""
    for model in models:
        for seed in seeds:
            subject = Subject(model=model, dtype=DTYPE, seed=seed)
            missing = [trial for trial in _trials(subject) if trial.key not in ledger.records]
            if not missing:
                continue
            bench = GraphBench(subject, FAULT_STAGES)
            for trial in missing:
                with ledger.running(trial):
                    record = bench.run(trial)
                ledger.add(record)
                verdicts = " ".join(f"{name} {stage.verdict}" for name, stage in record.stages.items())
                print(f"{record.seconds:7.1f} s  {trial.key}: {record.status}, {verdicts or record.why}", flush=True)
            del bench
            gc.collect()


def _trials(subject: Subject) -> Iterator[Trial]:
    yield Trial(subject=subject, kind=CONTROL, transform=UNCHANGED)
    for kind in KINDS:
        yield Trial(subject=subject, kind=FAULT, transform=kind)


def models_file() -> ModuleType:
    """Return the module with the models of both groups."""
    return load_module(str(MODELS_FILE), what="model")


class GraphBench(Bench):
    """One model, whose faults are planted in the graphs that dynamo captures of it."""

    def _make_baseline(self, subject: Subject) -> Baseline:
        module, kwargs = models_file().build(subject.model, seed=subject.seed)
        return baseline_of(Program(name=subject.model, call=module, kwargs=kwargs), self.stages)

    def transform_of(self, trial: Trial) -> Transform:
        """Return a pass that plants the trial's fault, or one that changes nothing; NotPlantable if it has no place."""
        if trial.kind == CONTROL:
            return FxPass(_as_aten, {})
        fault = FAULTS.get(trial.transform)
        return PlantedInGraph(fault, self._choose(fault, trial.subject.seed))

    def _choose(self, fault: Fault, seed: int) -> tuple[Form, Place]:
        """Return one eligible node of all captured graphs, with the form of its graph."""
        places = [
            (form, place_of(fault, node))
            for form, graph in self._graphs.items()
            for node in eligible_nodes(fault, graph.graph)
        ]
        if not places:
            raise NotPlantable(f"{fault.name} cannot be planted: it needs {fault.needs}, and no graph has one")
        return random.Random(f"{fault.name} {seed}").choice(places)

    @functools.cached_property
    def _graphs(self) -> dict[Form, GraphModule]:
        """The ATen graphs of the captured ones, by the form of the captured one."""
        graphs: dict[Form, GraphModule] = {}

        def survey(graph_module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
            graphs[_form_of(graph_module)] = _as_aten(graph_module, example_inputs)
            return graph_module

        self.baseline.run(FxPass(survey, {}))
        return graphs

    def run_unfaulted(self, *, lifted: bool) -> Observation:
        """Run the captured graphs without a fault."""
        return self.run_alone(FxPass(_as_aten, {}), lifted=lifted, is_eager=False)


class PlantedInGraph(FxPass):
    """Plants a fault in each captured graph of one form: graphs of one form are compiled alike."""

    def __init__(self, fault: Fault, at: tuple[Form, Place]) -> None:
        form, self.place = at

        def plant(graph_module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
            aten = _as_aten(graph_module, example_inputs)
            if _form_of(graph_module) != form:
                return aten
            for node in aten.graph.nodes:
                if node.name == self.place.node and place_of(fault, node).op == self.place.op:
                    fault.plant(node)
                    aten.graph.lint()
                    aten.recompile()
                    return aten
            raise PlaceLost(f"{fault.name} was planted at {self.place.node}, which the graph in float64 does not have")

        super().__init__(plant, {})


def _form_of(graph_module: GraphModule) -> Form:
    """Return the names of a graph's operations, without sizes: captured once more, the graph has numbers for them."""
    names = (each.partition("(")[0] for each in form_of(graph_module))
    return tuple(name for name in names if name not in ("size", "getitem"))


def _as_aten(graph_module: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Return the graph with the operators of an exported program, in which faults can be planted."""
    # real inputs must not be changed
    mode: Literal["real", "fake"] = "real" if detect_fake_mode(example_inputs) is not None else "fake"
    traceable = _with_plain_sizes(graph_module)
    return make_fx(traceable, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)(*example_inputs)


def _with_plain_sizes(graph_module: GraphModule) -> GraphModule:
    """Return a copy that takes no size out of a tensor, as Longformer does: such a graph cannot be traced again.

    Integers that depend on no input are computed, and methods get them as numbers.
    """
    plain = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    numbers: dict[Node, Any] = {}
    for node in plain.graph.nodes:
        operands = map_arg((node.args, node.kwargs), lambda each: numbers.get(each, each))
        if _is_whole_number(node) and numbers.keys() >= set(node.all_input_nodes):
            args, kwargs = operands
            function = node.target if node.op == "call_function" else getattr(torch.Tensor, node.target)
            numbers[node] = function(*args, **kwargs)
    for node in plain.graph.nodes:
        if node.op == "call_method":  # its first argument is the tensor itself
            given = (node.args[1:], node.kwargs)
            sizes, node.kwargs = map_arg(given, lambda each: int(numbers[each]) if each in numbers else each)
            node.args = (node.args[0], *sizes)
    plain.recompile()
    return plain


def _is_whole_number(node: Node) -> bool:
    value = node.meta.get("example_value")
    is_integer = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_floating_point()
    return node.op in ("call_function", "call_method") and is_integer


def as_markdown(records: Sequence[Record], groups: dict[str, Sequence[str]]) -> str:
    """Return a table with a row for each model and group, and the list of missed faults and flagged controls."""
    lines = [
        "# Models with and without graph breaks, bfloat16",
        "",
        "| models | graphs | clean | false alarms | inconclusive | faults that matter | caught | recall |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group, models in groups.items():
        for model in models:
            lines.append(_row(model, [record for record in records if record.trial.subject.model == model]))
        lines.append(_row(f"**{group}**", [record for record in records if record.trial.subject.model in models]))
    missed = [each for each in records if each.matters and not each.is_flagged(OURS, FAULT_STAGES)]
    lines += ["", f"## Missed faults: {len(missed)}", "", *map(_told, missed)]
    doubted = [each for each in records if each.trial.kind == CONTROL and not _is_equivalent(each)]
    lines += ["", f"## Clean models that are not equivalent: {len(doubted)}", "", *map(_told, doubted)]
    lost = [each for each in records if each.status != DONE]
    lines += ["", f"## Without a verdict: {len(lost)}", ""]
    lines += [f"- {each.trial.key}: {each.status}, {each.why}" for each in lost]
    return "\n".join([*lines, ""])


def _row(name: str, records: Sequence[Record]) -> str:
    done = [record for record in records if record.status == DONE]
    clean = [record for record in done if record.trial.kind == CONTROL]
    alarms = [record for record in clean if record.is_flagged(OURS, FAULT_STAGES)]
    undecided = [record for record in clean if not _is_equivalent(record) and record not in alarms]
    mattering = [record for record in done if record.trial.kind == FAULT and record.matters]
    caught = [record for record in mattering if record.is_flagged(OURS, FAULT_STAGES)]
    graphs = sorted({record.graphs for record in clean})
    cells = [
        " to ".join(map(str, graphs[:1] + graphs[1:][-1:])),
        *(str(len(each)) for each in (clean, alarms, undecided, mattering, caught)),
        f"{100 * len(caught) / len(mattering):.1f} %" if mattering else "–",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _is_equivalent(record: Record) -> bool:
    return all(stage.verdict == "equivalent" for stage in record.stages.values())


def _told(record: Record) -> str:
    reasons = [
        f"{name} {stage.verdict}: {reason}"
        for name, stage in record.stages.items()
        for reason in stage.reasons
        if stage.matters or stage.verdict != "equivalent"
    ]
    return "\n".join([f"- {record.trial.key} {record.place}".rstrip(), *(f"  - {reason}" for reason in reasons)])


if __name__ == "__main__":
    main()
