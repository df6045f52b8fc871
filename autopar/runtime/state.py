"""Weights, buffers and gradients under the names of the single-device model: whole tensors in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime import comm
from autopar.runtime.declare import Buffer, Parameters
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import RankMesh
from autopar.runtime.placement import Type, local_shape, local_slices, parse_placement
from autopar.runtime.stored import StoredParameter, local_part, unset_tensor, wrap


@dataclass(slots=True, eq=False)
class StoredBuffer:
    """One buffer on this rank. `tensor` is what checkpoints see; `local` shares its memory.

    `used` is what the program reads: `local` itself, or its copy in the dtype that the program computes with.
    """

    name: str
    declared: Buffer
    types: tuple[Type, ...]
    holder: Parameters
    attribute: str
    local: Tensor
    tensor: Tensor
    used: Tensor
    version: int = -1  # of `local`, when `used` was last made from it
    unset_version: int = -1  # of `local`, before it was given any value, where no state_dict holds it

    @property
    def is_set(self) -> bool:
        """Whether it was given a value, by loading or by hand."""
        return self.local._version != self.unset_version

    def refresh(self) -> None:
        """Brings `used` up to date with what is stored, which may have been loaded since."""
        if self.used is not self.local and self.version != self.local._version:
            self.used.copy_(self.local)
            self.version = self.local._version

    def commit_update(self) -> None:
        """Takes over the value that the forward pass has set, if it did."""
        value = self.holder.pending_updates.pop(self.attribute, None)
        if value is not None:
            self.local.copy_(value)
            self.refresh()


def make_buffer(name: str, declared: Buffer, holder: Parameters, attribute: str, mesh: RankMesh) -> StoredBuffer:
    """Makes this rank's part of a buffer, not yet loaded but for a constant, and puts it in its holder."""
    types = parse_placement(declared.placement, len(mesh.axes))
    local = unset_tensor(local_shape(declared.shape, types, mesh.axes), declared.dtype, mesh.device)
    if declared.value is not None:
        whole = torch.tensor(declared.value, dtype=declared.dtype).reshape(declared.shape)
        local.copy_(whole[local_slices(declared.shape, types, mesh.axes)])
    sharded = any(kind.is_shard for kind in types)
    used = local if declared.compute in (None, declared.dtype) else local.to(declared.compute)
    holder.__dict__[attribute] = used
    tensor = wrap(local, declared.shape, types, mesh) if sharded else local
    known = declared.persistent or declared.value is not None
    unset_version = -1 if known else local._version
    return StoredBuffer(name, declared, types, holder, attribute, local, tensor, used, -1, unset_version)


class State:
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

    @torch.no_grad()
    def refresh_buffers(self) -> None:
        """Before a step: buffers in the dtype that the program computes with."""
        for buffer in self.buffers.values():
            buffer.refresh()

    def full(self, *, cpu_offload: bool) -> dict[str, Tensor]:
        """Whole tensors of parameters and persistent buffers, on every rank."""
        persistent = {name: stored for name, stored in self.buffers.items() if stored.declared.persistent}
        tensors: dict[str, Tensor] = {name: stored.tensor for name, stored in self.parameters.items()}
        tensors |= {name: stored.tensor for name, stored in persistent.items()}
        full = {name: _whole(tensor) for name, tensor in tensors.items()}
        if cpu_offload:
            full = {name: tensor.cpu() for name, tensor in full.items()}
        return full | {name: full[primary] for name, primary in self.tied.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the parameters that have one, on every rank."""
        grads = {name: stored.tensor.grad for name, stored in self.parameters.items()}
        full = {name: _whole(grad) for name, grad in grads.items() if grad is not None}
        return full | {name: full[primary] for name, primary in self.tied.items() if primary in full}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, broadcast: bool) -> None:
        """Cuts whole tensors, those of the mesh's first rank if `broadcast`, into this rank's parts.

        Raises ProgramError that lists the names that are missing or unexpected and the shapes that differ.
        """
        found = {self.tied.get(name, name): tensor for name, tensor in tensors.items()}
        found |= {name: tensor for name, tensor in tensors.items() if name not in self.tied}
        self._check(found)
        for name, stored in self._targets().items():
            if name in found:
                whole = self._broadcast(found[name], stored) if broadcast else found[name]
                slices = local_slices(stored.declared.shape, stored.types, self.mesh.axes)
                stored.local.copy_(whole[slices])

    def check_set(self) -> None:
        """Raises ProgramError where a buffer that no state_dict holds was never given its value."""
        unset = sorted(name for name, stored in self.buffers.items() if not stored.is_set)
        if unset:
            raise ProgramError(
                f"expected values of the non-persistent buffers {', '.join(unset)}, found none: a state_dict does not "
                "hold them. Start from the model with init_from(model), or from PlannedProgram.build"
            )

    def _targets(self) -> dict[str, StoredParameter | StoredBuffer]:
        return {**self.parameters, **self.buffers}

    def _check(self, found: Mapping[str, Tensor]) -> None:
        targets = self._targets()
        optional = {name for name, stored in self.buffers.items() if not stored.declared.persistent}
        missing = sorted(set(targets) - set(found) - optional)
        unexpected = sorted(set(found) - set(targets))
        shapes = [
            f"{name}: expected {tuple(stored.declared.shape)}, found {tuple(found[name].shape)}"
            for name, stored in targets.items()
            if name in found and tuple(found[name].shape) != tuple(stored.declared.shape)
        ]
        if missing or unexpected or shapes:
            raise ProgramError(
                "the state does not belong to this program; "
                f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}; "
                f"other shape: {'; '.join(shapes) or 'none'}"
            )

    def _broadcast(self, tensor: Tensor, stored: StoredParameter | StoredBuffer) -> Tensor:
        if self.mesh.device_mesh is None or self.mesh.size == 1:
            return tensor
        whole = torch.empty(stored.declared.shape, dtype=stored.declared.dtype, device=self.mesh.device)
        if all(axis.index == 0 for axis in self.mesh.axes):
            whole.copy_(tensor)
        for axis in self.mesh.axes:
            if axis.group is not None:
                with comm.explained("broadcast", axis, whole.numel() * whole.element_size()):
                    dist.broadcast(_broadcastable(whole), dist.get_global_rank(axis.group, 0), group=axis.group)
        return whole


def _broadcastable(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    return tensor.detach().clone()


@torch.no_grad()
def clip_grad_norm(
    parameters: Mapping[str, StoredParameter], mesh: RankMesh, max_norm: float, norm_type: float
) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

    Each element counts once, however many ranks hold it: the parts are summed over those axes alone that
    shard the parameter.
    """
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for stored in parameters.values():
        if stored.tensor.grad is not None:
            sharded = tuple(i for i, kind in enumerate(stored.types) if kind.is_shard and mesh.axes[i].size > 1)
            groups.setdefault(sharded, []).append(local_part(stored.tensor.grad))
    total = _total_norm(groups, mesh, norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in groups.values():
        for grad in grads:
            grad.mul_(scale.to(grad.dtype))
    return total


def _total_norm(groups: Mapping[tuple[int, ...], list[Tensor]], mesh: RankMesh, norm_type: float) -> Tensor:
    combine: Callable[[Tensor], Tensor] = torch.amax if norm_type == float("inf") else torch.sum
    operation = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
    parts = [torch.zeros((), dtype=torch.float64, device=mesh.device)]
    for axes, grads in sorted(groups.items()):
        norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads if grad.numel()]
        powers = _power(torch.stack(norms).double(), norm_type) if norms else parts[0].view(1)
        part = combine(powers).clone()
        for axis in axes:
            with comm.explained("all_reduce", mesh.axes[axis], part.element_size()):
                dist.all_reduce(part, op=operation, group=mesh.axes[axis].group)
        parts.append(part)
    total = combine(torch.stack(parts))
    return _power(total, 1 / norm_type).float()


def _power(x: Tensor, exponent: float) -> Tensor:
    return x if exponent in (float("inf"), 0.0) else x**exponent
