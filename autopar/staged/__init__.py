"""The search over stages: submesh, logical shape, microbatches, schedule, recomputation; the best are simulated.

    templates of stages                           → the best few looked at, which bound the rest    `templates`
    setting = (submesh size, logical shape, B)    → placements along time against memory      `intraop.trade_offs`
    way = (placements, recomputation)             → what each layer costs, played alone       `simulate.layer_costs`
    stages of one way, by schedule                → estimated step time                       `interop.best_stages`
    stages of several ways                        → the same, submeshes and recomputation mixed    `mixing`
    the best few                                  → plans of the whole model, simulated       `finalists`

All but the last happens on a short graph (`interop.fold`), so the number of solves does not grow with depth. Of each
logical shape some numbers of microbatches are looked at (`counts`), as long as the estimate is likely to get better.
What needs too much memory is traded against it, in its placements and in what is computed again, where it is likely to
be the best (`looks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.clock import is_interrupted
from autopar.collector import without_collector
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.outline import Outline
from autopar.ir.tried import Tried
from autopar.progress import Report, reporting
from autopar.request import Request
from autopar.staged.finalists import Finalists
from autopar.staged.layered import Layered
from autopar.staged.looks import Looks
from autopar.staged.mixing import mixed
from autopar.staged.search import StagedSearch
from autopar.staged.templates import StageTemplates
from autopar.trace import Blocks


def template_stages(graph: Graph, blocks: Blocks, request: Request, profile: Profile) -> Looks:
    """Templates of several stages, where constraints leave them open, the best looked at."""
    with without_collector():
        looks = Looks(Layered(graph, blocks, request, profile), math.inf)
        StageTemplates(looks).look()
        return looks


def searched_stages(
    graph: Graph, blocks: Blocks, request: Request, profile: Profile, progress: Report | None,
    note: Callable[[Tried], None], than_ns: float | None = None, begun: Looks | None = None,
) -> Finalists:  # fmt: skip
    """What is found of one stage or several, in all settings. note: takes a row for each plan that is simulated.

    than_ns: what a plan takes that is known; what is estimated to be far slower is looked at no further. begun: with
    what was looked at already (`template_stages`), if that was.
    """
    with without_collector():
        looks = begun or template_stages(graph, blocks, request, profile)
        search = StagedSearch(looks.layered, than_ns, looks)
        with reporting(progress, len(search.shapes)) as report:
            found = search.run(report)
            is_too_large = bool(found) and all(candidate.peak_bytes > search.admitted for candidate in found)
            if is_too_large and not is_interrupted():
                # What all layers read, such as a mask, may be what does not fit when it is counted with each of them.
                search = StagedSearch(Layered(graph, blocks, request, profile, constants_once=True), than_ns)
                found = search.run(report)
            found += mixed(search.layered, found, search.clock)
        return Finalists(search, found, note)


def stages_near(graph: Graph, blocks: Blocks, request: Request, profile: Profile, outline: Outline) -> Finalists:
    """What is found of stages on alike submeshes in so many microbatches as an outline has."""
    with without_collector():
        search = StagedSearch(Layered(graph, blocks, request, profile))
        found = search.near(outline)
        found += mixed(search.layered, found, search.clock)
        return Finalists(search, found, lambda row: None)


__all__ = ["searched_stages", "stages_near", "template_stages"]
