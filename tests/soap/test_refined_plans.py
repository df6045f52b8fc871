"""Plans after refinement: never slower, within constraints, explained, printed and kept in files."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Stage
from autopar.microbatch import check_plan
from autopar.pipeline import placed, planned
from autopar.profiler import load_profile
from autopar.refinement import refined
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks, trace
from models import gpt
from tests.oracles.frozen.cases import PROFILES

MESH = autopar.Mesh(PROFILES["h100"], devices_per_node=8)


@cache
def graph() -> Graph:
    config = gpt.Config(
        num_layers=4, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192, batch_size=16
    )  # fmt: skip
    with torch.device("meta"):
        return trace(gpt.build(config), {k: v.to("meta") for k, v in gpt.example_inputs(config).items()})


@cache
def both(*constraints: autopar.Constraint, proposals: int = 300) -> tuple[Plan, Plan]:
    """What placements find, and that refined."""
    budget = SearchBudget(5.0, stages=False, proposals=proposals, refine_seconds=60.0)
    request = Request(MESH, "train", "adamw", None, constraints, budget)
    first = placed(graph(), request)
    return first, refined(graph(), find_blocks(graph()), request, load_profile(PROFILES["h100"]), first)


def test_a_gain_is_printed_explained_and_kept() -> None:
    first, plan = both()
    report = plan.search.refinement
    assert report is not None
    assert plan.predicted.step_time_ns == report.after_ns < report.before_ns == first.predicted.step_time_ns
    check_plan(graph(), plan)
    changes = "a change" if len(report.moves) == 1 else f"{len(report.moves)} changes"
    assert f"by {changes} that MCMC kept of 300 proposals" in str(plan)
    move = report.moves[0]
    assert move.gain_ns > 0
    assert f"{move.before} (simulated)" in plan.explain(move.name)
    assert autopar.Plan.from_json(plan.to_json()) == plan


def test_constraints_hold() -> None:
    pinned = autopar.Constraint("layers.1.mlp.up.weight", ("S(0)",), what="stored")
    _, plan = both(pinned, autopar.Constraint(microbatches=2), proposals=100)
    tensor = next(name for name, own in plan.parameters.items() if own == "layers.1.mlp.up.weight")
    assert {str(type_) for type_ in plan.stage.storage[tensor].placement} == {"S(0)"}
    assert plan.microbatches == 2


def test_without_proposals_the_plan_is_as_it_was() -> None:
    first, plan = both(proposals=0)
    assert plan is first


def test_a_plan_that_is_not_refined_says_why() -> None:
    first, _ = both(proposals=0)
    unlike = replace(first, stages=(first.stage, Stage(4, (), {}, {}, {})))
    request = Request(first.mesh, "train", "adamw", None, (), SearchBudget(5.0, proposals=100))
    plan = refined(graph(), find_blocks(graph()), request, load_profile(PROFILES["h100"]), unlike)
    assert plan.predicted == first.predicted and plan.stages == unlike.stages
    assert "  refined     not: its stages are on unlike submeshes, or on parts of them\n" in str(plan)
    assert autopar.Plan.from_json(plan.to_json()) == plan


def test_a_long_search_begins_at_expert_plans_and_at_a_drawn_one_too() -> None:
    budget = SearchBudget(5.0, stages=False, proposals=5_000, refine_seconds=1.5)
    request = Request(autopar.Mesh("h100", devices_per_node=4), "train", "adamw", None, (), budget)
    report = planned(graph(), request).search.refinement
    assert report is not None
    assert [*report.starts] == ["the plan", "template dp=4", "template dp=4, zero=3", "template dp=1, tp=4",
                                "a drawn plan"]  # fmt: skip
    assert report.after_ns <= 1.002 * min(best for _, best in report.starts.values())
