"""What to rent, against trying every choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from autopar.errors import PlanError
from autopar.ladders import Ladder, Needs, capacity
from autopar.ladders.capacity import Offer, Selection
from tests.ladder import made

INSTANCES = 200


def choices(offers: list[Offer], jobs: int, available: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Money and time of every way to share jobs out over meshes: for each offer meshes, and jobs on each of them."""
    for counts in itertools.product(range(jobs + 1), repeat=len(offers)):
        if sum(counts) != jobs:
            continue
        for meshes in itertools.product(*(range(1, count + 1) if count else (0,) for count in counts)):
            held: dict[str, int] = {}
            for offer, number in zip(offers, meshes, strict=True):
                held[offer.kind] = held.get(offer.kind, 0) + number * offer.devices
            if all(held.get(kind, 0) <= most for kind, most in available.items()):
                ends = [-(-y // m) * o.time_ns for y, m, o in zip(counts, meshes, offers, strict=True) if y]
                yield sum(y * o.money for y, o in zip(counts, offers, strict=True)), max(ends)


def instance(seed: int) -> tuple[list[Offer], int, dict[str, int], int | None, int | None]:
    draw = random.Random(seed)
    kinds = draw.sample(["a100", "h100", "l40s"], draw.randint(1, 3))
    offers = [
        Offer(draw.choice(kinds), draw.choice([1, 2, 4, 8]), draw.randint(1, 60), draw.randint(1, 60))
        for _ in range(draw.randint(1, 4))
    ]
    available = {kind: draw.randint(1, 16) for kind in kinds if draw.random() < 0.6}
    deadline = draw.randint(5, 120) if draw.random() < 0.7 else None
    budget = draw.randint(5, 160) if draw.random() < 0.7 else None
    return offers, draw.randint(1, 4), available, deadline, budget


@pytest.mark.parametrize("objective", ["money", "time"])
def test_equal_to_trying_all_choices(objective: str) -> None:
    fitting = 0
    for seed in range(INSTANCES):
        offers, jobs, available, deadline, budget = instance(seed)
        every = [
            pair
            for pair in choices(offers, jobs, available)
            if pair[1] <= (deadline or math.inf) and pair[0] <= (budget or math.inf)
        ]
        found = Selection(offers, jobs, available).best(objective, deadline, budget)
        if not every:
            assert found is None, seed
            continue
        fitting += 1
        assert found is not None, seed
        assert sum(found.jobs) == jobs and found.proof
        told = found.money if objective == "money" else found.time_ns
        assert told == min(pair[0 if objective == "money" else 1] for pair in every), seed
        assert (found.money, found.time_ns) in every, seed
    assert INSTANCES / 4 < fitting < INSTANCES


def two_kinds() -> Ladder:
    """A million tokens take 1000 steps of 1,024 samples … of h100 half as long as of a100, at three times the price."""
    fast = made.ladder(lambda n, batch: 80 / n, (8, 16, 32), (1024,), "h100", 3.0)
    slow = made.ladder(lambda n, batch: 160 / n, (8, 16, 32), (1024,), "a100", 1.0)
    return Ladder("model", fast.rungs + slow.rungs)


def test_trainings_of_years_take_as_long_as_they_take() -> None:
    """Times beyond 2 to the 53 ns, 104 days, were said to be 104 days, and cost as little."""
    tokens, hours = 10**12, math.ceil(10**12 / 1024 / 1024) * 10 / 3600  # on 8 h100
    years = made.ladder(lambda n, batch: 80 / n, (8,), (1024,), "h100", 3.0)
    found = capacity(years, Needs(tokens, deadline=10**9))
    assert found.hours == pytest.approx(hours) and found.money == pytest.approx(hours * 24)
    assert f"a deadline of {hours:.3g} h is the least" in capacity(years, Needs(tokens, deadline=2600)).lacks
    assert capacity(years, Needs(10**18, budget=10**13)).hours == pytest.approx(hours * 10**6)
    with pytest.raises(PlanError, match=r"expected jobs that cost less than 4\.61e"):
        capacity(years, Needs(1e27, deadline=10**20))


def test_the_cheapest_by_a_deadline_and_the_fastest_under_a_budget() -> None:
    tokens = 360 * 1024 * 1024  # 360 steps
    cheapest = capacity(two_kinds(), Needs(tokens, deadline=1.0))
    assert [str(one.rung.mesh) for one in cheapest.taken] == ["a100:4x8"]  # none is cheaper, and none of these faster
    assert cheapest.hours == pytest.approx(0.5) and cheapest.money == pytest.approx(16.0)
    fastest = capacity(two_kinds(), Needs(tokens, budget=25.0))
    assert [str(one.rung.mesh) for one in fastest.taken] == ["h100:4x8"] and fastest.objective == "time"
    assert capacity(two_kinds(), Needs(tokens, budget=20.0)).taken[0].rung.kind == "a100"


def test_kinds_are_mixed_where_jobs_are_several() -> None:
    """A sweep of two trainings, of which there are devices of the cheap kind for one."""
    needs = Needs(360 * 1024 * 1024, deadline=1.0, jobs=2, available={"a100": 16, "h100": 64})
    found = capacity(two_kinds(), needs)
    assert sorted(one.rung.kind for one in found.taken) == ["a100", "h100"] and found.money == pytest.approx(40.0)


def test_what_lacks_is_named() -> None:
    tokens = 360 * 1024 * 1024
    late = capacity(two_kinds(), Needs(tokens, deadline=0.1))
    assert not late.taken and "a deadline of 0.25 h is the least" in late.lacks
    dear = capacity(two_kinds(), Needs(tokens, deadline=1.0, budget=10.0))
    assert "a budget of 16 is the least by a deadline of 1 h" in dear.lacks
    none = capacity(two_kinds(), Needs(tokens, deadline=1.0, available={"a100": 4, "h100": 4}))
    assert "8 of a100 (4 available)" in none.lacks
    assert "no rung" in capacity(Ladder("model", ()), Needs(tokens, deadline=1.0)).lacks


def test_wrong_needs_are_refused() -> None:
    with pytest.raises(PlanError, match="expected tokens"):
        Needs(0)
    with pytest.raises(PlanError, match="expected prices"):
        capacity(made.ladder(lambda n, batch: 1 / n), Needs(1e6, deadline=1.0))
    with pytest.raises(PlanError, match="objective"):
        capacity(two_kinds(), Needs(1e6), "speed")
