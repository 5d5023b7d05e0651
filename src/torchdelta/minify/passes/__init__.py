"""Reduction passes: each proposes edits and tests nothing. A new one is one file and one line here."""

from torchdelta.minify.passes import cuts, thinning, values

STRATEGIES = (cuts.widen_from_culprit, cuts.isolate_operations, cuts.bisect_graph)
"""Great leaps, each made once; what does not end smaller is undone."""
PASSES = (
    thinning.drop_outputs,
    thinning.cut_edges,
    thinning.drop_effects,
    thinning.skip_operations,
    values.fix_shapes,
    thinning.drop_gradients,
    values.plain_strides,
    values.plain_dtypes,
    values.plain_values,
    values.random_numbers,
    values.plain_constants,
    values.shrink_sizes,
)
"""Small steps, repeated until none is left."""
