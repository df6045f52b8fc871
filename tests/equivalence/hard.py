"""What the tests of the hard cases share: a model on a plan must equal the model on one device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import autopar
from autopar.intraop import builder
from autopar.intraop.strategies import Strategy, enumerate_strategies
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import make_axes
from autopar.ir.placement import parse_placement
from autopar.ir.plan import Plan
from autopar.planning import Place, divided
from autopar.profiler import load_profile
from autopar.program import PlannedProgram
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks, trace
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool
from tests.routed_bytes import bytes_of

Tensors = dict[str, torch.Tensor]
OPTIMIZERS = ("sgd",)


def template(model: nn.Module, batch: Tensors, **choices: Any) -> PlannedProgram:
    """The program of a template for as many ranks as its axes have."""
    world = math.prod(choices.get(name, 1) for name in ("dp", "cp", "tp"))
    mesh = autopar.Mesh("cpu", devices_per_node=world)
    return autopar.parallelize(model, mesh, batch, plan=autopar.template_plan(model, mesh, batch, **choices))


def planned(
    model: nn.Module, batch: Tensors, axes: dict[str, int], *constraints: Constraint, mode: str = "train",
    microbatches: int = 1, only: Mapping[str, Sequence[str]] | None = None,
) -> PlannedProgram:  # fmt: skip
    """The best program on axes of these names and sizes under the constraints.

    `only`: for an operator, the placements in which it must read its first operands, whatever else is cheaper.
    """
    mesh = autopar.Mesh("cpu", devices_per_node=math.prod(axes.values()))
    graph = trace(model, batch, mode=mode)
    optimizer = "adamw" if mode == "train" else None
    request = Request(mesh, mode, optimizer, None, constraints, SearchBudget(10.0, gap=0.01))
    part = divided(graph, find_blocks(graph), microbatches)
    place = Place(part, make_axes(tuple(axes), tuple(axes.values())), request, load_profile("cpu"))
    with mock.patch.object(builder, "enumerate_strategies", partial(_restricted, only or {})):
        plan = place.fit(10.0)
    return autopar.parallelize(model, mesh, batch, plan=part.with_traffic(plan))


def _restricted(only: Mapping[str, Sequence[str]], graph: Graph, node: Node, *rest: Any) -> list[Strategy]:
    wanted = tuple(map(parse_placement, only.get(node.op, ())))
    return [s for s in enumerate_strategies(graph, node, *rest) if s.operands[: len(wanted)] == wanted]


def pin(pattern: str, type_: str, axis: str | None = None) -> tuple[Constraint, Constraint]:
    """A parameter stored and used as one type."""
    stored_, used_ = (Constraint(pattern, (type_,), what=what, axis=axis) for what in ("stored", "used"))
    return stored_, used_


def state_of(model: nn.Module) -> Tensors:
    """All tensors of the model, also the buffers that its state_dict leaves out."""
    return {**model.state_dict(), **dict(model.named_buffers())}


def assert_equal(model: nn.Module, batch: Tensors, program: PlannedProgram) -> list[Any]:
    """Loss, each gradient, clipped norm, weights after three steps, and bytes sent are as they must be."""
    state = state_of(model)
    results = pool(program.plan.mesh.num_devices).run(run_rank, program.source, state, batch, OPTIMIZERS)
    found = differences(run_single(model, batch, OPTIMIZERS), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    assert results[0][4] == bytes_of(program._graph, program.plan, model, batch)
    return results


def stored(plan: Plan, name: str) -> str:
    """How a parameter is stored: one type an axis."""
    return " ".join(map(str, plan.stage.storage[name].placement))


def operands_of(program: PlannedProgram, op: str) -> list[list[str]]:
    """For each node of an operator, the placements of its operands."""
    plan = program.plan
    nodes = [node for node in program._graph.nodes if node.op == op]
    return [[" ".join(map(str, placement)) for placement in plan.stage.nodes[node.name].operands] for node in nodes]
