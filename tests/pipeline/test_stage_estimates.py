"""Estimates of stages, each layer of which is played alone, beside what the simulator says of the whole plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import autopar
from autopar.interop import StageKind
from autopar.ir.mesh import make_axes
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.staged.finalists import Finalists
from autopar.staged.layered import Layered
from autopar.staged.relief import relieved
from autopar.staged.search import StagedSearch
from autopar.staged.templates import stored_as
from autopar.staged.ways import Setting, StageStrategy
from autopar.trace import find_blocks, trace
from models import gpt
from tests.oracles.frozen.cases import PROFILES


@cache
def search() -> StagedSearch:
    """Of layers large enough that gathers take about as long as what is computed, on two nodes of four devices."""
    config = gpt.Config(1024, 1024, num_layers=16, hidden_size=2048, num_heads=16, batch_size=64)
    with torch.device("meta"):
        graph = trace(gpt.build(config).bfloat16(), gpt.example_inputs(config))
    mesh = autopar.Mesh(PROFILES["h100"], nodes=2, devices_per_node=4)
    request = Request(mesh, "train", "adamw", None, (), SearchBudget(60.0))
    return StagedSearch(Layered(graph, find_blocks(graph), request, load_profile(mesh.profile)))


@pytest.mark.parametrize("zero", (1, 2, 3))
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 8), ("interleaved", 2)])
def test_steps_and_peaks(zero: int, schedule: str, microbatches: int) -> None:
    """Gathers that the layer before hides, gradients on their way, which few are at a time, the last backward passes,
    which wait for these, one stage after the other, and gradients that are not there while most is in flight."""
    found, finalists = search(), Finalists(search(), [], lambda row: None)
    free = Setting(make_axes(("dp",), (4,)), 4, 2, microbatches)
    setting = replace(free, zero=zero)
    fastest = found.layered.place_of(setting).placements.trade_offs(2, *found.looks.solver).fastest()
    every = [one for one in found.looks.staged(setting, fastest, "none") if one.schedule == schedule]
    candidate = max(every, key=lambda one: len(one.ways))
    played = finalists._simulated(candidate)
    assert candidate.step_ns == pytest.approx(played.step_time_ns, rel=0.05)
    assert 0.97 * played.peak_bytes <= candidate.peak_bytes <= 1.05 * played.peak_bytes


@pytest.mark.parametrize("zero", (1, 2))
@pytest.mark.parametrize(("known", "stages"), [(4, 2), (2, 4)])
def test_what_layers_keep_on_other_numbers_of_stages(zero: int, known: int, stages: int) -> None:
    """Of templates, each of which is estimated by layers of one number of stages."""
    looks, layered = search().looks, search().layered

    def template(stages: int) -> Setting:
        return Setting(make_axes(("dp",), (8 // stages,)), 8 // stages, stages, 8 * stages, zero)

    def layers(setting: Setting) -> StageKind:
        fastest = layered.place_of(setting).placements.trade_offs(1, *looks.solver).fastest()
        return layered.kind(StageStrategy(setting, fastest, "none"))

    own, setting = layers(template(known)), template(stages)
    said = stored_as(own, template(known), setting, layered.parameter_bytes(False))
    for column in ("resident_bytes", "gradient_bytes", "travelling_bytes"):
        found, expected = getattr(said, column), getattr(layers(setting), column)
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=4096, err_msg=column)
    assert zero == 1 or own.travelling_bytes.any()


@pytest.mark.parametrize("recompute", ("extensive", "full"))
def test_what_is_computed_again_is_told_from_other_placements(recompute: str) -> None:
    """Of a setting whose layers were played with nothing computed again alone: how likely it fits is told by that."""
    looks, layered = search().looks, search().layered
    free = Setting(make_axes(("dp",), (4,)), 4, 2, 8)
    known, other = replace(free, zero=1), replace(free, zero=2, microbatches=4)
    for setting, again in ((known, "none"), (known, recompute), (other, "none")):
        layered.kind(StageStrategy(setting, layered.fastest(setting, *looks.solver), again))
    fastest = layered.fastest(other, *looks.solver)
    kind, level = layered.kind(StageStrategy(other, fastest, "none")), layered.levels[recompute]
    assert level.kept < 1 < level.times
    plain = {(one.schedule, len(one.ways)): one for one in looks.staged(other, fastest, "none")}
    for one in looks.staged(other, fastest, recompute):
        if one.schedule == "interleaved":
            step_ns, peak_bytes = relieved(layered, kind, plain[one.schedule, len(one.ways)], level)
            assert step_ns == pytest.approx(one.step_ns, rel=0.03)
            assert peak_bytes == pytest.approx(one.peak_bytes, rel=0.06)
