"""Turns the raw points of `measure.py` and `measure_gloo.py` into a profile: calls apart from work, curves and tables.

Call costs of a family: its time at the smallest shape, where there is next to no work. A curve's knots are the measured
points themselves, less the call; where more work took less time, both take their mean. A table's vertex is a measured
shape's ns a FLOP; one too large to be measured has its smaller neighbours' mean.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cost.profile import FORMAT, NO_OVERLAP
from autopar.ops.table import operator
from autopar.ops.work import WorkKey, WorkKind

RESERVE_BYTES = 512 << 20
LEAST_SHARE = 0.1  # of a measured time that is left after call costs: below it lies noise
MATRIX_FAMILIES = ("matmul", "attention", "decode", "convolution")
COMPUTING_FAMILIES = (*MATRIX_FAMILIES, "max_pool", "avg_pool")
#: bytes that AdamW reads or writes for a float32 parameter
OPTIMIZER_BYTES = 28.0

Points = Sequence[Mapping[str, Any]]
Samples = list[tuple[float, float]]  # (work, its nanoseconds)
Pair = tuple[int, int]


def profile_from_points(raw: Mapping[str, Any], host: Mapping[str, Any], date: str) -> dict[str, Any]:
    """The profile of a CPU rank of one thread, as JSON data, from points, host facts and today's date."""
    source = f"{host['model']}, one thread a rank, torch {raw['host']['torch']}"
    provenance = {"kind": "measured", "source": source, "date": date}
    families = _by_family(raw)
    matrices = [point for point in families["matmul"] if point["op"] == "mm"]
    peak = max(_flops(point) / point["forward_ns"] * 1e9 for point in matrices)
    bandwidth = _bandwidth(families["straight_copy"])
    peaks = {name: 2 * size**3 / ns * 1e9 for name, (size, ns) in raw["dtypes"].items()}
    blocks = {
        "facts": [_facts(raw, host, {**peaks, "float32": peak}, bandwidth)],
        "operators": _operators(raw, families, peak, bandwidth),
        "links": _links(raw["collectives"]),
        "collectives": [_collective(item) for item in raw["collectives"]],
        "waits": [_waits(int(ranks), points) for ranks, points in raw.get("waits", {}).items()],
        "tables": _tables(families, _calls(raw, families)),
        "runtime": [_runtime(raw["runtime"])],
    }
    sourced = {name: [{**item, "provenance": provenance} for item in items] for name, items in blocks.items()}
    return {
        "format": FORMAT,
        "name": "cpu",
        "aliases": [],
        "title": f"CPU rank of one thread: {host['model']}",
        "device_type": "cpu",
        **sourced,
        "facts": sourced["facts"][0],
        "runtime": sourced["runtime"][0],
    }


def _by_family(raw: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for point in raw["points"]:
        found[point["family"]].append(point)
    return found


def _call(point: Mapping[str, Any]) -> WorkKey:
    shapes, itemsizes, gradients = zip(*point["operands"], strict=True)
    shape, itemsize = point["result"]
    results = ((tuple(shape),), (itemsize,))
    operands = tuple(map(tuple, shapes))
    op = f"aten.{point['op']}.default"
    return WorkKey(op, operands, results[0], tuple(itemsizes), results[1], gradients, "float32", point["detail"])


def _kind(point: Mapping[str, Any]) -> WorkKind:
    return operator(_call(point).op).work


def _flops(point: Mapping[str, Any]) -> int:
    """Of a product by its shape (m, n, k), whichever way its operands are stored."""
    return 2 * math.prod(point["shape"]) if point["op"] == "mm" else _kind(point).forward_flops(_call(point))


# Facts ----------------------------------------


def _bandwidth(copies: Points) -> float:
    """Bytes a second of the largest copy, read and written."""
    largest = max(copies, key=lambda point: math.prod(point["shape"]))
    return _kind(largest).forward(_call(largest)).num_bytes / float(largest["forward_ns"]) * 1e9


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
        "overlap_slowdown": _overlap_slowdown(raw["busy_share"], host["cores"]),
    }


def _overlap_slowdown(shares: Mapping[str, float], cores: int) -> float:
    """gloo's threads take their share of a core, the rest is left to compute; none where each has a core of its own."""
    fitting = [int(ranks) for ranks in shares if int(ranks) <= cores]
    ranks = max(fitting, default=min(map(int, shares)))
    left = 1.0 - shares[str(ranks)] if 2 * ranks > cores else 1.0
    return float(min(NO_OVERLAP, 1.0 / max(left, 1.0 / NO_OVERLAP)))


def _runtime(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Points that were measured before say nothing of pipelines."""
    before = {"pass": 0, "send": [], "receive": 0, "late": 0, "carry": []}
    return {f"{name}_ns": value for name, value in {**before, **measured}.items()}


# Operators ----------------------------------------


def _smallest(points: Points) -> Mapping[str, Any]:
    return min(points, key=lambda point: math.prod(point["shape"]))


def _calls(raw: Mapping[str, Any], families: Mapping[str, Points]) -> dict[str, Pair]:
    """What a call of each family costs, forward and backward, beside its kernels."""
    engine, node = _engine_ns(raw, families), raw["launch"][1]
    found: dict[str, Pair] = {}
    for family, points in families.items():
        least = _smallest(points)
        found[family] = least["forward_ns"], max(node, least["backward_ns"] - engine)
    kernel = _smallest([point for point in families["matmul"] if point["op"] == "mm"])["forward_ns"]
    for family, name in (("linear", "matmul"), ("einsum", "einsum")):
        if family in found:
            forward, backward = found.pop(family)
            found[name] = max(0, forward - kernel), max(node, backward // 2 - kernel)  # of two gradients
    return found


def _engine_ns(raw: Mapping[str, Any], families: Mapping[str, Points]) -> int:
    """Of a backward pass as a whole: that of one view, less its part, as a long chain of views tells it."""
    return max(0, int(_smallest(families["view"])["backward_ns"]) - int(raw["view"][1]))


def _operators(
    raw: Mapping[str, Any], families: Mapping[str, Points], peak: float, bandwidth: float
) -> list[dict[str, Any]]:
    calls, engine = _calls(raw, families), _engine_ns(raw, families)
    calling = ("matmul", "linear", "einsum", "view", "decode")  # of which only what a call costs is measured, or tables
    curved = {family: points for family, points in families.items() if family not in calling}
    found = [_operator(family, points, calls[family], engine, peak, bandwidth) for family, points in curved.items()]
    matmul = _operator("matmul", families["linear"], calls["matmul"], engine, peak, bandwidth)
    for item in (*found, matmul):
        typed = [point for point in raw.get("typed", ()) if point["family"] == item["family"]]
        item["points"] += [{**_point(point), "dtype": point["dtype"]} for point in typed]
    einsums = [{**matmul, "family": "einsum", "call_ns": list(calls["einsum"])}] if "einsum" in calls else []
    return [*found, matmul, *einsums, _optimizer(raw["optimizer"], bandwidth)]


def _operator(family: str, points: Points, call: Pair, engine: int, peak: float, bandwidth: float) -> dict[str, Any]:
    computes = family in COMPUTING_FAMILIES
    measured = [point for point in points if point is not _smallest(points)]
    rate = peak if computes else bandwidth
    curves = {
        side: _knots(_samples(measured, side, computes, call[position], position * engine), rate)
        for position, side in enumerate(("forward", "backward"))
    }
    return {
        "family": family,
        "bound": "compute" if computes else "memory",
        **curves,
        "call_ns": list(call),
        "residual": None,  # the curve passes through its points
        "points": [_point(point) for point in points],
    }


def _samples(points: Points, side: str, computes: bool, call_ns: int, engine: int) -> Samples:
    """Work and nanoseconds without the call, sorted by work; of a matrix gradient, one of its kernels."""
    found: Samples = []
    for point in points:
        work = (_kind(point).forward if side == "forward" else _kind(point).backward)(_call(point))
        kernels = work.products if computes and side == "backward" and point["family"] != "attention" else 1
        total = point[f"{side}_ns"] - engine
        left = max(total - call_ns, LEAST_SHARE * total, 1.0)
        found.append(((work.flops if computes else work.num_bytes) / kernels, left / kernels))
    return sorted(found)


def _optimizer(measured: Sequence[tuple[int, int]], bandwidth: float) -> dict[str, Any]:
    call = measured[0][1]
    samples = [(OPTIMIZER_BYTES * size, max(ns - call, LEAST_SHARE * ns)) for size, ns in measured[1:]]
    curve = _knots(samples, bandwidth)
    return {
        "family": "optimizer",
        "bound": "memory",
        "forward": curve,
        "backward": curve,
        "residual": None,
        "points": [],
    }


def _knots(samples: Samples, rate: float) -> list[list[float]]:
    """[work, share of the peak rate], one a distinct work: the median time where several points share it."""
    by_work: dict[float, list[float]] = defaultdict(list)
    for work, duration in samples:
        by_work[work].append(duration)
    times = non_decreasing([statistics.median(by_work[work]) for work in by_work])
    return [[work, work / duration * 1e9 / rate] for work, duration in zip(by_work, times, strict=True) if work > 0]


def non_decreasing(times: Sequence[float]) -> list[float]:
    """The closest sequence in least squares that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # sum and number of neighbours that share their mean
    for total in times:
        count = 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, held = pools.pop()
            total, count = total + before, count + held
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def _point(point: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: point[key] for key in ("op", "shape", "forward_ns", "backward_ns")}
    return {**kept, "dtype": "float32"}


# Tables ----------------------------------------


def _tables(families: Mapping[str, Points], calls: Mapping[str, Pair]) -> list[dict[str, Any]]:
    """Products by layout, attention by mask and direction and of one query, convolutions by form, kernel, direction."""
    rates: dict[str, dict[tuple[float, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for family in MATRIX_FAMILIES:
        for point in families.get(family, ()):
            flops, shape = _flops(point), tuple(map(float, point["shape"]))
            for name, coordinates, duration in _vertices(family, point, shape, calls):
                rates[name][coordinates].append(duration / flops)
    return [
        _table(name, {at: statistics.median(values) for at, values in found.items()}) for name, found in rates.items()
    ]


def _vertices(
    family: str, point: Mapping[str, Any], shape: tuple[float, ...], calls: Mapping[str, Pair]
) -> list[tuple[str, tuple[float, ...], float]]:
    """The tables that a point is a vertex of: name, coordinates, nanoseconds without the call."""
    kind = point["kind"]
    if family == "matmul":
        return [(kind, shape, point["forward_ns"])]
    if family == "decode":
        return [("decode forward float32", shape[1:], _net(point["forward_ns"], calls["attention"][0]))]
    forward, backward = (_net(point[f"{side}_ns"], calls[family][n]) for n, side in enumerate(("forward", "backward")))
    if family == "attention":
        at = shape[2:]
        return [(f"attention {kind} forward", at, forward), (f"attention {kind} backward", at, backward)] * (
            shape[2] > 2
        )
    form, kernel, side = kind.split()
    name = f"{form} convolution {kernel}"
    return [(f"{name} forward", shape, forward), (f"{name} {side}", shape, backward)] * (math.prod(shape) > 1)


def _net(total: float, call: float) -> float:
    return max(total - call, LEAST_SHARE * total)


def _table(name: str, rates: dict[tuple[float, ...], float]) -> dict[str, Any]:
    axes = [sorted({at[axis] for at in rates}) for axis in range(len(next(iter(rates))))]
    whole: dict[tuple[int, ...], float] = {}
    for place in itertools.product(*(range(len(axis)) for axis in axes)):
        at = tuple(axis[n] for axis, n in zip(axes, place, strict=True))
        whole[place] = rates[at] if at in rates else _from_smaller(place, whole)
    return {"name": name, "axes": axes, "rates": list(whole.values())}


def _from_smaller(place: tuple[int, ...], known: Mapping[tuple[int, ...], float]) -> float:
    """The geometric mean of the neighbours that are one vertex smaller along one axis."""
    smaller = [tuple(n - (axis == m) for m, n in enumerate(place)) for axis in range(len(place)) if place[axis] > 0]
    return statistics.geometric_mean(known[neighbour] for neighbour in smaller)


# Links ----------------------------------------


def _collective(item: Mapping[str, Any]) -> dict[str, Any]:
    times = non_decreasing([duration for _, duration in item["points"]])
    points = [[size, round(duration)] for (size, _), duration in zip(item["points"], times, strict=True)]
    return {"collective": item["collective"], "level": "intra_node", "ranks": item["ranks"], "points": points}


def _waits(ranks: int, points: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Who computes longer does not wait less."""
    lengths, waited = zip(*points, strict=True)
    rising = map(round, non_decreasing(waited))
    return {"level": "intra_node", "ranks": ranks, "points": [list(pair) for pair in zip(lengths, rising, strict=True)]}


def _links(collectives: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """α and β of a ring between two ranks: 2α for few bytes, bβ for many, which on a busy host may seem to take no
    longer: they are said to take a tenth of their time at least."""
    points = next(c["points"] for c in collectives if c["collective"] == "all_reduce" and c["ranks"] == 2)
    (_, least), (size, most) = points[0], points[-1]
    bandwidth = size / max(1, most - least, most // 10) * 1e9
    return [{"level": "intra_node", "alpha_ns": least // 2, "bandwidth": bandwidth}]
