"""Rules about the source tree that no linter knows."""

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchdelta

ROOT = Path(torchdelta.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
SOURCES = {path: path.read_text() for path in MODULES}
CLASSES = [
    (node.name, path)
    for path, source in SOURCES.items()
    for node in ast.parse(source).body
    if isinstance(node, ast.ClassDef)
]
RIDDLES = {
    "aftermath",
    "ahead",
    "asked",
    "asking",
    "attempts",
    "born",
    "follow",
    "foreign",
    "found",
    "given",
    "judged",
    "kept",
    "ledges",
    "left_behind",
    "made",
    "named",
    "noted",
    "operated",
    "places",
    "seen",
    "torn",
    "undecided",
    "vigilance",
    "watched",
}
"""Participles and metaphors that once named modules."""


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def is_private(part):
    return part.startswith("_") and not part.startswith("__")


def dotted(node):
    """Return `a.b.c` of an attribute chain; empty of anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def names_in(tree):
    """Every dotted name that the code imports or looks up, by where it comes from and not by what it is called here."""
    origin = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origin.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            origin.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            first, dot, rest = dotted(node).partition(".")
            yield origin.get(first, first) + dot + rest
    yield from origin.values()


def private_torch(source):
    """Return the private names of torch that the source uses."""
    names = {name for name in names_in(ast.parse(source)) if name.partition(".")[0] in ("torch", "functorch")}
    return sorted(name for name in names if any(map(is_private, name.split("."))))


def reads_of_environment(source):
    """Return how the source looks at environment variables."""
    return sorted({name for name in names_in(ast.parse(source)) if name.startswith(("os.environ", "os.getenv"))})


def swallowed(source):
    """Return the lines where every exception is caught, or any is and nothing comes of it."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            does_nothing = all(isinstance(statement, ast.Pass) or _is_constant(statement) for statement in node.body)
            if node.type is None or (does_nothing and _is_broad(node.type)):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("suppress") and any(map(_is_broad, node.args)):
            lines.append(node.lineno)
    return lines


def _is_broad(kind):
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(dotted(each) in ("Exception", "BaseException") for each in kinds)


def _is_constant(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class TestTheRulesThemselves:
    @pytest.mark.parametrize(
        "source",
        [
            "import torch._dynamo",
            "from torch._inductor import config",
            "from torch import _C",
            "from torch.utils._pytree import tree_map",
            "import torch\ntorch._dynamo.reset()",
            "import torch\ntorch.utils._pytree.tree_map",
            "from functorch._src import x",
            "from torch import utils\nutils._pytree.tree_map",
            "import torch.utils as tools\ntools._pytree",
        ],
    )
    def test_find_private_torch(self, source):
        assert private_torch(source)

    @pytest.mark.parametrize(
        "source", ["import torch.nn", "from torch.fx import Node", "torch.__version__", "self._torch.x", "node._args"]
    )
    def test_find_no_private_torch(self, source):
        assert not private_torch(source)

    @pytest.mark.parametrize(
        "source",
        [
            "import os\nos.environ['X']",
            "import os\nos.getenv('X')",
            "from os import environ",
            "import os as o\no.environ",
        ],
    )
    def test_find_the_environment(self, source):
        assert reads_of_environment(source)

    @pytest.mark.parametrize(
        "source",
        [
            "try: x\nexcept: y",
            "try: x\nexcept Exception: pass",
            "try: x\nexcept Exception: ...",
            "try: x\nexcept (ValueError, BaseException) as e:\n  'ignored'",
            "import contextlib\nwith contextlib.suppress(Exception): x",
        ],
    )
    def test_find_swallowed_exceptions(self, source):
        assert swallowed(source)

    def test_find_no_swallowed_exceptions(self):
        assert not swallowed("try: x\nexcept ImportError: pass\nexcept Exception as e: raise Y from e")

    def test_see_the_whole_tree(self):
        assert {"__init__.py", "records/codec.py", "cli/check.py"} <= set(map(name_of, MODULES))


def is_defined(name, tree):
    """Tell whether a function, class or method of that dotted name is defined at the top of a module."""
    first, _, rest = name.partition(".")
    found = [node for node in tree.body if getattr(node, "name", None) == first]
    return bool(found) and (not rest or any(is_defined(rest, node) for node in found))


def offenders(rule, *, outside=(), excused=()):
    """Return what a rule finds, by module; `outside` names folders, `excused` modules, in which it does not apply."""
    found = {}
    for path, source in SOURCES.items():
        is_excused = path.relative_to(ROOT).parts[0] in outside or name_of(path) in excused
        if not is_excused and (offences := rule(source)):
            found[name_of(path)] = offences
    return found


class TestEveryModule:
    def test_uses_private_torch_only_behind_the_wall(self):
        assert offenders(private_torch, outside=("_torch",)) == {}

    def test_is_named_for_what_it_is(self):
        forbidden = {"utils", "util", "helpers", "helper", "misc", "common", "tools"}

        assert [name_of(path) for path in MODULES if path.stem in forbidden] == []

    def test_has_a_name_that_need_not_be_opened_to_be_understood(self):
        assert [name_of(path) for path in MODULES if path.stem in RIDDLES] == []

    def test_opens_with_what_it_is_for(self):
        assert offenders(lambda source: not ast.get_docstring(ast.parse(source))) == {}

    def test_leaves_the_environment_to_the_command_line(self):
        # runtime.py looks at it only to put it back, kernel_store.py at what g++ reads; the others set what others read
        excused = (
            *("_torch/process/runtime.py", "_torch/process/forking.py"),
            *("_torch/compile/kernel_store.py", "isolate/zygote.py"),
        )

        assert offenders(reads_of_environment, outside=("cli",), excused=excused) == {}

    def test_swallows_no_exception(self):
        assert offenders(swallowed) == {}


class TestEveryClass:
    def test_has_a_name_of_its_own(self):
        modules = {}
        for name, path in CLASSES:
            modules.setdefault(name, []).append(name_of(path))

        assert {name: where for name, where in modules.items() if len(where) > 1} == {}

    def test_is_named_by_a_noun(self):
        participle = re.compile(r"[A-Z][a-z]*(ed|ing)|Seen|Found|Given|Made|Held|Told|Kept|Said|Torn|Left")
        # exceptions, a public name of `faults`, and nouns
        excused = {"Crashed", "Diverged", "Interrupted", "Refused", "Planted", "Finding", "Recording"}
        named = {name: name_of(path) for name, path in CLASSES if participle.fullmatch(name.lstrip("_"))}

        assert {name: where for name, where in named.items() if name not in excused} == {}


class TestTheArchitecturePage:
    PAGE = (ROOT.parent.parent / "docs" / "architecture.md").read_text()

    def test_names_only_files_and_definitions_that_exist(self):
        missing = []
        for path, definition in re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", self.PAGE):
            source = SOURCES.get(ROOT / path)
            if source is None and not list(ROOT.rglob(path)):
                missing.append(path)
            elif source is not None and definition and not is_defined(definition, ast.parse(source)):
                missing.append(f"{path}:{definition}")

        assert missing == []

    @pytest.mark.parametrize(
        ("heading", "most"),
        [("One check, from the command line to the report", 15), ("One diagnosis", 25), ("One guarded call", 20)],
    )
    def test_has_walks_that_open_few_files(self, heading, most):
        section = self.PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        walk = section.strip().partition("\n\n")[0]  # the numbered list; the paragraph behind it names parts
        assert walk.startswith("1. ")
        files = set(re.findall(r"`([\w/]+\.py)[:`]", walk))

        assert 5 < len(files) <= most

    def test_lists_every_folder(self):
        folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}

        assert {name for name in folders if f"| `{name}/`" not in self.PAGE} == set()


class TestThePublicFace:
    @pytest.mark.parametrize("name", torchdelta.__all__)
    def test_resolves_and_is_documented(self, name):
        value = getattr(torchdelta, name)

        if name != "SCHEMA_VERSION":  # a number has no docstring
            assert inspect.getdoc(value)
            assert value.__doc__

    def test_is_sorted_and_named_once(self):
        assert len(set(torchdelta.__all__)) == len(torchdelta.__all__)
        assert dir(torchdelta) == sorted(torchdelta.__all__)

    def test_has_nothing_else(self):
        with pytest.raises(AttributeError, match="'torchdelta' has no attribute 'chekc'"):
            _ = torchdelta.chekc

    def test_has_the_version_of_the_package(self):
        assert torchdelta.__version__ == importlib.metadata.version("torchdelta")

    def test_compare_is_the_function_although_a_subpackage_has_its_name(self):
        first = "import torchdelta, torchdelta.compare.leaves; torchdelta.check"

        assert run(f"{first}; print(callable(torchdelta.compare))") == "True"

    def test_needs_no_torch_until_something_runs(self):
        loaded = run("import sys, torchdelta, torchdelta.cli; print(*sys.modules)").split()

        assert "torchdelta.cli.check" in loaded
        assert not {"torch", "numpy", "numba"} & set(loaded)


def run(code):
    """Run code in an interpreter of its own and return what it prints."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
