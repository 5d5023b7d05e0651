"""Ten small Hugging Face models in bfloat16 with random weights: dynamo breaks five of them into several graphs.

The other five are of the same families, and captured as one graph each. `benchmarks/graph_breaks.py` plants faults in
the graphs of both groups.
"""

import torch

VOCABULARY, BATCH, LENGTH = 211, 2, 24
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 72,
}
_TRANSLATOR = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "use_cache": False,
}


def build(name, *, seed=0):
    """Return a model of `GROUPS` and its keyword arguments; biases and norms are not trivial, so that faults show."""
    torch.manual_seed(seed)
    model, kwargs = _FACTORIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    as_bfloat16 = {key: value.bfloat16() if value.is_floating_point() else value for key, value in kwargs.items()}
    # Whisper's layer drop, which is off here, breaks the graph in train mode only
    return model.train(name == "whisper_in_train_mode").bfloat16(), as_bfloat16


def _tokens(length=LENGTH):
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _deberta():
    from transformers import DebertaConfig, DebertaModel

    config = DebertaConfig(**_ENCODER, relative_attention=True, pos_att_type=["c2p", "p2c"])
    return DebertaModel(config), {"input_ids": _tokens()}


def _deberta_v2():
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(**_ENCODER, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=16)
    return DebertaV2Model(config), {"input_ids": _tokens()}


def _whisper():
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        **_TRANSLATOR,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperModel(config), {"input_features": torch.randn(BATCH, 16, 64), "decoder_input_ids": _tokens(12)}


def _longformer():
    from transformers import LongformerConfig, LongformerModel

    inputs = {"input_ids": _tokens(32), "attention_mask": torch.ones(BATCH, 32, dtype=torch.long)}
    return LongformerModel(LongformerConfig(**_ENCODER, attention_window=8)), inputs


def _led():
    from transformers import LEDConfig, LEDModel

    lengths = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
    config = LEDConfig(**_TRANSLATOR, **lengths, attention_window=8)
    return LEDModel(config), {"input_ids": _tokens(32), "decoder_input_ids": _tokens(12)}


def _big_bird():
    from transformers import BigBirdConfig, BigBirdModel

    config = BigBirdConfig(**_ENCODER, attention_type="block_sparse", block_size=8, num_random_blocks=1)
    return BigBirdModel(config), {"input_ids": _tokens(64)}


def _bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_ENCODER)), {"input_ids": _tokens()}


def _bart():
    from transformers import BartConfig, BartModel

    return BartModel(BartConfig(**_TRANSLATOR, max_position_embeddings=64)), {"input_ids": _tokens()}


def _esm():
    from transformers import EsmConfig, EsmModel

    config = EsmConfig(**_ENCODER, pad_token_id=1, position_embedding_type="rotary")
    return EsmModel(config), {"input_ids": _tokens()}


_FACTORIES = {
    "deberta": _deberta,
    "whisper_in_train_mode": _whisper,
    "longformer": _longformer,
    "led": _led,
    "big_bird": _big_bird,
    "deberta_v2": _deberta_v2,
    "whisper": _whisper,
    "bert": _bert,
    "bart": _bart,
    "esm": _esm,
}
GROUPS = {
    "with graph breaks": ("deberta", "whisper_in_train_mode", "longformer", "led", "big_bird"),
    "without graph breaks": ("deberta_v2", "whisper", "bert", "bart", "esm"),
}
