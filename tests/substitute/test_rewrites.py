"""Programs of graphs that random substitutions have made compute what the models compute."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.emit import emit
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.program import PlannedProgram, model_state
from autopar.substitute import load_rules, substituted
from autopar.substitute.lifting import lifted
from autopar.trace import find_blocks, trace
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
    budget = autopar.SearchBudget(seconds=4.0, stages=False, proposals=0)
    program = autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=2), batch, search=budget)
    state: dict[str, Any] = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(2).run(run_rank, program.source, state, batch, ("sgd",))
    assert differences(alone(name), results[0]) == []


def test_batch_norms_are_folded_into_convolutions_for_inference() -> None:
    torch.manual_seed(0)
    model, batch = zoo.build("wide_resnet")
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    model.eval()
    graph = trace(model, batch, mode="inference")
    blocks, rules, profile = find_blocks(graph), load_rules(), load_profile("h100")
    found = substituted(graph, blocks.paths, blocks.node_representative, rules, profile, trains=False, seconds=20.0)
    before, after = (sum("batch_norm" in node.op for node in one.nodes) for one in (graph, found.best.graph))
    assert after <= 1 < before  # what a profile cannot tell apart may stay
    plan = template_of_graph(found.best.graph, autopar.Mesh("cpu", devices_per_node=1), mode="inference")
    rank = PlannedProgram(graph, plan, emit(found.best.graph, plan), model_state(model)).build()
    with torch.no_grad():
        torch.testing.assert_close(rank(**batch), model(**batch), rtol=1e-5, atol=1e-6)
