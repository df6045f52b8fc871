"""template: templates of one stage that people run → those that fit, so that none of one line beats the answer.

Which of them may be faster, and are played, is decided in `autopar.families`. On many devices they come first: the
search for stages leaves out what is far slower than the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autopar.driver import Candidate, Context, Front, of_plan
from autopar.families import faster_templates
from autopar.ir.plan import Plan
from autopar.request import Request
from autopar.staged import template_stages
from autopar.tunables import FEW_DEVICES


def outset(front: Front, context: Context) -> Iterator[Candidate]:
    """The same before stages are looked for, where that takes long: they are bounded by the best template; and that by
    what templates of several stages take by estimate."""
    if front.round == 1 and _bounds_stages(context):
        given = front.given.graph
        begun = None
        if not context.keeps_one_stage(given):
            asked = context.asked_of(front.given)
            begun = front.kept["begun", front.given] = template_stages(
                given, context.blocks(given), asked, context.profile
            )  # fmt: skip
        known = (math.inf, {}) if begun is None else (begun.best_ns, begun.least_of_tp)
        yield from _faster(front, context, None, *known)


def template(front: Front, context: Context) -> Iterator[Candidate]:
    """Templates of the model's own graph that may be faster than its best plan, where constraints leave them open."""
    best = front.best_of(front.given) if front.round == 1 else None
    if best is not None and not _bounds_stages(context):
        yield from _faster(front, context, best.plan)


def _faster(
    front: Front, context: Context, plan: Plan | None, likely_ns: float = math.inf,
    least_of_tp: Mapping[int, int] | None = None,
) -> Iterator[Candidate]:  # fmt: skip
    if is_open(context.request):
        given = front.given.graph
        rows, found = faster_templates(
            given, plan, context.request, likely_ns=likely_ns, least_of_tp=least_of_tp
        )  # fmt: skip
        context.rows += rows
        yield from (of_plan(front.given, *one[1:]) for one in found)


def _bounds_stages(context: Context) -> bool:
    return context.looks_for_stages and context.request.mesh.num_devices > FEW_DEVICES


def is_open(request: Request) -> bool:
    """Whether constraints leave open what a template of one stage decides: its axes, stages, and recomputation."""
    rules, mesh = request.constraints, request.mesh
    is_open = all(rule.axis is None and rule.recompute is None and rule.stages in (None, 1) for rule in rules)
    return is_open and mesh.is_homogeneous and mesh.num_devices > 1
