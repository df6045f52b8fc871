"""The submeshes that stages may have, and the logical shapes of each.

(1, 2^p): a part of a node. (k, all): whole nodes. Alpa (OSDI'22), section 5.2: these tile every mesh.
"""

from __future__ import annotations

from autopar.ir.mesh import LogicalMesh, Mesh, make_axes


def submesh_sizes(mesh: Mesh, most_stages: int) -> list[int]:
    """Numbers of devices of equal submeshes that tile the mesh, at most so many of them; the whole mesh first."""
    inside = [size for size in divisors(mesh.devices_per_node) if size & (size - 1) == 0]
    whole = [nodes * mesh.devices_per_node for nodes in divisors(mesh.nodes)]
    sizes = sorted({*inside, *whole}, reverse=True)
    return [size for size in sizes if mesh.num_devices // size <= most_stages]


def logical_shapes(num_devices: int, devices_per_node: int, with_third: bool = False) -> list[LogicalMesh]:
    """A submesh as one axis or two, outer first; of two the inner one is no longer than a node has devices. with_third:
    and as three, of which the inner two are so."""
    shapes: list[tuple[int, ...]] = [(num_devices,) if num_devices > 1 else ()]
    inner = [size for size in divisors(num_devices) if 1 < size <= devices_per_node and size < num_devices]
    shapes += [(num_devices // size, size) for size in inner]
    if with_third:
        shapes += [(num_devices // size, *pair) for size in inner for pair in _pairs(size)]
    return [make_axes(("d0", "d1", "d2")[: len(shape)], shape) for shape in shapes]


def _pairs(number: int) -> list[tuple[int, int]]:
    """Two factors above 1 of a number, the smaller one first."""
    return [(one, number // one) for one in divisors(number) if 1 < one <= number // one]


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [factor for factor in range(1, number + 1) if number % factor == 0]
