"""Healthy programs of every kind that users bring: small, with random weights, in train mode where they have one."""

import torch
from torch import nn


def _seeded(build):
    def factory():
        torch.manual_seed(0)
        return build()

    return factory


@_seeded
def mlp():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 4))
    return model, (torch.randn(8, 16),)


class _ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.body_norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, image):
        hidden = torch.relu(self.norm(self.stem(image)))
        hidden = torch.relu(self.body_norm(self.body(hidden)))
        return self.head(hidden.mean((2, 3)))


@_seeded
def conv_net():
    return _ConvNet().train(), (torch.randn(4, 3, 16, 16),)


class _Recurrent(nn.Module):
    """An LSTM between layers that dynamo can capture: it runs eagerly, and the rest does not."""

    def __init__(self):
        super().__init__()
        self.embed = _Embed()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = _Head()

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden)


class _Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        return self.norm(self.table(tokens))


class _Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 50)

    def forward(self, hidden):
        return torch.log_softmax(self.out(torch.tanh(hidden)), -1)


@_seeded
def lstm():
    return _Recurrent(), (torch.randint(0, 50, (3, 7)),)


@_seeded
def bare_lstm():
    return nn.LSTM(8, 8), (torch.randn(3, 2, 8),)


@_seeded
def vit():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8
    )
    return ViTModel(config).train(), (), {"pixel_values": torch.randn(2, 3, 16, 16)}


@_seeded
def bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return BertModel(config).train(), (), {"input_ids": torch.randint(0, 99, (2, 12)), "attention_mask": mask}


@_seeded
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train(), (), {"input_ids": torch.randint(0, 99, (2, 12))}


@_seeded
def t5():
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False)
    tokens = torch.randint(0, 99, (2, 12))
    return T5Model(config).train(), (), {"input_ids": tokens, "decoder_input_ids": tokens[:, :6]}


def _gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0, **options
    )
    return GPT2LMHeadModel(config), (), {"input_ids": torch.randint(0, 99, (2, 12))}


@_seeded
def gpt2_eval():
    model, args, kwargs = _gpt2(use_cache=False)
    return model.eval(), args, kwargs


@_seeded
def gpt2_with_cache():
    model, args, kwargs = _gpt2()
    return model.eval(), args, kwargs
