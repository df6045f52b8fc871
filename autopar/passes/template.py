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
from autopar.passes.shared_experts import templates_with_experts
from autopar.request import Request
from autopar.staged import template_stages
from autopar.tunables import BESIDE_KNOWN, FEW_DEVICES


def outset(front: Front, context: Context) -> Iterator[Candidate]:
    """The same before stages are looked for, where that takes long: they are bounded by the best template; and that by
    what templates of several stages take by estimate. Where tokens are routed, first those that share the experts."""
    if front.round == 1 and bounds_stages(context):
        given, known_ns, least_of_tp = front.given.graph, math.inf, dict[int, int]()
        if not context.keeps_one_stage(given):
            asked, blocks = context.asked_of(front.given), context.blocks(given)
            begun = front.kept["begun", front.given] = template_stages(given, blocks, asked, context.profile)
            known_ns, least_of_tp = begun.best_ns, begun.least_of_tp
        for shared in templates_with_experts(front.given, context, None, known_ns) if is_open(context.request) else ():
            yield shared
            known_ns = min(known_ns, shared.step_ns / BESIDE_KNOWN)
        yield from _faster(front, context, None, known_ns, least_of_tp)


def template(front: Front, context: Context) -> Iterator[Candidate]:
    """Templates of the model's own graph that may be faster than its best plan, where constraints leave them open."""
    best = front.best_of(front.given) if front.round == 1 else None
    if best is not None and not bounds_stages(context):
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


def bounds_stages(context: Context) -> bool:
    """Whether templates of one stage come before those of several, which take long."""
    return context.looks_for_stages and context.request.mesh.num_devices > FEW_DEVICES


def is_open(request: Request) -> bool:
    """Whether constraints leave open what a template of one stage decides: its axes, stages, and recomputation."""
    rules, mesh = request.constraints, request.mesh
    is_open = all(rule.axis is None and rule.recompute is None and rule.stages in (None, 1) for rule in rules)
    return is_open and mesh.is_homogeneous and mesh.num_devices > 1
