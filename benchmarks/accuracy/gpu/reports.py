"""What is printed of predictions, and what is written of them."""

from __future__ import annotations

import datetime
import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.profiler.text import profile_text
from benchmarks.accuracy.gpu.odds import calibration
from benchmarks.accuracy.gpu.predictions import Predicted
from benchmarks.accuracy.gpu.scores import Figures, by_cell, by_source, by_source_left_out, error, of_grid, scored

GB = 10**9
COUNTS = ("rows", "memory rows", "cells", "cells of 10 runs or more", "runs that did not finish",
          "failed runs that no other excuses")  # fmt: skip
LeftOut = Mapping[str, Mapping[str, float]]
PLAIN = ("spearman", "least spearman")


def printed(items: Sequence[Predicted], left_out: LeftOut, seconds: int) -> str:
    """Tables by source and by cell, and the reasons of what was not predicted. left_out: errors of rows by their ids,
    under constants that were fitted without them, by what was left out together."""
    parts = [_table("source", by_source(items))]
    parts += [_table(f"{what} left out", by_source_left_out(items, errors)) for what, errors in left_out.items()]
    parts += [_table("cell", by_cell(items)), calibration(items, left_out.get("model", {})), ""]
    parts += [f"{name}: {_text(name, value)}" for name, value in of_grid(items).items()]
    parts += ["", "not predicted:", *_reasons(items)] if any(item.reason for item in items) else []
    predictions = sum(not item.reason for item in items)
    parts += [f"{len(items)} rows were read: {predictions} are predicted, {len(items) - predictions} are not (above)"]
    return "\n".join([*filter(None, parts), f"{len(scored(items))} rows; {seconds} s of processor time"])


def _table(title: str, figures: Mapping[str, Figures]) -> str:
    if not figures:
        return ""
    columns = list(dict.fromkeys(name for own in figures.values() for name in own))
    lines = [f"{title:64}" + "".join(f"{name:>15}" for name in columns)]
    for name, own in figures.items():
        cells = (_text(column, own[column]) if column in own else "" for column in columns)
        lines.append(f"{name[:64]:64}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join([*lines, ""])


def _text(name: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    if name in COUNTS:
        return f"{value:.0f}"
    return f"{value:.4f}" if name in PLAIN else f"{value:.2%}"


def _reasons(items: Sequence[Predicted]) -> list[str]:
    counts = Counter((item.row.source, item.reason) for item in items if item.reason)
    return [f"{count:5} of {source}: {reason[:160]}" for (source, reason), count in counts.most_common()]


# The file ----------------------------------------


def written(items: Sequence[Predicted], left_out: LeftOut, files: str, seconds: int) -> str:
    """The JSON of --output, every row in it."""
    rows = [_row(item) for item in items if not item.reason]
    reasons = [[item.row.id, item.row.source, item.reason] for item in items if item.reason]
    columns = ["id", "software", "gpu", "gpus", "model", "plan", "measured_s", "predicted_s", "error", "measured_GB",
               "predicted_GB", "needed_GB", "fits"]  # fmt: skip
    data = {
        "command": f"python -m benchmarks.accuracy.gpu {files}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
        "processor_seconds": seconds,
        "sources": by_source(items),
        "left_out": {what: by_source_left_out(items, errors) for what, errors in left_out.items()},
        "cells": by_cell(items),
        "grid": of_grid(items),
        "rows": [columns, *rows],
        "not_predicted": reasons,
    }
    return profile_text(_without_nan(data)) + "\n"


def _row(item: Predicted) -> list[Any]:
    row = item.row
    return [
        row.id, row.framework, row.gpu, row.gpus, row.model, f"seq{row.seq} {row.precision} {row.plan_text}",
        row.measured_s and round(row.measured_s, 4), round(item.seconds, 4),
        round(error(item), 4) if row.measured_s else None, row.memory_bytes and round(row.memory_bytes / GB, 2),
        round(item.reserved_bytes / GB, 2), round(item.needed_bytes / GB, 2), item.fits,
    ]  # fmt: skip


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
