"""Compiled blocks: what is joined in a kernel, what that saves, and what a plan says of it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Plan
from autopar.cost.compute import node_time_ns
from autopar.cost.fusion import Fused, compiled_time_ns, fusions
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import COMPILED
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.step import with_simulator
from autopar.trace import trace

ROWS, WIDTH = 4096, 1024


class Gate(nn.Module):
    """Three operators in a row that move memory, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x (ROWS, WIDTH) → a number."""
        made = self.up(x)
        return self.down((made.sin() * made).exp()).sum()


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        return trace(Gate(), (torch.empty(ROWS, WIDTH),))


def by_op(graph: Graph) -> dict[str, str]:
    return {node.op.split(".")[1]: node.name for node in graph.nodes}


def test_what_is_read_in_the_kernel_that_makes_it_stays_in_registers(graph: Graph) -> None:
    ops = by_op(graph)
    found = fusions(graph, frozenset(), {})
    assert found[ops["sin"]] == Fused((False,), (True,))
    assert found[ops["mul"]] == Fused((True, False), (True,))
    assert found[ops["exp"]] == Fused((True,), (False,))
    assert ops["linear"] not in found


def test_a_redistribution_ends_a_piece(graph: Graph) -> None:
    ops = by_op(graph)
    (product,) = next(node.results for node in graph.nodes if node.name == ops["mul"])
    assert set(fusions(graph, frozenset({product}), {})) == {ops["sin"], ops["mul"]}


def test_what_is_saved_is_made_again_from_what_the_kernel_reads(graph: Graph) -> None:
    ops = by_op(graph)
    sine = next(node.results for node in graph.nodes if node.name == ops["sin"])
    assert all(one.makes_again for one in fusions(graph, frozenset(), {ops["mul"]: sine}).values())


def test_a_kernel_moves_what_enters_and_leaves_it_and_is_launched_once(graph: Graph) -> None:
    """sin, mul and exp read and write 7 tensors apart, 3 joined (mul reads again what sin has read)."""
    h100 = load_profile("h100")
    h100 = replace(h100, facts=replace(h100.facts, launch_ns=(10**6, 10**6)), _shared={})
    found, eager, compiled = fusions(graph, frozenset(), {}), 0, 0
    for node in graph.nodes:
        if node.name in found:
            shapes = [tuple(graph.tensors[name].shape for name in names) for names in (node.operands, node.results)]
            eager += node_time_ns(node, *shapes, graph.tensors, h100)[0]
            compiled += compiled_time_ns(node, *shapes, graph.tensors, h100, found[node.name])[0][0]
    launches = 1e6 if h100.curve("pointwise").call_ns is None else 0
    assert (compiled - launches) / (eager - 3 * launches) == pytest.approx(3 / 7, rel=0.15)


def test_a_plan_says_what_it_predicts_and_takes_less_time_and_memory(graph: Graph) -> None:
    eager = with_simulator(template_of_graph(graph, autopar.Mesh("h100", devices_per_node=2), dp=2), graph)
    compiled = eager.compiled()
    assert compiled.runs == COMPILED
    assert compiled.predicted.step_time_ns < eager.timeline().step_time_ns
    assert compiled.predicted.peak_bytes < eager.timeline().peak_bytes
    assert compiled.predicted.comm_bytes == eager.predicted.comm_bytes
    assert "runs" not in json.loads(eager.to_json())
    assert Plan.from_json(compiled.to_json()) == compiled
    assert "rank.compile()" in str(compiled)
    assert "rank.compile()" not in str(eager)
    with pytest.raises(PlanError, match="lacks"):
        Plan.from_json(eager.to_json()).compiled()
