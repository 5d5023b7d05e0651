"""Load a program by its name: `path/file.py:factory`, `package.module:factory`, or the directory of a recording."""

from __future__ import annotations

from torchdelta import errors
from torchdelta.errors import ProgramError
from torchdelta.program import recordings
from torchdelta.program.programs import Program, load_callable, load_module
from torchdelta.records.recording import recording_of


def load_program(spec: str, *, name: str | None = None) -> Program:
    """Return the program that a factory builds or a recording holds; `spec` names a factory or a recorded directory.

    `name` is the factory's for messages; without it, that is `spec` too. A factory is called without arguments. Raise
    UsageError if `spec` is not a name of that form or names something that cannot be called. Raise ProgramError if the
    factory cannot be loaded, raises, or does not return (callable, args) or (callable, args, kwargs) that fit. A
    recorded directory is read by `recordings.read`, whose imports and compiler settings last; its errors are raised,
    and ReportUnreadable for a directory without a record.
    """
    if recording_of(spec) is not None:
        return recordings.read(spec)[0]
    factory = load_callable(spec, what="program factory")
    name = spec if name is None else name
    try:
        result = factory()
    except errors.caught_from_user_code() as error:
        raise ProgramError(f"{name}: the factory raised {errors.describe(error)}") from error
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
        raise ProgramError(
            f"{name}: the factory must return (callable, args) or (callable, args, kwargs), not {_describe(result)}"
        )
    call, args, *rest = result
    return Program(
        name=name, call=call, args=tuple(args) if isinstance(args, list) else args, kwargs=rest[0] if rest else {}
    )


def import_program(spec: str) -> None:
    """Import the modules of a named program, but do not build it; of a recording, apply its compiler settings too.

    Settings that the modules make on import hold from then on, as in the user's own run. Raise UsageError if `spec` has
    another form or names something that cannot be called, ProgramError if a module does not import or has no such
    factory, and ReportUnreadable if a directory has no readable record. Of a recording, also raise what
    `recordings.make_ready` raises.
    """
    recording = recording_of(spec)
    if recording is None:
        load_callable(spec, what="program factory")
    else:
        recordings.make_ready(recording, spec)


def import_place(place: str) -> None:
    """Import a module by file or by name, or the modules that a recording needs if `place` is a recorded directory.

    The compiler settings of a recording are applied too. Raise ProgramError if a module does not import, and
    ReportUnreadable if a directory has no readable record. Of a recording, also raise what `recordings.make_ready`
    raises.
    """
    recording = recording_of(place)
    if recording is None:
        load_module(place, what="operators")
    else:
        recordings.make_ready(recording, place)


def _describe(value: object) -> str:
    """Return the class of a value, for a tuple or list with its length, as in `tuple of 4`."""
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
