"""The stage programme against every choice of stages, on random chains of up to 8 layers and 8 devices."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.interop import StageKind, best_stages, equally_cut
from autopar.interop.dp import NEVER, _Bounds, _Ranges
from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, SCHEDULES, in_flight, turns
from tests.oracles.stages import Row, exhaustive, objective, peak, stayed

TAKEN = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}
TIMES = ("time", "receive", "once", "reduce", "hide")
ATTRIBUTES = (*TIMES, "resident", "travelling", "most_travelling", "activation", "workspace")


def drawn(rng: random.Random, layers: int, devices: int, limit: int) -> list[Row]:
    """Up to three kinds of submesh of 1, 2, 4 or 8 devices; larger ones are faster, more or less."""
    rows = []
    for _ in range(rng.randint(1, 3)):
        size = rng.choice([n for n in (1, 2, 4, 8) if n <= devices])
        row: Row = {"devices": size, "limit": max(1, limit + rng.randint(-limit // 4, limit // 4))}
        for name in ATTRIBUTES:
            row[name] = [rng.randint(0, 60) // rng.choice((1, size)) for _ in range(layers)]
        row["time"] = [value + 1 for value in row["time"]]
        row["receive"][0] = 0
        rows.append(row)
    return rows


def kind(row: Row) -> StageKind:
    arrays = {f"{name}_ns": np.array(row[name]) for name in TIMES}
    arrays |= {f"{name}_bytes": np.array(row[name]) for name in ATTRIBUTES[len(TIMES) :]}
    for name in ("travel_ns", "last_ns", "begin_bytes", "gradient_bytes", "waiting_bytes", "second_bytes", "split_ns"):
        arrays[name] = np.zeros_like(arrays["time_ns"])
    return StageKind(key=None, num_devices=row["devices"], memory_limit=row["limit"], **arrays)


@pytest.mark.parametrize("layers", range(1, 9))
@pytest.mark.parametrize("devices", range(1, 9))
def test_equal_to_every_choice(layers: int, devices: int) -> None:
    rng = random.Random(100 * layers + devices)
    outcomes = set()
    for _ in range(12):
        rows = drawn(rng, layers, devices, rng.choice((30, 200, 600, 3000)))
        microbatches, schedule = rng.choice((1, 2, 3, 8)), rng.choice(("gpipe", "1f1b"))
        best, least = exhaustive(rows, layers, devices, microbatches, schedule)
        outcomes.add(best is None)
        kinds = [kind(row) for row in rows]
        if best is None:
            with pytest.raises(InfeasibleError) as refused:
                best_stages(kinds, devices, microbatches, schedule)
            assert refused.value.smallest_bytes == (least or None)
            continue
        found = best_stages(kinds, devices, microbatches, schedule)
        stages = [tuple(stage) for stage in found.best.stages]
        assert (found.best.step_ns, found.lower_bound_ns, found.stop_reason) == (best, best, "optimal")
        assert objective(rows, stages, microbatches) == best
        peaks = peak(rows, stages, microbatches, schedule)
        assert all(have <= rows[number]["limit"] for have, (_, _, number) in zip(peaks, stages, strict=True))
        assert all(objective(rows, [*map(tuple, c.stages)], microbatches) == c.step_ns for c in found.runners_up)
    if layers > 2 and devices > 2:
        assert outcomes == {True, False}, "some of the instances are feasible, some are not"


@pytest.mark.parametrize("layers", (12, 24, 40))
def test_what_is_passed_over_is_never_the_best(layers: int) -> None:
    """Longer chains of mostly equal layers: with a limit on rounds that is never reached, nothing is passed over."""
    rng = random.Random(layers)
    for devices in (2, 4, 8):
        for _ in range(6):
            (row, *_), microbatches = drawn(rng, layers, devices, 30_000), rng.choice((1, 4, 16))
            row["devices"] = 1
            for name in ATTRIBUTES:  # all but the ends are alike
                row[name] = [row[name][0], *[row[name][1]] * (layers - 2), row[name][-1]]
            every = best_stages([kind(row)], devices, microbatches, max_rounds=1 << 20)
            found = best_stages([kind(row)], devices, microbatches)
            assert (found.best.step_ns, found.stop_reason) == (every.best.step_ns, "optimal")


def test_a_search_that_is_stopped_says_how_far_it_is_from_the_bound() -> None:
    rng = random.Random(5)
    for _ in range(50):
        rows = drawn(rng, 8, 8, 3000)
        best, _ = exhaustive(rows, 8, 8, 8, "1f1b")
        if best is None:
            continue
        found = best_stages([kind(row) for row in rows], 8, 8, max_rounds=1)
        assert found.lower_bound_ns <= best <= found.best.step_ns
        assert (found.stop_reason == "optimal") == (found.lower_bound_ns == found.best.step_ns)


def test_equal_stages_cost_what_the_objective_says() -> None:
    rng = random.Random(6)
    for _ in range(50):
        (row, *_), microbatches = drawn(rng, 6, 8, 3000), rng.choice((1, 2, 8))
        for count in (1, 2, 3, 6):
            equal = equally_cut(kind(row), count, microbatches)
            assert equal is not None
            assert equal.stages == tuple((n * 6 // count, (n + 1) * 6 // count, 0) for n in range(count))
            assert equal.step_ns == objective([row], [*map(tuple, equal.stages)], microbatches)
        assert equally_cut(kind(row), 4, microbatches) is None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("count", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 6), (2, 1, 1)])
def test_in_flight_is_what_the_schedule_plays(schedule: str, count: int, chunks: int, microbatches: int) -> None:
    row = SCHEDULES[schedule]
    chunks = (row.num_chunks or chunks) if row.has_chunks else 1
    microbatches = max(microbatches, row.fewest(count))
    on = row.in_turn(range(count), chunks)
    stages_of = [[stage for stage, place in enumerate(on) if place == position] for position in range(count)]
    for position, order in enumerate(turns(schedule, stages_of, microbatches, True)):
        held = np.cumsum([TAKEN[turn.direction] for turn in order])
        told = in_flight(schedule, count - position, microbatches, chunks, count)
        assert told == max(held)


@pytest.mark.parametrize("microbatches", (1, 2, 6))
def test_the_least_over_the_ends_that_bounds_allow(microbatches: int) -> None:
    """On chains too long for every choice, against plain sums: also where later layers hide what earlier ones send, so
    that a longer stage is allowed and a shorter one is not."""
    rng, num_uneven = random.Random(microbatches), 0
    for _ in range(30):
        row, layers = drawn(rng, 37, 1, 3_000)[0], 37
        behind = np.array([rng.choice((int(NEVER), rng.randint(0, 900))) for _ in range(layers + 1)])
        under = _Bounds(rng.randint(50, 400 * microbatches), rng.randint(1, 4))
        ranges = _Ranges(kind(row), microbatches)
        found = ranges.least_ahead(behind, under)
        for begin in range(layers):
            allowed = []
            for end in range(begin + 1, layers + 1):
                one = sum(row["time"][begin:end]) + row["receive"][begin]
                shown = max(0, sum(row["reduce"][begin:end]) - sum(row["hide"][begin:end]))
                held = stayed(row, begin, end)
                held += under.num_in_flight * sum(row["activation"][begin:end])
                bottleneck = (microbatches - 1) * one + sum(row["once"][begin:end]) + shown
                if bottleneck <= under.bottleneck_ns and held <= row["limit"]:
                    allowed.append((min(int(NEVER), one + int(behind[end])), end))
            least = min(allowed, default=(int(NEVER), 0))
            assert found[begin] == least[0]
            if least[0] < NEVER:
                assert ranges.end_ahead(begin, behind, under) == least[1]
            num_uneven += bool(allowed) and [end for _, end in allowed] != [*range(begin + 1, allowed[-1][1] + 1)]
    assert microbatches > 1 or num_uneven, "some ends are allowed behind others that are not"
