"""The mesh as one rank sees it: named axes, this rank's coordinate on each, and the groups to talk to.

Ranks are numbered row-major over the axes, the outermost axis first, as in `torch.distributed.DeviceMesh`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # torch lists no exports
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.errors import WorldError
from autopar.runtime.host_link import HostLink

#: seconds that a collective waits for a rank before it gives up, where the program makes the groups itself
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One mesh axis: its name, its size, this rank's coordinate, and the ranks that differ in it alone.

    shares: how many of equal units each rank gets of a dim that is cut; empty where all get as much (`SHARES`).
    """

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None  # None where size is 1
    is_gloo: bool = False
    timeout_s: float | None = None  # for how long a collective waits; None: as whoever made the group says
    late: list[Callable[[], None]] = field(default_factory=list, repr=False)  # to be waited for when the step ends
    shares: tuple[int, ...] = ()


class SumsElsewhere(Protocol):
    """What sums over an axis otherwise than its ranks among themselves (`servers`)."""

    def start(self, flat: torch.Tensor) -> Future[None]:
        """Sums a flat buffer over the axis, in place, after those that were started before."""


@dataclass(slots=True, eq=False)
class Progress:
    """Where a step is: the microbatch that runs, the count by which its mean loss is divided, and what else is known of
    all microbatches, by the tensor's name.

    is_again: what runs is a block that the backward pass recomputes. kept_call: in the forward pass, the outermost call
    around what runs that keeps nothing, and runs again.
    """

    microbatch: int = 0
    count: torch.Tensor | float | None = None
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    is_again: bool = False
    kept_call: object | None = None


Names = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RankMesh:
    """All axes, outermost first. `device_mesh` is None for a program of one rank without process groups.

    shares: by axis, where ranks get different parts of a batch. Parameters are cut evenly, by `axes`. joint: axes of
    several that also talk as one, by their names. apart: the axis of copies of the parameters that meet otherwise than
    by the sum of their gradients (`copies`); empty where there is none. servers: by axis, what sums gradients over it
    beside the ranks along it.
    """

    axes: tuple[Axis, ...]
    device_mesh: DeviceMesh | None
    device: torch.device
    timeout_s: float | None = None
    progress: Progress = field(default_factory=Progress)
    shares: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    joint: Mapping[Names, Axis] = field(default_factory=dict)
    apart: str = ""
    link: HostLink | None = None
    servers: Mapping[str, SumsElsewhere] = field(default_factory=dict)

    @cached_property
    def host_link(self) -> HostLink:
        """Between the device and its host; all meshes of a rank share one where the program says its rates."""
        return self.link or HostLink(self.device)

    @cached_property
    def batch_axes(self) -> tuple[Axis, ...]:
        """The axes as they cut inputs and what is computed from them."""
        return tuple(replace(axis, shares=self.shares.get(axis.name, ())) for axis in self.axes)

    def __getitem__(self, name: str) -> Axis:
        """An axis as it cuts inputs and what is computed from them."""
        return next(axis for axis in self.batch_axes if axis.name == name)

    def joined(self, *names: str) -> Axis:
        """All ranks of some axes as one, in the order of their ranks; the program says which it joins."""
        return self.joint[names]

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(axis.size for axis in self.axes)


def make_rank_mesh(
    sizes: Mapping[str, int],
    device_mesh: DeviceMesh | None = None,
    device: torch.device | None = None,
    timeout_s: float = TIMEOUT_S,
    joined: Sequence[Names] = (),
) -> RankMesh:
    """Makes this rank's view of a mesh with the given axis sizes. joined: the axes that also talk as one.

    Initialises the default process group when more than one rank is asked for and there is none (gloo on
    CPUs, NCCL on CUDA devices). The groups that are made here wait `timeout_s` seconds for a rank. Raises WorldError
    when the processes that run are not as many as the axes ask for.
    """
    device = device or _default_device(device_mesh)
    if math.prod(sizes.values()) == 1 and device_mesh is None:
        return RankMesh(tuple(Axis(name, 1, 0, None) for name in sizes), None, device)
    known_s = None
    if device_mesh is None:
        _check_world(sizes, start_process_group(device, timeout_s))
        device_mesh, known_s = _make_device_mesh(sizes, device, timeout_s), timeout_s
    assert device_mesh is not None, "every rank is in the mesh of all ranks"
    _check_device_mesh(sizes, device_mesh)
    axes = tuple(_axis(device_mesh, name, size, known_s) for name, size in sizes.items())
    if joined and device_mesh.size() != dist.get_world_size():
        raise WorldError(
            f"the program needs a DeviceMesh over all {dist.get_world_size()} ranks, since axes {joined[0]} also talk "
            f"as one, found one over {device_mesh.size()}; give one over all, or none"
        )
    joint = {names: _joint_axis(sizes, device_mesh.mesh, names, timeout_s) for names in joined}
    return RankMesh(axes, device_mesh, device, known_s, joint=joint)


def _joint_axis(sizes: Mapping[str, int], ranks: torch.Tensor, names: Names, timeout_s: float) -> Axis:
    """Of a mesh of these ranks. All of the world call this; what those get that are not in the mesh is nothing."""
    grid, dims = ranks.view(*sizes.values()), [[*sizes].index(name) for name in names]
    rows = grid.movedim(dims, [*range(-len(dims), 0)]).reshape(-1, math.prod(sizes[name] for name in names)).tolist()
    group = own_group(tuple(map(tuple, rows)), timeout_s)
    index = next((row.index(dist.get_rank()) for row in rows if dist.get_rank() in row), 0)
    is_gloo = group is not None and dist.get_backend(group) == "gloo"
    return Axis("+".join(names), len(rows[0]), index, group, is_gloo, timeout_s)


def _make_device_mesh(
    sizes: Mapping[str, int], device: torch.device, timeout_s: float, ranks: Sequence[int] | None = None
) -> DeviceMesh | None:
    """As `init_device_mesh` does, which has no way to say how long its groups wait. Of some ranks, all of the world
    take part, and those that are not among them get None."""
    ranks = range(math.prod(sizes.values())) if ranks is None else ranks
    grid = torch.tensor(ranks).view(*sizes.values())
    groups = []
    for dim in range(grid.dim()):
        rows = grid.movedim(dim, -1).reshape(-1, grid.size(dim)).tolist()
        groups.append(own_group(tuple(map(tuple, rows)), timeout_s))
    members = [group for group in groups if group is not None]
    if len(members) < len(groups):
        return None
    return DeviceMesh.from_group(members, device.type, grid, mesh_dim_names=tuple(sizes))


def make_submeshes(
    submeshes: Sequence[tuple[Sequence[int], Mapping[str, int], Sequence[Names]]],
    device: torch.device,
    timeout_s: float,
) -> list[RankMesh | None]:
    """This rank's view of each submesh, given by its ranks, axis sizes, and axes that also talk as one; None of one
    that it is not in.

    All ranks of the world call this, since each takes part in making every group.
    """
    return [_make_submesh(*submesh, device, timeout_s) for submesh in submeshes]


def _make_submesh(
    ranks: Sequence[int], sizes: Mapping[str, int], joined: Sequence[Names], device: torch.device, timeout_s: float
) -> RankMesh | None:
    if len(ranks) == 1:
        axes = tuple(Axis(name, 1, 0, None) for name in sizes)
        return RankMesh(axes, None, device, timeout_s) if dist.get_rank() == ranks[0] else None
    device_mesh = _make_device_mesh(sizes, device, timeout_s, ranks)
    joint = {names: _joint_axis(sizes, torch.tensor(ranks), names, timeout_s) for names in joined}
    if device_mesh is None:
        return None
    axes = tuple(_axis(device_mesh, *item, timeout_s) for item in sizes.items())
    return RankMesh(axes, device_mesh, device, timeout_s, joint=joint)


def world_of(
    count: int, device_mesh: DeviceMesh | None, device: torch.device | None, timeout_s: float
) -> tuple[torch.device, list[int]]:
    """The device of this rank and the ranks of a program of several stages, which starts the process group if need be.

    Raises WorldError when they are not as many as the stages ask for.
    """
    device = device or _default_device(device_mesh)
    if device_mesh is None:
        _check_world({"stages": count}, start_process_group(device, timeout_s))
        return device, list(range(count))
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != list(range(count)):
        raise WorldError(
            f"the program needs a DeviceMesh over ranks 0 to {count - 1} in order, found one over {len(ranks)} ranks, "
            f"{ranks[:8]}; give none, or plan again for it"
        )
    return device, ranks


Rows = tuple[tuple[int, ...], ...]
_groups: dict[tuple[Rows, float, str], tuple[dist.ProcessGroup, dist.ProcessGroup | None]] = {}  # world, own group


def own_group(
    rows: Rows, timeout_s: float, purpose: str = "", backend: str | None = None
) -> dist.ProcessGroup | None:  # fmt: skip
    """The group that this rank is in of those that the rows of ranks are; None where it is in no row. backend: as the
    world has it, where none is said, and then of a purpose of its own.

    All programs of a process share it: each group costs connections and threads until the process ends.
    """
    world = dist.group.WORLD
    known = _groups.get((rows, timeout_s, purpose))
    if known is not None and known[0] is world:
        return known[1]
    timeout = timedelta(seconds=timeout_s)
    made = dist.new_subgroups_by_enumeration(list(map(list, rows)), timeout=timeout, backend=backend)  # type: ignore[no-untyped-call] # torch's
    group: dist.ProcessGroup | None = made[0]
    assert world is not None, "programs of several ranks run in a process group"
    _groups[rows, timeout_s, purpose] = world, group
    return group


def timeout_of(group: dist.ProcessGroup) -> float | None:
    """Seconds that one of the groups of `own_group` waits for its ranks; None for another."""
    return next((timeout_s for (_, timeout_s, _), (_, own) in _groups.items() if own is group), None)


def _default_device(device_mesh: DeviceMesh | None) -> torch.device:
    kind = device_mesh.device_type if device_mesh is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", torch.get_device_module(kind).current_device()))
    torch.get_device_module(kind).set_device(index)
    return torch.device(kind, index)


def start_process_group(device: torch.device | None, timeout_s: float) -> int:
    """The number of processes that run together; makes their group where there is none."""
    if not dist.is_initialized():
        found = int(os.environ.get("WORLD_SIZE", "1"))
        if found == 1:
            return 1
        device = device or _default_device(None)
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
        store = _store_of_restart(found, timeout)
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(
                backend, store=store, rank=int(os.environ["RANK"]), world_size=found, timeout=timeout
            )
    return dist.get_world_size()


def _store_of_restart(world: int, timeout: timedelta) -> Store | None:
    """A part of torchrun's store for ranks that it has started anew; None where there is nothing to keep apart.

    The store outlives the ranks: gloo would find the addresses of those that were lost, and connect to nobody.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not restarts or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world, is_master=False, timeout=timeout)
    return PrefixStore(f"restart_{restarts}", store)


def _check_world(sizes: Mapping[str, int], found: int) -> None:
    expected = math.prod(sizes.values())
    if found != expected:
        raise WorldError(
            f"the program needs {expected} ranks (mesh {_show(sizes)}), found {found} running; "
            f"start it with `torchrun --nproc-per-node {expected} …`, or plan again for {found} ranks"
        )


def _check_device_mesh(sizes: Mapping[str, int], device_mesh: DeviceMesh) -> None:
    names = device_mesh.mesh_dim_names or ()
    found = dict(zip(names, device_mesh.shape, strict=False))
    if found != dict(sizes) or tuple(names) != tuple(sizes):
        raise WorldError(
            f"the program needs a DeviceMesh with axes {_show(sizes)}, found {_show(found)} on "
            f"{device_mesh.size()} ranks; name its dimensions alike (mesh_dim_names), or plan again for it"
        )


def _axis(device_mesh: DeviceMesh, name: str, size: int, timeout_s: float | None) -> Axis:
    if size == 1:
        return Axis(name, 1, 0, None)
    group = device_mesh.get_group(name)
    return Axis(name, size, device_mesh.get_local_rank(name), group, dist.get_backend(group) == "gloo", timeout_s)


def _show(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in sizes.items()) or "(none)"
