"""The ordered pass list: trace → intra-op ILP with ZeRO storage → simulate → emit, the verifier between passes.

Each candidate (one for each logical shape of the mesh) is scored by the one simulator; the fastest that fits wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.cost import Profile, load_profile
from autopar.emit import emit
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.intraop import plan_placements
from autopar.ir import verifier
from autopar.ir.constraint import Constraint
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh, Mesh, logical_meshes
from autopar.ir.plan import Plan
from autopar.ops import admits, coverage
from autopar.program import PlannedProgram, model_state
from autopar.simulate import predict, simulate, traffic
from autopar.template import template_axes, template_constraints
from autopar.trace import Blocks, find_blocks, trace
from autopar.zero import storage_options

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SearchBudget:
    """How long the search may take, in seconds over all logical meshes, and its seed."""

    seconds: float = 30.0
    seed: int = 0


_BUDGETS = {"fast": SearchBudget(10.0), "default": SearchBudget(30.0), "thorough": SearchBudget(300.0)}


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    example_inputs: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    mode: str = "train",
    optimizer: str | None = "adamw",
    precision: str | None = None,
    memory_limit: int | None = None,
    constraints: Sequence[Constraint] = (),
    plan: Plan | None = None,
    search: str | SearchBudget = "default",
    progress: Progress | None = None,
) -> PlannedProgram:
    """Turns a single-device model into the fastest sharded program for a mesh that the search finds.

    example_inputs: one global batch (real or meta tensors). memory_limit: bytes a device. plan: a saved plan, used
    after validation instead of a search. Raises AutoparError subclasses; InfeasibleError when nothing fits.
    """
    graph = _trace(model, example_inputs, loss_fn, mode)
    _check_precision(precision)
    if plan is None:
        plan = _search(
            graph,
            _Request(mesh, mode, optimizer, memory_limit, tuple(constraints), _budget(search)),
            progress,
        )
    elif str(plan.mesh) != str(mesh):
        raise PlanError(f"expected a plan for {mesh}, found one for {plan.mesh}; plan again for this mesh")
    verifier.verify(graph, plan, admits)
    return PlannedProgram(graph, plan, emit(graph, plan), model_state(model))


def template_plan(
    model: nn.Module, mesh: Mesh, example_inputs: Any, *, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1,
    schedule: str = "1f1b", sequence_parallel: bool = False, zero: int = 0, recompute: str = "none",
    loss_fn: Callable[..., Any] | None = None, mode: str = "train", optimizer: str | None = "adamw",
    memory_limit: int | None = None,
) -> Plan:  # fmt: skip
    """The plan that people write by hand for dp × tp devices, as constraints around which the rest is solved.

    Raises PlanError for what is not available yet: pp > 1, microbatches > 1, recompute other than "none".
    """
    for name, value, plain in (("microbatches", microbatches, 1), ("recompute", recompute, "none")):
        if value != plain:
            raise PlanError(f"expected {name}={plain!r}, found {value!r}: it is not available yet")
    axes = template_axes(mesh, dp, tp, pp)
    graph = _trace(model, example_inputs, loss_fn, mode)
    blocks = find_blocks(graph)
    paths = tuple(path for group in blocks.paths for path in group)
    rules = template_constraints(axes, zero, sequence_parallel, paths)
    request = _Request(mesh, mode, optimizer, memory_limit, tuple(rules), _BUDGETS["fast"])
    plan = _plan_on(graph, blocks, axes, request, load_profile(mesh.profile))
    verifier.verify(graph, plan, admits)
    return plan


def verify(plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None) -> None:
    """Type-checks a plan against a model. Raises PlanError or PlacementError with node and source line."""
    verifier.verify(_trace(model, example_inputs, loss_fn, plan.mode), plan, admits)


@dataclass(frozen=True)
class _Request:
    mesh: Mesh
    mode: str
    optimizer: str | None
    memory_limit: int | None
    constraints: tuple[Constraint, ...]
    budget: SearchBudget


def _trace(model: nn.Module, example_inputs: Any, loss_fn: Any, mode: str) -> Graph:
    if mode not in ("train", "inference"):
        raise PlanError(f'expected mode="train" or "inference", found {mode!r}')
    if example_inputs is None:
        raise PlanError("expected example_inputs (one global batch; meta tensors will do), found None")
    return trace(model, example_inputs, loss_fn=loss_fn, mode=mode)


def _check_precision(precision: str | None) -> None:
    if precision is not None:
        raise PlanError(f"expected precision=None, found {precision!r}: mixed precision is not available yet")


def _budget(search: str | SearchBudget) -> SearchBudget:
    if isinstance(search, SearchBudget):
        return search
    if search not in _BUDGETS:
        raise PlanError(f"expected search as one of {', '.join(_BUDGETS)} or a SearchBudget, found {search!r}")
    return _BUDGETS[search]


def _search(graph: Graph, request: _Request, progress: Progress | None) -> Plan:
    """One candidate for each logical mesh; the simulator picks."""
    profile, blocks = load_profile(request.mesh.profile), find_blocks(graph)
    candidates: list[Plan] = []
    refusals: list[InfeasibleError] = []
    tried: list[dict[str, Any]] = []
    for axes in logical_meshes(request.mesh):
        shape = "x".join(str(axis.size) for axis in axes) or "1"
        started = time.monotonic()
        try:
            candidate = _plan_on(graph, blocks, axes, request, profile)
        except InfeasibleError as error:
            refusals.append(error)
            tried.append({"mesh": shape, "infeasible": str(error).split(";")[0]})
            continue
        candidates.append(candidate)
        row = {
            "mesh": shape,
            "step_time_ns": candidate.predicted.step_time_ns,
            "peak_bytes": candidate.predicted.peak_bytes,
            "seconds": round(time.monotonic() - started, 3),
        }
        tried.append(row)
        if progress is not None:
            progress(f"mesh {shape}: {candidate.predicted.step_time_ns / 1e6:.3f} ms in {row['seconds']} s")
    if not candidates:
        raise refusals[0] if refusals else AutoparError("expected at least one logical mesh, found none")
    best = min(candidates, key=lambda plan: plan.predicted.step_time_ns)
    return replace(best, search=replace(best.search, tried=tuple(tried)))


def _plan_on(graph: Graph, blocks: Blocks, axes: LogicalMesh, request: _Request, profile: Profile) -> Plan:
    """The best plan on one logical mesh; solved again under a tighter limit when the simulated peak does not fit."""
    mesh = request.mesh
    profile = profile.shared_by(mesh.devices_per_node)
    limit = request.memory_limit or profile.usable_bytes
    draft = Plan(
        fingerprint=graph.fingerprint,
        model=graph.model_name,
        mesh=mesh,
        axes=axes,
        inputs={},
        storage={},
        nodes={},
        redistributes=(),
        mode=request.mode,
        optimizer=request.optimizer or "none",
        memory_limit=limit,
        coverage=coverage(graph),
        parameters={s.tensor: s.name for s in graph.stored},
        scopes={node.name: f"{node.scope.module}|{node.op}|{node.source}" for node in graph.nodes},
        blocks=blocks.paths,
    )
    asked, smallest = limit, None
    for _ in range(4):
        try:
            plan = plan_placements(
                graph, blocks, replace(draft, memory_limit=asked), profile, storage_options, request.constraints,
                request.budget.seconds, request.budget.seed,
            )  # fmt: skip
        except InfeasibleError as error:
            raise _does_not_fit(error, limit, smallest) from error
        plan = replace(plan, memory_limit=limit)
        plan = replace(plan, predicted=predict(simulate(graph, plan, profile)))
        plan = replace(plan, predicted=replace(plan.predicted, comm_bytes=traffic(graph, plan)))
        peak = plan.predicted.peak_bytes
        if peak <= limit:
            return plan
        smallest = min(smallest, peak, key=int) if smallest is not None else peak
        asked = min(int(asked * 0.7), asked - (peak - limit))
        if asked <= 0:
            break
    raise _does_not_fit(None, limit, smallest)


def _does_not_fit(error: InfeasibleError | None, limit: int, smallest: int | None) -> InfeasibleError:
    if error is not None and smallest is None:
        return error
    return InfeasibleError(
        f"expected a plan within {limit:,} bytes a device; the smallest peak found needs {smallest:,} bytes. "
        "Raise memory_limit, use more devices, or a smaller batch."
    )
