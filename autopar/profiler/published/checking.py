"""How far a profile is from what it was not fitted to: residuals by family, dtype or level, and class of sizes.

Operators: a profile of the same tables without a fifth of their shapes is asked for these. Kernels of attention differ
by half between softwares: a row is asked of its own kernel where the profile has one. Collectives: each size of a
sweep is asked of the others. Rows are of kernels in bursts, so the device's sustained clock is not in the predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from autopar.cost.collectives import measured_ns
from autopar.cost.profile import CollectivePoints, Profile
from autopar.cost.provenance import Provenance
from autopar.cost.residuals import Residual, size_class
from autopar.profiler.published.attention import with_kernel
from autopar.profiler.published.cases import MeasuredCall, cases_of
from autopar.profiler.published.collectives import completed, served_by, tables_of, thinned
from autopar.profiler.published.measurements import Measurement, read_measurements
from autopar.profiler.published.rows import Taken, read_rows

FEWEST = 5  # measurements of a class that have quantiles
Call = tuple[str, str, float, float]
"""Family, kind, and predicted and measured nanoseconds."""


class BurstProfile:
    """A profile as kernels are measured: at the highest clock, each attention with its own kernel."""

    def __init__(self, profile: Profile) -> None:
        self._profile = replace(profile, facts=replace(profile.facts, sustained_clock=1.0), _shared={})
        self._by_kernel: dict[str, Profile] = {"": self._profile}

    def predicted_ns(self, case: MeasuredCall) -> int:
        """What the row of such a case is predicted to say."""
        if case.kernel not in self._by_kernel:
            self._by_kernel[case.kernel] = with_kernel(self._profile, case.kernel)
        return case.predicted_ns(self._by_kernel[case.kernel])


def operator_calls(profile: Profile, folder: Path, is_own: Callable[[str], bool], is_left_out: Taken) -> Iterator[Call]:
    """Operators of the folder's rows of the device's own name, of shapes that the profile was made without."""
    asked = BurstProfile(profile)
    for case in cases_of(row for row in read_rows(folder, "*.csv", "*.csv.gz") if is_own(row.get("gpu", ""))):
        if case.is_alone and case.is_trusted and is_left_out(case.key):
            yield case.operators, case.dtype, asked.predicted_ns(case), case.measured_ns


def collective_calls(folder: Path, gpu: str) -> Iterator[Call]:
    """Collectives inside a node; those of a GPU, as the tables have it."""
    rows = [row for path in tables_of(folder) for row in read_measurements(path) if row.gpu == gpu]
    for row, predicted in sizes_left_out(rows):
        yield row.op, "intra_node", predicted, row.time_ns


def sizes_left_out(rows: Sequence[Measurement]) -> Iterator[tuple[Measurement, float]]:
    """A GPU's rows inside a node, each size but the largest predicted from the others."""
    served = served_by(rows)
    curves = {key: thinned(own) for key, own in served.items()}
    for key, curve in curves.items():
        for size in sorted(curve)[:-1]:
            others = {**curves, key: {other: time for other, time in curve.items() if other != size}}
            if others[key]:
                points = _as_points(*key, completed(others)[key])
                near = [row for row in served[key] if 2**-0.25 <= row.num_bytes / size < 2**0.25]
                yield from ((row, measured_ns(points, row.num_bytes)) for row in near)


def _as_points(op: str, ranks: int, curve: Mapping[int, float]) -> CollectivePoints:
    points = tuple((size, round(time)) for size, time in sorted(curve.items()))
    return CollectivePoints(op, "intra_node", ranks, points, Provenance("published", "left out", "2026-01-01"))


def residuals_of(calls: Iterable[Call], provenance: Provenance) -> tuple[Residual, ...]:
    """Quantiles of each class of calls that has some."""
    logs: dict[tuple[str, str, int], list[float]] = {}
    for family, kind, predicted, measured in calls:
        key = family, kind, size_class(predicted)
        logs.setdefault(key, []).append(math.log(measured / max(1.0, predicted)))
    return tuple(
        Residual(*key, len(own), _quantiles(own), provenance)
        for key, own in sorted(logs.items()) if len(own) >= FEWEST
    )  # fmt: skip


def _quantiles(logs: list[float]) -> tuple[float, float, float]:
    low, middle, high = (round(float(x), 4) for x in np.quantile(logs, (0.05, 0.5, 0.95)))
    return low, middle, high
