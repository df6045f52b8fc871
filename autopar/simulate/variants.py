"""Plans of one graph that differ in placements alone, as parts that are lowered once wherever they are equal."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from autopar.cost import Profile
from autopar.cost.compute import optimizer_time_ns
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan, Redistribute
from autopar.ir.redistribution import Step
from autopar.ir.structure import batch_inputs
from autopar.simulate.engine import Moment
from autopar.simulate.facts import graph_facts
from autopar.simulate.part_player import PRECEDING, Ahead, Begin, PartPlayer, Root, RootBucket, Unsupported
from autopar.simulate.parts import Arriving, Crossing, Gradients, Kept, Lowered, Marked, Part, PartLowering, Wanted
from autopar.simulate.parts import kept_after
from autopar.simulate.player import Pass
from autopar.simulate.program import Program, Transmission
from autopar.simulate.repeats import Segment, segments_of
from autopar.simulate.sharing import Filled, Sizes, Ways, fill, moving_slots, share

KEPT_PARTS = 1 << 12  # of a graph: more are forgotten all at once
Key = tuple[str, Placement]


class Gathered(NamedTuple):
    """What begins the step: parameters that are gathered once. ready: by part, of slots' values, when they are there;
    arriving: by part, of its units, when what is packed is there, and its bytes."""

    ready: Mapping[int, Mapping[int, tuple[int, str]]]
    arriving: Mapping[int, Mapping[int, list[tuple[int, int]]]]
    done: Pass
    last_ns: int


class Joined(NamedTuple):
    """A plan's parts as they are played, with what joins them: for each part, the unit that is entered after its own,
    and the one before them; of which parts regathered slots belong to no unit; slots that are lent to others."""

    players: tuple[PartPlayer, ...]
    following: Sequence[tuple[int, int]]
    preceding: Sequence[tuple[int, int]]
    root_parts: tuple[int, ...]
    root: Root | None
    gathered: Gathered
    lent: Sequence[Mapping[int, Key]]
    regathers: bool


class Variants:
    """Lowers plans by what is new in them."""

    def __init__(self, graph: Graph, plan: Plan, profile: Profile) -> None:
        self.graph, self.profile = graph, profile
        facts = graph_facts(graph, profile.device_type)
        self.segments = segments_of(graph, facts, frozenset(plan.recompute))
        batched = {name: graph.tensors[name].shape[0] for name in batch_inputs(graph)}
        self.lowering = PartLowering(graph, plan, profile, plan.mesh.devices_per_node, facts, batched)
        self.trains = self.lowering.trains
        self.differences = Differences(graph, self.segments, plan)
        self._all = [[*enumerate(segment.keeps)] for segment in self.segments]
        self._shared = [
            [(place, name) for place, name in enumerate(segment.keeps) if name not in segment.stored]
            for segment in self.segments
        ]  # fmt: skip
        self._numbers: dict[Hashable, int] = {}
        self._contents: list[Any] = []
        self._lowered: dict[tuple[int, int, int], tuple[Lowered, int]] = {}
        self._ways = Ways()
        self._joined: dict[tuple[PartPlayer, ...], Joined] = {}
        self._gathered: dict[Hashable, Gathered] = {}
        self._calm_begin: Gathered | None = None
        self._updates: tuple[Any, tuple[int, int]] | None = None

    @property
    def is_full(self) -> bool:
        """Whether it knows too much."""
        return len(self._lowered) > KEPT_PARTS or len(self._joined) > KEPT_PARTS

    def _number(self, content: Hashable) -> int:
        """One number for equal things."""
        number = self._numbers.setdefault(content, len(self._contents))
        if number == len(self._contents):
            self._contents.append(content)
        return number

    # Lowering ----------------------------------------

    def parts(self, plan: Plan) -> list[Part]:
        """The plan's parts: see `parts` for the four walks."""
        lowered = self._lowered_parts(plan)
        marked = self._marked_parts(lowered)
        first = marked[0].lowered
        before = self._number(Kept((False,) * first.num_memory, (False,) * first.num_entering))
        keeping = []
        for one in marked:
            keeping.append(before)
            after = one.after.get(before)
            if after is None:
                after = one.after[before] = self._number(kept_after(one, self._contents[before]))
            before = after
        wanted = self._number(Gradients((-1,) * len(lowered[-1].leaving), ()))
        parts: list[Part] = []
        for one, kept in zip(reversed(marked), reversed(keeping), strict=True):
            known = one.finished.get((kept, wanted))
            if known is None:
                part = self.lowering.finish(one, self._contents[kept], self._contents[wanted])
                known = one.finished[kept, wanted] = part, self._number(part.before)
            parts.append(known[0])
            wanted = known[1]
        return parts[::-1]

    def _lowered_parts(self, plan: Plan) -> list[Lowered]:
        numbers = self.differences.numbers(plan)
        before, found = self._number(self._begin(plan)), []
        for segment, number in zip(self.segments, numbers, strict=True):
            known = self._lowered.get((segment.kind, number, before))
            if known is None:
                part = self.lowering.lower(segment, plan, dict(self.differences.steps), self._contents[before])
                known = self._lowered[segment.kind, number, before] = part, self._number(part.after)
            found.append(known[0])
            before = known[1]
        return found

    def _begin(self, plan: Plan) -> Arriving:
        names = self.segments[0].enters
        bases = tuple([plan.inputs[name] for name in names])
        values = tuple([
            Crossing(n, base, n, False, self.lowering.shapes.local(name, base)[1], None)
            for n, (name, base) in enumerate(zip(names, bases, strict=True))
        ])  # fmt: skip
        return Arriving(bases, values, tuple([(value.num_bytes, False) for value in values]))

    def _marked_parts(self, lowered: Sequence[Lowered]) -> list[Marked]:
        last = lowered[-1]
        count = len(last.leaving)
        wanted = self._number(
            Wanted((False,) * count, (0,) * count, (True,) * count, (False,) * len(last.storages))
        )  # fmt: skip
        found = []
        for part in reversed(lowered):
            known = part.marked.get(wanted)
            if known is None:
                marked = self.lowering.mark(part, self._contents[wanted])
                known = part.marked[wanted] = marked, self._number(marked.before)
            found.append(known[0])
            wanted = known[1]
        return found[::-1]

    # Joining ----------------------------------------

    def joined(self, plan: Plan) -> Joined:
        """The plan's parts, as they are played."""
        parts = self.parts(plan)
        shares = self._shares(parts)
        regathers = any(part.regathers for part in parts)
        if regathers:
            return self._join_regathering(parts, shares)
        players = tuple([
            self._player(part, own, (None, None, None, number == 0, frozenset()))
            for number, (part, own) in enumerate(zip(parts, shares, strict=True))
        ])  # fmt: skip
        known = self._joined.get(players)
        if known is None:
            nothing = ((-1, -1),) * len(parts)
            known = self._joined[players] = Joined(
                players, nothing, nothing, (), None, self._gathers(parts), ({},) * len(parts), False
            )  # fmt: skip
        return known

    def _player(self, part: Part, own: int, around: tuple[Any, ...]) -> PartPlayer:
        known = part.players.get((own, around))
        if known is None:
            known = part.players[own, around] = PartPlayer(
                part, self.profile, self.trains, self._contents[own], *around
            )  # fmt: skip
        return known

    def _join_regathering(self, parts: Sequence[Part], shares: Sequence[int]) -> Joined:
        lent = self._lent(parts)
        following, preceding = _neighbours(parts)
        root_parts, root = self._root(parts)
        players = []
        for number, part in enumerate(parts):
            ahead, behind = following[number], preceding[number]
            around = (
                Ahead(parts[ahead[0]], ahead[1]) if ahead[0] >= 0 and _gathers_in(parts[ahead[0]], ahead[1]) else None,
                Ahead(parts[behind[0]], behind[1]) if behind[0] >= 0 and _is_entered(parts[behind[0]], behind[1]) else None,
                root if number == 0 or number in root_parts else None, number == 0,
                frozenset(n for n in lent[number] if part.program.slots[n].value < part.lowered.num_entering),
            )  # fmt: skip
            players.append(self._player(part, shares[number], around))
        key = tuple(players)
        if key not in self._joined:
            borrowed = [_borrowed(player, number, preceding, parts, lent) for number, player in enumerate(players)]
            together = [{**own, **others} for own, others in zip(lent, borrowed, strict=True)]
            self._joined[key] = Joined(
                key, following, preceding, root_parts, root, self._gathers(parts), together, True
            )  # fmt: skip
        return self._joined[key]

    def _shares(self, parts: Sequence[Part]) -> list[int]:
        """For each part, the number of its shares of buckets."""
        if not self.trains:
            return [self._number(())] * len(parts)
        before, filled = self._number(()), list[tuple[int, Filled]]()
        for part in reversed(parts):
            if part.moving is None:
                part.moving = moving_slots(part, self._ways)
            known = part.filled.get(before)
            if known is None:
                made = fill(part.moving, self._contents[before])
                known = part.filled[before] = self._number(made), self._number(made.after), made
            filled.append((known[0], known[2]))
            before = known[1]
        added, shares = self._number(()), list[int]()
        for part, (number, made) in zip(parts, reversed(filled), strict=True):
            shared = part.shared.get((number, added))
            if shared is None:
                own, after = share(part.moving or (), made, self._contents[added], self._ways, self._sent)
                if any(one.lacks and part.program.slots[one.slots[0]].shrinks for one in own):
                    raise Unsupported("shards of a tensor without gradient travel with others'")
                shared = part.shared[number, added] = self._number(own), self._number(after)
            shares.append(shared[0])
            added = shared[1]
        return shares

    def _sent(self, steps: tuple[Step, ...], sizes: Sizes) -> tuple[Transmission, ...]:
        return self.lowering.transmissions_of(steps, sizes, 1)

    def tracked(self, microbatches: int) -> Sequence[Sequence[tuple[int, str]]]:
        """By segment, the stored tensors, with their places, that may have memory for their gradients when it begins:
        after the first microbatch all of them."""
        return self._all if microbatches > 1 else self._shared

    # What is regathered ----------------------------------------

    def _lent(self, parts: Sequence[Part]) -> list[dict[int, Key]]:
        """For each part, by number, the regathered slots that several parts read and that a unit of the first holds.

        Raises Unsupported where that unit may be asked for ahead by another reader.
        """
        units: dict[Key, int] = {}
        found: list[dict[int, Key]] = []
        for number, (part, segment) in enumerate(zip(parts, self.segments, strict=True)):
            lowered, slots, own = part.lowered, part.program.slots, dict[int, Key]()
            held = {n for buckets in part.orders.gathers.values() for bucket in buckets for n in bucket.slots}
            names = [(segment.made if leaf.is_made else segment.enters)[leaf.place] for leaf in segment.leaves]
            crossing = [*zip(range(lowered.num_entering), lowered.before.values, itertools.repeat(segment.enters))]
            crossing += zip(lowered.leaving, lowered.after.values, itertools.repeat(names), strict=False)
            for value, crossed, tensors in crossing:
                n, key = part.program.values[value].slot, (tensors[crossed.tensor], crossed.placement)
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
        """Regathered slots of no unit."""
        found = [(number, n) for number, part in enumerate(parts) if part.regathers for n in part.unhoused]
        if not found:
            return (), None
        numbers = tuple(dict.fromkeys(number for number, _ in found))
        members = tuple(parts[number] for number in numbers)
        if len(set(members)) < len(members):
            raise Unsupported("equal parts have parameters of no block")
        place, units = {number: at for at, number in enumerate(numbers)}, dict[tuple[int, int], int]()
        program = self.lowering.program = Program()
        for at, (number, n) in enumerate(found):
            slot = parts[number].program.slots[n]
            unit = (number, slot.unit) if slot.unit else (0, 0)
            program.slots.append(slot.at(at, units.setdefault(unit, len(units))))
        buckets = [
            RootBucket(
                tuple((place[found[n][0]], found[n][1]) for n in bucket.slots), bucket.transmissions, bucket.convert_ns
            )
            for bucket in self.lowering.gathers_of(program)
        ]  # fmt: skip
        return numbers, Root(members, tuple(buckets))

    # The step's begin and end ----------------------------------------

    def _gathers(self, parts: Sequence[Part]) -> Gathered:
        """Plays the begin of the step, without what stays."""
        if not any(part.first_sent for part in parts):
            sizes = sum(part.first_bytes for part in parts)
            begin = Begin(Program(), self.profile, set())
            begin.engine.allocate(0, sizes, "gathered", Moment.SEND)
            return Gathered({}, {}, begin.result(), 0)
        key = tuple(parts)
        known = self._gathered.get(key)
        if known is None:
            known = self._gathered[key] = self._played_gathers(parts)
        return known

    def _played_gathers(self, parts: Sequence[Part]) -> Gathered:
        places, program = list[tuple[int, int]](), Program()
        units: dict[tuple[int, int], int] = {(0, 0): 0}
        is_plain = self.profile.runtime is None  # then what sends nothing is there at once
        for number, part in enumerate(parts):
            for n in part.first_sent if is_plain else part.first:
                slot = part.program.slots[n]
                unit = (number, slot.unit) if slot.unit else (0, 0)
                places.append((number, slot.value))
                program.slots.append(slot.at(len(places) - 1, units.setdefault(unit, len(units))))
        program.gathers = self.lowering.gathers_of(program)
        home = {unit: where for where, unit in units.items()}
        inside = {unit for (number, local), unit in units.items() if local in parts[number].orders.last}
        begin = Begin(program, self.profile, inside)
        if is_plain:
            quiet = sum(part.first_bytes - part.first_sent_bytes for part in parts)
            begin.engine.allocate(0, quiet, "gathered", Moment.SEND)
        begin.gather()
        ready: dict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
        for value, end in begin.ready_ns().items():
            number, own = places[value]
            ready[number][own] = end
        arriving: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for unit, found in begin.arriving_ns().items():
            number, local = home[unit]
            arriving[number][local] += found
        return Gathered(ready, arriving, begin.result(), begin.last_ns)

    def optimizer(self, plan: Plan) -> tuple[int, int]:
        """How long the optimizer runs, and the most bytes that updating a parameter takes for a while."""
        storage = self.differences.storage_number
        if self._updates is None or self._updates[0] != storage:
            self._updates = storage, self._update(plan)
        return self._updates[1]

    def _update(self, plan: Plan) -> tuple[int, int]:
        lowering = self.lowering
        lowering.plan, lowering.program, lowering.placements, lowering.constants = plan, Program(), {}, {}
        lowering._residents()
        return lowering.program.optimizer_ns, lowering.program.optimizer_workspace

    def residents(self, plan: Plan, parts: Sequence[Part]) -> list[tuple[int, str]]:
        """Bytes that stay through the step, with their kinds."""
        lowering, loss = self.lowering, self.graph.loss
        lowering.plan, lowering.program = plan, Program()
        lowering.placements = {} if loss is None else {loss: ()}
        constants: dict[object, int] = {}
        entering: list[object] = [(-1, n) for n in range(parts[0].lowered.num_memory)]
        for number, lowered in enumerate(part.lowered for part in parts):
            names: dict[int, object] = {s: (number, s) for s in (*lowered.constants, *lowered.storages)}
            names |= dict(enumerate(entering))
            constants.update((names[storage], size) for storage, size in lowered.constants.items())
            entering = [names[storage] for storage in lowered.storages]
        lowering.constants = dict(enumerate(constants.values()))
        lowering._residents()
        return lowering.program.residents


class Differences:
    """What is another object in a plan than in the one before.

    steps: of the plan's conversions; nodes, tensors: those that changed, and tensors whose conversions did, since they
    were asked for (`changes`). Segments get a number of what a plan says of them: equal of equal ones.
    """

    def __init__(self, graph: Graph, segments: Sequence[Segment], plan: Plan) -> None:
        self._graph, self._segments, self._recomputes = graph, segments, bool(plan.recompute)
        self._of_node = [segment.number for segment in segments for _ in segment.nodes]
        self._names = [node.name for node in graph.nodes]
        home = dict(zip(self._names, self._of_node, strict=True))
        self._readers = {
            name: frozenset([home[node.name] for node, _ in uses]) for name, uses in graph.consumers.items()
        }  # fmt: skip
        self._stored = [item.tensor for item in graph.stored]
        self._numbers: dict[Hashable, int] = {}
        self._known: list[int] = [-1] * len(segments)
        self._last: Plan | None = None
        self._nodes: list[Any] = [None] * len(self._names)
        self._storage: list[Any] = [None] * len(self._stored)
        self._redistributes: tuple[Redistribute, ...] = ()
        self._changed_segments: set[int] = set()
        self._changed_nodes: set[int] = set()
        self._changed_tensors: set[str] = set()
        self.steps: dict[Key, tuple[Step, ...]] = {}
        self.bases: dict[str, Placement] = {}
        self.storage_number = 0

    def numbers(self, plan: Plan) -> list[int]:
        """For each segment."""
        self.follow(plan)
        if self._changed_segments:
            self._known = [*self._known]
            for number in self._changed_segments:
                self._known[number] = self._number_of(self._segments[number], plan)
            self._changed_segments = set()
        return self._known

    def changes(self, plan: Plan) -> tuple[set[int], set[str]]:
        """The nodes, by number, and the tensors that have changed since this was asked."""
        self.follow(plan)
        found = self._changed_nodes, self._changed_tensors
        self._changed_nodes, self._changed_tensors = set(), set()
        return found

    def follow(self, plan: Plan) -> None:
        """Notes what is new in a plan."""
        last = self._last
        if plan is last:
            return
        if last is None or plan.nodes is not last.nodes:
            self._follow_nodes(plan)
        if last is None or plan.storage is not last.storage:
            self._follow_storage(plan)
        if last is None or plan.redistributes is not last.redistributes:
            self._follow_steps(plan)
        for name, placement in plan.inputs.items():
            if self.bases.get(name) != placement:
                self._follow_tensor(name, placement)
        self._last = plan

    def _follow_tensor(self, name: str, placement: Placement) -> None:
        self.bases[name] = placement
        self._changed_segments |= self._readers[name]
        self._changed_tensors.add(name)

    def _follow_nodes(self, plan: Plan) -> None:
        found = [*map(plan.nodes.__getitem__, self._names)]
        for number in _places_of_others(found, self._nodes):
            node, placed = self._graph.nodes[number], found[number]
            self._changed_segments.add(self._of_node[number])
            self._changed_nodes.add(number)
            for name, placement in zip(node.results, placed.results, strict=True):
                self._follow_tensor(name, placement)
            for name in node.operands:
                self._changed_tensors.add(name)
                if self._recomputes:
                    self._changed_segments |= self._readers[name]
        self._nodes = found

    def _follow_storage(self, plan: Plan) -> None:
        found = [*map(plan.storage.__getitem__, self._stored)]
        for number in _places_of_others(found, self._storage):
            self._follow_tensor(self._stored[number], found[number].placement)
            self.storage_number += 1
        self._storage = found

    def _follow_steps(self, plan: Plan) -> None:
        old, new = self._redistributes, plan.redistributes
        first = _first_other(old, new)
        end = _first_other(old[: first - len(old) - 1 : -1], new[: first - len(new) - 1 : -1])
        gone, come = old[first : len(old) - end], new[first : len(new) - end]
        kept = set(map(id, gone)) & set(map(id, come))
        for one in gone:
            if id(one) not in kept:
                self.steps.pop((one.tensor, one.target), None)
                self._changed_segments |= self._readers[one.tensor]
                self._changed_tensors.add(one.tensor)
        for one in come:
            if id(one) not in kept:
                self.steps[one.tensor, one.target] = one.steps
                self._changed_segments |= self._readers[one.tensor]
                self._changed_tensors.add(one.tensor)
        self._redistributes = new

    def _number_of(self, segment: Segment, plan: Plan) -> int:
        nodes = tuple([plan.nodes[node.name] for node in segment.nodes])
        bases, steps = self.bases, self.steps
        ways = tuple([
            steps.get((name, placement))
            for node, placed in zip(segment.nodes, nodes, strict=True)
            for name, placement in zip(node.operands, placed.operands, strict=True)
            if bases[name] != placement
        ])  # fmt: skip
        read = self._read_elsewhere(segment, plan) if self._recomputes else ()
        key = segment.kind, nodes, tuple([plan.storage[name] for name in segment.keeps]), ways, read
        return self._numbers.setdefault(key, len(self._numbers))

    def _read_elsewhere(self, segment: Segment, plan: Plan) -> Hashable:
        """Of what crosses its ends and is converted: the targets that other segments read, too, which decides what
        function a conversion is written in."""
        inside = {node.name for node in segment.nodes}
        return tuple([
            self._common_targets(name, inside, plan) for name in itertools.chain(segment.enters, segment.made)
        ])  # fmt: skip

    def _common_targets(self, name: str, inside: set[str], plan: Plan) -> frozenset[Placement]:
        if len(self._readers[name]) < 2:
            return frozenset()
        readers = [(node.name in inside, plan.nodes[node.name].operands[at]) for node, at in self._graph.consumers[name]]
        own = {target for is_own, target in readers if is_own}
        return frozenset(target for is_own, target in readers if not is_own and target in own)


def _places_of_others(new: Sequence[object], old: Sequence[object]) -> list[int]:
    """Where another object is than before."""
    same = [*map(operator.is_, new, old)]
    return [] if all(same) else [place for place, is_same in enumerate(same) if not is_same]


def _first_other(one: Sequence[object], other: Sequence[object]) -> int:
    """How many objects are the same from the first on."""
    same = [*map(operator.is_, one, other)]
    return len(same) if all(same) else same.index(False)


def _neighbours(parts: Sequence[Part]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """For each part, the unit that is entered after its own, and the one before them: part and number there."""
    following, preceding = [(-1, -1)] * len(parts), [(-1, -1)] * len(parts)
    last = -1
    for number, part in enumerate(parts):
        if part.orders.visits:
            if last >= 0:
                following[last] = number, part.orders.visits[0]
                preceding[number] = last, parts[last].orders.visits[-1]
            elif number:
                following[0] = number, part.orders.visits[0]
            last = number
    return following, preceding


def _borrowed(
    player: PartPlayer, number: int, preceding: Sequence[tuple[int, int]], parts: Sequence[Part],
    lent: Sequence[Mapping[int, Key]],
) -> dict[int, Key]:  # fmt: skip
    """Lent slots that this part asks for ahead, by their numbers here."""
    at, found = preceding[number][0], dict[int, Key]()
    for n, slot in enumerate(player.program.slots):
        whose, value = player.foreign.get(slot.value, (0, -1))
        if whose == PRECEDING and (key := lent[at].get(parts[at].program.values[value].slot)):
            found[n] = key
    return found


def _gathers_in(part: Part, unit: int) -> bool:
    return unit in part.orders.gathers


def _is_entered(part: Part, unit: int) -> bool:
    return part.direction is not None and any(unit in units for units in part.direction.entered.values())

