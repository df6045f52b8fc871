"""A rank that is slower than the others by a stated factor: seen, given less to do, and what that gains, measured.

    python -m benchmarks.elastic.slow [--steps 12]

Ranks of gloo on this host run real programs, data parallel, a node each. A rank's device is as slow as is stated: for
each of its rows it sleeps, since ranks that share cores cannot be told how fast to compute. From the own times that
`OwnTime` takes in these steps, as train.py logs them, `autopar rebalance` finds who is slow and plans anew; the new
plan's program is run on the same ranks. Seconds are of steps, in the median. Written to slow.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.ir.placement import part_length
from autopar.ladders.stores import StateStore
from autopar.ladders.stragglers import rebalanced, slowness
from benchmarks.facts import facts, write_record
from models import mlp
from tests.ladder.slow_ranks import own_seconds
from tests.rank_pool import RankPool

FILE = Path(__file__).with_name("slow")
ROW_S = 0.004
BATCH = 480
CASES = ((1.0, 2.0), (1.0, 3.0), (1.0, 1.0, 1.5, 1.0), (1.0, 1.0, 2.0, 1.0), (1.0, 1.0, 3.0, 1.0))
"""By rank, how many times as long a row takes."""
STEPS_LEFT = 10_000


def measured(pool: RankPool, program: autopar.Program, times: tuple[float, ...], steps: int) -> Any:
    """Own seconds of ranks, seconds of steps, and the rows of each rank."""
    rows = rows_of(program.plan)
    own, spent = pool.run(own_seconds, program.source, rows, [ROW_S * one for one in times], steps)[0]
    return own, spent, rows


def rows_of(plan: autopar.Plan) -> tuple[int, ...]:
    """Of the batch, of each rank of a data-parallel plan."""
    (stage,) = plan.stages
    (axis,) = stage.axes
    return tuple(part_length(BATCH, axis, index) for index in range(axis.size))


def row(times: tuple[float, ...], steps: int) -> dict[str, Any]:
    """One case."""
    torch.manual_seed(0)
    config = mlp.Config((64, 1024, 1024, 16), batch_size=BATCH)
    model, inputs = mlp.build(config), mlp.example_inputs(config)
    mesh, pool = autopar.Mesh("cpu", nodes=len(times)), RankPool(len(times))
    plan = autopar.template_plan(model, mesh, inputs, dp=len(times))
    before = autopar.parallelize(model, mesh, inputs, plan=plan, check=False)
    own, spent, rows = measured(pool, before, times, steps)
    report = slowness(own[1:], spent[1:])
    with tempfile.TemporaryDirectory() as folder:
        found = rebalanced(plan, model, inputs, report, STEPS_LEFT, folder, store=StateStore(restart_s=20.0))
        assert found.plan is not None, found.reason
        after = autopar.parallelize(model, found.plan.mesh, inputs, plan=found.plan, check=False)
    _, then, new_rows = measured(pool, after, times, steps)
    pool.stop()
    now_s, then_s = statistics.median(spent[1:]), statistics.median(then[1:])
    return {"times": times, "seen": report.times, "rows": rows, "new_rows": new_rows, "now_s": now_s,
            "expected_s": found.then_s, "then_s": then_s, "is_worth_it": found.is_worth_it}  # fmt: skip


def text(rows: list[dict[str, Any]]) -> str:
    heads = ("stated", "seen", "rows", "new rows", "step s", "expected s", "measured s", "gain", "decision")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in rows:
        cells = (*(", ".join(f"{value:g}" for value in one[key]) for key in ("times", "seen", "rows", "new_rows")),
                 f"{one['now_s']:.3f}", f"{one['expected_s']:.3f}", f"{one['then_s']:.3f}",
                 f"{1 - one['then_s'] / one['now_s']:.0%}", "go over" if one["is_worth_it"] else "stay")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    steps, rows = parser.parse_args().steps, list[dict[str, Any]]()
    for times in CASES:
        rows.append(row(times, steps))
        print(rows[-1], flush=True)
    told = f"{ROW_S * 1e3:g} ms a row where the factor is 1, {BATCH} rows; decisions for {STEPS_LEFT:,} steps left."
    write_record(FILE, facts("benchmarks.elastic.slow"), {"rows": rows}, f"{told}\n\n{text(rows)}")


if __name__ == "__main__":
    main()
