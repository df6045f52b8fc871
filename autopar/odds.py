"""How sure a prediction is: a 90% interval of the step time, what a device holds in all, how likely that fits.

step    log(measured / predicted) = Σ shareₖ · eₖ + e
        eₖ   error of operator k, which takes shareₖ of the step: of the spread that the profile's residuals have for
             its family, dtype and time. Calls of one shape are one operator, since they err alike however often they
             run; operators of other shapes in a family err alike in part (ALIKE), and families know nothing of each
             other.
        e    what whole steps differ by beside their operators (`WholeSteps.spread`)
memory  log(measured / predicted) of what is taken has `DeviceMemory.spread`; a plan fits where no more is taken than
        the device has without the margin in which its allocator gives back and asks again.

A profile without a block `steps` says nothing of the one, one without `memory` nothing of the other.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from autopar.cost import Profile, node_time_ns
from autopar.cost.device import MOST_COMMUNICATORS
from autopar.cost.profile import INSIDE
from autopar.cost.residuals import Residual
from autopar.ir.graph import Graph
from autopar.ir.placement import local_shape
from autopar.ir.plan import Plan, Prediction, Stage
from autopar.microbatch import divided_graph
from autopar.ops.table import operator
from autopar.profiler import profiles_of
from autopar.quantiles import with_p99
from autopar.simulate import simulate

ALIKE = 0.5  # correlation of the errors of a family's operators of different shapes
NINE_IN_TEN = 1.6449  # standard deviations to either side that hold 90% of a normal distribution


class Calls(NamedTuple):
    """An operator of one shape, or collectives: family, kind, nanoseconds of one call, and of all calls together."""

    family: str
    kind: str
    call_ns: float
    sum_ns: float


def with_odds(plan: Plan, graph: Graph) -> Plan:
    """The plan whose prediction says how sure it is, as far as the profiles of its devices do, with its step at the
    99th percentile of routings. graph: the plan's, of the whole batch."""
    plan = with_p99(plan, graph)
    profiles = profiles_of(plan.mesh)
    if not any(profile.memory or profile.steps for profile in profiles.values()):
        return plan
    part = divided_graph(graph, plan.microbatches)
    peaks = _peaks(plan, part, profiles)
    found = [told(plan, peak, profiles[kind]) for kind, peak in sorted(peaks.items())]
    spreads = [step_spread(plan, part, profile) for profile in profiles.values()]
    spread = None if None in spreads else max(filter(None, spreads))
    return replace(plan, predicted=with_interval(min(found, key=_odds), spread))


# Time ----------------------------------------


def with_interval(predicted: Prediction, spread: float | None) -> Prediction:
    """The prediction with the interval that nine in ten steps are in, up to where refilling a full device takes it.
    spread: standard deviation of the logarithm; None where it is not known."""
    if spread is None:
        return predicted
    low, high = (round(predicted.step_time_ns * math.exp(sign * NINE_IN_TEN * spread)) for sign in (-1, 1))
    return replace(predicted, step_time_interval_ns=(low, high + (predicted.refilling_ns or 0)))


def step_spread(plan: Plan, part: Graph, profile: Profile) -> float | None:
    """Standard deviation of log(measured / predicted) of a step; None where the profile does not say. part: the graph
    of one microbatch."""
    if profile.steps is None:
        return None
    return math.sqrt(profile.steps.spread**2 + operators_variance(plan, part, profile))


def operators_variance(plan: Plan, part: Graph, profile: Profile) -> float:
    """What the errors of operators and collectives add to the variance of the logarithm of the step time."""
    spreads: dict[str, list[float]] = defaultdict(list)
    for one, share in shares_of_step(plan, part, profile) if profile.residuals else ():
        residual = profile.residual(one.family, one.kind, one.call_ns)
        if residual is not None:
            spreads[one.family].append(share * spread_of(residual))
    return sum(
        ALIKE * sum(own) ** 2 + (1 - ALIKE) * sum(one**2 for one in own) for own in spreads.values()
    )  # fmt: skip


def spread_of(residual: Residual) -> float:
    """Standard deviation about a prediction that is not corrected by the residual's median."""
    low, median, high = residual.quantiles
    return math.hypot(median, (high - low) / (2 * NINE_IN_TEN))


def shares_of_step(plan: Plan, part: Graph, profile: Profile) -> Iterator[tuple[Calls, float]]:
    """What takes which share of the step: operators of the busiest stage, for which others wait, the optimizer, and
    collectives that nothing hides, taken for those that send most."""
    spent, step_ns, sent = plan.predicted.breakdown, max(1, plan.predicted.step_time_ns), plan.predicted.comm_bytes
    parts = max((operators_of(stage, part, profile) for stage in plan.stages), key=_sum_ns)
    computing = (spent.compute_ns + spent.recompute_ns + spent.bubble_ns) / step_ns / max(1.0, _sum_ns(parts))
    yield from ((one, computing * one.sum_ns) for one in parts)
    yield _alone("optimizer", "float32", spent.optimizer_ns), spent.optimizer_ns / step_ns
    if sent:
        most, exposed_ns = max(sent, key=lambda kind: sent[kind]), spent.exposed_communication_ns
        yield _alone(most, INSIDE, exposed_ns), exposed_ns / step_ns


def operators_of(stage: Stage, part: Graph, profile: Profile) -> list[Calls]:
    """Those of a stage, forward and backward, each shape once with all its calls."""
    sums: dict[tuple[object, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, placed in stage.nodes.items():
        node = part.node_by_name[name]
        inner, outer = (
            tuple(local_shape(part.tensors[t].shape, at, stage.axes) for t, at in zip(names, places, strict=True))
            for names, places in ((node.operands, placed.operands), (node.results, placed.results))
        )
        forward, backward = node_time_ns(node, inner, outer, part.tensors, profile)
        dtype = part.tensors[node.results[0]].dtype if node.results else "float32"
        known = sums[operator(node.op).work.family, dtype, node.op, inner, outer]
        known[:] = forward, known[1] + forward + backward
    return [Calls(str(key[0]), str(key[1]), call_ns, sum_ns) for key, (call_ns, sum_ns) in sums.items() if sum_ns]


def _alone(family: str, kind: str, spent_ns: float) -> Calls:
    return Calls(family, kind, spent_ns, spent_ns)


def _sum_ns(parts: list[Calls]) -> float:
    return sum(one.sum_ns for one in parts)


# Memory ----------------------------------------

SURE = 0.95  # plans that fit with that probability, or a higher one, all fit surely
STEPS = 20  # of probability below it, that plans are told apart by


class Sure:
    """How surely plans fit on devices of a profile. resolution: by how much steps must differ to be told apart."""

    def __init__(self, profile: Profile) -> None:
        assert profile.memory is not None and profile.steps is not None
        self._memory, self._capacity = profile.memory, profile.facts.capacity_bytes
        self.resolution = profile.steps.resolution

    def of(self, peak_bytes: int) -> float:
        """The probability in steps of a twentieth, of a plan that allocates so much at its peak; at most SURE."""
        odds = self._memory.fits_probability(self._memory.taken_bytes(peak_bytes), self._capacity)
        return min(SURE, math.floor(odds * STEPS) / STEPS)

    def refilling_ns(self, peak_bytes: int, microbatches: int) -> int:
        """What a step may take longer that allocates so much at its peak (`DeviceMemory.refilling_ns`)."""
        return self._memory.refilling_ns(peak_bytes, self._capacity, microbatches)

    def most_bytes(self, limit: int) -> int:
        """The most, up to a limit, that a plan may allocate at its peak and fit as surely as any."""
        return bisect_right(range(1, limit + 1), -self.of(0), key=lambda peak_bytes: -self.of(peak_bytes))


def _odds(told: Prediction) -> float:
    return 1.0 if told.fits_probability is None else told.fits_probability


def _peaks(plan: Plan, part: Graph, profiles: Mapping[str, Profile]) -> dict[str, int]:
    """What is allocated at most on devices of each kind."""
    if plan.mesh.is_homogeneous:
        return {group.profile: plan.predicted.peak_bytes for group in plan.mesh.groups}
    found: dict[str, int] = {}
    for lane in simulate(part, plan, profiles).lanes:
        kind = plan.mesh.group_of(lane.ranks).profile
        found[kind] = max(found.get(kind, 0), lane.peak_bytes)
    return found


def told(plan: Plan, peak_bytes: int, profile: Profile) -> Prediction:
    """The plan's prediction with what is taken of a device of that profile, on which so much is allocated at the
    peak."""
    memory, capacity = profile.memory, profile.facts.capacity_bytes
    if memory is None:
        return plan.predicted
    taken = memory.taken_bytes(peak_bytes, communicators(plan))
    return replace(
        plan.predicted, taken_bytes=taken, needed_bytes=memory.needed_bytes(taken), capacity_bytes=capacity,
        fits_probability=memory.fits_probability(taken, capacity), tight_bytes=memory.tight_bytes(capacity),
        refilling_ns=memory.refilling_ns(peak_bytes, capacity, plan.microbatches) or None,
    )  # fmt: skip


def communicators(plan: Plan) -> int:
    """Groups of ranks that a process is in: one for each axis of its stage, and one of neighbouring stages."""
    axes = max(sum(axis.size > 1 for axis in stage.axes) for stage in plan.stages)
    return min(MOST_COMMUNICATORS, axes + (len(plan.stages) > 1))
