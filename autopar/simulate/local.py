"""What one rank has of a tensor: its slice, and the memory that the runtime takes for a while to move it.

Copies are packed buffers, and parts in the order that travels, as in runtime/pieces.py (activations) and
runtime/coalesce.py (parameters and their gradients). A tensor cut along dim 0 travels from and into place; along
another dim its parts are copied first, or joined after. Gloo has no reduce-scatter: there, parts are exchanged and
summed, which takes the whole once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Placement, Shape, evenly, local_shape
from autopar.ir.plan import StagePlan
from autopar.ir.redistribution import Step, apply
from autopar.runtime.packing import LONE_BYTES


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


# Copies ----------------------------------------


_PASSED_ON = {("P", "I"), ("I", "P")}


def keeps_gradient(step: Step) -> bool:
    """Whether the gradient after a step is the gradient before it."""
    return (step.before.kind, step.after.kind) in _PASSED_ON


class Copies:
    """Bytes of copies by tensor and way, for one plan on one kind of device."""

    def __init__(self, graph: Graph, plan: StagePlan, device_type: str, shapes: LocalShapes) -> None:
        self._graph, self._axes, self._shapes = graph, plan.axes, shapes
        self._sums_parts = device_type == "cpu"

    def conversion_bytes(self, tensor: str, source: Placement, steps: Sequence[Step]) -> tuple[int, int]:
        """For an activation's conversion, forward and backward: the most that one of its steps takes."""
        forward = backward = 0
        for before, step, after in self._walk(source, steps):
            size = max(self._shapes.local(tensor, before)[1], self._shapes.local(tensor, after)[1])
            kinds, dims = (step.before.kind, step.after.kind), (step.before.dim, step.after.dim)
            forward = max(forward, self._moved(*kinds, *dims, size))
            backward = max(backward, self._moved(*_transposed(*kinds), *dims[::-1], size))
        return forward, backward

    def gather_bytes(self, tensor: str, source: Placement, steps: Sequence[Step]) -> int:
        """For a parameter on its way to where it is used; small ones travel packed."""
        total = 0
        for before, step, after in self._walk(source, steps):
            if step.before.kind == "S" and step.after.kind in "RI":
                whole, size = self._shapes.local(tensor, after)
                is_direct = math.prod(whole[: step.before.dim]) == 1 and size >= LONE_BYTES
                if not is_direct or whole[step.before.dim] % self._axes[step.axis].size:
                    total += size + self._shapes.local(tensor, before)[1]
        return total

    def scatter_bytes(self, tensor: str, source: Placement, steps: Sequence[Step]) -> int:
        """For a parameter's gradient on its way home, beside the gradient itself and what arrives."""
        total = 0
        for _, step, after in self._walk(source, steps):
            if (step.before.kind, step.after.kind) == ("S", "R"):
                size = math.prod(self._shapes.local(tensor, after)[0]) * self._graph.kept(tensor).itemsize
                is_packed = size < LONE_BYTES
                total += size * (bool(step.before.dim) + is_packed + self._sums_parts)
        return total

    def _walk(self, source: Placement, steps: Sequence[Step]) -> list[tuple[Placement, Step, Placement]]:
        walked = []
        for step in steps:
            after = apply(step, source)
            walked.append((source, step, after))
            source = after
        return walked

    def _moved(self, source: str, target: str, source_dim: int, target_dim: int, size: int) -> int:
        if source == "S" and target == "S":
            return size * ((target_dim != 0) + (source_dim != 0))
        if source == "S" and target in "RI":
            return size if source_dim else 0
        if source == "P" and target == "S":
            return size * (bool(target_dim) + self._sums_parts)
        return 0


def _transposed(before: str, after: str) -> tuple[str, str]:
    """What the gradient's kind changes from and to: R's is P, and the other way around."""
    other = {"R": "P", "P": "R"}
    return other.get(after, after), other.get(before, before)
