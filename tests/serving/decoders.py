"""Small decoders of transformers with random weights, and what they generate on one device.

In float64, as far as torch can: no sum in another order decides between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY, LENGTH = 61, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "dtype": torch.float64,
    "initializer_range": 0.2,
}  # fmt: skip

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama_wide": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "qwen3_wide": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_key_value_heads": 4}, head_dim=16)),
    "qwen3_mixed": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.2,
        )
    ),
    "latent": lambda: DeepseekV3ForCausalLM(  # one head of 16 elements and one of 8 are cached
        DeepseekV3Config(
            **SIZES | {"num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=2,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
}


@cache
def decoder(name: str) -> Any:
    """The model of a name, the same each time."""
    torch.manual_seed(0)
    model = DECODERS[name]().eval()
    return model if name == "mixtral" else model.double()  # torch's grouped products have no float64


def prompts(lengths: Sequence[int] = (3, 11, 1, 8, 5, 20)) -> list[list[int]]:
    """Of these lengths, random."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def generated(model: nn.Module, given: Sequence[Sequence[int]], new: int, eos: int | None = None) -> list[list[int]]:
    """The tokens that one device generates after each prompt, greedily, up to and with `eos`."""
    found = []
    for prompt in given:
        ids = torch.tensor([prompt])
        made = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=eos,
            pad_token_id=0,
        )  # fmt: skip
        found.append(made[0, len(prompt) :].tolist())
    return found
