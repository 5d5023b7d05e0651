"""From a graph that fails to the smallest one that fails in the same way."""
