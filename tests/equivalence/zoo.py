"""The models that plans are proved on, each with one small global batch."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from models import dit, dlrm, gpt, llama, lstm, mlp, moe, unet, wide_resnet
from tests.equivalence import transformers_zoo

_TOKENS = {"vocab_size": 512, "use_cache": False}


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights and its batch; the same for the same name."""
    torch.manual_seed(0)
    if name in _OWN:
        module: Any = _OWN[name]
        config = _CONFIGS[name] if name in _CONFIGS else module.Config()
        return module.build(config), module.example_inputs(config)
    if name in transformers_zoo.CASES:
        return transformers_zoo.CASES[name]()
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


_OWN = {
    "gpt": gpt, "moe": moe, "mlp": mlp, "llama": llama, "wide_resnet": wide_resnet, "unet": unet, "lstm": lstm,
    "lstm_fused": lstm, "dlrm": dlrm, "dit": dit,
}  # fmt: skip
_CONFIGS = {
    "lstm_fused": lstm.Config(fused=True),
    "llama": llama.Config(vocab_size=128, seq_len=16, hidden_size=32, num_heads=4, mlp_size=64, batch_size=4),
}
_HF = {"hf_gpt2": _gpt2, "hf_llama": _llama, "hf_bert": _bert}
#: proved in every plan, with optimizers
NAMES = ("gpt", "moe", "mlp", *_HF)
#: proved for one step in the plans of `planned.STEP_PLANS`
STEP_NAMES = (*(name for name in _OWN if name not in NAMES), *transformers_zoo.CASES)
