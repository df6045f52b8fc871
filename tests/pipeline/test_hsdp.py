"""Hierarchical data parallelism: shards among neighbours, copies of them across."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from autopar import Constraint, Mesh
from autopar.errors import MeshError
from autopar.ir.mesh import make_axes
from autopar.ir.placement import I, S
from autopar.ir.plan import Plan
from autopar.pipeline import template_of_graph
from autopar.planning import Place, divided
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.trace import find_blocks
from benchmarks.accuracy.memory import measure_rank
from tests.equivalence import planned, zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.oracles.frozen.cases import PROFILES, graph
from tests.rank_pool import pool

CHOICES = [{"zero": 1}, {"zero": 2, "microbatches": 2}, {"zero": 3}, {"zero": 3, "microbatches": 2}]


@cache
def _wide(**options: int) -> Plan:
    """Of 64 devices."""
    return _plan("gpt, wide", Mesh("h100", nodes=8, devices_per_node=8), **options)


def _plan(model: str, mesh: Mesh, **options: Any) -> Plan:
    return template_of_graph(graph(model), mesh, **options)


def test_parameters_have_shards_inside_and_copies_across() -> None:
    plan = _wide(dp=64, hsdp=8, zero=3)
    assert [(axis.name, axis.size) for axis in plan.stage.axes] == [("dp", 8), ("hsdp", 8)]
    stored = [plan.stage.storage[tensor] for tensor in plan.parameters]
    assert all(item.placement[0] == I and item.placement[1].kind == "S" and item.regather for item in stored)
    assert all(placement == (S(0), S(0)) for placement in plan.stage.inputs.values())


def test_gradients_are_scattered_inside_and_summed_as_shards_across() -> None:
    """What crosses nodes is an eighth of it, and parameters cross none."""
    whole, parted = (_wide(dp=64, hsdp=size, zero=3).predicted for size in (1, 8))
    assert parted.comm_bytes["reduce_scatter"] >= 0.99 * whole.comm_bytes["reduce_scatter"]
    assert 0 < parted.comm_bytes["all_reduce"] - whole.comm_bytes.get("all_reduce", 0) < whole.peak_bytes
    along = _wide(dp=64, hsdp=8, zero=3).timeline().lanes[0].along  # type: ignore[attr-defined] # a Timeline
    assert {axis for axis, kind in along if kind == "parameter all_gather"} == {1}
    shards, summed = along[1, "gradient reduce_scatter"].num_bytes, along[0, "gradient all_reduce"].num_bytes
    assert summed == pytest.approx(shards / 8, rel=0.05)
    assert parted.memory["parameters"] == pytest.approx(8 * whole.memory["parameters"], rel=0.01)


def test_prints_and_explanations_name_it() -> None:
    plan = _wide(dp=64, hsdp=8, zero=1)
    assert f"{len(plan.parameters)} parameters in shards over hsdp=8, copies over dp=8" in str(plan)
    assert ", hsdp: shards over hsdp=8, copies over dp=8" in plan.explain("layers.0.mlp")
    assert "hsdp" not in str(_wide(dp=64, zero=1))


def test_all_ranks_of_dp_are_plain_zero() -> None:
    one, other = (_wide(dp=8, tp=8, zero=1, hsdp=hsdp) for hsdp in (1, 8))
    assert one.stages == other.stages and one.predicted == other.predicted


@pytest.mark.parametrize(("hsdp", "zero", "error"), [(3, 1, MeshError), (0, 1, MeshError)])
def test_groups_that_cannot_be_are_refused(hsdp: int, zero: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="hsdp"):
        _wide(dp=64, hsdp=hsdp, zero=zero)


def test_the_search_may_choose_it() -> None:
    """On two data axes: in less memory than whole parameters take, and gathered inside a node alone."""
    whole, mesh = graph("gpt"), Mesh(PROFILES["h100"], nodes=2, devices_per_node=2)
    rules = [Constraint("*", ("S(0)",), what="input"), Constraint("*", ("R", "P"), what="used")]
    limit = round(_plan("gpt", mesh, dp=4, hsdp=2, zero=3).predicted.peak_bytes * 1.1)
    request = Request(mesh, "train", "adamw", limit, tuple(rules), SearchBudget(30.0))
    part = divided(whole, find_blocks(whole), 1)
    found = Place(part, make_axes(("d0", "d1"), (2, 2)), request, load_profile(PROFILES["h100"])).fit(30.0)
    assert "in shards over d1=2, copies over d0=2" in str(found)


@pytest.mark.sampled(only=("{'zero': 3, 'microbatches': 2}",))
@pytest.mark.ranks
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_ranks_compute_what_the_model_computes_in_no_more_memory(choices: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, batch = zoo.build("gpt")
    plan = planned.template("gpt", dp=4, hsdp=2, **choices)
    source = planned.program("gpt", plan).source
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(4).run(run_rank, source, state, batch, ("adamw",))
    assert not differences(run_single(model, batch, ("adamw",)), results[0])
    tracked = [lifetimes.peak_bytes for lifetimes, _ in pool(4).run(measure_rank, source, state, batch)]
    assert max(tracked) <= plan.predicted.peak_bytes
