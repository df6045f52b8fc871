"""What was simulated of the ranks of a lane, added up over a step by statement and direction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.schedule import BACKWARD, DIRECTIONS, FORWARD
from autopar.observed.kineto import RECOMPUTE
from autopar.simulate.engine import COMPUTE, Task
from autopar.simulate.overlap import STOPPING
from autopar.simulate.timeline import Lane, Timeline

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Simulated:
    """Of a lane: what each statement computes by direction, what the lane stands still for by statement, and how long
    it waits for anything by kind. is_last: whether the step ends when it does. num_calls: of operators, in all
    directions and microbatches."""

    first_rank: int
    num_ranks: int
    step_time_ns: int
    work: Mapping[tuple[str, str], int]
    sent: Mapping[str, int]
    exposed: Mapping[str, int]
    bubble_ns: int
    optimizer_ns: int
    is_last: bool
    num_calls: int

    @property
    def ranks(self) -> range:
        """Those that do the same."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def stopping_ns(self) -> int:
        """What it stands still for, of collectives of statements."""
        return sum(
            spent for kind, spent in self.exposed.items() if kind.partition(" ")[0] in ("activation", "operator")
        )

    @property
    def beside_ns(self) -> int:
        """What it stands still for, of what is sent beside compute."""
        return sum(self.exposed.values()) - self.stopping_ns

    @property
    def host_ns(self) -> int:
        """What is in nothing else."""
        known = sum(self.work.values()) + self.optimizer_ns + sum(self.exposed.values()) + self.bubble_ns
        return self.step_time_ns - known


def simulated(timeline: Timeline) -> list[Simulated]:
    """Each lane of a simulated step."""
    last = next((lane for lane in timeline.lanes if lane.breakdown == timeline.breakdown), timeline.lanes[-1])
    return [_lane(lane, timeline.step_time_ns, lane is last) for lane in timeline.lanes]


def _lane(lane: Lane, step_time_ns: int, is_last: bool) -> Simulated:
    work: Counter[tuple[str, str]] = Counter()
    sent: dict[str, int] = defaultdict(int)
    repeated = Counter((id(piece.tasks), id(piece.rename)) for piece in lane.played)
    pieces = {
        (id(piece.tasks), id(piece.rename)): shown.tasks for piece, shown in zip(lane.played, lane.pieces, strict=True)
    }
    for key, count in repeated.items():
        _add(pieces[key], count, work, sent)
    num_calls = sum(count * sum(_is_call(*task) for task in pieces[key]) for key, count in repeated.items())
    return Simulated(
        lane.ranks.start, len(lane.ranks), step_time_ns, work, sent, dict(lane.exposed), lane.breakdown.bubble_ns,
        lane.breakdown.optimizer_ns, is_last, num_calls,
    )  # fmt: skip


def _is_call(stream: str, name: str, start_ns: int, end_ns: int, kind: str) -> bool:
    """Whether a task is an operator's, and no redistribution's."""
    return (
        stream == COMPUTE
        and kind in (*DIRECTIONS, RECOMPUTE)
        and name != "launch"
        and " → " not in name
        and end_ns > start_ns
    )


def _add(tasks: Iterable[Task], count: int, work: Counter[tuple[str, str]], sent: dict[str, int]) -> None:
    for stream, name, start, end, kind in tasks:
        if stream == COMPUTE and kind in (*DIRECTIONS, RECOMPUTE):
            direction = kind if kind in (FORWARD, RECOMPUTE) else BACKWARD
            work[name, direction] += count * (end - start)
        elif stream != COMPUTE and kind.partition(" ")[0] in STOPPING:
            sent[name] += count * (end - start)
