"""Meshes of several kinds of devices: stages of one kind each, sized by speed, within each device's memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost import Profile
from autopar.driver import Context, search
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import make_axes
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES
from autopar.microbatch import check_plan, divided_graph
from autopar.passes.kinds import kinds
from autopar.pipeline import template_of_graph
from autopar.planning import divided
from autopar.profiler import profiles_of, template_profile
from autopar.request import Request, SearchBudget
from autopar.simulate import simulate
from autopar.trace import find_blocks, trace
from autopar.unequal import UnequalStages, sizes_by_speed
from models import gpt

MESH = autopar.Mesh([("a100", 1, 2), ("v100", 1, 2)])


@cache
def graph() -> Graph:
    config = gpt.Config(num_layers=8, hidden_size=1024, num_heads=8, seq_len=512, vocab_size=1024, batch_size=16)
    with torch.device("meta"):
        model = gpt.build(config).to(torch.float16)
    return trace(model, gpt.example_inputs(config))


def blocks_of(plan: Plan) -> list[int]:
    modules = ({plan.scopes[node].split("|")[0] for node in stage.nodes} for stage in plan.stages)
    return [len({m.split(".")[1] for m in own if m.startswith("layers.")}) for own in modules]


def template(mesh: autopar.Mesh = MESH, **asked: Any) -> Plan:
    return template_of_graph(graph(), mesh, microbatches=4, **asked)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_sizes_are_those_of_exhaustive_search(data: st.DataObject) -> None:
    stages, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    times = [[data.draw(st.integers(1, 9)) for _ in range(blocks)] for _ in range(stages)]
    most = [data.draw(st.integers(0, blocks)) for _ in range(stages)]
    options = {}
    for sizes in itertools.product(range(1, blocks + 1), repeat=stages):
        if sum(sizes) == blocks and all(size <= limit for size, limit in zip(sizes, most, strict=True)):
            ends = list(itertools.accumulate(sizes, initial=0))
            options[sizes] = max(sum(own[a:b]) for own, a, b in zip(times, ends, ends[1:], strict=False))
    found = sizes_by_speed(times, most)
    assert (found is None) == (not options)
    assert found is None or options[found] == min(options.values())


def test_faster_devices_get_more_blocks_and_the_step_is_shorter() -> None:
    equal, fast = template(pp=2, dp=2), template(pp=2, dp=2, split="speed")
    assert blocks_of(equal) == [4, 4]
    first, second = blocks_of(fast)
    assert first > second and first + second == 8
    assert fast.predicted.step_time_ns < 0.95 * equal.predicted.step_time_ns
    for plan in (equal, fast):
        check_plan(graph(), plan)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.timeline().step_time_ns == plan.predicted.step_time_ns


def test_costs_are_those_of_each_stage_s_own_devices() -> None:
    plan = template(pp=2, dp=2)
    alone = [template(autopar.Mesh(kind, 2, 2), pp=2, dp=2) for kind in ("a100", "v100")]
    parts = [lane.breakdown.compute_ns for lane in plan.timeline().lanes]
    same = [own.timeline().lanes[stage].breakdown.compute_ns for stage, own in enumerate(alone)]
    assert parts == same, "a stage computes as fast as among its like"
    assert {source.split()[0] for source in plan.sources} == {"a100", "v100"}


def test_first_stages_are_on_the_larger_memory() -> None:
    turned = autopar.Mesh([("v100", 1, 2), ("a100", 1, 2)])
    plan = template(turned, pp=2, dp=2, split="speed")
    assert [stage.first_rank for stage in plan.stages] == [2, 0]
    check_plan(graph(), plan)
    assert plan.predicted.step_time_ns == template(pp=2, dp=2, split="speed").predicted.step_time_ns


def with_memory(kind: str, capacity: int) -> dict[str, Profile]:
    profiles = profiles_of(MESH)
    facts = replace(profiles[kind].facts, capacity_bytes=capacity, reserve_bytes=0)
    return profiles | {kind: replace(profiles[kind], facts=facts, memory=None, _shared={})}


def stages(profiles: dict[str, Profile]) -> UnequalStages:
    part = divided(graph(), find_blocks(graph()), 4)
    paths = [path for group in part.blocks.paths for path in group]
    request = Request(MESH, "train", "adamw", None, (), SearchBudget(5.0))
    return UnequalStages(part, dict.fromkeys(profiles, make_axes(("x",), (2,))), 1, "1f1b", paths, request, profiles)


def peaks(plan: Plan) -> dict[int, int]:
    """Bytes that a device of each submesh holds, by its first rank."""
    part = divided_graph(graph(), plan.microbatches)
    return {lane.ranks.start: lane.peak_bytes for lane in simulate(part, plan, profiles_of(MESH)).lanes}


def test_a_stage_takes_no_more_blocks_than_its_devices_hold() -> None:
    free = stages(profiles_of(MESH)).plan("speed")
    limit = peaks(free)[0] * 3 // 4
    tight = stages(with_memory("a100", limit)).plan("speed")
    assert peaks(tight)[0] <= limit
    of_a100 = next(n for n, stage in enumerate(tight.stages) if stage.first_rank == 0)
    assert blocks_of(tight)[of_a100] < blocks_of(free)[0]
    with pytest.raises(InfeasibleError, match=r"no plan of 2 stages .* stage \d on ranks 0 to 1 would hold"):
        stages(with_memory("a100", limit // 100)).plan("speed")


def test_ranks_that_share_a_core_get_fewer_blocks() -> None:
    one_core = replace(template_profile(), facts=replace(template_profile().facts, cores=1), _shared={})
    profiles = {"alone": one_core, "sharing": one_core}
    mesh = autopar.Mesh([("alone", 1, 1), ("sharing", 1, 2)])
    part = divided(graph(), find_blocks(graph()), 4)
    paths = [path for group in part.blocks.paths for path in group]
    request = Request(mesh, "train", "adamw", None, (), SearchBudget(5.0))
    plan = UnequalStages(part, {"alone": (), "sharing": ()}, 1, "1f1b", paths, request, profiles).plan("speed")
    blocks = {stage.first_rank: count for stage, count in zip(plan.stages, blocks_of(plan), strict=True)}
    assert blocks == {0: 4, 1: 2, 2: 2}


def test_the_search_is_no_slower_than_the_template() -> None:
    request = Request(MESH, "train", "adamw", None, (), SearchBudget(1.0))
    plan = search((kinds,), graph(), Context(request))[1]
    check_plan(graph(), plan)
    assert plan.predicted.step_time_ns == min(row.step_time_ns for row in plan.search.tried if row.step_time_ns)
    assert 0 < plan.search.lower_bound_ns <= plan.predicted.step_time_ns and len(plan.search.tried) >= 1


def test_every_schedule_is_looked_at_on_unequal_devices() -> None:
    """Once nothing else is faster. None recomputes where its backward pass comes in two parts."""
    config = gpt.Config(num_layers=8, hidden_size=128, num_heads=4, seq_len=32, vocab_size=256, batch_size=16)
    with torch.device("meta"):
        whole = trace(gpt.build(config), gpt.example_inputs(config))
    request = Request(MESH, "train", "adamw", None, (), SearchBudget(60.0))
    plan = search((kinds,), whole, Context(request))[1]
    check_plan(whole, plan)
    rows = [row for row in plan.search.tried if row.step_time_ns]
    settings = [str(row.setting) for row in rows]
    assert all(any(text.endswith(name) for text in settings) for name in ("gpipe", "interleaved", "zero_bubble"))
    plain = min(row.step_time_ns or 0 for row in rows if str(row.setting).endswith("microbatches"))
    assert SCHEDULES[plan.schedule].splits_backward and plan.predicted.step_time_ns < plain
    assert not any("recompute" in text and "zero_bubble" in text for text in settings)


def test_stages_that_mix_kinds_are_refused() -> None:
    with pytest.raises(MeshError, match=r"devices of one kind, found a100 and v100; unequal devices need pipeline"):
        template(autopar.Mesh([("a100", 1, 1), ("v100", 1, 3)]), pp=2, dp=2)
    with pytest.raises(PlanError, match='expected split as "equal" or "speed", found \'slow\''):
        template(pp=2, dp=2, split="slow")


def test_equal_devices_may_be_split_by_speed_too() -> None:
    plan = template(autopar.Mesh("a100", 1, 3), pp=3, split="speed")
    assert sum(blocks_of(plan)) == 8 and len(plan.stages) == 3
    assert sorted(blocks_of(template(autopar.Mesh("a100", 1, 3), pp=3))) == [2, 3, 3]
    given = template(autopar.Mesh([("a100", 1, 2), ("v100", 1, 1)]), pp=3, layers=(4, 3, 1))
    assert blocks_of(given) == [4, 3, 1]
