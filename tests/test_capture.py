"""A capture holds what each node computed, as it was then, and two of them can be compared later."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchdelta import Verdict
from torchdelta.compare.statistics import Statistics, statistics_of
from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.nodewise.capture import capture
from torchdelta.nodewise.compare_captures import compare_captures
from torchdelta.storage import captures
from torchdelta.storage.captures import read_capture


class Small(nn.Module):
    """In-place results, a buffer that is written to, nested containers, numbers and complex values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, other):
        self.calls.add_(1)
        total = self.linear(x) + other["second"]
        positive = total.relu_()
        parts = list(positive.chunk(2, dim=-1))
        return {"parts": parts, "pair": (torch.complex(x, other["first"]), 3), "calls": self.calls * 2}


class Branching(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))


def batch(seed=1):
    drawn = torch.Generator().manual_seed(seed)
    x, first, second = (torch.randn(3, 4, generator=drawn) for _ in range(3))
    return (x,), {"other": {"first": first, "second": second}}


def exported(module=None, args=None, kwargs=None):
    if module is None:
        module, (args, kwargs) = Small(), batch()
    return torch.export.export(module, args, kwargs)


def traced(function):
    return torch.fx.symbolic_trace(function)


def values(captured, index=0):
    return {node.name: captured.leaves(index, node.name) for node in captured.nodes}


def is_equal(first, second):
    if first.keys() != second.keys():
        return False
    return all(
        torch.equal(one, second[path]) if isinstance(one, torch.Tensor) else one == second[path]
        for path, one in first.items()
    )


def test_the_outputs_are_bit_for_bit_those_of_the_plain_run():
    program, batches = exported(), [batch(1), batch(2)]
    plain = program.module()

    captured = capture(program.module(), batches)

    for index, (args, kwargs) in enumerate(batches):
        outputs = plain(*args, **kwargs)
        logged = captured.outputs(index)
        assert torch.equal(logged["outputs['parts'][1]"], outputs["parts"][1])
        assert torch.equal(logged["outputs['pair'][0]"], outputs["pair"][0])
        assert logged["outputs['pair'][1]"] == 3
        # state goes on from batch to batch
        assert torch.equal(logged["outputs['calls']"], outputs["calls"])


def test_the_keywords_of_a_batch_may_come_in_any_order():
    (x,), kwargs = batch()
    turned = {"other": dict(reversed(kwargs["other"].items()))}

    first, second = (capture(exported(), [((x,), given)]) for given in (kwargs, turned))

    assert is_equal(first.outputs(0), second.outputs(0))


def test_a_result_is_logged_as_it_was_before_it_was_overwritten():
    (x,), kwargs = batch()
    module = Small()

    captured = capture(exported(module, (x,), kwargs), [((x,), kwargs)])

    total = module.linear(x) + kwargs["other"]["second"]
    assert torch.equal(captured.leaves(0, "add")["value"], total)
    assert torch.equal(captured.leaves(0, "relu_")["value"], total.relu())


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda y: y.mul_(2),
        lambda y: F.relu(y, inplace=True),
        lambda y: F.relu(y, True),
        lambda y: torch.relu_(y),
        lambda y: torch.add(y, 1, out=y),
        lambda y: y.__setitem__(0, 5.0),
        lambda y: y.view(-1).zero_(),
    ],
)
def test_whatever_overwrites_a_result_it_was_kept(overwrite):
    def program(x):
        y = x - 1
        overwrite(y)
        return y * 1

    captured = capture(traced(program), [(torch.ones(2, 2) * -2,)])

    assert captured.leaves(0, "sub")["value"].eq(-3).all()
    assert not captured.leaves(0, "mul")["value"].eq(-3).all()


def test_statistics_that_batch_norm_updates_without_saying_so_are_kept_as_they_were():
    def program(x, mean, variance):
        seen = mean * 1
        return F.batch_norm(x, mean.view(-1), variance, training=True), seen

    captured = capture(traced(program), [(torch.randn(8, 3), torch.zeros(3), torch.ones(3))])

    assert captured.leaves(0, "view")["value"].eq(0).all()


def test_nothing_is_copied_that_nobody_writes_to():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            y = x * 2
            seen.append(y)
            return y

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, Spy)

    root = nn.Sequential(Spy())
    graph_module = torch.fx.GraphModule(root, Tracer().trace(root))

    captured = capture(graph_module, [(torch.ones(3),)])

    assert captured.leaves(0, "_0")["value"].data_ptr() == seen[0].data_ptr()


def test_neither_state_nor_inputs_nor_generators_are_changed():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen.add_(x)
            return F.dropout(x.add_(1)) + self.seen

    graph_module, x = traced(Writes()), torch.ones(2)
    state = torch.get_rng_state()

    first, second = capture(graph_module, [(x,)]), capture(graph_module, [(x,)])

    assert torch.equal(x, torch.ones(2))
    assert torch.equal(graph_module.seen, torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert is_equal(first.outputs(0), second.outputs(0))


def test_the_branch_that_was_taken_is_logged_and_the_other_is_not():
    program = exported(Branching(), (torch.ones(2),))

    captured = capture(program, [(torch.ones(2),), (-torch.ones(2),)])

    assert torch.equal(captured.leaves(0, "true_graph_0.sin")["value"], torch.ones(2).sin())
    assert captured.leaves(0, "false_graph_0.cos") == {}
    assert torch.equal(captured.leaves(1, "false_graph_0.mul")["value"], torch.ones(2).cos() * 2)


def test_the_inside_of_a_loop_is_not_logged_and_the_capture_says_so():
    class Loop(nn.Module):
        def forward(self, x):
            from torch._higher_order_ops import while_loop

            return while_loop(lambda x: x.sum() < 10, lambda x: (x + 1,), (x,))

    captured = capture(exported(Loop(), (torch.ones(2),)), [(torch.ones(2),)])

    assert any("the inside of while_loop" in note and "was not logged" in note for note in captured.notes)


def test_a_capture_on_disk_is_the_capture_in_memory(tmp_path):
    program, batches = exported(), [batch(1), batch(2)]

    in_memory = capture(program, batches)
    written = capture(program, batches, out=tmp_path / "run")
    read = read_capture(tmp_path / "run")

    assert read.nodes == written.nodes == in_memory.nodes
    for index in range(2):
        assert is_equal(read.outputs(index), in_memory.outputs(index))
        assert all(is_equal(leaves, values(in_memory, index)[name]) for name, leaves in values(read, index).items())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype", [torch.complex32, torch.complex128, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.uint16, torch.bool]
)
def test_every_dtype_and_memory_order_comes_back_from_disk(tmp_path, dtype):
    def program(x):
        return x.transpose(0, 2)

    given = torch.arange(24).reshape(2, 3, 4).to(torch.float32).to(dtype)

    capture(traced(program), [(given,)], out=tmp_path)
    found = read_capture(tmp_path).outputs(0)["outputs"]

    assert (found.dtype, found.shape, found.stride()) == (dtype, (4, 3, 2), given.transpose(0, 2).stride())
    assert statistics_of(found).checksum == statistics_of(given.transpose(0, 2)).checksum


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_values_are_kept_by_their_parts(tmp_path):
    def program(x):
        return torch.quantize_per_tensor(x, 0.5, 2, torch.quint8)

    capture(traced(program), [(torch.arange(3.0),)], out=tmp_path)

    outputs = read_capture(tmp_path).outputs(0)
    assert outputs["outputs.int_repr()"].tolist() == [2, 4, 6]
    assert outputs["outputs.q_scale()"] == 0.5


def test_beyond_the_limit_only_statistics_are_kept_and_the_capture_says_so(tmp_path):
    def program(x):
        return ((x + 1) * 2).sin()

    captured = capture(traced(program), [(torch.ones(100),)], out=tmp_path, limit_bytes=500)

    assert isinstance(captured.leaves(0, "add")["value"], torch.Tensor)
    assert isinstance(captured.leaves(0, "mul")["value"], Statistics)
    assert any("the limit of 500 bytes was reached after 400" in note for note in read_capture(tmp_path).notes)


def test_a_parameter_is_written_once_for_all_batches(tmp_path):
    program = torch.export.export(nn.Linear(64, 64), (torch.ones(1, 64),))

    capture(program, [(torch.ones(1, 64),)] * 5, out=tmp_path)

    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 2 * 64 * 64 * 4


def test_a_node_that_raises_ends_the_capture_and_what_came_before_is_there():
    def program(x):
        return (x + 1).view(7) * 2

    captured = capture(traced(program), [(torch.ones(7),), (torch.ones(8),), (torch.ones(7),)])

    assert len(captured.batches) == 2
    assert "batch 1: view raised RuntimeError" in captured.failure
    assert captured.leaves(1, "add")["value"].numel() == 8


def test_the_checksum_sees_order_and_sign_and_takes_any_nan_for_any_other():
    values = torch.tensor([1.0, -2.0, 0.0, float("nan")])
    other_nan = values.clone()
    other_nan.view(torch.int32)[3] += 1

    checksum = statistics_of(values).checksum
    assert checksum == statistics_of(other_nan).checksum
    assert checksum != statistics_of(values[[1, 0, 2, 3]]).checksum
    assert checksum != statistics_of(values * torch.tensor([1, 1, -1, 1])).checksum


def test_statistics_are_those_of_the_finite_values():
    found = statistics_of(torch.tensor([3.0, -4.0, float("inf"), float("nan")]))

    assert (found.nan, found.inf, found.minimum, found.maximum, found.mean) == (1, 1, -4.0, 3.0, -0.5)
    assert found.rms == pytest.approx(12.5**0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: capture(nn.Linear(2, 2), [(torch.ones(2),)]), "a graph is a torch.fx.GraphModule"),
        (lambda: capture(traced(lambda x: x.sin()), [torch.ones(2)]), "write \\(x,\\) for a single argument"),
        (lambda: capture(traced(lambda x: x.sin()), []), "no batch"),
        (lambda: capture(traced(lambda x: x.sin()), [(torch.ones(2),)], keep="all"), "keep is"),
        (lambda: capture(traced(lambda x: x + 1), [(torch.ones(2), 3)]), "does not take this batch"),
    ],
)
def test_wrong_use_is_explained(given, message):
    with pytest.raises(UsageError, match=message):
        given()


def test_a_directory_that_is_taken_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(UsageError, match="is not empty"):
        capture(traced(lambda x: x + 1), [(torch.ones(2),)], out=tmp_path)


def test_a_damaged_capture_is_refused(tmp_path):
    with pytest.raises(ReportUnreadable, match=r"does not hold a finished capture: cannot read .*capture\.json"):
        read_capture(tmp_path)
    capture(traced(lambda x: x + 1), [(torch.ones(2),)], out=tmp_path)
    manifest = tmp_path / "capture.json"
    whole = manifest.read_text()
    manifest.write_text(whole[:-10])
    with pytest.raises(ReportUnreadable, match=r"does not hold a finished capture: .*not JSON, or not all of it"):
        read_capture(tmp_path)
    manifest.write_text("{}")
    with pytest.raises(ReportUnreadable, match=r"capture\.json: this is JSON, but not a capture"):
        read_capture(tmp_path)
    manifest.write_text(whole)
    (file,) = tmp_path.glob("values-*")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        ReportUnreadable, match=r"values-00000\.safetensors: storages\[0\]: .*not those that were written"
    ):
        read_capture(tmp_path).outputs(0)
    file.unlink()
    with pytest.raises(ReportUnreadable, match=r"values-00000\.safetensors cannot be read"):
        read_capture(tmp_path).outputs(0)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda d: d.update(capture_version=99), "version 99.*: upgrade torchdelta"),
        (lambda d: d.update(capture_version=1), "version 1, .* reads 2: capture the graph again"),
        (lambda d: (d.pop("format"), d.update(capture_version=1)), "version 1, .* reads 2: capture the graph again"),
        (lambda d: d.pop("nodes"), "capture: nodes missing"),
        (lambda d: d.update(batches={}), "batches: expected a list"),
        (lambda d: d["batches"][0].update(extra=1), r"batches\[0\]: unknown extra"),
        (
            lambda d: d["batches"][0].update(results={"outputs": {"stored": {"file": 1, "row": 0}}}),
            "no tensor 0 in file 1",
        ),
        (lambda d: d["batches"][0].update(results={"outputs": {"stored": {"file": 0, "row": -1}}}), "no tensor -1"),
        (lambda d: d["batches"][0].update(results={"outputs": {"stored": {"file": "../x"}}}), "row missing"),
        (lambda d: d["batches"][0]["values"]["add"].update(value={"pickle": "x"}), "'pickle' is not a kind of leaf"),
    ],
)
def test_a_capture_that_was_changed_or_is_of_another_version_is_refused(edit, what, tmp_path):
    capture(traced(lambda x: x + 1), [(torch.ones(2),)], out=tmp_path)
    manifest = tmp_path / "capture.json"
    document = json.loads(manifest.read_text())
    edit(document)
    manifest.write_text(json.dumps(document))

    with pytest.raises(ReportUnreadable, match=rf"capture\.json: .*{what}"):
        read_capture(tmp_path)


def test_leaves_that_are_no_tensors_come_back_from_disk(tmp_path):
    graph = torch.fx.Graph()
    numbers = [math.nan, -math.inf, 1 + 2j, True, "nan", None, 2**70, torch.float16, slice(1, None)]
    graph.output((numbers, graph.placeholder("x")))
    graph_module = torch.fx.GraphModule({}, graph)

    in_memory = capture(graph_module, [(torch.ones(2),)]).outputs(0)
    capture(graph_module, [(torch.ones(2),)], out=tmp_path)

    read = read_capture(tmp_path).outputs(0)
    assert repr(read) == repr(in_memory)


def test_a_number_of_numpy_comes_back_from_disk_as_a_number(tmp_path):
    capture(traced(lambda x: (x, np.float64(0.5))), [(torch.ones(2),)], out=tmp_path)

    assert read_capture(tmp_path).outputs(0)["outputs[1]"] == 0.5


def test_views_of_one_storage_are_written_once_and_a_small_part_is_written_alone(tmp_path):
    def program(x):
        y = x + 1
        return y.view(64, 64), y.t(), y[:1]

    capture(traced(program), [(torch.ones(64, 64),)], out=tmp_path)

    whole, turned, part = (read_capture(tmp_path).outputs(0)[f"outputs[{index}]"] for index in range(3))
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 1.5 * 64 * 64 * 4
    assert (turned.stride(), part.untyped_storage().nbytes()) == ((1, 64), 64 * 4)
    assert torch.equal(whole, turned.t())
    shared = read_capture(tmp_path).outputs(0)
    assert shared["outputs[0]"].data_ptr() == shared["outputs[1]"].data_ptr()


def test_a_capture_is_written_while_the_graph_runs_and_holds_no_tensors_then(tmp_path, monkeypatch):
    monkeypatch.setattr(captures, "GROUP_BYTES", 1000)

    captured = capture(traced(lambda x: ((x + 1) * 2).sin()), [(torch.ones(200),), (torch.zeros(200),)], out=tmp_path)

    leaves = [leaf for batch in captured.batches for leaves in batch.values.values() for leaf in leaves.values()]
    assert all(isinstance(leaf, captures.StoredTensor) for leaf in leaves)
    assert len(list(tmp_path.glob("values-*.safetensors"))) == len(captured.files) == 4
    assert torch.equal(read_capture(tmp_path).leaves(1, "add")["value"], torch.ones(200))


# comparing


def right(x):
    return (x.sin() * 3).relu() + x


def wrong(x):
    return (x.sin() * 3.01).relu() + x


def wave():
    return torch.linspace(-2, 2, 64)


def verdicts(location):
    return {row.reference.name: {seen.verdict for seen in row.inherited} for row in location.table}


def test_names_the_first_node_that_differs():
    location = compare_captures(capture(traced(right), [(wave(),)]), capture(traced(wrong), [(wave(),)]))

    found = verdicts(location)
    assert location.verdict is Verdict.DIVERGED
    assert found["sin"] == {Verdict.EQUIVALENT}
    assert found["mul"] == found["output"] == {Verdict.DIVERGED}
    assert any("mul is the first node that diverged" in note for note in location.notes)
    assert any("judged by torch.testing's tolerances" in note for note in location.notes)


def test_two_captures_of_one_program_are_equivalent():
    first, second = (capture(exported(), [batch(1), batch(2)]) for _ in range(2))

    location = compare_captures(first, second)

    assert location.verdict is Verdict.EQUIVALENT
    assert location.coverage.matched == location.coverage.total
    assert (location.unmatched_reference, location.unmatched_candidate) == ((), ())


def test_the_signal_of_an_sqnr_is_the_reference():
    reference = capture(traced(lambda x: x * 1.0), [(wave(),)])
    candidate = capture(traced(lambda x: x * 1e6), [(wave(),)])

    (row, _) = compare_captures(reference, candidate, policy="sqnr>=35").table

    assert row.inherited[0].verdict is Verdict.DIVERGED
    assert row.inherited[0].measurement.sqnr_db == pytest.approx(-120, abs=0.1)


def test_the_worst_batch_is_shown_and_none_is_dropped():
    def program(x):
        return x * 1.0

    def off_when_large(x):
        return x * 1.0 + (x > 5)

    reference = capture(traced(program), [(torch.ones(3),), (torch.ones(3) * 9,), (torch.ones(3),)])
    candidate = capture(traced(off_when_large), [(torch.ones(3),), (torch.ones(3) * 9,)])

    location = compare_captures(reference, candidate)

    (output,) = location.table[-1].inherited
    assert (output.verdict, output.details["batch"]) == (Verdict.DIVERGED, 1)
    assert any("3 batches in the reference and 2 in the candidate" in note for note in location.notes)
    assert compare_captures(
        capture(traced(program), [(wave(),)] * 2), capture(traced(program), [(wave(),)])
    ).verdict is (Verdict.INCONCLUSIVE)


def test_lists_of_different_length_and_imaginary_parts_are_differences():
    def parts(x):
        return [x + 1, x + 2]

    def more_parts(x):
        return [x + 1, x + 2, x]

    def conjugated(x):
        return torch.complex(x, -x)

    longer = compare_captures(capture(traced(parts), [(wave(),)]), capture(traced(more_parts), [(wave(),)]))
    other = compare_captures(
        capture(traced(lambda x: torch.complex(x, x)), [(wave(),)]), capture(traced(conjugated), [(wave(),)])
    )

    assert longer.verdict is Verdict.DIVERGED
    assert {seen.path for seen in longer.table[-1].inherited if seen.verdict is Verdict.DIVERGED} == {"outputs[2]"}
    assert verdicts(other)["output"] == {Verdict.DIVERGED}


def test_other_branches_taken_are_a_difference():
    class Other(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 5, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))

    sides = (capture(exported(module, (torch.ones(2),)), [(torch.ones(2),)]) for module in (Branching(), Other()))

    found = verdicts(compare_captures(*sides))

    assert found["true_graph_0.sin"] == {Verdict.DIVERGED}
    assert found["false_graph_0.cos"] == {Verdict.DIVERGED}


def test_a_node_that_neither_side_ran_is_no_pass():
    first, second = (capture(exported(Branching(), (torch.ones(2),)), [(torch.ones(2),)]) for _ in range(2))

    location = compare_captures(first, second)
    rows = {row.reference.name: row for row in location.table}

    assert location.coverage.matched == location.coverage.total - 4
    assert rows["false_graph_0.cos"].inherited == ()
    assert "neither side logged a value" in rows["false_graph_0.cos"].reason


def test_graphs_with_nothing_in_common_are_inconclusive():
    def inner(x):
        return x.view(8, 8) @ x.view(8, 8)

    location = compare_captures(
        capture(traced(lambda x: x + 1), [(wave(),)]), capture(traced(lambda x: x + 1), [(wave(),)])
    )
    apart = compare_captures(capture(traced(lambda x: x.sin()), [(wave(),)]), capture(traced(inner), [(wave(),)]))

    assert location.verdict is Verdict.EQUIVALENT
    assert apart.coverage.matched == 0
    assert apart.verdict is Verdict.INCONCLUSIVE
    assert any("their outputs are diverged" in note for note in apart.notes)


def test_a_candidate_that_raised_has_crashed_and_is_compared_up_to_there():
    def raises(x):
        return x.sin().view(3)

    def fine(x):
        return x.sin().view(64)

    location = compare_captures(capture(traced(fine), [(wave(),)]), capture(traced(raises), [(wave(),)]))

    assert location.verdict is Verdict.CRASHED
    assert verdicts(location)["sin"] == {Verdict.EQUIVALENT}


def test_statistics_tell_identical_values_and_large_gaps_and_no_more():
    def shuffled(x):
        return (x.sin() * 3).relu().flip(0) + x

    captures = [capture(traced(each), [(wave(),)], keep="statistics") for each in (right, right, wrong, shuffled)]

    same, gap, other = (compare_captures(captures[0], candidate) for candidate in captures[1:])

    assert same.verdict is Verdict.EQUIVALENT
    assert verdicts(gap)["mul"] == {Verdict.DIVERGED}
    assert any("only statistics were kept" in note for note in gap.notes)
    assert other.verdict is not Verdict.EQUIVALENT


def test_a_small_difference_of_which_only_statistics_are_known_is_inconclusive():
    def rounded(x):
        return (x.sin() * 3.0000005).relu() + x

    first, second = (capture(traced(each), [(wave(),)], keep="statistics") for each in (right, rounded))

    assert verdicts(compare_captures(first, second))["mul"] == {Verdict.INCONCLUSIVE}
    assert verdicts(compare_captures(first, second, policy="bitwise"))["mul"] == {Verdict.DIVERGED}


def test_nodes_may_be_given_and_unknown_ones_are_refused():
    reference, candidate = capture(traced(right), [(wave(),)]), capture(traced(wrong), [(wave(),)])

    rows = compare_captures(reference, candidate, given={"sin": "relu"}).table
    assert next(row for row in rows if row.reference.name == "sin").how == "given"
    with pytest.raises(UsageError, match="sine"):
        compare_captures(reference, candidate, given={"sine": "sin"})


COMPARE = """
import sys
from torchdelta.storage.captures import read_capture
from torchdelta.nodewise.compare_captures import compare_captures
location = compare_captures(*map(read_capture, sys.argv[1:]))
print(location.verdict.value, *[row.reference.name for row in location.table if row.inherited[0].error])
"""


def test_another_process_compares_what_it_never_ran(tmp_path):
    capture(traced(right), [(wave(),)], out=tmp_path / "reference")
    capture(traced(wrong), [(wave(),)], out=tmp_path / "candidate")

    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(tmp_path / "reference"), str(tmp_path / "candidate")],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == ["diverged", "mul", "relu", "add", "output"]
