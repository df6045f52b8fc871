"""Stages that differ in their submeshes, and in what they compute again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import autopar
from autopar.interop import ChosenStage
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES
from autopar.microbatch import check_plan
from autopar.pipeline import planned, simulated_step
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.staged.finalists import Finalists, first_ranks
from autopar.staged.layered import Layered
from autopar.staged.mixing import _candidates, _ways, keeping_more, mixed
from autopar.staged.search import StagedSearch
from autopar.trace import find_blocks, trace
from models import gpt
from tests.oracles.frozen.cases import PROFILES

MESH = autopar.Mesh("cpu", devices_per_node=4)


@cache
def graph() -> Graph:
    config = gpt.Config(num_layers=5, hidden_size=128, num_heads=4, seq_len=32, vocab_size=256, batch_size=16)
    with torch.device("meta"):
        model = gpt.build(config)
    return trace(model, {name: tensor.to("meta") for name, tensor in gpt.example_inputs(config).items()})


def searched(limit: int | None = None) -> StagedSearch:
    request = Request(MESH, "train", "adamw", limit, (autopar.Constraint(microbatches=8),), SearchBudget(60.0))
    return StagedSearch(Layered(graph(), find_blocks(graph()), request, load_profile("cpu")))


def stated(finalists: Finalists, candidate: object) -> Plan:
    played = finalists._simulated(candidate)  # type: ignore[arg-type]
    plan = finalists.stated(candidate, played)  # type: ignore[arg-type]
    check_plan(graph(), plan)
    assert simulated_step(graph(), plan).step_time_ns == plan.predicted.step_time_ns == played.step_time_ns
    assert Plan.from_json(plan.to_json()) == plan
    return plan


def test_stages_on_submeshes_of_two_sizes_are_built_and_take_about_what_is_estimated() -> None:
    search = searched()
    found = [c for c in search.run(lambda _: None) if c.schedule == "1f1b"]
    kinds = [search.layered.kind(next(c.ways[0] for c in found if c.ways[0].setting.num_devices == n)) for n in (1, 2)]
    chosen = [ChosenStage(0, 2, 0), ChosenStage(2, 3, 0), ChosenStage(3, 5, 1)]
    stages = [kinds[kind] for _, _, kind in chosen]
    time_ns = [int(k.time_ns[begin:end].sum()) for k, (begin, end, _) in zip(stages, chosen, strict=True)]
    candidate = next(iter(_candidates(search.layered, kinds, chosen, sum(time_ns) + 7 * max(time_ns), 0)))
    assert candidate.row.mesh == "1 + 2" and candidate.row.stages == 3
    plan = stated(Finalists(search, [*found, candidate], [].append), candidate)
    assert [(stage.ranks.start, len(stage.ranks)) for stage in plan.stages] == [(2, 1), (3, 1), (0, 2)]
    assert candidate.step_ns == pytest.approx(plan.predicted.step_time_ns, rel=0.25)
    assert 0.9 * plan.predicted.peak_bytes <= candidate.peak_bytes <= 1.5 * plan.predicted.peak_bytes
    assert "layers.4.mlp.up: " in plan.explain("layers.4.mlp")


def test_mixing_finds_nothing_slower_than_what_all_alike_allow() -> None:
    search = searched()
    found = search.run(lambda _: None)
    for candidate in mixed(search.layered, found, search.clock):
        alike = [c.step_ns for c in found if c.schedule == "1f1b" and c.microbatches == candidate.microbatches]
        assert candidate.step_ns <= min(alike) or len(set(candidate.recompute)) > 1


def test_where_stages_of_one_size_wait_others_are_looked_at_too() -> None:
    """On devices that share no cores bounds leave out sizes that are slower for all stages alike."""
    mesh = autopar.Mesh(PROFILES["h100"], devices_per_node=4)
    request = Request(mesh, "train", "adamw", None, (autopar.Constraint(microbatches=8),), SearchBudget(60.0))
    layered = Layered(graph(), find_blocks(graph()), request, load_profile(mesh.profile))
    found = StagedSearch(layered).run(lambda _: None)
    of_one = [c for c in found if c.ways[0].setting.num_devices == 1]  # five layers in four stages
    assert of_one and {way.setting.num_devices for way in _ways(layered, of_one)} == {1, 2}


@pytest.mark.parametrize("schedule, stages", [("1f1b", 2), ("interleaved", 4), ("interleaved", 6)])
def test_as_few_layers_are_computed_again_as_memory_allows(schedule: str, stages: int) -> None:
    """Of six stages of five layers the head is one by itself."""
    search = searched()
    every = [c for c in search.frugal() if c.schedule == schedule and set(c.recompute) == {"full"}]
    whole = next(c for c in every if len(c.ways) == stages and c.num_submeshes == 2)
    limit = whole.peak_bytes + (400_000 if schedule == "1f1b" else 1_200_000)
    fewer = keeping_more(search.layered, whole, limit)
    assert fewer is not None and fewer.step_ns < whole.step_ns and fewer.peak_bytes <= limit
    assert "none" in fewer.recompute and set(fewer.recompute) <= {*search.layered.recomputations}
    assert keeping_more(search.layered, fewer, limit) is None, "as many as fit are kept at once"
    finalists = Finalists(search, [whole], [].append)
    before, plan = stated(finalists, whole), stated(finalists, fewer)
    assert plan.predicted.step_time_ns < before.predicted.step_time_ns
    assert before.predicted.peak_bytes <= plan.predicted.peak_bytes
    again = {path for path, name in zip(search.layered.path_of_layer, fewer.recompute, strict=True) if name != "none"}
    assert {".".join(name.split(".")[:2]) for name in plan.recompute} == again
    assert len(again) < len(before.recompute) == 5


def test_a_limit_leaves_some_layers_as_they_are() -> None:
    budget = SearchBudget(60.0, proposals=0)
    request = Request(MESH, "train", "adamw", None, (autopar.Constraint(stages=2, microbatches=8),), budget)
    free = planned(graph(), request)
    limit = int(free.predicted.peak_bytes * 0.75)
    plan = planned(graph(), replace(request, memory_limit=limit))
    assert plan.predicted.peak_bytes <= limit
    check_plan(graph(), plan)


def test_larger_submeshes_come_first_and_none_crosses_a_node() -> None:
    assert first_ranks([2, 4, 2]) == [4, 0, 6]
    assert first_ranks([2, 2, 4, 8]) == [12, 14, 8, 0]
    assert first_ranks([2, 2, 2]) == [0, 2, 4]
    assert SCHEDULES["interleaved"].in_turn([0, 2], 2) == [0, 2, 0, 2], "chunks begin again"
    assert SCHEDULES["zero_bubble_v"].in_turn([0, 2], 2) == [0, 2, 2, 0]
