"""The problem counts the state of each optimizer as the simulator does."""

from __future__ import annotations

import pytest

import autopar
from autopar.cost.memory import OPTIMIZERS
from autopar.ir.mesh import make_axes
from autopar.ir.placement import I, R
from autopar.ir.plan import Storage
from autopar.pipeline import template_of_graph
from autopar.planning import Place, divided
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.simulate.residents import STEP_COUNT_BYTES
from autopar.trace import find_blocks, trace
from models import mlp


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None])
def test_state_is_what_the_simulator_holds(optimizer: str | None) -> None:
    graph, mesh = trace(mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())), autopar.Mesh("h100", 1, 2)
    request = Request(mesh, "train", optimizer, None, (), SearchBudget())
    part = divided(graph, find_blocks(graph), 1)
    costs = Place(part, make_axes(("dp",), (2,)), request, load_profile("h100")).costs
    parameters = [graph.tensors[item.tensor] for item in graph.parameters]
    counted = sum(int(costs.state_bytes(tensor, [Storage((I,))], [(R,)])[0, 0]) for tensor in parameters)
    elements = sum(tensor.num_elements for tensor in parameters)
    held = template_of_graph(graph, mesh, dp=2, optimizer=optimizer).predicted.memory.get("optimizer", 0)
    scalars = STEP_COUNT_BYTES * len(parameters) if held else 0
    assert counted == 2 * 4 * elements + held - scalars
