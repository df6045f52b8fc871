"""Tables of matrix products, (m, k) times the transpose of (n, k), from `gemm_*.csv` of a folder.

Columns: gpu, dtype, m, n, k, time_us, software. Times were measured on a grid of sizes, but for some vertices:

1. Software that the caveats of its tables call wrong for a GPU is left out (`DISTRUSTED`); of the others, the
   geometric mean counts. Collections of the same products differ by 2 to 8%, none of them always faster.
2. What is filled in and interpolated is the time over a roofline (`grids.completed`).
3. The layouts of gradients are so many times as slow as the forward's, of equal sizes, as `gemm_training_layouts*.csv`
   say of the same GPU, or of those that they know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np

from autopar.cost.profile import Facts
from autopar.cost.provenance import Provenance
from autopar.cost.tables import Table
from autopar.profiler.published.eager import floor_ns, kernel_ns
from autopar.profiler.published.grids import Array, completed, fitted
from autopar.profiler.published.rows import Row, Shape, Taken, everything, grouped, read_rows, shape_of

SIZES = ("m", "n", "k")
#: (gpu, software, dtype) whose figures cannot be, and why
DISTRUSTED = {
    ("A100-SXM4-80GB", "vllm-0.14.0", "bfloat16"): "0.93 of the peak where others reach 0.79 to 0.84",
    ("GB200", "vllm-0.24.0", "bfloat16"): "throttled: 0.35 to 0.43 of the peak at 8192 × 8192 × 8192",
}
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "fp8": "float8_e4m3fn"}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
UNIT_NS = 1e-6  # rates of GPUs are a few femtoseconds a FLOP
LAYOUTS = {"grad_input": "NN", "grad_weight": "TN"}
FIXED_NS = 2000.0  # of the roofline: about what the least kernel takes
REACHED = 0.7  # of peak and bandwidth, of the roofline

SMALLEST = 16  # size along an axis of `single_tables`
FEWEST = 200  # products in float32 that make a table
BENDING = (0.2, 0.2, 0.2)  # of `single_tables`: see `grids.fitted`

Points = Mapping[Shape, float]
"""Nanoseconds by (m, n, k)."""


def product_tables(folder: Path, gpu: str, facts: Facts, date: str, taken: Taken = everything) -> list[Table]:
    """Tables of a GPU's products, by dtype, and those of their gradients. Empty where the folder has none."""
    rows = [row for row in read_rows(folder, "gemm_*.csv.gz", "gemm_*.csv", gpu=gpu) if _is_plain(row)]
    by_dtype = grouped(rows, lambda row: DTYPES[row["dtype"]])
    forward: dict[str, Table] = {}
    for dtype, own in by_dtype.items():
        points, software = merged_points(own, taken)
        if _is_grid(points):
            source = f"{gpu}, products of {', '.join(software)}; {len(points)} shapes"
            forward[dtype] = _of_grid(points, dtype, facts, Provenance("published", source, date))
    gradients = _gradients(folder, gpu, forward, date)
    return [*forward.values(), *(_like(table, *told) for table in forward.values() for told in gradients)]


def _is_plain(row: Row) -> bool:
    return row["dtype"] in DTYPES and "role" not in row and is_trusted(row)


def is_trusted(row: Row) -> bool:
    """Whether its software's figures of that GPU can be."""
    return (row["gpu"], row["software"], row["dtype"]) not in DISTRUSTED


def merged_points(rows: Iterable[Row], taken: Taken) -> tuple[dict[Shape, float], list[str]]:
    """Nanoseconds by shape, geometric means over software, and the names of the software. Of shapes taken only."""
    times: dict[Shape, list[float]] = {}
    software: dict[str, None] = {}
    for row in rows:
        shape = shape_of(row, SIZES)
        if taken(shape):
            times.setdefault(shape, []).append(1000 * float(row["time_us"]))
            software[row["software"]] = None
    return {shape: geometric_mean(own) for shape, own in times.items()}, sorted(software)


def _is_grid(points: Points) -> bool:
    """Whether at least half of the vertices that their sizes span were measured."""
    axes = _axes(points)
    return len(points) > 1000 and len(points) > math.prod(map(len, axes)) / 2


def _axes(points: Points) -> list[list[float]]:
    return [[float(size) for size in sorted({shape[axis] for shape in points})] for axis in range(3)]


def _of_grid(points: Points, dtype: str, facts: Facts, provenance: Provenance) -> Table:
    """Times over their roofline on the grid, completed, and back."""
    axes = _axes(points)
    places = [{size: number for number, size in enumerate(axis)} for axis in axes]
    values = np.full([len(axis) for axis in axes], np.nan)
    for shape, time in points.items():
        values[tuple(place[size] for place, size in zip(places, shape, strict=True))] = math.log(time)
    grid = np.meshgrid(*[np.array(axis) for axis in axes], indexing="ij")
    least, flops = np.log(roofline_ns(grid, dtype, facts)), 2.0 * grid[0] * grid[1] * grid[2]
    times = np.exp(completed(values - least, axes) + least)
    rates = [float(f"{rate:.3g}") for rate in (times / flops / UNIT_NS).ravel().tolist()]
    fastest = float(f"{min(points.values()):.4g}")
    return Table(f"NT {dtype}", tuple(map(tuple, axes)), tuple(rates), provenance, unit_ns=UNIT_NS, least_ns=fastest)


def single_tables(folder: Path, gpus: Iterable[str], facts: Facts, date: str, taken: Taken = everything) -> list[Table]:
    """Of products in float32 on these GPUs, without tensor cores: shapes lie anywhere, and were timed as eager calls.
    Layouts of gradients are taken to be as fast. Empty where there are few."""
    rows = [row for gpu in gpus for row in read_rows(folder, "gemm_*.csv.gz", "gemm_*.csv", gpu=gpu)]
    points, software = merged_points([row for row in rows if row["dtype"] == "float32" and "role" not in row], taken)
    floors = {row["gpu"]: floor_ns(row["gpu"], "linear", row["software"]) for row in rows if row["dtype"] == "float32"}
    floor = max(floors.values(), default=0.0)
    kernels = {shape: own for shape, time in points.items() if (own := kernel_ns(time, floor)) is not None}
    if len(kernels) < FEWEST:
        return []
    source = f"{len(kernels)} products on {', '.join(sorted(floors))} ({', '.join(software)})"
    made = _scattered(kernels, facts, Provenance("published", source, date))
    assumed = Provenance("assumed", f"as fast as the forward's; {source}", date)
    return [made, *(_like(made, layout, 1.0, assumed) for layout in LAYOUTS.values())]


def _scattered(points: Points, facts: Facts, provenance: Provenance) -> Table:
    """Times over their roofline at powers of two."""
    places = np.array([[float(size) for size in shape] for shape in points])
    axes = [[2.0**power for power in range(*_powers(places[:, axis]))] for axis in range(3)]
    least, times = np.log(roofline_ns([*places.T], "float32", facts)), np.log(list(points.values()))
    grid = np.meshgrid(*[np.array(axis) for axis in axes], indexing="ij")
    found = np.exp(fitted(places, times - least, axes, BENDING)) * roofline_ns(grid, "float32", facts)
    flops = 2.0 * grid[0] * grid[1] * grid[2]
    rates = bounded_ns(found, flops * 1e9 / facts.peak_flops["float32"]) / flops / UNIT_NS
    shown = tuple(float(f"{rate:.3g}") for rate in rates.ravel().tolist())
    return Table(
        "NT float32", tuple(map(tuple, axes)), shown, provenance, UNIT_NS, float(f"{min(points.values()):.4g}")
    )


def bounded_ns(times: Array, least: Array) -> Array:
    """Times on a grid where none is above that of a larger product, which computes a smaller one as well, nor below the
    least: a fit that is drawn on beyond its points knows neither."""
    found = times
    for axis in range(found.ndim):
        found = np.flip(np.minimum.accumulate(np.flip(found, axis), axis), axis)
    return np.maximum(found, least)


def _powers(sizes: Array) -> tuple[int, int]:
    """Of what is smaller than the smallest tile, the memory's pace decides (`compute._kernels_ns`)."""
    least = max(float(SMALLEST), float(sizes.min()))
    return math.floor(math.log2(least)), math.ceil(math.log2(sizes.max())) + 1


def roofline_ns(grid: Sequence[Array], dtype: str, facts: Facts) -> Array:
    """Nanoseconds of products of (m, n, k) at a share of peak and bandwidth, and what the least kernel takes."""
    m, n, k = grid
    computing = 2.0 * m * n * k / facts.peak_flops.get(dtype, facts.peak_flops["bfloat16"])
    moving = ITEM_BYTES[dtype] * (m * k + n * k + m * n) / facts.memory_bandwidth
    return np.asarray(np.maximum(computing, moving) * 1e9 / REACHED + FIXED_NS)


def _like(table: Table, layout: str, times: float, provenance: Provenance) -> Table:
    """A layout's table, in terms of the forward's."""
    name = table.name.replace("NT", layout)
    return Table(name, table.axes, table.rates, provenance, table.unit_ns, table.least_ns, table.name, times)


def _gradients(folder: Path, gpu: str, forward: Mapping[str, Table], date: str) -> list[tuple[str, float, Provenance]]:
    """The layouts of gradients: how much slower than the forward's, and by whom."""
    table = forward.get("bfloat16")
    rows = read_rows(folder, "gemm_training_layouts*.csv", "gemm_training_layouts*.csv.gz")
    by_gpu = grouped(rows, lambda row: row["gpu"])
    kind = gpu.partition("-")[0]
    used = {name: own for name, own in by_gpu.items() if name.partition("-")[0] == kind} or by_gpu
    found = []
    for role, layout in LAYOUTS.items():
        ratios = [ratio for own in used.values() if table and (ratio := _ratio(own, role, table))]
        if ratios:
            source = f"{role.replace('_', ' of the ')} against the forward's products, {', '.join(sorted(used))}"
            times = float(f"{geometric_mean(ratios):.3g}")
            found.append((layout, times, Provenance("fitted", source, date)))
    return found


def _ratio(rows: list[Row], role: str, table: Table) -> float | None:
    """How much slower products of a role are than the forward's, each against the table: what is of the software, the
    clock, or another GPU's peak is in both."""
    over = {
        name: [
            1000 * float(row["time_us"]) / table.kernel_ns(shape, 2.0 * math.prod(shape))
            for row in rows
            if row["role"] == name and row["batch"] == "1" and table.holds(shape := shape_of(row, SIZES))
        ]
        for name in ("forward", role)
    }
    return median(over[role]) / median(over["forward"]) if all(over.values()) else None
