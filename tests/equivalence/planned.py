"""The plans that are proved: nine for each model, made once a test session."""

from __future__ import annotations

from functools import cache
from typing import Any

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.trace import trace
from tests.equivalence import zoo

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp_sequence": {"tp": 2, "sequence_parallel": True},
    "dp_tp": {"dp": 2, "tp": 2},
    "zero3_tp": {"dp": 2, "tp": 2, "zero": 3},
    "searched": {},
}


@cache
def graph(model_name: str) -> Graph:
    """The model's graph on its batch."""
    model, batch = zoo.build(model_name)
    return trace(model, batch)


@cache
def plan(model_name: str, plan_name: str) -> Plan:
    """The template's plan, or the searched one for 4 ranks."""
    model, batch = zoo.build(model_name)
    choices = PLANS[plan_name]
    if not choices:
        return autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=4), batch).plan
    world = choices.get("dp", 1) * choices.get("tp", 1)
    return autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=world), batch, **choices)
