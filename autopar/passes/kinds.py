"""kinds: an open graph on unequal devices → plans in stages of one kind of device each, blocks shared out by speed.

What is searched, and how, is in `autopar.unequal`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopar.clock import Clock
from autopar.driver import Candidate, Context, Front, of_plan, outline_of
from autopar.ir.outline import Outline
from autopar.tunables import KINDS_SHARE, LEAST_SEARCH_S
from autopar.unequal import searched_kinds, unequal_in


def kinds(front: Front, context: Context) -> Iterator[Candidate]:
    """Plans of several stages, where devices are of several kinds. Raises InfeasibleError when none fits."""
    pinned = {rule.stages for rule in context.request.constraints} - {None}
    if context.request.mesh.is_homogeneous or pinned == {1}:
        return
    for asked in front.in_turn(lambda outline: outline is None or outline.num_submeshes > 1):
        if asked.outline is not None:
            yield from context.near(asked, partial(_near, asked, asked.outline, front, context))
            continue
        budget = context.asked_of(asked).budget
        share = KINDS_SHARE if budget.proposals else 1.0
        left = share * budget.seconds - front.spent_s.get(asked, 0.0)
        found = searched_kinds(
            asked.graph, context.blocks(asked.graph), context.request, context.profiles,
            Clock.of(max(LEAST_SEARCH_S, left)), context.noting(asked), context.progress,
        )  # fmt: skip
        yield from (of_plan(asked, outline_of(plan), plan, made) for plan, made in found)


def _near(asked: Candidate, outline: Outline, front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan of an equal graph, each kind's stages on the axes of an outline. Raises InfeasibleError where none
    fits."""
    blocks, request = context.blocks(asked.graph), context.nearby(front)
    plan, made = unequal_in(asked.graph, blocks, outline, request, context.profiles)
    yield of_plan(asked, outline_of(plan), plan, made)
