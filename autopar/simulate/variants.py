"""Plans of one graph that differ in placements alone, as parts that are lowered once wherever they are equal."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from autopar.cost import Profile
from autopar.cost.memory import most_workspace, optimizer_of
from autopar.cost.profile import host_of
from autopar.ir.branches import Coordinates
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement
from autopar.ir.plan import StagePlan
from autopar.ir.redistribution import Step
from autopar.ir.structure import batch_inputs
from autopar.runtime.packing import BUCKET_SIZES, BucketSizes
from autopar.simulate.engine import LAST, Carried, Engine, Moment
from autopar.simulate.facts import graph_facts
from autopar.simulate.gathers import first_gathers, gathers_by_unit
from autopar.simulate.operator_prices import PriceTable, StoredPrice
from autopar.simulate.orders import Orders, Unsupported
from autopar.simulate.overlap import AS_EMITTED, Overlap
from autopar.simulate.part_player import (
    PRECEDING,
    Ahead,
    Forward,
    PartPlayer,
    Root,
    RootBucket,
)
from autopar.simulate.parts import (
    Arriving,
    CrossingValue,
    Gradients,
    KeptBefore,
    Lowered,
    Marked,
    Part,
    PartLowering,
    Wanted,
    kept_after,
    ways_of,
)
from autopar.simulate.passes import Meet, Pass, Played, finished, first_read
from autopar.simulate.player import Player
from autopar.simulate.program import LocalProgram, Slot, Transmission
from autopar.simulate.residents import STEP_COUNT_BYTES, other_residents
from autopar.simulate.segments import Differences, Key, Numbers, Segment, known_segments
from autopar.simulate.sending import OtherLane
from autopar.simulate.sharing import Load, Open, Share, Sizes, Ways

Neighbour = tuple[int, tuple[int, ...]]
"""Units that are entered after a part's own, or before: their part, −1 for none, and numbers there."""

NO_NEIGHBOUR: Neighbour = (-1, ())
KEPT_PARTS, KEPT_OBJECTS = 1 << 12, 1 << 16  # of equal stages: more are forgotten all at once


SentValues = Mapping[tuple[str, Placement], bool]
"""What a stage sends to later ones, in which placements, and whether the gradient comes back."""


class FirstGathers(NamedTuple):
    """What begins the step: parameters that are gathered once. ready: by part, of slots' values, when they are there;
    arriving: by part, of slots' values that are the first of their bucket, when what is packed is there, and its
    bytes."""

    ready: Mapping[int, Mapping[int, tuple[int, str]]]
    arriving: Mapping[int, Mapping[int, list[tuple[int, int]]]]
    done: Played


class Joined(NamedTuple):
    """A plan's parts as they are played, with what joins them: for each part, the unit that is entered after its own,
    and those that the backward pass comes to behind them; of which parts regathered slots belong to no unit; slots that
    are lent to others."""

    players: tuple[PartPlayer, ...]
    following: Sequence[Neighbour]
    preceding: Sequence[Neighbour]
    root_parts: tuple[int, ...]
    root: Root | None
    lent: Sequence[Mapping[int, Key]]
    regathers: bool
    passes: dict[Any, Pass]

    @property
    def parts(self) -> list[Part]:
        """What is played."""
        return [player.part for player in self.players]


class KnownParts:
    """What is known of parts of a model's stages that are alike but for their placements, whichever stage has them.

    lowered: by kind of segment, what the plan says of it, and what comes in; marked, finished, players: what is made of
    each of these, by its id. They know those, which know nothing of them: so nothing is left for the collector.
    forward: what players of a part know of its forward pass. prices: of whatever runs on equal axes.
    limits: of what travels together.
    """

    def __init__(self, prices: PriceTable | None = None, limits: BucketSizes = BUCKET_SIZES) -> None:
        self.prices = PriceTable() if prices is None else prices
        self.numbers, self.ways = Numbers(), Ways(limits)
        self.lowered: dict[tuple[int, int, int], tuple[Lowered, int]] = {}
        self.marked: dict[tuple[int, int, bool], tuple[Marked, int]] = {}
        self.finished: dict[tuple[int, int, int], tuple[Part, int]] = {}
        self.players: dict[tuple[int, Any, Any], PartPlayer] = {}
        self.forward: dict[tuple[int, Any], Forward] = {}

    @property
    def is_full(self) -> bool:
        """Whether it is too much."""
        return len(self.lowered) > KEPT_PARTS or len(self.numbers) > KEPT_OBJECTS


class Variants:
    """Lowers plans by what is new in them."""

    def __init__(
        self, whole: Graph, graph: Graph, plan: StagePlan, profile: Profile, per_node: int, is_cut: bool = True,
        is_split: bool = False, overlap: Overlap = AS_EMITTED, known: KnownParts | None = None, may_split: bool = False,
        coordinates: Coordinates | None = None, others: Sequence[OtherLane] = (), in_one: bool = False,
        wrapping: str = "",
    ) -> None:  # fmt: skip
        """graph, plan: of the stage; whole: of all stages; is_cut: into segments; is_split: the backward pass comes in
        two parts; in_one: but not of the microbatches that these are for; may_split: it does in another plan with the
        same parts; overlap: as in `PartPlayer`; known: of
        such stages; wrapping: as in `segments_of`; the rest as in `Lowering`."""
        self.graph, self.profile, self.is_stage = graph, profile, graph.ends is not None
        self._overlap, self.known = overlap, known or KnownParts(limits=overlap.packing)
        self.slowdowns = profile.slowdowns
        facts, self._numbers = graph_facts(whole, profile.device_type), self.known.numbers
        self.segments = known_segments(whole, graph, facts, frozenset(plan.recompute), is_cut, is_split, wrapping)
        batched = {name: whole.tensors[name].shape[0] for name in batch_inputs(whole)}
        self.lowering = PartLowering(
            graph, plan, profile, per_node, facts, batched, self.known.prices, is_split or may_split, coordinates,
            others, overlap.casts,
        )  # fmt: skip
        self.trains = self.lowering.trains
        self.splits = self.trains and is_split and not in_one
        self.differences = Differences(graph, self.segments, plan, self._numbers)
        self._all = [[*enumerate(segment.keeps)] for segment in self.segments]
        self._shared = [
            [(place, name) for place, name in enumerate(segment.keeps) if name not in segment.stored]
            for segment in self.segments
        ]  # fmt: skip
        keeps = Counter(name for segment in self.segments for name in segment.keeps)
        self._read_by_several = [name for name, count in keeps.items() if count > 1]
        self._joined: dict[tuple[PartPlayer, ...], Joined] = {}
        self._gathered: dict[Hashable, FirstGathers] = {}
        self._stored_prices: list[StoredPrice] = [StoredPrice(0, 0, 0, (0, 0))] * len(graph.stored)
        self._updated = 0, 0
        self.named: dict[tuple[Segment, int], dict[str, str]] = {}  # see `Renames`

    @property
    def is_full(self) -> bool:
        """Whether it knows too much."""
        return self.known.is_full or len(self._joined) > KEPT_PARTS

    # Lowering ----------------------------------------

    def parts(self, plan: StagePlan, sent: SentValues) -> list[Part]:
        """The plan's parts: see `parts` for the four walks."""
        lowered = self._lowered_parts(plan, sent)
        marked = self._marked_parts(lowered)
        first = marked[0].lowered
        before = self._numbers.of(KeptBefore((False,) * first.num_memory, (False,) * first.num_entering))
        keeping = []
        for one in marked:
            keeping.append(before)
            after = one.after.get(before)
            if after is None:
                after = one.after[before] = self._numbers.of(kept_after(one, self._numbers.content(before)))
            before = after
        wanted = self._numbers.of(Gradients((-1,) * len(lowered[-1].leaving), ()))
        parts: list[Part] = []
        for one, kept in zip(reversed(marked), reversed(keeping), strict=True):
            known = self.known.finished.get((id(one), kept, wanted))
            if known is None:
                part = self.lowering.finish(one, self._numbers.content(kept), self._numbers.content(wanted))
                known = self.known.finished[id(one), kept, wanted] = part, self._numbers.of(part.before)
            parts.append(known[0])
            wanted = known[1]
        return parts[::-1]

    def _lowered_parts(self, plan: StagePlan, sent: SentValues) -> list[Lowered]:
        numbers = [*self.differences.numbers(plan)]
        if self.is_stage:
            received = tuple([plan.inputs[name] for name in self.graph.received])
            numbers[0] = self._numbers.of((numbers[0], received))
            leaving_as = tuple([
                (self._places.get(name, name), placement, is_answered)
                for (name, placement), is_answered in sent.items()
            ])  # fmt: skip
            numbers[-1] = self._numbers.of((numbers[-1], leaving_as))
        before, found = self._numbers.of(self._begin(plan)), []
        for segment, number in zip(self.segments, numbers, strict=True):
            known = self.known.lowered.get((segment.kind, number, before))
            if known is None:
                leaving = sent if segment.number == len(self.segments) - 1 else {}
                steps = dict(self.differences.steps)
                part = self.lowering.lower(segment, plan, steps, self._numbers.content(before), leaving)
                known = self.known.lowered[segment.kind, number, before] = part, self._numbers.of(part.after)
            found.append(known[0])
            before = known[1]
        return found

    def _begin(self, plan: StagePlan) -> Arriving:
        names = self.segments[0].enters
        bases = tuple([plan.inputs[name] for name in names])
        values = tuple([
            CrossingValue(n, base, n, False, self.lowering.shapes.local(name, base)[1], None)
            for n, (name, base) in enumerate(zip(names, bases, strict=True))
        ])  # fmt: skip
        return Arriving(bases, values, tuple([(value.num_bytes, False) for value in values]))

    def _marked_parts(self, lowered: Sequence[Lowered]) -> list[Marked]:
        last = lowered[-1]
        count = len(last.leaving)
        wanted = self._numbers.of(
            Wanted((False,) * count, (0,) * count, (True,) * count, (False,) * len(last.storages))
        )  # fmt: skip
        found = []
        for part in reversed(lowered):
            known = self.known.marked.get((id(part), wanted, self.splits))
            if known is None:
                marked = self.lowering.mark(part, self._numbers.content(wanted), self.splits)
                known = self.known.marked[id(part), wanted, self.splits] = marked, self._numbers.of(marked.before)
            found.append(known[0])
            wanted = known[1]
        return found[::-1]

    @cached_property
    def _places(self) -> Mapping[str, int]:
        """Of what the stage may send, where equal last segments have the same."""
        last = self.segments[-1]
        return {name: place for place, name in enumerate((*last.enters, *last.made, *last.stored, *last.keeps))}

    # Joining ----------------------------------------

    def joined(self, plan: StagePlan, sent: SentValues) -> Joined:
        """The plan's parts, as they are played. sent: what the stage sends to later ones, and whether the gradient
        comes back."""
        self._check_gathered_alike(plan)
        parts = self.parts(plan, sent)
        shares = self._shares(parts)
        regathers = any(part.regathers for part in parts)
        if regathers:
            return self._join_regathering(parts, shares)
        players = tuple([
            self._player(part, own, (None, None, None, number == 0, False, frozenset()))
            for number, (part, own) in enumerate(zip(parts, shares, strict=True))
        ])  # fmt: skip
        known = self._joined.get(players)
        if known is None:
            nothing = (NO_NEIGHBOUR,) * len(parts)
            known = self._joined[players] = Joined(
                players, nothing, nothing, (), None, ({},) * len(parts), False, {}
            )  # fmt: skip
        return known

    def _check_gathered_alike(self, plan: StagePlan) -> None:
        """Raises Unsupported where a parameter of several segments is regathered to several placements: that one of
        them is gathered says nothing of the others."""
        for name in self._read_by_several:
            if plan.storage[name].regather:
                readers = self.graph.consumers[name]
                if len({plan.nodes[node.name].operands[at] for node, at in readers}) > 1:
                    raise Unsupported("a shared parameter is regathered to several placements")

    def _player(self, part: Part, own: tuple[Share, ...], around: tuple[Any, ...]) -> PartPlayer:
        known = self.known.players.get((id(part), own, around))
        if known is None:
            if any(one.lacks and part.program.slots[one.slots[0]].is_resized for one in own):
                raise Unsupported("shards of a tensor without gradient travel with others'")
            forward = self.known.forward.setdefault((id(part), around), Forward())
            known = self.known.players[id(part), own, around] = PartPlayer(
                part, forward, self.profile, len(self.segments) == 1, self._overlap, own, *around
            )  # fmt: skip
        return known

    def _join_regathering(self, parts: Sequence[Part], shares: Sequence[tuple[Share, ...]]) -> Joined:
        if self.splits and len(parts) > 1:
            raise Unsupported("the second part of a backward pass asks for all parameters when it begins")
        lent = self._lent(parts)
        following, preceding = _neighbours(parts)
        root_parts, root = self._root(parts)
        begins_back = len(parts) - 1 if self.is_stage else -1  # it gathers again what belongs to no unit
        players = []
        for number, part in enumerate(parts):
            around = (
                _ahead(parts, following[number]), _ahead(parts, preceding[number]),
                root if number in (0, begins_back) or number in root_parts else None, number == 0,
                number == begins_back,
                frozenset(n for n in lent[number] if part.program.slots[n].value < part.lowered.num_entering),
            )  # fmt: skip
            players.append(self._player(part, shares[number], around))
        key = tuple(players)
        if key not in self._joined:
            borrowed = [_borrowed(player, number, preceding, parts, lent) for number, player in enumerate(players)]
            together = [{**own, **others} for own, others in zip(lent, borrowed, strict=True)]
            self._joined[key] = Joined(
                key, following, preceding, root_parts, root, together, True, {}
            )  # fmt: skip
        return self._joined[key]

    def _shares(self, parts: Sequence[Part]) -> list[tuple[Share, ...]]:
        """For each part, its shares of buckets: filled in the order of the backward pass, then told of what earlier
        parts add."""
        if not self.trains:
            return [()] * len(parts)
        opened: dict[int, Open | None] = {}
        filled = []
        for part in reversed(parts):
            if part.ways is None:
                part.ways = ways_of(part, self.known.ways)
            of_part = []
            for on_way in part.ways:
                groups, after = on_way.fill(opened.get(on_way.way) if on_way.crosses else None)
                of_part.append(groups)
                if on_way.crosses:
                    opened[on_way.way] = after
            filled.append(of_part)
        added, found = dict[int, Load | None](), list[tuple[Share, ...]]()
        for part, of_part in zip(parts, reversed(filled), strict=True):
            own: tuple[Share, ...] = ()
            for on_way, groups in zip(part.ways or (), of_part, strict=True):
                shares, rest = on_way.share(groups, added.get(on_way.way), self.known.ways, self._sent)
                own += shares
                if on_way.crosses:
                    added[on_way.way] = rest
            found.append(own)
        return found

    def _sent(self, steps: tuple[Step, ...], sizes: Sizes) -> tuple[Transmission, ...]:
        return self.lowering.sending.of_steps(steps, sizes, 1)

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
            crossing = [*zip(range(lowered.num_entering), lowered.before.values, itertools.repeat([*segment.enters]))]
            crossing += zip(lowered.leaving, lowered.after.values, itertools.repeat(names), strict=False)
            for value, crossed, tensors in crossing:
                n, key = part.program.values[value].slot, (tensors[crossed.tensor], crossed.placement)
                if n >= 0 and slots[n].storage.regather and slots[n].converts and key[0] in segment.keeps:
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
        slots = list[Slot]()
        for at, (number, n) in enumerate(found):
            slot = parts[number].program.slots[n]
            unit = (number, slot.unit) if slot.unit else (0, 0)
            slots.append(slot.at(at, units.setdefault(unit, len(units)), ""))
        buckets = [
            RootBucket(
                tuple((place[found[n][0]], found[n][1]) for n in bucket.slots), bucket.transmissions, bucket.convert_ns
            )
            for bucket in gathers_by_unit(slots, self.lowering.sending)
        ]  # fmt: skip
        return numbers, Root(members, tuple(buckets))

    # The step's begin and end ----------------------------------------

    def gathered(self, parts: Sequence[Part], carried: Carried, meet: Meet | None = None) -> FirstGathers:
        """Plays the begin of the step, from what other stages of the device have under way."""
        if not any(part.first_played for part in parts):
            sizes = sum(part.first_bytes for part in parts)
            engine = Engine(self.slowdowns, carried)
            engine.allocate(LAST, sizes, "gathered", Moment.SEND)
            return FirstGathers({}, {}, finished(engine, {}, {}))
        key = carried, tuple([self._first_form(part) for part in parts])
        known = self._gathered.get(key) if meet is None else None
        if known is None:
            known = self._gathered[key] = self._played_gathers(parts, carried, meet)
        ready = {
            number: {parts[number].program.slots[n].value: end for n, end in ends.items()}
            for number, ends in known.ready.items()
        }  # fmt: skip
        arriving = {
            number: {first_read(parts[number].program.slots[n].value): ends for n, ends in found.items()}
            for number, found in known.arriving.items()
        }  # fmt: skip
        return known._replace(ready=ready, arriving=arriving)

    def _first_form(self, part: Part) -> int:
        """One number for parts of which equal slots are gathered when the step begins."""
        if part.first_form < 0:
            slots = part.program.slots
            form = tuple([
                (
                    n, one.steps, one.sizes, one.stored_bytes, one.used_bytes, one.gather_bytes, one.is_alias,
                    one.cast_bytes,
                )
                for n, one in [(n, slots[n]) for n in part.first]
            ])  # fmt: skip
            part.first_form = self._numbers.of(form)
        return part.first_form

    def _played_gathers(self, parts: Sequence[Part], carried: Carried, meet: Meet | None) -> FirstGathers:
        """Slots are meant by number."""
        places, program = list[tuple[int, int]](), LocalProgram()
        is_plain = self.profile.runtime is None  # then what sends and casts nothing is there at once
        for number, part in enumerate(parts):
            for n in part.first_played if is_plain else part.first:
                slot = part.program.slots[n]
                places.append((number, n))
                program.slots.append(slot.at(len(places) - 1, 0, f"{number}:{n}"))
        program.gathers = first_gathers(program.slots, self.lowering.sending, self._overlap.packing)
        begun = Player(program, self.profile, Orders(), self._overlap).gather(carried, meet)
        quiet = sum(part.first_bytes - part.first_played_bytes for part in parts) if is_plain else 0
        if quiet:
            begun.done.allocations.append((0, quiet, "gathered", Moment.SEND))
        ready: dict[int, dict[int, tuple[int, str]]] = defaultdict(dict)
        for value, end, cause in begun.ready:
            number, own = places[value]
            ready[number][own] = end, cause
        arriving: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for value, end, size in begun.arriving:
            number, own = places[value]
            arriving[number][own].append((end, size))
        return FirstGathers(ready, arriving, begun.done)

    def optimizer(self, plan: StagePlan) -> tuple[int, int]:
        """How long the optimizer runs, and the most bytes that updating a parameter takes for a while."""
        changed = self.differences.changed_storage(plan)
        if changed:
            self._update(plan, changed)
        return self._updated

    def _update(self, plan: StagePlan, changed: set[int]) -> None:
        lowering, stored = self.lowering, self.graph.stored
        for number in changed:
            self._stored_prices[number] = lowering.stored.price(plan, stored[number].tensor)
        pairs = zip(self._stored_prices, stored, strict=True)
        trained = [(price, plan.storage[item.tensor].on_host) for price, item in pairs if item.requires_grad]
        moved = sum([price.moved_bytes for price, on_host in trained if not on_host])
        at_host = sum([price.moved_bytes for price, on_host in trained if on_host])
        is_elementwise = optimizer_of(plan.optimizer).is_elementwise
        most = most_workspace([price.workspace for price, on_host in trained if not on_host], is_elementwise)
        rate = host_of(self.profile).update_bandwidth if at_host else None
        if rate is None:  # the device computes for both
            moved, at_host = moved + at_host, 0
        calls = lowering.stored.update_ns(moved, len(trained)) if moved or at_host else 0
        self._updated = calls + (round(at_host * 1e9 / rate) if rate else 0), most

    def host_bytes(self, plan: StagePlan) -> int:
        """What the stage keeps on the host: parameters, their gradients and their optimizer state."""
        self.optimizer(plan)
        pairs = zip(self._stored_prices, self.graph.stored, strict=True)
        return sum([
            2 * price.stored_bytes + price.state_bytes + (STEP_COUNT_BYTES if price.state_bytes else 0)
            for price, item in pairs if plan.storage[item.tensor].on_host
        ])  # fmt: skip

    def resident_bytes(self, plan: StagePlan, parts: Sequence[Part]) -> int:
        """Bytes that stay through the step."""
        return sum([size for size, _ in self.residents(plan, parts)])

    def residents(self, plan: StagePlan, parts: Sequence[Part]) -> list[tuple[int, str]]:
        """Bytes that stay through the step, with their kinds."""
        self.optimizer(plan)
        held = other_residents(
            self.graph, plan, self.lowering.batched, _constants(parts), self.trains, self.profile.device_type
        )
        for price, item in zip(self._stored_prices, self.graph.stored, strict=True):
            if plan.storage[item.tensor].on_host:
                continue
            held.append((price.stored_bytes, "parameters"))
            if item.requires_grad and self.trains:
                held.append((price.state_bytes + (STEP_COUNT_BYTES if price.state_bytes else 0), "optimizer"))
        return held


def _constants(parts: Sequence[Part]) -> list[int]:
    """Bytes of what is computed once and kept, each once in parts that hand it on."""
    constants: dict[object, int] = {}
    entering: list[object] = [(-1, n) for n in range(parts[0].lowered.num_memory)]
    for number, lowered in enumerate(part.lowered for part in parts):
        names: dict[int, object] = {s: (number, s) for s in (*lowered.constants, *lowered.storages)}
        names |= dict(enumerate(entering))
        constants.update((names[storage], size) for storage, size in lowered.constants.items())
        entering = [names[storage] for storage in lowered.storages]
    return [*constants.values()]


def _neighbours(parts: Sequence[Part]) -> tuple[list[Neighbour], list[Neighbour]]:
    """For each part, the unit that is entered after its own, and those that the backward pass comes to behind them."""
    following, preceding = [NO_NEIGHBOUR] * len(parts), [NO_NEIGHBOUR] * len(parts)
    last = -1
    for number, part in enumerate(parts):
        orders = part.orders
        if orders.visits:
            first = number, tuple([unit for unit in orders.visits[:1] if unit in orders.gathers])
            if last >= 0:
                before = parts[last].orders.begun_with(parts[last].orders.visits[-1])
                following[last] = first
                preceding[number] = last, tuple([unit for unit in before if _is_entered(parts[last], unit)])
            elif number:
                following[0] = first
            last = number
    return following, preceding


def _borrowed(
    player: PartPlayer, number: int, preceding: Sequence[Neighbour], parts: Sequence[Part],
    lent: Sequence[Mapping[int, Key]],
) -> dict[int, Key]:  # fmt: skip
    """Lent slots that this part asks for ahead, by their numbers here."""
    at, found = preceding[number][0], dict[int, Key]()
    if at < 0 or not lent[at]:
        return found
    for n, slot in enumerate(player.program.slots):
        whose, value = player.foreign.get(slot.value, (0, -1))
        if whose == PRECEDING and (key := lent[at].get(parts[at].program.values[value].slot)):
            found[n] = key
    return found


def _ahead(parts: Sequence[Part], neighbour: Neighbour) -> Ahead | None:
    number, units = neighbour
    return Ahead(parts[number], units) if units else None


def _is_entered(part: Part, unit: int) -> bool:
    directions = part.directions.values()
    return any(unit in units for direction in directions for units in direction.entered.values())
