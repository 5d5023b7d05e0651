"""A program by its name: that of a factory which builds it, or of a directory in which a graph was recorded."""

from __future__ import annotations

from torchdelta import errors
from torchdelta.errors import ProgramError
from torchdelta.program import recordings
from torchdelta.program.programs import Program, load_callable, load_module
from torchdelta.records.recording import recording_of


def load_program(spec: str) -> Program:
    """Build the program that `path/file.py:factory`, `package.module:factory` or a recorded directory names."""
    if recording_of(spec) is not None:
        return recordings.read(spec)[0]
    factory = load_callable(spec, what="program factory")
    try:
        built = factory()
    except errors.caught_from_user_code() as error:
        raise ProgramError(f"{spec}: the factory raised {type(error).__name__}: {error}") from error
    if not isinstance(built, (tuple, list)) or len(built) not in (2, 3):
        raise ProgramError(
            f"{spec}: the factory must return (callable, args) or (callable, args, kwargs), not {_shape(built)}"
        )
    call, args, *rest = built
    return Program(
        name=spec, call=call, args=tuple(args) if isinstance(args, list) else args, kwargs=rest[0] if rest else {}
    )


def import_program(spec: str) -> None:
    """Import what a named program is made of; what that sets holds from then on, as in the user's own run."""
    recording = recording_of(spec)
    if recording is None:
        load_callable(spec, what="program factory")
    else:
        recordings.make_ready(recording)


def import_place(place: str) -> None:
    """Import a module by file or by name, or what a recorded directory needs."""
    recording = recording_of(place)
    if recording is None:
        load_module(place, what="operators")
    else:
        recordings.make_ready(recording)


def _shape(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
