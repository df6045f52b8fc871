"""balance: an open graph on unequal devices → plans in which they share each batch, by speed within their memory.

All devices are one stage, on axes of which the first cuts samples: `autopar.shares`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopar.clock import Clock
from autopar.driver import Candidate, Context, Front, of_plan
from autopar.ir.outline import Outline
from autopar.shares import searched_shares, shared_in
from autopar.tunables import BALANCE_SHARE


def balance(front: Front, context: Context) -> Iterator[Candidate]:
    """Plans of one stage, where devices are of several kinds. Raises InfeasibleError when nothing fits, PlanError where
    the batch cannot be shared out."""
    pinned = {rule.stages for rule in context.request.constraints} - {None}
    if context.request.mesh.is_homogeneous or pinned - {1}:
        return
    for asked in front.in_turn(lambda outline: outline is None or outline.num_submeshes == 1):
        if asked.outline is not None:
            yield from context.near(asked, partial(_near, asked, asked.outline, front, context))
            continue
        share = 1.0 if pinned else BALANCE_SHARE
        request = context.asked_of(asked)
        clock = Clock.of(share * request.budget.seconds)
        found = searched_shares(
            asked.graph, context.blocks(asked.graph), request, context.profiles, clock, context.noting(asked),
            context.progress,
        )  # fmt: skip
        yield from (of_plan(asked, *one) for one in found)
        front.spent_s[asked] = clock.passed_s


def _near(asked: Candidate, outline: Outline, front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan of an equal graph on the axes of an outline. Raises InfeasibleError where none fits."""
    blocks, request = context.blocks(asked.graph), context.nearby(front)
    plan, made = shared_in(asked.graph, blocks, outline, request, context.profiles)
    yield of_plan(asked, outline, plan, made)
