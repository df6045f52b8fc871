"""Plans of deep models are refined on few of their blocks, and are what the whole model does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.pipeline import placed, simulated_step, template_of_graph
from autopar.profiler import load_profile
from autopar.refinement import Worlds, refined
from autopar.refinement.shortened import shortened
from autopar.request import Request, SearchBudget
from autopar.simulate import simulate
from autopar.trace import find_blocks, trace
from autopar.tunables import KEPT
from models import gpt
from tests.branches.cases import Scaled

MESH = autopar.Mesh("h100", nodes=2, devices_per_node=8)
LAYERS = 20


@cache
def graph(num_layers: int = LAYERS) -> Graph:
    config = gpt.Config(
        num_layers=num_layers, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192, batch_size=64
    )  # fmt: skip
    with torch.device("meta"):
        return trace(gpt.build(config), {k: v.to("meta") for k, v in gpt.example_inputs(config).items()})


def request(limit: int | None = None) -> Request:
    budget = SearchBudget(5.0, stages=False, proposals=150, refine_seconds=60.0)
    return Request(MESH, "train", "adamw", limit, (), budget)


@cache
def first(limit: int | None = None) -> Plan:
    return placed(graph(), request(limit))


def worlds(plan: Plan, num_layers: int = LAYERS) -> Worlds:
    own = replace(request(), recompute=plan.recompute)
    return Worlds(graph(num_layers), find_blocks(graph(num_layers)), own, load_profile("h100"), plan)


def refine(plan: Plan, limit: int | None = None) -> Plan:
    return refined(graph(), find_blocks(graph()), request(limit), load_profile("h100"), plan)


def test_a_short_model_stands_for_the_whole() -> None:
    every = worlds(first())
    start = every.start("the plan", first())
    short = shortened(every, start)
    assert short is not None and short.extent == f"on {KEPT} of {LAYERS} blocks"
    assert list(short.paths) == [f"layers.{n}" for n in range(LAYERS)]
    assert [path for path, stands in short.paths.items() if path != stands] == [
        f"layers.{n}" for n in range(KEPT - 1, LAYERS - 1)
    ]
    part = short.worlds.graph
    assert len(part.nodes) < len(graph().nodes) / 2
    played = simulate(part, short.start.plan, load_profile("h100"))
    assert short.start.world.score.step_time_ns(short.start.plan) == played.step_time_ns
    again = short.lifted(graph(), short.start.plan)
    assert again.stage.nodes == start.plan.stage.nodes and again.stage.storage == start.plan.stage.storage


def test_what_was_found_is_done_in_all_blocks_and_simulated_there() -> None:
    plan = refine(first())
    report = plan.search.refinement
    assert report is not None and report.stop_reason.endswith(f"on {KEPT} of {LAYERS} blocks")
    assert plan.predicted.step_time_ns == report.after_ns < report.before_ns == first().predicted.step_time_ns
    check_plan(graph(), plan)
    assert simulated_step(graph(), plan).step_time_ns == plan.predicted.step_time_ns
    assert all(move.gain_ns > 0 for move in report.moves)
    blocks, kinds = find_blocks(graph()), dict[str, set[object]]()
    alike = {f"layers.{n}" for n in range(KEPT - 2, LAYERS - 1)}  # one of the short model, and those it stands for
    for node in graph().nodes:
        if any(path in alike for path, _ in node.scope.path):
            kinds.setdefault(blocks.representative_node(node.name), set()).add(plan.stage.nodes[node.name])
    assert kinds and all(len(found) == 1 for found in kinds.values())
    assert autopar.Plan.from_json(plan.to_json()) == plan


def test_a_limit_holds_for_the_whole_model() -> None:
    limit = int(first().predicted.peak_bytes * 0.8)
    plan = refine(first(limit), limit)
    assert plan.predicted.peak_bytes <= limit == plan.memory_limit
    assert plan.predicted.step_time_ns <= first(limit).predicted.step_time_ns
    assert simulated_step(graph(), plan).peak_bytes == plan.predicted.peak_bytes


def test_shallow_models_stay_whole() -> None:
    plan = template_of_graph(graph(2 * KEPT), MESH, dp=16)
    every = worlds(plan, 2 * KEPT)
    assert shortened(every, every.start("the plan", plan)) is None


def test_blocks_that_are_placed_apart_stay_whole() -> None:
    """The short model could not say what such a plan does."""
    again = replace(first(), recompute=("layers.12",))
    every = worlds(again)
    assert shortened(every, every.start("the plan", again)) is None
    alike = replace(first(), recompute=tuple(f"layers.{n}" for n in range(LAYERS)))
    every = worlds(alike)
    short = shortened(every, every.start("the plan", alike))
    assert short is not None and short.lifted(graph(), short.start.plan).recompute == alike.recompute


def test_what_runs_for_one_block_alone_outside_of_it_has_no_equal() -> None:
    """Each of these slices is of another row: no block's stands for another's."""
    with torch.device("meta"):
        model = trace(Scaled(LAYERS, 64), (torch.empty(64, 64), torch.empty(LAYERS, 64)))
    plan = placed(model, request())
    every = Worlds(model, find_blocks(model), request(), load_profile("h100"), plan)
    assert max(map(len, every.blocks.paths)) >= LAYERS - 1
    assert shortened(every, every.start("the plan", plan)) is None
    better = refined(model, find_blocks(model), request(), load_profile("h100"), plan)
    check_plan(model, better)
