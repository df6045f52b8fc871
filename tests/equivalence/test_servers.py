"""Gradients that are summed over servers: split as links ask for, equal to the model, sent as the plan says, and
refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch

import autopar
import autopar.runtime
from autopar.emit import emit
from autopar.errors import MeshError, PlacementError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.placement import Axis, I, R, S
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Step, over_servers
from autopar.ir.servers import Servers, node_share, server_share, split, total
from autopar.microbatch import check_plan
from autopar.pipeline import template_of_graph
from autopar.planning import divided
from autopar.runtime.declare import Program
from autopar.runtime.servers import _rows, is_server
from autopar.step import simulated_again
from autopar.trace import find_blocks
from tests.equivalence import zoo
from tests.equivalence.harness import differences, run_single
from tests.equivalence.planned import graph
from tests.equivalence.served import gradients, peak, run_lost, run_served, train

OPTIMIZERS = ("adamw",)


@cache
def single(name: str) -> Any:
    model, batch = zoo.build(name)
    return run_single(model, batch, OPTIMIZERS)


def with_servers(whole: Graph, plan: Plan) -> Plan:
    """The plan with each sum over one axis by servers, whatever it costs."""
    axes, trained = plan.stage.axes, {item.tensor for item in whole.stored if item.requires_grad}

    def marked(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return over_servers(tuple(step._replace(is_served=False) for step in steps), axes) or steps

    made = (replace(r, steps=marked(r.steps)) if r.tensor in trained else r for r in plan.stage.redistributes)
    found = plan.placed(redistributes=tuple(made))
    return divided(whole, find_blocks(whole), plan.microbatches).with_traffic(found)


def planned(model: str, mesh: str, **template: Any) -> Plan:
    whole = graph(model)
    return with_servers(whole, template_of_graph(whole, autopar.Mesh.parse(mesh), **template))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "template", "parts"),
    [
        ("cpu:2x1+servers:1", {"dp": 2, "microbatches": 2}, (1, 2)),
        ("cpu:2x1+servers:2", {"dp": 2, "precision": "bf16"}, (0, 1)),
        ("cpu:2x2+servers:1", {"dp": 2, "tp": 2}, (1, 2)),
    ],
    ids=["also workers sum", "servers alone", "two sums side by side"],
)
def test_programs_equal_the_model(mesh: str, template: dict[str, Any], parts: tuple[int, int]) -> None:
    plan, whole = planned("gpt", mesh, **template), graph("gpt")
    check_plan(whole, plan)
    source = emit(whole, plan)
    servers = plan.mesh.servers
    assert servers is not None and plan.num_processes == plan.mesh.num_devices + servers.count
    assert f"SERVERS = rt.Servers({servers.count}, (('dp', {parts}),))" in source
    model, batch = zoo.build("gpt")
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = run_served(plan.mesh.num_devices, servers.count, source, train, state, batch, OPTIMIZERS)
    found = differences(single("gpt"), results[0]) if "precision" not in template else []
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results[: plan.mesh.num_devices]} == {results[0][0].item()}
    assert results[0][4] == {kind: size for kind, size in plan.predicted.comm_bytes.items() if size}
    assert results[0][4]["servers"] > 0
    assert results[plan.mesh.num_devices :] == [None] * servers.count  # they end when the workers do


@pytest.mark.ranks
def test_workers_get_the_same_bits() -> None:
    plan, whole = planned("gpt", "cpu:3x1+servers:1", dp=3), graph("gpt")
    model, batch = zoo.build("gpt")
    results = run_served(3, 1, emit(whole, plan), gradients, dict(model.state_dict()), batch)
    for result in results[1:3]:
        assert all(map(torch.equal, results[0], result)) and len(result) == len(results[0])


@pytest.mark.ranks
def test_no_worker_takes_more_than_predicted() -> None:
    """Nor sends more; workers sum some, too."""
    whole = graph("gpt")
    plan = planned("gpt", "cpu:2x1+servers:1", dp=2)
    model, batch = zoo.build("gpt")
    results = run_served(2, 1, emit(whole, plan), peak, dict(model.state_dict()), batch)
    assert max(results[:2]) <= simulated_again(plan, whole).predicted.peak_bytes < 1.5 * max(results[:2])


@pytest.mark.ranks
def test_a_lost_worker_is_told_by_all() -> None:
    plan, whole = planned("gpt", "cpu:2x1+servers:1", dp=2), graph("gpt")
    _, batch = zoo.build("gpt")
    told = run_lost(2, 1, emit(whole, plan), batch)
    assert "a sum of servers/dp/0 did not come to its end; most likely a worker ended" in told


def test_links_end_together() -> None:
    """For a worker a node and equal links: BytePS, section 4.1."""
    for workers, count in [(4, 2), (8, 3), (16, 5), (3, 2)]:
        parts = split(Servers(count), workers, 1, workers)
        exact = Fraction(workers - count, workers**2 + count * workers - 2 * count)
        assert Fraction(parts[0], total(parts, count, workers)) == exact
        assert node_share(parts, count, workers, 1) == pytest.approx(workers * server_share(parts, count, workers))
    assert split(Servers(4), 4, 1, 4) == (0, 1)  # as many servers need no help
    assert split(Servers(2, speed=2.0), 4, 1, 4) == (0, 1)
    slower = split(Servers(2, speed=0.5), 4, 2, 2)  # two a node: what they sum for each other stays there
    assert node_share(slower, 2, 4, 2) == pytest.approx(2 * server_share(slower, 2, 4) / 0.5)


def test_meshes_with_servers() -> None:
    mesh = autopar.Mesh("cpu", nodes=4, servers=2)
    assert str(mesh) == "cpu:4x1+servers:2" and autopar.Mesh.parse(str(mesh)) == mesh and mesh.num_devices == 4
    slow = autopar.Mesh("cpu", nodes=4, servers=autopar.Servers(2, speed=0.25))
    assert str(slow) == "cpu:4x1+servers:2@0.25" and autopar.Mesh.parse(str(slow)) == slow
    for wrong in (0, -1, 1.5, "two", autopar.Servers(2, 0.0)):
        with pytest.raises(MeshError, match="expected 1 to 4,096 servers"):
            autopar.Mesh("cpu", servers=wrong)
    with pytest.raises(MeshError, match='expected servers such as "servers:2"'):
        autopar.Mesh.parse("cpu:4x1+servers:many")
    with pytest.raises(MeshError, match="expected servers beside CPU ranks"):
        template_of_graph(graph("gpt"), autopar.Mesh.parse("h100:4x1+servers:2"), dp=4)


def test_they_are_taken_where_they_are_faster() -> None:
    """Of two workers, each link carries as much either way; of four, a ring's carry 1.5 times as much."""
    whole = graph("gpt")
    for mesh, takes in [("cpu:2x1+servers:2", False), ("cpu:4x1+servers:4", True), ("cpu:1x4+servers:2", False)]:
        plan = template_of_graph(whole, autopar.Mesh.parse(mesh), dp=autopar.Mesh.parse(mesh).num_devices)
        assert plan.uses_servers == takes, mesh
        assert plan.num_processes == plan.mesh.num_devices + 4 * takes
    other = template_of_graph(whole, autopar.Mesh.parse("cpu:4x1"), dp=4)
    served = template_of_graph(whole, autopar.Mesh.parse("cpu:4x1+servers:4"), dp=4)
    assert served.predicted.step_time_ns < other.predicted.step_time_ns
    assert "gradients   of 37 parameters summed by 4 servers over dp, each of which sums 1/4" in str(served)


def test_files_keep_them_and_the_verifier_knows_them() -> None:
    whole, plan = graph("gpt"), planned("gpt", "cpu:2x1+servers:1", dp=2)
    again = Plan.from_json(plan.to_json())
    assert again.stages == plan.stages and again.mesh == plan.mesh
    with pytest.raises(PlanError, match="expected a mesh with servers"):
        check_plan(whole, replace(plan, mesh=autopar.Mesh("cpu", nodes=2)))
    twice = replace(plan.stage, storage={n: replace(s, on_host=True) for n, s in plan.stage.storage.items()})
    with pytest.raises(PlacementError, match="expected a sum over servers of the gradient of a parameter"):
        check_plan(whole, replace(plan, stages=(twice,)))


def test_only_the_last_sum_goes_over_servers() -> None:
    axes = (Axis("a", 2, 2), Axis("b", 2, 1))
    assert over_servers((Step(0, I, R),), axes) == (Step(0, I, R, is_served=True),)
    assert over_servers((Step(0, I, R), Step(1, I, R)), axes) is None
    assert over_servers((Step(0, I, R), Step(1, S(0), R)), axes) is None
    one = (axes[0], Axis("b", 1, 1))
    assert over_servers((Step(0, I, R), Step(1, I, R)), one) == (Step(0, I, R, is_served=True), Step(1, I, R))


def test_processes_know_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    program = type("Program", (Program,), {"AXES": {"dp": 2, "tp": 2}, "SERVERS": autopar.runtime.Servers(1, ())})
    for rank, serves in [("3", False), ("4", True)]:
        monkeypatch.setenv("RANK", rank)
        assert is_server(program) == serves and not is_server(Program)
    assert _rows({"dp": 2, "tp": 2}, "dp") == [[0, 2], [1, 3]]
