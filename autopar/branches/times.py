"""What operators and redistributions of a plan take, and what operators would that are not split on an axis."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost import Profile, node_time_ns
from autopar.cost.routes import Routes, routes
from autopar.ir.graph import Graph, Tensor
from autopar.ir.placement import Placement, R, local_shape
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Step


class Times:
    """Times of operators and redistributions, forward and backward, in ns."""

    def __init__(self, graph: Graph, plan: Plan, profile: Profile) -> None:
        self.graph, self.stage, self.mesh, self.profile = graph, plan.stage, plan.mesh, profile
        self.trains = plan.mode == "train"
        self._into = {(item.tensor, item.target): item for item in plan.stage.redistributes}

    def alone_ns(self, names: Sequence[str], axis: str) -> int:
        """The operators with nothing split on the axis."""
        position = next(number for number, other in enumerate(self.stage.axes) if other.name == axis)

        def free(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
            return tuple((*p[:position], R, *p[position + 1 :]) for p in placements)

        nodes = self.stage.nodes
        return sum(self._node_ns(name, free(nodes[name].operands), free(nodes[name].results)) for name in names)

    def now_ns(self, names: Sequence[str]) -> int:
        """The operators as they are placed, with all conversions of what they read and make."""
        nodes, graph = self.stage.nodes, self.graph
        total = sum(self._node_ns(name, nodes[name].operands, nodes[name].results) for name in names)
        touched = dict[tuple[str, Placement], None]()
        for name in names:
            node = graph.node_by_name[name]
            touched.update(dict.fromkeys(zip(node.operands, nodes[name].operands, strict=True)))
            for tensor in node.results:
                targets = (item.target for item in self.stage.redistributes if item.tensor == tensor)
                touched.update(dict.fromkeys((tensor, target) for target in targets))
        return total + sum(self._convert_ns(*value) for value in touched if value in self._into)

    def _node_ns(self, name: str, operands: tuple[Placement, ...], results: tuple[Placement, ...]) -> int:
        node = self.graph.node_by_name[name]
        forward, backward = node_time_ns(
            node, self._shapes(node.operands, operands), self._shapes(node.results, results), self.graph.tensors,
            self.profile,
        )  # fmt: skip
        return forward + (backward if self.trains else 0)

    def _shapes(self, names: Sequence[str], placements: Sequence[Placement]) -> tuple[tuple[int, ...], ...]:
        tensors, axes = self.graph.tensors, self.stage.axes
        return tuple(local_shape(tensors[n].shape, p, axes) for n, p in zip(names, placements, strict=True))

    def _convert_ns(self, tensor: str, target: Placement) -> int:
        route = self._routes(self.graph.tensors[tensor]).route(self._source(tensor), target)
        return 0 if route is None else route.forward_ns + route.backward_ns

    def _source(self, tensor: str) -> Placement:
        stage = self.stage
        if tensor in stage.storage:
            return stage.storage[tensor].placement
        if tensor in stage.inputs:
            return stage.inputs[tensor]
        maker = self.graph.producers[tensor]
        return stage.nodes[maker.name].results[maker.results.index(tensor)]

    def steps(self, tensor: Tensor, source: Placement, target: Placement) -> tuple[Step, ...] | None:
        """The cheapest redistribution; None where there is none."""
        route = self._routes(tensor).route(source, target)
        return None if route is None else route.steps

    def _routes(self, tensor: Tensor) -> Routes:
        differentiable = tensor.differentiable and self.trains
        itemsizes, mesh = self.graph.itemsizes(tensor.name), self.mesh
        return routes(tensor.shape, itemsizes, self.stage.axes, mesh.devices_per_node, self.profile, differentiable)
