"""A lower bound of a plan's step time, from prices of what it changes alone: no stream's work can be overlapped with
itself.

work of the compute stream = microbatches · Σ (operators and conversions, forward and backward) + the optimizer
work of a link level       = microbatches · Σ (collectives inside operators and of conversions) + Σ those of parameters

What buckets of parameters send is bounded by their bytes at the rate of an endless message, which no message beats
where a collective's time is concave in its bytes (`cost.collectives`, the algorithms' formulas); where it was measured,
it is left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from autopar.cost.collectives import INSIDE, collective_time_ns
from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan, Storage
from autopar.ir.redistribution import Step
from autopar.runtime.packing import LONE_BYTES
from autopar.simulate.differences import Differences
from autopar.simulate.parts import PartLowering
from autopar.simulate.program import Transmission
from autopar.simulate.traffic import reached_tensors

KEPT_TENSORS = 1 << 16
ENDLESS = 1 << 50  # bytes: more than any bucket has


class Work(NamedTuple):
    """Nanoseconds of a step on the compute stream, on links inside nodes, and between them."""

    compute_ns: int = 0
    inside_ns: int = 0
    across_ns: int = 0


class Bound:
    """The work of one plan after another, by what has changed."""

    def __init__(self, graph: Graph, plan: Plan, lowering: PartLowering, differences: Differences) -> None:
        self._graph, self._lowering, self._differences = graph, lowering, differences
        self._count, self._profile, self._facts = plan.microbatches, lowering.profile, lowering.facts
        reached = reached_tensors(graph) if lowering.trains else set[str]()
        self._goes_back = {
            node.name: not reached.isdisjoint(node.results)
            and any(graph.tensors[name].differentiable for name in node.operands)
            for node in graph.nodes
        }  # fmt: skip
        self._of_node: list[Work] = [Work()] * len(graph.nodes)
        self._of_tensor: dict[str, Work] = {}
        self._total = [0, 0, 0]
        numbers: dict[Hashable, int] = {}
        self._kinds = {name: numbers.setdefault(self._kind(name), len(numbers)) for name in graph.tensors}
        self._known: dict[tuple[int, Storage | None, tuple[int, ...]], Work] = {}
        self._rates: dict[tuple[str, int], float] = {}

    @property
    def is_full(self) -> bool:
        """Whether it keeps too much."""
        return len(self._known) > KEPT_TENSORS

    def least_ns(self, plan: Plan, optimizer_ns: int) -> int:
        """At most the step time of a plan, and at least each stream's work."""
        nodes, tensors = self._differences.changes(plan)
        self._lowering.plan, self._lowering.steps = plan, self._differences.steps
        for number in nodes:
            new = self._node(self._graph.nodes[number], plan)
            self._replace(self._of_node[number], new)
            self._of_node[number] = new
        for name in tensors:
            new = self._tensor(name, plan)
            self._replace(self._of_tensor.get(name, NONE), new)
            self._of_tensor[name] = new
        compute, inside, across = self._total
        return max(compute + optimizer_ns, inside, across)

    def _tensor(self, name: str, plan: Plan) -> Work:
        """What its conversions come to: equal of equal tensors that are read alike."""
        storage = plan.storage.get(name)
        key = self._kinds[name], storage, self._differences.seen(name)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._conversions(name, plan) if storage is None else self._stored(name, plan)
        return known

    def _kind(self, name: str) -> Hashable:
        """All that a tensor's conversions depend on beside the plan."""
        graph, tensor, stored = self._graph, self._graph.tensors[name], self._graph.stored_by_tensor.get(name)
        readers = tuple([(self._goes_back[node.name], at) for node, at in graph.consumers[name]])
        trained = stored is not None and stored.requires_grad
        is_folded = name in self._facts.folded
        return tensor.shape, graph.itemsizes(name), tensor.differentiable, trained, is_folded, readers

    def _replace(self, old: Work, new: Work) -> None:
        if old is not new:
            self._total = [total - gone + come for total, gone, come in zip(self._total, old, new, strict=True)]

    def _node(self, node: Node, plan: Plan) -> Work:
        if node.results and self._facts.folded.issuperset(node.results):
            return NONE
        price = self._lowering.price(node, plan.nodes[node.name])
        compute, sent = price.forward_ns, [*price.inner]
        if self._goes_back[node.name]:
            compute += price.backward_ns
            sent += price.inner_backward
        return self._work(compute, sent, self._count)

    def _work(self, compute_ns: int, sent: Sequence[Transmission], times: int) -> Work:
        inside = sum([one.duration_ns for one in sent if one.level == INSIDE])
        across = sum([one.duration_ns for one in sent]) - inside
        return Work(times * compute_ns, times * inside, times * across)

    def _targets(self, name: str, plan: Plan) -> dict[Placement, bool]:
        """The placements that a tensor is read in, and whether a gradient comes back from there."""
        found: dict[Placement, bool] = {}
        is_differentiable = self._graph.tensors[name].differentiable
        for node, at in self._graph.consumers[name]:
            target = plan.nodes[node.name].operands[at]
            found[target] = found.get(target, False) or (is_differentiable and self._goes_back[node.name])
        return found

    def _conversions(self, name: str, plan: Plan) -> Work:
        lowering, base = self._lowering, self._differences.bases[name]
        if name in self._facts.folded:
            return NONE
        lowering.placements[name] = base
        compute, sent = 0, list[Transmission]()
        for target, goes_back in self._targets(name, plan).items():
            if target != base:
                for direction in (0, 1) if goes_back else (0,):
                    own, collectives = lowering.conversion_work(name, self._steps(name, target), direction)
                    compute += own
                    sent += collectives
        return self._work(compute, sent, self._count) if compute or sent else NONE

    def _steps(self, name: str, target: Placement) -> tuple[Step, ...]:
        return self._lowering.route(name, target)

    def _stored(self, name: str, plan: Plan) -> Work:
        """Collectives of a stored tensor: to each placement that it is used in, and of its gradient on the way home."""
        storage, stored, lowering = plan.storage[name], self._graph.stored_by_tensor[name], self._lowering
        lowering.placements[name] = storage.placement
        total = [0.0, 0.0]
        for target, goes_back in self._targets(name, plan).items():
            steps = () if target == storage.placement else self._steps(name, target)
            if not steps:
                continue
            sizes = lowering.bytes_of_steps(name, steps)
            each = storage.regather or storage.reduce_each_microbatch
            times = (
                self._count if storage.regather else 1,
                (self._count if each else 1) if goes_back and stored.requires_grad and lowering.trains else 0,
            )
            used = self._lowering.shapes.local(name, target)[1]
            is_alone = used >= LONE_BYTES, False
            for direction in (0, 1):
                for sent in lowering.transmissions_of(steps, sizes, direction) if times[direction] else ():
                    spent = sent.duration_ns if is_alone[direction] else sent.num_bytes * self._rate(sent, plan)
                    total[sent.level != INSIDE] += times[direction] * spent
        return Work(0, int(total[0]), int(total[1]))

    def _rate(self, sent: Transmission, plan: Plan) -> float:
        """Nanoseconds that no byte of a bucket can do with less of, rounded down."""
        key = sent.collective, sent.axis
        if key not in self._rates:
            is_measured = any(kind == sent.collective for kind, _, _ in self._profile.collectives)
            is_concave = sent.collective in ("all_reduce", "all_gather", "reduce_scatter")
            endless = collective_time_ns(
                sent.collective, ENDLESS, plan.axes[sent.axis], self._lowering.per_node, self._profile
            )  # fmt: skip
            self._rates[key] = 0.0 if is_measured or not is_concave else endless / ENDLESS * (1 - 1e-9)
        return self._rates[key]


NONE = Work()
