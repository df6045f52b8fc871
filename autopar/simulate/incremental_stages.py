"""Simulates plans of several stages that differ little from those before: a stage that is as it was is not lowered
again, and its passes that begin as they have begun before are not played again.

A stage depends on its own placements, on what it sends, and on the schedule: all else of a plan only decides when its
passes begin, which the schedule is replayed for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from autopar.collector import without_collector
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan, Stage
from autopar.ir.stages import answered_values
from autopar.simulate.player import Player
from autopar.simulate.program import Prices, leaving_by_name, lower_stage
from autopar.simulate.schedule import play_stages, profiles_of_stages
from autopar.simulate.timeline import Timeline

KEPT_STAGES = 12  # of each place in the row


class _KnownStage(NamedTuple):
    """A stage that was lowered: all that its program depends on, and what plays it."""

    stage: Stage
    leaving: Mapping[str, tuple[Placement, ...]]
    rest: Any
    player: Player


class IncrementalStages:
    """Simulates plans of several stages one after another; equal to `simulate` to the nanosecond and the byte."""

    def __init__(self, graph: Graph, profile: Profile | Mapping[str, Profile]) -> None:
        self._graph, self._profile = graph, profile
        self._known: dict[int, list[_KnownStage]] = {}
        self.num_lowered = 0

    def timeline(self, plan: Plan) -> Timeline:
        """As `simulate(graph, plan, profile)`. Raises PlanError as that does."""
        with without_collector():
            profiles, prices = profiles_of_stages(plan, self._profile), dict[Any, Any]()
            players = [self._player(plan, index, profile, prices) for index, profile in enumerate(profiles)]
            return play_stages(self._graph, plan, players, profiles).timeline()

    def _player(self, plan: Plan, index: int, profile: Profile, prices: Prices) -> Player:
        stage, leaving = plan.stages[index], leaving_by_name(self._graph, plan, index)
        is_last = index == len(plan.stages) - 1
        rest = (
            plan.mesh, plan.microbatches, plan.schedule, plan.recompute, plan.mode, plan.optimizer, plan.blocks,
            plan.precision,
            len(plan.stages), is_last, answered_values(self._graph, plan, index),
        )  # fmt: skip
        kept = self._known.setdefault(index, [])
        for number, known in enumerate(kept):
            if known.stage == stage and known.leaving == leaving and known.rest == rest:
                kept.insert(0, kept.pop(number))
                return known.player
        program = lower_stage(self._graph, plan, index, profile, 0, prices)
        player = Player(program, profile, plan.mode == "train" and self._graph.loss is not None)
        kept.insert(0, _KnownStage(stage, leaving, rest, player))
        del kept[KEPT_STAGES:]
        self.num_lowered += 1
        return player
