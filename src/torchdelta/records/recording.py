"""A recording: a graph on its way to a compiler, with all that another process needs to know to ask about it again.

Beside the record lie the graph and its inputs. The record is written last, so a directory that has one is whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchdelta.errors import ReportUnreadable, UsageError
from torchdelta.records.case import Case
from torchdelta.records.codec import decode, encode
from torchdelta.records.comparison import Scalar
from torchdelta.records.strict_json import FileFormat

RECORDING = "recording.json"
RECORDING_VERSION = 1
LEVELS = ("dynamo", "forward", "backward", "inference")
_FORMAT = FileFormat(kind="recording", version=RECORDING_VERSION, remedy="record the graph again")
_DEFAULT_POLICY = "noise"


@dataclass(frozen=True, kw_only=True)
class AutocastSetting:
    """The autocast that a graph ran under."""

    device: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is known about a recorded graph besides its nodes and its inputs."""

    name: str
    """Where the graph comes from."""
    level: str
    """Who handed it over: `dynamo`, or AOTAutograd as a `forward`, `backward` or `inference` graph."""
    transform: str | None = None
    """What it was on its way to, as another process finds it; None where no other can."""
    options: dict[str, Scalar] = field(default_factory=dict)
    stages: tuple[str, ...] | None = None
    """What a check of it compares; None is what a check compares by default."""
    policy: str = _DEFAULT_POLICY
    nodes: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the compiler that were not as torch ships them, by their full names."""
    imports: tuple[str, ...] = ()
    """Modules, by name or by file, that define what the graph calls and what it was on its way to."""
    path: tuple[str, ...] = ()
    """Where modules lie that are not installed: another process searches there too."""
    is_grad_enabled: bool = True
    autocast: AutocastSetting | None = None
    lacks: tuple[str, ...] = ()
    """What a repro lacks, in sentences."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(
                f"a graph of the level {self.level!r} cannot be recorded: it is one of {', '.join(LEVELS)}"
            )
        # what no check could be asked is refused here, where somebody can still do something about it
        Case(program=self.name, transform=self.transform or "", policy=self.policy, **_stages(self.stages))


def recording_of(program: object) -> Recording | None:
    """Return the record of a recorded directory; None of any other program.

    ReportUnreadable of a directory that has no record in it, or one that cannot be read.
    """
    if not isinstance(program, str) or not os.path.isdir(program):
        return None
    return read_recording(program)


def write_recording(recording: Recording, directory: str | os.PathLike[str]) -> None:
    """Write the record of a directory; raise UsageError if it cannot be written."""
    _FORMAT.write(Path(directory) / RECORDING, encode(recording), indent=2)


def read_recording(directory: str | os.PathLike[str]) -> Recording:
    """Return the record of a directory; raise ReportUnreadable if there is none, or none that can be read."""
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


def completed(program: object, words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words of a check, with what the recording of its program says where they say nothing.

    UsageError where neither names a transform.
    """
    recording = recording_of(program)
    made = {name: value for name, value in words.items() if name != "policy" or value is not None}
    if recording is None:
        made.setdefault("policy", _DEFAULT_POLICY)
    else:
        made.setdefault("policy", recording.policy)
        if made.get("stages") is None:
            made["stages"] = recording.stages
    if made.get("transform") is not None or made.get("candidate") is not None:
        return made
    if recording is None:
        raise UsageError(
            "name a transform or a candidate to hold the program against (-t inductor, transform=…): only a recorded "
            "directory says by itself what it was on its way to"
        )
    if recording.transform is None:
        raise UsageError(
            f"{program} was recorded on its way to what no other process can import: name a transform (-t inductor, "
            "transform=…) to hold it against"
        )
    # options belong to the transform that they were given to
    return {**made, "transform": recording.transform, "options": made.get("options") or dict(recording.options)}


def _stages(stages: tuple[str, ...] | None) -> dict[str, Any]:
    return {} if stages is None else {"stages": stages}
