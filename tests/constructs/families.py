"""Small models of Hugging Face's families, whose sequences are split: decoders, encoders, both, images, and mixed."""

from __future__ import annotations

from tests.constructs.written import Written, written

TEXT = """\
import torch
import transformers as T

B = 2
SMALL = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=48, vocab_size=128)
NEW = dict(**SMALL, num_key_value_heads=2, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
OLD = dict(n_layer=2, n_head=4, vocab_size=128, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
           use_cache=False, bos_token_id=1, eos_token_id=2)
UNDROPPED = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
VISION = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=48, image_size=16)

def Model():
    return T.{kind}({config}){cast}

def text(length=16):
    torch.manual_seed(1)
    ids = torch.randint(3, 120, (B, length))
    labels = ids.clone()
    labels[0, :5] = -100
    return {'input_ids': ids, 'labels': labels}

def padded():
    mask = torch.ones(B, 16, dtype=torch.long)
    mask[1, 11:] = 0
    return text() | {'attention_mask': mask}

def two_texts():
    return text() | {'labels': torch.randint(3, 120, (B, 10))}

def batch():
    torch.manual_seed(2)
    return {batch}

def loss_fn():
    return None
"""
_DECODERS = {
    "gpt2": "T.GPT2Config(n_embd=32, **OLD)",
    "gpt_neo": (
        "T.GPTNeoConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=128, max_position_embeddings=64, "
        "attention_types=[[['global', 'local'], 1]], window_size=5, attention_dropout=0, embed_dropout=0, "
        "resid_dropout=0, use_cache=False, bos_token_id=1, eos_token_id=2)"
    ),
    "gpt_neox": "T.GPTNeoXConfig(max_position_embeddings=64, attention_dropout=0, hidden_dropout=0, **SMALL)",
    "gptj": "T.GPTJConfig(n_embd=32, rotary_dim=4, **OLD)",
    "opt": (
        "T.OPTConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, ffn_dim=48, vocab_size=128, "
        "max_position_embeddings=64, word_embed_proj_dim=32, dropout=0, attention_dropout=0, use_cache=False)"
    ),
    "bloom": (
        "T.BloomConfig(n_layer=2, hidden_size=32, n_head=4, vocab_size=128, hidden_dropout=0, attention_dropout=0, "
        "use_cache=False)"
    ),
    "falcon": (
        "T.FalconConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=128, alibi=False, "
        "use_cache=False)"
    ),
    "mpt": "T.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=128, max_seq_len=64, use_cache=False)",
    "llama": "T.LlamaConfig(**NEW)",
    "mistral": "T.MistralConfig(sliding_window=5, **NEW)",
    "qwen2": "T.Qwen2Config(**NEW)",
    "qwen3": "T.Qwen3Config(head_dim=8, **NEW)",
    "gemma": "T.GemmaConfig(head_dim=8, **NEW | {'num_key_value_heads': 1})",
    "gemma2": "T.Gemma2Config(head_dim=8, sliding_window=6, attn_implementation='eager', **NEW)",
    "gemma3": (
        "T.Gemma3TextConfig(head_dim=8, sliding_window=5, layer_types=['sliding_attention', 'full_attention'], **NEW)"
    ),
    "phi": "T.PhiConfig(use_cache=False, **SMALL)",
    "phi3": "T.Phi3Config(**NEW)",
    "olmo2": "T.Olmo2Config(**NEW)",
    "stablelm": "T.StableLmConfig(**NEW | {'num_key_value_heads': 4})",
    "starcoder2": "T.Starcoder2Config(residual_dropout=0, embedding_dropout=0, **NEW)",
    "cohere": "T.CohereConfig(**NEW)",
    "granite": "T.GraniteConfig(**NEW)",
    "smollm3": "T.SmolLM3Config(**NEW)",
    "mixtral": "T.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **NEW)",
    "qwen3_moe": (
        "T.Qwen3MoeConfig(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **NEW)"
    ),
    "gpt_oss": "T.GptOssConfig(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, **NEW)",
    "deepseek_v3": (
        "T.DeepseekV3Config(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, "
        "moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, "
        "qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, **NEW | {'num_key_value_heads': 4})"
    ),
}
_MASKED = {
    "bert": "T.BertConfig(max_position_embeddings=64, **UNDROPPED, **SMALL)",
    "roberta": "T.RobertaConfig(max_position_embeddings=64, **UNDROPPED, **SMALL)",
    "modernbert": (
        "T.ModernBertConfig(cls_token_id=1, sep_token_id=2, local_attention=8, global_attn_every_n_layers=2, "
        "**SPECIAL, **SMALL)"
    ),
}
_T5 = (
    "T.T5Config(num_layers=2, d_model=32, d_ff=64, d_kv=8, num_heads=4, vocab_size=128, dropout_rate=0, "
    "relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0, use_cache=False)"
)
_BOTH = "d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, " + (
    "vocab_size=128, dropout=0, use_cache=False, decoder_start_token_id=1, **SPECIAL"
)
_OTHERS = {
    "bert padded": ("BertForMaskedLM", _MASKED["bert"], "padded()"),
    "llama padded": ("LlamaForCausalLM", _DECODERS["llama"], "padded()"),
    "gpt2 padded": ("GPT2LMHeadModel", _DECODERS["gpt2"], "padded()"),
    "t5": ("T5ForConditionalGeneration", _T5, "text()"),
    "t5 of two lengths": ("T5ForConditionalGeneration", _T5, "two_texts()"),
    "bart": (
        "BartForConditionalGeneration",
        f"T.BartConfig(encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, {_BOTH})",
        "two_texts()",
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "T.WhisperConfig(encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16, "
        f"max_target_positions=16, {_BOTH})",
        "{'input_features': torch.randn(B, 8, 32), 'labels': torch.randint(3, 120, (B, 12))}",
    ),
    "vit": (
        "ViTForImageClassification",
        "T.ViTConfig(patch_size=4, num_labels=10, **UNDROPPED, **VISION)",
        "{'pixel_values': torch.randn(B, 3, 16, 16), 'labels': torch.randint(10, (B,))}",
    ),
    "clip": (
        "CLIPModel",
        "T.CLIPConfig(text_config=dict(max_position_embeddings=16, **SPECIAL, **SMALL), "
        "vision_config=dict(patch_size=4, **VISION), projection_dim=16)",
        "{'input_ids': torch.randint(3, 120, (B, 12)), 'pixel_values': torch.randn(B, 3, 16, 16), 'return_loss': True}",
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "T.LlavaConfig(vision_config=T.CLIPVisionConfig(patch_size=8, **VISION), text_config=T.LlamaConfig(**NEW), "
        "image_token_index=127, vision_feature_layer=-1)",
        "(lambda ids: {'input_ids': ids, 'pixel_values': torch.randn(B, 3, 16, 16), 'labels': ids.clone()})("
        "torch.randint(3, 120, (B, 16)).index_fill(1, torch.arange(2, 6), 127))",
    ),
}


_SINGLE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Torch multiplies the rows of experts in single precision at most."""


def _family(name: str, kind: str, config: str, batch: str = "text()") -> Written:
    cast = ".float()" if name in _SINGLE else ""
    return written(f"family: {name}", TEXT, {"kind": kind, "config": config, "cast": cast, "batch": batch})


CASES = (
    *(_family(name, "AutoModelForCausalLM.from_config", config) for name, config in _DECODERS.items()),
    *(_family(name, "AutoModelForMaskedLM.from_config", config) for name, config in _MASKED.items()),
    *(_family(name, *given) for name, given in _OTHERS.items()),
)
