"""How other softwares hide what they send, and add up gradients: what of it changes a step."""

from __future__ import annotations

import itertools
import random
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
from autopar.simulate import Overlap, Sums, Timeline, player, simulate
from autopar.simulate.engine import COMPUTE, Carried, Engine, shared
from autopar.simulate.overlap import Queues, queues_of
from autopar.simulate.parted import stage_in_one
from autopar.simulate.passes import PassKind, Standing
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


def in_queues(monkeypatch: pytest.MonkeyPatch, queues: Queues, **parts: object) -> Timeline:
    monkeypatch.setattr(player, "queues_of", lambda profile, overlap: queues)
    return simulate(*planned(**parts), slow_links(), Overlap(Sums.BUFFERED))


def test_emitted_programs_queue_by_axis_on_nccl_and_by_level_on_gloo() -> None:
    assert queues_of(load_profile("h100"), Overlap()) is Queues.AXIS
    assert queues_of(load_profile("cpu"), Overlap()) is Queues.LEVEL
    assert queues_of(load_profile("h100"), LIKE_MEGATRON) is Queues.PURPOSE


@pytest.mark.parametrize("queues", [Queues.AXIS, Queues.PURPOSE])
def test_what_stops_a_rank_does_not_wait_behind_gradients_of_another_group(
    monkeypatch: pytest.MonkeyPatch, queues: Queues
) -> None:
    one, apart = (in_queues(monkeypatch, found, dp=2, tp=2, zero=1) for found in (Queues.LEVEL, queues))
    assert apart.comm_bytes == one.comm_bytes
    pairs = [*zip(begins(apart, "activation"), begins(one, "activation"), strict=True)]
    assert all(first <= second for first, second in pairs)
    assert any(first < second for first, second in pairs), "layers before wait for sums of those behind"
    assert apart.step_time_ns <= one.step_time_ns


@pytest.mark.parametrize("queues", [Queues.AXIS, Queues.PURPOSE])
def test_a_link_carries_no_more_than_one_collective_at_a_time_however_many_queues_it_has(
    monkeypatch: pytest.MonkeyPatch, queues: Queues
) -> None:
    monkeypatch.setattr(player, "queues_of", lambda profile, overlap: queues)
    graph, plan = planned(1, dp=2, tp=2, zero=1)
    stage = stage_in_one(graph, plan, slow_links(), Overlap(Sums.BUFFERED))
    forward = stage.play(PassKind("forward"), Carried(), Standing())
    done = stage.play(PassKind("backward", True, True), Carried(), forward.standing)
    total = until = 0
    for begin, end in sorted((begin, end) for stream, _, begin, end, _ in done.tasks if stream != COMPUTE):
        total, until = total + max(0, end - max(begin, until)), max(until, end)
    ((_, played, _),) = done.pieces
    alone_ns = sum(sent.duration_ns for sent in played.along.values())
    stretched_ns = sum(end - begin for stream, _, begin, end, _ in done.tasks if stream != COMPUTE)
    assert total == pytest.approx(alone_ns, rel=1e-4) and stretched_ns > 1.05 * alone_ns


def test_a_level_has_one_link_for_all_of_its_queues() -> None:
    engine = Engine({}, Carried((("intra_node axis 0", 40),), ((0, 40, 1.0, "intra_node axis 0"),)))
    carried = engine.carry(40, "gradient")
    engine.transmit("intra_node axis 1", "first", "activation", 30, [engine.compute("kernel", "forward", 10)])
    elsewhere = engine.transmit("inter_node axis 1", "beside", "activation", 30)
    behind = engine.transmit("intra_node axis 0", "second", "gradient", 50)
    assert [engine.tasks[n][2:4] for n in (carried, elsewhere, behind)] == [(0, 70), (0, 30), (70, 120)]
    assert engine.tasks[-3][2:4] == (10, 70) and engine.moved == {40: (0, 70)}


@pytest.mark.parametrize("queues", [Queues.LEVEL, Queues.PURPOSE])
def test_gradients_queue_behind_each_other_wherever_they_queue(
    monkeypatch: pytest.MonkeyPatch, queues: Queues
) -> None:  # fmt: skip
    found = in_queues(monkeypatch, queues, dp=4, zero=1)
    assert begins(found, "gradient") == begins(in_queues(monkeypatch, Queues.AXIS, dp=4, zero=1), "gradient")


def brute_force(start: int, duration: int, beside: list[tuple[str, int, int]]) -> float:
    """When the new one ends, tick by tick: each stream's first that has begun has an equal share."""
    tick, now, left = 1 / 64, float(start), float(duration)
    queues: dict[str, list[list[float]]] = {}
    for stream, begin, end in beside:
        queues.setdefault(stream, []).append([begin, end - max(begin, start)])
    while left > 0:
        active = [queue for queue in queues.values() if queue and queue[0][0] <= now]
        left -= tick / (len(active) + 1)
        for queue in active:
            queue[0][1] -= tick * len(active) / (len(active) + 1)  # alone it would have taken 1/n of the link
            if queue[0][1] <= 0:
                queue.pop(0)
        now += tick
    return now


@pytest.mark.parametrize("seed", range(20))
def test_links_are_shared_evenly(seed: int) -> None:
    draw = random.Random(seed)
    beside, start, duration = list[tuple[str, int, int]](), draw.randrange(20), draw.randrange(1, 60)
    for stream in ("a", "b")[: 1 + seed % 2]:
        end = draw.randrange(10)
        for _ in range(draw.randrange(4)):
            begin, end = (at := end + draw.randrange(0, 20, 5)), at + draw.randrange(1, 30)
            beside.append((stream, begin, end))
    beside = [span for span in sorted(beside) if span[2] > start]
    end, later = shared(start, duration, beside)
    assert end == pytest.approx(brute_force(start, duration, beside), abs=1.5)
    assert all(new >= old for (_, _, old), (_, new) in zip(beside, later, strict=True))
    if len({stream for stream, _, _ in beside}) == 1:  # what the new one takes of the link, the others lack
        both = min(span[1] for span in beside) <= start and all(
            first[2] == second[1] for first, second in itertools.pairwise(beside)
        )  # fmt: skip
        if both:
            assert max(end, later[-1][1]) == pytest.approx(max(beside[-1][2], start) + duration, abs=1.5)


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
