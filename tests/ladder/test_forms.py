"""Forms that schedulers read: what they are fitted to comes back, and published decisions follow from exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.errors import PlanError
from autopar.ir.plan import Breakdown
from autopar.ladders import Ladder, Rung, StateStore, exported, fitted, goodput, points_of
from autopar.ladders.exports import EXPORTERS
from autopar.ladders.forms import Observed, least_largest
from autopar.simulate import Timeline
from autopar.simulate.timeline import Lane, TimelinePiece
from tests.ladder import made, schedulers

BATCHES = (256, 512, 1024)


def optimus_s(devices: int, batch: int) -> float:
    return 0.05 * batch / devices + 0.3 + 0.002 * devices


def pollux_s(devices: int, batch: int) -> float:
    grad = 0.1 + 0.02 * batch / devices
    sync = 0.0 if devices == 1 else 0.4 + 0.01 * (devices - 2) if devices <= 8 else 0.9 + 0.02 * (devices - 2)
    return float((grad**2.5 + sync**2.5) ** (1 / 2.5))


def loaded(ladder: Ladder, scheduler: str, **store: float) -> Any:
    return json.loads(exported(ladder, scheduler, StateStore(**store)))


@pytest.mark.parametrize(("form", "seconds"), [("optimus", optimus_s), ("pollux", pollux_s)])
def test_a_form_is_found_again(form: str, seconds: Callable[[int, int], float]) -> None:
    points = points_of(made.ladder(seconds, batches=BATCHES), "h100")
    found = fitted(points, form)
    assert found.error[0] <= found.error[1] < 1e-6
    assert found.seconds(24, 512, nodes=3) == pytest.approx(seconds(24, 512), rel=1e-5)
    assert all(value >= 0 for value in found.parameters.values())


def test_what_no_rung_depends_on_is_nothing() -> None:
    """Here what sums inside a node take, of rungs that all have several."""
    found = fitted(points_of(made.ladder(pollux_s, (16, 32, 64), BATCHES), "h100"), "pollux")
    assert found.error[1] < 1e-3
    assert found.parameters["alpha_local"] == found.parameters["beta_local"] == 0


def test_errors_are_told_where_a_form_is_none() -> None:
    odd = made.ladder(lambda n, batch: 1.0 + (n % 3), batches=BATCHES)
    assert fitted(points_of(odd, "h100"), "optimus").error[1] > 0.2
    with pytest.raises(PlanError, match="at least three"):
        points_of(made.ladder(optimus_s, (8, 16)), "h100")
    with pytest.raises(PlanError, match="optimus, pollux"):
        fitted(points_of(odd, "h100"), "cubic")
    with pytest.raises(PlanError, match="found none"):
        fitted([], "optimus")
    with pytest.raises(PlanError, match="above 0"):
        fitted([Observed(8, 1, 256, float("nan"))], "pollux")


def test_the_largest_error_is_the_least_there_is() -> None:
    """Beside every point at which its bounds meet."""
    draw = np.random.default_rng(0)
    for _ in range(12):
        rows = draw.uniform(0.1, 2.0, size=(6, 2))
        found = least_largest(rows)
        assert (found >= 0).all()
        assert np.abs(rows @ found - 1).max() == pytest.approx(_by_corners(rows), abs=1e-9)


def _by_corners(rows: Any) -> float:
    """Of all points where as many of its bounds meet as there are unknowns, the least largest error."""
    count, width = rows.shape
    bounds = np.vstack(
        [np.c_[rows, -np.ones(count)], np.c_[-rows, -np.ones(count)], np.c_[-np.eye(width), np.zeros(width)]]
    )
    limits = np.r_[np.ones(count), -np.ones(count), np.zeros(width)]
    best = 1.0
    for some in combinations(range(len(bounds)), width + 1):
        own = list(some)
        if abs(np.linalg.det(bounds[own])) > 1e-9:
            x = np.linalg.solve(bounds[own], limits[own])
            best = min(best, x[-1]) if (bounds @ x <= limits + 1e-9).all() else best
    return float(best)


@pytest.mark.parametrize("form", ["optimus", "pollux"])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_ladders_are_fitted_as_closely_as_they_were_drawn(form: str, seed: int) -> None:
    """Rungs up to four in a hundred off a form of Optimus', which one of Pollux' is for γ = 1: none is further off."""
    draw = np.random.default_rng(seed)
    theta = draw.uniform((0.5, 0.01, 1e-5), (3.0, 0.5, 3e-4))
    points = [
        Observed(n, -(-n // 8), batch, float(theta @ (batch / n, 1.0, n) * (1 + draw.uniform(-0.04, 0.04))))
        for n in (8, 24, 64, 192, 320, 448, 512) for batch in BATCHES
    ]  # fmt: skip
    assert fitted(points, form).error[1] <= 0.04 + 1e-6


# Decisions ----------------------------------------


def test_optimus_gives_a_device_where_it_shortens_most() -> None:
    """EuroSys'18: marginal gains, and none to a job that more workers make no faster."""
    data = loaded(made.ladder(optimus_s, batches=BATCHES), "optimus")
    speed = schedulers.form(data, "h100")
    long, short = schedulers.Job(speed, 512, 10_000), schedulers.Job(speed, 512, 1_000)
    held = schedulers.optimus([long, short], 24)
    assert held[0] > held[1] >= 1 and sum(held) == 24
    alone = schedulers.optimus([schedulers.Job(speed, 256, 100)], 4_096)
    best = min(range(1, 4_097), key=lambda n: optimus_s(n, 256))
    assert alone[0] == pytest.approx(best, abs=2)


def test_pollux_gives_more_devices_and_a_larger_batch_as_gradients_get_noisier() -> None:
    """OSDI'21, figures 1 and 7: as the noise scale grows, larger batches are as good, and scale further."""
    data = loaded(made.ladder(pollux_s, batches=BATCHES), "pollux")
    speed = schedulers.form(data, "h100")
    noisy, calm = (schedulers.Adaptive(speed, noise, 256, BATCHES) for noise in (20_000.0, 100.0))
    assert noisy.best(8)[1] > calm.best(8)[1] == 256
    held = schedulers.pollux([noisy, calm], 8)
    assert held[0] > held[1]


def test_goodput_has_its_best_batch_between() -> None:
    ladder = made.ladder(pollux_s, batches=(64, 128, 256, 512, 1024, 2048))
    found = [goodput(ladder, "h100", 8, noise, 64) for noise in (10.0, 500.0, 50_000.0)]
    assert [one.best_batch for one in found] == sorted(one.best_batch for one in found)
    assert found[0].best_batch == 64 and found[2].best_batch == 2048
    assert all(0.5 <= one.fitted_batch / one.best_batch <= 2 for one in found)
    with pytest.raises(PlanError, match="noise_scale"):
        goodput(ladder, "h100", 8, 0.0, 64)


def busy(compute: float, links: float, peak: int) -> Timeline:
    """A step of a second, so long busy."""
    tasks = [
        ("compute", "product", 0, round(compute * 1e9), "product"),
        ("intra_node", "sum", 0, round(links * 1e9), "sum"),
    ]
    piece = TimelinePiece(0, "", tasks, [(0, peak, "activation", 0), (10**9, made.GB - peak, "activation", 1)])
    lane = Lane(range(8), (piece,), Breakdown(), {}, {}, {}, {})
    return Timeline((lane,), 10**9, Breakdown(), {}, {})


def test_gandiva_packs_what_leaves_room_and_slices_by_what_a_pause_takes() -> None:
    """OSDI'18: packed where memory has room and utilisation is low; else one after the other, in long slices."""
    timelines = [busy(0.4, 0.1, 20 * made.GB), busy(0.5, 0.2, 30 * made.GB), busy(0.9, 0.1, 30 * made.GB)]
    rungs = [made.rung("h100:1x8", 256, 1.0, peak_bytes=t.peak_bytes, timeline=t) for t in timelines]
    one, other, greedy = loaded(Ladder("model", tuple(rungs)), "gandiva", restart_s=9.0)["rows"]
    assert one["compute_share"] == pytest.approx(0.4) and one["left_bytes"] == 60 * made.GB
    assert one["resting_bytes"] == made.GB
    assert schedulers.gandiva_packs(one, other) and not schedulers.gandiva_packs(one, greedy)
    assert not schedulers.gandiva_packs({**one, "left_bytes": made.GB}, other)
    assert schedulers.gandiva_slice_s(one) == pytest.approx(10 * (0.5 + 0.5 + 0.25 + 9.0))


def test_tiresias_takes_devices_from_who_had_most_service() -> None:
    """NSDI'19: a large job that ran for long goes behind small ones, whatever its speed."""
    ladder = Ladder("model", tuple(made.rung(f"h100:{n}x8", 256, 1.0) for n in (4, 1, 1)))
    rows = loaded(ladder, "tiresias")["rows"]
    assert schedulers.tiresias(rows, [10.0, 0.0, 0.0], 1_000.0, 32) == [0]
    assert schedulers.tiresias(rows, [100.0, 0.0, 0.0], 1_000.0, 32) == [1, 2]


def test_hare_gives_each_job_the_kind_that_suits_it() -> None:
    h100, l40s = made.ladder(lambda n, b: 1.0, (8,)), made.ladder(lambda n, b: 4.0, (8,), kind="l40s")
    big = loaded(Ladder("big", h100.rungs + l40s.rungs), "hare")["tasks"]["8 devices, batch 256"]
    h100, l40s = made.ladder(lambda n, b: 0.9, (8,)), made.ladder(lambda n, b: 1.0, (8,), kind="l40s")
    small = loaded(Ladder("small", h100.rungs + l40s.rungs), "hare")["tasks"]["8 devices, batch 256"]
    assert schedulers.hare([small, big], [1_000, 1_000]) == {0: "l40s", 1: "h100"}


def test_of_meshes_of_as_many_devices_hare_is_told_the_fastest() -> None:
    rungs = (made.rung("h100:1x8", 256, 2.0), made.rung("h100:2x4", 256, 3.0))
    tasks = [loaded(Ladder("model", order), "hare")["tasks"] for order in (rungs, rungs[::-1])]
    assert [own["8 devices, batch 256"]["h100"]["step_s"] for own in tasks] == [2.0, 2.0]


@pytest.mark.parametrize("scheduler", EXPORTERS)
def test_a_ladder_without_plans_is_exported_to_none(scheduler: str) -> None:
    refused = Rung(autopar.Mesh("h100"), 256, refusal="it takes 90 GB")
    with pytest.raises(PlanError, match="found none: h100:1x1: it takes 90 GB"):
        exported(Ladder("model", (refused,)), scheduler)
    with pytest.raises(PlanError, match="found none: it has no rungs"):
        exported(Ladder("model", ()), scheduler)


def test_the_table_says_what_a_job_does_with_less() -> None:
    """Synergy and Liquid look up who loses least."""
    rows = loaded(made.ladder(optimus_s), "synergy")["rows"]
    speeds = {row["devices"]: row["samples_s"] for row in rows}
    assert speeds[8] == pytest.approx(256 / optimus_s(8, 256)) and {row["memory_bytes"] for row in rows} == {
        10 * made.GB
    }


def test_an_unknown_scheduler_is_refused() -> None:
    with pytest.raises(PlanError, match="gandiva"):
        exported(made.ladder(optimus_s), "slurm")
