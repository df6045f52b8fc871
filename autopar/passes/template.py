"""template: templates of one stage that people run → those that fit, so that none of one line beats the answer.

Which of them may be faster, and are played, is decided in `autopar.families`. On many devices they come first: the
search for stages leaves out what is far slower than the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.driver import Candidate, Context, Front, of_plan
from autopar.families import faster_templates
from autopar.ir.plan import Plan
from autopar.request import Request
from autopar.rewrites import for_sequences
from autopar.staged import template_stages
from autopar.substitute import GraphCandidate
from autopar.template import longest_sequence
from autopar.tunables import FEW_DEVICES, LONG_SEQUENCE


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
        yield from _faster(front, context, None, math.inf if begun is None else begun.best_ns)


def template(front: Front, context: Context) -> Iterator[Candidate]:
    """Templates of the model's own graph that may be faster than its best plan, where constraints leave them open."""
    best = front.best_of(front.given) if front.round == 1 else None
    if best is not None and not _bounds_stages(context):
        yield from _faster(front, context, best.plan)


def contexts(front: Front, context: Context) -> Iterator[Candidate]:
    """Templates whose sequences are split, where they are long, of the graph that says where they may be."""
    pinned = sorted({rule.context for rule in context.request.constraints if rule.context is not None})
    given = front.given.graph
    if front.round > 1 or not is_open(context.request) or not (pinned or longest_sequence(given) >= LONG_SEQUENCE):
        return
    best = front.best_of(front.given)
    plan = None if best is None else best.plan
    looks: list[tuple[str, ...]] = [(way,) for way in pinned] or [("gather", "heads"), ("ring",)]
    for ways in looks:
        graph, steps = (given, ()) if pinned else for_sequences(given, ring="ring" in ways)
        asked = Candidate(GraphCandidate(graph, steps, 0))
        rows, found = faster_templates(graph, plan, context.request, ways)
        context.rows += rows
        for one in found:
            plan = one[1] if plan is None or one[1].predicted.step_time_ns < plan.predicted.step_time_ns else plan
            yield of_plan(asked, *one)


def _faster(front: Front, context: Context, plan: Plan | None, likely_ns: float = math.inf) -> Iterator[Candidate]:
    if is_open(context.request):
        rows, found = faster_templates(front.given.graph, plan, context.request, likely_ns=likely_ns)
        context.rows += rows
        yield from (of_plan(front.given, *one) for one in found)


def _bounds_stages(context: Context) -> bool:
    return context.looks_for_stages and context.request.mesh.num_devices > FEW_DEVICES


def is_open(request: Request) -> bool:
    """Whether constraints leave open what a template of one stage decides: its axes, stages, and recomputation."""
    rules, mesh = request.constraints, request.mesh
    is_open = all(rule.axis is None and rule.recompute is None and rule.stages in (None, 1) for rule in rules)
    return is_open and mesh.is_homogeneous and mesh.num_devices > 1
