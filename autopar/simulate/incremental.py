"""Simulates many plans of one graph."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.simulate.schedule import simulate
from autopar.simulate.timeline import Timeline


class Incremental:
    """Simulates plans of a graph, and remembers the last."""

    def __init__(self, graph: Graph, profile: Profile | Mapping[str, Profile]) -> None:
        self.graph, self.profile = graph, profile
        self._known: tuple[Plan, Timeline] | None = None

    def _timeline(self, plan: Plan) -> Timeline:
        if self._known is None or self._known[0] is not plan:
            self._known = plan, simulate(self.graph, plan, self.profile)
        return self._known[1]

    def step_time_ns(self, plan: Plan) -> int:
        return self._timeline(plan).step_time_ns

    def peak_bytes(self, plan: Plan) -> int:
        return self._timeline(plan).peak_bytes

    def least_time_ns(self, plan: Plan) -> int:
        return 0
