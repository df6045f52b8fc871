"""A traced run laid over the simulated step: what `Plan.compare` returns.

The difference of the two steps is the sum of what was wrong, each with its own figures on both sides:

    operators      what statements compute, forward, backward and again, beside what they were priced at
    optimizer      the update
    collectives    what stops ranks: the statement's collectives on the rank that comes last
    waiting        for the rank that comes last, which the simulator does not know of
    overlap        what gradients and parameters on their way hold up: how much of it is hidden was foreseen otherwise
    stages         messages of other stages, and bubbles
    host           launches, autograd, Python
    contention     what is in no other row: on CPUs, ranks and others that had the cores
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from autopar.errors import TraceFileError
from autopar.ir.plan import Plan
from autopar.ir.schedule import BACKWARD, FORWARD
from autopar.observed.expected import digest, from_json
from autopar.observed.kineto import RECOMPUTE, RankTrace, StatementPass, read_traces
from autopar.observed.measured import Measured, measured
from autopar.observed.simulated import Simulated, simulated
from autopar.simulate import Timeline
from autopar.views import view

DIRECTIONS = FORWARD, RECOMPUTE, BACKWARD


class Cause(NamedTuple):
    """A part of a step, predicted and measured."""

    name: str
    predicted_ns: int
    measured_ns: int

    @property
    def difference_ns(self) -> int:
        """How much longer it took than predicted."""
        return self.measured_ns - self.predicted_ns


class ComparedStatement(NamedTuple):
    """What a statement of the program takes in a step. predicted_ns, measured_ns: forward, again and backward, without
    what it stands still for; sent_predicted_ns, sent_measured_ns: of that, what its collectives take."""

    name: str
    module: str
    source: str
    predicted_ns: tuple[int, int, int]
    measured_ns: tuple[int, int, int]
    sent_predicted_ns: int
    sent_measured_ns: int

    @property
    def total_ns(self) -> tuple[int, int]:
        """All of it, predicted and measured."""
        return (
            sum(self.predicted_ns) + self.sent_predicted_ns,
            sum(self.measured_ns) + self.sent_measured_ns,
        )

    @property
    def difference_ns(self) -> int:
        """How much longer it took than predicted."""
        predicted, found = self.total_ns
        return found - predicted


class ComparedLine(NamedTuple):
    """What a source line takes in a module, all its statements together."""

    module: str
    source: str
    statements: tuple[str, ...]
    predicted_ns: int
    measured_ns: int

    @property
    def difference_ns(self) -> int:
        """How much longer it took than predicted."""
        return self.measured_ns - self.predicted_ns


@dataclass(frozen=True)
class StepComparison:
    """What was predicted of a step beside what ran, of the ranks of the lane that ends last.

    busy_ns: of a processor that these ranks' processes took in a measured step; a step much longer than that, of ranks
    that wait for nobody, was held up by others on the host. causes: what was wrong, whose differences add up to that of
    the steps. lines: by module and source line; statements: each by itself; both by how wrong they were. unseen: that
    were simulated and in no trace.
    """

    model: str
    mesh: str
    ranks: tuple[int, int]
    device: str
    num_steps: int
    predicted_ns: int
    measured_ns: int
    busy_ns: int
    causes: tuple[Cause, ...]
    lines: tuple[ComparedLine, ...]
    statements: tuple[ComparedStatement, ...]
    unseen: tuple[str, ...]

    @property
    def error(self) -> float:
        """The prediction over what was measured, less 1."""
        return self.predicted_ns / self.measured_ns - 1.0 if self.measured_ns else 0.0

    def __str__(self) -> str:
        text: str = view("comparison")(self)
        return text


def compare(plan: Plan, trace: str | Path) -> StepComparison:
    """Lays a folder of traces (or one rank's) over the plan's simulated step, as it is predicted now; of a plan that
    was read from a file, as it was when the program was written. Raises TraceFileError for a trace of another plan."""
    traces = read_traces(trace)
    _check(plan, traces)
    lanes = _lanes(plan, traces[0])
    seen = {one.rank for one in traces}
    known = [lane for lane in lanes if not seen.isdisjoint(lane.ranks)]
    lane = next((one for one in known if one.is_last), known[0] if known else lanes[0])
    return compared(plan, traces, lane)


def compared(plan: Plan, traces: Sequence[RankTrace], lane: Simulated) -> StepComparison:
    """The comparison for the ranks of one lane."""
    found = measured(traces, lane.ranks)
    statements = _statements(plan, lane, found)
    ran = {key.name for key in found.work} | {key.name for key in found.sent}
    priced = {name for (name, _), spent in lane.work.items() if spent} | set(lane.sent)
    return StepComparison(
        model=plan.model,
        mesh=str(plan.mesh),
        ranks=(lane.first_rank, lane.num_ranks),
        device=traces[0].device,
        num_steps=found.num_steps,
        predicted_ns=lane.step_time_ns,
        measured_ns=found.step_ns,
        busy_ns=found.busy_ns,
        causes=_causes(lane, found),
        lines=_lines(statements),
        statements=tuple(sorted(statements, key=lambda one: -abs(one.difference_ns))),
        unseen=tuple(sorted(priced - ran)),
    )


def _check(plan: Plan, traces: Sequence[RankTrace]) -> None:
    told = traces[0].expected
    if told.get("plan") != digest(plan):
        raise TraceFileError(
            f"expected a trace of this plan of {plan.model} on {plan.mesh}, found one of another plan, of "
            f"{told.get('model')} on {told.get('mesh')}; run this plan with `autopar run MODEL PLAN --trace FOLDER`"
        )


def _lanes(plan: Plan, trace: RankTrace) -> list[Simulated]:
    if plan.simulator is None:
        return [from_json(lane) for lane in trace.expected["simulated"]]
    timeline = plan.timeline()
    assert isinstance(timeline, Timeline), "the simulator's own"
    return simulated(timeline)


# Rows ----------------------------------------


def _statements(plan: Plan, lane: Simulated, found: Measured) -> list[ComparedStatement]:
    sent: dict[str, float] = defaultdict(float)
    for key, spent in found.sent.items():
        sent[key.name] += spent
    names = dict.fromkeys([*(name for name, _ in lane.work), *lane.sent, *(key.name for key in found.work), *sent])
    return [
        ComparedStatement(
            name,
            *_where(plan, found, name),
            predicted_ns=_by_direction(lane.work.get((name, direction), 0) for direction in DIRECTIONS),
            measured_ns=_by_direction(found.work.get(StatementPass(name, direction), 0.0) for direction in DIRECTIONS),
            sent_predicted_ns=lane.sent.get(name, 0),
            sent_measured_ns=round(sent.get(name, 0.0)),
        )
        for name in names
    ]


def _by_direction(values: object) -> tuple[int, int, int]:
    forward, again, backward = map(round, values)  # type: ignore[call-overload]
    return forward, again, backward


def _where(plan: Plan, found: Measured, name: str) -> tuple[str, str]:
    """Module and source line: as the trace says, or for what is in none, as the plan does."""
    if name in found.where:
        return found.where[name]
    module, _, source = (plan.scopes.get(name) or plan.scopes.get(name.partition(" → ")[0]) or "||").split("|")
    return module, source


def _lines(statements: Sequence[ComparedStatement]) -> tuple[ComparedLine, ...]:
    by_place: dict[tuple[str, str], list[ComparedStatement]] = defaultdict(list)
    for one in statements:
        by_place[one.module, one.source].append(one)
    lines = [
        ComparedLine(
            module, source, tuple(one.name for one in own),
            sum(one.total_ns[0] for one in own), sum(one.total_ns[1] for one in own),
        )
        for (module, source), own in by_place.items()
    ]  # fmt: skip
    return tuple(sorted(lines, key=lambda line: -abs(line.difference_ns)))


def _causes(lane: Simulated, found: Measured) -> tuple[Cause, ...]:
    """What is left of either step is others', so that all of them add up."""
    rows = [
        ("operators", sum(lane.work.values()), sum(found.work.values())),
        ("optimizer", lane.optimizer_ns, found.optimizer_ns),
        ("collectives", lane.stopping_ns, sum(found.sent.values())),
        ("waiting", 0, found.waited_ns),
        ("overlap", lane.beside_ns, found.beside_ns),
        ("stages", lane.bubble_ns, found.receive_ns),
        ("host", lane.host_ns, found.host_ns),
    ]
    causes = [Cause(name, round(predicted), round(spent)) for name, predicted, spent in rows]
    left = lane.step_time_ns - sum(cause.predicted_ns for cause in causes)
    return (*causes, Cause("contention", left, found.step_ns - sum(cause.measured_ns for cause in causes)))
