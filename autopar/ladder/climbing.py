"""One rung: templates of any number of stages by what layers cost on all rungs, the best few placed and simulated.

    settings of the rung        → estimates                 `staged.StageTemplates`, no problem solved, nothing played
    the best few                → candidates                their stages by dynamic programming
    the first few of these      → plans of the whole model, simulated                      `staged.finalists`
    the best                    → verified, with its odds, as a search of its own would return it

What an estimate leaves out is much alike where as many stages hold as many samples: by how much it was off on one rung
corrects it on the next, so that few candidates have to be simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autopar.clock import guarded
from autopar.driver import Candidate, chosen
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.plan import Choice, Plan
from autopar.ir.tried import Tried
from autopar.ladder.shared import RungLayers, SharedLayers
from autopar.microbatch import check_plan
from autopar.odds import Sure, with_odds
from autopar.request import Request
from autopar.simulate import Incremental, Timeline
from autopar.staged.finalists import Finalists
from autopar.staged.looks import Looks
from autopar.staged.search import StagedSearch
from autopar.staged.templates import StageTemplates
from autopar.staged.ways import EstimatedStages, StageStrategy
from autopar.substitute import GraphCandidate
from autopar.tunables import GUARD


@dataclass(eq=False)
class Climb:
    """What was learned on the rungs so far, of one kind of device. off: of stages that are alike, by how many times a
    step was longer than its estimate."""

    sure: Sure | None
    off: dict[Any, float] = field(default_factory=dict)

    def plan(self, shared: SharedLayers, request: Request) -> Plan:
        """The best plan of a rung. Raises InfeasibleError where none of these fits."""
        layers = RungLayers(shared, request)
        looks = Looks(layers, math.inf)
        with guarded(GUARD * request.budget.seconds):
            StageTemplates(looks, one_stage=True).look()
            rows = list[Tried]()
            search = StagedSearch(layers, None, looks)
            finalists = RungFinalists(search, looks.candidates, rows.append, shared, self.off)
            every = [self._candidate(finalists, *found) for found in finalists.plans]
            for best in self._best_first(every):
                try:
                    plan = best.plan
                    check_plan(layers.graph, plan)
                except AutoparError as error:
                    rows.append(Tried(infeasible=str(error)))
                    continue
                report = replace(plan.search, tried=tuple(rows))
                return with_odds(replace(plan, search=report), layers.graph)
        least = min((c.peak_bytes for c in looks.candidates), default=None)
        raise InfeasibleError(f"found no template within {layers.limit:,} bytes a device", least)

    def _candidate(self, finalists: Finalists, found: EstimatedStages, played: Timeline) -> Candidate:
        asked = Candidate(GraphCandidate(finalists.layered.graph, (), 0))
        made = partial(finalists.stated, found, played)
        return asked.planned(found.outline, played.step_time_ns, played.peak_bytes, made)

    def _best_first(self, every: list[Candidate]) -> Iterator[Candidate]:
        left = list(every)
        while left:
            best = chosen(left, self.sure)
            left.remove(best)
            yield best


class RungFinalists(Finalists):
    """The best candidates of a rung, played by what all rungs of a batch share."""

    def __init__(
        self, search: StagedSearch, found: list[EstimatedStages], note: Callable[[Tried], None],
        shared: SharedLayers, off: dict[Any, float],
    ) -> None:  # fmt: skip
        super().__init__(search, found, note)
        self._every, self._learned, self.quick_s = shared, off, 0.0
        self._known: dict[int, Plan] = {}

    def _simulator(self, microbatches: int) -> Incremental:  # type: ignore[override] # cached by what is shared
        return self._every.simulator(microbatches)

    def _built(self, candidate: EstimatedStages) -> Plan:
        """Once, for simulating and for stating it."""
        if id(candidate) not in self._known:
            self._known[id(candidate)] = super()._built(candidate)
        return self._known[id(candidate)]

    def _off(self) -> dict[Any, float]:
        return self._learned

    def _likeness(self, candidate: EstimatedStages) -> Any:
        """Of stages: how many there are, what each is like, and how many samples a rank has."""
        way, batch = candidate.ways[0], self.layered.batch
        sizes = {axis.name: axis.size for axis in way.setting.axes}
        ranks = way.setting.num_devices // sizes.pop("tp", 1)
        samples = batch / candidate.microbatches / ranks
        return candidate.num_submeshes, len(candidate.ways), candidate.schedule, samples, way.setting.zero, str(sizes)

    def _explained(self, way: StageStrategy) -> tuple[Choice, ...]:
        """Each decision against the others of its template."""
        return self.layered.place_of(way.setting).placements.explained(way.choice.choice)
