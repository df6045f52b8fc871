"""What pieces of a plan cost by themselves, whatever is beside them, for a search that puts them together.

Prices of single operators and tensors make a lower bound of a plan's step time: no stream's work can be overlapped
with itself, nor an operator with what it waits for.

work of the compute stream = microbatches · Σ (operators and conversions, forward and backward) + the optimizer
work of a link level       = microbatches · Σ (collectives inside operators and of conversions) + Σ those of parameters

An operator that reads what the one just before it makes waits for the collectives between the two, and so does that
one for the gradient on the way back: nothing else can be computed in the meantime, so these times are added to the
compute stream's. So are the time in which the step's first operator's parameters are gathered, and that in which the
gradients of the last one backward go home before the optimizer runs: whatever else travels with them, no bucket takes
less time than a part of it. Not so where the host or the runtime take time beside them.

What buckets of parameters send is bounded by their bytes at the rate of an endless message, which no message beats
where a collective's time is concave in its bytes (`cost.collectives`, the algorithms' formulas); where it was measured,
it is left out.

Stages are played alone, each as if it waited for no other. Of a stage of several layers, times and bytes are about the
sums of these; gradient sums of a layer run beside the backward passes of those before it, so what could hide them is
told apart. Stages of unequal devices are sized by how long blocks take on a kind of device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.cost import Profile
from autopar.cost.collectives import collective_time_ns
from autopar.cost.compute import pointwise_time_ns
from autopar.cost.profile import INSIDE
from autopar.ir.graph import IDENTITY, Graph, Node
from autopar.ir.placement import Placement
from autopar.ir.plan import NodePlan, Plan, StagePlan, Storage
from autopar.ir.recompute import modules_again, operators_again
from autopar.ir.redistribution import Step
from autopar.ir.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, SCHEDULES, Turn
from autopar.ir.structure import batch_inputs
from autopar.ops.saved import Extra
from autopar.runtime.packing import BUCKET_BYTES, LONE_BYTES, MAX_IN_FLIGHT
from autopar.simulate.engine import COMPUTE, Change, Moment, busy_ns, level_of
from autopar.simulate.facts import call_of, graph_facts
from autopar.simulate.incremental import Incremental
from autopar.simulate.parted import PartedStage, stage_in_one
from autopar.simulate.parts import NUM_BEFORE, Part, PartLowering
from autopar.simulate.passes import Pass, PassKind
from autopar.simulate.program import Item, Transmission
from autopar.simulate.schedule import StageProgress, Submesh, profiles_of_stages
from autopar.simulate.traffic import reached_tensors
from autopar.simulate.transfers import Transfers, find_transfers

ENDLESS = 1 << 50  # bytes: more than any bucket has


class WorkTimes(NamedTuple):
    """Nanoseconds: of a microbatch on the compute stream, forward and backward, with what it must wait for; of a step
    on links inside nodes, and between them; of an operator each time that it is computed again."""

    forward_ns: int = 0
    backward_ns: int = 0
    inside_ns: int = 0
    across_ns: int = 0
    again_ns: int = 0


NONE = WorkTimes()


Reshard = tuple[Placement, tuple[Step, ...], bool]
"""How a tensor is brought to a placement that it is read in; whether a gradient comes back from there."""


class SeparatePrices:
    """The work of each operator, activation and stored tensor by itself, whatever else a plan has."""

    def __init__(self, graph: Graph, plan: StagePlan, lowering: PartLowering, is_staged: bool = False) -> None:
        """is_staged: stages are made of the graph, so that its ends are not those of each."""
        self.graph, self._plan, self._lowering = graph, plan, lowering
        self._count, self._profile, self._facts = plan.microbatches, lowering.profile, lowering.facts
        profile, facts = lowering.profile, lowering.facts
        self._waits = profile.runtime is None and profile.host is None and not any(profile.facts.view_ns)
        reached = reached_tensors(graph) if lowering.trains else set[str]()
        self._goes_back = {
            node.name: not reached.isdisjoint(node.results)
            and any(graph.tensors[name].differentiable for name in node.operands)
            for node in graph.nodes
        }  # fmt: skip
        constant = facts.constants
        self._next: dict[str, tuple[Node, int]] = {}  # by tensor: what runs just after its maker, and reads it as which
        self._follows: set[str] = set()  # operators that read what the one just before makes
        for maker, reader in zip(graph.nodes, graph.nodes[1:], strict=False):
            for name in maker.results:
                if name in reader.operands and name not in constant and not constant.issuperset(reader.results):
                    self._next[name] = reader, reader.operands.index(name)
                    self._follows.add(reader.name)
        has_ends = self._waits and not is_staged and not profile.collectives
        computing = (node for node in graph.nodes if not constant.issuperset(node.results))
        leading_back = (node for node in graph.nodes if self._goes_back[node.name])
        self._first, self._last_back = (
            next(found, None) if has_ends else None for found in (computing, leading_back)
        )  # fmt: skip
        numbers: dict[Hashable, int] = {}
        self.kinds = {name: numbers.setdefault(self._kind(name), len(numbers)) for name in graph.tensors}
        self._rates: dict[tuple[str, int], float] = {}

    def _kind(self, name: str) -> Hashable:
        """All that a tensor's conversions depend on beside the plan."""
        graph, tensor, stored = self.graph, self.graph.tensors[name], self.graph.stored_by_tensor.get(name)
        readers = tuple([(self._goes_back[node.name], at) for node, at in graph.consumers[name]])
        trained = stored is not None and stored.requires_grad
        is_folded, after = name in self._facts.folded, self._next.get(name)
        leads_back = after is not None and self._goes_back[graph.producers[name].name]
        place = None if after is None else [node.name for node, _ in graph.consumers[name]].index(after[0].name)
        ends = [node.name for node in (self._first, self._last_back) if node is not None and name in node.operands]
        return (
            tensor.shape, graph.itemsizes(name), tensor.differentiable, trained, is_folded, readers, place, leads_back,
            tuple(ends),
        )  # fmt: skip

    def goes_back(self, tensor: str, reader: str) -> bool:
        """Whether a gradient of the tensor comes back from a node that reads it."""
        return self.graph.tensors[tensor].differentiable and self._goes_back[reader]

    def node(self, node: Node, placed: NodePlan) -> WorkTimes:
        """An operator, with what it sends inside."""
        if node.results and self._facts.folded.issuperset(node.results):
            return NONE
        price, goes_back = self._lowering.price(node, placed), self._goes_back[node.name]
        forward, backward, sent = price.forward_ns, 0, [*price.inner]
        if self._waits and any(name in self._next for name in node.results):
            forward += _spent(price.inner)
        if goes_back:
            backward = price.backward_ns
            sent += price.inner_backward
            if self._waits and node.name in self._follows and self._maker_goes_back(node):
                backward += _spent(price.inner_backward)
        return self._work(forward, backward, sent, self._count)._replace(again_ns=price.forward_ns)

    def least_ns(self, node: Node, options: Iterable[NodePlan]) -> int:
        """What an operator computes at least of a microbatch, forward and backward, in the fastest of strategies."""
        if node.results and self._facts.folded.issuperset(node.results):
            return 0
        prices = (self._lowering.price(node, placed) for placed in options)
        goes_back = self._goes_back[node.name]
        return min(price.forward_ns + (price.backward_ns if goes_back else 0) for price in prices)

    def computed_again(self, recompute: Sequence[str]) -> list[str]:
        """The operators that surely run again where these modules do: each of them saves something for its own backward
        pass."""
        modules, operators = frozenset(modules_again(recompute)), operators_again(tuple(recompute))
        again = (node for node in self._saving if node.name in operators or call_of(node.scope, modules) is not None)
        return [node.name for node in again] if recompute else []

    @cached_property
    def _saving(self) -> list[Node]:
        constants, facts = self._facts.constants, self._facts.nodes
        return [
            node for node in self.graph.nodes
            if self._goes_back[node.name] and node.op != IDENTITY and not constants.issuperset(node.results)
            and any(not isinstance(kept, Extra) for kept in facts[node.name].saved)
        ]  # fmt: skip

    def _maker_goes_back(self, node: Node) -> bool:
        """Whether the operator just before waits for this one's gradient."""
        return any(
            name in self._next and self._next[name][0] is node and self.goes_back(name, node.name)
            and self._goes_back[self.graph.producers[name].name]
            for name in node.operands
        )  # fmt: skip

    def _work(self, forward_ns: int, backward_ns: int, sent: Sequence[Transmission], times: int) -> WorkTimes:
        inside = sum([one.duration_ns for one in sent if one.level == INSIDE])
        across = sum([one.duration_ns for one in sent]) - inside
        return WorkTimes(forward_ns, backward_ns, times * inside, times * across)

    def activation(
        self, name: str, base: Placement, reshards: Sequence[Reshard], placed: Mapping[str, NodePlan]
    ) -> WorkTimes:
        """The conversions of a tensor that each microbatch makes. placed: of its readers that count."""
        if name in self._facts.folded:
            return NONE
        lowering = self._lowering
        lowering.placements[name] = base
        times, sent, waited = (
            [0, self._adding_ns(name, base, reshards, placed)],
            list[Transmission](),
            self._waited(name, placed),
        )
        for target, steps, goes_back in reshards:
            for direction in (0, 1) if goes_back else (0,):
                own, collectives = lowering.conversion_work(name, steps, direction)
                times[direction] += own
                sent += collectives
                if target == waited[direction]:
                    times[direction] += _spent(collectives)
        forward, backward = times
        return self._work(forward, backward, sent, self._count) if forward or backward or sent else NONE

    def _adding_ns(
        self, name: str, base: Placement, reshards: Sequence[Reshard], placed: Mapping[str, NodePlan]
    ) -> int:
        """Adds up gradients where several operators, or conversions, read one value."""
        if not self.graph.tensors[name].differentiable or name not in self.graph.producers:
            return 0
        readers: dict[Placement, set[str]] = {base: {str(target) for target, _, goes_back in reshards if goes_back}}
        for node, at in self.graph.consumers[name]:
            if node.name in placed and self._goes_back[node.name]:
                readers.setdefault(placed[node.name].operands[at], set()).add(node.name)
        local = self._lowering.shapes.local
        return sum(
            (len(names) - 1) * pointwise_time_ns(3 * local(name, target)[1], self._profile)
            for target, names in readers.items() if len(names) > 1
        )  # fmt: skip

    def _waited(self, name: str, placed: Mapping[str, NodePlan]) -> tuple[Placement | None, Placement | None]:
        """The placement that the operator just after waits for; that whose gradient the maker does."""
        if not self._waits or name not in self._next:
            return None, None
        reader, at = self._next[name]
        if reader.name not in placed:
            return None, None
        target = placed[reader.name].operands[at]
        is_back = self.goes_back(name, reader.name) and self._goes_back[self.graph.producers[name].name]
        return target, target if is_back else None

    def stored(
        self, name: str, storage: Storage, reshards: Sequence[Reshard], placed: Mapping[str, NodePlan]
    ) -> WorkTimes:  # fmt: skip
        """Collectives of a stored tensor: to each placement that it is used in, and of its gradient on the way home;
        what is waited for of them at the ends of the step. placed: of its readers that count."""
        stored, lowering = self.graph.stored_by_tensor[name], self._lowering
        lowering.placements[name] = storage.placement
        total, waited = [0.0, 0.0], [0, 0]
        ends = self._targets_at_ends(name, placed)
        for target, steps, goes_back in reshards:
            if not steps:
                continue
            sizes = lowering.bytes_of_steps(name, steps)
            each = storage.regather or storage.reduce_each_microbatch
            times = (
                self._count if storage.regather else 1,
                (self._count if each else 1) if goes_back and stored.requires_grad and lowering.trains else 0,
            )
            used = lowering.shapes.local(name, target)[1]
            is_alone = used >= LONE_BYTES, False
            for direction in (0, 1):
                for sent in lowering.sending.of_steps(steps, sizes, direction) if times[direction] else ():
                    waited[direction] += sent.duration_ns if target in ends[direction] else 0
                    spent = sent.duration_ns if is_alone[direction] else sent.num_bytes * self._rate(sent)
                    total[sent.level != INSIDE] += times[direction] * spent
        forward, backward = (amount // self._count for amount in waited)
        return WorkTimes(forward, backward, int(total[0]), int(total[1]))

    def _targets_at_ends(self, name: str, placed: Mapping[str, NodePlan]) -> list[set[Placement]]:
        """As what the step's first operator reads a tensor, and the last one of the backward pass."""
        return [
            {target for own, target in zip(node.operands, placed[node.name].operands, strict=True) if own == name}
            if node is not None and node.name in placed else set()
            for node in (self._first, self._last_back)
        ]  # fmt: skip

    def _rate(self, sent: Transmission) -> float:
        """Nanoseconds that no byte of a bucket can do with less of, rounded down."""
        key = sent.collective, sent.axis
        if key not in self._rates:
            is_measured = any(kind == sent.collective for kind, _, _ in self._profile.collectives)
            is_concave = sent.collective in ("all_reduce", "all_gather", "reduce_scatter")
            endless = collective_time_ns(
                sent.collective, ENDLESS, self._plan.axes[sent.axis], self._lowering.per_node, self._profile
            )  # fmt: skip
            self._rates[key] = 0.0 if is_measured or not is_concave else endless / ENDLESS * (1 - 1e-9)
        return self._rates[key]

    def moved_bytes(self, name: str, storage: Storage) -> int:
        """What the optimizer moves to update a stored tensor."""
        if not self._lowering.trains or not self.graph.stored_by_tensor[name].requires_grad:
            return 0
        return self._lowering.stored.moved_bytes(self._plan, name, storage.placement)

    def optimizer_ns(self, moved_bytes: int, tensors: int) -> int:
        """How long it takes to update so many tensors."""
        return self._lowering.stored.update_ns(moved_bytes, tensors) if moved_bytes else 0


def prices_of(graph: Graph, plan: Plan, profile: Profile, per_node: int, is_staged: bool = False) -> SeparatePrices:
    """The prices of plans like this one: on its axes, with its microbatches. per_node: devices of a stage in a node;
    is_staged: stages are made of the graph."""
    batched = {name: graph.tensors[name].shape[0] for name in batch_inputs(graph)}
    facts = graph_facts(graph, profile.device_type)
    stored = {item.tensor: Storage((), False, False) for item in graph.stored}  # which are stored is all that is asked
    stage = replace(plan.parts[0], storage=stored)
    return SeparatePrices(graph, stage, PartLowering(graph, stage, profile, per_node, facts, batched), is_staged)


def _spent(sent: Sequence[Transmission]) -> int:
    return sum([one.duration_ns for one in sent])


# Stages ----------------------------------------


_IN_TWO = next(row.name for row in SCHEDULES.values() if row.splits_backward)
_PARAMETER, _GRADIENT = "parameter ", "gradient "  # kinds of tasks begin so, which compute runs beside
CONSTANTS = "constants"  # of memory, the kind: a mask, say, that all layers read


class LayerCost(NamedTuple):
    """Times in ns, memory in bytes a device.

    forward_ns, backward_ns: of a microbatch, where none is the first or the last, beside a layer during which its
    parameters were gathered. receive_ns: of a microbatch, to fetch what crosses the border before the layer, to send
    its gradient back, and to wait for parameters that no layer before hides; of that, travel_ns between stages, during
    which a rank may make other passes. reduce_ns: a step, gathering parameters
    and summing gradients over ranks, which up to `hide_ns` of passes can run beside. last_ns: by how much the last
    microbatch's backward pass is longer, as few buckets of gradients are on their way at a time. optimizer_ns: a step,
    with what is packed and cast when it begins.
    begin_bytes: what is there before the first pass, parameters that were gathered with what they were gathered in.
    resident_bytes: parameters, gradients and optimizer state, of which gradient_bytes are there from the first backward
    pass on. travelling_bytes: what gradients on their way take beside
    that, of which a stage has that of all its layers, but at most `most_travelling_bytes`, as few buckets are on their
    way at a time. activation_bytes: of each microbatch in flight.
    workspace_bytes: what a pass takes beside both. Of backward passes in two parts, if these were played (else 0):
    waiting_bytes: of each microbatch between them. second_bytes: what the second takes beside what is there before it,
    in a stage of several layers for all of them at once. split_ns: what they take longer, but for kernels that run in
    both.
    """

    forward_ns: int
    backward_ns: int
    receive_ns: int
    travel_ns: int
    reduce_ns: int
    hide_ns: int
    last_ns: int
    optimizer_ns: int
    begin_bytes: int
    resident_bytes: int
    gradient_bytes: int
    travelling_bytes: int
    most_travelling_bytes: int
    activation_bytes: int
    workspace_bytes: int
    waiting_bytes: int
    second_bytes: int
    split_ns: int


def layer_costs(
    simulator: Incremental, plan: Plan, splits: bool = False, constants_once: bool = False
) -> list[LayerCost]:  # fmt: skip
    """The cost of each stage of a plan for one microbatch, whose stages are layers in order. See `LayerCost`.

    simulator: of the graph, which knows what it has seen of plans before. splits: whether backward passes are played in
    two parts, too. constants_once: what is computed once is no part of what stays, of which a stage has the sum over
    its layers, but of the workspace, of which it has the largest.
    """
    graph, profiles = simulator.graph, profiles_of_stages(plan, simulator.profile)
    trains = plan.mode == "train" and graph.loss is not None
    players = simulator.stages(plan)
    transfers = find_transfers(graph, plan, players, profiles)
    costs = [
        _cost(player, plan.microbatches, *_crossing_ns(transfers, number), constants_once)
        for number, player in enumerate(players)
    ]
    if not (splits and trains and len(plan.stages) > 1):
        return costs
    in_two = simulator.stages(replace(plan, schedule=_IN_TWO))
    return [_with_two_parts(cost, player) for cost, player in zip(costs, in_two, strict=True)]


def _crossing_ns(transfers: Transfers, border: int) -> tuple[int, int]:
    """What is sent over the border before a stage, each tensor once a direction, and what that takes of its ranks."""
    found: dict[tuple[str, ...], int] = {}
    for (source, direction), sent in transfers.sent.items():
        for transfer in sent:
            first, last = sorted((source, transfer.target))
            if first < border <= last:
                found[(direction, *transfer.names)] = transfer.duration_ns
    around = [transfers.around_ns(Turn(border, name, 0)) for name in (FORWARD, BACKWARD) if border]
    return sum(found.values()), sum(around)


def _cost(
    player: PartedStage, microbatches: int, travel_ns: int, around_ns: int, constants_once: bool
) -> LayerCost:  # fmt: skip
    """Plays a step of at most three microbatches: the first, one of those between, and the last."""
    alone, trains = _Alone(player), player.variants.trains
    count = min(microbatches, 3)
    begin = alone.play(PassKind("begin"))
    forward = [alone.play(PassKind("forward")) for _ in range(count)]
    kinds = [PassKind("backward", number == 0, number == count - 1) for number in range(count)]
    backward = [alone.play(kind) for kind in kinds] if trains else []
    end = [alone.play(PassKind("optimizer"))] if trains else []
    one, back = forward[-1], backward[count // 2 : count // 2 + 1]
    passes = _held([begin, *forward, *backward, *end], count)
    end_of_step = sum(_net(done.allocations) for done, _ in passes)
    first = _net(begin.allocations) + _net(one.allocations)
    kept = _net(one.allocations) if count > 1 else max(0, first - end_of_step)
    but = CONSTANTS if constants_once else None
    resident, arrived = (_between(passes, kept, but, has_arrived)[1] for has_arrived in (False, True))
    at_begin, before = _between(passes[: 1 + count], kept, but)
    forward_ns, *backward_ns = (_amid_layers_ns(done, player.variants.profile) for done in (one, *back))
    length, busy = forward_ns + sum(backward_ns), _link_ns([one, *back])
    last_ns = max(0, backward[-1].length_ns - back[0].length_ns) if trains else 0
    return LayerCost(
        forward_ns=forward_ns,
        backward_ns=sum(backward_ns),
        receive_ns=travel_ns + around_ns + max(0, sum(done.length_ns for done in (one, *back)) - length),
        travel_ns=travel_ns,
        reduce_ns=_link_ns([begin]) + _link_ns(backward[-1:]) - _link_ns(back),
        hide_ns=max(0, length + last_ns - busy),
        last_ns=last_ns,
        optimizer_ns=player.optimizer_ns + _computed_ns(begin),
        begin_bytes=at_begin,
        resident_bytes=arrived,
        gradient_bytes=max(0, arrived - before),
        travelling_bytes=resident - arrived,
        most_travelling_bytes=round((resident - arrived) * _buckets_on_their_way(passes)),
        activation_bytes=kept,
        workspace_bytes=_workspace(passes, resident, kept),
        waiting_bytes=0,
        second_bytes=0,
        split_ns=0,
    )


def _with_two_parts(cost: LayerCost, player: PartedStage) -> LayerCost:
    """Plays two microbatches, of which the second holds what every other does."""
    alone, profile = _Alone(player), player.variants.profile
    kinds = [PassKind(name) for name in ("begin", FORWARD, FORWARD, BACKWARD_INPUT, BACKWARD_INPUT)]
    _, _, forward, _, first = [alone.play(kind) for kind in kinds]
    _, second = [alone.play(PassKind(BACKWARD_WEIGHT, is_first, not is_first)) for is_first in (True, False)]
    branch_ns = sum(profile.runtime.branch_ns) if profile.runtime else 0
    return cost._replace(
        waiting_bytes=_net(forward.allocations) + _net(first.allocations),
        second_bytes=_peak(second.allocations),
        split_ns=branch_ns * _num_branches(player.parts),
    )


def _num_branches(parts: Sequence[Part]) -> int:
    """The items that gradients go through to what was received, and to other tensors, too."""
    entering, found = set[int](), 0
    for part in parts:
        way, values = entering.union(part.program.receives.values()), part.program.values
        for item in part.program.items[NUM_BEFORE : part.end]:
            wanted = [value in way for value in item.inputs if values[value].wants_gradient]
            if any(wanted):
                way.update(item.outputs)
            found += item.runs_backward and any(wanted) and not all(wanted)
        entering = {place for place, value in enumerate(part.lowered.leaving) if value in way}
    return found


class _Alone:
    """A stage that waits for no other."""

    def __init__(self, player: PartedStage) -> None:
        self.submesh, self.progress = Submesh(range(1), [0]), StageProgress(player)

    def play(self, kind: PassKind) -> Pass:
        begin = self.submesh.free_ns
        done = self.progress.player.play(kind, self.submesh.carried(begin), self.progress.at(begin))
        if kind.name == "begin":
            held = [(0, size, what, Moment.START) for size, what in self.progress.player.residents if size]
            done = replace(done, changes=held)
        self.submesh.take(done, begin, "")
        self.progress.take(done, begin)
        return done


def _net(changes: Iterable[Change]) -> int:
    return sum(size for _, size, _, _ in changes)


def _peak(changes: list[Change]) -> int:
    """The most bytes above those at the begin of the pass."""
    if not changes:
        return 0
    rows = np.array([(time, moment, size) for time, size, _, moment in changes], dtype=np.int64)
    order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))
    return max(0, int(np.cumsum(rows[order, 2]).max()))


Held = list[tuple[Pass, int]]
"""Passes in order, with the number of microbatches that hold activations while each runs."""


def _held(passes: list[Pass], count: int) -> Held:
    flying = [0, *range(1, count + 1), *range(count, -1, -1)]
    return list(zip(passes, flying, strict=False))


def _between(passes: Held, kept: int, but: str | None, arrived: bool = False) -> tuple[int, int]:
    """What is there before the first pass, and the most between passes, beside the activations of microbatches in
    flight, and but one kind. arrived: were all gradients at home that are on their way."""
    level, levels = 0, list[int]()
    for done, held in passes:
        level += _net(change for change in done.allocations if change[2] != but)
        left = held - (done.kind.name == "backward")
        travelling = sum(one.freed_bytes for one in done.standing.journeys) if arrived else 0
        levels.append(level - travelling - left * kept)
    return levels[0], max(levels[1:], default=0)


def _buckets_on_their_way(passes: Held) -> float:
    """What gradients on their way may take at most, in times what a layer's do: small ones share buckets with those of
    other layers, of which few are on their way beside the one that is filled."""
    whole = max(sum(one.whole_bytes for one in done.standing.journeys) for done, _ in passes)
    return max(1.0, (MAX_IN_FLIGHT + 1) * BUCKET_BYTES / whole) if whole else 1.0


def _workspace(passes: Held, resident: int, kept: int) -> int:
    """How far a pass goes above what stays and what the microbatches in flight hold, itself included."""
    level = most = 0
    for done, held in passes:
        most = max(most, level + _peak(done.allocations) - resident - held * kept)
        level += _net(done.allocations)
    return most


def _amid_layers_ns(done: Pass, profile: Profile) -> int:
    """How long a pass takes in the midst of like layers, of which each has the next one's parameters gathered.

    It waits for its own no more. But where what it must wait for travels in the same queue of links, the first such
    collective is behind the next layer's parameters and the last one's gradients; in another queue of that level it
    shares the link with them. What both hide slows down what is computed.
    """
    tasks, length = done.tasks, done.length_ns
    waited = sum(
        time for _, played, _ in done.pieces for kind, time in played.waited.items() if kind.startswith(_PARAMETER)
    )
    beside, first_stop, stops = dict[str, int](), dict[str, int](), dict[str, int]()
    for link, _, start, end, kind in tasks:
        if kind.startswith((_PARAMETER, _GRADIENT)):
            beside[link] = beside.get(link, 0) + end - start
        elif link != COMPUTE:
            first_stop[link] = min(first_stop.get(link, start), start)
            stops[link] = stops.get(link, 0) + end - start
    behind = [time - max(0, first_stop[link] - waited) for link, time in beside.items() if link in first_stop]
    sharing = [
        min(stopped, sum([time for other, time in beside.items() if other != link and _are_of_one_level(other, link)]))
        for link, stopped in stops.items()
    ]
    exposed = max([0, *behind, *sharing])
    left = max([end for link, end in done.links.items() if link in beside], default=0)
    slowdown = max([profile.slowdowns.get(level_of(link), 1.0) for link in beside], default=1.0)
    slowed = max(0, waited + max(0, left - length) - exposed) * (1 - 1 / slowdown)
    return max(length - waited + exposed + int(slowed), _link_ns([done]))


def _are_of_one_level(first: str, second: str) -> bool:
    return level_of(first) == level_of(second)


def _computed_ns(done: Pass) -> int:
    return sum([end - start for stream, _, start, end, _ in done.tasks if stream == COMPUTE])


def _link_ns(passes: list[Pass]) -> int:
    """How long the busiest level of links works in passes, whose queues share it."""
    busy: dict[str, int] = defaultdict(int)
    for done in passes:
        for level, spent in busy_ns(done.tasks).items():
            busy[level] += spent
    busy.pop(COMPUTE, None)
    return max(busy.values(), default=0)


# Blocks ----------------------------------------


def block_times_ns(graph: Graph, plan: Plan, profile: Profile, block_paths: Sequence[str]) -> list[int]:
    """Nanoseconds of a microbatch in each block, forward and backward, with the collectives inside.

    graph, plan: of one microbatch and one stage, on devices of the profile, slowed down where they share cores.
    block_paths: module paths of the blocks, in any order; the result has the order in which they run. What runs before
    the first block counts to that, anything else outside of blocks to the one before.
    """
    (part,) = stage_in_one(graph, plan, profile).parts
    program = part.program
    trains = plan.mode == "train" and graph.loss is not None
    times: dict[str, int] = {}
    before, current = 0, ""
    for item in program.items[NUM_BEFORE : part.end]:
        current = _block(program.units[item.unit], block_paths) or current
        spent = _spent_ns(item, trains)
        if current:
            times[current] = times.get(current, 0) + spent
        else:
            before += spent
    found = [*times.values()]
    return [found[0] + before, *found[1:]] if found else []


def _block(unit: str, block_paths: Sequence[str]) -> str:
    return next((path for path in block_paths if f"{unit}.".startswith(f"{path}.")), "")


def _spent_ns(item: Item, trains: bool) -> int:
    """Forward, once more where it is recomputed, and backward."""
    forward = item.forward_ns + sum(sent.duration_ns for sent in (*item.forward, *item.inner))
    if not trains:
        return forward
    again = forward if item.region >= 0 else 0
    backward = item.backward_ns + sum(sent.duration_ns for sent in (*item.backward, *item.inner_backward))
    return forward + again + (backward if item.runs_backward else 0)
