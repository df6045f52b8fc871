"""Whether intervals hold what they say: of measured rows, how many lie in their 90% intervals.

The spread of whole steps of a device is what 90% of the rows need beside what the residuals of their operators explain
(`autopar.odds`). Rows of a model are checked under the spread that the rows of all other models need. Of a grid of
plans the runs that reach half of their cell's best count, since slower ones have reasons of their software. Runs of a
software's own tests do not: their models are too small to keep a device busy, and their kernels often deterministic.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar.odds import NINE_IN_TEN
from autopar.profiler.text import profile_text
from benchmarks.accuracy.gpu.plans import profile_name
from benchmarks.accuracy.gpu.predictions import Predicted
from benchmarks.accuracy.gpu.scores import error, fast_runs, scored

SHARE = 0.9
RIGHT = 0.6745 * math.sqrt(2)  # of two normal errors' spread: so far apart, three in four pairs are in the right order
TESTS = "test settings"  # in the notes of such rows
FEW = 5  # rows of other models below which all rows say the spread


class Miss(NamedTuple):
    """A row's device, source and model, the logarithm of measured over predicted, its cell, and the variance that its
    operators explain."""

    device: str
    source: str
    model: str
    log: float
    cell: str
    variance: float

    @property
    def needs(self) -> float:
        """The variance of whole steps with which it lies just inside of its interval."""
        return max(0.0, (self.log / NINE_IN_TEN) ** 2 - self.variance)


def misses(items: Sequence[Predicted], left_out: Mapping[str, float]) -> list[Miss]:
    """Of all rows that count. left_out: errors by the rows' ids under constants fitted without their model."""
    chosen = [item for item in scored(items) if not item.row.cell] + fast_runs(items)
    chosen = [item for item in chosen if TESTS not in item.row.other]
    return [
        Miss(
            profile_name(item.row.gpu), item.row.source, item.row.model,
            -math.log1p(left_out.get(item.row.id, error(item))), item.row.cell, item.operators_variance,
        )
        for item in chosen
    ]  # fmt: skip


def needed_spread(rows: Iterable[Miss]) -> float:
    """The spread of whole steps with which 90% of the rows lie in their intervals."""
    return math.sqrt(float(np.quantile([row.needs for row in rows], SHARE, method="higher")))


def resolution(rows: Iterable[Miss]) -> float | None:
    """By how much predictions of two plans must differ to be in the right order three times in four: of rows of one
    cell, about its median; None without cells of several rows."""
    cells = [[row.log for row in own] for own in _by([row for row in rows if row.cell], "cell").values()]
    apart = [abs(log - float(np.median(own))) for own in cells if len(own) > 2 for log in own]
    return math.expm1(RIGHT * float(np.median(apart)) / 0.6745) if apart else None


def covered(rows: Sequence[Miss], apart: str = "model") -> list[bool]:
    """Of each row, in order, whether it lies in its interval under the spread of other models of its device, or of
    other sources where it has others (apart: "source")."""
    found = []
    for row in rows:
        own = [other for other in rows if other.device == row.device]
        others = [other for other in own if getattr(other, apart) != getattr(row, apart)]
        spread = needed_spread(others if len(others) >= FEW else own)
        found.append(row.log**2 <= NINE_IN_TEN**2 * (spread**2 + row.variance) + 1e-12)
    return found


def calibration(items: Sequence[Predicted], left_out: Mapping[str, float]) -> str:
    """A table by source and device, and of all: rows, the part of them in their intervals, and the device's spread."""
    rows = misses(items, left_out)
    inside, apart = (dict(zip(map(id, rows), covered(rows, by), strict=True)) for by in ("model", "source"))
    spreads = {device: needed_spread(own) for device, own in _by(rows, "device").items()}
    groups = {**_by(rows, "place"), "all": rows}
    lines = [f"{'90% intervals, models left out':64}{'rows':>8}{'inside':>10}{'spread':>10}{'sources left out':>20}"]
    for name, own in groups.items():
        share = np.mean([inside[id(row)] for row in own]) if own else math.nan
        spread = f"{spreads[own[0].device]:.2%}" if own and name != "all" else ""
        by_source = np.mean([apart[id(row)] for row in own]) if own else math.nan
        inside_text, apart_text = ("–" if math.isnan(part) else f"{part:.1%}" for part in (share, by_source))
        lines.append(f"{name[:64]:64}{len(own):8}{inside_text:>10}{spread:>10}{apart_text:>20}")
    return "\n".join(lines)


def _by(rows: Sequence[Miss], name: str) -> dict[str, list[Miss]]:
    found: dict[str, list[Miss]] = {}
    for row in rows:
        key = f"{row.source}, {row.device}" if name == "place" else getattr(row, name)
        found.setdefault(key, []).append(row)
    return dict(sorted(found.items()))


# The profiles ----------------------------------------


def steps_blocks(items: Sequence[Predicted], left_out: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """By device, the block `steps` of its profile. Where no grid was measured, three in four of two plans whose errors
    are independent are in the right order."""
    found = {}
    for device, rows in _by(misses(items, left_out), "device").items():
        spread, sources = needed_spread(rows), ", ".join(sorted({row.source for row in rows}))
        apart = resolution(rows) or math.expm1(RIGHT * spread)
        found[device] = {
            "count": len(rows), "spread": round(spread, 4), "resolution": round(apart, 4), "provenance": {
                "kind": "fitted", "date": datetime.date.today().isoformat(),
                "source": f"90% of {len(rows)} measured iterations are in their intervals: {sources}",
            },
        }  # fmt: skip
    return found


def write_steps(folder: Path, blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the blocks into the profiles of that name or alias, and leaves the rest of the files as it is."""
    for path in sorted(folder.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        names = [data.get("name", ""), *data.get("aliases", ())]
        for block in (blocks[name] for name in names if name in blocks):
            text = re.sub(r'  "steps": \{.*?\n  \},\n(?=  "operators")', "", text, flags=re.DOTALL)
            told = profile_text({"steps": block}).strip().removeprefix("{").removesuffix("}").strip()
            path.write_text(text.replace('  "operators": [', f'  {told},\n  "operators": [', 1), encoding="utf-8")
            break
