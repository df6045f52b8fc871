"""The search over stages: submesh, logical shape, microbatches, schedule, recomputation; the best are simulated.

    setting = (submesh size, logical shape, B)    → placements along time against memory      `intraop.trade_offs`
    way = (placements, recomputation)             → what each layer costs, played alone       `simulate.layer_costs`
    stages of one way, by schedule                → estimated step time                       `interop.best_stages`
    stages of several ways                        → the same, submeshes and recomputation mixed    `mixing`
    the best few                                  → plans of the whole model, simulated       `finalists`

All but the last happens on a short graph (`interop.fold`), so the number of solves does not grow with depth. Each
logical shape is looked at once, where the bubble is small; from the best on, the number of microbatches climbs from
there, for as long as the estimate gets better.
"""

from __future__ import annotations

import time
from dataclasses import replace

from autopar import interrupt
from autopar.collector import without_collector
from autopar.cost import Profile
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.planning import Request, best_plan, faster_plan
from autopar.progress import Report, reporting
from autopar.staged.finalists import Finalists
from autopar.staged.layered import Layered
from autopar.staged.mixing import mixed
from autopar.staged.search import StagedSearch
from autopar.trace import Blocks

_FEW_DEVICES = 8
_LEAST = 0.25
"""Of the budget what the search of one stage has at least."""


def best_staged_plan(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None
) -> Plan:  # fmt: skip
    """The fastest plan that fits, of one stage or several.

    Raises InfeasibleError naming the smallest memory limit that can be met.
    """
    with without_collector():
        search = StagedSearch(Layered(graph, blocks, request, profile))
        with reporting(progress, len(search.shapes)) as report:
            found = search.run(report)
            if all(candidate.peak_bytes > search.admitted for candidate in found) and not interrupt.is_asked():
                # What all layers read, such as a mask, may be what does not fit when it is counted with each of them.
                search = StagedSearch(Layered(graph, blocks, request, profile, constants_once=True))
                found = search.run(report)
            found += mixed(search.layered, found, search.started)
        finalists = Finalists(search, found)
        return finalists.best(*_of_one_stage(graph, blocks, search.request, profile, progress, finalists))


def staged_plan_near(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, size: int, mesh: str, microbatches: int
) -> Plan | None:
    """The fastest plan that fits, of stages on submeshes of so many devices seen as one logical shape, such as "2x4",
    in so many microbatches; None where none was found."""
    with without_collector():
        search = StagedSearch(Layered(graph, blocks, request, profile))
        found = search.near(size, mesh, microbatches)
        found += mixed(search.layered, found, search.started)
        finalists = Finalists(search, found)
        return finalists.best(None, None) if finalists.plans else None


def _of_one_stage(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None, than: Finalists
) -> tuple[Plan | None, InfeasibleError | None]:  # fmt: skip
    """On few devices, what the search of one stage finds on all logical meshes, also of three axes; or why not."""
    stages = {c.stages for c in request.constraints if c.stages is not None}
    if request.mesh.num_devices > _FEW_DEVICES or stages - {1} or interrupt.ends(than.best_ns is not None):
        return None, None
    best_ns, budget = than.best_ns, request.budget
    left = budget.seconds - (time.monotonic() - than.search.started)
    request = replace(request, budget=replace(budget, seconds=max(left, _LEAST * budget.seconds)))
    try:
        if best_ns is not None:
            return faster_plan(graph, blocks, request, profile, progress, best_ns), None
        return best_plan(graph, blocks, request, profile, progress), None
    except InfeasibleError as error:
        return None, error


__all__ = ["best_staged_plan", "staged_plan_near"]
