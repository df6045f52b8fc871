"""Large regions in parts that are searched by themselves, cut where the fewest substitutions cross (TASO, 2019, §5.3).

    minimum cut of the nodes, where the capacity between two nodes = number of possible substitutions that hold both

A part comes before the next: nothing in it reads what a later part makes. Cuts fall in the middle third of what is
cut, again and again until parts are small. What is found for the parts is put together on the whole region, where the
search goes on with what crosses the cuts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.substitute.backtracking import FoundGraph, Outcome
from autopar.substitute.defined import Values
from autopar.substitute.matching import COMMUTATIVE, Match, Matcher
from autopar.substitute.regions import subgraph
from autopar.substitute.rewriting import rewritten
from autopar.substitute.rules.terms import Apply, Term, Variable

if TYPE_CHECKING:
    import networkx

MOST_NODES = 40
"""Larger regions are cut: what a graph of this size costs is known in about a millisecond."""


def parts(values: Values, matchers: Sequence[Matcher], most: int = MOST_NODES) -> list[Graph]:
    """The graph in parts of at most so many nodes, an earlier one before those that read it; [the graph] if small."""
    nodes = values.graph.nodes
    if len(nodes) <= most:
        return [values.graph]
    flow = _flow(values, matchers)
    return [subgraph(values.graph, part) for part in _cut(list(nodes), flow, most)]


def _flow(values: Values, matchers: Sequence[Matcher]) -> networkx.DiGraph:
    """Nodes by name; between two, how many substitutions hold both, and what makes must come before what reads."""
    crossing: Counter[tuple[str, str]] = Counter()
    for matcher in matchers:
        for match in matcher.matches(values):
            crossing.update(combinations(sorted(set(_held(match, values))), 2))
    import networkx  # for large regions of a search alone

    graph = networkx.DiGraph()
    for (one, other), count in crossing.items():
        graph.add_edge(one, other, capacity=count)
        graph.add_edge(other, one, capacity=count)
    for node in values.graph.nodes:
        for name in node.operands:
            if name in values.graph.producers:
                maker = values.graph.producers[name].name
                known = graph.get_edge_data(maker, node.name, {"capacity": 0})["capacity"]
                graph.add_edge(maker, node.name, capacity=known + 1)
                graph.add_edge(node.name, maker, capacity=math.inf)
    return graph


def _held(match: Match, values: Values) -> Iterator[str]:
    """The names of the nodes that a match's source stands for."""
    stack: list[tuple[Term, str]] = list(zip(match.rule.source, match.roots, strict=True))
    while stack:
        term, name = stack.pop()
        made = values.definitions.get(name)
        if isinstance(term, Variable) or made is None or made.op != term.op or made.node is None:
            continue
        yield made.node.name
        for operands in (made.operands, made.operands[::-1]) if made.op in COMMUTATIVE else (made.operands,):
            stack += zip(term.operands, operands, strict=True)


def _cut(nodes: list[Node], flow: networkx.DiGraph, most: int) -> list[list[Node]]:
    """Nodes in order, in parts of at most so many."""
    if len(nodes) <= most:
        return [nodes]
    import networkx

    third = len(nodes) // 3
    graph = flow.subgraph([node.name for node in nodes]).copy()
    graph.add_edges_from((("", node.name) for node in nodes[:third]), capacity=math.inf)
    graph.add_edges_from(((node.name, " ") for node in nodes[-third:]), capacity=math.inf)
    _, (before, _) = networkx.minimum_cut(graph, "", " ")
    first = [node for node in nodes if node.name in before]
    second = [node for node in nodes if node.name not in before]
    return _cut(first, flow, most) + _cut(second, flow, most)


class CutPart(NamedTuple):
    """The values of a part as given, and what its search came to."""

    values: Values
    outcome: Outcome


def together(values: Values, found: Sequence[CutPart], cost: Callable[[Values], int]) -> FoundGraph:
    """What was found best for parts, as substitutions of the whole.

    A substitution that does not apply to the whole is left out: an operator that looks through one of another part.
    """
    now = FoundGraph(values, (), (), cost(values))
    for part, outcome in found:
        names: dict[str, str] = {}
        before = part
        for match in outcome.best.matches:
            after = rewritten(before, match)
            assert after is not None, "it was found so"
            step = _in_whole(now.values, renamed_match(match, partial(_named, names)))
            if step is not None:
                whole, made = step
                names.update(_same_place(match, made, after, whole))
                cost_ns = cost(whole)
                now = FoundGraph(whole, (*now.matches, made), (*now.gains_ns, now.cost_ns - cost_ns), cost_ns)
            before = after
    return now


def _named(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name)


def renamed_match(match: Match, now: Callable[[str], str]) -> Match:
    """A match where values have other names."""
    binding = {key: value if key[0] == "?" else now(value) for key, value in match.binding.items()}
    return Match(match.rule, tuple(map(now, match.roots)), binding)


def _in_whole(values: Values, match: Match) -> tuple[Values, Match] | None:
    """The values after a match that is stated for a part, and the match; None where it does not apply."""
    stated = (*match.roots, *(value for key, value in match.binding.items() if key[0] != "?"))
    if any(name in values.renamed for name in stated):
        return None
    try:
        made = Matcher(match.rule).at(values, match.roots, match.binding)
    except (PlanError, KeyError):
        return None
    after = rewritten(values, made)
    return None if after is None else (after, made)


def _same_place(one: Match, other: Match, part: Values, whole: Values) -> Iterator[tuple[str, str]]:
    """The values that a substitution made in a part, each with that of the whole in the same place of the target."""
    stack = list(zip(one.rule.target, one.roots, other.roots, strict=True))
    while stack:
        term, name, same = stack.pop()
        if isinstance(term, Apply) and name in part.definitions and same in whole.definitions:
            yield name, same
            stack += zip(term.operands, part.definitions[name].operands, whole.definitions[same].operands, strict=True)
