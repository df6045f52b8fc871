"""Turns the raw points of `measure.py` into a profile: subtracts launch costs and fits curves.

A curve's knots are the measured points themselves; where more work took less time, the longer time holds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from autopar.cost.profile import FORMAT, NO_OVERLAP
from autopar.cost.work import Call, Work, backward_work, forward_work

COMPUTE_BOUND = {"matmul", "attention", "convolution"}
RESERVE_BYTES = 512 << 20
LEAST_SHARE = 0.1  # of a measured time that is left after launch costs: below it lies noise

Samples = list[tuple[float, float]]  # (work of one kernel, its nanoseconds)


def profile_from_points(raw: Mapping[str, Any], host: Mapping[str, Any], date: str) -> dict[str, Any]:
    """The profile of a CPU rank of one thread, as JSON data, from points, host facts and today's date."""
    source = f"{host['model']}, one thread a rank, torch {raw['host']['torch']}"
    provenance = {"kind": "measured", "source": source, "date": date}
    samples = _samples(raw)
    peak = max(work / ns * 1e9 for side in samples["matmul"].values() for work, ns in side)
    bandwidth = max(work / ns * 1e9 for work, ns in samples["pointwise"]["forward"][-1:])
    peaks = {name: 2 * size**3 / ns * 1e9 for name, (size, ns) in raw["dtypes"].items()}
    facts = _facts(raw, host, {**peaks, "float32": peak}, bandwidth)
    operators = [_operator(family, sides, raw, peak, bandwidth) for family, sides in samples.items()]
    collectives = [item for item in raw["collectives"] if item["collective"] != "overlap"]
    return {
        "format": FORMAT,
        "name": "cpu",
        "aliases": [],
        "title": f"CPU rank of one thread: {host['model']}",
        "device_type": "cpu",
        "facts": {**facts, "provenance": provenance},
        "operators": [{**item, "provenance": provenance} for item in operators],
        "links": [{**link, "provenance": provenance} for link in _links(collectives)],
        "collectives": [{**_collective(item), "provenance": provenance} for item in collectives],
    }


def _facts(
    raw: Mapping[str, Any], host: Mapping[str, Any], peaks: dict[str, float], bandwidth: float
) -> dict[str, Any]:
    return {
        "peak_flops": peaks,
        "memory_bandwidth": bandwidth,
        "capacity_bytes": max(2 * RESERVE_BYTES, host["memory"] // host["cores"]),
        "reserve_bytes": RESERVE_BYTES,
        "launch_ns": raw["launch"][:2],
        "view_ns": raw["view"][:2],
        "cores": host["cores"],
        "overlap_slowdown": _overlap_slowdown(raw, host["cores"]),
    }


def _overlap_slowdown(raw: Mapping[str, Any], cores: int) -> float:
    """From compute alone (w), communication alone (c) and both (t): while c lasts, w + c − t is done."""
    overlaps = [item for item in raw["collectives"] if item["collective"] == "overlap"]
    measured = {item["ranks"]: item["points"][0] for item in overlaps}
    fitting = [ranks for ranks in measured if ranks <= cores]
    compute, communication, both = measured[max(fitting, default=min(measured))]
    gained = compute + communication - both
    return float(min(NO_OVERLAP, max(1.0, communication / gained))) if gained > 0 else NO_OVERLAP


def _samples(raw: Mapping[str, Any]) -> dict[str, dict[str, Samples]]:
    """By family and direction, sorted by work."""
    found: dict[str, dict[str, Samples]] = defaultdict(lambda: {"forward": [], "backward": []})
    for point in raw["points"]:
        call = _call(point)
        sides = {"forward": (forward_work(call), 0), "backward": (backward_work(call), raw["launch"][2])}
        for direction, (side, (work, overhead)) in enumerate(sides.items()):
            total = point[f"{side}_ns"] - overhead
            sample = _sample(point["family"], work, total, raw["launch"][direction], side)
            found[point["family"]][side].append(sample)
    for num_elements, duration in raw["optimizer"]:
        launches = raw["optimizer"][0][1]
        sample = (28.0 * num_elements, max(duration - launches, LEAST_SHARE * duration))
        found["optimizer"]["forward"].append(sample)
        found["optimizer"]["backward"].append(sample)
    return {family: {side: sorted(items) for side, items in both.items()} for family, both in found.items()}


def _sample(family: str, work: Work, total_ns: int, launch_ns: int, side: str) -> tuple[float, float]:
    """One kernel's work and nanoseconds without launch cost; a matrix gradient has several kernels."""
    kernels = work.kernels if side == "backward" and family in ("matmul", "convolution") else 1
    amount = work.flops if family in COMPUTE_BOUND else work.num_bytes
    left = max(total_ns - launch_ns * work.kernels, LEAST_SHARE * max(total_ns, launch_ns))
    return amount / kernels, left / kernels


def _call(point: Mapping[str, Any]) -> Call:
    shapes, itemsizes, gradients = zip(*point["operands"], strict=True)
    shape, itemsize = point["result"]
    results = ((tuple(shape),), (itemsize,))
    operands = tuple(map(tuple, shapes))
    op = f"aten.{point['op']}.default"
    return Call(op, operands, results[0], tuple(itemsizes), results[1], gradients, "float32", point["detail"])


def _operator(
    family: str, sides: Mapping[str, Samples], raw: Mapping[str, Any], peak: float, bandwidth: float
) -> dict[str, Any]:
    rate = peak if family in COMPUTE_BOUND else bandwidth
    curves = {side: _knots(samples, rate) for side, samples in sides.items()}
    return {
        "family": family,
        "bound": "compute" if family in COMPUTE_BOUND else "memory",
        **curves,
        "residual": None,  # the curve passes through its points
        "points": [_point(point) for point in raw["points"] if point["family"] == family],
    }


def _knots(samples: Samples, rate: float) -> list[list[float]]:
    """[work, share of the peak rate], one a distinct work: the median time where several points share it."""
    by_work: dict[float, list[float]] = defaultdict(list)
    for work, duration in samples:
        by_work[work].append(duration)
    times = accumulate((statistics.median(by_work[work]) for work in by_work), max)
    return [[work, work / duration * 1e9 / rate] for work, duration in zip(by_work, times, strict=True)]


def _point(point: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: point[key] for key in ("op", "shape", "forward_ns", "backward_ns")}
    return {**kept, "dtype": "float32"}


def _collective(item: Mapping[str, Any]) -> dict[str, Any]:
    times = accumulate((duration for _, duration in item["points"]), max)
    points = [[size, duration] for (size, _), duration in zip(item["points"], times, strict=True)]
    return {"collective": item["collective"], "level": "intra_node", "ranks": item["ranks"], "points": points}


def _links(collectives: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """α and β of a ring between two ranks: 2α for few bytes, bβ for many."""
    points = next(c["points"] for c in collectives if c["collective"] == "all_reduce" and c["ranks"] == 2)
    (_, least), (size, most) = points[0], points[-1]
    bandwidth = size / max(1, most - least) * 1e9
    return [{"level": "intra_node", "alpha_ns": least // 2, "bandwidth": bandwidth}]
