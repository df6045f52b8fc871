"""Models of the transformers library, small and with random weights, each with one small global batch.

Dropout is off: a plan draws other random numbers than one device, so the two could not be compared.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

Case = tuple[nn.Module, dict[str, Tensor]]

_VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
}  # fmt: skip
_DECODER: dict[str, Any] = {**_SIZES, "vocab_size": _VOCABULARY, "use_cache": False}


def _qwen2() -> Case:
    """Biases in query, key and value; fewer key/value heads; the head tied to the embedding."""
    config = transformers.Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **_DECODER)
    return transformers.Qwen2ForCausalLM(config), _text()


def _gemma() -> Case:
    """One key/value head, norms by 1 + weight, embeddings times √hidden."""
    config = transformers.GemmaConfig(num_key_value_heads=1, head_dim=8, **_DECODER)
    return transformers.GemmaForCausalLM(config), _text()


def _gemma2() -> Case:
    """Norms on both sides of each sublayer, scores and logits capped by tanh, a sliding window in every other layer."""
    config = transformers.Gemma2Config(
        num_key_value_heads=2, head_dim=8, sliding_window=6, attn_implementation="eager", **_DECODER
    )
    return transformers.Gemma2ForCausalLM(config), _text()


def _t5() -> Case:
    """Encoder and decoder share one embedding, each with a relative position bias; the text is padded."""
    config = transformers.T5Config(
        num_layers=2, d_model=32, d_ff=64, d_kv=8, num_heads=4, vocab_size=_VOCABULARY, dropout_rate=0,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    text = _text()
    mask = torch.ones_like(text["input_ids"])
    mask[1, 9:] = 0
    return transformers.T5ForConditionalGeneration(config), {**text, "attention_mask": mask}


def _vit() -> Case:
    """Patches by a convolution, a class token, learned positions."""
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, num_labels=10, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **_SIZES
    )
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(10, (4,))}
    return transformers.ViTForImageClassification(config), batch


def _whisper() -> Case:
    """Speech to text: convolutions over time and fixed positions in the encoder, learned ones in the decoder."""
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16, max_target_positions=16,
        vocab_size=_VOCABULARY, dropout=0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(4, 8, 32),
        "labels": _text()["labels"],
    }


def _mixtral() -> Case:
    """Four experts in each layer, two for a token, with the loss that balances them."""
    config = transformers.MixtralConfig(
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **_DECODER
    )
    return transformers.MixtralForCausalLM(config), _text()


def _text() -> dict[str, Tensor]:
    """Four sequences of twelve tokens; the loss ignores some labels of the first, so ranks hold unequal counts."""
    ids = torch.randint(3, _VOCABULARY, (4, 12))
    labels = torch.randint(3, _VOCABULARY, (4, 12))
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


CASES = {
    "hf_qwen2": _qwen2,
    "hf_gemma": _gemma,
    "hf_gemma2": _gemma2,
    "hf_t5": _t5,
    "hf_vit": _vit,
    "hf_whisper": _whisper,
    "hf_mixtral": _mixtral,
}
