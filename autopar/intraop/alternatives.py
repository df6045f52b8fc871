"""What each choice of a solved problem would cost otherwise: the answer to "why this, and not that?".

An operator and the parameters that it is the first to read go together, since the use of one is a choice of the
other; every other choice stays as it is. With R the cost of an option and of its edges to what stays, the rest of
operator v's group are its parameters k, and an option costs

    of the operator    G(o) = R_v(o) + Σ_k B_k(o),    B_k(o) = min_x R_k(x) + edge_kv(x, o)
    of a parameter     R_k(x) + min_o edge_kv(x, o) + G(o) − B_k(o)

Less what the group costs as chosen, that is an upper bound of what the best plan with the option would cost more; it
may be negative where memory forbids the option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intraop.builder import Built, ChoiceVariable, KeptParameter
from autopar.intraop.strategies import Strategy
from autopar.ir.labels import bracketed, storage_text, strategy_text
from autopar.ir.plan import Alternative, Choice
from autopar.selection.problem import INFINITE, NO_PATH_NS, Int64Array, Problem

MAX_ALTERNATIVES = 5


@dataclass(frozen=True, eq=False)
class _Priced:
    """For each option of a variable, what its group costs and uses then; compute: what the operator takes itself."""

    costs: Int64Array
    usages: Int64Array
    compute: Int64Array


@dataclass(frozen=True, eq=False)
class _GroupParameter:
    """A parameter of an operator's group: costs of its best option for each of the operator's, and which that is."""

    variable: int
    edge: Int64Array  # own option, operator's option
    best_costs: Int64Array
    best: Int64Array


def explain_choices(built: Built, choice: Sequence[int]) -> tuple[Choice, ...]:
    """The chosen option of each variable that had more than one, with the cheapest of the others.

    Times in ns a step and bytes a rank, over all the equal blocks that share the variable.
    """
    hard = _hard_edges(built)
    rest = _rest(built.problem, choice, hard)
    priced: dict[int, _Priced] = {}
    for operator in range(len(built.variables)):
        if operator not in priced and operator not in hard:
            priced.update(_group(built, operator, hard, rest))
    return tuple(
        _choice(variable, priced[number], choice[number])
        for number, variable in enumerate(built.variables)
        if len(variable.options) > 1
    )


def _hard_edges(built: Built) -> dict[int, tuple[int, Int64Array]]:
    """For each parameter whose use is that of its first reader: the reader, and edge[own option, reader's option]."""
    found = {}
    for (i, j), matrix in zip(built.problem.edges, built.problem.edge_costs, strict=True):
        if (matrix >= INFINITE).any():
            if built.variables[i].kind == "stored":
                found[i] = (j, matrix)
            elif built.variables[j].kind == "stored":
                found[j] = (i, matrix.T)
    return found


def _rest(problem: Problem, choice: Sequence[int], hard: dict[int, tuple[int, Int64Array]]) -> list[Int64Array]:
    """R: for each variable, the costs of its options with their edges to all but its own group, as chosen."""
    totals = [cost.copy() for cost in problem.costs]
    for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        if hard.get(i, (None,))[0] != j and hard.get(j, (None,))[0] != i:
            totals[i] = np.minimum(totals[i] + matrix[:, choice[j]], INFINITE)
            totals[j] = np.minimum(totals[j] + matrix[choice[i], :], INFINITE)
    return totals


def _group(
    built: Built, operator: int, hard: dict[int, tuple[int, Int64Array]], rest: list[Int64Array]
) -> dict[int, _Priced]:
    """The priced options of an operator (or of an input) and of the parameters that follow it."""
    problem = built.problem
    followers = [_follower(k, edge, rest[k]) for k, (reader, edge) in hard.items() if reader == operator]
    costs, usages = rest[operator], problem.usages[operator]
    for follower in followers:
        costs = np.minimum(costs + follower.best_costs, INFINITE)
        usages = usages + problem.usages[follower.variable][follower.best]
    priced = {operator: _Priced(costs, usages, built.compute_ns[operator])}
    for follower in followers:
        priced[follower.variable] = _following(problem, follower, priced[operator], rest[follower.variable])
    return priced


def _follower(variable: int, edge: Int64Array, rest: Int64Array) -> _GroupParameter:
    table = np.minimum(rest[:, None] + edge, INFINITE)
    return _GroupParameter(variable, edge, table.min(axis=0), table.argmin(axis=0))


def _following(problem: Problem, follower: _GroupParameter, group: _Priced, rest: Int64Array) -> _Priced:
    """The parameter's options: the operator takes its best one for each, and its other parameters go along."""
    others = np.where(group.costs >= INFINITE, INFINITE, group.costs - follower.best_costs)
    table = np.minimum(rest[:, None] + np.minimum(follower.edge + others[None, :], INFINITE), INFINITE)
    best = table.argmin(axis=1)
    own = problem.usages[follower.variable]
    usages = own + group.usages[best] - own[follower.best[best]]
    return _Priced(table.min(axis=1), usages, group.compute[best])


def _choice(variable: ChoiceVariable, priced: _Priced, chosen: int) -> Choice:
    order = [option for option in np.argsort(priced.costs, kind="stable").tolist() if option != chosen]
    real = [option for option in order if priced.costs[option] < NO_PATH_NS][:MAX_ALTERNATIVES]
    alternatives = tuple(
        Alternative(
            _text(variable.options[option]),
            int(priced.costs[option] - priced.costs[chosen]),
            int(priced.usages[option] - priced.usages[chosen]),
            int(priced.compute[option] - priced.compute[chosen]),
        )
        for option in real
    )
    name, count, options = variable.name, variable.count, variable.options
    cost = int(priced.costs[chosen])
    return Choice(name, variable.kind, count, _text(options[chosen]), cost, len(options), alternatives)


def _text(option: Any) -> str:
    if isinstance(option, KeptParameter):
        return f"stored {storage_text(option.storage)}, used {bracketed((option.use,))}"
    if isinstance(option, Strategy):
        return strategy_text(option)
    return bracketed((option,))
