"""Stages of unequal axes: plans cut from one for each stage, what the verifier refuses, what is sent in simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.cost.crossing import side
from autopar.errors import PlacementError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.placement import P, R, S
from autopar.ir.plan import Plan, Stage
from autopar.ir.stages import leaving_placement, maker_of
from autopar.microbatch import check_plan, divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.runtime.crossing import crossing
from autopar.simulate import Timeline, simulate
from autopar.staging import cut, even_sizes, stages_of_sizes
from autopar.trace import find_blocks, trace
from models import gpt

BATCH = 10

SHAPES: dict[str, tuple[dict[str, Any], ...]] = {
    "1+3": ({}, {"dp": 3}),
    "3+1": ({"dp": 3}, {}),
    "1+2+1": ({}, {"tp": 2}, {}),
    "2+2 dp tp": ({"dp": 2}, {"tp": 2}),
    "2+2 tp dp": ({"tp": 2}, {"dp": 2}),
    "2+2 split": ({"tp": 2, "sequence_parallel": True}, {"dp": 2}),
    "2+1+1": ({"tp": 2}, {}, {}),
    "zero 3": ({}, {"dp": 3, "zero": 3}),
    "4+2": ({"dp": 2, "tp": 2}, {"tp": 2}),
}


@cache
def graph(num_layers: int, tied: bool) -> Graph:
    config = gpt.Config(
        num_layers=num_layers, hidden_size=32, num_heads=2, seq_len=16, vocab_size=64, batch_size=BATCH, tie_head=tied
    )
    return trace(gpt.build(config), gpt.example_inputs(config))


def graph_of(name: str, tied: bool = False) -> Graph:
    return graph(len(SHAPES[name]), tied)


@cache
def staged(name: str, microbatches: int = 2, nodes: int = 1, tied: bool = False) -> Plan:
    whole, shapes = graph_of(name, tied), SHAPES[name]
    sizes = [shape.get("dp", 1) * shape.get("tp", 1) for shape in shapes]
    plans = [
        template_of_graph(whole, autopar.Mesh("a100", 1, size), microbatches=microbatches, **shape)
        for size, shape in zip(sizes, shapes, strict=True)
    ]
    paths = [path for group in find_blocks(whole).paths for path in group]
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    mesh = autopar.Mesh("a100", nodes, sum(sizes) // nodes)
    members = stages_of_sizes(whole, paths, even_sizes(whole, paths, len(sizes), 1, load_profile(mesh.profile)))
    return cut(whole, plans, members, firsts, "1f1b", mesh, profiles())


def profiles() -> dict[str, Any]:
    return {"a100": load_profile("a100")}


def timeline(name: str, plan: Plan) -> Timeline:
    count = plan.microbatches
    whole = next(whole for tied in (False, True) if (whole := graph_of(name, tied)).fingerprint == plan.fingerprint)
    part = divided_graph(whole, count)
    return simulate(part, plan, load_profile("a100"))


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "microbatches"), [("1+3", 1), *((name, 2) for name in SHAPES)])
def test_plans_of_unequal_stages_are_well_typed_kept_in_files_and_simulated(name: str, microbatches: int) -> None:
    plan = staged(name, microbatches)
    assert Plan.from_json(plan.to_json()) == plan
    check_plan(graph_of(name), plan)
    assert timeline(name, plan).step_time_ns > 0


def crossed(plan: Plan, whole: Graph) -> list[tuple[int, int, str]]:
    """(maker, reader, tensor) of what stages receive."""
    return [
        (maker_of(whole, plan, index, name), index, name)
        for index, stage in enumerate(plan.stages)
        for name in stage.inputs
        if name not in whole.inputs
    ]


def test_slices_travel_where_ranks_hold_or_want_the_whole() -> None:
    """From two ranks with all of it to two with a half: each sends a half, and gathers halves of the gradient."""
    plan, whole = staged("2+2 tp dp"), graph_of("2+2 tp dp")
    ((_, reader, name),) = crossed(plan, whole)
    assert leaving_placement(whole, plan, reader, name)[0].kind == "S"
    assert plan.stages[reader].inputs[name] == (S(0),)


@pytest.mark.parametrize("name", SHAPES)
def test_simulated_bytes_are_what_the_busiest_rank_sends(name: str) -> None:
    plan, whole = staged(name), graph_of(name)
    part = divided_graph(whole, plan.microbatches)
    expected = dict.fromkeys(range(len(plan.stages)), 0)
    for maker, reader, tensor in crossed(plan, whole):
        there = side(plan.stages[maker].ranks, plan.stages[maker].axes, leaving_placement(part, plan, reader, tensor))
        here = side(plan.stages[reader].ranks, plan.stages[reader].axes, plan.stages[reader].inputs[tensor])
        for stage, sender, receiver in ((maker, there, here), (reader, here, there)):
            route = crossing(part.tensors[tensor].shape, sender, receiver)
            sent = [sum(math.prod(s.stop - s.start for s in m.slices) for m in route.sends(r)) for r in sender.ranks]
            expected[stage] += max(sent) * 4 * plan.microbatches
    assert [lane.comm_bytes.get("send", 0) for lane in timeline(name, plan).lanes] == [*expected.values()]


@pytest.mark.parametrize("name", ["1+3", "2+2 dp tp", "zero 3"])
def test_gradients_of_what_unequal_stages_keep_are_summed_over_the_stages(name: str) -> None:
    plan = staged(name, tied=True)
    check_plan(graph_of(name, tied=True), plan)
    for lane in timeline(name, plan).lanes:
        tasks = [task for piece in lane.pieces for task in piece.tasks if task[4] == "gradient all_reduce"]
        assert tasks[-1][1] == "gradient of embedding.token.weight"


def test_sends_take_the_link_that_joins_the_ranks() -> None:
    inside, across = (timeline("2+2 dp tp", staged("2+2 dp tp", 2, nodes)) for nodes in (1, 2))
    streams = [{stream for (_, stream) in line.work_ns() if "send" in stream} for line in (inside, across)]
    assert streams == [{"send intra_node"}, {"send inter_node"}]


def test_printed_plans_say_the_axes_of_each_stage() -> None:
    text = str(staged("1+3"))
    assert "as (2 stages, 1f1b), train" in text
    assert "stage 0     rank 0 as (one device): layers.0" in text
    assert "stage 1     ranks 1 to 3 as (dp=3): layers.1" in text


# What the verifier refuses ----------------------------------------


def changed(name: str, index: int, change: Callable[[Stage], dict[str, Any]]) -> Plan:
    plan = staged(name)
    stages = [replace(s, **change(s)) if number == index else s for number, s in enumerate(plan.stages)]
    return replace(plan, stages=tuple(stages))


def arriving(*types: Any) -> Callable[[Stage], dict[str, Any]]:
    def change(stage: Stage) -> dict[str, Any]:
        (name,) = (name for name in stage.inputs if name not in ("tokens", "labels"))
        return {"inputs": {**stage.inputs, name: types}}

    return change


def with_summands_alone(stage: Stage) -> dict[str, Any]:
    """What leaves is made as summands, and not redistributed."""
    ((_, _, tensor),) = crossed(staged("3+1"), graph_of("3+1"))
    node = graph_of("3+1").producers[tensor].name
    nodes = {**stage.nodes, node: replace(stage.nodes[node], results=((P,),))}
    return {"nodes": nodes, "redistributes": tuple(r for r in stage.redistributes if r.tensor != tensor)}


MUTANTS: dict[str, tuple[str, int, Callable[[Stage], dict[str, Any]], type[Exception], str]] = {
    "arrives as R": ("1+3", 1, arriving(R), PlacementError, r"from other axes as S\(d\) or I on each"),
    "arrives as P": ("1+3", 1, arriving(P), PlacementError, r"from other axes as S\(d\) or I on each"),
    "a dim that is none": ("1+3", 1, arriving(S(3)), PlacementError, r"from other axes as S\(d\) or I on each"),
    "too few types": ("1+3", 1, arriving(), PlacementError, r"a type for each of 1 axes"),
    "nothing that may leave": ("3+1", 0, with_summands_alone, PlacementError, r"found \[P\]; redistribute"),
    "ranks overlap": ("1+3", 1, lambda _: {"first_rank": 0}, PlanError, r"equal or disjoint ranks"),
}


@pytest.mark.parametrize("case", MUTANTS)
def test_the_verifier_refuses(case: str) -> None:
    name, index, change, error, message = MUTANTS[case]
    with pytest.raises(error, match=message):
        check_plan(graph_of(name), changed(name, index, change))
