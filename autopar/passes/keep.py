"""keep: plans on unequal devices that compute blocks again → the same with as few of them as each device's memory asks.

Which blocks are computed again is chosen for all devices at once where placements are solved (`balance`, `kinds`). Each
stage keeps what its own memory allows, its last blocks first: those of its ranks that have least decide. No solve, some
simulations: how many fit is found by halving, for all stages at the same time. On equal devices that is done where
stages and places are searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.driver import Candidate, Context, Front, of_plan, outline_of
from autopar.ir.graph import Graph, is_inside
from autopar.ir.plan import Plan
from autopar.planning import divided
from autopar.simulate import Timeline, predict, simulate
from autopar.zero import Modules, joined


def keep(front: Front, context: Context) -> Iterator[Candidate]:
    """The best plan of each open graph again, where it is faster so."""
    is_pinned = any(rule.recompute is not None for rule in context.request.constraints)
    if context.request.mesh.is_homogeneous or is_pinned:
        return
    for asked in front.in_turn(lambda outline: True):
        best = front.best_of(asked)
        plan = None if best is None or not best.plan.recompute else _keeping(best, context)
        if plan is not None:
            yield of_plan(asked, outline_of(plan), plan)


def _keeping(best: Candidate, context: Context) -> Plan | None:
    """The plan with fewer blocks computed again; None where no fewer fit, or that is no faster."""
    part = divided(best.graph, context.blocks(best.graph), best.plan.microbatches)
    groups = _groups_by_stage(best.plan, [path for paths in part.blocks.paths for path in paths])
    fewest, most = [0] * len(groups), [len(own) for own in groups]
    while fewest != most:
        tried = [(few + many) // 2 for few, many in zip(fewest, most, strict=True)]
        over = _stages_over(_played(part.graph, _with(best.plan, groups, tried), context), best.plan, context)
        fewest = [count + 1 if stage in over and count < many else few
                  for stage, (few, count, many) in enumerate(zip(fewest, tried, most, strict=True))]  # fmt: skip
        most = [many if stage in over else count for stage, (count, many) in enumerate(zip(tried, most, strict=True))]
    plan = _with(best.plan, groups, most)
    played = _played(part.graph, plan, context)
    if _stages_over(played, plan, context) or played.step_time_ns >= best.step_ns:
        return None
    told = predict(played)
    return part.with_traffic(replace(plan, predicted=told))


def _groups_by_stage(plan: Plan, paths: Sequence[str]) -> list[list[Modules]]:
    """Of each stage, what is computed again together: of each of its blocks, in the order in which they run."""
    again = {path: tuple(m for m in plan.recompute if is_inside(m, (path,))) for path in paths}
    found: list[list[Modules]] = []
    for stage in plan.stages:
        modules = dict.fromkeys(plan.scopes[name].split("|")[0] for name in stage.nodes)
        own = (path for path in paths if any(is_inside(module, (path,)) for module in modules))
        found.append([again[path] for path in own if again[path]])
    return found


def _with(plan: Plan, groups: Sequence[Sequence[Modules]], counts: Sequence[int]) -> Plan:
    """The plan that computes so many of each stage's groups again, the first of them."""
    left_out = {m for own, count in zip(groups, counts, strict=True) for m in joined(own[count:])}
    return replace(plan, recompute=tuple(module for module in plan.recompute if module not in left_out))


def _played(graph: Graph, plan: Plan, context: Context) -> Timeline:
    return simulate(graph, plan, context.profiles)


def _stages_over(played: Timeline, plan: Plan, context: Context) -> set[int]:
    """The stages of which some device would hold more than it can."""
    over = {lane.ranks.start for lane in played.lanes if lane.peak_bytes > context.limit_bytes(lane.ranks)}
    return {number for number, stage in enumerate(plan.stages) if over.intersection(stage.ranks)}
