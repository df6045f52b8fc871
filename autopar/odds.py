"""How sure a prediction is: what a device holds in all, and how likely that fits.

log(measured / predicted) of what is taken has the spread that the profile's `DeviceMemory` says; a plan fits where no
more is taken than the device has. A profile without a block `memory` says nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.cost import Profile
from autopar.cost.device import MOST_COMMUNICATORS
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Prediction
from autopar.microbatch import divided_graph
from autopar.profiler import profiles_of
from autopar.simulate import simulate


def with_odds(plan: Plan, graph: Graph) -> Plan:
    """The plan whose prediction says how sure it is, as far as the profiles of its devices do. graph: the plan's, of
    the whole batch."""
    peaks = _peaks(plan, graph, profiles := profiles_of(plan.mesh))
    found = [told(plan.predicted, peak, communicators(plan), profiles[kind]) for kind, peak in sorted(peaks.items())]
    return replace(plan, predicted=min(found, key=_odds))


def _odds(told: Prediction) -> float:
    return 1.0 if told.fits_probability is None else told.fits_probability


def _peaks(plan: Plan, graph: Graph, profiles: Mapping[str, Profile]) -> dict[str, int]:
    """What is allocated at most on devices of each kind; several kinds are told apart only where a profile asks."""
    if plan.mesh.is_homogeneous or not any(profile.memory for profile in profiles.values()):
        return {group.profile: plan.predicted.peak_bytes for group in plan.mesh.groups}
    found: dict[str, int] = {}
    for lane in simulate(divided_graph(graph, plan.microbatches), plan, profiles).lanes:
        kind = plan.mesh.group_of(lane.ranks).profile
        found[kind] = max(found.get(kind, 0), lane.peak_bytes)
    return found


def told(predicted: Prediction, peak_bytes: int, num_communicators: int, profile: Profile) -> Prediction:
    """The prediction with what is taken of a device of that profile, on which so much is allocated at the peak."""
    memory, capacity = profile.memory, profile.facts.capacity_bytes
    if memory is None:
        return predicted
    taken = memory.taken_bytes(peak_bytes, num_communicators)
    odds = memory.fits_probability(taken, capacity)
    return replace(predicted, taken_bytes=taken, capacity_bytes=capacity, fits_probability=odds)


def communicators(plan: Plan) -> int:
    """Groups of ranks that a process is in: one for each axis of its stage, and one of neighbouring stages."""
    axes = max(sum(axis.size > 1 for axis in stage.axes) for stage in plan.stages)
    return min(MOST_COMMUNICATORS, axes + (len(plan.stages) > 1))
