"""Curves of operators that move bytes and compute little, from `memory_bound*.csv` of a folder.

Columns: gpu, op, pass, rows, cols, dtype, time_us, software. A family's rows are of its operators in `cases.MOVING`.

1. Times of kernels alone serve a family before those of eager calls (`eager`), which serve it beyond their sizes.
2. Bytes within half an octave are one point, the geometric mean of their times; more bytes take no less time. What fits
   the L2 cache comes out faster than memory gives, and the least time is what a kernel takes to start and end.
3. Families that nobody measured are as a pointwise operator that moves more: by as much as their assumed curves were
   apart, of what a kernel takes besides its start.
4. Of a GPU that nobody measured, what takes time with bytes is as much shorter as its memory is faster than that of the
   measured GPU with the nearest bandwidth.

5. An update takes what fused AdamW was measured to take (`OPTIMIZERS`).
6. Rows that `measure_gpu` wrote serve their families alone, and their backward passes too; else backward directions
   have the forward's curve, which is one of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

from autopar.cost.compute import node_call
from autopar.cost.memory import optimizer_moved_bytes
from autopar.cost.profile import Curve, OperatorCurve, Profile
from autopar.cost.provenance import Provenance
from autopar.ops.table import operator
from autopar.profiler.published.cases import MeasuredCall, cases_of
from autopar.profiler.published.collectives import isotonic
from autopar.profiler.published.eager import kernel_ns
from autopar.profiler.published.rows import Taken, read_rows

FILES = "memory_bound*.csv*"
OPTIMIZERS = "optimizers*.csv*"
OWN = "CUDA graph"  # at the end of the software of rows that `measure_gpu` wrote
FEWEST = 8  # rows that make a curve
LEAST = 1 << 14  # bytes; what moves fewer takes as long
CARRIED = "carried over from "  # begins what is said of families of a GPU that nobody measured
LEVEL = 1e-6  # by which more bytes take longer where as much was measured, above what figures are rounded by
LARGE = 1 << 26  # bytes, from which on families that nobody measured are compared

Points = Mapping[float, float]
"""Nanoseconds by bytes moved."""


def with_moving(profile: Profile, folder: Path, gpus: Sequence[str], date: str, taken: Taken) -> Profile:
    """The profile with curves of the operators that the folder's rows of these GPUs have, and of those like them."""
    rows = [row for gpu in gpus for row in read_rows(folder, FILES, gpu=gpu)]
    calls = [call for call in cases_of(rows) if taken(call.key)]
    forward, backward = ([call for call in calls if call.direction == side] for side in (0, 1))
    back = grouped_calls(backward)
    made = {
        family: _of_calls(family, own, back.get(family, []), profile, date)
        for family, own in grouped_calls(forward).items()
    }
    if "pointwise" not in made:
        return profile
    others = {
        name: _beside(curve, profile, made["pointwise"], date)
        for name, curve in profile.operators.items() if curve.bound == "memory" and name not in made
    }  # fmt: skip
    made |= _updates(folder, gpus, profile, date)
    return replace(profile, operators={**profile.operators, **others, **made}, _shared={})


def _updates(folder: Path, gpus: Sequence[str], profile: Profile, date: str) -> dict[str, OperatorCurve]:
    """Of AdamW in one fused kernel, as emitted scripts call it; none where the folder has no rows of it."""
    found = [row for gpu in gpus for row in read_rows(folder, OPTIMIZERS, gpu=gpu) if row["way"] == "fused"]
    times: dict[float, list[float]] = {}
    for row in found:
        shape = (int(row["elements"]), int(row["tensors"]))
        size = float(shape[1] * optimizer_moved_bytes(row["op"], shape[:1], row["dtype"]))
        times.setdefault(max(LEAST, size), []).append(1000 * float(row["time_us"]))
    if len(times) < FEWEST:
        return {}
    sizes = sorted(times)
    points = dict(zip(sizes, isotonic([geometric_mean(times[size]) for size in sizes]), strict=True))
    source = f"{len(found)} times of fused AdamW on {found[0]['gpu']} ({found[0]['software']})"
    curve = curve_of(points, profile.facts.memory_bandwidth)
    provenance = Provenance("measured", source, date)
    return {"optimizer": OperatorCurve("optimizer", "memory", curve, curve, provenance, call_ns=(0, 0))}


def grouped_calls(calls: Iterable[MeasuredCall]) -> dict[str, list[MeasuredCall]]:
    """By family, those that show how long their kernels took; of eager calls, where there are enough of kernels alone,
    only those that move more than any of these."""
    found: dict[str, list[MeasuredCall]] = {}
    for call in calls:
        if kernel_ns(call.measured_ns, call.floor_ns) is not None:
            found.setdefault(call.operators, []).append(call)
    return {family: chosen for family, own in found.items() if len(chosen := _chosen(own)) >= FEWEST}


def _chosen(calls: list[MeasuredCall]) -> list[MeasuredCall]:
    own = [call for call in calls if call.software.endswith(OWN)]
    if len(own) >= FEWEST:
        return own
    alone = [call for call in calls if not call.floor_ns]
    if len(alone) < FEWEST:
        return calls
    most = max(map(moved_bytes, alone))
    return [*alone, *(call for call in calls if call.floor_ns and moved_bytes(call) > most)]


def _of_calls(
    family: str, calls: list[MeasuredCall], back: list[MeasuredCall], profile: Profile, date: str
) -> OperatorCurve:
    gpus, ops, software = (
        ", ".join(sorted({getattr(call, name) for call in calls})) for name in ("gpu", "op", "software")
    )
    counted = f"{len(calls)} times" + (f" (and {len(back)} of the backward pass)" if back else "")
    kind = "measured" if all(call.software.endswith(OWN) for call in calls) else "published"
    provenance = Provenance(kind, f"{counted} of {ops} on {gpus} ({software})", date)
    forward = _made(points_of(calls), profile)
    backward = _made(points_of(back), profile) if back else forward
    return OperatorCurve(family, "memory", forward, backward, provenance, call_ns=(0, 0))


def points_of(calls: Iterable[MeasuredCall]) -> dict[float, float]:
    """Of rows that show how long their kernels took."""
    times: dict[int, list[tuple[float, float]]] = {}
    for call in calls:
        kernel, moved = kernel_ns(call.measured_ns, call.floor_ns), max(LEAST, moved_bytes(call))
        if kernel is not None:
            times.setdefault(round(2 * math.log2(moved)), []).append((moved, kernel))
    bins = [own for _, own in sorted(times.items())]
    sizes = [geometric_mean(size for size, _ in own) for own in bins]
    return dict(zip(sizes, isotonic([geometric_mean(time for _, time in own) for own in bins]), strict=True))


def moved_bytes(call: MeasuredCall) -> int:
    """As the cost model counts them, in the direction of the call."""
    told = node_call(call.node, call.operands, (call.result,), call.tensors)
    work = operator(told.op).work
    return (work.backward if call.direction else work.forward)(told).num_bytes


def _made(points: Points, profile: Profile) -> Curve:
    """Knots of the points; below them a launch, and what is in proportion to their bytes."""
    least, start = min(points), float(profile.facts.launch_ns[0])
    smaller = [float(1 << n) for n in range(LEAST.bit_length() - 1, 40, 2) if (1 << n) < least / 2]
    below = {size: start + (points[least] - start) * size / least for size in smaller if points[least] > start}
    return curve_of({**below, **points}, profile.facts.memory_bandwidth)


def curve_of(points: Points, bandwidth: float) -> Curve:
    """The curve whose times those are; what moves fewer bytes than the first takes as long."""
    times, last = {1: min(points.values())}, 0.0
    for size, time in sorted(points.items()):
        last = times[round(size)] = max(time, (last or times[1]) * (1 + LEVEL))
    return Curve(tuple((float(size), float(f"{size * 1e9 / bandwidth / time:.8g}")) for size, time in times.items()))


def times_of(curve: Curve, bandwidth: float) -> dict[float, float]:
    """Nanoseconds at its knots."""
    return {size: size / share * 1e9 / bandwidth for size, share in curve.knots[1:]}


def _beside(curve: OperatorCurve, profile: Profile, pointwise: OperatorCurve, date: str) -> OperatorCurve:
    """A family that nobody measured."""
    before = profile.operators["pointwise"].forward
    ratio = curve.forward.effective_work(LARGE) / before.effective_work(LARGE)
    source = f"as pointwise ({pointwise.provenance.source}), {ratio:.2f} times as long beside its start"
    bandwidth = profile.facts.memory_bandwidth
    points = times_of(pointwise.forward, bandwidth)
    start = min(points.values())
    made = curve_of({size: start + ratio * (time - start) for size, time in points.items()}, bandwidth)
    return _published(curve.family, made, Provenance("assumed", source, date))


def _published(family: str, curve: Curve, provenance: Provenance) -> OperatorCurve:
    return OperatorCurve(family, "memory", curve, curve, provenance, call_ns=(0, 0))


def carried_moving(profile: Profile, measured: Profile, date: str) -> Profile:
    """A device that nobody measured, from one that was."""
    ratio = measured.facts.memory_bandwidth / profile.facts.memory_bandwidth
    operators = dict(profile.operators)
    for name, curve in measured.operators.items():
        if curve.bound == "memory":
            source = f"{CARRIED}{measured.name} by bandwidth: {curve.provenance.source}"
            sides = [_slower(side, ratio, measured, profile) for side in (curve.forward, curve.backward)]
            provenance = Provenance("assumed", source, date)
            operators[name] = OperatorCurve(name, "memory", sides[0], sides[1], provenance, call_ns=(0, 0))
    return replace(profile, operators=operators, _shared={})


def _slower(curve: Curve, ratio: float, measured: Profile, profile: Profile) -> Curve:
    """Where what takes time with bytes takes so many times as long."""
    points = times_of(curve, measured.facts.memory_bandwidth)
    start = min(points.values())
    longer = {size: start + ratio * (time - start) for size, time in points.items()}
    return curve_of(longer, profile.facts.memory_bandwidth)
