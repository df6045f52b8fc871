"""Programs with branches compute what the model does: loss, gradients, buffers, weights after steps, and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.simulate import traffic
from tests.branches.cases import case, plan
from tests.branches.jobs import run_once
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool

CASES = {
    "towers on two ranks": ("two_towers", 1, 2, (0, 1), 0),
    "towers, sharded parameters": ("two_towers", 2, 2, (0, 1), 1),
    "towers on two of four": ("two_towers", 1, 4, (3, 1), 0),
    "layers on one rank, the first operator without gradient": ("scaled", 1, 2, (0,), 0),
    "modules on two ranks": ("inception", 1, 2, (0, 1), 0),
    "modules beside data parallelism": ("inception", 2, 2, (0, 1), 0),
    "modules on four ranks": ("inception", 1, 4, (2, 0, 3, 1), 0),
}


@pytest.mark.sampled(
    only=(
        "towers, sharded parameters",
        "towers on two of four",
        "layers on one rank, the first operator without gradient",
        "modules on four ranks",
    )
)
@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_equals_the_model(name: str) -> None:
    model_name, dp, tp, coordinates, zero = CASES[name]
    model, batch, graph = case(model_name)
    own = plan(model_name, dp, tp, coordinates, zero)
    assert own.stage.forks
    program = autopar.parallelize(model, own.mesh, batch, plan=own)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    ranks = pool(dp * tp)
    results = ranks.run(run_rank, program.source, state, batch, ("sgd",))
    found = differences(run_single(model, batch, ("sgd",)), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    after = ranks.run(run_once, program.source, state, batch)
    assert [sent for sent, _ in after] == [traffic(graph, own, rank) for rank in range(dp * tp)]
    for buffer, value in _buffers_after_a_step(model, batch).items():
        for _, buffers in after:
            torch.testing.assert_close(buffers[buffer], value, rtol=1e-5, atol=1e-6)


def _buffers_after_a_step(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model(**batch)
    found = {name: value.clone() for name, value in model.named_buffers() if "running" in name}
    model.load_state_dict(state)
    return found
