"""State on the host, as it is planned: said in the plan, priced by the link, refused where it cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.profile import profile_to_json
from autopar.errors import InfeasibleError, PlanError, ProfileError
from autopar.ir.offload import stored_on_host, uses_host
from autopar.ir.placement import I, R, S
from autopar.ir.plan import Plan, Storage
from autopar.profiler import load_profile, template_profile
from autopar.simulate.host_copies import DOWN, UP
from autopar.trace import trace
from autopar.zero import storage_options
from models import gpt, mlp

GPU = autopar.Mesh("h100", devices_per_node=2)
SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 128, "batch_size": 8,
}  # fmt: skip


@cache
def made() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = gpt.Config(**SMALL)
    return gpt.build(config), gpt.example_inputs(config)


def planned(mesh: autopar.Mesh = GPU, **choices: Any) -> Plan:
    model, batch = made()
    return autopar.template_plan(model, mesh, batch, check=False, **choices)


def profile_file(folder: Path, **host: Any) -> autopar.Mesh:
    """Two ranks of the `cpu` template whose host is stated."""
    profile = template_profile()
    assert profile.beside is not None
    stated = replace(profile, host_memory=replace(profile.beside, **host), _shared={})
    path = folder / f"cpu-{len([*folder.iterdir()])}.json"
    path.write_text(json.dumps(profile_to_json(stated)))
    return autopar.Mesh(str(path), devices_per_node=2)


@pytest.mark.parametrize("choices", [{"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_a_template_has_all_that_is_trained_on_the_host(choices: dict[str, int]) -> None:
    """Files and prints say so; the device holds no parameters at rest, gradients or optimizer state."""
    plan = planned(offload="optimizer", **choices)
    assert len(stored_on_host(plan.stage)) == len(plan.parameters)
    assert Plan.from_json(plan.to_json()) == plan
    assert f"  offload     {len(plan.parameters)} of {len(plan.parameters)} stored tensors" in str(plan)
    assert "on the host" in plan.explain("embedding.token")
    assert not plan.predicted.memory.get("optimizer") and not plan.predicted.memory.get("parameters")
    assert plan.host_link is None and "host_memory" in plan.sources
    without = planned(**choices)
    assert not uses_host(without) and "host" not in without.to_json() and without.predicted.host_bytes is None
    assert "offload: none | " in without.diff(plan)
    elements = sum(p.numel() for p in made()[0].parameters())
    held = plan.predicted.host_bytes
    assert held is not None and held >= 16 * elements // 2  # parameter, gradient, both moments


def test_copies_queue_on_a_stream_for_each_direction() -> None:
    """What is stored comes up as often as it is used, by the link's rate; each gradient goes down once a step."""
    plan, host = planned(dp=2, zero=3, offload="optimizer"), load_profile("h100").beside
    assert host is not None
    events = plan.timeline().events  # type: ignore[attr-defined] # of the simulator's timeline
    up, down = ([event for event in events if event.stream == (0, name)] for name in (UP, DOWN))
    stored = sum(p.numel() for p in made()[0].parameters()) * 4 // 2
    spent = {name: sum(e.end_ns - e.start_ns for e in found) for name, found in ((UP, up), (DOWN, down))}
    least = {UP: stored * 1e9 / host.up_bandwidth, DOWN: stored * 1e9 / host.down_bandwidth}
    assert spent[DOWN] == pytest.approx(least[DOWN] + len(down) * host.copy_ns, rel=0.01)
    assert spent[UP] >= 1.5 * least[UP]
    for found in (up, down):
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(found))


def test_updates_take_what_the_host_moves() -> None:
    """28 bytes a parameter of AdamW at the host's rate, beside nothing of the device's."""
    plan, host = planned(dp=2, offload="optimizer"), load_profile("h100").beside
    assert host is not None and host.update_bandwidth is not None
    elements = sum(p.numel() for p in made()[0].parameters())
    assert plan.predicted.breakdown.optimizer_ns >= 28 * elements * 1e9 / host.update_bandwidth
    assert planned(dp=2).predicted.breakdown.optimizer_ns < plan.predicted.breakdown.optimizer_ns


def test_storages_on_the_host_are_offered_where_they_may_be() -> None:
    """Of what is trained; also whole ones, brought for each use."""
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    plan = autopar.template_plan(model, GPU, batch, dp=2, check=False)
    graph, axes = trace(model, batch), plan.stage.axes
    tensor = graph.tensors[next(item.tensor for item in graph.stored)]
    device = storage_options(tensor, axes)
    both = storage_options(tensor, axes, may_offload=True)
    assert both[: len(device)] == device and all(option.on_host for option in both[len(device) :])
    assert Storage((I,), True, True, on_host=True) in both and Storage((S(0),), on_host=True) in both
    assert all(option.on_host for option in storage_options(tensor, axes, must_offload=True))
    frozen = replace(tensor, differentiable=False)
    assert storage_options(frozen, axes, may_offload=True) == storage_options(frozen, axes)
    assert storage_options(frozen, axes)[0].placement == (R,)


def test_the_search_takes_the_host_where_nothing_else_fits_and_is_told_that_it_may() -> None:
    """With room for everything, nothing is there though it may be."""
    model, batch = made()
    budget = autopar.SearchBudget(3.0, proposals=0, substitutions=False, stages=False)
    asked: dict[str, Any] = {"search": budget, "check": False, "allow": ("offload",)}
    free = autopar.parallelize(model, GPU, batch, **asked).plan
    assert not uses_host(free)
    with pytest.raises(InfeasibleError) as refused:
        autopar.parallelize(model, GPU, batch, memory_limit=1, **{**asked, "allow": ()})
    assert refused.value.smallest_bytes is not None
    limit = int(0.9 * refused.value.smallest_bytes)
    with pytest.raises(InfeasibleError):
        autopar.parallelize(model, GPU, batch, memory_limit=limit, **{**asked, "allow": ()})
    found = autopar.parallelize(model, GPU, batch, memory_limit=limit, **asked).plan
    assert uses_host(found) and found.predicted.peak_bytes <= limit and found.predicted.host_bytes


def test_a_host_that_does_not_hold_it_is_named(tmp_path: Path) -> None:
    """With what it holds, what is needed, and what helps."""
    with pytest.raises(InfeasibleError, match=r"at most 1,000 bytes on the host of a device.*found [0-9,]+; shard"):
        planned(profile_file(tmp_path, capacity_bytes=1_000), dp=2, offload="optimizer")


def test_the_simulated_link_of_cpu_ranks_is_stated(tmp_path: Path) -> None:
    """In the plan, and in the program that delays copies to it; a slower one makes the step longer."""
    mesh = profile_file(tmp_path, down_bandwidth=2e8, up_bandwidth=1e8)
    plan = planned(mesh, dp=2, offload="optimizer")
    assert plan.host_link is not None and tuple(plan.host_link[:2]) == (2e8, 1e8)
    assert Plan.from_json(plan.to_json()) == plan
    assert "over a simulated link of 0.2 GB/s down and 0.1 GB/s up" in str(plan)
    model, batch = made()
    source = autopar.parallelize(model, mesh, batch, plan=plan, check=False).source
    assert "    HOST_LINK = rt.LinkRates(down_bandwidth=200000000.0, up_bandwidth=100000000.0, copy_ns=20000)" in source
    slower = planned(profile_file(tmp_path, up_bandwidth=1e6, down_bandwidth=1e6), dp=2, offload="optimizer")
    assert slower.predicted.step_time_ns > plan.predicted.step_time_ns + 200_000_000


def test_what_cannot_be_on_the_host_is_refused() -> None:
    """A plan that says so of what is not trained, or for inference; unequal devices; a device of which nothing is
    known."""
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    model.layers[0].requires_grad_(False)
    plan = autopar.template_plan(model, GPU, batch, dp=2, check=False)
    stage, name = plan.stage, "layers.0.weight"
    odd = replace(stage, storage={**stage.storage, name: replace(stage.storage[name], on_host=True)})
    with pytest.raises(PlanError, match=r"trained on the host, found layers\.0\.weight"):
        autopar.parallelize(model, GPU, batch, plan=replace(plan, stages=(odd,)), check=False)
    with pytest.raises(PlanError, match="copies that meet by an algorithm; keep it on the device"):
        planned(dp=2, offload="optimizer", algorithm="adasum")
    mixed = autopar.Mesh([("h100", 1, 1), ("a100", 1, 1)])
    with pytest.raises(PlanError, match="devices of one kind with offload='optimizer'"):
        planned(mixed, dp=2, offload="optimizer")


def test_a_device_of_whose_host_nothing_is_known_is_refused(tmp_path: Path) -> None:
    """With what its file lacks."""
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(profile_to_json(replace(load_profile("h100"), host_memory=None, _shared={}))))
    with pytest.raises(ProfileError, match=r"expected host_memory in the profile"):
        planned(autopar.Mesh(str(path), devices_per_node=2), dp=2, offload="optimizer")
