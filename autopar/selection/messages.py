"""Messages through all of a network, which lead to a choice: sequential tree-reweighted message passing.

    m_ij(b) = min_a  γ_i (c_i(a) + Σ_k m_ki(a)) − m_ji(a) + c_ij(a, b),    γ_i = 1 / max(neighbours before, after i)

variable by variable and back. On the way there each variable takes the value that costs least beside the values of
those before it and the messages of those after it. Other costs of the same network go on from the same messages, which
most of them still hold for. Kolmogorov, "Convergent tree-reweighted message passing" (PAMI 28, 2006). Bounds that have
to hold are `bounding`'s: these are sums of floats.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.clock import worked
from autopar.selection.elimination import Core
from autopar.tunables import MESSAGE_S

Float64Array = npt.NDArray[np.float64]
_Link = tuple[int, Float64Array, Float64Array, Float64Array]
"""A neighbour, the costs of pairs by its value first, the message to it and the one from it."""


class Messages:
    """The messages of a core; its tables may change, its variables and their values may not."""

    def __init__(self, core: Core) -> None:
        sizes = [len(costs) for costs in core.unary]
        self._messages = {pair: np.zeros(sizes[pair[1]]) for i, j in core.pairs for pair in ((i, j), (j, i))}

    def values(self, core: Core, sweeps: int) -> list[int]:
        """Sends messages there and back so many times; returns what the last ones lead to."""
        before, after = self._links(core)
        unary = [costs.astype(np.float64) for costs in core.unary]
        shares = [1.0 / max(1, len(b), len(a)) for b, a in zip(before, after, strict=True)]
        values: list[int] = []
        for _ in range(sweeps):
            values = []
            for costs, share, earlier, later in zip(unary, shares, before, after, strict=True):
                values.append(_best(costs, earlier, later, values))
                _send(costs, share, (earlier, later), later)
            for costs, share, earlier, later in reversed(list(zip(unary, shares, before, after, strict=True))):
                _send(costs, share, (earlier, later), earlier)
            worked(core.num_entries * MESSAGE_S)
        return values

    def _links(self, core: Core) -> tuple[list[list[_Link]], list[list[_Link]]]:
        """Each variable's links to those before it, and to those after it."""
        before: list[list[_Link]] = [[] for _ in core.unary]
        after: list[list[_Link]] = [[] for _ in core.unary]
        for (i, j), table in core.pairs.items():
            there, back = self._messages[i, j], self._messages[j, i]
            after[i].append((j, np.ascontiguousarray(table.T, dtype=np.float64), there, back))
            before[j].append((i, table.astype(np.float64), back, there))
        return before, after


def _best(costs: Float64Array, before: list[_Link], after: list[_Link], values: list[int]) -> int:
    total = costs.copy()
    for other, table, _, _ in before:
        total += table[values[other]]
    for _, _, _, incoming in after:
        total += incoming
    return int(total.argmin())


def _send(costs: Float64Array, share: float, links: tuple[list[_Link], list[_Link]], to: list[_Link]) -> None:
    total = costs.copy()
    for side in links:
        for _, _, _, incoming in side:
            total += incoming
    total *= share
    for _, table, outgoing, incoming in to:
        np.min(table + (total - incoming), axis=1, out=outgoing)
        outgoing -= outgoing.min()
