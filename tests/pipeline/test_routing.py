"""Plans under a routing: time in the mean and at the 99th percentile, files, and a plan under another routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.ir.constraint import Constraint

transformers = pytest.importorskip("transformers")
QUICK = autopar.SearchBudget(2.0, stages=False, substitutions=False, proposals=0)
BY_EXPERTS = (Constraint("*.experts.*", allow=("S(0)",), what="used"),)


def mixtral(layers: int = 1) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=512, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    ids = torch.zeros(8, 512, dtype=torch.int64, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def planned(routing: autopar.Routing | None, **others: Any) -> autopar.Plan:
    model, inputs = mixtral()
    mesh = autopar.Mesh("h100", devices_per_node=4)
    given = {"constraints": BY_EXPERTS, "search": QUICK, "routing": routing, **others}
    return autopar.parallelize(model, mesh, inputs, **given).plan


def test_skew_costs_time_and_a_quantile_more() -> None:
    balanced, skewed = planned(None), planned(autopar.Routing.power_law(2.0))
    for plan in (balanced, skewed):
        told = plan.predicted
        assert told.step_time_p99_ns is not None and told.step_time_p99_ns >= told.step_time_ns
        again = autopar.Plan.from_json(plan.to_json())
        assert again == plan and again.to_json() == plan.to_json()
        compiled = plan.compiled().predicted
        assert compiled.step_time_p99_ns is not None and compiled.step_time_p99_ns >= compiled.step_time_ns
    assert skewed.predicted.step_time_ns > balanced.predicted.step_time_ns
    assert skewed.fingerprint == balanced.fingerprint  # the same model
    assert "a power law of exponent 2" in str(skewed) and "99th percentile of routings" in str(skewed)
    assert "routing: None | a power law of exponent 2" in balanced.diff(skewed)
    other = planned(autopar.Routing.power_law(2.0), plan=balanced)
    assert other.predicted.step_time_ns > balanced.predicted.step_time_ns
    assert planned(None, plan=other).predicted == other.predicted


def test_models_without_experts() -> None:
    model, inputs = nn.Linear(8, 8), (torch.zeros(4, 8),)
    mesh = autopar.Mesh("h100", devices_per_node=2)
    with pytest.raises(PlanError, match="leave routing out"):
        autopar.template_plan(
            model, mesh, inputs, dp=2, routing=autopar.Routing.power_law(1), loss_fn=lambda out: out.sum()
        )
    plan = autopar.template_plan(
        model, mesh, inputs, dp=2, routing=autopar.Routing.balanced(), loss_fn=lambda out: out.sum()
    )
    assert plan.predicted.step_time_p99_ns is None
    with pytest.raises(PlanError, match=r"autopar.Routing"):
        autopar.template_plan(model, mesh, inputs, dp=2, routing="balanced")  # type: ignore[arg-type]


def test_histograms_fit_the_model() -> None:
    with pytest.raises(PlanError, match="8 experts"):
        planned(autopar.Routing.histogram([1, 2, 3]))
    with pytest.raises(PlanError, match=r"model\.layers\.7"):
        planned(autopar.Routing.histogram({"model.layers.7.mlp": [1] * 8}))
    hot = autopar.Routing.histogram({"model.layers.0": [9, 9, 1, 1, 1, 1, 1, 1]})
    unplaced = planned(hot, plan=planned(None))
    assert planned(hot).predicted.step_time_ns < unplaced.predicted.step_time_ns  # both hot experts on the first rank
