"""Simulates plans that differ little from those before: what is the same as in an earlier plan is not played again.

A graph is cut into segments (`repeats`), each of which is lowered by itself (`parts`) and played on from where those
before have left the streams (`part_player`). A segment with equal placements in an equal context is lowered once, and
one that begins in an equal state is played once, wherever in the model it is and in whichever plan. FlexFlow's delta
simulation (MLSys'19, 5.3) updates the times of tasks that a change reaches; here these are segments, and those that a
change reaches without a difference are not played again either.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping

from autopar.collector import without_collector
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate.part_player import Unsupported
from autopar.simulate.parted import Beyond, PartedStep
from autopar.simulate.schedule import profiles_of_stages
from autopar.simulate.step import ranks_differ, simulate
from autopar.simulate.timeline import Timeline
from autopar.simulate.variants import Variants

KEPT_PLANS = 4
KEPT_VARIANTS = 4


class Incremental:
    """Simulates plans that differ little from those before; equal to `simulate` to the nanosecond and the byte.

    Plans of several stages, with branches, on unlike devices or with unequal shares are simulated as a whole.
    """

    def __init__(self, graph: Graph, profile: Profile | Mapping[str, Profile]) -> None:
        self._graph, self._profile = graph, profile
        self._played: OrderedDict[int, tuple[Plan, PartedStep | Timeline]] = OrderedDict()
        self._variants: OrderedDict[Hashable, Variants] = OrderedDict()
        self.num_whole = 0  # of plans that were simulated as a whole

    def step_time_ns(self, plan: Plan, until_ns: float = math.inf) -> int:
        """As `simulate(graph, plan, profile).step_time_ns`; where that is above `until_ns`, it or something between."""
        try:
            played = self._play(plan, until_ns)
        except Beyond as beyond:
            return beyond.least_ns
        return played.end_ns if isinstance(played, PartedStep) else played.step_time_ns

    def peak_bytes(self, plan: Plan) -> int:
        """As `simulate(graph, plan, profile).peak_bytes`."""
        return self.timeline(plan).peak_bytes

    def excess_bytes(self, plan: Plan, limit_bytes: int) -> int:
        """How much the peak is above a limit; where it is far below, memory is not added up moment by moment."""
        played = self._play(plan)
        if isinstance(played, PartedStep) and played.most_bytes() <= limit_bytes:
            return 0
        return max(0, self.peak_bytes(plan) - limit_bytes)

    def timeline(self, plan: Plan) -> Timeline:
        """As `simulate(graph, plan, profile)`, but for the names of tasks: those of equal layers."""
        played = self._play(plan)
        return played.timeline() if isinstance(played, PartedStep) else played

    def _play(self, plan: Plan, until_ns: float = math.inf) -> PartedStep | Timeline:
        known = self._played.get(id(plan))
        if known is None:
            known = self._played[id(plan)] = plan, self._played_now(plan, until_ns)
            if len(self._played) > KEPT_PLANS:
                self._played.popitem(last=False)
        return known[1]

    def _played_now(self, plan: Plan, until_ns: float) -> PartedStep | Timeline:
        if not _is_whole(plan):
            try:
                return self._step(plan, until_ns)
            except Unsupported:
                pass
        self.num_whole += 1
        return simulate(self._graph, plan, self._profile)

    def _step(self, plan: Plan, until_ns: float) -> PartedStep:
        with without_collector():
            return PartedStep(self._variants_of(plan), plan.parts[0], until_ns)

    def _variants_of(self, plan: Plan) -> Variants:
        key = plan.stage.axes, plan.mesh, plan.microbatches, plan.recompute, plan.mode, plan.optimizer, plan.blocks
        known = self._variants.get(key)
        if known is None or known.is_full:
            (profile,) = profiles_of_stages(plan, self._profile)
            known = self._variants[key] = Variants(self._graph, plan.parts[0], profile)
            if len(self._variants) > KEPT_VARIANTS:
                self._variants.popitem(last=False)
        return known


def _is_whole(plan: Plan) -> bool:
    """Whether it is simulated as a whole."""
    return len(plan.stages) > 1 or bool(plan.stage.forks) or ranks_differ(plan)
