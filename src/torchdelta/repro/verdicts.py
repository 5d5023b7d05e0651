"""The function `main` of a script: is the bug still there?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from torchdelta.errors import ReproUnwritable
from torchdelta.records.failure import Failure
from torchdelta.repro.evidence import Bound, Divergence, key_of
from torchdelta.repro.literals import write_text

SURVIVED = 42
"""With this status a child says that it came to its end."""
OUTPUT_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The calls of `run` that give each side, and what the candidate's values are called."""

    reference: str
    candidate: str
    truth: str | None
    """None where a script has no truth."""
    label: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a script asks, and what it needs for that."""

    main: tuple[str, ...]
    returns: tuple[str, ...] = ()
    """The last statements of `run`."""
    constants: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


def ask_values(divergence: Divergence, sides: Sides, bound: Bound) -> Verdict:
    """Ask whether an element is further off than the bound."""
    wide = "to(torch.complex128)" if (divergence.comparison.dtype or "").startswith("complex") else "double()"
    truth = ", {truth[worst].item()} in float64" if sides.truth else ""
    return Verdict(
        constants=(f"BOUND = {bound.value:.3g}  # {bound.reason}",),
        returns=(f"return {divergence.leaf}.detach().{wide}",),
        main=(
            *_both(sides),
            *([f"truth = {sides.truth}"] if sides.truth else []),
            _SAME_SHAPE,
            "same = (candidate == reference) | (candidate.isnan() & reference.isnan())",
            "error = (candidate - reference).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0)",
            "worst = torch.unravel_index(error.argmax(), error.shape)",
            f'print(f"{_at(divergence, "[int(i) for i in worst]")}: {{reference[worst].item()}} eagerly, "',
            f'      f"{{candidate[worst].item()}} {sides.label}{truth}")',
            "return error[worst].item() > BOUND",
        ),
    )


def ask_exact(divergence: Divergence, sides: Sides) -> Verdict:
    """Ask whether any element differs."""
    return Verdict(
        returns=(f"return torch.as_tensor({divergence.leaf})",),
        main=(
            *_both(sides),
            _SAME_SHAPE,
            "differing = (candidate != reference).nonzero().tolist()",
            "for index in differing[:1]:",
            f'    print(f"{_at(divergence, "index")}: {{reference[tuple(index)].item()}} eagerly, "',
            f'          f"{{candidate[tuple(index)].item()}} {sides.label}")',
            "return bool(differing)",
        ),
    )


_TRAITS = {
    "dtype": "{}.dtype",
    "shape": "tuple({}.shape)",
    "device": "{}.device",
    "requires_grad": "{}.requires_grad",
    "stride": "[step for size, step in zip({0}.shape, {0}.stride()) if size > 1]",
    "value": "{}",
}
_STRUCTURE = (
    "def structure(value):",
    "    if isinstance(value, (list, tuple)):",
    "        return type(value).__name__, [structure(item) for item in value]",
    "    if isinstance(value, dict):",
    "        return type(value).__name__, {key: structure(item) for key, item in value.items()}",
    "    return type(value).__name__",
)


def ask_contract(divergence: Divergence, sides: Sides, around: Mapping[str, str]) -> Verdict:
    """Ask whether a clause is still broken; `around` has whatever may share memory with the leaf, by its path."""
    clause, leaf = divergence.clause, divergence.leaf
    definitions: tuple[str, ...] = ()
    returns: tuple[str, ...]
    if clause == "structure":
        whole = "outputs" if leaf.startswith("outputs") else leaf
        returns, definitions = (f"return structure({whole})",), _STRUCTURE
    elif clause == "aliasing":
        others = ", ".join(f"{json.dumps(path)}: {reach}" for path, reach in around.items() if reach != leaf)
        returns = (
            f"memory = {leaf}.untyped_storage().data_ptr()",
            f"others = {{{others}}}",
            "others = {name: value for name, value in others.items() if torch.is_tensor(value)}",
            "return [name for name, value in others.items() if value.untyped_storage().data_ptr() == memory]",
        )
    elif clause in _TRAITS:
        returns = (f"return {_TRAITS[clause].format(leaf)}",)
    else:
        raise ReproUnwritable(f"{divergence.comparison.path} breaks {clause}, which a script has no words for")
    what = "shares memory with" if clause == "aliasing" else clause
    return Verdict(
        returns=returns,
        definitions=definitions,
        main=(
            *_both(sides),
            f'print(f"{_at(divergence)}, {what}: {{reference}} eagerly, {{candidate}} {sides.label}")',
            "return candidate != reference",
        ),
    )


def ask_exception(failure: Failure, sides: Sides) -> Verdict:
    """Ask whether the candidate still raises that."""
    name, key = failure.type.rpartition(".")[2], key_of(failure)
    is_other = f'type(error).__name__ != "{name}"' + (" or SAID not in str(error)" if key else "")
    return Verdict(
        constants=(f"SAID = {write_text(key)}",) if key else (),
        main=(
            sides.reference,
            "try:",
            f"    {sides.candidate}",
            "except BaseException as error:",
            f"    if {is_other}:",
            "        raise",
            '    print(f"{type(error).__name__}: {error}"[:2000])',
            "    return True",
            "return False",
        ),
    )


def ask_child(failure: Failure, sides: Sides, *, deadline_s: float, memory_bytes: int) -> Verdict:
    """Ask whether a process that runs the candidate still dies, or does not end."""
    start = "[sys.executable, __file__, CHILD]"
    run: tuple[str, ...] = (sides.candidate,)
    imports = ["import subprocess"]
    constants = ['CHILD = "--child"']
    if failure.kind == "output":
        constants.append(f"LIMIT = {OUTPUT_BYTES}  # bytes that nobody would print")
        asked = [
            f"with subprocess.Popen({start}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:",
            "    printed = len(child.stdout.read(LIMIT))",
            "    child.kill()",
            'print(f"the child printed {printed} bytes, or more")',
            "return printed == LIMIT",
        ]
    elif failure.kind == "timeout":
        constants.append(f"DEADLINE_S = {deadline_s:g}")
        asked = [
            "try:",
            f"    ended = subprocess.run({start}, timeout=DEADLINE_S).returncode",
            "except subprocess.TimeoutExpired:",
            '    print(f"the child did not end within {DEADLINE_S} s")',
            "    return True",
            *_SURVIVAL,
        ]
    else:
        constants.append(f"DEADLINE_S = {deadline_s:g}")
        died = _death(failure)
        imports += ["import signal"] if failure.kind == "signal" else []
        if failure.kind == "memory":
            imports.append("import resource")
            run = (*_LIMITED, "try:", f"    {sides.candidate}", *_OUT_OF_MEMORY)
            constants.append(f"LIMIT = {memory_bytes}  # bytes, beside what the child starts with")
        asked = [
            f"ended = subprocess.run({start}, timeout=DEADLINE_S).returncode",
            'print(f"the child ended with status {ended}")',
            f"if {died}:",
            "    return True",
            *_SURVIVAL,
        ]
    child = (
        "if CHILD in sys.argv:",
        *(f"    {line}" for line in run),
        f"    sys.exit({SURVIVED})  # it came to its end",
    )
    return Verdict(
        main=(*child, sides.reference, *asked),
        constants=tuple(constants),
        imports=tuple(imports),
    )


_SURVIVAL = (
    f"if ended != {SURVIVED}:",
    '    raise RuntimeError(f"the child failed in another way, with status {ended}")',
    "return False",
)
_LIMITED = (
    'held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()',
    "resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT, held + LIMIT))",
)
_OUT_OF_MEMORY = (
    "except Exception as error:",
    '    if not any(word in repr(error).lower() for word in ("memory", "alloc")):',
    "        raise",
    "    sys.exit(3)  # out of memory",
)


def _death(failure: Failure) -> str:
    if failure.kind == "signal":
        return f"ended == -signal.{failure.type}"
    if failure.kind == "exit":
        return f"ended == {int(failure.type or 0)}"
    if failure.kind == "memory":
        return "ended == 3 or ended < 0"
    raise ReproUnwritable(f"a candidate that failed by {failure.kind} has no script that shows it")


def _both(sides: Sides) -> tuple[str, str]:
    return f"reference = {sides.reference}", f"candidate = {sides.candidate}"


_SAME_SHAPE = "assert candidate.shape == reference.shape"


def _at(divergence: Divergence, index: str = "") -> str:
    """Return a leaf, and the index of one of its elements, as they stand in a text that values are put into."""
    path = divergence.comparison.path.replace("{", "{{").replace("}", "}}").replace('"', "'")
    return f"{path}{{{index}}}" if index and divergence.comparison.shape else path
