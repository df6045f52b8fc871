"""Stages on unequal submeshes compute what the model computes: tensors cross between unlike axes both ways."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import profiles_of
from autopar.simulate import simulate, traffic_by_submesh
from autopar.staging import cut, stages_of_sizes
from autopar.trace import find_blocks, trace
from models import gpt
from tests.equivalence import zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool

Axes = dict[str, Any]

#: by name: what each stage has, as `template_plan` is asked for it, and the schedule
PLANS: dict[str, tuple[tuple[Axes, ...], str]] = {
    "1+3": (({}, {"dp": 3}), "1f1b"),
    "3+1 gpipe": (({"dp": 3, "zero": 3}, {}), "gpipe"),
    "1+3 tp": (({}, {"tp": 3}), "1f1b"),
    "2+2 dp tp": (({"dp": 2}, {"tp": 2}), "1f1b"),
    "2+2 tp dp": (({"tp": 2}, {"dp": 2, "zero": 1}), "gpipe"),
    "2+1 turned": (({"tp": 2}, {}), "1f1b"),  # the first stage on the last ranks
    "1+2+1": (({}, {"tp": 2, "sequence_parallel": True}, {}), "1f1b"),
}
#: a sample: `tests.equivalence.pipelines` proves plans like the others, with every schedule, of six models
CASES = [("gpt", "1+3"), ("gpt", "3+1 gpipe"), ("gpt", "2+1 turned"), ("gpt", "1+2+1"), ("moe", "2+2 tp dp")]


@cache
def built(name: str) -> tuple[nn.Module, Any]:
    """A model of the zoo; of gpt, one with a tied head and batches that three ranks share unevenly."""
    if name != "gpt":
        return zoo.build(name)
    config = gpt.Config(
        num_layers=3, hidden_size=24, num_heads=3, seq_len=8, vocab_size=50, batch_size=10, tie_head=True
    )
    torch.manual_seed(0)
    return gpt.build(config), gpt.example_inputs(config)


@cache
def graph(name: str) -> Graph:
    return trace(*built(name))


@cache
def single(name: str) -> Any:
    return run_single(*built(name), ("adamw",))


def planned(model_name: str, plan_name: str) -> Plan:
    """Each stage planned on a mesh of its own; a block for each but the last, which has the others."""
    (shapes, schedule), whole = PLANS[plan_name], graph(model_name)
    sizes = [shape.get("dp", 1) * shape.get("tp", 1) for shape in shapes]
    plans = [
        template_of_graph(whole, autopar.Mesh("cpu", 1, size), microbatches=2, **shape)
        for size, shape in zip(sizes, shapes, strict=True)
    ]
    paths = [path for group in find_blocks(whole).paths for path in group]
    members = stages_of_sizes(whole, paths, [1] * (len(sizes) - 1) + [len(paths) - len(sizes) + 1])
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    if plan_name.endswith("turned"):
        firsts = [sum(sizes) - first - size for first, size in zip(firsts, sizes, strict=True)]
    mesh = autopar.Mesh("cpu", devices_per_node=sum(sizes))
    return cut(whole, plans, members, firsts, schedule, mesh, profiles_of(mesh))


@pytest.mark.sampled(only=("gpt-3+1 gpipe", "gpt-1+2+1", "moe-2+2 tp dp"))
@pytest.mark.ranks
@pytest.mark.parametrize(("model_name", "plan_name"), CASES)
def test_unequal_stages_equal_the_model(model_name: str, plan_name: str) -> None:
    model, batch = built(model_name)
    plan = planned(model_name, plan_name)
    program = autopar.parallelize(model, plan.mesh, batch, plan=plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(plan.mesh.num_devices).run(run_rank, program.source, state, batch, ("adamw",))
    found = differences(single(model_name), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}
    assert len({norm.item() for _, _, norm, *_ in results}) == 1
    check_bytes(plan, model_name, [result[4] for result in results])


def check_bytes(plan: Plan, model_name: str, counted: list[Mapping[str, int]]) -> None:
    """Collectives as predicted on every rank; sends on the busiest of each submesh."""
    whole = graph(model_name)
    part = divided_graph(whole, plan.microbatches)
    timeline = simulate(part, plan, profiles_of(plan.mesh))
    for lane, predicted in zip(timeline.lanes, traffic_by_submesh(whole, plan, timeline), strict=True):
        own = [dict(counted[rank]) for rank in lane.ranks]
        assert max(sent.pop("send", 0) for sent in own) == predicted.pop("send", 0)
        assert own[0] == predicted
