"""Programs of several stages compute what the model computes, and every rank sends the bytes that were predicted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import autopar
from autopar.ir.plan import Plan
from autopar.microbatch import one_microbatch, one_microbatch_plan, types_of
from autopar.simulate import traffic_by_submesh
from tests.equivalence import zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.equivalence.planned import graph
from tests.rank_pool import pool

PLANS: dict[str, dict[str, Any]] = {
    "gpipe": {"pp": 2, "microbatches": 4, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
    "pp_dp": {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b"},
    "pp_tp": {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "1f1b"},
    "pp_zero1": {"pp": 2, "dp": 2, "microbatches": 2, "zero": 1, "schedule": "gpipe"},
    "pp_recompute": {"pp": 2, "microbatches": 4, "recompute": "full"},
    "pp_zero2": {"pp": 2, "dp": 2, "microbatches": 2, "zero": 2, "schedule": "1f1b"},
    "pp_zero3": {"pp": 2, "dp": 2, "microbatches": 2, "zero": 3, "schedule": "1f1b"},
}
MODELS = ("gpt", "hf_gpt2", "hf_llama", "moe")


@cache
def single(name: str) -> Any:
    model, batch = zoo.build(name)
    return run_single(model, batch, ("adamw",))


def planned(model_name: str, plan_name: str) -> Plan:
    model, batch = zoo.build(model_name)
    choices = PLANS[plan_name]
    world = choices["pp"] * choices.get("dp", 1) * choices.get("tp", 1)
    return autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=world), batch, **choices)


@pytest.mark.ranks
@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("model_name", MODELS)
def test_pipeline_equals_model(model_name: str, plan_name: str) -> None:
    model, batch = zoo.build(model_name)
    plan = planned(model_name, plan_name)
    program = autopar.parallelize(model, plan.mesh, batch, plan=plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(plan.mesh.num_devices).run(run_rank, program.source, state, batch, ("adamw",))
    found = differences(single(model_name), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    assert len({norm.item() for _, _, norm, *_ in results}) == 1
    for ranks, predicted in bytes_by_submesh(program.plan, model_name):
        for rank in ranks:
            assert results[rank][4] == predicted, f"rank {rank}"


def bytes_by_submesh(plan: Plan, model_name: str) -> list[tuple[range, dict[str, int]]]:
    """What a rank of each submesh hands to each collective."""
    whole = graph(model_name)
    part = one_microbatch(whole, types_of(plan), plan.microbatches) if plan.microbatches > 1 else whole
    timeline: Any = plan.timeline()
    sent = traffic_by_submesh(whole, plan, part, one_microbatch_plan(plan), timeline)
    return [(lane.ranks, counts) for lane, counts in zip(timeline.lanes, sent, strict=True)]
