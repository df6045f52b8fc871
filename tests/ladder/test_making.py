"""Ladders of models: plans of what rungs share beside those of a search of their own, and programs of them."""

from __future__ import annotations

import functools

import pytest
import torch

import autopar
from autopar.errors import PlanError
from autopar.ladders.making import sorted_meshes
from models import llama
from tests.equivalence.on_threads import program_differences
from tests.oracles.frozen.cases import PROFILES

H100 = PROFILES["h100"]
LARGE = llama.Config(32_000, 2048, num_layers=6, hidden_size=2048, num_heads=16, num_kv_heads=8, mlp_size=5632)
SMALL = llama.Config(num_layers=2, batch_size=8)


def meshes(*counts: int) -> list[autopar.Mesh]:
    return [autopar.Mesh(H100, nodes=-(-n // 8), devices_per_node=min(8, n)) for n in counts]


@functools.cache
def large() -> autopar.Ladder:
    with torch.device("meta"):
        model = llama.build(LARGE).to(torch.bfloat16)
        inputs = {name: torch.empty((256, 2048), dtype=torch.long) for name in ("tokens", "labels")}
    return autopar.ladder(
        model, inputs, meshes(16, 32), global_batches=(96, 128, 256), prices={H100: 2.0}, tokens=1e9, deadline=10.0,
    )  # fmt: skip


def test_rungs_are_about_as_good_as_searches_of_their_own() -> None:
    """Of one that is not where the layers are priced."""
    with torch.device("meta"):
        model = llama.build(LARGE).to(torch.bfloat16)
    ladder = large()
    assert [(r.devices, r.global_batch) for r in ladder.rungs] == [(n, b) for b in (96, 128, 256) for n in (16, 32)]
    assert all(rung.how == "shared" for rung in ladder.rungs)
    for rung in ladder.rungs[-1:]:
        shape = (rung.global_batch, 2048)
        inputs = {name: torch.empty(shape, dtype=torch.long, device="meta") for name in ("tokens", "labels")}
        own = autopar.parallelize(model, rung.mesh, inputs, search="fast", check=False).plan
        assert rung.step_ns <= 1.01 * own.predicted.step_time_ns
        assert rung.plan is not None
        autopar.verify(rung.plan, model, inputs)
        again = autopar.parallelize(model, rung.mesh, inputs, plan=rung.plan, check=False)
        assert again.plan.predicted == rung.plan.predicted and "class Program" in again.source


def test_samples_that_one_stage_cannot_share_equally_hide_no_others() -> None:
    """Of six a rank it takes all at once, though four are none that 16 ranks have, and on two stages are slower."""
    rung = next(rung for rung in large().rungs if (rung.devices, rung.global_batch) == (16, 96))
    assert rung.plan is not None and len(rung.plan.stages) == 1 and rung.plan.microbatches == 1


def test_a_ladder_says_what_each_rung_does() -> None:
    ladder = large()
    for rung in ladder.rungs:
        assert rung.plan is not None and rung.plan.predicted.peak_bytes <= rung.plan.memory_limit
        assert 0 < rung.bound_ns <= rung.step_ns and rung.tokens_per_sample == 2048
    speeds = [rung.samples_s for rung in ladder.of(H100, 256)]
    assert speeds == sorted(speeds)
    assert ladder.capacity.taken and not ladder.capacity.lacks


def test_a_rung_on_which_nothing_fits_says_so() -> None:
    with torch.device("meta"):
        model, inputs = llama.build(SMALL), llama.example_inputs(SMALL)
    ladder = autopar.ladder(model, inputs, meshes(2), memory_limit=10_000)
    assert not ladder.fitting and "10,000" in ladder.rungs[0].refusal and "none:" in str(ladder)


@pytest.mark.ranks
def test_programs_of_rungs_compute_what_the_model_computes() -> None:
    """On two and four ranks, of a batch that is not the example's, too."""
    torch.manual_seed(0)
    model, inputs = llama.build(SMALL), llama.example_inputs(SMALL)
    ladder = autopar.ladder(model, inputs, meshes(2, 4), global_batches=(8, 4), check=False)
    for rung in (ladder.rungs[0], ladder.rungs[-1]):
        own = {name: tensor[: rung.global_batch] for name, tensor in inputs.items()}
        assert rung.plan is not None and rung.how == "shared"
        program = autopar.parallelize(model, rung.mesh, own, plan=rung.plan)
        assert program_differences(model, own, program) == []
    assert {(r.devices, r.global_batch) for r in (ladder.rungs[0], ladder.rungs[-1])} == {(2, 4), (4, 8)}


def test_what_templates_are_no_good_for_is_searched() -> None:
    model, inputs = llama.build(SMALL), llama.example_inputs(SMALL)
    ladder = autopar.ladder(model, inputs, [autopar.Mesh(H100)])
    assert {rung.how for rung in ladder.rungs} == {"searched"}


def test_the_home_is_in_the_middle() -> None:
    found = [str(mesh) for mesh in sorted_meshes(["h100:1x8", "h100:4x8", "a100:1x8", "h100:2x8", "h100:2x8"])]
    assert found == ["h100:2x8", "h100:1x8", "h100:4x8", "a100:1x8"]


def test_wrong_arguments_are_refused() -> None:
    model, inputs = llama.build(SMALL), llama.example_inputs(SMALL)
    with pytest.raises(PlanError, match="at least one mesh"):
        autopar.ladder(model, inputs, [])
    with pytest.raises(PlanError, match="global_batches"):
        autopar.ladder(model, inputs, ["h100:1x2"], global_batches=[0])
    with pytest.raises(PlanError, match="expected tokens"):
        autopar.ladder(model, inputs, ["h100:1x2"], deadline=1.0)
