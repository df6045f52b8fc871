"""Llama against the implementation in transformers, weights copied over."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models import llama

CONFIG = llama.Config()
THEIR_NAMES = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def their_model() -> LlamaForCausalLM:
    """The model of transformers with the sizes of CONFIG."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.hidden_size,
            intermediate_size=CONFIG.mlp_size,
            num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=CONFIG.num_heads,
            num_key_value_heads=CONFIG.num_kv_heads,
            max_position_embeddings=CONFIG.seq_len,
            rms_norm_eps=CONFIG.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_base},
            use_cache=False,
        )
    )


def their_name(name: str) -> str:
    """The name of one of our parameters in transformers."""
    return ".".join(THEIR_NAMES.get(part, part) for part in name.split("."))


def test_logits_and_gradients_equal_those_of_transformers() -> None:
    torch.manual_seed(0)
    ours, theirs = llama.build(CONFIG), their_model()
    theirs.load_state_dict({their_name(name): value for name, value in ours.state_dict().items()})
    inputs = llama.example_inputs(CONFIG)
    loss = ours(**inputs)
    logits = theirs(input_ids=inputs["tokens"]).logits
    their_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
    torch.testing.assert_close(loss, their_loss)
    loss.backward()
    their_loss.backward()
    their_parameters = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, their_parameters[their_name(name)].grad, rtol=1e-4, atol=1e-6)
