"""Chooses branches: every region of the graph, on every axis, where the simulated step is shorter and memory fits.

    candidates   regions (`finding`) × axes; branches go to coordinates so that the longest sum of their times is least
    gate         operators' times as they are placed now + conversions at them  >  the longest coordinate's sum after;
                 what the branches send is left out, so that nothing that could win is thrown away
    order        greatest difference first; each candidate is simulated on top of those that were taken before
    equal blocks are changed together: the number of candidates follows the number of distinct blocks

Three forms of each are simulated: as it is, with the branches' parameters stored whole on the axis, and with the join
run on summands, where its operator can, so that one redistribution follows instead of one for each branch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.branches.finding import ForkRegion, find_regions
from autopar.branches.placing import Joins, put_in_branches
from autopar.branches.times import Times
from autopar.clock import Clock
from autopar.cost import Profile
from autopar.errors import AutoparError, PlacementError
from autopar.ir.branches import SUMMED, branch_rule, check_forks, check_inner_conversions, homes, refusal
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Alternative, Branch, Choice, Fork, NodePlan, Plan
from autopar.ir.structure import constant_tensors
from autopar.ops import admits
from autopar.tunables import LEAST_FORK_GAIN

Score = Callable[[Plan], Plan]
"""The plan with the simulator's prediction."""

_EXACT = 4096  # assignments that are all looked at; beyond, the longest branch goes to the least loaded coordinate


@dataclass(frozen=True)
class ForkCandidate:
    """Forks of equal regions on one axis; `gain_ns`: what they may spare at most, all together."""

    forks: tuple[Fork, ...]
    joins: tuple[str, ...]
    gain_ns: int


class Form(NamedTuple):
    """Whether parameters that branches alone read are stored whole on the axis, whether the join runs on summands."""

    keeps_whole: bool
    sums: bool


_FORMS = tuple(itertools.starmap(Form, itertools.product((False, True), repeat=2)))


class Taken(NamedTuple):
    """A candidate that made the step shorter, and the plan before it."""

    candidate: ForkCandidate
    before: Plan


def with_branches(
    graph: Graph, plan: Plan, profile: Profile, score: Score, representative: Callable[[str], str], seconds: float,
    pinned: Collection[str] = (), than_ns: float = math.inf,
) -> Plan:  # fmt: skip
    """The plan with all branches that make its simulated step strictly shorter within its memory limit; the plan itself
    where none does. The search stops after so many seconds at the latest.

    plan: of one stage, scored. representative: the node in its place in the first equal block. pinned: nodes that stay
    as they are placed. than_ns: a step that is known; what cannot be faster is not looked at further.
    """
    if not _may_branch(plan):
        return plan
    clock = Clock.of(seconds)
    times = Times(graph, plan, profile)
    taken: list[Taken] = []
    best, form = plan, None
    every = candidates(graph, plan, times, representative, pinned)
    for number, candidate in enumerate(every):
        left_ns = sum(one.gain_ns for one in every[number:])
        if clock.is_over or best.predicted.step_time_ns - left_ns >= than_ns:
            break
        if _overlaps(best, candidate):
            continue
        found = _best_form(graph, best, candidate, times, score, form)
        if found is not None:
            taken.append(Taken(candidate, best))
            form, best = found
    return replace(best, choices=(*best.choices, *_choices(taken, best))) if taken else plan


def most_spared_ns(
    graph: Graph, plan: Plan, profile: Profile, representative: Callable[[str], str], pinned: Collection[str] = ()
) -> int:  # fmt: skip
    """What branches may spare of a plan's step at most, in ns: all that `with_branches` would look at together."""
    if not _may_branch(plan):
        return 0
    every = candidates(graph, plan, Times(graph, plan, profile), representative, pinned)
    return sum(candidate.gain_ns for candidate in every)


def _may_branch(plan: Plan) -> bool:
    """Whether a plan has an axis for branches, and gathers no parameter anew in each of them."""
    regathers = any(storage.regather for storage in plan.stage.storage.values())
    return not regathers and any(axis.size > 1 for axis in plan.stage.axes)


def _overlaps(plan: Plan, candidate: ForkCandidate) -> bool:
    known = homes(plan.stage)
    names = {name for fork in candidate.forks for branch in fork.branches for name in branch.nodes}
    return not names.isdisjoint(known)


def _best_form(
    graph: Graph, plan: Plan, candidate: ForkCandidate, times: Times, score: Score, before: Form | None
) -> tuple[Form, Plan] | None:  # fmt: skip
    """The fastest form that fits and is faster than the plan; once others were taken in some form (`before`), the first
    that is, beginning with that one: what is best for one region mostly is for others."""
    best: tuple[Form, Plan] | None = None
    for form, placed in _forms(graph, plan, candidate, times, before):
        found = score(placed)
        limit = best[1] if best is not None else plan
        faster = found.predicted.step_time_ns < limit.predicted.step_time_ns
        if faster and found.predicted.peak_bytes <= plan.memory_limit:
            best = form, found
            if before is not None:
                break
    return best


def _forms(
    graph: Graph, plan: Plan, candidate: ForkCandidate, times: Times, before: Form | None
) -> Iterator[tuple[Form, Plan]]:
    """The plan with the candidate, in each form that there is and that differs."""
    seen = []
    for form in sorted(_FORMS, key=lambda form: form != before):
        joins: Joins = dict.fromkeys(candidate.joins, candidate.forks[0].axis) if form.sums else {}
        try:
            placed = put_in_branches(graph, plan, candidate.forks, times.steps, form.keeps_whole, joins)
        except PlacementError:
            continue
        if (form.sums, placed.stage.storage) not in seen and _is_well_typed(graph, placed, joins):
            seen.append((form.sums, placed.stage.storage))
            yield form, placed


def _is_well_typed(graph: Graph, plan: Plan, joins: Joins) -> bool:
    """Whether the joins' operators run on summands, and the branches' as they are placed there."""
    try:
        check_forks(graph, plan.parts[0])
        check_inner_conversions(graph, plan.stage)
    except AutoparError:
        return False
    known = homes(plan.stage)
    rows: list[tuple[Node, NodePlan, LogicalMesh, str | None]]
    rows = [(graph.node_by_name[name], plan.stage.nodes[name], plan.stage.axes, None) for name in joins]
    rows += [
        (graph.node_by_name[name], *branch_rule(graph, plan.stage, graph.node_by_name[name], known)) for name in known
    ]
    return all(
        objection is None and admits(graph, node, own.operands, own.results, axes) is None
        for node, own, axes, objection in rows
    )


# Candidates ----------------------------------------


def candidates(
    graph: Graph, plan: Plan, times: Times, representative: Callable[[str], str], pinned: Collection[str] = ()
) -> list[ForkCandidate]:  # fmt: skip
    """What may be worth a simulation, the most promising first: what spares so little at most that it could not be told
    is not. pinned: nodes that stay as they are placed."""
    constant = constant_tensors(graph)

    def stays(node: Node) -> bool:
        return node.name in pinned or refusal(graph, node, constant, plan.recompute) is not None

    regions = [region for region in find_regions(graph, stays) if region.join not in pinned]
    groups: dict[object, list[ForkRegion]] = {}
    for region in regions:
        groups.setdefault((*(tuple(map(representative, branch)) for branch in region.branches),), []).append(region)
    found, least_ns = list[ForkCandidate](), LEAST_FORK_GAIN * plan.predicted.step_time_ns
    for axis in plan.stage.axes:
        for equal in groups.values() if axis.size > 1 else ():
            candidate = _candidate(graph, times, equal, axis.name, axis.size)
            found += [candidate] if candidate is not None and candidate.gain_ns > least_ns else []
    return sorted(found, key=lambda candidate: -candidate.gain_ns)


def _candidate(graph: Graph, times: Times, equal: Sequence[ForkRegion], axis: str, size: int) -> ForkCandidate | None:
    alone = [times.alone_ns(branch, axis) for branch in equal[0].branches]
    coordinates = assign(alone, size)
    forks, now = [], 0
    for region in equal:
        members: dict[int, list[str]] = {}
        for branch, coordinate in zip(region.branches, coordinates, strict=True):
            members.setdefault(coordinate, []).extend(branch)
        if not _may_leave(graph, region):
            return None
        forks.append(Fork(axis, tuple(Branch(c, tuple(names)) for c, names in sorted(members.items()))))
        now += times.now_ns([name for branch in region.branches for name in branch])
    loads = [sum(t for t, c in zip(alone, coordinates, strict=True) if c == k) for k in set(coordinates)]
    return ForkCandidate(tuple(forks), tuple(region.join for region in equal), now - len(equal) * max(loads))


def _may_leave(graph: Graph, region: ForkRegion) -> bool:
    """Whether everything that leaves the branches is of numbers that ranks can sum."""
    inside = {name for branch in region.branches for name in branch}
    last = {*graph.outputs, *graph.mutations.values()}
    for name in inside:
        for tensor in graph.node_by_name[name].results:
            leaves = tensor in last or any(reader.name not in inside for reader, _ in graph.consumers[tensor])
            if leaves and graph.tensors[tensor].dtype not in SUMMED:
                return False
            if not graph.parameter_by_name.keys().isdisjoint(graph.updates.get(tensor, ())):
                return False  # all ranks that store a part of the parameter make it
    return True


def assign(times_ns: Sequence[int], size: int) -> list[int]:
    """A coordinate for each branch so that the longest sum is least: exact for few, else longest first.

    Graham (1969): the longest-first rule is within 4/3 of the least.
    """
    count = min(size, len(times_ns))
    order = sorted(range(len(times_ns)), key=lambda n: -times_ns[n])
    if count ** len(times_ns) <= _EXACT:
        found = min(_assignments(len(times_ns), count), key=lambda placed: _longest(times_ns, order, placed, count))
    else:
        found, loads = [], [0] * count
        for number in order:
            found.append(loads.index(min(loads)))
            loads[found[-1]] += times_ns[number]
    return [found[order.index(number)] for number in range(len(times_ns))]


def _assignments(length: int, count: int) -> Iterator[list[int]]:
    """All of them up to the names of coordinates: each new one is the next number."""

    def further(placed: list[int], used: int) -> Iterator[list[int]]:
        if len(placed) == length:
            yield placed
            return
        for coordinate in range(min(used + 1, count)):
            yield from further([*placed, coordinate], max(used, coordinate + 1))

    return further([], 0)


def _longest(times_ns: Sequence[int], order: Sequence[int], placed: Sequence[int], count: int) -> int:
    loads = [0] * count
    for number, coordinate in zip(order, placed, strict=True):
        loads[coordinate] += times_ns[number]
    return max(loads)


# Report ----------------------------------------


def _choices(taken: Sequence[Taken], plan: Plan) -> Iterator[Choice]:
    """What was taken, against running every operator of it on all ranks as the plan did before."""
    for number, (candidate, before) in enumerate(taken):
        after = taken[number + 1].before if number + 1 < len(taken) else plan
        fork = candidate.forks[0]
        yield Choice(
            name=fork.branches[0].nodes[0],
            kind="fork",
            count=len(candidate.forks),
            chosen=f"{len(fork.branches)} branches on {fork.axis}",
            cost_ns=after.predicted.step_time_ns,
            num_options=2,
            alternatives=(
                Alternative(
                    "all ranks run all of them",
                    before.predicted.step_time_ns - after.predicted.step_time_ns,
                    before.predicted.peak_bytes - after.predicted.peak_bytes,
                ),
            ),
        )
