"""Which axes and how many microbatches unequal devices share a batch in: in as few as fit, or twice as many as long as
that is faster. Blocks are computed again where nothing fits otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from autopar.clock import Clock
from autopar.cost import Profile
from autopar.errors import AutoparError, InfeasibleError, PlacementError, PlanError
from autopar.interop.submeshes import logical_shapes
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh, Mesh, make_axes
from autopar.ir.outline import Outline, sizes_text
from autopar.ir.plan import Plan, SearchReport
from autopar.ir.tried import Tried
from autopar.planning import divided, microbatch_counts
from autopar.progress import Report, reporting
from autopar.request import Request
from autopar.shares.batch import SharedBatch
from autopar.template import template_recompute
from autopar.trace import Blocks
from autopar.tunables import FEW_DEVICES, LEAST_SEARCH_S

Found = tuple[Outline, Plan]


@dataclass(eq=False)
class ShareSearch:
    """What was tried on which axes, and why the rest was refused. note: takes a row of the report for each."""

    graph: Graph
    blocks: Blocks
    request: Request
    profiles: Mapping[str, Profile]
    clock: Clock
    note: Callable[[Tried], None]
    progress: Report | None = None

    def __post_init__(self) -> None:
        self.shapes = shared_axes(self.request.mesh)
        self.paths = tuple(path for group in self.blocks.paths for path in group)
        self.num_tried = 0
        self.refusals: list[AutoparError] = []

    def run(self) -> Iterator[Found]:
        """Plans that fit. Raises InfeasibleError when none does."""
        counts = [*microbatch_counts(self.graph, self.request)]
        for recompute in ("none",) if self.request.mode != "train" else ("none", "full"):
            best_ns: int | None = None
            for count in counts:
                if best_ns is not None and self.clock.is_over:
                    break
                found = [*self._in(count, recompute)]
                yield from found
                least_ns = min((plan.predicted.step_time_ns for _, plan in found), default=None)
                if best_ns is not None and (least_ns is None or least_ns >= best_ns):
                    break
                best_ns = least_ns
            if best_ns is not None:
                return
        if not self.refusals:
            raise PlanError(f"expected several devices to share a batch, found {self.request.mesh}")
        raise self.refusals[0]

    def _in(self, microbatches: int, recompute: str) -> Iterator[Found]:
        """Plans in so many microbatches, over all axes."""
        with reporting(self.progress, len(self.shapes)) as report:
            for axes in self.shapes:
                plan = self._tried(axes, microbatches, recompute, report)
                if plan is not None:
                    yield Outline((axes,), microbatches), plan

    def _tried(self, axes: LogicalMesh, microbatches: int, recompute: str, report: Report) -> Plan | None:
        """The plan on these axes; None where there is none."""
        text = f"shares over {sizes_text(axes)} in {microbatches} microbatches"
        text += "" if recompute == "none" else f", recompute {recompute}"
        self.num_tried += 1
        try:
            plan = self._planned(axes, microbatches, recompute)
        except (InfeasibleError, PlacementError, PlanError) as error:
            self.refusals.append(error)
            self.note(Tried(setting=text, infeasible=str(error)))
            report(f"{text}: {error}")
            return None
        self.note(Tried(setting=text, step_time_ns=plan.predicted.step_time_ns))
        report(f"{text}: {plan.predicted.step_time_ns / 1e6:.3f} ms")
        return plan

    def _planned(self, axes: LogicalMesh, microbatches: int, recompute: str) -> Plan:
        seconds = max(LEAST_SEARCH_S, self.clock.left_s) / len(self.shapes)
        request = self.request.recomputing(template_recompute(self.graph, self.paths, recompute))
        request = replace(request, budget=replace(request.budget, seconds=seconds))
        part = divided(self.graph, self.blocks, microbatches)
        return SharedBatch(part, axes, request, self.profiles).plan("speed")

    def reported(self, outline: Outline, plan: Plan) -> Plan:
        """The plan with how it was found."""
        part = divided(self.graph, self.blocks, outline.microbatches)
        batch = SharedBatch(part, outline.axes, self.request, self.profiles)
        why = f"no exchange of rows is faster, after {self.num_tried} settings"
        return _reported(batch, replace(plan, search=replace(plan.search, seconds=round(self.clock.passed_s, 3))), why)


def searched_shares(
    graph: Graph, blocks: Blocks, request: Request, profiles: Mapping[str, Profile], clock: Clock,
    note: Callable[[Tried], None], progress: Report | None,
) -> Iterator[tuple[Outline, Plan, Callable[[], Plan]]]:  # fmt: skip
    """Plans that fit, each with its outline, and what says more of it. note: takes a row of the report for each.
    Raises InfeasibleError when nothing fits, PlanError where the batch cannot be shared out."""
    search = ShareSearch(graph, blocks, request, profiles, clock, note, progress)
    for outline, plan in search.run():
        yield outline, plan, partial(search.reported, outline, plan)


def shared_in(
    graph: Graph, blocks: Blocks, outline: Outline, request: Request, profiles: Mapping[str, Profile]
) -> tuple[Plan, Callable[[], Plan]]:
    """The best plan of a graph on the axes of an outline, and what says more of it. Raises InfeasibleError where none
    fits."""
    batch = SharedBatch(divided(graph, blocks, outline.microbatches), outline.axes, request, profiles)
    plan = batch.plan("speed")
    return plan, partial(_reported, batch, plan, "near the best plan of the model's own graph")


def _reported(batch: SharedBatch, plan: Plan, why: str) -> Plan:
    """The plan with how it was found."""
    report = SearchReport(
        method="shares of the batch by speed, descent over rows, intra-op ILP",
        cost_ns=plan.predicted.step_time_ns,
        lower_bound_ns=batch.least_step_ns,
        stop_reason=why,
        seconds=plan.search.seconds,
        seed=batch.request.budget.seed,
    )
    return replace(plan, search=report)


def shared_axes(mesh: Mesh) -> list[LogicalMesh]:
    """Samples over the first axis; alone, or with others inside of each node: one more, or two of few devices."""
    most, inner = mesh.num_devices, math.gcd(*(group.devices_per_node for group in mesh.groups))
    sizes = [size for size in range(1, inner + 1) if inner % size == 0 and most // size > 1]
    every = [axes for size in sizes for axes in logical_shapes(size, size)]
    shapes = [(most // math.prod(own), *own) for own in ([axis.size for axis in axes] for axes in every)]
    shapes = [shape for shape in shapes if len(shape) < 3 or (most <= FEW_DEVICES and shape[1] <= shape[2])]
    return [make_axes(("d0", "d1", "d2")[: len(shape)], shape) for shape in shapes]
