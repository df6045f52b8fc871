"""Predicted beside measured training iterations of GPUs, whole steps and peaks of memory.

    python -m benchmarks.accuracy.gpu FILES… [--models CSV] [--source S] [--gpu G] [--every N] [--fast]
        [--profile GPU=NAME…] [--cross-validate] [--fit ROUNDS] [--constants NAME…] [--odds] [--output FILE]

FILES: CSVs of measured configurations (`rows`), plain or gzipped. Each row becomes the plan that `template_plan` makes
of it, on the model as its software computes it (`decoder`), and is simulated with the shipped profile of its GPU joined
by its software's facts (`softwares`). Every row is predicted, or listed with the reason why not, whatever it says.
--profile: of a GPU that none is shipped of (or in its place), by the rows' name for it, a profile's name or file.

--fit goes on from the shipped constants (`fitting`), fits them to the rows whose time is known (of a grid, to runs that
reach half of their cell's best), and writes softwares.json and the clocks in cost_profiles. --cross-validate fits
without the rows of each model, and of each source, in turn, and reports the errors of these. --constants names those
that are fitted (an owner, a dot, a constant: gb200.clock, nemo.matmul+attention); the others stay as they are.

Printed and written to --output: of each source the mean absolute error (MAPE), the median signed error, the worst, the
rank correlation and the memory's error; how many rows lie in their 90% intervals (`odds`; --odds writes how sure steps
are into cost_profiles); of a grid of plans the same for each cell, with the regret of the plan that is
predicted fastest, and what was said of the memory of runs that finished and of those that did not.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from autopar.cost import Profile
from autopar.errors import AutoparError
from autopar.profiler import load_profile
from benchmarks.accuracy.gpu.fitting import cross_validated, fit
from benchmarks.accuracy.gpu.odds import steps_blocks, write_steps
from benchmarks.accuracy.gpu.plans import GIVEN, profiles_of
from benchmarks.accuracy.gpu.predictions import Planned, Predicted, planned, predicted
from benchmarks.accuracy.gpu.reports import printed, written
from benchmarks.accuracy.gpu.rows import Row, read_rows
from benchmarks.accuracy.gpu.scores import fast_runs
from benchmarks.accuracy.gpu.softwares import Software, read_softwares, write_softwares

PROFILES = Path(__file__).parents[3] / "cost_profiles"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.gpu", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+", metavar="FILES")
    parser.add_argument("--models", type=Path, help="sizes of the models; by default models.csv beside each file")
    parser.add_argument("--source", default="", help="only rows whose source has this in its name")
    parser.add_argument("--gpu", default="", help="only rows whose GPU has this in its name")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th row of each file")
    parser.add_argument("--fast", action="store_true", help="of a grid, only runs that reach half of their cell's best")
    parser.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="fit the constants and write them")
    parser.add_argument("--constants", nargs="+", default=(), metavar="NAME", help="fit these and leave all others")
    parser.add_argument("--profile", nargs="+", default=(), metavar="GPU=NAME", help="a GPU's profile, or its file")
    parser.add_argument("--cross-validate", action="store_true", help="leave out each model and each source in turn")
    parser.add_argument("--odds", action="store_true", help="write the spread of whole steps into the profiles")
    parser.add_argument("--output", type=Path, help="a file for every row as JSON")
    options = parser.parse_args(arguments)
    if options.output and options.output.is_dir():
        parser.error(f"expected a file for --output, found the folder {options.output}: name a file in it")
    try:
        GIVEN.clear()
        GIVEN.update({gpu: known_profile(name) for gpu, _, name in (text.partition("=") for text in options.profile)})
        options.rows = rows_of(options)
    except (AutoparError, OSError, ValueError, EOFError, csv.Error) as error:
        parser.error(str(error))
    return options


def known_profile(name: str) -> tuple[str]:
    """As `GIVEN` has it. Raises AutoparError where there is no such profile."""
    load_profile(name)
    return (name,)


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Those of all files that were asked for."""
    found = []
    for path in options.csv:
        rows = [row for row in read_rows(path, options.models) if options.source.lower() in row.source.lower()]
        rows = [row for row in rows if options.gpu.lower() in row.gpu.lower()]
        found += (reaching_half(rows) if options.fast else rows)[:: options.every]
    return found


def reaching_half(rows: list[Row]) -> list[Row]:
    """Without runs of a grid that are slower than half of their cell's best."""
    fast = {item.row.id for item in fast_runs(Predicted(row) for row in rows)}
    return [row for row in rows if not row.cell or row.id in fast]


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the predictions."""
    started, options = time.process_time(), _options(arguments)
    softwares, rows = read_softwares(), options.rows
    profiles = profiles_of(rows)
    items: Iterable[Planned] = planned(rows, softwares)
    left_out: dict[str, dict[str, float]] = {}
    if options.fit or options.cross_validate:
        items = list(items)
        fails = {(row.source, row.id) for row in _without_prediction(items, softwares, profiles)}
        chosen = [item for item in worth_fitting(items) if (item.row.source, item.row.id) not in fails]
        if options.fit:
            told = f"{len(chosen)} rows by {' '.join(_flags(options))}"
            softwares, profiles = fit(chosen, softwares, profiles, options.fit, told, options.constants)
            write_constants(softwares, profiles)
    predictions = [predicted(item, softwares, profiles) for item in items]
    if options.cross_validate:
        known = {item.row.id: item.seconds for item in predictions}
        left_out = cross_validated(chosen, softwares, profiles, options.constants, known)
    seconds = round(time.process_time() - started)
    print(printed(predictions, left_out, seconds))
    if options.odds:
        write_steps(PROFILES, steps_blocks(predictions, left_out.get("model", {})))
    if options.output:
        command = " ".join([*(path.name for path in options.csv), *_flags(options)])
        options.output.write_text(written(predictions, left_out, command, seconds), encoding="utf-8")
    return 0


def _without_prediction(
    items: Iterable[Planned], softwares: tuple[Software, ...], profiles: Mapping[str, Profile]
) -> list[Row]:
    """Planned rows that cannot be simulated, which no constant can be fitted to."""
    return [item.row for item in items if predicted(item, softwares, profiles).reason]


def _flags(options: argparse.Namespace) -> list[str]:
    given = {"--source": options.source, "--gpu": options.gpu, "--every": options.every if options.every > 1 else ""}
    given |= {"--fit": options.fit or "", "--constants": " ".join(options.constants)}
    found = [f"{name} {value}" for name, value in given.items() if value]
    return [*found, *(["--fast"] if options.fast else []), *(["--cross-validate"] if options.cross_validate else [])]


def worth_fitting(items: Iterable[Planned]) -> list[Planned]:
    """Those whose time is known; of a grid's cell the runs that reach half of its best."""
    known = [item for item in items if item.plan is not None and item.row.measured_s]
    fast = {(item.row.source, item.row.id) for item in fast_runs(Predicted(item.row) for item in known)}
    return [item for item in known if not item.row.cell or (item.row.source, item.row.id) in fast]


def write_constants(softwares: tuple[Software, ...], profiles: Mapping[str, Profile]) -> None:
    """Writes softwares.json, and each device's sustained clock into its profile."""
    write_softwares(softwares)
    for path in sorted(PROFILES.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        profile = profiles.get(data.get("name", "")) or next(
            (profiles[alias] for alias in data.get("aliases", ()) if alias in profiles), None
        )
        if profile is not None:
            write_clock(path, profile.facts.sustained_clock)


def write_clock(path: Path, clock: float) -> None:
    """Writes one number of a profile's facts, and leaves the rest of the file as it is."""
    text = re.sub(r',\n *"sustained_clock": [\d.]+', "", path.read_text(encoding="utf-8"))
    path.write_text(re.sub(r'("overlap_slowdown": [\d.]+)', rf'\1,\n    "sustained_clock": {clock}', text, count=1))


if __name__ == "__main__":
    sys.exit(main())
