"""Functions, hooks and custom operators: a backward of somebody's own, not linear in the gradient, of a weight that
several operators read, is given the whole gradient, however the model is split; and what draws says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, TraceError
from autopar.trace import trace
from tests.carried.compared import compare, planned, sharded, single
from tests.carried.functions import Clipped
from tests.carried.models import CLASSES, WIDTH, batch

MOST = 0.003


@torch.library.custom_op("autopar_tests::bounded", mutates_args=())
def bounded(x: Tensor) -> Tensor:
    """Whose gradient is bounded element by element."""
    return x.clone()


bounded.register_fake(torch.empty_like)
bounded.register_autograd(lambda ctx, gradient: gradient.clamp(-MOST, MOST))


def _noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


tagged = torch.library.custom_op(
    "autopar_tests::tagged", _noisy, mutates_args=(), schema="(Tensor x) -> Tensor",
    tags=torch.Tag.nondeterministic_seeded,
)  # fmt: skip
silent = torch.library.custom_op("autopar_tests::silent", _noisy, mutates_args=(), schema="(Tensor x) -> Tensor")
later = torch.library.custom_op(
    "autopar_tests::later", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
)
for drawing in (tagged, silent, later):
    drawing.register_fake(torch.empty_like)
    drawing.register_autograd(lambda ctx, gradient: gradient)
later.register_autograd(lambda ctx, gradient: gradient * torch.rand_like(gradient))


class Read(nn.Module):
    """A weight that is read before and after a layer, each time as `how` passes it on."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.between, self.head, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.how(self.weight)
        h = self.between(F.linear(x, weight).tanh()).tanh()
        return F.cross_entropy(self.head(F.linear(h, weight)), y)


def _hooked(weight: Tensor) -> Tensor:
    h = weight.view_as(weight)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-MOST, MOST))
    return h


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda weight: Clipped.apply(weight, 0.01),
    "hook": _hooked,
    "operator": bounded,
}
HOWS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero": {"dp": 2, "zero": 3},
    "stages": {"devices": 2, "constraints": [autopar.Constraint(stages=2)]},
}


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOWS)
def test_it_is_given_the_whole_gradient(way: str, how: str) -> None:
    model = Read(WAYS[way])
    program = planned(model, batch(), **HOWS[how])
    assert len(program.plan.stages) == (2 if how == "stages" else 1)
    ranks = sharded(program, model, batch())
    assert compare(single(model, batch()), ranks) == []


@pytest.mark.parametrize("way", WAYS)
def test_not_of_each_microbatch_by_itself(way: str) -> None:
    with pytest.raises(PlanError, match=r"(?s)each microbatch by itself.*microbatches=1"):
        planned(Read(WAYS[way]), batch(), dp=2, microbatches=2)


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_that_runs_it_in_two_stages_is_refused(way: str) -> None:
    model = Read(WAYS[way])
    graph, mesh = trace(model, batch()), autopar.Mesh("h100", devices_per_node=2)
    plan = planned(model, batch(), **HOWS["stages"]).plan
    (node,) = [node for node in graph.nodes if node.op.startswith("autopar") and "weight" in node.operands]
    first, second = plan.stages
    own = first.nodes.get(node.name) or second.nodes[node.name]
    both = tuple(replace(stage, nodes={**stage.nodes, node.name: own}) for stage in plan.stages)
    with pytest.raises(PlanError, match=rf"(?s){node.name}.*in one stage, found it in 2"):
        autopar.parallelize(model, mesh, batch(), plan=replace(plan, stages=both))


def test_what_torch_derives_runs_where_it_is_read() -> None:
    """In both stages, rather than sent."""
    plan = planned(Read(lambda weight: weight * 2.0), batch(), **HOWS["stages"]).plan
    assert all(any(name.startswith("mul") for name in stage.nodes) for stage in plan.stages)


@pytest.mark.parametrize("how", ["dp", "tp", "zero"])
def test_an_operator_that_says_that_it_draws_draws_the_same_on_all_ranks(how: str) -> None:
    model = Read(tagged)
    ranks = sharded(planned(model, batch(), **HOWS[how]), model, batch())
    assert compare(single(model, batch()), ranks) == []


@pytest.mark.parametrize(("operator", "where"), [(silent, "numbers, found"), (later, "in its backward")])
def test_one_that_draws_and_does_not_say_so_is_refused(operator: Callable[[Tensor], Tensor], where: str) -> None:
    told = rf"(?s)autopar_tests.\w+.default at .*test_own_backward.py:\d+ to draw no.*{where}.*nondeterministic_seeded"
    with pytest.raises(TraceError, match=told):
        planned(Read(operator), batch(), dp=2)
