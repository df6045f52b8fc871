"""What is new in a plan: found by comparing objects, since plans that come one after another share most of theirs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Sequence
from typing import Any

from autopar.ir.graph import Graph
from autopar.ir.placement import Placement
from autopar.ir.plan import Redistribute, StagePlan
from autopar.ir.redistribution import Step
from autopar.simulate.repeats import Segment

Key = tuple[str, Placement]
KEPT_OBJECTS = 1 << 16


class Differences:
    """What is another object in a plan than in the one before.

    steps: of the plan's conversions. Segments get a number of what a plan says of them: equal of equal ones.
    """

    def __init__(self, graph: Graph, segments: Sequence[Segment], plan: StagePlan) -> None:
        self._graph, self._segments, self._recomputes = graph, segments, bool(plan.recompute)
        self._of_node = [segment.number for segment in segments for _ in segment.nodes]
        self._names = [node.name for node in graph.nodes]
        home = dict(zip(self._names, self._of_node, strict=True))
        self._readers = {
            name: frozenset([home[node.name] for node, _ in uses]) for name, uses in graph.consumers.items()
        }  # fmt: skip
        self._stored = [item.tensor for item in graph.stored]
        self._numbers: dict[Hashable, int] = {}
        self._objects: dict[int, tuple[int, Hashable]] = {}  # by identity, which holds as long as they are kept here
        self._known: list[int] = [-1] * len(segments)
        self._last: StagePlan | None = None
        self._nodes: list[Any] = [None] * len(self._names)
        self._storage: list[Any] = [None] * len(self._stored)
        self._redistributes: tuple[Redistribute, ...] = ()
        self._changed_segments: set[int] = set()
        self._changed_readers: set[int] = set()  # nodes that read something that is another, too
        self._codes: list[int] = [-1] * len(self._names)
        self._storage_codes: list[int] = [-1] * len(self._stored)
        place_of = {name: place for place, name in enumerate(self._stored)}
        self._keeps = [[place_of[name] for name in segment.keeps] for segment in segments]
        self._begins = [*itertools.accumulate((len(segment.nodes) for segment in segments), initial=0)]
        node_of = {name: number for number, name in enumerate(self._names)}
        self._nodes_reading = {
            name: frozenset([node_of[node.name] for node, _ in uses]) for name, uses in graph.consumers.items()
        }  # fmt: skip
        self.steps: dict[Key, tuple[Step, ...]] = {}
        self.bases: dict[str, Placement] = {}
        self._changed_storage: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether it keeps too much."""
        return len(self._objects) > KEPT_OBJECTS

    def numbers(self, plan: StagePlan) -> list[int]:
        """For each segment."""
        self.follow(plan)
        if self._changed_segments:
            self._known = [*self._known]
            for number in self._changed_segments:
                self._known[number] = self._number_of(self._segments[number], plan)
            self._changed_segments = set()
        return self._known

    def changed_storage(self, plan: StagePlan) -> set[int]:
        """The stored tensors, by number, whose storage has changed since this was asked."""
        self.follow(plan)
        found, self._changed_storage = self._changed_storage, set()
        return found

    def follow(self, plan: StagePlan) -> None:
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
        for place in self._changed_readers:
            self._codes[place] = self._code_of(place)
        self._changed_readers = set()
        self._last = plan

    def _note(self, name: str) -> None:
        self._changed_segments |= self._readers[name]
        self._changed_readers |= self._nodes_reading[name]

    def _follow_tensor(self, name: str, placement: Placement) -> None:
        self.bases[name] = placement
        self._note(name)

    def _follow_nodes(self, plan: StagePlan) -> None:
        found = [*map(plan.nodes.__getitem__, self._names)]
        for number in _places_of_others(found, self._nodes):
            node, placed = self._graph.nodes[number], found[number]
            self._changed_segments.add(self._of_node[number])
            self._changed_readers.add(number)
            for name, placement in zip(node.results, placed.results, strict=True):
                self._follow_tensor(name, placement)
            for name in node.operands if self._recomputes else ():
                self._changed_segments |= self._readers[name]
        self._nodes = found

    def _follow_storage(self, plan: StagePlan) -> None:
        found = [*map(plan.storage.__getitem__, self._stored)]
        for number in _places_of_others(found, self._storage):
            self._follow_tensor(self._stored[number], found[number].placement)
            self._changed_storage.add(number)
            self._storage_codes[number] = self._number(found[number])
        self._storage = found

    def _follow_steps(self, plan: StagePlan) -> None:
        old, new = self._redistributes, plan.redistributes
        first = _first_other(old, new)
        end = _first_other(old[: first - len(old) - 1 : -1], new[: first - len(new) - 1 : -1])
        gone, come = old[first : len(old) - end], new[first : len(new) - end]
        kept = set(map(id, gone)) & set(map(id, come))
        for one in gone:
            if id(one) not in kept:
                self.steps.pop((one.tensor, one.target), None)
                self._note(one.tensor)
        for one in come:
            if id(one) not in kept:
                self.steps[one.tensor, one.target] = one.steps
                self._note(one.tensor)
        self._redistributes = new

    def _number_of(self, segment: Segment, plan: StagePlan) -> int:
        begin, places = self._begins[segment.number], self._keeps[segment.number]
        nodes = tuple(self._codes[begin : begin + len(segment.nodes)])
        storage = tuple([self._storage_codes[place] for place in places])
        read = self._read_elsewhere(segment, plan) if self._recomputes else ()
        return self._numbers.setdefault((segment.kind, nodes, storage, read), len(self._numbers))

    def _code_of(self, number: int) -> int:
        """What the plan says of a node: its placements, and the ways of its operands that are converted."""
        node, placed, bases, steps = self._graph.nodes[number], self._nodes[number], self.bases, self.steps
        key = [self._number(placed)]
        for name, placement in zip(node.operands, placed.operands, strict=True):
            if bases[name] != placement:
                way = steps.get((name, placement))
                key.append(-1 if way is None else self._number(way))
        return key[0] if len(key) == 1 else self._numbers.setdefault(tuple(key), len(self._numbers))

    def _number(self, content: Hashable) -> int:
        """One number for equal things; the same object is looked at once."""
        known = self._objects.get(id(content))
        if known is None:
            number = self._numbers.setdefault(content, len(self._numbers))
            known = self._objects[id(content)] = number, content
        return known[0]

    def _read_elsewhere(self, segment: Segment, plan: StagePlan) -> Hashable:
        """Of what crosses its ends and is converted: the targets that other segments read, too, which decides what
        function a conversion is written in."""
        inside = {node.name for node in segment.nodes}
        return tuple([
            self._common_targets(name, inside, plan) for name in itertools.chain(segment.enters, segment.made)
        ])  # fmt: skip

    def _common_targets(self, name: str, inside: set[str], plan: StagePlan) -> frozenset[Placement]:
        if len(self._readers[name]) < 2:
            return frozenset()
        readers = [
            (node.name in inside, plan.nodes[node.name].operands[at]) for node, at in self._graph.consumers[name]
        ]
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
