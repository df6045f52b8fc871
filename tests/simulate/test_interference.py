"""Computation and collectives slow each other, each link level by its own measure."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.cost import Profile
from autopar.cost.profile import LEVELS, Interference
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import Overlap, Sums, Timeline, simulate
from autopar.simulate.engine import Carried, Engine
from autopar.trace import trace
from models import gpt


def test_compute_is_slowed_by_the_level_of_what_is_in_flight() -> None:
    """100 ns beside a collective inside the node, then 100 beside one across, then 100 alone."""
    engine = Engine({"intra_node": 2.0, "inter_node": 4.0}, Carried())
    engine.transmit("intra_node", "gather", "parameter all_gather", 200)
    engine.transmit("inter_node", "sum", "gradient all_reduce", 400, after=[1])
    engine.compute("kernel", "forward", 300)
    assert engine.free_ns == 200 + 400 + 100


def test_a_level_that_slows_nothing_is_not_followed() -> None:
    engine = Engine({"inter_node": 4.0}, Carried())
    engine.transmit("intra_node", "gather", "parameter all_gather", 200)
    engine.compute("kernel", "forward", 300)
    assert engine.free_ns == 300 and not engine.in_flight


def test_what_is_carried_into_a_pass_slows_by_its_own_level() -> None:
    engine = Engine({}, Carried(in_flight=((-50, 100, 2.0, "inter_node"),)))
    engine.compute("kernel", "forward", 300)
    assert engine.free_ns == 100 + 250


def test_the_more_of_facts_and_level_counts() -> None:
    profile = slowed_by(load_profile("h100"))
    assert profile.slowdowns == {}
    whole = replace(profile, facts=replace(profile.facts, overlap_slowdown=1.3), _shared={})
    assert whole.slowdowns == {"intra_node": 1.3, "inter_node": 1.3}
    assert slowed_by(whole, compute=1.5).slowdowns == {"intra_node": 1.5, "inter_node": 1.5}


def slowed_by(profile: Profile, compute: float = 1.0, collective: float = 1.0) -> Profile:
    source = profile.facts.provenance
    both = {level: Interference(level, compute, collective, source) for level in LEVELS}
    return replace(profile, interference=both, _shared={})


def step(profile: Profile, sums: Sums = Sums.EARLY, **layout: object) -> Timeline:
    config = gpt.Config(num_layers=2, hidden_size=64, seq_len=32, vocab_size=64)
    graph = trace(gpt.build(config), gpt.example_inputs(config))
    plan = template_of_graph(graph, autopar.Mesh("h100", 1, 4), **layout)
    return simulate(divided_graph(graph, plan.microbatches), plan, profile, Overlap(sums))


@pytest.mark.parametrize("zero", [1, 3])
def test_collectives_beside_compute_take_longer_and_those_that_stop_the_ranks_do_not(zero: int) -> None:
    alone = slowed_by(load_profile("h100"))
    slowed = slowed_by(alone, collective=2.0)
    for layout, factor in (({"dp": 4, "zero": zero}, 2), ({"tp": 4}, 1)):
        before, after = step(alone, **layout), step(slowed, **layout)
        assert after.comm_bytes == before.comm_bytes
        spent = [sum(sent.duration_ns for sent in t.lanes[0].along.values()) for t in (before, after)]
        assert spent[1] == pytest.approx(factor * spent[0], rel=1e-3)


def test_gradients_that_are_summed_after_the_backward_pass_are_beside_nothing() -> None:
    alone = slowed_by(load_profile("h100"))
    times = [step(p, sums=Sums.LATE, dp=4).step_time_ns for p in (alone, slowed_by(alone, collective=2.0))]
    assert times[0] == times[1]
