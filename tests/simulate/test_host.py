"""Hosts that need time to launch: when a step waits for them, and when it does not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost import Profile
from autopar.cost.profile import Host, Provenance
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import Overlap, Sums, Timeline, simulate
from autopar.simulate.engine import Carried, Engine
from autopar.trace import trace
from models import gpt

SOURCE = Provenance("assumed", "test", "2026-01-01")


@cache
def planned() -> tuple[Graph, Plan]:
    config = gpt.Config(num_layers=2, hidden_size=64, num_heads=4, seq_len=32, vocab_size=64)
    graph = trace(gpt.build(config), gpt.example_inputs(config))
    mesh = autopar.Mesh("h100", devices_per_node=4)
    plan = template_of_graph(graph, mesh, dp=2, tp=2, microbatches=2, recompute="full")
    return divided_graph(graph, 2), plan


def with_host(*times_ns: int) -> Profile:
    return replace(load_profile("h100"), host=Host(*times_ns, provenance=SOURCE), _shared={})


def step(profile: Profile, sums: Sums = Sums.EARLY) -> Timeline:
    return simulate(*planned(), profile, Overlap(sums))


def test_a_host_that_takes_no_time_changes_nothing() -> None:
    assert step(with_host(0, 0, 0, 0)).step_time_ns == step(replace(load_profile("h100"), host=None)).step_time_ns


@settings(deadline=None, max_examples=25)
@given(st.tuples(*[st.integers(0, 10**6)] * 4), st.integers(0, 3), st.integers(1, 10**6))
def test_a_slower_host_is_never_faster_and_the_breakdown_adds_up(
    times: tuple[int, int, int, int], which: int, more: int
) -> None:
    slower = [*times]
    slower[which] += more
    fast, slow = step(with_host(*times)), step(with_host(*slower))
    assert fast.step_time_ns <= slow.step_time_ns
    parts = slow.breakdown
    spent = (
        parts.compute_ns + parts.recompute_ns + parts.exposed_communication_ns + parts.bubble_ns + parts.optimizer_ns
    )
    assert spent == slow.step_time_ns


def test_a_launch_bound_step_takes_what_the_host_needs() -> None:
    """With a millisecond a launch, the device waits for all but the last kernel."""
    slow, twice = step(with_host(10**6, 10**6, 10**6, 0)), step(with_host(2 * 10**6, 2 * 10**6, 2 * 10**6, 0))
    assert twice.step_time_ns == pytest.approx(2 * slow.step_time_ns, rel=0.02)


def test_the_host_runs_ahead_of_a_device_that_is_slower() -> None:
    engine = Engine({}, Carried())
    for _ in range(10):
        engine.compute("kernel", "forward", 100, issue_ns=40)
    assert engine.free_ns == 40 + 10 * 100, "only the first launch is waited for"


def test_a_collective_is_launched_after_what_precedes_it() -> None:
    engine = Engine({}, Carried())
    engine.compute("kernel", "forward", 10, issue_ns=100)
    engine.transmit("intra_node", "sum", "activation all_reduce", 50, issue_ns=30)
    assert engine.tasks[-1][2:4] == (130, 180)
    assert engine.free_ns == 130, "the device is idle until then because of the host, which counts as computing"


def test_gradients_that_are_summed_after_the_backward_pass_overlap_nothing() -> None:
    early, late = step(load_profile("h100")), step(load_profile("h100"), sums=Sums.LATE)
    assert late.comm_bytes == early.comm_bytes
    assert late.step_time_ns >= early.step_time_ns
    last_backward = max(event.end_ns for event in late.events if event.kind == "backward")
    sums = [event for event in late.events if event.kind.startswith("gradient")]
    assert sums
    assert min(event.start_ns for event in sums) >= last_backward


def test_gradients_in_buffers_of_their_own_are_not_waited_for() -> None:
    """A step of few microbatches ends when the last buckets are home; until then, none of them stands in the way."""
    config = gpt.Config(num_layers=2, hidden_size=512, num_heads=4, seq_len=32, vocab_size=64)
    graph = trace(gpt.build(config), gpt.example_inputs(config))
    plan = template_of_graph(graph, autopar.Mesh("h100", devices_per_node=4), dp=4, zero=1)
    h100 = load_profile("h100")
    links = {level: replace(link, bandwidth=1e9, bandwidth_by_ranks=()) for level, link in h100.links.items()}
    slow = replace(h100, links=links, collectives={}, interference={}, _shared={})
    steps = {sums: simulate(graph, plan, slow, Overlap(sums)) for sums in Sums}
    waits = {sums: steps[sums].exposed["gradient reduce_scatter"] for sums in Sums}
    backward = {
        sums: max(event.end_ns for event in timeline.events if event.kind == "backward")
        for sums, timeline in steps.items()
    }
    assert backward[Sums.LATE] == backward[Sums.BUFFERED] < backward[Sums.EARLY]
    assert steps[Sums.BUFFERED].comm_bytes == steps[Sums.EARLY].comm_bytes
    assert waits[Sums.BUFFERED] <= waits[Sums.EARLY] <= waits[Sums.LATE]
