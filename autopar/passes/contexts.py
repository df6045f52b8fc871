"""contexts: a graph of long sequences → plans that split them: templates, or a graph of which all is searched.

    sequences are long     the graph says already where they may be (`pipeline`): templates dp × cp × tp of one stage
    memory binds           the graph that says so is opened, and planned like the model's own, in stages, too

Each template has attention as it takes less on its axes, operator by operator (`contexts.by_price`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from autopar.clock import is_interrupted
from autopar.contexts import Steps, by_price, for_sequences
from autopar.driver import Candidate, Context, Front, of_plan
from autopar.families import Family, named
from autopar.interop.submeshes import divisors
from autopar.ir.graph import Graph
from autopar.ir.structure import batch_inputs
from autopar.passes.template import is_open
from autopar.positions import attending
from autopar.substitute import GraphCandidate, sequences
from autopar.template import longest_sequence, template_axes
from autopar.tunables import ALIKE, BOUND_SEQUENCE, FEW_DEVICES, LONG_SEQUENCE

_WAYS = ("gather", "heads")
"""Keys come to the queries, gathered or in a ring as the graph says; or heads are parted."""


def contexts(front: Front, context: Context) -> Iterator[Candidate]:
    """Templates of long sequences that are split; where memory binds, the graph whose sequences may be."""
    rules, given = context.request.constraints, front.given.graph
    pinned = sorted({rule.context for rule in rules if rule.context is not None})
    if front.round > 1 or not context.request.mesh.is_homogeneous or context.request.mesh.num_devices == 1:
        return
    if pinned or longest_sequence(given) >= LONG_SEQUENCE:
        if is_open(context.request):
            yield from _Templates(front, context, pinned).found()
    elif _is_bound(front, context) and (sequences.over_rings(given) or attending(given)):
        graph, steps = for_sequences(given)
        graph, ways = by_price(graph, context.request)
        yield Candidate(GraphCandidate(graph, (*steps, *ways), 0))


def _is_bound(front: Front, context: Context) -> bool:
    """Whether the model's own graph does not fit; or on few devices, which are more than the samples that they could
    share, computes something again to do so."""
    best, graph = front.best_of(front.given), front.given.graph
    if longest_sequence(graph) < BOUND_SEQUENCE:
        return False
    devices = context.request.mesh.num_devices
    has_few = min((graph.tensors[name].shape[0] for name in batch_inputs(graph)), default=devices) < devices
    return best is None or (devices <= FEW_DEVICES and has_few and bool(best.plan.recompute))


class _Templates:
    """Templates of shapes dp × cp × tp, of the graphs that have attention as it takes less there."""

    def __init__(self, front: Front, context: Context, pinned: Sequence[str]) -> None:
        """pinned: how attention runs, where that is not open."""
        self.given, self.context, self.pinned = front.given.graph, context, pinned
        best = front.best_of(front.given)
        self.plan = None if best is None else best.plan
        self.best_ns = math.inf if best is None else best.step_ns
        self.families = dict[str, tuple[Family, Steps]]()

    def found(self) -> Iterator[Candidate]:
        """Those that fit. More ranks inside of operators, which send more, are looked at as long as they gain."""
        devices, last_ns = self.context.request.mesh.num_devices, math.inf
        for tp in divisors(self.context.request.mesh.devices_per_node):
            likely_ns = self._beside(tp, devices // tp)
            if is_interrupted() or min(likely_ns, last_ns) > ALIKE * self.best_ns:
                break
            last_ns = likely_ns
        for family, steps in self.families.values():
            self.context.rows += family.rows
            asked = Candidate(GraphCandidate(family.graph, steps, 0))
            for _, name, place, plan in family.found:
                yield of_plan(asked, place.outline, plan, partial(named, name, plan), place.part.with_traffic)

    def _beside(self, tp: int, among: int) -> float:
        """What a step likely takes in the best of those that fit with so much tensor parallelism."""
        least_ns = math.inf
        for cp in sorted(set(divisors(among)) - {1}):
            family = self._family(among // cp, tp, cp)
            if family.samples < among // cp:
                continue
            likely_ns, fitting_ns = family.look_at_context(among // cp, tp, cp, self.pinned or _WAYS)
            self.best_ns, least_ns = min(self.best_ns, family.best_ns), min(least_ns, fitting_ns)
            if is_interrupted() or likely_ns > ALIKE * self.best_ns:
                break  # where more ranks split a sequence, they send more
        return least_ns

    def _family(self, dp: int, tp: int, cp: int) -> Family:
        request = self.context.request
        graph, steps = self._graph(dp, tp, cp)
        known = str([step.roots for step in steps])
        if known not in self.families:
            self.families[known] = Family(graph, self.plan, request), steps
        family = self.families[known][0]
        family.best_ns = min(family.best_ns, self.best_ns)
        return family

    def _graph(self, dp: int, tp: int, cp: int) -> tuple[Graph, Steps]:
        if self.pinned:
            return self.given, ()
        return by_price(self.given, self.context.request, template_axes(self.context.request.mesh, dp, tp, 1, cp=cp))
