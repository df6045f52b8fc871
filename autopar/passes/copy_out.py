"""copy_out: where activations may wait on the host, plans in which blocks' do, where they are faster or alone fit.

    of one stage     each place that was looked at, traded against memory by that              `places.copied`
    of several       the best plan, with the first blocks of each stage copied out instead of computed again

Nothing is tried that is not allowed by name (`allow=("offload",)`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autopar.clock import is_ending
from autopar.driver import REFINED, Candidate, Context, Front, of_plan, outline_of
from autopar.ir.mesh import logical_meshes
from autopar.ir.plan import Plan
from autopar.ir.recompute import is_operator_call
from autopar.ir.schedule import SCHEDULES
from autopar.ir.structure import block_paths
from autopar.places import CopiedPlace, copied_ladders
from autopar.planning import Place, divided, microbatch_counts
from autopar.simulate import Incremental, predict
from autopar.tunables import COPIED_COUNTS, COPIED_SHARE
from autopar.zero import copied_blocks, pinned_modules, recomputable


def copy_out(front: Front, context: Context) -> Iterator[Candidate]:
    """Of the model's own graph, once no other is open."""
    request = context.request
    is_asked = "offload" in request.allow and request.mode == "train" and request.mesh.is_homogeneous
    if not is_asked or front.opened or context.profile.beside is None:
        return
    best = front.best
    if best is not None and not _is_spared(best.plan):
        return
    paths = [path for paths in context.blocks(front.given.graph).paths for path in paths]
    if not copied_blocks(front.given.graph, paths):
        return
    if best is not None and len(best.plan.stages) > 1 and not best.plan.copied_out:
        yield from _staged(best, context)
    stages = {rule.stages for rule in request.constraints} - {None}
    if not stages or stages == {1}:
        yield from _places(front, context)


def _is_spared(plan: Plan) -> bool:
    """Whether a plan does anything that it may do for memory's sake."""
    stored = [storage for stage in plan.stages for storage in stage.storage.values()]
    return bool(plan.recompute) or plan.microbatches > 1 or any(one.regather or one.on_host for one in stored)


def _host_bytes(context: Context) -> int:
    shared = context.profile.shared_by(context.request.mesh.devices_per_node)
    return 0 if shared.beside is None else shared.beside.capacity_bytes


# One stage ----------------------------------------


def _places(front: Front, context: Context) -> Iterator[Candidate]:
    """Plans over logical meshes, in as few microbatches as have one, and up to as many as the best plan has."""
    request, graph = context.request, front.given.graph
    blocks = context.blocks(graph)
    paths = [path for paths in blocks.paths for path in paths]
    pinned = pinned_modules(recomputable(graph, paths), request.constraints)
    if pinned:  # blocks that are to be computed again are
        return
    than_ns = min((one.step_ns for one in front.found), default=math.inf)
    seconds = COPIED_SHARE * request.budget.seconds
    counts = [*microbatch_counts(graph, request)][:COPIED_COUNTS]
    ladders = copied_ladders(copied_blocks(graph, paths))
    ladders = ladders[:1] if pinned is not None else ladders
    for count in counts:
        part, before_ns = divided(graph, blocks, count), than_ns
        places = [Place(part, axes, request, context.profile) for axes in logical_meshes(request.mesh)]
        simulator = Incremental(part.graph, places[0].shared_profile)
        for there in places:
            if is_ending() and front.best is not None:
                return
            each = seconds / len(places)
            for plan in CopiedPlace(there, ladders, simulator, each, than_ns, host_bytes=_host_bytes(context)).plans():
                if plan.copied_out and plan.predicted.step_time_ns < than_ns:
                    than_ns = plan.predicted.step_time_ns
                    made = partial(part.with_traffic, plan)
                    yield replace(of_plan(front.given, there.outline, plan, made), rank=REFINED)
        if than_ns == before_ns < math.inf:
            break


# Several stages ----------------------------------------


def _staged(best: Candidate, context: Context) -> Iterator[Candidate]:
    """The best plan with blocks copied out, and fewer or none computed again."""
    plan = best.plan
    if SCHEDULES[plan.schedule].splits_backward or any(stage.forks for stage in plan.stages):
        return
    part = divided(best.graph, context.blocks(best.graph), plan.microbatches)
    groups = _blocks_by_stage(plan, block_paths(best.graph))
    shared, host = context.profile.shared_by(context.request.mesh.devices_per_node), _host_bytes(context)
    simulator = Incremental(part.graph, shared)

    def played(count: int) -> Plan:
        copied = tuple(path for own in groups for path in own[:count])
        inside = tuple(f"{path}." for path in copied)
        again = tuple(
            name for name in plan.recompute
            if not is_operator_call(name) and name not in copied and not name.startswith(inside)
        )  # fmt: skip
        tried = replace(plan, copied_out=copied, recompute=again)
        return replace(tried, predicted=predict(simulator.timeline(tried)))

    found = [played(count) for count in range(1, max(map(len, groups), default=0) + 1)]
    fitting = [
        one for one in found
        if one.predicted.peak_bytes <= one.memory_limit and (one.predicted.host_bytes or 0) <= host
        and one.predicted.step_time_ns < best.step_ns
    ]  # fmt: skip
    if fitting:
        fastest = min(fitting, key=lambda one: one.predicted.step_time_ns)
        made = partial(part.with_traffic, fastest)
        yield replace(of_plan(best.asked or best, outline_of(fastest), fastest, made), rank=REFINED)


def _blocks_by_stage(plan: Plan, blocks: set[str]) -> list[list[str]]:
    """Of each stage, its repeated blocks that may be copied out, in the order in which they run; of the last one, not
    the last, which is needed again at once."""
    wanted = {path for paths in plan.blocks for path in paths} & blocks
    found = []
    for stage in plan.stages:
        own = dict.fromkeys(
            path for name in stage.nodes for path in _around(plan.scopes[name].split("|")[0]) if path in wanted
        )
        found.append([*own])
    found[-1:] = [found[-1][:-1]]
    return found


def _around(module: str) -> list[str]:
    """A module and those around it, outermost first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
