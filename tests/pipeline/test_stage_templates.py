"""Templates of several stages: what thousands of estimates say of them, and that the search is not beaten by them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.by_hand import template_of_graph
from autopar.errors import InfeasibleError
from autopar.families import Family
from autopar.interop import StageKind
from autopar.ir.graph import Graph
from autopar.pipeline import planned
from autopar.profiler import load_profile
from autopar.request import BUDGETS, Request
from autopar.staged import template_stages
from autopar.staged.layered import Layered
from autopar.staged.ways import StageStrategy
from autopar.trace import find_blocks, trace
from autopar.tunables import TEMPLATES_LOOKED_AT
from models import gpt
from tests.oracles.frozen.cases import PROFILES

MESH = autopar.Mesh(PROFILES["h100"], nodes=2, devices_per_node=8)
LIMIT = 16 * 10**9
CONFIG = gpt.Config(1024, 1024, num_layers=24, hidden_size=4096, num_heads=32, batch_size=128)


@cache
def graph() -> Graph:
    """About 5 billion parameters, of which 2 bytes each on one device are as much as it may hold."""
    with torch.device("meta"):
        return trace(gpt.build(CONFIG).bfloat16(), gpt.example_inputs(CONFIG))


def request() -> Request:
    return Request(MESH, "train", "adamw", LIMIT, (), replace(BUDGETS["fast"], substitutions=False))


def test_estimates_on_other_numbers_of_stages_are_near_what_is_found_there() -> None:
    """One problem serves all numbers of stages: what is stored among more ranks takes less."""
    looks = template_stages(graph(), find_blocks(graph()), request(), load_profile(MESH.profile))
    assert looks.of_shape and looks.known
    for setting, look in looks.known.items():
        tp = next((axis.size for axis in setting.axes if axis.name == "tp"), 1)
        estimated = looks.of_shape[setting.num_devices, tp]
        assert look.floor_ns >= 0.9 * estimated and setting.template
        assert "pp=" in setting.template
    best_ns = min(look.least_ns for look in looks.known.values())
    is_enough = len(looks.known) == TEMPLATES_LOOKED_AT
    assert is_enough or {setting.num_devices for setting in looks.known} >= {
        devices for (devices, _), estimated in looks.of_shape.items() if estimated < best_ns
    }


@pytest.fixture(scope="module")
def found() -> autopar.Plan:
    return planned(graph(), request())


@pytest.mark.parametrize(
    "by_hand",
    (
        {"dp": 4, "tp": 2, "pp": 2, "microbatches": 32, "zero": 1, "schedule": "interleaved", "chunks": 6},
        {"dp": 2, "tp": 2, "pp": 4, "microbatches": 64, "zero": 1, "recompute": "selective"},
        {"dp": 8, "pp": 2, "microbatches": 16, "zero": 2, "schedule": "interleaved", "chunks": 3},
    ),
    ids=str,
)
def test_no_template_is_faster_than_what_is_found(by_hand: dict[str, Any], found: autopar.Plan) -> None:
    """Of what was simulated and fits, of which the answer is what fits most surely of all that is as fast."""
    split = by_hand.get("tp", 1) > 1
    try:
        plan = template_of_graph(graph(), MESH, **by_hand, sequence_parallel=split, memory_limit=LIMIT)
    except InfeasibleError:
        pytest.skip("does not fit")
    steps = [one.step_time_ns for one in found.search.tried if (one.peak_bytes or LIMIT + 1) <= LIMIT]
    assert min(step for step in steps if step is not None) <= plan.predicted.step_time_ns


def test_what_could_be_no_better_is_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory does not bind, nothing is estimated that computes more again."""
    roomy, played = replace(request(), memory_limit=80 * 10**9), list[str]()
    of_kind = Layered.kind

    def kind(layered: Layered, way: StageStrategy) -> StageKind:
        played.append(way.recompute)
        return of_kind(layered, way)

    monkeypatch.setattr(Layered, "kind", kind)
    looks = template_stages(graph(), find_blocks(graph()), roomy, load_profile(MESH.profile))
    assert looks.known and set(played) == {"none"}
    played.clear()
    template_stages(graph(), find_blocks(graph()), request(), load_profile(MESH.profile))
    assert len(set(played)) > 1


def test_templates_of_one_stage_are_bounded_by_what_layers_take_on_as_many_ranks() -> None:
    """More ranks that split each operator send more: where layers alone take too long, nothing is solved."""
    looks = template_stages(graph(), find_blocks(graph()), request(), load_profile(MESH.profile))
    assert looks.least_of_tp[1] < looks.least_of_tp[2]
    family = Family(graph(), None, request(), looks.best_ns, dict.fromkeys((1, 2, 4, 8), 2 * looks.best_ns))
    family.look()
    assert not family.rows and not family.found
