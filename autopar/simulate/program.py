"""What one rank does in a microbatch, as flat lists: values, operators, conversions, parameter slots.

`Lowering` reads graph and plan, with costs from the profile, segment by segment (`parts`), which are played.
A *value* is a tensor in one placement. A *slot* is a stored tensor in the placement that operators use it in,
converted once a step or around each use. *Storage* is memory: views and
free conversions share their base's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.cost import Profile, beside_compute_ns, collective_time_ns, waits_along
from autopar.cost.compute import (
    copy_time_ns,
    gathered_ns,
    in_bits_ns,
    node_issue_ns,
    node_time_ns,
    optimizer_time_ns,
    pointwise_time_ns,
    split_backward_ns,
    split_norm_backward_ns,
    split_norm_time_ns,
)
from autopar.cost.fusion import Fused, compiled_time_ns, fusions
from autopar.cost.memory import (
    kept_values,
    lowered_memory,
    optimizer_state_bytes,
    optimizer_workspace_bytes,
    packed_in_eight_bits,
    workspace_bytes,
)
from autopar.cost.profile import ACROSS, INSIDE, Waits, host_of
from autopar.cost.servers import SERVED, summing_bytes
from autopar.cost.updates import update_bytes
from autopar.errors import PlanError
from autopar.ir.branches import (
    Coordinates,
    Home,
    entering,
    homes,
    host_scopes,
    is_idle,
)
from autopar.ir.graph import IDENTITY, Graph, Node, Scope, common_scope
from autopar.ir.mesh import LogicalMesh, ranks_within_node
from autopar.ir.placement import Axis, Placement, Shape, evenly, format_placement, local_shape
from autopar.ir.plan import COMPILED, NodePlan, Plan, StagePlan, Storage
from autopar.ir.recompute import PieceStep, pieces_needed
from autopar.ir.redistribution import Step, apply, gradient_collectives, transfer_bytes
from autopar.ir.stages import answered_values, leaving_values
from autopar.ir.structure import is_cut
from autopar.ops.communication import gathered_rows, inner_communication, worked_shapes
from autopar.ops.eight_bits import eight_bits_moved, eight_bits_workspace
from autopar.ops.experts import ROUTED_EXPERTS, place_table_bytes
from autopar.ops.inner import Inner
from autopar.ops.saved import Extra, Saved
from autopar.ops.table import operator
from autopar.ops.workspace import Sizes
from autopar.runtime.packing import BUCKET_SIZES, LONE_BYTES, BucketSizes, pack_gathers
from autopar.simulate.facts import (
    Again,
    Call,
    Copies,
    GraphFacts,
    LocalShapes,
    call_of,
    number_calls,
    tensors_on_the_way,
)
from autopar.simulate.host_copies import AXIS, COPY, DOWN, UP, is_copy
from autopar.simulate.layouts import AS_IN_GRAPH, Layouts
from autopar.simulate.traffic import inner_collectives

OPTIMIZER_KERNELS = {
    "cpu": 8,
    "cuda": 1,
}  # a tensor's launches: one by one on CPUs, fused over tensors on GPUs

STEP_COUNT_BYTES = 4  # torch's optimizers with state count steps in a float32 scalar for each parameter

COUNT_BYTES = 4  # what a mean over all microbatches divides by: a float32 scalar (`Progress.count`)
RANK_BYTES = 4  # a DeviceMesh numbers its ranks in int32, in the host's memory


class Transmission(NamedTuple):
    """One collective: its name, the link level that it is on, its bytes and nanoseconds. waits: how long its ranks wait
    for each other besides where it stops them, if that is known. is_early: it was sent long before, and has arrived.
    beside_ns: its nanoseconds while its ranks compute. num_ranks: that take part. is_shared: whether other axes of the
    stage have links of that level, too. room_bytes: of pieces that a rank holds while it sums some for the others."""

    collective: str
    level: str
    axis: int
    num_bytes: int
    duration_ns: int
    waits: Waits | None = None
    is_early: bool = False
    beside_ns: int = 0
    num_ranks: int = 1
    is_shared: bool = False
    room_bytes: int = 0


@dataclass(slots=True)
class Value:
    """A tensor in one placement: its local form, the storage that holds it, what makes it."""

    tensor: str
    shape: tuple[int, ...]
    num_bytes: int
    storage: int
    item: int = -1
    slot: int = -1
    differentiable: bool = False
    wants_gradient: bool = False
    leads_back: bool = False  # its gradient is made in the first part of a backward pass in two (`tensors_on_the_way`)


@dataclass(slots=True)
class LocalMemory:
    """A piece of local memory. `owner` is the item that allocates it, −1 for none."""

    num_bytes: int
    owner: int


class Split(NamedTuple):
    """An operator's backward pass in two parts: to values that lead back, and to the others. Nanoseconds, and those of
    the host to launch them."""

    backward_ns: tuple[int, int]
    issue_ns: tuple[int, int]


@dataclass(slots=True)
class Item:
    """An operator or a conversion between placements, in forward order."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward_ns: int = 0
    backward_ns: int = 0
    issue_ns: tuple[int, int] = (0, 0)  # of the host, to launch it forward and backward
    forward: tuple[Transmission, ...] = ()
    backward: tuple[Transmission, ...] = ()
    inner: tuple[Transmission, ...] = ()  # what an operator sends inside its forward pass
    inner_backward: tuple[Transmission, ...] = ()
    passing: frozenset[int] = frozenset()  # inputs whose gradient is the result's own, in the same memory
    viewed: frozenset[int] = frozenset()  # inputs whose gradient is a view of what the operator makes
    workspace: tuple[int, int] = (0, 0)  # bytes taken for a while, forward and backward
    gradient_bytes: int = 0  # of the memory that its operand's gradient lies in; 0: as many as the gradient has
    saved: tuple[int, ...] = ()  # storages
    extra_bytes: int = 0  # saved, but no tensor of the graph
    extras: tuple[int, ...] = ()  # bytes of each of these, where something is copied to the host
    number_bytes: int = 0  # of plain numbers that are saved, which stay even where all else is computed again
    unit: int = 0
    region: int = -1  # what the backward pass runs again together, −1 for nothing
    copied_call: int = -1  # the call of a module that is copied out, −1 for none
    needs: tuple[int, ...] = ()  # the regions that run again before its backward pass, in their order
    runs_backward: bool = False
    split: Split | None = None  # where the schedule asks for it, of operators

    @property
    def is_send(self) -> bool:
        """Whether it leaves a tensor for other stages."""
        return self.name.startswith("send ")

    @property
    def needs_saved(self) -> bool:
        """Whether its backward pass reads what was saved."""
        return self.runs_backward and bool(self.saved or self.extra_bytes)


BESIDE_COMPUTE = frozenset({("I", "R"), ("S", "R"), ("I", "S")})
"""Conversions of a parameter whose transposed ones, of its gradient, the runtime starts and awaits later."""


@dataclass(slots=True)
class Slot:
    """A parameter, buffer or constant as operators use it."""

    tensor: str
    value: int
    storage: Storage
    steps: tuple[Step, ...]
    stored_bytes: int
    used_bytes: int
    gradient_bytes: int  # of the gradient on its way home
    unit: int
    is_alias: bool
    requires_grad: bool
    sizes: tuple[tuple[int, int], ...] = ()  # bytes of each step, forward and backward
    gather_bytes: int = 0  # of copies while it is gathered: what travels packed, or does not lie as it is used
    scatter_bytes: int = 0  # of copies while its gradient is scattered
    cast_bytes: tuple[int, int] = (0, 0)  # read and written to cast what is stored, and its gradient back
    is_cast: bool = False  # it is used in another dtype than it is stored in
    is_resized: bool = field(init=False)  # its gradient has another size at home than where it is made
    stops_for_home: bool = field(init=False)  # the rank stops until its gradient is home: no step runs beside compute
    reduces_each: bool = field(init=False)  # its gradient goes home in each microbatch
    converts: bool = field(init=False)  # operators use something else than what is stored
    by_levels: bool = field(init=False)  # its gradient is summed by levels

    def __post_init__(self) -> None:
        kinds = [(step.before.kind, step.after.kind) for step in self.steps]
        self.is_resized = any("S" in pair for pair in kinds)
        self.stops_for_home = not self.storage.on_host and BESIDE_COMPUTE.isdisjoint(kinds)
        self.reduces_each = self.storage.regather or self.storage.reduce_each_microbatch
        self.converts = self.is_cast or bool(self.steps)
        self.by_levels = any(step.parts > 1 for step in self.steps)

    def at(self, value: int, unit: int, tensor: str) -> Slot:
        """The slot in another program, where its tensor has a name that tells it apart from that program's own."""
        other = object.__new__(Slot)
        for name in _SLOT_FIELDS:  # a third of the time that `copy.copy` takes
            setattr(other, name, getattr(self, name))
        other.value, other.unit, other.tensor = value, unit, tensor
        return other


_SLOT_FIELDS = tuple(Slot.__slots__)


@dataclass(slots=True)
class Bucket:
    """Slots that are converted by the same collectives at the same time."""

    slots: list[int]
    transmissions: tuple[Transmission, ...]
    convert_ns: int = 0  # packing, joining and casting on the rank itself
    first_is_beside: bool = False  # what comes after the first transmission, a copy from the host, runs beside it


@dataclass(slots=True)
class LocalProgram:
    """Everything that is played of a segment."""

    values: list[Value] = field(default_factory=list)
    memory: list[LocalMemory] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    gathers: list[Bucket] = field(default_factory=list)
    receives: dict[str, int] = field(default_factory=dict)  # tensors of earlier stages -> value
    sends: dict[tuple[str, Placement], int] = field(default_factory=dict)  # tensors that later stages read -> value
    splits: bool = False  # the backward pass is made in two parts
    first_of: dict[int, int] = field(default_factory=dict)  # items of branches -> the branch's first: autograd sees one
    led: frozenset[int] = frozenset()  # items of the first part: a gradient that leads back comes from them
    own: frozenset[int] = frozenset()  # items of the second part: another gradient does
    own_in_order: tuple[int, ...] = ()  # the same
    by_itself: frozenset[int] = frozenset()  # regions of operators: what others save of them is made again, too
    calls_again: dict[int, str] = field(default_factory=dict)  # of the other regions, the module that is called
    end: int = 0  # one past the last item that is no other part's
    begins: bool = True  # no part is before it
    is_all: bool = True  # there is no other part

    def around(self) -> list[tuple[int, ...]]:
        """Of each unit, those whose modules are around its own, outermost first, and itself."""
        number = {path: index for index, path in enumerate(self.units)}
        found = []
        for path in self.units:
            parts = path.split(".") if path else []
            prefixes = (".".join(parts[:count]) for count in range(len(parts) + 1))
            found.append(tuple([number[prefix] for prefix in prefixes if prefix in number]))
        return found


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def devices_per_node(plan: Plan, index: int) -> int:
    """How many neighbours of a stage share a node, as far as its axes go."""
    mesh = plan.mesh.part(plan.stages[index].ranks) if len(plan.stages) > 1 else plan.mesh
    return mesh.devices_per_node


def sent_values(graph: Graph, plan: Plan, index: int) -> dict[tuple[str, Placement], bool]:
    """What a stage sends to later ones, in which placements, and whether the gradient comes back."""
    if len(plan.stages) == 1:
        return {}
    answered = {*answered_values(graph, plan, index)}
    return {value: value in answered for value in leaving_values(graph, plan, index)}


class OperatorPrice(NamedTuple):
    """What an operator costs with some placements."""

    forward_ns: int
    backward_ns: int
    issue_ns: tuple[int, int]
    inner: tuple[Transmission, ...]
    inner_backward: tuple[Transmission, ...]
    workspace: tuple[int, int]
    split: Split | None
    lowered_bytes: int | None  # what autograd keeps of the runtime's function that runs instead, if one does
    lowered_keeps: tuple[int, ...] = ()  # and which operands and results it keeps


class _SlotPrice(NamedTuple):
    """Bytes of a stored tensor on the way to one of its uses; fields as in `Slot`."""

    stored_bytes: int
    gradient_bytes: int
    is_alias: bool
    sizes: tuple[tuple[int, int], ...]
    gather_bytes: int
    scatter_bytes: int
    cast_bytes: tuple[int, int]
    is_cast: bool


class StoredPrice(NamedTuple):
    """Bytes of a stored tensor, its optimizer state, what its update moves, and takes for a while."""

    stored_bytes: int
    state_bytes: int
    moved_bytes: int
    workspace: tuple[int, int]


@dataclass(slots=True)
class PriceTable:
    """What is known of equal things on equal axes: nodes by their place in a repeated block, stored tensors by form."""

    operators: dict[Hashable, OperatorPrice] = field(default_factory=dict)
    slots: dict[Hashable, _SlotPrice] = field(default_factory=dict)
    stored: dict[Hashable, StoredPrice] = field(default_factory=dict)


class _BranchBorder:
    """What a branch reads of others and leaves to them, and by node the conversions of its own that come before it.

    first: the number of its first item.
    """

    def __init__(self, graph: Graph, plan: StagePlan, home: Home, first: int) -> None:
        self.first = first
        names = set(plan.forks[home.fork].branches[home.branch].nodes)
        nodes = [node for node in graph.nodes if node.name in names]
        made = {name: p for node in nodes for name, p in zip(node.results, plan.nodes[node.name].results, strict=True)}
        reads, inner = dict[tuple[str, Placement], None](), dict[tuple[str, Placement], str]()
        for node in nodes:
            for value in zip(node.operands, plan.nodes[node.name].operands, strict=True):
                if value[0] not in made:
                    reads[value] = None
                elif made[value[0]] != value[1]:
                    inner.setdefault(value, node.name)
        self.reads = [*reads]
        self.conversions: dict[str, list[str]] = {}
        for (tensor, wanted), name in inner.items():
            self.conversions.setdefault(name, []).append(f"{tensor} → {' '.join(map(str, wanted))}")
        leaves = dict[tuple[str, Placement], None]()
        last = {*graph.outputs, *graph.mutations.values(), *graph.sent}
        for name, placement in made.items():
            outside = [(reader, position) for reader, position in graph.consumers[name] if reader.name not in names]
            wanted_outside = [(name, plan.nodes[reader.name].operands[position]) for reader, position in outside]
            wanted_outside += [(name, placement)] if name in last else []
            leaves.update((value if value in inner else (name, placement), None) for value in wanted_outside)
        self.leaves = [*leaves]


class OtherLane(NamedTuple):
    """Ranks that take part in the same collectives, but have other devices or other shares of a batch. joined: the
    axes along which they do."""

    axes: LogicalMesh
    per_node: int
    profile: Profile
    joined: frozenset[int]


class Lowering:
    """Turns nodes with their placements into items, values and slots."""

    def __init__(
        self, graph: Graph, plan: StagePlan, profile: Profile, per_node: int, facts: GraphFacts, prices: PriceTable,
        batched: Mapping[str, int], may_split: bool = False, coordinates: Coordinates | None = None,
        others: Sequence[OtherLane] = (), casts: bool = True,
    ) -> None:  # fmt: skip
        """coordinates: of the rank, where ranks run branches. others: lanes that what is sent lasts as long on. casts:
        parameters are cast to the dtype that they are used in when they are converted, and their gradients back."""
        self.homes, self.entering, self.coordinates = homes(plan), entering(graph, plan), coordinates or {}
        self.branches: dict[Home, _BranchBorder] = {}
        self.graph, self.plan, self.profile, self.per_node = graph, plan, profile, per_node
        self.facts, self.prices, self.batched, self.others = facts, prices, batched, others
        self.casts = casts
        self.twins = facts.twins(plan.blocks)
        self.routed = [node for node in graph.nodes if node.op == ROUTED_EXPERTS]
        self.shapes = LocalShapes(graph, plan)
        self.program = LocalProgram()
        self.copies = Copies(graph, plan, profile.device_type, self.shapes)
        self.layouts = Layouts(graph)
        self.steps = {(r.tensor, r.target): r.steps for r in plan.redistributes}
        self.transmissions: dict[Hashable, Transmission] = {}
        self.step_bytes: dict[object, tuple[tuple[int, int], ...]] = {}
        self.known: dict[tuple[str, Placement], int] = {}
        self.placements: dict[str, Placement] = {}
        self.units: dict[str, int] = {}
        self.again = Again(graph, plan.recompute, facts.blocks)
        self.places: dict[str, int] = {}
        self.fused: dict[str, Fused] = {}
        self._fusions_known: dict[frozenset[str], dict[str, Fused]] = {}
        self.leading_back = tensors_on_the_way(graph) if may_split else frozenset()
        self.trains = plan.mode == "train" and (
            graph.loss is not None or graph.ends is not None
        )  # a stage may lead to it
        self.may_split = self.trains and may_split
        self.constants: dict[int, int] = {}  # storage -> bytes of what is computed once and kept
        self.batch = next(iter(batched.values()), 0)  # of the whole graph: a stage may read no input of the model
        self.copied = frozenset(plan.copied_out) if self.trains else frozenset[str]()
        self.copied_calls: list[tuple[int, Call | None]] = []  # items, in calls that are copied out
        self.calls: list[tuple[int, Call | None]] = []  # items that run each microbatch, where they are recomputed

    def _fuse(self) -> None:
        """What operators join where blocks are compiled: of what leaves the stage, nothing stays in registers."""
        if self.plan.plan.runs != COMPILED:
            return
        leaves = frozenset([*(tensor for tensor, _ in self.steps), *self.graph.outputs])
        if leaves not in self._fusions_known:
            saved = {name: facts.saved for name, facts in self.facts.nodes.items()}
            self._fusions_known[leaves] = fusions(self.graph, leaves, saved)
        self.fused = self._fusions_known[leaves]

    # Values ----------------------------------------

    def _memory(self, num_bytes: int, owner: int) -> int:
        self.program.memory.append(LocalMemory(num_bytes, owner))
        return len(self.program.memory) - 1

    def _value(
        self, tensor: str, placement: Placement, local: tuple[Shape, int], storage: int, item: int = -1, slot: int = -1
    ) -> int:
        """A tensor in a placement, which makes it `local`: a shape and its bytes."""
        differentiable, values = self.graph.tensors[tensor].differentiable, self.program.values
        number = self.known[tensor, placement] = len(values)
        leads_back = differentiable and tensor in self.leading_back
        values.append(Value(tensor, *local, storage, item, slot, differentiable, False, leads_back))
        return number

    def _operand(self, tensor: str, placement: Placement, unit: int) -> int:
        """The value that an operator reads: as it was made, or converted here, once for all its readers."""
        if tensor in self.plan.storage:
            return self._slot(tensor, placement)
        known = self.known.get((tensor, placement))
        if known is not None:
            return known
        return self._conversion(tensor, placement, unit)

    def _route(self, tensor: str, target: Placement) -> tuple[Step, ...]:
        if self.placements[tensor] == target:
            return ()
        if (tensor, target) not in self.steps:
            raise PlanError(
                f"expected a redistribution of {tensor!r} from {format_placement(self.placements[tensor])} "
                f"to {format_placement(target)}, found none; verify the plan"
            )
        return self.steps[tensor, target]

    def _slot(self, tensor: str, placement: Placement) -> int:
        program = self.program
        known = self.known.get((tensor, placement))
        if known is not None and program.values[known].slot >= 0:
            return known
        steps = self._route(tensor, placement)
        if self.plan.storage[tensor].on_host and COPY not in steps:
            steps = (COPY, *steps)
        storage = self._memory(0, -1)  # its bytes are counted slot by slot
        local = self.shapes.local(tensor, placement)
        value = self._value(tensor, placement, local, storage, slot=len(program.slots))
        stored, price = self.graph.stored_by_tensor[tensor], self._slot_price(tensor, steps, program.values[value])
        program.slots.append(
            Slot(
                tensor=tensor,
                value=value,
                storage=self.plan.storage[tensor],
                steps=steps,
                stored_bytes=price.stored_bytes,
                used_bytes=program.values[value].num_bytes,
                gradient_bytes=price.gradient_bytes,
                unit=self._unit(stored.name),
                is_alias=price.is_alias,
                requires_grad=stored.requires_grad and self.trains,
                sizes=price.sizes,
                gather_bytes=price.gather_bytes,
                scatter_bytes=price.scatter_bytes,
                cast_bytes=price.cast_bytes,
                is_cast=price.is_cast,
            )
        )
        return value

    def _slot_price(self, tensor: str, steps: tuple[Step, ...], value: Value) -> _SlotPrice:
        source, kept = self.placements[tensor], self.graph.kept(tensor)
        way, steps = steps, tuple([step for step in steps if not is_copy(step)])
        is_cast = tensor in self.graph.kept_dtypes and self.graph.stored_by_tensor[tensor].kind == "parameter"
        key = (value.shape, source, way, kept.shape, kept.dtype, self.graph.tensors[tensor].dtype, is_cast)
        known = self.prices.slots.get(key)
        if known is None:
            stored = math.prod(self._stored_shape(tensor))
            itemsize, master = self.graph.itemsizes(tensor)
            is_sent = is_cast and any(step.before.kind == "S" for step in steps)  # the shard's cast copy is
            is_alias = not any("S" in (s.before.kind, s.after.kind) or s.after.kind == "P" for s in way)
            staged = stored * kept.itemsize if way != steps and (steps or is_cast) else 0
            known = self.prices.slots[key] = _SlotPrice(
                stored_bytes=stored * kept.itemsize,
                gradient_bytes=math.prod(value.shape) * kept.itemsize,
                is_alias=is_alias and tensor not in self.graph.kept_dtypes,
                sizes=self._step_bytes(tensor, way),
                gather_bytes=(
                    self.copies.gather_bytes(tensor, source, steps) + (stored * itemsize if is_sent else 0) + staged
                ),
                scatter_bytes=self.copies.scatter_bytes(tensor, source, steps),
                cast_bytes=self._cast_bytes(stored, math.prod(value.shape), itemsize + master) if is_cast else (0, 0),
                is_cast=is_cast,
            )
        return known

    def _cast_bytes(self, stored: int, used: int, each: int) -> tuple[int, int]:
        """Of elements that are stored, and of gradients of those that are used. each: bytes read and written of one."""
        return (stored * each, used * each) if self.casts else (0, 0)

    def _step_bytes(
        self, tensor: str, steps: tuple[Step, ...], axes: LogicalMesh | None = None
    ) -> tuple[tuple[int, int], ...]:  # fmt: skip
        """axes: of another lane."""
        shape, itemsize = self.shapes.shapes[tensor], self.graph.itemsizes(tensor)
        key = (shape, itemsize, self.placements[tensor], steps, tensor in self.plan.storage, axes)
        if key not in self.step_bytes:
            placement, sizes = self.placements[tensor], []
            axes = self.plan.axes if axes is None else axes
            axes = evenly(axes) if tensor in self.plan.storage else axes
            for step in steps:
                if is_copy(step):
                    size = math.prod(local_shape(shape, placement, axes)) * self.graph.kept(tensor).itemsize
                    sizes.append((size, size))
                    continue
                sizes.append(transfer_bytes(shape, itemsize, placement, axes, step))
                placement = apply(step, placement)
            self.step_bytes[key] = tuple(sizes)
        return self.step_bytes[key]

    def _transmission(
        self, collective: str, axis: int, num_bytes: int, elsewhere: tuple[int, ...] = (), joint: Axis | None = None
    ) -> Transmission:
        """elsewhere: bytes on other lanes, where they are others; it lasts as long as on the slowest. joint: the axis
        and others as one, where all their ranks talk, which are of one kind."""
        key = (collective, axis, num_bytes, elsewhere, joint)
        if key not in self.transmissions:
            per_node = self.per_node
            mesh_axis = joint or self.plan.axes[axis]
            inside = ranks_within_node(mesh_axis, per_node) == mesh_axis.size and collective != SERVED
            duration = collective_time_ns(collective, num_bytes, mesh_axis, per_node, self.profile)
            level = INSIDE if inside else ACROSS
            inner = [ranks_within_node(each, per_node) == each.size for each in self.plan.axes if each.size > 1]
            slowed = self.profile.beside_compute(level)
            for lane, size in zip(self.others, elsewhere or (num_bytes,) * len(self.others), strict=True):
                if axis in lane.joined:
                    on_lane = collective_time_ns(collective, size, lane.axes[axis], lane.per_node, lane.profile)
                    duration, slowed = max(duration, on_lane), max(slowed, lane.profile.beside_compute(level))
            waits = waits_along(mesh_axis, per_node, self.profile)
            beside = round(duration * slowed)
            self.transmissions[key] = Transmission(
                collective, level, axis, num_bytes, duration, waits, beside_ns=beside, num_ranks=mesh_axis.size,
                is_shared=inner.count(inside) > 1,
                room_bytes=self._room_bytes(mesh_axis, num_bytes) if collective == SERVED else 0,
            )  # fmt: skip
        return self.transmissions[key]

    def _room_bytes(self, axis: Axis, num_bytes: int) -> int:
        assert self.profile.servers is not None, "sums go over the servers of a mesh that has some"
        return summing_bytes(num_bytes, axis.size, ranks_within_node(axis, self.per_node), self.profile.servers)

    def _transmissions(
        self, steps: Sequence[Step], sizes: Sequence[tuple[int, int]], direction: int,
        elsewhere: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> tuple[Transmission, ...]:  # fmt: skip
        """The collectives of a route, in the order of the direction. elsewhere: sizes on other lanes, where they are
        others."""
        if direction and any(step.parts > 1 for step in steps):
            return tuple([self._transmission(*sent) for sent in gradient_collectives(steps, sizes, self.plan.axes)])
        rows = list(zip(steps, sizes, *elsewhere, strict=True))
        return tuple(
            self._host_copy(size[direction], direction)
            if is_copy(step)
            else self._transmission(
                step.transfers[direction].collective or "", step.axis, size[direction],
                tuple([other[direction] for other in more]),
            )
            for step, size, *more in (rows if direction == 0 else reversed(rows))
            if is_copy(step) or (step.transfers[direction].collective and self.plan.axes[step.axis].size > 1)
        )  # fmt: skip

    def _host_copy(self, num_bytes: int, direction: int) -> Transmission:
        """Of what is stored to the device (0), or of its gradient to the host, where it is added to what is there of
        earlier microbatches."""
        host = host_of(self.profile)
        duration = host.up_ns(num_bytes) if direction == 0 else host.down_ns(num_bytes)
        name = UP if direction == 0 else DOWN
        return Transmission(name, name, AXIS, num_bytes, duration, beside_ns=duration)

    # Items ----------------------------------------

    def _receive(self, name: str) -> None:
        """A tensor of an earlier stage: an item without operands, which keeps its memory until its gradient is made."""
        program, placement = self.program, self.plan.inputs[name]
        self.placements[name] = placement
        number, local = len(program.items), self.shapes.local(name, placement)
        storage = self._memory(local[1], number)
        value = program.receives[name] = self._value(name, placement, local, storage, number)
        program.items.append(Item(f"receive {name}", inputs=(), outputs=(value,), saved=(storage,)))

    def _send(self, name: str, placement: Placement) -> None:
        """A tensor for later stages: an item without results. Its memory is kept until it has left (`transfers`)."""
        program = self.program
        value = self._operand(name, placement, 0)
        program.sends[name, placement] = value
        program.items.append(Item(f"send {name}", inputs=(value,), outputs=()))

    def _conversion(self, tensor: str, target: Placement, unit: int) -> int:
        program = self.program
        source = self.known[tensor, self.placements[tensor]]
        steps = self._route(tensor, target)
        sizes = self._step_bytes(tensor, steps)
        elsewhere = [self._step_bytes(tensor, steps, lane.axes) for lane in self.others]
        forward, backward = (self._transmissions(steps, sizes, direction, elsewhere) for direction in (0, 1))
        way, back = self.copies.of_activation(tensor, self.placements[tensor], steps)
        shares = way.own_bytes is None
        number = len(program.items)
        if (self.again or self.copied) and tensor not in self.facts.constants:
            scope = self._reading_scope(tensor, target)
            self._note_call(number, self.again.of_conversion(tensor, steps, scope))
            self._note_copied(number, scope)
        local, is_once = self.shapes.local(tensor, target), self._is_converted_once(tensor, target)
        size, maker = local[1] if way.own_bytes is None else way.own_bytes, -1 if is_once else number
        storage = program.values[source].storage if shares else self._memory(size, maker)
        value = self._value(tensor, target, local, storage, maker)
        if shares:
            self.layouts.made([value], self.layouts.of_view(source))
        else:
            self.layouts.converted(value, tensor)
        if is_once or tensor in self.facts.folded:
            program.items.append(Item(f"{tensor} → {' '.join(map(str, target))}", (source,), (value,), unit=unit))
            return value
        views = self.profile.facts.view_ns
        program.items.append(
            Item(
                name=f"{tensor} → {' '.join(map(str, target))}",
                inputs=(source,),
                outputs=(value,),
                forward_ns=self._handling_ns(steps, sizes, 0) if forward else views[0],
                backward_ns=self._handling_ns(steps, sizes, 1) if backward else views[1],
                forward=forward,
                backward=backward,
                passing=frozenset((source,)) if back.own_bytes is None else frozenset(),
                workspace=(way.workspace_bytes, back.workspace_bytes),
                gradient_bytes=back.own_bytes or 0,
                unit=unit,
            )
        )
        return value

    def _handling_ns(self, steps: Sequence[Step], sizes: Sequence[tuple[int, int]], direction: int) -> int:
        """What a redistribution does on the rank itself: its call, and the copies around its collectives."""
        if self.profile.runtime is None:
            return 0
        copied = sum(copied_bytes(step, size[direction], direction) for step, size in zip(steps, sizes, strict=True))
        return self.profile.runtime.function_ns[direction] + copy_time_ns(copied, self.profile)

    def _node(self, node: Node) -> None:
        """An operator, in a branch or in none."""
        home = self.homes.get(node.name)
        if home is None:
            self._operator(node)
        else:
            self._enter(node)
            self._branched(node, home)

    def _operator(self, node: Node) -> None:
        program, placements = self.program, self.plan.nodes[node.name]
        facts = self.facts.nodes[node.name]
        unit = self._place(node.scope.module)
        read = zip(node.operands, placements.operands, strict=True)
        inputs = [self._operand(tensor, placement, unit) for tensor, placement in read]
        number = len(program.items)
        is_constant = self.facts.constants.issuperset(node.results)
        if not is_constant:
            self._keep_constants(node, inputs)
        if node.op != IDENTITY and not is_constant:
            self._note_call(number, self.again.of_node(node))
            self._note_copied(number, node.scope)
        maker = -1 if is_constant else number
        fused = self.fused.get(node.name)
        stays = fused.results if fused else (False,) * len(node.results)
        laid = self.layouts.of_results(node, inputs[0]) if inputs else AS_IN_GRAPH
        base = inputs[0] if facts.is_view and not laid.is_copy else -1
        outputs = [
            self._result(name, placement, maker, base, in_registers)
            for name, placement, in_registers in zip(node.results, placements.results, stays, strict=True)
        ]
        self.layouts.made(outputs, laid)
        if is_constant and self.facts.folded.issuperset(node.results):
            program.items.append(Item(node.name, tuple(dict.fromkeys(inputs)), tuple(outputs), unit=unit))
            return
        price = self._operator_price(node, placements, inputs, outputs)
        kept: tuple[Saved, ...] = facts.saved if self.trains else ()
        if kept and (placements.in_bits or placements.in_eight_bits):
            in_bits, in_bytes = placements.in_bits, placements.in_eight_bits
            kept = kept_values(node, self.graph, in_bits, self.profile.device_type, in_bytes)
        if price.lowered_bytes is not None:
            kept = tuple([(*node.operands, *node.results)[position] for position in price.lowered_keeps if kept])
        if kept and fused and fused.makes_again:
            kept = (*kept, *(name for name, stays in zip(node.operands, fused.operands, strict=True) if not stays))
        saved, extras, numbers = self._saved(kept, node, inputs, outputs)
        if self.trains and facts.saved and price.lowered_bytes:
            extras = (*extras, price.lowered_bytes)
        passing = frozenset([inputs[position] for position in facts.passing])
        summed, summing_bytes = self._read_several_times(inputs, passing)
        program.items.append(
            Item(
                name=node.name,
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=tuple(outputs),
                forward_ns=price.forward_ns,
                backward_ns=price.backward_ns,
                issue_ns=price.issue_ns,
                split=price.split,
                passing=passing - summed,
                viewed=frozenset([inputs[position] for position in facts.viewed]),
                workspace=(price.workspace[0], price.workspace[1] + summing_bytes),
                inner=price.inner,
                inner_backward=price.inner_backward,
                saved=saved,
                extra_bytes=sum(extras),
                extras=extras if self.copied else (),
                number_bytes=numbers,
                unit=unit,
            )
        )

    def _read_several_times(self, inputs: Sequence[int], passing: Collection[int]) -> tuple[frozenset[int], int]:
        """Operands that an operator reads several times, whose gradients autograd sums in new memory, and bytes of
        those that are summed beside it."""
        counts = Counter(inputs)
        if len(counts) == len(inputs):
            return frozenset(), 0
        values = self.program.values
        several = [value for value, count in counts.items() if count > 1 and values[value].differentiable]
        made = [(counts[value] - 1) * values[value].num_bytes for value in several if value not in passing]
        return frozenset(several), sum(made)

    def _operator_price(self, node: Node, placements: NodePlan, inputs: list[int], outputs: list[int]) -> OperatorPrice:
        """That of a twin in an equal block with equal placements, whichever plan had it."""
        values = self.program.values
        back = tuple([values[value].leads_back for value in inputs]) if self.may_split else ()
        fused = self.fused.get(node.name)
        key = (self.twins.get(node.name, node.name), placements, back, *((fused,) if fused else ()))
        known = self.prices.operators.get(key)
        if known is None:
            operands = tuple([values[value].shape for value in inputs])
            operands = worked_shapes(node, operands, placements.operands, self.plan.axes)
            results = tuple([self._made_shape(values[value]) for value in outputs])
            times = node_time_ns(node, operands, results, self.graph.tensors, self.profile)
            issue_ns = node_issue_ns(node, operands, results, self.graph.tensors, self.profile)
            if fused:
                times, issue_ns = compiled_time_ns(node, operands, results, self.graph.tensors, self.profile, fused)
            if self.trains and (ranks := gathered_rows(node, placements.operands, self.plan.axes)) > 1:
                longer = gathered_ns(node, operands, results, self.graph.tensors, ranks, self.profile)
                times = times[0] + longer[0], times[1] + longer[1]
            split = (
                Split(*split_backward_ns(node, operands, results, self.graph.tensors, back, self.profile))
                if back
                else None
            )
            inner, inner_backward = self._inner(node, times)
            own, _ = inner_communication(self.graph, node, placements.operands, self.plan.axes)
            passes = operator(node.op).passes_when_split
            if own and passes and self.profile.runtime:
                size = values[inputs[0]].num_bytes
                times = split_norm_time_ns(passes, size, self.profile)
                split = split and split._replace(backward_ns=split_norm_backward_ns(passes, size, self.profile))
            sizes = self._sizes(node, inputs, outputs, bool(own))
            lowered = lowered_memory(node, sizes, placements.operands)
            workspace = workspace_bytes(node.op, sizes) if lowered is None else lowered.workspace
            kept = None if lowered is None else lowered.saved_bytes
            keeps = () if lowered is None else lowered.keeps
            if placements.in_bits and self.trains and (rule := operator(node.op).in_bits):
                workspace, kept, keeps = rule.workspace(node, sizes), None, ()
                longer, issued = in_bits_ns(rule.moved(node, sizes), self.profile)
                times, issue_ns = _sum(times, longer), _sum(issue_ns, issued)
                split = split and Split(_sum(split.backward_ns, (longer[1], 0)), _sum(split.issue_ns, (issued[1], 0)))
            if placements.in_eight_bits and self.trains:
                packed = packed_in_eight_bits(node, self.graph)
                workspace = eight_bits_workspace(packed, node, self.graph, sizes, workspace)
                longer, issued = in_bits_ns(eight_bits_moved(packed, node, self.graph, sizes), self.profile)
                times, issue_ns = _sum(times, longer), _sum(issue_ns, issued)
                again = (longer[1], longer[1]), (issued[1], issued[1])  # each half unpacks what the operator keeps
                split = split and Split(_sum(split.backward_ns, again[0]), _sum(split.issue_ns, again[1]))
            known = OperatorPrice(*times, issue_ns, inner, inner_backward, workspace, split, kept, keeps)
            self.prices.operators[key] = known
        return known

    def _result(self, name: str, placement: Placement, item: int, base: int, in_registers: bool = False) -> int:
        """A result. What every microbatch makes whole, and reads a slice of, has the slice's shape and all its bytes:
        its gradient is padded to that size, too."""
        self.placements[name] = placement
        shape, num_bytes = self.shapes.local(name, placement)
        num_bytes *= self._parts(name) if item >= 0 else 1
        num_bytes *= not in_registers
        storage = self.program.values[base].storage if base >= 0 else self._memory(num_bytes, item)
        return self._value(name, placement, (shape, num_bytes), storage, item)

    def _parts(self, name: str) -> int:
        """How many slices a tensor is made with, of which a microbatch reads one."""
        return math.prod(self.graph.made_shape(name)) // max(1, math.prod(self.graph.tensors[name].shape))

    def _made_shape(self, value: Value) -> Shape:
        parts = self._parts(value.tensor) if value.item >= 0 else 1
        return value.shape if parts == 1 else (parts * value.shape[0], *value.shape[1:])

    def _keep_constants(self, node: Node, inputs: Sequence[int]) -> None:
        """What an operator reads of what the runtime computes once, as it is converted for that: it is there for good,
        for all microbatches."""
        for name, value in zip(node.operands, inputs, strict=True):
            producer = self.graph.producers.get(name)
            if producer is None or name not in self.facts.constants:
                continue
            storage = self.program.values[value].storage
            shape = self.graph.tensors[name].shape
            is_whole = bool(shape) and shape[0] == self.batch and not self.facts.nodes[producer.name].is_view
            self.constants[storage] = self.program.memory[storage].num_bytes * (
                self.plan.microbatches if is_whole else 1
            )

    def _is_converted_once(self, tensor: str, target: Placement) -> bool:
        """Whether the runtime converts it when it computes what it is made of, once."""
        ends = self.placements[tensor], target
        return tensor in self.facts.constants and not any(is_cut(self.plan, placement) for placement in ends)

    def _inner(
        self, node: Node, computes_ns: tuple[int, int]
    ) -> tuple[tuple[Transmission, ...], tuple[Transmission, ...]]:
        """What the operator sends inside its forward and its backward pass, which compute so long."""
        lanes = [self.plan, *(replace(self.plan, axes=lane.axes) for lane in self.others)]
        forward, backward = zip(*(inner_collectives(self.graph, node, lane) for lane in lanes), strict=True)
        return (
            self._inner_transmissions(forward, computes_ns[0]),
            self._inner_transmissions(backward, computes_ns[1]),
        )

    def _inner_transmissions(self, sent: Sequence[Sequence[Inner]], compute_ns: int) -> tuple[Transmission, ...]:
        """sent: on each lane, the own one first."""
        rows = [row for row in zip(*sent, strict=True) if self.plan.axes[row[0].axis].size > 1]
        return tuple([self._inner_transmission(compute_ns, *row) for row in rows])

    def _inner_transmission(self, compute_ns: int, inner: Inner, *elsewhere: Inner) -> Transmission:
        """What is sent early holds up nothing: its way is over when its operator begins. Of what is sent beside the
        operator's own computing, the rest counts."""
        sizes = tuple([other.priced_bytes for other in elsewhere])
        joint = inner.along(self.plan.axes) if inner.also else None
        sent = self._transmission(inner.collective, inner.axis, inner.priced_bytes, sizes, joint)
        if inner.is_beside:
            axis, size = inner.along(self.plan.axes), inner.priced_bytes
            longer = beside_compute_ns(
                sent.collective, size, compute_ns, axis, self.per_node, self.profile, inner.beside_share
            )
            return sent._replace(duration_ns=longer, beside_ns=longer)
        return sent._replace(duration_ns=0, waits=None, is_early=True) if inner.is_early else sent

    def _sizes(self, node: Node, inputs: list[int], outputs: list[int], communicates: bool) -> Sizes:
        """On this rank."""
        values = self.program.values
        return Sizes(
            tuple([values[value].shape for value in inputs]),
            tuple([self._made_shape(values[value]) for value in outputs]),
            max((self.shapes.itemsize(name) for name in node.results), default=0),
            tuple([values[value].differentiable for value in inputs]),
            self.profile.device_type,
            communicates,
            tuple([axis.size for axis in self.plan.axes]),
            tuple([self.shapes.itemsize(name) for name in node.operands]),
        )

    def _saved(
        self, kept: Sequence[Saved], node: Node, inputs: list[int], outputs: list[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The storages that autograd keeps alive for this operator, bytes of each extra, and those of numbers."""
        values = dict(zip((*node.operands, *node.results), (*inputs, *outputs), strict=True))
        storages, extras, numbers = [], list[int](), 0
        for one in kept:
            if not isinstance(one, Extra):
                storages.append(self.program.values[values[one]].storage)
            elif one.is_number:
                numbers += one.itemsize
            else:
                extras.append(one.num_bytes(self.program.values[values[one.like]].shape))
        return tuple(dict.fromkeys(storages)), tuple(extras), numbers

    # Branches ----------------------------------------

    def _enter(self, node: Node) -> None:
        """Before the first operator of a fork: what its branches read is brought to where they read it."""
        for value in self.entering.get(node.name, ()):
            if value[0] not in self.plan.storage:
                self._operand(
                    *value, self._place(host_scopes(self.graph, self.plan)[self.homes[node.name].fork].module)
                )

    def _branched(self, node: Node, home: Home) -> None:
        """An operator of a branch. To autograd a branch is one function: it keeps what it reads of others, and hands
        out all of its gradients when its first operator's are there."""
        items, begin = self.program.items, len(self.program.items)
        is_first = home not in self.branches
        if is_first:
            self.branches[home] = _BranchBorder(self.graph, self.plan, home, begin)
        branch = self.branches[home]
        if is_idle(home, self.coordinates):
            self._idle(node, branch)
        else:
            self._operator(node)
        self.program.first_of.update((number, branch.first) for number in range(begin, len(items)))
        if is_first and self.trains:
            self._call_function(items[begin], branch, is_idle(home, self.coordinates))

    def _call_function(self, item: Item, branch: _BranchBorder, idle: bool) -> None:
        """What autograd's function adds to a branch's first item: it reads all that the branch reads of others, and
        hands each of these a gradient, if only zeros."""
        if not idle:
            read = [self.known[value] for value in branch.reads if value[0] not in self.plan.storage]
            item.inputs = tuple(dict.fromkeys((*item.inputs, *read)))
            kept = [self.program.values[value].storage for value in read]
            item.saved = tuple(dict.fromkeys((*item.saved, *kept)))
        if self.profile.runtime is not None:
            item.forward_ns += self.profile.runtime.function_ns[0]
            item.backward_ns += self.profile.runtime.function_ns[1]

    def _idle(self, node: Node, branch: _BranchBorder) -> None:
        """An operator of a branch that other ranks run: items that do nothing, but for the first, which makes zeros of
        all that leaves the branch, and of the gradients of all that it reads."""
        program, unit, number = self.program, self._place(node.scope.module), len(self.program.items)
        self.placements.update(zip(node.results, self.plan.nodes[node.name].results, strict=True))
        if number > branch.first:
            names = [*branch.conversions.pop(node.name, ()), node.name]
            program.items += [Item(name, (), (), unit=unit) for name in names]
            return
        inputs = [self._operand(*value, unit) for value in branch.reads]
        outputs = []
        for name, placement in branch.leaves:
            local = self.shapes.local(name, placement)
            outputs.append(self._value(name, placement, local, self._memory(local[1], number), number))
        wanted = [value for value in inputs if program.values[value].differentiable]
        program.items.append(
            Item(node.name, tuple(inputs), tuple(outputs), self._zeros_ns(outputs), self._zeros_ns(wanted), unit=unit)
        )

    def _zeros_ns(self, values: Sequence[int]) -> int:
        return sum(pointwise_time_ns(self.program.values[value].num_bytes, self.profile) for value in values)

    # Units ----------------------------------------

    def _unit(self, name: str) -> int:
        """The block around a module or parameter, numbered in order of appearance; the program itself is 0."""
        path = self.facts.block_of(name, self.again.modules)
        if path not in self.units:
            self.units[path] = len(self.units)
            self.program.units.append(path)
        return self.units[path]

    def _place(self, module: str) -> int:
        """The unit of a node in a module."""
        known = self.places.get(module)
        if known is None:
            known = self.places[module] = self._unit(module)
        return known

    # Recomputation ----------------------------------------

    def _note_call(self, number: int, call: Call | None) -> None:
        """Notes where an item runs again, as far as recomputation asks for it."""
        if self.again and self.trains:
            self.calls.append((number, call))

    def _note_copied(self, number: int, scope: Scope) -> None:
        """Notes in which call an item runs of which something is copied out."""
        if self.copied:
            self.copied_calls.append((number, call_of(scope, self.copied)))

    def _mark_copied(self) -> None:
        """Numbers these calls."""
        numbers = number_calls(call for _, call in self.copied_calls)
        for (number, _), call in zip(self.copied_calls, numbers, strict=True):
            self.program.items[number].copied_call = call

    def _reading_scope(self, tensor: str, target: Placement) -> Scope:
        """The innermost module call that holds all readers of a conversion, which is where the emitter writes it."""
        nodes = self.plan.nodes
        readers = (
            node.scope for node, position in self.graph.consumers[tensor]
            if node.name in nodes and nodes[node.name].operands[position] == target
        )  # fmt: skip
        return common_scope(list(readers))

    def _mark_regions(self) -> None:
        """Numbers the calls that run again: those of which the backward pass needs something."""
        if not self.calls:
            return
        items, by_itself, modules = self.program.items, set[int](), dict[int, str]()
        for (number, call), region in zip(self.calls, number_calls(call for _, call in self.calls), strict=True):
            items[number].region = region
            if isinstance(call, str):
                by_itself.add(region)
            elif call is not None:
                modules[region] = call[-1][0]
        needed = pieces_needed([self._piece_step(number, by_itself) for number in range(len(items))])
        again = {region for regions in needed for region in regions}
        for item, regions in zip(items, needed, strict=True):
            item.region, item.needs = item.region if item.region in again else -1, regions
        self.program.by_itself = frozenset(by_itself & again)
        self.program.calls_again = {region: path for region, path in modules.items() if region in again}

    def _piece_step(self, number: int, by_itself: Collection[int]) -> PieceStep:
        program, item = self.program, self.program.items[number]
        reads = [program.values[value].storage for value in item.inputs]
        makes = [program.values[value].storage for value in item.outputs]
        own = [storage for storage in makes if program.memory[storage].owner == number]
        return PieceStep(item.region, item.region in by_itself, reads, own, item.saved, item.needs_saved)

    # What stays ----------------------------------------

    def other_residents(self) -> list[tuple[int, str]]:
        """What is not stored from step to step."""
        held = []
        for name in (name for name in self.graph.inputs if name not in self.graph.received):
            whole = self.graph.tensors[name]
            local = local_shape(whole.shape, self.plan.inputs[name], self.plan.axes)
            count = self.plan.microbatches if name in self.batched else 1
            held.append((count * math.prod(local) * whole.itemsize, "inputs"))
        held += [(size, "constants") for size in self.constants.values()]
        held += [(self._updated_bytes(name), "updates") for name in self.graph.mutations if self.trains]
        return [*held, (self._scalar_bytes(), "scalars")]

    def _updated_bytes(self, name: str) -> int:
        """Of what forward makes of a buffer or parameter, which is stored when the step ends: the new value, as it is
        computed (`runtime.state.StoredBuffer.take_update`)."""
        tensor = self.graph.tensors[self.graph.mutations[name]]
        node = self.graph.producers.get(tensor.name)
        if node is None or node.name not in self.plan.nodes:
            return 0
        placement = self.plan.nodes[node.name].results[node.results.index(tensor.name)]
        return math.prod(local_shape(tensor.shape, placement, self.plan.axes)) * tensor.itemsize

    def optimizer_ns(self, moved_bytes: int, tensors: int) -> int:
        """How long it takes to update so many tensors, which are DTensors where several ranks run the stage."""
        kernels, sharded = tensors * OPTIMIZER_KERNELS[self.profile.device_type], self._num_ranks() > 1
        return optimizer_time_ns(moved_bytes, tensors, kernels, sharded, self.profile)

    def _num_ranks(self) -> int:
        """That run the program: of a stage, its own."""
        return math.prod(axis.size for axis in self.plan.axes)

    def _scalar_bytes(self) -> int:
        """What the runtime keeps of single numbers: each microbatch's loss and its gradient, 1; what a mean divides by;
        the ranks of the mesh; where experts are."""
        loss, devices = self.graph.loss, self._num_ranks()
        held = RANK_BYTES * devices if devices > 1 and self.profile.device_type == "cpu" else 0
        if self.trains and loss is not None and loss in self.placements:
            held += (self.plan.microbatches + 1) * self.graph.tensors[loss].itemsize + COUNT_BYTES
        return held + place_table_bytes(self.routed, self.plan.nodes, self.plan.axes)

    def _stored_price(self, name: str) -> StoredPrice:
        tensor, optimizer = self.graph.kept(name), self.plan.optimizer
        key = (tensor.shape, tensor.dtype, self.plan.storage[name].placement)
        known = self.prices.stored.get(key)
        if known is None:
            shape = self._stored_shape(name)
            known = self.prices.stored[key] = StoredPrice(
                math.prod(shape) * tensor.itemsize,
                optimizer_state_bytes(optimizer, shape, tensor.dtype, tensor.shape),
                self._update_bytes(tensor.shape, tensor.dtype, self.plan.storage[name].placement),
                optimizer_workspace_bytes(optimizer, shape, tensor.dtype, tensor.shape),
            )
        return known

    def _update_bytes(self, whole: tuple[int, ...], dtype: str, placement: Placement) -> int:
        """What an update moves, with what takes as long as gathering for it."""
        axes = evenly(self.plan.axes)
        return update_bytes(self.plan.optimizer, whole, dtype, placement, axes, self.per_node, self.profile)

    def _stored_shape(self, tensor: str) -> tuple[int, ...]:
        placement = self.plan.storage[tensor].placement
        return local_shape(self.graph.tensors[tensor].shape, placement, evenly(self.plan.axes))

    # Buckets ----------------------------------------

    def first_gathers_of(self, program: LocalProgram, limits: BucketSizes = BUCKET_SIZES) -> list[Bucket]:
        """The buckets that slots are gathered in when the step begins, which come in the order of their first use."""
        self.program, slots = program, program.slots
        moved = (n for n, slot in enumerate(slots) if slot.converts)

        def size(number: int) -> int:
            return slots[number].used_bytes

        return [*map(self._bucket, pack_gathers(moved, lambda n: slots[n].steps, size, limits))]

    def gathers_of(self, program: LocalProgram) -> list[Bucket]:
        """The buckets that a program's slots are gathered in."""
        self.program = program
        moved = [n for n, slot in enumerate(program.slots) if slot.converts]
        return [self._bucket(group) for group in self._gathers(moved)]

    def _gathers(self, moved: list[int]) -> list[list[int]]:
        """Large slots are gathered alone, the others of a unit together."""
        lone = [[n] for n in moved if self.program.slots[n].used_bytes >= LONE_BYTES]
        small: dict[Hashable, list[int]] = {}
        for n in moved:
            if self.program.slots[n].used_bytes < LONE_BYTES:
                small.setdefault(way_of_slot(self.program.slots[n], True), []).append(n)
        return [*lone, *small.values()]

    def _bucket(self, slots: list[int]) -> Bucket:
        first = self.program.slots[slots[0]]
        rows = [self.program.slots[number].sizes for number in slots]
        columns = zip(*rows, strict=True) if len(rows) > 1 else ()
        sizes = [(sum(a for a, _ in column), sum(b for _, b in column)) for column in columns] or rows[0]
        sent = self._transmissions(first.steps, sizes, 0)
        is_beside = COPY in first.steps and len(sent) > 1 and host_of(self.profile).is_simulated
        return Bucket(slots, sent, (self._convert_ns(slots) if sent else 0) + self._cast_ns(slots), is_beside)

    def _cast_ns(self, slots: list[int]) -> int:
        """A kernel for each."""
        sizes = (self.program.slots[number].cast_bytes[0] for number in slots)
        return sum(pointwise_time_ns(size, self.profile) for size in sizes)

    def _convert_ns(self, slots: list[int]) -> int:
        """Small and inner-dim shards are packed, joined and copied into place; others land there."""
        if self.profile.runtime is None:
            return 0
        copied = 0
        for slot in (self.program.slots[number] for number in slots):
            is_direct = slot.used_bytes >= LONE_BYTES and slot.steps[-1].before.dim == 0
            copied += 0 if is_direct or is_copy(slot.steps[-1]) else slot.stored_bytes + 2 * slot.used_bytes
            if COPY in slot.steps and host_of(self.profile).is_simulated:  # by the rank itself
                copied += slot.stored_bytes
        return len(slots) * self.profile.runtime.convert_ns + copy_time_ns(copied, self.profile)


def copied_bytes(step: Step, num_bytes: int, direction: int) -> int:
    """Bytes that the runtime copies around a step's collective: a sum has a buffer of its own, and what is cut or
    joined along another dim than the first is put in order (`runtime.pieces`)."""
    kind = step.transfers[direction].collective
    dims = [type_.dim for type_ in (step.before, step.after) if type_.kind == "S"]
    if kind in ("all_reduce", SERVED):
        return num_bytes
    return num_bytes * sum(dim > 0 for dim in dims) if kind else 0


def way_of_slot(slot: Slot, by_unit: bool) -> Hashable:
    """Slots of one way may travel together. by_unit: no others than those of its unit."""
    return slot.steps, slot.reduces_each, slot.storage.regather, slot.unit if by_unit else None


def is_summed_first(slot: Slot) -> bool:
    """Whether the gradient's first step home is a sum over an axis that leaves its shape."""
    step = slot.steps[-1]
    return (step.before.kind, step.after.kind) == ("I", "R")


def mark_gradients(program: LocalProgram, ends: list[int]) -> None:
    """Which values have a gradient: those that an end (the loss, what is sent) depends on and that lead to a parameter
    or input. A branch's first item hands out gradients where any of its items has some."""
    called: set[int] = set()
    for value in ends:
        program.values[value].wants_gradient = True
    for number, item in reversed([*enumerate(program.items)]):
        wanted = any(program.values[v].wants_gradient for v in item.outputs or item.inputs)
        if not wanted and number not in called:
            continue
        item.runs_backward = item.runs_backward or number in called or not item.inputs or not item.outputs
        for value in item.inputs:
            if program.values[value].differentiable:
                program.values[value].wants_gradient = item.runs_backward = True
        if item.runs_backward and number in program.first_of:
            called.add(program.first_of[number])


def mark_parts(program: LocalProgram) -> None:
    """Which items run in which part of a backward pass in two, by the gradients that come from them."""
    if not program.splits:
        return
    led: set[int] = set()
    own: set[int] = set()
    for number, item in enumerate(program.items):
        if item.runs_backward:
            wanted = [v for v in item.inputs if program.values[v].wants_gradient] or item.outputs
            for value in wanted:
                (led if program.values[value].leads_back else own).add(number)
    program.led, program.own, program.own_in_order = frozenset(led), frozenset(own), tuple(sorted(own))
