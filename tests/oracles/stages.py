"""Every way to cut a chain of layers into stages on submeshes, tried one by one, with plain sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
"""A kind of submesh: its number of devices, its limit, and a list an attribute with an entry a layer."""


def every_choice(rows: Sequence[Row], layers: int, devices: int) -> Iterator[list[tuple[int, int, int]]]:
    """All lists of (begin, end, kind) that cover the layers and use the devices up."""

    def behind(begin: int, left: int) -> Iterator[list[tuple[int, int, int]]]:
        if begin == layers:
            if left == 0:
                yield []
            return
        for number, row in enumerate(rows):
            if row["devices"] <= left:
                for end in range(begin + 1, layers + 1):
                    for rest in behind(end, left - row["devices"]):
                        yield [(begin, end, number), *rest]

    return behind(0, devices)


def held(schedule: str, position: int, count: int, microbatches: int) -> int:
    """Microbatches whose forward pass a stage has made before it makes the first backward one."""
    warm_up = count - position  # a microbatch goes through as many stages before its gradient comes back
    return microbatches if schedule == "gpipe" or warm_up > microbatches else warm_up


def objective(rows: Sequence[Row], stages: list[tuple[int, int, int]], microbatches: int) -> int:
    """Nanoseconds of a step."""
    times, ends = [], []
    for begin, end, kind in stages:
        row = rows[kind]
        one = sum(row["time"][begin:end]) + row["receive"][begin]
        shown = max(0, sum(row["reduce"][begin:end]) - sum(row["hide"][begin:end]))
        times.append(one)
        ends.append((microbatches - 1) * one + sum(row["once"][begin:end]) + shown)
    return sum(times) + max(ends)


def stayed(row: Row, begin: int, end: int) -> int:
    """Bytes a device of a stage beside the activations of microbatches."""
    travelling = min(sum(row["travelling"][begin:end]), max(row["most_travelling"]))
    return sum(row["resident"][begin:end]) + travelling + max(row["workspace"][begin:end])


def peak(rows: Sequence[Row], stages: list[tuple[int, int, int]], microbatches: int, schedule: str) -> list[int]:
    """Bytes a device of each stage."""
    found = []
    for position, (begin, end, kind) in enumerate(stages):
        row = rows[kind]
        flying = held(schedule, position, len(stages), microbatches)
        stays = stayed(row, begin, end)
        found.append(stays + flying * sum(row["activation"][begin:end]))
    return found


def exhaustive(
    rows: Sequence[Row], layers: int, devices: int, microbatches: int, schedule: str
) -> tuple[int | None, int]:
    """The least objective of what fits (None where nothing does), and the least limit equal for all kinds (0: none)."""
    best: int | None = None
    least = 0
    for stages in every_choice(rows, layers, devices):
        peaks = peak(rows, stages, microbatches, schedule)
        least = max(peaks) if not least else min(least, max(peaks))
        if all(have <= rows[stage[2]]["limit"] for have, stage in zip(peaks, stages, strict=True)):
            value = objective(rows, stages, microbatches)
            best = value if best is None else min(best, value)
    return best, least
