"""How close operators' predicted times are to those that others measured on GPUs, row by row.

    python -m benchmarks.accuracy.gpu_operators FOLDER_OR_FILE... [--cross-validate] [--output gpu_operators]

Reads tables of the form that `autopar profile --from` reads, whatever rows they hold, and asks the cost model for each
row's operator on the shipped profile of its GPU. With --cross-validate the folder's profiles are made anew without a
fifth of the shapes (by a hash), and those are predicted. Kernels of attention differ by half between softwares: a row
is predicted with the table of its own kernel where the profile has one. Rows that are not understood are counted by
the reason, and end no others. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import AutoparError
from autopar.profiler import load_profile, profile_names
from autopar.profiler.published.cases import MeasuredCall, cases_of
from autopar.profiler.published.checking import BurstProfile
from autopar.profiler.published.make import blocks_from_folder, is_of
from autopar.profiler.published.rows import four_fifths, rows_of
from benchmarks.facts import facts, write_record

# Predictions --------------------------------------------------------------


#: of profiles of GPUs whose products nobody measured: the one that each resembles
LIKE = {"a100-40gb": "A100-SXM4-80GB", "l4": "RTX-PRO-6000", "l40s": "RTX-PRO-6000"}


class Predictor:
    """The profiles of GPUs, as they are shipped, or without a fifth of the shapes of a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._profiles: dict[str, BurstProfile | None] = {}

    def error(self, case: MeasuredCall) -> float | None:
        """predicted / measured - 1; None for a GPU without a profile, or a shape that was fitted to."""
        if self.folder and four_fifths(case.key):
            return None
        if case.gpu not in self._profiles:
            self._profiles[case.gpu] = self._profile(case.gpu)
        profile = self._profiles[case.gpu]
        return None if profile is None else profile.predicted_ns(case) / case.measured_ns - 1

    def _profile(self, gpu: str) -> BurstProfile | None:
        shipped = [load_profile(name) for name in profile_names()]
        found = next((profile for profile in shipped if is_of(profile, gpu)), None)
        if found is None:
            return None
        if self.folder is None:
            return BurstProfile(found)
        today = datetime.date.today().isoformat()
        return BurstProfile(blocks_from_folder(self.folder, found, today, LIKE.get(found.name, ""), four_fifths))


def summary(errors: Iterable[float]) -> dict[str, float]:
    """How many, the median, the 90th percentile and the worst of errors, and their median with its sign."""
    own = np.array(list(errors))
    sizes = np.abs(own)
    found = {"median": np.median(sizes), "p90": np.quantile(sizes, 0.9), "worst": sizes.max(), "bias": np.median(own)}
    return {"rows": len(own), **{name: round(float(value), 4) for name, value in found.items()}}


#: median and 90th percentile, of bfloat16 on A100, H100, H200 and B200
TARGETS = {
    ("products", "m, n, k of 256 or more"): (0.04, 0.12), ("products", "all"): (0.08, 0.25),
    ("attention, causal", "all"): (0.06, 0.20), ("attention, no mask", "all"): (0.06, 0.20),
}  # fmt: skip
TARGETED = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM5-141GB", "B200-SXM6-180GB")


def target_of(gpu: str, dtype: str, family: str, size: str) -> tuple[float, float] | None:
    """What a group's median and 90th percentile should be at most."""
    return TARGETS.get((family, size)) if dtype == "bfloat16" and gpu in TARGETED else None


def is_shown(case: MeasuredCall) -> bool:
    """Whether a page draws it beside its prediction: one layer of products in bfloat16, one of attention."""
    if case.dtype != "bfloat16":
        return False
    is_layer = case.family == "products" and case.key[1:] == (8192, 8192) and case.key[0] >= 16
    return is_layer or (case.family == "attention, causal" and case.key[3:6] == (32, 8, 128) and case.key[0] <= 4)


def report(
    cases: Iterable[MeasuredCall], predictor: Predictor, shown: list[Any] | None = None,
    not_read: Counter[str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each GPU, dtype, family and size class; and, of what several softwares measured, for each of them.

    shown: takes single cases for the page, [GPU, software, shape, measured µs, predicted µs]. not_read: takes why
    nothing is predicted of a case of a known GPU.
    """
    errors: dict[tuple[str, ...], list[float]] = {}
    for case in cases:
        try:
            error = predictor.error(case)
        except (ArithmeticError, AssertionError, AutoparError, LookupError, TypeError, ValueError) as failed:
            error, reason = None, f"{case.family}: {type(failed).__name__}: {failed}"
            if not_read is not None:
                not_read[reason[:160]] += 1
        if error is None:
            continue
        if shown is not None and is_shown(case):
            times = (round(ns / 1000, 2) for ns in (case.measured_ns, case.measured_ns * (1 + error)))
            shown.append([case.gpu, case.kernel or case.software, list(case.key), *times])
        software = case.kernel or case.software
        base = case.gpu, case.dtype, case.family
        names = [(*base, size, own) for size in {case.size, "all"} - {""} for own in {software, ""}]
        for name in names if case.is_trusted else [(*base, "all", f"{software} (distrusted)")]:
            errors.setdefault(name, []).append(error)
    columns = ("gpu", "dtype", "family", "size", "software")
    return [
        {**dict(zip(columns, name, strict=True)), **summary(own), "target": target_of(*name[:4])}
        for name, own in sorted(errors.items())
    ]


# Command --------------------------------------------------------------------


def main() -> None:
    """Prints the summary, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FOLDER_OR_FILE")
    parser.add_argument("--cross-validate", action="store_true", help="without a fifth of the shapes; takes one folder")
    parser.add_argument("--gpu", action="append", default=[], help="only GPUs whose name begins so")
    parser.add_argument("--output", type=Path, help="NAME: writes NAME.json and NAME.md")
    options = parser.parse_args()
    files = [file for path in options.paths for file in (sorted(path.glob("*.csv*")) if path.is_dir() else [path])]
    folder = options.paths[0] if options.cross_validate else None
    rows = (row for file in files for row in rows_of(file) if "gpu" in row and "time_us" in row)
    wanted = (row for row in rows if not options.gpu or row["gpu"].startswith(tuple(options.gpu)))
    shown: list[Any] = []
    not_read: Counter[str] = Counter()
    found = report(cases_of(wanted, not_read), Predictor(folder), shown, not_read)
    text = markdown(found)
    print(text)
    for reason, count in not_read.most_common():
        print(f"{count:6} rows without a prediction: {reason}")
    if options.output:
        write_record(options.output, facts("benchmarks.accuracy.gpu_operators"), {"rows": found, "shown": shown}, text)


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of all rows but those of one software alone."""
    shown = [row for row in rows if not row["software"] or "distrusted" in row["software"]]
    lines = [
        f"| {row['gpu']} | {row['dtype']} | {row['family']} | {row['size']}{row['software'] and ', '}{row['software']} "
        f"| {row['rows']:,} | {row['median']:.1%} | {row['p90']:.1%} | {row['worst']:.0%} | {row['bias']:+.1%} "
        f"| {_told(row)} |"
        for row in shown
    ]
    head = "| GPU | dtype | family | size | rows | median error | 90th percentile | worst | bias | target |"
    return "\n".join([head, f"|{' --- |' * 10}", *lines])


def _told(row: Mapping[str, Any]) -> str:
    """The targets of a group, and whether it meets them."""
    if not row["target"] or row["software"]:
        return ""
    is_met = row["median"] <= row["target"][0] and row["p90"] <= row["target"][1]
    return f"{row['target'][0]:.0%}, {row['target'][1]:.0%}: {'met' if is_met else 'missed'}"


if __name__ == "__main__":
    main()
