"""Weights whose gradients meet as factors: the program equals the model, and sends and holds what the plan says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.emit import emit
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.placement import I, Placement, R
from autopar.ir.plan import NodePlan, Redistribute, Stage
from autopar.microbatch import check_plan
from autopar.ops.factors import LINEAR, factor_axes
from autopar.pipeline import template_of_graph
from autopar.program import model_state
from benchmarks.accuracy.memory import measure_rank
from models import mlp
from tests.equivalence import zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.equivalence.planned import graph
from tests.equivalence.predicted import bytes_by_submesh
from tests.rank_pool import pool

OPTIMIZERS = ("sgd", "adamw")
WIDTH = 96


class Wide(nn.Module):
    """Linear layers with and without bias on rows of two dims; one is called twice, one has a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.frozen, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """x (batch, rows, width), target as x → loss ()."""
        hidden = self.second(F.gelu(self.first(x)))
        hidden = self.twice(F.relu(self.frozen(self.twice(hidden))))
        return F.mse_loss(hidden, target)


@cache
def made(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Wide()
    return model, {"x": torch.randn(batch, 2, WIDTH), "target": torch.randn(batch, 2, WIDTH)}


@cache
def single(batch: int) -> Any:
    return run_single(*made(batch), OPTIMIZERS)


TEMPLATES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "uneven": {"dp": 4},
    "zero1": {"dp": 2, "zero": 1},
    "zero2_microbatches": {"dp": 2, "zero": 2, "microbatches": 2},
    "zero3": {"dp": 2, "zero": 3},
    "microbatches": {"dp": 2, "microbatches": 2},
    "dp_tp": {"dp": 2, "tp": 2},
    "zero3_tp": {"dp": 2, "tp": 2, "zero": 3},
    "hsdp": {"dp": 4, "hsdp": 2, "zero": 1},
    "bf16": {"dp": 2, "precision": "bf16"},
}


def planned(name: str, batch: int) -> autopar.PlannedProgram:
    model, inputs = made(batch)
    template = TEMPLATES[name]
    mesh = autopar.Mesh("cpu", devices_per_node=template.get("dp", 1) * template.get("tp", 1))
    plan = autopar.template_plan(model, mesh, inputs, gradients="factors", check=False, **template)
    return autopar.parallelize(model, mesh, inputs, plan=plan, precision=template.get("precision"), check=False)


@pytest.mark.ranks
@pytest.mark.parametrize("name", TEMPLATES)
def test_programs_equal_the_model(name: str) -> None:
    batch = 7 if name == "uneven" else 8
    program = planned(name, batch)
    assert "as factors over" in str(program.plan)
    assert "rt.linear_by_factors" in program.source
    model, inputs = made(batch)
    results = pool(program.plan.mesh.num_devices).run(run_rank, program.source, model.state_dict(), inputs, OPTIMIZERS)
    if name != "bf16":
        found = differences(single(batch), results[0])
        assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    said = {kind: size for kind, size in program.plan.predicted.comm_bytes.items() if size}
    assert max((result[4] for result in results), key=lambda sent: sum(sent.values())) == said


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["dp", "zero3"])
def test_ranks_hold_no_more_than_the_plan_says(name: str) -> None:
    program = planned(name, 8)
    model, inputs = made(8)
    results = pool(2).run(measure_rank, program.source, model_state(model) or {}, inputs)
    most = max(lifetimes.peak_bytes for lifetimes, _ in results)
    assert most <= program.plan.predicted.peak_bytes <= 1.1 * most


# Choosing ----------------------------------------

CONFIG = mlp.Config(widths=(256, 512, 512, 16), batch_size=8)
COPIES = (
    autopar.Constraint(stages=1),
    autopar.Constraint("*", ("S(0)",), what="input"),
    autopar.Constraint("layers.*", ("S(0)",), what="output"),
    autopar.Constraint("*", ("R", "I"), what="used"),
    autopar.Constraint("*", ("I",), what="stored"),
)
"""Data parallelism of copies, however gradients meet."""
MESH = autopar.Mesh("cpu", devices_per_node=2)


def _template(config: mlp.Config, **options: Any) -> autopar.Plan:
    return autopar.template_plan(mlp.build(config), MESH, mlp.example_inputs(config), check=False, **options)


def _by_factors(plan: autopar.Plan) -> set[str]:
    """The modules whose weights' gradients meet as factors."""
    return {
        plan.scope(name)[0]
        for stage in plan.stages
        for name, node in stage.nodes.items()
        if plan.scope(name)[1] == LINEAR and factor_axes(node.operands, stage.axes)
    }


def test_what_pays_meets_as_factors_and_what_does_not_as_sums() -> None:
    """The last layer's 16 outputs are fewer than its rows would have to be."""
    plan = _template(CONFIG, dp=2, gradients="factors")
    assert {"layers.0", "layers.1"} <= _by_factors(plan)
    sums = _template(CONFIG, dp=2)
    assert not _by_factors(sums) and plan.predicted.step_time_ns < sums.predicted.step_time_ns
    assert sum(plan.predicted.comm_bytes.values()) < sum(sums.predicted.comm_bytes.values()) / 4


def test_many_rows_meet_as_sums() -> None:
    config = mlp.Config(widths=CONFIG.widths, batch_size=1024)
    plans = [_template(config, dp=2, gradients=how) for how in ("factors", "sums")]
    assert plans[0].stages == plans[1].stages


def test_the_search_takes_factors_where_weights_are_whole() -> None:
    found = autopar.parallelize(
        mlp.build(CONFIG), MESH, mlp.example_inputs(CONFIG), constraints=COPIES, search="fast", check=False
    )
    assert {"layers.0", "layers.1"} <= _by_factors(found.plan)


def test_a_constraint_asks_for_them_though_they_cost_more() -> None:
    config = mlp.Config(widths=CONFIG.widths, batch_size=1024)
    rules = (
        autopar.Constraint(stages=1),
        autopar.Constraint("layers.1", ("S(0)",), what="output"),
        autopar.Constraint("layers.1.weight", ("I",), what="used"),
    )
    found = autopar.parallelize(
        mlp.build(config), MESH, mlp.example_inputs(config), constraints=rules, search="fast", check=False
    )
    assert _by_factors(found.plan) == {"layers.1"}


# Stages ----------------------------------------


def with_factors(whole: Graph, plan: autopar.Plan) -> autopar.Plan:
    """The plan with all linear operators over split rows by factors, whatever that costs."""
    return replace(plan, stages=tuple(_stage_with_factors(whole, stage) for stage in plan.stages))


def _stage_with_factors(whole: Graph, stage: Stage) -> Stage:
    nodes, moved = dict(stage.nodes), dict[tuple[str, Placement], Placement]()
    for name, placed in stage.nodes.items():
        node = whole.node_by_name[name]
        axes = [n for n, type_ in enumerate(placed.operands[0]) if type_.kind == "S"] if node.op == LINEAR else []
        over = [n for n in axes if placed.operands[1][n] == R and placed.results[0][n].kind == "S"]
        if over:
            whole_of = [tuple(I if n in over else t for n, t in enumerate(p)) for p in placed.operands[1:]]
            moved.update(zip(zip(node.operands[1:], placed.operands[1:], strict=True), whole_of, strict=True))
            nodes[name] = replace(placed, operands=(placed.operands[0], *whole_of))
    found = dict[tuple[str, Placement], Redistribute]()
    for item in stage.redistributes:
        target = moved.get((item.tensor, item.target))
        if target is None or _is_read(whole, nodes, item):
            found[item.tensor, item.target] = item
        if target is not None:
            steps = (s._replace(after=I) if s.after == R and target[s.axis] == I else s for s in item.steps)
            kept = tuple(step for step in steps if step.before != step.after)
            if kept:
                found[item.tensor, target] = Redistribute(item.tensor, target, kept)
    return replace(stage, nodes=nodes, redistributes=tuple(found.values()))


def _is_read(whole: Graph, nodes: dict[str, NodePlan], item: Redistribute) -> bool:
    readers = ((nodes[node.name], at) for node, at in whole.consumers[item.tensor] if node.name in nodes)
    return any(placed.operands[at] == item.target for placed, at in readers)


def _staged(schedule: str) -> autopar.Plan:
    mesh = autopar.Mesh("cpu", devices_per_node=4)
    return template_of_graph(graph("gpt"), mesh, dp=2, pp=2, microbatches=2, schedule=schedule)


@pytest.mark.ranks
def test_stages_equal_the_model() -> None:
    whole = graph("gpt")
    plan = with_factors(whole, _staged("1f1b"))
    check_plan(whole, plan)
    model, batch = zoo.build("gpt")
    results = pool(4).run(run_rank, emit(whole, plan), model_state(model) or {}, batch, OPTIMIZERS)
    found = differences(run_single(model, batch, OPTIMIZERS), results[0])
    assert not found, "\n".join(found)
    for ranks, said in bytes_by_submesh(plan, whole):
        assert results[ranks.start][4] == {kind: size for kind, size in said.items() if size}


def test_backward_passes_in_two_parts_are_refused() -> None:
    whole = graph("gpt")
    plan = with_factors(whole, _staged("zero_bubble"))
    with pytest.raises(PlanError, match="two parts, found I"):
        check_plan(whole, plan)


@pytest.mark.parametrize(
    ("options", "told"), [({"gradients": "rows", "dp": 2}, "sums, factors"), ({"pp": 2}, "one stage")]
)
def test_what_is_not_built_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        _template(CONFIG, **{"gradients": "factors", **options})
