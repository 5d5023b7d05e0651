"""Batch norm that two passes fold with a wrong epsilon: one on modules, one on dynamo's graph."""

import torch
from torch import nn

EPS = 1e-5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4, eps=1e-1)
        self.tail = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.tail(torch.relu(self.bn(self.conv(x))))


def build():
    torch.manual_seed(0)
    net = Net()
    net.bn.running_mean.normal_()
    net.bn.running_var.uniform_(0.1, 1.0)
    return net.eval(), (torch.randn(2, 3, 8, 8),)


def fold(gm):
    modules = dict(gm.named_modules())
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and isinstance(modules[node.target], nn.BatchNorm2d):
            conv, bn = modules[node.args[0].target], modules[node.target]
            scale = bn.weight / torch.sqrt(bn.running_var + EPS)
            with torch.no_grad():
                conv.weight.mul_(scale[:, None, None, None])
                conv.bias.copy_((conv.bias - bn.running_mean) * scale + bn.bias)
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def fold_dynamo(gm, example_inputs):
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is torch.nn.functional.batch_norm:
            conv = node.args[0]
            mean, var, weight, bias = node.args[1:5]
            g = gm.graph
            with g.inserting_before(node):
                d = g.call_function(torch.add, (var, EPS))
                s = g.call_function(torch.rsqrt, (d,))
                scale = g.call_function(torch.mul, (weight, s))
                s4 = g.call_function(torch.reshape, (scale, (-1, 1, 1, 1)))
                w = g.call_function(torch.mul, (conv.args[1], s4))
                b0 = g.call_function(torch.sub, (conv.args[2], mean))
                b1 = g.call_function(torch.mul, (b0, scale))
                b = g.call_function(torch.add, (b1, bias))
                new = g.call_function(conv.target, (conv.args[0], w, b, *conv.args[3:]))
            node.replace_all_uses_with(new)
            g.erase_node(node)
            g.erase_node(conv)
    gm.recompile()
    return gm
