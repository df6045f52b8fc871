"""Wherever a walk over plans ends, the program computes what the model does."""

from __future__ import annotations

import pytest

import autopar
from tests.equivalence import planned, zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool
from tests.soap.walks import walked

FOUR = autopar.Mesh("cpu", devices_per_node=4)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "seed"), [("gpt", 1), ("wide_resnet", 4)])
def test_a_walked_plan_equals_the_model(name: str, seed: int) -> None:
    model, batch = zoo.build(name)
    plan = walked(planned.graph(name), FOUR, 40, seed, dp=2, tp=2)
    program = autopar.parallelize(model, FOUR, batch, plan=plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(4).run(run_rank, program.source, state, batch, ("sgd", "adamw"))
    found = differences(run_single(model, batch, ("sgd", "adamw")), results[0])
    assert not found, "\n".join(found)
    sent = max((result[4] for result in results), key=lambda sent: sum(sent.values()))
    assert sent == {kind: size for kind, size in program.plan.predicted.comm_bytes.items() if size}
