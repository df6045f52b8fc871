"""What must hold between the fields of a plan before anything reads it; what needs the model is the verifier's.

A plan for which this holds can be printed, explained, compared and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autopar.ir.mesh import MICROBATCH, LogicalMesh, check_axis_names
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan, Stage
from autopar.ir.reading import MalformedError, short
from autopar.ir.redistribution import TABLE


def check_consistent(plan: Plan) -> None:
    """Raises MalformedError or MeshError naming the field that does not go with the others."""
    for number, stage in enumerate(plan.stages):
        where = ("stages", number) if len(plan.stages) > 1 else ()
        _check_stage(stage, where)
        last, devices = stage.first_rank + stage.num_ranks - 1, plan.mesh.num_devices
        _expect(last < devices or not where, where, f"ranks of the {devices} of {plan.mesh}", f"some up to {last:,}")
    peak = plan.predicted.peak_bytes
    _expect(plan.memory_limit >= peak, ("memory_limit",), f"at least the predicted peak of {peak} bytes",
            str(plan.memory_limit))  # fmt: skip


def _check_stage(stage: Stage, where: tuple[Any, ...]) -> None:
    """Of a stage: as many types as axes everywhere, and steps and forks on axes that there are."""
    axes = stage.axes
    check_axis_names([axis.name for axis in axes])
    for number, axis in enumerate(axes):
        _expect(len(axis.shares) in (0, axis.size), (*where, "axes", number), f"{axis.size} shares",
                str(len(axis.shares)))  # fmt: skip
        _expect(axis.stride > 0 or axis.name == MICROBATCH, (*where, "axes", number), "neighbours a rank or more apart",
                "a distance of 0")  # fmt: skip
    for path, placement in _placements(stage):
        _expect(len(placement) == len(axes), (*where, *path), f"a type for each of {len(axes)} axes",
                " ".join(map(str, placement)) or "none")  # fmt: skip
    for number, item in enumerate(stage.redistributes):
        for step in item.steps:
            _expect(step.axis < len(axes), (*where, "redistributes", number), f"steps on one of {len(axes)} axes",
                    f"one on axis {step.axis}")  # fmt: skip
            _expect((step.before.kind, step.after.kind) in TABLE, (*where, "redistributes", number),
                    "steps of the table of redistributions", f"{step.before} -> {step.after}")  # fmt: skip
    _check_forks(stage, axes, where)


def _check_forks(stage: Stage, axes: LogicalMesh, where: tuple[Any, ...]) -> None:
    sizes = {axis.name: axis.size for axis in axes}
    taken: set[str] = set()
    for number, fork in enumerate(stage.forks):
        place = (*where, "forks", number)
        _expect(fork.axis in sizes, place, f"an axis of {', '.join(sizes) or 'none'}", short(repr(fork.axis)))
        coordinates = [branch.coordinate for branch in fork.branches]
        _expect(
            bool(coordinates) and max(coordinates) < sizes[fork.axis] and len({*coordinates}) == len(coordinates),
            place, f"branches at some of the coordinates below {sizes[fork.axis]}, each once", str(coordinates[:8]),
        )  # fmt: skip
        for branch in fork.branches:
            _expect(bool(branch.nodes), place, "operators in each branch", "none")
            odd = [name for name in branch.nodes if name not in stage.nodes or name in taken]
            _expect(not odd, place, "operators of the plan, each in one branch", short(repr(odd[:3])))
            taken.update(branch.nodes)


def _placements(stage: Stage) -> Iterator[tuple[tuple[Any, ...], Placement]]:
    """Each placement with the place where it stands."""
    yield from _named(stage.inputs, "inputs")
    yield from _named({name: kept.placement for name, kept in stage.storage.items()}, "storage")
    for name, node in stage.nodes.items():
        yield from ((("nodes", name), placement) for placement in (*node.operands, *node.results))
    for number, item in enumerate(stage.redistributes):
        yield ("redistributes", number), item.target


def _named(placements: Mapping[str, Placement], field: str) -> Iterator[tuple[tuple[str, str], Placement]]:
    return (((field, name), placement) for name, placement in placements.items())


def _expect(holds: bool, where: Iterable[Any], expected: str, found: str) -> None:
    if not holds:
        raise MalformedError(where, expected, found)
