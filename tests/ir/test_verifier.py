"""What the verifier refuses that no operator's rule would: storages and inputs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.errors import PlacementError
from autopar.ir import verifier
from autopar.ir.graph import Graph
from autopar.ir.placement import R, S
from autopar.ir.plan import Storage
from autopar.ops import admits
from autopar.trace import trace
from tests.random_programs.plans import Choices, make_plan, random_plan


def planned(microbatches: int, norm: bool) -> tuple[Graph, Choices]:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4) if norm else nn.ReLU())
    graph = trace(model, (torch.randn(8, 6),), loss_fn=lambda output: output.square().mean())
    for seed in range(200):
        choices = random_plan(graph, (2,), random.Random(seed))
        if choices is not None and choices.microbatches == microbatches:
            return graph, choices
    raise AssertionError("no such plan")


def test_a_buffer_that_forward_changes_is_stored_whole() -> None:
    graph, choices = planned(1, norm=True)
    name = next(s.tensor for s in graph.stored if s.name.endswith("running_mean"))
    split = replace(choices, storage={**choices.storage, name: Storage((S(0),))})
    with pytest.raises(PlacementError, match=r"running_mean.*, which forward updates, stored as R, found"):
        make_plan(graph, split)


def test_microbatches_cut_the_inputs_that_the_plan_says() -> None:
    graph, choices = planned(2, norm=False)
    plan, _ = make_plan(graph, choices)
    (name,) = plan.microbatch_inputs
    whole = plan.placed(inputs={name: (R, *plan.stage.inputs[name][1:])})
    with pytest.raises(PlacementError, match=r"as S\(0\) over microbatches, found R"):
        verifier.verify(graph, whole, admits)
