"""Simulates plans that differ little from those before: what is the same as in an earlier plan is not played again.

A graph is cut into segments (`repeats`), each of which is lowered by itself (`parts`) and played on from where those
before have left the streams (`part_player`). A segment with equal placements in an equal context is lowered once, and
one that begins in an equal state is played once, wherever in the model it is and in whichever plan. FlexFlow's delta
simulation (MLSys'19, 5.3) updates the times of tasks that a change reaches; here these are segments, and those that a
change reaches without a difference are not played again either.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from autopar.cost import Profile
from autopar.cost.collectives import LEVELS
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Step
from autopar.ir.structure import batch_inputs
from autopar.runtime.packing import pack_gradients
from autopar.simulate.engine import Carried, Change, Engine, Moment
from autopar.simulate.facts import graph_facts
from autopar.simulate.part_player import (
    FOLLOWING, PRECEDING, Ahead, Ends, Entry, Exit, PartPlayer, Root, RootBucket, Share, Travelling, Unsupported, ending, finished, Begin,
)  # fmt: skip
from autopar.simulate.parts import Arriving, Crossing, Gradients, Kept, Lowered, Marked, Part, PartLowering, Wanted, kept_after
from autopar.simulate.passes import BACKWARD, FORWARD, turns
from autopar.simulate.player import Pass, PassKind
from autopar.simulate.program import Program, Slot, is_summed_first
from autopar.simulate.repeats import Segment, segments_of
from autopar.simulate.schedule import Submesh, _differ, _profiles, lane_of, simulate
from autopar.simulate.timeline import Piece, Timeline

KEPT_TIMELINES = 4
KEPT_FAMILIES = 4


class Incremental:
    """Simulates plans that differ little from those before; equal to `simulate` to the nanosecond and the byte.

    Plans of several stages, with branches, on unlike devices or with unequal shares are simulated as a whole.
    """

    def __init__(self, graph: Graph, profile: Profile | Mapping[str, Profile]) -> None:
        self._graph, self._profile = graph, profile
        self._timelines: OrderedDict[int, tuple[Plan, Timeline]] = OrderedDict()
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self.fallbacks = 0

    def step_time_ns(self, plan: Plan) -> int:
        """As `simulate(graph, plan, profile).step_time_ns`."""
        try:
            return self._step(plan).end_ns
        except Unsupported:
            self.fallbacks += 1
            return self._timeline(plan).step_time_ns

    def peak_bytes(self, plan: Plan) -> int:
        """As `simulate(graph, plan, profile).peak_bytes`."""
        return self.timeline(plan).peak_bytes

    def timeline(self, plan: Plan) -> Timeline:
        """As `simulate(graph, plan, profile)`, but for the names of tasks: those of equal layers."""
        try:
            return self._step(plan).timeline()
        except Unsupported:
            self.fallbacks += 1
            return self._timeline(plan)

    def least_time_ns(self, plan: Plan) -> int:
        """A lower bound of the step time: no stream's work."""
        return max(self._timeline(plan).work_ns().values(), default=0)

    def _step(self, plan: Plan) -> _Step:
        if plan.stages or plan.forks or _differ(plan):
            raise Unsupported
        key = plan.axes, plan.mesh, plan.microbatches, plan.recompute, plan.mode, plan.optimizer, plan.blocks
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = _Family(self._graph, plan, self._profile)
            if len(self._families) > KEPT_FAMILIES:
                self._families.popitem(last=False)
        step = _Step(family, plan, family.played(plan))
        step.run()
        return step

    def _timeline(self, plan: Plan) -> Timeline:
        known = self._timelines.get(id(plan))
        if known is None or known[0] is not plan:
            known = self._timelines[id(plan)] = plan, simulate(self._graph, plan, self._profile)
            if len(self._timelines) > KEPT_TIMELINES:
                self._timelines.popitem(last=False)
        return known[1]


class _Packed(NamedTuple):
    """Shares by part, and the numbers of their buckets; slots of each bucket, by part and number."""

    shares: list[tuple[Share, ...]]
    buckets: list[tuple[int, ...]]
    members: list[list[tuple[int, int, Slot]]]


class _Gathered(NamedTuple):
    """What begins the step: parameters that are gathered once. ready: by part, of slots' values, when they are there;
    arriving: by part, of its units, when what is packed is there, and its bytes; changes: of memory."""

    ready: dict[int, dict[int, tuple[int, str]]]
    arriving: dict[int, dict[int, list[tuple[int, int]]]]
    done: Pass
    last_ns: int


class _Played(NamedTuple):
    """The parts of a plan, with what joins them."""

    players: list[PartPlayer]
    packed: _Packed
    following: list[tuple[int, int]]
    preceding: list[tuple[int, int]]
    root_parts: tuple[int, ...]
    root: Root | None
    gathered: _Gathered
    lent: list[dict[int, tuple[str, Placement]]]


class _Family:
    """Plans that differ in placements alone."""

    def __init__(self, graph: Graph, plan: Plan, profile: Profile | Mapping[str, Profile]) -> None:
        (self.profile,) = _profiles(plan, profile)
        self.graph = graph
        facts = graph_facts(graph, self.profile.device_type)
        self.segments = segments_of(graph, facts, frozenset(plan.recompute))
        batched = {name: graph.tensors[name].shape[0] for name in batch_inputs(graph)}
        per_node = plan.mesh.devices_per_node
        self.lowering = PartLowering(graph, plan, self.profile, per_node, facts, batched)
        self.trains = self.lowering.trains
        self._numbers: dict[Hashable, int] = {}
        self._lowered: dict[Hashable, Lowered] = {}
        self._players: dict[Hashable, PartPlayer] = {}
        self._joined: dict[tuple[Part, ...], _Played] = {}

    def number(self, content: Hashable) -> int:
        """One number for equal things."""
        return self._numbers.setdefault(content, len(self._numbers))

    def played(self, plan: Plan) -> _Played:
        """The plan's parts, as they are played."""
        parts = tuple(self._parts(plan))
        known = self._joined.get(parts)
        if known is None:
            known = self._joined[parts] = self._join(parts)
        return known

    def _join(self, parts: tuple[Part, ...]) -> _Played:
        lent = self._lent(parts)
        packed = self._packed_shares(parts)
        following, preceding = _neighbours(parts)
        root_parts, root = self._root(parts)
        players = []
        for number, part in enumerate(parts):
            ahead, behind = following[number], preceding[number]
            key = (
                part, packed.shares[number],
                Ahead(parts[ahead[0]], ahead[1]) if ahead[0] >= 0 and ahead[1] in parts[ahead[0]].orders.gathers else None,
                Ahead(parts[behind[0]], behind[1]) if behind[0] >= 0 and _is_entered(parts[behind[0]], behind[1]) else None,
                root if number == 0 or number in root_parts else None, number == 0,
                frozenset(n for n in lent[number] if part.program.slots[n].value < part.lowered.num_entering),
            )  # fmt: skip
            player = self._players.get(key)
            if player is None:
                player = self._players[key] = PartPlayer(key[0], self.profile, self.trains, *key[1:])
            players.append(player)
        borrowed = [_borrowed(player, number, preceding, parts, lent) for number, player in enumerate(players)]
        lent = [own | of_others for own, of_others in zip(lent, borrowed, strict=True)]
        return _Played(players, packed, following, preceding, root_parts, root, self._gathered(parts), lent)

    def held_through(self, plan: Plan, parts: Sequence[Part]) -> Program:
        """What stays through the step, and the optimizer's time and memory."""
        lowering = self.lowering
        lowering.plan, lowering.program = plan, Program()
        loss = self.graph.loss
        lowering.placements = {} if loss is None else {loss: ()}
        constants: dict[object, int] = {}
        entering: list[object] = [(-1, n) for n in range(parts[0].lowered.num_memory)]
        for number, lowered in enumerate(part.lowered for part in parts):
            names = {storage: (number, storage) for storage in (*lowered.constants, *lowered.storages)}
            names |= dict(enumerate(entering))
            constants.update((names[storage], size) for storage, size in lowered.constants.items())
            entering = [names[storage] for storage in lowered.storages]
        lowering.constants = dict(enumerate(constants.values()))
        lowering._residents()
        return lowering.program

    def _lent(self, parts: Sequence[Part]) -> list[dict[int, tuple[str, Placement]]]:
        """For each part, by number, the regathered slots that several parts read and that a unit of the first holds.

        Raises Unsupported where that unit may be asked for ahead by another reader.
        """
        units: dict[tuple[str, Placement], int] = {}
        found: list[dict[int, tuple[str, Placement]]] = []
        for number, (part, segment) in enumerate(zip(parts, self.segments, strict=True)):
            lowered, slots, own = part.lowered, part.program.slots, dict[int, tuple[str, Placement]]()
            held = {n for buckets in part.orders.gathers.values() for bucket in buckets for n in bucket.slots}
            names = [(segment.made if leaf.is_made else segment.enters)[leaf.place] for leaf in segment.leaves]
            crossing = list(zip(range(lowered.num_entering), lowered.before.values, itertools.repeat(segment.enters)))
            crossing += zip(lowered.leaving, lowered.after.values, itertools.repeat(names), strict=False)
            for value, crossed, tensors in crossing:
                n = part.program.values[value].slot
                key = tensors[crossed.tensor], crossed.placement
                if n >= 0 and slots[n].storage.regather and slots[n].steps and key[0] in segment.keeps:
                    if n in held:
                        units[key] = number
                    if key in units:
                        own[n] = key
                        if 0 < number - units[key] < 2:
                            raise Unsupported("a gathered parameter is read by the next block")
            found.append(own)
        return found

    def _root(self, parts: Sequence[Part]) -> tuple[tuple[int, ...], Root | None]:
        found: list[tuple[int, int]] = []
        for number, part in enumerate(parts):
            own = {n for buckets in part.orders.gathers.values() for bucket in buckets for n in bucket.slots}
            for n, slot in enumerate(part.program.slots):
                if slot.steps and slot.storage.regather and slot.value >= part.lowered.num_entering and n not in own:
                    found.append((number, n))
        if not found:
            return (), None
        numbers = tuple(dict.fromkeys(number for number, _ in found))
        place = {number: at for at, number in enumerate(numbers)}
        members = tuple(parts[number] for number in numbers)
        if len(set(members)) < len(members):
            raise Unsupported("equal parts have parameters of no block")
        units: dict[tuple[int, int], int] = {}
        for number, n in found:
            unit = parts[number].program.slots[n].unit
            units.setdefault((number if unit else 0, unit), len(units))
        program = self.lowering.program = Program()
        for at, (number, n) in enumerate(found):
            slot = parts[number].program.slots[n]
            program.slots.append(slot.at(at, units[number if slot.unit else 0, slot.unit]))
        buckets = self.lowering._buckets(forward=True)
        return numbers, Root(
            members,
            tuple(
                RootBucket(
                    tuple((place[found[n][0]], found[n][1]) for n in bucket.slots), bucket.transmissions,
                    bucket.convert_ns,
                )
                for bucket in buckets
            ),
        )  # fmt: skip

    def _gathered(self, parts: Sequence[Part]) -> _Gathered:
        """Plays the begin of the step, without what stays."""
        places, program = [], Program()
        units: dict[tuple[int, int], int] = {(0, 0): 0}
        home: list[tuple[int, int]] = [(0, 0)]
        for number, part in enumerate(parts):
            for n, slot in enumerate(part.program.slots):
                if slot.steps and not slot.storage.regather and slot.value >= part.lowered.num_entering:
                    unit = (number, slot.unit) if slot.unit else (0, 0)
                    if unit not in units:
                        units[unit] = len(units)
                        home.append(unit)
                    places.append((number, slot.value))
                    program.slots.append(slot.at(len(places) - 1, units[unit]))
        self.lowering.program = program
        program.gathers = self.lowering._buckets(forward=True)
        begin = Begin(program, self.profile, {u for (number, local), u in units.items() if local in parts[number].orders.last})
        begin.gather()
        engine = begin.engine
        ready: dict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
        for value, task in begin._ready.items():
            number, own = places[value]
            ready[number][own] = engine.tasks[task][3], engine.tasks[task][4]
        arriving: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for unit, found in begin._arriving.items():
            number, local = home[unit]
            arriving[number][local] += [(engine.tasks[task][3], size) for task, size in found]
        return _Gathered(ready, arriving, begin.result(), engine.tasks[engine.last][3] - engine.free_ns)

    # Lowering ----------------------------------------

    def _parts(self, plan: Plan) -> list[Part]:
        lowered = self._lowered_parts(plan)
        wanted = self._wanted_at_end(lowered[-1])
        marked: list[Marked] = []
        for part in reversed(lowered):
            marked.append(self.lowering.mark(part, wanted))
            wanted = marked[-1].before
        marked.reverse()
        kept = Kept((False,) * marked[0].lowered.num_memory, (False,) * marked[0].lowered.num_entering)
        keeping = []
        for one in marked:
            keeping.append(kept)
            kept = kept_after(one, kept)
        last = lowered[-1].leaving
        gradients = Gradients((-1,) * len(last), ())
        parts: list[Part] = []
        for one, kept in zip(reversed(marked), reversed(keeping), strict=True):
            parts.append(self.lowering.finish(one, kept, gradients))
            gradients = parts[-1].before
        return parts[::-1]

    def _lowered_parts(self, plan: Plan) -> list[Lowered]:
        steps = {(r.tensor, r.target): r.steps for r in plan.redistributes}
        bases = dict(plan.inputs) | {name: kept.placement for name, kept in plan.storage.items()}
        for node in self.graph.nodes:
            bases.update(zip(node.results, plan.nodes[node.name].results, strict=True))
        before = self._begin(plan)
        found = []
        for segment in self.segments:
            key = segment.kind, self._local(segment, plan, steps, bases), before
            part = self._lowered.get(key)
            if part is None:
                part = self._lowered[key] = self.lowering.lower(segment, plan, dict(steps), before)
                for slot in part.program.slots:
                    if any(step.before.kind == "S" for step in slot.steps) or slot.storage.regather:
                        pass
            found.append(part)
            before = part.after
        return found

    def _begin(self, plan: Plan) -> Arriving:
        names = self.segments[0].enters
        bases = tuple(plan.inputs[name] for name in names)
        values = tuple(
            Crossing(n, base, n, False, self.lowering.shapes.local(name, base)[1], None)
            for n, (name, base) in enumerate(zip(names, bases, strict=True))
        )
        return Arriving(bases, values, tuple((value.num_bytes, False) for value in values))

    def _local(
        self, segment: Segment, plan: Plan, steps: Mapping[tuple[str, Placement], tuple[Step, ...]],
        bases: Mapping[str, Placement],
    ) -> int:  # fmt: skip
        """All that the plan says of a segment itself."""
        nodes = tuple(plan.nodes[node.name] for node in segment.nodes)
        ways = tuple(
            steps.get((name, placement))
            for node, placed in zip(segment.nodes, nodes, strict=True)
            for name, placement in zip(node.operands, placed.operands, strict=True)
            if bases[name] != placement
        )
        read = () if not plan.recompute else self._read_elsewhere(segment, plan, bases)
        return self.number((nodes, tuple(plan.storage[name] for name in segment.keeps), ways, read))

    def _read_elsewhere(self, segment: Segment, plan: Plan, bases: Mapping[str, Placement]) -> Hashable:
        """Of what comes in and is converted here: the scopes of other readers, which its conversion is written for."""
        inside, found = {node.name for node in segment.nodes}, []
        for place, name in enumerate(segment.enters):
            readers = [(node, plan.nodes[node.name].operands[at]) for node, at in self.graph.consumers[name]]
            targets = {target for node, target in readers if node.name in inside and target != bases[name]}
            others = frozenset(target for node, target in readers if node.name not in inside and target in targets)
            found.append((place, others))
        for place, name in enumerate(segment.made):
            readers = [(node, plan.nodes[node.name].operands[at]) for node, at in self.graph.consumers[name]]
            targets = {target for node, target in readers if node.name in inside and target != bases[name]}
            others = frozenset(target for node, target in readers if node.name not in inside and target in targets)
            found.append((~place, others))
        return tuple(found)

    def _wanted_at_end(self, last: Lowered) -> Wanted:
        count = len(last.leaving)
        return Wanted((False,) * count, (0,) * count, (True,) * count, (False,) * len(last.storages))

    # Buckets ----------------------------------------

    def _packed_shares(self, parts: Sequence[Part]) -> _Packed:
        """Gradients of all parts in buckets, as `Lowering` packs them."""
        if not self.trains:
            return _Packed([()] * len(parts), [()] * len(parts), [])
        slots: list[tuple[int, int, Slot]] = []
        ended: dict[tuple[int, int], int] = {}
        for number, part in enumerate(parts):
            of_value = {slot.value: n for n, slot in enumerate(part.program.slots)}
            for n, slot in enumerate(part.program.slots):
                if slot.value >= part.lowered.num_entering and slot.steps and slot.requires_grad:
                    slots.append((number, n, slot))
            for item, finished in part.orders.ended_at.items():
                for slot, _ in finished:
                    if item < part.end and item >= 2:
                        ended[number, of_value[slot.value]] = item
        groups = pack_gradients(
            range(len(slots) - 1, -1, -1),
            lambda n: (
                slots[n][2].steps, slots[n][2].reduces_each, slots[n][2].storage.regather, _unit(parts, *slots[n])
            ),
            lambda n: slots[n][2].gradient_bytes,
            lambda n: is_summed_first(slots[n][2]),
        )
        shares: list[list[Share]] = [[] for _ in parts]
        buckets: list[list[int]] = [[] for _ in parts]
        for bucket, group in enumerate(groups):
            members = [slots[n] for n in group]
            rows = [slot.sizes for _, _, slot in members]
            sizes = [(sum(a for a, _ in column), sum(b for _, b in column)) for column in zip(*rows, strict=True)]
            sent = self.lowering._transmissions(members[0][2].steps, sizes, 1)
            whole = sum(slot.gradient_bytes for _, _, slot in members)
            with_gradient = [(number, n) for number, n, _ in members if (number, n) in ended]
            first = min(((number, ended[number, n]) for number, n in with_gradient), default=(-1, -1))
            for number in dict.fromkeys(number for number, _, _ in members):
                own = tuple(n for other, n, _ in members if other == number)
                is_last, is_begun = number == first[0], any(other > number for other, _ in with_gradient)
                buckets[number].append(bucket)
                shares[number].append(
                    Share(
                        own, first[1] if is_last else -1, sent if is_last else (), whole,
                        sum(slot.scatter_bytes for _, _, slot in members), is_summed_first(members[0][2]), is_begun,
                    )
                )  # fmt: skip
        return _Packed(
            [tuple(own) for own in shares], [tuple(own) for own in buckets], [[slots[n] for n in group] for group in groups]
        )


def _unit(parts: Sequence[Part], number: int, _: int, slot: Slot) -> tuple[int, int] | None:
    """Which unit a regathered slot is of."""
    if not slot.storage.regather:
        return None
    return (number, slot.unit) if slot.unit else (0, 0)


def _neighbours(parts: Sequence[Part]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """For each part, the unit that is entered after its own, and the one before them: part and number there."""
    following, preceding = [(-1, -1)] * len(parts), [(-1, -1)] * len(parts)
    last = -1
    for number, part in enumerate(parts):
        if part.orders.visits:
            if last >= 0:
                following[last] = number, part.orders.visits[0]
                preceding[number] = last, parts[last].orders.visits[-1]
            last = number
    first = next((number for number, part in enumerate(parts) if part.orders.visits), -1)
    if first > 0:
        following[0] = first, parts[first].orders.visits[0]
    return following, preceding


def _borrowed(
    player: PartPlayer, number: int, preceding: Sequence[tuple[int, int]], parts: Sequence[Part],
    lent: Sequence[Mapping[int, tuple[str, Placement]]],
) -> dict[int, tuple[str, Placement]]:  # fmt: skip
    """Lent slots that this part asks for ahead, by their numbers here."""
    at, found = preceding[number][0], dict[int, tuple[str, Placement]]()
    for n, slot in enumerate(player.program.slots):
        whose, value = player.foreign.get(slot.value, (0, -1))
        if whose == PRECEDING and (key := lent[at].get(parts[at].program.values[value].slot)):
            found[n] = key
    return found


def _is_entered(part: Part, unit: int) -> bool:
    return part.direction is not None and any(unit in units for units in part.direction.entered.values())


class _Step:
    """One step in absolute time."""

    def __init__(self, family: _Family, plan: Plan, played: _Played) -> None:
        self.family, self.plan, self.played, self.players = family, plan, played, played.players
        self.host = family.profile.host
        gathered = played.gathered
        self.begin = 0
        self.now = gathered.done.length_ns
        self.last, self.waiting = self.now + gathered.last_ns, ""
        self.busy = 0
        self.links: dict[str, int] = dict(gathered.done.links)
        self.in_flight = list(gathered.done.in_flight)
        self.home: list[tuple[int, str]] = []
        self.held: set[str] = set()
        self.pieces: list[tuple[int, Pass]] = [(0, gathered.done)]
        self.changes: list[Change] = []
        self.ready: list[dict[int, tuple[int, str]]] = [dict(gathered.ready.get(n, ())) for n in range(len(self.players))]
        self.arriving: list[dict[int, list[tuple[int, int]]]] = [
            dict(gathered.arriving.get(n, ())) for n in range(len(self.players))
        ]  # fmt: skip
        self.arrived: list[list[tuple[int, str] | None]] = [[] for _ in self.players]
        self.live: list[set[int]] = [set() for _ in self.players]
        self.pinned: list[frozenset[int]] = [frozenset()] * len(self.players)
        self.whole: list[frozenset[int]] = [frozenset()] * len(self.players)
        self.lent: dict[tuple[str, Placement], int] = {}  # slots that stay gathered for several parts, and their bytes
        self.awaited: Ends = ()
        self.journeys: tuple[Travelling, ...] = ()
        self.root = -1
        self.num_backward = 0
        self.held_through = family.held_through(plan, [player.part for player in self.players])

    def run(self) -> None:
        """Everything."""
        (order,) = turns(self.plan.schedule, [[0]], self.plan.microbatches, self.family.trains)
        for turn in order:
            if turn.direction == FORWARD:
                self._forward()
            else:
                self._backward()
        if self.family.trains:
            self._optimize()
        self.end_ns = max([self.now, *self.links.values()])

    def _begin(self, direction: str) -> None:
        self.begin = self.last = self.now
        self.busy = self.now + (self.host.pass_ns if self.host else 0)
        self.waiting, self.awaited = direction, ()
        self.journeys = tuple([one._replace(kind="gradient") for one in self.journeys])

    def _entry(self, number: int, player: PartPlayer, kind: PassKind, **more: Any) -> Entry:
        now, looks_back = self.now, player.looks_back[kind.name]
        if looks_back:
            links = tuple((link, max(self.links.get(link, 0), self.begin) - now) for link in LEVELS)
        else:
            links = tuple(sorted((link, end - now) for link, end in self.links.items() if end > now))
        in_flight = tuple((a - now, b - now) for a, b in self.in_flight if b > now)
        host = self.busy - now if self.host or looks_back else 0
        waiting, last = self.waiting if self.host else "", self.last - now
        live, root = self.live[number], -1
        if player.has_root and self.played.root is not None:
            root = self.root if kind.name == BACKWARD else self.played.root.num_slots
            live = live | {0} if self.root >= 0 else live
        arriving = tuple(
            (unit, max(end - now, last), size) for unit, found in sorted(self.arriving[number].items())
            for end, size in found
        )  # fmt: skip
        awaited = tuple([(end - now, cause) for end, cause in self.awaited if end > now])
        return Entry(
            kind, last, host, waiting, links, in_flight, live=frozenset(live), arriving=arriving,
            pinned=self.pinned[number] | {n for n, key in self.played.lent[number].items() if key in self.lent},
            root=root, awaited=awaited, **more,
        )  # fmt: skip

    def _play(self, number: int, player: PartPlayer, entry: Entry) -> Exit:
        known = player.known.get(entry)
        if known is None:
            known = player.known[entry] = player.play_part(entry)
        begin, done = self.now, known.done
        self.pieces.append((begin, done))
        self.now = begin + done.length_ns
        self.last, self.waiting = self.now + known.last_ns, known.waiting
        if self.host:
            self.busy = self.now + known.host_ns
        for link, end in done.links.items():
            self.links[link] = max(begin + end, self.links.get(link, 0))
        self.in_flight = [(begin + a, begin + b) for a, b in done.in_flight]
        self.home += [(begin + end, kind) for end, kind in known.home]
        self.live[number], self.pinned[number] = set(known.live), known.pinned.difference(self.played.lent[number])
        for n, key in self.played.lent[number].items():
            if n in known.pinned:
                self.lent[key] = player.program.slots[n].used_bytes
            else:
                self.lent.pop(key, None)
        self.arriving[number] = {}
        self.awaited = tuple([(begin + end, cause) for end, cause in known.awaited])
        if player.has_root:
            self.root = known.root
        for value, end, cause in known.ready:
            at, own = (number, value) if value not in player.foreign else self._whose(number, *player.foreign[value])
            self.ready[at][own] = begin + end, cause
        for unit in known.ahead:
            at, own = (self.played.following if unit == player.following else self.played.preceding)[number]
            self.live[at].add(own)
            self.arriving[at][own] = [(begin + end, size) for u, end, size in known.arriving if u == unit]
        return known

    def _whose(self, number: int, whose: int, value: int) -> tuple[int, int]:
        if whose == FOLLOWING:
            return self.played.following[number][0], value
        if whose == PRECEDING:
            return self.played.preceding[number][0], value
        return self.played.root_parts[whose], value

    def _coming(self, number: int, begin: int) -> tuple[tuple[int, int, str], ...]:
        """Slots, and what was sent inside operators, that are under way."""
        ready = self.ready[number]
        if not ready:
            return ()
        found = tuple([(value, end - begin, cause) for value, (end, cause) in sorted(ready.items()) if end > begin])
        if not found:
            ready.clear()
        return found

    def _end_pass(self, exits: Sequence[Exit]) -> None:
        """Regathered parameters that are left are of no more use."""
        left = sum(one.left_bytes for one in exits) + sum(self.lent.values())
        self.lent = {}
        for player, pinned in zip(self.players, self.pinned, strict=True):
            left += sum(player.program.slots[n].used_bytes for n in pinned)
        if self.root >= 0 and self.played.root is not None:
            root = self.played.root
            left += sum(
                slot.used_bytes
                for bucket in root.buckets for place, n in bucket.slots
                if not (slot := root.parts[place].program.slots[n]).is_alias
            )  # fmt: skip
            self.root = -1
        if left:
            self.changes.append((self.last, -left, "gathered", Moment.START))
        for number in range(len(self.players)):
            self.live[number], self.pinned[number] = set(), frozenset()

    def _forward(self) -> None:
        self._begin(FORWARD)
        kind, latest = PassKind(FORWARD), self.now
        ends: list[tuple[int, str] | None] = [None] * self.players[0].part.lowered.num_entering
        exits = []
        for number, player in enumerate(self.players):
            begin, lowered, looks_back = self.now, player.part.lowered, player.looks_back[FORWARD]
            self.arrived[number] = ends
            ready = tuple(
                (value, found[0] - begin, found[1])
                for value in player.reads
                if (found := ends[value]) is not None and (looks_back or found[0] > begin)
            )
            left = self._play(number, player, self._entry(number, player, kind, ready=ready + self._coming(number, begin)))
            exits.append(left)
            latest = begin + left.latest_ns
            count = lowered.num_entering
            after = [ends[value] if value < count else None for value in lowered.leaving]
            for place, end, cause in left.made:
                after[place] = begin + end, cause
            ends = after
        freed = sum(player.part.freed_bytes for player in self.players)
        if freed:
            self.changes.append((latest, -freed, "activations", Moment.END))
        if not self.family.trains:
            self._end_pass(exits)

    def _backward(self) -> None:
        self._begin(BACKWARD)
        self.num_backward += 1
        kind = PassKind(BACKWARD, self.num_backward == 1, self.num_backward == self.plan.microbatches)
        if self.root >= 0 and self.played.root is not None:
            self.root = self.played.root.num_slots
        gradients: dict[int, Ends] = {}
        transient: frozenset[int] = frozenset()
        others: dict[int, int] = {}
        exits = []
        for number in range(len(self.players) - 1, -1, -1):
            player, keeps, begin = self.players[number], self.family.segments[number].keeps, self.now
            lowered, looks_back = player.part.lowered, player.looks_back[BACKWARD]
            ready = self._coming(number, begin)
            if player.recomputes:
                since = self.begin if looks_back else begin
                ready += tuple(
                    (v, found[0] - begin, found[1])
                    for v in player.reads if (found := self.arrived[number][v]) is not None and found[0] > since
                )  # fmt: skip
            coming = tuple(
                (lowered.leaving[place], under_way)
                for place, ends in gradients.items()
                if (under_way := tuple([(e - begin, cause) for e, cause in ends if looks_back or e > begin]))
            )
            held = frozenset([place for place, name in enumerate(keeps) if name in self.held] if self.held else ())
            left = self._play(
                number, player,
                self._entry(
                    number, player, kind, ready=ready, gradients=coming, others=self._others(number, others, begin),
                    held=held, transient=frozenset(lowered.leaving[place] for place in transient),
                    whole=self.whole[number], journeys=self._under_way(begin), arrivals=self._arrivals(number, kind),
                ),
            )  # fmt: skip
            exits.append(left)
            self.held.update(keeps[place] for place in left.held)
            self.whole[number] = left.whole
            self.journeys = tuple([one._replace(end_ns=begin + one.end_ns) for one in left.journeys])
            self._note(number, others, left, begin)
            passed = {value: place for place, value in enumerate(lowered.leaving) if value < lowered.num_entering}
            before = {value: gradients[place] for value, place in passed.items() if place in gradients}
            for value, ends in left.gradients:
                before[value] = (*before.get(value, ()), *((begin + e, cause) for e, cause in ends))
            gradients, transient = before, left.transient
        self._end_pass(exits)

    def _under_way(self, begin: int) -> tuple[Travelling, ...]:
        last = self.last - begin
        return tuple([
            one._replace(end_ns=one.end_ns - begin) if one.end_ns - begin > last else one._replace(end_ns=last, kind="")
            for one in self.journeys
        ])  # fmt: skip

    def _others(self, number: int, others: dict[int, int], begin: int) -> tuple[int, ...]:
        shares = zip(self.players[number].shares, self.played.packed.buckets[number], strict=True)
        return tuple([
            max(0, others.get(bucket, 0) - begin) if share.completed_at >= 0 else 0 for share, bucket in shares
        ])  # fmt: skip

    def _arrivals(self, number: int, kind: PassKind) -> tuple[tuple[int, int], ...]:
        """Bytes of other parts' shards that go home with this part's: new ones, and those added to what is there."""
        found, any_of_others = [], False
        for share, bucket in zip(self.players[number].shares, self.played.packed.buckets[number], strict=True):
            members = self.played.packed.members[bucket]
            new = added = 0
            if share.completed_at >= 0 and len(members) > len(share.slots) and members[0][2].shrinks:
                seen = set(self.held)
                for at, n, slot in members:
                    if at != number:
                        name = self._name(at, slot)
                        added += slot.stored_bytes if name in seen else 0
                        new += 0 if name in seen else slot.stored_bytes
                        seen.add(name)
                        any_of_others = True
            found.append((new, added))
        return tuple(found) if any_of_others else ()

    def _name(self, number: int, slot: Slot) -> str:
        """The tensor of a slot, which may be another one's where an equal part was lowered."""
        lowered = self.players[number].part.lowered
        return self.family.segments[number].keeps[lowered.keeps.index(slot.tensor)]

    def _note(self, number: int, others: dict[int, int], left: Exit, begin: int) -> None:
        buckets = self.played.packed.buckets[number]
        for bucket, end in zip(buckets, left.own, strict=True):
            if end >= 0:
                others[bucket] = max(begin + end, others.get(bucket, 0))
        for index in left.sent:
            members = self.played.packed.members[buckets[index]]
            if len(members) > len(self.players[number].shares[index].slots) and members[0][2].shrinks:
                for at, n, slot in members:
                    if at != number:
                        self.whole[at] -= {n}
                        self.held.add(self._name(at, slot))

    def _optimize(self) -> None:
        links = tuple(sorted((link, end - self.now) for link, end in self.links.items() if end > self.now))
        in_flight = tuple((a - self.now, b - self.now) for a, b in self.in_flight if b > self.now)
        engine = Engine(self.family.profile.facts.overlap_slowdown, Carried(links, in_flight))
        after = [engine.carry(end - self.now, kind) for end, kind in self.home if end > self.now]
        for one in self.journeys:
            end = max(0, one.end_ns - self.now)
            after.append(engine.carry(end, "gradient"))
            engine.allocations += ending(one, end, Moment.ALL_ARRIVE, Moment.ALL_ARRIVED)
        taken = self.held_through.optimizer_workspace
        task = engine.compute("optimizer", "optimizer", self.held_through.optimizer_ns, after)
        engine.allocate(task, taken, "workspace")
        engine.release(task, taken, "workspace")
        self.pieces.append((self.now, finished(PassKind("optimizer"), engine, {})))
        self.now += engine.free_ns

    # Results ----------------------------------------

    def timeline(self) -> Timeline:
        """Everything that was played; tasks have the names of equal layers' ones."""
        submesh = Submesh(range(self.plan.mesh.num_devices), [0])
        for begin, done in self.pieces:
            submesh.take(done, begin, "")
        resident = [(0, size, kind, Moment.START) for size, kind in self.held_through.residents if size]
        submesh.pieces.append(Piece(0, "", [], [*resident, *self.changes]))
        submesh.free_ns = self.now
        submesh.links = self.links
        lane = lane_of(submesh, self.end_ns)
        return Timeline((lane,), self.end_ns, lane.breakdown, lane.exposed, lane.comm_bytes)
