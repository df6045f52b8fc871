"""What rungs share, and what each has of its own: where placements are found."""

from __future__ import annotations

import dataclasses
import functools

import torch

import autopar
from autopar.ir.graph import Graph
from autopar.ir.mesh import make_axes
from autopar.ladders.shared import RungLayers, SharedLayers, shared_layers
from autopar.profiler import load_profile
from autopar.request import BUDGETS, Request
from autopar.staged.ways import Setting
from autopar.trace import trace
from models import llama
from tests.oracles.frozen.cases import PROFILES

H100 = PROFILES["h100"]
CONFIG = llama.Config(4_000, 256, num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=4, mlp_size=512)


@functools.cache
def graph(batch: int) -> Graph:
    with torch.device("meta"):
        model, tokens = llama.build(CONFIG).to(torch.bfloat16), torch.empty((batch, 256), dtype=torch.long)
        return trace(model, {"tokens": tokens, "labels": tokens})


def request(nodes: int, devices: int) -> Request:
    mesh = autopar.Mesh(H100, nodes=nodes, devices_per_node=devices)
    return Request(mesh, "train", "adamw", None, (), BUDGETS["fast"])


def shared(batch: int, beside: SharedLayers | None = None) -> SharedLayers:
    return shared_layers(graph(batch), request(1, 4), load_profile(H100), beside)


def test_placements_that_are_free_are_of_one_batch() -> None:
    """Templates with as many samples a rank have one home, whatever the batch; a free choice is of its shapes."""
    first = shared(16)
    second = shared(8, first)
    one, other = (RungLayers(every, request(1, 4)) for every in (first, second))
    axes = make_axes(("dp", "tp"), (2, 2))
    assert one.is_home(Setting(axes, 4, 1, 4, 1)) and not other.is_home(Setting(axes, 4, 1, 2, 1))
    assert one.is_home(Setting(axes, 4, 1, 4)) and other.is_home(Setting(axes, 4, 1, 4))
    assert RungLayers(second, request(1, 4), at_home=True).is_home(Setting(axes, 4, 1, 2, 1))


def test_a_rung_that_is_short_of_memory_computes_no_more_layers_again_than_it_must() -> None:
    """Estimates of templates are of all layers alike."""
    with torch.device("meta"):
        model, tokens = llama.build(CONFIG).to(torch.bfloat16), torch.empty((16, 256), dtype=torch.long)
    found = autopar.ladder(
        model, {"tokens": tokens, "labels": tokens}, [request(1, 4).mesh], check=False, memory_limit=60_000_000
    )
    plan = found.rungs[0].plan
    assert plan is not None and found.rungs[0].how == "shared"
    again = {name.split(".")[1] for name in plan.recompute}
    assert 0 < len(again) < CONFIG.num_layers
    assert 0.9 * 60_000_000 < plan.predicted.peak_bytes <= 60_000_000


def test_estimates_of_schedules_do_not_hide_one_stage() -> None:
    """They leave out what stages wait for each other: by a fifth, where launches bind."""
    mesh, config = request(1, 4).mesh, dataclasses.replace(CONFIG, num_layers=8)
    with torch.device("meta"):
        model, tokens = llama.build(config).to(torch.bfloat16), torch.empty((64, 256), dtype=torch.long)
    inputs = {"tokens": tokens, "labels": tokens}
    found = autopar.ladder(model, inputs, [mesh], check=False)
    template = autopar.template_plan(model, mesh, inputs, dp=4, zero=1, check=False)
    assert found.rungs[0].step_ns is not None
    assert found.rungs[0].step_ns <= template.predicted.step_time_ns
