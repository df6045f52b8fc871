"""Meshes: the physical devices a program runs on, and the logical shapes they can be looked at as.

Ranks are numbered node by node. A logical mesh is a list of axes, outer first, whose sizes multiply to the
number of devices; each axis stays inside a node or crosses nodes according to its stride.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autopar.errors import MeshError
from autopar.ir.naming import is_axis_name, is_profile_name
from autopar.ir.placement import Axis
from autopar.ir.servers import Servers, checked_servers, parse_servers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LogicalMesh = tuple[Axis, ...]
MICROBATCH = "microbatch"  # the axis, outermost, whose "ranks" are microbatches that run one after another
MAX_AXES = 3
MAX_DEVICES = 2**20
#: shipped profiles of GPUs, by the words of their drivers' names
GPU_PROFILES = (
    "a100", "a100-40gb", "b200", "b300", "gb200", "gb300", "gh200", "h100", "h200", "l4", "l40s", "v100",
)  # fmt: skip


@dataclass(frozen=True)
class DeviceGroup:
    """Equal nodes of equal devices; `profile` names the cost profile of the device."""

    profile: str
    nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, init=False)
class Mesh:
    """The devices that a program is planned for.

    `Mesh("h100", nodes=8, devices_per_node=8)`, or for unequal devices a list of
    `(profile, nodes, devices_per_node)`. servers: spare hosts without devices that may sum gradients (`Servers`, or
    their number); their ranks come after those of the devices. Raises MeshError for sizes below 1.
    """

    groups: tuple[DeviceGroup, ...]
    servers: Servers | None = None

    def __init__(
        self, profile: str | list[tuple[str, int, int]], nodes: int = 1, devices_per_node: int = 1,
        servers: Servers | int | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(profile, (str, list, tuple)):
            raise MeshError(f"expected a cost profile's name or groups of devices, found {profile!r}")
        groups = tuple(map(_group, [(profile, nodes, devices_per_node)] if isinstance(profile, str) else profile))
        if not 1 <= sum(group.num_devices for group in groups) <= MAX_DEVICES:
            raise MeshError(f"expected 1 to {MAX_DEVICES:,} devices in groups of equal ones, found {list(groups)}")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "servers", checked_servers(servers))

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh, devices_per_node: int | None = None) -> Mesh:
        """The mesh of a running program; `devices_per_node` defaults to LOCAL_WORLD_SIZE, else one node."""
        import os

        count = device_mesh.size()
        per_node = devices_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", count))
        if count % per_node:
            raise MeshError(f"expected full nodes, found {count} devices with {per_node} a node")
        return cls(_profile_of(device_mesh.device_type), count // per_node, per_node)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads "h100:8x8" (nodes x devices a node), "cpu:4", or several joined by "+"; at the end "+servers:2", spare
        hosts, or "+servers:2@0.5", of half a node's link each."""
        *parts, last = text.split("+")
        if not last.startswith("servers:") or not parts:
            return cls([_parse_group(part) for part in (*parts, last)])
        return cls([_parse_group(part) for part in parts], servers=parse_servers(last.removeprefix("servers:")))

    @property
    def is_homogeneous(self) -> bool:
        return len({(group.profile, group.devices_per_node) for group in self.groups}) == 1

    @property
    def profile(self) -> str:
        """The cost profile's name; raises MeshError when the devices differ."""
        if not self.is_homogeneous:
            raise MeshError(f"expected equal devices, found {self}; unequal devices need pipeline stages")
        return self.groups[0].profile

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def devices_per_node(self) -> int:
        return self.groups[0].devices_per_node

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        nodes = 0
        for group in self.groups:
            if rank < group.num_devices:
                return nodes + rank // group.devices_per_node
            rank, nodes = rank - group.num_devices, nodes + group.nodes
        raise MeshError(f"expected a rank of {self}, found one that is {rank} beyond its last")

    def group_of(self, ranks: range | None = None) -> DeviceGroup:
        """The devices of neighbouring ranks (of all, when none are given) as one group of equal nodes.

        Raises MeshError where they are of several kinds.
        """
        ranks = range(self.num_devices) if ranks is None else ranks
        first, found = 0, []
        for group in self.groups:
            if max(ranks.start, first) < min(ranks.stop, first + group.num_devices):
                found.append(group)
            first += group.num_devices
        if len({(group.profile, group.devices_per_node) for group in found}) != 1:
            raise MeshError(
                f"expected ranks {ranks.start} to {ranks.stop - 1} of {self} on devices of one kind, found "
                f"{' and '.join(group.profile for group in found) or 'none'}; unequal devices need pipeline stages"
            )
        return replace(found[0], nodes=sum(group.nodes for group in found))

    def part(self, ranks: range) -> Mesh:
        """Neighbouring ranks as a mesh of their own, as far as nodes go: 2x4 for ranks 4 to 11 of 4x4.

        Ranks that neither lie in one node nor fill nodes count by the largest equal parts of nodes that they fill.
        Raises MeshError where their devices are of several kinds.
        """
        group = self.group_of(ranks)
        if self.node_of(ranks.start) == self.node_of(ranks[-1]):
            return Mesh(group.profile, 1, len(ranks))
        ahead = next(n for n in range(1, len(ranks)) if self.node_of(ranks[n]) != self.node_of(ranks.start))
        filled = math.gcd(ahead, len(ranks), group.devices_per_node)
        return Mesh(group.profile, len(ranks) // filled, filled)

    def __str__(self) -> str:
        devices = "+".join(f"{g.profile}:{g.nodes}x{g.devices_per_node}" for g in self.groups)
        return devices if self.servers is None else f"{devices}+{self.servers}"

    def to_json(self) -> list[list[Any]]:
        return [[g.profile, g.nodes, g.devices_per_node] for g in self.groups]


def checked(mesh: Any) -> Mesh:
    """The mesh, if it is one that a program can be planned for: of whole devices. Raises MeshError."""
    if not isinstance(mesh, Mesh):
        raise MeshError(f'expected a mesh such as autopar.Mesh("h100", nodes=2, devices_per_node=8), found {mesh!r}')
    if not all(type(count) is int for group in mesh.groups for count in (group.nodes, group.devices_per_node)):
        raise MeshError(f"expected nodes and devices in whole numbers, found {mesh}")
    return mesh


def _group(row: Any) -> DeviceGroup:
    if not isinstance(row, (tuple, list)) or len(row) != 3:
        raise MeshError(f"expected groups of devices as (profile, nodes, devices a node), found {row!r}")
    profile, nodes, devices = row
    if not is_profile_name(profile):
        raise MeshError(f"expected the name of a cost profile, or the path of its JSON file, found {profile!r}")
    if not all(isinstance(count, (int, float)) and count >= 1 for count in (nodes, devices)):
        raise MeshError(f"expected at least one node and one device a node, found {row!r}")
    return DeviceGroup(profile, nodes, devices)


def _parse_group(text: str) -> tuple[str, int, int]:
    name, _, sizes = text.partition(":")
    numbers = sizes.split("x") if sizes else ["1"]
    if not name or len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise MeshError(f'expected a mesh such as "h100:8x8" or "cpu:4", found {text!r}')
    nodes, devices = numbers if len(numbers) == 2 else ["1", numbers[0]]
    return name, int(nodes), int(devices)


def _profile_of(device_type: str) -> str:
    if device_type == "cpu":
        return "cpu"
    import torch

    return profile_of_device(torch.cuda.get_device_name())


def profile_of_device(name: str) -> str:
    """The shipped profile of a GPU, by what its driver calls it: the one with most words of its own in that name
    ("NVIDIA A100-SXM4-40GB" is `a100-40gb`, and "NVIDIA GH200 480GB" no `h200`). Raises MeshError where there is none.
    """
    words = set(re.split(r"[\s_-]+", name.lower()))
    known = [profile for profile in GPU_PROFILES if set(profile.split("-")) <= words]
    if not known:
        raise MeshError(f"expected a device with a cost profile, found {name!r}; build the Mesh with a profile's name")
    return max(known, key=lambda profile: profile.count("-"))


def make_axes(names: tuple[str, ...], sizes: tuple[int, ...]) -> LogicalMesh:
    """Axes in row-major order: the last one joins neighbouring ranks. Raises MeshError for names that are none."""
    check_axis_names(names)
    strides = [math.prod(sizes[position + 1 :]) for position in range(len(sizes))]
    return tuple(Axis(*fields) for fields in zip(names, sizes, strides, strict=True))


def unnamed_text(axes: LogicalMesh) -> str:
    """The axes, whatever they are called: equal where what is found out about a graph is the same."""
    return repr([axis[1:] for axis in axes])


def check_axis_names(names: Sequence[str]) -> None:
    """Raises MeshError where emitted code could not call its axes so."""
    for name in names:
        if not is_axis_name(name) or name == MICROBATCH or names.count(name) > 1:
            raise MeshError(f"expected names of mesh axes as identifiers of their own, none twice, found {name!r}")


def logical_meshes(mesh: Mesh) -> list[LogicalMesh]:
    """Every way to look at the mesh as at most `MAX_AXES` axes, each inside a node or across nodes.

    Orders of equal-level axes differ in nothing the cost model sees, so one order of each stands for all; one
    flat axis over everything is added for meshes of several nodes.
    """
    shapes = {
        outer + inner
        for outer in _factorisations(mesh.nodes)
        for inner in _factorisations(mesh.devices_per_node)
        if len(outer + inner) <= MAX_AXES
    }
    shapes.add((mesh.num_devices,) if mesh.num_devices > 1 else ())
    return [make_axes(("d0", "d1", "d2")[: len(shape)], shape) for shape in sorted(shapes, key=lambda s: (len(s), s))]


def _factorisations(number: int) -> Iterator[tuple[int, ...]]:
    """Every non-decreasing tuple of factors above 1 with the given product; () for 1."""

    def split(rest: int, least: int) -> Iterator[tuple[int, ...]]:
        if rest == 1:
            yield ()
        for factor in range(least, rest + 1):
            if rest % factor == 0:
                yield from ((factor, *tail) for tail in split(rest // factor, factor))

    return split(number, 2)


def coordinates(axes: LogicalMesh) -> list[tuple[int, ...]]:
    """The coordinate of each rank, in rank order."""
    return list(itertools.product(*(range(axis.size) for axis in axes)))


def ranks_within_node(axis: Axis, devices_per_node: int) -> int:
    """How many ranks of a group along the axis share a node (1 when neighbours are nodes apart)."""
    return math.gcd(axis.size, max(1, devices_per_node // axis.stride)) if axis.stride < devices_per_node else 1
