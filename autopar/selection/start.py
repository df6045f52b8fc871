"""A first choice, found at once: the most frugal values, which is what fits if anything simple does."""

from __future__ import annotations

import numpy as np

from autopar.selection.problem import INFINITE
from autopar.selection.subproblems import Subproblems


def frugal_choice(parts: Subproblems) -> list[int]:
    """Returns, variable by variable, the value that uses least and is not forbidden beside those before it.

    What costs least breaks ties. May neither fit nor avoid all that is forbidden.
    """
    offsets, usages = parts.usage.offsets, parts.usage.total_usages()
    values: list[int] = []
    for v in range(parts.network.num_variables):
        costs = parts.costs_beside(v, values)
        used = usages[offsets[v] : offsets[v + 1]]
        values.append(int(np.lexsort((costs, used, costs >= INFINITE))[0]))
    return values
