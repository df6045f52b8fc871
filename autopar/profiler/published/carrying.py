"""Tables of a GPU that was measured, as those of another like it, which was not: each time by its roofline.

A product takes as many times its roofline (`products.roofline_ns`) on both; attention beyond the least kernel's time is
as much longer as the peak is lower.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autopar.cost.profile import Facts
from autopar.cost.provenance import Provenance
from autopar.cost.tables import Table
from autopar.errors import ProfileError
from autopar.profiler.library import load_profile, profile_names
from autopar.profiler.published.products import roofline_ns

#: FLOP/s in bfloat16 and bytes a second of GPUs that were measured and have no profile: their data sheets
SHEETS = {"RTX-PRO-6000": (5.038e14, 1.792e12)}


def facts_of(gpu: str) -> Facts:
    """Peaks and bandwidth of a measured GPU. Raises ProfileError where they are not known."""
    words = set(gpu.lower().split("-"))
    shipped = [load_profile(name) for name in profile_names() if set(name.split("-")) <= words]
    if shipped:
        return shipped[0].facts
    if gpu not in SHEETS:
        raise ProfileError(f"expected a GPU with known peaks, found {gpu!r}; known are {', '.join(SHEETS)}")
    peak, bandwidth = SHEETS[gpu]
    peaks = {"bfloat16": peak, "float16": peak, "float8_e4m3fn": 2 * peak}
    return Facts(peaks, bandwidth, 1, 0, (0, 0), (0, 0), Provenance("datasheet", gpu, ""))


def carried(tables: Iterable[Table], gpu: str, own: Facts, other: Facts) -> list[Table]:
    """A GPU's tables as those of a device with other facts. Those in terms of another stay so."""
    found = []
    for table in tables:
        source = f"carried over from {gpu} by peak and bandwidth: {table.provenance.source}"
        provenance = Provenance("assumed", source, table.provenance.date)
        made = replace(table, provenance=provenance)
        if table.like is None:
            rates = _products(table, own, other) if table.name.startswith("NT") else _attention(table, own, other)
            made = replace(made, rates=tuple(float(f"{rate:.3g}") for rate in rates))
        found.append(made)
    rates_of = {table.name: table.rates for table in found}
    return [replace(table, rates=rates_of[table.like]) if table.like else table for table in found]


def _products(table: Table, own: Facts, other: Facts) -> list[float]:
    grid = np.meshgrid(*[np.array(axis) for axis in table.axes], indexing="ij")
    dtype = table.name.split()[1]
    factor = roofline_ns(grid, dtype, other) / roofline_ns(grid, dtype, own)
    return [float(rate) for rate in np.array(table.rates) * factor.ravel()]


def _attention(table: Table, own: Facts, other: Facts) -> list[float]:
    factor = own.peak_flops["bfloat16"] / other.peak_flops["bfloat16"]
    sequences, lengths, widths, _ = np.meshgrid(*[np.array(axis) for axis in table.axes], indexing="ij")
    halved = 2 if " causal " in table.name else 1
    flops = 4.0 * sequences * lengths**2 * widths / halved
    least = np.minimum(table.least_ns / flops.ravel() / table.unit_ns, np.array(table.rates))
    return [float(rate) for rate in least + (np.array(table.rates) - least) * factor]
