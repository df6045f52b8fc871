"""The pass that has products compute beside what is sent around them."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.async_tp import kinds_of_sending
from autopar.by_hand import template_of_graph
from autopar.driver import Candidate, Context, Front, of_plan, outline_of
from autopar.ir.graph import Graph
from autopar.passes.async_tp import async_tp
from autopar.request import BUDGETS, Request
from autopar.rewrites import graph_of
from autopar.trace import trace
from models import llama

MESH = autopar.Mesh("h100", devices_per_node=4)


@pytest.fixture(scope="module")
def graph() -> Graph:
    config = llama.Config(
        vocab_size=1024, seq_len=4096, num_layers=2, hidden_size=4096, num_heads=32, num_kv_heads=8, mlp_size=14336,
        batch_size=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = llama.build(config).to(torch.bfloat16)
    return trace(model, {name: value.to("meta") for name, value in llama.example_inputs(config).items()})


def _changed(graph: Graph, plan: autopar.Plan, memory_limit: int | None = None) -> list[Candidate]:
    """What the pass makes of a plan that is the best so far."""
    front = Front(graph)
    front.opened = []
    front.add(of_plan(front.given, outline_of(plan), plan), "template")
    return [*async_tp(front, Context(Request(MESH, "train", "adamw", memory_limit, (), BUDGETS["fast"])))]


def _template(graph: Graph, **options: bool) -> autopar.Plan:
    return template_of_graph(graph, MESH, tp=4, sequence_parallel=True, **options)


def test_a_plan_that_stands_still_for_rows_is_changed(graph: Graph) -> None:
    plan = _template(graph)
    found = _changed(graph, plan)[0]
    answer = found.answer
    assert answer.predicted.step_time_ns < 0.95 * plan.predicted.step_time_ns
    exposed = [one.predicted.breakdown.exposed_communication_ns for one in (answer, plan)]
    assert exposed[0] < exposed[1] / 2
    assert answer.predicted.comm_bytes["ring"]
    rules = {step.rule for step in found.variant.steps}
    assert rules == {"gather-beside-products", "scatter-beside-products"}
    by_hand = _template(graph, async_tp=True)
    assert by_hand.predicted.step_time_ns == answer.predicted.step_time_ns
    assert graph_of(by_hand, graph).fingerprint == by_hand.fingerprint


def test_nothing_is_changed_twice(graph: Graph) -> None:
    plan = _template(graph, async_tp=True)
    told = graph_of(plan, graph)
    assert kinds_of_sending(told, plan) == []
    assert _changed(told, plan) == []


def test_what_does_not_fit_is_left_out(graph: Graph) -> None:
    plan = _template(graph)
    assert _changed(graph, plan, memory_limit=plan.predicted.peak_bytes // 2) == []
