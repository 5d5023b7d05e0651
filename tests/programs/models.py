"""Twelve small models of the kinds that people compile: random weights, inputs by position, plain tuples as outputs.

They are the clean programs and the ground for planted faults of `benchmarks/verdicts.py`.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 211
BATCH = 4
LENGTH = 24
WIDTH = 64
HEADS = 4


def build(name, *, dtype=torch.float32, seed=0, train=False, probing=False):
    """Return a model of `MODELS` and its arguments.

    With `probing`, weights are drawn so that activations are of order one, and biases and norms are not trivial: a
    fault in a bias that is zero, or in an epsilon beside a variance of one, cannot be seen by anybody.
    """
    torch.manual_seed(seed)
    model, args = _FACTORIES[name]()
    # a ResNet is trained in either mode: its batch norms are a hard case only as long as they look at the batch
    model.train(train or name == "resnet")
    if probing:
        _draw_probing_weights(model, seed)
    return model.to(dtype), tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)


class _Plain(nn.Module):
    """A transformers model that takes its inputs by position and returns a plain tuple."""

    def __init__(self, model, *, inputs, outputs):
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, *args):
        result = self.model(**dict(zip(self.inputs, args, strict=True)))
        return tuple(result[name] for name in self.outputs)


def _tokens(batch=BATCH, length=LENGTH):
    return torch.randint(0, VOCABULARY, (batch, length))


def _bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, LENGTH - 5 :] = 0
    mask[2, LENGTH - 9 :] = 0
    names = ("last_hidden_state", "pooler_output")
    return _Plain(BertModel(config), inputs=("input_ids", "attention_mask"), outputs=names), (_tokens(), mask)


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=3,
        n_head=HEADS,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return _Plain(GPT2LMHeadModel(config), inputs=("input_ids",), outputs=("logits",)), (_tokens(),)


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=3 * WIDTH,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation="eager",
    )
    return _Plain(LlamaForCausalLM(config), inputs=("input_ids",), outputs=("logits",)), (_tokens(),)


def _vit():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=32,
        patch_size=8,
        attn_implementation="sdpa",
    )
    names = ("last_hidden_state", "pooler_output")
    return _Plain(ViTModel(config), inputs=("pixel_values",), outputs=names), (torch.randn(BATCH, 3, 32, 32),)


def _t5():
    from transformers import T5Config, T5Model

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=16,
        d_ff=4 * WIDTH,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=HEADS,
        use_cache=False,
        attn_implementation="eager",
    )
    model = _Plain(T5Model(config), inputs=("input_ids", "decoder_input_ids"), outputs=("last_hidden_state",))
    return model, (_tokens(), _tokens(length=12))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=2 * WIDTH,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation="eager",
        # the loop over experts depends on data and cannot be exported; grouped matmul has no float64 kernel
        experts_implementation="batched_mm",
    )
    return _Plain(MixtralForCausalLM(config), inputs=("input_ids",), outputs=("logits",)), (_tokens(),)


def _mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=48, state_size=8, num_hidden_layers=2, use_cache=False)
    model = _Plain(MambaForCausalLM(config), inputs=("input_ids",), outputs=("logits",))
    return model, (_tokens(batch=2, length=12),)


class _Residual(nn.Module):
    """Two convolutions with batch norm, beside a shortcut."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        is_plain = before == after and stride == 1
        self.shortcut = nn.Identity() if is_plain else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, image):
        hidden = F.relu(self.first_norm(self.first(image)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(image))


class _ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = nn.Sequential(
            _Residual(16, 16, 1), _Residual(16, 32, 2), _Residual(32, 64, 2), _Residual(64, 64, 1)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, image):
        features = self.blocks(F.max_pool2d(F.relu(self.stem(image)), 2)).mean((2, 3))
        return self.head(features), features


def _resnet():
    return _ResNet(), (torch.randn(BATCH, 3, 32, 32),)


class _UNet(nn.Module):
    """A diffusion model's shape: a time embedding, two levels down and up, skip connections and a clamp."""

    def __init__(self):
        super().__init__()
        self.down_1 = self._level(3, 16)
        self.down_2 = self._level(16, 32)
        self.middle = self._level(32, 32)
        self.up_2 = self._level(64, 16)
        self.up_1 = self._level(32, 16)
        self.out = nn.Conv2d(16, 3, 1)
        self.time = nn.Linear(16, 32)

    @staticmethod
    def _level(before, after):
        return nn.Sequential(
            nn.Conv2d(before, after, 3, 1, 1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, 1, 1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
        )

    def forward(self, image, time):
        frequencies = torch.exp(-math.log(1000.0) * torch.arange(8, device=image.device, dtype=image.dtype) / 8)
        angles = time[:, None] * frequencies[None]
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        fine = self.down_1(image)
        coarse = self.down_2(F.avg_pool2d(fine, 2))
        middle = self.middle(F.avg_pool2d(coarse, 2) + embedded[:, :, None, None])
        up = self.up_2(torch.cat([F.interpolate(middle, scale_factor=2, mode="nearest"), coarse], 1))
        up = F.interpolate(up, scale_factor=2, mode="bilinear", align_corners=False)
        return (torch.clamp(self.out(self.up_1(torch.cat([up, fine], 1))), -3.0, 3.0),)


def _unet():
    return _UNet(), (torch.randn(2, 3, 16, 16), torch.rand(2) * 4)


class _Lstm(nn.Module):
    """The cells are written out: dynamo captures no graph of an `nn.LSTM`."""

    def __init__(self, width=48):
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.of_input = nn.Linear(width, 4 * width)
        self.of_hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        embedded = self.embed(tokens)
        hidden = embedded.new_zeros(embedded.shape[0], self.width)
        cell = torch.zeros_like(hidden)
        seen = []
        for time in range(embedded.shape[1]):
            gates = self.of_input(embedded[:, time]) + self.of_hidden(hidden)
            enter, forget, update, leave = gates.chunk(4, -1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(update)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
            seen.append(hidden)
        return self.out(torch.stack(seen, 1)), cell


def _lstm():
    tokens = _tokens(length=14)
    tokens[0, 9:] = 0
    tokens[3, 6:] = 0
    return _Lstm(), (tokens,)


class _Recommender(nn.Module):
    """Dense features beside embedded ones, and their interactions: masks, integer arithmetic, logarithms, an argmax."""

    def __init__(self, width=32, features=13, slots=9):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.bottom = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (slots + 1) * slots // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, dense, sparse):
        bottom = self.bottom(torch.log1p(torch.clamp(dense, min=0.0)))
        embedded = self.embed(sparse // 2)
        is_known = (sparse > 20).unsqueeze(-1)
        embedded = self.norm(torch.where(is_known, embedded, torch.zeros_like(embedded)))
        vectors = torch.cat([bottom[:, None], embedded], 1)
        products = torch.matmul(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        interactions = products[:, rows, columns]
        score = torch.sigmoid(self.top(torch.cat([bottom, interactions], 1)))
        pooled = embedded.mean(1)
        direction = pooled / (pooled.norm(dim=-1, keepdim=True) + 1e-6)
        return score, direction, interactions.argmax(1)


def _recommender():
    return _Recommender(), (torch.randn(16, 13) * 2, torch.randint(0, 2 * VOCABULARY - 1, (16, 9)))


class _MoeBlock(nn.Module):
    """Causal attention, then the two best of four experts for every token."""

    def __init__(self, width, experts):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.router_norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.enter = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.leave = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, hidden):
        batch, length, width = hidden.shape
        parts = self.attention(self.attention_norm(hidden)).chunk(3, -1)
        query, key, value = (part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + attended.transpose(1, 2).reshape(batch, length, width)
        normed = self.router_norm(hidden)
        probabilities = torch.softmax(self.router(normed), -1)
        weights, chosen = torch.topk(probabilities, 2, -1)
        gates = torch.zeros_like(probabilities).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        inner = F.gelu(torch.einsum("bnd,edf->benf", normed, self.enter), approximate="tanh")
        outer = torch.einsum("benf,efd->bend", inner, self.leave)
        return hidden + (outer * gates.permute(0, 2, 1).unsqueeze(-1)).sum(1), chosen


class _Moe(nn.Module):
    def __init__(self, width=WIDTH, experts=4):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.first = _MoeBlock(width, experts)
        self.second = _MoeBlock(width, experts)

    def forward(self, tokens):
        hidden, _ = self.first(self.embed(tokens))
        return self.second(hidden)


def _moe():
    return _Moe(), (_tokens(),)


_FACTORIES = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "vit": _vit,
    "t5": _t5,
    "mixtral": _mixtral,
    "mamba": _mamba,
    "resnet": _resnet,
    "unet": _unet,
    "lstm": _lstm,
    "recommender": _recommender,
    "moe": _moe,
}
MODELS = list(_FACTORIES)


def _draw_probing_weights(model, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            owner = model.get_submodule(path.rpartition(".")[0])
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_probing(parameter, drawn, path, owner))


def _probing(parameter, drawn, path, owner):
    is_embedding = isinstance(owner, nn.Embedding) or "embeddings" in path
    if parameter.dim() < 2:
        is_norm_weight = bool((parameter == 1).all())
        return 1 + 0.3 * drawn if is_norm_weight else parameter + 0.2 * drawn
    if path.endswith("A_log"):  # the decay of a state-space model: another value is another kind of dynamics
        return parameter
    if is_embedding and not isinstance(owner, (nn.Linear, nn.Conv2d)):
        return drawn
    return 1.2 * drawn / _fan_in(parameter, owner) ** 0.5


def _fan_in(parameter, owner):
    if type(owner).__name__ == "Conv1D":  # GPT-2's linear layer, which has its inputs first
        return parameter.shape[0]
    if isinstance(owner, (nn.Linear, nn.Conv1d, nn.Conv2d)):
        return parameter[0].numel()
    return parameter.shape[1]  # experts, stacked
