"""Refines a deep model's plan on few of its equal blocks, and does in all of them what was found there.

    whole plan, n equal blocks  →  the same plan on `KEPT` of them (`interop.fold`)  →  chains by MCMC  →  lifted

What a proposal costs to simulate follows the number of blocks; what it gains in one of many equal blocks, it gains in
each. So as many proposals are made of a deep model as of a shallow one, and the whole model is simulated for what comes
out of them alone. Memory: what the whole plan has left of its limit is shared by the blocks, so

    limit of the short plan = its peak + (limit − peak of the whole plan) · KEPT / n

What is found is estimated to fit the whole then, and is simulated there before it is believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.interop import Folded, fold
from autopar.ir.graph import Graph, is_inside
from autopar.ir.plan import Plan
from autopar.refinement.jumping import Jumps
from autopar.refinement.worlds import Worlds
from autopar.soap import Jump, Start
from autopar.tunables import KEPT

_DEEP = 2 * KEPT


@dataclass(frozen=True)
class Short:
    """A plan's model with fewer blocks, and where its chain begins. paths: by each block's, that of the one which
    stands for it, itself where it is kept."""

    worlds: Worlds
    start: Start
    folded: Folded
    paths: Mapping[str, str]

    @property
    def jumps(self) -> dict[str, Jump]:
        """What may be proposed beside other options of decisions."""
        return Jumps(self.worlds).possible()

    @property
    def extent(self) -> str:
        """How much of the model it is, in words."""
        return f"on {len(set(self.paths.values()))} of {len(self.paths)} blocks"

    def lifted(self, graph: Graph, found: Plan) -> Plan:
        """What was found, done in all blocks; its redistributions are still to be made. graph: the whole one's."""
        stand_in, nodes, storage = self.folded.stand_in, found.stage.nodes, found.stage.storage
        again, limit = _in_all(found.recompute, self.paths), self.worlds.plan.memory_limit  # the whole plan's
        return replace(found, recompute=again, memory_limit=limit).placed(
            nodes={node.name: nodes[stand_in.get(node.name, node.name)] for node in graph.nodes},
            storage={item.tensor: storage[stand_in.get(item.tensor, item.tensor)] for item in graph.stored},
            redistributes=(),
        )


def shortened(worlds: Worlds, start: Start) -> Short | None:
    """The model with `KEPT` of its equal blocks, and the start there; None where it has not many more, where others are
    between them, where the plan has stages or branches, or places blocks apart that one is to stand for."""
    plan = start.plan
    if len(worlds.plan.stages) > 1 or plan.stage.forks or all(len(paths) <= _DEEP for paths in worlds.blocks.paths):
        return None
    folded = fold(worlds.graph, worlds.blocks, worlds.layers, KEPT)
    if folded.graph is worlds.graph or not _stands_for_all(folded, worlds.graph):
        return None
    paths = _stand_in_paths(worlds, folded)
    again = tuple(module for module in plan.recompute if is_inside(module, paths.values()))
    request = replace(worlds.request, recompute=again)
    short = Worlds(folded.graph, worlds.blocks, request, worlds.profile, worlds.plan)
    placed = short.first.space.redistributed(_without_others(plan, folded.graph, again))
    if placed is None:
        return None
    found = Short(short, Start(start.name, short.first, placed), folded, paths)
    if not _place_alike(found.lifted(worlds.graph, placed), plan):
        return None
    left = plan.memory_limit - _peak_bytes(start)
    limit = _peak_bytes(found.start) + left * len(set(paths.values())) // len(paths)
    return replace(found, start=replace(found.start, plan=replace(placed, memory_limit=max(1, limit))))


def _stands_for_all(folded: Folded, graph: Graph) -> bool:
    """Whether all that is gone has an equal in the short graph: not so what runs outside of blocks for one alone."""
    short, stand_in = folded.graph, folded.stand_in
    nodes, stored = short.node_by_name.keys(), short.stored_by_tensor.keys()
    return all(stand_in.get(node.name, node.name) in nodes for node in graph.nodes) and all(
        stand_in.get(item.tensor, item.tensor) in stored for item in graph.stored
    )


def _without_others(plan: Plan, graph: Graph, again: tuple[str, ...]) -> Plan:
    """What the plan says of a short graph."""
    nodes, storage = plan.stage.nodes, plan.stage.storage
    return replace(plan, recompute=again).placed(
        nodes={node.name: nodes[node.name] for node in graph.nodes},
        storage={item.tensor: storage[item.tensor] for item in graph.stored},
    )


def _place_alike(one: Plan, other: Plan) -> bool:
    again = set(one.recompute) == set(other.recompute)
    return again and one.stage.nodes == other.stage.nodes and one.stage.storage == other.stage.storage


def _peak_bytes(start: Start) -> int:
    return start.world.score.excess_bytes(start.plan, limit_bytes=0)


def _stand_in_paths(worlds: Worlds, folded: Folded) -> dict[str, str]:
    """By each block's path, in the order in which they run, that of the block that stands for it."""
    every = {path for group in worlds.blocks.paths for path in group}
    path_of = {node.name: node.scope.outermost(every) for node in worlds.graph.nodes}
    found: dict[str, str] = {}
    for name, path in path_of.items():
        stands = path_of.get(folded.stand_in.get(name, name))
        if path is not None and stands is not None:
            found.setdefault(path, stands)
    return found


def _in_all(modules: Sequence[str], paths: Mapping[str, str]) -> tuple[str, ...]:
    """Modules that are computed again, block by block."""
    return tuple(
        path + module.removeprefix(stands)
        for path, stands in paths.items()
        for module in modules
        if is_inside(module, (stands,))
    )
