"""Reduction passes: each proposes edits and tests nothing.

A pass is a generator function of a `Search`; the reducer sends it, for each edit, whether the edit was accepted. A new
pass is one function in `cuts.py`, `thinning.py` or `values.py` and one line here. Order matters: a pass that makes the
graph much smaller comes before one that makes it a little plainer, because small subjects are quick to ask about.
"""

from torchdelta.minify.passes import cuts, thinning, values

STRATEGIES = (cuts.widen_from_culprit, cuts.isolate_operations, cuts.bisect_graph)
"""Passes that run once, at the start. A detour over a larger subject is allowed; undone if the end is not simpler."""
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
"""Passes that run again and again until none of them makes progress."""
