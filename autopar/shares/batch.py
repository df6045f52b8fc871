"""Plans for unequal devices that work on one batch together: placements for all of them, then shares by speed.

    placements on axes (data, model)    `planning.Place`, for as many of the slowest device; samples are cut over data
    rows of each kind of rank           `best_rows`: simulated step time, within each device's memory
    axes with shares                    `ir.shares`; simulated with all profiles (`simulate.together`)

Ranks of one kind get equally many rows of each microbatch. Some kind gets as many as an equal share, or more: so no
step is shorter than what the fastest kind takes to compute that much.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from autopar.cost import Profile
from autopar.errors import InfeasibleError, MeshError, PlacementError, PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.mesh import DeviceGroup, LogicalMesh, Mesh
from autopar.ir.plan import Plan
from autopar.ir.shares import alike_ranks, check_shares
from autopar.ir.structure import batch_inputs
from autopar.microbatch import batch_types
from autopar.planning import DividedGraph, Place, divided
from autopar.refusal import devices_hold_more
from autopar.request import Request
from autopar.simulate import Incremental, Timeline, predict
from autopar.simulate.timeline import Lane
from autopar.template import check_split
from autopar.tunables import LESS_HELD, MORE_BUSY

Rows = tuple[int, ...]
"""Of each kind of rank, in the order of the ranks: how many rows of a microbatch each rank gets."""

Cost = tuple[int, int]
"""Bytes beyond what devices can hold, over all kinds; nanoseconds."""


def near_rows(total: int, ranks: Sequence[int], weights: Sequence[float]) -> Rows | None:
    """Whole rows that add up, each kind's number of ranks considered, as near to the weights as can be.

    total: rows of all ranks. ranks: how many there are of each kind. weights: what a rank of each kind should get, in
    any unit. Each gets one at least. None where no whole numbers add up to the total.
    """
    unit = total / sum(count * weight for count, weight in zip(ranks, weights, strict=True))
    wanted = [weight * unit for weight in weights]
    reach = max(ranks)  # beyond that, numbers that add up come again
    spans = [range(max(1, round(w) - reach), round(w) + reach + 1) for w in wanted[:-1]]
    found: list[tuple[float, Rows]] = []
    for first in itertools.product(*spans):
        rest, odd = divmod(total - sum(c * r for c, r in zip(ranks, first, strict=False)), ranks[-1])
        if not odd and rest > 0:
            rows = (*first, rest)
            found.append((max(abs(r / w - 1) for r, w in zip(rows, wanted, strict=True)), rows))
    return min(found)[1] if found else None


def moves(rows: Rows, ranks: Sequence[int], step: int) -> Iterator[Rows]:
    """Rows that are `step` of the smallest possible exchanges of two kinds away."""
    for giver, taker in itertools.permutations(range(len(rows)), 2):
        both = math.lcm(ranks[giver], ranks[taker]) * step
        moved = list(rows)
        moved[giver] -= both // ranks[giver]
        moved[taker] += both // ranks[taker]
        if moved[giver] > 0:
            yield tuple(moved)


def best_rows(
    start: Rows, ranks: Sequence[int], cost: Callable[[Rows], Cost],
    may_help: Callable[[Rows, Rows], bool] = lambda best, rows: True,
) -> Rows:  # fmt: skip
    """Descends from a start by exchanges of rows between two kinds, in ever smaller steps, to where none helps.

    may_help: whether rows may cost less than the best so far; what surely does not is not looked at.
    """
    best, step = start, 1 << max(0, max(start).bit_length() - 3)
    while step:
        worth = (rows for rows in moves(best, ranks, step) if may_help(best, rows))
        found = min(worth, key=cost, default=best)
        if cost(found) < cost(best):
            best = found
        else:
            step //= 2
    return best


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """All devices as one stage on axes of which the first cuts samples; the others join devices of one kind.

    rules: what else is to hold, such as a template's constraints. Raises MeshError for axes that mix kinds otherwise.
    """

    part: DividedGraph
    axes: LogicalMesh
    request: Request
    profiles: Mapping[str, Profile]
    rules: Sequence[Constraint] = ()
    refusals: list[InfeasibleError] = field(default_factory=list)  # limits of memory that no draft fits in

    def __post_init__(self) -> None:
        sizes = " × ".join(str(axis.size) for axis in self.axes)
        if not self.axes or any(len(ranks) % self.inner for ranks in self.kinds):
            raise MeshError(
                f"expected axes of {self.mesh} of which all but the first join devices of one kind, found {sizes}; "
                "unequal devices need data parallelism or pipeline stages between them"
            )
        if len({profile.device_type for profile in self.profiles.values()}) > 1:
            raise MeshError(f"expected devices of one type to share a batch, found {self.mesh}; use pipeline stages")

    @property
    def mesh(self) -> Mesh:
        """All devices."""
        return self.request.mesh

    @property
    def inner(self) -> int:
        """How many ranks work on the same samples."""
        return math.prod(axis.size for axis in self.axes[1:])

    @cached_property
    def kinds(self) -> list[range]:
        """The ranks of each kind."""
        return alike_ranks(self.mesh, self.axes)

    @cached_property
    def counts(self) -> list[int]:
        """How many parts of the batch the ranks of each kind get."""
        return [len(ranks) // self.inner for ranks in self.kinds]

    @cached_property
    def limits(self) -> list[int]:
        """Bytes that a device of each kind may hold."""
        groups = map(self.mesh.group_of, self.kinds)
        return [
            self.request.memory_limit or self.profiles[group.profile].shared_by(group.devices_per_node).usable_bytes
            for group in groups
        ]

    @property
    def tightest(self) -> int:
        """The kind of the least memory."""
        return min(range(len(self.kinds)), key=lambda kind: self.limits[kind])

    @property
    def num_rows(self) -> int:
        """Of a microbatch."""
        graph = self.part.graph
        names = batch_inputs(graph)
        return graph.tensors[names[0]].shape[0] if names else 0

    def place(self, group: DeviceGroup, part: DividedGraph) -> Place:
        """The problem of as many devices of one kind as there are in all."""
        alike = len({other.devices_per_node for other in self.mesh.groups}) == 1
        nodes = self.mesh.nodes if alike else self.mesh.num_devices
        mesh = Mesh(group.profile, nodes, self.mesh.num_devices // nodes)
        request = replace(self.request, mesh=mesh, memory_limit=max(self.limits), constraints=self._constraints)
        return Place(part, self.axes, request, self.profiles[group.profile])

    @property
    def _constraints(self) -> tuple[Constraint, ...]:
        """The first axis cuts samples, and uses what is stored whole; how that is stored on it is open."""
        graph, blocks, axis = self.part.graph, self.part.blocks, self.axes[0].name
        inputs = batch_inputs(graph)
        made, batch = (name for node in graph.nodes for name in node.results), batch_types(graph)
        first = [name for name in made if blocks.representative_tensor(name) == name]
        return (
            *(Constraint(n, ("S(0)" if n in inputs else "R",), what="input", axis=axis) for n in graph.inputs),
            Constraint("*", ("R",), what="used", axis=axis, min_dims=2),
            Constraint("*", ("R", "P"), what="used", axis=axis),
            *(
                Constraint(n, (str(batch[n]),) if n in batch else ("R", "I", "P"), what="tensor", axis=axis, soft=True)
                for n in first
            ),
            *self.rules,
            *self.request.constraints,
        )

    def drafts(self) -> list[Plan]:
        """Plans of one microbatch in which every rank gets as much, as the devices with the least memory ask for.

        The first is for their equal part of the rows, a further one for half of that (or less, where both need more
        memory than there is): a draft is as good as the rows are near to those that it was made for.
        """
        least = self.tightest
        found: dict[int, Plan] = {}
        for fraction in (1, 2, 4, 8):
            if found and fraction > 2:
                break
            try:
                found[fraction] = self._draft(self.mesh.group_of(self.kinds[least]), self.limits[least], fraction)
            except InfeasibleError as error:
                self.refusals.append(error)
            except PlanError:  # so few rows are not possible
                break
        return list(found.values())

    def _draft(self, group: DeviceGroup, limit: int, fraction: int) -> Plan:
        """Placements for devices of one kind that get a fraction of the rows. Raises InfeasibleError."""
        part, count = self.part, self.part.microbatches
        small = part if fraction == 1 else divided(part.whole, part.blocks, count * fraction)
        place = self.place(group, small)
        found = place.fit(self.request.budget.seconds / 2, limit)
        inputs = found.microbatch_inputs if count > 1 else ()
        return self._of_mesh(replace(found, microbatches=count, microbatch_inputs=inputs))

    def _of_mesh(self, plan: Plan) -> Plan:
        """The plan for all devices as they are."""
        groups = {group.profile: group for group in self.mesh.groups}
        sources = {
            f"{name} {block}": source
            for name, group in groups.items()
            for block, source in self.place(group, self.part).draft().sources.items()
        }
        return replace(plan, mesh=self.mesh, sources=sources)

    def plan(self, split: str) -> Plan:
        """Rows in equal parts, or by speed within each device's memory.

        Raises PlanError for another word or a batch that cannot be shared out so, InfeasibleError when nothing fits.
        """
        check_split(split)
        drafts = self.drafts()
        if not drafts:
            raise self.refusals[0]
        best = min(drafts, key=self.cost) if split == "equal" else self._by_speed(drafts)
        timeline = self.timeline(best)
        if any(self.over(timeline)):
            raise self._does_not_fit(timeline)
        return self.part.with_traffic(replace(best, predicted=predict(timeline)))

    def _by_speed(self, drafts: Sequence[Plan]) -> Plan:
        """Of the drafts, that which is best with rows by the speed of computing, with the rows that are best for it."""
        equal = self.timeline(drafts[0])
        speeds = [1 / max(1, lane.breakdown.compute_ns) for lane in equal.lanes]
        start = near_rows(self.num_rows, self.counts, speeds)
        if start is None:
            raise PlanError(
                f"expected a microbatch whose rows can be shared out over {self.mesh}, equally among those of a kind, "
                f"found {self.num_rows} for {' + '.join(map(str, self.counts))} parts; take another batch size"
            )
        tried = min((_Descent(self, draft) for draft in drafts), key=lambda one: one.cost(start))
        if tried.draft is drafts[0]:
            tried.note(tuple(self.num_rows // sum(self.counts) for _ in self.counts), equal)
        rows = best_rows(start, self.counts, tried.cost, tried.may_help)
        if not self.are_even(tried.plan(rows)):
            rows = min(self._even_near(tried, rows), key=tried.cost, default=rows)
        return tried.plan(rows)

    def are_even(self, plan: Plan) -> bool:
        """Whether other axes cut each rank's rows evenly: otherwise most plans are refused, as no reshape keeps parts
        whole that are not equal."""
        try:
            check_shares(self.part.graph, plan.stage, evenly_inside=True)
        except PlacementError:
            return False
        return True

    def _even_near(self, tried: _Descent, rows: Rows) -> list[Rows]:
        """Rows that are cut evenly: those that were looked at, and those next to some others."""
        near = near_rows(self.num_rows // self.inner, self.counts, rows) if self.num_rows % self.inner == 0 else None
        every = [*tried.costs, *([tuple(self.inner * count for count in near)] if near is not None else [])]
        return [own for own in every if self.are_even(tried.plan(own))]

    def cost(self, plan: Plan) -> Cost:
        """What a plan of one microbatch is compared by; the largest where something is cut that cannot be."""
        try:
            check_shares(self.part.graph, plan.stage)
        except PlacementError:
            return sys.maxsize, sys.maxsize
        timeline = self.timeline(plan)
        return sum(self.over(timeline)), timeline.step_time_ns

    def step_time_ns(self, plan: Plan, until_ns: float = math.inf) -> int:
        """What a plan of one microbatch takes; more than anything where something is cut that cannot be."""
        return self.cost(plan)[1]

    def excess_bytes(self, plan: Plan, limit_bytes: int) -> int:
        """Bytes beyond what devices can hold: each has a limit of its own, whatever the plan's is."""
        return self.cost(plan)[0]

    @cached_property
    def least_step_ns(self) -> int:
        """What a step takes at least on these axes, however samples are shared out."""
        places = (self.place(group, self.part) for group in self.mesh.groups)
        return min(sum(place.work_ns(place.shared_profile).values()) for place in places)

    def shared(self, draft: Plan, rows: Rows) -> Plan:
        """The plan with so many rows for each rank of a kind."""
        unit = math.gcd(*rows)
        shares = [row // unit for row, count in zip(rows, self.counts, strict=True) for _ in range(count)]
        first = self.axes[0]._replace(shares=tuple(shares) if len(set(shares)) > 1 else ())
        return draft.placed(axes=(first, *self.axes[1:]))

    @cached_property
    def _simulator(self) -> Incremental:
        return Incremental(self.part.graph, self.profiles)

    def timeline(self, plan: Plan) -> Timeline:
        """A plan of one microbatch on all devices, simulated."""
        return self._simulator.timeline(plan)

    def over(self, timeline: Timeline) -> list[int]:
        """By kind, the bytes beyond what a device can hold."""
        held = [(lane.peak_bytes, self.limits[self._kind(lane.ranks.start)]) for lane in timeline.lanes]
        return [max(0, peak - limit) for peak, limit in held]

    def _kind(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.kinds) if rank in ranks)

    def _does_not_fit(self, timeline: Timeline) -> InfeasibleError:
        needs = [
            f"ranks {lane.ranks.start} to {lane.ranks.stop - 1} would hold {lane.peak_bytes:,} of {limit:,}"
            for lane in timeline.lanes
            if lane.peak_bytes > (limit := self.limits[self._kind(lane.ranks.start)])
        ]
        return devices_hold_more("shares of the batch", self.mesh, needs, "more microbatches, zero, recompute")


# Rows ----------------------------------------


class RowLoad(NamedTuple):
    """What a rank of a kind has to do: the time of its own work and of what it sends to others of its kind, and its
    peak."""

    busy_ns: float
    peak_bytes: float

    def between(self, other: RowLoad, share: float) -> RowLoad:
        """On the line through both: this one at 0, the other one at 1."""
        return RowLoad(*(one + share * (two - one) for one, two in zip(self, other, strict=True)))


def row_load(lane: Lane) -> RowLoad:
    """As a lane was simulated. The first axis joins all kinds: what is sent over it is not a kind's own."""
    own = lane.breakdown
    sent = sum(sent.duration_ns for (axis, _), sent in lane.along.items() if axis > 0)
    return RowLoad(own.compute_ns + own.recompute_ns + own.optimizer_ns + sent, lane.peak_bytes)


@dataclass(eq=False)
class _Descent:
    """A draft with its rows shared out so and so: what was simulated, and what that lets expect of the rest."""

    batch: SharedBatch
    draft: Plan

    def __post_init__(self) -> None:
        self._loads: list[dict[int, RowLoad]] = [{} for _ in self.batch.kinds]  # of each kind, by a rank's rows
        self.costs: dict[Rows, Cost] = {}
        self.plan: Callable[[Rows], Plan] = cache(lambda rows: self.batch.shared(self.draft, rows))

    def cost(self, rows: Rows) -> Cost:
        """What so many rows cost, simulated once."""
        if rows not in self.costs:
            self.costs[rows] = self.batch.cost(self.plan(rows))
            if self.costs[rows][1] < sys.maxsize:
                self.note(rows, self.batch.timeline(self.plan(rows)))
        return self.costs[rows]

    def note(self, rows: Rows, timeline: Timeline) -> None:
        """Takes what a rank of each kind does with so many rows."""
        for own, count, lane in zip(self._loads, rows, timeline.lanes, strict=True):
            own[count] = row_load(lane)

    def may_help(self, best: Rows, rows: Rows) -> bool:
        """Whether rows may cost less than the best so far, which was simulated.

        Where something is over its memory: whether less would be. Else whether all fits, and the kind that is busiest
        is less so: others wait for it wherever they meet.
        """
        if any(not own for own in self._loads):
            return True
        now, then = ([self._expected(*pair) for pair in enumerate(each)] for each in (best, rows))
        peaks = zip(then, self.batch.limits, strict=True)
        over = sum(max(0, LESS_HELD * load.peak_bytes - limit) for load, limit in peaks)
        if self.costs[best][0]:
            return over < self.costs[best][0]
        return not over and max(one.busy_ns for one in then) < MORE_BUSY * max(one.busy_ns for one in now)

    def _expected(self, kind: int, rows: int) -> RowLoad:
        """On the line through the two nearest numbers of rows that were simulated; of one alone, in proportion, and
        memory no less than that."""
        known = self._loads[kind]
        near = sorted(known, key=lambda count: abs(count - rows))[:2]
        first = known[near[0]]
        if len(near) > 1:
            return first.between(known[near[1]], (rows - near[0]) / (near[1] - near[0]))
        share = rows / near[0]
        return RowLoad(share * first.busy_ns, min(share, 1) * first.peak_bytes)
