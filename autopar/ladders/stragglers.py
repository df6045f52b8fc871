"""A rank that was seen to be slower than others, and whether a plan that gives it less to do is worth the move.

    a log's own times of ranks    how many times longer each node takes    `slowness`: medians over a window of steps
    these                         a mesh of unequal devices                `slowed_mesh`: profiles so much slower
    that mesh                     the best plan for it                     a search: shares of the batch, stages
    both plans on that mesh       seconds that a step takes less           simulated, in proportion to the measured
    these, of all steps to come   a decision                               against moving and starting anew

Nodes are what a mesh is made of: the slowest rank of a node makes its node slow.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from autopar.cost.profile import profile_to_json
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.writing import write_whole
from autopar.ladders.layouts import layout_of
from autopar.ladders.stores import StateStore
from autopar.ladders.transitions import Transition, transition
from autopar.pipeline import graph_for, parallelize, played
from autopar.profiler import load_profile, profiles_of

WINDOW = 20
"""Steps at the end of a log that count. With fewer, a rank that was held up for a while is taken for slow; with more,
one that has become slow is seen late."""
LEAST = 1.1
"""How many times longer than the others a node must take to be called slow. With less, what is noise is acted on."""
STEADY = 0.75
"""In what share of the steps of the window it must have taken so much longer."""
_DIGITS = 2  # of how many times slower: profiles of nodes that are about as slow are one


@dataclass(frozen=True)
class StragglerReport:
    """By node, how many times longer it takes than the median of all, of an even number the lower of both in the
    middle: of two nodes, than the other. 1.0 of those that are not slow. step_s: the median of what a step took. steps:
    how many were looked at."""

    times: tuple[float, ...]
    step_s: float
    steps: int

    @property
    def slow(self) -> tuple[int, ...]:
        """The nodes that are."""
        return tuple(node for node, times in enumerate(self.times) if times > 1)


@dataclass(frozen=True)
class Rebalance:
    """What to do. plan: for the devices as they were seen; None where none is slow. now_s, then_s: a step, as it was
    measured, and as it is expected under the plan. moved: what going over takes. cost_s: that with a new start.
    gain_s: over all steps that are left, less the cost. reason: of the decision, in words."""

    report: StragglerReport
    plan: Plan | None
    now_s: float
    then_s: float
    moved: Transition | None
    cost_s: float
    gain_s: float
    reason: str

    @property
    def is_worth_it(self) -> bool:
        """Whether to go over to the plan."""
        return self.plan is not None and self.gain_s > 0


def read_own_times(log: str | Path) -> tuple[list[list[float]], list[float]]:
    """From a log of train.py, since its last start: by step, the own seconds of each rank, and those of the step.
    Raises PlanError for a log without them."""
    try:
        lines = [json.loads(line) for line in Path(log).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise PlanError(f"expected a log that train.py --log-file wrote, found none in {log}: {error}") from error
    own, steps = list[list[float]](), list[float]()
    for line in lines:
        if not isinstance(line, dict) or "loss" not in line or (own and len(line.get("own_s", ())) != len(own[0])):
            own, steps = [], []
        if isinstance(line, dict) and "own_s" in line:
            own.append([float(one) for one in line["own_s"]])
            steps.append(float(line["step_s"]))
    if not own:
        raise PlanError(
            f"expected steps with own_s, the ranks' own times, in {log}, found none; train.py --log-file writes them "
            "on CPUs, of several ranks. On GPUs, ranks wait inside of kernels: trace them (`autopar compare`) instead"
        )
    return own, steps


def slowness(own: Sequence[Sequence[float]], steps: Sequence[float], ranks_per_node: int = 1) -> StragglerReport:
    """Which nodes are slow, by the own seconds of ranks that had equally much to do (steps × ranks).

    A node is as slow as its slowest rank, in the median of the last steps, and slow where that is `LEAST` times the
    median of all nodes, in `STEADY` of these steps too.
    """
    window = [
        [max(row[at : at + ranks_per_node]) for at in range(0, len(row), ranks_per_node)] for row in own[-WINDOW:]
    ]
    nodes = range(len(window[0]))
    typical = statistics.median_low(statistics.median(row[node] for row in window) for node in nodes)
    found = []
    for node in nodes:
        times = statistics.median(row[node] for row in window) / typical
        longer = sum(row[node] > LEAST * statistics.median_low(row) for row in window)
        is_slow = times > LEAST and longer >= STEADY * len(window)
        found.append(round(times, _DIGITS) if is_slow else 1.0)
    return StragglerReport(tuple(found), statistics.median(steps[-WINDOW:]), len(window))


def slowed_mesh(mesh: Mesh, times: Sequence[float], folder: str | Path) -> Mesh:
    """The mesh with nodes that are so many times slower, whose profiles are written to a folder. Raises PlanError for a
    mesh that is of unequal devices already."""
    if not mesh.is_homogeneous or mesh.nodes != len(times):
        raise PlanError(
            f"expected a plan for {len(times)} equal nodes, as the log has them, found one for {mesh}; give the plan "
            "that the run began with, whose ranks have equally much to do"
        )
    names = {1.0: mesh.profile}
    for one in sorted(set(times) - {1.0}):
        profile = replace(load_profile(mesh.profile).slower(one), name=f"slower-{one:g}", aliases=())
        path = Path(folder).resolve() / f"{Path(mesh.profile).stem}_slower_{one:g}.json"
        write_whole(path, json.dumps(profile_to_json(profile)))
        names[one] = str(path)
    groups: list[tuple[str, int, int]] = []
    for one in times:
        name = names[one]
        count = groups.pop()[1] if groups and groups[-1][0] == name else 0
        groups.append((name, count + 1, mesh.devices_per_node))
    return Mesh(groups)


def rebalanced(
    plan: Plan, model: nn.Module, example_inputs: Any, report: StragglerReport, steps_left: int, folder: str | Path, *,
    loss_fn: Callable[..., Any] | None = None, store: StateStore | None = None, search: str = "fast",
) -> Rebalance:  # fmt: skip
    """Whether another plan is worth the move, for so many steps that are left. folder: for the slower profiles, which
    the plan's mesh names. store: what starting anew takes besides the move. Raises PlanError as `slowed_mesh`."""
    now_s, store = report.step_s, store or StateStore()
    if not report.slow:
        return Rebalance(report, None, now_s, now_s, None, 0.0, 0.0, "no node is slower than the others")
    mesh = slowed_mesh(plan.mesh, report.times, folder)
    before, _ = played(replace(plan, mesh=mesh), model, example_inputs, loss_fn=loss_fn)
    after = parallelize(
        model, mesh, example_inputs, loss_fn=loss_fn, optimizer=plan.optimizer, precision=plan.precision,
        memory_limit=None, search=search, check=False,
    ).plan  # fmt: skip
    share = after.predicted.step_time_ns / before.predicted.step_time_ns
    old, new = (layout_of(graph_for(one, model, example_inputs, loss_fn=loss_fn), one) for one in (before, after))
    moved = transition(old, new, mesh, profiles_of(mesh), old_nodes=mesh.nodes, store=store)
    cost_s = store.restart_s + moved.pause_s
    gain_s = (now_s - now_s * share) * steps_left - cost_s
    slow = ", ".join(f"node {node} takes {report.times[node]:g} times as long" for node in report.slow)
    told = (
        f"{slow}: {1 - share:.0%} less a step, {(now_s - now_s * share) * steps_left:.1f} s in {steps_left} steps, "
        f"against {cost_s:.1f} s to move and to start anew"
    )
    return Rebalance(report, after, now_s, now_s * share, moved, cost_s, gain_s, told)


def report_lines(found: Rebalance) -> list[str]:
    """For a screen."""
    verdict = "go over to the new plan" if found.is_worth_it else "stay with the plan"
    lines = [f"{verdict}: {found.reason}"]
    if found.plan is not None and found.moved is not None:
        lines.append(
            f"  a step took {found.now_s * 1e3:.1f} ms, {found.then_s * 1e3:.1f} ms are expected; "
            f"{found.moved.moves.total_bytes:,} bytes move"
        )
    return lines
