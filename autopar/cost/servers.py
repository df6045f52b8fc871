"""How long the sum of a gradient over servers takes, as `runtime.servers` makes it.

A buffer goes in pieces of at most `PIECE_BYTES`: of each, parts are pushed to all that sum, and sums are pulled from
them, while the next piece is pushed. So a direction of each link carries what `ir.servers` says, and the last piece's
way back comes on top:

    cσ + 2α + b (1 + 1/c) max(node's share · β, server's share · nodes / v · β, server's share · devices · γ)

b bytes in c pieces; v, the speed of a server's link over a node's; β, the time of a byte on a node's link as one of its
devices sees it while all of them talk; γ, that of a rank that passes once over a byte, as a server does over what it
receives. All devices of all nodes do the same meanwhile.
"""

from __future__ import annotations

import math

from autopar.ir.servers import ServerHosts, node_share, server_share, split, total
from autopar.runtime.packing import PIECE_BYTES

SERVED = "servers"  # as bytes that are handed to them are counted


def served_sum_ns(
    num_bytes: int, workers: int, inside: int, hosts: ServerHosts, wires: list[tuple[float, float]],
    start_ns: float, pass_ns_per_byte: float,
) -> float:  # fmt: skip
    """Nanoseconds of one sum over `workers` ranks, of which a node has `inside`, while all others do the same.

    wires: protocols of the link between nodes, as a device sees it while all of its node talk: nanoseconds a message,
    and a byte.
    """
    servers = hosts.servers
    parts = split(servers, workers, inside, hosts.nodes)
    node = node_share(parts, servers.count, workers, inside)
    received = server_share(parts, servers.count, workers) * hosts.devices
    per_node = hosts.devices / hosts.nodes
    asked = max(node, received / per_node / servers.speed)
    pieces = math.ceil(num_bytes / PIECE_BYTES)
    sent = min(
        2 * alpha + num_bytes * max(asked * beta, received * pass_ns_per_byte) * (1 + 1 / pieces)
        for alpha, beta in wires
    )
    return pieces * start_ns + sent


def summing_bytes(num_bytes: int, workers: int, inside: int, hosts: ServerHosts) -> int:
    """Memory in which a worker receives, sums and sends back its parts of two pieces."""
    parts = split(hosts.servers, workers, inside, hosts.nodes)
    own = min(num_bytes, PIECE_BYTES) * parts[0] / total(parts, hosts.servers.count, workers)
    return math.ceil(2 * (2 * workers + 1) * own)
