"""What a rank's runtime takes beside passes: to call them, to send and to receive, and to update parameters."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import pytest

import autopar
from autopar.cost import Profile, Runtime
from autopar.cost.profile import Provenance
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.schedule import FORWARD, Turn, turns
from autopar.microbatch import one_microbatch, one_microbatch_plan, types_of
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.runtime.arrivals import may_come_early
from autopar.simulate import Incremental, Timeline, simulate
from autopar.simulate.engine import COMPUTE
from autopar.trace import trace
from models import gpt

SOURCE = Provenance("assumed", "test", "2026-11-23")
MICROBATCHES = 4
PASS_NS, SEND_NS, RECEIVE_NS, LATE_NS = 5_000_000, 700_000, 90_000, 1000
FREE = Runtime((0, 0), 0, 0, (0, 0), SOURCE)
BUSY = replace(FREE, pass_ns=PASS_NS, send_ns=((1, SEND_NS),), receive_ns=RECEIVE_NS)


def profile_with(runtime: Runtime) -> Profile:
    return replace(load_profile("cpu"), runtime=runtime, _shared={})


def planned(**ways: Any) -> tuple[Graph, Plan]:
    """Of one microbatch, as it is simulated."""
    config = gpt.Config(num_layers=4, hidden_size=64, num_heads=4, seq_len=32, vocab_size=64, batch_size=8)
    graph = trace(gpt.build(config), gpt.example_inputs(config))
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = template_of_graph(graph, mesh, microbatches=MICROBATCHES, memory_limit=10**13, **ways)
    return one_microbatch(graph, types_of(plan), MICROBATCHES), one_microbatch_plan(plan)


def played(runtime: Runtime, graph: Graph, plan: Plan) -> Timeline:
    timeline = simulate(graph, plan, profile_with(runtime))
    for lane in timeline.lanes:
        assert sum(asdict(lane.breakdown).values()) == timeline.step_time_ns
    return timeline


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_each_pass_is_called_and_each_message_handed_over(schedule: str) -> None:
    graph, plan = planned(pp=2, schedule=schedule)
    free, busy = (played(runtime, graph, plan) for runtime in (FREE, BUSY))
    again = Incremental(graph, profile_with(BUSY)).timeline(plan)
    assert (again.step_time_ns, again.breakdown) == (busy.step_time_ns, busy.breakdown)
    borders, of_each = {"interleaved": (3, 4), "zero_bubble": (1, 3)}.get(schedule, (1, 2))
    passes = of_each * MICROBATCHES
    for after in busy.lanes:
        sent = received = borders * MICROBATCHES
        around = passes * PASS_NS + sent * SEND_NS + received * RECEIVE_NS
        assert around <= after.exposed["send"] < around + PASS_NS, "and the time that they travel"
    assert busy.step_time_ns > free.step_time_ns


def spans_of(timeline: Timeline, plan: Plan) -> list[dict[Turn, tuple[int, int]]]:
    """When each lane's turns begin and end, in their order."""
    stages: dict[int, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        stages.setdefault(stage.first_rank, []).append(number)
    found = []
    for lane, order in zip(timeline.lanes, turns(plan.schedule, [*stages.values()], MICROBATCHES, True), strict=True):
        played = [piece for piece in lane.pieces if piece.label and {task[0] for task in piece.tasks} & {COMPUTE}]
        passes = [[*own] for _, own in groupby(played, lambda piece: (piece.label, piece.tasks[0][4] == "backward"))]
        spans = [
            (own[0].begin_ns, max(piece.begin_ns + task[3] for piece in own for task in piece.tasks)) for own in passes
        ]  # fmt: skip
        found.append(dict(zip(order, spans, strict=True)))
    return found


@pytest.mark.parametrize(("schedule", "some_late"), [("gpipe", False), ("1f1b", True), ("interleaved", True)])
def test_who_asks_for_what_was_sent_before_stands_still(schedule: str, some_late: bool) -> None:
    graph, plan = planned(pp=2, schedule=schedule)
    timeline = played(replace(FREE, pass_ns=PASS_NS, late_ns=LATE_NS), graph, plan)
    spans = spans_of(timeline, plan)
    ends = {turn: end for lane in spans for turn, (_, end) in lane.items()}
    found = set()
    for lane in spans:
        order = list(lane)
        for before, turn, following in zip(order, order[1:], order[2:], strict=False):
            source = following.stage + (-1 if following.direction == FORWARD else 1)
            waited = lane[turn][0] - lane[before][1] - PASS_NS
            if 0 <= source < len(plan.stages) and may_come_early(turn, following) and waited <= LATE_NS:
                is_late = ends[following._replace(stage=source)] <= lane[turn][0] - LATE_NS
                assert waited == LATE_NS * is_late
                found.add(is_late)
    assert found == {False, some_late}
    again = Incremental(graph, profile_with(replace(FREE, pass_ns=PASS_NS, late_ns=LATE_NS))).timeline(plan)
    assert (again.step_time_ns, again.breakdown) == (timeline.step_time_ns, timeline.breakdown)


def test_a_plan_of_one_stage_has_no_schedule() -> None:
    graph, plan = planned(dp=2)
    assert played(FREE, graph, plan).step_time_ns == played(BUSY, graph, plan).step_time_ns


@pytest.mark.parametrize(("ways", "update_ns"), [({"pp": 2}, 10**6), ({"dp": 2}, 9 * 10**6)])
def test_parameters_of_a_stage_of_one_rank_are_no_dtensors(ways: dict[str, int], update_ns: int) -> None:
    graph, plan = planned(**ways)
    updating = replace(FREE, optimizer_ns=(10**6, 9 * 10**6))
    free, busy = (played(runtime, graph, plan) for runtime in (FREE, updating))
    for before, after, part in zip(free.lanes, busy.lanes, plan.stages, strict=True):
        assert after.breakdown.optimizer_ns - before.breakdown.optimizer_ns == len(part.storage) * update_ns
