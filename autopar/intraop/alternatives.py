"""What each choice of a solved problem would cost otherwise: the answer to "why this, and not that?".

The difference of an option to the chosen one, with every other choice as it is:

    Δ(option) = costs[option] − costs[chosen] + Σ_edges edge_costs[option, other] − edge_costs[chosen, other]

but that a parameter whose storage was chosen for another use follows: it is stored the cheapest way for the new one.
An upper bound of what the best plan with that option would cost more; negative where memory forbids the option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.intraop.builder import Built, Kept, Variable
from autopar.intraop.problem import INFINITE, NO_PATH_NS, Int64Array, Problem
from autopar.intraop.strategies import Strategy
from autopar.ir.placement import Placement, format_placement
from autopar.ir.plan import Alternative, Choice
from autopar.ir.text import storage_text

MAX_ALTERNATIVES = 5


def explain_choices(built: Built, choice: Sequence[int]) -> tuple[Choice, ...]:
    """The chosen option of each variable that had more than one, with the cheapest of the others.

    Times in ns a step and bytes a rank, over all the equal blocks that share the variable.
    """
    totals = _totals(built.problem, choice)
    usages = [usage.copy() for usage in built.problem.usages]
    kinds = [variable.kind for variable in built.variables]
    for (i, j), matrix in zip(built.problem.edges, built.problem.edge_costs, strict=True):
        if kinds[i] == "stored" and kinds[j] == "node":
            _follow(totals, usages, choice, i, j, matrix)
    return tuple(
        _choice(variable, np.minimum(totals[number], INFINITE), usages[number], choice[number])
        for number, variable in enumerate(built.variables)
        if len(variable.options) > 1
    )


def _totals(problem: Problem, choice: Sequence[int]) -> list[Int64Array]:
    """For each variable, the cost of each option with all others as chosen, edges included."""
    totals = [cost.copy() for cost in problem.costs]
    for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        totals[i] += np.minimum(matrix[:, choice[j]], INFINITE)
        totals[j] += np.minimum(matrix[choice[i], :], INFINITE)
        totals[i] = np.minimum(totals[i], _MOST)
        totals[j] = np.minimum(totals[j], _MOST)
    return totals


_MOST = 8 * INFINITE  # several forbidden entries may add up: each is taken off again where a parameter follows


def _follow(
    totals: list[Int64Array], usages: list[Int64Array], choice: Sequence[int], stored: int, node: int,
    matrix: Int64Array,
) -> None:  # fmt: skip
    """Lets a parameter's storage change with the options of its reader that its chosen one forbids, in place."""
    now = choice[stored]
    alone = totals[stored] - np.minimum(matrix[:, choice[node]], INFINITE)  # without this reader
    for option in np.flatnonzero(matrix[now] >= INFINITE):
        together = np.minimum(alone + np.minimum(matrix[:, option], INFINITE), _MOST)
        best = int(together.argmin())
        if together[best] < INFINITE:
            totals[node][option] += together[best] - alone[now] - INFINITE
            usages[node][option] += usages[stored][best] - usages[stored][now]


def _choice(variable: Variable, totals: Int64Array, usages: Int64Array, chosen: int) -> Choice:
    order = [option for option in np.argsort(totals, kind="stable").tolist() if option != chosen]
    others = [option for option in order if totals[option] < NO_PATH_NS][:MAX_ALTERNATIVES]
    alternatives = tuple(
        Alternative(
            _text(variable.options[option]),
            int(totals[option] - totals[chosen]),
            int(usages[option] - usages[chosen]),
        )
        for option in others
    )
    return Choice(
        variable.name,
        variable.kind,
        variable.count,
        _text(variable.options[chosen]),
        int(totals[chosen]),
        len(variable.options),
        alternatives,
    )


def _text(option: Any) -> str:
    if isinstance(option, Kept):
        return f"{storage_text(option.storage)} used {_bracketed((option.use,))}"
    if isinstance(option, Strategy):
        return f"{_bracketed(option.operands)} -> {_bracketed(option.results)}"
    return _bracketed((option,))


def _bracketed(placements: tuple[Placement, ...]) -> str:
    return ", ".join(f"[{format_placement(placement)}]" for placement in placements)
