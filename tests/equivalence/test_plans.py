"""Every plan computes what the model computes: loss, each gradient, clipped norm, weights after optimizer steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import autopar
from tests.equivalence import zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp_sequence": {"tp": 2, "sequence_parallel": True},
    "dp_tp": {"dp": 2, "tp": 2},
    "zero3_tp": {"dp": 2, "tp": 2, "zero": 3},
    "dp_microbatches": {"dp": 2, "microbatches": 2},
    "zero2_microbatches": {"dp": 2, "zero": 2, "microbatches": 2},
    "zero3_microbatches": {"dp": 2, "zero": 3, "microbatches": 2},
    "tp_microbatches": {"tp": 2, "microbatches": 4},
    "searched": {},
}
OPTIMIZERS = ("sgd", "adamw")


@cache
def single(name: str) -> Any:
    model, batch = zoo.build(name)
    return run_single(model, batch, OPTIMIZERS)


@pytest.mark.ranks
@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("model_name", zoo.NAMES)
def test_plan_equals_model(model_name: str, plan_name: str) -> None:
    model, batch = zoo.build(model_name)
    choices = PLANS[plan_name]
    world = choices.get("dp", 1) * choices.get("tp", 1) if choices else 4
    mesh = autopar.Mesh("cpu", devices_per_node=world)
    plan = autopar.template_plan(model, mesh, batch, **choices) if choices else None
    program = autopar.parallelize(model, mesh, batch, plan=plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(world).run(run_rank, program.source, state, batch, OPTIMIZERS)
    found = differences(single(model_name), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    predicted = {kind: size for kind, size in program.plan.predicted.comm_bytes.items() if size}
    assert results[0][4] == predicted
