"""Nested arguments and results, taken apart as torch itself does it."""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]
