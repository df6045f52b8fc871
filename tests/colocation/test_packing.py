"""Packings: against trying all, as Nexus' example has it, and what is said where there is none."""

from __future__ import annotations

import random

import pytest

from autopar.colocation import BatchCurve, BatchPoint, HostKind, ServingSession, host_of, pack, request_curve
from autopar.errors import PlanError
from autopar.serving import BatchLatency, LatencyCurve, StepLatency
from tests.colocation import reference

MS, GB = 10**6, 10**9
INSTANCES = 40


def curve(*points: tuple[int, float, float]) -> BatchCurve:
    """Of batch, ms and GB."""
    return BatchCurve(tuple(BatchPoint(batch, round(ms * MS), round(gb * GB)) for batch, ms, gb in points))


def drawn(seed: int) -> tuple[list[ServingSession], list[HostKind]]:
    """Up to four sessions on one or two kinds of hosts, some of which they cannot run on."""
    draw = random.Random(seed)
    kinds = [HostKind("small", 1, 16 * GB), HostKind("large", draw.choice((2, 3)), 40 * GB)][: draw.choice((1, 2, 2))]
    kinds = [HostKind(k.name, k.devices, k.capacity_bytes, None, draw.choice((None, 1, 2, 4))) for k in kinds]
    sessions = []
    for number in range(draw.randint(1, 4)):
        first, each, weights = draw.uniform(2, 20), draw.uniform(0.5, 6), draw.uniform(1, 9)
        curves = {}
        for kind in kinds:
            speed = 1.0 if kind.name == "small" else draw.uniform(0.3, 0.8)
            own = [(b, (first + each * b) * speed, weights + 0.3 * b) for b in (1, 2, 4, 8)]
            if draw.random() < 0.85 or len(kinds) == 1:
                curves[kind.name] = curve(*own)
        rate = draw.choice((5, 20, 60, 150, 400))
        if curves:
            sessions.append(ServingSession(f"s{number}", rate, round(draw.uniform(30, 200) * MS), curves))
    return sessions, kinds


def test_equal_to_trying_all() -> None:
    """Also which cannot be; and the greedy packing is never better."""
    counts = {"none": 0, "greedy is more": 0, "shared": 0, "whole": 0}
    for seed in range(INSTANCES):
        sessions, kinds = drawn(seed)
        if not sessions:
            continue
        found = pack(sessions, kinds, percentile=None)
        expected = reference.fewest(sessions, kinds, [kind.devices for kind in kinds])
        assert (expected is None) == bool(found.lacks), seed
        counts["none"] += expected is None
        if expected is not None:
            assert found.cost == expected and found.is_proved, seed
            assert found.greedy_cost >= found.cost or any(kind.available is not None for kind in kinds), seed
            counts["greedy is more"] += found.greedy_cost > found.cost
            counts["shared"] += any(len(host.runs) > 1 for host in found.hosts)
            counts["whole"] += any(host.count > 1 for host in found.hosts)
    assert min(counts.values()) > 2, counts


def test_a_packing_holds_what_it_says() -> None:
    """Rates in all, time in each period, bounds, memory, and turns that do not overlap."""
    for seed in range(0, INSTANCES, 5):
        sessions, kinds = drawn(seed)
        for percentile in (None, 0.99):
            found = pack(sessions, kinds, percentile=percentile) if sessions else None
            if found is None or found.lacks:
                continue
            for session in sessions:
                runs = [(host.count, run) for host in found.hosts for run in host.runs if run.session == session.name]
                assert sum(count * run.rate_s for count, run in runs) == pytest.approx(session.rate_s)
                assert all(run.worst_ns <= session.bound_ns for _, run in runs)
            for host in found.hosts:
                kind = next(kind for kind in kinds if kind.name == host.kind)
                assert host.peak_bytes <= kind.capacity_bytes
                ends = 0
                for run in host.runs:
                    assert run.begins_ns == ends
                    ends = run.begins_ns + run.latency_ns
                assert ends <= host.period_ns


def test_models_share_a_device_as_nexus_has_it() -> None:
    """Its figure: A takes 75, 100 ms for 8, 16; B 50, 90 and C 60, 95 for as many. B's batches of 8 each 125 ms leave
    75 of these, which is what A takes of 8; C, whose period cannot be the same, has another device."""
    a = ServingSession("A", 64, 200 * MS, {"gpu": curve((4, 50, 1), (8, 75, 1), (16, 100, 1))})
    b = ServingSession("B", 32, 250 * MS, {"gpu": curve((4, 50, 1), (8, 90, 1), (16, 125, 1))})
    c = ServingSession("C", 32, 250 * MS, {"gpu": curve((4, 60, 1), (8, 95, 1), (16, 125, 1))})
    found = pack([a, b, c], [HostKind("gpu", 1, 16 * GB)], percentile=None)
    assert found.cost == found.greedy_cost == 2 and found.is_proved
    assert [run.session for run in found.hosts[0].runs] == ["A", "B"]
    host = found.hosts[0]
    assert host.period_ns == 125 * MS and [run.batch for run in host.runs] == [8, 4] and host.busy_share == 1.0


def test_money_counts_where_prices_are_given() -> None:
    curves = {"old": curve((4, 40, 1)), "new": curve((4, 10, 1))}
    session = ServingSession("model", 300, 100 * MS, curves)
    kinds = {"old": HostKind("old", 1, 16 * GB, 1.0), "new": HostKind("new", 1, 16 * GB, 2.5)}
    found = pack([session], kinds.values(), percentile=None)
    assert found.unit == "money an hour" and found.counts() == {"new": 1} and found.cost == 2.5
    dear = HostKind("new", 1, 16 * GB, 3.5)
    assert pack([session], [kinds["old"], dear], percentile=None).counts() == {"old": 3}


def test_what_lacks_is_named() -> None:
    session = ServingSession("model", 100, 30 * MS, {"gpu": curve((1, 20, 10), (4, 25, 12))})
    found = pack([session], [HostKind("gpu", 1, 16 * GB)])
    assert found.lacks and "40 ms is the least" in found.lacks[0] and "found 30 ms" in found.lacks[0]
    found = pack([session], [HostKind("gpu", 1, 8 * GB)])
    assert "10,000,000,000 bytes" in found.lacks[0]
    slow = ServingSession("model", 100, 60 * MS, {"gpu": curve((1, 20, 10))})
    found = pack([slow], [HostKind("gpu", 1, 16 * GB, None, 1)], percentile=None)
    assert "1 of gpu" in found.lacks[0] and "2 of gpu would do" in found.lacks[0]
    assert "no curve there" in pack([slow], [HostKind("other", 1, GB)]).lacks[0]
    assert str(found).startswith("none:")


@pytest.mark.parametrize("percentile", [0.9, 0.99])
def test_so_many_requests_are_answered_in_time(percentile: float) -> None:
    """On hosts that several share, requests coming at random, as a simulated server has it."""
    curves = {"gpu": curve(*((b, 4 + 0.8 * b, 2) for b in (1, 2, 4, 8, 16, 32)))}
    sessions = [ServingSession(f"s{n}", rate, bound * MS, curves) for n, (rate, bound) in
                enumerate(((700, 90), (40, 60), (150, 120), (3, 80), (15, 150)))]  # fmt: skip
    found = pack(sessions, [HostKind("gpu", 1, 16 * GB)], percentile=percentile)
    assert not found.lacks and any(len(host.runs) > 2 for host in found.hosts)
    for host in found.hosts:
        for run in host.runs:
            bound = next(session.bound_ns for session in sessions if session.name == run.session)
            came = reference.arrivals(run.rate_s, 20_000, seed=1)
            waited = reference.waited_in_turns(came, curves["gpu"], host.period_ns, run.begins_ns, run.batch)
            assert reference.share_within(waited, bound) >= percentile, (host, run)
            assert run.worst_ns <= bound


def test_curves_of_decoders() -> None:
    """A prompt of 700 goes in 512 and 256, the first token with it; steps count with their interval's upper end."""
    step = {"predicted_ns": 10, "interval_ns": [8, 12]}
    points = [
        {"batch": 1, "decode": step, "prefill": {"512": {"predicted_ns": 100}, "256": {"predicted_ns": 60}},
         "peak_bytes": 5},
        {"batch": 2, "decode": None, "prefill": {}, "peak_bytes": 0},
    ]  # fmt: skip
    assert request_curve(points, 700, 4).points == (BatchPoint(1, 160 + 3 * 12, 5),)
    assert request_curve(points, None, 4).points == (BatchPoint(1, 48, 5),)
    assert request_curve(points, 1024).points == (BatchPoint(1, 200, 5),)
    steps = BatchLatency(1, StepLatency(10, (9, 12)), {1: StepLatency(7)}, 5)
    assert request_curve(LatencyCurve((steps,)), None, 4) == request_curve(points, None, 4)
    with pytest.raises(PlanError, match="found neither"):
        request_curve(points)


def test_programs_that_a_larger_one_beats_are_left_out() -> None:
    assert [p.batch for p in curve((1, 5, 1), (2, 9, 1), (4, 8, 1)).points] == [1, 4]
    assert curve((1, 5, 1), (4, 8, 1)).of(2) == BatchPoint(4, 8 * MS, GB)
    with pytest.raises(PlanError, match="each batch once"):
        curve((1, 5, 1), (1, 6, 1))


def test_hosts_are_meshes() -> None:
    host = host_of("h100:1x2", price=2.0)
    assert host.devices == 2 and host.price == 4.0 and 40 * GB < host.capacity_bytes < 80 * GB
