"""Simulates plans that differ little from those before: what is the same as in an earlier plan is not played again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate.schedule import simulate
from autopar.simulate.timeline import Timeline

KEPT_TIMELINES = 4


class Incremental:
    """Simulates plans that differ little from those before; equal to `simulate` to the nanosecond and the byte."""

    def __init__(self, graph: Graph, profile: Profile | Mapping[str, Profile]) -> None:
        self._graph, self._profile = graph, profile
        self._timelines: OrderedDict[int, tuple[Plan, Timeline]] = OrderedDict()

    def step_time_ns(self, plan: Plan) -> int:
        """As `simulate(graph, plan, profile).step_time_ns`."""
        return self._timeline(plan).step_time_ns

    def peak_bytes(self, plan: Plan) -> int:
        """As `simulate(graph, plan, profile).peak_bytes`."""
        return self._timeline(plan).peak_bytes

    def least_time_ns(self, plan: Plan) -> int:
        """A lower bound of the step time: no stream's work."""
        return max(self._timeline(plan).work_ns().values(), default=0)

    def _timeline(self, plan: Plan) -> Timeline:
        known = self._timelines.get(id(plan))
        if known is None or known[0] is not plan:
            known = self._timelines[id(plan)] = plan, simulate(self._graph, plan, self._profile)
            if len(self._timelines) > KEPT_TIMELINES:
                self._timelines.popitem(last=False)
        return known[1]
