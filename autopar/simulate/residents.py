"""What stays on a rank through a step, and what updating it takes: stored tensors with their optimizer state, inputs,
constants, new values of buffers, single numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from autopar.cost import Profile
from autopar.cost.compute import optimizer_time_ns
from autopar.cost.memory import optimizer_state_bytes, optimizer_workspace_bytes
from autopar.cost.updates import update_bytes
from autopar.ir.graph import Graph, Node, found_once
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Placement, Shape, evenly, local_shape
from autopar.ir.plan import StagePlan
from autopar.ops.experts import ROUTED_EXPERTS, place_table_bytes
from autopar.simulate.operator_prices import PriceTable, StoredPrice

OPTIMIZER_KERNELS = {
    "cpu": 8,
    "cuda": 1,
}  # a tensor's launches: one by one on CPUs, fused over tensors on GPUs

STEP_COUNT_BYTES = 4  # torch's optimizers with state count steps in a float32 scalar for each parameter

COUNT_BYTES = 4  # what a mean over all microbatches divides by: a float32 scalar (`Progress.count`)
RANK_BYTES = 4  # a DeviceMesh numbers its ranks in int32, in the host's memory


class StoredPrices:
    """Prices of a graph's stored tensors on axes of which `per_node` neighbours share a node."""

    def __init__(self, graph: Graph, table: PriceTable, axes: LogicalMesh, per_node: int, profile: Profile) -> None:
        self.graph, self.table, self.axes, self.per_node, self.profile = graph, table, axes, per_node, profile
        self._moved: dict[object, int] = {}

    def price(self, plan: StagePlan, tensor: str) -> StoredPrice:
        """What a stored tensor takes, and its update."""
        kept, placement = self.graph.kept(tensor), plan.storage[tensor].placement
        key = (kept.shape, kept.dtype, placement)
        known = self.table.stored.get(key)
        if known is None:
            shape = stored_shape(self.graph, plan, tensor)
            known = self.table.stored[key] = StoredPrice(
                math.prod(shape) * kept.itemsize,
                optimizer_state_bytes(plan.optimizer, shape, kept.dtype, kept.shape),
                self.moved_bytes(plan, tensor, placement),
                optimizer_workspace_bytes(plan.optimizer, shape, kept.dtype, kept.shape),
            )
        return known

    def moved_bytes(self, plan: StagePlan, tensor: str, placement: Placement) -> int:
        """What the update of a stored tensor moves where it is stored so, with what takes as long as gathering for
        it."""
        kept = self.graph.kept(tensor)
        key = kept.shape, kept.dtype, placement
        if key not in self._moved:
            self._moved[key] = update_bytes(
                plan.optimizer, kept.shape, kept.dtype, placement, evenly(self.axes), self.per_node, self.profile
            )
        return self._moved[key]

    def update_ns(self, moved_bytes: int, tensors: int) -> int:
        """How long it takes to update so many tensors, which are DTensors where several ranks run the stage."""
        kernels = tensors * OPTIMIZER_KERNELS[self.profile.device_type]
        return optimizer_time_ns(moved_bytes, tensors, kernels, num_ranks(self.axes) > 1, self.profile)


def stored_shape(graph: Graph, plan: StagePlan, tensor: str) -> Shape:
    """The local shape of a tensor as it is stored."""
    return local_shape(graph.tensors[tensor].shape, plan.storage[tensor].placement, evenly(plan.axes))


def num_ranks(axes: LogicalMesh) -> int:
    """That run the program: of a stage, its own."""
    return math.prod(axis.size for axis in axes)


def other_residents(
    graph: Graph, plan: StagePlan, batched: Mapping[str, int], constants: Iterable[int], trains: bool, device_type: str
) -> list[tuple[int, str]]:
    """Bytes, with their kinds, of what is not stored from step to step. constants: bytes of each that is computed once
    and kept."""
    held = []
    for name in (name for name in graph.inputs if name not in graph.received):
        whole = graph.tensors[name]
        local = local_shape(whole.shape, plan.inputs[name], plan.axes)
        count = plan.microbatches if name in batched else 1
        held.append((count * math.prod(local) * whole.itemsize, "inputs"))
    held += [(size, "constants") for size in constants]
    held += [(_updated_bytes(graph, plan, name), "updates") for name in graph.mutations if trains]
    return [*held, (_scalar_bytes(graph, plan, trains, device_type), "scalars")]


def _updated_bytes(graph: Graph, plan: StagePlan, name: str) -> int:
    """Of what forward makes of a buffer or parameter, which is stored when the step ends: the new value, as it is
    computed (`runtime.state.StoredBuffer.take_update`)."""
    tensor = graph.tensors[graph.mutations[name]]
    node = graph.producers.get(tensor.name)
    if node is None or node.name not in plan.nodes:
        return 0
    placement = plan.nodes[node.name].results[node.results.index(tensor.name)]
    return math.prod(local_shape(tensor.shape, placement, plan.axes)) * tensor.itemsize


def _scalar_bytes(graph: Graph, plan: StagePlan, trains: bool, device_type: str) -> int:
    """What the runtime keeps of single numbers: each microbatch's loss and its gradient, 1; what a mean divides by; the
    ranks of the mesh; where experts are."""
    devices = num_ranks(plan.axes)
    held = RANK_BYTES * devices if devices > 1 and device_type == "cpu" else 0
    if trains and graph.loss is not None:
        held += (plan.microbatches + 1) * graph.tensors[graph.loss].itemsize + COUNT_BYTES
    return held + place_table_bytes(_routed(graph), plan.nodes, plan.axes)


@found_once
def _routed(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == ROUTED_EXPERTS]
