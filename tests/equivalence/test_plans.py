"""Every plan computes what the model computes: loss, each gradient, clipped norm, weights after optimizer steps.

Each plan of a model in turn; `pytest --whole tests/equivalence/test_plans.py` runs each plan of each model.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.equivalence import planned, zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool

OPTIMIZERS = ("sgd", "adamw")


@cache
def single(name: str) -> Any:
    model, batch = zoo.build(name)
    return run_single(model, batch, OPTIMIZERS)


@pytest.mark.sampled(always=("gpt-searched", "moe-searched"))
@pytest.mark.ranks
@pytest.mark.parametrize("plan_name", planned.PLANS)
@pytest.mark.parametrize("model_name", zoo.NAMES)
def test_plan_equals_model(model_name: str, plan_name: str) -> None:
    model, batch = zoo.build(model_name)
    plan = planned.plan(model_name, plan_name)
    program = planned.program(model_name, plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(plan.mesh.num_devices).run(run_rank, program.source, state, batch, OPTIMIZERS)
    found = differences(single(model_name), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    predicted = {kind: size for kind, size in program.plan.predicted.comm_bytes.items() if size}
    assert max((result[4] for result in results), key=lambda sent: sum(sent.values())) == predicted, (
        "of the busiest rank"
    )
