"""Templates take models as they are."""

from __future__ import annotations

from types import ModuleType

import pytest

import autopar
from autopar.ir.placement import I, R, S
from autopar.trace import trace
from models import gpt, lstm, mlp, wide_resnet


@pytest.mark.parametrize("choices", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "tp": 2}])
def test_frozen_parameters_are_stored_whole_without_a_gradient(choices: dict[str, int]) -> None:
    """The templates ask for I; a parameter without gradient offers R, which is the same there."""
    config = mlp.Config()
    model, batch = mlp.build(config), mlp.example_inputs(config)
    model.layers[0].requires_grad_(False)
    mesh = autopar.Mesh("h100", devices_per_node=choices.get("dp", 1) * choices.get("tp", 1))
    plan = autopar.template_plan(model, mesh, batch, **choices)
    assert I not in plan.stage.storage["layers.0.weight"].placement
    if choices == {"dp": 2}:
        assert plan.stage.storage["layers.0.weight"].placement == (R,)
        assert plan.stage.storage["layers.1.weight"].placement == (I,)
    assert "requires_grad=False" in autopar.parallelize(model, mesh, batch, plan=plan).source


@pytest.mark.parametrize("module", [gpt, lstm, wide_resnet])
def test_data_parallel_ranks_compute_their_samples_alone(module: ModuleType) -> None:
    """Gathering a tiny batch is cheaper, and was chosen: the first matrix products, or batch norm, ran on all of it."""
    config = module.Config()
    model, batch = module.build(config), module.example_inputs(config)
    graph = trace(model, batch)
    plan = autopar.template_plan(model, autopar.Mesh("h100", devices_per_node=2), batch, dp=2)
    made = {*batch}
    for node in graph.nodes:
        if made & {*node.operands}:
            made |= {*node.results}
            assert plan.stage.nodes[node.name].results[0][0].kind in "SP", node
            if "batch_norm" in node.op:
                assert plan.stage.nodes[node.name].operands[0] == (S(0),)
    assert graph.loss in made
