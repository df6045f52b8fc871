"""How long an operator takes for what it sends inside."""

from __future__ import annotations

from autopar.cost.collectives import beside_compute_ns, collective_time_ns
from autopar.cost.profile import Profile
from autopar.ir.mesh import LogicalMesh
from autopar.ops.inner import Inner


def inner_time_ns(inner: Inner, compute_ns: int, axes: LogicalMesh, devices_per_node: int, profile: Profile) -> int:
    """Nanoseconds of one collective inside an operator that computes so long: of what is under way beside that, the
    rest."""
    kind, size, axis = inner.collective, inner.priced_bytes, inner.along(axes)
    if inner.is_beside:
        return beside_compute_ns(
            kind, size, compute_ns, axis, devices_per_node, profile, inner.beside_share, inner.messages
        )
    return collective_time_ns(kind, size, axis, devices_per_node, profile)
