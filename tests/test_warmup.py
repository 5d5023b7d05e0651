"""The steps that a clean process takes before its script comes can be taken, and need nothing of torchdelta."""

import ast
from pathlib import Path

from torchdelta._torch.process.warmup import warmup_steps


def test_the_probe_of_instructions_is_in_a_file_that_needs_torch_alone():
    (step,) = (step for step in warmup_steps("inductor", forks=True) if ".py:" in step)
    file, _, function = step.rpartition(":")
    module = ast.parse(Path(file).read_text())

    functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    imports = {ast.unparse(node) for node in ast.walk(module) if isinstance(node, (ast.Import, ast.ImportFrom))}
    assert function in functions
    assert not any("torchdelta" in line for line in imports)


def test_only_inductor_has_steps_of_its_own():
    assert warmup_steps("aot_eager", forks=True) == ("torch",)
    assert warmup_steps("inductor", forks=False) != warmup_steps("inductor", forks=True)
