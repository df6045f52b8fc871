"""Streams and tasks of one device while it makes one pass: the core, which knows nothing of plans.

A task runs on its stream when the tasks that it depends on have ended and the stream's earlier tasks have. Tasks are
submitted after those they depend on, so each is placed once, in order of submission: streams are first-in, first-out,
as on the device. While a collective is in flight, compute progresses as many times slower as that collective's level
says (`Profile.slowdown`). Times count from the begin of the pass, which is when the compute stream is free; what is
still under way then is *carried*.

A communication stream is a line on one level of links, `level` or `level whose`. Where collectives of several lines of
a level are in flight at once, they share it evenly: one that starts beside others delays them by what it takes of the
link (processor sharing), so that the level never carries more than one collective's worth at a time. What has waited
for these others already is not placed again.

Where a collective stops the rank, its ranks *meet*: it starts once the slowest of them is there, which takes the longer
the longer they have computed since they met before (`Waits`).

Where the host takes time to launch, it launches tasks in the order of submission from the begin of the pass on, ahead
of the device when that is slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import add
from typing import NamedTuple

from autopar.cost.profile import LEVELS, Waits

COMPUTE = "compute"

Task = tuple[str, str, int, int, str]
"""Stream, name, start and end in ns, kind."""

Flight = tuple[int, int, float, str]
"""Of a collective: start, end, how many times slower compute progresses meanwhile, and its communication stream."""

Moved = Mapping[int, tuple[int, int]]
"""When collectives start and end, by when they were to end."""

Change = tuple[int, int, str, int]
"""Of memory: time in ns, bytes taken or (negative) given back, kind, and moment of that time."""


class Sent(NamedTuple):
    """Collectives of one kind along one axis: how many times, the bytes that a rank hands to them, and their time."""

    times: int
    num_bytes: int
    duration_ns: int

    def plus(self, other: Sent) -> Sent:
        """Both together."""
        return Sent(*map(add, self, other))

    def repeated(self, count: int) -> Sent:
        """As often as that."""
        return Sent(*(amount * count for amount in self))


NOTHING_SENT = Sent(0, 0, 0)

LAST = 0  # the number of the compute stream's latest task before the pass


class Carried(NamedTuple):
    """What a device has under way when a pass begins, in ns after that.

    links: when each communication stream is free; in_flight: its collectives; last_ns: how long the compute stream's
    latest task took, which ended at 0; unmet_ns: how long it has computed since its ranks met.
    """

    links: tuple[tuple[str, int], ...] = ()
    in_flight: tuple[Flight, ...] = ()
    last_ns: int = 0
    unmet_ns: int = 0


@cache
def level_of(link: str) -> str:
    """The level of links that a communication stream is on; another stream is itself."""
    level, _, _ = link.partition(" ")
    return level if level in LEVELS else link


def after_moves(end_ns: int, moved: Moved) -> int:
    """When a collective ends that was to end then."""
    return moved[end_ns][1] if end_ns in moved else end_ns


class Moment:
    """What happens to memory at one time, in this order: plain numbers, which arrays take as they are.

    A task ends; what several tasks have made is summed; hooks collect gradients; journeys end, which leaves shards;
    new ones and gathers start; at the end of a step, all journeys end; the next task starts.
    """

    END = 0
    SUM = 1
    SUMMED = 2
    COLLECT = 3
    COLLECTED = 4
    ARRIVE = 5
    ARRIVED = 6
    SEND = 7
    ALL_ARRIVE = 8
    ALL_ARRIVED = 9
    START = 10
    COUNT = 11


class Engine:
    """Places tasks on streams and records what they allocate and free."""

    def __init__(
        self, slowdowns: Mapping[str, float], carried: Carried, host_ns: int = 0, kind: str = "forward"
    ) -> None:
        """slowdowns: of compute while a collective is in flight, by level of links; 1.0 is not listed."""
        self.tasks: list[Task] = [(COMPUTE, "", -carried.last_ns, 0, "")]
        self.waited: dict[str, int] = defaultdict(int)  # kind of task waited for -> compute's idle time
        self.allocations: list[Change] = []
        self.free_ns = 0
        self.last = LAST  # the compute stream's latest task
        self.links: dict[str, int] = dict(carried.links)
        self.in_flight = list(carried.in_flight)
        self.moved: dict[int, tuple[int, int]] = {}  # of what was carried
        self._sent: dict[tuple[str, int], list[int]] = {}  # collectives that others may delay, by stream and end
        self._slowdowns = slowdowns
        self.num_carried = 1
        self.host_ns = host_ns  # until when the host is busy launching what was submitted
        self.kind = kind  # of the compute that waits for launches
        self.has_met = False
        self._unmet_ns = carried.unmet_ns  # until the ranks meet
        self._met_ns = 0  # when they did, or the begin, later by what compute has been idle since

    @property
    def unmet_ns(self) -> int:
        """How long the compute stream has computed since the ranks met, or since the begin."""
        return self.free_ns - self._met_ns

    def carry(self, end_ns: int, kind: str) -> int:
        """A task of an earlier pass that ends after this one has begun, to depend on."""
        self.tasks.append(("", "", 0, end_ns, kind))
        self.num_carried += 1
        return len(self.tasks) - 1

    def launch(self, issue_ns: int) -> None:
        """The host launches the next task. A device that is idle until then counts as computing: it is launch-bound."""
        self.host_ns += issue_ns
        if self.host_ns > self.free_ns:
            self.tasks.append((COMPUTE, "launch", self.free_ns, self.host_ns, self.kind))
            self.free_ns = self.host_ns

    def compute(self, name: str, kind: str, duration_ns: int, after: Iterable[int] = (), issue_ns: int = 0) -> int:
        """Places a task on the compute stream; returns its number, for `after` of those that depend on it."""
        self.kind = kind
        if issue_ns:
            self.launch(issue_ns)
        tasks, free = self.tasks, self.free_ns
        start, cause = free, ""
        for number in after:
            task = tasks[number]
            if task[3] > start:
                start, cause = task[3], task[4]
        if start > free:
            self.waited[cause] += start - free
            self._met_ns += start - free
        end = start + duration_ns
        if self.in_flight:
            end = self._slowed_end(start, duration_ns)
        self.free_ns = end
        self.last = len(tasks)
        tasks.append((COMPUTE, name, start, end, kind))
        return self.last

    def transmit(
        self, link: str, name: str, kind: str, duration_ns: int, after: Iterable[int] = (), issue_ns: int = 0,
        others: Callable[[int], int] | None = None, waits: Waits | None = None,
    ) -> int:  # fmt: skip
        """Places a collective on a communication stream; returns its number. others: from when this rank could start,
        when all of its ranks can. waits: of one that stops the rank."""
        if issue_ns:
            self.launch(issue_ns)
        tasks = self.tasks
        start = max(self.links.get(link, 0), self.host_ns)
        for number in after:
            end = tasks[number][3]
            if end > start:
                start = end
        if waits is not None:
            start += waits.after(self._unmet_ns + self.free_ns - self._met_ns)
            self.has_met, self._unmet_ns, self._met_ns = True, 0, self.free_ns
        if others is not None:
            start = others(start)
        level = level_of(link)
        end = start + duration_ns if level == link else self._shared_end(link, start, duration_ns)
        self.links[link] = end
        slowdown = self._slowdowns.get(level)
        if slowdown is not None or level != link:
            self.in_flight.append((start, end, slowdown or 1.0, link))
            self._sent.setdefault((link, end), []).append(len(tasks))
        tasks.append((link, name, start, end, kind))
        return len(tasks) - 1

    def _slowed_end(self, start: int, duration_ns: int) -> int:
        """When compute ends that makes 1/slowdown of its progress while a collective is in flight: the one that began
        first."""
        left, now = float(duration_ns), start
        pending = [span for span in self.in_flight if span[1] > start]
        self.in_flight = pending  # compute starts in order: what ended before is of no more use
        for begin, end, slowdown, _ in sorted(pending):
            begin, end = max(begin, now), max(end, now)
            if left <= begin - now:
                break
            left -= begin - now
            now = begin
            if left * slowdown <= end - now:
                return now + round(left * slowdown)
            left -= (end - now) / slowdown
            now = end
        return now + round(left)

    def _shared_end(self, link: str, start: int, duration_ns: int) -> int:
        """When a collective ends that shares its level with those of other streams, which are delayed."""
        level = level_of(link)
        beside = [
            span for span in self.in_flight if span[1] > start and span[3] != link and level_of(span[3]) == level
        ]  # fmt: skip
        if not beside or not duration_ns:
            return start + duration_ns
        beside.sort()
        end, later = shared(start, duration_ns, [(span[3], span[0], span[1]) for span in beside])
        moved = {(old[3], old[1]): new for old, new in zip(beside, later, strict=True) if new[1] != old[1]}
        if moved:
            self.in_flight = [(*moved.get((span[3], span[1]), span[:2]), *span[2:]) for span in self.in_flight]
            for (other, _), (_, new) in moved.items():
                self.links[other] = max(new, self.links.get(other, 0))
            self._move(moved)
        return end

    def _move(self, moved: Mapping[tuple[str, int], tuple[int, int]]) -> None:
        """By stream and end, when collectives are under way; among them those that an earlier pass or part began."""
        ends = {old: new for (_, old), new in moved.items()}
        tasks = self.tasks
        for number in range(1, self.num_carried):
            if (end := tasks[number][3]) in ends:
                tasks[number] = "", "", 0, ends[end][1], tasks[number][4]
        for (stream, begin, end), numbers in [((old[0], *new), self._sent.pop(old, ())) for old, new in moved.items()]:
            for number in numbers:
                tasks[number] = stream, tasks[number][1], begin, end, tasks[number][4]
            self._sent.setdefault((stream, end), []).extend(numbers)
        for old, (_, new) in self.moved.items():
            self.moved[old] = ends.get(new, self.moved[old])
        for old, new_span in ends.items():
            self.moved.setdefault(old, new_span)

    def settle(self) -> None:
        """All tasks are submitted, and have their places."""

    def later(self, first: int, second: int) -> int:
        """The task that ends later."""
        return max(first, second, key=lambda task: self.tasks[task][3])

    def change(self, first: int, last: int, taken: int, given: int, kind: str) -> None:
        """Memory taken when the first task starts, and given back when the last one ends."""
        if taken:
            self.allocations.append((self.tasks[first][2], taken, kind, Moment.START))
        if given:
            self.allocations.append((self.tasks[last][3], -given, kind, Moment.END))

    def allocate(self, task: int, num_bytes: int, kind: str, moment: int = Moment.START) -> None:
        """Memory taken when a task starts, or at a moment of its end."""
        if num_bytes:
            _, _, start, end, _ = self.tasks[task]
            self.allocations.append((start if moment == Moment.START else end, num_bytes, kind, moment))

    def release(self, task: int, num_bytes: int, kind: str, moment: int = Moment.END) -> None:
        """Memory given back at a moment of a task's end."""
        if num_bytes:
            self.allocations.append((self.tasks[task][3], -num_bytes, kind, moment))


def busy_ns(tasks: Iterable[Task]) -> dict[str, int]:
    """How long the compute stream works in some tasks, and each level of links, of which queues share a level."""
    busy: dict[str, int] = defaultdict(int)
    until: dict[str, int] = {}
    for stream, _, start, end, _ in sorted(tasks, key=_start_of):
        level = level_of(stream)
        since = max(start, until.get(level, start))
        if end > since:
            busy[level] += end - since
            until[level] = end
    return busy


def _start_of(task: Task) -> int:
    return task[2]


def shared(
    start_ns: int, duration_ns: int, beside: Sequence[tuple[str, int, int]]
) -> tuple[int, list[tuple[int, int]]]:  # fmt: skip
    """Processor sharing of a link: when a collective ends that takes so long alone and starts then, and when those of
    other streams start and end that are beside it, given by their streams, starts and ends, in order.

    n others that are under way have 1/n of the link each, and 1/(n + 1) with the new one. Each stream's next one starts
    when it was to, and the one before has ended.
    """
    now, left = float(start_ns), float(duration_ns)
    queues: dict[str, list[tuple[int, float, float]]] = {}  # by stream: number, start, how long it would be under way
    for number, (stream, planned, ended) in enumerate(beside):
        queues.setdefault(stream, []).append((number, planned, ended - max(planned, now)))
    found = [(planned, ended) for _, planned, ended in beside]
    while left > _SOON_NS:
        active = [queue for queue in queues.values() if queue and queue[0][1] <= now]
        coming = [queue[0][1] - now for queue in queues.values() if queue and queue[0][1] > now]
        count = len(active)
        step = min([left * (count + 1), *coming, *(queue[0][2] * (count + 1) / count for queue in active)])
        now, left = now + step, left - step / (count + 1)
        for queue in active:
            number, begin, rest = queue.pop(0)
            rest -= step * count / (count + 1)
            if rest > _SOON_NS:
                queue.insert(0, (number, begin, rest))
            else:
                _end(found, number, begin, now, queue)
    end = round(now)
    for queue in queues.values():
        while queue:
            number, begin, rest = queue.pop(0)
            _end(found, number, begin, max(begin, now) + rest, queue)
    return end, found


_SOON_NS = 1e-3


def _end(
    found: list[tuple[int, int]], number: int, begin: float, end: float, queue: list[tuple[int, float, float]]
) -> None:  # fmt: skip
    """Notes an end, before which the stream's next one does not start."""
    found[number] = round(begin), round(end)
    if queue and queue[0][1] < end:
        queue[0] = queue[0][0], end, queue[0][2]
