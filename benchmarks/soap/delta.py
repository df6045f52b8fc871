"""Delta simulation against full simulation: equal on 10,000 random proposals, and how much faster.

    python -m benchmarks.soap.delta [--proposals 10000] [--timed 100] [--output benchmarks/soap/delta.json]

A proposal changes the placements of one operator, how one tensor is stored, or what is computed again, in one layer or
in all equal ones; half of them are taken, so that plans drift far from the templates that they began with. Equal means:
step time, breakdown, exposed time by kind, bytes by collective, peak memory and what it consists of, every task; and,
asked whether a step is within a time, or its peak within a limit, drawn around what is true, the answer is that of the
whole.

Timed is a GPT of 32 layers on 64 and on 8 devices. One proposal after another is simulated whole (from plan and graph
to step time and peak), then by its difference to those before; a tenth of them are taken. Times are those
of a core, without the garbage collector, which both leave off. FlexFlow's delta simulation was 2.2 to 6.9 times as fast
as its full one (MLSys'19, table 4).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.ir.plan import Plan
from autopar.simulate import Timeline
from autopar.simulate.incremental import Incremental, simulate_whole
from benchmarks.facts import facts, write_record
from benchmarks.simulate.run import SMALL
from benchmarks.soap.cases import CASES, Case, Start, start
from benchmarks.soap.proposals import Proposer
from models import gpt

TIMED: dict[str, tuple[Case, int]] = {
    "64 devices": (Case(gpt, SMALL, {"dp": 16, "tp": 4}, slowdown=1.0), 8),
    "8 devices": (Case(gpt, SMALL, {"dp": 4, "tp": 2}, slowdown=1.0), 1),
}
STORES = 0.2  # of proposals, those that change how a tensor is stored
PARTS = (0.5, 0.9, 0.97, 0.999, 1.0, 1.001, 1.2)  # of a step and of its peak that are asked for


def main() -> None:
    """Compares, measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proposals", type=int, default=10000)
    parser.add_argument("--timed", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    timed = [_timed(name, equal, options.timed) for name in TIMED for equal in (False, True)]
    count, more = divmod(options.proposals, len(CASES))
    compared = [_compared(name, count + (number < more)) for number, name in enumerate(CASES)]
    total, differ = (sum(row[key] for row in compared) for key in ("proposals", "differ"))
    print(f"{total} proposals, {differ} differ from full simulation")
    if options.output:
        rows = {"proposals": total, "differ": differ, "timed": timed, "compared": compared}
        write_record(options.output, facts("benchmarks.soap.delta"), rows)


# Equality ----------------------------------------


def differences(full: Timeline, delta: Timeline) -> list[str]:
    """What is not equal of a step."""
    names = ("step_time_ns", "breakdown", "exposed", "comm_bytes", "peak_bytes", "memory_at_peak", "events")
    return [name for name in names if getattr(full, name) != getattr(delta, name)]


def bounds_broken(full: Timeline, incremental: Incremental, plan: Plan, part: float) -> list[str]:
    """What is not so of a plan's step within a part of its time, and of its peak above that part of it."""
    until_ns, limit_bytes = int(full.step_time_ns * part), int(full.peak_bytes * part)
    said = incremental.step_time_ns(plan, until_ns)
    is_right = min(until_ns + 1, full.step_time_ns) <= said <= full.step_time_ns
    over = incremental.excess_bytes(plan, limit_bytes)
    return ["until"] * (not is_right) + ["excess"] * (over != max(0, full.peak_bytes - limit_bytes))


def _compared(name: str, count: int) -> dict[str, Any]:
    """Random proposals of a case, simulated both ways."""
    graph, profile, walk = _walk(start(CASES[name]), count, seed=1, taken=0.5)
    incremental, differ, rng = Incremental(graph, profile), 0, random.Random(1)
    for plan in walk():
        full = simulate_whole(graph, plan, profile)
        found = bounds_broken(full, incremental, plan, rng.choice(PARTS))
        found += differences(full, incremental.timeline(plan))
        if found:
            differ += 1
            print(f"{name}: {found}")
    row = {"case": name, "proposals": count, "differ": differ, "as_a_whole": incremental.num_whole}
    print(row, flush=True)
    return row


def _walk(begin: Start, count: int, seed: int, taken: float, equal: bool | None = None) -> Any:
    """Graph and devices, and proposals one after another."""
    part, plan, profile = begin

    def proposals() -> Any:
        proposer, rng, current = Proposer(part, plan, seed), random.Random(seed), plan
        yield plan
        for _ in range(count - 1):
            proposal = proposer.propose(current, rng.random() < 0.5 if equal is None else equal, STORES)
            yield proposal
            current = proposal if rng.random() < taken else current

    return part.graph, profile, proposals


# Time ----------------------------------------


def _timed(name: str, equal: bool, count: int) -> dict[str, Any]:
    case, num_nodes = TIMED[name]
    graph, profile, walk = _walk(start(case, num_nodes), count + 1, seed=3, taken=0.1, equal=equal)
    incremental = Incremental(graph, profile)
    rows = []
    for number, plan in enumerate(walk()):
        full = _seconds(lambda plan=plan: simulate_whole(graph, plan, profile).peak_bytes)  # type: ignore[misc]
        delta = _seconds(lambda plan=plan: incremental.step_time_ns(plan))  # type: ignore[misc]
        peak = _seconds(lambda plan=plan: incremental.peak_bytes(plan))  # type: ignore[misc]
        if number:
            rows.append((full, delta, peak))
    full, delta, peak = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
    row = {
        "devices": name, "changed": "all equal layers" if equal else "one layer", "proposals": count,
        "full_ms": round(full, 2), "delta_ms": round(delta, 2),
        "peak_ms": round(peak, 2),
        "times_as_fast": round(statistics.median(f / d for f, d, _ in rows), 1),
        "times_as_fast_with_peak": round(statistics.median(f / (d + p) for f, d, p in rows), 1),
    }  # fmt: skip
    print(row, flush=True)
    return row


def _seconds(function: Callable[[], int]) -> float:
    """Of a core."""
    gc.collect(0)
    gc.disable()
    begin = time.process_time()
    function()
    spent = time.process_time() - begin
    gc.enable()
    return spent


if __name__ == "__main__":
    main()
