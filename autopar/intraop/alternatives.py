"""What each choice of a solved problem would cost otherwise: the answer to "why this, and not that?".

The difference of an option to the chosen one, with every other choice as it is:

    Δ(option) = costs[option] − costs[chosen] + Σ_edges edge_costs[option, other] − edge_costs[chosen, other]

An upper bound of what the best plan with that option would cost more; negative where memory forbids the option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.intraop.builder import Built, Variable
from autopar.intraop.problem import INFINITE, NO_PATH_NS, Int64Array, Problem
from autopar.intraop.strategies import Strategy
from autopar.ir.placement import Placement, format_placement
from autopar.ir.plan import Alternative, Choice, Storage
from autopar.ir.text import storage_text

MAX_ALTERNATIVES = 5


def explain_choices(built: Built, choice: Sequence[int]) -> tuple[Choice, ...]:
    """The chosen option of each variable that had more than one, with the cheapest of the others.

    Times in ns a step and bytes a rank, over all the equal blocks that share the variable.
    """
    totals = _totals(built.problem, choice)
    return tuple(
        _choice(variable, totals[number], built.problem.usages[number], choice[number])
        for number, variable in enumerate(built.variables)
        if len(variable.options) > 1
    )


def _totals(problem: Problem, choice: Sequence[int]) -> list[Int64Array]:
    """For each variable, the cost of each option with all others as chosen, edges included."""
    totals = [cost.copy() for cost in problem.costs]
    for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        totals[i] = np.minimum(totals[i] + matrix[:, choice[j]], INFINITE)
        totals[j] = np.minimum(totals[j] + matrix[choice[i], :], INFINITE)
    return totals


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
    if isinstance(option, Storage):
        return storage_text(option)
    if isinstance(option, Strategy):
        return f"{_bracketed(option.operands)} -> {_bracketed(option.results)}"
    return _bracketed((option,))


def _bracketed(placements: tuple[Placement, ...]) -> str:
    return ", ".join(f"[{format_placement(placement)}]" for placement in placements)
