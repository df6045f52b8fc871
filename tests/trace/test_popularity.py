"""How often a model's routers choose each expert, measured on its data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.errors import PlanError

pytestmark = pytest.mark.sweep

transformers = pytest.importorskip("transformers")


class Config:
    """Of this module, as the command line builds models."""


def build(config: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(  # type: ignore[no-any-return]
        transformers.MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2,
        )
    )  # fmt: skip


def example_inputs(config: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (3, 8))
    return {"input_ids": ids, "labels": ids}


def eager_counts(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, list[int]]:
    """By the router's logits, which transformers returns."""
    found = torch.zeros(2, 5, dtype=torch.int64)
    for batch in batches:
        with torch.no_grad():
            logits = model(**batch, output_router_logits=True).router_logits
        for layer, own in enumerate(logits):
            found[layer] += own.topk(2, -1).indices.reshape(-1).bincount(minlength=5)
    return {f"model.layers.{layer}.mlp.experts": own.tolist() for layer, own in enumerate(found)}


def test_counts_are_the_models(tmp_path: Any) -> None:
    model, batches = build(None), [example_inputs(None) for _ in range(2)]
    batches.append({name: x[:1] for name, x in batches[0].items()})  # a shorter one
    measured = autopar.Routing.measured(model, batches)
    assert measured.layers == {path: tuple(own) for path, own in eager_counts(model, batches).items()}
    measured.save(tmp_path / "routing.json")
    assert autopar.Routing.histogram(tmp_path / "routing.json") == measured
    plan = autopar.template_plan(model, autopar.Mesh("h100", devices_per_node=2), batches[0], dp=2, routing=measured)
    assert autopar.Plan.from_json(plan.to_json()).routing == measured


def test_the_command(tmp_path: Any, capsys: Any) -> None:
    target = tmp_path / "routing.json"
    assert main(["profile", "--routing", f"{__name__}:Config", "--batches", "3", "-o", str(target)]) == 0
    assert "hottest" in capsys.readouterr().out
    counts = autopar.Routing.read(target).layers
    assert [sum(own) for own in counts.values()] == [3 * 24 * 2] * 2
    assert main(["profile", "--routing", f"{__name__}:Config"]) == 2


def test_what_has_no_choices_is_refused() -> None:
    with pytest.raises(PlanError, match="no choices"):
        autopar.Routing.measured(nn.Linear(2, 2), (torch.zeros(1, 2),))
    with torch.device("meta"), pytest.raises(PlanError, match="meta device"):
        autopar.Routing.measured(build(None), example_inputs(None))
