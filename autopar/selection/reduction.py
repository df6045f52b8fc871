"""Turns a Problem into an equivalent, smaller Network: every optimum is kept.

Three rules, applied until none applies:
- a strategy that is forbidden, or has no allowed partner along some edge, goes (arc consistency);
- a strategy that does not fit beside the least usage of all other nodes, at some time, goes;
- two nodes of which one determines the other (each strategy of the first has one allowed partner) become
  one variable. Sharding problems are full of these: an operator that follows its operand.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from autopar.errors import InfeasibleError
from autopar.selection.network import Member, Network, Use
from autopar.selection.problem import INFINITE, Int64Array, Problem

Domains = list[Int64Array]
Mask = npt.NDArray[np.bool_]
_Adjacency = list[list[tuple[int, Mask]]]


def reduce_problem(problem: Problem) -> Network:
    """Returns a network with the same optima; raises InfeasibleError when a node is left no strategy."""
    domains = prune_strategies(problem)
    return _merge_determined(problem, domains)


def prune_strategies(problem: Problem) -> Domains:
    """Returns, for each node, the strategies that may still be in some feasible choice, ascending."""
    allowed = [costs < INFINITE for costs in problem.costs]
    adjacency = _allowed_pairs(problem)
    changed = list(range(problem.num_nodes))
    while changed:
        _make_arc_consistent(allowed, adjacency, changed)
        changed = _drop_what_does_not_fit(problem, allowed)
    return [np.flatnonzero(mask) for mask in allowed]


def _allowed_pairs(problem: Problem) -> _Adjacency:
    """Lists (neighbour, allowed[own strategy, neighbour's strategy]) of each node."""
    adjacency: _Adjacency = [[] for _ in range(problem.num_nodes)]
    for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        allowed = matrix < INFINITE
        adjacency[i].append((j, allowed))
        adjacency[j].append((i, allowed.T))
    return adjacency


def _make_arc_consistent(allowed: list[Mask], adjacency: _Adjacency, changed: list[int]) -> None:
    """Drops, in place, strategies without an allowed partner; `changed` seeds the work list."""
    queue, queued = deque(changed), set(changed)
    while queue:
        i = queue.popleft()
        queued.discard(i)
        _require_some(i, allowed[i])
        for j, pairs in adjacency[i]:
            supported = allowed[j] & pairs[allowed[i]].any(axis=0)
            if supported.sum() < allowed[j].sum():
                allowed[j] = supported
                if j not in queued:
                    queue.append(j)
                    queued.add(j)


def _require_some(node: int, mask: Mask) -> None:
    if not mask.any():
        raise InfeasibleError(f"node {node}: every strategy is forbidden, by its own cost, by an edge, or "
                              "because it does not fit in the usage limit")  # fmt: skip


def _drop_what_does_not_fit(problem: Problem, allowed: list[Mask]) -> list[int]:
    """Drops, in place, strategies larger than the room that the least usages leave; returns the nodes."""
    if problem.usage_limit is None:
        return []
    least = np.array([u[a].min() for u, a in zip(problem.usages, allowed, strict=True)], dtype=np.int64)
    starts, room = room_over_time(problem, least)
    changed = []
    for node, (lo, hi) in enumerate(problem.intervals):
        if lo < hi:
            first, last = np.searchsorted(starts, (lo, hi))
            fits = allowed[node] & (problem.usages[node] - least[node] <= room[first:last].min())
            if fits.sum() < allowed[node].sum():
                allowed[node] = fits
                changed.append(node)
    for node in changed:
        _require_some(node, allowed[node])
    return changed


def room_over_time(problem: Problem, usages: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Returns the times at which something starts or ends, and the limit less the usage from each on."""
    live = [(lo, hi, usages[i]) for i, (lo, hi) in enumerate(problem.intervals) if lo < hi]
    if not live or problem.usage_limit is None:
        return np.zeros(1, dtype=np.int64), np.full(1, INFINITE, dtype=np.int64)
    lo, hi, amount = (np.array(column, dtype=np.int64) for column in zip(*live, strict=True))
    starts, position = np.unique(np.concatenate([lo, hi]), return_inverse=True)
    change = np.zeros(len(starts), dtype=np.int64)
    np.add.at(change, position, np.concatenate([amount, -amount]))
    return starts, problem.usage_limit - np.cumsum(change)


class _Merger:
    """The graph while variables are contracted; variables are numbered as the nodes are."""

    def __init__(self, problem: Problem, domains: Domains) -> None:
        self.costs: list[Int64Array] = [c[d] for c, d in zip(problem.costs, domains, strict=True)]
        self.strategies: list[dict[int, Int64Array]] = [{i: d} for i, d in enumerate(domains)]
        self.neighbours: list[dict[int, Int64Array]] = [{} for _ in domains]
        for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
            self.connect(i, j, matrix[np.ix_(domains[i], domains[j])])

    def connect(self, i: int, j: int, matrix: Int64Array) -> None:
        self.neighbours[i][j] = matrix
        self.neighbours[j][i] = matrix.T

    def run(self) -> None:
        """Contracts until no variable determines another."""
        queue = deque((i, j) for i, around in enumerate(self.neighbours) for j in around)
        while queue:
            i, j = queue.popleft()
            matrix = self.neighbours[i].get(j)
            if matrix is not None and _determines(matrix):
                queue.extend((i, k) for k in self.neighbours[j] if k != i)
                queue.extend((k, i) for k in self.neighbours[j] if k != i)
                self.contract(i, j, np.argmin(matrix, axis=1))

    def contract(self, i: int, j: int, value: Int64Array) -> None:
        """Replaces variable j by `value[v]` wherever variable i takes value v."""
        along = self.neighbours[i].pop(j)[np.arange(len(value)), value]
        self.costs[i] = _sum(self.costs[i], along, self.costs[j][value])
        self.strategies[i].update({node: s[value] for node, s in self.strategies[j].items()})
        self.strategies[j] = {}
        del self.neighbours[j][i]
        for k, matrix in self.neighbours[j].items():
            del self.neighbours[k][j]
            moved = matrix[value]
            self.connect(i, k, _sum(moved, self.neighbours[i][k]) if k in self.neighbours[i] else moved)
        self.neighbours[j] = {}


def _determines(matrix: Int64Array) -> bool:
    """Whether each row allows exactly one column."""
    return bool(((matrix < INFINITE).sum(axis=1) == 1).all())


def _sum(*terms: Int64Array) -> Int64Array:
    """Sums costs, at most INFINITE: a handful of terms of at most 10^18 each fit in 64 bits."""
    total = terms[0]
    for term in terms[1:]:
        total = np.minimum(total + term, INFINITE)
    return total


def _merge_determined(problem: Problem, domains: Domains) -> Network:
    merger = _Merger(problem, domains)
    merger.run()
    return _freeze(problem, merger)


def _freeze(problem: Problem, merger: _Merger) -> Network:
    """Renumbers the variables that are left and collects what they use."""
    kept = [i for i, strategies in enumerate(merger.strategies) if strategies]
    number = {i: v for v, i in enumerate(kept)}
    pairs = {
        (number[i], number[j]): np.ascontiguousarray(matrix)
        for i in kept
        for j, matrix in merger.neighbours[i].items()
        if i < j
    }
    members = {node: Member(number[i], s) for i in kept for node, s in merger.strategies[i].items()}
    ordered = [members[node] for node in range(problem.num_nodes)]
    least, uses = _collect_uses(problem, ordered)
    starts, room = room_over_time(problem, least)
    return Network([merger.costs[i] for i in kept], pairs, uses, starts, room, ordered)


def _collect_uses(problem: Problem, members: list[Member]) -> tuple[Int64Array, list[Use]]:
    """Splits each node's usage into its least, which every choice pays, and the rest."""
    least = np.zeros(problem.num_nodes, dtype=np.int64)
    uses = []
    for node, (member, (lo, hi)) in enumerate(zip(members, problem.intervals, strict=True)):
        usages = problem.usages[node][member.strategies]
        least[node] = usages.min()
        if lo < hi and usages.max() > least[node] and problem.usage_limit is not None:
            uses.append(Use(member.variable, lo, hi, usages - least[node]))
    return least, uses
