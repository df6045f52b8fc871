"""Where the ranks of one process meet: every collective of every group, with what goes wrong named at once.

A rank posts its part of a collective and goes on; the result is there once it waits, and not before: an output that
is read too early holds NaN. What one rank sends to another is there for it from then on. When ranks call different
collectives, or wait for one that cannot come any more because the others are done or wait themselves, all of them end
with a `MeetingError` that says who was where.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

Combine = Callable[[list[Any]], list[Tensor]]  # what each rank brings -> the output of each rank


class Channel(NamedTuple):
    """What a rank sends to another by a tag is received by that tag, in the same order."""

    group: tuple[int, ...]
    source: int
    target: int
    tag: int


class MeetingError(Exception):
    """Ranks that do not meet: different calls, or a wait that would never end."""


@dataclass
class Meeting:
    """One collective of one group: who has come with what, and what each takes home."""

    group: tuple[int, ...]
    number: int
    what: str
    parts: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == len(self.group)

    def __str__(self) -> str:
        missing = [rank for rank in self.group if rank not in self.parts]
        return f"{self.what} of ranks {list(self.group)} (number {self.number} of this group; missing {missing})"


class Exchange:
    """All meetings of one job of `world` ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.error: str | None = None
        self.sent: list[Counter[str]] = [Counter() for _ in range(world)]
        self._lock = threading.Lock()
        self._bells = [threading.Semaphore(0) for _ in range(world)]
        self._meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self._numbers: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._letters: dict[tuple[Channel, int], Meeting] = {}  # sent and not received, or the other way round
        self._ends: Counter[tuple[Channel, bool]] = Counter()
        self._waiting: dict[int, Meeting] = {}
        self._done: set[int] = set()
        self._open: Counter[int] = Counter()  # meetings that a rank joined and did not wait for yet

    def post(self, rank: int, group: tuple[int, ...], what: str, part: Any, combine: Combine) -> Meeting:
        """Joins the next meeting of the group; whoever comes last computes what each takes home."""
        with self._lock:
            self._raise_if_failed()
            number = self._numbers[rank, group]
            self._numbers[rank, group] += 1
            meeting = self._meetings.setdefault((group, number), Meeting(group, number, what))
            if meeting.what != what:
                raise self._fail(f"rank {rank} called {what}, others {meeting}")
            meeting.parts[rank] = part
            self._open[rank] += 1
            if meeting.is_complete:
                outputs = combine([meeting.parts[member] for member in group])
                meeting.results = dict(zip(group, outputs, strict=True))
                del self._meetings[group, number]
                self._wake(other for other, awaited in self._waiting.items() if awaited is meeting)
            return meeting

    def send(self, channel: Channel, what: str, part: Tensor) -> None:
        """Leaves a tensor for another rank, who may wait for it already."""
        with self._lock:
            self._raise_if_failed()
            letter = self._letter(channel, what, is_sent=True)
            letter.parts[channel.source] = part
            letter.results[channel.target] = part
            self._wake(other for other, awaited in self._waiting.items() if awaited is letter)

    def receive(self, channel: Channel, what: str) -> Meeting:
        """What the other rank leaves here, to be taken."""
        with self._lock:
            self._raise_if_failed()
            self._open[channel.target] += 1
            return self._letter(channel, what, is_sent=False)

    def _letter(self, channel: Channel, what: str, is_sent: bool) -> Meeting:
        number = self._ends[channel, is_sent]
        self._ends[channel, is_sent] += 1
        text = f"{what} to rank {channel.target} by tag {channel.tag}"
        known = self._letters.pop((channel, number), None)
        if known is None:
            known = self._letters[channel, number] = Meeting((channel.source,), number, text)
        if known.what != text:
            raise self._fail(f"{'sent' if is_sent else 'expected'} was {text}, on the other side {known}")
        return known

    def take(self, rank: int, meeting: Meeting) -> Tensor:
        """Waits until everybody has come; what the rank takes home."""
        with self._lock:
            self._open[rank] -= 1
            self._waiting[rank] = meeting
            self._check_hope()
        while True:
            with self._lock:
                if meeting.results:
                    del self._waiting[rank]
                    return meeting.results[rank]
                self._raise_if_failed()
            self._bells[rank].acquire()

    def leave(self, rank: int, error: str | None = None) -> None:
        """A rank has finished its job, or failed: then nobody waits for it any more."""
        with self._lock:
            self._done.add(rank)
            self._waiting.pop(rank, None)
            if error is not None and self.error is None:
                self.error = f"rank {rank} failed:\n{error}"
            if error is None and self.error is None and self._open[rank]:
                self.error = f"rank {rank} ended without having waited for {self._open[rank]} of its collectives"
            if len(self._done) == self.world and self.error is None and self._letters:
                self.error = f"nobody has received {', '.join(map(str, self._letters.values()))}"
            if self._waiting and self.error is None:
                self._check_hope()
            if self.error is not None:
                self._wake(self._waiting)

    def give_up(self, reason: str) -> None:
        """Ends all ranks that wait."""
        with self._lock:
            self._fail(reason)

    def _check_hope(self) -> None:
        """Fails when every rank is done or waits for a meeting that is not complete."""
        stuck = {rank: meeting for rank, meeting in self._waiting.items() if not meeting.is_complete}
        if self.error is None and len(stuck) + len(self._done) == self.world:
            places = "; ".join(f"rank {rank} waits for {meeting}" for rank, meeting in sorted(stuck.items()))
            self.error = f"ranks wait for each other: {places}; done: {sorted(self._done)}"
            self._wake(self._waiting)

    def _fail(self, text: str) -> MeetingError:
        self.error = self.error or text
        self._wake(self._waiting)
        return MeetingError(self.error)

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._bells[rank].release()

    def _raise_if_failed(self) -> None:
        if self.error is not None:
            raise MeetingError(self.error)
