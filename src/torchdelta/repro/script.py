"""Write a finding as a script that needs torch alone: program, inputs, transform, and a `main` that decides.

The script exits with 1 while the bug is there, 0 once it is gone, and 2 if it cannot run. Start reading at `write`;
`Question` has the parts, and `_Script.text` puts them together.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchdelta._torch.compile.settings import INDUCTOR
from torchdelta.repro.code import INDENT
from torchdelta.repro.finding import Evidence
from torchdelta.repro.issue import header_of
from torchdelta.repro.question import CAST, GraphQuestion, Question, write_cotangent, write_run
from torchdelta.repro.values import TensorSource, write_value
from torchdelta.repro.whole_program import ProgramQuestion, question_of
from torchdelta.transforms.compiler import SAME_RANDOM

WIDTH = 116
HOOK = (
    "# an error on the way says nothing about the bug: it exits with 2",
    "sys.excepthook = lambda *error: sys.exit(sys.__excepthook__(*error) or 2)",
)
_LITERAL = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
"""A text as `repr` writes it."""
_SPACE = "\ue000"
"""Stands for a space at which a line must not be broken: a character that is in no text."""
_LOAD_SAVED = 'saved = torch.load(pathlib.Path(__file__).with_suffix(".pt"), weights_only=True)'


@dataclass(frozen=True, kw_only=True)
class WrittenScript:
    """The files of a script that was written."""

    path: Path
    tensors_path: Path | None
    """The file with the tensors that were too large for the script, or None."""
    embeds_data: bool
    """Whether the files have values of the user's tensors."""
    added_copies: tuple[Path, ...] = ()
    """The copies of the user's code that were not there before."""


def write(finding: Evidence, path: Path, *, data: bool = True, under: str | None = None) -> WrittenScript:
    """Write a script, with its large tensors in a `.pt` file and copies of the user's code beside it; return the paths.

    The result also tells whether they have the user's values. Existing files are overwritten. Without `data`, random
    numbers replace the user's values. With `under`, the script and its `.pt` file get that name in the directory of
    `path`, and the caller moves them later; copies and imports are those of a script at `path`. The directory is made
    if it is missing. Raise ReproUnwritable if no script of torch alone can show the finding; what `GraphQuestion` or
    `ProgramQuestion` raises passes through.
    """
    path = Path(path)
    question = question_of(finding, path, data=data)
    script: _Script
    if isinstance(question, ProgramQuestion):
        script = _ProgramScript(question, path)
    else:
        assert isinstance(question, GraphQuestion)
        script = _GraphScript(question, path)
    text = script.text()
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_name(under or path.name)
    tensors_path = path.with_suffix(".pt") if script.saved else None
    if tensors_path is not None:
        torch.save(script.saved, tensors_path)
    added_copies = script.question.imports.copy_all()
    path.write_text(text, encoding="utf-8")
    return WrittenScript(
        path=path, tensors_path=tensors_path, embeds_data=script.embeds_data, added_copies=added_copies
    )


class _Script:
    """Puts the parts of a script together."""

    def __init__(self, question: Question, path: Path) -> None:
        """Keep the question, its finding and the path of the script; subclasses set `saved` and `embeds_data`."""
        self.question = question
        self.finding = question.finding
        self.path = path
        self.saved: dict[str, torch.Tensor] = {}
        self.embeds_data = False

    def _definitions(self) -> Iterator[list[str]]:
        """Yield the functions and classes that build the program and its inputs, each as a list of lines.

        Subclasses implement it; here NotImplementedError is raised.
        """
        raise NotImplementedError

    def _run(self) -> list[str]:
        """Return the lines that define `run`, which takes one side to the value that is compared.

        Subclasses implement it; here NotImplementedError is raised.
        """
        raise NotImplementedError

    def _describe_origin(self) -> str:
        """Return sentences that say whether the script has values of the user's, and which files are their code.

        Subclasses implement it; here NotImplementedError is raised.
        """
        raise NotImplementedError

    def text(self) -> str:
        """Return the text of the whole script; nothing is written to a file.

        Raise ReproUnwritable if it would need the stage `steps`, or if an input or a compiler setting has no literal.
        """
        question = self.question
        blocks = [
            [header_of(question, self._describe_origin().rstrip())],
            self._imports(),
            self._settings(),
            list(question.main.constants),
        ]
        functions = [
            *self._definitions(),
            list(question.applied.lines),
            *self._tools(),
            self._run(),
            ["def main():", *(f"{INDENT}{line}" for line in question.main.statements)],
            self._ending(),
        ]
        top = "\n\n".join("\n".join(block) for block in blocks if block)
        return "\n\n\n".join([top, *("\n".join(block) for block in functions if block)]) + "\n"

    def _tools(self) -> Iterator[list[str]]:
        """Yield the definitions of the script's helper functions, each as a list of lines; the first may be empty."""
        yield list(self.question.main.definitions)
        if self.question.is_cast:
            yield list(CAST)
        if self.question.stage == "gradients":
            outputs = [each for each in self.finding.report.comparisons if each.path.startswith("outputs")]
            yield write_cotangent({each.dtype or "" for each in outputs}, is_cast=self.question.is_cast)

    def _imports(self) -> list[str]:
        """Return the lines of the imports: the standard library, the exception hook, torch and its configs, all others.

        torch comes after the hook, which also covers its import.
        """
        others = [*(line for lines in self.question.module_imports for line in lines), *self.question.applied.imports]
        plain = {"import sys", *self.question.main.imports}
        if self.saved or any("pathlib" in line for line in others):
            plain.add("import pathlib")
        configs = sorted({f"import {name.rpartition('config.')[0]}config" for name in self._compiler_settings()})
        last = list(dict.fromkeys(others))
        return [*sorted(plain), "", *HOOK, "", "import torch", *configs, *(["", *last] if last else [])]

    def _compiler_settings(self) -> dict[str, Any]:
        """Return the compiler's settings that the script changes, by their full names.

        They are those of the finding, overridden by those of the transform, and `fallback_random` if a note of the
        report says that the candidate had it.
        """
        settings = {**self.finding.config, **self.question.applied.settings}
        if SAME_RANDOM in self.finding.report.notes:
            settings[f"{INDUCTOR}.fallback_random"] = True
        return settings

    def _settings(self) -> list[str]:
        """Return the statements that change the compiler's settings, and the one that makes a deterministic case so.

        Raise ReproUnwritable if the value of a setting has no literal.
        """
        lines = [f"{name} = {write_value(value)}" for name, value in sorted(self._compiler_settings().items())]
        if self.finding.case.deterministic:
            lines.append("torch.use_deterministic_algorithms(True)")
        return lines

    def _ending(self) -> list[str]:
        """Return the lines that call `main`, print its answer, and exit with 1 if the bug is there, else with 0.

        For a flaky failure, `main` is called up to `tries` times, until one call shows the bug.
        """
        tries = self.finding.tries
        call = "main()" if tries == 1 else f"any(main() for _ in range({tries}))  # it does not fail each time"
        return [
            'if __name__ == "__main__":',
            f"{INDENT}is_there = {call}",
            f'{INDENT}print("the bug is there" if is_there else "the bug is gone")',
            f"{INDENT}sys.exit(int(is_there))",
        ]


class _GraphScript(_Script):
    """Puts the script of a graph together."""

    question: GraphQuestion

    def __init__(self, question: GraphQuestion, path: Path) -> None:
        super().__init__(question, path)
        self.inputs = question.finding.inputs
        self.saved = {**question.inputs.saved, **question.state.saved}
        self.embeds_data = question.inputs.embeds_data or question.state.embeds_data

    def _definitions(self) -> Iterator[list[str]]:
        """Yield the definition of `inputs`, and then that of the program, each as a list of lines."""
        yield self._inputs()
        yield self._program()

    def _run(self) -> list[str]:
        """Return the lines that define `run`, with a backward if the script's stage is `gradients`."""
        question = self.question
        return write_run(
            question.outputs,
            seed=self.finding.case.seed,
            has_backward=question.stage == "gradients",
            is_differentiable=question.divergence is not None,
            returns=question.main.returns,
        )

    def _inputs(self) -> list[str]:
        """Return the lines that define `inputs`, which builds the program's arguments and returns them in a tuple."""
        source = self.question.inputs
        values = [
            source.expressions[name] if isinstance(value, torch.Tensor) else write_value(value)
            for name, value in zip(self.question.program.inputs, self.inputs, strict=True)
        ]
        lines = [*_setup(source)]
        one_line = f"return ({', '.join(values)}{',' if len(values) == 1 else ''})"
        if len(one_line) <= WIDTH - len(INDENT):
            lines.append(one_line)
        else:
            lines += ["return (", *(line for text in values for line in _wrap(f"{text},", INDENT)), ")"]
        return ["def inputs():", *(f"{INDENT}{line}" for line in lines)]

    def _program(self) -> list[str]:
        """Return the lines that define the function `program`, or the class `Program` if the program has state.

        State means tensors and modules of its own.
        """
        program, source = self.question.program, self.question.state
        if not program.is_module:
            return [f"def program({', '.join(program.inputs)}):", *(f"{INDENT}{line}" for line in program.body)]
        state = [*_setup(source), *(f"self.{name} = {call}" for name, call in program.modules.items())]
        for name, tensor in program.tensors.items():
            is_buffer = name.isidentifier() and not isinstance(tensor, torch.nn.Parameter)
            value = source.expressions[name]
            state += _wrap(f'self.register_buffer("{name}", {value})' if is_buffer else f"self.{name} = {value}")
        return [
            "class Program(torch.nn.Module):",
            f"{INDENT}def __init__(self):",
            f"{INDENT * 2}super().__init__()",
            *(f"{INDENT * 2}{line}" for line in state),
            "",
            f"{INDENT}def forward({', '.join(('self', *program.inputs))}):",
            *(f"{INDENT * 2}{line}" for line in program.body),
        ]

    def _describe_origin(self) -> str:
        """Return sentences that say whether the script embeds the user's values, and which files are their code."""
        copies = self.question.imports.describe_copies()
        if not self.embeds_data:
            return f"Its tensors are drawn or constant, and none is the user's; numbers in the code may be. {copies}"
        beside = f", some of them in {self.path.with_suffix('.pt').name} beside it" if self.saved else ""
        return f"It embeds values of the tensors that it was found with{beside}. {copies}"


class _ProgramScript(_Script):
    """Puts the script of the user's own program together."""

    question: ProgramQuestion

    def _definitions(self) -> Iterator[list[str]]:
        """Yield the functions that build the program and reach its state, each as a list of lines."""
        return self.question.definitions()

    def _run(self) -> list[str]:
        """Return the lines that define `run` for the user's own program."""
        return self.question.run_lines()

    def _describe_origin(self) -> str:
        """Return sentences that say where the program comes from, and which files are the user's code."""
        return self.question.describe()


def _setup(source: TensorSource) -> Iterator[str]:
    """Yield the statements that come before the expressions of tensors; the first loads the saved ones, if any."""
    if source.saved:
        yield _LOAD_SAVED
    for line in source.setup:
        yield from _wrap(line)


def _wrap(text: str, indent: str = "") -> list[str]:
    """Return a statement as lines, each begun by `indent`; a long one is broken at its spaces, and indented further.

    The lines fit into `WIDTH` if they are indented twice more, as far as there are spaces outside of texts to break at.
    """
    if len(text) + len(indent) <= WIDTH - 2 * len(INDENT):
        return [f"{indent}{text}"]
    # within a literal, white space must stay, and a line must not end; nor may it end at the sign of an assignment
    unbroken = _LITERAL.sub(lambda literal: literal[0].replace(" ", _SPACE), text)
    lines = textwrap.wrap(
        unbroken.replace(" = ", f"{_SPACE}={_SPACE}"),
        WIDTH - 2 * len(INDENT),
        initial_indent=indent,
        subsequent_indent=f"{indent}{INDENT}",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_SPACE, " ") for line in lines]
