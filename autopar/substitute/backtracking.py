"""Cost-based backtracking over substitutions (Jia et al., TASO, 2019).

The cheapest graph not yet looked at is rewritten by every rule wherever it applies; what costs more than α times the
best is dropped. A graph is met once, however it was reached: `key` hashes what its outputs are computed from.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.substitute.defined import OPAQUE, Definition, Values
from autopar.substitute.lowering import PARTS
from autopar.substitute.matching import Match, Matcher
from autopar.substitute.rewriting import rewritten

ALPHA = 1.05
"""How much more than the best a graph may cost to be looked at: TASO's value."""


@dataclass(frozen=True)
class Found:
    """A graph, the substitutions that lead to it, each with what it gained then, and its cost (ns)."""

    values: Values
    matches: tuple[Match, ...]
    gains_ns: tuple[int, ...]
    cost_ns: int


@dataclass(frozen=True)
class Outcome:
    """The graphs found, cheapest first; the first one is best. `stop`: why the search ended. `seen`: graphs met."""

    found: tuple[Found, ...]
    stop: str
    seen: int
    seconds: float


class Backtracking:
    """The search over graphs that rules lead to."""

    def __init__(
        self, matchers: Sequence[Matcher], cost: Callable[[Values], int], alpha: float = ALPHA, kept: int = 4
    ) -> None:
        self.matchers, self.cost, self.alpha, self.kept = matchers, cost, alpha, kept

    def run(self, values: Values, seconds: float, most: int = 1 << 30) -> Outcome:
        """The cheapest graphs that are reached in so many seconds, or of so many graphs looked at."""
        begin = time.monotonic()
        start = Found(values, (), (), self.cost(values))
        best, seen, found, number = start.cost_ns, {key(values)}, [start], 0
        queue = [(start.cost_ns, number, start)]
        stop = "every graph within the threshold was looked at"
        while queue:
            cost_ns, _, now = heapq.heappop(queue)
            if cost_ns > self.alpha * best:
                break
            for new in self._next(now, seen):
                if new.cost_ns <= self.alpha * best:
                    number += 1
                    heapq.heappush(queue, (new.cost_ns, number, new))
                    found.append(new)
                best = min(best, new.cost_ns)
                if time.monotonic() - begin > seconds or len(seen) >= most:
                    break
            if time.monotonic() - begin > seconds:
                stop = f"the time limit of {seconds:g} s"
                break
            if len(seen) >= most:
                stop = f"the limit of {most} graphs"
                break
        cheapest = sorted(found, key=lambda item: (item.cost_ns, len(item.matches)))[: self.kept]
        return Outcome(tuple(cheapest), stop, len(seen), time.monotonic() - begin)

    def _next(self, now: Found, seen: set[int]) -> Iterator[Found]:
        for matcher in self.matchers:
            for match in matcher.matches(now.values):
                values = rewritten(now.values, match)
                if values is None:
                    continue
                form = key(values)
                if form not in seen:
                    seen.add(form)
                    cost_ns = self.cost(values)
                    gains = (*now.gains_ns, now.cost_ns - cost_ns)
                    yield Found(values, (*now.matches, match), gains, cost_ns)


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
