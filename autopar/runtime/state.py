"""Weights, buffers and gradients under the names of the single-device model: whole tensors in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime import comm
from autopar.runtime.declare import Buffer, Parameter, Parameters
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import RankMesh
from autopar.runtime.packed import Packings
from autopar.runtime.placement import AxisType, local_shape, local_slices, parse_placement
from autopar.runtime.stored import StoredParameter, local_part, unset_tensor, wrap


@dataclass(slots=True, eq=False)
class StoredBuffer:
    """One buffer on this rank. `tensor` is what checkpoints see; `local` shares its memory.

    `used` is what the program reads: `local` itself, or its copy in the dtype that the program computes with.
    """

    name: str
    declared: Buffer
    types: tuple[AxisType, ...]
    mesh: RankMesh
    holder: Parameters
    attribute: str
    local: Tensor
    tensor: Tensor
    used: Tensor
    version: int = -1  # of `local`, when `used` was last made from it
    unset_version: int = -1  # of `local`, before it was given any value
    latest: Tensor | None = None  # what forward has set in this step

    @property
    def is_set(self) -> bool:
        """Whether it was given a value, by loading or by hand."""
        return self.local._version != self.unset_version

    def refresh(self) -> None:
        """Brings `used` up to date with what is stored, which may have been loaded since."""
        self.latest = None
        if self.used is not self.local and self.version != self.local._version:
            self.used.copy_(self.local)
            self.version = self.local._version

    def take_update(self, value: Tensor) -> None:
        """Keeps what forward has set; what is stored stays as it is until the step ends."""
        self.latest = value

    def drop_update(self) -> None:
        """Forgets what forward has set: what is stored is what it set last."""
        self.latest = None

    def commit_update(self) -> None:
        """At the end of a step: stores what forward has set, if it did."""
        if self.latest is not None:
            self.local.copy_(self.latest)
            self.refresh()


def make_buffer(
    name: str, declared: Buffer, holder: Parameters, attribute: str, mesh: RankMesh, known: StoredBuffer | None = None,
    start: Any = None,
) -> StoredBuffer:  # fmt: skip
    """Makes this rank's part of a buffer, not yet loaded but for a constant, and puts it in its holder.

    known: what another stage on this rank has made of it, to be shared. start: its first value, as nested lists, or the
    number that is everywhere.
    """
    start = declared.value if start is None else start
    types = parse_placement(declared.placement, len(mesh.axes))
    shape = local_shape(declared.shape, types, mesh.axes)
    local = known.local if known is not None else unset_tensor(shape, declared.dtype, mesh.device)
    if start is not None and known is None:
        if isinstance(start, list):
            whole = torch.tensor(start, dtype=declared.dtype).reshape(declared.shape)
            local.copy_(whole[local_slices(declared.shape, types, mesh.axes)])
        else:
            local.fill_(start)
    sharded = any(kind.is_shard for kind in types)
    used = local if declared.compute in (None, declared.dtype) else local.to(declared.compute)
    holder.__dict__[attribute] = used
    tensor = wrap(local, declared.shape, types, mesh) if sharded else local
    unset_version = -1 if start is not None else local._version
    return StoredBuffer(name, declared, types, mesh, holder, attribute, local, tensor, used, -1, unset_version)


class ProgramState:
    """All parameters and buffers of a program by single-device name."""

    def __init__(
        self,
        parameters: Mapping[str, StoredParameter],
        buffers: Mapping[str, StoredBuffer],
        tied: Mapping[str, str],
        mesh: RankMesh,
    ) -> None:
        self.parameters, self.buffers = dict(parameters), dict(buffers)
        self.tied, self.mesh = dict(tied), mesh
        self.num_updates = 0  # by optimizers that have parameters of the program
        self.has_copies = False  # whether ranks update copies of the parameters by gradients of their own

    def full(self, *, cpu_offload: bool) -> dict[str, Tensor]:
        """Whole tensors of parameters and persistent buffers, on every rank."""
        whole = self._whole_of({name: stored.tensor for name, stored in self.persistent().items()})
        full = self.packings.unpacked(whole)
        if cpu_offload:
            full = {name: tensor.cpu() for name, tensor in full.items()}
        return full | {name: full[primary] for name, primary in self.tied.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the parameters that have one, on every rank."""
        grads = {name: stored.tensor.grad for name, stored in self.parameters.items()}
        whole = self._whole_of({name: grad for name, grad in grads.items() if grad is not None})
        full = self.packings.unpacked(whole)
        return full | {name: full[primary] for name, primary in self.tied.items() if primary in full}

    @cached_property
    def packings(self) -> Packings:
        """Between stored names and the model's."""
        return Packings(self._declared())

    def whole(self, name: str) -> Tensor:
        """A tensor of the model, whole, from the slices of all ranks, which call this together."""
        stored = [own for own in self._declared() if name in self.packings.sources(own)]
        held = self._targets()
        full = self._whole_of({own: held[own].tensor for own in stored if own in held})
        return self.packings.unpacked(full)[name]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks of all stages, where there are several; None where each rank has a part of every tensor."""
        return None

    def source_of(self, name: str) -> int:
        """The rank that speaks for a stored tensor, where `group` is not None."""
        raise AssertionError(f"every rank has a part of {name}")

    def speaks_for(self, name: str) -> bool:
        """Whether this rank is among those that speak for a stored tensor: its parts make up the tensor."""
        return name in self.parameters or name in self.buffers

    @property
    def declared(self) -> dict[str, Parameter]:
        """Every parameter that the program stores, on any rank."""
        return {name: item for name, item in self._declared().items() if isinstance(item, Parameter)}

    def persistent(self) -> dict[str, StoredParameter | StoredBuffer]:
        """What a state_dict holds."""
        return {**self.parameters, **{name: b for name, b in self.buffers.items() if b.declared.persistent}}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of each parameter and persistent buffer of the model, on any rank, the dtype in which it is stored."""
        return {
            source: item.dtype
            for name, item in self._declared().items()
            if isinstance(item, Parameter) or item.persistent
            for source in self.packings.sources(name)
        }

    def _whole_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on every rank, from this rank's parts."""
        return {name: whole_tensor(tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, broadcast: bool) -> None:
        """Cuts whole tensors, those of the mesh's first rank if `broadcast`, into this rank's parts.

        Raises ProgramError that lists the names that are missing or unexpected and the shapes that differ.
        """
        found = {self.tied.get(name, name): tensor for name, tensor in tensors.items()}
        found |= {name: tensor for name, tensor in tensors.items() if name not in self.tied}
        self._check(found)
        targets = self._targets()
        for name, declared in self._declared().items():
            if found.keys() >= set(self.packings.sources(name)):
                whole = self.packings.packed(name, found)
                whole = self._broadcast(whole, declared) if broadcast else whole
                if name in targets:
                    _cut(whole, targets[name])

    @property
    def names(self) -> set[str]:
        """Everything that `load` takes, tied names too."""
        return {*self.packings.shapes, *self.tied}

    def initial(self) -> dict[str, Tensor]:
        """The values that a program states itself of what a state_dict holds."""
        declared = ((n, d) for n, d in self._declared().items() if isinstance(d, Parameter) or d.persistent)
        return {
            n: torch.tensor(d.value, dtype=d.dtype).reshape(d.shape)
            for n, d in declared
            if d.value is not None and n in self.names
        }

    def check_set(self) -> None:
        """Raises ProgramError where a buffer was never given its value."""
        unset = {name: stored.declared.persistent for name, stored in sorted(self.buffers.items()) if not stored.is_set}
        if unset:
            lost = [name for name, is_persistent in unset.items() if not is_persistent]
            why = f"; a state_dict does not hold {', '.join(lost)}" if lost else ""
            raise ProgramError(
                f"expected values of the buffers {', '.join(unset)}, found none{why}. Start from the model with "
                "init_from(model), or from PlannedProgram.build; without weights here, plan with `autopar plan --meta`"
            )

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, norm_type: float) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

        Of copies of the parameters, each by its own."""
        if self.has_copies and self.group is not None:
            raise ProgramError(
                "expected copies of the parameters of one stage to clip the gradients of each by its own norm, found "
                "several stages; take one stage a copy, or adasum, whose gradients are equal"
            )
        grads = [stored.tensor.grad for stored in self.parameters.values() if stored.tensor.grad is not None]
        total = power(self._total_power(norm_type), 1 / norm_type).float()
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            own = local_part(grad)
            own.mul_(scale.to(own.device, own.dtype))
        return total

    def _total_power(self, norm_type: float) -> Tensor:
        """The sum over all elements of |gradient| to the power of the norm; their maximum for the infinite norm."""
        return total_power(self.parameters.values(), self.mesh, norm_type)

    def _targets(self) -> dict[str, StoredParameter | StoredBuffer]:
        return {**self.parameters, **self.buffers}

    def _declared(self) -> dict[str, Parameter | Buffer]:
        """Everything that the program stores, on any rank."""
        return {name: stored.declared for name, stored in self._targets().items()}

    def _check(self, found: Mapping[str, Tensor]) -> None:
        targets = self.packings.shapes
        stored = self._declared().items()
        optional = {name for name, item in stored if isinstance(item, Buffer) and not item.persistent}
        missing = sorted(set(targets) - set(found) - optional)
        unexpected = sorted(set(found) - set(targets))
        shapes = [
            f"{name}: expected {tuple(shape)}, found {tuple(found[name].shape)}"
            for name, shape in targets.items()
            if name in found and tuple(found[name].shape) != tuple(shape)
        ]
        if missing or unexpected or shapes:
            raise ProgramError(
                "the state does not belong to this program; "
                f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}; "
                f"other shape: {'; '.join(shapes) or 'none'}"
            )

    def _broadcast(self, tensor: Tensor, declared: Parameter | Buffer) -> Tensor:
        if self.mesh.device_mesh is None or self.mesh.size == 1:
            return tensor
        whole = torch.empty(declared.shape, dtype=declared.dtype, device=self.mesh.device)
        if all(axis.index == 0 for axis in self.mesh.axes):
            whole.copy_(tensor)
        spread(whole, self.mesh)
        return whole


def spread(whole: Tensor, mesh: RankMesh) -> None:
    """Gives all ranks of a mesh what its first rank has, in place."""
    for axis in mesh.axes:
        comm.broadcast_over(whole, axis)


def _cut(whole: Tensor, stored: StoredParameter | StoredBuffer) -> None:
    stored.local.copy_(whole[local_slices(stored.declared.shape, stored.types, stored.mesh.axes)])


def on_device(tensor: DTensor) -> DTensor:
    """The DTensor, with its part on the mesh's devices if it is on the host."""
    local, mesh = tensor.to_local(), tensor.device_mesh
    if local.device.type == mesh.device_type:
        return tensor
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank of its mesh; a copy of any other tensor."""
    if isinstance(tensor, DTensor):
        return on_device(tensor).full_tensor().detach().clone()
    return tensor.detach().clone()


@torch.no_grad()
def total_power(parameters: Iterable[StoredParameter], mesh: RankMesh, norm_type: float) -> Tensor:
    """The sum of |gradient| to the power of the norm (the maximum for the infinite norm) over a mesh.

    Each element counts once, however many ranks hold it: the parts are summed over those axes alone that
    shard the parameter.
    """
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for stored in parameters:
        if stored.tensor.grad is not None:
            sharded = tuple(i for i, kind in enumerate(stored.types) if kind.is_shard and mesh.axes[i].size > 1)
            groups.setdefault(sharded, []).append(local_part(stored.tensor.grad))
    combine, operation = combination(norm_type)
    parts = [torch.zeros((), dtype=torch.float64, device=mesh.device)]
    for axes, grads in sorted(groups.items()):
        norms = [torch.linalg.vector_norm(grad, norm_type).to(mesh.device) for grad in grads if grad.numel()]
        powers = power(torch.stack(norms).double(), norm_type) if norms else parts[0].view(1)
        part = combine(powers).clone()
        for axis in axes:
            with comm.explained("all_reduce", mesh.axes[axis], part.element_size()):
                dist.all_reduce(part, op=operation, group=mesh.axes[axis].group)
        parts.append(part)
    return combine(torch.stack(parts))


def combination(norm_type: float) -> tuple[Callable[[Tensor], Tensor], Any]:
    """How powers combine on a rank, and over ranks."""
    return (torch.amax, dist.ReduceOp.MAX) if norm_type == float("inf") else (torch.sum, dist.ReduceOp.SUM)


def power(x: Tensor, exponent: float) -> Tensor:
    return x if exponent in (float("inf"), 0.0) else x**exponent
