"""The shapes that one rank computes with: slices under a placement."""

from __future__ import annotations

import math

from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Placement, Shape, evenly, local_shape
from autopar.ir.plan import StagePlan


class LocalShapes:
    """Local shapes and sizes by tensor and placement; equal tensors share them."""

    def __init__(self, graph: Graph, plan: StagePlan) -> None:
        self.shapes = {name: tensor.shape for name, tensor in graph.tensors.items()}
        self._stored = frozenset(plan.storage)
        self._axes: tuple[LogicalMesh, LogicalMesh] = (plan.axes, evenly(plan.axes))
        self._itemsizes = {name: tensor.itemsize for name, tensor in graph.tensors.items()}
        self._local: dict[tuple[Shape, Placement, bool], tuple[Shape, int]] = {}

    def itemsize(self, tensor: str) -> int:
        """Bytes of an element while computing."""
        return self._itemsizes[tensor]

    def local(self, tensor: str, placement: Placement) -> tuple[Shape, int]:
        """The first rank's slice, and its bytes while computing."""
        key = (self.shapes[tensor], placement, tensor in self._stored)
        known = self._local.get(key)
        if known is None:
            shape = local_shape(key[0], placement, self._axes[key[2]])
            known = self._local[key] = (shape, math.prod(shape))
        return known[0], known[1] * self._itemsizes[tensor]
