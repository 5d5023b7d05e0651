"""A report that is written is read back exactly as it was, and nothing else is taken for a report."""

import dataclasses
import enum
import json
import math
import os
import resource
import stat
import struct
import types
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from programs import reports
from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records import case as cases
from torchdelta.records.case import Case
from torchdelta.records.codec import from_json, read_report, to_json, write_report
from torchdelta.records.comparison import Scalar, Worst
from torchdelta.records.report import SCHEMA_VERSION, Report, Stage

LOOKS_LIKE_A_NUMBER = ["nan", "inf", "-inf", "\\nan", "\\\\inf", "NaN", "-0.0", "1", "true", "null", ""]

text = st.one_of(st.sampled_from(LOOKS_LIKE_A_NUMBER), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
floats = st.one_of(st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308]), st.floats())
integers = st.one_of(st.integers(), st.integers(min_value=-(10**400), max_value=10**400))
ATOMS = {str: text, float: floats, int: integers, bool: st.booleans(), type(None): st.none()}


def values_of(hint):
    """Any value of a type that a record's field has."""
    if hint in ATOMS:
        return ATOMS[hint]
    if hint is Case:
        return case
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        fields = typing.get_type_hints(hint)
        if hint is Report:
            del fields["schema_version"]
        return st.builds(hint, **{name: values_of(field) for name, field in fields.items()})
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(text, values_of(arguments[1]), max_size=2)
    assert typing.get_origin(hint) in (typing.Union, types.UnionType), hint
    return st.one_of([values_of(member) for member in arguments])


def some_of(names):
    return st.lists(st.sampled_from(names), unique=True).map(tuple)


case = st.builds(
    Case,
    **{
        **{name: values_of(hint) for name, hint in typing.get_type_hints(Case).items()},
        "stages": st.one_of(some_of(cases.STAGES).filter(len), st.just((cases.VALUES,))),
        "ignore": some_of(cases.IGNORABLE),
        "strict": some_of(cases.STRICT),
        "seed": st.integers(0, 2**63 - 1),
        "iterations": st.integers(1),
        "steps": st.integers(1),
    },
)


def identity(value):
    """What two values have in common only when nothing was lost: -0.0 is not 0.0, 1 is not 1.0, nan is nan."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value), identity(fields)
    if isinstance(value, dict):
        return {key: identity(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(identity, value))
    if isinstance(value, float):
        return "a nan" if math.isnan(value) else struct.pack("d", value)
    return type(value), value


def strictly_parsed(json_text):
    """Parse as a reader does that takes no NaN and no duplicate key."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    def once(pairs):
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    return json.loads(json_text, parse_constant=refuse, object_pairs_hook=once)


class TestRoundTrip:
    @settings(max_examples=150, deadline=None)
    @given(values_of(Report))
    def test_gives_back_any_report_bit_by_bit(self, report):
        written = to_json(report)

        assert identity(from_json(written)) == identity(report)
        assert strictly_parsed(written)["schema_version"] == SCHEMA_VERSION
        assert to_json(from_json(written)) == written

    @pytest.mark.parametrize("make", reports.ALL)
    def test_gives_back_reports_of_every_kind(self, make):
        assert from_json(to_json(make())) == make()

    @pytest.mark.parametrize("value", [*LOOKS_LIKE_A_NUMBER, math.nan, math.inf, -math.inf, -0.0, 0, 1, True, 10**400])
    def test_keeps_a_number_apart_from_text_that_looks_like_it(self, value):
        seen = dataclasses.replace(
            reports.comparison("x"), worst=Worst(index=(), reference=value, candidate=value, truth=None)
        )
        report = reports.report(Stage.of("forward", (seen,)))

        again = from_json(to_json(report)).comparisons[0].worst

        assert identity(again) == identity(seen.worst)

    def test_writes_numbers_that_are_not_finite_as_text(self):
        seen = dataclasses.replace(reports.comparison("x"), error=math.nan, allowed=math.inf, noise=-math.inf)

        written = strictly_parsed(to_json(reports.report(Stage.of("forward", (seen,)))))

        leaf = written["stages"][0]["comparisons"][0]
        assert [leaf["error"], leaf["allowed"], leaf["noise"]] == ["nan", "inf", "-inf"]

    def test_keeps_a_name_that_is_no_unicode(self, tmp_path):
        report = dataclasses.replace(reports.equivalent(), notes=(os.fsdecode(b"caf\xe9.py"), "λ ≠ µ"))

        write_report(report, tmp_path / "report.json")

        assert read_report(tmp_path / "report.json") == report


# Whoever changes this changes what a report is: raise SCHEMA_VERSION with it.
SCHEMA = (
    6,
    {
        "Breach": "clause: str, reference: str, candidate: str, excused: bool",
        "Case": "program: str, transform: str, options: dict[str, Scalar], stages: tuple[str, ...], policy: str, "
        "seed: int, ignore: tuple[str, ...], strict: tuple[str, ...], iterations: int, steps: int, optimizer: str, "
        "loss: str | None, deterministic: bool, anomaly: bool, semantic: bool, thorough: bool",
        "Comparison": "path: str, verdict: Verdict, reason: str, leaf: str, kind: str | None, dtype: str | None, "
        "shape: tuple[int, ...] | None, contract: tuple[Breach, ...], error: float | None, noise: float | None, "
        "allowed: float | None, resolution: float | None, worst: Worst | None, measurement: Measurement | None, "
        "details: dict[str, Scalar]",
        "Cost": "seconds: dict[str, float], peak_bytes: int",
        "Coverage": "matched: int, total: int, how: dict[str, int]",
        "Culprit": "op: str, node: str, module_path: str, source_line: str, local_error: float, noise: float, "
        "stage: str | None, reason: str, rung: str | None, cause: str | None, region: tuple[str, ...]",
        "Environment": "torch: str, python: str, platform: str",
        "Failure": "kind: str, type: str, message: str, signature: Signature, traceback: str",
        "Graphs": "captured: int, transformed_calls: int, untransformed_calls: int",
        "Measurement": "numel: int, finite: int, mismatches: int, misplaced: int, nan_reference: int, "
        "nan_candidate: int, inf_reference: int, inf_candidate: int, max_abs: float, max_rel: float, "
        "square_error: float, square_reference: float, square_candidate: float, dot: float, max_ulp: int | None, "
        "beyond: int, worst: int",
        "Questions": "native: str, semantic: str, local: str",
        "Reduction": "nodes_before: int, nodes_after: int, queries: int, seconds: float, is_minimal: bool, rate: float",
        "Report": "verdict: Verdict, environment: Environment, case: Case, stages: tuple[Stage, ...], "
        "questions: Questions, graphs: Graphs | None, unmatched: tuple[UnmatchedLeaf, ...], notes: tuple[str, ...], "
        "culprits: tuple[Culprit, ...], coverage: Coverage | None, failure: Failure | None, "
        "reduction: Reduction | None, repro: Repro | None, cost: Cost | None, schema_version: int",
        "Repro": "path: str, confirmed: bool",
        "Scalar": "bool | int | float | str",
        "Signature": "kind: str, stage: str, type: str, message: str, where: str, magnitude: int | None",
        "Stage": "name: str, verdict: Verdict, comparisons: tuple[Comparison, ...], reason: str",
        "UnmatchedLeaf": "path: str, side: str, what: str",
        "Verdict": "equivalent, inconclusive, diverged, timed_out, crashed",
        "Worst": "index: tuple[int, ...], reference: Scalar | None, candidate: Scalar | None, truth: Scalar | None",
    },
)


def schema_of(hint, found):
    """Write down the fields of every record that a type reaches."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        found[hint.__name__] = ", ".join(member.value for member in hint)
    elif dataclasses.is_dataclass(hint):
        found[hint.__name__] = ", ".join(f"{field.name}: {field.type}" for field in dataclasses.fields(hint))
        for field in typing.get_type_hints(hint).values():
            schema_of(field, found)
    for argument in typing.get_args(hint):
        schema_of(argument, found)
    return found


def test_the_schema_changes_only_together_with_its_version():
    assert (SCHEMA_VERSION, schema_of(Report, {"Scalar": str(Scalar)})) == SCHEMA


def without(place, name):
    """Return the JSON of a report with one field taken out."""
    return changed(place, lambda record: record.pop(name))


def changed(place, change):
    """Return the JSON of a report after a change of the record at a place."""
    data = json.loads(to_json(reports.diverged()))
    record = data
    for step in place:
        record = record[step]
    change(record)
    return json.dumps(data)


LEAF = ("stages", 1, "comparisons", 0)


class TestUnreadable:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (to_json(reports.equivalent())[:-200], r"^this is not JSON \(line \d+: "),
            ("", r"^this is not JSON \(line 1: "),
            ("verdict: equivalent", r"^this is not JSON \(line 1: "),
            ("NaN", "NaN is not JSON"),
            ("[" * 100_000, "^this is not a torchdelta report: "),
            ("9" * 5000, "^this is not a torchdelta report: "),
            ("[]", "^this is JSON but not a torchdelta report: it has no schema_version$"),
            ("7", "^this is JSON but not a torchdelta report"),
            ('{"name": "package", "version": "1.0"}', "^this is JSON but not a torchdelta report"),
            ('{"schema_version": "1"}', "^this is JSON but not a torchdelta report"),
        ],
    )
    def test_what_is_no_report(self, given, said):
        with pytest.raises(ReportUnreadable, match=said):
            from_json(given)

    @pytest.mark.parametrize(
        ("version", "said"),
        [
            (SCHEMA_VERSION + 1, f"has schema {SCHEMA_VERSION + 1}, .* reads {SCHEMA_VERSION}: upgrade torchdelta"),
            (SCHEMA_VERSION - 1, f"has schema {SCHEMA_VERSION - 1}, .* reads {SCHEMA_VERSION}: run the check again"),
        ],
    )
    def test_another_schema_says_what_to_do(self, version, said):
        with pytest.raises(ReportUnreadable, match=said):
            from_json(changed((), lambda report: report.update(schema_version=version, added_later=1)))

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (without((), "stages"), "^report: stages missing$"),
            (without((), "questions"), "^report: questions missing$"),
            (without(LEAF, "verdict"), r"^report\.stages\[1\]\.comparisons\[0\]: verdict missing$"),
            (changed((), lambda report: report.update(extra=1)), "^report: unknown extra$"),
            (
                changed(LEAF, lambda leaf: leaf.update(extra=1)),
                r"^report\.stages\[1\]\.comparisons\[0\]: unknown extra$",
            ),
            (
                changed(LEAF, lambda leaf: leaf.update(verdict="fine")),
                r"^report\.stages\[1\]\.comparisons\[0\]\.verdict: expected Verdict, found 'fine'$",
            ),
            (changed(LEAF, lambda leaf: leaf.update(error="big")), r"\.error: expected number, found 'big'$"),
            (changed(LEAF, lambda leaf: leaf.update(error=True)), r"\.error: expected number, found True$"),
            (changed(LEAF, lambda leaf: leaf.update(error=10**400)), r"\.error: expected number that fits a float"),
            (changed(LEAF, lambda leaf: leaf.update(path=None)), r"\.path: expected str, found None$"),
            (changed(LEAF, lambda leaf: leaf.update(shape=[1, True])), r"\.shape\[1\]: expected int, found True$"),
            (
                changed((*LEAF, "worst"), lambda worst: worst.update(truth=[1])),
                r"\.worst\.truth: expected bool or int or float or str, found a list$",
            ),
            (changed((), lambda report: report.update(stages={})), r"^report\.stages: expected list, found a dict$"),
            (changed((), lambda report: report.update(case=[])), r"^report\.case: expected dict, found a list$"),
            (
                changed(("case",), lambda case: case.update(stages=["backward"])),
                r"^report\.case: unknown stage 'backward'",
            ),
            (changed(("cost",), lambda cost: cost.update(seconds={"a": "x"})), r"^report\.cost\.seconds\.a: "),
        ],
    )
    def test_a_wrong_field_is_named_by_its_place(self, given, said):
        with pytest.raises(ReportUnreadable, match=said):
            from_json(given)

    def test_what_was_found_is_shown_in_part_when_it_is_long(self):
        with pytest.raises(ReportUnreadable) as caught:
            from_json(changed((), lambda report: report.update(verdict="long " * 1000)))

        assert len(str(caught.value)) < 100

    def test_a_file_is_named(self, tmp_path):
        path = tmp_path / "report.json"
        for content, said in ((b"{", "not JSON"), (b"\xff\xfe", "cannot read")):
            path.write_bytes(content)
            with pytest.raises(ReportUnreadable, match=said) as caught:
                read_report(path)
            assert str(path) in str(caught.value)

    def test_a_file_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(ReportUnreadable, match=r"cannot read .*none\.json: No such file or directory"):
            read_report(tmp_path / "none.json")
        with pytest.raises(ReportUnreadable, match="Is a directory"):
            read_report(tmp_path)


class TestWriting:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "report.json"

    def test_takes_a_path_or_its_name(self, path):
        write_report(reports.equivalent(), str(path))

        assert read_report(str(path)) == read_report(path) == reports.equivalent()

    def test_is_as_readable_as_any_other_file(self, path):
        path.with_name("other").touch()

        write_report(reports.equivalent(), path)

        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.with_name("other").stat().st_mode)

    def test_leaves_the_old_report_alone_when_the_new_one_cannot_be_encoded(self, path):
        write_report(reports.equivalent(), path)
        unfit = dataclasses.replace(reports.diverged(), notes=(object(),))

        with pytest.raises(TypeError):
            write_report(unfit, path)

        assert read_report(path) == reports.equivalent()
        assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]

    def test_leaves_the_old_report_alone_when_writing_fails_half_way(self, path):
        write_report(reports.equivalent(), path)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(UsageError, match=r"^cannot write .*report\.json: File too large$"):
                write_report(reports.diverged(), path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        assert read_report(path) == reports.equivalent()
        assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
    def test_leaves_nothing_behind_when_it_is_interrupted(self, path, monkeypatch, error):
        def fail(*_):
            raise error

        monkeypatch.setattr(Path, "replace", fail)

        with pytest.raises((KeyboardInterrupt, UsageError)):
            write_report(reports.equivalent(), path)

        assert list(path.parent.iterdir()) == []

    def test_refuses_a_place_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").touch()
        for place in (tmp_path, tmp_path / "none" / "report.json", tmp_path / "file" / "report.json"):
            with pytest.raises(UsageError, match=f"^cannot write {place}: "):
                write_report(reports.equivalent(), place)
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

    def test_refuses_a_directory_without_permission(self, path):
        path.parent.chmod(0o500)
        user = os.geteuid()
        if user == 0:  # root writes everywhere
            os.seteuid(65534)
        try:
            with pytest.raises(UsageError, match=r"^cannot write .*report\.json: Permission denied$"):
                write_report(reports.equivalent(), path)
        finally:
            os.seteuid(user)

    def test_follows_a_link_and_keeps_it(self, path):
        target = path.with_name("runs.json")
        path.symlink_to(target)

        write_report(reports.equivalent(), path)

        assert path.is_symlink()
        assert read_report(target) == reports.equivalent()

    def test_writes_into_a_pipe_instead_of_replacing_it(self, path):
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            write_report(reports.crashed(), path)
            received = os.read(reader, 1 << 16).decode()
        finally:
            os.close(reader)

        assert from_json(received) == reports.crashed()
        assert stat.S_ISFIFO(path.stat().st_mode)
