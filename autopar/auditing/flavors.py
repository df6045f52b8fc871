"""Sizes of the models that torchtitan knows by name and flavor, and of those that a Hugging Face config.json describes.

torchtitan: torchtitan/models/llama3/__init__.py and models/qwen3/__init__.py (github.com/pytorch/torchtitan, commits
00f555e1 and 0310b491), models/llama/__init__.py (older ones); vocabularies are those of the models' tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.auditing.job import ModelSizes
from autopar.errors import PlanError

_LLAMA3, _QWEN3 = 128_256, 151_936


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int = _LLAMA3) -> ModelSizes:
    return ModelSizes(layers, hidden, heads, kv_heads, hidden // heads, ffn, vocab)


def _qwen(layers: int, hidden: int, heads: int, ffn: int, is_tied: bool = False) -> ModelSizes:
    return ModelSizes(layers, hidden, heads, 8, 128, ffn, _QWEN3, is_tied=is_tied)


FLAVORS: Mapping[str, Mapping[str, ModelSizes]] = {
    "llama3": {
        "debugmodel": _llama(6, 256, 16, 16, 768, 2048),
        "8B": _llama(32, 4096, 32, 8, 14336),
        "70B": _llama(80, 8192, 64, 8, 28672),
        "405B": _llama(126, 16384, 128, 8, 53248),
    },
    "llama2": {
        "271M": _llama(16, 1024, 8, 8, 2816, 32_000),
        "1B": _llama(18, 2048, 16, 16, 5632, 32_000),
        "7B": _llama(32, 4096, 32, 32, 11008, 32_000),
        "13B": _llama(40, 5120, 40, 40, 13824, 32_000),
        "26B": _llama(80, 5120, 40, 40, 13824, 32_000),
        "70B": _llama(80, 8192, 64, 8, 28672, 32_000),
    },
    "qwen3": {
        "0.6B": _qwen(28, 1024, 16, 3072, True),
        "1.7B": _qwen(28, 2048, 16, 6144, True),
        "4B": _qwen(36, 2560, 32, 9728, True),
        "8B": _qwen(36, 4096, 32, 12288),
        "14B": _qwen(40, 5120, 40, 17408),
        "32B": _qwen(64, 5120, 64, 25600),
        "30B-A3B": ModelSizes(
            48, 2048, 32, 4, 128, 6144, _QWEN3, experts=128, chosen_experts=8, expert_ffn=768
        ),
    },
}  # fmt: skip
_SUFFIXES = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")


def flavor(name: str, flavor_name: str) -> ModelSizes | None:
    """The sizes of torchtitan's model, where they are known; how its attention is computed makes no other one."""
    known = FLAVORS.get(name, {})
    for suffix in ("", *_SUFFIXES):
        if suffix and not flavor_name.endswith(suffix):
            continue
        bare = flavor_name.removesuffix(suffix) if suffix else flavor_name
        if bare in known:
            return known[bare]
    return None


# Hugging Face ----------------------------------------

_GPT2 = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
         "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
         "num_local_experts": "num_experts"}  # fmt: skip
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_OTHER_KINDS = {"q_lora_rank": "multi-latent attention", "kv_lora_rank": "multi-latent attention",
                "encoder_layers": "an encoder", "is_encoder_decoder": "an encoder", "state_size": "state-space layers",
                "vision_config": "images", "text_config": "several towers"}  # fmt: skip


def read_config(path: Path) -> tuple[ModelSizes, dict[str, Any]]:
    """The sizes of a decoder from Hugging Face's config.json, and the file. Raises PlanError where they are not there,
    or where the model is of another kind."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"expected {path} as a model's config.json, found {error}") from error
    if not isinstance(told, dict):
        raise PlanError(f"expected {path} as a model's config.json, found a {type(told).__name__}")
    return sizes_of(told, str(path)), told


def sizes_of(told: Mapping[str, Any], name: str) -> ModelSizes:
    """The sizes in a Hugging Face configuration."""
    config = {_GPT2.get(key, key): value for key, value in told.items()}
    for key, kind in _OTHER_KINDS.items():
        if config.get(key):
            raise PlanError(f"expected a decoder in {name}, found {kind} ({key}); give it as --model module:config")
    absent = [key for key in _NEEDED if not _is_count(config.get(key))]
    if absent:
        raise PlanError(f"expected {', '.join(absent)} as numbers from 1 up in {name}, found {config.get(absent[0])!r}")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    is_gpt = "n_embd" in told or config.get("model_type") in ("gpt2", "gpt_neo", "opt", "bert", "roberta")
    sizes = ModelSizes(
        config["num_hidden_layers"], hidden, heads, config.get("num_key_value_heads") or heads,
        config.get("head_dim") or hidden // heads, config.get("intermediate_size") or 4 * hidden, config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", is_gpt)),
    )  # fmt: skip
    if is_gpt:
        positions = config.get("max_position_embeddings") or 0
        sizes = replace(
            sizes, is_gated=False, norm="layer", positions="learned", has_bias=True, max_positions=positions
        )
    if config.get("num_experts"):
        width = config.get("moe_intermediate_size") or sizes.ffn
        chosen = config.get("num_experts_per_tok") or config.get("top_k") or 2
        sizes = replace(sizes, experts=config["num_experts"], chosen_experts=chosen, expert_ffn=width)
    return sizes


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
