"""What the search combines on unequal devices computes what the model computes: SOAP, three axes, blocks that are kept.

Each plan is found by the passes that find such plans, and its program is run on ranks that are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Constraint, Mesh, Plan, SearchBudget, parallelize
from autopar.driver import Candidate, Context, Front
from autopar.ir.graph import Graph
from autopar.ir.mesh import make_axes
from autopar.ir.outline import Outline
from autopar.passes.balance import balance
from autopar.passes.kinds import kinds
from autopar.pipeline import planned_jointly, template_of_graph
from autopar.profiler import profiles_of
from autopar.refinement import refined
from autopar.request import Request
from autopar.substitute import GraphCandidate
from autopar.trace import find_blocks, trace
from models import gpt
from tests.equivalence.on_threads import program_differences
from tests.oracles.frozen.cases import PROFILES

BUDGET = SearchBudget(10.0, substitutions=False, proposals=0)
DEEP = 5, 64  # layers, and positions of which what is saved is most of the memory


@cache
def built(num_layers: int = 4, seq_len: int = 16) -> tuple[nn.Module, Any]:
    config = gpt.Config(
        num_layers=num_layers, hidden_size=32, num_heads=8, seq_len=seq_len, vocab_size=64, batch_size=16
    )
    torch.manual_seed(0)
    return gpt.build(config), gpt.example_inputs(config)


@cache
def graph(*sizes: int) -> Graph:
    return trace(*built(*sizes))


def request(a_kind: int, **asked: Any) -> Request:
    mesh = Mesh([(PROFILES["a100"], 1, a_kind), (PROFILES["v100"], 1, a_kind)])
    return replace(Request(mesh, "train", "adamw", None, (), BUDGET), **asked)


def refined_stages() -> Plan:
    """What one kind of stage does after the other, from a template that sends too much."""
    return _refined({"pp": 2, "tp": 2, "microbatches": 2})


def refined_shares() -> Plan:
    """Rows that are shared out by speed stay so; storage and strategies are changed."""
    plan = _refined({"dp": 4, "zero": 3, "split": "speed"})
    assert plan.stage.axes[0].shares
    return plan


def _refined(template: dict[str, Any]) -> Plan:
    own = request(2, budget=replace(BUDGET, proposals=60, refine_seconds=60.0))
    start = template_of_graph(graph(), own.mesh, **template)
    plan = refined(graph(), find_blocks(graph()), own, profiles_of(own.mesh), start)
    assert plan.search.refinement is not None and plan.search.refinement.moves
    assert plan.predicted.step_time_ns < start.predicted.step_time_ns
    return plan


def three_axes_inside_stages() -> Plan:
    """Two stages of 2 × 2 × 2 devices each."""
    return _in(Outline((make_axes(("d0", "d1", "d2"), (2, 2, 2)),) * 2, 2), kinds, 8)


def three_axes_beside_shares() -> Plan:
    """Samples over the first of three axes."""
    return _in(Outline((make_axes(("d0", "d1", "d2"), (2, 2, 2)),), 1), balance, 4)


def _in(outline: Outline, search: Callable[..., Any], a_kind: int) -> Plan:
    """What a pass finds in an outline."""
    front = Front(graph())
    front.next_round()
    front.open = [Candidate(GraphCandidate(graph(), (), 0), outline)]
    (found,) = search(front, Context(request(a_kind)))
    plan: Plan = found.plan
    assert all(len(stage.axes) == 3 for stage in plan.stages)
    return plan


def some_blocks_again() -> Plan:
    """Under a limit that some blocks must be computed again for, and others need not."""
    own = request(2, constraints=(Constraint(stages=2), Constraint(microbatches=4)))
    free = planned_jointly(graph(*DEEP), own)[1]
    plan = planned_jointly(graph(*DEEP), replace(own, memory_limit=int(0.25 * free.predicted.peak_bytes)))[1]
    assert 0 < len({module.split(".")[1] for module in plan.recompute}) < 5
    return plan


@pytest.mark.sampled(only=("refined_stages", "refined_shares", "three_axes_beside_shares", "some_blocks_again"))
@pytest.mark.ranks
@pytest.mark.parametrize(
    "found",
    [refined_stages, refined_shares, three_axes_inside_stages, three_axes_beside_shares, some_blocks_again],
    ids=lambda one: one.__name__,
)
def test_it_equals_the_model(found: Callable[[], Plan]) -> None:
    plan = found()
    model, batch = built(*DEEP) if found is some_blocks_again else built()
    program = parallelize(model, plan.mesh, batch, plan=plan)
    faults = program_differences(model, batch, program)
    assert not faults, "\n".join(faults[:10])
