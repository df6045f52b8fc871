"""The models that plans are proved on, each with one small global batch."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from models import gpt, mlp, moe

_TOKENS = {"vocab_size": 512, "use_cache": False}


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights and its batch; the same for the same name."""
    torch.manual_seed(0)
    if name in _OWN:
        module: Any = _OWN[name]
        config = module.Config()
        return module.build(config), module.example_inputs(config)
    model = _HF[name]()
    ids = torch.randint(0, 512, (4, 32))
    labels = torch.randint(0, 512, (4, 32))
    labels[0, :7] = -100  # ranks hold unequal counts
    return model, {"input_ids": ids, "labels": labels}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, n_positions=64, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        bos_token_id=1, eos_token_id=1, **_TOKENS,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=2,
        **_TOKENS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=512,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


_OWN = {"gpt": gpt, "moe": moe, "mlp": mlp}
_HF = {"hf_gpt2": _gpt2, "hf_llama": _llama, "hf_bert": _bert}
NAMES = (*_OWN, *_HF)
