"""One rank's part of a program: builds it, trains it, clips it, and loads and saves its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime import comm, randomness, state
from autopar.runtime.compiling import checked_options, compile_blocks, taken_wrapper, watch_for_wrapper
from autopar.runtime.constants import forget_constants
from autopar.runtime.declare import Block, Parameters, Program
from autopar.runtime.errors import ProgramError
from autopar.runtime.gathering import Gatherer, Unit
from autopar.runtime.inputs import join_outputs, split_inputs
from autopar.runtime.mesh import TIMEOUT_S, RankMesh, make_rank_mesh
from autopar.runtime.reducing import Reducer, on_gradient
from autopar.runtime.stored import Slot, StoredParameter, slot_names


def build(
    program: type[Program],
    device_mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Rank:
    """Builds this rank's part of an emitted program, with its real shards only, not yet loaded (NaN).

    Under torchrun, the process group and the device mesh are made where they are not given. A program of one
    rank needs neither. A rank that does not answer for `timeout_s` seconds is given up (CollectiveError). Raises
    WorldError when the processes that run are not the mesh of the program.
    """
    mesh = make_rank_mesh(program.AXES, device_mesh, torch.device(device) if device is not None else None, timeout_s)
    return Rank(program(mesh), mesh)


class Rank(nn.Module):
    """An `nn.Module` whose parameters are DTensors under the single-device model's names."""

    def __init__(self, program: Program, mesh: RankMesh) -> None:
        super().__init__()
        parameters, slots, buffers = _materialise(program, mesh)
        units = _units(program, slots)
        owner = {slot: unit for unit in units for slot in (*unit.kept, *unit.regathered)}
        self.__dict__.update(  # not as submodules: their names are not the model's
            _program=program,
            _mesh=mesh,
            _state=state.State(parameters, buffers, program.TIED, mesh),
            _gatherer=Gatherer(units),
            _reducer=Reducer(slots, mesh, owner.get),
        )
        self.training = program.TRAINING
        self._watch_units(slots, owner)
        self._register(parameters, buffers)

    _program: Program
    _mesh: RankMesh
    _state: state.State
    _gatherer: Gatherer
    _reducer: Reducer

    def _watch_units(self, slots: list[Slot], owner: Mapping[Slot, Unit]) -> None:
        """After the reducer's hooks, so that a leaf's gradient is sent before its memory is given back."""
        for slot in slots:
            unit = owner.get(slot)
            if unit is not None and slot in unit.regathered and slot.leaf.requires_grad:
                done = self._gatherer.gradient_done
                on_gradient(slot.leaf, partial(done, unit))

    def _register(self, parameters: Mapping[str, StoredParameter], buffers: Mapping[str, state.StoredBuffer]) -> None:
        for name, parameter in parameters.items():
            owner, _, last = name.rpartition(".")
            _submodule(self, owner).register_parameter(last, parameter.tensor)
        for name, buffer in buffers.items():
            owner, _, last = name.rpartition(".")
            _submodule(self, owner).register_buffer(last, buffer.tensor, buffer.declared.persistent)

    def train(self, mode: bool = True) -> Rank:
        """Keeps the mode that the model was in when it was planned; raises ProgramError for the other one.

        Dropout, batch norm and whatever else follows the mode are written into the program.
        """
        if mode != self.training:
            now, other = ("training", "evaluation") if self.training else ("evaluation", "training")
            call = "model.eval()" if self.training else "model.train()"
            raise ProgramError(
                f"expected to stay in {now} mode, for which the program was emitted, found a change to {other}. Plan "
                f"another program after {call}, and move the weights with full_state_dict and load_full_state_dict"
            )
        return self

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles the blocks in place, with the arguments of `torch.compile`; `torch.compile(rank)` does the same.

        Compiled are the operators between redistributions; see `runtime.compiling`. Raises ProgramError for
        fullgraph=True.
        """
        checked_options(options)
        compile_blocks(self._program, lambda function: torch.compile(function, *args, **options))

    def _compile_if_wrapped(self) -> None:
        compiler = taken_wrapper(self)
        if compiler is not None:
            compile_blocks(self._program, compiler)

    def train_step(self, *inputs: Tensor, local: bool = False, **named_inputs: Tensor) -> Tensor:
        """Runs forward and backward over the global batch, or over this rank's shard of it if `local`.

        Returns the loss of the whole batch, equal on all ranks; the parameters have their gradients then,
        added to those that they had before.
        """
        self._compile_if_wrapped()
        microbatches = split_inputs(type(self._program), inputs, named_inputs, self._mesh, local)
        self._state.refresh_buffers()
        self._check_frozen()
        self._state.check_set()
        with torch.enable_grad():
            self._program.prepare(microbatches)
            self._reducer.begin_step()
            self._gatherer.begin_step()
            randomness.begin_step()
            losses = [self._train_microbatch(index, inputs) for index, inputs in enumerate(microbatches)]
        self._reducer.end_step()
        comm.finish_late(self._mesh)
        for parameter in self._state.parameters.values():
            parameter.publish_gradient()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)

    def _check_frozen(self) -> None:
        """Raises ProgramError for a parameter that was frozen when it was planned, and is not any more."""
        for name, parameter in self._state.parameters.items():
            if parameter.tensor.requires_grad and not parameter.declared.requires_grad:
                raise ProgramError(
                    f"expected {name} to need no gradient, as when it was planned, found requires_grad=True; "
                    "plan again with a model in which it does"
                )

    def _train_microbatch(self, index: int, inputs: tuple[Tensor, ...]) -> Tensor:
        self._mesh.progress.microbatch = index
        self._gatherer.begin_microbatch()
        self._reducer.begin_microbatch(is_last=index == self._program.MICROBATCHES - 1)
        try:
            loss = self._loss(self._program(*inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            self._reducer.end_microbatch()
        finally:
            self._gatherer.end_microbatch()
        self._commit_buffers()
        return loss.detach()

    def _loss(self, outputs: Any) -> Tensor:
        loss = outputs if isinstance(outputs, Tensor) else outputs[self._program.LOSS_INDEX]
        if loss.dim() != 0:
            raise ProgramError(f"expected the forward pass to return a scalar loss, found shape {tuple(loss.shape)}")
        return loss

    @torch.no_grad()
    def forward(self, *inputs: Tensor, local: bool = False, **named_inputs: Tensor) -> Any:
        """Runs the forward pass alone, without gradients, and returns what the program returns."""
        self._compile_if_wrapped()
        microbatches = split_inputs(type(self._program), inputs, named_inputs, self._mesh, local)
        self._state.refresh_buffers()
        self._state.check_set()
        self._program.prepare(microbatches)
        self._gatherer.begin_step()
        randomness.begin_step()
        outputs = [self._run_microbatch(*item) for item in enumerate(microbatches)]
        comm.finish_late(self._mesh)
        return join_outputs(outputs, ())

    def _run_microbatch(self, index: int, inputs: tuple[Tensor, ...]) -> Any:
        self._mesh.progress.microbatch = index
        self._gatherer.begin_microbatch()
        try:
            return self._program(*inputs)
        finally:
            self._gatherer.end_microbatch()
            self._commit_buffers()

    def _commit_buffers(self) -> None:
        with torch.no_grad():
            for buffer in self._state.buffers.values():
                buffer.commit_update()

    @property
    def num_ranks(self) -> int:
        """Number of ranks that run the program."""
        return self._mesh.size

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a collective waits for a rank; None where the groups were given."""
        return self._mesh.timeout_s

    def forget_constants(self) -> None:
        """Computes again, at the next step, what the program keeps of its buffers; they may be new since."""
        forget_constants(self._program)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their norm over all parameters and ranks is at most `max_norm`.

        Returns the norm before, a 0-dim tensor that is equal on all ranks: the single-device norm.
        """
        return state.clip_grad_norm(self._state.parameters, self._mesh, float(max_norm), float(norm_type))

    def full_state_dict(self, *, cpu_offload: bool = False) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers by single-device name, tied names too, on every rank."""
        return self._state.full(cpu_offload=cpu_offload)

    def load_full_state_dict(self, tensors: Mapping[str, Tensor], *, broadcast: bool = False) -> None:
        """Loads whole tensors by single-device name; if `broadcast`, those that the mesh's first rank has.

        Raises ProgramError that lists the names that are missing or unexpected and the shapes that differ.
        """
        self._state.load(tensors, broadcast=broadcast)
        self.forget_constants()

    def init_from(self, model: nn.Module | Mapping[str, Tensor], *, broadcast: bool = True) -> None:
        """Starts from a single-device model's weights, or its tensors by name (those it has no use for are left).

        With `broadcast`, the weights that the mesh's first rank has are taken everywhere, whatever the seeds.
        """
        if isinstance(model, nn.Module):
            tensors = model.state_dict() | dict(model.named_parameters()) | dict(model.named_buffers())
        else:
            tensors = dict(model)
        known = {**self._state.parameters, **self._state.buffers, **self._state.tied}
        self.load_full_state_dict({k: v for k, v in tensors.items() if k in known}, broadcast=broadcast)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients by single-device name, on every rank; parameters without one are left out."""
        return self._state.full_gradients()


def _materialise(
    program: Program, mesh: RankMesh
) -> tuple[dict[str, StoredParameter], list[Slot], dict[str, state.StoredBuffer]]:
    """Makes this rank's tensors for all that the program declares."""
    parameters: dict[str, StoredParameter] = {}
    buffers: dict[str, state.StoredBuffer] = {}
    slots: list[Slot] = []
    for name, holder, attribute in _declared(program):
        if attribute in holder.declared_buffers:
            buffers[name] = state.make_buffer(name, holder.declared_buffers[attribute], holder, attribute, mesh)
            continue
        declared = holder.declared_parameters[attribute]
        parameters[name] = parameter = StoredParameter(name, declared, mesh)
        names = slot_names(attribute, len(declared.uses))
        slots += [Slot(parameter, use, holder, name) for use, name in zip(declared.uses, names, strict=True)]
    return parameters, slots, buffers


def _declared(program: Program) -> Iterator[tuple[str, Parameters, str]]:
    for prefix, module in program.named_modules():
        if isinstance(module, Parameters):
            for attribute in (*module.declared_parameters, *module.declared_buffers):
                yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute


def _units(program: Program, slots: list[Slot]) -> list[Unit]:
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


def _submodule(root: nn.Module, path: str) -> nn.Module:
    module = root
    for name in path.split(".") if path else ():
        if name not in dict(module.named_children()):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


watch_for_wrapper(Rank)
