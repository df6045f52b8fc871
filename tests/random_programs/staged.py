"""Random plans of several stages: any cut of the program, each stage with any plan on a submesh of any size.

A stage is a whole plan of the program on the stage's axes, of which it runs its nodes; stages that share one are
planned together, as stages of equal submeshes mostly are. What is handed over goes in the cheapest placements, or any.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar import staging
from autopar.cost.crossing import way
from autopar.errors import PlacementError, PlanError
from autopar.interop import Members
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import I, Placement, R, S, Type
from autopar.ir.plan import Plan
from autopar.ir.schedule import PLAIN, SCHEDULES, Schedule
from autopar.ir.structure import is_random
from autopar.microbatch import check_plan, divisible
from autopar.planning import divided
from autopar.profiler import profiles_of
from autopar.trace import find_blocks
from tests.random_programs.plans import Choices, draft_plan, random_again, random_choices

#: axes of a submesh
SHAPES = ((), (), (2,), (2,), (3,), (2, 2), (4,))
MAX_RANKS = 8
_TRIES = 4


@dataclass(frozen=True)
class StagedChoices:
    """All that a plan of several stages is free to choose.

    stages: what each is planned by; stages of the same choices (one object) are planned together. members: the stages
    of each node. handovers: the seed of the placements that tensors cross in; None: the cheapest.
    """

    stages: tuple[Choices, ...]
    members: Members
    first_ranks: tuple[int, ...]
    schedule: str
    recompute: tuple[str, ...] = ()
    handovers: int | None = None

    @property
    def microbatches(self) -> int:
        return self.stages[0].microbatches

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The axes of each stage."""
        return tuple(choices.sizes for choices in self.stages)


def random_staged_plan(graph: Graph, rng: random.Random, mode: str = "train") -> StagedChoices | None:
    """Choices whose plan verifies, or fails in another way than by being refused; None where none was found, as for
    programs that draw random numbers: stages draw at the same time, and not what one device draws."""
    if any(is_random(node) for node in graph.nodes):
        return None
    for _ in range(_TRIES):
        choices = random_staged_choices(graph, rng, mode)
        try:
            make_staged_plan(graph, choices, mode)
        except (PlanError, PlacementError):
            continue
        except Exception:
            pass  # the same again when the case is judged
        return choices
    return None


# The choices ----------------------------------------


def random_staged_choices(graph: Graph, rng: random.Random, mode: str = "train") -> StagedChoices:
    """Submeshes, a cut of the program, a plan for each stage, a schedule and what is computed again."""
    shapes = _random_shapes(rng)
    schedule = rng.choice([*SCHEDULES, PLAIN])
    row = SCHEDULES[schedule]
    microbatches = _random_count(graph, rng, mode)
    chunks = (row.num_chunks or rng.choice([1, 2, 2, 3])) if row.has_chunks else 1
    shapes = shapes[: max(2, 6 // chunks)]
    fewest = row.fewest(len(shapes))
    enough = [count for count in (4, 6) if count >= fewest and divisible(graph, count)]
    if microbatches < fewest and enough:
        microbatches = rng.choice(enough)
    firsts = [sum(math.prod(shape) for shape in shapes[:place]) for place in range(len(shapes))]
    if rng.random() < 0.2:  # the first stage on the last ranks
        firsts = [_num_ranks(shapes) - first - math.prod(shape) for first, shape in zip(firsts, shapes, strict=True)]
    members = random_members(graph, len(shapes) * chunks, rng)
    again = () if row.splits_backward or rng.random() < 0.6 else random_again(graph, rng)
    return StagedChoices(
        _random_parts(graph, shapes, row, chunks, rng, mode, microbatches), members,
        tuple(row.in_turn(firsts, chunks)), schedule, again,
        rng.randrange(1 << 30) if rng.random() < 0.6 else None,
    )  # fmt: skip


def _num_ranks(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _random_shapes(rng: random.Random) -> list[tuple[int, ...]]:
    """The axes of 2 to 4 submeshes, equal ones half of the time."""
    while True:
        count = rng.choice([2, 2, 2, 3, 3, 4])
        shapes = [rng.choice(SHAPES)] * count if rng.random() < 0.4 else [rng.choice(SHAPES) for _ in range(count)]
        if _num_ranks(shapes) <= MAX_RANKS:
            return shapes


def _random_count(graph: Graph, rng: random.Random, mode: str) -> int:
    """Of microbatches."""
    if mode != "train":
        return 1
    able = [count for count in (2, 3, 4, 6) if divisible(graph, count)]
    return rng.choice([1, *able, *able])


def _random_parts(
    graph: Graph,
    shapes: Sequence[tuple[int, ...]],
    row: Schedule,
    chunks: int,
    rng: random.Random,
    mode: str,
    microbatches: int,
) -> tuple[Choices, ...]:
    """Of each stage; stages of one submesh, and often equal ones too, are planned together."""
    together = rng.random() < 0.6
    known: dict[Any, Choices] = {}
    found = []
    for place, shape in enumerate(shapes):
        key = shape if together else place
        if key not in known:
            known[key] = random_choices(graph, shape, rng, mode, microbatches)
        found.append(known[key])
    return tuple(row.in_turn(found, chunks))


def random_members(graph: Graph, count: int, rng: random.Random) -> dict[str, tuple[int, ...]]:
    """The stages of each node: about as they come, some later than they might; the last one makes the loss.

    Nodes that several stages have what it takes for may run in several of them.
    """
    order = [node.name for node in graph.nodes]
    cuts = sorted(rng.sample(range(1, max(len(order), count)), count - 1))
    late, twice = rng.choice([0.0, 0.1, 0.3]), rng.choice([0.0, 0.0, 0.15])
    changed = set(graph.mutations.values())
    members: dict[str, tuple[int, ...]] = {}
    for position, node in enumerate(graph.nodes):
        made_in = [members[graph.producers[name].name] for name in node.operands if name in graph.producers]
        least = max([0, *(stages[0] for stages in made_in)])
        stage = max(least, sum(position >= cut for cut in cuts))
        if rng.random() < late:
            stage = rng.randint(stage, count - 1)
        if graph.loss in node.results:
            stage = count - 1
        members[node.name] = (stage,)
        single = not changed.isdisjoint(node.results) or graph.loss in node.results
        if rng.random() < twice and stage < count - 1 and not single:
            members[node.name] = (stage, rng.randint(stage + 1, count - 1))
    return members


# The plan ----------------------------------------


def make_staged_plan(graph: Graph, choices: StagedChoices, mode: str = "train") -> Plan:
    """The plan of the choices. Raises what the verifier raises, or where a tensor has no way between stages."""
    part = divided(graph, find_blocks(graph), choices.microbatches)
    known: dict[int, Plan] = {}
    for one in choices.stages:
        if id(one) not in known:
            known[id(one)] = draft_plan(part, one, mode)
    plans = [known[id(one)] for one in choices.stages]
    sizes = {first: math.prod(one.sizes) for first, one in zip(choices.first_ranks, choices.stages, strict=True)}
    mesh = Mesh("cpu", devices_per_node=sum(sizes.values()))
    plan = _cut(part.graph, plans, choices, mesh)
    plan = replace(plan, recompute=choices.recompute)
    check_plan(graph, plan)
    return plan


def _cut(graph: Graph, plans: Sequence[Plan], choices: StagedChoices, mesh: Mesh) -> Plan:
    """As `staging.cut`, where the placements of what is handed over are random if they are to be."""
    if choices.handovers is None:
        return staging.cut(
            graph, plans, choices.members, choices.first_ranks, choices.schedule, mesh, profiles_of(mesh)
        )
    what = staging._Cut(
        graph, [plan.stage for plan in plans], choices.members, choices.first_ranks, mesh, profiles_of(mesh)
    )
    reads = [staging._reads(what, index) for index in range(len(plans))]
    rng = random.Random(choices.handovers)
    handed = [
        {name: _other_handover(what, index, name, item, reads[index], rng) for name, item in found.items()}
        for index, found in enumerate(staging._received(what, pairs, index) for index, pairs in enumerate(reads))
    ]
    stages = tuple(staging._stage(what, reads, handed, index) for index in range(len(plans)))
    plan = replace(plans[0], mesh=mesh, stages=stages, schedule=choices.schedule)
    return staging._without_unread(what, plan, reads)


def _other_handover(
    what: staging._Cut, index: int, name: str, item: staging._Handed, reads: Mapping[Any, None], rng: random.Random
) -> staging._Handed:
    """Other placements that a tensor may leave and arrive in, where some that are drawn will do."""
    maker, made = item.maker, what.made(item.maker, name)
    wanted = [placement for read, placement in reads if read == name]
    there, here = what.end(maker), what.end(index)
    is_equal = [axis.size for axis in there.axes] == [axis.size for axis in here.axes]
    for _ in range(6):
        leaving = _random_placement(what.graph, name, len(there.axes), rng, is_equal)
        arriving = leaving if is_equal else _random_placement(what.graph, name, len(here.axes), rng, False)
        found = staging._Handed(maker, leaving, arriving)
        if _goes(what, maker, name, made, found.leaving) and all(
            _goes(what, index, name, found.arriving, placement) for placement in wanted
        ):
            return found
    return item


def _random_placement(graph: Graph, name: str, count: int, rng: random.Random, is_equal: bool) -> Placement:
    tensor = graph.tensors[name]
    whole = I if tensor.differentiable else R
    types: list[Type] = [whole, *(S(dim) for dim in range(len(tensor.shape)))] + ([R] if is_equal else [])
    return tuple(rng.choice(types) for _ in range(count))


def _goes(what: staging._Cut, index: int, name: str, have: Placement, target: Placement) -> bool:
    """Whether a stage can redistribute a tensor so, of one microbatch."""
    tensor = what.graph.tensors[name]
    if have == target:
        return True
    route = way(tensor.shape, tensor.itemsize, tensor.differentiable, have, target, what.end(index), what.mesh)
    return route is not None
