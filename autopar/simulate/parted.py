"""One step of a plan in parts: what is under way when each of them begins, in absolute time.

A part that begins as it has begun before is not played again (`part_player`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from autopar.ir.plan import StagePlan
from autopar.ir.schedule import BACKWARD, FORWARD, turns
from autopar.simulate.differences import Key
from autopar.simulate.engine import Carried, Change, Engine, Moment
from autopar.simulate.part_player import (
    FOLLOWING,
    PRECEDING,
    Ends,
    Exit,
    LooksBack,
    PartEntry,
    PartPlayer,
    Travelling,
    ending,
    finished,
)
from autopar.simulate.parts import Part
from autopar.simulate.player import Pass, PassKind
from autopar.simulate.schedule import Submesh, lane_of
from autopar.simulate.timeline import Timeline, TimelinePiece
from autopar.simulate.variants import Variants

LONG_AGO = -(1 << 62)
FORWARD_KIND = PassKind(FORWARD)
NOTHING: frozenset[int] = frozenset()

_Streams = tuple[int, int, str, tuple[tuple[str, int], ...], tuple[tuple[int, int], ...]]
"""`PartEntry`'s fields from last_ns to in_flight."""

_Coming = tuple[tuple[int, int, str], ...]

_Gathering = tuple[frozenset[int], tuple[tuple[int, int, int], ...], frozenset[int], int, Ends]
"""live, arriving, pinned, root, awaited."""

_Gradients = tuple[
    tuple[tuple[int, Ends], ...], tuple[int, ...], frozenset[int], frozenset[int], frozenset[int],
    tuple[Travelling, ...], tuple[tuple[int, int], ...],
]  # fmt: skip
"""gradients, others, held, transient, whole, journeys, arrivals."""

_OpenBucket = tuple[int, tuple[tuple[int, tuple[int, ...]], ...]]
"""When its last gradient is there, and of shards the slots of each part that are in it."""

NO_GRADIENTS: _Gradients = ((), (), NOTHING, NOTHING, NOTHING, (), ())


class Beyond(Exception):
    """The step takes longer than asked for: at least so many nanoseconds."""

    def __init__(self, least_ns: int) -> None:
        super().__init__(f"at least {least_ns} ns")
        self.least_ns = least_ns


class PartedStep:
    """One step in absolute time. Raises Beyond as soon as it must take longer than `until_ns`."""

    def __init__(self, variants: Variants, plan: StagePlan, until_ns: float = math.inf) -> None:
        self.variants, self.plan, self.until_ns = variants, plan, until_ns
        self.joined = joined = variants.joined(plan)
        self.players, self.lent_slots = joined.players, joined.lent
        self.host = variants.profile.host
        self.optimizer_ns, self.workspace = variants.optimizer(plan) if variants.trains else (0, 0)
        self.left_ns = self.optimizer_ns + plan.microbatches * sum([sum(part.work_ns) for part in self.parts])
        gathered, count = joined.gathered, len(joined.players)
        self.begin = self.busy = 0
        self.now = gathered.done.length_ns
        self.last, self.waiting = self.now + gathered.last_ns, ""
        self.unmet_ns = gathered.done.unmet_ns
        self.links: dict[str, int] = dict(gathered.done.links)
        self.in_flight = list(gathered.done.in_flight)
        self.pieces: list[tuple[int, Pass]] = [(0, gathered.done)]
        self.home: list[tuple[int, str]] = []
        self.held: set[str] = set()
        self.changes: list[Change] = []
        self.ready: list[dict[int, tuple[int, str]]] = [dict(gathered.ready.get(n, ())) for n in range(count)]
        self.arriving: list[dict[int, list[tuple[int, int]]]] = [
            dict(gathered.arriving.get(n, ())) for n in range(count)
        ]  # fmt: skip
        self.arrived: list[Sequence[tuple[int, str] | None]] = [()] * count
        self.live: list[frozenset[int]] = [frozenset()] * count
        self.pinned: list[frozenset[int]] = [frozenset()] * count
        self.whole: list[frozenset[int]] = [frozenset()] * count
        self.lent: dict[Key, int] = {}  # slots that stay gathered for several parts, and their bytes
        self.awaited: Ends = ()
        self.journeys: tuple[Travelling, ...] = ()
        self.root = -1
        self.num_backward = 0
        self.may_be_calm = not (self.host or joined.root or any(joined.lent))
        self.run()

    def run(self) -> None:
        """Everything."""
        (order,) = turns(self.plan.schedule, [[0]], self.plan.microbatches, self.variants.trains)
        for turn in order:
            if turn.direction == FORWARD:
                self._forward()
            else:
                self._backward()
        if self.variants.trains:
            self._optimize()
        self.end_ns = max([self.now, *self.links.values()])

    def _begin(self, direction: str) -> None:
        self.begin = self.last = self.now
        self.busy = self.now + (self.host.pass_ns if self.host else 0)
        self.waiting, self.awaited = direction, ()
        self.journeys = tuple([one._replace(kind="gradient") for one in self.journeys])

    def _streams(self, player: PartPlayer, kind: PassKind) -> _Streams:
        """What of the streams a part depends on."""
        now, looks_back = self.now, player.looks_back[kind.name]
        if looks_back:
            links = tuple([(link, max(self.links.get(link, 0), self.begin) - now) for link in player.levels])
        else:
            links = tuple([(link, end - now) for link, end in sorted(self.links.items()) if end > now])
        in_flight = tuple([(a - now, b - now) for a, b in self.in_flight if b > now]) if self.in_flight else ()
        host = self.busy - now if self.host else LONG_AGO if looks_back else 0
        return self.last - now, host, self.waiting if self.host else "", links, in_flight

    def _gathering(self, number: int, player: PartPlayer, kind: PassKind) -> _Gathering:
        """What it depends on of what is gathered."""
        now, last = self.now, self.last - self.now
        live, root = self.live[number], -1
        if player.has_root and self.joined.root is not None:
            root = self.root if kind.name == BACKWARD else self.joined.root.num_slots
            live = live | {0} if self.root >= 0 else live
        arriving: tuple[tuple[int, int, int], ...] = ()
        if self.arriving[number]:
            arriving = tuple([
                (unit, max(end - now, last), size)
                for unit, found in sorted(self.arriving[number].items()) for end, size in found
            ])  # fmt: skip
        pinned = self.pinned[number]
        if self.lent:
            pinned = pinned | {n for n, key in self.lent_slots[number].items() if key in self.lent}
        awaited = tuple([(end - now, cause) for end, cause in self.awaited if end > now]) if self.awaited else ()
        return live, arriving, pinned, root, awaited

    def _play(
        self, number: int, player: PartPlayer, kind: PassKind, ready: _Coming, backward: _Gradients = NO_GRADIENTS
    ) -> Exit:
        streams, gathering = self._streams(player, kind), self._gathering(number, player, kind)
        unmet_ns = self.unmet_ns if player.meets else 0
        key = kind, streams, ready, gathering, backward, unmet_ns
        memory = player.forward.known if kind is FORWARD_KIND else player.known
        known = memory.get(key)
        if known is None:
            entry = PartEntry(
                kind, *streams, ready, *backward[:4], *gathering[:3], backward[4], *gathering[3:], *backward[5:],
                unmet_ns,
            )  # fmt: skip
            known = memory[key] = player.play_part(entry)
        self._take(number, player, known)
        return known

    def _take(self, number: int, player: PartPlayer, known: Exit) -> None:
        """Goes on from where a part has left the streams, and what it has under way."""
        begin, done = self.now, known.done
        self.pieces.append((begin, done))
        self.now = begin + done.length_ns
        self.unmet_ns = done.unmet_after(self.unmet_ns)
        self.last, self.waiting = self.now + known.last_ns, known.waiting
        if self.host:
            self.busy = self.now + known.host_ns
        for link, end in done.links.items():
            self.links[link] = max(begin + end, self.links.get(link, 0))
        self.in_flight = [(begin + a, begin + b) for a, b in done.in_flight]
        if known.home:
            self.home += [(begin + end, kind) for end, kind in known.home]
        self.awaited = tuple([(begin + end, cause) for end, cause in known.awaited]) if known.awaited else ()
        for value, end, cause in known.ready:
            at, own = (number, value) if value not in player.foreign else self._whose(number, *player.foreign[value])
            self.ready[at][own] = begin + end, cause
        if self.joined.regathers:
            self._take_gathered(number, player, known, begin)
        elif self.arriving[number]:
            self.arriving[number] = {}

    def _take_gathered(self, number: int, player: PartPlayer, known: Exit, begin: int) -> None:
        self.arriving[number] = {}
        self.live[number], self.pinned[number] = known.live, known.pinned.difference(self.lent_slots[number])
        for n, key in self.lent_slots[number].items():
            if n in known.pinned:
                self.lent[key] = player.program.slots[n].used_bytes
            else:
                self.lent.pop(key, None)
        if player.has_root:
            self.root = known.root
        for unit in known.ahead:
            at, own = (self.joined.following if unit == player.following else self.joined.preceding)[number]
            self.live[at] |= {own}
            packed = [(begin + end, size) for u, end, size in known.arriving if u == unit]
            self.arriving[at][own] = [*self.arriving[at].get(own, ()), *packed]

    def _whose(self, number: int, whose: int, value: int) -> tuple[int, int]:
        if whose == FOLLOWING:
            return self.joined.following[number][0], value
        if whose == PRECEDING:
            return self.joined.preceding[number][0], value
        return self.joined.root_parts[whose], value

    def _coming(self, number: int, begin: int, since: int | None = None) -> tuple[tuple[int, int, str], ...]:
        """Slots, and what was sent inside operators, that are under way, or were since."""
        ready, since = self.ready[number], begin if since is None else since
        if not ready:
            return ()
        found = tuple([(value, end - begin, cause) for value, (end, cause) in sorted(ready.items()) if end > since])
        if not found:
            ready.clear()
        return found

    def _end_pass(self, exits: Sequence[Exit]) -> None:
        """Regathered parameters that are left are of no more use."""
        left = sum(one.left_bytes for one in exits) + sum(self.lent.values())
        self.lent = {}
        for player, pinned in zip(self.players, self.pinned, strict=True):
            left += sum(player.program.slots[n].used_bytes for n in pinned)
        if self.root >= 0 and self.joined.root is not None:
            left += self.joined.root.num_bytes
            self.root = -1
        if left:
            self.changes.append((self.last, -left, "gathered", Moment.START))
        self.live = [frozenset()] * len(self.players)
        self.pinned = [frozenset()] * len(self.players)

    # Passes ----------------------------------------

    def _done(self, work_ns: int) -> None:
        """Work of the compute stream is done; what is left cannot take less than it."""
        self.left_ns -= work_ns
        if self.now + self.left_ns > self.until_ns:
            raise Beyond(self.now + self.left_ns)

    def _forward(self) -> None:
        self._begin(FORWARD)
        latest, count = self.now, len(self.players)
        ends: Sequence[tuple[int, str] | None] = ()
        exits = []
        calm = self._calm_parts()
        self._done(sum([player.part.work_ns[0] for player in self.players[:calm]]))
        for number in range(calm, count):
            player, begin = self.players[number], self.now
            self.arrived[number] = ends
            try:
                left = self._play_forward(number, player, ends)
            except LooksBack:  # a part says so once, before it has changed anything
                left = self._play_forward(number, player, ends)
            exits.append(left)
            latest, lowered = begin + left.latest_ns, player.part.lowered
            self._done(player.part.work_ns[0])
            ends = _ends_after(ends, lowered.leaving, lowered.num_entering, left, begin)
        self.changes += self._freed(latest if exits else self.now)
        if not self.variants.trains and self.joined.regathers:
            self._end_pass(exits)

    def _play_forward(self, number: int, player: PartPlayer, ends: Sequence[tuple[int, str] | None]) -> Exit:
        begin, looks_back = self.now, player.looks_back[FORWARD]
        ready = self._coming(number, begin)
        if ends:
            ready += tuple([
                (value, found[0] - begin, found[1])
                for value in player.reads
                if (found := ends[value]) is not None and (looks_back or found[0] > begin)
            ])  # fmt: skip
        return self._play(number, player, FORWARD_KIND, ready)

    def _calm_parts(self) -> int:
        """Plays parts as long as nothing is under way between them; returns the number of the first that is left."""
        if not self.may_be_calm or any(end > self.now for end in self.links.values()):
            return 0
        now, pieces, count = self.now, self.pieces, len(self.pieces)
        begun_ns = unmet_ns = self.unmet_ns
        for number, player in enumerate(self.players):
            before_ns = unmet_ns if player.meets else 0
            known = player.forward.calm.get(before_ns)
            if known is None and not player.looks_back[FORWARD]:
                entry = PartEntry(FORWARD_KIND, unmet_ns=before_ns)
                with suppress(LooksBack):
                    known = player.forward.calm[before_ns] = player.play_part(entry)
            if known is None:  # it asks for the past of the links, which is not followed here
                del pieces[count:]
                self.may_be_calm, self.unmet_ns = False, begun_ns
                return 0
            if not known.is_calm or self.ready[number] or self.arriving[number]:
                self.now = self.last = now
                return number
            done = known.done
            pieces.append((now, done))
            now += done.length_ns
            self.unmet_ns = unmet_ns = done.unmet_after(unmet_ns)
        self.now = self.last = now
        return len(self.players)

    def _freed(self, latest: int) -> list[Change]:
        freed = sum([player.part.freed_bytes for player in self.players])
        return [(latest, -freed, "activations", Moment.END)] if freed else []

    def _backward(self) -> None:
        self._begin(BACKWARD)
        self.num_backward += 1
        kind = PassKind(BACKWARD, self.num_backward == 1, self.num_backward == self.plan.microbatches)
        if self.root >= 0 and self.joined.root is not None:
            self.root = self.joined.root.num_slots
        self.open: dict[int, _OpenBucket] = {}
        gradients: dict[int, Ends] = {}
        transient: frozenset[int] = frozenset()
        exits = []
        keeps = self.variants.tracked(self.plan.microbatches)
        for number in range(len(self.players) - 1, -1, -1):
            player, begin, names = self.players[number], self.now, keeps[number]
            try:
                left = self._play_backward(number, player, kind, gradients, transient, names)
            except LooksBack:
                left = self._play_backward(number, player, kind, gradients, transient, names)
            exits.append(left)
            self._done(player.part.work_ns[1])
            if names:
                self.held.update([name for place, name in names if place in left.held])
            self.whole[number] = left.whole
            self.journeys = tuple([one._replace(end_ns=begin + one.end_ns) for one in left.journeys])
            self._note(number, player, left, begin)
            if gradients or left.gradients:
                gradients = _gradients_before(gradients, player, left, begin)
            transient = left.transient
        if self.joined.regathers:
            self._end_pass(exits)

    def _play_backward(
        self, number: int, player: PartPlayer, kind: PassKind, gradients: Mapping[int, Ends], transient: frozenset[int],
        names: Sequence[tuple[int, str]],
    ) -> Exit:  # fmt: skip
        begin, lowered, looks_back = self.now, player.part.lowered, player.looks_back[BACKWARD]
        coming = tuple([
            (lowered.leaving[place], under_way)
            for place, ends in gradients.items()
            if (under_way := tuple([(e - begin, cause) for e, cause in ends if looks_back or e > begin]))
        ]) if gradients else ()  # fmt: skip
        held = frozenset([place for place, name in names if name in self.held]) if self.held else NOTHING
        leaving = frozenset([lowered.leaving[place] for place in transient]) if transient else NOTHING
        journeys = self._under_way(begin) if self.journeys else ()
        whole, others = self.whole[number], self._others(player, begin)
        backward = (coming, others, held, leaving, whole, journeys, self._arrivals(player))
        return self._play(number, player, kind, self._coming_back(number, player), backward)

    def _coming_back(self, number: int, player: PartPlayer) -> _Coming:
        """Slots, and what the part computes again from, that are under way."""
        begin = self.now
        since = self.begin if player.recomputes and player.looks_back[BACKWARD] else begin
        ready = self._coming(number, begin, since)
        if player.recomputes and self.arrived[number]:
            arrived = self.arrived[number]
            ready += tuple([
                (v, found[0] - begin, found[1])
                for v in player.reads if (found := arrived[v]) is not None and found[0] > since
            ])  # fmt: skip
        return ready

    # Buckets ----------------------------------------

    def _under_way(self, begin: int) -> tuple[Travelling, ...]:
        last = self.last - begin
        return tuple([
            one._replace(end_ns=one.end_ns - begin) if one.end_ns - begin > last else one._replace(end_ns=last, kind="")
            for one in self.journeys
        ])  # fmt: skip

    def _others(self, player: PartPlayer, begin: int) -> tuple[int, ...]:
        """By share that the part completes, when the last gradient of other parts was there."""
        if not player.waits:
            return ()
        found = [0] * len(player.shares)
        for index, way in player.waits:
            found[index] = max(0, self.open[way][0] - begin)
        return tuple(found)

    def _arrivals(self, player: PartPlayer) -> tuple[tuple[int, int], ...]:
        """Bytes of other parts' shards that go home with this part's: new ones, and those added to what is there."""
        if not player.shrinks_with_others:
            return ()
        found = [(0, 0)] * len(player.shares)
        for index, way in player.shrinks_with_others:
            new = added = 0
            seen = set(self.held)
            for at, numbers in self.open[way][1]:
                for n in numbers:
                    name, size = self._name(at, n), self.players[at].program.slots[n].stored_bytes
                    added += size if name in seen else 0
                    new += 0 if name in seen else size
                    seen.add(name)
            found[index] = new, added
        return tuple(found)

    def _name(self, at: int, number: int) -> str:
        """The tensor of a slot, which may be another one's where an equal part was lowered."""
        player = self.players[at]
        keeps = player.part.lowered.keeps
        return self.variants.segments[at].keeps[keeps.index(player.program.slots[number].tensor)]

    def _note(self, number: int, player: PartPlayer, left: Exit, begin: int) -> None:
        """Notes what is in buckets that other parts complete, and of those that went home what they did for others."""
        if not player.joins_others:
            return
        opened = dict(self.open)
        for index, share in player.joins_others:
            end, members = self.open[share.way] if share.comes else (-1, ())
            if share.comes and index in left.sent and player.program.slots[share.slots[0]].shrinks:
                for at, numbers in members:
                    self.whole[at] = self.whole[at].difference(numbers)
                    self.held.update([self._name(at, n) for n in numbers])
            if share.goes:
                own = begin + left.own[index] if left.own[index] >= 0 else -1
                shrinks = player.program.slots[share.slots[0]].shrinks
                opened[share.way] = max(end, own), (*members, (number, share.slots)) if shrinks else ()
        self.open = opened

    def _optimize(self) -> None:
        links = tuple(sorted((link, end - self.now) for link, end in self.links.items() if end > self.now))
        in_flight = tuple((a - self.now, b - self.now) for a, b in self.in_flight if b > self.now)
        engine = Engine(self.variants.profile.facts.overlap_slowdown, Carried(links, in_flight))
        after = [engine.carry(end - self.now, kind) for end, kind in self.home if end > self.now]
        for one in self.journeys:
            end = max(0, one.end_ns - self.now)
            after.append(engine.carry(end, "gradient"))
            engine.allocations += ending(one, end, Moment.ALL_ARRIVE, Moment.ALL_ARRIVED)
        taken = self.workspace
        task = engine.compute("optimizer", "optimizer", self.optimizer_ns, after)
        engine.allocate(task, taken, "workspace")
        engine.release(task, taken, "workspace")
        self.pieces.append((self.now, finished(PassKind("optimizer"), engine, {}, {})))
        self.now += engine.free_ns

    # Results ----------------------------------------

    def most_bytes(self) -> int:
        """At least the peak: every part of a pass at its own fullest, as if that were at one time."""
        rise = self.variants.rise_bytes
        played = sum([rise(done) for _, done in self.pieces]) + sum([max(0, change[1]) for change in self.changes])
        return self.variants.resident_bytes(self.plan, self.parts) + played

    @property
    def parts(self) -> list[Part]:
        """What was played."""
        return [player.part for player in self.players]

    def timeline(self) -> Timeline:
        """Everything that was played; tasks have the names of equal layers' ones."""
        submesh = Submesh(range(self.plan.mesh.num_devices), [0])
        for begin, done in self.pieces:
            submesh.take(done, begin, "")
        resident = [
            (0, size, kind, Moment.START) for size, kind in self.variants.residents(self.plan, self.parts) if size
        ]
        submesh.pieces.append(TimelinePiece(0, "", [], [*resident, *self.changes]))
        submesh.free_ns = self.now
        submesh.links = self.links
        lane = lane_of(submesh, self.end_ns)
        return Timeline((lane,), self.end_ns, lane.breakdown, lane.exposed, lane.comm_bytes)


def _ends_after(
    ends: Sequence[tuple[int, str] | None], leaving: Sequence[int], num_entering: int, left: Exit, begin: int
) -> Sequence[tuple[int, str] | None]:
    """When the values are there that the next part begins with, as far as a task makes them."""
    if not ends and not left.made:
        return ()
    after = [ends[value] if ends and value < num_entering else None for value in leaving]
    for place, end, cause in left.made:
        after[place] = begin + end, cause
    return after


def _gradients_before(
    gradients: Mapping[int, Ends], player: PartPlayer, left: Exit, begin: int
) -> dict[int, Ends]:  # fmt: skip
    """Contributions to the gradients of the values that a part begins with."""
    lowered = player.part.lowered
    passed = {v: place for place, v in enumerate(lowered.leaving) if v < lowered.num_entering}
    before = {value: gradients[place] for value, place in passed.items() if place in gradients}
    for value, ends in left.gradients:
        before[value] = (*before.get(value, ()), *((begin + e, cause) for e, cause in ends))
    return before
