"""Spare hosts that sum gradients for the devices that train, and how a sum is split between both.

A server's host has no device and keeps no parameters. Each worker of a sum sends every summing rank its part of the
gradient; that rank adds the parts up in the order of the workers, and sends the sum back to all of them. What is summed
is the gradient alone: the update stays with the workers (Jiang et al., OSDI'20, "BytePS", section 4.1; the servers
themselves are those of Li et al., OSDI'14).

    n  workers of a sum, r of them in a node;   k  servers;   v  a server's link over a node's
    w  the part of a gradient that each worker sums, s = (1 − n w) / k that of each server

In each direction, a node's link carries 1 + w (n − 2 r) of a gradient for each of its devices, a server's link s for
each device of all nodes. `split` takes the w at which both take as long: for r = 1 and v = 1 it is BytePS's,
(n − k) / (n² + k n − 2 k); 0 where servers do not need help.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autopar.errors import MeshError

MOST = 1 << 12  # servers
_FINEST = 64  # parts of which a worker sums some, for each of a server's


@dataclass(frozen=True)
class Servers:
    """Spare hosts of a mesh, one summing rank each. speed: of a host's link to the others, over that of a node."""

    count: int
    speed: float = 1.0

    def __str__(self) -> str:
        return f"servers:{self.count}" + ("" if self.speed == 1 else f"@{self.speed:.9g}")

    def to_json(self) -> dict[str, Any]:
        """As plan files have it."""
        return {"count": self.count, "speed": self.speed}


@dataclass(frozen=True)
class ServerHosts:
    """Servers as a cost model sees them: beside so many nodes, of so many devices together."""

    servers: Servers
    nodes: int
    devices: int


def checked_servers(servers: Any) -> Servers | None:
    """What a mesh was given: their number, or `Servers`; None for none. Raises MeshError for anything else."""
    if servers is None:
        return None
    found = Servers(servers) if type(servers) is int else servers
    is_whole = isinstance(found, Servers) and type(found.count) is int and 1 <= found.count <= MOST
    if not is_whole or not isinstance(found.speed, (int, float)) or not 1e-3 <= found.speed <= 1e3:
        raise MeshError(
            f"expected 1 to {MOST:,} servers, with links of 0.001 to 1,000 times the speed of a node's, found "
            f"{servers!r}; give servers=2, or autopar.Servers(2, speed=0.5)"
        )
    return Servers(found.count, float(found.speed))


def parse_servers(text: str) -> Servers:
    """Reads "2" or "2@0.5", what follows "servers:" in a mesh's text. Raises MeshError."""
    count, at, speed = text.partition("@")
    try:
        return checked_servers(Servers(int(count), float(speed) if at else 1.0)) or Servers(1)
    except ValueError:
        raise MeshError(f'expected servers such as "servers:2" or "servers:2@0.5", found {text!r}') from None


def split(servers: Servers, workers: int, inside: int, nodes: int) -> tuple[int, int]:
    """How many of equal parts of a gradient each worker sums, and each server, so that their links end together.

    workers: of a sum, with `inside` of them in each node; nodes: of all devices of the mesh, which do the same side by
    side.
    """
    load = Fraction(nodes, servers.count) / Fraction(servers.speed).limit_denominator(1000)
    if load <= 1:  # all of it on the servers takes their links no longer than those of the nodes
        return 0, 1
    own = (load - 1) / (workers - 2 * inside + load * workers)
    theirs = (1 - workers * own) / servers.count
    if theirs * _FINEST < own:
        return 1, 0
    ratio = (own / theirs).limit_denominator(_FINEST)
    return ratio.numerator, ratio.denominator


def node_share(parts: tuple[int, int], servers: int, workers: int, inside: int) -> float:
    """Of a gradient, for each device of a node, what the node's link carries in each direction."""
    return 1 + parts[0] / total(parts, servers, workers) * (workers - 2 * inside)


def server_share(parts: tuple[int, int], servers: int, workers: int) -> float:
    """Of a gradient, for each worker, what a server's link carries in each direction."""
    return parts[1] / total(parts, servers, workers)


def total(parts: tuple[int, int], servers: int, workers: int) -> int:
    """Equal parts of a gradient, of all that sum."""
    return workers * parts[0] + servers * parts[1]
