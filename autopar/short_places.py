"""Places of templates: problems of a short graph, plans of the whole one, played by layers; and what is known of a
template, in any number of microbatches, from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.intraop import SOFT_PENALTY_NS, KeptParameter, Placements, prepare_placements
from autopar.ir.constraint import Constraint
from autopar.ir.graph import is_inside
from autopar.ir.plan import Plan
from autopar.planning import DividedGraph, Place
from autopar.request import SearchBudget
from autopar.simulate import Incremental, predict
from autopar.tunables import TEMPLATE_TRIES, USAGE_ABOVE, USAGE_NEAR

QUICK_BUDGET = SearchBudget(10.0, gap=0.01, substitutions=False, proposals=0)
QUICK_SOLVE = (2.0, QUICK_BUDGET.seed, QUICK_BUDGET.gap)
"""Seconds, seed and gap of a solve."""


@dataclass(frozen=True, eq=False)
class ShortPlace(Place):
    """A place whose problem is that of a short graph, which costs what the whole one does, and whose plans, of the
    whole one, are played by layers."""

    short: DividedGraph = field(kw_only=True)
    simulator: Incremental = field(kw_only=True)

    @property
    def _rules(self) -> tuple[Constraint, ...]:
        return (*self.request.constraints, *self.short.constraints)

    def placements_with(self, keep: Mapping[str, KeptParameter], strictly: bool = False) -> Placements:
        short = self.short
        found = prepare_placements(
            short.graph, short.blocks, self.draft(), self.shared_profile, self._storages, self._rules, short.whole,
            short.copies, self.sends, keep, strictly=strictly,
        )  # fmt: skip
        return replace(found, graph=self.part.graph, costs=found.costs.of(self.part.graph))

    def scored(self, plan: Plan) -> Plan:
        return replace(plan, predicted=predict(self.simulator.timeline(plan)))


class KnownTemplate:
    """What is known of a template in any number of microbatches from one, in which ZeRO is 3: what all of these save
    together is parted among them.

    least_ns: what a step takes at least.
    """

    def __init__(self, place: ShortPlace) -> None:
        self.place, self.least_ns = place, place.placements.least_step_ns(*QUICK_SOLVE)

    def sent_ns(self, microbatches: int) -> int:
        """What gathering and reducing what is stored takes a step, with each microbatch anew: as ZeRO-3 does."""
        placements = self.place.placements
        sent = placements.unlimited(*QUICK_SOLVE).cost % SOFT_PENALTY_NS - self.least_ns
        return sent * microbatches // self.place.part.microbatches

    def sending_ns(self, microbatches: int) -> int:
        """What a step takes at least for that: links inside a node and between nodes are busy at the same time."""
        return self.sent_ns(microbatches) // 2

    def usage(self, microbatches: int) -> int:
        """Estimated bytes a device of the fastest placements."""
        placements = self.place.placements
        return self._in(microbatches, *placements.usage_of(placements.unlimited(*QUICK_SOLVE).choice))

    def inside(self, modules: Sequence[str]) -> int:
        """What operators inside of modules save, in all microbatches together."""
        built, graph = self.place.placements.built, self.place.short.graph
        choice = self.place.placements.unlimited(*QUICK_SOLVE).choice
        sizes = (
            int(usage[option])
            for usage, option, variable in zip(built.problem.usages, choice, built.variables, strict=True)
            if variable.kind == "node" and is_inside(graph.node_by_name[variable.name].scope.module, modules)
        )
        return sum(sizes) * self.place.part.microbatches

    def needs(self, microbatches: int) -> int:
        """Bytes a device at least."""
        usage = self.usage(microbatches)
        return usage if usage <= self.place.placements.draft.memory_limit else self._in(microbatches, *self._least)

    def _in(self, microbatches: int, stored: int, saved: int) -> int:
        return stored + saved * self.place.part.microbatches // microbatches

    @cached_property
    def _least(self) -> tuple[int, int]:
        least = self.place.placements.least_memory(*QUICK_SOLVE[:2])
        return least.stored_bytes, least.usage_bytes - least.stored_bytes


def fitted(place: ShortPlace, limit: int, beyond: int | None) -> Plan:
    """The fastest placements that fit when they are played, in a few tries. Raises InfeasibleError naming their peak.

    beyond: by how much peaks are above the usage of placements, if that is known.
    """
    usage, peak = place.placements.unlimited(*QUICK_SOLVE).peak_usage, 0
    asked = min(usage, int(limit * USAGE_ABOVE) if beyond is None else int(limit * USAGE_NEAR) - beyond)
    for _ in range(TEMPLATE_TRIES):
        if asked < usage and asked < place.placements.least_memory(*QUICK_SOLVE[:2]).usage_bytes:
            break
        plan = place.within(asked, QUICK_SOLVE[0])
        if plan.predicted.peak_bytes <= limit:
            return plan
        peak = peak or plan.predicted.peak_bytes
        asked -= plan.predicted.peak_bytes - limit
    told = f"needs {peak:,} bytes a device" if peak else f"needs {usage + (beyond or 0):,} bytes a device by estimate"
    raise InfeasibleError(told, peak or None)
