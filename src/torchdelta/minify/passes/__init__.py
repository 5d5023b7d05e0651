"""Reduction passes: each proposes edits and tests nothing. A new one is one file and one line here."""

from torchdelta.minify.passes import (
    bisect,
    edges,
    effects,
    gradients,
    numbers,
    operands,
    outputs,
    scatter,
    shapes,
    sizes,
    strides,
    widen,
)

STRATEGIES = (widen.propose, scatter.propose, bisect.propose)
"""Great leaps, each made once; what does not end smaller is undone."""
PASSES = (
    outputs.propose,
    edges.propose,
    effects.propose,
    operands.propose,
    shapes.propose,
    gradients.propose,
    sizes.propose,
    strides.propose,
    numbers.propose,
)
"""Small steps, repeated until none is left."""
