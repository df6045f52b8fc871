"""What stages send each other: tensors forward, their gradients backward, and the gradients of tied parameters.

Rank k of a stage sends to rank k of another. The transfer is across nodes when any of these pairs is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost import Profile, collective_time_ns
from autopar.cost.collectives import ACROSS, INSIDE
from autopar.ir.graph import Graph
from autopar.ir.placement import Axis, local_shape
from autopar.ir.plan import Plan
from autopar.ir.stages import tied_tensors
from autopar.simulate.program import Program


class Transfer(NamedTuple):
    """What a stage sends to another after a pass; `link` is "" between stages of one submesh, where nothing travels."""

    target: int
    is_forward: bool
    names: tuple[str, ...]
    num_bytes: int
    link: str
    duration_ns: int


class Tie(NamedTuple):
    """A tensor that several stages keep, and the all-reduce that sums its gradient over them."""

    tensor: str
    stages: tuple[int, ...]
    num_bytes: int
    link: str
    duration_ns: int


@dataclass(frozen=True)
class Transfers:
    """By stage and direction: what it sends, and how many transfers it waits for."""

    sent: dict[tuple[int, bool], list[Transfer]]
    awaited: dict[tuple[int, bool], int]

    def of(self, stage: int, is_forward: bool) -> list[Transfer]:
        return self.sent.get((stage, is_forward), [])

    def num_awaited(self, stage: int, is_forward: bool) -> int:
        return self.awaited.get((stage, is_forward), 0)


def find_transfers(plan: Plan, programs: Sequence[Program], profile: Profile) -> Transfers:
    """Everything that travels between stages in a microbatch."""
    found = Transfers({}, {})
    for target, receiver in enumerate(programs):
        for source, sender in enumerate(programs[:target]):
            names = tuple(name for name in receiver.receives if name in sender.sends)
            trained = tuple(name for name in names if receiver.values[receiver.receives[name]].wants_gradient)
            for sending, receiving, is_forward, what in (
                (source, target, True, names), (target, source, False, trained)
            ):  # fmt: skip
                if what:
                    size = sum(receiver.values[receiver.receives[name]].num_bytes for name in what)
                    link, duration = _link(plan, sending, receiving, size, profile)
                    transfer = Transfer(receiving, is_forward, what, size, link, duration)
                    found.sent.setdefault((sending, is_forward), []).append(transfer)
                    key = receiving, is_forward
                    found.awaited[key] = found.awaited.get(key, 0) + 1
    return found


def _link(plan: Plan, source: int, target: int, num_bytes: int, profile: Profile) -> tuple[str, int]:
    first, second = plan.stages[source], plan.stages[target]
    if first.first_rank == second.first_rank:
        return "", 0
    level, axis = _level(plan, [first.ranks, second.ranks])
    return f"send {level}", collective_time_ns("send", num_bytes, axis, plan.mesh.devices_per_node, profile)


def _level(plan: Plan, ranks: Sequence[range]) -> tuple[str, Axis]:
    """The level of link that joins equal ranks of submeshes, and an axis as long as there are submeshes on it."""
    per_node = plan.mesh.devices_per_node
    groups = zip(*ranks, strict=False)
    inside = all(len({rank // per_node for rank in group}) == 1 for group in groups)
    return (INSIDE, Axis("stages", len(ranks), 1)) if inside else (ACROSS, Axis("stages", len(ranks), per_node))


def find_ties(graph: Graph, plan: Plan, programs: Sequence[Program], profile: Profile) -> list[Tie]:
    """The gradients that are summed over stages, once a step."""
    found = []
    for tensor, stages in tied_tensors(graph, plan).items():
        placement = plan.stages[stages[0]].storage[tensor].placement
        shape = local_shape(graph.tensors[tensor].shape, placement, plan.stages[stages[0]].axes)
        size = math.prod(shape) * graph.kept(tensor).itemsize
        ranks = list({plan.stages[stage].first_rank: plan.stages[stage].ranks for stage in stages}.values())
        if len(ranks) > 1:
            level, axis = _level(plan, ranks)
            duration = collective_time_ns("all_reduce", size, axis, plan.mesh.devices_per_node, profile)
            found.append(Tie(tensor, stages, size, level, duration))
    return found
