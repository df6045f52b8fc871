"""Takes over from another choice what makes this one cheaper, as far as it fits.

What two choices differ in falls apart into moves that do not meet in any table: each has a cost and uses more memory
at some times, less at others. The best set of moves that fits is a knapsack of some dozens of them, with rows as they
are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.clock import worked
from autopar.selection.problem import INFINITE, Int64Array
from autopar.selection.subproblems import Subproblems
from autopar.selection.usage import worst_positions

_ROWS_A_ROUND, _MOST_ROUNDS = 4, 24
_DETERMINISTIC_S = 0.3
"""Of CP-SAT's own count of work, for one knapsack."""
_LARGEST_COST = 10**9
"""Costs are scaled to this, which leaves sums of them within 64 bits."""


@dataclass(frozen=True, eq=False)
class _Switch:
    """Variables that change together: by how much that is dearer, and uses more from each of the `room_starts` on."""

    variables: list[int]
    cost: int
    usage: Int64Array


def merged(parts: Subproblems, values: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns the cheapest choice that fits which was found between one that fits and another one."""
    moves = [_move(parts, values, other, variables) for variables in _apart(parts, values, other)]
    moves = [move for move in moves if move.cost < INFINITE // 2]
    found = list(values)
    for move in _knapsack(moves, parts.usage.excess(values)):
        for variable in move.variables:
            found[variable] = other[variable]
    return found


def _apart(parts: Subproblems, values: Sequence[int], other: Sequence[int]) -> Iterable[list[int]]:
    """The variables in which two choices differ, by what is tied together."""
    left = {v for v, value in enumerate(values) if value != other[v]}
    for first in sorted(left):
        if first not in left:
            continue
        left.discard(first)
        group = [first]
        for variable in group:
            near = ((w, table) for w, table in parts.tables(variable) if w in left)
            tied = [w for w, table in near if _interact(table, (variable, w), values, other)]
            group.extend(tied)
            left.difference_update(tied)
        yield group


def _interact(table: Int64Array, pair: tuple[int, int], values: Sequence[int], other: Sequence[int]) -> bool:
    """Whether what one change costs depends on whether the other one is made."""
    v, w = pair
    both, none = int(table[other[v], other[w]]), int(table[values[v], values[w]])
    return both + none != int(table[other[v], values[w]]) + int(table[values[v], other[w]])


def _move(parts: Subproblems, values: Sequence[int], other: Sequence[int], variables: list[int]) -> _Switch:
    network, inside, cost = parts.network, set(variables), 0
    for v in variables:
        cost += int(network.unary[v][other[v]]) - int(network.unary[v][values[v]])
        for w, table in parts.tables(v):
            if w not in inside:
                cost += int(table[other[v], values[w]]) - int(table[values[v], values[w]])
            elif v < w:
                cost += int(table[other[v], other[w]]) - int(table[values[v], values[w]])
    return _Switch(variables, cost, parts.change_of_usage(variables, values, other))


def _knapsack(moves: list[_Switch], excess: Int64Array) -> list[_Switch]:
    """Returns the moves that are cheapest together, of sets that fit; none where none was found."""
    chosen, rows = [move for move in moves if move.cost < 0], set[int]()
    for _ in range(_MOST_ROUNDS):
        usage = sum((move.usage for move in chosen), excess)
        if usage.max(initial=0) <= 0:
            return chosen
        rows.update(worst_positions(usage, _ROWS_A_ROUND))
        chosen = _cheapest(moves, excess, sorted(rows))
    return []


def _cheapest(moves: list[_Switch], excess: Int64Array, rows: Sequence[int]) -> list[_Switch]:
    from ortools.sat.python import cp_model  # lazy: a second to import

    model = cp_model.CpModel()
    taken = [model.new_bool_var("") for _ in moves]
    for row in rows:
        model.add(
            sum(int(move.usage[row]) * take for move, take in zip(moves, taken, strict=True)) <= -int(excess[row])
        )
    scale = max(1, max(abs(move.cost) for move in moves) // _LARGEST_COST)
    model.minimize(sum(move.cost // scale * take for move, take in zip(moves, taken, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _DETERMINISTIC_S
    status = solver.solve(model)
    worked(solver.response_proto.deterministic_time)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    return [move for move, take in zip(moves, taken, strict=True) if solver.boolean_value(take)]
