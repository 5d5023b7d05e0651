"""The programs of `answer.py`: each can be checked by name, and run by hand as a user would without a tool.

python benchmarks/answer_programs.py bert     compiles it and compares with `allclose`
python benchmarks/answer_programs.py pass512  captures it, and runs the graph once, forward and backward
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import nn

Built = tuple[nn.Module | Callable[..., Any], tuple[Any, ...]]
VOCABULARY, WIDTH, LAYERS, HEADS = 211, 64, 2, 4


def small() -> Built:
    """Return a function of three operations."""
    torch.manual_seed(0)
    return (lambda x: torch.relu(x @ x.T).sum(-1)), (torch.randn(8, 8),)


def bert() -> Built:
    """Return BERT, with relu in place of gelu because the planted bug is in relu."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        hidden_act="relu",
    )
    return _of_tokens(BertModel, config)


def gpt2() -> Built:
    """Return GPT-2 of two layers."""
    return _gpt2(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY)


def gpt2_small() -> Built:
    """Return GPT-2 in its published size of 124 million parameters."""
    return _gpt2()


def _gpt2(**sizes: Any) -> Built:
    from transformers import GPT2Config, GPT2Model

    return _of_tokens(GPT2Model, GPT2Config(activation_function="relu", use_cache=False, **sizes))


def t5() -> Built:
    """Return T5 of two layers, encoder and decoder."""
    from transformers import T5Config, T5Model

    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_layers=LAYERS, num_heads=HEADS
    )
    model, (tokens,) = _of_tokens(T5Model, config)
    return model, (tokens, tokens)


def vit() -> Built:
    """Return ViT of two layers."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=32,
        patch_size=8,
        hidden_act="relu",
    )
    torch.manual_seed(0)
    return _Last(ViTModel(config)).eval(), (torch.randn(2, 3, 32, 32),)


class _Last(nn.Module):
    """A model of transformers that takes its inputs by position and returns the last hidden state alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> Any:
        """Return the last hidden state."""
        words = {"decoder_input_ids": args[1]} if len(args) > 1 else {}
        return self.model(args[0], **words).last_hidden_state


def _of_tokens(kind: Any, config: Any) -> tuple[_Last, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return _Last(kind(config)).eval(), (torch.randint(0, VOCABULARY, (2, 16)),)


class Chain(nn.Module):
    """A model of a given number of nodes."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(nodes // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply each layer and a tanh."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def pass128() -> Built:
    """Return a model of 128 nodes."""
    torch.manual_seed(0)
    return Chain(128), (torch.randn(4, 16),)


def pass512() -> Built:
    """Return a model of 512 nodes."""
    torch.manual_seed(0)
    return Chain(512), (torch.randn(4, 16),)


def rewritten(graph_module: torch.fx.GraphModule, example_inputs: Any) -> torch.fx.GraphModule:  # noqa: ARG001
    """Write each tanh as a sigmoid: a pass that changes every second node, and not the function."""
    for node in list(graph_module.graph.nodes):
        if node.target in (torch.tanh, torch.Tensor.tanh):
            with graph_module.graph.inserting_after(node):
                scaled = graph_module.graph.call_function(torch.mul, (node.args[0], 2.0))
            with graph_module.graph.inserting_after(scaled):
                gate = graph_module.graph.call_function(torch.sigmoid, (scaled,))
            with graph_module.graph.inserting_after(gate):
                doubled = graph_module.graph.call_function(torch.mul, (gate, 2.0))
            with graph_module.graph.inserting_after(doubled):
                result = graph_module.graph.call_function(torch.sub, (doubled, 1.0))
            node.replace_all_uses_with(result)
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def with_bug(build: Callable[[], Built]) -> Callable[[], Built]:
    """Return a factory of the same program under inductor's own planted relu bug."""

    def build_with_bug() -> Built:
        torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"
        return build()

    return build_with_bug


small_bug, bert_bug, gpt2_bug, t5_bug, vit_bug = map(with_bug, (small, bert, gpt2, t5, vit))


def _run_once(call: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor:
    """Run forward, and backward if there is one; return the output, detached."""
    output: torch.Tensor = call(*args)
    if output.requires_grad:
        output.sum().backward()  # type: ignore[no-untyped-call]
    return output.detach()


def main(name: str) -> None:
    """Do what a user does by hand: run eagerly, compile, run, compare; of a pass, capture and run once."""
    program, args = globals()[name]()
    if name.startswith("pass"):
        _run_once(torch.compile(program, backend=rewritten), args)
        return
    reference = _run_once(program, args)
    print(torch.allclose(_run_once(torch.compile(program), args), reference, rtol=1e-3, atol=1e-5))


if __name__ == "__main__":
    main(sys.argv[1])
