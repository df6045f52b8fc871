"""The builder's costs from a profile: compute, redistribution, parameter synchronisation and memory of a choice."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.cost import Profile, collective_time_ns, node_time_ns
from autopar.cost.collectives import Route, sum_ns
from autopar.cost.compute import gathered_ns, pointwise_time_ns
from autopar.cost.inside import inner_time_ns
from autopar.cost.memory import kept_values, optimizer_moved_bytes, optimizer_state_bytes, storage_root
from autopar.cost.routes import UNREACHABLE, Routes, routes
from autopar.cost.servers import SERVED
from autopar.intraop.recomputed import RecomputedShares
from autopar.intraop.strategies import Strategies, Strategy
from autopar.ir.graph import Graph, Node, Tensor
from autopar.ir.mesh import MICROBATCH, LogicalMesh, unnamed_text
from autopar.ir.placement import Axis, I, Placement, R, local_shape
from autopar.ir.plan import Storage
from autopar.ir.redistribution import Step, by_levels, over_servers
from autopar.ir.structure import folded_tensors
from autopar.ops import call_key
from autopar.ops.communication import gathered_rows, inner_communication, worked_shapes
from autopar.ops.saved import Extra, Saved
from autopar.runtime.packing import LONE_BYTES
from autopar.selection.problem import NO_PATH_NS

Times = npt.NDArray[np.int64]


class Sends(NamedTuple):
    """What is sent to another stage if stages begin anywhere: by tensor, how often a microbatch on average.

    axis: as long as the two submeshes, with the distance of their equal ranks.
    """

    axis: Axis
    times: Mapping[str, float]


class ProfiledCosts:
    """Implements `builder.Costs` for one logical mesh."""

    def __init__(
        self,
        graph: Graph,
        axes: LogicalMesh,
        devices_per_node: int,
        profile: Profile,
        mode: str,
        optimizer: str | None,
        microbatches: int = 1,
        again: RecomputedShares | None = None,
        sends: Sends | None = None,
        copied: RecomputedShares | None = None,
        in_bits: frozenset[str] = frozenset(),
        in_eight_bits: frozenset[str] = frozenset(),
    ) -> None:
        self.in_bits, self.in_eight_bits = in_bits, in_eight_bits
        self.sends, self.copied = sends, copied or RecomputedShares((), ())
        self.graph, self.axes, self.profile = graph, axes, profile
        self.again = again or RecomputedShares((), ())
        self.microbatches = microbatches  # of which the graph is one; times are of the whole step
        self.devices_per_node, self.train = devices_per_node, mode == "train"
        self.optimizer = optimizer
        self._converted: dict[Hashable, Times] = {}
        self._local = lru_cache(maxsize=None)(lambda shape, placement: local_shape(shape, placement, axes))

    def of(self, graph: Graph) -> ProfiledCosts:
        """The same for another graph."""
        other = copy.copy(self)
        other.__dict__.pop("_saved", None)
        other.__dict__.pop("_folded", None)
        other.__dict__.pop("_passes", None)
        other._converted, other.graph = {}, graph
        return other

    def _shapes(self, names: tuple[str, ...], placements: tuple[Placement, ...]) -> tuple[tuple[int, ...], ...]:
        tensors = self.graph.tensors
        return tuple(self._local(tensors[n].shape, p) for n, p in zip(names, placements, strict=True))

    @cached_property
    def _folded(self) -> set[str]:
        return folded_tensors(self.graph)

    def compute_ns(self, node: Node, strategies: Strategies) -> list[int]:
        if node.results and self._folded.issuperset(node.results):
            return [0] * len(strategies)
        share, sends = self._share(node), self.sends is not None and any(n in self.sends.times for n in node.results)
        sent = [self._sent_ns(node, strategy) for strategy in strategies] if sends else [0] * len(strategies)
        return [
            (once + round(share * forward) + along) * self.microbatches
            for (once, forward), along in zip(self._passes_ns(node, strategies), sent, strict=True)
        ]

    def _passes_ns(self, node: Node, strategies: Strategies) -> list[tuple[int, int]]:
        """What all passes of a microbatch take, and its forward pass; found once for calls that are alike, in whatever
        plans of the graph, and whatever constraints leave of their strategies."""
        known = self._passes.setdefault(call_key(self.graph, node), {})
        for strategy in strategies:
            if id(strategy) not in known:
                known[id(strategy)] = strategy, self._pass_ns(node, strategy)
        return [known[id(strategy)][1] for strategy in strategies]

    @cached_property
    def _passes(self) -> dict[Hashable, dict[int, tuple[Strategy, tuple[int, int]]]]:
        """By call and by the identity of a strategy, which is kept with it: a strategy's hash takes as long as all
        else."""
        known: dict[Hashable, Any] = self.graph.found.setdefault(("passes", unnamed_text(self.axes)), {})
        found: dict[Hashable, dict[int, tuple[Strategy, tuple[int, int]]]]
        found = known.setdefault((self.profile, self.devices_per_node, self.train), {})
        return found

    def _pass_ns(self, node: Node, strategy: Strategy) -> tuple[int, int]:
        operands = self._shapes(node.operands, strategy.operands)
        results = self._shapes(node.results, strategy.results)
        operands = worked_shapes(node, operands, strategy.operands, self.axes)
        forward, backward = node_time_ns(node, operands, results, self.graph.tensors, self.profile)
        if self.train and (times := gathered_rows(node, strategy.operands, self.axes)) > 1:
            longer = gathered_ns(node, operands, results, self.graph.tensors, times, self.profile)
            forward, backward = forward + longer[0], backward + longer[1]
        inner, inner_back = self._inner_ns(node, strategy, (forward, backward))
        return forward + (backward if self.train else 0) + inner + inner_back, forward + inner

    def _sent_ns(self, node: Node, strategy: Strategy) -> int:
        """What sending the results to another stage takes, and their gradients back; summands are sent summed."""
        assert self.sends is not None
        total = 0.0
        for name, shape in zip(node.results, self._shapes(node.results, strategy.results), strict=True):
            if name in self.sends.times:
                tensor = self.graph.tensors[name]
                size = math.prod(shape) * tensor.itemsize
                one = collective_time_ns("send", size, self.sends.axis, self.devices_per_node, self.profile)
                total += one * self.sends.times[name] * (1 + (tensor.differentiable and self.train))
        return int(total)

    def _share(self, node: Node) -> float:
        """The part of a node's instances that runs again for the backward pass."""
        return self.again.of_operator(node) if self.train else 0.0

    def _inner_ns(self, node: Node, strategy: Strategy, computes_ns: tuple[int, int]) -> tuple[int, int]:
        """What the operator communicates inside, forward and backward, beyond what it computes beside that."""
        sent = inner_communication(self.graph, node, strategy.operands, self.axes, self.train)
        forward, backward = (
            sum(inner_time_ns(inner, compute_ns, self.axes, self.devices_per_node, self.profile) for inner in direction)
            for direction, compute_ns in zip(sent, computes_ns, strict=True)
        )
        return forward, backward

    def saved_bytes(self, node: Node, strategies: Strategies) -> list[int]:
        """What autograd keeps of operands and results; each storage counts at the first node that saves it."""
        total = [0] * len(strategies)
        for saved, share in self._saved.get(node.name, ()) if self.train else ():
            name = saved.like if isinstance(saved, Extra) else saved
            shape, itemsize = self.graph.tensors[name].shape, self.graph.tensors[name].itemsize
            for number, placement in enumerate(_placements_of(name, node, strategies)):
                local = self._local(shape, placement)
                size = saved.num_bytes(local) if isinstance(saved, Extra) else math.prod(local) * itemsize
                total[number] += round(share * size)
        return total

    @cached_property
    def _saved(self) -> dict[str, tuple[tuple[Saved, float], ...]]:
        """By node: the values that it is the first to save, but for inputs and parameters, and in which part of the
        node's instances they are kept. Of what is recomputed, that is what enters."""
        known = {*self.graph.inputs, *(item.tensor for item in self.graph.stored)}
        found = {}
        for node in self.graph.nodes:
            again, kept = self._share(node), dict[Saved, float]()
            fewer = node.name in self.in_bits, node.name in self.in_eight_bits
            saved = kept_values(node, self.graph, fewer[0], self.profile.device_type, fewer[1])
            shares = ((v, self._kept_share(node, v)) for v in saved)
            for value, share in (*(pair for pair in shares if pair[1]), *((v, again) for v in self._entering(node))):
                root = None if isinstance(value, Extra) else storage_root(value, self.graph)
                if root not in known or value in kept:
                    kept[value] = min(1.0, kept.get(value, 0.0) + share)  # saved and entering, it is there once
                if root is not None:
                    known.add(root)
            found[node.name] = tuple(kept.items())
        return found

    def _kept_share(self, node: Node, saved: Saved) -> float:
        """In which part of a node's instances it keeps something: not where its module runs again, or is copied out,
        nor what is made again by itself."""
        here = 1 - self.copied.of(node.scope.module)
        if isinstance(saved, Extra):
            return 1 if saved.is_number else here * (1 - self._share(node))
        maker = self.graph.producers.get(storage_root(saved, self.graph))
        kept = here * (1 - self.again.of(node.scope.module)) if self.train else 1.0
        return kept if maker is None else kept * (1 - self.again.by_itself(maker))

    def _entering(self, node: Node) -> list[str]:
        """What the operator reads from outside of the recomputed module that it is in, or of operators beside it."""
        makers = [(name, self.graph.producers[name]) for name in node.operands if name in self.graph.producers]
        if self.again.by_itself(node):
            return [name for name, maker in makers if not self.again.by_itself(maker)]
        return [name for name, maker in makers if self.again.is_entered(node.scope.module, maker.scope.module)]

    def convert_ns(self, tensor: Tensor, sources: list[Placement], targets: list[Placement]) -> Times:
        again = min((self._share(reader) for reader, _ in self.graph.consumers[tensor.name]), default=0.0)
        like = tensor.shape, tensor.differentiable, self.graph.itemsizes(tensor.name), tensor.name in self._folded
        key = (*like, again, tuple(sources), tuple(targets))
        if key not in self._converted:
            self._converted[key] = self._convert_ns(tensor, sources, targets, again)
        return self._converted[key]

    def _convert_ns(self, tensor: Tensor, sources: list[Placement], targets: list[Placement], again: float) -> Times:
        """again: the part of the tensor's uses that run again for the backward pass."""
        forward, backward = self._routes(tensor).times(sources, targets)
        total = (forward + backward + np.rint(again * forward).astype(np.int64)) * self.microbatches
        number = {placement: position for position, placement in enumerate((*sources, *targets))}
        left, right = (np.array([number[placement] for placement in some]) for some in (sources, targets))
        unequal = left[:, None] != right
        if tensor.name in self._folded:
            total = np.zeros_like(total)
        return np.where(forward >= UNREACHABLE, NO_PATH_NS, total + unequal)  # of equal plans, fewer conversions

    def storage_ns(self, tensor: Tensor, storages: list[Storage], targets: list[Placement]) -> Times:
        """Gathers before use (again before backward when regathered), gradient synchronisation after, adding up the
        gradients of the microbatches, and casting master weights and gradients."""
        sources = [storage.placement for storage in storages]
        forward, backward = self._routes(tensor).times(sources, targets)
        if self._may_be_served(tensor):
            saved = [[self._saved_by_servers(tensor, source, target) for target in targets] for source in sources]
            backward = backward - np.minimum(np.array(saved), backward)
        gathers = np.array([self._num_gathers(storage) for storage in storages])[:, None]
        reductions = np.array([self._num_reductions(storage) for storage in storages])[:, None]
        total = forward * gathers + backward * reductions + self._added_up_ns(tensor, storages, targets)
        total += self._cast_ns(tensor, storages, targets)
        if any(storage.on_host for storage in storages):
            total += np.array([self._offloading_ns(tensor, storage) for storage in storages])[:, None]
        return np.where(forward >= UNREACHABLE, NO_PATH_NS, total)

    def _offloading_ns(self, tensor: Tensor, storage: Storage) -> int:
        """What is copied of a parameter on the host, and of its gradient, and what its update takes longer there."""
        host = self.profile.beside
        if not storage.on_host:
            return 0
        if host is None:
            return int(NO_PATH_NS)
        dtype, local = self.graph.kept(tensor.name).dtype, self._local(tensor.shape, storage.placement)
        size = math.prod(local) * self.graph.kept(tensor.name).itemsize
        copied = self._num_gathers(storage) * host.up_ns(size) + self._num_reductions(storage) * host.down_ns(size)
        moved = optimizer_moved_bytes(self.optimizer, local, dtype, tensor.shape)
        update = round(moved * 1e9 / host.update_bandwidth) if host.update_bandwidth else 0
        return copied + update

    def _cast_ns(self, tensor: Tensor, storages: list[Storage], targets: list[Placement]) -> Times:
        """What is stored, whenever it is converted; each microbatch's gradient of what is used."""
        cast = np.zeros((len(storages), len(targets)), dtype=np.int64)
        if tensor.name not in self.graph.kept_dtypes or self.graph.stored_by_tensor[tensor.name].kind != "parameter":
            return cast
        each = sum(self.graph.itemsizes(tensor.name))

        def once(placement: Placement) -> int:
            return pointwise_time_ns(each * math.prod(self._local(tensor.shape, placement)), self.profile)

        if tensor.differentiable and self.train:
            cast[:] = [self.microbatches * once(target) for target in targets]
        cast += np.array([[self._num_gathers(storage) * once(storage.placement)] for storage in storages])
        return cast

    def _added_up_ns(self, tensor: Tensor, storages: list[Storage], targets: list[Placement]) -> Times:
        """Adding each microbatch's gradient to those before it: as used, or as stored if it is reduced first."""
        added = np.zeros((len(storages), len(targets)), dtype=np.int64)
        if self.microbatches == 1 or not (tensor.differentiable and self.train):
            return added

        def once(placement: Placement) -> int:
            size = math.prod(self._local(tensor.shape, placement)) * self.graph.kept(tensor.name).itemsize
            return pointwise_time_ns(3 * size, self.profile) * (self.microbatches - 1)

        added[:] = [once(target) for target in targets]
        for row, storage in enumerate(storages):
            if storage.regather or storage.reduce_each_microbatch:
                added[row] = once(storage.placement)
        return added

    def _num_gathers(self, storage: Storage) -> int:
        """A step; a regathered parameter is gathered for the forward and the backward pass of each microbatch."""
        return (2 if self.train else 1) * self.microbatches if storage.regather else 1

    def _num_reductions(self, storage: Storage) -> int:
        return self.microbatches if storage.regather or storage.reduce_each_microbatch else 1

    def steps(self, tensor: Tensor, source: Placement, target: Placement) -> tuple[Step, ...] | None:
        """The redistribution whose time the costs count; None when there is none. The gradient of a parameter is summed
        over several axes by levels where that takes less."""
        route = self._routes(tensor).route(source, target)
        if route is None:
            return None
        if levels := self._by_levels(tensor, source, target, route):
            return levels
        return over_servers(route.steps, self.axes) if self._saved_by_servers(tensor, source, target) else route.steps

    def _saved_by_servers(self, tensor: Tensor, source: Placement, target: Placement) -> int:
        """Nanoseconds that a parameter's gradient takes less where it is summed over the mesh's servers when it begins
        its way home; 0 where it is not, or that takes more."""
        route = self._routes(tensor).route(source, target) if self._may_be_served(tensor) else None
        served = over_servers(route.steps, self.axes) if route is not None else None
        if served is None:
            return 0
        axis = self.axes[next(step.axis for step in served if step.is_served)]
        own_bytes = math.prod(self._local(tensor.shape, target)) * self.graph.itemsizes(tensor.name)[1]
        num_bytes = max(own_bytes, LONE_BYTES)  # small ones travel together
        by_servers, plain = (
            collective_time_ns(kind, num_bytes, axis, self.devices_per_node, self.profile)
            for kind in (SERVED, "all_reduce")
        )
        return math.ceil(max(0, plain - by_servers) * own_bytes / num_bytes)

    def _may_be_served(self, tensor: Tensor) -> bool:
        """Whether it is a parameter that is trained by all devices of a mesh with servers, each as much."""
        hosts, stored = self.profile.servers, self.graph.stored_by_tensor.get(tensor.name)
        if hosts is None or stored is None or stored.kind != "parameter" or not (tensor.differentiable and self.train):
            return False
        sizes = [axis.size for axis in self.axes if axis.name != MICROBATCH]
        return math.prod(sizes) == hosts.devices and not any(axis.shares for axis in self.axes)

    def _by_levels(self, tensor: Tensor, source: Placement, target: Placement, route: Route) -> tuple[Step, ...] | None:
        """The steps of a parameter whose gradient is summed by levels at the begin of its way home, where that is
        cheaper than the route; None else."""
        stored = self.graph.stored_by_tensor.get(tensor.name)
        if len(self.axes) < 2 or stored is None or stored.kind != "parameter":
            return None
        summed = [place for place, pair in enumerate(zip(source, target, strict=True)) if pair == (I, R)]
        if len(summed) < 2:
            return None
        if not (tensor.differentiable and self.train) or any(axis.shares for axis in self.axes):
            return None
        before = tuple(I if place in summed else type_ for place, type_ in enumerate(target))
        first = self._routes(tensor).route(source, before)
        plain = (*(first.steps if first else ()), *(Step(place, I, R) for place in summed))
        levels = by_levels(plain, self.axes) if first else None
        if first is None or levels is None:
            return None
        num_bytes = math.prod(self._local(tensor.shape, before)) * self.graph.itemsizes(tensor.name)[1]
        times = partial(sum_ns, axes=self.axes, devices_per_node=self.devices_per_node, profile=self.profile)
        if num_bytes < LONE_BYTES:  # it travels with others, as long as the least that travels alone
            is_faster = times(levels, LONE_BYTES) < times(plain, LONE_BYTES)
        else:
            own_ns = first.forward_ns + first.backward_ns + times(levels, num_bytes)
            is_faster = own_ns < route.forward_ns + route.backward_ns
        return levels if is_faster else None

    def _routes(self, tensor: Tensor) -> Routes:
        differentiable = tensor.differentiable and self.train
        return routes(
            tensor.shape,
            self.graph.itemsizes(tensor.name),
            self.axes,
            self.devices_per_node,
            self.profile,
            differentiable,
        )

    def state_bytes(self, tensor: Tensor, storages: list[Storage], uses: list[Placement]) -> Times:
        """Parameter, gradient and optimizer state as stored; with the copy in a use, where that is another one.

        A gathered copy that is kept counts, and its gradient where that waits for further microbatches. Regathered
        ones come and go; the simulator counts them.
        """
        dtype, master = self.graph.kept(tensor.name).dtype, self.graph.kept(tensor.name).itemsize
        trains = tensor.differentiable and self.train
        used = np.array([math.prod(self._local(tensor.shape, use)) for use in uses])
        found = np.zeros((len(storages), len(uses)), dtype=np.int64)
        for row, storage in enumerate(storages):
            local = self._local(tensor.shape, storage.placement)
            kept = (2 if trains else 1) * master * math.prod(local)
            kept += optimizer_state_bytes(self.optimizer, local, dtype, tensor.shape) if trains else 0
            waits = trains and self.microbatches > 1 and not storage.reduce_each_microbatch
            copies = tensor.itemsize + (master if waits else 0)
            if storage.on_host:
                kept = 0
            is_copy = [
                not storage.regather and (storage.on_host or master != tensor.itemsize or _is_cut(storage, use))
                for use in uses
            ]
            found[row] = kept + used * is_copy * copies
        return found


def _is_cut(storage: Storage, use: Placement) -> bool:
    """Whether what is stored is less than what is used."""
    return any(t.kind == "S" and t != u for t, u in zip(storage.placement, use, strict=True))


def _placements_of(name: str, node: Node, strategies: Strategies) -> list[Placement]:
    """Of an operand of a node (of equal ones the last), or else a result."""
    if name in node.operands:
        position = len(node.operands) - 1 - node.operands[::-1].index(name)
        return [strategy.operands[position] for strategy in strategies]
    position = node.results.index(name)
    return [strategy.results[position] for strategy in strategies]
