"""A transform in plain torch: the lines of a script that turn the program into the candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchdelta._torch.compile.dynamo import mode_config
from torchdelta.errors import ReproUnwritable
from torchdelta.records.case import Case
from torchdelta.repro.imports import import_named

_INDUCTOR = "torch._inductor.config"
_BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition", "eager")


@dataclass(frozen=True, kw_only=True)
class TransformSource:
    """How a script makes and runs its candidate."""

    what: str
    """What the candidate is, as the subject of a sentence."""
    label: str
    """How its values are called apart from the reference's."""
    call: str = "{}"
    """The candidate, given the program."""
    dtype: str | None = None
    """What program and inputs are cast to."""
    lines: tuple[str, ...] = ()
    """Definitions that come before."""
    imports: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the compiler, by their full names."""
    is_rebuilt: bool = False
    """Whether the candidate holds its state by itself, under the names that it has in the program."""


def write_transform(case: Case, script: Path, device: str) -> TransformSource:
    """Return how a script applies the transform of a case; ReproUnwritable says why it cannot."""
    name, colon, argument = case.transform.partition(":")
    writers: dict[str, Callable[[], TransformSource]] = {
        "backend": lambda: _compiled(f'"{argument}"', argument, case.options),
        "export": lambda: _exported("exported", "torch.export", case.options),
        "decompose": lambda: _decomposed(case.options, script),
        "cast": lambda: TransformSource(
            what=f"A cast to {argument}", label=f"in {argument}", dtype=f"torch.{argument}"
        ),
        "autocast": lambda: _autocast(argument, str(case.options.get("device") or device)),
    }
    if name in _BACKENDS:
        return _compiled(f'"{name}"', name, case.options)
    if name in writers:
        return writers[name]()
    if name in ("quantize", "module"):
        raise ReproUnwritable(
            f"{case.transform} makes another program than its graph, which no script of torch alone can do"
        )
    if not colon:
        raise ReproUnwritable(
            f"{case.transform} lives in this process only: put it in a file, and name it as path/file.py:name"
        )
    return _passed(case, script)


def _compiled(backend: str, name: str, options: Mapping[str, Any]) -> TransformSource:
    keywords = [f"backend={backend}"]
    settings = {
        f"{_INDUCTOR}.{key.removeprefix('config.')}": value
        for key, value in options.items()
        if key.startswith("config.")
    }
    keywords += [f"{key}={options[key]!r}" for key in ("dynamic", "fullgraph") if options.get(key) is not None]
    if mode := options.get("mode"):
        if name == "inductor":
            keywords.append(f'mode="{mode}"')
        else:  # torch takes a mode for inductor alone
            stands_for = mode_config(str(mode), dynamic=options.get("dynamic"))
            settings = {**{f"{_INDUCTOR}.{key}": value for key, value in stands_for.items()}, **settings}
    given = ", ".join(keywords)
    return TransformSource(
        what=f"torch.compile({given})", label="compiled", call=f"torch.compile({{}}, {given})", settings=settings
    )


def _passed(case: Case, script: Path) -> TransformSource:
    found = import_named(case.transform, script)
    options = dict(case.options)
    graph = options.pop("graph", "dynamo")
    what = f"The pass {case.transform.rpartition(':')[2]} on the {graph} graph"
    boxed = 'made if getattr(made, "_boxed_call", False) else make_boxed_func(made)'
    function = (
        "def transform(graph_module, example_inputs):",
        f"    made = {found.name}(graph_module, example_inputs)",
        "    made = graph_module if made is None else made  # it may have changed its graph in place",
        "    if isinstance(made, torch.fx.GraphModule):",
        "        made.recompile()",
        f"    return {boxed if graph == 'aten' else 'made'}",
    )
    imports = found.lines
    if graph == "export":
        made = _exported("exported", what, {}, then="transform({}, inputs())")
        return replace(made, label="transformed", lines=(*function, "", "", *made.lines), imports=imports)
    backend = "transform"
    if graph == "aten":
        imports = ("from functorch.compile import make_boxed_func", _AOT_IMPORT, *imports)
        backend = "aot_autograd(fw_compiler=transform, bw_compiler=transform)"
    made = _compiled(backend, backend, options)
    return replace(made, what=what, label="transformed", lines=function, imports=imports)


_AOT_IMPORT = "from torch._dynamo.backends.common import aot_autograd"


def _exported(
    name: str, what: str, options: Mapping[str, Any], *, then: str = "{}", change: str = ""
) -> TransformSource:
    strict = ", strict=True" if options.get("strict") else ""
    made = then.format(f"torch.export.export(program, inputs(){strict}){change}.module()")
    return TransformSource(
        what=what,
        label=name,
        call=f"{name}({{}})",
        lines=(
            f"def {name}(program):",
            "    if not isinstance(program, torch.nn.Module):  # nothing else can be exported",
            "        module = torch.nn.Module()",
            "        module.forward = program",
            "        program = module",
            f"    return {made}",
        ),
        is_rebuilt=True,
    )


def _decomposed(options: Mapping[str, Any], script: Path) -> TransformSource:
    if "table" not in options:
        return _exported("decomposed", "run_decompositions()", options, change=".run_decompositions()")
    found = import_named(str(options["table"]), script)
    table = f"{found.name}() if callable({found.name}) else {found.name}"
    made = _exported("decomposed", f"run_decompositions({found.name})", options, change=f".run_decompositions({table})")
    return replace(made, imports=found.lines)


def _autocast(dtype: str, device: str) -> TransformSource:
    given = f'"{device}", torch.{dtype}'
    return TransformSource(
        what=f"torch.autocast({given})",
        label="under autocast",
        call="autocast({})",
        lines=(
            "def autocast(program):",
            "    if not isinstance(program, torch.nn.Module):",
            f"        return torch.autocast({given})(program)",
            f"    program.forward = torch.autocast({given})(program.forward)",
            "    return program",
        ),
    )
