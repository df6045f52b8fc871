"""All cheapest redistributions of one tensor at once: shortest paths over its placements, by Bellman-Ford in numpy.

A placement is a node; a legal step of the table (`ir.redistribution`) is an edge that weighs its forward plus
backward nanoseconds (`collectives.step_time_ns`). With K types an axis and A axes there are K^A placements with
A·(K−1) steps each, so that relaxing all of them is one array operation, and few rounds suffice: a cheapest path
changes an axis once or twice. Ties go to the fewer steps, then to the outer axis.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.cost.collectives import Route, step_time_ns
from autopar.cost.profile import Profile
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import I, P, Placement, R, S, Type
from autopar.ir.redistribution import ItemSize, Step, is_legal

Times = npt.NDArray[np.int64]
UNREACHABLE = np.int64(1) << 52
_TIME_BYTES, _COLUMN_BYTES = np.dtype(np.int64).itemsize, np.dtype(np.int16).itemsize
KEPT_BYTES = 1 << 28
"""Of tables that are remembered: one of four axes takes tens of megabytes."""
_TIE = 64  # weights are times × 64 + 1: of equal times, fewer steps


class _Paths(NamedTuple):
    """From one placement to each: nanoseconds, and the column of `Routes._previous` that the last step came by."""

    forward_ns: Times
    backward_ns: Times
    last: npt.NDArray[np.int16]


class _PlacementSpace:
    """What all tensors of as many dims have alike on axes of these sizes: placements, and the steps between them."""

    def __init__(self, types: tuple[Type, ...], sizes: tuple[int, ...]) -> None:
        self.types, self.sizes = types, sizes
        self.placements: list[Placement] = list(itertools.product(types, repeat=len(sizes)))
        self.index = {placement: position for position, placement in enumerate(self.placements)}
        self.previous = self._previous()
        self.kind_of, self.kinds = self._kinds()
        dims = [type_.dim for type_ in types if type_.kind == "S"]
        self.shards = {dim: np.array([self._num_shards(p, dim) for p in self.placements]) for dim in dims}

    def _previous(self) -> Times:
        """For each placement and each (axis, type): the placement that had this type on this axis."""
        num_types, num_axes = len(self.types), len(self.sizes)
        strides = [num_types ** (num_axes - 1 - axis) for axis in range(num_axes)]
        nodes = np.arange(len(self.placements))
        columns = [
            nodes + (before - nodes // strides[axis] % num_types) * strides[axis]
            for axis in range(num_axes)
            for before in range(num_types)
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((1, 0), dtype=np.int64)

    def _kinds(self) -> tuple[Times, list[tuple[Placement, Step]]]:
        """For each entry of `previous` the kind of step that leads from there, −1 where none is legal; and an example
        of each kind. Steps of a kind take the same time."""
        kind_of, known = np.full(self.previous.shape, -1, dtype=np.int64), dict[object, int]()
        examples: list[tuple[Placement, Step]] = []
        for node, column in itertools.product(range(len(self.placements)), range(self.previous.shape[1])):
            before, axis = self.placements[self.previous[node, column]], column // len(self.types)
            step = Step(axis, before[axis], self.placements[node][axis])
            if is_legal(step, before):
                key = self._parts(before, axis), step
                if key not in known:
                    known[key] = len(examples)
                    examples.append((before, step))
                kind_of[node, column] = known[key]
        return kind_of, examples

    def _parts(self, placement: Placement, axis: int) -> tuple[tuple[Type, int], ...]:
        """How the other axes split the tensor, in order: what the bytes of a step on `axis` depend on."""
        return tuple(
            (type_, self.sizes[position])
            for position, type_ in enumerate(placement)
            if type_.kind == "S" and position != axis
        )

    def _num_shards(self, placement: Placement, dim: int) -> int:
        return math.prod(size for type_, size in zip(placement, self.sizes, strict=True) if type_.dim == dim)


_space = lru_cache(maxsize=256)(_PlacementSpace)


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
        types: tuple[Type, ...] = (R, I, P, *(S(dim) for dim, size in enumerate(shape) if size > 1))
        self._space = _space(types, tuple(axis.size for axis in axes))
        self._found: dict[int, _Paths] = {}

    @property
    def num_bytes(self) -> int:
        """Of what is known: a row for each placement that was asked about, and what rows are made of."""
        size, columns = len(self._space.placements), len(self._space.types) * len(self.axes)
        rows = len(self._found) * size * (2 * _TIME_BYTES + _COLUMN_BYTES)
        return rows + (3 * size * columns * _TIME_BYTES if self._found else 0)

    def __contains__(self, placement: object) -> bool:
        """Whether the tensor has such dims, longer than one, and there are so many axes."""
        return placement in self._space.index

    def times(self, sources: Sequence[Placement], targets: Sequence[Placement]) -> tuple[Times, Times]:
        """Forward and backward nanoseconds from each source to each target; `UNREACHABLE` where there is no way."""
        rows = [self._space.index[source] for source in sources]
        missing = sorted({row for row in rows if row not in self._found})
        if missing:
            self._solve(missing)
        columns = [self._space.index[target] for target in targets]
        forward = np.array([self._found[row].forward_ns[columns] for row in rows])
        return forward, np.array([self._found[row].backward_ns[columns] for row in rows])

    def route(self, source: Placement, target: Placement) -> Route | None:
        """The steps from one placement to another, and their nanoseconds; None when there is no way."""
        forward, backward = self.times([source], [target])
        if forward[0, 0] >= UNREACHABLE:
            return None
        steps: list[Step] = []
        node, last = self._space.index[target], self._found[self._space.index[source]].last
        while self._space.placements[node] != source:
            axis, before = divmod(int(last[node]), len(self._space.types))
            steps.append(Step(axis, self._space.types[before], self._space.placements[node][axis]))
            node = int(self._space.previous[node, last[node]])
        return Route(tuple(reversed(steps)), int(forward[0, 0]), int(backward[0, 0]))

    @cached_property
    def _step_times(self) -> tuple[Times, Times]:
        """Nanoseconds forward and backward of the step into each placement from each of `_PlacementSpace.previous`."""
        space = self._space
        possible = np.ones(len(space.placements), dtype=bool)  # no dim is cut into more slices than it is long
        for dim, shards in space.shards.items():
            possible &= shards <= self.shape[dim]
        is_step = (space.kind_of >= 0) & possible[:, None] & possible[space.previous]
        times = np.full((len(space.kinds) + 1, 2), UNREACHABLE, dtype=np.int64)
        for kind in np.unique(space.kind_of[is_step]).tolist():
            times[kind] = self._time_ns(*space.kinds[kind])
        found = times[np.where(is_step, space.kind_of, len(space.kinds))]
        return found[..., 0], found[..., 1]

    @cached_property
    def _weights(self) -> Times:
        forward, backward = self._step_times
        return np.where(forward >= UNREACHABLE, UNREACHABLE, (forward + backward) * _TIE + 1)

    def _time_ns(self, before: Placement, step: Step) -> tuple[int, int]:
        forward, backward = step_time_ns(
            self.shape, self.itemsize, before, self.axes, step, self.devices_per_node, self.profile
        )
        return forward, backward if self.differentiable else 0

    def _solve(self, rows: list[int]) -> None:
        """Finds the paths from some placements to all others."""
        weights, (size, columns), count = self._weights, self._space.previous.shape, len(self._space.types)
        distances = np.full((len(rows), size), UNREACHABLE, dtype=np.int64)
        distances[np.arange(len(rows)), rows] = 0
        last = np.zeros((len(rows), size), dtype=np.int16)
        changed = True
        while changed:
            changed = False
            for column in range(columns):
                axis, before = divmod(column, count)
                along = count**axis, count, size // count ** (axis + 1)  # placements by what an axis has of them
                known, by = distances.reshape(-1, *along), last.reshape(-1, *along)
                through = known[:, :, before : before + 1] + weights[:, column].reshape(along)
                better = through < known
                if better.any():
                    np.copyto(known, through, where=better)
                    by[better] = column
                    changed = True
        self._add_up(rows, distances < UNREACHABLE, last)

    def _add_up(self, rows: list[int], reachable: npt.NDArray[np.bool_], last: npt.NDArray[np.int16]) -> None:
        """Sums the directions apart along the paths, from their ends to their starts, and keeps the result."""
        step_forward, step_backward = self._step_times
        starts, nodes = np.array(rows)[:, None], np.tile(np.arange(len(self._space.placements)), (len(rows), 1))
        forward, backward = np.where(reachable, 0, UNREACHABLE), np.where(reachable, 0, UNREACHABLE)
        while (moving := reachable & (nodes != starts)).any():
            columns = np.take_along_axis(last, nodes, axis=1)
            forward += np.where(moving, step_forward[nodes, columns], 0)
            backward += np.where(moving, step_backward[nodes, columns], 0)
            nodes = np.where(moving, self._space.previous[nodes, columns], nodes)
        for number, row in enumerate(rows):
            self._found[row] = _Paths(forward[number], backward[number], last[number])


class KnownRoutes:
    """The tables that were asked for last, as many as take so many bytes: the others are made again."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._known: OrderedDict[Hashable, tuple[Routes, int]] = OrderedDict()  # with the bytes that are counted

    def __len__(self) -> int:
        return len(self._known)

    def of(self, *asked: Any) -> Routes:
        """As `Routes` of the same. What a table has found since it was last asked for is counted now."""
        found, counted = self._known.pop(asked) if asked in self._known else (Routes(*asked), 0)
        self._known[asked] = found, found.num_bytes
        self.num_bytes += found.num_bytes - counted
        while self.num_bytes > self.most_bytes and len(self._known) > 1:
            self.num_bytes -= self._known.popitem(last=False)[1][1]
        return found


_known_routes = KnownRoutes(KEPT_BYTES)


def routes(
    shape: tuple[int, ...], itemsize: ItemSize, axes: LogicalMesh, devices_per_node: int, profile: Profile,
    differentiable: bool,
) -> Routes:  # fmt: skip
    """The table of a tensor's redistributions; remembered, since equal tensors are many, whatever axes are called."""
    nameless = tuple(axis._replace(name="") for axis in axes)
    return _known_routes.of(shape, itemsize, nameless, devices_per_node, profile, differentiable)
