"""The search's choice of operators that keep bits: where memory binds, and never where it does not."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import pipeline
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import COMPILED, Plan
from autopar.microbatch import check_plan
from autopar.pipeline import template_of_graph
from autopar.running import running
from autopar.trace import trace
from autopar.zero import in_bits, rungs_in_bits, with_in_bits
from benchmarks.in_bits.run import Encoder

MESH = autopar.Mesh("cpu", devices_per_node=2)
BUDGET = autopar.SearchBudget(substitutions=False, proposals=0)
BATCH = {"x": torch.empty(8, 64, 64, device="meta")}


@cache
def model() -> nn.Module:
    with torch.device("meta"):
        return Encoder(4, 64)


@cache
def graph() -> Graph:
    return trace(model(), BATCH)


@cache
def searched(limit: int | None, with_bits: bool = True) -> Plan:
    rules = (autopar.Constraint(stages=1), autopar.Constraint(microbatches=1))
    passes = tuple(one for one in pipeline.PASSES if with_bits or one.__name__ != "in_bits")
    with mock.patch.object(pipeline, "trace", lambda *_, **__: graph()), mock.patch.object(pipeline, "PASSES", passes):
        return autopar.parallelize(
            model(), MESH, BATCH, memory_limit=limit, constraints=rules, search=BUDGET, check=False
        ).plan


def test_taken_where_memory_binds_and_it_is_faster() -> None:
    free = searched(None)
    assert not in_bits(free)
    limit = int(0.82 * free.predicted.peak_bytes)
    found, without = searched(limit), searched(limit, with_bits=False)
    assert in_bits(found) and found.predicted.peak_bytes <= limit
    assert found.predicted.step_time_ns < without.predicted.step_time_ns
    assert "in bits" in str(found) and "relu ×" in str(found) and "in bits: none | " in free.diff(found)
    check_plan(graph(), Plan.from_json(found.to_json()))


def test_rungs_free_more_and_more_and_leave_out_what_gains_nothing() -> None:
    """A ReLU before a product keeps nothing that the product does not keep."""
    rungs = rungs_in_bits(graph(), "cpu")
    assert rungs[0] == () and all(set(less) < set(more) for less, more in itertools.pairwise(rungs))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.down(torch.relu(self.up(x))).sum()
            return made

    assert rungs_in_bits(trace(Plain(), {"x": torch.randn(4, 8)}), "cpu") == ((),)


def template(**choices: Any) -> Plan:
    return template_of_graph(graph(), MESH, dp=2, **choices)


def kept(plan: Plan, *names: str) -> Plan:
    return with_in_bits(plan, names or rungs_in_bits(graph(), "cpu")[-1])


def test_refusals_name_the_operator() -> None:
    plan = kept(template())
    check_plan(graph(), plan)
    linear = next(node.name for node in graph().nodes if "linear" in node.op)
    relu = next(node for node in graph().nodes if "relu" in node.op)
    again = f"{relu.scope.module}.{relu.name}()"
    for wrong, said in (
        (kept(template(), linear), f"found {linear}"),
        (replace(plan, runs=COMPILED), "runs eagerly"),
        (replace(plan, mode="inference"), "found inference"),
        (replace(plan, recompute=(again,)), f"found {relu.name} to be both"),
    ):
        with pytest.raises(PlanError, match=said):
            check_plan(graph(), wrong)


def test_files_say_true_or_nothing() -> None:
    data = json.loads(kept(template()).to_json())
    name, row = next((name, row) for name, row in data["stages"][0]["nodes"].items() if len(row) == 3)
    assert row[2] is True
    for wrong in (False, 1, "yes", None):
        data["stages"][0]["nodes"][name][2] = wrong
        with pytest.raises(PlanError):
            Plan.from_json(json.dumps(data))


def test_what_is_compiled_keeps_what_the_compiler_says() -> None:
    found = running(kept(template()), graph(), COMPILED, None)
    assert found.runs == COMPILED and not in_bits(found)
