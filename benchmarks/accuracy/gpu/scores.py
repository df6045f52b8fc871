"""How good predictions are: by source, and by cell of a grid of plans."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.profiler import load_profile
from benchmarks.accuracy.gpu.plans import profile_name
from benchmarks.accuracy.gpu.predictions import Predicted
from benchmarks.accuracy.gpu.rows import Row

HALF = 0.5  # of a cell's best speed: slower runs are of no interest, and many of them are slow for reasons of software
TOO_LITTLE = 0.97  # of the memory that a run took: a prediction below it is one that does not warn
FEW = 10  # runs of a cell below which its rank correlation says little

Figures = Mapping[str, float]


def scored(items: Iterable[Predicted]) -> list[Predicted]:
    """Those with a time on both sides."""
    return [item for item in items if not item.reason and item.row.measured_s]


def error(item: Predicted) -> float:
    """Of the step time, relative."""
    assert item.row.measured_s
    return item.seconds / item.row.measured_s - 1


def memory_error(item: Predicted) -> float:
    """Of the memory, relative."""
    assert item.row.memory_bytes
    return item.reserved_bytes / item.row.memory_bytes - 1


def margin(item: Predicted) -> float:
    """What a run is said to need at most over what it took, less one."""
    assert item.row.memory_bytes
    return item.needed_bytes / item.row.memory_bytes - 1


def summary(items: Sequence[Predicted]) -> Figures:
    """Of one group of rows: median is of signed errors, the others are of their size."""
    errors = np.array([error(item) for item in items])
    times = [[item.seconds for item in items], [item.row.measured_s or 0.0 for item in items]]
    memory = np.array([memory_error(item) for item in items if item.row.memory_bytes])
    found = {
        "rows": len(items), "mape": np.mean(np.abs(errors)), "median": np.median(errors),
        "worst": np.max(np.abs(errors)), "spearman": spearman(*times),
    }  # fmt: skip
    if len(memory):
        found |= {"memory rows": len(memory), "memory": np.mean(np.abs(memory)), "memory median": np.median(memory)}
    return rounded(found)


def rounded(figures: Mapping[str, Any]) -> Figures:
    """For people, and for files that are compared."""
    return {name: round(float(value), 4) for name, value in figures.items()}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of the ranks; ties share their mean rank."""
    if len(first) < 2 or len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    values = [np.array(first), np.array(second)]
    ranks = [np.array([np.mean(np.flatnonzero(np.sort(x) == v)) for v in x]) for x in values]
    return float(np.corrcoef(*ranks)[0, 1])


def by(items: Iterable[Predicted], key: Callable[[Predicted], str]) -> dict[str, list[Predicted]]:
    """In groups, in the order of their names."""
    found: dict[str, list[Predicted]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return dict(sorted(found.items()))


def by_source(items: Sequence[Predicted]) -> dict[str, Figures]:
    """Of each source and GPU, precisions apart; of a grid, the runs that reach half of their cell's best."""
    chosen = [item for item in scored(items) if not item.row.cell] + fast_runs(items)
    groups = by(chosen, lambda item: f"{item.row.source}, {item.row.gpu}, {item.row.precision}")
    return {name: summary(group) for name, group in groups.items()}


def by_source_left_out(items: Sequence[Predicted], errors: Mapping[str, float]) -> dict[str, Figures]:
    """The same under other errors, by the rows' ids."""
    chosen = [
        replace(item, seconds=(1 + errors[item.row.id]) * (item.row.measured_s or 0.0))
        for item in scored(items) if item.row.id in errors
    ]  # fmt: skip
    groups = by(chosen, lambda item: f"{item.row.source}, {item.row.gpu}, {item.row.precision}")
    return {name: summary(group) for name, group in groups.items()}


# A grid of plans ----------------------------------------


def fast_runs(items: Iterable[Predicted]) -> list[Predicted]:
    """Of each cell, those that reach half of its best speed."""
    found = []
    for group in by((item for item in scored(items) if item.row.cell), lambda item: item.row.cell).values():
        best = min(item.row.measured_s or math.inf for item in group)
        found += [item for item in group if (item.row.measured_s or math.inf) * HALF <= best]
    return found


def by_cell(items: Sequence[Predicted]) -> dict[str, Figures]:
    """Of each cell: the fast runs' errors and rank correlation, and the regret of the plan predicted fastest."""
    fast = by(fast_runs(items), lambda item: item.row.cell)
    cells = by((item for item in items if item.row.cell and not item.reason), lambda item: item.row.cell)
    found = {}
    for name, group in cells.items():
        if name in fast:
            own = summary(fast[name])
            kept = {key: own[key] for key in ("rows", "mape", "median", "worst", "spearman")}
            found[name] = {**kept, **rounded({"regret": regret(group), "of the fastest": regret(group, 0.0)})}
    return found


def regret(items: Sequence[Predicted], resolution: float | None = None) -> float:
    """How much slower the plan that is taken ran than the fastest, among finished ones with ZeRO-1 or dp=1: `taken`.
    resolution: by how much predicted steps must differ to be told apart; the device's profile says it where not given.
    Of the one predicted fastest, whatever may hold it up, where it is 0.
    """
    done = [item for item in scored(items) if item.row.zero == 1 or item.row.dp == 1]
    if not done:
        return math.nan
    apart = resolution_of(done[0]) if resolution is None else resolution
    done = [replace(item, held_s=0.0) for item in done] if resolution == 0.0 else done
    return (taken(done, apart).row.measured_s or 0.0) / min(item.row.measured_s or math.inf for item in done) - 1


def taken(items: Sequence[Predicted], resolution: float) -> Predicted:
    """The plan that one takes: of those that are not said to be tight, while there are any, and that the profile cannot
    tell from the one expected to be fastest, the one with the fewest turns; of equal ones the fastest. Expected is what
    is predicted and what a software's runs are held up for on so many nodes.

    What is in no prediction (a slow rank, a link that is shared, a host that has something else to do) holds up a turn
    of all ranks, so fewer turns are safer where predictions do not say more.
    """
    wide = [item for item in items if not item.is_tight] or list(items)
    most = min(expected_s(item) for item in wide) * (1 + resolution)
    near = (item for item in wide if expected_s(item) <= most)
    return min(near, key=lambda item: (item.row.turns, expected_s(item)))


def expected_s(item: Predicted) -> float:
    """A step's time, with what it is expected to be held up."""
    return item.seconds + item.held_s


def resolution_of(item: Predicted) -> float:
    """Of the row's device; 0 where its profile does not say how sure steps are."""
    steps = load_profile(profile_name(item.row.gpu)).steps
    return steps.resolution if steps else 0.0


def of_grid(items: Sequence[Predicted]) -> Figures:
    """Of all cells together: regret, memory of finished runs, and what is said of those that did not finish."""
    grid = [item for item in items if item.row.cell and not item.reason]
    if not grid:
        return {}
    cells = by_cell(items)
    regrets = [figures["regret"] for figures in cells.values() if not math.isnan(figures["regret"])]
    large = [figures for figures in cells.values() if figures["rows"] >= FEW]
    known = [item for item in grid if item.row.measured_s and item.row.memory_bytes]
    memory = np.array([memory_error(item) for item in known])
    failed = [item for item in grid if not item.row.measured_s]
    found = {
        "cells": len(cells), "cells of 10 runs or more": len(large),
        "worst mape": max((figures["mape"] for figures in large), default=math.nan),
        "least spearman": min((figures["spearman"] for figures in large), default=math.nan),
        "memory rows": len(known), "runs that did not finish": len(failed),
    }  # fmt: skip
    if regrets:
        found |= {"median regret": np.median(regrets), "worst regret": max(regrets)}
        fastest = [figures["of the fastest"] for figures in cells.values() if not math.isnan(figures["of the fastest"])]
        found |= {"median regret of the fastest": np.median(fastest), "worst of these": max(fastest)}
    if known:
        found |= {"memory": np.mean(np.abs(memory)), "memory median": np.median(memory)}
        margins = np.array([margin(item) for item in known])
        found |= {"said to need < 97%": np.mean(margins < TOO_LITTLE - 1), "margin of what is needed": margins.mean()}
        fast = [item for item in fast_runs(items) if item.row.memory_bytes]
        found |= {"memory of fast runs": np.mean([abs(memory_error(item)) for item in fast])}
        found |= {"fast runs said to need < 97%": np.mean([margin(item) < TOO_LITTLE - 1 for item in fast])}
    if failed:
        found["said to fit of these"] = np.mean([item.fits for item in failed])
        full = [item for item in failed if not any(needs_no_more(item.row, other.row) for other in known)]
        found["failed runs that no other excuses"] = len(full)
        found["said to fit of those"] = np.mean([item.fits for item in full]) if full else math.nan
    return rounded(found)


def needs_no_more(row: Row, other: Row) -> bool:
    """Whether a run's ranks hold no more than those of another one, so that where that ran, it was not for memory that
    this one did not: no larger micro batches, no more of them in flight, no more of the optimizer's state."""
    alike = (row.source, row.gpu, row.model, row.seq, row.pp) == (
        other.source, other.gpu, other.model, other.seq, other.pp
    )  # fmt: skip
    flying = min(row.pp, row.microbatches) <= min(other.pp, other.microbatches)
    state = other.zero == 0 or (row.zero >= other.zero and row.dp >= other.dp)
    return alike and flying and state and row.tp >= other.tp and row.micro_batch <= other.micro_batch
