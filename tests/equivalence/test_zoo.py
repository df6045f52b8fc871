"""One step of every model of the zoo in every kind of plan equals the model: loss, gradients, buffers, bytes.

The models of test_plans.py are proved there in these plans and more; here they have the plan that is searched for
devices slow enough for the search to split them. Each model in one of the plans in turn;
`pytest --whole tests/equivalence/test_zoo.py` runs all.
"""

from __future__ import annotations

from functools import cache

import pytest

from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.rewrites import graph_of
from tests.equivalence import planned, zoo
from tests.equivalence.step import Step, compare, step_alone, step_on_rank
from tests.rank_pool import pool
from tests.routed_bytes import bytes_of

CASES = [
    *((model, plan) for model in zoo.STEP_NAMES for plan in planned.STEP_PLANS),
    *(pytest.param(model, "searched", marks=pytest.mark.whole) for model in zoo.NAMES),  # test_plans.py has its share
    ("dlrm", "dp_microbatches"),  # bags, whose rules ask for the numbers at which those of the step begin
]


@cache
def single(model_name: str) -> Step:
    return step_alone(*zoo.build(model_name))


@pytest.mark.sampled(always=("hf_mixtral-searched", "dit-searched"))
@pytest.mark.ranks
@pytest.mark.parametrize(("model_name", "plan_name"), CASES)
def test_step_equals_model(model_name: str, plan_name: str) -> None:
    model, batch = zoo.build(model_name)
    program = planned.program(model_name, planned.plan(model_name, plan_name))
    traced = planned.graph(model_name)
    graph = graph_of(program.plan, traced)
    check_split(graph, program.plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    ranks = pool(program.plan.mesh.num_devices).run(step_on_rank, program.source, state, batch)
    sent = bytes_of(graph, program.plan, model, batch, traced)
    faults = compare(single(model_name), ranks, sent).faults()
    assert not faults, "\n".join(faults)


def check_split(graph: Graph, plan: Plan) -> None:
    """A plan that replicates everything would be equal trivially, so what each plan is for must have happened."""
    for position, axis in enumerate(plan.stage.axes):
        kinds = {name: storage.placement[position].kind for name, storage in plan.stage.storage.items()}
        if axis.name == "dp":
            assert {str(placement[position]) for placement in plan.stage.inputs.values()} == {"S(0)"}
        elif axis.name == "tp":
            assert any(kind == "S" and len(graph.tensors[name].shape) > 1 for name, kind in kinds.items())
    devices = plan.mesh.num_devices
    share = planned.work_share(graph, plan)
    most = 0.55 if plan.stage.forks else 1.15 / devices  # three branches on four ranks, say
    assert share <= most, f"a rank of {devices} computes {share:.0%} of the matrix products"
