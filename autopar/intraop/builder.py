"""Builds the strategy-selection problem of a graph on one logical mesh, one set of variables a distinct block.

    minimise Σ node costs + Σ edge costs   subject to   Σ usages ≤ memory limit

Node cost: forward + backward compute of a strategy on local shapes (`costs.compute_ns`). Edge cost: the
redistribution between what the producer leaves and what the consumer needs, both directions
(`costs.convert_ns`); for parameters, the step's gather and gradient synchronisation under their storage
(`costs.storage_ns`). Usage: stored state of parameters (`costs.state_bytes`) and saved activations
(`costs.saved_bytes`). Equal blocks share variables: their costs and usages are multiplied, so the size of the
problem follows the number of distinct blocks, not of layers. Alpa (OSDI'22), section 4, with typed placements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from autopar.errors import InfeasibleError
from autopar.intraop.strategies import Strategies, Strategy, enumerate_strategies, permitted
from autopar.ir.constraint import Constraint, ConstraintIndex
from autopar.ir.graph import Graph, Node, Stored, Tensor
from autopar.ir.mesh import LogicalMesh, unnamed_text
from autopar.ir.placement import I, Placement, R, Type, leaves_none_empty, of_new_value
from autopar.ir.plan import NodePlan, Storage
from autopar.ir.structure import has_own_backward
from autopar.ops import call_key
from autopar.ops.factors import may_pay, meets, pays
from autopar.selection.problem import INFINITE, Problem

Matrix = npt.NDArray[np.int64]
SOFT_PENALTY_NS = 10**12
_Option = TypeVar("_Option")
ASKED, PAYING = "asked", "paying"  # why a weight's gradient may meet as factors


class Costs(Protocol):
    """What the builder asks of the cost model; times in ns a step, memory in bytes a rank.

    Redistributions are priced as a matrix, from each source to each target; NO_PATH_NS where there is none. Strategies
    come as one object for all calls that are alike.
    """

    def compute_ns(self, node: Node, strategies: Strategies) -> list[int]: ...
    def saved_bytes(self, node: Node, strategies: Strategies) -> list[int]: ...
    def convert_ns(self, tensor: Tensor, sources: list[Placement], targets: list[Placement]) -> Matrix: ...
    def storage_ns(self, tensor: Tensor, storages: list[Storage], targets: list[Placement]) -> Matrix: ...
    def state_bytes(self, tensor: Tensor, storages: list[Storage], uses: list[Placement]) -> Matrix: ...


class Representatives(Protocol):
    def representative_node(self, name: str) -> str: ...
    def representative_tensor(self, name: str) -> str: ...


class KeptParameter(NamedTuple):
    """How a parameter is stored, and the placement that its first reader uses it in."""

    storage: Storage
    use: Placement


StorageOptions = Callable[[Tensor, LogicalMesh], list[Storage]]


@dataclass(frozen=True)
class ChoiceVariable:
    """One choice: a node's strategy, a stored tensor's storage, an input's placement, or an output's placement."""

    name: str
    kind: str
    options: tuple[Any, ...]
    count: int


@dataclass(frozen=True)
class Built:
    """The problem, and what each of its variables means."""

    problem: Problem
    variables: tuple[ChoiceVariable, ...]
    index: dict[tuple[str, str], int]  # (kind, representative name) -> variable
    compute_ns: tuple[Matrix, ...]  # of the options of each variable, what operators take themselves


def build(
    graph: Graph,
    blocks: Representatives,
    axes: LogicalMesh,
    costs: Costs,
    storage_options: StorageOptions,
    constraints: Sequence[Constraint] = (),
    memory_limit: int | None = None,
    whole: Graph | None = None,
    copies: Mapping[str, int] | None = None,
    keep: Mapping[str, KeptParameter] | None = None,
    by_factors: bool = False,
    strictly: bool = False,
) -> Built:
    """Raises InfeasibleError naming the node whose strategies the shapes or constraints leave none of.

    `whole`: the graph of the step, when `graph` is that of one of its microbatches. `copies`: how many equal nodes or
    stored tensors one stands for, by name, where not one. `keep`: options of stored tensors that stay though others
    are better in every way. by_factors: gradients of weights may meet as factors, where that sends less; where a
    constraint asks for it, they may anyway. strictly: with those options of each decision alone that break the fewest
    soft constraints, at no penalty: any other has one that is more than all that a step takes, so that where these go
    together in less than that, the cheapest choice of all is among them.
    """
    builder = _Builder(
        graph, blocks, axes, costs, storage_options, constraints, whole, copies or {}, keep or {}, by_factors, strictly
    )
    return builder.build(memory_limit)


@dataclass(frozen=True)
class Options:
    """What each decision may be, as far as constraints go: operators and stored tensors by representative; inputs.

    Of soft constraints the fewest are broken that can be, decision by decision.
    """

    strategies: Mapping[str, tuple[NodePlan, ...]]
    storages: Mapping[str, tuple[Storage, ...]]
    inputs: Mapping[str, tuple[Placement, ...]]


def open_options(
    graph: Graph, blocks: Representatives, axes: LogicalMesh, costs: Costs, storage_options: StorageOptions,
    constraints: Sequence[Constraint], whole: Graph | None, by_factors: bool = False,
) -> Options:  # fmt: skip
    """All options of each decision, those that a solver may leave out as dominated, too; nothing is priced.

    by_factors: as in `build`. Raises InfeasibleError as `build` does.
    """
    return _Builder(graph, blocks, axes, costs, storage_options, constraints, whole, {}, {}, by_factors, True).options()


class _Builder:
    def __init__(
        self, graph: Graph, blocks: Representatives, axes: LogicalMesh, costs: Costs,
        storage_options: StorageOptions, constraints: Sequence[Constraint], whole: Graph | None,
        copies: Mapping[str, int], keep: Mapping[str, KeptParameter], by_factors: bool, strictly: bool,
    ) -> None:  # fmt: skip
        self.by_factors, self.strictly = by_factors, strictly
        self.whole, self.copies, self.keep = whole, copies, keep
        self.graph, self.blocks, self.axes, self.costs = graph, blocks, axes, costs
        self.storage_options, self.rules = storage_options, ConstraintIndex(constraints)
        self._permits = cache(partial(permitted, axes=axes))
        self.variables: list[ChoiceVariable] = []
        self.strategies: dict[str, tuple[Strategies, list[int]]] = {}
        self._alike: dict[Hashable, Strategies] = graph.found.setdefault(("strategies", unnamed_text(axes)), {})
        self.index: dict[tuple[str, str], int] = {}
        self.unary: list[Matrix] = []
        self.compute_ns: list[Matrix] = []
        self.usage: list[Matrix] = []
        self.edges: Counter[tuple[int, int, int, int, str]] = Counter()

    def build(self, memory_limit: int | None) -> Built:
        self._stored()
        self._inputs()
        self._nodes()
        self._count_edges()
        self._outputs()
        matrices: dict[tuple[int, int], Matrix] = {}
        for (source, result, target, operand, tensor), count in self.edges.items():
            matrix = self._matrix(source, result, target, operand, tensor)
            self._add_edge(matrices, source, target, np.where(matrix >= INFINITE, INFINITE, matrix * count))
        problem = Problem(
            name=f"{self.graph.model_name} on {'x'.join(str(axis.size) for axis in self.axes) or '1'}",
            intervals=[(0, 1)] * len(self.variables),
            costs=[np.minimum(cost, INFINITE) for cost in self.unary],
            usages=self.usage,
            edges=list(matrices),
            edge_costs=[np.minimum(matrix, INFINITE) for matrix in matrices.values()],
            usage_limit=memory_limit,
        )
        return Built(problem, tuple(self.variables), self.index, tuple(self.compute_ns))

    def options(self) -> Options:
        """See `open_options`."""
        graph, blocks = self.graph, self.blocks
        strategies, storages = dict[str, tuple[NodePlan, ...]](), dict[str, tuple[Storage, ...]]()
        for node in graph.nodes:
            if blocks.representative_node(node.name) == node.name:
                kept, _ = self._strategies_of(node.name)
                strategies[node.name] = tuple(NodePlan(option.operands, option.results) for option in kept)
        for stored in graph.stored:
            if blocks.representative_tensor(stored.tensor) == stored.tensor:
                storages[stored.tensor] = tuple(self._storages(stored, graph.tensors[stored.tensor])[0])
        inputs = {name: tuple(self._input(name)[0]) for name in graph.inputs}
        return Options(strategies, storages, inputs)

    # variables

    def _add(self, kind: str, name: str, options: Sequence[Any], count: int, cost: list[int], usage: list[int]) -> None:
        self.index[kind, name] = len(self.variables)
        self.variables.append(ChoiceVariable(name, kind, tuple(options), count))
        self.unary.append(np.array(cost, dtype=np.int64))
        self.compute_ns.append(self.unary[-1] if kind == "node" else np.zeros(len(cost), dtype=np.int64))
        self.usage.append(np.array(usage, dtype=np.int64))

    def _stored(self) -> None:
        counts: Counter[str] = Counter()
        for stored in self.graph.stored:
            counts[self.blocks.representative_tensor(stored.tensor)] += self.copies.get(stored.tensor, 1)
        for stored in self.graph.stored:
            if self.blocks.representative_tensor(stored.tensor) != stored.tensor:
                continue
            tensor, count = self.graph.tensors[stored.tensor], counts[stored.tensor]
            storages, penalties = self._storages(stored, tensor)
            options, costs, usages = self._kept(tensor, storages, penalties)
            self._add("stored", stored.tensor, options, count, [c * count for c in costs], [u * count for u in usages])

    def _kept(
        self, tensor: Tensor, storages: list[Storage], penalties: list[int]
    ) -> tuple[list[KeptParameter], list[int], list[int]]:
        """Storages with each use of the first reader: what is dearer and larger than another of the same use goes."""
        options, costs, usages = [], [], []
        uses = self._uses(tensor.name) or list(dict.fromkeys(storage.placement for storage in storages))
        prices = self.costs.storage_ns(tensor, storages, uses) + np.array(penalties)[:, None]
        sizes = self.costs.state_bytes(tensor, storages, uses)
        for column, use in enumerate(uses):
            rows = list(zip(prices[:, column].tolist(), sizes[:, column].tolist(), range(len(storages)), strict=True))
            kept = [row for row in rows if self.keep.get(tensor.name) == KeptParameter(storages[row[2]], use)]
            for cost, usage, row in sorted({*_undominated(rows), *kept}):
                options.append(KeptParameter(storages[row], use))
                costs.append(cost)
                usages.append(usage)
        return options, costs, usages

    def _uses(self, name: str) -> list[Placement]:
        """The placements in which the first reader of a stored tensor may want it."""
        readers = self.graph.consumers[name]
        if not readers:
            return []
        node, position = readers[0]
        strategies, _ = self._strategies_of(self.blocks.representative_node(node.name))
        return list(dict.fromkeys(strategy.operands[position] for strategy in strategies))

    def _storages(self, stored: Stored, tensor: Tensor) -> tuple[list[Storage], list[int]]:
        if stored.name not in self.graph.kept_in_parts:
            return [Storage((R,) * len(self.axes))], [0]
        every = self.storage_options(tensor, self.axes)
        options = tuple(o for o in every if leaves_none_empty(tensor.shape, o.placement, self.axes))
        names = (stored.name,)
        known, penalties = self._constrain("stored", names, tensor, options, lambda option, _: [option.placement])
        kept = list(known)
        for rule in self._matching("stored", (stored.name,), tensor):
            if rule.zero is not None:
                kept, penalties = _of_zero_stage(kept, penalties, rule.zero)
        open_, penalties = self._open(kept, penalties)
        return [*open_], penalties

    def _inputs(self) -> None:
        for name in self.graph.inputs:
            kept, penalties = self._input(name)
            self._add("input", name, kept, 1, penalties, [0] * len(kept))

    def _input(self, name: str) -> tuple[Sequence[Placement], list[int]]:
        tensor = self.graph.tensors[name]
        types = [R, *(Type("S", dim) for dim in range(len(tensor.shape)))]
        every = _products(types, len(self.axes))
        options = tuple(p for p in every if leaves_none_empty(tensor.shape, p, self.axes))
        return self._open(*self._constrain("input", (name,), tensor, options, lambda option, _: [option]))

    def _nodes(self) -> None:
        counts: Counter[str] = Counter()
        for node in self.graph.nodes:
            counts[self.blocks.representative_node(node.name)] += self.copies.get(node.name, 1)
        for node in self.graph.nodes:
            if self.blocks.representative_node(node.name) != node.name:
                continue
            options, penalties = self._strategies_of(node.name)
            count = counts[node.name]
            times = self.costs.compute_ns(node, options)
            cost = [time * count + penalty for time, penalty in zip(times, penalties, strict=True)]
            usage = [size * count for size in self.costs.saved_bytes(node, options)]
            self._add("node", node.name, options, count, cost, usage)

    def _strategies_of(self, name: str) -> tuple[Strategies, list[int]]:
        if name not in self.strategies:
            self.strategies[name] = self._open(*self._strategies(self.graph.node_by_name[name]))
        return self.strategies[name]

    def _enumerated(self, node: Node) -> Strategies:
        """Before constraints; found once for calls of the graph that are alike, whatever axes are called."""
        meeting = self._meeting(node) if meets(node) else ""
        key = call_key(self.graph, node), None if self.whole is None else call_key(self.whole, node), meeting
        if key not in self._alike:
            found = enumerate_strategies(self.graph, node, self.axes, self.whole, bool(meeting))
            self._alike[key] = tuple(found if meeting == ASKED else self._paying(node, found) if meeting else found)
        return self._alike[key]

    def _meeting(self, node: Node) -> str:
        """Whether the gradient of a node's weight may meet as factors: since a constraint asks for it, where they may
        be less than is sent for a sum, or not at all."""
        stored = self.graph.stored_by_tensor.get(node.operands[1])
        if stored is None or not stored.requires_grad:
            return ""
        rules = self._matching("used", (stored.name,), self.graph.tensors[stored.tensor])
        if any(rule.permits(I) and not rule.permits(R) for rule in rules):
            return ASKED
        return PAYING if self.by_factors and may_pay(self.whole or self.graph, node) else ""

    def _paying(self, node: Node, found: Sequence[Strategy]) -> list[Strategy]:
        whole = (self.whole or self.graph).tensors[node.operands[0]].shape
        microbatches = math.prod(whole) // max(1, math.prod(self.graph.tensors[node.operands[0]].shape))
        return [one for one in found if pays(self.graph, node, microbatches, one.operands, self.axes)]

    def _strategies(self, node: Node) -> tuple[Strategies, list[int]]:
        options = self._enumerated(node)
        first = self.graph.tensors[node.results[0]]
        names = (node.scope.module, node.name, *node.results)
        options, penalties = self._constrain("output", names, first, options, _constrained_results(node))
        uses = [
            ("used", stored.name, name, _operand_placement(position))
            for position, name in enumerate(node.operands)
            if (stored := self.graph.stored_by_tensor.get(name)) is not None and stored.kind == "parameter"
            if not has_own_backward(node)  # it takes whole gradients, whatever others are content with
        ]
        made = [("tensor", name, name, _result_placement(position)) for position, name in enumerate(node.results)]
        read = [("operands", name, name, _every_operand) for name in node.results]
        for what, matched, name, placement in (*uses, *made, *read):
            kept, extra = self._constrain(what, (matched,), self.graph.tensors[name], options, placement)
            if kept is not options:
                by_option = dict(zip(options, penalties, strict=True))
                options, penalties = kept, [by_option[o] + e for o, e in zip(kept, extra, strict=True)]
        return options, penalties

    # constraints

    def _open(self, options: Sequence[_Option], penalties: list[int]) -> tuple[tuple[_Option, ...], list[int]]:
        """Options and their penalties; strictly, those of the least, which then is no matter of choice."""
        if not self.strictly:
            return tuple(options), penalties
        least = min(penalties)
        kept = tuple(option for option, penalty in zip(options, penalties, strict=True) if penalty == least)
        return kept, [0] * len(kept)

    def _matching(self, what: str, names: tuple[str, ...], tensor: Tensor) -> list[Constraint]:
        return [c for c in self.rules.matching(what, names) if len(tensor.shape) >= c.min_dims]

    def _constrain(
        self, what: str, names: tuple[str, ...], tensor: Tensor, options: tuple[Any, ...],
        placements: Callable[[Any, Constraint], list[Placement]],
    ) -> tuple[tuple[Any, ...], list[int]]:  # fmt: skip
        """The options that no constraint forbids, and their penalties; the same object where none asks anything."""
        kept, penalties = [], []
        rules = self._matching(what, names, tensor)
        if options and not rules:
            return options, [0] * len(options)
        permits = partial(self._permits, differentiable=tensor.differentiable)
        for option in options:
            broken = [rule for rule in rules if not all(permits(rule, p) for p in placements(option, rule))]
            if all(rule.soft for rule in broken):
                kept.append(option)
                penalties.append(SOFT_PENALTY_NS * len(broken))
        if not kept:
            raise InfeasibleError(_nothing_left(what, tensor, rules, self.axes))
        return tuple(kept), penalties

    # edges

    def _variable_of(self, tensor: str) -> tuple[int, int]:
        """The variable that decides a tensor's placement, and which of its results the tensor is."""
        if tensor in self.graph.stored_by_tensor:
            return self.index["stored", self.blocks.representative_tensor(tensor)], 0
        if tensor in self.graph.inputs:
            return self.index["input", tensor], 0
        node = self.graph.producers[tensor]
        return self.index["node", self.blocks.representative_node(node.name)], node.results.index(tensor)

    def _count_edges(self) -> None:
        for node in self.graph.nodes:
            target = self.index["node", self.blocks.representative_node(node.name)]
            for operand, tensor in enumerate(node.operands):
                source, result = self._variable_of(tensor)
                edge = source, result, target, operand, self.blocks.representative_tensor(tensor)
                self.edges[edge] += self.copies.get(node.name, 1)

    def _outputs(self) -> None:
        in_parts = self.graph.kept_in_parts
        for stored, name in self.graph.mutations.items():
            if stored in in_parts:
                source, result = self._variable_of(name)
                kept, _ = self._variable_of(in_parts[stored].tensor)
                self.edges[source, result, kept, 0, name] += 1
        updates = (name for stored, name in self.graph.mutations.items() if stored not in in_parts)
        for name in dict.fromkeys((*self.graph.outputs, *updates)):
            whole = (I if self.graph.tensors[name].differentiable else R,) * len(self.axes)
            self._add("output", name, [whole], 1, [0], [0])
            source, result = self._variable_of(name)
            self.edges[source, result, self.index["output", name], 0, name] += 1

    def _matrix(self, source: int, result: int, target: int, operand: int, tensor_name: str) -> Matrix:
        tensor = self.graph.tensors[tensor_name]
        left, right = self.variables[source], self.variables[target]
        targets = [self._wanted(option, operand) for option in right.options]
        if left.kind == "stored" and right.kind == "node" and self._is_first_reader(tensor_name, right, operand):
            # What the storage costs for this use, the option itself has paid.
            return np.array([[0 if kept.use == use else INFINITE for use in targets] for kept in left.options])
        rows, row_of = _distinct([_left(option, result) for option in left.options])
        columns, column_of = _distinct(targets)
        price = self.costs.storage_ns if left.kind == "stored" else self.costs.convert_ns
        return price(tensor, rows, columns)[np.ix_(row_of, column_of)]

    def _wanted(self, option: Any, operand: int) -> Placement:
        """The placement that an option takes a tensor in; that of a parameter which becomes it, as it is stored."""
        if isinstance(option, Strategy):
            return option.operands[operand]
        wanted: Placement = (
            of_new_value(option.storage.placement, self.axes) if isinstance(option, KeptParameter) else option
        )
        return wanted

    def _is_first_reader(self, tensor: str, variable: ChoiceVariable, operand: int) -> bool:
        node, position = self.graph.consumers[tensor][0]
        return (self.blocks.representative_node(node.name), position) == (variable.name, operand)

    def _add_edge(self, matrices: dict[tuple[int, int], Matrix], source: int, target: int, matrix: Matrix) -> None:
        matrix = np.minimum(matrix, INFINITE)
        if source == target:
            self.unary[source] = np.minimum(self.unary[source] + np.diagonal(matrix), INFINITE)
            return
        key, value = ((source, target), matrix) if source < target else ((target, source), matrix.T)
        matrices[key] = np.minimum(matrices[key] + value, INFINITE) if key in matrices else value


def _nothing_left(what: str, tensor: Tensor, rules: list[Constraint], axes: LogicalMesh) -> str:
    """Expected, found and remedy, where no placement of a tensor is left."""
    sizes = ", ".join(f"{axis.name}={axis.size}" for axis in axes)
    patterns = ", ".join(repr(rule.pattern) for rule in rules) or "none"
    ranks = math.prod(axis.size for axis in axes if any(r.allow == ("S(0)",) and r.axis == axis.name for r in rules))
    if what == "input" and tensor.shape and ranks > 1:
        batch = tensor.shape[0]
        fits = " or ".join(str(n) for n in (batch // ranks * ranks, -(-batch // ranks) * ranks) if n)
        return (
            f"expected at least one sample on each of {ranks} ranks of the mesh ({sizes}), found a batch of {batch} "
            f"({tensor.name} {list(tensor.shape)}), which leaves a rank without. Use a batch of {fits}, or fewer "
            "data-parallel ranks."
        )
    return (
        f"expected at least one placement of {tensor.name} {list(tensor.shape)} on the mesh ({sizes}), found no "
        f"strategy that the constraints allow (constraints that match: {patterns}). Relax the constraint, or choose "
        "lengths and axes such that every rank gets at least one row of a dim that is cut."
    )


def _left(option: Any, result: int) -> Any:
    """What an option leaves for readers: a placement, or a parameter's storage."""
    if isinstance(option, Strategy):
        return option.results[result]
    return option.storage if isinstance(option, KeptParameter) else option


def _undominated(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Of (cost, usage, option): those than which no other is both cheaper and smaller."""
    kept: list[tuple[int, int, int]] = []
    for row in sorted(rows):
        if not kept or row[1] < kept[-1][1]:
            kept.append(row)
    return kept


def _distinct(values: list[Any]) -> tuple[list[Any], list[int]]:
    order = {value: position for position, value in enumerate(dict.fromkeys(values))}
    return list(order), [order[value] for value in values]


def _products(types: list[Type], count: int) -> list[Placement]:
    found: list[Placement] = [()]
    for _ in range(count):
        found = [(*placement, type_) for placement in found for type_ in types]
    return found


def _operand_placement(position: int) -> Callable[[Any, Constraint], list[Placement]]:
    return lambda option, _: [option.operands[position]]


def _every_operand(option: Any, rule: Constraint) -> list[Placement]:
    return list(option.operands)


def _constrained_results(node: Node) -> Callable[[Any, Constraint], list[Placement]]:
    """Of a constraint by tensor name the results so named, of one by module or operator all."""

    def placements(option: Any, rule: Constraint) -> list[Placement]:
        named = [p for name, p in zip(node.results, option.results, strict=True) if rule.matches(name)]
        return named or list(option.results)

    return placements


def _result_placement(position: int) -> Callable[[Any, Constraint], list[Placement]]:
    return lambda option, _: [option.results[position]]


def _of_zero_stage(options: list[Storage], penalties: list[int], stage: int) -> tuple[list[Storage], list[int]]:
    """Those that behave as the stage says; where gradients are reduced once a step anyway, 2 is as 1."""
    for wanted in (stage, 1) if stage == 2 else (stage,):
        pairs = [(o, p) for o, p in zip(options, penalties, strict=True) if _zero_agrees(o, wanted)]
        if any(type_.kind == "S" for option, _ in pairs for type_ in option.placement):
            return [o for o, _ in pairs], [p for _, p in pairs]
    return options, penalties


def _zero_agrees(option: Storage, stage: int) -> bool:
    """Whether sharded storage behaves as the stage says; with one microbatch, stages 1 and 2 are the same."""
    if all(type_.kind != "S" for type_ in option.placement):
        return True
    return option.regather == (stage == 3) and option.reduce_each_microbatch == (stage >= 2)
