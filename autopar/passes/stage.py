"""stage: an open graph → plans of one stage or several on equal submeshes, the best simulated (Alpa §5).

Placements of one microbatch are solved for each kind of submesh on a short graph, layers are shared out over stages by
dynamic programming, and the best few are simulated as plans of the whole model (`autopar.staged`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopar.clock import Clock
from autopar.cost import Profile
from autopar.driver import Candidate, Context, Front
from autopar.ir.graph import Graph
from autopar.ir.outline import Outline
from autopar.request import Request
from autopar.staged import searched_stages, stages_near
from autopar.staged.finalists import Finalists
from autopar.trace import Blocks


def stage(front: Front, context: Context) -> Iterator[Candidate]:
    """Plans of stages, where devices are alike; for a graph whose outline is given, in that one."""
    if not context.request.mesh.is_homogeneous:
        return
    looks = context.looks_for_stages
    for asked in front.in_turn(lambda outline: looks if outline is None else outline.num_submeshes > 1):
        if asked.outline is not None:
            yield from context.near(asked, partial(_near, asked, asked.outline, context))
        elif not context.keeps_one_stage(asked.graph):
            clock = Clock.of(0.0)
            finalists = searched_stages(*_given(asked, context), context.progress, context.noting(asked))
            front.kept["stage", asked] = finalists
            yield from _candidates(asked, finalists)
            front.spent_s[asked] = clock.passed_s


def _given(asked: Candidate, context: Context) -> tuple[Graph, Blocks, Request, Profile]:
    return asked.graph, context.blocks(asked.graph), context.asked_of(asked), context.profile


def _near(asked: Candidate, outline: Outline, context: Context) -> Iterator[Candidate]:
    """Plans of an equal graph in an outline."""
    yield from _candidates(asked, stages_near(*_given(asked, context), outline))


def _candidates(asked: Candidate, finalists: Finalists) -> Iterator[Candidate]:
    for found, played in finalists.plans:
        made = partial(finalists.stated, found, played)
        yield asked.planned(found.outline, played.step_time_ns, played.peak_bytes, made)
