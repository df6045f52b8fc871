"""The share of a step that ranks of a pipeline stand idle, predicted and measured, for each schedule.

    python -m benchmarks.accuracy.bubble [--rounds 48] [--output benchmarks/accuracy]

Run from the root of the repository, on a machine that does nothing else and has a core for each of the two ranks.
Measured is the time of a step (with AdamW) in which a rank makes no pass, no update and no sum of gradients: it waits
for another stage. Predicted is the bubble and what sends leave exposed of the rank's lane. The profile of the host is
measured before. Rounds of the schedules alternate, and ranks change cores every round, since the cores of a rented
machine are not equally fast: a faster core shortens one rank's waiting and lengthens the other's. Told are the medians
over all rounds, and over the fastest quarter of them in each of the two assignments: what a host does beside only ever
adds waiting. Errors are those of the quarters, as a part of what is measured and in points of the step, for each rank
and for the schedule, whose bubble is the mean over its ranks. Writes bubble.json and bubble.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.program import load_source
from autopar.runtime import keep_freed_memory
from benchmarks.facts import facts, write_record
from models import gpt
from tests.rank_pool import pool

HERE = Path(__file__).parent
CONFIG = gpt.Config(vocab_size=512, seq_len=128, num_layers=4, hidden_size=256, num_heads=8, batch_size=16)
PLANS: dict[str, dict[str, Any]] = {
    schedule: {"pp": 2, "microbatches": 4, "schedule": schedule}
    for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
}
WARM_UP = 2
ALL = "all"
WITHIN = 0.1


def measure(rank: int, world: int, sources: dict[str, str], batch: dict[str, Tensor], rounds: int) -> dict[str, Any]:
    """On one rank: seconds of each step, and how much of them it was busy, by schedule."""
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    keep_freed_memory()  # as train.py does
    steps = {name: _step(source, batch) for name, source in sources.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        os.sched_setaffinity(0, {cores[(rank + number) % world]})
        for name, step in steps.items():
            dist.barrier()
            taken = step()
            if number >= WARM_UP:
                found[name].append(taken)
    os.sched_setaffinity(0, cores)
    return found


def _step(source: str, batch: dict[str, Tensor]) -> Callable[[], tuple[float, float]]:
    from autopar import runtime as rt

    rank = rt.build(load_source(source).Program)
    torch.manual_seed(0)
    for parameter in rank.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    optimizer = torch.optim.AdamW(rank.parameters(), lr=1e-4)
    clock = _Clock()
    for local in rank._locals:
        for name in ("forward", "backward", "backward_of_inputs", "backward_of_leaves", "begin_step", "end_step"):
            setattr(local, name, clock.watched(getattr(local, name)))

    def step() -> tuple[float, float]:
        clock.busy = 0.0
        started = time.perf_counter()
        optimizer.zero_grad()
        rank.train_step(**batch)
        clock.watched(optimizer.step)()
        return time.perf_counter() - started, clock.busy

    return step


class _Clock:
    """Adds up the time that some functions take."""

    def __init__(self) -> None:
        self.busy = 0.0

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.busy += time.perf_counter() - started

        return timed


def rows(rounds: int) -> list[dict[str, Any]]:
    """One for each schedule and rank, and one for all ranks of the schedule."""
    torch.manual_seed(0)
    model, batch = gpt.build(CONFIG), gpt.example_inputs(CONFIG)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plans = {name: autopar.template_plan(model, mesh, batch, **choices) for name, choices in PLANS.items()}
    programs = {name: autopar.parallelize(model, mesh, batch, plan=plan) for name, plan in plans.items()}
    sources = {name: program.source for name, program in programs.items()}
    results = pool(2).run(measure, sources, batch, rounds)
    found = []
    for name, program in programs.items():
        timeline: Any = program.plan.timeline()
        steps = [max(ranks[name][n][0] for ranks in results) for n in range(rounds)]
        quiet = _fastest(steps)
        predicted, waits = {}, {}
        for lane in timeline.lanes:
            rank = str(lane.ranks.start)
            predicted[rank] = (lane.breakdown.bubble_ns + lane.exposed.get("send", 0)) / timeline.step_time_ns
            busy = [busy for _, busy in results[lane.ranks.start][name]]
            waits[rank] = [1 - one / step for one, step in zip(busy, steps, strict=True)]
        predicted[ALL] = statistics.mean(predicted.values())
        waits[ALL] = [statistics.mean(each) for each in zip(*waits.values(), strict=True)]
        for rank, idle in predicted.items():
            idle_quiet = _of_fastest(waits[rank], quiet)
            found.append({
                "schedule": name, "rank": rank, "predicted_step_ms": round(timeline.step_time_ns / 1e6, 2),
                "measured_step_ms": round(statistics.median(steps) * 1e3, 2),
                "fastest_steps_ms": round(_of_fastest(steps, quiet) * 1e3, 2),
                "predicted_idle": round(idle, 4), "measured_idle": round(statistics.median(waits[rank]), 4),
                "idle_of_fastest": round(idle_quiet, 4), "error": round(idle / idle_quiet - 1, 3),
                "points": round(100 * (idle - idle_quiet), 1),
            })  # fmt: skip
    return found


def _fastest(steps: list[float]) -> list[list[int]]:
    """The fastest quarter of the rounds, for each assignment of ranks to cores: rounds alternate between the two."""
    assignments = [range(first, len(steps), 2) for first in (0, 1)]
    return [sorted(rounds, key=steps.__getitem__)[: max(1, len(rounds) // 4)] for rounds in assignments]


def _of_fastest(values: list[float], quiet: list[list[int]]) -> float:
    return statistics.mean(statistics.median(values[n] for n in rounds) for rounds in quiet)


def table(found: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [f"| {' | '.join(found[0])} |", "|" + " --- |" * len(found[0])]
    return "\n".join([*lines, *(f"| {' | '.join(str(cell) for cell in row.values())} |" for row in found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    found = rows(options.rounds)
    about = facts("benchmarks.accuracy.bubble")
    write_record(options.output / "bubble", about, {"rows": found})
    schedules, ranks = [row for row in found if row["rank"] == ALL], [row for row in found if row["rank"] != ALL]
    near, near_ranks = (sum(abs(row["error"]) <= WITHIN for row in some) for some in (schedules, ranks))
    text = (
        f"`{about['command']}`, {about['machine']}, {about['date']}. Idle: as a share of the step.\n\n"
        f"Of {len(schedules)} schedules, {near} are within a tenth of what is measured; of {len(ranks)} ranks of one, "
        f"{near_ranks}.\n\n{table(found)}\n"
    )
    (options.output / "bubble.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
