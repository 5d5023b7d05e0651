"""Write the script: the program, its inputs, the transform, and a `main` that exits 1 while the bug is there."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchdelta.repro.code import INDENT
from torchdelta.repro.finding import Finding
from torchdelta.repro.imports import import_module
from torchdelta.repro.issue import header_of
from torchdelta.repro.question import CAST, COMPLEX_COTANGENT, COTANGENT, Question, write_run
from torchdelta.repro.values import TensorSource, write_value
from torchdelta.transforms.compiler import SAME_RANDOM

WIDTH = 116
HOOK = (
    "# an error on the way says nothing about the bug: it exits with 2",
    "sys.excepthook = lambda *error: sys.exit(sys.__excepthook__(*error) or 2)",
)
_LOADED = 'saved = torch.load(pathlib.Path(__file__).with_suffix(".pt"), weights_only=True)'


@dataclass(frozen=True, kw_only=True)
class WrittenScript:
    """The files of a script."""

    path: Path
    tensors_path: Path | None
    """The tensors that were too large for it."""
    embeds_data: bool
    """Whether values of the user's tensors are in them."""


def write(finding: Finding, path: Path, *, data: bool = True, under: str | None = None) -> WrittenScript:
    """Write a script and what it needs beside it; without `data`, random numbers stand for the user's.

    With `under` it has that name, in the same directory, until somebody moves it to `path`. ReproUnwritable says why no
    script of torch alone could show the finding.
    """
    path = Path(path)
    script = _Script(Question(finding, path, data=data), path)
    text = script.text()
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_name(under or path.name)
    tensors_path = path.with_suffix(".pt") if script.saved else None
    if tensors_path is not None:
        torch.save(script.saved, tensors_path)
    path.write_text(text, encoding="utf-8")
    return WrittenScript(path=path, tensors_path=tensors_path, embeds_data=script.embeds_data)


class _Script:
    """Puts the parts of a script together."""

    def __init__(self, asked: Question, path: Path) -> None:
        self.asked = asked
        self.finding = asked.finding
        self.path = path
        self.saved = {**asked.inputs.saved, **asked.state.saved}
        self.embeds_data = asked.inputs.embeds_data or asked.state.embeds_data

    def text(self) -> str:
        asked = self.asked
        blocks = [
            [header_of(asked, self._data())],
            self._imports(),
            self._settings(),
            list(asked.verdict.constants),
        ]
        functions = [
            self._inputs(),
            self._program(),
            list(asked.applied.lines),
            *self._tools(),
            write_run(
                asked.outputs,
                seed=self.finding.case.seed,
                has_backward=asked.stage == "gradients",
                is_differentiable=asked.divergence is not None,
                returns=asked.verdict.returns,
            ),
            ["def main():", *(f"{INDENT}{line}" for line in asked.verdict.main)],
            self._ending(),
        ]
        top = "\n\n".join("\n".join(block) for block in blocks if block)
        return "\n\n\n".join([top, *("\n".join(block) for block in functions if block)]) + "\n"

    def _tools(self) -> Iterator[list[str]]:
        yield list(self.asked.verdict.definitions)
        if self.asked.is_cast:
            yield list(CAST)
        if self.asked.stage == "gradients":
            is_complex = any((seen.dtype or "").startswith("complex") for seen in self.finding.report.comparisons)
            yield list(COMPLEX_COTANGENT if is_complex else COTANGENT)

    def _imports(self) -> list[str]:
        imported = [import_module(module, self.path) for module in sorted(self.asked.program.imports)]
        others = [*(line for lines in imported for line in lines), *self.asked.applied.imports]
        plain = {"import sys", *self.asked.verdict.imports}
        if self.saved or any("pathlib" in line for line in others):
            plain.add("import pathlib")
        configs = sorted({f"import {name.rpartition('config.')[0]}config" for name in self._changed()})
        last = list(dict.fromkeys(others))
        return [*sorted(plain), "", *HOOK, "", "import torch", *configs, *(["", *last] if last else [])]

    def _changed(self) -> dict[str, Any]:
        changed = {**self.finding.config, **self.asked.applied.settings}
        if SAME_RANDOM in self.finding.report.notes:
            changed["torch._inductor.config.fallback_random"] = True
        return changed

    def _settings(self) -> list[str]:
        lines = [f"{name} = {write_value(value)}" for name, value in sorted(self._changed().items())]
        if self.finding.case.deterministic:
            lines.append("torch.use_deterministic_algorithms(True)")
        return lines

    def _inputs(self) -> list[str]:
        source = self.asked.inputs
        written = [
            source.expressions[name] if isinstance(value, torch.Tensor) else write_value(value)
            for name, value in zip(self.asked.program.inputs, self.finding.inputs, strict=True)
        ]
        lines = [*_prepared(source)]
        one_line = f"return ({', '.join(written)}{',' if len(written) == 1 else ''})"
        if len(one_line) <= WIDTH - len(INDENT):
            lines.append(one_line)
        else:
            lines += ["return (", *(line for text in written for line in _wrapped(f"{text},", INDENT)), ")"]
        return ["def inputs():", *(f"{INDENT}{line}" for line in lines)]

    def _program(self) -> list[str]:
        program, source = self.asked.program, self.asked.state
        if not program.is_module:
            return [f"def program({', '.join(program.inputs)}):", *(f"{INDENT}{line}" for line in program.body)]
        held = [*_prepared(source), *(f"self.{name} = {call}" for name, call in program.modules.items())]
        for name, tensor in program.tensors.items():
            is_buffer = name.isidentifier() and not isinstance(tensor, torch.nn.Parameter)
            made = source.expressions[name]
            held += _wrapped(f'self.register_buffer("{name}", {made})' if is_buffer else f"self.{name} = {made}")
        return [
            "class Program(torch.nn.Module):",
            f"{INDENT}def __init__(self):",
            f"{INDENT * 2}super().__init__()",
            *(f"{INDENT * 2}{line}" for line in held),
            "",
            f"{INDENT}def forward({', '.join(('self', *program.inputs))}):",
            *(f"{INDENT * 2}{line}" for line in program.body),
        ]

    def _ending(self) -> list[str]:
        tries = self.finding.tries
        asked = "main()" if tries == 1 else f"any(main() for _ in range({tries}))  # it does not fail each time"
        return [
            'if __name__ == "__main__":',
            f"{INDENT}is_there = {asked}",
            f'{INDENT}print("the bug is there" if is_there else "the bug is gone")',
            f"{INDENT}sys.exit(int(is_there))",
        ]

    def _data(self) -> str:
        if not self.embeds_data:
            return "Its tensors are drawn or constant, and none is the user's; numbers in the code may be."
        beside = f", some of them in {self.path.with_suffix('.pt').name} beside it" if self.saved else ""
        return f"It embeds values of the tensors that it was found with{beside}."


def _prepared(source: TensorSource) -> Iterator[str]:
    if source.saved:
        yield _LOADED
    for line in source.setup:
        yield from _wrapped(line)


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Break a line of numbers, which may be broken behind any of them."""
    if len(text) + len(indent) <= WIDTH - 2 * len(INDENT):
        return [f"{indent}{text}"]
    return textwrap.wrap(
        text,
        WIDTH - 2 * len(INDENT),
        initial_indent=indent,
        subsequent_indent=f"{indent}{INDENT}",
        break_long_words=False,
        break_on_hyphens=False,
    )
