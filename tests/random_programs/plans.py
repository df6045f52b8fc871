"""Random well-typed plans for a graph: any rule of each operator on each axis, any storage, any way between types."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from autopar.errors import PlacementError, PlanError
from autopar.intraop.extract import _redistributes
from autopar.intraop.strategies import permitted
from autopar.ir import verifier
from autopar.ir.graph import Graph, Node, Tensor
from autopar.ir.mesh import LogicalMesh, Mesh
from autopar.ir.placement import Axis, I, Placement, R, S, Type
from autopar.ir.plan import NodePlan, Plan, Redistribute, Storage
from autopar.ir.recompute import operator_call, refusal_again
from autopar.ir.redistribution import Step, by_levels, cheapest_path, transfer_bytes
from autopar.ir.structure import block_paths
from autopar.microbatch import check_plan
from autopar.ops import admits, axis_rules
from autopar.ops.notation import AxisRule
from autopar.planning import DividedGraph, Place, divided
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.simulate import traffic
from autopar.trace import find_blocks

#: logical meshes of 2, 3, 4, 6 and 8 ranks, 1 to 3 axes
MESHES = ((2,), (3,), (4,), (2, 2), (6,), (2, 3), (3, 2), (8,), (4, 2), (2, 4), (2, 2, 2))
NAMES = ("x", "y", "z")
_TRIES = 30


@dataclass(frozen=True)
class Choices:
    """All that a plan is free to choose, on the axes of the mesh; conversions follow from it."""

    sizes: tuple[int, ...]
    microbatches: int
    inputs: Mapping[str, Placement]
    storage: Mapping[str, Storage]
    nodes: Mapping[str, NodePlan]
    ways: int | None = None  # the seed of the ways between placements; None: the cheapest
    recompute: tuple[str, ...] = ()


def make_axes(sizes: tuple[int, ...]) -> LogicalMesh:
    """Named axes, row-major."""
    return tuple(Axis(NAMES[i], size, math.prod(sizes[i + 1 :])) for i, size in enumerate(sizes))


def random_choices(
    graph: Graph, sizes: tuple[int, ...], rng: random.Random, mode: str = "train", microbatches: int | None = None
) -> Choices:  # fmt: skip
    """Choices that type-check. Several microbatches where the model allows that, now and then, or as many as given."""
    whole = mode != "train" or any("dropout" in node.op for node in graph.nodes)  # exact masks are for whole steps
    part = _part(graph, microbatches or (1 if whole else rng.choice([1, 1, 2, 3, 4])))
    axes = make_axes(sizes)
    inputs = {name: _random_shards(part.graph.tensors[name], axes, rng) for name in graph.inputs}
    storage = {s.tensor: _random_storage(part.graph, s.tensor, axes, rng) for s in graph.stored}
    nodes: dict[str, NodePlan] = {}
    current = inputs | {name: kept.placement for name, kept in storage.items()}
    follow = rng.choice([0.2, 0.6, 0.9])
    for node in graph.nodes:
        nodes[node.name] = _random_node(part, node, axes, current, rng, follow)
        current.update(zip(node.results, nodes[node.name].results, strict=True))
    ways = rng.randrange(1 << 30) if rng.random() < 0.4 else None
    return Choices(sizes, part.microbatches, inputs, storage, nodes, ways)


def _part(graph: Graph, microbatches: int) -> DividedGraph:
    try:
        return divided(graph, find_blocks(graph), microbatches)
    except PlanError:
        return divided(graph, find_blocks(graph), 1)


def _random_shards(tensor: Tensor, axes: LogicalMesh, rng: random.Random, whole: Type = R) -> Placement:
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    return tuple(S(rng.choice(dims)) if dims and rng.random() < 0.5 else whole for _ in axes)


def _random_storage(graph: Graph, name: str, axes: LogicalMesh, rng: random.Random) -> Storage:
    tensor, stored = graph.tensors[name], graph.stored_by_tensor[name]
    whole = I if tensor.differentiable else R
    if stored.name in graph.mutations:
        return Storage((whole,) * len(axes))
    placement = _random_shards(tensor, axes, rng, whole)
    if stored.kind == "parameter" and any(type_.kind == "S" for type_ in placement):
        return Storage(placement, *rng.choice([(False, False), (True, True), (False, True)]))
    return Storage(placement)


def _random_node(
    part: DividedGraph,
    node: Node,
    axes: LogicalMesh,
    current: Mapping[str, Placement],
    rng: random.Random,
    follow: float,
) -> NodePlan:
    """A random rule on each axis; rather one that takes the operands as they are, with probability `follow`."""
    if not node.operands or not axes:
        return NodePlan(((),) * len(node.operands), tuple((R,) * len(axes) for _ in node.results))
    rules = axis_rules(part.whole, node)
    for _ in range(_TRIES):
        picked = [_random_rule(rules, node, current, axis, rng, follow) for axis in range(len(axes))]
        found = _node_plan(picked)
        if _fits(part, node, found, axes):
            return found
    return _node_plan([AxisRule((R,) * len(node.operands), (R,) * len(node.results))] * len(axes))


def _random_rule(
    rules: tuple[AxisRule, ...], node: Node, current: Mapping[str, Placement], axis: int, rng: random.Random,
    follow: float,
) -> AxisRule:  # fmt: skip
    if rng.random() > follow:
        return rng.choice(rules)
    have = tuple(current[name][axis] for name in node.operands)
    agree = [sum(left == right for left, right in zip(rule.operands, have, strict=True)) for rule in rules]
    return rng.choice([rule for rule, count in zip(rules, agree, strict=True) if count == max(agree)])


def _node_plan(rules: list[AxisRule]) -> NodePlan:
    operands = tuple(zip(*(rule.operands for rule in rules), strict=True))
    results = tuple(zip(*(rule.results for rule in rules), strict=True))
    return NodePlan(operands, results)


def _fits(part: DividedGraph, node: Node, plan: NodePlan, axes: LogicalMesh) -> bool:
    """Whether the shapes of a step and of one microbatch admit the node's placements."""
    for name, placement in zip(node.results, plan.results, strict=True):
        constraints = [c for c in part.constraints if c.matches(name)]
        if not all(permitted(constraint, placement, axes) for constraint in constraints):
            return False
    return admits(part.whole, node, plan.operands, plan.results, axes) is None


@cache
def _profile():  # type: ignore[no-untyped-def]
    return load_profile("cpu")


def make_plan(graph: Graph, choices: Choices, mode: str = "train") -> tuple[Plan, dict[str, int]]:
    """The plan of the choices, and the bytes that it says the first rank sends. Raises what the verifier raises."""
    part = divided(graph, find_blocks(graph), choices.microbatches)
    whole = part.with_traffic(draft_plan(part, choices, mode))
    check_plan(graph, whole)
    return whole, dict(whole.predicted.comm_bytes)


def draft_plan(part: DividedGraph, choices: Choices, mode: str = "train") -> Plan:
    """The plan of the choices for one microbatch, with the bytes of its first rank; not verified."""
    axes = make_axes(choices.sizes)
    graph = part.whole
    mesh = Mesh("cpu", devices_per_node=math.prod(choices.sizes))
    place = Place(part, axes, Request(mesh, mode, None, None, (), SearchBudget()), _profile())
    inputs, storage, nodes = dict(choices.inputs), dict(choices.storage), dict(choices.nodes)
    path = partial(_path, axes, choices.ways)
    plan = place.draft().placed(inputs=inputs, storage=storage, nodes=nodes)
    ends = verifier.ending(graph, plan.stage)
    moved = _redistributes(part.graph, inputs, storage, nodes, ends, path)
    if not (choices.ways or 0) % 2:
        moved = tuple(_by_levels(graph, axes, item) for item in moved)
    plan = plan.placed(redistributes=moved)
    plan = replace(plan, recompute=choices.recompute)
    return replace(plan, predicted=replace(plan.predicted, comm_bytes=traffic(graph, plan)))


def _by_levels(graph: Graph, axes: LogicalMesh, item: Redistribute) -> Redistribute:
    """The sum of a parameter's gradient over several axes by levels, where it is one."""
    stored = graph.stored_by_tensor.get(item.tensor)
    is_trained = stored is not None and stored.kind == "parameter" and stored.requires_grad
    return replace(item, steps=(is_trained and by_levels(item.steps, axes)) or item.steps)


def _path(
    axes: LogicalMesh, ways: int | None, tensor: Tensor, have: Placement, wanted: Placement
) -> tuple[Step, ...] | None:
    """The way of the fewest bytes, or a random one."""
    if ways is None:
        return cheapest_path(have, wanted, lambda p, step: sum(_bytes(tensor, p, axes, step)))
    rng = random.Random(ways)
    return cheapest_path(have, wanted, lambda p, step: rng.randint(1, 9))


def _bytes(tensor: Tensor, placement: Placement, axes: LogicalMesh, step: Step) -> tuple[int, int]:
    return transfer_bytes(tensor.shape, tensor.itemsize, placement, axes, step)


def random_plan(graph: Graph, sizes: tuple[int, ...], rng: random.Random, mode: str = "train") -> Choices | None:
    """Choices whose plan verifies; None where none was found (rules of one axis may not go together)."""
    for _ in range(3):
        choices = random_choices(graph, sizes, rng, mode)
        if mode == "train" and rng.random() < 0.4:
            choices = replace(choices, recompute=random_again(graph, rng))
        try:
            make_plan(graph, choices, mode)
        except (PlanError, PlacementError):
            continue
        return choices
    return None


# What is computed again ----------------------------------------


def random_again(graph: Graph, rng: random.Random) -> tuple[str, ...]:
    """Some modules, none inside of another, operators of other modules, or both."""
    what = rng.choice(["modules", "operators", "operators", "both"])
    modules = random_modules(graph, rng) if what != "operators" else ()
    return (*modules, *(random_operators(graph, rng, modules) if what != "modules" else ()))


def random_modules(graph: Graph, rng: random.Random) -> tuple[str, ...]:
    """Some modules, none inside of another."""
    paths = sorted({path for node in graph.nodes for path, _ in node.scope.path if path})
    chosen: list[str] = []
    for path in rng.sample(paths, min(len(paths), rng.randint(1, 3))):
        if not any(_is_inside(path, other) or _is_inside(other, path) for other in chosen):
            chosen.append(path)
    return tuple(chosen)


def random_operators(graph: Graph, rng: random.Random, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Some operators, or all, of those that can run again by themselves and are in none of some modules."""
    blocks = block_paths(graph)
    able = [operator_call(node) for node in graph.nodes if refusal_again(graph, node, blocks) is None]
    able = [call for call in able if not any(_is_inside(call, module) for module in modules)]
    return tuple(rng.sample(able, rng.choice([len(able), rng.randint(0, len(able))])))


def _is_inside(path: str, other: str) -> bool:
    """Whether a module or operator is another module, or in it."""
    return f"{path}.".startswith(f"{other}.")
