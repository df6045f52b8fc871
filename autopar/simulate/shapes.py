"""The shapes that one rank computes with: of one microbatch, and of its slices under a placement."""

from __future__ import annotations

import math

from autopar.cost.compute import compute_itemsize
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Placement, local_shape
from autopar.ir.plan import Plan

Shape = tuple[int, ...]


def microbatch_shapes(graph: Graph, plan: Plan) -> dict[str, Shape]:
    """The global shape of each tensor in one microbatch.

    A tensor that depends on the divided inputs has its batch dim divided: the first dim that is a multiple of
    the batch (a flattened batch · length is one, too); scalars and what does not depend on them stay whole.
    """
    shapes = {name: tensor.shape for name, tensor in graph.tensors.items()}
    divided = set(plan.microbatch_inputs)
    batch = max((shapes[name][0] for name in divided if shapes[name]), default=0)
    if plan.microbatches <= 1 or not batch:
        return shapes
    for node in graph.nodes:
        if divided.intersection(node.operands):
            divided.update(node.results)
    for name in divided:
        shapes[name] = _divide(shapes[name], batch, plan.microbatches)
    return shapes


def _divide(shape: Shape, batch: int, microbatches: int) -> Shape:
    for dim, size in enumerate(shape):
        if size and size % batch == 0:
            return (*shape[:dim], -(-size // microbatches), *shape[dim + 1 :])
    return shape


class LocalShapes:
    """Local shapes and sizes by tensor and placement; equal tensors share them."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.shapes = microbatch_shapes(graph, plan)
        self._axes: LogicalMesh = plan.axes
        self._itemsizes = {name: compute_itemsize(t, plan.precision) for name, t in graph.tensors.items()}
        self._local: dict[tuple[Shape, Placement], tuple[Shape, int]] = {}

    def itemsize(self, tensor: str) -> int:
        """Bytes of an element while computing."""
        return self._itemsizes[tensor]

    def local(self, tensor: str, placement: Placement) -> tuple[Shape, int]:
        """The largest slice's shape, and its bytes while computing."""
        key = (self.shapes[tensor], placement)
        known = self._local.get(key)
        if known is None:
            shape = local_shape(key[0], placement, self._axes)
            known = self._local[key] = (shape, math.prod(shape))
        return known[0], known[1] * self._itemsizes[tensor]
