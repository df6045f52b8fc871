"""`autopar.ladder`: one trace a global batch, one set of priced layers a kind of device, a plan a rung."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autopar.arguments import check_arguments
from autopar.clock import interrupts_caught
from autopar.collector import without_collector
from autopar.contexts import with_contexts
from autopar.cost.memory import optimizer_of, optimizer_state_bytes
from autopar.driver import Context
from autopar.errors import InfeasibleError, MeshError, PlacementError, PlanError
from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh, checked
from autopar.ir.plan import Plan, Substitution
from autopar.ir.routing import Routing
from autopar.ir.structure import batch_inputs
from autopar.ladders.capacity import Needs, capacity
from autopar.ladders.climbing import Climb
from autopar.ladders.layouts import layout_of
from autopar.ladders.rungs import Ladder, Rung
from autopar.ladders.shared import SharedLayers, shared_layers
from autopar.pipeline import planned_jointly, traced
from autopar.profiler import load_profile
from autopar.progress import Report, reporting
from autopar.request import BUDGETS, Request, SearchBudget, budget_of, memory_limit_of
from autopar.rewrites import under_routing, with_causal_attention
from autopar.staging import node_times_ns
from autopar.step import with_simulator
from autopar.template import longest_sequence
from autopar.trace import find_blocks
from autopar.tunables import LONG_SEQUENCE


@faults_told()
@without_collector()
def ladder(
    model: nn.Module,
    example_inputs: Any,
    meshes: Iterable[Mesh | str],
    *,
    global_batches: Iterable[int] | None = None,
    prices: Mapping[str, float] | None = None,
    deadline: float | None = None,
    budget: float | None = None,
    tokens: float | None = None,
    tokens_per_sample: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: str | None = "adamw",
    precision: str | None = None,
    memory_limit: int | None = None,
    routing: Routing | None = None,
    search: str | SearchBudget | None = None,
    progress: Report | None = None,
    check: bool = True,
) -> Ladder:
    """Plans of one model for many meshes and global batches: a scaling curve for schedulers, and what to buy.

    meshes: such as "h100:8x8", of any kinds and sizes. global_batches: in samples, of each mesh; by default that of
    example_inputs (which may be meta tensors). prices: money of a device hour, by the name of the devices' profile.
    tokens: how many are to be trained on; with deadline (hours), budget (money) or both, `Ladder.capacity` names the
    cheapest rung that does it, or the fastest, with a proof, or what lacks. tokens_per_sample: by default the length
    of the first input, where it has one. search: None has all rungs share one set of priced layers, and looks among
    templates of any number of stages; the name of a search, or a SearchBudget, searches each rung by itself, as
    `parallelize` does. So are rungs searched of which templates are no good: unequal devices, ranks that share cores,
    models without repeated blocks, and long sequences. Everything else is as for `parallelize`.

    A rung on which nothing fits says so. Raises AutoparError for arguments that are none.
    """
    check_arguments(model=model, loss_fn=loss_fn, optimizer=optimizer, precision=precision, progress=progress,
                    routing=routing)  # fmt: skip
    if tokens is None and (deadline is not None or budget is not None):
        raise PlanError("expected tokens beside a deadline or a budget, how many are to be trained on, found none")
    needs = None if tokens is None else Needs(tokens, deadline, budget)
    optimizer_of(optimizer)
    began, own = time.process_time(), None if search is None else budget_of(search)
    wanted = sorted_meshes(meshes)
    traced_batches = _Traces(model, example_inputs, loss_fn, precision, optimizer, routing, check)
    batches = _checked_batches(global_batches, traced_batches.example_batch)
    length = tokens_per_sample or traced_batches.length
    limit = memory_limit_of(memory_limit)
    rungs = list[Rung]()
    with interrupts_caught(), reporting(progress, len(wanted) * len(batches)) as report:
        planner = _Planner(traced_batches, optimizer, limit, precision, own)
        for mesh in wanted:
            for batch in reversed(batches):  # placements of many microbatches suit fewer, too
                rung = planner.rung(mesh, batch, prices or {}, length)
                rungs.append(rung)
                report(_line(rung))
    rungs.sort(key=lambda rung: (rung.kind, rung.global_batch, rung.devices))
    found = Ladder(traced_batches.name, tuple(rungs), processor_s=round(time.process_time() - began, 3))
    return found if needs is None else replace(found, capacity=capacity(found, needs))


def sorted_meshes(meshes: Iterable[Mesh | str]) -> list[Mesh]:
    """Each once; of each kind one in the middle first, whose layers are home to what the others ask for. Raises
    MeshError, or PlanError where there is none."""
    if isinstance(meshes, (str, Mesh)):
        meshes = [meshes]
    found = list(dict.fromkeys(checked(Mesh.parse(one) if isinstance(one, str) else one) for one in meshes))
    if not found:
        raise PlanError("expected at least one mesh, such as h100:8x8, found none")
    if served := next((mesh for mesh in found if mesh.servers is not None), None):
        raise MeshError(f"expected meshes without servers, which rungs do not plan for, found {served}; leave them out")
    by_kind: dict[Any, list[Mesh]] = {}
    for mesh in sorted(found, key=lambda mesh: mesh.num_devices):
        by_kind.setdefault(tuple((g.profile, g.devices_per_node) for g in mesh.groups), []).append(mesh)
    return [mesh for own in by_kind.values() for mesh in _from_the_middle(own)]


def _from_the_middle(meshes: Sequence[Mesh]) -> list[Mesh]:
    middle = len(meshes) // 2
    return sorted(meshes, key=lambda mesh: abs(meshes.index(mesh) - middle))


def _checked_batches(global_batches: Iterable[int] | None, own: int) -> list[int]:
    found = [own] if global_batches is None else sorted(set(global_batches))
    if not found or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in found):
        raise PlanError(f"expected global_batches as numbers of samples from 1 up, found {global_batches!r}")
    return found


def _line(rung: Rung) -> str:
    what = f"{rung.step_ns / 1e6:.3f} ms a step" if rung.fits else rung.refusal
    return f"{rung.mesh}, batch {rung.global_batch}: {what}"


class _Traces:
    """A model's graphs, one for each global batch, as `parallelize` would plan them."""

    def __init__(
        self, model: nn.Module, example_inputs: Any, loss_fn: Any, precision: str | None, optimizer: str | None,
        routing: Routing | None, check: bool,
    ) -> None:  # fmt: skip
        self._given, self._inputs, self._precision = (model, loss_fn), example_inputs, precision
        self._optimizer, self.routing = optimizer, routing
        graph, self.against_eager = traced(model, example_inputs, loss_fn, precision, check)
        self.name, names = graph.model_name, batch_inputs(graph)
        if not names:
            raise PlanError("expected inputs with a batch in dim 0, found none; a ladder is of batches")
        shape = graph.tensors[names[0]].shape
        self.example_batch, self.length = shape[0], shape[1] if len(shape) > 1 else None
        self._known = {self.example_batch: self._planned(graph)}

    def of(self, batch: int) -> tuple[Graph, tuple[Substitution, ...]]:
        """The graph, and the substitutions that make it of the traced one. Raises TraceError."""
        if batch not in self._known:
            model, loss_fn = self._given
            graph, _ = traced(model, self._of_batch(batch), loss_fn, self._precision, check=False)
            self._known[batch] = self._planned(graph)
        return self._known[batch]

    def _of_batch(self, batch: int) -> Any:
        """Inputs of so many samples, without values: what has as many rows as the example has others."""

        def resized(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != self.example_batch:
                return value
            return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta")

        return tree_map(resized, self._inputs)

    def _planned(self, graph: Graph) -> tuple[Graph, tuple[Substitution, ...]]:
        graph, steps = under_routing(graph, self.routing, self._optimizer)
        graph, causal = with_causal_attention(graph, ())
        graph, told, _ = with_contexts(graph, ())
        return graph, (*steps, *causal, *told)


@dataclass(eq=False)
class _Planner:
    """Plans rungs, and keeps what they share: by kind of device and number of devices in a node."""

    traces: _Traces
    optimizer: str | None
    limit: int | None
    precision: str | None
    budget: SearchBudget | None
    _shared: dict[tuple[str, int, int], SharedLayers] = field(default_factory=dict)
    _climbs: dict[tuple[str, int], Climb] = field(default_factory=dict)
    _whole_ns: dict[tuple[str, str], int] = field(default_factory=dict)  # of a graph on one device of a kind

    def rung(self, mesh: Mesh, batch: int, prices: Mapping[str, float], length: int | None) -> Rung:
        """The rung, with a plan or with why it has none."""
        rung = Rung(mesh, batch, tokens_per_sample=length, price=_price(mesh, prices))
        try:
            graph, steps = self.traces.of(batch)
            graph, plan, how = self._plan(graph, mesh, batch)
        except (InfeasibleError, MeshError, PlacementError, PlanError) as error:
            return replace(rung, refusal=str(error))
        plan = replace(
            plan, routing=self.traces.routing, substitutions=(*steps, *plan.substitutions),
            checked_against_eager=self.traces.against_eager,
        )  # fmt: skip
        plan = with_simulator(plan, graph)
        bound_ns, state_bytes = self._bound_ns(graph, mesh), self._state_bytes(graph)
        laid_out = partial(layout_of, graph, plan)
        return replace(rung, plan=plan, how=how, bound_ns=bound_ns, state_bytes=state_bytes, laid_out=laid_out)

    def _plan(self, graph: Graph, mesh: Mesh, batch: int) -> tuple[Graph, Plan, str]:
        """The best plan, the graph that it is of, and how it was found."""
        budget = BUDGETS["fast"] if self.budget is None else self.budget
        request = Request(mesh, "train", self.optimizer, self.limit, (), budget, self.precision)
        if self.budget is None and self._is_shared(graph, mesh):
            shared, climb = self._shared_of(graph, request, batch)
            try:
                return graph, climb.plan(shared, request), "shared"
            except InfeasibleError:
                pass  # what no template can do, a search of its own may
        return *planned_jointly(graph, request), "searched"

    def _is_shared(self, graph: Graph, mesh: Mesh) -> bool:
        """Whether templates are likely to hold the best plan."""
        if not mesh.is_homogeneous or mesh.num_devices == 1 or longest_sequence(graph) >= LONG_SEQUENCE:
            return False
        shares_cores = load_profile(mesh.profile).shared_by(mesh.devices_per_node).ranks_sharing > 1
        return not shares_cores and sum(map(len, find_blocks(graph, ()).paths)) > 1

    def _shared_of(self, graph: Graph, request: Request, batch: int) -> tuple[SharedLayers, Climb]:
        mesh = request.mesh
        kind, profile = (mesh.profile, mesh.devices_per_node), load_profile(mesh.profile)
        key = (*kind, batch)
        if key not in self._shared:
            beside = next((one for known, one in self._shared.items() if known[:2] == kind), None)
            self._shared[key] = shared_layers(graph, request, profile, beside)
        climb = self._climbs.setdefault(kind, Climb(Context(request).sure))
        return self._shared[key], climb

    def _bound_ns(self, graph: Graph, mesh: Mesh) -> int:
        """What a step takes at least: all operators on whole tensors, shared out by speed, and nothing sent."""
        per_ns = 0.0
        for group in mesh.groups:
            key = graph.fingerprint, group.profile
            if key not in self._whole_ns:
                profile = load_profile(group.profile).shared_by(group.devices_per_node)
                self._whole_ns[key] = sum(node_times_ns(graph, profile).values())
            per_ns += group.num_devices / max(1, self._whole_ns[key])
        return int(1 / per_ns)

    def _state_bytes(self, graph: Graph) -> int:
        """Of parameters, buffers and optimizer state, whole."""
        found = 0
        for item in graph.stored:
            tensor = graph.tensors[item.tensor]
            found += tensor.num_bytes
            if item.requires_grad and self.optimizer is not None:
                found += optimizer_state_bytes(self.optimizer, tensor.shape, tensor.dtype)
        return found


def _price(mesh: Mesh, prices: Mapping[str, float]) -> float | None:
    """Of all devices an hour; None where one kind has no price."""
    found = [prices.get(group.profile) for group in mesh.groups]
    if None in found:
        return None
    return sum(group.num_devices * float(price or 0.0) for group, price in zip(mesh.groups, found, strict=True))
