"""Tasks placed all at once are where those placed one by one are, where nothing depends on what others delay."""

from __future__ import annotations

import random

import pytest

from autopar.simulate.engine import COMPUTE, Carried, Engine, Moment
from autopar.simulate.settling import SettlingEngine

LINKS = ["intra_node axis 0", "intra_node axis 1", "inter_node axis 1"]
NOTHING = Carried()


def _submit(engine: Engine, seed: int, links: list[str]) -> list[int]:
    draw, tasks = random.Random(seed), list[int]()
    for number in range(40):
        after = []
        if draw.random() < 0.4:
            after = [engine.compute(f"cast {number}", "forward", draw.randrange(0, 3000), (), draw.choice([0, 400]))]
        link = draw.choice(links)
        tasks.append(
            engine.transmit(link, f"{number}", "parameter", draw.randrange(1, 9000), after, draw.choice([0, 50]))
        )
        engine.allocate(engine.last, number + 1, "gathered", Moment.SEND)
    engine.settle()
    return tasks


def _placed(engine: Engine, tasks: list[int]) -> list[tuple[str, int, int]]:
    return [(engine.tasks[task][0], *engine.tasks[task][2:4]) for task in tasks]


@pytest.mark.parametrize("seed", range(8))
def test_one_queue_a_level_is_placed_as_by_the_engine(seed: int) -> None:
    one, other = Engine({}, NOTHING), SettlingEngine({}, NOTHING)
    links = [LINKS[0], LINKS[2]]
    assert _placed(one, _submit(one, seed, links)) == _placed(other, _submit(other, seed, links))
    assert (one.free_ns, one.host_ns, one.links) == (other.free_ns, other.host_ns, other.links)
    assert one.allocations == other.allocations and one.unmet_ns == other.unmet_ns


@pytest.mark.parametrize("seed", range(8))
def test_queues_of_a_level_share_it_as_by_the_engine(seed: int) -> None:
    """To the nanosecond that each of the engine's placements rounds."""
    one, other = Engine({}, NOTHING), SettlingEngine({}, NOTHING)
    for mine, others in zip(
        _placed(one, _submit(one, seed, LINKS)), _placed(other, _submit(other, seed, LINKS)), strict=True
    ):
        assert mine[0] == others[0] and mine[1:] == pytest.approx(others[1:], abs=40)


def test_compute_is_slowed_by_what_began_first() -> None:
    engines = Engine({"intra_node": 1.5}, NOTHING), SettlingEngine({"intra_node": 1.5}, NOTHING)
    for engine in engines:
        engine.transmit("intra_node", "a", "parameter", 3000)
        task = engine.compute("cast", "forward", 4000)
        engine.settle()
        assert engine.tasks[task][2:4] == (0, 5000), "2,000 of it beside the collective, in 3,000"


def test_what_depends_on_a_delayed_collective_waits_for_it() -> None:
    engine = SettlingEngine({}, NOTHING)
    first = engine.transmit(LINKS[0], "first step", "parameter", 1000)
    second = engine.transmit(LINKS[2], "second step", "parameter", 500, [first])
    engine.transmit(LINKS[1], "another axis", "parameter", 1000)
    engine.settle()
    assert engine.tasks[first][2:4] == (0, 2000)
    assert engine.tasks[second][2:4] == (2000, 2500)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_what_is_under_way_goes_on_as_if_all_had_been_submitted_together(cut: int) -> None:
    draw = random.Random(cut)
    jobs = [(draw.choice(LINKS[:2]), draw.randrange(1, 5000)) for _ in range(30)]
    whole, first = SettlingEngine({}, NOTHING), SettlingEngine({}, NOTHING)
    for engine, some in ((whole, jobs), (first, jobs[:cut])):
        for link, duration in some:
            engine.transmit(link, "", "parameter", duration)
        engine.settle()
    rest = SettlingEngine({}, Carried(tuple(first.links.items()), tuple(first.in_flight)))
    for link, duration in jobs[cut:]:
        rest.transmit(link, "", "parameter", duration)
    rest.settle()
    assert [task[2:4] for task in whole.tasks[1 + cut :]] == [
        pytest.approx(task[2:4], abs=2) for task in rest.tasks[1:]
    ]
    ends = sorted(rest.moved.get(end, (0, end))[1] for _, end, _, _ in first.in_flight)
    assert ends == pytest.approx(sorted(task[3] for task in whole.tasks[1 : 1 + cut]), abs=2)


def test_a_level_carries_no_more_than_one_collective_at_a_time() -> None:
    engine = SettlingEngine({}, NOTHING)
    tasks = [engine.transmit(LINKS[number % 2], "", "parameter", 700 + number) for number in range(20)]
    engine.settle()
    assert max(engine.tasks[task][3] for task in tasks) == sum(700 + number for number in range(20))


def test_a_host_that_is_slower_than_the_device_launches() -> None:
    engines = Engine({}, NOTHING), SettlingEngine({}, NOTHING)
    for engine in engines:
        for number in range(3):
            cast = engine.compute("cast", "forward", 100, (), 1000)
            engine.transmit("intra_node", f"{number}", "parameter", 10, [cast], 500)
        engine.settle()
    one, other = engines
    assert one.free_ns == other.free_ns == 4500
    spent = [sum(t[3] - t[2] for t in engine.tasks if t[:2] == (COMPUTE, "launch")) for engine in engines]
    assert spent[0] == spent[1]
