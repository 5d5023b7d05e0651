"""Where a difference comes from: nodes are matched across two graphs, and each is judged by itself."""
