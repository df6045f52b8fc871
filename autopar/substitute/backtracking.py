"""Cost-based backtracking over substitutions (Jia et al., TASO, 2019).

The cheapest graph not yet looked at is rewritten by every rule wherever it applies; what costs more than α times the
best is dropped. A graph that is better than all before is looked at at once; the rest of the one that it came from
waits. A graph is met once, however it was reached: `key` hashes what its outputs are computed from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.clock import Clock, worked
from autopar.substitute.defined import OPAQUE, Definition, Values
from autopar.substitute.lowering import PARTS
from autopar.substitute.matching import Match, Matcher
from autopar.substitute.rewriting import rewritten
from autopar.tunables import TRY_S

ALPHA = 1.05
"""How much more than the best a graph may cost to be looked at: TASO's value."""

RESOLUTION = 0.02
"""Costs that differ by less are taken for equal: medians of repeated timings of one call differ by as much."""

GIVEN_UP = 0.1
"""Share of a gain that fewer substitutions are worth."""


@dataclass(frozen=True)
class FoundGraph:
    """A graph, the substitutions that lead to it, each with what it gained then, and its cost (ns)."""

    values: Values
    matches: tuple[Match, ...]
    gains_ns: tuple[int, ...]
    cost_ns: int


@dataclass(frozen=True)
class Outcome:
    """What a search found. `stop`: why it ended. `seen`: graphs met.

    cheapest: by the profile. best: of the graphs that are as good, that of the fewest substitutions (`simplest`).
    """

    best: FoundGraph
    cheapest: FoundGraph
    stop: str
    seen: int
    seconds: float


class _BacktrackingLimits(NamedTuple):
    """When a search ends before it has looked at every graph within the threshold."""

    clock: Clock
    seconds: float
    most: int
    patience: int

    def reached(self, seen: int, since: int) -> str:
        """Which limit is reached; "" if none is. since: substitutions tried since the best graph."""
        if self.clock.is_over:
            return f"the {self.clock.stop_reason} of {self.seconds:.3g} s"
        if seen >= self.most:
            return f"the limit of {self.most} graphs"
        return f"no gain in {self.patience} substitutions" if since >= self.patience else ""


class Backtracking:
    """The search over graphs that rules lead to."""

    def __init__(
        self, matchers: Sequence[Matcher], cost: Callable[[Values], int], alpha: float = ALPHA,
        known: dict[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.matchers, self.cost, self.alpha = matchers, cost, alpha
        self.known = {} if known is None else known  # costs by key, which several searches may share

    def run(self, values: Values, seconds: float, most: int = 1 << 30, patience: int = 1 << 30) -> Outcome:
        """The cheapest graphs that are reached within limits.

        seconds: of work. most: of graphs met. patience: of substitutions tried since the best graph was met.
        """
        return self.on(FoundGraph(values, (), (), self.cost(values)), seconds, most, patience)

    def on(self, start: FoundGraph, seconds: float, most: int = 1 << 30, patience: int = 1 << 30) -> Outcome:
        """The cheapest graphs that are reached from one that was found before."""
        values, limits = start.values, _BacktrackingLimits(Clock.of(seconds), seconds, most, patience)
        seen, found, tried, last, stop = {key(values)}, [start], 0, 0, ""
        best = start.cost_ns
        queue = [(start.cost_ns, 0, start, self._next(start, seen))]
        while queue and queue[0][0] <= self.alpha * best and not stop:
            _, _, now, following = queue[0]
            for new in following:
                tried += 1
                worked(TRY_S)
                if new is not None and new.cost_ns <= self.alpha * best:
                    heapq.heappush(queue, (new.cost_ns, len(seen), new, self._next(new, seen)))
                    found.append(new)
                if new is not None and new.cost_ns < best:
                    best, last = new.cost_ns, tried
                    break
                stop = limits.reached(len(seen), tried - last)
                if stop:
                    break
            else:
                queue = [entry for entry in queue if entry[2] is not now]
                heapq.heapify(queue)
        stop = stop or "every graph within the threshold was looked at"
        return Outcome(simplest(found), min(found, key=cheaper), stop, len(seen), limits.clock.passed_s)

    def _next(self, now: FoundGraph, seen: set[int]) -> Iterator[FoundGraph | None]:
        """The graphs that one substitution makes; None for one that was met before.

        The rule that was applied last comes first: what it gained at one place it mostly gains at the next, too.
        """
        last = now.matches[-1].rule if now.matches else None
        for matcher in sorted(self.matchers, key=lambda matcher: matcher.rule is not last):
            for match in matcher.matches(now.values):
                values = rewritten(now.values, match)
                if values is None:
                    continue
                form = key(values)
                if form in seen:
                    yield None
                    continue
                seen.add(form)
                cost_ns = self.known.get(form)
                if cost_ns is None:
                    cost_ns = self.known[form] = self.cost(values)
                gains = (*now.gains_ns, now.cost_ns - cost_ns)
                yield FoundGraph(values, (*now.matches, match), gains, cost_ns)


def cheaper(found: FoundGraph) -> tuple[int, int]:
    """What graphs are compared by: cost, then how many substitutions it takes."""
    return found.cost_ns, len(found.matches)


def simplest(found: Sequence[FoundGraph]) -> FoundGraph:
    """Of the graphs that are as good as the cheapest, the one of the fewest substitutions, the cheapest of these."""
    most = as_good_ns(found[0].cost_ns + sum(found[0].gains_ns), min(item.cost_ns for item in found))
    return min((item for item in found if item.cost_ns <= most), key=lambda item: (len(item.matches), item.cost_ns))


def as_good_ns(given_ns: int, least_ns: int) -> float:
    """What a graph may cost to be as good as the cheapest that substitutions make of a given one.

    As good is what no profile can tell from it, and what gives up little of a gain that one can tell.
    """
    gained, told = given_ns - least_ns, RESOLUTION * least_ns
    return least_ns + (told if gained <= told else min(told, GIVEN_UP * gained))


def key(values: Values) -> int:
    """A hash of what the ends are computed from: equal for equal computations, whatever values are called."""
    known: dict[str, int] = {}
    for name in values.live:
        made = values.definitions.get(name)
        known[name] = hash(name) if made is None else _hash(made, values, known)
    return hash(tuple(known[name] for name in values.ends))


def _hash(made: Definition, values: Values, known: dict[str, int]) -> int:
    operands = tuple(known[name] for name in made.operands)
    if made.op == OPAQUE:
        return hash((OPAQUE, made.attributes, operands))
    if made.op == "concat":
        return hash(("concat", made.attributes, tuple(_parts(made, values, known))))
    if made.op in PARTS:
        return _hash_of_part(made, values, known)
    return hash((made.op, made.attributes, operands))


def _parts(made: Definition, values: Values, known: dict[str, int]) -> Iterator[int]:
    """What a chain of concatenations puts together."""
    for operand in made.operands:
        inner = values.definitions.get(operand)
        if inner is not None and inner.op == "concat" and inner.attributes == made.attributes:
            yield from _parts(inner, values, known)
        else:
            yield known[operand]


def _hash_of_part(made: Definition, values: Values, known: dict[str, int]) -> int:
    """A part by the elements that it is, of what it is cut from in the end."""
    (axis, size), (operand,) = made.attributes, made.operands
    start = 0 if made.op == "first" else size
    inner = values.definitions.get(operand)
    while inner is not None and inner.op in PARTS and inner.attributes[0] == axis:
        if inner.op == "second":
            start += inner.attributes[1]  # type: ignore[operator, assignment] # sizes in a graph are numbers
        (operand,) = inner.operands
        inner = values.definitions.get(operand)
    return hash(("part of", axis, start, made.tensor.shape, known[operand]))
