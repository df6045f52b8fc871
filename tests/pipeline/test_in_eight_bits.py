"""The search's choice of activations in 8 bits: where it may, memory binds and nothing exact fits or is as fast; never
unasked."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar import pipeline
from autopar.cost.eight_bits import COMPRESSION
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.algorithm import Algorithm
from autopar.ir.graph import Graph
from autopar.ir.inexact import BY_FORMULA, by_formula
from autopar.ir.plan import COMPILED, Plan
from autopar.microbatch import check_plan
from autopar.pipeline import template_of_graph
from autopar.running import running
from autopar.trace import trace
from autopar.zero import in_bits, in_eight_bits, rungs_in_bits, rungs_in_eight_bits, that_run, with_in_bits
from models import gpt

MESH = autopar.Mesh("cpu", devices_per_node=2)
BUDGET = autopar.SearchBudget(substitutions=False, proposals=0)
CONFIG = gpt.Config(
    vocab_size=256, seq_len=64, num_layers=2, hidden_size=64, num_heads=4, batch_size=16, dropout=0.1
)  # fmt: skip


@cache
def model() -> nn.Module:
    with torch.device("meta"):
        return gpt.build(CONFIG)


@cache
def graph() -> Graph:
    return trace(model(), batch())


def batch() -> Any:
    with torch.device("meta"):
        return gpt.example_inputs(CONFIG)


@cache
def searched(limit: int | None, *allow: str, free: bool = False) -> Plan:
    """free: under no constraint; else one stage and microbatch of whole parameters, in which no block is computed
    again."""
    pinned = [autopar.Constraint(stages=1, microbatches=1), autopar.Constraint("*", recompute="none")]
    pinned += [autopar.Constraint("*", ("I",), what="stored"), autopar.Constraint("*", ("S(0)",), what="input")]
    with mock.patch.object(pipeline, "trace", lambda *_, **__: graph()):
        return autopar.parallelize(
            model(), MESH, batch(), memory_limit=limit, constraints=() if free else tuple(pinned), search=BUDGET,
            check=False, allow=allow,
        ).plan  # fmt: skip


def test_taken_where_nothing_exact_fits_and_it_may_be() -> None:
    free = searched(None, COMPRESSION)
    assert not in_eight_bits(free) and free.gradient_error is None
    limit = int(0.8 * free.predicted.peak_bytes)
    with pytest.raises(InfeasibleError):
        searched(limit)
    found = searched(limit, COMPRESSION)
    assert in_eight_bits(found) and found.predicted.peak_bytes <= limit
    assert found.gradient_error is not None and found.gradient_error.how == BY_FORMULA  # the model is on meta
    assert "in 8 bits" in str(found) and "gradients 0.91% off" in str(found)
    assert "in 8 bits: none | " in free.diff(found)
    read = Plan.from_json(found.to_json())
    assert read == found
    check_plan(graph(), read)


@pytest.mark.parametrize("share", [0.6])
def test_no_search_takes_it_unasked(share: float) -> None:
    most = searched(None, free=True).predicted.peak_bytes
    for allow in ((), ("offload",)):
        plan = searched(int(share * most), *allow, free=True)
        assert not in_eight_bits(plan) and plan.algorithm is None and plan.gradient_error is None


def kept(plan: Plan, *names: str) -> Plan:
    rung = rungs_in_eight_bits(graph(), "cpu")[-1]
    allowed = replace(plan, allow=(COMPRESSION,))
    return with_in_bits(allowed, rung.in_bits, names or that_run(graph(), plan, rung.in_eight_bits))


def test_rungs_begin_with_what_is_exact_and_free_more_and_more() -> None:
    rungs, exact = rungs_in_eight_bits(graph(), "cpu"), rungs_in_bits(graph(), "cpu")
    assert [rung.in_bits for rung in rungs[: len(exact)]] == [*exact]
    assert not any(rung.in_eight_bits for rung in rungs[: len(exact)]) and len(rungs) > len(exact)
    for less, more in zip(rungs[len(exact) :], rungs[len(exact) + 1 :], strict=False):
        assert set(less.in_eight_bits) < set(more.in_eight_bits)
    ops = {graph().node_by_name[name].op.split(".")[1] for name in rungs[-1].in_eight_bits}
    assert {"linear", "layer_norm", "gelu"} <= ops


def test_refusals_name_the_operator() -> None:
    plan = kept(template_of_graph(graph(), MESH, dp=2))
    check_plan(graph(), plan)
    lookup = next(node.name for node in graph().nodes if "embedding" in node.op)
    gelu = next(node for node in graph().nodes if "gelu" in node.op)
    again = f"{gelu.scope.module}.{gelu.name}()"
    for wrong, said in (
        (replace(plan, allow=()), 'expected allow=\\("compression",\\)'),
        (kept(plan, lookup), f"found {lookup}"),
        (replace(plan, runs=COMPILED), 'runs="eager"'),
        (replace(plan, mode="inference"), "found inference"),
        (replace(plan, recompute=(again,)), f"found {gelu.name}"),
    ):
        with pytest.raises(PlanError, match=said):
            check_plan(graph(), wrong)
    compiled = running(plan, graph(), COMPILED, None)
    assert compiled.runs == COMPILED and not in_eight_bits(compiled) and not in_bits(compiled)


def test_files_say_true_or_eight_or_nothing() -> None:
    data = json.loads(kept(template_of_graph(graph(), MESH, dp=2)).to_json())
    rows = data["stages"][0]["nodes"]
    name = next(name for name, row in rows.items() if row[2:] == [8])
    assert any(row[2:] == [True] for row in rows.values())
    for wrong in (False, 1, 7, 16, "yes", None):
        rows[name][2] = wrong
        with pytest.raises(PlanError):
            Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(("text", "amount"), [("topk", 0.02), ("powersgd", 4.0)])
def test_formulas_are_those_of_normally_distributed_values(text: str, amount: float) -> None:
    values = torch.randn(256, 192, generator=torch.Generator().manual_seed(0))
    if text == "topk":
        sent = values.abs() >= values.abs().flatten().kthvalue(round((1 - amount) * values.numel())).values
        off = float((values * ~sent).norm() / values.norm())
    else:
        left = torch.linalg.qr(values @ torch.randn(192, int(amount), generator=torch.Generator().manual_seed(1))).Q
        off = float((values - left @ (left.mT @ values)).norm() / values.norm())
    told = by_formula(Algorithm(text, "dp", amount=amount), False, [tuple(values.shape)])
    assert off == pytest.approx(told.relative, rel=0.03)
