"""The link between nodes of a named network, fitted to collectives that were measured across nodes.

Minimised is the mean logarithmic error of the formulas (`cost.collectives.modelled_ns`), small and large sizes alike,
by turns over the link's constants: the cost of a message, the bandwidth of an adapter, and where that helps a second
protocol of cheaper messages. A bandwidth can be given, where what is published of it says more than few nodes do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cost.collectives import make_group, modelled_ns
from autopar.cost.profile import ACROSS, INSIDE, Link, Profile, Protocol, Provenance
from autopar.ir.placement import Axis
from autopar.profiler.published.measurements import Measurement, named, today

FIRST = (20e3, 40e9, 10e3, 0.3)  # where the search begins: α, bandwidth, α of the cheap protocol, its share
STEPS = tuple(2.0**-power for power in range(1, 8))  # of a constant's logarithm


def fitted_network(
    network: str, rows: Sequence[Measurement], near: Link, base: Profile, bandwidth: float | None = None
) -> Link:
    """The link across nodes of that name. near: the link inside a node; base: a GPU's profile; bandwidth: if known."""

    def link_of(constants: Sequence[float]) -> Link:
        alpha, rate, cheap, share = constants
        fast = Protocol(round(cheap), float(f"{min(1.0, share):.3g}")) if cheap < 0.99 * alpha else None
        gpus, nodes = ", ".join(sorted({row.gpu for row in rows})), max(row.nodes for row in rows)
        source = f"formulas fitted to {len(rows)} times of {gpus} on up to {nodes} nodes, {named(rows)}, {network}"
        source += "" if bandwidth is None else "; the bandwidth is what the maker says that such adapters reach"
        known = float(f"{bandwidth or rate:.4g}")
        return Link(ACROSS, round(alpha), known, Provenance("fitted", source, today()), 0, fast, network=network)

    def loss(constants: Sequence[float]) -> float:
        profile = replace(base, links={INSIDE: near, ACROSS: link_of(constants)}, _shared={})
        return sum(abs(math.log(_formula_ns(row, profile) / row.time_ns)) for row in rows) / len(rows)

    return link_of(by_turns(loss, FIRST))


def _formula_ns(row: Measurement, profile: Profile) -> float:
    group = make_group(Axis("x", row.ranks, 1), row.ranks // row.nodes, profile)
    return modelled_ns(row.op, row.num_bytes, group, profile)


def by_turns(loss: Callable[[Sequence[float]], float], first: Sequence[float]) -> tuple[float, ...]:
    """Positive constants of least loss near the first: each in turn is made a step more or less, by shorter steps once
    none helps."""
    best, least = tuple(first), loss(first)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for number in range(len(best)):
                for factor in (math.exp(step), math.exp(-step)):
                    tried = (*best[:number], best[number] * factor, *best[number + 1 :])
                    if (found := loss(tried)) < least - 1e-9:
                        best, least, improved = tried, found, True
    return best
