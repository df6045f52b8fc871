"""Shares: a mesh axis may give its ranks unequal parts of a batch, as unequal devices ask for.

    axis data=3, shares (2, 1, 1)       8 samples as 4 + 2 + 2, and what is computed from them alike

Only activations are cut so; what is stored (parameters and their gradients, buffers) is cut evenly, and used whole over
such an axis. Every length that is cut is a multiple of the sum of the shares, so that all of its parts are whole and
reshapes keep them whole: (8, 16) as (128) is 64 + 32 + 32. A loss that is a mean divides by the global count anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from autopar.errors import PlacementError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh, Mesh, coordinates
from autopar.ir.placement import Axis, Placement, format_placement
from autopar.ir.plan import Plan, Stage
from autopar.ir.redistribution import apply


def axis_text(axis: Axis) -> str:
    """ "dp=16", or "dp=16 (8 × 5, 8 × 3)" where ranks get so many of equal units each."""
    text = f"{axis.name}={axis.size}"
    runs = [(share, len(list(run))) for share, run in itertools.groupby(axis.shares)]
    return f"{text} ({', '.join(f'{count} × {share}' for share, count in runs)})" if runs else text


def alike_ranks(mesh: Mesh, axes: LogicalMesh) -> list[range]:
    """Neighbouring ranks, on axes over the whole mesh, whose devices and shares are the same."""
    kinds = []
    for rank, coordinate in enumerate(coordinates(axes)):
        group = mesh.group_of(range(rank, rank + 1))
        shares = tuple(axis.shares[index] for axis, index in zip(axes, coordinate, strict=True) if axis.shares)
        kinds.append((group.profile, group.devices_per_node, shares))
    ends = list(itertools.accumulate((len(list(run)) for _, run in itertools.groupby(kinds)), initial=0))
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def seen_from(axes: LogicalMesh, rank: int) -> LogicalMesh:
    """The axes with the rank's shares in the first place: what is said of rank 0 then holds for this one."""
    index_of = {axis: rank // axis.stride % axis.size for axis in axes if axis.shares}
    return tuple(
        axis._replace(shares=(*axis.shares[index:], *axis.shares[:index]))
        if (index := index_of.get(axis)) is not None
        else axis
        for axis in axes
    )


# The check ----------------------------------------


def check_axes_with_shares(plan: Plan) -> None:
    """That the shares of a plan are possible. Raises PlanError."""
    axes = [axis for stage in plan.stages for axis in stage.axes if axis.shares]
    for axis in axes:
        _check_axis(axis)
    if len(plan.stages) > 1 and axes:
        raise PlanError(f"expected shares in plans of one stage, found {axis_text(axes[0])} in one of several stages")
    forks = [fork for stage in plan.stages for fork in stage.forks]
    if forks and (axes or not plan.mesh.is_homogeneous):
        raise PlanError(
            f"expected branches on equal ranks with equal shares, found some on {forks[0].axis} of {plan.mesh}"
            + "".join(f" with {axis_text(axis)}" for axis in axes)
        )
    if len(axes) > 1:
        raise PlanError(f"expected shares on one axis, found {' and '.join(map(axis_text, axes))}")


def check_shares(graph: Graph, stage: Stage, evenly_inside: bool = False) -> None:
    """That shares cut only what they may, into whole parts. Raises PlacementError naming the tensor that is not so.

    evenly_inside: and that other axes cut these parts evenly, as reshapes need.
    """
    position = next((number for number, axis in enumerate(stage.axes) if axis.shares), None)
    if position is not None:
        _check_cuts(graph, stage, position, evenly_inside)


def _check_axis(axis: Axis) -> None:
    shares = axis.shares
    is_fine = len(shares) == axis.size and min(shares) > 0 and math.gcd(*shares) == 1
    if not is_fine:
        raise PlanError(
            f"expected shares of axis {axis.name} as {axis.size} positive numbers without a common factor, "
            f"found {list(shares)}"
        )


def _check_cuts(graph: Graph, stage: Stage, position: int, evenly_inside: bool) -> None:
    axis = stage.axes[position]
    for name, placement in _placements(graph, stage):
        type_ = placement[position]
        if type_.kind != "S":
            continue
        shape = graph.tensors[name].shape
        if name in graph.stored_by_tensor:
            raise PlacementError(
                f"expected {name} to be used whole over axis {axis.name}, which has shares, found "
                f"[{format_placement(placement)}]"
            )
        pairs = enumerate(zip(placement, stage.axes, strict=True))
        others = (pair for number, pair in pairs if number < position or (evenly_inside and number > position))
        slices = math.prod(other.size for other_type, other in others if other_type == type_)
        if shape[type_.dim] % (slices * axis.units):
            raise PlacementError(
                f"expected dim {type_.dim} of {name} {list(shape)} to be a multiple of {slices * axis.units}, which "
                f"{axis_text(axis)} cuts into whole parts, found [{format_placement(placement)}]; take other shares or "
                "another batch size"
            )


def _placements(graph: Graph, stage: Stage) -> Iterable[tuple[str, Placement]]:
    """Everything that operators read and make, and what activations are on the way between."""
    placed = dict(stage.inputs)
    yield from placed.items()
    for node in graph.nodes:
        found = stage.nodes[node.name]
        placed.update(zip(node.results, found.results, strict=True))
        yield from zip(node.results, found.results, strict=True)
        yield from zip(node.operands, found.operands, strict=True)
    for item in stage.redistributes:
        if item.tensor in graph.stored_by_tensor:
            continue
        placement = placed[item.tensor]
        for step in item.steps:
            placement = apply(step, placement)
            yield item.tensor, placement
