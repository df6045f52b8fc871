"""What was simulated of the ranks of a lane, added up over a step by statement and direction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.schedule import BACKWARD, DIRECTIONS, FORWARD
from autopar.observed.kineto import RECOMPUTE
from autopar.simulate.engine import COMPUTE, Task
from autopar.simulate.player import STOPPING
from autopar.simulate.timeline import Lane, Timeline

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Simulated:
    """Of a lane: what each statement computes by direction, what the lane stands still for by statement, and how long
    it waits for anything by kind. is_last: whether the step ends when it does."""

    first_rank: int
    num_ranks: int
    step_time_ns: int
    work: Mapping[tuple[str, str], int]
    sent: Mapping[str, int]
    exposed: Mapping[str, int]
    bubble_ns: int
    optimizer_ns: int
    is_last: bool

    @property
    def ranks(self) -> range:
        """Those that do the same."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


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
    return Simulated(
        lane.ranks.start, len(lane.ranks), step_time_ns, work, sent, dict(lane.exposed), lane.breakdown.bubble_ns,
        lane.breakdown.optimizer_ns, is_last,
    )  # fmt: skip


def _add(tasks: Iterable[Task], count: int, work: Counter[tuple[str, str]], sent: dict[str, int]) -> None:
    for stream, name, start, end, kind in tasks:
        if stream == COMPUTE and kind in (*DIRECTIONS, RECOMPUTE):
            direction = kind if kind in (FORWARD, RECOMPUTE) else BACKWARD
            work[name, direction] += count * (end - start)
        elif stream != COMPUTE and kind.partition(" ")[0] in STOPPING:
            sent[name] += count * (end - start)
