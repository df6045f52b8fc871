"""What rungs share: a model's layers, and what each costs in one way to run it, found once for all meshes and batches.

What a layer takes of a microbatch depends on how many samples a rank has of it, on who shares it and on how it is
stored, hardly on how many ranks do the same beside it. So placements are solved, and layers played, where the first
rung asks for them (their home); elsewhere what changes with the number of ranks is scaled:

    what is stored in shards      by how many ranks share it                            `staged.templates.stored_as`
    sums and gathers of a step    by what the collective takes among so many ranks      `cost.collectives`

These are estimates: what is chosen by them is placed on its own mesh, simulated and verified.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.collector import cached_method
from autopar.cost import Profile
from autopar.cost.collectives import collective_time_ns
from autopar.interop import StageKind
from autopar.intraop import TradeOff
from autopar.ir.graph import Graph
from autopar.ir.placement import Axis
from autopar.planning import Place
from autopar.request import Request
from autopar.simulate import Incremental
from autopar.staged.layered import Layered
from autopar.staged.templates import copied_bytes, stored_as
from autopar.staged.ways import Int64Array, Setting, StageStrategy
from autopar.trace import find_blocks

_BUCKET_BYTES = 1 << 26
"""Of gradients that travel together, by which collectives among more and fewer ranks are compared."""
_OF_ONE_MESH = ("_known_short_place", "_known_kind", "_known_computed", "_known__scaled", "_known_fastest_here")
_OF_ALL = ("_known_part", "_known_short_part", "_known__layer_simulator", "_known_parameter_bytes")
"""Caches of `Layered`'s methods: those that depend on the mesh, and those that do not."""


@dataclass(eq=False)
class SharedLayers:
    """Of a model in one global batch, on one kind of device: all that does not depend on how many there are.

    homes: by likeness of settings, the rung and the setting where placements are solved; one for all batches.
    """

    layered: Layered
    homes: dict[Hashable, tuple[RungLayers, Setting]] = field(default_factory=dict)

    @cached_method
    def simulator(self, microbatches: int) -> Incremental:
        """Of plans of the whole model."""
        return Incremental(self.layered.part(microbatches).graph, self.layered.shared)

    def known(self) -> dict[str, Any]:
        """What `Layered` has of the model, found once."""
        own = self.layered
        _ = own.ends, own.num_experts, own.recomputations, own.batch, own.path_of_layer, own._short_members
        for name in _OF_ALL:
            vars(own).setdefault(name, {})
        return {name: value for name, value in vars(own).items() if name not in _OF_ONE_MESH}


def shared_layers(
    graph: Graph, request: Request, profile: Profile, beside: SharedLayers | None = None
) -> SharedLayers:  # fmt: skip
    """Of a graph on devices of a kind. beside: the same of another batch, with which homes are shared."""
    layered = Layered(graph, find_blocks(graph, request.constraints), request, profile)
    return SharedLayers(layered, {} if beside is None else beside.homes)


class RungLayers(Layered):
    """A model's layers on the devices of one rung, which costs are those of their homes."""

    def __init__(self, shared: SharedLayers, request: Request, at_home: bool = False) -> None:
        """at_home: all is placed on this rung's own mesh."""
        vars(self).update(shared.known())
        self._homes, self.request = {} if at_home else shared.homes, request

    def is_home(self, setting: Setting) -> bool:
        """Whether placements of a setting are found on this rung's mesh."""
        return self._home(setting) == (self, setting)

    def place_of(self, setting: Setting) -> Place:
        """The intra-op problem of its home."""
        rung, own = self._home(setting)
        return Layered.place_of(rung, own)

    def fastest(self, setting: Setting, work_s: float, seed: int) -> TradeOff:
        """That of its home, found once."""
        rung, own = self._home(setting)
        return rung.fastest_here(own, work_s, seed)

    @cached_method
    def fastest_here(self, setting: Setting, work_s: float, seed: int) -> TradeOff:
        """Of a setting that is at home on this rung."""
        return Layered.fastest(self, setting, work_s, seed)

    def kind(self, way: StageStrategy) -> StageKind:
        """What each layer costs: in its home, scaled."""
        rung, own = self._home(way.setting)
        kind: StageKind = Layered.kind(rung, StageStrategy(own, way.choice, way.recompute))
        return kind if own == way.setting and rung is self else self._scaled(kind, own, way)

    def _home(self, setting: Setting) -> tuple[RungLayers, Setting]:
        sizes = {axis.name: axis.size for axis in setting.axes}
        ranks = setting.num_devices // sizes.get("tp", 1)
        names, shared = tuple(sizes), (sizes.get("tp", 1), sizes.get("ep", 1), setting.sharing)
        samples = self.batch // setting.microbatches // ranks if setting.zero is not None else (self.request.mesh,)
        is_inside = setting.num_devices <= self.request.mesh.devices_per_node
        stored = setting.zero, setting.splits_sequence, setting.num_stages > 1, is_inside, setting.microbatches > 1
        free = () if setting.zero is not None else (self.batch, setting)
        return self._homes.setdefault((names, shared, samples, stored, free), (self, setting))

    @cached_method
    def _scaled(self, kind: StageKind, own: Setting, way: StageStrategy) -> StageKind:
        """What layers cost in another number of ranks."""
        setting = way.setting
        kind = stored_as(kind, own, setting, copied_bytes(self, setting))
        ratio = self._sum_ns(setting) / max(1.0, self._sum_ns(own))
        waits = kind.receive_ns - kind.travel_ns
        waits = _times(waits, ratio) if setting.zero == 3 else waits
        return replace(
            kind, key=way, num_devices=setting.num_devices, reduce_ns=_times(kind.reduce_ns, ratio),
            last_ns=_times(kind.last_ns, ratio), receive_ns=kind.travel_ns + waits,
        )  # fmt: skip

    def _sum_ns(self, setting: Setting) -> float:
        """What a bucket of gradients takes along the axis of data."""
        inner = math.prod(axis.size for axis in setting.axes if axis.name == "tp")
        axis = Axis("dp", setting.num_devices // inner, inner)
        return collective_time_ns(
            "reduce_scatter", _BUCKET_BYTES, axis, self.request.mesh.devices_per_node, self.shared
        )  # fmt: skip


def _times(values: Int64Array, ratio: float) -> Int64Array:
    found: Int64Array = np.rint(values * ratio).astype(np.int64)
    return found
