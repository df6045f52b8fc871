"""The search of one region, whatever its size: its parts (`cutting`), then what they come to together.

Small graphs are searched twice, as a first gain decides what others are met: once with the rules in their order, which
begins with the merging of products, once with those first that say most. An adapter folds into its weight as long as
its products are not merged with others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.clock import Clock
from autopar.ir.graph import Graph, Ref, map_references
from autopar.substitute.backtracking import ALPHA, Backtracking, FoundGraph, Outcome, cheaper, simplest
from autopar.substitute.cutting import MOST_NODES, CutPart, parts, renamed_match, together
from autopar.substitute.defined import Values
from autopar.substitute.lifting import lifted
from autopar.substitute.matching import Matcher
from autopar.substitute.pricing import Pricer
from autopar.substitute.regions import in_twin, names_in
from autopar.substitute.rules.terms import Apply, Rule, subterms

SHARE_OF_ORDER = 0.4
"""Share of a small graph's time that backtracking may take with the rules in one order."""

SHARE_OF_PARTS = 0.7
"""Share of a region's time that its parts may take."""


class Limits(NamedTuple):
    """Larger graphs than of `most_nodes` are cut.

    patience: how many substitutions are tried without a gain before the search of a region that is not cut ends;
    part_patience: of each of the parts of one that is, and of what crosses the cuts. most: graphs met in all regions.
    """

    most_nodes: int = MOST_NODES
    patience: int = 2000
    part_patience: int = 500
    most: int = 1 << 30


LIMITS = Limits()

SHORT = Limits(patience=200, part_patience=200, most=1_000)
"""Ten times as much patience found nothing better in the models that were looked at (benchmarks/substitution)."""


class Searcher:
    """Searches regions with the same rules and costs."""

    def __init__(
        self, matchers: Sequence[Matcher], cost: Pricer, alpha: float = ALPHA, limits: Limits = LIMITS
    ) -> None:
        self.cost, self.limits = cost, limits
        self.matchers = matchers
        self.pinned = matchers[0].pinned if matchers else frozenset()
        specific = sorted(matchers, key=lambda matcher: -_operators(matcher.rule))
        known: dict[int, int] = {}
        self.orders = [Backtracking(order, cost, alpha, known) for order in (matchers, specific)]

    def run(self, values: Values, seconds: float, most: int = 1 << 30) -> Outcome:
        """The cheapest graphs that are reached in some seconds, and when at most so many are met."""
        clock = Clock.of(seconds)
        given = FoundGraph(values, (), (), self.cost(values))
        cuts = parts(values, self.matchers, self.limits.most_nodes)
        if len(cuts) == 1:
            return self._small(given, seconds, self.limits.patience, most)
        found = self._parts(cuts, clock.part(SHARE_OF_PARTS), most)
        start = together(values, found, self.cost)
        most -= sum(part.outcome.seen for part in found)
        outcome = self.orders[0].on(min(start, given, key=cheaper), clock.left_s, most, self.limits.part_patience)
        return replace(
            outcome,
            best=simplest((given, outcome.best, outcome.cheapest)),
            seen=outcome.seen + sum(part.outcome.seen for part in found),
            seconds=clock.passed_s,
        )

    def _small(self, start: FoundGraph, seconds: float, patience: int, most: int) -> Outcome:
        """By backtracking with the rules in both orders, unless the first finds no gain at all."""
        clock = Clock.of(seconds)
        outcomes = [self.orders[0].on(start, seconds * SHARE_OF_ORDER, most, patience)]
        if outcomes[0].cheapest is not start:
            most -= outcomes[0].seen
            outcomes.append(self.orders[1].on(start, seconds * SHARE_OF_ORDER, most, patience))
        found = [item for outcome in outcomes for item in (outcome.best, outcome.cheapest)]
        return Outcome(
            simplest(found), min(found, key=cheaper), "; ".join(dict.fromkeys(outcome.stop for outcome in outcomes)),
            sum(outcome.seen for outcome in outcomes), clock.passed_s,
        )  # fmt: skip

    def _parts(self, cuts: Sequence[Graph], clock: Clock, most: int) -> list[CutPart]:
        """What is found for each part; equal ones are searched once."""
        known: dict[object, CutPart] = {}
        found = []
        distinct = {self._form(graph): graph for graph in cuts}
        for graph in cuts:
            form = self._form(graph)
            if form not in known:
                parts_left = len(distinct) - len(known)
                seconds = max(0.0, clock.left_s) / parts_left
                values = lifted(graph)
                start = FoundGraph(values, (), (), self.cost(values))
                met = sum(part.outcome.seen for part in known.values())
                outcome = self._small(start, seconds, self.limits.part_patience, (most - met) // parts_left)
                known[form] = CutPart(values, outcome)
            found.append(_for_twin(known[form], graph))
        return found

    def _form(self, graph: Graph) -> object:
        """Equal for graphs that differ in names alone, none of which is pinned in one and not in the other."""
        numbers: dict[str, int] = {}

        def number(name: str) -> int:
            return numbers.setdefault(name, len(numbers))

        nodes = []
        for node in graph.nodes:
            args = map_references((node.args, node.kwargs), lambda name: Ref(str(number(name))))
            nodes.append((node.op, repr(args), tuple(name and number(name) for name in node.outputs)))
        tensors = [graph.tensors[name] for name in numbers]
        facts = tuple(
            (tensor.shape, tensor.dtype, tensor.differentiable, tensor.name in self.pinned) for tensor in tensors
        )
        kept = tuple(numbers.get(name) for name in graph.outputs)
        stored = tuple((numbers.get(item.tensor), item.kind) for item in graph.stored)
        return tuple(nodes), facts, kept, stored


def _operators(rule: Rule) -> int:
    """How many operators the source of a rule has."""
    return sum(isinstance(term, Apply) for source in rule.source for term in subterms(source))


def _for_twin(part: CutPart, graph: Graph) -> CutPart:
    """What was found for a part, for one that differs in names alone."""
    first = part.values.graph
    if graph is first:
        return part
    names = names_in(first.nodes, graph.nodes)
    best = part.outcome.best
    matches = tuple(renamed_match(match, lambda name: in_twin(name, names)) for match in best.matches)
    return CutPart(lifted(graph), replace(part.outcome, best=replace(best, matches=matches), seen=0))
