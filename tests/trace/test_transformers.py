"""Language models as people have them: traced on meta tensors, and equal to the model where they are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import autopar
from autopar.ops import coverage
from autopar.trace import find_blocks, trace
from tests.trace.test_trace import check_against_model

_COMMON: dict[str, Any] = {"vocab_size": 96, "use_cache": False}


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=16, n_head=4, n_positions=16, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        bos_token_id=1, eos_token_id=1, **_COMMON,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        **_COMMON,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert() -> Any:
    config = transformers.BertConfig(
        num_hidden_layers=3, hidden_size=16, intermediate_size=24, num_attention_heads=4, vocab_size=96,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


MODELS = {"gpt2": (_gpt2, "transformer.h"), "llama": (_llama, "model.layers"), "bert": (_bert, "bert.encoder.layer")}


def test_cache_of_keys_and_values_is_no_hindrance() -> None:
    """`use_cache=True` is the library's default: forward then returns an object that torch.export does not know."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 96, (2, 8))
    graph = trace(model, {"input_ids": ids, "labels": ids})
    assert "forward" not in model.__dict__
    assert model(ids).past_key_values is not None
    assert [stored.name for stored in graph.stored if stored.kind == "constant"] == []
    assert all(len(node.operands) > 1 for node in graph.nodes if node.op == "aten.cat.default")
    check_against_model(graph, model, {"input_ids": ids, "labels": ids})


def test_a_cache_that_forward_returns_is_left_out_of_inference_with_a_word() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 96, (2, 8))
    with pytest.warns(UserWarning, match="a DynamicCache as past_key_values, .* leaves it out"):
        program = autopar.parallelize(
            model, autopar.Mesh("h100"), {"input_ids": ids}, mode="inference", search="fast"
        )  # fmt: skip
    torch.testing.assert_close(program.build(device="cpu")(input_ids=ids), model(ids).logits)


class Own:
    """An object that nobody knows, with a tensor in it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_another_object_that_forward_returns_in_inference_is_refused() -> None:
    class Model(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            out = super().forward(input)
            return out, Own(out)

    with pytest.raises(autopar.AutoparError, match="found Own as 1"):
        trace(Model(4, 4), {"input": torch.randn(2, 4)}, mode="inference")


@pytest.mark.sampled(only=("llama", "bert"))
@pytest.mark.parametrize("name", MODELS)
def test_models_trace_on_meta_and_mean_the_same(name: str) -> None:
    build, layers = MODELS[name]
    torch.manual_seed(0)
    with torch.device("meta"):
        ids = torch.zeros(2, 8, dtype=torch.int64)
        graph = trace(build().train(), {"input_ids": ids, "labels": ids})
    blocks = find_blocks(graph)
    assert (tuple(f"{layers}.{i}" for i in range(3))) in blocks.paths
    assert all(not source.startswith("replicated") for source in coverage(graph).values())
    assert all(node.source for node in graph.nodes if node.op == "aten.linear.default")

    model = build().train()
    real = torch.randint(0, 96, (2, 8))
    inputs = {"input_ids": real, "labels": real.masked_fill(torch.arange(8) % 3 == 0, -100)}
    graph_of_real = trace(model, inputs)
    assert [node.op for node in graph_of_real.nodes] == [node.op for node in graph.nodes]
    check_against_model(graph_of_real, model, inputs)
