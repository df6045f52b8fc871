"""Predicted beside measured training iterations of GPUs, whole steps and peaks of memory.

    python -m benchmarks.accuracy.gpu FILES… [--models CSV] [--source S] [--output FILE]

FILES: CSVs of measured configurations (`rows`), plain or gzipped. Each row becomes the plan that `template_plan` makes
of it, on the model as its software computes it (`decoder`), and is simulated with the shipped profile of its GPU joined
by its software's facts (`softwares`). Rows that cannot be expressed are listed with the reason.

Printed and written to --output: of each source the mean absolute error (MAPE), the median signed error, the worst, the
rank correlation and the memory's error; of a grid of plans the same for each cell, with the regret of the plan that is
predicted fastest, and what was said of the memory of runs that finished and of those that did not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.accuracy.gpu.plans import profiles_of
from benchmarks.accuracy.gpu.predictions import Predicted, planned, predict
from benchmarks.accuracy.gpu.reports import printed, written
from benchmarks.accuracy.gpu.rows import Row, read_rows
from benchmarks.accuracy.gpu.softwares import read_softwares


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.gpu", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+", metavar="FILES")
    parser.add_argument("--models", type=Path, help="sizes of the models; by default models.csv beside each file")
    parser.add_argument("--source", default="", help="only rows whose source has this in its name")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th row of each file")
    parser.add_argument("--output", type=Path, help="a file for every row as JSON")
    options = parser.parse_args(arguments)
    if options.output and options.output.is_dir():
        parser.error(f"expected a file for --output, found the folder {options.output}: name a file in it")
    return options


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Those of all files that were asked for."""
    found = []
    for path in options.csv:
        rows = [row for row in read_rows(path, options.models) if options.source.lower() in row.source.lower()]
        found += rows[:: options.every]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes the predictions."""
    options, started = _options(arguments), time.process_time()
    softwares, rows = read_softwares(), rows_of(options)
    profiles = profiles_of(rows)
    predictions: list[Predicted] = [predict(item, softwares, profiles) for item in planned(rows, softwares)]
    seconds = round(time.process_time() - started)
    print(printed(predictions, seconds))
    if options.output:
        command = " ".join(path.name for path in options.csv)
        options.output.write_text(written(predictions, command, seconds), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
