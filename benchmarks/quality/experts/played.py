"""Plays configurations of one model: placements found on its short graph, equal parts of all plans lowered once.

A bound of a step, by what each stage computes, whole blocks computed again included: the last of P submeshes waits for
the first microbatch to come through those before it and back, one chunk of each; so does each other, in plain stages;
where backward passes come in two parts, nobody need wait. What is computed does not depend on how it is stored, and is
least in one microbatch, whose operators are largest: one problem is solved for a bound of all these, and one of each
number of microbatches for those that this leaves. Bytes at least: the mean of what submeshes store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from autopar.cost.compute import node_time_ns
from autopar.errors import AutoparError, PlanError
from autopar.expert_parallel import check_experts, expert_axes
from autopar.families import ShortPlace
from autopar.interop import block_layers, fold
from autopar.intraop import Placements
from autopar.intraop.search import costs_of
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.schedule import SCHEDULES, in_flight
from autopar.microbatch import batch_types
from autopar.planning import DividedGraph, divided
from autopar.profiler import load_profile
from autopar.request import BUDGETS, Request
from autopar.simulate import Incremental
from autopar.staging import cut, even_sizes, node_times_ns, stages_of_sizes
from autopar.template import positions, template_axes, template_constraints, template_ranks, template_recompute
from autopar.trace import find_blocks
from autopar.zero import KINDS
from benchmarks.quality.experts.grid import Expert, Placed

_SOLVE = (2.0, 0, 0.01)
_AGAIN = 0.9
"""Of a block's forward pass, what is computed again at least where all of it is: not what nobody saves."""


KEPT_PLANS, USES = 64, 64
"""Plans that are kept, and how many are placed or played before what is known of their graphs is forgotten: a grid has
hundreds, and a plan of a large model with all its parts takes tens of megabytes."""


class Found(NamedTuple):
    """Placements of a microbatch on one submesh that has the whole model: what a step computes, and sends between
    operators, of what is before the blocks, of each, and of what is after them, what it takes at least, and what a
    device stores, and saves for the backward pass, by what is computed again."""

    layers_ns: tuple[float, ...]
    least_ns: int
    stored_bytes: int
    saved_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Played:
    """What the simulator says of a configuration; of one that is slower than was asked for, not what it takes."""

    expert: Expert
    step_ns: int
    peak_bytes: int | None


def same(placed: Placed, pp: int) -> tuple[Placed, int]:
    """A shape that stands for itself alone."""
    return placed, pp


class Player:
    """Plays configurations of a traced model on a mesh."""

    def __init__(self, graph: Graph, mesh: Mesh, deepest: Callable[[Placed, int], tuple[Placed, int]] = same) -> None:
        """deepest: of a shape and its number of submeshes, one that has no fewer and is else alike: each has the more
        samples for it, and bounds are by its placements."""
        self.graph, self.mesh, self.deepest = graph, mesh, deepest
        self.profile = load_profile(mesh.profile)
        self.blocks = find_blocks(graph)
        self.paths = tuple(path for group in self.blocks.paths for path in group)
        self.layers = block_layers(graph, self.paths)
        self.folded = fold(graph, self.blocks, self.layers)
        self.shared = self.profile.shared_by(mesh.devices_per_node)
        self.limit = self.shared.usable_bytes
        self.parts, self.found, self.sizes = cache(self._parts), cache(self._found), cache(self._sizes)
        self._plans, self._uses = dict[tuple[Placed, int], Plan](), 0

    def _parts(self, count: int) -> tuple[DividedGraph, DividedGraph, Incremental]:
        """Of copies of the graphs, which end with what is found out about their microbatches."""
        whole = divided(replace(self.graph), self.blocks, count)
        short = replace(divided(replace(self.folded.graph), self.blocks, count), copies=self.folded.copies)
        return whole, short, Incremental(whole.graph, self.shared, may_split=True)

    def _use(self) -> None:
        """Forgets what is known of graphs, now and then."""
        self._uses += 1
        if self._uses % USES == 0:
            self.parts.cache_clear()

    def _found(self, placed: Placed, pp: int) -> Found | None:
        """None where constraints leave nothing."""
        self._use()
        try:
            place = self._place(placed, pp)
            placements = place.placements
            solution = placements.unlimited(*_SOLVE)
        except AutoparError:
            return None
        whole, short, _ = self.parts(placed.microbatches)
        self._plans[placed, pp] = placements.placed(place.draft(), whole.graph, solution.choice)
        while len(self._plans) > KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        return Found(
            self._layers_ns(placements, solution.choice), placements.least_step_ns(*_SOLVE),
            placements.usage_of(solution.choice)[0],
            {
                recompute: self._saved_bytes(placements, short.graph, solution.choice, recompute)
                for recompute in KINDS
            },
        )  # fmt: skip

    def _place(self, placed: Placed, pp: int) -> ShortPlace:
        """Raises AutoparError where there is no such template."""
        one, mesh = placed, self.mesh
        axes = template_axes(mesh, one.dp, one.tp, pp, one.hsdp, one.cp, one.ep, one.exchange)
        sharing = expert_axes(mesh, one.dp, one.tp, one.cp, one.ep, one.exchange).sharing
        check_experts(self.graph, one.ep)
        whole, short, simulator = self.parts(one.microbatches)
        made = batch_types(short.graph)
        batch = {name: kind for name, kind in made.items() if self.blocks.representative_tensor(name) == name}
        sequence = positions(short.graph, self.blocks, one.cp)
        rules = template_constraints(
            short.graph, axes, one.zero, one.sequence_parallel, self.paths, batch, sequence, one.context, sharing,
            self.blocks,
        )  # fmt: skip
        request = Request(mesh, "train", "adamw", None, tuple(rules), BUDGETS["fast"])
        return ShortPlace(whole, axes, request, self.profile, strictly=True, short=short, simulator=simulator)

    def _saved_bytes(self, placements: Placements, graph: Graph, choice: Sequence[int], recompute: str) -> int:
        """What the backward pass of a microbatch reads of the forward pass, of all layers. graph: the short one."""
        try:
            again = template_recompute(self.graph, self.paths, recompute)
        except PlanError:
            return 0
        costs = costs_of(graph, replace(placements.draft, recompute=again), self.shared)
        chosen = zip(placements.built.variables, choice, strict=True)
        return sum(
            one.count * costs.saved_bytes(graph.node_by_name[one.name], (one.options[option],))[0]
            for one, option in chosen
            if one.kind == "node"
        )

    def _layers_ns(self, placements: Placements, choice: Sequence[int]) -> tuple[float, ...]:
        """What is computed of each layer and sent for it, the ends of the model among them. What equal operators of all
        blocks compute is told of one."""
        built, found = placements.built, [0.0] * (self.layers.count + 2)
        of_variable = [self.layers_of.get(one.name, ()) if one.kind == "node" else () for one in built.variables]
        computed = zip(
            of_variable, (int(times[n]) for times, n in zip(built.compute_ns, choice, strict=True)), strict=True
        )
        is_stored = [one.kind == "stored" for one in built.variables]
        sent = (
            (of_variable[right], int(matrix[choice[left], choice[right]]))
            for (left, right), matrix in zip(built.problem.edges, built.problem.edge_costs, strict=True)
            if not (is_stored[left] or is_stored[right])
        )
        for layers, spent in (*computed, *sent):
            for layer in layers:
                found[layer] += spent / len(layers)
        return tuple(found)

    @cached_property
    def layers_of(self) -> dict[str, list[int]]:
        """By the operator that stands for equal ones, the layers that have these, the ends of the model among them."""
        of_node, found = self.layers.with_ends(self.graph).fixed, dict[str, list[int]]()
        for name, layer in of_node.items():
            found.setdefault(self.blocks.representative_node(name), []).append(layer)
        return found

    def least_ns(self, expert: Expert, own_count: bool = False) -> float:
        """A bound of its step; infinite where constraints leave nothing. own_count: of as many microbatches, which is
        dearer to find and higher."""
        found, part = self._sharded(expert, own_count)
        if found is None:
            return math.inf
        loads, row, least_ns = self._loads_ns(found, expert), SCHEDULES[expert.schedule], part * found.least_ns
        each, count = part * np.array(loads).reshape(expert.chunks, expert.pp), expert.placed.microbatches
        if row.turns_back:
            each[1::2] = each[1::2, ::-1]
        busy = each.sum(axis=0)
        if row.splits_backward or expert.pp == 1:
            return max(least_ns / expert.pp, float(busy.max()))
        before = (np.cumsum(each[0]) - each[0]) / count
        waits = busy + before if not row.has_chunks else busy[-1:] + before[-1:]
        return max(least_ns / expert.pp, float(busy.max()), float(waits.max()))

    def _sharded(self, expert: Expert, own_count: bool = False) -> tuple[Found | None, float]:
        """What bounds it, and how much of that is its own: what a submesh computes and holds for the whole model, of
        fewer samples. own_count: of as many microbatches, and submeshes."""
        placed = most_sharded(expert.placed)
        if own_count:
            return self.found(replace(placed, microbatches=expert.placed.microbatches), expert.pp), 1.0
        placed, pp = self.deepest(placed, expert.pp)
        return self.found(placed, pp), expert.pp / pp

    def _loads_ns(self, found: Found, expert: Expert) -> list[float]:
        """What each stage computes."""
        before, *blocks, after = found.layers_ns
        again = _AGAIN * self.forward if expert.recompute == "full" else 0.0
        loads, sizes = list[float](), self.sizes(expert.pp, expert.chunks, expert.schedule)
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            loads.append((1 + again) * sum(blocks[end - size : end]))
        loads[0] += before
        loads[-1] += after
        return loads

    def _sizes(self, pp: int, chunks: int, schedule: str) -> tuple[int, ...]:
        """How many blocks each stage has."""
        if pp == 1:
            return (self.layers.count,)
        return even_sizes(self.graph, self.paths, pp, chunks, self.profile, schedule)

    @cached_property
    def forward(self) -> float:
        """The part of all that is computed that forward passes are, on one device."""
        tensors, forward = self.folded.graph.tensors, 0
        for node in self.folded.graph.nodes:
            operands, results = (tuple(tensors[n].shape for n in names) for names in (node.operands, node.results))
            forward += node_time_ns(node, operands, results, tensors, self.shared)[0]
        return forward / sum(node_times_ns(self.folded.graph, self.shared).values())

    def likely_ns(self, expert: Expert) -> float:
        """An estimate, for the order in which configurations are played."""
        (found, part), count = self._sharded(expert), expert.placed.microbatches
        if found is None:
            return math.inf
        bubble = float(SCHEDULES[expert.schedule].bubble(expert.pp, count, expert.chunks)) if expert.pp > 1 else 0.0
        again = {"none": 1.0, "selective": 1.05, "block": 1.05, "full": 4 / 3}[expert.recompute]
        return part * found.least_ns / expert.pp * (1 + bubble / count) * again

    def likely_bytes(self, expert: Expert, own: bool = False) -> float:
        """An estimate of its peak, low where something is computed again: what that holds meanwhile is left out. own:
        of its own placements, which are dearer to find, in place of those that store least."""
        count = expert.placed.microbatches
        found, part = (self.found(expert.placed, expert.pp), 1.0) if own else self._sharded(expert)
        if found is None:
            return math.inf
        saved = found.saved_bytes[expert.recompute] * (1 if own else 1 / count)
        flying = in_flight(expert.schedule, expert.pp, count, expert.chunks, expert.pp) if expert.pp > 1 else 1
        return part * (found.stored_bytes + saved * flying / expert.chunks) / expert.pp

    def played(self, expert: Expert, until_ns: float = math.inf) -> Played:
        """Played until it must be slower than that. Raises AutoparError where it cannot be."""
        self._use()
        simulator, plan = self.parts(expert.placed.microbatches)[2], self.plan(expert)
        step_ns = simulator.step_time_ns(plan, until_ns)
        return Played(expert, step_ns, simulator.peak_bytes(plan) if step_ns < until_ns else None)

    def plan(self, expert: Expert) -> Plan:
        """One microbatch's plan of the whole model."""
        key = expert.placed, expert.pp
        assert self.found(*key) is not None, f"no placements of {expert}"
        if key not in self._plans:
            self._found(*key)
        again = template_recompute(self.graph, self.paths, expert.recompute)
        whole, plan = self.parts(expert.placed.microbatches)[0], replace(self._plans[key], recompute=again)
        if expert.pp == 1:
            return plan
        ranks = template_ranks(self.mesh, expert.pp, expert.chunks, expert.schedule)
        sizes = self.sizes(expert.pp, expert.chunks, expert.schedule)
        return cut(whole.graph, plan, stages_of_sizes(self.graph, self.paths, sizes), ranks, expert.schedule)


def most_sharded(placed: Placed) -> Placed:
    """Of one microbatch, and stored in parts."""
    return replace(placed, microbatches=1, zero=3 if placed.dp * placed.cp > 1 else 0, hsdp=1)
