"""The shipped all-reduce models of the A100 and V100 against a published table of NCCL's times inside one node.

    python -m benchmarks.accuracy.all_reduce TABLE [--ship] [--output FILE]

TABLE is a CSV with the columns gpu, n_gpus, bytes and time_ns_in_place, such as what github.com/VIA-Research/vTrain
(MIT) publishes. Printed for each device, and written to benchmarks/accuracy/all_reduce.json:

- shipped: what `autopar.cost` says, over all rows. The targets are about these.
- sizes not shipped: the same over the sizes that the profile has no measured point of, which are interpolated.
- formula: the fitted start-up, message, byte and pass costs alone, which serve other collectives and groups. The table
  begins at 1 MB, so NCCL's low-latency protocols, which serve smaller sizes, cannot be fitted to it.
- formula without p ranks: the same, fitted without the rows of p ranks, on the rows of p ranks.

--ship fits anew and writes the links and points into cost_profiles/, which is how the shipped figures were made.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar.cost import Profile, collective_time_ns
from autopar.cost.profile import Link, Provenance, profile_from_json
from autopar.ir.placement import Axis
from autopar.profiler import load_profile
from autopar.profiler.text import profile_text
from benchmarks.accuracy.fitting import Array, fit_positive

HERE = Path(__file__).parent
PROFILES = HERE.parents[1] / "cost_profiles"
TARGETS = {"median": 0.05, "worst": 0.15}
SHIPPED_MEGABYTES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SMALL_BYTES = 64 << 20  # errors are told apart here: the table has many more sizes above
TABLE_SOURCE = "NCCL all-reduce inside one node, fp32, in place; table of github.com/VIA-Research/vTrain (MIT)"


class Row(NamedTuple):
    """One measurement."""

    gpu: str
    ranks: int
    num_bytes: int
    time_ns: int


def read_table(path: Path) -> list[Row]:
    """The rows of a table. Raises ValueError naming the columns that it lacks."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = {"gpu", "n_gpus", "bytes", "time_ns_in_place"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: expected the columns {sorted(missing)}, found {reader.fieldnames}")
        return [Row(r["gpu"], int(r["n_gpus"]), int(r["bytes"]), int(r["time_ns_in_place"])) for r in reader]


# The formula's constants ----------------------------------------


def fit_link(rows: Iterable[Row], level: str = "intra_node") -> Link:
    """The link whose all-reduce formula fits the rows best: relative errors, small and large sizes alike.

    One bandwidth serves all groups where that explains them (a switch); else each group size has its own (V100's
    NVLink forms as many rings as the group's wiring allows).
    """
    rows = list(rows)
    switched, wired = _fit_switched(rows, level), _fit_wired(rows, level)
    return switched if _loss(switched, rows) <= 1.5 * _loss(wired, rows) else wired


def _loss(link: Link, rows: list[Row]) -> float:
    weights = _weights(np.array([row.num_bytes for row in rows], dtype=float))
    return float(np.sum(weights * [abs(np.log(formula_ns(link, r.ranks, r.num_bytes) / r.time_ns)) for r in rows]))


def _weights(sizes: Array) -> Array:
    """The table's sizes are equally spaced, so the large ones are many: a small size counts more, by the root."""
    weights: Array = 1 / np.sqrt(sizes)
    return weights / weights.sum()


class Sweep(NamedTuple):
    """Rows as columns, with what the formula needs of them: messages and bytes of the ring and of the tree."""

    ranks: Array
    sizes: Array
    times: Array
    weights: Array

    @classmethod
    def of(cls, rows: list[Row]) -> Sweep:
        ranks, sizes, times = (np.array(column, dtype=float) for column in list(zip(*rows, strict=True))[1:])
        return cls(ranks, sizes, times, _weights(sizes))

    def sent(self, alpha: float, rate: float | Array) -> Array:
        """Nanoseconds of the better algorithm, at `rate` bytes a nanosecond."""
        ring = 2 * (self.ranks - 1) * alpha + 2 * (self.ranks - 1) / self.ranks * self.sizes / rate
        tree = 2 * np.ceil(np.log2(self.ranks)) * alpha + 2 * self.sizes / rate
        better: Array = np.minimum(ring, tree)
        return better

    def error(self, predicted: Array) -> float:
        return float(np.sum(self.weights * np.abs(np.log(predicted / self.times))))


def _fit_switched(rows: list[Row], level: str) -> Link:
    """One bandwidth, and a pass over the rank's own bytes."""
    sweep = Sweep.of(rows)

    def loss(x: Array) -> float:
        return sweep.error(x[0] + sweep.sent(x[1], x[2]) + sweep.sizes / x[3])

    start, alpha, rate, passing = fit_positive(loss, np.array([30e3, 5e3, 300.0, 500.0]))
    link = Link(level, _rounded(alpha), _rounded(rate * 1e9), _provenance(rows), _rounded(start))
    return replace(link, pass_bandwidth=_rounded(passing * 1e9))


def _fit_wired(rows: list[Row], level: str) -> Link:
    """A bandwidth for each group size: what it reaches at best, by a common factor more."""
    sweep = Sweep.of(rows)
    groups = sorted(set(sweep.ranks))
    column = np.searchsorted(groups, sweep.ranks)
    moved = 2 * (sweep.ranks - 1) / sweep.ranks * sweep.sizes
    reached = np.array([np.max(moved[sweep.ranks == n] / sweep.times[sweep.ranks == n]) for n in groups])

    def loss(x: Array) -> float:
        return sweep.error(x[0] + sweep.sent(x[1], reached[column] * x[2]))

    start, alpha, factor = fit_positive(loss, np.array([30e3, 5e3, 1.0]))
    by_ranks = tuple((int(n), _rounded(rate * factor * 1e9)) for n, rate in zip(groups, reached, strict=True))
    usual = float(np.median([rate for _, rate in by_ranks]))
    link = Link(level, _rounded(alpha), usual, _provenance(rows), _rounded(start))
    return replace(link, bandwidth_by_ranks=by_ranks)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _provenance(rows: list[Row]) -> Provenance:
    groups = sorted({row.ranks for row in rows})
    source = f"all-reduce formula fitted to {len(rows)} rows of 2 to {groups[-1]} ranks. {TABLE_SOURCE}"
    return Provenance("fitted", source, datetime.date.today().isoformat())


def formula_ns(link: Link, ranks: int, num_bytes: int) -> int:
    """What the cost model's formula says of an all-reduce on that link."""
    return collective_time_ns("all_reduce", num_bytes, Axis("x", ranks, 1), ranks, _alone(link))


_with_link: dict[Link, Profile] = {}


def _alone(link: Link) -> Profile:
    """A profile that has this link and no measured points."""
    if link not in _with_link:
        _with_link[link] = replace(load_profile("a100"), links={link.level: link}, collectives={}, _shared={})
    return _with_link[link]


# Errors ----------------------------------------


def errors_of(rows: list[Row], predict: Callable[[Row], int]) -> dict[str, float]:
    """Median, 95th percentile and worst relative error; and median and worst of sizes up to 64 MiB."""
    errors = np.array([abs(predict(row) / row.time_ns - 1) for row in rows])
    small = errors[[row.num_bytes <= SMALL_BYTES for row in rows]]
    figures = {
        "rows": len(rows),
        "median": np.median(errors),
        "p95": np.quantile(errors, 0.95),
        "worst": errors.max(),
        "median_to_64MiB": np.median(small) if len(small) else float("nan"),
        "worst_to_64MiB": small.max() if len(small) else float("nan"),
    }
    return {name: round(float(value), 4) for name, value in figures.items()}


def report(gpu: str, rows: list[Row]) -> dict[str, dict[str, float]]:
    """Every error that is told of a device."""
    profile = profile_from_json(json.loads((PROFILES / f"{gpu}.json").read_text(encoding="utf-8")), gpu)
    link = profile.links["intra_node"]
    shipped = {(ranks, size) for (_, _, ranks), c in profile.collectives.items() for size, _ in c.points}
    found = {
        "shipped": errors_of(rows, lambda row: _shipped_ns(profile, row)),
        "sizes not shipped": errors_of(
            [row for row in rows if (row.ranks, row.num_bytes) not in shipped], lambda row: _shipped_ns(profile, row)
        ),
        "formula": errors_of(rows, lambda row: formula_ns(link, row.ranks, row.num_bytes)),
    }
    for left_out in sorted({row.ranks for row in rows}):
        rest = fit_link(row for row in rows if row.ranks != left_out)
        held = [row for row in rows if row.ranks == left_out]
        found[f"formula without {left_out} ranks"] = _formula_errors(rest, held)
    return found


def _formula_errors(link: Link, rows: list[Row]) -> dict[str, float]:
    return errors_of(rows, lambda row: formula_ns(link, row.ranks, row.num_bytes))


def _shipped_ns(profile: Profile, row: Row) -> int:
    return collective_time_ns("all_reduce", row.num_bytes, Axis("x", row.ranks, 1), row.ranks, profile)


# Shipping ----------------------------------------


def ship(gpu: str, rows: list[Row]) -> None:
    """Writes the fitted link and the thinned points into the device's profile."""
    path = PROFILES / f"{gpu}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    link = fit_link(rows)
    data["links"] = [_link_json(link), *(item for item in data["links"] if item["level"] != link.level)]
    groups = sorted({row.ranks for row in rows})
    data["collectives"] = [_points_json(ranks, [row for row in rows if row.ranks == ranks]) for ranks in groups]
    path.write_text(profile_text(data) + "\n", encoding="utf-8")


def _link_json(link: Link) -> dict[str, Any]:
    fields = {name: getattr(link, name) for name in link.__dataclass_fields__}
    return {**{name: value for name, value in fields.items() if value}, "provenance": vars(link.provenance)}


def _points_json(ranks: int, rows: list[Row]) -> dict[str, Any]:
    """Where more bytes took less time, the longer time holds."""
    chosen = sorted((row.num_bytes, row.time_ns) for row in rows if row.num_bytes >> 20 in SHIPPED_MEGABYTES)
    longest = np.maximum.accumulate([time for _, time in chosen]).tolist()
    return {
        "collective": "all_reduce",
        "level": "intra_node",
        "ranks": ranks,
        "points": [[size, int(time)] for (size, _), time in zip(chosen, longest, strict=True)],
        "provenance": {"kind": "published", "source": TABLE_SOURCE, "date": datetime.date.today().isoformat()},
    }


# The command ----------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the errors; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.all_reduce", description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--ship", action="store_true", help="fit anew and write cost_profiles/")
    parser.add_argument("--output", type=Path, default=HERE / "all_reduce.json")
    options = parser.parse_args(arguments)
    rows = read_table(options.table)
    gpus = sorted({row.gpu for row in rows})
    if options.ship:
        for gpu in gpus:
            ship(gpu, [row for row in rows if row.gpu == gpu])
    results = {gpu: report(gpu, [row for row in rows if row.gpu == gpu]) for gpu in gpus}
    for gpu, found in results.items():
        print(f"{gpu}\n  {'':26}{'rows':>5} {'median':>7} {'p95':>7} {'worst':>7}  {'to 64 MiB: median, worst':>24}")
        for name, e in found.items():
            print(
                f"  {name:26}{e['rows']:5.0f} {e['median']:7.2%} {e['p95']:7.2%} {e['worst']:7.2%}"
                f"  {e['median_to_64MiB']:15.2%} {e['worst_to_64MiB']:8.2%}"
            )
    met = all(found["shipped"][name] <= limit for found in results.values() for name, limit in TARGETS.items())
    print(f"targets (shipped: median ≤ 5%, worst ≤ 15%) {'met' if met else 'MISSED'}")
    head = {
        "command": f"python -m benchmarks.accuracy.all_reduce {options.table.name}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
        "targets": TARGETS,
    }
    options.output.write_text(json.dumps({**head, "errors": results}, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
