"""What the simulator knows of a graph before any program is lowered: facts whatever the plan, what runs again, and what
the first of two parts of a backward pass goes through.

A call of a recomputed module runs again, as a whole, when autograd asks for the first thing that an operator in it has
saved. One in which nothing is saved for the backward pass does not. Operators that run again by themselves do so with
their neighbours of that kind, when the first of what they have saved, or made, is asked for (`ir.recompute`).

Where a backward pass comes in two parts, all that depends on what the stage has received is on the first one's way, as
`runtime.splitting` finds it in autograd's graph. What is computed from parameters beside it waits for the second part,
unless several operators on the way read what comes of one parameter, such as a bias that all attention layers share, or
gradients come in beside the way: then all between these and the parameter is on the way, too. Where nothing waits for
gradients, as in a first stage, the second part makes them all.

And what one rank has of a tensor: its slice, and the memory that the runtime takes for a while to move it. Copies are
packed buffers, and parts in the order that travels, as in runtime/pieces.py (activations) and runtime/coalesce.py
(parameters and their gradients). A tensor cut along dim 0 travels from and into place; along another dim its parts are
copied first, or joined after. Gloo has no reduce-scatter: there, parts are exchanged and summed, which takes the whole
once more.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import NamedTuple

from autopar.cost.memory import is_view, kept_values, passes_gradient, saved_values, viewed_gradients
from autopar.cost.profile import device_type_of
from autopar.ir.graph import Graph, Node, Scope
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Placement, Shape, evenly, local_shape
from autopar.ir.plan import StagePlan
from autopar.ir.recompute import PieceStep, makes_memory, modules_again, operators_again, pieces_needed, tensors_again
from autopar.ir.redistribution import Step, apply
from autopar.ir.statements import Convert, Flat, Operate, Statement, Value
from autopar.ir.structure import block_paths, constant_tensors, folded_tensors
from autopar.ops.layout import copied
from autopar.ops.saved import Saved
from autopar.runtime.packing import LONE_BYTES
from autopar.simulate.conversions import Moves, Way
from autopar.simulate.layouts import AS_IN_GRAPH, Laid, Layouts


class NodeFacts(NamedTuple):
    """Whether results share the operand's memory, the positions of operands whose gradients do, what autograd saves,
    and the positions of operands whose gradients are views of what the operator makes."""

    is_view: bool
    passing: tuple[int, ...]
    saved: tuple[Saved, ...]
    viewed: tuple[int, ...]


class GraphFacts:
    """Facts of each node by name, the blocks that parameters and nodes belong to, the tensors that never change, and of
    these those that no step computes."""

    def __init__(self, graph: Graph, device_type: str) -> None:
        self.nodes = {node.name: _node_facts(node, graph, device_type) for node in graph.nodes}
        self.blocks = block_paths(graph)
        self._blocks_of: dict[frozenset[str], dict[str, str]] = {}
        self._asked: tuple[frozenset[str], dict[str, str]] = frozenset(), self._blocks_of.setdefault(frozenset(), {})
        self.constants, self.folded = constant_tensors(graph), folded_tensors(graph)
        self._graph = weakref.ref(graph)
        self._twins: tuple[tuple[tuple[str, ...], ...], dict[str, tuple[int, int]]] | None = None

    def twins(self, blocks: tuple[tuple[str, ...], ...]) -> dict[str, tuple[int, int]]:
        """For each node in a repeated block, the number of the distinct block and the node's place in it.

        blocks: the module paths of the instances of each.
        """
        if self._twins is None or self._twins[0] != blocks:
            graph = self._graph()
            assert graph is not None, "the facts of a graph are asked for while it lives"
            self._twins = blocks, _twins(graph, blocks)
        return self._twins[1]

    def block_of(self, name: str, recomputed: frozenset[str] = frozenset()) -> str:
        """The innermost block that a module path or parameter's name lies in; "" is the program itself.

        recomputed: modules that are blocks for that reason.
        """
        if self._asked[0] is not recomputed:  # large sets that are equal are compared once, not for each name
            self._asked = recomputed, self._blocks_of.setdefault(recomputed, {})
        known = self._asked[1]
        found = known.get(name)
        if found is None:
            is_block = not name or name in self.blocks or name in recomputed
            found = known[name] = name if is_block else self.block_of(name.rpartition(".")[0], recomputed)
        return found


def _twins(graph: Graph, blocks: tuple[tuple[str, ...], ...]) -> dict[str, tuple[int, int]]:
    number = {path: position for position, paths in enumerate(blocks) for path in paths}
    counts: dict[str, int] = defaultdict(int)
    found = {}
    for node in graph.nodes:
        path = node.scope.outermost(number)
        if path is not None:
            found[node.name] = number[path], counts[path]
            counts[path] += 1
    return found


def _node_facts(node: Node, graph: Graph, device_type: str) -> NodeFacts:
    passing = tuple(position for position, passes in enumerate(passes_gradient(node, graph)) if passes)
    return NodeFacts(
        is_view(node, graph), passing, saved_values(node, graph, device_type), viewed_gradients(node, graph)
    )


_known: dict[tuple[int, str], tuple[weakref.ref[Graph], GraphFacts]] = {}


def graph_facts(graph: Graph, device_type: str) -> GraphFacts:
    """The graph's facts on a kind of device, remembered as long as it lives."""
    key = id(graph), device_type
    known = _known.get(key)
    if known is not None and known[0]() is graph:
        return known[1]
    facts = GraphFacts(graph, device_type)
    _known[key] = (weakref.ref(graph, lambda _: _known.pop(key, None)), facts)
    return facts


# What runs again ----------------------------------------


Call = tuple[tuple[str, str], ...] | str
"""A recomputed module with those around it, as in `Scope.path`; of operators by themselves, the block that they are
in."""


class Again:
    """What a plan computes again of a graph, and in which call of a module, or run of operators in a block."""

    def __init__(self, graph: Graph, recompute: tuple[str, ...], blocks: Set[str]) -> None:
        self.modules = frozenset(modules_again(recompute))
        self.operators, self.tensors = operators_again(recompute), tensors_again(graph, recompute)
        self._blocks = blocks

    def __bool__(self) -> bool:
        return bool(self.modules or self.operators)

    def of_node(self, node: Node) -> Call | None:
        """Where an operator runs again."""
        if node.name in self.operators:
            return self._block_of(node.scope)
        return call_of(node.scope, self.modules)

    def of_conversion(self, tensor: str, steps: Sequence[Step], scope: Scope) -> Call | None:
        """Where a tensor is brought to another placement again. scope: where it is the first time."""
        around = call_of(scope, self.modules)
        if around is None and tensor in self.tensors and makes_memory(steps):
            return self._block_of(scope)
        return around

    def _block_of(self, scope: Scope) -> str:
        """The innermost block around; "" is the program itself."""
        return next((path for path, _ in reversed(scope.path) if path in self._blocks or path in self.modules), "")


class Recomputation:
    """The pieces of one plan. flat: states it, asked for once at most. `reached`: the tensors that get a gradient, none
    in inference."""

    def __init__(self, graph: Graph, plan: StagePlan, flat: Callable[[], Flat], reached: set[str]) -> None:
        statements = flat().statements if plan.recompute and reached else ()
        calls = Again(graph, plan.recompute, block_paths(graph) if statements else set())
        pieces = number_calls(_call_of(calls, statement) for statement in statements)
        by_itself = [isinstance(_call_of(calls, statement), str) for statement in statements]
        memory = _StatementMemory(graph, plan)
        steps = [
            memory.step(statement, piece, alone, _saves(graph, statement, reached))
            for statement, piece, alone in zip(statements, pieces, by_itself, strict=True)
        ]
        again = {piece for needed in pieces_needed(steps) for piece in needed}
        known = zip(pieces, statements, strict=True)
        self._again: set[str | Value] = {key_of(s) for piece, s in known if piece >= 0 and piece in again}

    def runs_again(self, statement: Statement) -> bool:
        """Whether the backward pass runs the statement once more."""
        return key_of(statement) in self._again

    def computes_again(self, node: str) -> bool:
        """Whether an operator runs again."""
        return node in self._again

    def converts_again(self, value: Value) -> bool:
        """Whether a tensor is brought to a placement again."""
        return value in self._again


class _StatementMemory:
    """Memory of the values of statements, by number; views share that of what they are views of."""

    def __init__(self, graph: Graph, plan: StagePlan) -> None:
        self._graph, self._axes, self._of = graph, plan.axes, dict[Value, int]()
        self._nodes, self._layouts, self._shapes = plan.nodes, Layouts(graph), LocalShapes(graph, plan)
        self._device_type = device_type_of(plan.mesh.groups[0].profile)

    def step(self, statement: Statement, piece: int, by_itself: bool, saves: bool) -> PieceStep:
        """A statement, by the memory that it reads, makes and keeps."""
        reads = [self._of.setdefault(value, len(self._of)) for value in statement.reads]
        laid, shares = self._laid(statement)
        for value in statement.makes:
            self._of[value] = reads[0] if shares else len(self._of)
        makes = [self._of[value] for value in statement.makes]
        kept = list[int]()
        if saves and isinstance(statement, Operate):
            names = (*statement.node.operands, *statement.node.results)
            known = dict(zip(names, (*reads, *makes), strict=True))
            placed = self._nodes[statement.node.name]
            kind, in_bytes = self._device_type, placed.in_eight_bits
            saved = kept_values(statement.node, self._graph, placed.in_bits, kind, in_bytes)
            if not placed.in_bits and not in_bytes:
                saved = self._layouts.kept(statement.node, laid, saved)
            kept = [known[name] for name in saved if isinstance(name, str)]
        return PieceStep(piece, by_itself, reads, () if shares else makes, kept, saves)

    def _laid(self, statement: Statement) -> tuple[Laid, bool]:
        """How a statement works on its operands, and whether its results share the memory of the first."""
        if isinstance(statement, Operate):
            if not statement.reads:
                return AS_IN_GRAPH, False
            shapes = [self._shapes.local(*value)[0] for value in statement.reads]
            made = self._shapes.local(*statement.makes[0])[0] if statement.makes else ()
            laid = self._layouts.of_results(statement.node, statement.reads, shapes, made)
            shares = self._layouts.is_view(statement.node, laid, is_view(statement.node, self._graph))
            self._layouts.made(statement.makes, laid)
            return laid, shares
        moved, shares = statement.redistribute, bool(statement.reads) and not self._makes_memory(statement)
        if shares:
            self._layouts.made(statement.makes, self._layouts.of_view(statement.reads[0]))
        else:
            for value in statement.makes:
                self._layouts.converted(value, moved.tensor, moved.steps)
        return AS_IN_GRAPH, shares

    def _makes_memory(self, statement: Convert) -> bool:
        return any(
            "S" in (step.before.kind, step.after.kind)
            or step.after.kind == "P"
            or (step.transfers[0].collective and self._axes[step.axis].size > 1)
            for step in statement.redistribute.steps
        )


def _call_of(calls: Again, statement: Statement) -> Call | None:
    if isinstance(statement, Operate):
        return calls.of_node(statement.node)
    moved = statement.redistribute
    return calls.of_conversion(moved.tensor, moved.steps, statement.scope)


def call_of(scope: Scope, recompute: Set[str]) -> Call | None:
    """The call of a recomputed module that a statement is in."""
    for depth, (path, _) in enumerate(scope.path):
        if path in recompute:
            return scope.path[: depth + 1]
    return None


def number_calls(calls: Iterable[Call | None]) -> list[int]:
    """For each of consecutive statements, the number of the piece that it is in, −1 for none.

    A call that something else interrupts goes on in a piece of its own, as the emitter cuts it.
    """
    found, count, last = list[int](), -1, None
    for call in calls:
        count += call is not None and call != last
        found.append(-1 if call is None else count)
        last = call
    return found


def key_of(statement: Statement) -> str | Value:
    """An operator's name, or what a conversion makes."""
    return statement.node.name if isinstance(statement, Operate) else statement.makes[0]


def _saves(graph: Graph, statement: Statement, reached: set[str]) -> bool:
    """Whether a statement's own backward pass reads something that was saved."""
    return (
        isinstance(statement, Operate)
        and not reached.isdisjoint(statement.node.results)
        and bool(saved_values(statement.node, graph))
    )


# The first part of a backward pass in two ----------------------------------------


SOURCE = "a source of gradients"


def tensors_on_the_way(graph: Graph) -> frozenset[str]:
    """The tensors of a stage's graph, without parameters, whose gradients the first part makes."""
    way = {name for name in graph.received if graph.tensors[name].differentiable}
    for node in graph.nodes:
        if not way.isdisjoint(node.operands):
            way.update(node.results)
    while way and (more := _shared(graph, way)):
        way |= more
    return frozenset(way)


def _shared(graph: Graph, way: set[str]) -> set[str]:
    """What comes of parameters beside the way, and leads to several operators on it, or to a source of gradients."""
    readers = _readers_on_the_way(graph, way)
    trained = (item.tensor for item in graph.stored if graph.tensors[item.tensor].differentiable)
    known = {name for name in trained if len(readers.get(name, ())) > 1 or SOURCE in readers.get(name, ())}
    found = set[str]()
    for node in graph.nodes:
        if not (known | found).isdisjoint(node.operands):
            found.update(name for name in node.results if name not in way and graph.tensors[name].differentiable)
    return found


def _readers_on_the_way(graph: Graph, way: set[str]) -> dict[str, set[str]]:
    """By tensor beside the way: the operators on it that read what comes of the tensor, two at most, and `SOURCE` where
    gradients come in there."""
    readers: dict[str, set[str]] = {name: {SOURCE} for name in graph.gradient_sources if name not in way}
    for node in reversed(graph.nodes):
        on_the_way = not way.isdisjoint(node.results)
        reached = {node.name} if on_the_way else set[str]().union(*(readers.get(name, ()) for name in node.results))
        for name in node.operands:
            if name not in way and len(readers.get(name, ())) < 2:
                readers.setdefault(name, set()).update(sorted(reached)[:2])
    return readers


# Slices and copies ----------------------------------------


class LocalShapes:
    """Local shapes and sizes by tensor and placement; equal tensors share them."""

    def __init__(self, graph: Graph, plan: StagePlan) -> None:
        self.shapes = {name: tensor.shape for name, tensor in graph.tensors.items()}
        self._stored = frozenset(plan.storage)
        self._axes: tuple[LogicalMesh, LogicalMesh] = (plan.axes, evenly(plan.axes))
        self._itemsizes = {name: tensor.itemsize for name, tensor in graph.tensors.items()}
        self._local: dict[tuple[Shape, Placement, bool], tuple[Shape, int]] = {}

    def itemsize(self, tensor: str) -> int:
        """Bytes of an element while computing."""
        return self._itemsizes[tensor]

    def local(self, tensor: str, placement: Placement) -> tuple[Shape, int]:
        """The first rank's slice, and its bytes while computing."""
        key = (self.shapes[tensor], placement, tensor in self._stored)
        known = self._local.get(key)
        if known is None:
            shape = local_shape(key[0], placement, self._axes[key[2]])
            known = self._local[key] = (shape, math.prod(shape))
        return known[0], known[1] * self._itemsizes[tensor]


# Copies ----------------------------------------


class Copies:
    """Bytes of copies by tensor and way, for one plan on one kind of device."""

    def __init__(self, graph: Graph, plan: StagePlan, device_type: str, shapes: LocalShapes) -> None:
        self._graph, self._axes, self._shapes = graph, plan.axes, shapes
        self._sums_parts = device_type == "cpu"
        self._moves, self._permuted = Moves(plan.axes, self._sums_parts), copied(graph).permuted
        self._ways: dict[Hashable, tuple[Way, Way]] = {}

    def of_activation(self, tensor: str, source: Placement, steps: Sequence[Step]) -> tuple[Way, Way]:
        """The ways of an activation to another placement, and of its gradient back."""
        is_permuted, itemsize = tensor in self._permuted, self._shapes.itemsize(tensor)
        key = self._shapes.shapes[tensor], itemsize, source, steps, is_permuted
        known = self._ways.get(key)
        if known is None:

            def local(placement: Placement) -> Shape:
                return self._shapes.local(tensor, placement)[0]

            known = self._ways[key] = (
                self._moves.forward(local, itemsize, source, steps, is_permuted),
                self._moves.backward(local, itemsize, source, steps),
            )
        return known

    def gather_bytes(self, tensor: str, source: Placement, steps: Sequence[Step]) -> int:
        """For a parameter on its way to where it is used; small ones travel packed."""
        total = 0
        for before, step, after in self._walk(source, steps):
            if step.before.kind == "S" and step.after.kind in "RI":
                (whole, size), (_, part) = (self._shapes.local(tensor, at) for at in (after, before))
                length, ranks = whole[step.before.dim], self._axes[step.axis].size
                is_direct = math.prod(whole[: step.before.dim]) == 1 and size >= LONE_BYTES
                if not is_direct or length % ranks:
                    total += _padded(size, length, ranks) + part
        return total

    def scatter_bytes(self, tensor: str, source: Placement, steps: Sequence[Step]) -> int:
        """For a parameter's gradient on its way home, beside the gradient itself and what arrives: of what is
        scattered, of shards that are gathered and do not lie there one after the other, of small ones that are
        summed then, and of what the rank stops for (shards exchanged for others, or set among zeros)."""
        total, is_scattered, itemsize = 0, False, self._graph.kept(tensor).itemsize
        for before, step, after in reversed(self._walk(source, steps)):
            kinds = step.before.kind, step.after.kind
            size = math.prod(self._shapes.local(tensor, after)[0]) * itemsize
            is_packed = size < LONE_BYTES
            if kinds == ("S", "R"):
                length, ranks = self._shapes.local(tensor, after)[0][step.before.dim], self._axes[step.axis].size
                is_uneven = bool(length % ranks)
                moved = bool(step.before.dim or is_uneven) + is_packed + self._sums_parts
                total += _padded(size, length, ranks) * moved
                is_scattered = True
            elif kinds == ("I", "S"):
                whole, axis_size = self._shapes.local(tensor, before)[0], self._axes[step.axis].size
                full = math.prod(whole) * itemsize
                leads = math.prod(whole[: step.after.dim]) == 1
                length = whole[step.after.dim]
                is_direct = leads and length % axis_size == 0 and full >= LONE_BYTES
                total += 0 if is_direct else size + _padded(full, length, axis_size)
                is_scattered = True
            elif kinds == ("I", "R") and is_scattered:
                total += size * is_packed
            elif step.after.kind == "S" or step.before.kind == "S":
                way = self._moves.backward(lambda at: self._shapes.local(tensor, at)[0], itemsize, before, [step])
                total += way.workspace_bytes + (way.own_bytes or 0) * (before != source)
        return total

    def _walk(self, source: Placement, steps: Sequence[Step]) -> list[tuple[Placement, Step, Placement]]:
        walked = []
        for step in steps:
            after = apply(step, source)
            walked.append((source, step, after))
            source = after
        return walked


def _padded(num_bytes: int, length: int, ranks: int) -> int:
    """Bytes of a tensor of which each rank has as many rows as the one with most, of the dim of that length."""
    return num_bytes // max(1, length) * -(-length // ranks) * ranks
