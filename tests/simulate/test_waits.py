"""Ranks that wait for each other where a collective stops them: how long, since when, and what does not stop them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.cost import Profile
from autopar.cost.profile import Provenance, Waits
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import simulate
from autopar.simulate.engine import Carried, Engine
from autopar.trace import trace
from models import gpt

SOURCE = Provenance("assumed", "test", "2026-11-23")
AS_LONG = Waits("intra_node", 2, ((0, 0), (10**12, 10**12)), SOURCE)  # as they have computed
MILLISECOND = 10**6


def waiting(points: tuple[tuple[int, int], ...]) -> Profile:
    waits = Waits("intra_node", 2, points, SOURCE)
    return replace(load_profile("cpu"), waits={("intra_node", 2): waits}, _shared={})


@cache
def planned(microbatches: int = 1, **ways: int) -> tuple[Graph, Plan]:
    config = gpt.Config(num_layers=2, hidden_size=64, num_heads=4, seq_len=32, vocab_size=64, batch_size=8)
    graph = trace(gpt.build(config), gpt.example_inputs(config))
    plan = template_of_graph(
        graph, autopar.Mesh("cpu", devices_per_node=2), microbatches=microbatches, memory_limit=10**13, **ways
    )
    if microbatches == 1:
        return graph, plan
    return divided_graph(graph, microbatches), plan


def test_ranks_wait_for_what_they_have_computed_since_they_met() -> None:
    engine = Engine({}, Carried(unmet_ns=7))
    engine.compute("kernel", "forward", 100)
    first = engine.transmit("intra_node", "sum", "activation all_reduce", 50, [engine.last], waits=AS_LONG)
    assert engine.tasks[first][2:4] == (207, 257), "100 here and 7 in the pass before"
    engine.compute("kernel", "forward", 10, [first])
    second = engine.transmit("intra_node", "sum", "activation all_reduce", 50, [engine.last], waits=AS_LONG)
    assert engine.tasks[second][2:4] == (277, 327), "10 since; while compute is idle it does not get unequal"
    assert engine.has_met
    assert engine.unmet_ns == 0


def test_a_collective_beside_compute_stops_nobody() -> None:
    engine = Engine({}, Carried(unmet_ns=7))
    engine.compute("kernel", "forward", 100)
    engine.transmit("intra_node", "sum", "gradient all_reduce", 50, [engine.last])
    assert engine.tasks[-1][2:4] == (100, 150)
    assert not engine.has_met
    assert engine.unmet_ns == 100


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_takes_longer_by_the_waits_of_its_stopping_collectives(microbatches: int) -> None:
    graph, plan = planned(microbatches, tp=2)
    before = simulate(graph, plan, load_profile("cpu"))
    after = simulate(graph, plan, waiting(((0, MILLISECOND),)))
    sent = [event for event in before.events if event.kind.split()[0] in ("activation", "operator")]
    assert len(sent) >= 8 * microbatches
    assert after.step_time_ns - before.step_time_ns == len(sent) * MILLISECOND
    assert after.breakdown.compute_ns == before.breakdown.compute_ns
    assert after.comm_bytes == before.comm_bytes


def test_gradients_that_are_summed_beside_compute_are_not_waited_for() -> None:
    graph, plan = planned(dp=2)
    before = simulate(graph, plan, load_profile("cpu"))
    after = simulate(graph, plan, waiting(((0, MILLISECOND),)))
    assert any(event.kind.startswith("gradient") for event in before.events)
    stopping = sum(event.kind.startswith("operator") for event in before.events)
    assert after.step_time_ns - before.step_time_ns == stopping * MILLISECOND


def test_what_is_computed_in_one_pass_counts_in_the_next() -> None:
    """All of the step's computation but the optimizer's lies between two meetings, or before the first."""
    graph, plan = planned(2, tp=2)
    before, after = simulate(graph, plan, load_profile("cpu")), simulate(graph, plan, waiting(AS_LONG.points))
    waited = after.step_time_ns - before.step_time_ns
    tail = after.events[-1].start_ns - max(e.end_ns for e in after.events if e.kind.split()[0] == "activation")
    assert 0 <= before.breakdown.compute_ns - waited <= tail + 1
