"""Placements along other axes.

axes before   d0 of 2, d1 of 4, the ranks of d1 next to each other
axes after    d0 of 8: it lies along both, so a tensor may only be placed alike on the two
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan


def on_axes(plan: Plan, axes: LogicalMesh) -> Plan | None:
    """The plan's placements along other axes over as many devices; None where an axis would have several types."""
    stage = plan.stage
    if stage.axes == axes:
        return plan
    origin = _origins(stage.axes, axes)
    try:
        return plan.placed(
            axes=axes,
            inputs={name: _along(placed, origin) for name, placed in stage.inputs.items()},
            storage={n: replace(kept, placement=_along(kept.placement, origin)) for n, kept in stage.storage.items()},
            nodes={
                name: replace(
                    own, operands=tuple([_along(p, origin) for p in own.operands]),
                    results=tuple([_along(p, origin) for p in own.results]),
                )
                for name, own in stage.nodes.items()
            },
        )  # fmt: skip
    except _Mixed:
        return None


class _Mixed(Exception):
    """An axis would have several types."""


def _origins(before: LogicalMesh, after: LogicalMesh) -> list[tuple[int, ...]]:
    """For each new axis, the old ones that it lies along, by strides in the same order of ranks."""
    found = []
    for axis in after:
        ends = axis.stride, axis.stride * axis.size
        found.append(
            tuple(n for n, old in enumerate(before) if old.stride < ends[1] and ends[0] < old.stride * old.size)
        )
    return found


def _along(placement: Placement, origin: Sequence[tuple[int, ...]]) -> Placement:
    types = []
    for old in origin:
        own = {placement[n] for n in old}
        if len(own) != 1:
            raise _Mixed
        types.append(own.pop())
    return tuple(types)
