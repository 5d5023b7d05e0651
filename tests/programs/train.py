"""A training run as a user would write it: a small transformer, five steps, the losses on stdout."""

import argparse

import torch
from torch import nn
from torch._inductor import config


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(self.first_norm(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        hidden = torch.relu(self.up(self.second_norm(x)))
        return x + self.down(hidden)


class Transformer(nn.Module):
    def __init__(self, words=32, width=16, layers=2):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads=2) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bug", help="one of the mistakes that inductor can be asked to make in relu")
    parser.add_argument("--status", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.bug:
        config.cpp.inject_relu_bug_TESTING_ONLY = arguments.bug
    torch.manual_seed(0)
    model = Transformer()
    compiled = torch.compile(model, backend=arguments.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(arguments.steps):
        tokens = torch.randint(32, (2, 9))
        logits = compiled(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item().hex()}")
    raise SystemExit(arguments.status)


if __name__ == "__main__":
    main()
