"""Cuts a model into stages of equal numbers of repeated blocks, and a plan of its whole into one of given stages."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from autopar.cost import Profile
from autopar.cost.crossing import End, cheapest_handover, way
from autopar.errors import PlanError
from autopar.interop import Members, block_layers
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import MICROBATCH, Mesh
from autopar.ir.placement import P, Placement, local_shape
from autopar.ir.plan import Plan, Redistribute, Stage
from autopar.ir.redistribution import cheapest_path
from autopar.ir.stages import leaving_values
from autopar.ir.verifier import output_placement, update_placement


def equal_stages(graph: Graph, block_paths: Sequence[str], count: int) -> Members:
    """The stages of each node when each of `count` stages has as many blocks as the others.

    block_paths: module paths of the repeated blocks. Raises PlanError when their number is not a multiple of `count`.
    """
    layers = block_layers(graph, block_paths)
    if not layers.count or layers.count % count:
        raise PlanError(
            f"expected a number of repeated blocks that {count} stages divide equally, found {layers.count} "
            "(numbered modules that run something); choose a number of stages that divides it"
        )
    return stages_of_sizes(graph, block_paths, [layers.count // count] * count)


def stages_of_sizes(graph: Graph, block_paths: Sequence[str], sizes: Sequence[int]) -> Members:
    """The stages of each node when each stage has so many of the blocks, in the order in which they run."""
    layers = block_layers(graph, block_paths)
    assert layers.count == sum(sizes), "each block is in a stage"
    ends = list(accumulate(sizes))
    return layers.members(graph, [bisect_right(ends, number) for number in range(layers.count)])


# The plan ----------------------------------------

Pair = tuple[str, Placement]
"""A tensor, and a placement that it is needed in."""


@dataclass(frozen=True, eq=False)
class _Cut:
    """What is cut: placements by stage, each for what its stage reads at least, and where the stages are."""

    graph: Graph
    plans: Sequence[Stage]
    members: Members
    first_ranks: Sequence[int]
    mesh: Mesh
    profiles: Mapping[str, Profile]

    @cached_property
    def nodes(self) -> list[list[Node]]:
        """What runs in each stage."""
        found: list[list[Node]] = [[] for _ in self.plans]
        for node in self.graph.nodes:
            for index in self.members[node.name]:
                found[index].append(node)
        return found

    def end(self, index: int) -> End:
        """The ranks and axes of a stage."""
        axes = tuple(axis for axis in self.plans[index].axes if axis.name != MICROBATCH)
        first = self.first_ranks[index]
        ranks = range(first, first + math.prod(axis.size for axis in axes))
        group = self.mesh.group_of(ranks)
        return End(ranks, axes, self.profiles[group.profile].shared_by(group.devices_per_node))

    def maker(self, index: int, name: str) -> int | None:
        """The stage that a stage receives the tensor from; None where it does not receive it."""
        node = self.graph.producers.get(name)
        return None if node is None or index in self.members[node.name] else self.members[node.name][0]

    def made(self, index: int, name: str) -> Placement:
        """The placement that a tensor is made in by a stage."""
        node = self.graph.producers[name]
        return self.plans[index].nodes[node.name].results[node.results.index(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one microbatch, whole over the ranks."""
        plan = self.plans[self.members[self.graph.producers[name].name][0]]
        placement = self.made(self.members[self.graph.producers[name].name][0], name)
        cut = [(t, axis) for t, axis in zip(placement, plan.axes, strict=True) if axis.name == MICROBATCH]
        return local_shape(self.graph.tensors[name].shape, tuple(t for t, _ in cut), tuple(axis for _, axis in cut))


def cut(
    graph: Graph, plans: Plan | Sequence[Plan], members: Members, first_ranks: Sequence[int], schedule: str,
    mesh: Mesh | None = None, profiles: Mapping[str, Profile] | None = None,
) -> Plan:  # fmt: skip
    """One plan of several stages, from the given ranks on, out of a plan for each (or one for all of them).

    A stage's plan is one of the whole graph on the stage's axes, or as much of it as the stage runs and reads; what
    else a plan says is taken from the first. Between stages of one plan, a tensor is sent as it was made, but summands
    are summed first; between others it travels as `cost.crossing` finds cheapest, and what must be redistributed for
    that on both sides is added. mesh: that of all stages, if not the plans' own; profiles: by the names of its devices,
    needed where the plans differ. Raises PlanError where a tensor cannot leave its stage.
    """
    own = [plans] * len(first_ranks) if isinstance(plans, Plan) else list(plans)
    what = _Cut(graph, [plan.stage for plan in own], members, first_ranks, mesh or own[0].mesh, profiles or {})
    reads = [_reads(what, index) for index in range(len(own))]
    handed = [_received(what, pairs, index) for index, pairs in enumerate(reads)]
    stages = tuple(_stage(what, reads, handed, index) for index in range(len(own)))
    plan = replace(own[0], mesh=what.mesh, stages=stages, schedule=schedule)
    return _without_unread(what, plan, reads)


def _without_unread(what: _Cut, plan: Plan, reads: Sequence[Mapping[Pair, None]]) -> Plan:
    """The plan, without redistributions that nobody reads: a tensor that leaves in several placements for stages of
    other axes may be taken for all of them in one."""
    kept = [{*reads[index], *leaving_values(what.graph, plan, index)} for index in range(len(plan.stages))]
    return replace(
        plan,
        stages=tuple(
            replace(stage, redistributes=tuple(r for r in stage.redistributes if (r.tensor, r.target) in pairs))
            for stage, pairs in zip(plan.stages, kept, strict=True)
        ),
    )


def _reads(what: _Cut, index: int) -> dict[Pair, None]:
    """Everything that the stage's nodes read, and what must leave the model from it."""
    graph, plan, members, count = what.graph, what.plans[index], what.members, len(what.plans)
    found: dict[Pair, None] = {}
    for node in what.nodes[index]:
        found |= dict.fromkeys(zip(node.operands, plan.nodes[node.name].operands, strict=True))
    for name in graph.outputs:
        if _is_made(graph, members, index, count, name):
            found[name, output_placement(graph, plan, name)] = None
    for stored in graph.stored:
        value = graph.mutations.get(stored.name)
        if value is not None and _is_made(graph, members, index, count, value):
            found[value, update_placement(graph, plan, stored.name)] = None
            found[stored.tensor, plan.storage[stored.tensor].placement] = None  # kept there, though it may not be read
    return found


def _is_made(graph: Graph, members: Members, index: int, count: int, name: str) -> bool:
    """Whether a stage makes what must be there at the end; the last has what no node makes."""
    maker = graph.producers.get(name)
    return index == count - 1 if maker is None else index in members[maker.name]


class _Handed(NamedTuple):
    """A tensor that a stage receives: from which one, in which placement it leaves and arrives."""

    maker: int
    leaving: Placement
    arriving: Placement


def _received(what: _Cut, reads: Mapping[Pair, None], index: int) -> dict[str, _Handed]:
    """What comes from earlier stages, as it goes and comes."""
    found: dict[str, _Handed] = {}
    for name in dict.fromkeys(name for name, _ in reads):
        maker = what.maker(index, name)
        if maker is None:
            continue
        made, plan = what.made(maker, name), what.plans[index]
        wanted = tuple(placement for read, placement in reads if read == name)
        if what.plans[maker] is plan:
            sent = wanted[0] if len(wanted) == 1 and _has_summands(made, plan) else made
            found[name] = _Handed(maker, sent, sent)
        else:
            found[name] = _handed_over(what, name, maker, index, wanted)
    return found


def _has_summands(placement: Placement, plan: Stage) -> bool:
    return any(t == P and axis.name != MICROBATCH for t, axis in zip(placement, plan.axes, strict=True))


def _handed_over(what: _Cut, name: str, maker: int, index: int, wanted: Sequence[Placement]) -> _Handed:
    """The cheapest way between stages that are planned apart."""
    tensor, made = what.graph.tensors[name], what.made(maker, name)
    found = cheapest_handover(
        what.shape(name), tensor.itemsize, tensor.differentiable, _on_ranks(made, what.plans[maker]),
        tuple(_on_ranks(p, what.plans[index]) for p in wanted), what.end(maker), what.end(index), what.mesh,
    )  # fmt: skip
    if found is None:
        raise PlanError(f"expected a way for {name} from stage {maker} to stage {index}, found none")
    over = _over_microbatches(made, what.plans[maker])
    return _Handed(maker, (*over, *found.leaving), (*over, *found.arriving))


def _on_ranks(placement: Placement, plan: Stage) -> Placement:
    return tuple(t for t, axis in zip(placement, plan.axes, strict=True) if axis.name != MICROBATCH)


def _over_microbatches(placement: Placement, plan: Stage) -> Placement:
    """The type on the axis of microbatches, which is the outermost, if there is one."""
    return tuple(t for t, axis in zip(placement, plan.axes, strict=True) if axis.name == MICROBATCH)


def _stage(
    what: _Cut, reads: Sequence[Mapping[Pair, None]], handed: Sequence[Mapping[str, _Handed]], index: int
) -> Stage:
    graph, plan = what.graph, what.plans[index]
    received = {name: item.arriving for name, item in handed[index].items()}
    nodes = {node.name: plan.nodes[node.name] for node in what.nodes[index]}
    have = dict(plan.inputs) | {name: kept.placement for name, kept in plan.storage.items()}
    have.update(received)
    for name, placed in nodes.items():
        have.update(zip(graph.node_by_name[name].results, placed.results, strict=True))
    sent = [
        (name, item.leaving) for later in handed[index + 1 :] for name, item in later.items() if item.maker == index
    ]
    wanted = dict.fromkeys([*reads[index], *sent])
    known = {(item.tensor, item.target): item for item in plan.redistributes}
    names = {name for name, _ in reads[index]}
    if index == 0:  # state dicts have what nobody reads, too
        names |= plan.storage.keys() - {name for stage in reads for name, _ in stage}
    return Stage(
        first_rank=what.first_ranks[index],
        axes=plan.axes,
        inputs={**{name: plan.inputs[name] for name in graph.inputs if name in names}, **received},
        storage={name: kept for name, kept in plan.storage.items() if name in names},
        nodes=nodes,
        redistributes=tuple(
            known[pair] if (pair in known and _is_planned(what, index, pair[0], have[pair[0]]))
            else _redistribute(what, index, pair[0], have[pair[0]], pair[1])
            for pair in wanted if have[pair[0]] != pair[1]
        ),
    )  # fmt: skip


def _is_planned(what: _Cut, index: int, name: str, have: Placement) -> bool:
    """Whether the stage's plan has the tensor in the placement in which the stage has it."""
    node = what.graph.producers.get(name)
    return node is None or (node.name in what.plans[index].nodes and what.made(index, name) == have)


def _redistribute(what: _Cut, index: int, name: str, have: Placement, target: Placement) -> Redistribute:
    """The cheapest way between placements that the stage's plan does not know it in: of what is handed over."""
    plan, tensor = what.plans[index], what.graph.tensors[name]
    if _over_microbatches(have, plan) != _over_microbatches(target, plan):  # cut for a microbatch where it is read
        steps = cheapest_path(have, target, lambda _, step: int(plan.axes[step.axis].name != MICROBATCH))
    else:
        source, to = _on_ranks(have, plan), _on_ranks(target, plan)
        route = way(what.shape(name), tensor.itemsize, tensor.differentiable, source, to, what.end(index), what.mesh)
        shift = len(plan.axes) - len(source)
        steps = None if route is None else tuple(step._replace(axis=step.axis + shift) for step in route.steps)
    assert steps is not None, f"{name} has a way from {have} to {target}, by which its handover was chosen"
    return Redistribute(name, target, steps)
