"""The search's choice of recomputation: as little as the limit asks for, the fastest of what fits; pinned by hand."""

from __future__ import annotations

from collections import Counter
from functools import cache
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar import pipeline
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.pipeline import template_of_graph
from autopar.planning import Place
from autopar.trace import trace
from autopar.zero import Modules
from models import gpt

MESH = autopar.Mesh("cpu", devices_per_node=2)
BUDGET = autopar.SearchBudget(substitutions=False, proposals=0)
CONFIG = gpt.Config(num_layers=6, hidden_size=256, num_heads=8, seq_len=128, vocab_size=1024, batch_size=8)


@cache
def model() -> nn.Module:
    with torch.device("meta"):
        return gpt.build(CONFIG)


@cache
def graph() -> Graph:
    return trace(model(), gpt.example_inputs(CONFIG))


@cache
def searched(limit: int | None = None, *constraints: autopar.Constraint) -> Plan:
    """The best plan of one stage."""
    return anyhow(limit, autopar.Constraint(stages=1), *constraints)


@cache
def anyhow(limit: int | None = None, *constraints: autopar.Constraint) -> Plan:
    with mock.patch.object(pipeline, "trace", lambda *_, **__: graph()):
        return autopar.parallelize(
            model(), MESH, gpt.example_inputs(CONFIG), memory_limit=limit, constraints=constraints, search=BUDGET
        ).plan


@cache
def templates() -> list[Plan]:
    """Of one stage; no limit is asked of them, so that they are the same for all."""
    choices = [
        {**axes, "recompute": kind, "microbatches": count}
        for axes in ({"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "sequence_parallel": True})
        for kind in ("none", "block", "full")
        for count in (1, 2)
    ]  # fmt: skip
    return [template_of_graph(graph(), MESH, **item) for item in choices]


def test_a_plan_that_fits_recomputes_nothing_and_is_searched_for_once() -> None:
    with mock.patch.object(Place, "recomputing", side_effect=AssertionError):
        plan = searched()
    assert not plan.recompute and all(row.recompute is None for row in plan.search.tried)


@pytest.mark.sampled(only=("0.6",))
@pytest.mark.parametrize("share", [0.7, 0.6, 0.5])
def test_what_does_not_fit_is_recomputed_as_far_as_it_takes(share: float) -> None:
    """And is at least as fast as every template that fits, with recomputation or without, in one microbatch or more."""
    limit = int(searched().predicted.peak_bytes * share)
    plan = searched(limit)
    assert plan.predicted.peak_bytes <= limit
    fitting = [t.predicted.step_time_ns for t in templates() if t.predicted.peak_bytes <= limit]
    assert plan.predicted.step_time_ns <= min(fitting, default=plan.predicted.step_time_ns)
    if plan.recompute:
        assert "recompute   layers.*" in str(plan) and "recomputation" in str(plan)
        assert "recompute: none | layers.*" in searched().diff(plan)
        assert "Computed again in the backward pass" in plan.explain("layers.0")


def test_some_blocks_are_recomputed_where_that_is_enough() -> None:
    plan = searched(int(searched().predicted.peak_bytes * 0.7), autopar.Constraint(microbatches=1))
    of_layer = Counter(name.split(".")[1] for name in plan.recompute)
    assert plan.recompute and len({of_layer[str(layer)] for layer in range(6)}) == 2  # some more than others
    assert "recompute   layers.*" in str(plan) and " of 6" in str(plan)


def test_the_smallest_limit_is_that_of_a_recomputed_plan_and_can_be_met() -> None:
    with pytest.raises(InfeasibleError) as refused:
        searched(10**5)
    assert "6 modules recomputed" in str(refused.value)
    least = refused.value.smallest_bytes
    assert least is not None and searched(least).predicted.peak_bytes <= least
    kept = autopar.Constraint(recompute="none")
    with pytest.raises(InfeasibleError) as refused_too:
        searched(10**5, kept)
    assert least < (refused_too.value.smallest_bytes or 0)


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        ((autopar.Constraint(recompute="full"),), tuple(f"layers.{n}" for n in range(6))),
        ((autopar.Constraint("layers.[01]", recompute="block"),), ("layers.0.attention", "layers.1.attention")),
        (
            (autopar.Constraint("layers.0", recompute="full"), autopar.Constraint("layers.1", recompute="block")),
            ("layers.0", "layers.1.attention"),
        ),
        ((autopar.Constraint(recompute="none"),), ()),
    ],
    ids=["all", "attention of two", "each its own", "nothing"],
)
def test_constraints_pin_what_is_recomputed(constraints: tuple[autopar.Constraint, ...], expected: Modules) -> None:
    assert searched(None, *constraints).recompute == expected


@pytest.mark.parametrize("kind", ["full", "block", "none"])
def test_what_is_recomputed_can_be_pinned_of_several_stages(kind: str) -> None:
    plan = anyhow(None, autopar.Constraint(stages=2, microbatches=2), autopar.Constraint(recompute=kind))
    path = {"full": "layers.{}", "block": "layers.{}.attention", "none": ""}[kind]
    assert len(plan.stages) >= 2
    assert plan.recompute == tuple(path.format(number) for number in range(6) if path)


def test_a_limit_is_met_by_the_better_of_stages_and_none() -> None:
    limit = searched().predicted.peak_bytes // 2
    assert anyhow(limit).predicted.step_time_ns <= searched(limit).predicted.step_time_ns
    assert anyhow(limit).predicted.peak_bytes <= limit


def test_constraints_that_cannot_be_met_are_refused() -> None:
    full, block = autopar.Constraint(recompute="full"), autopar.Constraint("layers.1", recompute="block")
    with pytest.raises(PlanError, match=r"agree on what is recomputed of layers.1, found 'block', 'full'"):
        searched(None, full, block)
    with pytest.raises(PlanError, match=r"found none whose path matches 'blocks.\*'"):
        searched(None, autopar.Constraint("blocks.*", recompute="full"))
    with pytest.raises(PlanError, match=r'recompute as "none", "selective", "block" or "full", found \'all\''):
        autopar.Constraint(recompute="all")  # type: ignore[arg-type] # on purpose
