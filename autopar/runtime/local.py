"""One program, or one stage of a pipeline, on this rank: its real tensors, and the passes over its microbatches.

A pass is the forward or the backward pass of one microbatch. What gathers parameters and sends gradients is told
where each begins and ends; several microbatches may be between their two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.runtime import comm, copying, randomness, state
from autopar.runtime.declare import Block, Parameters, Program
from autopar.runtime.gathering import FIRST, Gatherer, Unit
from autopar.runtime.mesh import RankMesh
from autopar.runtime.ranges import BEGIN, END, part
from autopar.runtime.reducing import Reducer, on_gradient
from autopar.runtime.stored import ParameterUse, StoredParameter, slot_names
from autopar.runtime.tracing import name_ranges

Stored = TypeVar("Stored")


class Local:
    """A program with this rank's tensors.

    number: of the stage, in the stream of random numbers. others: stages that this rank has made before; what they
    store is shared. tied: parameters that stages elsewhere store as well, whose gradients are handed out by themselves.
    """

    def __init__(
        self, program: Program, mesh: RankMesh, number: int = 0, others: Sequence[Local] = (),
        tied: Container[str] = (),
    ) -> None:  # fmt: skip
        self.program, self.mesh, self.number = program, mesh, number
        self.parameters: dict[str, StoredParameter] = {}
        self.buffers: dict[str, state.StoredBuffer] = {}
        self._targets: dict[tuple[Parameters, str], StoredParameter | state.StoredBuffer] = {}
        self._holders: dict[Parameters, None] = {}
        slots = self._materialise(others, tied)
        self.uses = slots
        self.leaves = [slot.leaf for slot in slots]
        own = [*self.leaves, *(x for buffer in self.buffers.values() for x in (buffer.local, buffer.used))]
        self._own_memory = {x.untyped_storage()._cdata for x in own}
        copying.note_stored(program, self._own_memory)
        units = _units(program, slots)
        owner = {slot: unit for unit in units for slot in (*unit.kept, *unit.regathered)}
        self.gatherer = Gatherer(units)
        self.reducer = Reducer(slots, mesh, owner.get)
        self._watch_units(slots, owner)
        name_ranges(program)
        self._backward_passes = 0

    def _watch_units(self, slots: list[ParameterUse], owner: Mapping[ParameterUse, Unit]) -> None:
        """After the reducer's hooks, so that a leaf's gradient is sent before its memory is given back."""
        for slot in slots:
            unit = owner.get(slot)
            if unit is not None and slot in unit.regathered and slot.leaf.requires_grad:
                done = self.gatherer.gradient_done
                on_gradient(slot.leaf, partial(done, unit))

    def _materialise(self, others: Sequence[Local], tied: Container[str]) -> list[ParameterUse]:
        """Makes this rank's tensors for all that the program declares, or takes those that others have made."""
        slots: list[ParameterUse] = []
        for name, holder, attribute in declared_tensors(self.program):
            self._holders[holder] = None
            if attribute in holder.declared_buffers:
                buffer = holder.declared_buffers[attribute]
                known = _known(name, [other.buffers for other in others])
                if known is not None and known.declared != buffer:  # a constant for inputs of another shape
                    known = None
                start = self.program.BUFFERS.get(name)
                made = state.make_buffer(name, buffer, holder, attribute, self.mesh, known, start)
                self.buffers[name] = self._targets[holder, attribute] = made
                continue
            declared = holder.declared_parameters[attribute]
            shared = _known(name, [other.parameters for other in others])
            parameter = shared or StoredParameter(name, declared, self.mesh, is_tied=name in tied)
            self.parameters[name] = self._targets[holder, attribute] = holder.stored_parameters[attribute] = parameter
            uses = zip(declared.uses, slot_names(attribute, len(declared.uses)), strict=True)
            slots += [ParameterUse(parameter, use, holder, named) for use, named in uses]
        return slots

    def refresh_buffers(self) -> None:
        """Before a step: buffers in the dtype that the program computes with."""
        with torch.no_grad():
            for buffer in self.buffers.values():
                buffer.refresh()

    def begin_step(self, microbatches: Sequence[tuple[Tensor, ...]]) -> None:
        """Starts what is gathered once a step, and counts what a mean over all microbatches divides by."""
        with part(BEGIN):
            self.program.prepare(list(microbatches))
            self.reducer.begin_step()
            self.gatherer.begin_step()
        self._backward_passes = 0

    def end_step(self) -> None:
        """Waits for all gradients and late results."""
        with part(END):
            self.reducer.end_step()
            self.finish_late()

    def finish_late(self) -> None:
        """Waits for results that nothing in the step reads, and takes over what forward has set of what is stored."""
        self.gatherer.end_step()
        comm.finish_late(self.mesh)
        with torch.no_grad():
            for target in self._targets.values():
                target.commit_update()

    def forward(self, index: int, inputs: Sequence[Tensor]) -> Any:
        """The forward pass of a microbatch. What it sets is stored when the step ends: the other microbatches, and
        blocks that are run again, read what was stored before."""
        self.mesh.progress.microbatch = index
        randomness.begin_pass(self.number, index)
        self.gatherer.begin_forward()
        outputs = self.gatherer.outlasting(self.program(*inputs))
        for holder in self._holders:
            self._take_updates(holder)
        return outputs

    def _take_updates(self, holder: Parameters) -> None:
        """Keeps what forward has set; copied where it is memory of what is stored or used, which changes first, or a
        part of something larger. What was written in place is stored already."""
        holder.set_by_forward.update(holder.pending_updates)
        for attribute, value in holder.pending_updates.items():
            target = self._targets[holder, attribute]
            if value.is_set_to(target.local):
                target.drop_update()
                continue
            memory = value.untyped_storage()
            is_own = memory._cdata in self._own_memory or memory.nbytes() > value.numel() * value.element_size()
            target.take_update(value.clone() if is_own else value)
        holder.pending_updates.clear()

    def backward(self, index: int, run: Callable[[], None]) -> None:
        """The backward pass of a microbatch, which is what `run` does; in the last one's, gradients go home."""
        self.gatherer.begin_backward()
        copying.begin_backward(self.program, index)
        self._make_gradients(index, run)

    def backward_of_nothing(self, index: int) -> None:
        """That of a microbatch that no gradient reaches, for which nothing is gathered."""
        copying.forget(self.program, index)
        self._make_gradients(index, lambda: None)

    def backward_of_inputs(self, index: int, run: Callable[[], None]) -> None:
        """The first part of a microbatch's backward pass, which makes no gradients of parameters."""
        self.mesh.progress.microbatch = index
        self.gatherer.begin_backward(FIRST)
        run()

    def backward_of_leaves(self, index: int, run: Callable[[], None]) -> None:
        """The second part, with all parameters in place; in the last one's, gradients go home."""
        self.gatherer.bring_all()
        self._make_gradients(index, run)

    def _make_gradients(self, index: int, run: Callable[[], None]) -> None:
        self.mesh.progress.microbatch = index
        self._backward_passes += 1
        self.reducer.begin_microbatch(is_last=self._backward_passes == self.program.MICROBATCHES)
        run()
        self.reducer.end_microbatch()
        for holder in self._holders:  # what recomputed blocks have set again
            holder.pending_updates.clear()

    def end_pass(self) -> None:
        """Frees what the pass has gathered."""
        self.gatherer.end_pass()


def _known(name: str, made: Sequence[Mapping[str, Stored]]) -> Stored | None:
    """What another stage on this rank has made of a tensor that both store."""
    return next((tensors[name] for tensors in made if name in tensors), None)


def declared_tensors(program: Program) -> Iterator[tuple[str, Parameters, str]]:
    """Every parameter and buffer that a program declares: its name, and the attribute of which module it is."""
    return _declared_in(program, "")


def _declared_in(module: nn.Module, prefix: str) -> Iterator[tuple[str, Parameters, str]]:
    names: dict[str, str] = {}
    if isinstance(module, Parameters):
        names = module.model_names
        for attribute in (*module.declared_parameters, *module.declared_buffers):
            yield prefix + names.get(attribute, attribute), module, attribute
    for attribute, child in module.named_children():
        yield from _declared_in(child, f"{prefix}{names.get(attribute, attribute)}.")


def _units(program: Program, slots: list[ParameterUse]) -> list[Unit]:
    """One unit for each block with a forward of its own, each slot in the innermost that encloses it."""
    owner: dict[nn.Module, Block] = {}
    for module in program.modules():  # parents come before children
        if _runs(module):
            owner |= dict.fromkeys(module.modules(), module)  # type: ignore[arg-type]
    blocks = [module for module in program.modules() if isinstance(module, Block) and _runs(module)]
    converted = [slot for slot in slots if not slot.is_alias]
    members = {block: [slot for slot in converted if owner[slot.holder] is block] for block in blocks}
    return [Unit(block, members[block], block is program) for block in blocks if members[block]]


def _runs(module: nn.Module) -> bool:
    return isinstance(module, Block) and type(module).forward is not Block.forward
