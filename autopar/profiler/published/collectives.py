"""A profile's links and collectives from tables of measured times, `collectives*.csv` or `.csv.gz` of a folder.

What was measured inside a node becomes points in four steps:

1. One source serves a collective of so many ranks: NCCL's own benchmark before kernel times before wall clocks, since
   the first has no launch from the host in it. Integers are left out where other dtypes are there (`FLOATS_ONLY`).
2. Sizes within a quarter of an octave are one point, the geometric mean of sizes and a typical time (`_typical`), so a
   table of a thousand sizes becomes some thirty points.
3. More bytes take no less time (isotonic regression of the logarithms).
4. Powers of two that were not measured are filled in (`filled`): NCCL changes its protocol at certain sizes, where
   times jump, and a sweep of another collective that has the size says on which side of the jump it lies.

Releases of NCCL change protocols at other sizes (on two H100, 256 KiB of all-to-all take 9 µs in 2.23 and 14 in 2.27),
so where several were measured each has points of its own beside those of all (`CollectivePoints.library`).

The link that other groups and collectives are extrapolated with is read off the same points (`fitted_link`).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import numpy as np

from autopar.cost.profile import Profile, profile_from_json, profile_to_json
from autopar.profiler.published.measurements import Measurement, named, read_measurements, today

#: The first that a collective has rows of serves it. Of the V100, Mist's sweep took pairs of GPUs with one NVLink
#: between them, which are those of ranks 0 and 1, and another took pairs with two.
SOURCES = ("nccl-tests", "kernel time", "in Mist", "wall clock", "")
INTEGERS = ("int8", "uint8", "int32")
FLOATS_ONLY = ("all_reduce", "reduce_scatter")  # NVSwitch adds floating-point numbers only
#: all-gather and reduce-scatter send the same messages, and NCCL chooses protocols for both alike
LIKE = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
LARGEST = 1 << 30

Curve = dict[int, float]
"""Nanoseconds by bytes."""

Key = tuple[str, int]
"""A collective and its number of ranks."""


class CollectiveBlocks(NamedTuple):
    """Items of a profile's "links" and "collectives" as JSON; empty where the tables say nothing."""

    links: list[dict[str, Any]]
    collectives: list[dict[str, Any]]


def collective_blocks(folder: Path, gpu: str) -> CollectiveBlocks:
    """The blocks of a GPU, as the tables' gpu column has it, from all tables of collectives in a folder.

    Raises ValueError for a table that lacks columns.
    """
    rows = [row for path in tables_of(folder) for row in read_measurements(path) if row.gpu == gpu]
    served = {key: own for key, own in served_by(rows).items() if key[0] != "send" or own[0].nodes == 1}
    curves = completed({key: thinned(own) for key, own in served.items()})
    links = fitted_link(curves, served)
    points = [_points(key, curves[key], served[key]) for key in sorted(curves)]
    return CollectiveBlocks([links] if links else [], points + _points_by_library(served))


def _points_by_library(served: Mapping[Key, Sequence[Measurement]]) -> list[dict[str, Any]]:
    """Those of each release, where several measured a GPU."""
    releases = by_library([row for own in served.values() for row in own])
    found = []
    for library in releases if len(releases) > 1 else ():
        own = {key: kept for key, some in served.items() if (kept := [row for row in some if row.library == library])}
        curves = completed({key: thinned(some) for key, some in own.items()})
        found += [{**_points(key, curves[key], own[key]), "library": library} for key in sorted(curves)]
    return found


def by_library(rows: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """The rows of each release that is stated."""
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.library:
            found.setdefault(row.library, []).append(row)
    return dict(sorted(found.items()))


def gpus_of(folder: Path) -> list[str]:
    """The GPUs whose collectives the folder's tables have, those with most rows first."""
    return [
        gpu
        for gpu, _ in Counter(row.gpu for path in tables_of(folder) for row in read_measurements(path)).most_common()
    ]


def tables_of(folder: Path) -> list[Path]:
    """A folder's files of collectives."""
    return sorted(path for path in folder.glob("collectives*") if path.name.endswith((".csv", ".csv.gz")))


def with_collectives(profile: Profile, folder: Path, gpu: str) -> Profile:
    """The profile with what the folder's tables say of links and collectives inside a node; the rest stays, such as
    groups of ranks that no table has."""
    blocks, data = collective_blocks(folder, gpu), profile_to_json(profile)
    new = {link["level"] for link in blocks.links}
    data["links"] = [*blocks.links, *(link for link in data["links"] if link["level"] not in new)]
    known = {_group(item) for item in blocks.collectives}
    data["collectives"] = [*blocks.collectives, *(item for item in data["collectives"] if _group(item) not in known)]
    return profile_from_json(json.loads(json.dumps(data)), f"tables of {folder}")


def _group(item: Mapping[str, Any]) -> tuple[Any, ...]:
    return item["collective"], item["level"], item["ranks"], item.get("library", "")


def extrapolated(blocks: CollectiveBlocks, times: float, why: str) -> CollectiveBlocks:
    """Blocks of a GPU that was not measured, from one whose links have so many times the bandwidth: what the smallest
    message takes stays, and what more bytes take besides is so many times as long."""
    return CollectiveBlocks(
        [
            {**link, "bandwidth": float(f"{link['bandwidth'] / times:.4g}"), "provenance": provenance("assumed", why)}
            for link in blocks.links
        ],
        [
            {**item, "points": _stretched(item["points"], times), "provenance": provenance("assumed", why)}
            for item in blocks.collectives
        ],
    )


def _stretched(points: Sequence[tuple[int, int]], times: float) -> list[list[int]]:
    least = points[0][1]
    return [[size, round(least + times * (time - least))] for size, time in points]


def served_by(rows: Iterable[Measurement]) -> dict[Key, list[Measurement]]:
    """The rows inside a node that serve each collective: those of the best source that it has."""
    groups: dict[Key, list[Measurement]] = {}
    for row in rows:
        if row.nodes == 1:
            groups.setdefault((row.op, row.ranks), []).append(row)
    return {key: _best_source(key[0], own) for key, own in groups.items()}


def _best_source(op: str, rows: list[Measurement]) -> list[Measurement]:
    best = min(map(_rank_of_source, rows))
    rows = [row for row in rows if _rank_of_source(row) == best]
    floats = [row for row in rows if row.dtype not in INTEGERS]
    return floats if floats and op in FLOATS_ONLY else rows


def _rank_of_source(row: Measurement) -> int:
    return next(rank for rank, words in enumerate(SOURCES) if words in row.software)


# From rows to points ----------------------------------------


def thinned(rows: Iterable[Measurement]) -> Curve:
    """One point for the sizes around each half of an octave, later ones taking no less time."""
    bins: dict[int, list[Measurement]] = {}
    for row in rows:
        bins.setdefault(round(2 * math.log2(row.num_bytes)), []).append(row)
    sizes = [geometric_mean(row.num_bytes for row in own) for _, own in sorted(bins.items())]
    points = [(round(size), _typical(own, size)) for size, (_, own) in zip(sizes, sorted(bins.items()), strict=True)]
    return dict(zip([size for size, _ in points], isotonic([time for _, time in points]), strict=True))


def _typical(rows: Sequence[Measurement], size: float) -> float:
    """The median of their times; of wall clocks the lower quartile of the pace, since some of the layouts that were
    swept with one took a copy besides, which made them up to three times as long."""
    if not any("wall clock" in row.software for row in rows):
        return median([row.time_ns for row in rows])
    return size * sorted(row.time_ns / row.num_bytes for row in rows)[len(rows) // 4]


def isotonic(times: Sequence[float]) -> list[float]:
    """The nearest times that never fall: neighbours in the wrong order share their geometric mean."""
    blocks: list[tuple[float, int]] = []  # logarithm, how many
    for time in times:
        blocks.append((math.log(time), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (right, m), (left, n) = blocks.pop(), blocks.pop()
            blocks.append(((left * n + right * m) / (n + m), n + m))
    return [math.exp(log) for log, count in blocks for _ in range(count)]


def completed(curves: Mapping[Key, Curve]) -> dict[Key, Curve]:
    """The curves with the powers of two that they lack, from their least size to 1 GiB."""
    return {key: _with(curve, _lacking(curve), *_told_by(key, curves)) for key, curve in curves.items()}


def _told_by(key: Key, curves: Mapping[Key, Curve]) -> tuple[list[Curve], bool]:
    """The curves that say what another lacks, and whether a straight line says as much as each of them.

    For all-reduces those of other groups, in which the jumps are nearly at the same sizes; for all-to-alls none: left
    out in turn, their sizes were told worse by other groups than by the line.
    """
    op, ranks = key
    if op in LIKE:
        return [curves[LIKE[op], ranks]] if (LIKE[op], ranks) in curves else [], False
    others = [curve for (other, number), curve in curves.items() if other == op == "all_reduce" and number != ranks]
    return others, True


def _lacking(curve: Collection[int]) -> list[int]:
    """Powers of two from the least size on that have no measured size within a quarter of an octave."""
    powers = [1 << n for n in range(9, LARGEST.bit_length()) if min(curve) < 1 << n]
    return [power for power in powers if not any(abs(math.log2(size / power)) < 0.25 for size in curve)]


def _with(curve: Curve, sizes: Iterable[int], likes: Sequence[Curve], is_line_told: bool) -> Curve:
    points = sorted({**curve, **{size: filled(curve, size, likes, is_line_told) for size in sizes}}.items())
    return dict(zip([size for size, _ in points], isotonic([time for _, time in points]), strict=True))


def filled(curve: Curve, size: int, likes: Sequence[Curve] = (), is_line_told: bool = True) -> float:
    """Nanoseconds at a size that was not measured: the geometric mean of what is told of it.

    A like curve tells its own time, times how much longer this one took at the sizes next to it that both have; the
    line is one of bytes: α + bβ is exact between two sizes of one protocol. Where no curve has the size, the line.
    """
    told = [time for like in likes if (time := _as_in(like, curve, size)) is not None]
    return geometric_mean([*told, _straight(sorted(curve.items()), size)] if is_line_told or not told else told)


def _as_in(like: Curve, curve: Curve, size: int) -> float | None:
    common = sorted(set(curve) & set(like))
    right = bisect_right(common, size)
    if size not in like or not 0 < right < len(common):
        return None
    low, high = common[right - 1], common[right]
    share = math.log(size / low) / math.log(high / low)
    return like[size] * math.pow(curve[low] / like[low], 1 - share) * math.pow(curve[high] / like[high], share)


def _straight(points: Sequence[tuple[int, float]], size: int) -> float:
    """Along the line through the points on both sides; above the largest at the pace of the last line."""
    if len(points) == 1:
        return points[0][1] * max(1.0, size / points[0][0])
    right = min(max(1, bisect_right(points, (size, math.inf))), len(points) - 1)
    (x, y), (next_x, next_y) = points[right - 1 : right + 1]
    return max(y, y + (next_y - y) * (size - x) / (next_x - x))


# Blocks ----------------------------------------


def _points(key: Key, curve: Curve, rows: Sequence[Measurement]) -> dict[str, Any]:
    op, ranks = key
    source = f"{len(rows)} times of {named(rows)}; powers of two that lack are filled in"
    return {
        "collective": op,
        "level": "intra_node",
        "ranks": ranks,
        "points": [[size, math.ceil(float(f"{time:.4g}"))] for size, time in sorted(curve.items())],
        "residual": round(_residual(curve, rows), 4),
        "provenance": provenance("published", source),
    }


def _residual(curve: Curve, rows: Sequence[Measurement]) -> float:
    """Median relative error of the points at the rows."""
    points = sorted(curve.items())
    return median([abs(_straight(points, row.num_bytes) / row.time_ns - 1) for row in rows])


def provenance(kind: str, source: str) -> dict[str, str]:
    return {"kind": kind, "source": source, "date": today()}


def fitted_link(curves: Mapping[Key, Curve], rows: Mapping[Key, Sequence[Measurement]]) -> dict[str, Any] | None:
    """The link inside a node under which the formulas (`cost.collectives`) are nearest to all-gathers and
    reduce-scatters; None without either.

    Small messages give the cost of starting and of a message in the cheap protocol, large ones the bandwidth, those
    between them the cost of a message at full bandwidth and the cheap protocol's part of it.
    """
    rings = {key: curve for key, curve in curves.items() if key[0] in LIKE}
    if not rings:
        return None
    rate = _bandwidth(rings)
    start, cheap = _least_squares([(ranks - 1, min(curve.values())) for (_, ranks), curve in rings.items()])
    full = _message_ns(rings, rate, start, 4 << 20, 64 << 20)
    link = {"level": "intra_node", "alpha_ns": round(max(full, cheap)), "bandwidth": float(f"{rate * 1e9:.4g}")}
    if start >= 10:
        link["start_ns"] = round(start)
    if cheap < full:
        link["low_latency"] = {"alpha_ns": round(cheap), "share": _share(rings, rate, start, cheap)}
    used = [row for key in rings for row in rows[key]]
    return {**link, "provenance": provenance("fitted", f"ring formula read off {len(used)} times of {named(used)}")}


def _bandwidth(rings: Mapping[Key, Curve]) -> float:
    """Bytes a nanosecond through each rank of the largest group, in its largest messages."""
    most = max(ranks for _, ranks in rings)
    rates = [
        (most - 1) / most * size / time
        for (_, ranks), curve in rings.items()
        if ranks == most
        for size, time in curve.items()
        if size >= max(curve) // 8
    ]
    return float(median(rates))


def _least_squares(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Cost of starting and of a message, both positive, from times of the smallest messages by their number."""
    messages, times = np.array(points, dtype=float).T
    if len(set(messages)) == 1:
        return 0.0, float(np.mean(times / messages))
    slope, offset = np.polyfit(messages, times, 1)
    if slope < 10 or offset < 0:
        return (float(np.mean(times)) - 10 * float(np.mean(messages)), 10.0) if slope < 10 else (0.0, float(slope))
    return float(offset), float(slope)


def _message_ns(rings: Mapping[Key, Curve], rate: float, start: float, least: int, most: int) -> float:
    """Median cost of a message at full bandwidth, among sizes where it is a part of the time."""
    costs = [
        (time - start - (ranks - 1) / ranks * size / rate) / (ranks - 1)
        for (_, ranks), curve in rings.items()
        for size, time in curve.items()
        if least <= size <= most
    ]
    return max(10.0, median(costs)) if costs else 10.0


def _share(rings: Mapping[Key, Curve], rate: float, start: float, cheap: float) -> float:
    """The cheap protocol's bandwidth over the link's, from messages of half a megabyte."""
    shares = [
        (ranks - 1) / ranks * size / rate / max(time - start - (ranks - 1) * cheap, 1.0)
        for (_, ranks), curve in rings.items()
        for size, time in curve.items()
        if 1 << 18 <= size <= 1 << 20
    ]
    return float(f"{min(1.0, max(0.01, median(shares))):.3g}") if shares else 1.0
