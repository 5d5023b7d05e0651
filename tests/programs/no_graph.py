"""Programs whose failures have no graph of their own: in dynamo, in a graph break, or in Python side effects."""

import os

import torch
from torch import nn

X = torch.arange(6.0).reshape(2, 3)
CALLS = []
TOTAL = 0


def is_fake(x):
    return type(x) is not torch.Tensor


def branch():
    def f(x):
        return x + 1 if x.sum() > 0 else x - 1

    return f, (X.clone(),)


def prints():
    def f(x):
        y = torch.relu(x)
        print("hello")
        return y + 1

    return f, (X.clone(),)


@torch._dynamo.allow_in_graph
def no_fakes(x):
    if is_fake(x):
        raise NotImplementedError("this function knows no fake tensors")
    return x + 1


def raising():
    return (lambda x: no_fakes(torch.relu(x)) * 2), (X.clone(),)


@torch._dynamo.allow_in_graph
def dies(x):
    if is_fake(x):
        os.abort()
    return x + 1


def dying():
    return (lambda x: dies(torch.relu(x)) * 2), (X.clone(),)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0
        self.log = []

    def forward(self, x):
        self.count += 2 if torch.compiler.is_compiling() else 1
        return x + 1


class Logging(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        y = x + 1
        if not torch.compiler.is_compiling():
            self.log.append(y)
        return y


def counting():
    return Counting(), (X.clone(),)


def logging():
    return Logging(), (X.clone(),)


def globally():
    def f(x):
        global TOTAL
        TOTAL = TOTAL + (3 if torch.compiler.is_compiling() else 1)
        return x + 1

    return f, (X.clone(),)


def behind_break():
    def f(x, *, scale):
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return y * (scale if torch.compiler.is_compiling() else 1.0)

    return f, (X.clone(),), {"scale": 3.0}


def excepting():
    def f(x):
        if not torch.compiler.is_compiling():
            raise ValueError("only compiled")
        return x + 1

    return f, (X.clone(),)


class Detaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        if torch.compiler.is_compiling():
            y = y.detach() + (y - y.detach()) * 2
        return {"y": y}


def gradient():
    torch.manual_seed(0)
    return Detaching(), (X.clone(),)


def mutating():
    def f(x):
        if torch.compiler.is_compiling():
            x.add_(1)
            return x + 1
        return x + 2

    return f, (X.clone(),)
