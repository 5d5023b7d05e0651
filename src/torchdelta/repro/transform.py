"""A transform as source text: the lines of a script that turn the program into the candidate.

Start reading at `write_transform`, which has one writer for each kind of transform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchdelta._torch.compile.dynamo import mode_config
from torchdelta._torch.compile.settings import AOT_AUTOGRAD_IMPORT, INDUCTOR
from torchdelta._torch.graphs.user_passes import wanted_by
from torchdelta.errors import ReproUnwritable
from torchdelta.program.programs import load_callable
from torchdelta.records.case import Case
from torchdelta.repro.imports import ScriptImports
from torchdelta.repro.values import write_text
from torchdelta.transforms.compiler import split_settings

_BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition", "eager")


@dataclass(frozen=True, kw_only=True)
class TransformSource:
    """The source text that makes a script's candidate, and the words for it."""

    what: str
    """The candidate as the subject of a sentence, such as `torch.compile(backend="inductor")`."""
    label: str
    """The word for the candidate's values, such as `compiled`."""
    call: str = "{}"
    """The expression of the candidate, with `{}` for the program."""
    dtype: str | None = None
    """The dtype to which program and inputs are cast, or None."""
    lines: tuple[str, ...] = ()
    """Definitions that the expression needs."""
    imports: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the compiler, by their full names."""
    is_rebuilt: bool = False
    """Whether the candidate is a new module with parameters and buffers of its own, under the same names."""


def write_transform(case: Case, imports: ScriptImports, device: str) -> TransformSource:
    """Return the source by which a script applies the transform of a case; raise ReproUnwritable if a script cannot.

    `imports` writes the script's imports, and notes the files to copy for them. `device` is the type of device on which
    the inputs are, for an autocast without the option `device`. A script cannot quantize, replace the module, run
    AOTAutograd alone, or use a pass that it cannot import by a name. A user's pass is loaded here; UsageError and
    ProgramError of that are passed on.
    """
    name, colon, argument = case.transform.partition(":")
    writers: dict[str, Callable[[], TransformSource]] = {
        "backend": lambda: _compiled(f'"{argument}"', argument, case.options),
        "export": lambda: _exported("exported", "torch.export", case.options),
        "decompose": lambda: _decomposed(case.options, imports),
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
    return _fx_pass(case, imports)


def _compiled(backend: str, name: str, options: Mapping[str, Any]) -> TransformSource:
    """Return the source of `torch.compile` with a backend: `backend` is its expression in the script, `name` its name.

    Of `options`, `dynamic`, `fullgraph` and `mode` become keywords of the call. The others become `settings` of the
    source, which a script assigns to torch's config by their full names. If `name` is not `inductor`, the mode becomes
    settings too, and no keyword, because torch refuses it there; the settings in `options` override these.
    """
    keywords = [f"backend={backend}"]
    config, others, options = split_settings(options)
    settings = {**{f"{INDUCTOR}.{key}": value for key, value in config.items()}, **others}
    keywords += [f"{key}={options[key]!r}" for key in ("dynamic", "fullgraph") if options.get(key) is not None]
    if mode := options.get("mode"):
        if name == "inductor":
            keywords.append(f'mode="{mode}"')
        else:  # torch accepts a mode for inductor only
            mode_settings = mode_config(str(mode), dynamic=options.get("dynamic"))
            settings = {**{f"{INDUCTOR}.{key}": value for key, value in mode_settings.items()}, **settings}
    arguments = ", ".join(keywords)
    return TransformSource(
        what=f"torch.compile({arguments})",
        label="compiled",
        call=f"torch.compile({{}}, {arguments})",
        settings=settings,
    )


def _fx_pass(case: Case, imports: ScriptImports) -> TransformSource:
    """Return the source that imports a user's pass and applies it to the graph that the option `graph` names.

    The case's transform names the pass, which is loaded here to see which arguments it takes. The script runs it as a
    backend of `torch.compile` (for `dynamo`, the default, and `aten`), or on the module that `torch.export` or
    `torch.fx.symbolic_trace` makes; for these two, the other options are not used. Files to copy are added to
    `imports`. Raise ReproUnwritable if there is no such file or module, and UsageError or ProgramError if the pass
    cannot be loaded.
    """
    imported = imports.of_object(case.transform)
    options = dict(case.options)
    graph = options.pop("graph", "dynamo")
    options.pop("unchanged", None)
    wants_graph, with_inputs = wanted_by(load_callable(case.transform, what="pass"))
    arguments = ("graph_module.graph" if wants_graph else "graph_module") + (", example_inputs" if with_inputs else "")
    what = f"The pass {case.transform.rpartition(':')[2]} on the {graph} graph"
    boxed = 'result if getattr(result, "_boxed_call", False) else make_boxed_func(result)'
    function = (
        "def transform(graph_module, example_inputs):",
        f"    result = {imported.name}({arguments})",
        "    if isinstance(result, tuple):  # as torch's own passes return",
        '        result = getattr(result, "graph_module", result)',
        "    if isinstance(result, torch.fx.Graph):",
        "        result = torch.fx.GraphModule(graph_module, result)",
        "    if result is None or isinstance(result, (bool, int)):  # it has changed its graph in place",
        "        result = graph_module",
        "    if not callable(result):",
        "        kind = type(result).__name__",
        '        raise TypeError(f"a pass must return a callable or change its graph in place, and returned {kind}")',
        "    if isinstance(result, torch.fx.GraphModule):",
        "        result.recompile()",
        f"    return {boxed if graph == 'aten' else 'result'}",
    )
    lines = imported.lines
    if graph == "export":
        exported = _exported("exported", what, {}, then="transform({}, inputs())")
        return replace(exported, label="transformed", lines=(*function, "", "", *exported.lines), imports=lines)
    if graph == "symbolic":
        call = "transform(torch.fx.symbolic_trace({}), inputs())"
        return TransformSource(
            what=what, label="transformed", call=call, lines=function, imports=lines, is_rebuilt=True
        )
    backend = "transform"
    if graph == "aten":
        lines = ("from functorch.compile import make_boxed_func", AOT_AUTOGRAD_IMPORT, *lines)
        backend = "aot_autograd(fw_compiler=transform, bw_compiler=transform)"
    compiled = _compiled(backend, backend, options)
    return replace(compiled, what=what, label="transformed", lines=function, imports=lines)


def _exported(
    name: str, what: str, options: Mapping[str, Any], *, then: str = "{}", change: str = ""
) -> TransformSource:
    """Return the source of `torch.export` in a function `name`, which is also the word for the candidate's values.

    `what` is the candidate as the subject of a sentence. Of `options`, only `strict` counts. `change` is the text of a
    call on the exported program; `then`, with `{}` for the module, is an expression to return instead of the module.
    """
    strict = ", strict=True" if options.get("strict") else ""
    module = then.format(f"torch.export.export(program, inputs(){strict}){change}.module()")
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
            f"    return {module}",
        ),
        is_rebuilt=True,
    )


def _decomposed(options: Mapping[str, Any], imports: ScriptImports) -> TransformSource:
    """Return the source of `run_decompositions` on the exported program, with the user's table if the options name one.

    The option `table` is imported; if it is callable, the script calls it. Raise ReproUnwritable if its file or module
    is missing.
    """
    if "table" not in options:
        return _exported("decomposed", "run_decompositions()", options, change=".run_decompositions()")
    imported = imports.of_object(str(options["table"]))
    name = imported.name
    table = f"{name}() if callable({name}) else {name}"
    exported = _exported("decomposed", f"run_decompositions({name})", options, change=f".run_decompositions({table})")
    return replace(exported, imports=imported.lines)


def _autocast(dtype: str, device: str) -> TransformSource:
    """Return the source of `torch.autocast` around the program's call; in the script, a module's `forward` is replaced.

    `dtype` is a name such as `bfloat16`, and `device` a type of device.
    """
    arguments = f"{write_text(device)}, torch.{dtype}"
    return TransformSource(
        what=f"torch.autocast({arguments})",
        label="under autocast",
        call="autocast({})",
        lines=(
            "def autocast(program):",
            "    if not isinstance(program, torch.nn.Module):",
            f"        return torch.autocast({arguments})(program)",
            f"    program.forward = torch.autocast({arguments})(program.forward)",
            "    return program",
        ),
    )
