"""How sure predictions are: what a plan takes of its devices, in its file and in print."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

import autopar
from autopar.driver import Candidate, chosen
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.mesh import make_axes
from autopar.ir.outline import Outline
from autopar.ir.plan import Plan
from autopar.margin import Found, in_and_out_of_margin
from autopar.microbatch import divided_graph
from autopar.odds import (
    NINE_IN_TEN,
    Sure,
    communicators,
    operators_variance,
    shares_of_step,
    told,
    with_interval,
)
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.show.text import plan_text
from autopar.substitute import GraphCandidate
from autopar.trace import trace
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
    said = plan.predicted
    assert said.taken_bytes == memory.taken_bytes(said.peak_bytes, 2)
    assert said.needed_bytes == memory.needed_bytes(said.taken_bytes)
    assert said.capacity_bytes == load_profile("h100").facts.capacity_bytes and said.fits_probability == 1.0
    assert " runs; with 100.0% below the 75.3 GB from which its allocator thrashes" in plan_text(plan)
    assert Plan.from_json(plan.to_json()).predicted == said


@pytest.mark.parametrize("profile", ["cpu", PROFILES["h100"]])
def test_profiles_that_do_not_say_leave_predictions_as_they_were(profile: str) -> None:
    plan = plan_on(autopar.Mesh(profile, devices_per_node=2), dp=2)
    assert plan.predicted.taken_bytes is None and plan.predicted.fits_probability is None
    assert " with segments" not in plan_text(plan)
    assert not {"taken_bytes", "fits_probability", "tight_bytes"} & set(plan.to_json().split('"'))


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


def test_a_plan_that_fills_the_device_says_what_refilling_may_take() -> None:
    plan = plan_on(autopar.Mesh("h100", devices_per_node=4), dp=2, tp=2, microbatches=2)
    profile = load_profile("h100")
    assert profile.memory is not None and plan.predicted.refilling_ns is None
    assert "refilling_ns" not in plan.to_json() and "so full" not in plan_text(plan)
    full = replace(plan, predicted=told(plan, profile.usable_bytes + 1, profile))
    assert full.predicted.refilling_ns == 2 * profile.memory.refill_ns
    assert told(full, profile.usable_bytes, profile).refilling_ns is None
    assert "; so full that a step may take 2.45 s more" in plan_text(full)
    assert Plan.from_json(full.to_json()).predicted.refilling_ns == 2 * profile.memory.refill_ns
    (low, high), (same, longer) = (
        with_interval(one.predicted, 0.1).step_time_interval_ns or (0, 0) for one in (plan, full)
    )
    assert (same, longer) == (low, high + 2 * profile.memory.refill_ns)


def request_of(limit: int | None, profile: str = "h100") -> Request:
    return Request(autopar.Mesh(profile, devices_per_node=4), "train", "adamw", limit, (), SearchBudget())


def searched_for(steps_ns: dict[int | None, tuple[int, int]], asked: list[int | None]) -> Callable[[Request], Found]:
    """A search that finds, within each limit, a plan of that step and what refilling may take; else nothing."""
    plan = plan_on(autopar.Mesh("h100", devices_per_node=4), dp=4)

    def searched(request: Request) -> Found:
        asked.append(request.memory_limit)
        if request.memory_limit not in steps_ns:
            raise InfeasibleError("nothing fits")
        step_ns, refilling_ns = steps_ns[request.memory_limit]
        own = replace(plan.predicted, step_time_ns=step_ns, refilling_ns=refilling_ns or None)
        return graph_of(mlp.Config()), replace(plan, predicted=own, memory_limit=request.memory_limit or 0)

    return searched


S = 10**9


@pytest.mark.parametrize(
    ("roomy_ns", "full_ns", "taken_ns", "searches"),
    [
        (1 * S, (S // 2, 2 * S), 1 * S, 1),  # no plan in the margin takes less than refilling for one microbatch
        (9 * S, (8 * S, 2 * S), 9 * S, 2),
        (9 * S, (6 * S, 2 * S), 6 * S, 2),
        (None, (6 * S, 2 * S), 6 * S, 2),
    ],
)
def test_a_larger_limit_is_used_where_that_is_faster_with_refilling(
    roomy_ns: int | None, full_ns: tuple[int, int], taken_ns: int, searches: int
) -> None:
    usable, asked = load_profile("h100").usable_bytes, list[int | None]()
    limit = usable + 1
    known = {limit: full_ns, **({} if roomy_ns is None else {usable: (roomy_ns, 0)})}
    _, plan = in_and_out_of_margin(request_of(limit), searched_for(known, asked))
    assert plan.predicted.step_time_ns == taken_ns and plan.memory_limit == limit
    assert asked == [usable, limit][:searches]


@pytest.mark.parametrize(("limit", "profile"), [(None, "h100"), (10**9, "h100"), (10**15, "cpu")])
def test_limits_that_keep_plans_out_of_the_margin_are_searched_once(limit: int | None, profile: str) -> None:
    asked = list[int | None]()
    in_and_out_of_margin(request_of(limit, profile), searched_for({limit: (1, 0)}, asked))
    assert asked == [limit]


# Steps ----------------------------------------


def graph_of(config: mlp.Config) -> Graph:
    return trace(mlp.build(config), mlp.example_inputs(config), mode="train")


def test_nine_in_ten_steps_are_in_an_interval_around_the_prediction() -> None:
    said = plan_on(autopar.Mesh("h100", devices_per_node=4), dp=2, tp=2).predicted
    assert said.step_time_interval_ns is not None
    low, high = said.step_time_interval_ns
    assert low < said.step_time_ns < high
    assert low * high == pytest.approx(said.step_time_ns**2, rel=1e-3)
    steps = load_profile("h100").steps
    assert steps is not None and math.log(high / low) >= 2 * NINE_IN_TEN * steps.spread


def test_errors_of_operators_average_out_in_part() -> None:
    """Equal shapes err alike, other shapes of a family in part, so a step is surer than its operators, and less sure
    than if they all erred by themselves."""
    config, profile = mlp.Config(), load_profile("h100")
    plan, part = plan_on(autopar.Mesh("h100", devices_per_node=2), dp=2), divided_graph(graph_of(config), 1)
    shares = [share for _, share in shares_of_step(plan, part, profile)]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)
    spread = 0.1
    alike = replace(profile.residuals[0], quantiles=(-NINE_IN_TEN * spread, 0.0, NINE_IN_TEN * spread), from_ns=0)
    one = tuple(
        replace(alike, family=family, kind="float32")
        for family in {one.family for one, _ in shares_of_step(plan, part, profile)}
    )
    found = operators_variance(plan, part, replace(profile, residuals=one, _shared={}))
    assert spread**2 * sum(share**2 for share in shares) < found < spread**2 * sum(shares) ** 2
    assert operators_variance(plan, part, replace(profile, residuals=(), _shared={})) == 0


def of_step(step_ns: int, peak_bytes: int) -> Candidate:
    asked = Candidate(GraphCandidate(graph_of(mlp.Config()), (), 0))
    return asked.planned(
        Outline((make_axes(("d0",), (1,)),)), step_ns, peak_bytes, lambda: plan_on(autopar.Mesh("h100"))
    )


def test_of_plans_that_cannot_be_told_apart_the_one_that_fits_surely_is_taken() -> None:
    profile = load_profile("h100")
    sure = Sure(profile)
    tight, roomy = profile.usable_bytes, profile.usable_bytes // 2
    assert sure.of(tight) < sure.of(roomy) == sure.of(1)
    most = sure.most_bytes(tight)
    assert roomy < most < tight and sure.of(most) == sure.of(1) > sure.of(most + 1)
    assert sure.most_bytes(roomy) == roomy
    near, far = 1000 * (1 + sure.resolution * 0.9), 1000 * (1 + sure.resolution * 1.1)
    fastest, safer, slower = of_step(1000, tight), of_step(int(near), roomy), of_step(int(far), roomy)
    assert chosen([fastest, safer, slower], sure) is safer
    assert chosen([fastest, slower], sure) is fastest
    assert chosen([of_step(999, roomy), safer], sure).step_ns == 999
    assert chosen([fastest, safer], None) is fastest


def test_a_plan_that_fills_the_device_is_taken_where_it_is_faster_with_refilling() -> None:
    profile = load_profile("h100")
    assert profile.memory is not None
    sure, refill_ns = Sure(profile), profile.memory.refill_ns
    full, roomy = of_step(1000, profile.usable_bytes + 1), of_step(900 + refill_ns, profile.usable_bytes // 2)
    assert chosen([full, roomy], sure) is roomy
    slower = of_step(3000 + refill_ns, profile.usable_bytes // 2)
    assert chosen([full, slower], sure) is full
