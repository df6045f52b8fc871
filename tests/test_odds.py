"""How sure predictions are: what a plan takes of its devices, in its file and in print."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.odds import communicators
from autopar.profiler import load_profile
from autopar.show.text import plan_text
from models import mlp
from tests.oracles.frozen.cases import PROFILES


def plan_on(mesh: autopar.Mesh, batch: int = 32, limit: int | None = None, **layout: int) -> Plan:
    config = mlp.Config(batch_size=batch)
    return autopar.template_plan(
        mlp.build(config), mesh, mlp.example_inputs(config), check=False, memory_limit=limit, **layout
    )  # type: ignore[arg-type]


def test_a_plan_for_gpus_says_what_it_takes_of_them() -> None:
    plan, memory = plan_on(autopar.Mesh("h100", devices_per_node=4), dp=2, tp=2), load_profile("h100").memory
    assert memory is not None and communicators(plan) == 2
    told = plan.predicted
    assert told.taken_bytes == memory.taken_bytes(told.peak_bytes, 2)
    assert told.capacity_bytes == load_profile("h100").facts.capacity_bytes and told.fits_probability == 1.0
    assert "of 85.5 GB taken with segments, context and buffers; fits with 100.0%" in plan_text(plan)
    assert Plan.from_json(plan.to_json()).predicted == told


@pytest.mark.parametrize("profile", ["cpu", PROFILES["h100"]])
def test_profiles_that_do_not_say_leave_predictions_as_they_were(profile: str) -> None:
    plan = plan_on(autopar.Mesh(profile, devices_per_node=2), dp=2)
    assert plan.predicted.taken_bytes is None and plan.predicted.fits_probability is None
    assert "fits with" not in plan_text(plan)
    assert not {"taken_bytes", "fits_probability"} & set(plan.to_json().split('"'))


def test_of_unequal_devices_the_one_that_is_fullest_for_its_size_tells() -> None:
    mesh = autopar.Mesh([("a100-40gb", 1, 2), ("v100", 1, 2)])
    plan = plan_on(mesh, pp=2, dp=2)
    assert plan.predicted.capacity_bytes in {load_profile(name).facts.capacity_bytes for name in ("a100-40gb", "v100")}
    assert plan.predicted.fits_probability == 1.0


def test_the_search_stays_out_of_the_margin_in_which_the_allocator_thrashes() -> None:
    profile = load_profile("h100")
    assert profile.memory is not None
    plan = plan_on(autopar.Mesh("h100", devices_per_node=1))
    assert plan.memory_limit == profile.usable_bytes < profile.facts.capacity_bytes * profile.memory.tight_share
    with pytest.raises(InfeasibleError):
        plan_on(autopar.Mesh("h100", devices_per_node=1), limit=1000)
