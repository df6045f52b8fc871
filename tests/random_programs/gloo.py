"""The same jobs on gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import runtime as rt
from tests.random_programs import check
from tests.rank_pool import pool


def run_on_gloo(world: int, job: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Runs a job of `check` on processes."""
    ranks = pool(world)
    if not ranks.is_running:
        ranks.run(_ready)  # with time of its own: processes start slowly on a busy machine
    return ranks.run(_on_process, job.__name__, args)


def _ready(rank: int, world: int) -> None:
    """A job that only imports what the others need."""


def _on_process(rank: int, world: int, name: str, args: tuple[Any, ...]) -> Any:
    with rt.count_bytes() as counted:
        check.device_mesh = _device_mesh
        check.sent_so_far = lambda: check.by_collective(counted)
        return getattr(check, name)(rank, *args)


@cache
def _device_mesh(axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """One for all programs: each would open sockets of its own."""
    return init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
