"""Graphs, tensors, values and captures in files: strict JSON and safetensors, and nothing is pickled.

`tensors` holds tensors, `values` holds literals; `graph_nodes`, `graph_modules` and `graphs` build a graph file of
both, and `captures` a log of the values that a graph computed. The text of JSON and the atomic write are in
`records.strict_json`. Start reading at `tensors`.
"""
