"""Rule tests on the threads of `tests.random_programs.world`: the runtime's collectives over axes of given sizes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ir.placement import Axis
from autopar.runtime import mesh as runtime_mesh
from tests.random_programs.world import device_mesh, sent_so_far, thread_world

Coordinate = tuple[int, ...]


def sent() -> Counter[str]:
    """Bytes that this rank has handed to each collective since its job began."""
    return Counter(sent_so_far())


def run(axes: Sequence[Axis], job: Callable[[Coordinate, runtime_mesh.RankMesh], Any]) -> dict[Coordinate, Any]:
    """The results of `job(coordinate, mesh)` on every rank of the axes."""
    coordinates = list(itertools.product(*(range(axis.size) for axis in axes)))

    def on_rank(rank: int) -> Any:
        return job(coordinates[rank], _mesh(axes, coordinates[rank]))

    return dict(zip(coordinates, thread_world(len(coordinates)).run(on_rank), strict=True))


def _mesh(axes: Sequence[Axis], coordinate: Coordinate) -> runtime_mesh.RankMesh:
    whole = device_mesh(tuple((axis.name, axis.size) for axis in axes))
    made = [
        runtime_mesh.Axis(axis.name, axis.size, index, whole.get_group(axis.name) if axis.size > 1 else None, False)
        for axis, index in zip(axes, coordinate, strict=True)
    ]
    return runtime_mesh.RankMesh(tuple(made), None, torch.device("cpu"), joint=_joint(axes, coordinate))


def _joint(axes: Sequence[Axis], coordinate: Coordinate) -> dict[tuple[str, ...], runtime_mesh.Axis]:
    """All axes as one, where they are several."""
    if len(axes) < 2:
        return {}
    size = math.prod(axis.size for axis in axes)
    index = sum(axis.stride * own for axis, own in zip(axes, coordinate, strict=True))
    whole = device_mesh((("whole", size),))
    axis = runtime_mesh.Axis("whole", size, index, whole.get_group("whole") if size > 1 else None, False)
    return {tuple(axis.name for axis in axes): axis}
