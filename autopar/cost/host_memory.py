"""The memory of a device's host, and the link to it: where a plan may keep what the device does not hold.

    copy of b bytes       copy_ns + b / bandwidth of its direction, from and to pinned memory
    update on the host    bytes that it reads and writes (`memory.optimizer_moved_bytes`) / update_bandwidth

One link each device: both directions at once, each copy in its turn. A CPU rank has its tensors in the host's memory
already. Its host tier is simulated: tensors there do not count as the rank's, and the runtime delays each copy as a
link of the stated rates would (`runtime.host_link`), so that what is predicted can be measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost.provenance import Provenance


@dataclass(frozen=True)
class HostMemory:
    """What one device may use of its host. Bandwidths in bytes a second; a share of what devices of a node share.

    down_bandwidth: device to host; up_bandwidth: host to device; copy_ns: what any copy takes beside its bytes.
    update_bandwidth: what an optimizer's update on the host reads and writes; None where the host computes as the
    device does, which is then a CPU. is_simulated: device and host are one memory.
    """

    capacity_bytes: int
    down_bandwidth: float
    up_bandwidth: float
    copy_ns: int
    provenance: Provenance
    update_bandwidth: float | None = None
    is_simulated: bool = False

    def down_ns(self, num_bytes: int) -> int:
        """A copy to the host."""
        return self.copy_ns + round(num_bytes * 1e9 / self.down_bandwidth)

    def up_ns(self, num_bytes: int) -> int:
        """A copy from the host."""
        return self.copy_ns + round(num_bytes * 1e9 / self.up_bandwidth)


_SIMULATED = HostMemory(
    capacity_bytes=0,
    down_bandwidth=1e9,
    up_bandwidth=1e9,
    copy_ns=20_000,
    provenance=Provenance(
        "assumed",
        "a simulated link of 1 GB/s each way and 20 us a copy, to which the runtime delays copies; host_memory in the "
        "profile's file states another",
        "2026-11-27",
    ),
    is_simulated=True,
)


def simulated_host(capacity_bytes: int) -> HostMemory:
    """The host tier of a CPU rank whose profile states none: as much memory again, behind a slow link."""
    return replace(_SIMULATED, capacity_bytes=capacity_bytes)
