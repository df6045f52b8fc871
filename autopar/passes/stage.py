"""stage: an open graph → plans of one stage or several on equal submeshes, the best simulated (Alpa §5).

Placements of one microbatch are solved for each kind of submesh on a short graph, layers are shared out over stages by
dynamic programming, and the best few are simulated as plans of the whole model (`autopar.staged`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopar.clock import Clock
from autopar.driver import Candidate, Context, Front
from autopar.ir.outline import Outline
from autopar.staged import searched_stages, stages_near
from autopar.staged.finalists import Finalists


def stage(front: Front, context: Context) -> Iterator[Candidate]:
    """Plans of stages, where devices are alike; for a graph whose outline is given, in that one."""
    if not context.request.mesh.is_homogeneous:
        return
    looks = context.looks_for_stages
    for asked in front.in_turn(lambda outline: looks if outline is None else outline.num_submeshes > 1):
        if asked.outline is not None:
            yield from context.near(asked, partial(_near, asked, asked.outline, context))
        elif not context.keeps_one_stage(asked.graph):
            clock, known = Clock.of(0.0), front.best_of(asked)
            finalists = searched_stages(
                asked.graph, context.blocks(asked.graph), context.asked_of(asked), context.profile, context.progress,
                context.noting(asked), None if known is None else known.step_ns, front.kept.get(("begun", asked)),
            )  # fmt: skip
            front.kept["stage", asked] = finalists
            yield from _candidates(asked, finalists)
            front.spent_s[asked] = clock.passed_s


def _near(asked: Candidate, outline: Outline, context: Context) -> Iterator[Candidate]:
    """Plans of an equal graph in an outline."""
    blocks, request = context.blocks(asked.graph), context.asked_of(asked)
    yield from _candidates(asked, stages_near(asked.graph, blocks, request, context.profile, outline))


def _candidates(asked: Candidate, finalists: Finalists) -> Iterator[Candidate]:
    for found, played in finalists.plans:
        ways = partial(finalists.placed, found, played), partial(finalists.told, played)
        yield asked.planned(found.outline, played.step_time_ns, played.peak_bytes, *ways)
