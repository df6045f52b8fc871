"""A graph in segments that are lowered and played one after another: which of them are equal, which are new in a plan.

A segment ends where no block does go on: functions, recomputed calls and gathered units each lie in one segment, or in
the program itself; but for the block around all others, where that gathers nothing again (`wrapping`). Of two equal
segments, what is known of one with some placements is known of the other. What is new in a plan is found by comparing
objects, since plans that come one after another share most of theirs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from autopar.ir.graph import Graph, Node, map_references
from autopar.ir.placement import Placement
from autopar.ir.plan import Redistribute, StagePlan
from autopar.ir.recompute import operator_call, tensors_again
from autopar.ir.redistribution import Step
from autopar.simulate.facts import GraphFacts, tensors_on_the_way
from autopar.simulate.wrapping import NO_WRAPPER, Wrapper, leave_segments, outliving, wrapper_in

ROOT_NODES = 24  # how many nodes of the program itself make a segment


class Recomputed(NamedTuple):
    """What a plan computes again: modules and operators' calls, by name; and the results of such operators."""

    calls: frozenset[str]
    tensors: frozenset[str]


class Enters(NamedTuple):
    """A tensor that is there before a segment: by its place among those, or by the segment's result that it is."""

    place: int
    is_made: bool


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Consecutive nodes. enters: tensors of before that this or a later one reads, a stored one if several do.
    leaves: how each of those that the next begins with comes about; made: its results; stored: stored tensors that
    no other segment reads; keeps: all that it reads; runs_again: whether anything of it, or that enters it, is computed
    again; kind: equal of equal segments, whatever is computed again of others. wrapper: the module that it is cut
    inside of, which goes on behind it or, if it returns, ends in it; outlives: of its results, by place, those that are
    held when that has returned."""

    number: int
    nodes: tuple[Node, ...]
    enters: tuple[str, ...]
    leaves: tuple[Enters, ...]
    made: tuple[str, ...]
    stored: tuple[str, ...]
    keeps: tuple[str, ...]
    runs_again: bool = True
    kind: int = -1
    wrapper: str = ""
    returns: bool = False
    outlives: tuple[int, ...] = ()


def known_segments(
    whole: Graph, graph: Graph, facts: GraphFacts, recomputed: frozenset[str], is_cut: bool = True,
    is_split: bool = False, wrapping: str = "",
) -> tuple[Segment, ...]:  # fmt: skip
    """As `segments_of`, found once for a graph. whole: of all stages, which may have equal segments."""
    cut = f"{ROOT_NODES} {is_split} {wrapping}" if is_cut else ""
    key = "segments", f"{_text(recomputed)} {cut}"
    if key not in graph.found:
        kinds: dict[Hashable, int] = whole.found.setdefault(("kinds", ""), {})
        graph.found[key] = segments_of(graph, facts, recomputed, is_cut, is_split, kinds, wrapping)
    found: tuple[Segment, ...] = graph.found[key]
    return found


@lru_cache(maxsize=64)
def _text(recomputed: frozenset[str]) -> str:
    """One for all equal sets, which may have thousands of names."""
    return str(sorted(recomputed))


def segments_of(
    graph: Graph, facts: GraphFacts, recomputed: frozenset[str], is_cut: bool = True, is_split: bool = False,
    kinds: dict[Hashable, int] | None = None, wrapping: str = "",
) -> tuple[Segment, ...]:  # fmt: skip
    """The segments of a stage's graph, or all of it as one. What the stage receives comes about in the first one, what
    it sends is read in the last one. is_split: its backward pass comes in two parts. kinds: by form, of other stages'
    segments, too; these are added. wrapping: the path of a module around all blocks that is cut, since nothing is
    gathered again."""
    kinds = {} if kinds is None else kinds
    tensors = tensors_again(graph, tuple(sorted(recomputed)))
    way = tensors_on_the_way(graph) if is_split and is_cut else frozenset[str]()
    wrapper = wrapper_in(graph, facts, recomputed, wrapping if is_cut else "")
    runs = _cut_runs(graph, facts, recomputed, is_split, wrapper) if is_cut else [graph.nodes]
    held = outliving(graph, facts, wrapper, runs, (*graph.sent, *graph.outputs))
    if held is None or (wrapper.path and leave_segments(graph, runs, tensors)):
        wrapper, held = NO_WRAPPER, frozenset()
        runs = _cut_runs(graph, facts, recomputed, is_split, wrapper)
    homes = {node.name: number for number, run in enumerate(runs) for node in run}
    readers = {
        name: [homes[node.name] for node, _ in uses] for name, uses in graph.consumers.items() if uses
    }  # fmt: skip
    last = {name: max(numbers) for name, numbers in readers.items()}
    last.update(dict.fromkeys(graph.outputs, len(runs)))
    shared = [s.tensor for s in graph.stored if len(set(readers.get(s.tensor, ()))) > 1]
    own = {s.tensor for s in graph.stored if s.tensor in readers} - set(shared)
    first = {name: min(readers[name]) for name in shared}
    for name in graph.received:
        last.setdefault(name, 0)
    enters = tuple(name for name in graph.inputs if name in last and name not in graph.received)
    found, end = list[Segment](), 0
    for number, run in enumerate(runs):
        begin, end = end, end + len(run)
        around = (wrapper.goes_on(end), wrapper.returns(begin, end))
        received = graph.received if number == 0 else ()
        made = (*received, *(name for node in run for name in node.results))
        begun = tuple(name for name in shared if first[name] == number)
        stored = tuple(dict.fromkeys(name for node in run for name in node.operands if name in own))
        places = {name: Enters(place, False) for place, name in enumerate(enters)}
        places |= {name: Enters(place, True) for place, name in enumerate((*made, *begun))}
        crossing = (name for name in (*enters, *made, *begun) if last.get(name, -1) > number)
        after = tuple(sorted(crossing, key=lambda name: -last[name]))
        leaves = tuple(places[name] for name in after)
        outlives = tuple(place for place, name in enumerate(made) if name in held) if around[0] else ()
        ends = number == 0, number == len(runs) - 1, *around, outlives
        form: Hashable = ("a whole stage", len(kinds))  # like no other
        if len(runs) > 1 or (is_cut and graph.ends is not None):
            again = Recomputed(recomputed, tensors)
            form = _form(graph, facts, again, run, enters, leaves, (*made, *begun), stored, ends, way)
        kind = kinds.setdefault(form, len(kinds))
        keeps = tuple(dict.fromkeys(n for node in run for n in node.operands if n in graph.stored_by_tensor))
        runs_again = not tensors.isdisjoint(enters) or any(_runs_again(node, recomputed) for node in run)
        path = wrapper.path if any(around) else ""
        rest = runs_again, kind, path, around[1], outlives
        found.append(Segment(number, run, enters, leaves, (*made, *begun), stored, keeps, *rest))
        enters = after
    return tuple(found)


def _cut_runs(
    graph: Graph, facts: GraphFacts, recomputed: frozenset[str], is_split: bool, wrapper: Wrapper
) -> list[tuple[Node, ...]]:  # fmt: skip
    """The nodes of each segment. What the first ones save must not wait for a gradient of theirs."""
    runs = _runs(graph, facts, recomputed, wrapper) if graph.nodes else [graph.nodes]
    while is_split and len(runs) > 1 and not _is_trained(graph, runs[0]):
        runs[:2] = [(*runs[0], *runs[1])]
    return runs


def _runs(
    graph: Graph, facts: GraphFacts, recomputed: frozenset[str], wrapper: Wrapper = NO_WRAPPER
) -> list[tuple[Node, ...]]:  # fmt: skip
    """Cut where a unit that lies in no other but the wrapper begins or ends, and where the program itself, or that, has
    run for long."""
    spans: dict[str, tuple[int, int]] = {}
    homes = {s.tensor: facts.block_of(s.name, recomputed) for s in graph.stored}
    seen = set[str]()
    for number, node in enumerate(graph.nodes):
        units = {facts.block_of(node.scope.module, recomputed)}
        units |= {homes[name] for name in node.operands if name in homes and name not in seen}
        seen.update(name for name in node.operands if name in homes and _is_shared(graph, name))
        for unit in units:
            while unit and unit != wrapper.path:
                spans[unit] = spans.get(unit, (number, number))[0], number
                unit = facts.block_of(unit.rpartition(".")[0], recomputed)
    inside = {cut for first, last in spans.values() for cut in range(first + 1, last + 1)}
    ends = {cut for first, last in spans.values() for cut in (first, last + 1)} - inside
    runs, begin, count = list[tuple[Node, ...]](), 0, len(graph.nodes)
    for cut in range(1, count + 1):
        is_long = cut - begin >= ROOT_NODES and not _run_again(graph.nodes[cut - 1 : cut + 1], recomputed)
        if cut == count or (cut not in inside and (cut in ends or is_long)):
            runs.append(graph.nodes[begin:cut])
            begin = cut
    return runs


def _is_trained(graph: Graph, run: Sequence[Node]) -> bool:
    """Whether nodes read something that has a gradient of its own."""
    stored = (graph.stored_by_tensor.get(name) for node in run for name in node.operands)
    return any(item is not None and item.requires_grad for item in stored)


def _is_shared(graph: Graph, name: str) -> bool:
    """Whether modules share a stored tensor: it belongs to the first."""
    return len({node.scope.module for node, _ in graph.consumers[name]}) > 1


def _runs_again(node: Node, recomputed: frozenset[str]) -> bool:
    """Whether a module around an operator, or it by itself, is computed again."""
    return bool(recomputed) and (
        operator_call(node) in recomputed or any(path in recomputed for path, _ in node.scope.path)
    )


def _run_again(nodes: Sequence[Node], recomputed: frozenset[str]) -> bool:
    """Whether operators that follow each other are computed again by themselves: together, where one block has them."""
    return bool(recomputed) and all(operator_call(node) in recomputed for node in nodes)


def _form(
    graph: Graph, facts: GraphFacts, again: Recomputed, nodes: tuple[Node, ...], enters: tuple[str, ...],
    leaves: tuple[Enters, ...], made: tuple[str, ...], stored: tuple[str, ...], ends: Hashable,
    way: frozenset[str],
) -> Hashable:  # fmt: skip
    """All that lowering asks of a segment's graph, and of what is computed again there, by places instead of names: so
    that equal segments are equal whatever is computed again elsewhere."""
    recomputed = again.calls
    codes = {name: ("enters", place) for place, name in enumerate(enters)}
    codes |= {name: ("made", place) for place, name in enumerate(made)}
    codes |= {name: ("stored", place) for place, name in enumerate(stored)}
    prefix = _common(nodes)
    coded = tuple(_coded(node, codes, prefix, recomputed) for node in nodes)
    described = tuple(
        (_described(graph, facts, name, prefix, recomputed), name in way, name in again.tensors)
        for name in (*enters, *made, *stored)
    )
    units = [facts.block_of(node.scope.module, recomputed) for node in nodes]
    return repr((coded, described, leaves, ends, tuple(_inside(unit, prefix) for unit in units)))


def _coded(node: Node, codes: Mapping[str, Any], prefix: str, recomputed: frozenset[str]) -> Any:
    """The node by places, and of it, and each module around it, whether that is computed again."""
    scope: Any = tuple((_inside(path, prefix), kind, path in recomputed) for path, kind in node.scope.path)
    args = map_references(node.args, codes.__getitem__)
    kwargs = tuple((key, map_references(value, codes.__getitem__)) for key, value in node.kwargs)
    scope = (scope, bool(recomputed) and operator_call(node) in recomputed)
    return node.op, args, kwargs, tuple(codes.get(name or "") for name in node.outputs), scope


def _described(graph: Graph, facts: GraphFacts, name: str, prefix: str, recomputed: frozenset[str]) -> Any:
    tensor, stored = graph.tensors[name], graph.stored_by_tensor.get(name)
    flags = (
        name in facts.constants, name in facts.folded, name in graph.outputs, name == graph.loss, name in graph.inputs,
        name in graph.mutations.values(), name in graph.producers, name in graph.received, name in graph.sent,
    )  # fmt: skip
    whole = tensor.shape, graph.whole_shapes.get(name), tensor.dtype, tensor.differentiable, graph.kept_dtypes.get(name)
    held = stored and (
        _inside(stored.name, prefix), stored.kind, stored.requires_grad, stored.name in graph.mutations,
        _inside(facts.block_of(stored.name, recomputed), prefix),
    )  # fmt: skip
    return whole, flags, held


def _common(nodes: tuple[Node, ...]) -> str:
    """The innermost module that all nodes are in; the program itself, where a stage has none."""
    shared = nodes[0].scope.path if nodes else ()
    for node in nodes:
        pairs = zip(shared, node.scope.path, strict=False)
        same = [left == right for left, right in pairs]
        shared = shared[: same.index(False) if False in same else len(same)]
    return shared[-1][0] if shared else ""


def _inside(path: str, prefix: str) -> str:
    """A module's path as seen from inside another; of those around it, how many."""
    if prefix and f"{path}.".startswith(f"{prefix}."):
        return "*" + path[len(prefix) :]
    return (
        path if not prefix or not f"{prefix}.".startswith(f"{path}." if path else "") else "^" * (path.count(".") + 1)
    )


# What is new in a plan ----------------------------------------


Key = tuple[str, Placement]


class Numbers:
    """One number for equal things. Objects that plans share are looked at once, and kept here, which keeps their
    identity."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._contents: list[Any] = []
        self._objects: dict[int, tuple[int, Hashable]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def of(self, content: Hashable) -> int:
        """The number of something. Tuples with other names are other things, even where both are empty."""
        number = self._numbers.setdefault((type(content), content), len(self._contents))
        if number == len(self._contents):
            self._contents.append(content)
        return number

    def of_object(self, content: Hashable) -> int:
        """As `of`, for what plans share."""
        known = self._objects.get(id(content))
        if known is None:
            known = self._objects[id(content)] = self.of(content), content
        return known[0]

    def content(self, number: int) -> Any:
        """What has the number."""
        return self._contents[number]


class Differences:
    """What is another object in a plan than in the one before.

    steps: of the plan's conversions. Segments get a number of what a plan says of them: equal of equal ones.
    """

    def __init__(self, graph: Graph, segments: Sequence[Segment], plan: StagePlan, numbers: Numbers) -> None:
        self._graph, self._segments, self._recomputes = graph, segments, bool(plan.recompute)
        self._of_node = [segment.number for segment in segments for _ in segment.nodes]
        self._names = [node.name for node in graph.nodes]
        self._stored = [item.tensor for item in graph.stored]
        self._numbers = numbers
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
        self._nodes_reading, self._readers = _known_readers(graph, self._of_node)
        self.steps: dict[Key, tuple[Step, ...]] = {}
        self.bases: dict[str, Placement] = {}
        self._changed_storage: set[int] = set()

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
        if last is None:
            self._begin(plan)
        else:
            if plan.nodes is not last.nodes:
                self._follow_nodes(plan)
            if plan.storage is not last.storage:
                self._follow_storage(plan)
            if plan.redistributes is not last.redistributes:
                self._follow_steps(plan)
        for name, placement in plan.inputs.items():
            if self.bases.get(name) != placement:
                self._follow_tensor(name, placement)
        for place in self._changed_readers:
            self._codes[place] = self._code_of(place)
        self._changed_readers = set()
        self._last = plan

    def _begin(self, plan: StagePlan) -> None:
        """Everything of the first plan is new."""
        self._nodes = [*map(plan.nodes.__getitem__, self._names)]
        self._storage = [*map(plan.storage.__getitem__, self._stored)]
        for node, placed in zip(self._graph.nodes, self._nodes, strict=True):
            self.bases.update(zip(node.results, placed.results, strict=True))
        self.bases.update((name, kept.placement) for name, kept in zip(self._stored, self._storage, strict=True))
        self._storage_codes = [*map(self._numbers.of_object, self._storage)]
        self._redistributes = plan.redistributes
        self.steps = {(one.tensor, one.target): one.steps for one in plan.redistributes}
        self._changed_segments = {*range(len(self._segments))}
        self._changed_readers, self._changed_storage = {*range(len(self._names))}, {*range(len(self._stored))}

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
            self._storage_codes[number] = self._numbers.of_object(found[number])
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
        read = self._read_elsewhere(segment, plan) if segment.runs_again else ()
        return self._numbers.of((segment.kind, nodes, storage, read))

    def _code_of(self, number: int) -> int:
        """What the plan says of a node: its placements, and the ways of its operands that are converted."""
        node, placed, bases, steps = self._graph.nodes[number], self._nodes[number], self.bases, self.steps
        key = [self._numbers.of_object(placed)]
        for name, placement in zip(node.operands, placed.operands, strict=True):
            if bases[name] != placement:
                way = steps.get((name, placement))
                key.append(-1 if way is None else self._numbers.of_object(way))
        return key[0] if len(key) == 1 else self._numbers.of(tuple(key))

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


Readers = Mapping[str, frozenset[int]]


def _known_readers(graph: Graph, of_node: Sequence[int]) -> tuple[Readers, Readers]:
    """By tensor, the nodes that read it, and the segments that do, by number. Found once for a graph, as long as it is
    cut in the same way. of_node: by node, the segment that it is in."""
    known = graph.found.get(("readers", ""))
    if known is None or known[0] != of_node:
        node_of = {node.name: number for number, node in enumerate(graph.nodes)}
        nodes = {name: frozenset([node_of[node.name] for node, _ in uses]) for name, uses in graph.consumers.items()}
        segments = {name: frozenset([of_node[n] for n in numbers]) for name, numbers in nodes.items()}
        known = graph.found["readers", ""] = [*of_node], nodes, segments
    return known[1], known[2]


def _places_of_others(new: Sequence[object], old: Sequence[object]) -> list[int]:
    """Where another object is than before."""
    same = [*map(operator.is_, new, old)]
    return [] if all(same) else [place for place, is_same in enumerate(same) if not is_same]


def _first_other(one: Sequence[object], other: Sequence[object]) -> int:
    """How many objects are the same from the first on."""
    same = [*map(operator.is_, one, other)]
    return len(same) if all(same) else same.index(False)
