"""Plays the passes of a stage in parts: what is under way when each of them begins, in ns from the pass's begin.

A part that begins as it has begun before is not played again (`part_player`), nor is a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.clock import worked
from autopar.cost import Profile
from autopar.ir.branches import Coordinates
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, StagePlan
from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, DIRECTIONS, FORWARD
from autopar.simulate.engine import COMPUTE, Carried, Change, Flight, Moment, Moved, after_moves
from autopar.simulate.lowering import devices_per_node
from autopar.simulate.overlap import AS_EMITTED, Overlap
from autopar.simulate.part_player import (
    FOLLOWING,
    PRECEDING,
    Ends,
    Exit,
    LooksBack,
    PartEntry,
    PartPlayer,
)
from autopar.simulate.parts import Part
from autopar.simulate.passes import (
    LEAVE_GRADIENTS,
    Beyond,
    Bound,
    Meet,
    Pass,
    PassKind,
    Played,
    Rename,
    Standing,
    Travelling,
    optimizer_pass,
    whole_pass,
)
from autopar.simulate.renaming import Renames
from autopar.simulate.segments import Key
from autopar.simulate.sending import OtherLane
from autopar.simulate.variants import SentValues, Variants
from autopar.tunables import JOIN_PART_S, TAKE_PART_S

LONG_AGO = -(1 << 62)
NOTHING: frozenset[int] = frozenset()
NO_BOUND = Bound(float("inf"), 0)

_Streams = tuple[int, int, str, tuple[tuple[str, int], ...], tuple[Flight, ...]]
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


class PartedStage:
    """A stage of a plan, in parts."""

    def __init__(self, variants: Variants, plan: StagePlan, sent: SentValues) -> None:
        """plan: of the stage."""
        self.variants, self.plan = variants, plan
        self.joined = joined = variants.joined(plan, sent)
        worked(JOIN_PART_S * len(joined.players))
        self.optimizer_ns, self.workspace = variants.optimizer(plan) if variants.trains else (0, 0)
        is_alone = len(joined.players) == 1
        self.may_be_calm = not (variants.profile.host or joined.root or any(joined.lent) or is_alone)
        self._renames = Renames(
            variants.segments, joined.players, joined.following, joined.preceding, joined.root_parts, variants.named
        )
        self.renames: list[Rename] = [self._renames.of(n) for n in range(len(joined.players))]
        self._meets = any(player.meets for player in joined.players)
        names = (FORWARD, *joined.parts[0].directions)
        self._work_ns = {name: sum([part.work_ns[name] for part in joined.parts]) for name in names}
        self._work_ns["optimizer"] = self.optimizer_ns

    @property
    def parts(self) -> list[Part]:
        """What is played."""
        return self.joined.parts

    @property
    def waiting_bytes(self) -> int:
        """What waits on the host between the two passes of a microbatch."""
        return sum(call.host_bytes for part in self.joined.parts for call in part.lifetimes.copied.values())

    @property
    def receives(self) -> Collection[str]:
        """Tensors of earlier stages."""
        return self.variants.graph.received

    @property
    def kept(self) -> Collection[str]:
        """What it sends of those that autograd keeps anyway, or that are stored."""
        saved: list[bool] = [False] * self.joined.parts[0].lowered.num_memory
        for part in self.joined.parts:
            lowered, own = part.lowered, saved
            saved = [s in part.saved or (s < len(own) and own[s]) for s in lowered.storages]
        program, own_name = part.program, self._renames.in_last
        sent = ((own_name(name), program.values[value].storage) for (name, _), value in program.sends.items())
        return {
            name for name, storage in sent
            if storage in part.saved or (storage < len(own) and own[storage]) or program.memory[storage].owner < 0
        }  # fmt: skip

    @property
    def residents(self) -> list[tuple[int, str]]:
        """Bytes that are held through the step, and of what kind."""
        return self.variants.residents(self.plan, self.joined.parts)

    @property
    def host_bytes(self) -> int:
        """What is kept on the host."""
        return self.variants.host_bytes(self.plan)

    def has_work(self, name: str) -> bool:
        """Whether anything runs in a pass of that name."""
        return name == FORWARD or any(part.directions[name].steps for part in self.joined.parts)

    def work_ns(self, name: str) -> int:
        """What a pass of that name must compute."""
        return self._work_ns.get(name, 0)

    def play(self, kind: PassKind, carried: Carried, standing: Standing, bound: Bound | None = None) -> Pass:
        """The pass, from what the device and the stage have under way. Raises Beyond where that breaks the bound."""
        bound = bound or NO_BOUND
        key = self.state(kind, carried, standing)
        known = self.joined.passes.get(key) if kind.name in DIRECTIONS else None
        if known is None:
            known = self.played(*key, bound)
            if kind.name in DIRECTIONS:
                self.joined.passes[key] = known
        elif bound.beside_ns + known.length_ns > bound.until_ns:
            raise Beyond(bound.beside_ns + known.length_ns)
        return known

    def state(self, kind: PassKind, carried: Carried, standing: Standing) -> tuple[PassKind, Carried, Standing]:
        """All that a pass depends on."""
        if kind.name in LEAVE_GRADIENTS:
            standing = standing.without_gradients()
        return kind, Carried(carried.links, carried.in_flight, 0, carried.unmet_ns if self._meets else 0), standing

    def played(
        self, kind: PassKind, carried: Carried, standing: Standing, bound: Bound = NO_BOUND, meet: Meet | None = None
    ) -> Pass:
        """Plays a pass. meet: where other ranks do unlike work."""
        if kind.name == "begin":
            return self._begin_step(carried, meet)
        if kind.name == "optimizer":
            return self._optimize(carried, standing)
        return _PartedPass(self, kind, carried, standing, bound, meet).run()

    def _begin_step(self, carried: Carried, meet: Meet | None) -> Pass:
        gathered = self.variants.gathered(self.joined.parts, carried._replace(unmet_ns=0), meet)
        ready = [((n, value), *end) for n, found in gathered.ready.items() for value, end in found.items()]
        arriving = [
            ((n, unit), *one) for n, found in gathered.arriving.items() for unit, ends in found.items() for one in ends
        ]  # fmt: skip
        standing = Standing(ready=tuple(ready), arriving=tuple(arriving))
        return whole_pass(PassKind("begin"), gathered.done, standing, self._renames.of(-1))

    def _optimize(self, carried: Carried, standing: Standing) -> Pass:
        return optimizer_pass(self.variants.slowdowns, carried, standing, self.optimizer_ns, self.workspace)


class PartlySplitStage(PartedStage):
    """A stage of which some backward passes come in two parts, and others in one: `whole` is the same stage as it
    plays these, cut into the same segments, so that both go on from what the other has left under way."""

    def __init__(self, variants: Variants, plan: StagePlan, sent: SentValues, whole: PartedStage) -> None:
        super().__init__(variants, plan, sent)
        self._whole = whole

    def has_work(self, name: str) -> bool:
        """As in `PartedStage`."""
        return self._whole.has_work(name) if name == BACKWARD else super().has_work(name)

    def work_ns(self, name: str) -> int:
        """As in `PartedStage`."""
        return self._whole.work_ns(name) if name == BACKWARD else super().work_ns(name)

    def play(self, kind: PassKind, carried: Carried, standing: Standing, bound: Bound | None = None) -> Pass:
        """As in `PartedStage`."""
        if kind.name == BACKWARD:
            return self._whole.play(kind, carried, standing, bound)
        return super().play(kind, carried, standing, bound)


def stage_in_one(
    graph: Graph, plan: Plan, profile: Profile, overlap: Overlap = AS_EMITTED, coordinates: Coordinates | None = None,
    others: Sequence[OtherLane] = (),
) -> PartedStage:  # fmt: skip
    """A plan's only stage as one segment. coordinates, others: as in `Lowering`."""
    (part,) = plan.parts
    per_node = devices_per_node(plan, 0)
    variants = Variants(
        graph, graph, part, profile, per_node, is_cut=False, overlap=overlap, coordinates=coordinates,
        others=others,
    )  # fmt: skip
    return PartedStage(variants, part, {})


class _PartedPass:
    """One pass; times from its begin. Raises Beyond as soon as the step must take longer than its bound."""

    def __init__(
        self, stage: PartedStage, kind: PassKind, carried: Carried, standing: Standing, bound: Bound, meet: Meet | None
    ) -> None:  # fmt: skip
        self.stage, self.kind, self.bound, self.meet, joined = stage, kind, bound, meet, stage.joined
        self.variants, self.joined, self.players, self.lent_slots = stage.variants, joined, joined.players, joined.lent
        self.host, count = stage.variants.profile.host, len(joined.players)
        self.now = self.last = 0
        self.busy, self.waiting = self.host.pass_ns if self.host and stage.has_work(kind.name) else 0, kind.name
        self.begun_unmet_ns = self.unmet_ns = carried.unmet_ns
        self.has_met = False
        self.returned_ns = 0  # when the module that the stage is cut inside of has returned
        self.left_ns = stage.work_ns(kind.name)
        self.links, self.in_flight = dict(carried.links), [*carried.in_flight]
        self.pieces: list[tuple[int, Played, Rename]] = []
        self.changes: list[Change] = []
        self.home, self.held = [*standing.home], set(standing.held)
        self.ready: list[dict[int, tuple[int, str]]] = [{} for _ in range(count)]
        for (number, value), end, cause in standing.ready:
            self.ready[number][value] = end, cause
        self.arriving: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(count)]
        for (number, unit), end, size in standing.arriving:
            self.arriving[number].setdefault(unit, []).append((end, size))
        self.arrived: list[dict[int, tuple[int, str]]] = [{} for _ in range(count)]
        for (number, value), end, cause in standing.arrived if kind.name == BACKWARD else ():
            self.arrived[number][value] = end, cause
        self.live, self.pinned, self.whole = (
            _by_part(found, count) for found in (standing.live, standing.pinned, standing.whole)
        )  # fmt: skip
        self.lent: dict[Key, int] = dict(standing.lent)  # slots that stay gathered for several parts, and their bytes
        self.awaited: Ends = ()
        self.journeys = standing.journeys
        self.root = standing.root

    def run(self) -> Pass:
        """The pass."""
        (self._forward if self.kind.name == FORWARD else self._backward)()
        worked(TAKE_PART_S * len(self.pieces))
        return Pass(
            self.kind, tuple(self.pieces), self.changes, self.now, self.links,
            [span for span in self.in_flight if span[1] > self.now], 0,
            self.unmet_ns if self.has_met else self.unmet_ns - self.begun_unmet_ns, self.has_met, self._standing(),
        )  # fmt: skip

    def _standing(self) -> Standing:
        """What is under way at its end."""
        now = self.now
        return Standing(
            ready=_under_way(self.ready, now),
            live=_of_parts(self.live),
            pinned=_of_parts(self.pinned),
            arriving=tuple([
                ((number, unit), end, size)
                for number, units in enumerate(self.arriving) if units
                for unit, found in sorted(units.items()) for end, size in found
            ]),
            arrived=_under_way(self.arrived, now),
            lent=tuple(self.lent.items()),
            root=self.root,
            held=frozenset(self.held),
            whole=_of_parts(self.whole),
            journeys=self.journeys,
            home=tuple([(end, cause) for end, cause in self.home if end > now]),
        )  # fmt: skip

    def _streams(self, player: PartPlayer, kind: PassKind) -> _Streams:
        """What of the streams a part depends on."""
        now, looks_back = self.now, player.looks_back[kind.name]
        if looks_back:
            links = tuple([(link, max(self.links.get(link, 0), 0) - now) for link in player.links])
        else:
            links = tuple([(link, end - now) for link, end in sorted(self.links.items()) if end > now])
        flights = self.in_flight
        in_flight = (
            tuple([(a - now, b - now, slow, link) for a, b, slow, link in flights if b > now]) if flights else ()
        )
        host = self.busy - now if self.host else LONG_AGO if looks_back else 0
        return self.last - now, host, self.waiting if self.host else "", links, in_flight

    def _gathering(self, number: int, player: PartPlayer, kind: PassKind) -> _Gathering:
        """What it depends on of what is gathered."""
        now, last = self.now, self.last - self.now
        live, root = self.live[number], -1
        if player.has_root and self.joined.root is not None:
            root = self.root if kind.name != FORWARD and not player.begins_back else self.joined.root.num_slots
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
        memory = player.forward.known if kind.name == FORWARD else player.known
        known = memory.get(key) if self.meet is None else None
        if known is None:
            entry = PartEntry(
                kind, *streams, ready, *backward[:4], *gathering[:3], backward[4], *gathering[3:], *backward[5:],
                unmet_ns,
            )  # fmt: skip
            known = memory[key] = player.play_part(entry, self.meet)
        self._take(number, player, known)
        return known

    def _take(self, number: int, player: PartPlayer, known: Exit) -> None:
        """Goes on from where a part has left the streams, and what it has under way."""
        begin, done = self.now, known.done
        self.pieces.append((begin, done, self.stage.renames[number]))
        self.now = begin + done.length_ns
        self.unmet_ns, self.has_met = done.unmet_after(self.unmet_ns), self.has_met or done.has_met
        self.last, self.waiting = self.now + known.last_ns, known.waiting
        if self.host:
            self.busy = self.now + known.host_ns
        for link, end in done.links.items():
            self.links[link] = max(begin + end, self.links.get(link, 0))
        self.in_flight = [(begin + a, begin + b, slow, link) for a, b, slow, link in done.in_flight]
        if done.moved:
            self._move({begin + old: (begin + start, begin + end) for old, (start, end) in done.moved.items()})
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

    def _move(self, moved: Moved) -> None:
        """What was under way when a part began ends later, since it has shared its links with what the part sent."""
        self.home = [(after_moves(end, moved), kind) for end, kind in self.home]
        for found in (*self.ready, *self.arrived):
            found.update({value: (moved[end][1], cause) for value, (end, cause) in found.items() if end in moved})
        for units in self.arriving:
            for unit, ends in units.items():
                units[unit] = [(after_moves(end, moved), size) for end, size in ends]
        left = set(moved)
        for place in range(len(self.pieces) - 2, -1, -1):  # but for the one that moved them
            if not left:
                break
            begin, done, rename = self.pieces[place]
            own = {end for end in left if end - begin in done.sent_until}
            if own:
                tasks = [
                    (name, what, *_since(moved[end + begin], begin), kind)
                    if name != COMPUTE and end + begin in own else (name, what, start, end, kind)
                    for name, what, start, end, kind in done.tasks
                ]  # fmt: skip
                self.pieces[place] = begin, replace(done, tasks=tasks), rename
                left -= own

    def _take_gathered(self, number: int, player: PartPlayer, known: Exit, begin: int) -> None:
        self.arriving[number] = _arriving(known, known.live, begin)
        self.live[number], self.pinned[number] = known.live, known.pinned.difference(self.lent_slots[number])
        for n, key in self.lent_slots[number].items():
            if n in known.pinned:
                self.lent[key] = player.program.slots[n].used_bytes
            else:
                self.lent.pop(key, None)
        if player.has_root:
            self.root = known.root
        for unit in known.ahead:
            here = player.following if unit in player.following else player.preceding
            at, units = (self.joined.following if here is player.following else self.joined.preceding)[number]
            own = units[here.index(unit)]
            self.live[at] |= {own}
            packed = _arriving(known, {unit}, begin).get(unit, ())
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
        for units in self.arriving:
            for end, size in itertools.chain(*units.values()):
                self.changes.append((max(end, self.last), -size, "gathered", Moment.START))
            units.clear()
        self.live = [frozenset()] * len(self.players)
        self.pinned = [frozenset()] * len(self.players)

    # Passes ----------------------------------------

    def _done(self, work_ns: int) -> None:
        """Work of the compute stream is done; what is left cannot take less than it."""
        self.left_ns -= work_ns
        least_ns = self.bound.beside_ns + self.now + self.left_ns
        if least_ns > self.bound.until_ns:
            raise Beyond(least_ns)

    def _forward(self) -> None:
        latest, count = self.now, len(self.players)
        ends: Sequence[tuple[int, str] | None] = ()
        exits = []
        calm = self._calm_parts()
        self._done(sum([player.part.work_ns[FORWARD] for player in self.players[:calm]]))
        for number in range(calm, count):
            player, begin = self.players[number], self.now
            if player.recomputes and ends:
                self.arrived[number] = {v: found for v in player.reads if (found := ends[v]) is not None}
            try:
                left = self._play_forward(number, player, ends)
            except LooksBack:  # a part says so once, before it has changed anything
                left = self._play_forward(number, player, ends)
            exits.append(left)
            latest, lowered = begin + left.latest_ns, player.part.lowered
            if player.returns >= 0:
                self.returned_ns = begin + left.returned_ns
            self._done(player.part.work_ns[FORWARD])
            ends = _ends_after(ends, lowered.leaving, lowered.num_entering, left, begin)
        self.changes += self._freed(latest if exits else self.now)
        if self.joined.regathers and (self.variants.is_stage or not self.variants.trains):
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
        return self._play(number, player, self.kind, ready)

    def _calm_parts(self) -> int:
        """Plays parts as long as nothing is under way between them; returns the number of the first that is left."""
        if not self.stage.may_be_calm or any(end > self.now for end in self.links.values()):
            return 0
        now, pieces, count = self.now, self.pieces, len(self.pieces)
        begun_ns = unmet_ns = self.unmet_ns
        for number, player in enumerate(self.players):
            before_ns = unmet_ns if player.meets else 0
            known = player.forward.calm.get(before_ns)
            if known is None and not player.looks_back[FORWARD]:
                entry = PartEntry(self.kind, unmet_ns=before_ns)
                with suppress(LooksBack):
                    known = player.forward.calm[before_ns] = player.play_part(entry)
            if known is None:  # it asks for the past of the links, which is not followed here
                del pieces[count:]
                self.stage.may_be_calm, self.unmet_ns, self.has_met = False, begun_ns, False
                return 0
            if not known.is_calm or self.ready[number] or self.arriving[number]:
                self.now = self.last = now
                return number
            done = known.done
            if player.returns >= 0:
                self.returned_ns = now + known.returned_ns
            pieces.append((now, done, self.stage.renames[number]))
            now += done.length_ns
            self.unmet_ns = unmet_ns = done.unmet_after(unmet_ns)
            self.has_met = self.has_met or done.has_met
        self.now = self.last = now
        return len(self.players)

    def _freed(self, latest: int) -> list[Change]:
        freed = sum([player.part.freed_bytes for player in self.players])
        returned = sum([player.part.returned_bytes for player in self.players])
        ends = (latest, freed), (self.returned_ns, returned)
        return [(end, -size, "activations", Moment.END) for end, size in ends if size]

    def _backward(self) -> None:
        kind = self.kind
        if self.root >= 0 and self.joined.root is not None:
            self.root = self.joined.root.num_slots
        self.open: dict[int, _OpenBucket] = {}
        gradients: dict[int, Ends] = {}
        transient: frozenset[int] = frozenset()
        exits = []
        keeps = self.variants.tracked(self.stage.plan.microbatches)
        for number in range(len(self.players) - 1, -1, -1):
            player, begin, names = self.players[number], self.now, keeps[number]
            try:
                left = self._play_backward(number, player, kind, gradients, transient, names)
            except LooksBack:
                left = self._play_backward(number, player, kind, gradients, transient, names)
            exits.append(left)
            self._done(player.part.work_ns[kind.name])
            if names:
                self.held.update([name for place, name in names if place in left.held])
            self.whole[number] = left.whole
            self.journeys = tuple([one.moved(begin) for one in left.journeys])
            self._note(number, player, left, begin)
            if gradients or left.gradients:
                gradients = _gradients_before(gradients, player, left, begin)
            transient = left.transient
        if self.joined.regathers:
            self._end_pass(exits)
        received = sum([player.part.received_bytes.get(kind.name, 0) for player in self.players])
        if received:
            self.changes.append((self.last, -received, "activation gradients", Moment.START))
        dropped = sum([player.part.lifetimes.dropped_bytes for player in self.players])
        if dropped and kind.name == BACKWARD_INPUT:
            self.changes.append((self.last, -dropped, "activations", Moment.START))

    def _play_backward(
        self, number: int, player: PartPlayer, kind: PassKind, gradients: Mapping[int, Ends], transient: frozenset[int],
        names: Sequence[tuple[int, str]],
    ) -> Exit:  # fmt: skip
        begin, lowered, looks_back = self.now, player.part.lowered, player.looks_back[kind.name]
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
        since = 0 if player.recomputes and player.looks_back[self.kind.name] else begin
        ready = self._coming(number, begin, since)
        return ready + tuple([
            (value, end - begin, cause) for value, (end, cause) in self.arrived[number].items() if end > since
        ])  # fmt: skip

    # Buckets ----------------------------------------

    def _under_way(self, begin: int) -> tuple[Travelling, ...]:
        last = self.last - begin
        found = []
        for one in (one.moved(-begin) for one in self.journeys):
            cut = None if one.cut_ns is None else max(last, one.cut_ns)
            found.append(
                one._replace(cut_ns=cut) if one.end_ns > last else one._replace(end_ns=last, kind="", cut_ns=cut)
            )
        return tuple(found)

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
        if not player.is_resized_with_others:
            return ()
        found = [(0, 0)] * len(player.shares)
        for index, way in player.is_resized_with_others:
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
            if share.comes and index in left.sent and player.program.slots[share.slots[0]].is_resized:
                for at, numbers in members:
                    self.whole[at] = self.whole[at].difference(numbers)
                    self.held.update([self._name(at, n) for n in numbers])
            if share.goes:
                own = begin + left.own[index] if left.own[index] >= 0 else -1
                is_resized = player.program.slots[share.slots[0]].is_resized
                opened[share.way] = max(end, own), (*members, (number, share.slots)) if is_resized else ()
        self.open = opened


def _since(span: tuple[int, int], begin: int) -> tuple[int, int]:
    return span[0] - begin, span[1] - begin


def _by_part(found: frozenset[tuple[int, int]], count: int) -> list[frozenset[int]]:
    """Numbers by their part."""
    by_part: list[frozenset[int]] = [NOTHING] * count
    for number, own in found:
        by_part[number] |= {own}
    return by_part


def _of_parts(by_part: Sequence[frozenset[int]]) -> frozenset[tuple[int, int]]:
    """Numbers with that of their part."""
    return frozenset([(number, own) for number, found in enumerate(by_part) if found for own in found])


def _arriving(known: Exit, units: Collection[int], begin: int) -> dict[int, list[tuple[int, int]]]:
    """What arrives packed of some units, when a part has ended that began then."""
    found: dict[int, list[tuple[int, int]]] = {}
    for unit, end, size in known.arriving:
        if unit in units:
            found.setdefault(unit, []).append((begin + end, size))
    return found


def _under_way(
    by_part: Sequence[Mapping[int, tuple[int, str]]], now: int
) -> tuple[tuple[tuple[int, int], int, str], ...]:
    """What ends later than that, in the order of parts."""
    return tuple([
        ((number, value), end, cause)
        for number, found in enumerate(by_part) if found
        for value, (end, cause) in sorted(found.items()) if end > now
    ])  # fmt: skip


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
