"""Cuts a model into stages of numbers of repeated blocks, and a plan of its whole into one of given stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from autopar.cost import Profile
from autopar.cost.compute import node_time_ns
from autopar.cost.crossing import End, cheapest_handover, way
from autopar.errors import PlanError
from autopar.interop import Layers, Members, block_layers, chunk_sizes
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.placement import P, Placement
from autopar.ir.plan import Plan, Redistribute, Stage
from autopar.ir.schedule import PLAIN, SCHEDULES
from autopar.ir.stages import leaving_values
from autopar.ir.verifier import output_placement, update_placement


def even_sizes(
    graph: Graph, block_paths: Sequence[str], submeshes: int, chunks: int, profile: Profile, schedule: str = PLAIN
) -> tuple[int, ...]:  # fmt: skip
    """How many of the repeated blocks each stage has: as many as the others, or else so that the busiest submesh is as
    little busy as can be, what runs before and after the blocks counted.

    block_paths: module paths of the blocks. The chunks of a submesh are stages in turn. An end of the model may be a
    stage by itself where there are more stages than blocks. profile: of the devices, by which blocks and ends are told
    apart. Raises PlanError where there are more stages yet.
    """
    layers, stages = block_layers(graph, block_paths), submeshes * chunks
    if layers.count and layers.count % stages == 0:
        return (layers.count // stages,) * stages
    before, times, after = _block_times_ns(graph, layers, profile) if layers.count else (0, [], 0)
    if not layers.count or stages > layers.count + (before > 0) + (after > 0):
        raise PlanError(
            f"expected at least {stages} repeated blocks (numbered modules that run something) for {stages} stages, or "
            f"one less for each end of the model that runs something, found {layers.count}; choose fewer stages"
        )
    return chunk_sizes(times, (before, after), submeshes, chunks, SCHEDULES[schedule].turns_back)


def _block_times_ns(graph: Graph, layers: Layers, profile: Profile) -> tuple[int, list[int], int]:
    """What runs before the blocks, each block, and what runs after them, on one device."""
    node_ns, found = node_times_ns(graph, profile), [0] * (layers.count + 2)
    for name, number in layers.with_ends(graph).fixed.items():
        found[number] += node_ns[name]
    return found[0], found[1:-1], found[-1]


def node_times_ns(graph: Graph, profile: Profile) -> dict[str, int]:
    """Of each operator on one device, both ways."""
    tensors, found = graph.tensors, {}
    for node in graph.nodes:
        operands, results = (tuple(tensors[n].shape for n in names) for names in (node.operands, node.results))
        found[node.name] = sum(node_time_ns(node, operands, results, tensors, profile))
    return found


def checked_sizes(graph: Graph, block_paths: Sequence[str], sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Numbers of blocks that a user gives each stage. Raises PlanError where they are not those of the model."""
    layers = block_layers(graph, block_paths)
    if len(sizes) != stages or sum(sizes) != layers.count or min(sizes) < 0:
        raise PlanError(
            f"expected layers as {stages} numbers of repeated blocks, one for each stage in the order in which they "
            f"run, that add up to the model's {layers.count}, found {len(sizes)} that add up to {sum(sizes)}"
            + (f", {min(sizes)} among them" if min(sizes) < 0 else "")
        )
    ends = {*layers.with_ends(graph).fixed.values()}
    empty = [number for number, size in enumerate(sizes) if not size]
    alone = {0: 0, stages - 1: layers.count + 1}
    for number in empty:
        if alone.get(number) not in ends:
            raise PlanError(
                f"expected a block at least in stage {number}, found layers={tuple(sizes)}: only the first and the "
                "last stage run something else, where the model has something before its blocks and after them"
            )
    return tuple(sizes)


def stages_of_sizes(graph: Graph, block_paths: Sequence[str], sizes: Sequence[int]) -> Members:
    """The stages of each node when each stage has so many of the blocks, in the order in which they run."""
    layers = block_layers(graph, block_paths)
    assert layers.count == sum(sizes), "each block is in a stage"
    ends = list(accumulate(sizes))
    of_block = [bisect_right(ends, number) for number in range(layers.count)]
    if all(sizes):
        return layers.members(graph, of_block)
    return layers.with_ends(graph).members(graph, [0, *of_block, len(sizes) - 1])


# The plan ----------------------------------------

Pair = tuple[str, Placement]
"""A tensor, and a placement that it is needed in."""


@dataclass(frozen=True, eq=False)
class _Cut:
    """What is cut: placements by stage, each for what its stage reads at least, and where the stages are."""

    graph: Graph
    placed: Sequence[Stage]
    members: Members
    first_ranks: Sequence[int]
    mesh: Mesh
    profiles: Mapping[str, Profile]

    @cached_property
    def nodes(self) -> list[list[Node]]:
        """What runs in each stage."""
        found: list[list[Node]] = [[] for _ in self.placed]
        for node in self.graph.nodes:
            for index in self.members[node.name]:
                found[index].append(node)
        return found

    def end(self, index: int) -> End:
        """The ranks and axes of a stage."""
        placed, first = self.placed[index], self.first_ranks[index]
        ranks = range(first, first + placed.num_ranks)
        group = self.mesh.group_of(ranks)
        return End(ranks, placed.axes, self.profiles[group.profile].shared_by(group.devices_per_node))

    def maker(self, index: int, name: str) -> int | None:
        """The stage that a stage receives the tensor from; None where it does not receive it."""
        node = self.graph.producers.get(name)
        return None if node is None or index in self.members[node.name] else self.members[node.name][0]

    def made(self, index: int, name: str) -> Placement:
        """The placement that a tensor is made in by a stage."""
        node = self.graph.producers[name]
        return self.placed[index].nodes[node.name].results[node.results.index(name)]


def cut(
    graph: Graph, plans: Plan | Sequence[Plan], members: Members, first_ranks: Sequence[int], schedule: str,
    mesh: Mesh | None = None, profiles: Mapping[str, Profile] | None = None,
) -> Plan:  # fmt: skip
    """One plan of several stages, from the given ranks on, out of a plan for each (or one for all of them).

    graph: of one microbatch. A stage's plan is one of the whole graph on the stage's axes, or as much of it as the
    stage runs and reads; what else a plan says is taken from the first. Between stages of one plan, a tensor is sent as
    it was made, but summands are summed first; between others it travels as `cost.crossing` finds cheapest, and what
    must be redistributed for that on both sides is added. mesh: that of all stages, if not the plans' own; profiles: by
    the names of its devices, needed where the plans differ. Raises PlanError where a tensor cannot leave its stage.
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
    graph, placed, members, count = what.graph, what.placed[index], what.members, len(what.placed)
    found: dict[Pair, None] = {}
    for node in what.nodes[index]:
        found |= dict.fromkeys(zip(node.operands, placed.nodes[node.name].operands, strict=True))
    for name in graph.outputs:
        if _is_made(graph, members, index, count, name):
            found[name, output_placement(graph, placed, name)] = None
    for stored in graph.stored:
        value = graph.mutations.get(stored.name)
        if value is not None and _is_made(graph, members, index, count, value):
            found[value, update_placement(graph, placed, stored.name)] = None
            kept = placed.storage[stored.tensor].placement
            found[stored.tensor, kept] = None  # it is kept there, though it may not be read
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
        made = what.made(maker, name)
        wanted = tuple(placement for read, placement in reads if read == name)
        if what.placed[maker] is what.placed[index]:
            sent = wanted[0] if len(wanted) == 1 and P in made else made
            found[name] = _Handed(maker, sent, sent)
        else:
            found[name] = _handed_over(what, name, maker, index, wanted)
    return found


def _handed_over(what: _Cut, name: str, maker: int, index: int, wanted: Sequence[Placement]) -> _Handed:
    """The cheapest way between stages that are planned apart."""
    tensor, made = what.graph.tensors[name], what.made(maker, name)
    found = cheapest_handover(
        tensor.shape, tensor.itemsize, tensor.differentiable, made, tuple(wanted), what.end(maker), what.end(index),
        what.mesh,
    )  # fmt: skip
    if found is None:
        raise PlanError(f"expected a way for {name} from stage {maker} to stage {index}, found none")
    return _Handed(maker, found.leaving, found.arriving)


def _stage(
    what: _Cut, reads: Sequence[Mapping[Pair, None]], handed: Sequence[Mapping[str, _Handed]], index: int
) -> Stage:
    graph, placed = what.graph, what.placed[index]
    received = {name: item.arriving for name, item in handed[index].items()}
    nodes = {node.name: placed.nodes[node.name] for node in what.nodes[index]}
    have = dict(placed.inputs) | {name: kept.placement for name, kept in placed.storage.items()}
    have.update(received)
    for name, node in nodes.items():
        have.update(zip(graph.node_by_name[name].results, node.results, strict=True))
    sent = [
        (name, item.leaving) for later in handed[index + 1 :] for name, item in later.items() if item.maker == index
    ]
    wanted = dict.fromkeys([*reads[index], *sent])
    known = {(item.tensor, item.target): item for item in placed.redistributes}
    names = {name for name, _ in reads[index]}
    if index == 0:  # state dicts have what nobody reads, too
        names |= placed.storage.keys() - {name for stage in reads for name, _ in stage}
    return Stage(
        first_rank=what.first_ranks[index],
        axes=placed.axes,
        inputs={**{name: placed.inputs[name] for name in graph.inputs if name in names}, **received},
        storage={name: kept for name, kept in placed.storage.items() if name in names},
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
    return node is None or (node.name in what.placed[index].nodes and what.made(index, name) == have)


def _redistribute(what: _Cut, index: int, name: str, have: Placement, target: Placement) -> Redistribute:
    """The cheapest way between placements that the stage's plan does not know it in: of what is handed over."""
    tensor = what.graph.tensors[name]
    route = way(tensor.shape, tensor.itemsize, tensor.differentiable, have, target, what.end(index), what.mesh)
    assert route is not None, f"{name} has a way from {have} to {target}, by which its handover was chosen"
    return Redistribute(name, target, route.steps)
