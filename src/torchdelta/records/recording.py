"""A recording: a graph on its way to a compiler, with everything that another process needs to check it.

A recorded directory is a program: `torchdelta check DIRECTORY`. The graph and its inputs lie beside the record, which
is written last, so a directory that has a record is complete. `complete` fills the gaps of a caller's options from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records.case import Case, CheckOptions
from torchdelta.records.codec import decode, encode
from torchdelta.records.comparison import Scalar
from torchdelta.records.strict_json import FileFormat
from torchdelta.records.trust import require_trusted

RECORDING = "recording.json"
RECORDING_VERSION = 1
LEVELS = ("dynamo", "forward", "backward", "inference")
_NAMED_TRANSFORMS = ("backend", "cast", "autocast")
"""Transforms with an argument, such as a dtype, that is not the name of code."""
_ARGUED = ("module", "quantize")
"""Transforms with an argument that may be the name of code."""
_CODE_OPTIONS = ("table", "state")
"""Options whose value may be the name of code."""
_FORMAT = FileFormat(kind="recording", version=RECORDING_VERSION, remedy="record the graph again")


@dataclass(frozen=True, kw_only=True)
class AutocastSetting:
    """The autocast that a graph ran under."""

    device: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Everything about a recorded graph besides its nodes and its inputs."""

    name: str
    """Where the graph comes from."""
    level: str
    """The compiler's part that handed it over: `dynamo`, or AOTAutograd (`forward`, `backward`, `inference`)."""
    transform: str | None = None
    """The transform that it was handed to, by a name that another process can import; None if it has none."""
    options: dict[str, Scalar] = field(default_factory=dict)
    stages: tuple[str, ...] | None = None
    """The stages that a check of it compares; None are the default ones."""
    policy: str = Case.policy
    nodes: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the compiler that differ from torch's defaults, by their full names."""
    imports: tuple[str, ...] = ()
    """Modules, by name or by file, that define the functions that the graph calls, and its transform."""
    path: tuple[str, ...] = ()
    """Directories of modules that are not installed: another process adds them to its search path."""
    is_grad_enabled: bool = True
    autocast: AutocastSetting | None = None
    lacks: tuple[str, ...] = ()
    """The parts that could not be recorded, which a repro lacks, in sentences."""

    def __post_init__(self) -> None:
        """Raise UsageError if the level is not one of `LEVELS`, or if no case could have the stages."""
        if self.level not in LEVELS:
            raise UsageError(
                f"a graph of the level {self.level!r} cannot be recorded: it is one of {', '.join(LEVELS)}"
            )
        # a case that makes no sense is refused here, while the guard that records can still say so
        Case(program=self.name, transform=self.transform or "", policy=self.policy, **_stages(self.stages))


def recording_of(program: object) -> Recording | None:
    """Return the record of a program that is a text, the path of a recorded directory; None for any other program.

    ReportUnreadable if the text names a directory without a record, or with one that cannot be read.
    """
    if not isinstance(program, str) or not os.path.isdir(program):
        return None
    return read_recording(program)


def write_recording(recording: Recording, directory: str | os.PathLike[str]) -> None:
    """Write the record into a directory, which must exist; raise UsageError if it cannot be written."""
    _FORMAT.write(Path(directory) / RECORDING, encode(recording), indent=2)


def read_recording(directory: str | os.PathLike[str]) -> Recording:
    """Return the record in a directory; raise ReportUnreadable if it is missing, damaged or of another version."""
    path = Path(directory) / RECORDING
    try:
        document = _FORMAT.read(path)
    except ReportUnreadable as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise ReportUnreadable(
            f"{os.fspath(directory)} has no {RECORDING}: nothing was recorded there, or the process that recorded it "
            "died before it was written; record the graph again, or name a program as path/file.py:factory"
        ) from None
    try:
        return decode(Recording, document, "recording")  # type: ignore[no-any-return]
    except ReportUnreadable as error:
        raise ReportUnreadable(f"{path}: {error}; record the graph again") from error


def places_of_code(recording: Recording) -> list[str]:
    """Return the files and modules that a recording imports code from."""
    transform = _code_of(recording.transform or "")
    return [*recording.imports, *([transform] if transform else []), *_code_in(recording.options)]


def _code_of(transform: str) -> str:
    """Return the file or module that a transform's name imports code from; empty if it imports none."""
    kind, _, argument = transform.partition(":")
    place = argument if kind in _ARGUED else transform
    place = place.rpartition(":")[0]
    return place if place.endswith(".py") or kind not in _NAMED_TRANSFORMS else ""


def _code_in(options: Mapping[str, Scalar]) -> list[str]:
    """Return the files and modules that the values of a transform's options import code from.

    These are texts with a colon, if the option is one of `_CODE_OPTIONS` or the text names a `.py` file.
    """
    texts = {name: value for name, value in options.items() if isinstance(value, str) and ":" in value}
    return [text.rpartition(":")[0] for name, text in texts.items() if name in _CODE_OPTIONS or ".py:" in text]


def complete(program: object, options: CheckOptions) -> CheckOptions:
    """Return a copy of the options, with the policy and stages that they lack from the program's recording.

    If they have neither a transform nor a candidate, the recorded transform is added too, with its options unless the
    caller set some. Without a recording a missing policy is the default one. UsageError if there is still neither a
    transform nor a candidate, or if the recorded transform or its options name code that is not trusted;
    ReportUnreadable if the program is a directory without a readable record.
    """
    recording = recording_of(program)
    policy = recording.policy if recording is not None else Case.policy
    options = replace(options, policy=options.policy if options.policy is not None else policy)
    if recording is not None and options.stages is None:
        options = replace(options, stages=recording.stages)
    if options.transform is not None or options.candidate is not None:
        return options
    if recording is None:
        raise UsageError(
            "name a transform or a candidate to compare the program with (-t inductor, transform=…): only a recorded "
            "directory names the transform that its graph was on the way to"
        )
    if recording.transform is None:
        raise UsageError(
            f"{program} was recorded on its way to a transform that no other process can import: name one (-t "
            "inductor, transform=…) to compare it with"
        )
    given = options.options or dict(recording.options)
    for place in (_code_of(recording.transform), *_code_in(recording.options if not options.options else {})):
        if place:
            require_trusted(place, recording.path, named_by=f"the recording {program}")
    # options belong to the transform for which they were recorded
    return replace(options, transform=recording.transform, options=given)


def with_absolute_file(name: str) -> str:
    """Return the name of code with its file made absolute, if there is such a file; any other name unchanged.

    `name` is that of a program, a transform, an optimizer or a loss, or an option that names code: `file.py:name`, with
    `module:` or `quantize:` in front for a transform, or the directory of a recording.
    """
    kind, _, argument = name.partition(":")
    start, code = (f"{kind}:", argument) if kind in _ARGUED else ("", name)
    place, colon, attribute = code.rpartition(":")
    if place.endswith(".py") and os.path.isfile(place):
        return f"{start}{os.path.abspath(place)}{colon}{attribute}"
    return os.path.abspath(name) if not colon and os.path.isdir(name) else name


def with_absolute_files(options: CheckOptions) -> CheckOptions:
    """Return the options with the files of all code that they name made absolute, so that a process may move."""
    names: dict[str, Any] = {
        key: with_absolute_file(value)
        for key in ("transform", "optimizer", "loss")
        if isinstance(value := getattr(options, key), str)
    }
    code = {key: value for key, value in options.options.items() if isinstance(value, str) and ":" in value}
    return replace(options, **names, options={**options.options, **{k: with_absolute_file(v) for k, v in code.items()}})


def _stages(stages: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the stages as a keyword argument of `Case`; empty if they are None."""
    return {} if stages is None else {"stages": stages}
