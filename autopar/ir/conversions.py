"""The redistributions that a plan's decisions need: one for each placement that a tensor is read in and not made in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from autopar.ir.graph import Node
from autopar.ir.placement import Placement
from autopar.ir.plan import NodePlan


class Conversion(NamedTuple):
    """A tensor that is read in another placement than it is made, stored or fed in."""

    tensor: str
    source: Placement
    target: Placement


def needed_conversions(
    order: Iterable[Node], nodes: Mapping[str, NodePlan], entering: Mapping[str, Placement],
    ends: Iterable[tuple[str, Placement]],
) -> list[Conversion]:  # fmt: skip
    """Each once, in the order in which they are first read.

    order: nodes as they run; entering: of inputs and stored tensors; ends: what must leave the graph, and as what.
    """
    placements = dict(entering)
    found: dict[tuple[str, Placement], Conversion] = {}

    def read(pairs: Iterable[tuple[str, Placement]]) -> None:
        for name, target in pairs:
            if placements[name] != target:
                found.setdefault((name, target), Conversion(name, placements[name], target))

    for node in order:
        placed = nodes[node.name]
        read(zip(node.operands, placed.operands, strict=True))
        placements.update(zip(node.results, placed.results, strict=True))
    read(ends)
    return [*found.values()]
