"""Templates take models as they are."""

from __future__ import annotations

import pytest

import autopar
from autopar.ir.placement import I, R
from models import mlp


@pytest.mark.parametrize("choices", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "tp": 2}])
def test_frozen_parameters_are_stored_whole_without_a_gradient(choices: dict[str, int]) -> None:
    """The templates ask for I; a parameter without gradient offers R, which is the same there."""
    config = mlp.Config()
    model, batch = mlp.build(config), mlp.example_inputs(config)
    model.layers[0].requires_grad_(False)
    mesh = autopar.Mesh("h100", devices_per_node=choices.get("dp", 1) * choices.get("tp", 1))
    plan = autopar.template_plan(model, mesh, batch, **choices)
    assert I not in plan.storage["layers.0.weight"].placement
    if choices == {"dp": 2}:
        assert plan.storage["layers.0.weight"].placement == (R,)
        assert plan.storage["layers.1.weight"].placement == (I,)
    assert "requires_grad=False" in autopar.parallelize(model, mesh, batch, plan=plan).source
