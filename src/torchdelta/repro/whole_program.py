"""The script of the user's own program, for a failure that has no graph of its own.

Dynamo may fail before there is a graph, between two graphs, or in the side effects that it replays. The script then
builds the program by the user's own factory, once for each side, and asks the same as that of a graph:

    def built(transform=lambda program: program):
        program, args, *kwargs = build()
        return transform(program), program, args, *kwargs

    reference = run(*built())
    candidate = run(*built(lambda program: torch.compile(program, backend="inductor")))

`ProgramQuestion` has its parts, and `question_of` chooses between it and `GraphQuestion`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torchdelta.errors import ReproUnwritable
from torchdelta.records.report import EXCEPTION
from torchdelta.repro.code import INDENT
from torchdelta.repro.finding import Divergence, Evidence, Finding, ProgramFinding, divergence_of
from torchdelta.repro.imports import ScriptImports
from torchdelta.repro.question import GraphQuestion, Question, ScriptMain, ScriptSides
from torchdelta.repro.transform import write_transform

_STATE = re.compile(
    r"(?:parameters|buffers|attributes)\[(?P<name>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\](?P<rest>.*)", re.DOTALL
)
_LEAVES = (
    "def leaves(value, path):",
    "    if not isinstance(value, (list, tuple, dict)):",
    "        yield path, value",
    "        return",
    "    for key, item in value.items() if isinstance(value, dict) else enumerate(value):",
    '        yield from leaves(item, f"{path}[{key!r}]")',
)
_LOOKUP = (
    "def state(program, name):",
    '    """Return an attribute of the program, or a variable that its function uses."""',
    '    function = getattr(program, "forward", program)',
    '    function = inspect.unwrap(getattr(function, "__func__", function))',
    "    nonlocals = inspect.getclosurevars(function).nonlocals",
    "    known = {**function.__globals__, **nonlocals, type(program).__name__: type(program)}",
    '    first, *steps = name.split(".")',
    "    value = getattr(program, first) if hasattr(program, first) else known.get(first)",
    "    for step in steps:",
    "        value = getattr(value, step, None)",
    "    return value",
)
_RAISED = (
    "def raised_by(side):",
    "    try:",
    "        side()",
    "    except BaseException as error:",
    "        return type(error).__name__",
    '    return "nothing"',
)


def question_of(finding: Evidence, path: Path, *, data: bool) -> Question:
    """Return the question of a finding for a script at `path`; raise ReproUnwritable if no script can show it.

    Without `data`, random numbers replace the user's in a graph's script. The user's own program is not changed.
    """
    if isinstance(finding, ProgramFinding):
        return ProgramQuestion(finding, path)
    assert isinstance(finding, Finding)
    return GraphQuestion(finding, path, data=data)


class ProgramQuestion(Question):
    """All parts of the script of the user's own program."""

    finding: ProgramFinding

    def __init__(self, finding: ProgramFinding, path: Path) -> None:
        """Write the parts of the script; raise ReproUnwritable if no script can show the finding.

        `path` is the script's path, to which its imports are relative; no file is written. What `write_transform`
        raises passes through.
        """
        if finding.case.loss is not None:
            raise ReproUnwritable(f"the gradients are those of {finding.case.loss}: make that a part of the program")
        self.finding = finding
        self.imports = ScriptImports(script=path)
        self.factory = self.imports.of_object(finding.program)
        # where the user's modules are found
        self.module_imports = [self.factory.lines[:-1]] if self.factory.modules else []
        self.applied = write_transform(finding.case, self.imports, "cpu")
        if self.applied.dtype is not None:
            raise ReproUnwritable(f"{finding.case.transform} casts the inputs, which a factory makes in its own dtype")
        self.divergence = None if finding.report.failure is not None else self._divergence()
        sides = ScriptSides(
            reference="run(*built())",
            candidate=f"run(*built(lambda program: {self.applied.call.format('program')}))",
            truth=None,
            label=self.applied.label,
        )
        is_raised = self.divergence is not None and self.divergence.clause == EXCEPTION
        main = _ask_raised(sides) if is_raised else self._ask(sides, {})
        self.main = replace(main, imports=(*main.imports, *self._standard_modules(main)))

    @property
    def _reads_inputs(self) -> bool:
        """Whether the transform calls the script's function `inputs`."""
        return any("inputs()" in text for text in (self.applied.call, *self.applied.lines))

    def _divergence(self) -> Divergence:
        """Return the divergence that the script shows; ReproUnwritable if it can reach none, or if it needs float64.

        Of state with another structure, the script compares the whole attribute, because one side may lack the leaf.
        Values with rounding are turned into tensors first, because they may be plain numbers.
        """
        divergence = divergence_of(self.finding.report, self._reach)
        if divergence.is_lifted:
            raise ReproUnwritable("it shows in float64 only, and a factory makes its program in its own dtype")
        if divergence.clause == "structure" and (match := _STATE.fullmatch(divergence.comparison.path)):
            return replace(divergence, leaf=self._reach_state(match["name"], ""))
        if divergence.clause is None and not divergence.is_exact:
            return replace(divergence, leaf=f"torch.as_tensor({divergence.leaf})")
        return divergence

    def _reach(self, path: str) -> str | None:
        """Return the script's expression for a leaf at a path of the report, or None if a script cannot reach it.

        State is looked up by its name (`_reach_state`). Outputs and arguments, and the exception that a side raises,
        have their path as expression. None for any other path, and if the expression is not valid Python.
        """
        if path == EXCEPTION:
            return path
        match = _STATE.fullmatch(path)
        expression = self._reach_state(match["name"], match["rest"]) if match is not None else path
        if match is None and not path.startswith(("outputs", "args", "kwargs")):
            return None
        try:
            ast.parse(expression, mode="eval")
        except SyntaxError:
            return None
        return expression

    def _reach_state(self, name: str, rest: str) -> str:
        """Return the script's expression for state: a call that looks up `name`, a quoted text, followed by `rest`.

        It is looked up in the candidate if the transform makes a new module, and else in the program.
        """
        owner = "call" if self.applied.is_rebuilt else "program"
        return f"state({owner}, {name}){rest}"

    def definitions(self) -> Iterator[list[str]]:
        """Yield the functions that build the program and reach its state, each as a list of lines.

        The first is `built`; `inputs`, `state` and `leaves` follow only if the script uses them.
        """
        yield self._built()
        if self._reads_inputs:
            yield ["def inputs():", f"{INDENT}return tuple(built()[2])"]
        if self.divergence is not None and "state(" in self.divergence.leaf:
            yield list(_LOOKUP)
        if self.stage == "gradients":
            yield list(_LEAVES)

    def _built(self) -> list[str]:
        """Return the lines that define `built`, which builds the program by the factory and transforms it.

        `built` seeds torch, and returns the transformed program, the program itself and its arguments. With `is_anew`
        it first makes Python forget the user's modules, so that they are imported anew; a file that is loaded by its
        path is loaded anew in any case.
        """
        *_, import_line = self.factory.lines
        modules = ", ".join(f'"{name}"' for name in self.factory.modules)
        anew = [
            f"for name in ({modules},):  # each side starts from the modules as they are written",
            f"{INDENT}sys.modules.pop(name, None)",
        ]
        body = [
            *(anew if self.factory.modules and self.finding.is_anew else []),
            f"torch.manual_seed({self.finding.case.seed})",
            *([import_line] if self.factory.modules else self.factory.lines),
            f"program, args, *kwargs = {self.factory.name}()",
            "return transform(program), program, args, *kwargs",
        ]
        return ["def built(transform=lambda program: program):", *(f"{INDENT}{line}" for line in body)]

    def run_lines(self) -> list[str]:
        """Return the lines that define `run(call, program, args, kwargs)`; they end with the statements `main.returns`.

        `run` seeds torch and calls; in the stage `gradients` it then runs backward from every output that requires
        grad, with seeded cotangents.
        """
        seed = self.finding.case.seed
        lines = [
            "def run(call, program, args, kwargs={}):",
            f"    torch.manual_seed({seed})",
            f"    {'outputs = ' if self.main.returns or self.stage == 'gradients' else ''}call(*args, **kwargs)",
        ]
        if self.stage == "gradients":
            lines += [
                '    roots = [(path, leaf) for path, leaf in leaves(outputs, "outputs") if torch.is_tensor(leaf)]',
                "    roots = [(path, leaf) for path, leaf in roots if leaf.requires_grad]",
                f"    grads = [cotangent(leaf, {seed} ^ zlib.crc32(path.encode())) for path, leaf in roots]",
                "    torch.autograd.backward([leaf for _, leaf in roots], grads)",
            ]
        return [*lines, *(f"    {line}" for line in self.main.returns)]

    def _standard_modules(self, main: ScriptMain) -> Iterator[str]:
        """Yield the statements that import `inspect`, `zlib` and `pathlib`, each if the script needs it.

        `inspect` is needed if `main.returns` calls `state`, `zlib` for the stage of gradients, and `pathlib` if the
        factory's lines name it. Nothing else is searched.
        """
        if any("state(" in line for line in main.returns):
            yield "import inspect"
        if self.stage == "gradients":
            yield "import zlib"
        if any("pathlib" in line for line in self.factory.lines):
            yield "import pathlib"

    def describe(self) -> str:
        """Return sentences that say where the program comes from, and which files are the user's code."""
        origin = f"No graph shows it by itself, so this is the user's own program, which {self.factory.name} builds."
        return f"{origin} {self.imports.describe_copies()}".rstrip()


def _ask_raised(sides: ScriptSides) -> ScriptMain:
    """Return the source of a `main` that tells whether candidate and reference raise exceptions of different types.

    Types are compared by name; a side that raises nothing counts as a type of its own.
    """
    return ScriptMain(
        definitions=_RAISED,
        statements=(
            f"reference = raised_by(lambda: {sides.reference})",
            f"candidate = raised_by(lambda: {sides.candidate})",
            f'print(f"raised: {{reference}} eagerly, {{candidate}} {sides.label}")',
            "return candidate != reference",
        ),
    )
