"""Tables of attention as PyTorch runs it, from rows that `measure_gpu` wrote: kernels `torch_…`, forward and backward.

A block of threads takes TILE queries of one head, and all keys that these see; a multiprocessor takes blocks in turn:

    time  = start + (busy⁴ + longest⁴)^¼         nothing is hidden, or keys are by a tensor
          = start + busy + late · longest        causal: blocks are of unequal length, and a long one may come last
    busy  = blocks / multiprocessors · (begin + step · keys that a query sees in the mean)
    longest = begin + step · keys

`begin` and `step` belong to a head dim, `start` and `late` to a kernel and a direction. Eight numbers meet 147 times of
an H100's forward pass within 2.4% (median; 10.6% for nine of ten), each tenth left out in turn, and 59 of the backward
pass within 5.1% (12.0%): less than a table does, whose points lie far apart. How many query heads share a key makes no
difference in them.

Under a mask that is a tensor all keys are seen, and scores are read: so many times as long, by head dim, as rows of
`torch_masked` take over the same kernel without a mask.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

import numpy as np

from autopar.cost.profile import Profile
from autopar.cost.provenance import Provenance
from autopar.cost.tables import Table
from autopar.profiler.published.grids import Array
from autopar.profiler.published.products import UNIT_NS
from autopar.profiler.published.rows import Row, Shape, Taken, everything, read_rows, shape_of

TILE = 128  # queries of a block
DEFAULT, MASKED = "torch", "torch_masked"  # kernels that PyTorch chooses by itself, and under a tensor
EFFICIENT, FLASH2 = "torch_efficient", "torch_flash2"
COLUMNS = {
    "forward": ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "causal"),
    "backward": ("batch", "seq", "seq", "heads", "kv_heads", "qk_head_dim", "causal"),
}
FILES = {"forward": "attention_forward.csv*", "backward": "attention_forward_backward*.csv*"}
#: begins of the names of profiles where PyTorch prefers cuDNN's attention
CUDNN = ("h100", "h200", "gh200", "b200", "gb200", "b300", "gb300")
FEWEST = 24  # rows of a kernel and a direction that its numbers are fitted to
FEWEST_MASKED = 3
#: vertices of the tables: sequences, and keys
SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 4096)
LENGTHS = tuple(1 << n for n in range(7, 18))
ROUNDS, LEAST_GAIN, BEND = 60, 1e-7, 0.1  # of the fit: errors beyond a tenth count in proportion, not squared
WIDEST_USUAL = 128  # head dims above it are not for `efficient_times`

Rows = Mapping[Shape, float]
"""Nanoseconds by shape, in the order of `COLUMNS`."""


class Tiled(NamedTuple):
    """A kernel in one direction: the numbers of the formula, in nanoseconds; head dims with their (begin, step)."""

    multiprocessors: int
    start: float
    late: float
    by_width: Mapping[int, tuple[float, float]]

    def time_ns(self, sequences: float, keys: float, width: int, is_causal: bool) -> float:
        """As many queries as keys in each sequence, which is a sample's head."""
        begin, step = self.by_width[width]
        seen = (keys + TILE) / 2 if is_causal else keys
        busy = sequences * max(1.0, keys / TILE) / self.multiprocessors * (begin + step * seen)
        longest = begin + step * keys
        rest = busy + self.late * longest if is_causal else (busy**4 + longest**4) ** 0.25
        return self.start + rest

    def row_ns(self, shape: Shape) -> float:
        """Of a row's shape."""
        batch, queries, keys, heads, _, width, causal = shape
        return self.time_ns(batch * heads * queries / keys, keys, width, bool(causal))


def tiled_tables(folder: Path, gpu: str, date: str, taken: Taken = everything) -> list[Table]:
    """Of the kernel that PyTorch runs there (`flash …`), of it under a mask, and of FlashAttention-2 (`flash2 …`).

    None where `measure_gpu` did not write the folder, or wrote too few rows of them.
    """
    if not multiprocessors(folder):
        return []
    rows = {direction: _by_kernel(folder, direction, gpu, taken) for direction in COLUMNS}
    chosen = default_kernel(rows["forward"], multiprocessors(folder))
    kernels = {"flash": chosen, "flash2": FLASH2 if chosen != FLASH2 else ""}
    return [
        table
        for name, kernel in kernels.items()
        for direction, own in rows.items()
        for table in _tables(name, kernel, direction, own, gpu, multiprocessors(folder), date)
    ]


def masked_alike(folder: Path, gpu: str, profile: Profile, date: str) -> list[Table]:
    """Tables of attention under a mask for a GPU that was not measured, in terms of its own without one: as many times
    as long as on the folder's GPU. Where PyTorch runs cuDNN's attention, that one's; elsewhere of the memory-efficient
    kernel, which takes masks, over FlashAttention-2, which takes none."""
    if not multiprocessors(folder):
        return []
    ratios = _own_masked_times(folder, gpu) if profile.name.startswith(CUDNN) else efficient_times(folder, gpu)
    whose = "cuDNN's under a mask over without" if profile.name.startswith(CUDNN) else f"{EFFICIENT} over {FLASH2}"
    found = []
    for direction, (times, count) in ratios.items():
        plain = profile.tables.get(f"flash full {direction} bfloat16")
        if plain is not None:
            source = f"{times:.2f} times attention without a mask: {whose} on {gpu}, {count} shapes"
            masked = replace(
                plain, name=f"flash masked {direction} bfloat16", like=plain.like or plain.name,
                times=float(f"{times * plain.times:.4g}"), provenance=Provenance("assumed", source, date),
            )  # fmt: skip
            found.append(masked)
    return found


def _own_masked_times(folder: Path, gpu: str) -> dict[str, tuple[float, int]]:
    """By direction, of PyTorch's own kernel: in the mean over head dims up to the usual, and of how many rows."""
    count = multiprocessors(folder)
    found: dict[str, tuple[float, int]] = {}
    chosen = default_kernel(_by_kernel(folder, "forward", gpu, everything), count)
    for direction in COLUMNS:
        rows = _by_kernel(folder, direction, gpu, everything)
        masked = rows.get(MASKED, {})
        if chosen and len(rows.get(chosen, {})) >= FEWEST and len(masked) >= FEWEST_MASKED:
            times = masked_times(fit(rows[chosen], count), masked)
            usual = [value for width, value in times.items() if width <= WIDEST_USUAL]
            found[direction] = geometric_mean(usual or times.values()), len(masked)
    return found


def multiprocessors(folder: Path) -> int:
    """As `measure_gpu` found them; 0 where it did not write the folder."""
    path = folder / "device.json"
    if not path.exists():
        return 0
    return int(json.loads(path.read_text(encoding="utf-8")).get("device", {}).get("multiprocessors", 0))


def default_kernel(forward: Mapping[str, Rows], count: int) -> str:
    """The kernel whose times are nearest to those of PyTorch's own choice; none where too few are known."""
    known = {name: own for name, own in forward.items() if name not in (DEFAULT, MASKED) and len(own) >= FEWEST}
    default = forward.get(DEFAULT, {})
    if not default or not known:
        return ""
    return min(known, key=lambda name: _error(fit(known[name], count), default))


def _error(found: Tiled, rows: Rows) -> float:
    logs = [abs(math.log(time / found.row_ns(shape))) for shape, time in rows.items() if shape[5] in found.by_width]
    return median(logs) if logs else math.inf


def efficient_times(folder: Path, gpu: str) -> dict[str, tuple[float, int]]:
    """By direction, how many times as long the memory-efficient kernel takes as FlashAttention-2, and of how many rows:
    what PyTorch runs under a mask where cuDNN's attention is not its choice. Both are of Ampere's instructions."""
    count = multiprocessors(folder)
    found: dict[str, tuple[float, int]] = {}
    for direction in COLUMNS:
        rows = _by_kernel(folder, direction, gpu, everything)
        base = rows.get(FLASH2, {})
        if len(base) >= FEWEST:
            kernel = fit(base, count)
            ratios = [
                time / kernel.row_ns(shape)
                for shape, time in rows.get(EFFICIENT, {}).items()
                if shape[5] in kernel.by_width and shape[5] <= WIDEST_USUAL
            ]
            found |= {direction: (geometric_mean(ratios), len(ratios))} if len(ratios) >= FEWEST_MASKED else {}
    return found


def _by_kernel(folder: Path, direction: str, gpu: str, taken: Taken) -> dict[str, Rows]:
    """Rows that are no one pass of two, of the files that have a kernel."""
    times: dict[str, dict[Shape, list[float]]] = {}
    for row in read_rows(folder, FILES[direction], gpu=gpu):
        kernel = row.get("kernel", "")
        if kernel.startswith(DEFAULT) and row.get("pass", "forward") == direction and _is_half(row):
            shape = shape_of(row, COLUMNS[direction])
            if taken(shape):
                times.setdefault(kernel, {}).setdefault(shape, []).append(1000 * float(row["time_us"]))
    return {name: {shape: geometric_mean(own) for shape, own in rows.items()} for name, rows in times.items()}


def _is_half(row: Row) -> bool:
    return row["dtype"] in ("bfloat16", "float16")


# Tables -------------------------------------------------------------------


def _tables(
    name: str, kernel: str, direction: str, rows: Mapping[str, Rows], gpu: str, count: int, date: str
) -> Iterable[Table]:
    own = dict(rows.get(kernel, {})) | (dict(rows.get(DEFAULT, {})) if name == "flash" else {})
    if not kernel or len(own) < FEWEST:
        return
    found = fit(own, count)
    source = f"{kernel} on {gpu}, by blocks of {TILE} queries; {len(own)} shapes"
    for kind in ("causal", "full"):
        provenance = Provenance("measured", source, date)
        yield _table(f"{name} {kind} {direction} bfloat16", found, kind == "causal", {}, provenance)
    masked = rows.get(MASKED, {}) if name == "flash" else {}
    if len(masked) >= FEWEST_MASKED:
        times = masked_times(found, masked)
        shown = ", ".join(f"{value:.2f} of heads of {width}" for width, value in times.items())
        provenance = Provenance("measured", f"{source}; under a mask times {shown}, of {len(masked)} shapes", date)
        yield _table(f"{name} masked {direction} bfloat16", found, False, times, provenance)


def masked_times(found: Tiled, masked: Rows) -> dict[int, float]:
    """By head dim, how many times as long a mask makes the kernel: where no row has a head dim, that of all rows."""
    ratios = {shape: time / found.row_ns((*shape[:-1], 0)) for shape, time in masked.items()}
    by_width = {
        width: [ratio for shape, ratio in ratios.items() if shape[5] == width] or list(ratios.values())
        for width in found.by_width
    }
    return {width: geometric_mean(own) for width, own in by_width.items()}


def _table(name: str, found: Tiled, is_causal: bool, times: Mapping[int, float], provenance: Provenance) -> Table:
    axes = tuple(map(float, SEQUENCES)), tuple(map(float, LENGTHS)), tuple(map(float, found.by_width)), (1.0,)
    rates = []
    for sequences in SEQUENCES:
        for keys in LENGTHS:
            for width in found.by_width:
                flops = 4.0 * sequences * keys**2 * width / (2 if is_causal else 1)
                time = found.time_ns(sequences, keys, width, is_causal) * times.get(width, 1.0)
                rates.append(float(f"{time / flops / UNIT_NS:.3g}"))
    return Table(name, axes, tuple(rates), provenance, unit_ns=UNIT_NS, least_ns=float(f"{found.start:.4g}"))


# The fit ------------------------------------------------------------------


def fit(rows: Rows, count: int) -> Tiled:
    """The formula's numbers that meet the times best, as logarithms, by Levenberg and Marquardt's damped steps."""
    widths = sorted({shape[5] for shape in rows})
    shapes, times = list(rows), np.log(np.array(list(rows.values())))

    def made(numbers: Array) -> Tiled:
        start, late, *others = np.exp(numbers).tolist()
        return Tiled(count, start, late, dict(zip(widths, zip(others[::2], others[1::2], strict=True), strict=True)))

    def errors(numbers: Array) -> Array:
        found = made(numbers)
        return np.asarray(times - np.log([found.row_ns(shape) for shape in shapes]), np.float64)

    begin = [math.log(5e3), math.log(0.4), *[math.log(2e3), math.log(15.0)] * len(widths)]
    return made(_least(errors, np.array(begin)))


def _least(errors: Callable[[Array], Array], numbers: Array) -> Array:
    """Where the sum of √(1 + (error / BEND)²) is least."""
    damping, left = 1e-2, errors(numbers)
    for _ in range(ROUNDS):
        slopes = _slopes(errors, numbers, left)
        counted = 1 / np.sqrt(1 + (left / BEND) ** 2)
        square, pull = slopes.T @ (counted[:, None] * slopes), slopes.T @ (counted * left)
        scale = damping * (np.trace(square) / len(numbers) + 1e-9)
        moved = numbers - np.linalg.solve(square + scale * np.eye(len(numbers)), pull)
        after = errors(moved)
        gain = _cost(left) - _cost(after)
        if gain > 0:
            numbers, left, damping = moved, after, damping / 3
        else:
            damping *= 4
        if 0 < gain < LEAST_GAIN or damping > 1e6:
            break
    return numbers


def _cost(left: Array) -> float:
    return float(np.sqrt(1 + (left / BEND) ** 2).sum())


def _slopes(errors: Callable[[Array], Array], numbers: Sequence[float] | Array, left: Array) -> Array:
    step = 1e-4
    columns: list[Array] = [(errors(numbers + step * unit) - left) / step for unit in np.eye(len(numbers))]
    return np.stack(columns, axis=1)
