"""Branches: parts of the graph that run on one coordinate of a mesh axis alone, beside others on other coordinates.

    fork                        what the branches read comes as R on the axis, from outside
    ├─ branch at coordinate 0   inside, values are P: the value on the ranks of the coordinate, zeros elsewhere
    ├─ branch at coordinate 1   so that what leaves is P, and goes on by the ordinary redistributions
    join

This is typed whatever the operators are, linear or not: outside of its coordinate a branch is the function that gives
zeros. The gradient of what leaves (P) comes as R; the coordinate's ranks run the backward pass, for the others the
gradients of what the branch read (R) are zeros: summands, as P asks for. On the other axes the operators of a branch
follow their rules as anywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.errors import PlacementError, PlanError
from autopar.ir.graph import IDENTITY, Graph, Node, Scope, common_scope
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import P, Placement, R
from autopar.ir.plan import Fork, NodePlan, Redistribute, Stage, StagePlan
from autopar.ir.recompute import modules_again, operators_again
from autopar.ir.structure import computed_once, is_random, region_of

#: what may leave a branch: sums over ranks are exact where all but one are zero, and every backend has them
SUMMED = ("float64", "float32", "float16", "bfloat16")
MEAN_LOSSES = ("aten.cross_entropy_loss.default",)  # which count their samples over all ranks


class Home(NamedTuple):
    """Where a node of a branch runs: the number of the fork, that of the branch in it, the axis, the coordinate."""

    fork: int
    branch: int
    axis: str
    coordinate: int


def homes(stage: Stage) -> dict[str, Home]:
    """For each node that is in a branch, where it runs."""
    return {
        name: Home(number, position, fork.axis, branch.coordinate)
        for number, fork in enumerate(stage.forks)
        for position, branch in enumerate(fork.branches)
        for name in branch.nodes
    }


def axis_position(axes: LogicalMesh, name: str) -> int:
    """The position of an axis by name."""
    return next(position for position, axis in enumerate(axes) if axis.name == name)


Coordinates = Mapping[str, int]
"""Where ranks are on the axes that have branches, by the axes' names."""


def is_idle(home: Home | None, coordinates: Coordinates) -> bool:
    """Whether ranks at these coordinates leave out what is in a branch."""
    return home is not None and coordinates.get(home.axis) != home.coordinate


def coordinates_of(stage: Stage, rank: int) -> dict[str, int]:
    """Where a rank (counted from the submesh's first) is on the axes that have branches."""
    names = {fork.axis for fork in stage.forks}
    return {axis.name: rank // axis.stride % axis.size for axis in stage.axes if axis.name in names}


def unlike_ranks(stage: Stage) -> list[int]:
    """The first of each set of ranks that run the same operators, the submesh's first rank first."""
    found: dict[tuple[int, ...], int] = {(): 0}
    for axis in stage.axes:
        owned = {branch.coordinate for fork in stage.forks if fork.axis == axis.name for branch in fork.branches}
        if owned:
            others = [n for n in range(axis.size) if n not in owned][:1]
            found = {
                (*key, n): rank + n * axis.stride for key, rank in found.items() for n in sorted({*owned, *others})
            }
    return sorted(found.values())


def host_scopes(graph: Graph, stage: Stage) -> list[Scope]:
    """For each fork, the innermost module call that holds all of its branches."""
    nodes = graph.node_by_name
    return [common_scope([nodes[name].scope for branch in fork.branches for name in branch.nodes])
            for fork in stage.forks]  # fmt: skip


def in_order(graph: Graph, stage: Stage) -> Sequence[Node]:
    """The nodes with those of a fork one after another, branch by branch; else as near to their order as can be.

    Raises PlanError where branches of a fork depend on each other, or on what depends on them.
    """
    if not stage.forks:
        return graph.nodes
    groups = _groups(graph, stage)
    placed = {node.name: number for number, group in enumerate(groups) for node in group}
    waits, readers = _dependencies(graph, groups, placed)
    ready = [number for number, count in enumerate(waits) if count == 0]
    found: list[Node] = []
    while ready:
        number = heapq.heappop(ready)
        found += groups[number]
        for reader in readers[number]:
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, reader)
    if len(found) < len(graph.nodes):
        stuck = next(name for name, home in homes(stage).items() if waits[placed[name]])
        raise PlanError(
            "expected branches that no path leaves and enters again, found one through the fork of "
            f"{_text(graph, stuck)}"
        )
    return found


def _groups(graph: Graph, stage: Stage) -> list[list[Node]]:
    """Each fork's nodes, branch by branch, at the place of its first one; every other node alone."""
    known, nodes = homes(stage), graph.node_by_name
    order = {node.name: number for number, node in enumerate(graph.nodes)}
    done: set[int] = set()
    groups = []
    for node in graph.nodes:
        home = known.get(node.name)
        if home is None:
            groups.append([node])
        elif home.fork not in done:
            done.add(home.fork)
            members = [sorted(branch.nodes, key=order.__getitem__) for branch in stage.forks[home.fork].branches]
            groups.append([nodes[name] for names in members for name in names])
    return groups


def _dependencies(
    graph: Graph, groups: list[list[Node]], placed: Mapping[str, int]
) -> tuple[list[int], list[list[int]]]:
    """How many groups each waits for, and which wait for it."""
    readers: list[list[int]] = [[] for _ in groups]
    waits = [0] * len(groups)
    for number, group in enumerate(groups):
        makers = {placed[graph.producers[name].name] for node in group for name in node.operands
                  if name in graph.producers}  # fmt: skip
        for maker in makers - {number}:
            readers[maker].append(number)
            waits[number] += 1
    return waits, readers


def entering(graph: Graph, stage: Stage) -> dict[str, list[tuple[str, Placement]]]:
    """By the first node of each fork: what its branches read of others, in the placements they read it in.

    These conversions come before the fork, so that no branch waits for one between two others.
    """
    known = homes(stage)
    found: dict[int, dict[tuple[str, Placement], None]] = {}
    first: dict[int, str] = {}
    for node in in_order(graph, stage) if known else ():
        home = known.get(node.name)
        if home is None:
            continue
        first.setdefault(home.fork, node.name)
        for name, placement in zip(node.operands, stage.nodes[node.name].operands, strict=True):
            if not _is_inside(graph, known, home, name):
                found.setdefault(home.fork, {})[name, placement] = None
    return {first[fork]: [*values] for fork, values in found.items()}


def _is_inside(graph: Graph, known: Mapping[str, Home], home: Home, tensor: str) -> bool:
    """Whether the tensor is made in the same branch."""
    maker = graph.producers.get(tensor)
    return maker is not None and known.get(maker.name) == home


def leaves(graph: Graph, stage: Stage) -> Iterator[tuple[str, Home]]:
    """The tensors that a branch makes and others read, with the branch."""
    known = homes(stage)
    last = {*graph.returned, *graph.mutations.values(), *graph.sent}
    for name, home in known.items():
        for tensor in graph.node_by_name[name].results:
            readers = (node.name for node, _ in graph.consumers[tensor])
            if tensor in last or any(known.get(reader) != home for reader in readers):
                yield tensor, home


# Types ----------------------------------------


def branch_rule(
    graph: Graph, stage: Stage, node: Node, known: Mapping[str, Home]
) -> tuple[NodePlan, LogicalMesh, str | None]:
    """What a node of a branch does on the axes other than the fork's, these axes, and what is wrong on that one."""
    home, node_plan = known[node.name], stage.nodes[node.name]
    position = axis_position(stage.axes, home.axis)
    wanted = tuple(P if _is_inside(graph, known, home, name) else R for name in node.operands)
    operands = tuple(placement[position] for placement in node_plan.operands)
    results = tuple(placement[position] for placement in node_plan.results)
    objection = None
    if operands != wanted or results != (P,) * len(results):
        left, right = (", ".join(map(str, types)) for types in (operands, results))
        objection = (
            f"{left} -> {right} on axis {home.axis}, where a branch at one coordinate runs "
            f"{', '.join(map(str, wanted))} -> {', '.join('P' for _ in results)}"
        )
    axes = stage.axes[:position] + stage.axes[position + 1 :]
    return NodePlan(_without(node_plan.operands, position), _without(node_plan.results, position)), axes, objection


def _without(placements: tuple[Placement, ...], position: int) -> tuple[Placement, ...]:
    return tuple(placement[:position] + placement[position + 1 :] for placement in placements)


def check_forks(graph: Graph, stage: StagePlan) -> None:
    """That forks are of nodes and axes of the stage, and that what is in their branches may run on some ranks alone.

    Raises PlanError or PlacementError naming the node.
    """
    if not stage.forks:
        return
    for fork in stage.forks:
        _check_fork(graph, stage, fork)
    counted = [name for fork in stage.forks for branch in fork.branches for name in branch.nodes]
    if len(set(counted)) < len(counted):
        twice = next(name for name in counted if counted.count(name) > 1)
        raise PlanError(f"expected each node in one branch, found {_text(graph, twice)} in several")
    in_order(graph, stage)
    _check_together(stage)
    constant = computed_once(graph, stage)
    for name in counted:
        objection = refusal(graph, graph.node_by_name[name], constant, stage.recompute)
        if objection is not None:
            raise PlanError(f"{_text(graph, name)}: expected an operator that may run in a branch, found {objection}")
    _check_borders(graph, stage)


def converted_inside(graph: Graph, stage: Stage) -> dict[tuple[str, Placement], Home]:
    """The redistributions that are made in a branch: of what it makes itself, for readers of its own."""
    return {value: found[0] for value, found in _readers_inside(graph, stage, homes(stage)).items()}


def check_inner_conversions(graph: Graph, stage: Stage) -> None:
    """That what a branch reads of its own is redistributed on other axes alone. Raises PlacementError."""
    readers = _readers_inside(graph, stage, homes(stage)) if stage.forks else {}
    for item in stage.redistributes:
        for home in readers.get((item.tensor, item.target), ()):
            _check_inner(graph, stage, item, home)


def _check_fork(graph: Graph, stage: Stage, fork: Fork) -> None:
    sizes = {axis.name: axis.size for axis in stage.axes}
    if sizes.get(fork.axis, 1) < 2:
        raise PlanError(f"expected branches on a mesh axis of several ranks, found axis {fork.axis!r} of {sizes}")
    coordinates = [branch.coordinate for branch in fork.branches]
    if len(set(coordinates)) < len(coordinates) or not all(0 <= c < sizes[fork.axis] for c in coordinates):
        raise PlanError(
            f"expected a branch at each of some coordinates of axis {fork.axis} of {sizes[fork.axis]} ranks, "
            f"found them at {coordinates}"
        )
    unknown = {name for branch in fork.branches for name in branch.nodes} - set(graph.node_by_name)
    if unknown or not all(branch.nodes for branch in fork.branches):
        raise PlanError(f"expected branches of nodes of the model, found {sorted(unknown)[:3] or 'an empty one'}")


def _check_together(stage: StagePlan) -> None:
    """What does not go with what: blocks that gather when they run would do so on some ranks alone."""
    gathered = [name for name, storage in stage.storage.items() if storage.regather]
    if gathered:
        raise PlanError(
            f"expected parameters gathered once a step in a plan with branches, found {gathered[0]} regathered at each "
            "use (ZeRO-3), which all ranks must do in one order"
        )
    if any(axis.shares for axis in stage.axes) or not stage.mesh.is_homogeneous:
        raise PlanError("expected equal ranks with equal shares of the batch in a plan with branches, found others")


def refusal(graph: Graph, node: Node, constant: Collection[str], recompute: tuple[str, ...]) -> str | None:
    """Why a node must not run on some ranks alone, or None."""
    if is_random(node):
        return "one that draws random numbers, which all ranks must draw in one order"
    if node.op in MEAN_LOSSES:
        return "a loss, whose samples all ranks count"
    if any(name in constant for name in node.results):
        return "a constant, which is computed once, on all ranks"
    again = region_of(modules_again(recompute), node.scope.module)
    if node.name in operators_again(recompute):
        return "one that is computed again in the backward pass"
    if again >= 0:
        return f"one that is computed again in the backward pass, in {modules_again(recompute)[again]}"
    if node.op == IDENTITY and graph.producers.get(node.operands[0]) is None:
        return "a name for what comes from outside"
    return None


def _check_borders(graph: Graph, stage: Stage) -> None:
    known = homes(stage)
    for tensor, _ in leaves(graph, stage):
        dtype = graph.tensors[tensor].dtype
        if dtype not in SUMMED:
            raise PlacementError(
                f"{_text(graph, graph.producers[tensor].name)}: expected {', '.join(SUMMED)} to leave a branch, which "
                f"ranks can sum, found {dtype}"
            )
    for name, home in known.items():
        node = graph.node_by_name[name]
        if node.op == IDENTITY and not _is_inside(graph, known, home, node.operands[0]):
            raise PlanError(f"{_text(graph, name)}: expected it beside its operand, found it in a branch")
        for tensor in node.operands:
            other = known.get(graph.producers[tensor].name) if tensor in graph.producers else None
            if other is not None and other != home and other.fork == home.fork:
                raise PlanError(
                    f"{_text(graph, name)}: expected branches that run at the same time, found that it reads {tensor} "
                    f"of the one at coordinate {other.coordinate}"
                )


def _readers_inside(
    graph: Graph, stage: Stage, known: Mapping[str, Home]
) -> dict[tuple[str, Placement], list[Home]]:  # fmt: skip
    """Which branches read what they make in which placement."""
    found: dict[tuple[str, Placement], list[Home]] = {}
    for name, home in known.items():
        node = graph.node_by_name[name]
        for tensor, placement in zip(node.operands, stage.nodes[name].operands, strict=True):
            if _is_inside(graph, known, home, tensor):
                found.setdefault((tensor, placement), []).append(home)
    return found


def _check_inner(graph: Graph, stage: Stage, item: Redistribute, home: Home) -> None:
    if any(stage.axes[step.axis].name == home.axis for step in item.steps if 0 <= step.axis < len(stage.axes)):
        raise PlacementError(
            f"redistribution of {item.tensor} from {_text(graph, graph.producers[item.tensor].name)}: expected no step "
            f"on axis {home.axis} inside of a branch at one of its coordinates, found one"
        )


def _text(graph: Graph, name: str) -> str:
    node = graph.node_by_name[name]
    return f"node {name} ({node.op})" + (f" at {node.source}" if node.source else "")
