"""What optimizers that look at whole tensors keep, gather and compute, in a plan's memory and time."""

from __future__ import annotations

import pytest

import autopar
from autopar.cost.memory import GATHERED_BYTES, gathered_bytes, most_workspace, optimizer_state_bytes
from autopar.cost.memory import optimizer_workspace_bytes as workspace
from autopar.cost.updates import update_bytes
from autopar.ir.mesh import make_axes
from autopar.ir.placement import I, S
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.runtime.optimizers.memory import RESIDENT_BYTES
from autopar.trace import trace
from models import mlp


def test_state_by_shape() -> None:
    assert optimizer_state_bytes("muon", (10, 20)) == 4 * 200
    assert optimizer_state_bytes("muon", (20,)) == 4 * 40
    assert optimizer_state_bytes("shampoo", (10, 20)) == 4 * (200 + 2 * (100 + 400))
    assert optimizer_state_bytes("shampoo", (5, 20), whole=(10, 20)) == 4 * (100 + 100 + 400)
    assert optimizer_state_bytes("shampoo", (20,)) == 4 * 20


def test_what_is_gathered_stands_beside_temporaries() -> None:
    assert gathered_bytes("adamw", (5, 20), (10, 20)) == gathered_bytes("muon", (10, 20), (10, 20)) == 0
    assert gathered_bytes("muon", (5, 20), (10, 20)) == 4 * 200 * 3
    assert workspace("muon", (5, 20), whole=(10, 20)) == (4 * 200 * (3 + 4), 4 * 200 * 3)
    assert GATHERED_BYTES == RESIDENT_BYTES


def test_gathered_tensors_stay_up_to_a_limit() -> None:
    size = GATHERED_BYTES // 4
    assert most_workspace([(size, size)] * 3, is_elementwise=False) == 3 * size
    assert most_workspace([(size, size)] * 9, is_elementwise=False) == 5 * size
    assert most_workspace([(size, size)] * 9, is_elementwise=True) == 2 * size


def test_gathers_and_products_take_time() -> None:
    profile, axes, shape = load_profile("h100"), make_axes(("dp",), (8,)), (4096, 4096)
    moved = {
        (name, cut): update_bytes(name, shape, "float32", placement, axes, 8, profile)
        for name in ("adamw", "lamb", "muon", "shampoo")
        for cut, placement in (("whole", (I,)), ("cut", (S(0),)))
    }
    assert moved["adamw", "cut"] * 8 == moved["adamw", "whole"] == moved["lamb", "whole"]
    assert moved["lamb", "cut"] > 2 * moved["adamw", "cut"]
    assert moved["adamw", "whole"] < moved["muon", "whole"] < moved["shampoo", "whole"]


@pytest.mark.parametrize("name", ["muon", "shampoo", "lamb"])
def test_a_plan_pays_for_its_optimizer(name: str) -> None:
    graph, mesh = trace(mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())), autopar.Mesh("h100", 1, 2)
    plans = {n: template_of_graph(graph, mesh, dp=2, zero=3, optimizer=n).predicted for n in (name, "sgd")}
    assert plans[name].memory["optimizer"] > plans["sgd"].memory.get("optimizer", 0)
    assert plans[name].breakdown.optimizer_ns > plans["sgd"].breakdown.optimizer_ns
