"""The plans that are proved for each model, made once a test session."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import autopar
from autopar import pipeline
from autopar.cost.compute import flops
from autopar.cost.files import profiles_folder
from autopar.ir.graph import Graph
from autopar.ir.placement import local_shape
from autopar.ir.plan import Plan
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.pipeline import template_of_graph
from autopar.trace import trace
from tests.equivalence import zoo

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "hsdp": {"dp": 4, "hsdp": 2, "zero": 1},
    "hsdp_zero3": {"dp": 4, "hsdp": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp_sequence": {"tp": 2, "sequence_parallel": True},
    "dp_tp": {"dp": 2, "tp": 2},
    "zero3_tp": {"dp": 2, "tp": 2, "zero": 3},
    "dp_microbatches": {"dp": 2, "microbatches": 2},
    "zero2_microbatches": {"dp": 2, "zero": 2, "microbatches": 2},
    "zero3_microbatches": {"dp": 2, "zero": 3, "microbatches": 2},
    "tp_microbatches": {"tp": 2, "microbatches": 4},
    "searched": {},
}
ONE_STAGE = "searched_one_stage"
"""Searched among plans of one stage: what is redistributed in it is one list."""

#: what each model of the zoo is proved in
STEP_PLANS = ("dp", "zero3", "tp", "dp_tp", "searched")
_SLOWDOWN = 10_000

BUDGET = autopar.SearchBudget(4.0, proposals=60)
"""The default search with less time and fewer proposals: every pass is in it, and tests take seconds less a model."""


@cache
def graph(model_name: str) -> Graph:
    """The model's graph on its batch."""
    model, batch = zoo.build(model_name)
    return trace(model, batch)


@cache
def slow_mesh(count: int = 4) -> autopar.Mesh:
    """Devices so slow that even tiny models are worth splitting: on real ones, the search replicates them all."""
    profile = json.loads((profiles_folder() / "cpu.json").read_text())
    facts = profile["facts"]
    facts["peak_flops"] = {dtype: rate / _SLOWDOWN for dtype, rate in facts["peak_flops"].items()}
    facts["memory_bandwidth"] /= _SLOWDOWN
    path = Path(tempfile.mkdtemp(prefix="autopar-test-")) / "slow.json"
    path.write_text(json.dumps(profile))
    return autopar.Mesh(str(path), devices_per_node=count)


@contextmanager
def traced(model_name: str) -> Iterator[None]:
    """A model is traced once for all its plans and programs."""
    with mock.patch.object(pipeline, "trace", lambda *_, **__: graph(model_name)):
        yield


def program(model_name: str, chosen: Plan) -> autopar.PlannedProgram:
    """The program of a plan for the model."""
    model, batch = zoo.build(model_name)
    with traced(model_name):
        return autopar.parallelize(model, chosen.mesh, batch, plan=chosen)


def template(model_name: str, **choices: Any) -> Plan:
    """A template's plan for as many ranks as it has."""
    world = choices.get("pp", 1) * choices.get("dp", 1) * choices.get("tp", 1)
    return template_of_graph(graph(model_name), autopar.Mesh("cpu", devices_per_node=world), **choices)


@cache
def plan(model_name: str, plan_name: str) -> Plan:
    """The template's plan, or the one searched for four slow devices; in one stage for four CPU ranks as they are."""
    if plan_name not in ("searched", ONE_STAGE):
        return template(model_name, **PLANS[plan_name])
    is_free = plan_name == "searched"
    mesh = slow_mesh() if is_free else autopar.Mesh("cpu", devices_per_node=4)
    rules = [] if is_free else [autopar.Constraint(stages=1)]
    model, batch = zoo.build(model_name)
    with traced(model_name):
        return autopar.parallelize(model, mesh, batch, constraints=rules, search=BUDGET).plan


def work_share(graph: Graph, plan: Plan) -> float:
    """Which share of the model's products (matrix products, attention, convolutions, experts) the first rank computes.

    1 / devices where all are split, 1 where none is.
    """
    first = (0,) * len(plan.stage.axes)
    whole, local = 0, 0
    for node in (node for node in graph.nodes if node.op in _PRODUCTS):
        placed = plan.stage.nodes[node.name]
        operands, results = ([graph.tensors[name].shape for name in names] for names in (node.operands, node.results))
        cut = (
            tuple(local_shape(shape, placement, plan.stage.axes, first) for shape, placement in zip(*pair, strict=True))
            for pair in ((operands, placed.operands), (results, placed.results))
        )
        whole += flops(node, tuple(operands), tuple(results))
        local += flops(node, *cut)
    return local / whole


_PRODUCTS = {
    *(f"aten.{name}.default" for name in ("linear", "mm", "bmm", "addmm", "matmul", "einsum", "baddbmm")),
    *(f"aten.conv{dims}d.default" for dims in (1, 2, 3)),
    "aten.scaled_dot_product_attention.default",
    "aten._grouped_mm.default",
    "transformers.grouped_mm_fallback.default",
    ROUTED_EXPERTS,
}
