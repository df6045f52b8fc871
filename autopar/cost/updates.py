"""What a step of an optimizer takes that looks at whole tensors, beside moving what a rank stores.

    gathers    parameter, gradient and state, over each axis that shards the parameter, on all of its ranks
    products   of matrices, on each rank that has the parameter: Newton and Schulz's of Muon, five times x ← x·p(xᵀx);
               eigenvectors of Shampoo's two statistics, which take some 25 n³ (Golub and Van Loan, table 8.3.1 and
               LAPACK's divide and conquer lie between 9 n³ and 25 n³)

Times of updates are summed in bytes moved, so that is what these are told in: bytes that take as long.
"""

from __future__ import annotations

import math

from autopar.cost.collectives import collective_time_ns
from autopar.cost.compute import optimizer_time_ns
from autopar.cost.memory import gathered_bytes, optimizer_moved_bytes, optimizer_of
from autopar.cost.profile import Profile
from autopar.ir.placement import Axis, Placement, Shape, local_shape

_UNIT_BYTES = 2**30


def update_bytes(
    optimizer: str | None, whole: Shape, dtype: str, placement: Placement, axes: tuple[Axis, ...],
    devices_per_node: int, profile: Profile,
) -> int:  # fmt: skip
    """Bytes that one update of a stored parameter moves, with those that take as long as its gathers and products."""
    shape = local_shape(whole, placement, axes)
    moved = optimizer_moved_bytes(optimizer, shape, dtype, whole)
    if optimizer_of(optimizer).is_elementwise:
        return moved
    taken_ns = _gathers_ns(gathered_bytes(optimizer, shape, whole, dtype), placement, axes, devices_per_node, profile)
    taken_ns += round(_products_flops(optimizer, whole) * 1e9 / profile.peak_flops(dtype))
    unit_ns = optimizer_time_ns(_UNIT_BYTES, 0, 0, False, profile)
    return moved + taken_ns * _UNIT_BYTES // max(unit_ns, 1)


def _gathers_ns(
    num_bytes: int, placement: Placement, axes: tuple[Axis, ...], devices_per_node: int, profile: Profile
) -> int:
    """From the inner axis out, as the runtime does: the inner ones move less."""
    taken_ns = 0
    for kind, axis in zip(placement, axes, strict=True):
        if kind.kind == "S" and num_bytes:
            taken_ns += collective_time_ns("all_gather", num_bytes, axis, devices_per_node, profile)
            num_bytes //= max(axis.size, 1)
    return taken_ns


def _products_flops(optimizer: str | None, shape: Shape) -> int:
    if len(shape) != 2:
        return 0
    rows, columns = min(shape), max(shape)
    if optimizer == "muon":
        return 5 * (4 * rows * rows * columns + 2 * rows**3)
    if optimizer == "shampoo":
        return sum(25 * length**3 for length in shape) + 4 * math.prod(shape) * sum(shape)
    return 0
