"""A graph in segments that are lowered and played one after another, and which of them are equal.

A segment ends where no block does go on: functions, recomputed calls and gathered units each lie in one segment, or in
the program itself. Of two equal segments, what is known of one with some placements is known of the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopar.ir.graph import Graph, Node, map_references
from autopar.simulate.facts import GraphFacts

ROOT_NODES = 24  # how many nodes of the program itself make a segment


class Enters(NamedTuple):
    """A tensor that is there before a segment: by its place among those, or by the segment's result that it is."""

    place: int
    is_made: bool


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Consecutive nodes. enters: tensors of before that this or a later one reads, a stored one if several do.
    leaves: how each of those that the next begins with comes about; made: its results; stored: stored tensors that
    no other segment reads; keeps: all that it reads; kind: equal of equal segments."""

    number: int
    nodes: tuple[Node, ...]
    enters: tuple[str, ...]
    leaves: tuple[Enters, ...]
    made: tuple[str, ...]
    stored: tuple[str, ...]
    keeps: tuple[str, ...]
    kind: int = -1


def known_segments(graph: Graph, facts: GraphFacts, recomputed: frozenset[str]) -> tuple[Segment, ...]:
    """As `segments_of`, found once for a graph."""
    key = "segments", f"{sorted(recomputed)} {ROOT_NODES}"
    if key not in graph.found:
        graph.found[key] = segments_of(graph, facts, recomputed)
    found: tuple[Segment, ...] = graph.found[key]
    return found


def segments_of(graph: Graph, facts: GraphFacts, recomputed: frozenset[str]) -> tuple[Segment, ...]:
    """The segments of a stage's graph without branches. What the stage receives comes about in the first one, what it
    sends is read in the last one."""
    runs = _runs(graph, facts, recomputed)
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
    found, kinds = [], dict[Hashable, int]()
    for number, run in enumerate(runs):
        received = graph.received if number == 0 else ()
        made = (*received, *(name for node in run for name in node.results))
        begun = tuple(name for name in shared if first[name] == number)
        stored = tuple(dict.fromkeys(name for node in run for name in node.operands if name in own))
        places = {name: Enters(place, False) for place, name in enumerate(enters)}
        places |= {name: Enters(place, True) for place, name in enumerate((*made, *begun))}
        crossing = (name for name in (*enters, *made, *begun) if last.get(name, -1) > number)
        after = tuple(sorted(crossing, key=lambda name: -last[name]))
        leaves = tuple(places[name] for name in after)
        ends = number == 0, number == len(runs) - 1
        form = _form(graph, facts, recomputed, run, enters, leaves, (*made, *begun), stored, ends)
        kind = kinds.setdefault(form, len(kinds))
        keeps = tuple(dict.fromkeys(n for node in run for n in node.operands if n in graph.stored_by_tensor))
        found.append(Segment(number, run, enters, leaves, (*made, *begun), stored, keeps, kind))
        enters = after
    return tuple(found)


def _runs(graph: Graph, facts: GraphFacts, recomputed: frozenset[str]) -> list[tuple[Node, ...]]:
    """Cut where a unit that lies in no other begins or ends, and where the program itself has run for long."""
    spans: dict[str, tuple[int, int]] = {}
    homes = {s.tensor: facts.block_of(s.name, recomputed) for s in graph.stored}
    seen = set[str]()
    for number, node in enumerate(graph.nodes):
        units = {facts.block_of(node.scope.module, recomputed)}
        units |= {homes[name] for name in node.operands if name in homes and name not in seen}
        seen.update(name for name in node.operands if name in homes and _is_shared(graph, name))
        for unit in units:
            while unit:
                spans[unit] = spans.get(unit, (number, number))[0], number
                unit = facts.block_of(unit.rpartition(".")[0], recomputed)
    inside = {cut for first, last in spans.values() for cut in range(first + 1, last + 1)}
    ends = {cut for first, last in spans.values() for cut in (first, last + 1)} - inside
    runs, begin, count = list[tuple[Node, ...]](), 0, len(graph.nodes)
    for cut in range(1, count + 1):
        if cut == count or (cut not in inside and (cut in ends or cut - begin >= ROOT_NODES)):
            runs.append(graph.nodes[begin:cut])
            begin = cut
    return runs


def _is_shared(graph: Graph, name: str) -> bool:
    """Whether modules share a stored tensor: it belongs to the first."""
    return len({node.scope.module for node, _ in graph.consumers[name]}) > 1


def _form(
    graph: Graph, facts: GraphFacts, recomputed: frozenset[str], nodes: tuple[Node, ...], enters: tuple[str, ...],
    leaves: tuple[Enters, ...], made: tuple[str, ...], stored: tuple[str, ...], ends: tuple[bool, bool],
) -> Hashable:  # fmt: skip
    """All that lowering asks of a segment's graph, by places instead of names."""
    codes = {name: ("enters", place) for place, name in enumerate(enters)}
    codes |= {name: ("made", place) for place, name in enumerate(made)}
    codes |= {name: ("stored", place) for place, name in enumerate(stored)}
    prefix = _common(nodes)
    coded = tuple(_coded(node, codes, prefix, recomputed) for node in nodes)
    described = tuple(_described(graph, facts, name, prefix) for name in (*enters, *made, *stored))
    units = [facts.block_of(node.scope.module, recomputed) for node in nodes]
    units += [facts.block_of(graph.stored_by_tensor[name].name, recomputed) for name in stored]
    return repr((coded, described, leaves, ends, tuple(_inside(unit, prefix) for unit in units)))


def _coded(node: Node, codes: Mapping[str, Any], prefix: str, recomputed: frozenset[str]) -> Any:
    """The node by places, and of each module around it, whether that is computed again."""
    scope = tuple((_inside(path, prefix), kind, path in recomputed) for path, kind in node.scope.path)
    args = map_references(node.args, codes.__getitem__)
    kwargs = tuple((key, map_references(value, codes.__getitem__)) for key, value in node.kwargs)
    return node.op, args, kwargs, tuple(codes.get(name or "") for name in node.outputs), scope


def _described(graph: Graph, facts: GraphFacts, name: str, prefix: str) -> Any:
    tensor, stored = graph.tensors[name], graph.stored_by_tensor.get(name)
    flags = (
        name in facts.constants, name in facts.folded, name in graph.outputs, name == graph.loss, name in graph.inputs,
        name in graph.mutations.values(), name in graph.producers, name in graph.received, name in graph.sent,
    )  # fmt: skip
    whole = tensor.shape, graph.whole_shapes.get(name), tensor.dtype, tensor.differentiable, graph.kept_dtypes.get(name)
    held = stored and (_inside(stored.name, prefix), stored.kind, stored.requires_grad, stored.name in graph.mutations)
    return whole, flags, held


def _common(nodes: tuple[Node, ...]) -> str:
    """The innermost module that all nodes are in."""
    shared = nodes[0].scope.path
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
