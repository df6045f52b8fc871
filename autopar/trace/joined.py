"""Markers of watched blocks that follow each other are one marker while their program is decomposed.

    y = repeated([x], …, "layers.1")                                y = repeated([x], …, "layers.1")
    z = repeated([y], …, "layers.2")   → z = repeated([x], …)   →   z = repeated([y], …, "layers.2")

torch runs each operator of a program to decompose it, and a marker takes as long as any other: that of a thousand
blocks in a row is one call instead of a thousand. What the blocks pass to each other nobody else sees.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx
from torch.export import ExportedProgram

from autopar.trace.markers import repeated

_SEVERAL = ""
"""In place of the block that a marker's are like: the model's own path, which is no block's."""
_GIVEN = -1


@dataclass
class _Run:
    """Neighbouring markers. inside: these, and the items of what they make."""

    markers: list[fx.Node] = field(default_factory=list)
    inside: dict[fx.Node, None] = field(default_factory=dict)

    @property
    def given(self) -> list[fx.Node]:
        """What the markers read of others."""
        read = (source for marker in self.markers for source in marker.all_input_nodes)
        return list(dict.fromkeys(source for source in read if source not in self.inside))

    @property
    def items(self) -> list[fx.Node]:
        return [node for node in self.inside if node.target is operator.getitem]

    @property
    def results(self) -> list[fx.Node]:
        """The items that others read."""
        return [item for item in self.items if any(user not in self.inside for user in item.users)]


@dataclass(frozen=True)
class _Marker:
    """One of those that were joined. inputs, made: its operands, each by the marker that makes it (or `_GIVEN`) and the
    position there. results: the positions of items that others read, by their number among those of all markers."""

    inputs: list[_Place]
    made: list[_Place]
    like: str
    block: str
    results: dict[int, int]
    meta: dict[str, Any]


_Place = tuple[int, int]


def decomposed_as_one(
    program: ExportedProgram, decompose: Callable[[ExportedProgram], ExportedProgram]
) -> ExportedProgram:
    """What `decompose` makes of a program; its markers are as they were, but for those that nothing reads."""
    runs = [run for run in _runs(program.graph) if len(run.markers) > 1 and run.results]
    joined = {str(number): _join(program.graph, run, str(number)) for number, run in enumerate(runs)}
    program = decompose(program)
    for node in list(program.graph.find_nodes(op="call_function", target=repeated)):
        if node.args[2] == _SEVERAL:
            _part(program.graph, node, joined[cast(str, node.args[3])])
    return program


def _runs(graph: fx.Graph) -> Iterator[_Run]:
    run = _Run()
    for node in graph.nodes:
        if node.target is repeated:
            run.markers.append(node)
        elif node.target is not operator.getitem or node.args[0] not in run.inside:
            yield run
            run = _Run()
            continue
        run.inside[node] = None
    yield run


def _join(graph: fx.Graph, run: _Run, name: str) -> list[_Marker]:
    """Puts one marker in the place of a run's, and says which these were."""
    number = {marker: at for at, marker in enumerate(run.markers)}
    made_by = {item: (number[cast(fx.Node, item.args[0])], cast(int, item.args[1])) for item in run.items}
    given, results = run.given, run.results
    place = {node: (_GIVEN, position) for position, node in enumerate(given)} | made_by
    read: dict[int, dict[int, int]] = {}
    for n, item in enumerate(results):
        at, position = made_by[item]
        read.setdefault(at, {})[n] = position
    parts, made = [], {}
    for at, marker in enumerate(run.markers):
        inputs, made[at], like, block = cast(tuple[list[fx.Node], list[fx.Node], str, str], marker.args)
        operands = [place[x] for x in inputs], [place[x] for x in made[at]]
        parts.append(_Marker(*operands, like, block, read.get(at, {}), marker.meta))
    with graph.inserting_before(run.markers[0]):
        looks = [made[at][position] for at, position in map(made_by.__getitem__, results)]
        whole = graph.call_function(repeated, (given, looks, _SEVERAL, name))
    whole.meta = {**run.markers[0].meta, "val": [item.meta["val"] for item in results]}
    for n, item in enumerate(results):
        item.args = (whole, n)
    for node in reversed(run.inside):
        if node.args[0] is not whole:
            graph.erase_node(node)
    return parts


def _part(graph: fx.Graph, whole: fx.Node, parts: list[_Marker]) -> None:
    """Puts those that were joined in the place of one marker."""
    read = {cast(int, item.args[1]): item for item in whole.users}
    items: dict[_Place, fx.Node] = {(_GIVEN, n): x for n, x in enumerate(cast(list[fx.Node], whole.args[0]))}
    made: list[fx.Node] = []

    def item_of(place: _Place) -> fx.Node:
        if place not in items:
            items[place] = graph.call_function(operator.getitem, (made[place[0]], place[1]))
        return items[place]

    with graph.inserting_before(whole):
        for at, part in enumerate(parts):
            operands = [[item_of(place) for place in places] for places in (part.inputs, part.made)]
            made.append(graph.call_function(repeated, (*operands, part.like, part.block)))
            made[at].meta = part.meta
            for n in part.results.keys() & read.keys():
                read[n].args = made[at], part.results[n]
                whole.prepend(read[n])
                items.setdefault((at, part.results[n]), read[n])
    graph.erase_node(whole)
    for marker in reversed(made):
        for node in (*marker.users, marker):
            if not node.users:
                graph.erase_node(node)
