"""Experts placed by how often they are chosen: the same loss, gradients, weights and state dict."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.plan import Plan
from autopar.substitute.placing import balanced_order
from tests.equivalence.harness import differences, run_rank, run_single
from tests.equivalence.round_trips import round_trip
from tests.rank_pool import pool

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks
COUNTS = {"model.layers.0.mlp": [90, 80, 70, 60, 5, 4, 3, 2], "model.layers.1.mlp": [1, 2, 1, 50, 1, 2, 60, 1]}
ROUTING = autopar.Routing.histogram(COUNTS)
SPLIT = (
    Constraint("*.experts.*", allow=("S(0)",), what="used"),
    Constraint("*.experts.*", allow=("S(0)",), what="stored"),
)
QUICK = autopar.SearchBudget(2.0, stages=False, substitutions=False, proposals=0)


@cache
def mixtral() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 8))
    return transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


@cache
def planned(devices: int) -> autopar.PlannedProgram:
    model, batch = mixtral()
    mesh = autopar.Mesh("h100", devices_per_node=devices)
    return autopar.parallelize(model, mesh, batch, routing=ROUTING, constraints=SPLIT, search=QUICK)


@pytest.mark.sampled(only=("2",))
@pytest.mark.parametrize("devices", [2, 4])
def test_placed_experts_compute_what_the_model_does(devices: int) -> None:
    model, batch = mixtral()
    program = planned(devices)
    placed = [step for step in program.plan.substitutions if step.rule == "place-experts"]
    assert [step.modules for step in placed] == [("model.layers.0.mlp.experts",), ("model.layers.1.mlp.experts",)]
    assert all(
        "by_load" in name for name in program.plan.parameters.values() if ".experts." in name and "pos" not in name
    )
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    ranks = pool(devices).run(run_rank, program.source, state, batch, ("sgd", "adamw"))
    assert differences(run_single(model, batch, ("sgd", "adamw")), ranks[0]) == []
    for rank, (whole, shards) in enumerate(pool(devices).run(round_trip, program.source, state)):
        assert whole.keys() == state.keys()
        assert all(torch.equal(whole[name], state[name]) for name in state)
        for name, shard in shards.items():
            own = state[name.removesuffix("_by_load")]
            order = balanced_order(COUNTS[name.partition(".experts")[0]])
            held = order[rank * 8 // devices :][: 8 // devices]
            assert torch.equal(shard, own[list(held)])


def test_a_plan_file_places_again_and_wrong_orders_are_refused() -> None:
    model, batch = mixtral()
    program = planned(2)
    again = autopar.parallelize(model, program.plan.mesh, batch, plan=Plan.from_json(program.plan.to_json()))
    assert again.source == program.source
    assert "place-experts" in str(program.plan)
    data = json.loads(program.plan.to_json())
    for order in ("0 1 2 3 4 5 6", "0 0 1 2 3 4 5 6", "x", ""):
        data["substitutions"][0]["binding"]["order"] = order
        with pytest.raises(PlanError, match="order of the experts"):
            autopar.verify(Plan.from_json(json.dumps(data)), model, batch)


def test_loads_are_those_of_the_placed_experts() -> None:
    model, batch = mixtral()
    plan = planned(4).plan
    skewed = autopar.Routing.histogram([90, 80, 1, 1, 1, 1, 1, 1])
    under = autopar.parallelize(model, plan.mesh, batch, plan=plan, routing=skewed).plan
    assert under.predicted.step_time_ns >= plan.predicted.step_time_ns
    assert under.substitutions == plan.substitutions


@pytest.mark.parametrize("count", [2, 4, 6, 8, 16, 60, 128])
def test_slices_are_chosen_as_often(count: int) -> None:
    """LPT's bound of 4/3 of the mean, where no expert alone is above it, at any number of equal slices."""
    generator = torch.Generator().manual_seed(count)
    counts = (torch.rand(count, generator=generator) + 0.5).tolist()
    order = balanced_order(counts)
    assert sorted(order) == list(range(count))
    for ranks in (n for n in range(2, count) if count % n == 0 and count // n > 1):
        sums = torch.tensor([counts[expert] for expert in order]).view(ranks, -1).sum(1)
        plain = torch.tensor(sorted(counts, reverse=True)).view(ranks, -1).sum(1)
        assert sums.max() <= 4 / 3 * sums.mean() and sums.max() <= plain.max()
