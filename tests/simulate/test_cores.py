"""Ranks that share cores: those that wait leave theirs to the others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Breakdown, Plan
from autopar.ir.schedule import FORWARD, Turn, turns
from autopar.microbatch import one_microbatch, one_microbatch_plan, types_of
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import Incremental, Timeline, predict, simulate
from autopar.simulate.cores import SEND, Beside, SharedCoreClock, Sharing, clock_of, part_of_step
from autopar.simulate.engine import COMPUTE, Task
from autopar.simulate.timeline import Lane, TimelinePiece
from autopar.trace import trace
from models import gpt

RANKS = 4
MESH = Mesh("a100", devices_per_node=RANKS)
STAGED: dict[str, dict[str, Any]] = {
    "gpipe": {"pp": 4, "microbatches": 4, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "dp": 2, "microbatches": 4, "recompute": "full"},
    "interleaved": {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "interleaved"},
    "zero_bubble": {"pp": 4, "microbatches": 4, "schedule": "zero_bubble"},
}


@cache
def whole_graph() -> Graph:
    config = gpt.Config(num_layers=4, hidden_size=64, num_heads=4, seq_len=16, vocab_size=64, batch_size=16)
    return trace(gpt.build(config), gpt.example_inputs(config))


@cache
def case(name: str) -> tuple[Graph, Plan]:
    plan = template_of_graph(whole_graph(), MESH, **STAGED[name])
    count = plan.microbatches
    return one_microbatch(whole_graph(), types_of(plan), count), one_microbatch_plan(plan)


def with_cores(cores: int | None) -> Profile:
    profile = load_profile("a100")
    return replace(profile, facts=replace(profile.facts, cores=cores), _shared={})


def played(name: str, cores: int | None) -> Timeline:
    return simulate(*case(name), with_cores(cores))


def compute_ns(timeline: Timeline) -> int:
    """Of all ranks."""
    return sum(len(lane.ranks) * timeline.work_ns()[lane.ranks.start, COMPUTE] for lane in timeline.lanes)


@pytest.mark.parametrize("name", STAGED)
def test_a_step_takes_no_less_than_the_cores_need_for_it(name: str) -> None:
    alone, shared = played(name, None), played(name, 2)
    assert shared.step_time_ns >= compute_ns(alone) / 2
    assert alone.step_time_ns < shared.step_time_ns < RANKS / 2 * alone.step_time_ns * 1.05
    assert played(name, RANKS).step_time_ns == alone.step_time_ns


@pytest.mark.parametrize("name", STAGED)
def test_the_parts_of_a_step_add_up(name: str) -> None:
    timeline = played(name, 2)
    for lane in timeline.lanes:
        own = lane.breakdown
        every = own.compute_ns, own.recompute_ns, own.exposed_communication_ns, own.bubble_ns, own.optimizer_ns
        assert sum(every) == timeline.step_time_ns
        assert min(every) >= 0
        assert own.exposed_communication_ns == sum(lane.exposed.values())
    assert max(event.end_ns for event in timeline.events) == timeline.step_time_ns
    assert predict(timeline).lower_bound_ns <= timeline.step_time_ns


@pytest.mark.parametrize("name", STAGED)
def test_memory_and_what_is_sent_stay_as_they_are(name: str) -> None:
    alone, shared = played(name, None), played(name, 2)
    assert shared.peak_bytes == alone.peak_bytes
    assert shared.comm_bytes == alone.comm_bytes
    assert len(shared.events) == len(alone.events)


def test_plans_that_are_simulated_one_after_another_share_cores_too() -> None:
    graph, plan = case("1f1b")
    found = Incremental(graph, with_cores(2)).timeline(plan)
    assert found.step_time_ns == played("1f1b", 2).step_time_ns
    assert found.events == played("1f1b", 2).events


def test_nobody_waits_where_all_do_the_same() -> None:
    plan = template_of_graph(whole_graph(), MESH, dp=RANKS)
    crowded = simulate(whole_graph(), plan, with_cores(2))
    assert crowded.breakdown.bubble_ns == 0
    assert crowded.work_ns()[0, COMPUTE] > 1.9 * simulate(whole_graph(), plan, with_cores(None)).work_ns()[0, COMPUTE]


def test_a_clock_by_hand() -> None:
    """Three of four ranks for 300, then one for 100, on two cores: 3/4 of 300 and 2/4 of 100; then half of nothing."""
    busy = [([(0, 300)], {0: 2}), ([(0, 100), (100, 300)], {0: 1}), ([(300, 400)], {0: 1})]
    clock = SharedCoreClock(Sharing(ranks=4, cores=2), busy)
    assert clock([0, 100, 300, 400, 500]).tolist() == [0, 75, 225, 275, 325]


def test_what_threads_do_beside_passes_takes_cores_too() -> None:
    """Of two ranks for 100; then their messages, of which the network's threads take three times as long; then their
    threads hand over more, while two others compute: 2, 6 and 4 cores of 2, for 4 ranks."""
    tasks: list[Task] = [(COMPUTE, "x", 0, 100, "forward"), ("link", "y", 100, 200, SEND)]
    first = lane(range(2), [TimelinePiece(0, "", tasks, [])])
    second = lane(range(2, 4), [TimelinePiece(200, "", [(COMPUTE, "x", 0, 100, "forward")], [])])
    beside = [Beside([(200, 300)], carrying_ns=300), Beside([], carrying_ns=0)]
    clock = clock_of([first, second], beside, Sharing(ranks=4, cores=2), devices_per_node=4)
    assert clock([100, 200, 300]).tolist() == [50, 200, 300]


def lane(ranks: range, pieces: list[TimelinePiece]) -> Lane:
    return Lane(ranks, tuple(pieces), Breakdown(0, 0, 0, 0, 0), {}, {}, {}, {})


def test_each_node_has_cores_of_its_own() -> None:
    clock = SharedCoreClock(
        Sharing(ranks=2, cores=1), [([(0, 100)], {0: 1}), ([(0, 100)], {1: 1}), ([(100, 200)], {0: 1, 1: 2})]
    )
    assert clock([100, 200]).tolist() == [50, 150]


# What a pipeline of equal stages takes ----------------------------------------


def shared_out(schedule: str, stages: int, microbatches: int, sharing: Sharing, trains: bool) -> float:
    """How long a step takes, from moment to moment: all passes that can be made are, at an equal share of the cores.
    A rank with a core to itself makes a pass forward in 1 second, and another in 2, or each half of it in 1."""
    orders = [list(order) for order in turns(schedule, [[n] for n in range(stages)], microbatches, trains)]
    left: dict[int, float] = {}  # of the pass that a stage makes
    done: set[Turn] = set()
    now, each = 0.0, sharing.ranks // stages
    while any(orders):
        for stage, order in enumerate(orders):
            if order and stage not in left and is_ready(order[0], stages, done):
                left[stage] = 2.0 if order[0].direction == "backward" else 1.0
        speed = min(1.0, sharing.cores / (each * len(left)))
        passed = min(left.values()) / speed
        now += passed
        for stage in list(left):
            left[stage] -= passed * speed
            if left[stage] < 1e-9:
                del left[stage]
                done.add(orders[stage].pop(0))
    return now


def is_ready(turn: Turn, stages: int, done: set[Turn]) -> bool:
    before = turn.stage - 1 if turn.direction == FORWARD else turn.stage + 1
    return turn.direction == "backward_weight" or not 0 <= before < stages or turn._replace(stage=before) in done


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_cores_are_shared_out_evenly(schedule: str, stages: int, microbatches: int, cores: int) -> None:
    sharing = Sharing(8, cores)
    slow = shared_out(schedule, stages, microbatches, Sharing(8, 8), True) * sharing.ranks / sharing.cores
    part = part_of_step(sharing, schedule, stages, microbatches, True, (1000,) * stages)
    assert part * slow == pytest.approx(shared_out(schedule, stages, microbatches, sharing, True), rel=1e-3)
