"""A decoder with its cache computes what it computes without one, or is refused by what keeps it from that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.emit import emit
from autopar.errors import InfeasibleError, MeshError, PlanError, TraceError
from autopar.ops.caches import write_rows
from autopar.runtime.lowering.caches import write_rows as written_in_place
from autopar.serving.cached import CachedDecoder
from autopar.serving.held import held_against_decoder
from autopar.serving.planning import ServedLayout, planned_steps, traced_steps
from autopar.serving.shapes import cached_shapes
from autopar.trace import trace
from tests.serving.decoders import LENGTH, SIZES, decoder

MESH = autopar.Mesh("cpu", devices_per_node=4)


@pytest.mark.parametrize("name", ["llama", "qwen3_mixed", "mistral"])
def test_chunks_and_single_tokens_make_what_the_whole_sequence_does(name: str) -> None:
    """Windows of five keys among them, which are left long before the end."""
    assert held_against_decoder(decoder(name), LENGTH) == "yes"


def test_attention_that_adds_its_mask_gets_one_of_numbers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")).eval()
    assert model.config._attn_implementation == "eager"
    assert held_against_decoder(model, LENGTH) == "yes"


def test_a_decoder_that_depends_on_more_than_its_cache_is_refused() -> None:
    """Here on how many tokens are given at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Counting(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
                    past_key_values: Any = None, use_cache: Any = None, logits_to_keep: Any = 0) -> Any:  # fmt: skip
            out = super().forward(
                input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache,
                logits_to_keep=logits_to_keep,
            )  # fmt: skip
            out.logits = out.logits * input_ids.shape[1]
            return out

    with pytest.raises(TraceError, match="depend on more than keys, values, masks and positions"):
        held_against_decoder(Counting(LlamaConfig(**SIZES)).eval(), LENGTH)


def test_the_model_stays_as_it_is() -> None:
    model = decoder("llama")
    names, trained = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    cached = CachedDecoder(model, 2, 8)
    assert list(model.state_dict()) == names
    assert [name for name, _ in cached.named_parameters()] == [name for name, _ in model.named_parameters()]
    program = autopar.serve(
        model.train(), autopar.Mesh("cpu", devices_per_node=1), max_batch=2, max_length=8, check=False
    )
    assert model.training and [p.requires_grad for p in model.parameters()] == trained
    assert program.max_batch == 2 and not program.decode.training
    model.eval()


def test_what_is_cached_is_found_where_configurations_do_not_say_it() -> None:
    assert cached_shapes(decoder("gpt2")) == ((4, 8, 8),) * 2
    assert cached_shapes(decoder("latent")) == ((1, 16, 8),) * 2  # latents, and keys of positions
    assert cached_shapes(decoder("mixtral")) == ((2, 8, 8),) * 2


def test_a_model_that_caches_other_keys_than_it_says_is_refused() -> None:
    """One that cannot run without data, of one head where its configuration tells two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Told(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
                    past_key_values: Any = None, use_cache: Any = None, logits_to_keep: Any = 0) -> Any:  # fmt: skip
            int(input_ids[0, 0])  # which no tensor without data has
            rows = torch.zeros(input_ids.shape[0], 1, input_ids.shape[1], 8, dtype=torch.float64)
            return past_key_values.update(rows, rows, 0)

    model = Told(LlamaConfig(**SIZES)).eval()
    assert cached_shapes(model) == ((2, 8, 8),) * 2
    with pytest.raises(PlanError, match="expected layer 0 to cache 2 heads of 8 elements, found 1 of 8"):
        held_against_decoder(model, LENGTH)


def test_layers_that_hide_keys_by_themselves_are_refused_before_they_run() -> None:
    """Also where nothing is held against the model; its windows are wider than what would be held."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    model = GPTNeoForCausalLM(GPTNeoConfig(attention_types=[[["global", "local"], 1]], window_size=256, **sizes))
    with pytest.raises(PlanError, match="full or sliding attention, found local"):
        autopar.serve(model, MESH, max_batch=1, max_length=64, check=False)


def test_layers_that_cache_nothing_or_twice_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Shared(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
                    past_key_values: Any = None, use_cache: Any = None, logits_to_keep: Any = 0) -> Any:  # fmt: skip
            rows = torch.zeros(1, 2, 2, 8, device="meta")
            return [past_key_values.update(rows, rows, 0) for _ in range(2)]

    with pytest.raises(PlanError, match="once in each of 2 layers, found layers 0 2 times, 1 0 times"):
        cached_shapes(Shared(LlamaConfig(**SIZES)))


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_go_where_they_belong_and_others_stay(steps: int) -> None:
    cache, rows = torch.randn(2, 3, 8, 4), torch.randn(2, 3, steps, 4)
    positions = torch.tensor([[5, 6, 7], [2, 0, 4]])[:, :steps]
    is_written = torch.tensor([[True, False, True], [False, True, True]])[:, :steps]
    expected = write_rows(cache, positions, rows, is_written)
    found = cache.clone()
    assert written_in_place(found, positions, rows, is_written) is found
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found, cache)


class Kept(nn.Module):
    """A cache of two sequences, that forward reads before or after it writes."""

    def __init__(self, reads_before: bool) -> None:
        super().__init__()
        self.reads_before = reads_before
        self.register_buffer("rows", torch.zeros(2, 2, 8, 2), persistent=False)

    rows: torch.Tensor

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = self.rows.sum() if self.reads_before else 0.0
        self.rows.copy_(write_rows(self.rows, positions, x, positions >= 0))
        return self.rows.sum() + before


def test_rows_are_written_in_place_only_where_nothing_reads_what_was_there() -> None:
    inputs = {"positions": torch.tensor([[1], [2]]), "x": torch.randn(2, 2, 1, 2)}
    assert set(trace(Kept(False), inputs, mode="inference").kept_in_parts) == {"rows"}
    with pytest.raises(TraceError, match=r"write_rows of a buffer that nothing else reads.*written in place"):
        trace(Kept(True), inputs, mode="inference")


def test_layouts_that_do_not_go_with_the_model_are_refused_with_the_remedy() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = decoder("llama")
    options: dict[str, Any] = {"max_batch": 4, "max_length": 16, "check": False}
    sizes = SIZES | {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 48}
    odd = LlamaForCausalLM(LlamaConfig(**sizes))
    with pytest.raises(PlanError, match=r"divides 4 key/value heads.*tp=6; take tp=4"):
        autopar.serve(odd, autopar.Mesh("cpu", devices_per_node=6), tp=6, **options)
    with pytest.raises(MeshError, match="expected dp × tp × pp = 4 devices"):
        autopar.serve(model, MESH, dp=1, tp=1, pp=1, **options)
    with pytest.raises(PlanError, match="batch that dp=4 divides, found 3"):
        autopar.serve(model, MESH, dp=4, **options | {"max_batch": 3})
    with pytest.raises(PlanError, match="prompt_lengths from 2 to max_length=16"):
        autopar.serve(model, MESH, prompt_lengths=[32], **options)
    with pytest.raises(InfeasibleError):
        autopar.serve(model, MESH, dp=1, tp=2, pp=2, memory_limit=10_000, **options)


def test_models_without_such_a_cache_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"expected a causal decoder of transformers.*Linear"):
        autopar.serve(nn.Linear(2, 2), MESH, max_batch=1, max_length=8)
    model = decoder("llama")
    kept = getattr(model.config, "layer_types", None)
    model.config.layer_types = ["full_attention", "linear_attention"]
    try:
        with pytest.raises(PlanError, match="full or sliding attention, found linear_attention"):
            autopar.serve(model, MESH, max_batch=1, max_length=8)
    finally:
        model.config.layer_types = kept


def test_buffers_that_forward_writes_with_a_gradient_are_put_back() -> None:
    """Holding an inference model against its graph once failed on these."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("last", torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last.copy_(self.linear(x))
            return self.last * 2

    model = Remembering()
    plan = autopar.template_plan(
        model, autopar.Mesh("cpu", devices_per_node=1), {"x": torch.randn(2, 4)}, mode="inference"
    )
    assert plan.checked_against_eager == "yes"
    assert not model.last.requires_grad and not model.last.any()


def test_a_decode_step_reads_each_head_of_the_cache_once() -> None:
    """Four query heads share two of keys: on one rank, on two that cache one each, on four that cache both."""
    traced = traced_steps(decoder("llama"), 4, 16, (), check=False)
    for tp, heads in ((1, ""), (2, ""), (4, "heads=(4, 2, (tp,))")):
        mesh = autopar.Mesh("cpu", devices_per_node=tp)
        steps = planned_steps(traced, decoder("llama"), mesh, ServedLayout(tp=tp))
        source = emit(*steps.decode)
        assert "aten.expand" not in source.split("class LlamaAttention")[1].split("class ")[0]
        assert "rt.grouped_attention(" in source and heads in source
