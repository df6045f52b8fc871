"""Tables of fused attention by (sequences, length, width, sharing), from `attention_forward*.csv` of a folder.

Columns: gpu, dtype, causal, batch, q_len, kv_len, heads, kv_heads, head_dim, time_us, software, kernel. Kernels differ
by a fifth to a half, so each has its tables (`flash_attn_fa3 causal forward bfloat16`), and the fastest that a GPU was
measured with is what PyTorch's own attention is taken to run (`flash causal forward bfloat16`, of cuDNN on Hopper and
Blackwell). Sequences are batch × heads; sharing is the query heads that have one key and value.

1. Rates are fitted at the vertices of a grid (`grids.fitted`).
2. Without a mask, widths that no encoder was measured with have the causal rates of sequences that are √2 as long,
   which have as many operations.
3. Backward takes so many times as long as forward, as `attention_forward_backward*.csv` say of large ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np

from autopar.cost.profile import Profile
from autopar.cost.provenance import Provenance
from autopar.cost.tables import Table
from autopar.profiler.published.grids import Array, fitted, weights
from autopar.profiler.published.products import UNIT_NS
from autopar.profiler.published.rows import Row, Shape, Taken, everything, grouped, read_rows, shape_of

COLUMNS = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "causal")
KINDS = {"1": "causal", "0": "full"}
SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 6144)
SHARING = (1, 2, 4, 8, 16, 32, 64)
#: what a change of slope costs along each axis; chosen among a few by errors at shapes left out
BENDING = (0.05, 0.05, 0.02, 0.1)
FEWEST = 500  # shapes of a kernel that make a table
LARGE_FLOPS = 1e11  # from which on backward's share is that of the arithmetic
FLASH2 = "flash2"
#: FlashAttention-2 against FlashAttention-3 on Hopper, forward: between the 1.5 and 2 of its paper (Shah et al. 2024,
#: abstract), not measured
FLASH2_TIMES = 1.7

Points = Mapping[Shape, float]
"""Nanoseconds by shape, in the order of `COLUMNS`."""


def attention_tables(folder: Path, gpu: str, date: str, taken: Taken = everything) -> list[Table]:
    """Tables of each kernel that a GPU was measured with, and of the one that PyTorch is taken to run."""
    rows = [row for row in read_rows(folder, "attention_forward.csv*", gpu=gpu) if row["dtype"] in _HALF]
    by_kernel = {
        key: _points(own, taken) for key, own in grouped(rows, lambda row: (kernel_of(row), row["causal"])).items()
    }
    tables: list[Table] = []
    for (kernel, causal), points in by_kernel.items():
        if len(points) >= FEWEST:
            tables.append(_table(f"{kernel} {KINDS[causal]} forward bfloat16", points, f"{gpu}, {kernel}", date))
    if not tables:
        return []
    tables += _defaults(tables, by_kernel, gpu, date)
    return [*tables, *_backward(folder, gpu, tables, date)]


_HALF = ("bfloat16", "float16")


def kernel_of(row: Row) -> str:
    """A name for a row's kernel: without what it is called for encoders."""
    return row["kernel"].removeprefix("vit_")


def with_kernel(profile: Profile, kernel: str) -> Profile:
    """The profile of a device whose attention runs this kernel; the same where the profile does not know it."""
    own = {name: table for name, table in profile.tables.items() if name.startswith(f"{kernel} ")}
    if not own:
        return profile
    renamed = [replace(table, name=name.replace(kernel, "flash", 1)) for name, table in own.items()]
    return replace(profile, tables={**profile.tables, **{table.name: table for table in renamed}}, _shared={})


def _points(rows: list[Row], taken: Taken) -> dict[Shape, float]:
    times: dict[Shape, list[float]] = {}
    for row in rows:
        shape = shape_of(row, COLUMNS)
        if taken(shape):
            times.setdefault(shape, []).append(1000 * float(row["time_us"]))
    return {shape: geometric_mean(own) for shape, own in times.items()}


def flops_of(shape: Shape) -> float:
    """Of the forward pass, as the cost model counts them."""
    batch, queries, keys, heads, _, width, causal = shape
    return 4.0 * batch * heads * queries * keys * width / (2 if causal else 1)


def place_of(shape: Shape) -> tuple[float, float, float, float]:
    """The coordinates in a table."""
    batch, queries, keys, heads, shared, width, _ = shape
    return batch * heads * queries / keys, keys, width, heads / shared


def _table(name: str, points: Points, source: str, date: str) -> Table:
    provenance = Provenance("published", f"{source}; {len(points)} shapes", date)
    places = np.array([place_of(shape) for shape in points])
    rates = np.array([math.log(time / flops_of(shape) / UNIT_NS) for shape, time in points.items()])
    return _on_grid(name, places, rates, provenance, min(points.values()))


def _on_grid(name: str, places: Array, rates: Array, provenance: Provenance, least_ns: float) -> Table:
    axes = [
        _below(SEQUENCES, places[:, 0]), sorted(set(places[:, 1].tolist())), sorted(set(places[:, 2].tolist())),
        _below(SHARING, places[:, 3]),
    ]  # fmt: skip
    values = np.exp(fitted(places, rates, axes, BENDING)).ravel().tolist()
    shown = tuple(float(f"{value:.3g}") for value in values)
    return Table(name, tuple(map(tuple, axes)), shown, provenance, unit_ns=UNIT_NS, least_ns=float(f"{least_ns:.4g}"))


def _below(axis: tuple[int, ...], values: Array) -> list[float]:
    """Coordinates up to the first that is as large as any value."""
    least = min((float(x) for x in axis if x >= values.max()), default=float(axis[-1]))
    return [float(x) for x in axis if x <= least]


# The kernel that PyTorch runs -----------------------------------------------


def _defaults(tables: list[Table], by_kernel: Mapping[tuple[str, str], Points], gpu: str, date: str) -> list[Table]:
    """For both kinds of mask, the table of the fastest kernel; where one was not measured, what the other says."""
    known = {kind: [table for table in tables if table.name.split()[1] == kind] for kind in KINDS.values()}
    if not known["causal"]:
        return []
    causal = min(known["causal"], key=_typical)
    found = [_alias(causal, "flash", 1.0, Provenance("fitted", f"as {causal.name.split()[0]}", date))]
    kernel = causal.name.split()[0]
    full = min(known["full"], key=_typical, default=None)
    of_encoders = by_kernel[full.name.split()[0], "0"] if full else {}
    source = f"{gpu}, {kernel}; widths of no encoder from causal ones of √2 the length"
    found.append(_without_mask(causal, of_encoders, Provenance("fitted", source, date)))
    if gpu.startswith(("H100", "H200")):
        reported = Provenance("assumed", f"{FLASH2_TIMES:g} times {kernel}, whose paper says 1.5 to 2 on an H100", date)
        found += [_alias(table, FLASH2, FLASH2_TIMES, reported) for table in found]
    return found


def _typical(table: Table) -> float:
    """The rate of a large one."""
    return table.ns_per_flop((64, 4096, 128 if "causal" in table.name else 64, 1))


def _alias(table: Table, kernel: str, times: float, provenance: Provenance) -> Table:
    """Another kernel's table, in terms of this one."""
    _, _, rest = table.name.partition(" ")
    like, own = table.like or table.name, float(f"{times * table.times:.4g}")
    return replace(table, name=f"{kernel} {rest}", like=like, times=own, provenance=provenance)


def _without_mask(causal: Table, encoders: Points, provenance: Provenance) -> Table:
    """From encoders, and from causal attention where it was measured with other widths."""
    known = {shape[5] for shape in encoders}
    places = [place_of(shape) for shape in encoders]
    rates = [math.log(time / flops_of(shape) / UNIT_NS) for shape, time in encoders.items()]
    sequences, lengths, widths, sharing = causal.axes
    for width in [width for width in widths if width not in known and (width > 80 or not known)]:
        for count in sequences:
            for length in lengths:
                for shared in [own for own in sharing if own <= min(count, 8)]:
                    places.append((count, length, width, shared))
                    at = (count, length * math.sqrt(2), width, shared)
                    rates.append(math.log(causal.ns_per_flop(at) / UNIT_NS))
    made = _on_grid("flash full forward bfloat16", np.array(places), np.array(rates), provenance, causal.least_ns)
    return held_beyond(made, np.array(places), lengths[-1])


def held_beyond(table: Table, places: Array, reach: float) -> Table:
    """Longer sequences than `reach` take as long a FLOP as those of that length, where nothing was measured: they are
    computed in the same blocks (encoders up to 65,536 differ by 5%), and a slope that is drawn on ends anywhere.

    places: (count, 4), of what was measured. The same table where it has no such length.
    """
    lengths = np.array(table.axes[1])
    if reach not in table.axes[1] or lengths[-1] <= reach:
        return table
    corners, shares = weights(places, table.axes)
    known = np.bincount(corners.ravel(), shares.ravel(), math.prod(map(len, table.axes))) > 0
    rates = np.array(table.rates).reshape([len(axis) for axis in table.axes])
    at_reach = rates[:, [table.axes[1].index(reach)]]
    is_beyond = (lengths > reach)[None, :, None, None] & ~known.reshape(rates.shape)
    return replace(table, rates=tuple(np.where(is_beyond, at_reach, rates).ravel().tolist()))


# Backward ---------------------------------------------------------------------


def _backward(folder: Path, gpu: str, tables: list[Table], date: str) -> list[Table]:
    rows = read_rows(folder, "attention_forward_backward*.csv*")
    by_gpu = grouped(rows, lambda row: row["gpu"])
    kind = gpu.partition("-")[0]
    used = {name: own for name, own in by_gpu.items() if name.partition("-")[0] == kind} or by_gpu
    ratios = [ratio for own in used.values() for ratio in _ratios(own)]
    if not ratios:
        return []
    times = float(f"{median(ratios):.3g}")
    source = f"backward against forward of {len(ratios)} large ones, {', '.join(sorted(used))}"
    provenance = Provenance("fitted", source, date)
    return [
        replace(_alias(table, table.name.split()[0], times, provenance), name=table.name.replace("forward", "backward"))
        for table in tables
    ]


def _ratios(rows: list[Row]) -> list[float]:
    columns = ("batch", "seq", "heads", "kv_heads", "qk_head_dim", "v_head_dim", "qkv_contiguous")
    found = []
    for own in grouped(rows, lambda row: shape_of(row, columns)).values():
        times = {row["pass"]: float(row["time_us"]) for row in own}
        batch, length, heads, _, width, values, _ = shape_of(own[0], columns)
        is_large = batch * heads * length**2 * (width + values) > LARGE_FLOPS and width == values
        if is_large and len(times) == 2:
            found.append(times["backward"] / times["forward"])
    return found
