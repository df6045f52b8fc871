"""How other softwares hide what they send, and add up gradients: what of it changes a step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.rewrites import graph_of
from autopar.simulate import Overlap, Sums, Timeline, simulate
from autopar.trace import trace
from models import gpt

LIKE_MEGATRON = Overlap(Sums.BUFFERED, casts=False, adds=False, balances=False, queues_apart=True)


@cache
def planned(microbatches: int = 2, **parts: object) -> tuple[Graph, Plan]:
    config = gpt.Config(num_layers=4, hidden_size=256, num_heads=4, seq_len=64, vocab_size=64)
    graph = trace(gpt.build(config), gpt.example_inputs(config))
    plan = template_of_graph(
        graph, autopar.Mesh("h100", devices_per_node=4), microbatches=microbatches, **parts  # type: ignore[arg-type]
    )  # fmt: skip
    return divided_graph(graph_of(plan, graph), microbatches), plan


def slow_links() -> Profile:
    """Links on which gradients are under way long after they are made, and nothing else is."""
    h100 = load_profile("h100")
    links = {level: replace(link, bandwidth=1e9, bandwidth_by_ranks=()) for level, link in h100.links.items()}
    return replace(h100, links=links, collectives={}, interference={}, _shared={})


def begins(timeline: Timeline, kind: str) -> list[int]:
    return sorted(event.start_ns for event in timeline.events if event.kind.startswith(kind))


def test_what_stops_a_rank_does_not_wait_behind_gradients_of_another_group() -> None:
    graph, plan = planned(dp=2, tp=2, zero=1)
    one, apart = (
        simulate(graph, plan, slow_links(), Overlap(Sums.BUFFERED, queues_apart=apart)) for apart in (False, True)
    )
    assert apart.comm_bytes == one.comm_bytes
    pairs = [*zip(begins(apart, "activation"), begins(one, "activation"), strict=True)]
    assert all(first <= second for first, second in pairs)
    assert any(first < second for first, second in pairs), "layers before wait for sums of those behind"
    assert apart.step_time_ns < one.step_time_ns


def test_gradients_queue_behind_each_other_wherever_they_queue() -> None:
    graph, plan = planned(dp=4, zero=1)
    one, apart = (
        simulate(graph, plan, slow_links(), Overlap(Sums.BUFFERED, queues_apart=apart)) for apart in (False, True)
    )
    assert begins(apart, "gradient") == begins(one, "gradient")


@pytest.mark.parametrize("zero", [1, 3])
def test_products_add_gradients_up_from_the_second_microbatch_on(zero: int) -> None:
    """With ZeRO-3 shards are added, which no product makes."""
    spent = {
        (count, adds): simulate(*planned(count, dp=4, zero=zero), load_profile("h100"), Overlap(adds=adds))
        for count in (1, 2) for adds in (True, False)
    }  # fmt: skip
    compute = {key: timeline.breakdown.compute_ns for key, timeline in spent.items()}
    assert compute[1, True] == compute[1, False]
    assert (compute[2, True] > compute[2, False]) == (zero == 1)
    assert all(timeline.peak_bytes == spent[count, True].peak_bytes for (count, _), timeline in spent.items())


def test_sequences_that_come_in_halves_are_not_exchanged_in_each_attention() -> None:
    graph, plan = planned(cp=2, dp=2, context="ring")
    emitted, other = (simulate(graph, plan, load_profile("h100"), way) for way in (Overlap(), LIKE_MEGATRON))
    assert begins(emitted, "operator ring")
    assert begins(emitted, "operator all_to_all")
    assert begins(other, "operator ring")
    assert not begins(other, "operator all_to_all")


def test_flat_buffers_hold_large_gradients_and_parameters_too() -> None:
    """Fewer collectives, of as many bytes: the latency of many ranks is paid once a buffer."""
    graph, plan = planned(dp=4, zero=1)
    each, packed = (
        simulate(graph, plan, slow_links(), Overlap(Sums.BUFFERED, bucket_bytes=size)) for size in (0, 1 << 24)
    )
    assert packed.comm_bytes == each.comm_bytes
    for kind in ("gradient", "parameter"):
        assert 0 < len(begins(packed, kind)) < len(begins(each, kind)), kind


def test_a_buffer_is_no_larger_than_its_most() -> None:
    graph, plan = planned(dp=4, zero=1)
    counts = [
        len(begins(simulate(graph, plan, slow_links(), Overlap(Sums.BUFFERED, bucket_bytes=size)), "gradient"))
        for size in (1 << 20, 1 << 22, 1 << 30)
    ]
    assert counts[0] > counts[1] > counts[2]
