"""Collectives of GPUs: what the cost model says with the shipped profiles beside published measurements.

    python -m benchmarks.accuracy.gpu_collectives FILE [FILE …] [--cross-validate] [--ship] [--output FILE]

Each FILE is a table `collectives*.csv` or `.csv.gz` with the columns of `autopar.profiler.published.collectives`. Every
row inside a node, of a GPU that a profile is shipped for, is predicted by `autopar.cost.collective_time_ns`; the rows
of other GPUs are counted. Reported are median, 90th percentile and worst relative error by GPU and collective, over
sizes of 64 KiB to 1 GiB, and by ranks and size class. All-reduces of integers are told apart: NVSwitch does not add
them, and no training program reduces any. So are rows of another source than the profile's points: kernel times in a
program, which include waiting for the other ranks, other pairs of GPUs, and older versions of NCCL. Rows across nodes
are predicted where their link names a network that the profile knows. A row that states its release of NCCL is
predicted with the points of that release, where the profile has some: it is a fact of the software that ran.

--cross-validate takes no shipped points: each size of each collective and number of ranks in turn is left out, all
rows of that size, the points are made anew from the rest, and the size is predicted; the largest size is not left out.
Releases of NCCL are by themselves here, too.
--ship writes the blocks that the tables of the first FILE's folder give into cost_profiles/.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from autopar.cost import Profile, collective_time_ns
from autopar.cost.profile import Link, profile_from_json
from autopar.ir.placement import Axis
from autopar.profiler import load_profile
from autopar.profiler.published.checking import sizes_left_out
from autopar.profiler.published.collectives import (
    FLOATS_ONLY,
    INTEGERS,
    by_library,
    collective_blocks,
    extrapolated,
)
from autopar.profiler.published.measurements import Measurement, read_measurements
from autopar.profiler.published.networks import fitted_network
from autopar.profiler.text import profile_text
from benchmarks.accuracy.gpu.plans import own_names

HERE = Path(__file__).parent
PROFILES = HERE.parents[1] / "cost_profiles"
#: the shipped profile of each GPU, by its name in the tables
SHIPPED = {
    "A100-SXM4-80GB": "a100", "H100-SXM5-80GB": "h100", "H200-SXM5-141GB": "h200", "B200-SXM6-180GB": "b200",
    "GB200": "gb200", "L40S": "l40s", "L4": "l4", "A100-SXM4-40GB": "a100-40gb", "V100-SXM2-32GB": "v100",
}  # fmt: skip
WIRED = ("V100-SXM2-32GB",)  # NVLink from GPU to GPU, without a switch
#: nodes with one adapter of 400 Gb/s a GPU: InfiniBand, which counts unless another is named, or EFA
NDR = ("H100-SXM5-80GB", "H200-SXM5-141GB", "B200-SXM6-180GB", "GB200")
NDR_BANDWIDTH = 47e9  # of 50e9; NVIDIA: 46 to 48, github.com/NVIDIA/nccl-tests issue 290
INTERFERENCE_DATE = "2026-11-26"
#: 8 B200, 32 KiB to 1 MiB, called from torch 2.9 (github.com/stas00/ml-engineering) less NCCL's own benchmark: median
CALL = {
    "collective_ns": 20_000,
    "provenance": {
        "kind": "fitted",
        "source": "all-reduces of 32 KiB to 1 MiB on 8 B200, called from torch 2.9 with NCCL 2.27 "
        "(stas00/ml-engineering@744d01e18b:network/README.md), less what nccl-tests takes: median",
        "date": INTERFERENCE_DATE,
    },
}
BY_NCCL = ("A100-SXM4-80GB", "H100-SXM5-80GB")  # and measured in other ways besides
#: GPUs that were not measured: one with links of the same kind, how many times their bandwidth it has, and why
STAND_INS = {
    "L40S": ("RTX-PRO-6000", 2.0, "as RTX PRO 6000, on PCIe 4.0 x16 instead of 5.0 x16, which has twice the rate"),
}
KNOWN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
LEAST, MOST = 64 << 10, 1 << 30
CLASSES = ((0, "below 64 KiB"), (LEAST, "64 KiB to 1 MiB"), (1 << 20, "1 to 32 MiB"), (32 << 20, "from 32 MiB"))
TARGETS = {"median": 0.05, "p90": 0.15}


class Prediction(NamedTuple):
    """A row and what was predicted for it."""

    row: Measurement
    time_ns: float

    @property
    def error(self) -> float:
        return self.time_ns / self.row.time_ns - 1


# Predictions ----------------------------------------


def shipped_predictions(rows: Iterable[Measurement]) -> list[Prediction]:
    """Those of the shipped profiles, for the rows of their GPUs, whose names a table may use, too."""
    rows = [row for row in rows if row.op in KNOWN]
    profiles = {gpu: load_profile(name) for gpu in {row.gpu for row in rows} for name in shipped_names(gpu)}
    known = [row for row in rows if row.gpu in profiles]
    releases = {(row.gpu, row.library) for row in known}
    under = {key: profiles[key[0]].with_library(key[1]) for key in releases}
    inside = [Prediction(row, _cost_ns(row, under[row.gpu, row.library])) for row in known if row.nodes == 1]
    return inside + [
        Prediction(row, _cost_ns(row, profile))
        for row in rows
        if row.gpu in profiles and row.nodes > 1 and (profile := _on_network(row, profiles[row.gpu]))
    ]


def shipped_names(gpu: str) -> tuple[str, ...]:
    """The shipped profile of a GPU, by its name in the tables, a profile's, or one of its form and memory; or none."""
    name = SHIPPED.get(gpu, "")
    return (name,) if name and _is_shipped(name) else own_names(gpu)[:1]


def _on_network(row: Measurement, profile: Profile) -> Profile | None:
    """The profile with the links that the row was measured on; None where it knows no such network."""
    if profile.links["inter_node"].network and profile.links["inter_node"].network in row.link.lower():
        return profile
    names = {link.network for link in profile.other_links if link.network and link.network in row.link.lower()}
    return profile.on(min(names)) if names else None


def _is_shipped(name: str) -> bool:
    return any(name in (data["name"], *data.get("aliases", ())) for data in _profile_files().values())


def _profile_files() -> dict[Path, dict[str, Any]]:
    paths = (path for path in PROFILES.glob("*.json") if not path.name.endswith("schema.json"))
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(paths)}


def _cost_ns(row: Measurement, profile: Profile) -> int:
    return collective_time_ns(row.op, row.num_bytes, Axis("x", row.ranks, 1), row.ranks // row.nodes, profile)


def cross_validated(rows: Sequence[Measurement]) -> list[Prediction]:
    """Each size but the largest predicted from the others, GPU by GPU."""
    gpus = sorted({row.gpu for row in rows})
    own = ([row for row in rows if row.gpu == gpu] for gpu in gpus)
    return [Prediction(*found) for some in own for one in _of_one_release(some) for found in sizes_left_out(one)]


def _of_one_release(rows: Sequence[Measurement]) -> list[list[Measurement]]:
    """A GPU's rows, those of each release of NCCL by themselves where several were measured."""
    releases = by_library(row for row in rows if row.nodes == 1)
    if len(releases) < 2:
        return [list(rows)]
    return [*releases.values(), [row for row in rows if not row.library]]


# The report ----------------------------------------


def summary(predictions: Sequence[Prediction]) -> dict[str, float]:
    """How many rows, and median, 90th percentile and worst relative error."""
    errors = sorted(abs(item.error) for item in predictions)
    return {
        "rows": len(errors), "median": round(median(errors), 4), "p90": round(float(np.quantile(errors, 0.9)), 4),
        "worst": round(errors[-1], 4), "bias": round(median(item.error for item in predictions), 4),
    }  # fmt: skip


def grouped(predictions: Iterable[Prediction], name: Callable[[Measurement], str]) -> dict[str, dict[str, float]]:
    """The summary of each group of rows, by what `name` says of them."""
    groups: dict[str, list[Prediction]] = {}
    for item in predictions:
        groups.setdefault(name(item.row), []).append(item)
    return {group: summary(own) for group, own in sorted(groups.items())}


def report(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """All that is told: the groups that the targets are about first."""
    across = [item for item in predictions if item.row.nodes > 1]
    others = [item for item in predictions if item.row.nodes == 1 and _is_other_source(item.row)]
    predictions = [item for item in predictions if item.row.nodes == 1 and not _is_other_source(item.row)]
    in_range = [item for item in predictions if LEAST <= item.row.num_bytes <= MOST]
    floats = [item for item in in_range if not _is_integer_sum(item.row)]
    return {
        "by gpu and collective": grouped(floats, lambda row: f"{row.gpu} {row.op}"),
        "by gpu, collective and ranks": grouped(floats, lambda row: f"{row.gpu} {row.op} {row.ranks}"),
        "by gpu, collective and size": grouped(
            [item for item in predictions if not _is_integer_sum(item.row)],
            lambda row: f"{row.gpu} {row.op} {size_class(row.num_bytes)}",
        ),
        "sums of integers": grouped(
            [item for item in in_range if _is_integer_sum(item.row)], lambda row: f"{row.gpu} {row.op}"
        ),
        "across nodes": grouped(
            across, lambda row: f"{row.gpu} {row.op}, {row.nodes:2} nodes of {row.ranks // row.nodes}"
        ),
        "other sources than the points'": grouped(
            [item for item in others if LEAST <= item.row.num_bytes <= MOST],
            lambda row: f"{row.gpu} {row.op} {row.ranks}, {row.software}",
        ),
    }


def _is_other_source(row: Measurement) -> bool:
    """Whether others measured the row than what its GPU's profile was made from, by another method or years before."""
    if row.gpu in ("a100", "v100"):
        return True
    if row.gpu.startswith("V100"):
        return "in Mist" not in row.software
    return row.op != "send" and row.gpu in BY_NCCL and "nccl-tests" not in row.software


def _is_integer_sum(row: Measurement) -> bool:
    return row.op in FLOATS_ONLY and row.dtype in INTEGERS


def size_class(num_bytes: int) -> str:
    """The name of the class that a size is in."""
    return next(name for least, name in reversed(CLASSES) if num_bytes >= least)


def missed(groups: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The groups that miss a target."""
    return [name for name, found in groups.items() if any(found[what] > most for what, most in TARGETS.items())]


def markdown(head: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """The report as a page."""
    lines = ["# Collectives, predicted beside published measurements", ""]
    lines += [f"`{head['command']}`, {head['machine']}, {head['date']}", ""]
    for what, found in results.items():
        for title, groups in found.items():
            if groups:
                lines += [f"## {what}, {title}", ""]
                lines += ["| | rows | median | p90 | worst | bias |", "|---|--:|--:|--:|--:|--:|"]
                lines += [_line(name, figures) for name, figures in groups.items()] + [""]
    return "\n".join(lines)


def _line(name: str, found: Mapping[str, float]) -> str:
    shares = " | ".join(f"{found[what]:.1%}" for what in ("median", "p90", "worst", "bias"))
    return f"| {name} | {found['rows']} | {shares} |"


# Shipping ----------------------------------------


def ship(folder: Path) -> None:
    """Writes the blocks of each shipped GPU into its profile: links and collectives, interference, networks."""
    for path, data in _profile_files().items():
        names = {data["name"], *data.get("aliases", ())}
        for gpu in (gpu for gpu, name in SHIPPED.items() if name in names):
            blocks = collective_blocks(folder, STAND_INS[gpu][0] if gpu in STAND_INS else gpu)
            blocks = extrapolated(blocks, *STAND_INS[gpu][1:]) if gpu in STAND_INS else blocks
            levels = {link["level"] for link in blocks.links} | ({"inter_node"} if gpu in NDR else set())
            data["links"] = blocks.links + [link for link in data["links"] if link["level"] not in levels]
            data["collectives"] = blocks.collectives + _staying(gpu, blocks.collectives, data["collectives"])
            data["interference"] = interference_of(gpu)
            data["call"] = CALL
            data["links"] += networks_of(gpu, data)
            path.write_text(profile_text(data) + "\n", encoding="utf-8")


def interference_of(gpu: str) -> list[dict[str, Any]]:
    """What is published, or assumed, of computation beside collectives: `interference.csv`."""
    with (HERE / "interference.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu]
    return [
        {
            "level": row["level"], "compute": float(row["compute"]), "collective": float(row["collective"]),
            "provenance": {"kind": row["kind"], "source": row["source"], "date": INTERFERENCE_DATE},
        }
        for row in rows
    ]  # fmt: skip


def networks_of(gpu: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Links between nodes of named networks, for GPUs whose nodes are sold with one adapter of 400 Gb/s a GPU: fitted
    to `collectives_across_nodes.csv`."""
    if gpu not in NDR:
        return []
    profile = profile_from_json({**data, "links": [link for link in data["links"] if not link.get("network")]}, gpu)
    rows = read_measurements(HERE / "collectives_across_nodes.csv")
    near = profile.link("intra_node")
    found = [
        fitted_network("infiniband", [r for r in rows if r.link == "InfiniBand" and r.num_bytes < 32 << 20], near,
                       profile, NDR_BANDWIDTH),
        fitted_network("efa", [row for row in rows if row.link == "EFA"], near, profile),
    ]  # fmt: skip
    return [_link_json(link) for link in found]


def _link_json(link: Link) -> dict[str, Any]:
    return {name: value for name, value in asdict(link).items() if value not in (None, 0, ())}


def _staying(gpu: str, new: Sequence[Mapping[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a profile keeps of the points that it has: all where there are no new ones; without a switch groups of
    sizes that lack among the new ones, since their wiring is their own."""
    known = {(item["collective"], item["ranks"]) for item in new}
    return [item for item in old if not new or (gpu in WIRED and (item["collective"], item["ranks"]) not in known)]


# The command ----------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and writes the errors; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.gpu_collectives", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--cross-validate", action="store_true")
    parser.add_argument("--ship", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "gpu_collectives.json")
    options = parser.parse_args(arguments)
    if options.ship:
        ship(options.files[0].parent)
    rows = [row for path in options.files for row in read_measurements(path)]
    results = {"shipped profiles": report(shipped_predictions(rows))}
    if options.cross_validate:
        results["sizes left out"] = report(cross_validated(rows))
    head = {
        "command": "python -m benchmarks.accuracy.gpu_collectives "
        + " ".join([*(path.name for path in options.files), *["--cross-validate"] * options.cross_validate]),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
        "targets": TARGETS,
        "rows of GPUs without a profile": dict(
            Counter(row.gpu for row in rows if row.gpu not in SHIPPED and not shipped_names(row.gpu))
        ),
        "rows of other collectives": dict(Counter(row.op for row in rows if row.op not in KNOWN)),
        "rows across nodes": sum(row.nodes > 1 for row in rows),
    }
    options.output.write_text(json.dumps({**head, **results}, indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(markdown(head, results), encoding="utf-8")
    return _print(results)


def _print(results: Mapping[str, Mapping[str, Any]]) -> int:
    verdicts = {what: missed(found["by gpu and collective"]) for what, found in results.items()}
    for what, found in results.items():
        print(what)
        for name, figures in found["by gpu and collective"].items():
            errors = "  ".join(f"{key} {figures[key]:6.1%}" for key in ("median", "p90", "worst"))
            print(f"  {name:34} {figures['rows']:5} rows  {errors}{'  missed' if name in verdicts[what] else ''}")
    return int(any(verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
