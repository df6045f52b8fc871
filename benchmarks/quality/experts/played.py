"""Plays configurations of one model: placements found on its short graph, equal parts of all plans lowered once.

A bound of a step: the busiest of pp submeshes computes no less than the mean, and, where each has one stage, waits for
the first microbatch to come through those before it and back. What is computed does not depend on how it is stored, and
is least in one microbatch, whose operators are largest: one problem is solved for a bound of all these. Bytes at least:
the mean of what submeshes store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from autopar.errors import AutoparError
from autopar.families import ShortPlace
from autopar.interop import block_layers, fold
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES, in_flight
from autopar.microbatch import batch_types
from autopar.planning import DividedGraph, divided
from autopar.profiler import load_profile
from autopar.request import BUDGETS, Request
from autopar.simulate import Incremental
from autopar.staging import cut, stages_of_sizes
from autopar.template import template_axes, template_constraints, template_ranks, template_recompute
from autopar.trace import find_blocks
from benchmarks.quality.experts.grid import Expert, Placed, sizes_of

_SOLVE = (2.0, 0, 0.01)


class Found(NamedTuple):
    """Placements of a microbatch on one submesh that has the whole model: the plan, what a step computes, what it takes
    at least, and what a device stores and saves for the backward pass."""

    plan: Plan
    compute_ns: int
    least_ns: int
    stored_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Played:
    """What the simulator says of a configuration."""

    expert: Expert
    step_ns: int
    peak_bytes: int


class Player:
    """Plays configurations of a traced model on a mesh."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.profile = load_profile(mesh.profile)
        self.blocks = find_blocks(graph)
        self.paths = tuple(path for group in self.blocks.paths for path in group)
        self.layers = block_layers(graph, self.paths)
        self.folded = fold(graph, self.blocks, self.layers)
        self.shared = self.profile.shared_by(mesh.devices_per_node)
        self.limit = self.shared.usable_bytes
        self.parts, self.found = cache(self._parts), cache(self._found)

    def _parts(self, count: int) -> tuple[DividedGraph, DividedGraph, Incremental]:
        whole = divided(self.graph, self.blocks, count)
        short = replace(divided(self.folded.graph, self.blocks, count), copies=self.folded.copies)
        return whole, short, Incremental(whole.graph, self.shared, may_split=True)

    def _found(self, placed: Placed, pp: int) -> Found | None:
        """None where constraints leave nothing."""
        axes = template_axes(self.mesh, placed.dp, placed.tp, pp)
        whole, short, simulator = self.parts(placed.microbatches)
        made = batch_types(short.graph)
        batch = {name: kind for name, kind in made.items() if self.blocks.representative_tensor(name) == name}
        rules = template_constraints(
            short.graph, axes, placed.zero, placed.sequence_parallel, self.paths, batch
        )  # fmt: skip
        request = Request(self.mesh, "train", "adamw", None, tuple(rules), BUDGETS["fast"])
        place = ShortPlace(whole, axes, request, self.profile, short=short, simulator=simulator)
        try:
            solution = place.placements.unlimited(*_SOLVE)
        except AutoparError:
            return None
        plan = place.placements.placed(place.draft(), whole.graph, solution.choice)
        chosen = zip(place.placements.built.compute_ns, solution.choice, strict=True)
        return Found(
            plan, sum(int(times[option]) for times, option in chosen), place.placements.least_step_ns(*_SOLVE),
            *place.placements.usage_of(solution.choice),
        )  # fmt: skip

    def least_ns(self, expert: Expert) -> float:
        """A bound of its step; infinite where constraints leave nothing."""
        found = self.found(_most_sharded(expert.placed), expert.pp)
        return math.inf if found is None else found.compute_ns * _least_part(expert)

    def likely_ns(self, expert: Expert) -> float:
        """An estimate, for the order in which configurations are played."""
        found, count = self.found(_most_sharded(expert.placed), expert.pp), expert.placed.microbatches
        if found is None:
            return math.inf
        bubble = float(SCHEDULES[expert.schedule].bubble(expert.pp, count, expert.chunks)) if expert.pp > 1 else 0.0
        again = {"none": 1.0, "selective": 1.05, "block": 1.05, "full": 4 / 3}[expert.recompute]
        return found.least_ns / expert.pp * (1 + bubble / count) * again

    def likely_bytes(self, expert: Expert) -> float:
        """An estimate of its peak, low where something is computed again: then what is stored alone."""
        found, count = self.found(_most_sharded(expert.placed), expert.pp), expert.placed.microbatches
        if found is None:
            return math.inf
        saved = found.saved_bytes / count if expert.recompute == "none" else 0.0
        flying = in_flight(expert.schedule, expert.pp, count, expert.chunks, expert.pp) if expert.pp > 1 else 1
        return (found.stored_bytes + saved * flying / expert.chunks) / expert.pp

    def stores_too_much(self, expert: Expert) -> bool:
        """Whether what submeshes store is, in the mean, more than a device holds."""
        found = self.found(expert.placed, expert.pp)
        return found is None or found.stored_bytes / expert.pp > self.limit

    def played(self, expert: Expert) -> Played:
        """Raises AutoparError where it cannot be."""
        simulator = self.parts(expert.placed.microbatches)[2]
        timeline = simulator.timeline(self.plan(expert))
        return Played(expert, timeline.step_time_ns, timeline.peak_bytes)

    def plan(self, expert: Expert) -> Plan:
        """One microbatch's plan of the whole model."""
        found = self.found(expert.placed, expert.pp)
        assert found is not None
        again = template_recompute(self.graph, self.paths, expert.recompute)
        whole, plan = self.parts(expert.placed.microbatches)[0], replace(found.plan, recompute=again)
        if expert.pp == 1:
            return plan
        ranks = template_ranks(self.mesh, expert.pp, expert.chunks, expert.schedule)
        sizes = sizes_of(self.layers.count, len(ranks))
        return cut(whole.graph, plan, self._members(tuple(sizes)), ranks, expert.schedule)

    def _members(self, sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return dict(stages_of_sizes(self.graph, self.paths, sizes))


def _most_sharded(placed: Placed) -> Placed:
    """Of one microbatch, and stored in parts."""
    return replace(placed, microbatches=1, zero=3 if placed.dp > 1 else 0)


def _least_part(expert: Expert) -> float:
    """Of all that is computed, what the step of the best split takes at least.

    In stages of whole backward passes, T_j + Σ_{i<j} T_i / m for each stage j; all these are at most C only where
    Σ T ≤ C · m · (1 − (1 − 1/m)^pp).
    """
    row, count = SCHEDULES[expert.schedule], expert.placed.microbatches
    if expert.pp == 1 or row.has_chunks or row.splits_backward:
        return 1 / expert.pp
    return 1 / (count * (1 - (1 - 1 / count) ** expert.pp))
