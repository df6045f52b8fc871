"""Programs of graphs that random substitutions have made compute what the models compute."""

from __future__ import annotations

import random
from typing import Any

import pytest

import autopar
from autopar.substitute.lifting import lifted
from tests.equivalence import planned, zoo
from tests.equivalence.harness import differences, run_rank
from tests.rank_pool import pool
from tests.substitute.rewrites import alone, faults, graph_after, random_rewrite


@pytest.mark.parametrize(("name", "seed"), [("gpt", 0), ("llama", 1), ("hf_gpt2", 2), ("unet", 3)])
def test_random_substitutions_change_nothing(name: str, seed: int) -> None:
    after, applied = random_rewrite(lifted(planned.graph(name)), 12, random.Random(seed))
    assert len(applied) == 12
    assert faults(name, graph_after(after)) == []


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gpt", "hf_gpt2"])
def test_the_plan_found_jointly_equals_the_model_on_ranks(name: str) -> None:
    model, batch = zoo.build(name)
    budget = autopar.SearchBudget(seconds=4.0, stages=False, substitutions=True)
    program = autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=2), batch, search=budget)
    state: dict[str, Any] = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(2).run(run_rank, program.source, state, batch, ("sgd",))
    assert differences(alone(name), results[0]) == []
