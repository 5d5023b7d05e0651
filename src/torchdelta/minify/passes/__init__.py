"""Reduction passes: each proposes edits and tests nothing. A new one is one file and one line here."""

from torchdelta.minify.passes import (
    bisect,
    constants,
    dtypes,
    edges,
    effects,
    gradients,
    numbers,
    operands,
    outputs,
    plain,
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
    strides.propose,
    dtypes.propose,
    plain.propose,
    numbers.propose,
    constants.propose,
    sizes.propose,
)
"""Small steps, repeated until none is left."""
