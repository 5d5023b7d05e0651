"""The function `run` of a script: one side from its inputs to what is compared."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from torchdelta._torch.graphs import restored_outputs
from torchdelta.compare.leaves import leaves_of

COTANGENT = (
    "def cotangent(output, seed):",
    "    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))",
    "    return drawn.bfloat16().to(output)  # numbers that every dtype can hold",
)
COMPLEX_COTANGENT = (
    "def cotangent(output, seed):",
    "    shape = (*output.shape, 2) if output.is_complex() else output.shape",
    "    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))",
    "    drawn = drawn.bfloat16().double()  # numbers that every dtype can hold",
    "    return (torch.view_as_complex(drawn) if output.is_complex() else drawn).to(output)",
)
CAST = (
    "def cast(args, dtype):",
    "    def is_float(x):",
    "        return torch.is_tensor(x) and x.is_floating_point()",
    "",
    "    return [x.detach().to(dtype).requires_grad_(x.requires_grad) if is_float(x) else x for x in args]",
)


def write_run(
    outputs: Mapping[str, str], *, seed: int, has_backward: bool, is_differentiable: bool, returns: Sequence[str]
) -> list[str]:
    """Return the definition of `run`, which ends with the statements `returns`.

    `outputs` has each leaf of the outputs by its path in a report; with `is_differentiable` a single one surely is.
    """
    lines = ["def run(call, args):", f"    torch.manual_seed({seed})", "    outputs = call(*args)"]
    if has_backward:
        seeds = {expression: seed ^ zlib.crc32(path.encode()) for path, expression in outputs.items()}
        is_single = is_differentiable and len(seeds) == 1
        lines += [f"    {line}" for line in (_backward_of_one(seeds) if is_single else _backward(seeds))]
    elif not returns:
        lines[-1] = "    call(*args)"
    return [*lines, *(f"    {line}" for line in returns)]


def _backward_of_one(seeds: Mapping[str, int]) -> Iterator[str]:
    ((output, seed),) = seeds.items()
    yield f"{output}.backward(cotangent({output}, {seed}))"


def _backward(seeds: Mapping[str, int]) -> Iterator[str]:
    yield f"seeded = [{', '.join(f'({output}, {seed})' for output, seed in seeds.items())}]"
    yield "roots = [pair for pair in seeded if torch.is_tensor(pair[0]) and pair[0].requires_grad]"
    yield "if roots:"
    yield "    torch.autograd.backward([output for output, _ in roots], [cotangent(*pair) for pair in roots])"


def outputs_of(graph_module: GraphModule) -> dict[str, str]:
    """Return each leaf that a graph returns: its path in a report, and how a script reaches it."""
    returned: Any = graph_module.graph.output_node().args[0]
    if not isinstance(returned, (list, tuple)):
        return _tensors_within(returned, "outputs", "outputs")
    # who called the graph may have got another structure than it returns
    restored = leaves_of(restored_outputs(graph_module)(list(range(len(returned)))), "outputs")
    found: dict[str, str] = {}
    for path, place in restored.items():
        if type(place) is int:
            found |= _tensors_within(returned[place], path, f"outputs[{place}]")
    return found


def _tensors_within(returned: Any, path: str, expression: str) -> dict[str, str]:
    if not isinstance(returned, (list, tuple, dict)):
        return {path: expression}
    items = returned.items() if isinstance(returned, dict) else enumerate(returned)
    found: dict[str, str] = {}
    for key, item in items:
        found |= _tensors_within(item, f"{path}[{key!r}]", f"{expression}[{key!r}]")
    return found
