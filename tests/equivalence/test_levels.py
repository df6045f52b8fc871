"""Gradients that are summed by levels: the program equals the model, sends what the plan says, and is refused where it
cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.emit import emit
from autopar.errors import PlacementError
from autopar.ir.graph import Graph
from autopar.ir.placement import Axis, I, R, S
from autopar.ir.plan import Plan
from autopar.ir.redistribution import SentOn, Step, by_levels, gradient_collectives
from autopar.microbatch import check_plan
from autopar.pipeline import template_of_graph
from autopar.planning import divided
from autopar.trace import find_blocks
from tests.equivalence import zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.equivalence.planned import graph
from tests.rank_pool import pool

OPTIMIZERS = ("sgd", "adamw")
TEMPLATES: dict[str, dict[str, Any]] = {
    "copies": {"dp": 4, "hsdp": 2},
    "microbatches": {"dp": 4, "hsdp": 2, "microbatches": 2},
    "bf16": {"dp": 4, "hsdp": 2, "precision": "bf16"},
}


@cache
def single(name: str) -> Any:
    model, batch = zoo.build(name)
    return run_single(model, batch, OPTIMIZERS)


def with_levels(whole: Graph, plan: Plan) -> Plan:
    """The plan with each sum over several axes by levels, whatever it costs."""
    axes, trained = plan.stage.axes, {item.tensor for item in whole.stored if item.requires_grad}

    def marked(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return by_levels(tuple(step._replace(parts=1) for step in steps), axes) or steps

    made = (replace(r, steps=marked(r.steps)) if r.tensor in trained else r for r in plan.stage.redistributes)
    found = plan.placed(redistributes=tuple(made))
    return divided(whole, find_blocks(whole), plan.microbatches).with_traffic(found)


def planned(model: str, name: str) -> Plan:
    whole = graph(model)
    plan = template_of_graph(whole, autopar.Mesh("cpu", devices_per_node=4), **TEMPLATES[name])
    return with_levels(whole, plan)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["copies", "microbatches"])
@pytest.mark.parametrize("model_name", ["gpt"])
def test_programs_equal_the_model(model_name: str, name: str) -> None:
    plan, whole = planned(model_name, name), graph(model_name)
    check_plan(whole, plan)
    source = emit(whole, plan)
    assert "by_levels=True" in source
    model, batch = zoo.build(model_name)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(4).run(run_rank, source, state, batch, OPTIMIZERS)
    found = differences(single(model_name), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    assert results[0][4] == {kind: size for kind, size in plan.predicted.comm_bytes.items() if size}


def test_each_level_sends_a_part() -> None:
    """Over 2 × 4 × 3 ranks: a sum of 1,000 floats in 12 parts of 84 along the outer axis."""
    axes = (Axis("a", 2, 12), Axis("b", 4, 3), Axis("c", 3, 1))
    steps = by_levels(tuple(Step(axis, I, R) for axis in range(3)), axes)
    assert steps is not None and {step.parts for step in steps} == {12}
    size = math.ceil(1000 / 12) * 12 * 4
    assert gradient_collectives(steps, [(0, size)] * 3, axes) == [
        SentOn("reduce_scatter", 2, size), SentOn("reduce_scatter", 1, size // 3), SentOn("all_reduce", 0, size // 12),
        SentOn("all_gather", 1, size // 3), SentOn("all_gather", 2, size),
    ]  # fmt: skip


def test_one_axis_has_no_levels() -> None:
    axes = (Axis("a", 2, 2), Axis("b", 2, 1))
    assert by_levels((Step(0, I, R),), axes) is None
    assert by_levels((Step(0, I, R), Step(1, I, S(0))), axes) is None
    assert by_levels((Step(0, I, R), Step(1, I, R)), (axes[0], Axis("b", 1, 1))) is None


def test_files_keep_them_and_the_verifier_counts_parts() -> None:
    plan, whole = planned("gpt", "copies"), graph("gpt")
    again = Plan.from_json(plan.to_json())
    assert again.stages == plan.stages
    first = next(r for r in plan.stage.redistributes if any(step.parts > 1 for step in r.steps))
    wrong = replace(first, steps=tuple(step._replace(parts=3) for step in first.steps))
    others = tuple(wrong if r == first else r for r in plan.stage.redistributes)
    with pytest.raises(PlacementError, match="sum by levels over two axes at least"):
        check_plan(whole, plan.placed(redistributes=others))
