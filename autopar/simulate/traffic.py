"""The bytes that one rank hands to each collective in a step, exactly as the emitted program sends them.

Activations: each redistribution once a microbatch, both directions where a gradient flows; forward once more in a call
that runs again (`Recomputation`), and for each sum or count over all microbatches that it serves, for which alone it
may be there (`ops.ahead`). Parameters: once a step; regathered ones each microbatch. What inference keeps of
parameters is sent when these are loaded, in none of the steps after that. Operators that communicate inside add what
they declare. Byte conventions: `ir.redistribution.transfer_bytes`.

Regathered parameters are brought into place as `runtime.gathering` does it. A block's come when its forward is called
and go when it ends. Whoever reads one at another time (a second piece of the block that runs apart, another module that
shares the parameter) brings it again, and then it stays to the end, as one does of which the block hands out a view; a
stage of several keeps nothing between a microbatch's two passes, and brings it once more for the second. The backward
pass brings what is not in place when the first gradient reaches an output of the block's forward, or when the block
runs again. If it comes in two parts, the second brings everything once more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

from autopar.cost.memory import is_view
from autopar.ir.branches import converted_inside, coordinates_of, homes, is_idle
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import Placement, evenly
from autopar.ir.plan import Plan, Redistribute, StagePlan
from autopar.ir.recompute import modules_again
from autopar.ir.redistribution import Step, apply, gradient_collectives, transfer_bytes
from autopar.ir.schedule import num_in_two_parts
from autopar.ir.stages import leaving_values, stage_graph
from autopar.ir.statements import Flat, Operate, Statement, Value, flatten
from autopar.ir.structure import block_paths, computed_once, folded_tensors, is_cut
from autopar.microbatch import divided_graph, on_microbatch_axis
from autopar.ops.ahead import ToldAhead
from autopar.ops.call import call_of
from autopar.ops.communication import count_of_targets, inner_communication
from autopar.ops.copies import without_sums
from autopar.ops.inner import Sent
from autopar.simulate.facts import Recomputation, key_of, tensors_on_the_way
from autopar.simulate.timeline import Timeline


def traffic(graph: Graph, plan: Plan, rank: int = 0) -> dict[str, int]:
    """Bytes by collective, a rank (the first) of the only stage and step. Others may have shorter slices, and run other
    branches. graph: of the step.

    A tensor that ranks share along the dim that microbatches cut is gathered whole before it is cut.
    """
    plan = without_sums(plan)
    return _total(_of_stage(graph, on_microbatch_axis(graph, plan), plan, 0, rank))


def traffic_by_submesh(graph: Graph, plan: Plan, timeline: Timeline) -> list[dict[str, int]]:
    """As `traffic`, of a plan of several stages, for each lane of its timeline."""
    plan = without_sums(plan)
    found, full = [], on_microbatch_axis(graph, plan)
    for lane in timeline.lanes:
        sent = Counter(lane.bytes_between)
        for index, stage in enumerate(plan.stages):
            if stage.first_rank == lane.ranks.start:
                sent.update(_of_stage(graph, full, plan, index))
        found.append(_total(sent))
    return found


def _of_stage(graph: Graph, full: Plan, plan: Plan, index: int, rank: int = 0) -> Counter[str]:
    """Of a stage of a plan, and the plan stated on the axis of microbatches."""
    whole, stage = stage_graph(graph, full, index), full.parts[index]
    runs = _Runs(whole, stage, leaving_values(graph, full, index) if len(full.parts) > 1 else ())
    part = stage_graph(divided_graph(graph, plan.microbatches), plan, index)
    in_two = _num_in_two_parts(plan, index)
    return _moved(whole, stage, runs, in_two, rank) + _inside(part, plan.parts[index], runs, rank)


def _num_in_two_parts(plan: Plan, index: int) -> int:
    """Of how many microbatches a stage's backward pass comes in two parts."""
    on: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        on[stage.first_rank].append(number)
    return num_in_two_parts(plan.schedule, tuple(map(tuple, on.values())), plan.microbatches)[index]


def _total(*parts: Counter[str]) -> dict[str, int]:
    return {kind: size for kind, size in sorted(sum(parts, Counter[str]()).items()) if size}


class _Runs:
    """How often a step runs what is done in each microbatch, and to tell all of them of the batch (`ops.ahead`)."""

    def __init__(self, graph: Graph, stage: StagePlan, leaving: Sequence[Value]) -> None:
        self._microbatches, self._left = stage.microbatches, set[str | Value]()
        self._ahead = Counter[str | Value]()
        self._flat: Callable[[], Flat] = cache(partial(flatten, graph, stage, leaving))
        ahead = ToldAhead(graph, stage, self._flat()) if stage.microbatches > 1 else None
        self._tells = ahead is not None and bool(ahead.told)
        if ahead is not None and self._tells:
            self._ahead.update(key_of(statement) for one in ahead.told for statement in one.makers or ())
            left = ahead.left
            self._flat = lambda: left
            self._left.update(map(key_of, left.statements))

    def ahead(self, key: str | Value) -> int:
        """Before the first microbatch: of an operator, by its name, or a conversion."""
        return self._microbatches * self._ahead[key]

    def once(self, key: str | Value) -> int:
        """Of what the first step keeps for all later ones: in the first, if something comes of it."""
        return int(key in self._kept) + self.ahead(key)

    @cached_property
    def _kept(self) -> frozenset[str | Value]:
        return frozenset(map(key_of, self._flat().constants))

    def forward(self, key: str | Value) -> int:
        """In all forward passes and before them."""
        stays = not self._tells or key in self._left
        return self._microbatches * stays + self.ahead(key)


def _moved(graph: Graph, plan: StagePlan, runs: _Runs, in_two: int = 0, rank: int = 0) -> Counter[str]:
    """What redistributions send, but for those in branches that other ranks run. in_two: of how many microbatches the
    backward pass comes in two parts."""
    place = coordinates_of(plan, rank)
    left_out = {value for value, home in converted_inside(graph, plan).items() if is_idle(home, place)}
    counts: Counter[str] = Counter()
    placements = _placements(graph, plan)
    once, folded = computed_once(graph, plan), folded_tensors(graph)
    reached = reached_tensors(graph) if plan.mode == "train" else set()
    flat = cache(partial(flatten, graph, plan, graph.answered))
    recomputation = Recomputation(graph, plan, flat, reached)
    regathering = Regathering(graph, plan, flat, reached, recomputation, in_two)
    for redistribute in plan.redistributes:
        name = redistribute.tensor
        if (name, redistribute.target) in left_out or name in folded:
            continue
        forward, backward = _step_counts(graph, plan, redistribute, regathering, recomputation, reached, once, runs)
        _add(counts, graph, plan, name, placements[name], redistribute.steps, forward, backward, rank)
    return counts


def _inside(graph: Graph, plan: StagePlan, runs: _Runs, rank: int = 0) -> Counter[str]:
    """What operators send inside."""
    counts: Counter[str] = Counter()
    known, place, folded = homes(plan), coordinates_of(plan, rank), folded_tensors(graph)
    reached, once = reached_tensors(graph) if plan.mode == "train" else set(), computed_once(graph, plan)
    recomputation = Recomputation(graph, plan, partial(flatten, graph, plan), reached)
    for node in graph.nodes:
        if is_idle(known.get(node.name), place) or not folded.isdisjoint(node.results):
            continue
        forward, backward = inner_collectives(graph, node, plan)
        trains = not reached.isdisjoint(node.results)
        again = recomputation.computes_again(node.name)
        times = runs.forward(node.name) + plan.microbatches * again
        times = runs.once(node.name) if forward and not once.isdisjoint(node.results) else times
        for inner in forward:
            counts[inner.collective] += inner.num_bytes * times
        for inner in backward if trains else ():
            counts[inner.collective] += inner.num_bytes * plan.microbatches
        if plan.microbatches > 1:  # once for all of them
            for inner in count_of_targets(call_of(graph, node), plan.nodes[node.name].operands):
                counts[inner.collective] += inner.num_bytes
    return counts


def _placements(graph: Graph, plan: StagePlan) -> dict[str, Placement]:
    found = dict(plan.inputs) | {name: storage.placement for name, storage in plan.storage.items()}
    for node in graph.nodes:
        found.update(zip(node.results, plan.nodes[node.name].results, strict=True))
    return found


def reached_tensors(graph: Graph) -> set[str]:
    """The tensors whose gradient the backward pass computes: those that the loss (or what a stage sends) depends on,
    but for what is cut off by a comparison or a detached value."""
    found = set(graph.gradient_sources)
    for node in reversed(graph.nodes):
        if not found.isdisjoint(node.results):
            found.update(name for name in node.operands if graph.tensors[name].differentiable)
    return found


def _step_counts(
    graph: Graph, plan: StagePlan, redistribute: Redistribute, regathering: Regathering, recomputation: Recomputation,
    reached: set[str], once: set[str], runs: _Runs,
) -> tuple[int, int]:  # fmt: skip
    """How often a step a redistribution runs forward and backward."""
    name = redistribute.tensor
    trains = name in reached and _brings_gradient(graph, plan, redistribute, reached)
    stored = graph.stored_by_tensor.get(name)
    if name in once and not is_cut(plan, redistribute.target):
        return runs.once((name, redistribute.target)), 0
    if stored is None or stored.kind != "parameter":
        again = recomputation.converts_again((name, redistribute.target))
        forward = runs.forward((name, redistribute.target)) + plan.microbatches * again
        return forward, plan.microbatches if trains else 0
    storage = plan.storage[name]
    gathers = regathering.count(redistribute) if storage.regather else 1
    reductions = plan.microbatches if storage.regather or storage.reduce_each_microbatch else 1
    return gathers, reductions if trains else 0


def _brings_gradient(graph: Graph, plan: StagePlan, redistribute: Redistribute, reached: set[str]) -> bool:
    """Whether some reader of the redistributed tensor has a gradient to hand back; who makes the loss has."""
    readers = [
        node for node, position in graph.consumers[redistribute.tensor]
        if plan.nodes[node.name].operands[position] == redistribute.target
    ]  # fmt: skip
    leaves = (redistribute.tensor, redistribute.target) in graph.answered
    return redistribute.tensor == graph.loss or leaves or any(not reached.isdisjoint(node.results) for node in readers)


def _add(
    counts: Counter[str], graph: Graph, plan: StagePlan, name: str, placement: Placement, steps: tuple[Step, ...],
    forward: int, backward: int, rank: int,
) -> None:  # fmt: skip
    shape, itemsizes = graph.tensors[name].shape, graph.itemsizes(name)
    axes = evenly(plan.axes) if name in plan.storage else plan.axes
    coordinate = tuple(rank // axis.stride % axis.size if axis.name != MICROBATCH else 0 for axis in axes)
    are_levels = any(step.parts > 1 for step in steps)
    every = list[tuple[int, int]]()
    for step in steps:
        if plan.axes[step.axis].name == MICROBATCH:  # microbatches follow each other: nothing is sent
            placement = apply(step, placement)
            every.append((0, 0))
            continue
        sizes = transfer_bytes(shape, itemsizes, placement, axes, step, coordinate)
        every.append(sizes)
        if are_levels:
            placement = apply(step, placement)
            continue
        for transfer, size, times in zip(step.transfers, sizes, (forward, backward), strict=True):
            if transfer.collective:
                counts[transfer.collective] += size * times
        placement = apply(step, placement)
    if are_levels:
        for step, (size, _) in zip(steps, every, strict=True):
            if collective := step.transfers[0].collective:
                counts[collective] += size * forward
        for sent in gradient_collectives(steps, every, axes):
            counts[sent.collective] += sent.num_bytes * backward


def inner_collectives(graph: Graph, node: Node, plan: StagePlan) -> Sent:
    """What an operator sends inside, in the forward and the backward pass of a microbatch.

    A mean loss counts its targets in the forward pass, unless several microbatches share the count: along the first
    axis early where it can be (`emit.early`), then along the others.
    """
    operands = plan.nodes[node.name].operands
    forward, backward = inner_communication(graph, node, operands, plan.axes, plan.mode == "train")
    counts = count_of_targets(call_of(graph, node), operands) if plan.microbatches == 1 else []
    counts = [inner for inner in counts if plan.axes[inner.axis].size > 1]
    if counts and _is_counted_early(graph, node, plan):
        counts[0] = counts[0]._replace(is_early=True)
    return [*forward, *counts], backward


def _is_counted_early(graph: Graph, loss: Node, plan: StagePlan) -> bool:
    """Whether the targets follow from inputs and constants outside of blocks, where the loss lies, too."""
    if len(loss.operands) > 2:  # weights of classes
        return False
    blocks, needed = block_paths(graph, modules_again(plan.recompute)), [loss.operands[1]]
    makers = [loss]
    while needed:
        name = needed.pop()
        if name in graph.stored_by_tensor or name in graph.received:
            return False
        producer = graph.producers.get(name)
        if producer is not None and producer not in makers:
            makers.append(producer)
            needed += producer.operands
    return all(path not in blocks for maker in makers for path, _ in maker.scope.path if path)


# Regathered parameters ----------------------------------------


class StatementSpan(NamedTuple):
    """Consecutive statements: the first of them, and the first that is none of them."""

    start: int
    end: int


class Regathering:
    """Counts of one plan. flat: states it. `reached`: the tensors that get a gradient, none in inference. in_two: of
    how many microbatches the backward pass comes in two parts."""

    def __init__(
        self, graph: Graph, plan: StagePlan, flat: Callable[[], Flat], reached: set[str], recomputation: Recomputation,
        in_two: int,
    ) -> None:  # fmt: skip
        self.graph, self.plan, self._flat, self.reached = graph, plan, flat, reached
        self.recomputation = recomputation
        # where nothing was received, the second part is all of it
        self._in_two = 0 if reached.isdisjoint(graph.received) else in_two

    def count(self, redistribute: Redistribute) -> int:
        """How often a step converts a parameter to one of its uses: the second part of a backward pass brings all."""
        in_one = self.plan.microbatches - self._in_two
        whole = in_one * self._count(redistribute, False) if in_one else 0
        return whole + (self._in_two * (self._count(redistribute, True) + 1) if self._in_two else 0)

    def _count(self, redistribute: Redistribute, is_first_part: bool) -> int:
        """Of a microbatch; is_first_part: up to the end of the first of two parts of its backward pass."""
        span = self._span_of(self.graph.stored_by_tensor[redistribute.tensor].name)
        goes_and_comes = int(self._is_stage and bool(self.reached))
        if span is None:  # the program keeps its own
            return 1 + goes_and_comes
        reads = self._reads[redistribute.tensor, redistribute.target]
        if any(position < span.start for position in reads):
            return 1 + goes_and_comes
        stays = self._is_seen_outside((redistribute.tensor, redistribute.target), span)
        if any(position >= span.end for position in reads):
            return (1 if stays else 2) + goes_and_comes
        comes_again = self._is_visited_again(span, is_first_part) and (self._is_stage or not stays)
        return 2 if comes_again else 1

    @property
    def _is_stage(self) -> bool:
        return self.graph.ends is not None

    @cached_property
    def _reads(self) -> dict[Value, list[int]]:
        """Where each value is read."""
        found: dict[Value, list[int]] = defaultdict(list)
        for position, statement in enumerate(self._flat().statements):
            for value in statement.reads:
                found[value].append(position)
        return found

    @cached_property
    def _spans(self) -> dict[str, StatementSpan]:
        """Where the forward of each block runs: the first of its pieces."""
        blocks, found = block_paths(self.graph, modules_again(self.plan.recompute)), dict[str, StatementSpan]()
        for position, statement in enumerate(self._flat().statements):
            for path in {path for path, _ in statement.scope.path} & blocks:
                start, end = found.get(path, (position, position))
                if end == position:
                    found[path] = StatementSpan(start, position + 1)
        return found

    def _span_of(self, name: str) -> StatementSpan | None:
        """That of the innermost block that a parameter is in."""
        end = name.rfind(".")
        while end > 0:
            if name[:end] in self._spans:
                return self._spans[name[:end]]
            end = name.rfind(".", 0, end)
        return None

    def _is_seen_outside(self, used: Value, span: StatementSpan) -> bool:
        """Whether the block hands out a view of the parameter, which then stays in place to the end of the pass."""
        statements, views = self._flat().statements, [used]
        for statement in statements[slice(*span)]:
            if isinstance(statement, Operate) and is_view(statement.node, self.graph) and statement.reads[0] in views:
                views += statement.makes
        kept = {*self._flat().outputs, *self._flat().leaving}
        return any(view in kept or any(place >= span.end for place in self._reads[view]) for view in views[1:])

    def _is_visited_again(self, span: StatementSpan, is_first_part: bool) -> bool:
        """Whether the backward pass needs the block in place: it runs again, or a gradient reaches its outputs."""
        if (span, is_first_part) not in self._visits:
            statements = self._flat().statements[slice(*span)]
            runs_again = any(map(self.recomputation.runs_again, statements))
            self._visits[span, is_first_part] = runs_again or self._gets_gradient(span, statements, is_first_part)
        return self._visits[span, is_first_part]

    def _gets_gradient(self, span: StatementSpan, statements: Sequence[Statement], is_first_part: bool) -> bool:
        """Whether a gradient reaches what the statements leave to others, in the first part if there are two."""
        made = {value for statement in statements for value in statement.makes}
        if is_first_part:
            made = {value for value in made if value[0] in self._leading_back}
        return any(
            value in self._losses or any(not span.start <= position < span.end for position in self._handed[value])
            for value in made & self._trained
        )

    @cached_property
    def _visits(self) -> dict[tuple[StatementSpan, bool], bool]:
        return {}

    @cached_property
    def _handed(self) -> dict[Value, list[int]]:
        """Where each value is read by a statement that hands it a gradient."""
        found: dict[Value, list[int]] = defaultdict(list)
        for position, statement in enumerate(self._flat().statements):
            if self._hands_back(statement, self._trained):
                for value in statement.reads:
                    found[value].append(position)
        return found

    @cached_property
    def _leading_back(self) -> frozenset[str]:
        """The tensors that the first part of the backward pass makes gradients of."""
        return tensors_on_the_way(self.graph)

    @cached_property
    def _trained(self) -> set[Value]:
        """The values that get a gradient."""
        found = set(self._losses)
        for statement in reversed(self._flat().statements):
            if self._hands_back(statement, found):
                found.update(value for value in statement.reads if value[0] in self.reached)
        return found

    @cached_property
    def _losses(self) -> set[Value]:
        """The values that gradients start from: the loss, and what later stages hand one back for."""
        if not self.reached:
            return set()
        pairs = zip(self.graph.returned, self._flat().outputs, strict=True)
        return {value for name, value in pairs if name == self.graph.loss} | set(self._flat().leaving)

    def _hands_back(self, statement: Statement, trained: set[Value]) -> bool:
        """Whether a statement hands a gradient to what it reads; `trained`: values that get one, those it makes too."""
        if isinstance(statement, Operate) and not self.reached.isdisjoint(statement.node.results):
            return True
        return not trained.isdisjoint(statement.makes)
