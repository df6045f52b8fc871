"""From nodes with their placements to what one rank does in a microbatch (`simulate.program`), priced.

`Lowering` reads graph and plan, segment by segment (`parts`), which are played.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from autopar.cost import Profile
from autopar.cost.compute import copy_time_ns, pointwise_time_ns
from autopar.cost.fusion import Fused, fusions
from autopar.cost.memory import kept_values
from autopar.cost.servers import SERVED
from autopar.errors import PlanError
from autopar.ir.branches import Coordinates, Home, entering, homes, host_scopes, is_idle
from autopar.ir.graph import IDENTITY, Graph, Node, Scope, common_scope
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Placement, Shape, evenly, format_placement, local_shape
from autopar.ir.plan import COMPILED, NodePlan, Plan, StagePlan
from autopar.ir.recompute import PieceStep, pieces_needed
from autopar.ir.redistribution import Step, apply, transfer_bytes
from autopar.ir.stages import answered_values, leaving_values
from autopar.ir.structure import is_cut
from autopar.ops.saved import Extra, Saved
from autopar.simulate.branch_border import BranchBorder
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
from autopar.simulate.host_copies import COPY, is_copy
from autopar.simulate.layouts import AS_IN_GRAPH, Laid, Layouts
from autopar.simulate.operator_prices import OperatorPrices, PriceTable, SlotPrice, made_parts
from autopar.simulate.program import Item, LocalMemory, LocalProgram, Slot, Value
from autopar.simulate.residents import StoredPrices, stored_shape
from autopar.simulate.sending import OtherLane, SendPrices


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
        self.branches: dict[Home, BranchBorder] = {}
        self.graph, self.plan, self.profile, self.per_node = graph, plan, profile, per_node
        self.facts, self.prices, self.batched, self.casts = facts, prices, batched, casts
        self.shapes = LocalShapes(graph, plan)
        self.sending = SendPrices(plan.axes, per_node, profile, others)
        self.stored = StoredPrices(graph, prices, plan.axes, per_node, profile)
        self.program = LocalProgram()
        self.copies = Copies(graph, plan, profile.device_type, self.shapes)
        self.layouts = Layouts(graph)
        self.steps = {(r.tensor, r.target): r.steps for r in plan.redistributes}
        self.step_bytes: dict[object, tuple[tuple[int, int], ...]] = {}
        self.known: dict[tuple[str, Placement], int] = {}
        self.placements: dict[str, Placement] = {}
        self.units: dict[str, int] = {}
        self.again = Again(graph, plan.recompute, facts.blocks)
        self.places: dict[str, int] = {}
        self.fused: dict[str, Fused] = {}
        self._fusions_known: dict[frozenset[str], dict[str, Fused]] = {}
        self.leading_back = tensors_on_the_way(graph) if may_split else frozenset()
        leads_to_loss = graph.loss is not None or graph.ends is not None  # a stage may
        self.trains = plan.mode == "train" and leads_to_loss
        may_split, twins = self.trains and may_split, facts.twins(plan.blocks)
        self.operators = OperatorPrices(graph, twins, self.shapes, prices, self.sending, self.trains, may_split)
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

    def _slot_price(self, tensor: str, steps: tuple[Step, ...], value: Value) -> SlotPrice:
        source, kept = self.placements[tensor], self.graph.kept(tensor)
        way, steps = steps, tuple([step for step in steps if not is_copy(step)])
        is_cast = tensor in self.graph.kept_dtypes and self.graph.stored_by_tensor[tensor].kind == "parameter"
        key = (value.shape, source, way, kept.shape, kept.dtype, self.graph.tensors[tensor].dtype, is_cast)
        known = self.prices.slots.get(key)
        if known is None:
            stored = math.prod(stored_shape(self.graph, self.plan, tensor))
            itemsize, master = self.graph.itemsizes(tensor)
            is_sent = is_cast and any(step.before.kind == "S" for step in steps)  # the shard's cast copy is
            is_alias = not any("S" in (s.before.kind, s.after.kind) or s.after.kind == "P" for s in way)
            staged = stored * kept.itemsize if way != steps and (steps or is_cast) else 0
            known = self.prices.slots[key] = SlotPrice(
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
        elsewhere = [self._step_bytes(tensor, steps, lane.axes) for lane in self.sending.others]
        forward, backward = (self.sending.of_steps(steps, sizes, direction, elsewhere) for direction in (0, 1))
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
            self.layouts.converted(value, tensor, steps)
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
        laid = self._laid(node, placements, inputs) if inputs else AS_IN_GRAPH
        base = inputs[0] if inputs and self.layouts.is_view(node, laid, facts.is_view) else -1
        outputs = [
            self._result(name, placement, maker, base, in_registers)
            for name, placement, in_registers in zip(node.results, placements.results, stays, strict=True)
        ]
        self.layouts.made(outputs, laid)
        if is_constant and self.facts.folded.issuperset(node.results):
            program.items.append(Item(node.name, tuple(dict.fromkeys(inputs)), tuple(outputs), unit=unit))
            return
        values = program.values
        operands, results = [values[value] for value in inputs], [values[value] for value in outputs]
        price = self.operators.price(self.plan, node, operands, results, self.fused.get(node.name))
        kept: tuple[Saved, ...] = self.layouts.kept(node, laid, facts.saved) if self.trains else ()
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

    def _laid(self, node: Node, placements: NodePlan, inputs: list[int]) -> Laid:
        """How the operator works on the slices that the rank has."""
        shapes = [self.program.values[value].shape for value in inputs]
        made = self.shapes.local(node.results[0], placements.results[0])[0] if node.results else ()
        return self.layouts.of_results(node, inputs, shapes, made)

    def _read_several_times(self, inputs: Sequence[int], passing: Collection[int]) -> tuple[frozenset[int], int]:
        """Operands that an operator reads several times, whose gradients autograd sums in new memory, and bytes of
        those that are summed beside it."""
        if len({*inputs}) == len(inputs):
            return frozenset(), 0
        counts, values = Counter(inputs), self.program.values
        several = [value for value, count in counts.items() if count > 1 and values[value].differentiable]
        made = [(counts[value] - 1) * values[value].num_bytes for value in several if value not in passing]
        return frozenset(several), sum(made)

    def _result(self, name: str, placement: Placement, item: int, base: int, in_registers: bool = False) -> int:
        """A result. What every microbatch makes whole, and reads a slice of, has the slice's shape and all its bytes:
        its gradient is padded to that size, too."""
        self.placements[name] = placement
        shape, num_bytes = self.shapes.local(name, placement)
        num_bytes *= made_parts(self.graph, name) if item >= 0 else 1
        num_bytes *= not in_registers
        storage = self.program.values[base].storage if base >= 0 else self._memory(num_bytes, item)
        return self._value(name, placement, (shape, num_bytes), storage, item)

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
            self.branches[home] = BranchBorder(self.graph, self.plan, home, begin)
        branch = self.branches[home]
        if is_idle(home, self.coordinates):
            self._idle(node, branch)
        else:
            self._operator(node)
        self.program.first_of.update((number, branch.first) for number in range(begin, len(items)))
        if is_first and self.trains:
            self._call_function(items[begin], branch, is_idle(home, self.coordinates))

    def _call_function(self, item: Item, branch: BranchBorder, idle: bool) -> None:
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

    def _idle(self, node: Node, branch: BranchBorder) -> None:
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

    # Buckets ----------------------------------------


def copied_bytes(step: Step, num_bytes: int, direction: int) -> int:
    """Bytes that the runtime copies around a step's collective: a sum has a buffer of its own, and what is cut or
    joined along another dim than the first is put in order (`runtime.pieces`)."""
    kind = step.transfers[direction].collective
    dims = [type_.dim for type_ in (step.before, step.after) if type_.kind == "S"]
    if kind in ("all_reduce", SERVED):
        return num_bytes
    return num_bytes * sum(dim > 0 for dim in dims) if kind else 0
