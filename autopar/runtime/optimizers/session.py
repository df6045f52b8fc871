"""An optimizer's step as on one device: plain whole tensors stand in for parameters, gradients and state.

What the optimizer holds is changed for the time of a step, and back:
    param_groups   a stand-in for each parameter of the model (`StandIn`), those of other stages too where it looks at
                   everything; elsewhere in its attributes, a stand-in for a parameter
    state          of each stand-in, what is kept for the parameter (`keeping`)
Stand-ins stay the same objects from step to step, for what an optimizer keeps by parameter in dicts of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.runtime import comm
from autopar.runtime.errors import ProgramError
from autopar.runtime.optimizers.attributes import Swap, groups_of, held_by
from autopar.runtime.optimizers.entries import WholeParameter, whole_parameters
from autopar.runtime.optimizers.keeping import Keeper
from autopar.runtime.optimizers.memory import Lazy, Residents, Watching, WatchingReads
from autopar.runtime.state import ProgramState
from autopar.runtime.stored import StoredParameter, local_part, wrap

_PLAIN = (bool, int, float, str, type(None))


class StandIn:
    """The plain whole tensor that an optimizer has in a parameter's place, and that of its gradient."""

    def __init__(self, entry: WholeParameter, memory: Residents) -> None:
        self.entry, self.memory = entry, memory
        if entry.is_local:
            (stored,) = entry.own
            self._value, self.value = stored.local.detach(), None
        else:
            self._value = torch.empty(entry.shape, dtype=entry.dtype, device=entry.state.mesh.device)
            self.value = memory.add(Lazy(self._value, entry.name, self._read, self._write, True))
        self.tensor = nn.Parameter(self._value.detach())
        self.gradient: Lazy | None = None
        self._given: Tensor | None = None

    def _read(self) -> Tensor:
        return self.entry.read(_values)

    def _write(self, whole: Tensor) -> None:
        self.entry.write(whole, _values)

    def begin(self, has_gradient: bool) -> None:
        """Gives the stand-in a gradient, if the parameter has one."""
        self.tensor.requires_grad_(all(stored.tensor.requires_grad for stored in self.entry.own))
        self._given = self._gradient_now() if has_gradient else None
        self.tensor.grad = self._given

    def _gradient_now(self) -> Tensor:
        if self.entry.is_local:
            held = self.entry.own[0].tensor.grad
            assert held is not None, "the stand-in of a parameter with a gradient"
            return local_part(held).detach()
        if self.gradient is None:
            empty = torch.empty_like(self._value, memory_format=torch.contiguous_format)
            write = lambda whole: self.entry.write(whole, _gradients)  # noqa: E731
            self.gradient = self.memory.add(Lazy(empty, self.entry.name, lambda: self.entry.read(_gradients), write))
            self.gradient.free()
        return self.gradient.tensor

    def end(self) -> None:
        """Stores what took the place of the values or of the gradient as a whole, such as `p.data = other`."""
        if self.tensor.untyped_storage()._cdata != self._value.untyped_storage()._cdata:
            self.entry.write(self._here(self.tensor), _values)
            if self.value is not None:
                self.value.is_written = False
            self.tensor.data = self._value.detach()
        found = self.tensor.grad
        if found is None:
            for stored in self.entry.own:
                stored.tensor.grad = None
        elif found is not self._given:
            self.entry.write(self._here(found), _new_gradients)
        self.tensor.grad = None

    def _here(self, tensor: Tensor) -> Tensor:
        """The tensor, which may be one that is kept in the state."""
        lazy = self.memory.of(tensor)
        if lazy is not None and not lazy.is_here:
            lazy.bring()
        return tensor.detach()


def _values(stored: StoredParameter) -> Tensor:
    return stored.local


def _gradients(stored: StoredParameter) -> Tensor:
    held = stored.tensor.grad
    return torch.zeros_like(stored.local) if held is None else held


def _new_gradients(stored: StoredParameter) -> Tensor:
    if stored.tensor.grad is None:
        zeros = torch.zeros_like(stored.local)
        stored.tensor.grad = wrap(zeros, stored.declared.shape, stored.types, stored.mesh)
    return stored.tensor.grad


class Session:
    """An optimizer on a rank. is_everywhere: it looks at all parameters of all stages."""

    def __init__(self, optimizer: Optimizer, state: ProgramState, is_everywhere: bool) -> None:
        self.optimizer, self.state = optimizer, state
        self.is_asked_everywhere = is_everywhere
        self.is_everywhere = is_everywhere and state.group is not None
        self.memory = Residents(self._draw)
        self.entries = whole_parameters(state, self.is_everywhere)
        self.stand_ins: dict[str, StandIn] = {}
        self._names = {id(item.tensor): name for name, item in state.parameters.items()}
        self._of_stored: dict[str, list[str]] = {}
        for entry in self.entries.values():
            for source in entry.sources:
                self._of_stored.setdefault(source.stored, []).append(entry.name)
        self.keeper = Keeper(self.memory, self.entries, self._of_stored, self.is_everywhere, type(optimizer).__name__)
        self._groups: list[tuple[list[Any], list[Any]]] = []
        self._may_draw = True
        self._swap: Swap | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the optimizer has whole tensors, and every operator is seen first."""
        name = type(self.optimizer).__name__
        with WatchingReads(self.memory), Watching(self.memory, name), self._given_whole():
            yield

    @contextmanager
    def _given_whole(self) -> Iterator[None]:
        """Where it fails, what was stored stays as it was, but for what was stored already."""
        self.enter()
        try:
            yield
        except BaseException:
            self.memory.is_busy = True
            self._restore()
            self.memory.forget()
            raise
        self.leave()

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that trains the parameters themselves, with what the step has made of them so far."""

        def call(*args: Any) -> Any:
            self.leave(is_pause=True)
            with torch.enable_grad():
                found = closure(*args)
            self.enter(is_pause=True)
            return found

        return call

    # Before and after ----------------------------------------

    @torch.no_grad()
    def enter(self, is_pause: bool = False) -> None:
        """Puts stand-ins in the places of parameters. is_pause: they have their state still, which the step holds."""
        optimizers = held_by(self.optimizer)
        groups = groups_of(optimizers)
        self._may_draw = True
        own = [[self._names[id(p)] for p in params if id(p) in self._names] for params in groups]
        if not is_pause:
            self.keeper.begin(optimizers, self.state.parameters)
        told = self._told(own)
        names = told.groups if told is not None else [[n for s in names for n in self._of_stored[s]] for names in own]
        for name in (name for group in names for name in group):
            if name not in self.stand_ins:
                self.stand_ins[name] = StandIn(self.entries[name], self.memory)
                self.memory.forget()
        self._groups = [(params, list(params)) for params in groups]
        for params, wanted in zip(groups, names, strict=True):
            others = [p for p in params if id(p) not in self._names]
            params[:] = [*(self.stand_ins[name].tensor for name in dict.fromkeys(wanted)), *others]
        for name in dict.fromkeys(name for group in names for name in group):
            stand_in = self.stand_ins[name]
            has_gradient = name in told.trained if told is not None else _has_gradient(stand_in.entry)
            stand_in.begin(has_gradient)
        tensors = {name: stand_in.tensor for name, stand_in in self.stand_ins.items()}
        if not is_pause:
            self.keeper.enter(tensors, told.states if told is not None else {})
        self._swap = Swap(optimizers, self._instead)
        self.memory.before_leaving = self._adopt
        self.memory.is_busy = False

    @torch.no_grad()
    def leave(self, is_pause: bool = False) -> None:
        """Stores what the step has made of everything, and puts the parameters back in their places."""
        self.memory.is_busy = True
        for name in self.stand_ins:
            self._adopt(name)
        for stand_in in self.stand_ins.values():
            stand_in.end()
        self.memory.leave_all()
        self._restore(is_pause)

    def _adopt(self, unit: Any) -> None:
        if unit in self.stand_ins:
            self.keeper.adopt(unit, self.stand_ins[unit].tensor)

    def _restore(self, is_pause: bool = False) -> None:
        if not is_pause:
            self.keeper.leave({name: stand_in.tensor for name, stand_in in self.stand_ins.items()})
        for params, before in self._groups:
            params[:] = before
        self._groups = []
        if self._swap is not None:
            self._swap.undo()
        self._swap = None

    # Other stages ----------------------------------------

    def _told(self, own: list[list[str]]) -> FromAllStages | None:
        """What the ranks that speak for them tell of all parameters."""
        if not self.is_everywhere:
            return None
        group = self.state.group
        assert group is not None, "ranks of several stages are joined"
        options = [{k: v for k, v in g.items() if isinstance(v, _PLAIN)} for g in self.optimizer.param_groups]
        spoken = {s for names in own for s in names if self.state.speaks_for(s)}
        trained = [s for s in spoken if self.state.parameters[s].tensor.grad is not None]
        states = {n: self.keeper.described(n) for s in spoken for n in self._of_stored[s]}
        every = comm.gather_objects((own, options, trained, states), group)
        for number, (_, others, _, _) in enumerate(every):
            if others != options:
                raise ProgramError(
                    f"expected groups of parameters with the same options on all ranks, since {_name(self.optimizer)} "
                    f"looks at those of all stages; found {options} here and {others} on rank {number}. Make as many "
                    "groups, in the same order, on each rank, also where one has no parameter"
                )
        stored = [{name for found, *_ in every for name in found[k]} for k in range(len(own))]
        order = list(self.entries)
        groups = [
            [n for n in order if any(source.stored in names for source in self.entries[n].sources)] for names in stored
        ]
        return FromAllStages(
            groups,
            {n for _, _, found, _ in every for s in found for n in self._of_stored[s]},
            {n: item for *_, found in every for n, item in found.items()},
        )

    def _draw(self) -> None:
        """All ranks draw what the first would."""
        group = self.state.group or (torch.distributed.group.WORLD if self.state.mesh.size > 1 else None)
        if self.state.group is not None and not self.is_everywhere:
            raise ProgramError(
                f"expected {_name(self.optimizer)} to draw no random numbers, as stages would draw other ones; tell "
                'rt.declare_optimizer(…, looks_at="everything")'
            )
        if group is not None and self._may_draw:
            device = self.state.mesh.device
            own = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
            told = comm.broadcast(own.to(device), torch.distributed.get_global_rank(group, 0), group).cpu()
            torch.set_rng_state(told) if device.type == "cpu" else torch.cuda.set_rng_state(told, device)
            self._may_draw = False

    # What an optimizer holds beside groups and state ----------------------------------------

    def _instead(self, item: Any) -> Any:
        """What stands in for something that an optimizer has in its own attributes."""
        names = self._of_stored.get(self._names.get(item if type(item) is int else id(item), ""))
        if names is None and not isinstance(item, DTensor):
            return item
        if self.is_everywhere:
            raise ProgramError(
                f"expected {_name(self.optimizer)} to keep what belongs to a parameter in `state`, found parameters, "
                "or tensors made of them, in its own attributes, where a rank has those of its stages alone. Keep them "
                'in `state`, or tell rt.declare_optimizer(…, looks_at="parameters") where that is so'
            )
        if names is None:
            return self.keeper.outside(item)
        if len(names) > 1:
            raise ProgramError(
                f"expected parameters as the model has them, found {', '.join(names)} packed in one by a substitution, "
                f"which {_name(self.optimizer)} keeps in its own attributes. Plan without substitutions "
                "(autopar.SearchBudget(substitutions=False))"
            )
        if names[0] not in self.stand_ins:
            return item
        stand_in = self.stand_ins[names[0]].tensor
        return id(stand_in) if isinstance(item, int) else stand_in


class FromAllStages:
    """What is known of the parameters of all stages: their groups, those with gradients, and what is kept of each."""

    def __init__(self, groups: list[list[str]], trained: set[str], states: dict[str, Any]) -> None:
        self.groups, self.trained, self.states = groups, trained, states


def _has_gradient(entry: WholeParameter) -> bool:
    return all(stored.tensor.grad is not None for stored in entry.own)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
