"""Passes that look for names, module paths or sizes, and change the program only where they find them."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.first, self.act, self.second = nn.Linear(n, 2 * n), nn.ReLU(), nn.Linear(2 * n, n)

    def forward(self, x):
        return x + self.second(self.act(self.first(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 3)

    def forward(self, image, scale):
        return self.head(self.blocks(image)) * scale


def build():
    torch.manual_seed(0)
    return Net().requires_grad_(False), (torch.randn(4, 8), torch.tensor(2.0))


def off_after(gm, node):
    with gm.graph.inserting_after(node):
        off = gm.graph.call_function(torch.add, (node, 0.5))
    node.replace_all_uses_with(off, lambda user: user is not off)
    gm.recompile()
    return gm


def nodes(gm, *ops):
    return [node for node in gm.graph.nodes if node.op in ops]


def by_placeholder(gm, inputs):
    node = next((n for n in nodes(gm, "placeholder") if n.target == "L_image_"), None)
    return off_after(gm, node) if node is not None else gm


def by_placeholder_name(gm, inputs):
    node = next((n for n in nodes(gm, "placeholder") if n.name == "l_scale_"), None)
    return off_after(gm, node) if node is not None else gm


def by_parameter_name(gm, inputs):
    node = next((n for n in nodes(gm, "placeholder") if n.name.startswith("l_self_modules_head")), None)
    return off_after(gm, node) if node is not None else gm


def by_module_stack(gm, inputs):
    for n in nodes(gm, "call_function"):
        stack = n.meta.get("nn_module_stack") or {}
        if any("blocks" in str(path) and "act" in str(path) for path, _ in stack.values()):
            return off_after(gm, n)
    return gm


def by_size(gm, inputs):
    for n in nodes(gm, "call_function"):
        value = n.meta.get("example_value")
        if value is not None and getattr(value, "shape", ())[-1:] == (16,):
            return off_after(gm, n)
    return gm


def by_count(gm, inputs):
    last = nodes(gm, "call_function", "call_method")
    return off_after(gm, last[-1]) if len(last) >= 8 else gm


def by_call_module(gm):
    for n in nodes(gm, "call_module"):
        if n.target == "blocks.1.act":
            return off_after(gm, n)
    return gm


def by_get_attr(gm, inputs):
    for n in nodes(gm, "get_attr"):
        if n.target == "head.weight":
            return off_after(gm, n)
    return gm


def by_export_name(gm, inputs):
    node = next((n for n in nodes(gm, "placeholder") if n.name == "image"), None)
    return off_after(gm, node) if node is not None else gm


def by_rank(gm, inputs):
    for n in nodes(gm, "call_function"):
        value = n.meta.get("example_value")
        if value is not None and getattr(value, "ndim", 0) == 2 and value.shape[0] >= 4:
            return off_after(gm, n)
    return gm
