"""First choices, to go on from: the most frugal values, which are what fits if anything simple does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.clock import Clock
from autopar.selection.exact import search_exactly
from autopar.selection.network import Network
from autopar.selection.problem import INFINITE
from autopar.selection.subproblems import Subproblems

_LARGEST_WEIGHT = 10**6
"""Usages are scaled so that what uses most, and longest, costs about this."""


def frugal_choice(parts: Subproblems) -> list[int]:
    """Returns, variable by variable, the value that uses least and is not forbidden beside those before it.

    What costs least breaks ties. Found at once; may neither fit nor avoid all that is forbidden.
    """
    offsets, usages = parts.usage.offsets, parts.usage.total_usages()
    values: list[int] = []
    for v in range(parts.network.num_variables):
        costs = parts.costs_beside(v, values)
        used = usages[offsets[v] : offsets[v + 1]]
        values.append(int(np.lexsort((costs, used, costs >= INFINITE))[0]))
    return values


def fitting_choice(network: Network, clock: Clock, seed: int) -> list[int] | None:
    """Returns a choice that fits, searched for by usage with no regard to cost; None when none was found in time."""
    return search_exactly(_priced_by_usage(network), clock, seed).values


def _priced_by_usage(network: Network) -> Network:
    """The network of the same choices in which a value costs what it uses, and for how long."""
    weights = [np.zeros(len(costs)) for costs in network.unary]
    for use in network.uses:
        weights[use.variable] += use.usages * float(use.hi - use.lo)
    unit = max((float(weight.max()) for weight in weights), default=0.0) / _LARGEST_WEIGHT or 1.0
    unary = [
        np.where(costs >= INFINITE, INFINITE, np.ceil(weight / unit).astype(np.int64))
        for costs, weight in zip(network.unary, weights, strict=True)
    ]
    pairs = {pair: np.where(matrix >= INFINITE, INFINITE, 0) for pair, matrix in network.pairs.items()}
    return replace(network, unary=unary, pairs=pairs)
