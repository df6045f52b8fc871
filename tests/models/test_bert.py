"""models.bert is the BERT of transformers: same weights, same loss, same gradients."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForMaskedLM

from models import bert

CONFIG = bert.Config()
THEIR_NAMES = {
    "embedding.token": "bert.embeddings.word_embeddings",
    "embedding.position": "bert.embeddings.position_embeddings",
    "embedding.sentence": "bert.embeddings.token_type_embeddings",
    "embedding.norm": "bert.embeddings.LayerNorm",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.words": "cls.predictions.decoder",
}


def their_model() -> BertForMaskedLM:
    """The model of transformers with the sizes of CONFIG."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.hidden_size,
            num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=CONFIG.num_heads,
            intermediate_size=CONFIG.mlp_ratio * CONFIG.hidden_size,
            max_position_embeddings=CONFIG.seq_len,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )


def their_name(name: str) -> str:
    """The name of one of our parameters in transformers."""
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        return f"bert.encoder.layer.{index}.{their_name(rest)}"
    module, _, kind = name.rpartition(".")
    return f"{THEIR_NAMES[module]}.{kind}"


def test_loss_and_gradients_equal_those_of_transformers() -> None:
    torch.manual_seed(0)
    ours, theirs = bert.build(CONFIG), their_model()
    state = {their_name(name): value for name, value in ours.state_dict().items()}
    state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    theirs.load_state_dict(state)
    inputs = bert.example_inputs(CONFIG)
    loss = ours(**inputs)
    their_loss = theirs(input_ids=inputs["tokens"], token_type_ids=inputs["sentences"], labels=inputs["labels"]).loss
    torch.testing.assert_close(loss, their_loss)
    loss.backward()
    their_loss.backward()
    their_parameters = dict(theirs.named_parameters(remove_duplicate=False))
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, their_parameters[their_name(name)].grad, rtol=1e-4, atol=1e-6)


def test_a_fixed_share_of_words_is_masked_and_only_they_have_labels() -> None:
    inputs = bert.example_inputs(CONFIG)
    masked = inputs["tokens"] == CONFIG.vocab_size - 1
    assert (masked.sum(dim=1) == round(CONFIG.masked * CONFIG.seq_len)).all()
    assert torch.equal(masked, inputs["labels"] != bert.UNMASKED)
