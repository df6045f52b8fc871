"""Plans that people write by hand, of a traced model: constraints around which the rest is solved."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from autopar.async_tp import with_async_tp
from autopar.contexts import for_sequences
from autopar.cost.exchanges import placed_experts, priced_tables
from autopar.cost.profile import host_of
from autopar.cost.slices import PlacedSlices, sliced_tables
from autopar.errors import AutoparError, InfeasibleError
from autopar.expert_parallel import (
    ADAPTIVE,
    check_adaptive,
    check_alone,
    check_experts,
    check_replicas,
    check_slices,
    expert_axes,
)
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.offload import NOT_OFFLOADED
from autopar.ir.plan import Plan, Substitution
from autopar.microbatch import batch_types, check_plan, divided_graph
from autopar.odds import with_odds
from autopar.planning import Place, divided, fit_or_refuse_over
from autopar.profiler import profile_of, profiles_of
from autopar.refusal import check_host
from autopar.request import BUDGETS, Request, memory_limit_of
from autopar.rewrites import any_way, by_load, by_slices, in_chunks, with_replicas, with_slices
from autopar.shares import SharedBatch
from autopar.simulate import Overlap
from autopar.simulate.overlap import AS_EMITTED
from autopar.staging import checked_sizes, cut, even_sizes, stages_of_sizes
from autopar.step import simulated_again, with_simulator
from autopar.template import (
    FACTORS,
    check_context,
    check_gradients,
    check_hsdp,
    check_offload,
    positions,
    template_axes,
    template_constraints,
    template_copied_out,
    template_ranks,
    template_recompute,
)
from autopar.trace import find_blocks
from autopar.tunables import MOST_EXPLAINED
from autopar.unequal import UnequalStages


def template_of_graph(
    graph: Graph, mesh: Mesh, *, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1, schedule: str = "1f1b",
    chunks: int = 2, layers: Sequence[int] | None = None, sequence_parallel: bool = False, zero: int = 0,
    hsdp: int = 1, cp: int = 1, context: str = "gather", ep: int = 1, exchange: str = "flat", exchange_chunks: int = 1,
    recompute: str = "none", offload: str = "none", split: str = "equal", experts: str = "whole", replicas: int = 0,
    gradients: str = "sums", async_tp: bool = False, mode: str = "train",
    optimizer: str | None = "adamw", precision: str | None = None, memory_limit: int | None = None,
    constraints: Sequence[Constraint] = (), overlap: Overlap = AS_EMITTED,
) -> Plan:  # fmt: skip
    """`template_plan` of a traced model, under further constraints. overlap: what is sent beside computation, where
    another software than emitted programs runs the plan, on equal devices."""
    axes = template_axes(mesh, dp, tp, pp, hsdp, cp, ep, exchange)
    sharing = expert_axes(mesh, dp, tp, cp, ep, exchange).sharing
    check_hsdp(mesh, pp, hsdp)
    check_experts(graph, ep)
    check_alone(mesh, hsdp, ep)
    check_slices(experts, dp // ep)
    check_replicas(replicas, ep, exchange, experts)
    check_context(mesh, cp, context)
    check_gradients(gradients, pp, mesh.is_homogeneous)
    check_offload(offload, mode, mesh, optimizer)
    if offload != NOT_OFFLOADED:
        host_of(profile_of(mesh))
    graph, told = for_sequences(graph, ring=context == "ring") if cp > 1 else (graph, ())
    graph, in_parts = in_chunks(graph, exchange_chunks)
    graph, replicated = with_replicas(graph, replicas)
    told = (*told, *in_parts, *replicated)
    graph, in_slices = with_slices(graph, experts)
    told = (*told, *(in_slices if experts != ADAPTIVE else ()))
    given, is_adaptive = graph, exchange == ADAPTIVE and ep > 1
    if is_adaptive:
        check_adaptive(exchange_chunks)
        graph = any_way(graph)
    first_ranks = template_ranks(mesh, pp, chunks, schedule)
    part = divided(graph, find_blocks(graph), microbatches)
    paths = tuple(path for group in part.blocks.paths for path in group)
    by_speed = split != "equal" or not mesh.is_homogeneous
    sizes = None if layers is None else checked_sizes(graph, paths, layers, len(first_ranks))
    if pp > 1 and not by_speed:
        sizes = sizes or even_sizes(graph, paths, pp, len(first_ranks) // pp, profile_of(mesh), schedule)
        members = stages_of_sizes(graph, paths, sizes)
        part = replace(part, cut=lambda plan: cut(part.graph, plan, members, first_ranks, schedule), num_submeshes=pp)
    batch = {n: t for n, t in batch_types(part.graph).items() if part.blocks.representative_tensor(n) == n}
    sequence = positions(part.graph, part.blocks, cp)
    rules = template_constraints(
        part.graph,
        axes,
        zero,
        sequence_parallel,
        paths,
        batch,
        sequence,
        context,
        sharing,
        part.blocks,
        "" if experts == "whole" else "dp",
        gradients,
    )
    rules += constraints
    again = template_recompute(graph, paths, recompute)
    limit = memory_limit_of(memory_limit)
    copied = template_copied_out(graph, paths, offload)
    request = Request(
        mesh, mode, optimizer, limit, tuple(rules), BUDGETS["fast"], precision, again, offload=offload,
        copied_out=copied,
    )  # fmt: skip
    if by_speed:
        kinds = {group.profile: axes for group in mesh.groups}
        if pp == 1 and not mesh.is_homogeneous:
            return _checked(SharedBatch(part, axes, request, profiles_of(mesh)).plan(split), graph)
        stages = UnequalStages(part, kinds, len(first_ranks) // pp, schedule, paths, request, profiles_of(mesh))
        plan = stages.plan(split, sizes)
    else:
        plan = _fitted(Place(part, axes, request, profile_of(mesh), None, gradients == FACTORS, overlap))
    if is_adaptive or experts == ADAPTIVE:
        graph, plan = _by_load(given, plan, is_adaptive, experts == ADAPTIVE)
    if async_tp:
        graph, plan = with_async_tp(graph, plan)
    return _checked(replace(plan, substitutions=(*told, *plan.substitutions)), graph)


def _by_load(graph: Graph, plan: Plan, exchanged: bool, sliced: bool) -> tuple[Graph, Plan]:
    """A plan whose ranks exchange tokens, and its graph, where the load says how; and whose ranks have slices of
    experts, where it says what of these and of rows travels: by tables that are priced for its placements, the second
    where rows are exchanged by the first. Raises InfeasibleError where what that takes does not fit."""
    profiles, steps = profiles_of(plan.mesh), tuple[Substitution, ...]()
    if exchanged:
        part = divided_graph(graph, plan.microbatches)
        graph, steps = by_load(graph, priced_tables(placed_experts(part, plan, profiles)))
    if sliced:
        part = divided_graph(graph, plan.microbatches)
        graph, told = by_slices(graph, sliced_tables(placed_experts(part, plan, profiles, PlacedSlices)))
        steps += told
    found = simulated_again(replace(plan, fingerprint=graph.fingerprint, substitutions=steps), graph)
    if found.predicted.peak_bytes > found.memory_limit:
        fixed = ['exchange="flat"'] * exchanged + ['experts="tensor" or "data"'] * sliced
        remedy = " and ".join(fixed)
        raise InfeasibleError(
            f"expected at most {found.memory_limit:,} bytes a device, found {found.predicted.peak_bytes:,} with what "
            f"travels by load; use {remedy}",
            found.predicted.peak_bytes,
        )
    return graph, found


def _checked(plan: Plan, graph: Graph) -> Plan:
    """The plan, verified, with its odds and what `plan.timeline()` calls."""
    check_plan(graph, plan)
    check_host(plan)
    return with_simulator(with_odds(plan, graph), graph)


def _fitted(place: Place) -> Plan:
    """Its choices are held against all others; on three axes and more, of which there would be too many, against those
    alone that break as few soft constraints, unless nothing fits so."""
    if len(place.axes) > MOST_EXPLAINED:
        with contextlib.suppress(InfeasibleError):
            return place.part.with_traffic(replace(place, strictly=True).fit(place.request.budget.seconds))
    try:
        plan = place.fit(place.request.budget.seconds)
    except InfeasibleError:
        _, plan = fit_or_refuse_over([place])
    return place.part.with_traffic(plan)


def expert_plans(graph: Graph, request: Request) -> list[tuple[str, Plan]]:
    """Templates to begin with, too, as far as the model and constraints allow them: data parallel, whole and sharded,
    and beside tensor parallel inside a node."""
    devices, inner = request.mesh.num_devices, request.mesh.devices_per_node
    found = []
    choices: list[dict[str, int]] = [{"dp": devices}, {"dp": devices, "zero": 3}, {"dp": devices // inner, "tp": inner}]
    for choice in choices:
        with contextlib.suppress(AutoparError):
            plan = template_of_graph(
                graph, request.mesh, dp=choice["dp"], tp=choice.get("tp", 1), zero=choice.get("zero", 0),
                mode=request.mode, optimizer=request.optimizer, precision=request.precision,
                memory_limit=request.memory_limit, constraints=request.constraints,
            )  # fmt: skip
            found.append((f"template {', '.join(f'{key}={value}' for key, value in choice.items())}", plan))
    return found
