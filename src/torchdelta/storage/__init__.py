"""Graphs, tensors, values and captures in files: strict JSON and safetensors, and nothing pickled."""
