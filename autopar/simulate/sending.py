"""What a rank sends, priced: the collectives of redistributions, those inside operators, copies from and to the host.

Where ranks of other devices, or with other shares of a batch, take part, a collective lasts as long as on the slowest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from autopar.cost import Profile, beside_compute_ns, collective_time_ns, waits_along
from autopar.cost.profile import ACROSS, INSIDE, host_of
from autopar.cost.servers import SERVED, summing_bytes
from autopar.ir.mesh import LogicalMesh, ranks_within_node
from autopar.ir.placement import Axis
from autopar.ir.redistribution import Step, gradient_collectives
from autopar.ops.inner import Inner
from autopar.simulate.host_copies import AXIS, DOWN, UP, is_copy
from autopar.simulate.program import Transmission

Sizes = Sequence[tuple[int, int]]
"""Bytes of each step, forward and backward."""


class OtherLane(NamedTuple):
    """Ranks that take part in the same collectives, but have other devices or other shares of a batch. joined: the
    axes along which they do."""

    axes: LogicalMesh
    per_node: int
    profile: Profile
    joined: frozenset[int]


class SendPrices:
    """Prices of what ranks send along axes of which `per_node` neighbours share a node. others: lanes that it lasts as
    long on."""

    def __init__(self, axes: LogicalMesh, per_node: int, profile: Profile, others: Sequence[OtherLane] = ()) -> None:
        self.axes, self.per_node, self.profile, self.others = axes, per_node, profile, others
        self._known: dict[Hashable, Transmission] = {}

    def collective(
        self, name: str, axis: int, num_bytes: int, elsewhere: tuple[int, ...] = (), joint: Axis | None = None
    ) -> Transmission:
        """elsewhere: bytes on other lanes, where they are others. joint: the axis and others as one, where all their
        ranks talk, which are of one kind."""
        key = (name, axis, num_bytes, elsewhere, joint)
        if key not in self._known:
            self._known[key] = self._priced(*key)
        return self._known[key]

    def _priced(
        self, name: str, axis: int, num_bytes: int, elsewhere: tuple[int, ...], joint: Axis | None
    ) -> Transmission:
        mesh_axis = joint or self.axes[axis]
        inside = ranks_within_node(mesh_axis, self.per_node) == mesh_axis.size and name != SERVED
        level = INSIDE if inside else ACROSS
        levels = [ranks_within_node(each, self.per_node) == each.size for each in self.axes if each.size > 1]
        duration = collective_time_ns(name, num_bytes, mesh_axis, self.per_node, self.profile)
        slowed = self.profile.beside_compute(level)
        for lane, size in zip(self.others, elsewhere or (num_bytes,) * len(self.others), strict=True):
            if axis in lane.joined:
                on_lane = collective_time_ns(name, size, lane.axes[axis], lane.per_node, lane.profile)
                duration, slowed = max(duration, on_lane), max(slowed, lane.profile.beside_compute(level))
        return Transmission(
            name,
            level,
            axis,
            num_bytes,
            duration,
            waits_along(mesh_axis, self.per_node, self.profile),
            beside_ns=round(duration * slowed),
            num_ranks=mesh_axis.size,
            is_shared=levels.count(inside) > 1,
            room_bytes=self._room_bytes(mesh_axis, num_bytes) if name == SERVED else 0,
        )

    def _room_bytes(self, axis: Axis, num_bytes: int) -> int:
        assert self.profile.servers is not None, "sums go over the servers of a mesh that has some"
        return summing_bytes(num_bytes, axis.size, ranks_within_node(axis, self.per_node), self.profile.servers)

    def of_steps(
        self, steps: Sequence[Step], sizes: Sizes, direction: int, elsewhere: Sequence[Sizes] = ()
    ) -> tuple[Transmission, ...]:
        """The collectives of a route, in the order of the direction: forward (0) or backward. elsewhere: sizes on other
        lanes, where they are others."""
        if direction and any(step.parts > 1 for step in steps):
            return tuple([self.collective(*sent) for sent in gradient_collectives(steps, sizes, self.axes)])
        rows = list(zip(steps, sizes, *elsewhere, strict=True))
        return tuple(
            self.host_copy(size[direction], direction)
            if is_copy(step)
            else self.collective(
                step.transfers[direction].collective or "", step.axis, size[direction],
                tuple([other[direction] for other in more]),
            )
            for step, size, *more in (rows if direction == 0 else reversed(rows))
            if is_copy(step) or (step.transfers[direction].collective and self.axes[step.axis].size > 1)
        )  # fmt: skip

    def host_copy(self, num_bytes: int, direction: int) -> Transmission:
        """Of what is stored to the device (0), or of its gradient to the host, where it is added to what is there of
        earlier microbatches."""
        host = host_of(self.profile)
        duration = host.up_ns(num_bytes) if direction == 0 else host.down_ns(num_bytes)
        name = UP if direction == 0 else DOWN
        return Transmission(name, name, AXIS, num_bytes, duration, beside_ns=duration)

    def inside(self, sent: Sequence[Sequence[Inner]], compute_ns: int) -> tuple[Transmission, ...]:
        """What an operator sends in one of its passes, which computes so long. sent: on each lane, the own one
        first."""
        rows = [row for row in zip(*sent, strict=True) if self.axes[row[0].axis].size > 1]
        return tuple([self._inside(compute_ns, *row) for row in rows])

    def _inside(self, compute_ns: int, inner: Inner, *elsewhere: Inner) -> Transmission:
        """What is sent early holds up nothing: its way is over when its operator begins. Of what is sent beside the
        operator's own computing, the rest counts."""
        sizes = tuple([other.priced_bytes for other in elsewhere])
        joint = inner.along(self.axes) if inner.also else None
        sent = self.collective(inner.collective, inner.axis, inner.priced_bytes, sizes, joint)
        if inner.is_beside:
            axis, size = inner.along(self.axes), inner.priced_bytes
            longer = beside_compute_ns(
                sent.collective, size, compute_ns, axis, self.per_node, self.profile, inner.beside_share, inner.messages
            )
            return sent._replace(duration_ns=longer, beside_ns=longer)
        return sent._replace(duration_ns=0, waits=None, is_early=True) if inner.is_early else sent
