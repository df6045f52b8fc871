"""Laws that every simulated step obeys, over plans of all kinds and devices of any speed."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost import Profile
from autopar.cost.profile import Interference
from autopar.ir.graph import Graph, Node
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import Incremental, Timeline, simulate
from autopar.simulate.parted import PartedStage
from autopar.simulate.program import LocalProgram
from autopar.trace import trace
from models import gpt
from tests.oracles.frozen.cases import PROFILES

PLANS: dict[str, dict[str, Any]] = {
    "data": {"dp": 8, "microbatches": 2},
    "tensor": {"dp": 2, "tp": 4},
    "sequence": {"dp": 4, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    "zero-2": {"dp": 8, "zero": 2, "microbatches": 4},
    "zero-3": {"dp": 4, "tp": 2, "zero": 3, "microbatches": 2, "recompute": "block"},
    "gpipe": {"pp": 4, "dp": 2, "microbatches": 4, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "dp": 2, "tp": 2, "microbatches": 8, "recompute": "full"},
    "1f1b zero-3": {"pp": 4, "dp": 2, "microbatches": 8, "zero": 3},
    "interleaved": {"pp": 2, "tp": 4, "microbatches": 4, "schedule": "interleaved"},
    "zero_bubble": {"pp": 4, "dp": 2, "microbatches": 8, "schedule": "zero_bubble"},
    "zero_bubble zero-3": {
        "pp": 2,
        "tp": 2,
        "dp": 2,
        "microbatches": 4,
        "schedule": "zero_bubble",
        "zero": 3,
    },
    "dualpipev zero-3": {"pp": 2, "dp": 4, "microbatches": 4, "schedule": "dualpipev", "zero": 3},
}


class Case(NamedTuple):
    """What is simulated: a microbatch's graph and plan."""

    graph: Graph
    plan: Plan


@cache
def whole_graph() -> Graph:
    config = gpt.Config(num_layers=4, hidden_size=32, num_heads=4, seq_len=16, vocab_size=64, tie_head=True)
    config = replace(config, batch_size=64)
    return trace(gpt.build(config), gpt.example_inputs(config))


@cache
def case_of(name: str) -> Case:
    plan = template_of_graph(whole_graph(), autopar.Mesh("a100", nodes=2, devices_per_node=4), **PLANS[name])
    graph = divided_graph(whole_graph(), plan.microbatches)
    return Case(graph, plan)


@cache
def device(bandwidth: float, inter: float, alpha: float, speed: float, slowdown: float) -> Profile:
    """An A100 with other links (bandwidth and start-up cost, across nodes too), computing speed, and overlap: across
    nodes collectives are slowed, too."""
    profile = load_profile(PROFILES["a100"])
    factors = {"intra_node": bandwidth, "inter_node": bandwidth * inter}
    links = {
        name: replace(link, bandwidth=link.bandwidth * factors[name], alpha_ns=round(link.alpha_ns * alpha))
        for name, link in profile.links.items()
    }
    slowed = {"inter_node": Interference("inter_node", slowdown + 1, slowdown, profile.facts.provenance)}
    facts = replace(
        profile.facts,
        overlap_slowdown=slowdown,
        memory_bandwidth=profile.facts.memory_bandwidth * speed,
        peak_flops={dtype: rate * speed for dtype, rate in profile.facts.peak_flops.items()},
        launch_ns=tuple(round(ns / speed) for ns in profile.facts.launch_ns),
    )
    return replace(profile, links=links, facts=facts, interference=slowed, collectives={}, _shared={})


SCALES = st.sampled_from([0.01, 0.1, 1.0, 10.0])
DEVICES = st.builds(
    device, SCALES, SCALES, st.sampled_from([0.1, 1.0, 10.0]), SCALES, st.sampled_from([1.0, 1.3, 16.0])
)
NAMES = st.sampled_from(sorted(PLANS))


@given(NAMES, DEVICES)
@settings(max_examples=25, deadline=None)
def test_a_step_takes_as_long_as_its_streams_and_paths_and_its_parts_add_up(name: str, profile: Profile) -> None:
    case = case_of(name)
    timeline = simulate(*case, profile)
    assert timeline.step_time_ns >= max(timeline.work_ns().values())
    assert timeline.step_time_ns >= critical_path_ns(case, profile)
    for lane in timeline.lanes:
        parts = lane.breakdown
        assert sum(vars(parts).values()) == timeline.step_time_ns
        assert sum(lane.exposed.values()) == parts.exposed_communication_ns
        assert min(vars(parts).values()) >= 0 and min(lane.exposed.values(), default=0) >= 0
    assert timeline.breakdown in [lane.breakdown for lane in timeline.lanes]


def critical_path_ns(case: Case, profile: Profile) -> int:
    """The longest chain of items of one microbatch, forward over all stages and back, as if nothing ever queued."""
    programs = [stage.parts[0].program for stage in _stages(case, profile)]
    arrived: dict[str, int] = {}
    ends = [_forward_ns(program, arrived) for program in programs]
    returned: dict[str, int] = {}
    for program, end in zip(reversed(programs), reversed(ends), strict=True):
        end = _backward_ns(program, end, returned)
    return end


def _forward_ns(program: LocalProgram, arrived: dict[str, int]) -> int:
    ready: dict[int, int] = {value: arrived[name] for name, value in program.receives.items()}
    for item in program.items:
        begin = max((ready.get(value, 0) for value in item.inputs), default=0)
        own = sum(sent.duration_ns for sent in (*item.forward, *item.inner))
        for value in item.outputs:
            ready[value] = max(ready.get(value, 0), begin + own + (0 if item.forward else item.forward_ns))
    arrived.update((name, ready[value]) for (name, _), value in program.sends.items())
    return max(ready.values())


def _backward_ns(program: LocalProgram, end: int, returned: dict[str, int]) -> int:
    ready: dict[int, int] = defaultdict(lambda: end if not program.sends else 0)
    ready.update((value, returned[name]) for (name, _), value in program.sends.items() if name in returned)
    for item in reversed(program.items):
        if item.runs_backward:
            begin = max((ready[value] for value in item.outputs), default=0)
            own = sum(sent.duration_ns for sent in (*item.backward, *item.inner_backward))
            spent = item.split.backward_ns[0] if item.split else item.backward_ns  # what others wait for
            for value in item.inputs:
                ready[value] = max(ready[value], begin + own + (0 if item.backward else spent))
    returned.update((name, ready[value]) for name, value in program.receives.items())
    return max(ready.values())


@given(NAMES, DEVICES)
@settings(max_examples=12, deadline=None)
def test_memory_is_given_back_and_its_peak_is_at_least_what_stays(name: str, profile: Profile) -> None:
    case = case_of(name)
    for lane in simulate(*case, profile).lanes:
        resident = sum(size for size, _ in _residents(case, profile, lane.ranks.start))
        assert lane.peak_bytes >= resident > 0
        assert sum(lane.memory_at_peak.values()) == lane.peak_bytes == max(size for _, size in lane.memory)
        assert min(size for _, size in lane.memory[len(lane.memory) // 100 :]) >= 0
        left: Counter[str] = Counter()
        for piece in lane.pieces:
            for _, size, kind, _ in piece.changes:
                left[kind] += size
        kept = {kind for kind, size in left.items() if size}
        assert kept <= {"inputs", "parameters", "constants", "scalars", "optimizer", "gradients", "gathered"}, kept
        assert left["gradients"] <= left["parameters"]


def _residents(case: Case, profile: Profile, first_rank: int) -> list[tuple[int, str]]:
    stages = zip(case.plan.stages, _stages(case, profile), strict=True)
    return [held for stage, played in stages if stage.first_rank == first_rank for held in played.residents]


def _stages(case: Case, profile: Profile) -> list[PartedStage]:
    """Each in one part."""
    return Incremental(case.graph, profile, in_parts=False).stages(case.plan)


@given(NAMES, st.sampled_from([0.01, 0.1, 1.0]), SCALES, st.sampled_from([1.0, 2.0, 100.0]))
@settings(max_examples=12, deadline=None)
def test_faster_links_are_never_slower(name: str, bandwidth: float, inter: float, faster: float) -> None:
    slow, fast = (device(bandwidth * factor, inter, 1.0, 1.0, 1.0) for factor in (1.0, faster))
    assert simulate(*case_of(name), fast).step_time_ns <= simulate(*case_of(name), slow).step_time_ns


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b zero-3", "interleaved", "zero_bubble"])
def test_relabelling_devices_changes_nothing(name: str) -> None:
    """Stages in the opposite order of ranks: the same links join them."""
    case = case_of(name)
    turned = [replace(s, first_rank=8 - s.num_ranks - s.first_rank) for s in case.plan.stages]
    plan = replace(case.plan, stages=tuple(turned))
    first, second = (simulate(case.graph, p, load_profile(PROFILES["a100"])) for p in (case.plan, plan))
    assert (first.step_time_ns, first.breakdown) == (second.step_time_ns, second.breakdown)
    assert [lane.peak_bytes for lane in first.lanes] == [lane.peak_bytes for lane in second.lanes]


@pytest.mark.parametrize("name", sorted(PLANS))
def test_the_same_plan_takes_the_same_nanoseconds(name: str) -> None:
    profile = device(0.1, 1.0, 1.0, 1.0, 1.3)
    first, second = (simulate(*case_of(name), profile) for _ in range(2))
    assert first.events == second.events and first.memory == second.memory
    assert all(isinstance(event.end_ns, int) for event in first.events)


def spent(timeline: Timeline, kind: str, names: set[str]) -> int:
    events = (event for event in timeline.events if event.kind == kind)
    return sum(e.end_ns - e.start_ns for e in events if e.name.partition(" #")[0] in names)


@pytest.mark.parametrize("name", ["sequence", "1f1b"])
def test_recomputation_runs_every_block_again(name: str) -> None:
    case = case_of(name)
    timeline = simulate(*case, device(1.0, 1.0, 1.0, 1.0, 1.0))
    inside = {node.name for node in case.graph.nodes if node.scope.path[1:] and "layers" in node.scope.path[1][0]}
    again = sum(lane.breakdown.recompute_ns for lane in timeline.lanes)
    assert again == spent(timeline, "recompute", {e.name.partition(" #")[0] for e in timeline.events})
    assert again >= spent(timeline, "forward", inside) > 0
    without = simulate(case.graph, replace(case.plan, recompute=()), load_profile(PROFILES["a100"]))
    assert without.peak_bytes > timeline.peak_bytes and without.step_time_ns < timeline.step_time_ns


def test_1f1b_holds_fewer_microbatches_than_gpipe_in_the_same_time() -> None:
    case = case_of("gpipe")
    early = simulate(case.graph, replace(case.plan, schedule="1f1b"), load_profile(PROFILES["a100"]))
    late = simulate(*case, load_profile(PROFILES["a100"]))
    activations = [[lane.memory_at_peak["activations"] for lane in timeline.lanes] for timeline in (early, late)]
    assert activations[0][0] == activations[1][0], "the first stage holds all four"
    assert activations[0][3] * 3 < activations[1][3], "the last stage holds one"
    assert abs(early.step_time_ns - late.step_time_ns) < 0.05 * late.step_time_ns


def test_zero_bubble_fills_the_bubble_with_gradients_of_weights_and_keeps_activations_longer() -> None:
    """On a device so slow that nothing but computing counts. Two thirds would be filled if weights took a third."""
    case, profile = case_of("zero_bubble"), device(10.0, 1.0, 0.1, 1e-4, 1.0)
    split = simulate(*case, profile)
    whole = simulate(case.graph, replace(case.plan, schedule="1f1b"), profile)
    assert split.comm_bytes["send"] == whole.comm_bytes["send"]
    bubbles = [[lane.breakdown.bubble_ns for lane in timeline.lanes] for timeline in (split, whole)]
    assert 1 / 3 < bubbles[0][0] / bubbles[1][0] < 0.6
    work = [sum(lane.breakdown.compute_ns for lane in timeline.lanes) for timeline in (split, whole)]
    assert 1.0 <= work[0] / work[1] < 1.02, "gradients are read twice"
    held = [[lane.memory_at_peak["activations"] for lane in timeline.lanes] for timeline in (split, whole)]
    assert held[0][0] == held[1][0], "the first stage delays nothing"
    assert held[0][3] > 2 * held[1][3]
    names = {event.name.partition(" #")[0] for event in split.events if event.kind == "backward_weight"}
    linear = {node.name for node in case.graph.nodes if ".linear." in node.op}
    assert linear <= names and not any("attention" in node.op and node.name in names for node in late_nodes(case))


def late_nodes(case: Case) -> list[Node]:
    """Those of all stages but the first."""
    return [node for node in case.graph.nodes if node.name not in case.plan.stages[0].nodes]
