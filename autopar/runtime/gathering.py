"""Brings used parameters into place: once a step, or around every run of the block that uses them.

A *unit* is a block with a forward of its own, together with all parameters below it that no inner unit has.
A regathered parameter is converted when its unit runs forward, freed after it, converted again when the
backward pass reaches the unit, and freed when its gradients are done; one unit ahead is already under way
meanwhile, in the order and for the passes that the microbatch before showed. A unit that the backward pass recomputes
is converted for that, and stays until its gradients are done. What is ahead of a recomputed call is what it begins
with when it runs again: its first unit, and those inside of it that begin with it. The program itself is a unit, too,
but keeps its own parameters between the forward and the backward pass: they are converted once a microbatch.

All other converted parameters are converted once a step and kept. Their buckets start when it begins, in the order in
which the step before has first read them; each is waited for where the first of its parameters is read, so that the
others travel beside the first microbatch's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map_only

from autopar.runtime import coalesce
from autopar.runtime.coalesce import CutTensor
from autopar.runtime.declare import Block
from autopar.runtime.functions import tensors_in
from autopar.runtime.mesh import RankMesh
from autopar.runtime.packing import pack_gathers
from autopar.runtime.redistributing import forward_step
from autopar.runtime.stored import ParameterUse, SizedStep

WHOLE, FIRST, SECOND = "whole", "first", "second"  # backward passes, and the parts of those in two


class Unit:
    """The converted parameters of one block, and which of them are under way or in place."""

    def __init__(self, block: Block, slots: Sequence[ParameterUse], is_root: bool) -> None:
        self.block, self.is_root = block, is_root
        self.kept = [slot for slot in slots if not slot.parameter.declared.regather]
        self.regathered = [slot for slot in slots if slot.parameter.declared.regather]
        self.has_run = False  # forward, in this microbatch
        self.is_running = False
        self.in_flight = 0  # microbatches that have run forward, and not yet backward
        self.awaits_backward = False  # in this backward pass
        self.runs_in = set[str]()  # parts of backward passes that were seen to reach it: it is prefetched in these
        self.undone = 0  # regathered leaves whose gradient is still to come in this backward pass
        self.read_outside: dict[ParameterUse, None] = {}  # regathered, asked for by something outside, in that order
        self._under_way: list[Callable[[], None]] = []
        self._concealed: list[ParameterUse] = []  # in place, and nobody's before the block runs

    def launch(self) -> None:
        """Starts to convert the regathered parameters that are not in place and not under way."""
        missing = [slot for slot in self.regathered if not slot.is_live]
        if missing:
            for slot in missing:
                slot.is_live = True
            self._under_way.append(start_conversion(missing))

    @property
    def is_done(self) -> bool:
        """Whether every regathered leaf has its gradient, so that no node of the unit is left to run."""
        return self.undone == 0 and all(slot.leaf.requires_grad for slot in self.regathered)

    def finish(self) -> None:
        """Waits for what is under way; then the leaves are in place."""
        while self._under_way:
            self._under_way.pop(0)()
        while self._concealed:
            self._concealed.pop().show()

    def release(self, *, all_slots: bool = False) -> None:
        """Frees the regathered parameters, but those that something outside this unit has asked for."""
        self.finish()
        for slot in self.regathered:
            if slot.is_live and (all_slots or not slot.is_pinned):
                slot.is_pinned = False
                slot.free()

    def fetch(self, slot: ParameterUse) -> Tensor:
        """Brings one regathered leaf into place for a reader outside the unit; it stays until the microbatch ends.

        For what runs again in a backward pass that has not reached the unit yet, it stays until the unit is done.
        """
        self.finish()
        if not slot.is_live:
            start_conversion([slot])()
        if not (self.block.mesh.progress.is_again and self.awaits_backward):
            slot.is_pinned = True
            self.read_outside[slot] = None
            self._conceal()
        return slot.leaf

    def _conceal(self) -> None:
        """Others that came with what something outside has asked for must be asked for, too: they would not be kept."""
        if not self.is_running:
            self._concealed = [slot for slot in self.regathered if slot.is_live and not slot.is_pinned]
            for slot in self._concealed:
                slot.conceal()

    def pin_seen(self, outputs: Iterable[Tensor]) -> None:
        """Keeps the regathered parameters, until the pass ends, whose memory the block's outputs are views of."""
        memory = {x.untyped_storage()._cdata for x in outputs}
        for slot in self.regathered:
            slot.is_pinned |= slot.is_live and slot.leaf.untyped_storage()._cdata in memory

    def bring_back(self) -> None:
        """For a backward pass: the parameters that the backward pass of no block brings, if they are not in place."""
        if self.is_root:
            self.launch()
            self.finish()
        for slot in self.read_outside:
            self.fetch(slot)


class Visit(NamedTuple):
    """A run of a unit's block in a forward pass. call: the recomputed call that it is a part of; depth: how many units'
    blocks run around it."""

    unit: Unit
    call: object | None = None
    depth: int = 0


class FirstConversions:
    """Parameters that are converted once a step, bucket by bucket, each waited for where the first of it is read.

    The first step shows in which order they are read. It is the same on all ranks: those that do not run a branch name
    what it reads.
    """

    def __init__(self, slots: Sequence[ParameterUse]) -> None:
        self._order = list(slots)  # as declared, until it has been seen once
        self._read: dict[ParameterUse, None] | None = {}  # in this step, while the order is to be seen
        self._under_way: dict[ParameterUse, tuple[list[ParameterUse], Callable[[], None]]] = {}

    def launch(self) -> None:
        """Starts all of them, those that are read first at first."""
        self._finish_all()  # of a step that failed midway
        self._read = None if self._read is None else {}
        for bucket in pack_gathers(self._order, _lane, lambda slot: slot.num_bytes):
            for slot in bucket:
                slot.hide()
            self._under_way.update(dict.fromkeys(bucket, (bucket, start_conversion(bucket))))

    def fetch(self, slot: ParameterUse) -> Tensor:
        """Waits for the slot's bucket. Its leaves are in place then; hidden, while the order is to be seen."""
        self._finish(slot)
        if self._read is not None:
            self._read[slot] = None
            slot.show()
        return slot.leaf

    def end_step(self) -> None:
        """Waits for what nothing has read."""
        self._finish_all()
        if self._read is not None:
            self._order = [*self._read, *(slot for slot in self._order if slot not in self._read)]
            self._read = None

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish(next(iter(self._under_way)))

    def _finish(self, slot: ParameterUse) -> None:
        bucket, wait = self._under_way.get(slot, ((), None))
        if wait is not None:
            for other in bucket:
                del self._under_way[other]
            wait()
        if self._read is not None:
            for other in bucket:
                other.hide()


class Gatherer:
    """Runs the units' conversions around their forward and backward passes, one unit ahead."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self._visited: list[Visit] = []
        self._depth = 0  # units whose blocks run
        self._order: list[Visit] = []
        self._take_order([Visit(unit) for unit in units])  # as declared, until it has been seen once
        self._part = WHOLE  # of the backward pass
        self.first = FirstConversions([slot for unit in units for slot in unit.kept])
        for unit in self.units:
            self._attach(unit)

    def _attach(self, unit: Unit) -> None:
        unit.block.register_forward_pre_hook(lambda block, inputs: self._before_forward(unit))
        unit.block.register_forward_hook(lambda block, inputs, outputs: self._after_forward(unit, outputs))
        for slot in unit.regathered:
            slot.holder.late_tensors[slot.attribute] = partial(unit.fetch, slot)
        for slot in unit.kept:
            slot.holder.late_tensors[slot.attribute] = partial(self.first.fetch, slot)

    def begin_step(self) -> None:
        """Starts to convert everything that is converted once a step. The stored shards may be new since."""
        for unit in self.units:
            unit.in_flight = 0
        self.first.launch()

    def end_step(self) -> None:
        """Waits for what no microbatch has read."""
        self.first.end_step()

    def begin_forward(self) -> None:
        """A microbatch's forward pass begins."""
        self._visited, self._depth = [], 0
        for unit in self.units:
            unit.has_run = False

    def begin_backward(self, part: str = WHOLE) -> None:
        """A microbatch's backward pass begins: its own forward pass, or that of another, may have just ended."""
        self._part = part
        self._take_order(self._visited)
        for unit in self.units:
            unit.awaits_backward = unit.in_flight > 0
            unit.undone = sum(slot.leaf.requires_grad for slot in unit.regathered)
            unit.bring_back()

    def bring_all(self) -> None:
        """For the second part of a backward pass, whose operators ask for their parameters in no order of blocks."""
        self._part = SECOND
        for unit in self.units:
            unit.launch()
        for unit in self.units:
            unit.finish()

    def end_pass(self) -> None:
        """Frees whatever is still in place, such as frozen parameters and those that nothing used."""
        self._take_order(self._visited)
        for unit in self.units:
            unit.release(all_slots=True)

    def outlasting(self, outputs: Any) -> Any:
        """What a pass returns or sends, copied where it is memory that is freed when the pass ends."""
        live = [slot for unit in self.units for slot in unit.regathered if slot.is_live]
        memory = {slot.leaf.untyped_storage()._cdata for slot in live}
        if memory.isdisjoint(x.untyped_storage()._cdata for x in tensors_in(outputs)):
            return outputs
        return tree_map_only(Tensor, lambda x: x.clone() if x.untyped_storage()._cdata in memory else x, outputs)

    def gradient_done(self, unit: Unit) -> None:
        """One more leaf of the unit has its gradient."""
        unit.undone -= 1
        if unit.is_done:
            unit.release(all_slots=True)

    def _before_forward(self, unit: Unit) -> None:
        is_again = unit.block.mesh.progress.is_again
        if not (is_again and unit.is_done):  # a block may run in pieces, of which the later ones have run backward
            unit.launch()
        if is_again:
            self._launch_after_again(unit)
        else:
            self._visited.append(Visit(unit, unit.block.mesh.progress.kept_call, self._depth))
            self._depth += 1
            unit.has_run = True
            self._launch_following(unit)
        unit.finish()
        unit.is_running = True
        if unit.block.is_compiled:  # which would break in two where it waits
            for slot in unit.kept:
                self.first.fetch(slot)

    def _after_forward(self, unit: Unit, outputs: Any) -> None:
        progress, unit.is_running = unit.block.mesh.progress, False
        if progress.is_again:
            return
        self._depth -= 1
        if not unit.regathered or unit.is_root:
            return
        runs_again = progress.kept_call is not None
        differentiable = [x for x in tensors_in(outputs) if x.requires_grad]
        if differentiable and torch.is_grad_enabled():
            unit.in_flight += 1
            register_multi_grad_hook(differentiable, lambda grad: self._before_backward(unit, runs_again), mode="any")
        unit.pin_seen(tensors_in(outputs))
        unit.release()

    def _before_backward(self, unit: Unit, runs_again: bool) -> None:
        """runs_again: nothing of this run is kept, so that the unit is converted when it runs again, and not before."""
        unit.awaits_backward = False
        unit.runs_in.add(self._part)
        unit.in_flight -= 1
        if runs_again:
            return
        if not unit.is_done:  # a block may run in pieces, of which the later ones have brought all gradients
            unit.launch()
        self._launch_before(self._places.get(unit, 0))
        unit.finish()

    def _take_order(self, visited: list[Visit]) -> None:
        """From here on, units run as they did then."""
        if visited and visited is not self._order:
            self._order = visited
            self._places = {visit.unit: place for place, visit in reversed([*enumerate(visited)])}  # of first visits

    def _launch_following(self, unit: Unit) -> None:
        """Starts to convert the next unit of the forward pass, if it is still to run."""
        place = self._places.get(unit, len(self._order)) + 1
        if place < len(self._order) and not self._order[place].unit.has_run:
            self._order[place].unit.launch()

    def _launch_after_again(self, unit: Unit) -> None:
        """Starts to convert what is next where a unit runs again: the next one in its call, which runs again, too,
        or, after its last, what the backward pass comes to when it is through with the call."""
        if (place := self._places.get(unit)) is None:
            return
        following, call = self._order[place + 1 : place + 2], self._order[place].call
        if call is None:  # operators that run again by themselves
            for visit in following:
                self._launch_awaiting(visit.unit)
        elif following and following[0].call is call:
            if not following[0].unit.is_done:
                following[0].unit.launch()
        else:
            self._launch_before(self._first_of_call(place))

    def _launch_before(self, place: int) -> None:
        """Starts to convert what the backward pass comes to behind this visit: the unit before it, or, if that is part
        of a recomputed call, what this begins with."""
        if place:
            first = self._first_of_call(place - 1)
            self._launch_awaiting(self._order[first].unit)
            for around, inside in zip(self._order[first:], self._order[first + 1 : place], strict=False):
                if inside.depth <= around.depth:
                    break
                self._launch_awaiting(inside.unit)

    def _first_of_call(self, place: int) -> int:
        """The first visit of the recomputed call that a visit is a part of, or itself."""
        call = self._order[place].call
        while call is not None and place and self._order[place - 1].call is call:
            place -= 1
        return place

    def _launch_awaiting(self, unit: Unit) -> None:
        """Starts to convert a unit that this backward pass is still to reach, and reads again: what others read, and
        gradients came to through these, has been freed for good."""
        if unit.awaits_backward and self._part in unit.runs_in and not unit.is_done:
            unit.launch()


def start_conversion(slots: Iterable[ParameterUse]) -> Callable[[], None]:
    """Starts to convert stored shards into leaves; returns a function that waits until they are in place."""
    finishes = []
    ordered = sorted(slots, key=_lane)
    for _, lane in groupby(ordered, key=_lane):
        finishes.append(_start_lane(list(lane)))

    def finish() -> None:
        for wait in finishes:
            wait()

    return finish


def _lane(slot: ParameterUse) -> str:
    """Slots with equal steps and dtypes travel together, and those of the host by themselves."""
    steps = [(s.step.axis, str(s.step.source), str(s.step.target)) for s in slot.steps]
    return f"{steps} {slot.leaf.dtype}{' of the host' if slot.parameter.is_on_host else ''}"


@torch.no_grad()
def _start_lane(slots: list[ParameterUse]) -> Callable[[], None]:
    for slot in slots:
        slot.allocate()
    stored = [slot.parameter.local for slot in slots]
    return _start_from_host(stored, slots) if slots[0].parameter.is_on_host else _start_from(stored, slots)


def _start_from_host(stored: list[Tensor], slots: list[ParameterUse]) -> Callable[[], None]:
    """What is used as it is stored is copied into place; of the rest, what is stored is copied to the device first."""
    mesh, link = slots[0].parameter.mesh, slots[0].parameter.mesh.host_link
    if not (slots[0].moves or slots[0].is_cast):
        copy = link.up([(slot.target, local) for slot, local in zip(slots, stored, strict=True)])
        return partial(_show_after, copy.wait, slots)
    staged = [torch.empty_like(local, device=mesh.device) for local in stored]
    copy = link.up(list(zip(staged, stored, strict=True)))
    if mesh.device.type == "cuda":
        with torch.cuda.stream(link.up_stream):
            rest = _start_from(staged, slots)
    else:
        rest = _start_from(staged, slots)

    def finish() -> None:
        copy.wait()
        rest()

    return finish


def _show_after(wait: Callable[[], None], slots: list[ParameterUse]) -> None:
    wait()
    for slot in slots:
        slot.show()


def _start_from(stored: list[Tensor], slots: list[ParameterUse]) -> Callable[[], None]:
    """From what is stored, on the device."""
    mesh = slots[0].parameter.mesh
    if not slots[0].moves:
        return _cast_lane(stored, slots)
    tensors = [local.to(slot.dtype) for local, slot in zip(stored, slots, strict=True)]
    for index in range(len(slots[0].steps) - 1):
        tensors = _convert(tensors, [slot.steps[index] for slot in slots], mesh)
    last = _start_last(tensors, slots, mesh)

    def finish() -> None:
        last()
        for slot in slots:
            slot.show()

    return finish


def _cast_lane(stored: list[Tensor], slots: list[ParameterUse]) -> Callable[[], None]:
    """Slots that are what is stored, in another dtype."""
    for slot, local in zip(slots, stored, strict=True):
        slot.target.copy_(local)

    def finish() -> None:
        for slot in slots:
            slot.show()

    return finish


def _convert(tensors: list[Tensor], steps: list[SizedStep], mesh: RankMesh) -> list[Tensor]:
    step, axis = steps[0].step, mesh.axes[steps[0].step.axis]
    if step.source.is_shard and not step.target.is_shard:
        pieces = _gather_pieces(tensors, steps)
        outputs = [piece.tensor.new_empty(piece.whole_shape) for piece in pieces]
        return coalesce.all_gather(pieces, outputs, axis)()
    return [
        forward_step(tensor, axis, s.step.source, s.step.target, s.sizes)
        for tensor, s in zip(tensors, steps, strict=True)
    ]


def _start_last(tensors: list[Tensor], slots: list[ParameterUse], mesh: RankMesh) -> Callable[[], object]:
    steps = [slot.steps[-1] for slot in slots]
    step = steps[0].step
    targets = [slot.target for slot in slots]
    if step.source.is_shard and not step.target.is_shard:
        return coalesce.all_gather(_gather_pieces(tensors, steps), targets, mesh.axes[step.axis])
    for target, converted in zip(targets, _convert(tensors, steps, mesh), strict=True):
        target.copy_(converted)
    return lambda: None


def _gather_pieces(tensors: list[Tensor], steps: list[SizedStep]) -> list[CutTensor]:
    pieces = []
    for tensor, sized in zip(tensors, steps, strict=True):
        assert sized.sizes[0] is not None, "a gather starts from a sharded dim"
        pieces.append(CutTensor(tensor, sized.step.source.dim, sized.sizes[0]))
    return pieces
