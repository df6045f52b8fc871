"""All cheapest redistributions of one tensor at once: shortest paths over its placements, by Bellman-Ford in numpy.

A placement is a node; a legal step of the table (`ir.redistribution`) is an edge that weighs its forward plus
backward nanoseconds (`collectives.step_time_ns`). With K types an axis and A axes there are K^A placements with
A·(K−1) steps each, so that relaxing all of them is one array operation, and few rounds suffice: a cheapest path
changes an axis once or twice. Ties go to the fewer steps, then to the outer axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.cost.collectives import Route, step_time_ns
from autopar.cost.profile import Profile
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import I, P, Placement, R, S, Type, num_shards
from autopar.ir.redistribution import ItemSize, Step, is_legal

Times = npt.NDArray[np.int64]
UNREACHABLE = np.int64(1) << 52
_TIE = 64  # weights are times × 64 + 1: of equal times, fewer steps


class _Paths(NamedTuple):
    """From one placement to each: nanoseconds, and the column of `Routes._previous` that the last step came by."""

    forward_ns: Times
    backward_ns: Times
    last: Times


class Routes:
    """The cheapest way between every two placements of a tensor on one logical mesh.

    shape: global. The backward direction weighs only for a differentiable tensor.
    """

    def __init__(
        self, shape: tuple[int, ...], itemsize: ItemSize, axes: LogicalMesh, devices_per_node: int, profile: Profile,
        differentiable: bool,
    ) -> None:  # fmt: skip
        self.shape, self.itemsize, self.axes, self.differentiable = shape, itemsize, axes, differentiable
        self.devices_per_node, self.profile = devices_per_node, profile
        self.types: tuple[Type, ...] = (R, I, P, *(S(dim) for dim, size in enumerate(shape) if size > 1))
        self.placements: list[Placement] = list(itertools.product(self.types, repeat=len(axes)))
        self.index = {placement: position for position, placement in enumerate(self.placements)}
        self._found: dict[int, _Paths] = {}

    def times(self, sources: Sequence[Placement], targets: Sequence[Placement]) -> tuple[Times, Times]:
        """Forward and backward nanoseconds from each source to each target; `UNREACHABLE` where there is no way."""
        rows = [self.index[source] for source in sources]
        missing = sorted({row for row in rows if row not in self._found})
        if missing:
            self._solve(missing)
        columns = [self.index[target] for target in targets]
        forward = np.array([self._found[row].forward_ns[columns] for row in rows])
        return forward, np.array([self._found[row].backward_ns[columns] for row in rows])

    def route(self, source: Placement, target: Placement) -> Route | None:
        """The steps from one placement to another, and their nanoseconds; None when there is no way."""
        forward, backward = self.times([source], [target])
        if forward[0, 0] >= UNREACHABLE:
            return None
        steps: list[Step] = []
        node, last = self.index[target], self._found[self.index[source]].last
        while self.placements[node] != source:
            axis, before = divmod(int(last[node]), len(self.types))
            steps.append(Step(axis, self.types[before], self.placements[node][axis]))
            node = int(self._previous[node, last[node]])
        return Route(tuple(reversed(steps)), int(forward[0, 0]), int(backward[0, 0]))

    @cached_property
    def _previous(self) -> Times:
        """For each placement and each (axis, type): the placement that had this type on this axis."""
        num_types, num_axes = len(self.types), len(self.axes)
        strides = [num_types ** (num_axes - 1 - axis) for axis in range(num_axes)]
        nodes = np.arange(len(self.placements))
        columns = [
            nodes + (before - nodes // strides[axis] % num_types) * strides[axis]
            for axis in range(num_axes)
            for before in range(num_types)
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((1, 0), dtype=np.int64)

    @cached_property
    def _step_times(self) -> tuple[Times, Times]:
        """Nanoseconds forward and backward of the step into each placement from each of `_previous`."""
        forward = np.full(self._previous.shape, UNREACHABLE, dtype=np.int64)
        backward = forward.copy()
        known: dict[object, tuple[int, int]] = {}
        possible = [self._is_possible(placement) for placement in self.placements]
        for node, column in itertools.product(np.flatnonzero(possible), range(self._previous.shape[1])):
            before, axis = self.placements[self._previous[node, column]], column // len(self.types)
            step = Step(axis, before[axis], self.placements[node][axis])
            if possible[self._previous[node, column]] and is_legal(step, before):
                key = self._parts(before, axis), step
                if key not in known:
                    known[key] = self._time_ns(before, step)
                forward[node, column], backward[node, column] = known[key]
        return forward, backward

    @cached_property
    def _weights(self) -> Times:
        forward, backward = self._step_times
        return np.where(forward >= UNREACHABLE, UNREACHABLE, (forward + backward) * _TIE + 1)

    def _time_ns(self, before: Placement, step: Step) -> tuple[int, int]:
        forward, backward = step_time_ns(
            self.shape, self.itemsize, before, self.axes, step, self.devices_per_node, self.profile
        )
        return forward, backward if self.differentiable else 0

    def _is_possible(self, placement: Placement) -> bool:
        """Whether no dim is cut into more slices than it is long."""
        dims = {type_.dim for type_ in placement if type_.kind == "S"}
        return all(self.shape[dim] >= num_shards(placement, dim, self.axes) for dim in dims)

    def _parts(self, placement: Placement, axis: int) -> tuple[tuple[Type, int], ...]:
        """How the other axes split the tensor, in order: what the bytes of a step on `axis` depend on."""
        return tuple(
            (type_, self.axes[position].size)
            for position, type_ in enumerate(placement)
            if type_.kind == "S" and position != axis
        )

    def _solve(self, rows: list[int]) -> None:
        """Finds the paths from some placements to all others."""
        weights, size = self._weights, len(self.placements)
        distances = np.full((len(rows), size), UNREACHABLE, dtype=np.int64)
        distances[np.arange(len(rows)), rows] = 0
        last = np.zeros((len(rows), size), dtype=np.int64)
        changed = True
        while changed:
            changed = False
            for column in range(self._previous.shape[1]):
                through = distances[:, self._previous[:, column]] + weights[:, column]
                better = through < distances
                if better.any():
                    np.copyto(distances, through, where=better)
                    last[better] = column
                    changed = True
        self._add_up(rows, distances < UNREACHABLE, last)

    def _add_up(self, rows: list[int], reachable: npt.NDArray[np.bool_], last: Times) -> None:
        """Sums the directions apart along the paths, from their ends to their starts, and keeps the result."""
        step_forward, step_backward = self._step_times
        starts, nodes = np.array(rows)[:, None], np.tile(np.arange(len(self.placements)), (len(rows), 1))
        forward, backward = np.where(reachable, 0, UNREACHABLE), np.where(reachable, 0, UNREACHABLE)
        while (moving := reachable & (nodes != starts)).any():
            columns = np.take_along_axis(last, nodes, axis=1)
            forward += np.where(moving, step_forward[nodes, columns], 0)
            backward += np.where(moving, step_backward[nodes, columns], 0)
            nodes = np.where(moving, self._previous[nodes, columns], nodes)
        for number, row in enumerate(rows):
            self._found[row] = _Paths(forward[number], backward[number], last[number])


@lru_cache(maxsize=1024)
def routes(
    shape: tuple[int, ...], itemsize: ItemSize, axes: LogicalMesh, devices_per_node: int, profile: Profile,
    differentiable: bool,
) -> Routes:  # fmt: skip
    """The table of a tensor's redistributions; remembered, since equal tensors are many."""
    return Routes(shape, itemsize, axes, devices_per_node, profile, differentiable)
