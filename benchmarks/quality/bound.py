"""What a template's step takes at least: the time that its devices compute, whatever they send.

C: what the operators of a microbatch compute on one submesh of dp × tp devices, each in its fastest strategy; C_b:
those of repeated blocks, of which each of pp stages has as many. B: microbatches. The last stage begins after the
forward passes of all others and ends before their backward passes, so that

    step ≥ C + (B − 1) · C_b / pp      gpipe, 1f1b
    step ≥ B · C / pp                  other schedules: some stage computes at least its share

With full recomputation the forward pass of blocks counts twice. Where R ranks share c cores, times are those of ranks
that are all busy; one that has a core to itself is as much as R / c times faster (`simulate.cores`):

    step ≥ max(B · C / pp, (C + (B − 1) · C_b / pp) · c / R)      gpipe, 1f1b; the first alone for others
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import autopar
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.planning import DividedGraph, Place, divided
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.simulate.cores import sharing_of
from autopar.template import template_axes, template_ranks, template_recompute
from autopar.trace import find_blocks


class Bound:
    """Of templates of one model on one mesh."""

    def __init__(self, graph: Graph, mesh: autopar.Mesh) -> None:
        self.graph, self.mesh, self.profile = graph, mesh, load_profile(mesh.profile)
        self.sharing = sharing_of([self.profile.shared_by(mesh.devices_per_node)])
        self.blocks = find_blocks(graph)
        self.paths = tuple(path for group in self.blocks.paths for path in group)
        self._compute = cache(self._compute_ns)
        self._part = cache(self._divided)

    def least_ns(self, choice: Mapping[str, Any]) -> int | None:
        """Nanoseconds a step; None for a template that is not possible. choice: of `autopar.template_plan`."""
        dp, tp, pp, count = (choice[name] for name in ("dp", "tp", "pp", "microbatches"))
        try:
            template_ranks(self.mesh, pp, 2, choice["schedule"])
            whole, of_blocks = self._compute(dp, tp, pp, count, choice["recompute"])
        except AutoparError:
            return None
        shared = count * whole / pp
        in_a_row = whole + (count - 1) * of_blocks / pp if choice["schedule"] in ("gpipe", "1f1b") else 0.0
        if self.sharing is None or pp == 1:
            return int(in_a_row or shared)
        return int(max(shared, in_a_row * self.sharing.cores / self.sharing.ranks))

    def _divided(self, microbatches: int) -> DividedGraph:
        return divided(self.graph, self.blocks, microbatches)

    def _compute_ns(self, dp: int, tp: int, pp: int, microbatches: int, recompute: str) -> tuple[float, float]:
        """Of a microbatch, all operators, and those of repeated blocks. Raises AutoparError."""
        again = template_recompute(self.graph, self.paths, recompute)
        request = Request(self.mesh, "train", "adamw", None, (), SearchBudget(), None, again)
        part = self._part(microbatches)
        built = Place(part, template_axes(self.mesh, dp, tp, pp), request, self.profile).placements.built
        whole = of_blocks = 0.0
        for variable, times in zip(built.variables, built.compute_ns, strict=True):
            least = float(times.min()) / microbatches
            whole += least
            if variable.kind == "node" and self._is_in_block(part.graph, variable.name):
                of_blocks += least
        return whole, of_blocks

    def _is_in_block(self, graph: Graph, name: str) -> bool:
        return any(path in self.paths for path, _ in graph.node_by_name[name].scope.path)
