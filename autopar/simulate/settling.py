"""Tasks that are placed all at once, where nothing asks when one of them ends before all are submitted: the first
gathers of a step.

`Engine` places each task as it is submitted, and again whatever a later one delays. Where several queues of a level are
long, as they are when a step begins, each of so many tasks would place all of the others again. Here time goes forward
once, from event to event: a queue's first task runs once those that it depends on have ended; the n queues of a level
that have something under way have 1/n of it each (processor sharing), and compute progresses as many times slower as
the collective says that began first. So a task that depends on one that others delay waits for it, which `Engine`, that
does not place such tasks again, leaves out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

from autopar.cost.profile import Waits
from autopar.simulate.engine import COMPUTE, Carried, Engine, Flight, Moment, level_of

_SOON_NS = 1e-3


@dataclass(slots=True, eq=False)
class _QueuedTask:
    """A task that is to be placed: its number, none of one of an earlier pass. left_ns: of work, alone on its level;
    release_ns: when the host has launched it."""

    number: int | None
    stream: str
    level: str
    name: str
    kind: str
    left_ns: float
    release_ns: int
    after: Sequence[_QueuedTask]
    start_ns: float | None = None
    end_ns: float = inf

    def ready_ns(self) -> float:
        """When it may start."""
        return max([self.release_ns, *(job.end_ns for job in self.after)])


class _Allocation(NamedTuple):
    task: int
    num_bytes: int
    kind: str
    moment: int


class SettlingEngine(Engine):
    """Takes tasks as `Engine` does, and places them in `settle`; until then `tasks` has their places alone."""

    def __init__(
        self, slowdowns: Mapping[str, float], carried: Carried, host_ns: int = 0, kind: str = "forward"
    ) -> None:
        super().__init__(slowdowns, carried, host_ns, kind)
        self._jobs: list[_QueuedTask] = []
        self._asked: list[_Allocation] = []
        known = {flight[3] for flight in carried.in_flight}
        self._free_at = {link: end for link, end in carried.links if link not in known}

    def launch(self, issue_ns: int) -> None:
        """The host launches the next task."""
        self.host_ns += issue_ns

    def compute(self, name: str, kind: str, duration_ns: int, after: Iterable[int] = (), issue_ns: int = 0) -> int:
        """Queues a task on the compute stream."""
        self.kind = kind
        self.last = self._queue(COMPUTE, name, kind, duration_ns, after, issue_ns)
        return self.last

    def transmit(
        self, link: str, name: str, kind: str, duration_ns: int, after: Iterable[int] = (), issue_ns: int = 0,
        others: Callable[[int], int] | None = None, waits: Waits | None = None,
    ) -> int:  # fmt: skip
        """Queues a collective, of one for which no rank waits and that no other rank delays."""
        assert others is None and waits is None
        return self._queue(link, name, kind, duration_ns, after, issue_ns)

    def allocate(self, task: int, num_bytes: int, kind: str, moment: int = Moment.START) -> None:
        """Memory taken when a task starts, or at a moment of its end."""
        if num_bytes:
            self._asked.append(_Allocation(task, num_bytes, kind, moment))

    def _queue(
        self, stream: str, name: str, kind: str, duration_ns: int, after: Iterable[int], issue_ns: int
    ) -> int:  # fmt: skip
        self.launch(issue_ns)
        number = len(self.tasks)
        first = number - len(self._jobs)
        awaited = [self._jobs[task - first] for task in after if task >= first]
        ready = max(self.host_ns, self._free_at.get(stream, 0))
        job = _QueuedTask(number, stream, level_of(stream), name, kind, float(duration_ns), ready, awaited)
        self._jobs.append(job)
        self.tasks.append((stream, name, -1, -1, kind))
        return number

    # Placing ----------------------------------------

    def settle(self) -> None:
        """Places all tasks, and records what they allocate."""
        under_way, self.in_flight = self.in_flight, []
        carried = _jobs_of(under_way)
        queues: dict[str, list[_QueuedTask]] = {}
        for job in reversed([*carried, *self._jobs]):  # so that a queue's first job ends its list
            queues.setdefault(job.stream, []).append(job)
        now = 0.0
        while queues:
            now = self._go_on(queues, now)
        self._launch_until(self.host_ns)
        for job, (_, end, _, _) in zip(carried, under_way, strict=True):
            if round(job.end_ns) != end:
                self.moved[end] = round(_begin_of(job)), round(job.end_ns)
        for asked in self._asked:
            super().allocate(*asked)

    def _go_on(self, queues: dict[str, list[_QueuedTask]], now: float) -> float:
        """To the next event: a job ends, or one is ready to start; when that is."""
        active, coming = list[_QueuedTask](), list[float]()
        for queue in queues.values():
            job = queue[-1]
            if job.start_ns is None and (ready := job.ready_ns()) <= now:
                self._start(job, now)
            elif job.start_ns is None:
                coming.append(ready - now)
            if job.start_ns is not None:
                active.append(job)
        paces = self._paces(active)
        step = min([*coming, *(job.left_ns * pace for job, pace in zip(active, paces, strict=True))])
        for job, pace in zip(active, paces, strict=True):
            job.left_ns -= step / pace
            if job.left_ns <= _SOON_NS:
                self._end(job, now + step)
                queues[job.stream].pop()
                if not queues[job.stream]:
                    del queues[job.stream]
        return now + step

    def _paces(self, active: Sequence[_QueuedTask]) -> list[float]:
        """How many times as long each takes as alone."""
        sent = [job for job in active if job.stream != COMPUTE]
        beside = Counter(job.level for job in sent)
        first = min((job for job in sent if self._slows(job)), key=_begin_of, default=None)
        slowed = 1.0 if first is None else self._slowdowns.get(first.level, 1.0)
        return [slowed if job.stream == COMPUTE else float(beside[job.level]) for job in active]

    def _slows(self, job: _QueuedTask) -> bool:
        return job.level in self._slowdowns or job.level != job.stream

    def _start(self, job: _QueuedTask, now: float) -> None:
        job.start_ns = now
        if job.stream == COMPUTE:
            self._launch_until(job.release_ns)
            if (begin := round(now)) > self.free_ns:
                self.waited[max(job.after, key=_end_of).kind] += begin - self.free_ns
                self._met_ns += begin - self.free_ns

    def _launch_until(self, host_ns: int) -> None:
        """A device that is idle until then counts as computing: it is launch-bound."""
        if host_ns > self.free_ns:
            self.tasks.append((COMPUTE, "launch", self.free_ns, host_ns, self.kind))
            self.free_ns = host_ns

    def _end(self, job: _QueuedTask, now: float) -> None:
        job.end_ns = now
        start, end = round(_begin_of(job)), round(now)
        if job.number is not None:
            self.tasks[job.number] = job.stream, job.name, start, end, job.kind
        if job.stream == COMPUTE:
            self.free_ns = end
            return
        self.links[job.stream] = end
        if self._slows(job):
            self.in_flight.append((start, end, self._slowdowns.get(job.level, 1.0), job.stream))


def _begin_of(job: _QueuedTask) -> float:
    assert job.start_ns is not None
    return job.start_ns


def _end_of(job: _QueuedTask) -> float:
    return job.end_ns


def _jobs_of(under_way: Sequence[Flight]) -> list[_QueuedTask]:
    """What an earlier pass has under way, with the work that is left of each: it had its share of the level."""
    jobs = [
        _QueuedTask(None, link, level_of(link), "", "", 0.0, max(0, start), (), float(start) if start <= 0 else None)
        for start, _, _, link in under_way
    ]  # fmt: skip
    edges: dict[int, tuple[list[_QueuedTask], list[_QueuedTask]]] = defaultdict(
        lambda: ([], [])
    )  # that start and that end then
    for job, (start, end, _, _) in zip(jobs, under_way, strict=True):
        edges[max(0, start)][0].append(job)
        edges[end][1].append(job)
    active = list[_QueuedTask]()
    for (time, (begun, _)), (later, (_, ended)) in pairwise(sorted(edges.items())):
        active += begun
        beside = Counter(job.level for job in active)
        for job in active:
            job.left_ns += (later - time) / beside[job.level]
        active = [job for job in active if job not in ended]
    return jobs
