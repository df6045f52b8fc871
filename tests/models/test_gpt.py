"""What is particular to models.gpt: a tied head, dropout, causality."""

from __future__ import annotations

import dataclasses

import torch

from models import gpt

CONFIG = gpt.Config()


def test_tied_head_is_the_token_embedding() -> None:
    model = gpt.build(dataclasses.replace(CONFIG, tie_head=True))
    assert model.head.weight is model.embedding.token.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_without_dropout_no_random_operator_is_traced() -> None:
    model, inputs = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    graph = torch.export.export(model, (), inputs, strict=False).graph
    assert not [node for node in graph.nodes if "dropout" in str(node.target)]


def test_dropout_acts_in_training_only() -> None:
    config = dataclasses.replace(CONFIG, dropout=0.5)
    model, inputs = gpt.build(config), gpt.example_inputs(config)
    assert model(**inputs) != model(**inputs)
    model.eval()
    assert model(**inputs) == model(**inputs)


def test_a_token_does_not_see_those_after_it() -> None:
    attention = gpt.Attention(hidden_size=16, num_heads=4, dropout=0.0)
    x = torch.randn(1, 6, 16)
    changed = torch.cat((x[:, :4], torch.randn(1, 2, 16)), dim=1)
    torch.testing.assert_close(attention(x)[:, :4], attention(changed)[:, :4])
