"""in_bits: where memory binds, plans whose operators keep bits for their backward pass, where they are faster or alone
fit.

    of one stage     each place that was looked at, traded against memory by that              `places.in_bits`
    any              the best plan, with bits instead of as many blocks that are computed again

Gradients are equal bit for bit, so nobody has to allow it; plans that nothing is done to for memory's sake are left
alone. Where inexact gradients are allowed by name (`allow=("compression",)`), more operators may keep 8 bits of each
activation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from autopar.clock import is_ending
from autopar.cost.eight_bits import COMPRESSION
from autopar.driver import REFINED, Candidate, Context, Front, of_plan, outline_of
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh, logical_meshes
from autopar.ir.plan import Plan
from autopar.ir.recompute import is_operator_call, module_of_call
from autopar.places import CompactPlace, compact_ladders
from autopar.planning import DividedGraph, Place, divided, microbatch_counts
from autopar.simulate import Incremental, predict
from autopar.tunables import FEW_DEVICES, IN_BITS_COUNTS, IN_BITS_SHARE, MESHES_IN_BITS
from autopar.zero import (
    KeptIn,
    joined,
    pinned_modules,
    recomputable,
    rungs_in_bits,
    rungs_in_eight_bits,
    that_run,
    with_in_bits,
)


def in_bits(front: Front, context: Context) -> Iterator[Candidate]:
    """Of the model's own graph, once no other is open; and of the best plan's."""
    request, best = context.request, front.best
    if front.opened or request.mode != "train" or not request.mesh.is_homogeneous:
        return
    if best is not None and not _binds(best.plan):
        return
    if best is not None and best.plan.recompute:
        yield from _kept_instead(best, context)
    stages = {rule.stages for rule in request.constraints} - {None}
    if not stages or stages == {1}:
        yield from _places(front, context)


def _binds(plan: Plan) -> bool:
    """Whether a plan does anything for memory's sake alone."""
    stored = [storage for stage in plan.stages for storage in stage.storage.values()]
    in_parts = len(plan.stages) == 1 and plan.microbatches > 1
    return bool(plan.recompute) or in_parts or any(one.regather or one.on_host for one in stored)


# One stage ----------------------------------------


def _places(front: Front, context: Context) -> Iterator[Candidate]:
    """Plans over logical meshes, in few microbatches, and in more as long as that gets better."""
    request, graph, device = context.request, front.given.graph, context.profile.device_type
    if len(_every_rung(graph, context)) == 1:
        return
    blocks = context.blocks(graph)
    options = recomputable(graph, [path for paths in blocks.paths for path in paths])
    pinned = pinned_modules(options, request.constraints)
    again = joined(options.full) if pinned is None else ()
    than_ns = min((one.step_ns for one in front.found), default=math.inf)
    meshes = _meshes(front, context)
    for count in [*microbatch_counts(graph, request)][:IN_BITS_COUNTS] if meshes else ():
        part, before_ns = divided(graph, blocks, count), than_ns
        exact = [KeptIn(names) for names in rungs_in_bits(part.graph, device)]
        ladders = compact_ladders(exact, _every_rung(part.graph, context), again, pinned or ())
        places = [Place(part, axes, request, context.profile) for axes in meshes]
        simulator = Incremental(part.graph, places[0].shared_profile)
        for there in places:
            if is_ending() and front.best is not None:
                return
            if not there.may_be_faster(than_ns):
                continue
            seconds = IN_BITS_SHARE * request.budget.seconds / len(places)
            beside = than_ns < math.inf
            for plan in CompactPlace(there, ladders, simulator, seconds, than_ns, is_beside=beside).plans():
                if plan.predicted.step_time_ns < than_ns:
                    than_ns = plan.predicted.step_time_ns
                    made = partial(part.with_traffic, plan)
                    yield replace(of_plan(front.given, there.outline, plan, made), rank=REFINED)
        if than_ns == before_ns < math.inf and count > 1:
            break


def _every_rung(graph: Graph, context: Context) -> Sequence[KeptIn]:
    """Exact ones, and inexact ones where these are allowed."""
    device = context.profile.device_type
    if COMPRESSION in context.request.allow:
        return rungs_in_eight_bits(graph, device)
    return [KeptIn(names) for names in rungs_in_bits(graph, device)]


def _meshes(front: Front, context: Context) -> list[LogicalMesh]:
    """Those of the fastest plans of one stage; all where there is none, but where stages took its place: on many
    devices (`passes.place`)."""
    ordered = sorted(front.found, key=lambda one: one.step_ns)
    known = [one.outline.axes for one in ordered if one.outline is not None and one.outline.num_submeshes == 1]
    mesh = context.request.mesh
    in_stages = front.best is not None and context.looks_for_stages and mesh.num_devices > FEW_DEVICES
    return [*dict.fromkeys(known)][:MESHES_IN_BITS] or ([] if in_stages else logical_meshes(mesh))


# The best plan ----------------------------------------


def _kept_instead(best: Candidate, context: Context) -> Iterator[Candidate]:
    """The best plan with operators in bits, and as few blocks computed again as fit then: found by halving; where that
    is allowed, with operators in 8 bits, too."""
    part = divided(best.graph, context.blocks(best.graph), best.plan.microbatches)
    exact, every = KeptIn(rungs_in_bits(part.graph, context.profile.device_type)[-1]), _every_rung(part.graph, context)
    for kept in dict.fromkeys((exact, every[-1])):
        if kept != KeptIn():
            yield from _with_kept(best, part, kept, context)


def _with_kept(best: Candidate, part: DividedGraph, kept: KeptIn, context: Context) -> Iterator[Candidate]:
    shared = context.profile.shared_by(context.request.mesh.devices_per_node)
    simulator, groups = Incremental(part.graph, shared), _blocks_again(best.plan)

    def with_so_many(count: int) -> Plan:
        again = tuple(name for group in groups[:count] for name in group)
        own = {name.removesuffix("()").rpartition(".")[2] for name in again if is_operator_call(name)}
        tried = replace(best.plan, recompute=again, allow=context.request.allow)
        bits, eight = ([name for name in names if name not in own] for names in kept)
        return with_in_bits(tried, bits, that_run(part.graph, tried, eight))

    few, many, found, found_ns = 0, len(groups), None, 0
    while few <= many:
        middle = (few + many) // 2
        tried = with_so_many(middle)
        if not simulator.excess_bytes(tried, tried.memory_limit):
            found, found_ns, many = tried, simulator.step_time_ns(tried), middle - 1
        else:
            few = middle + 1
    if found is not None and found_ns < best.step_ns:
        found = replace(found, predicted=predict(simulator.timeline(found)))
        made = partial(part.with_traffic, found)
        yield replace(of_plan(best.asked or best, outline_of(found), found, made), rank=REFINED)


def _blocks_again(plan: Plan) -> list[list[str]]:
    """What is computed again, by block; the blocks of all stages in turn, so that each stage keeps its last ones."""
    repeated, groups = {path for paths in plan.blocks for path in paths}, dict[str, list[str]]()
    for name in plan.recompute:
        module = module_of_call(name) if is_operator_call(name) else name
        parts = module.split(".")
        around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        groups.setdefault(next((path for path in around if path in repeated), module), []).append(name)
    places = {path: (own.index(path), stage) for stage, own in enumerate(_by_stage(plan, [*groups])) for path in own}
    return [groups[path] for path in sorted(groups, key=lambda path: places.get(path, (0, 0)))]


def _by_stage(plan: Plan, paths: list[str]) -> list[list[str]]:
    modules = [{plan.scopes[name].split("|")[0] for name in stage.nodes} for stage in plan.stages]
    return [[path for path in paths if any(f"{name}.".startswith(f"{path}.") for name in own)] for own in modules]
