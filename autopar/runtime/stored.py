"""One parameter on this rank: the shard that is stored, and a slot for each placement in which it is used.

The stored shard is wrapped as a DTensor `nn.Parameter`, which is what optimizers and checkpoints see. A
slot owns the *leaf*: the plain local tensor that the program computes with and that autograd gives a
gradient to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autopar.runtime.declare import Parameter, Parameters
from autopar.runtime.errors import ProgramError
from autopar.runtime.host_link import host_tensor
from autopar.runtime.mesh import Axis, RankMesh
from autopar.runtime.placement import (
    AxisType,
    TypeChange,
    conversion_way,
    local_shape,
    local_size,
    local_slices,
    parse_placement,
    parse_way,
    shard_axes,
)
from autopar.runtime.redistributing import forward_step


@dataclass(frozen=True, slots=True)
class SizedStep:
    """A step, with the lengths over its axis of the dims that are sharded before and after it."""

    step: TypeChange
    sizes: tuple[int | None, int | None]

    @property
    def is_free(self) -> bool:
        """Whether the forward direction moves and computes nothing."""
        return not (self.step.source.is_shard or self.step.target.is_shard or self.step.target.kind == "P")


class StoredParameter:
    """The stored shard of one parameter, its DTensor, and the gradient that this step has brought so far.

    is_tied: stages on other ranks store it as well, so that the step's gradient is summed with theirs before it is
    added to what the parameter holds already.
    """

    def __init__(self, name: str, declared: Parameter, mesh: RankMesh, is_tied: bool = False) -> None:
        self.name, self.declared, self.mesh, self.is_tied = name, declared, mesh, is_tied
        self.types = parse_placement(declared.stored, len(mesh.axes))
        shape = local_shape(declared.shape, self.types, mesh.axes)
        self.is_on_host = declared.on_host
        if self.is_on_host:
            self.local = fill_unset(host_tensor(shape, declared.dtype, mesh.device))
        else:
            self.local = unset_tensor(shape, declared.dtype, mesh.device)
        self.tensor = nn.Parameter(wrap(self.local, declared.shape, self.types, mesh), declared.requires_grad)
        if mesh.device_mesh is None:
            self.local = self.tensor.data
        self._storage = self.tensor.untyped_storage()  # kept, so that no other is ever at its address
        self.gradient: Tensor | None = None
        self._is_owned = False  # that gradient's memory
        self._wrapped: tuple[Tensor, Tensor] | None = None  # what may become the gradient, and its DTensor
        self.is_leaf = False  # whether the program computes with the parameter itself
        self._set_aside: tuple[Tensor | None, list[dict[int, Any]]] | None = None
        self._latest: Tensor | None = None  # what forward has made of it in this step

    def begin_step(self) -> None:
        """Sets aside the gradient that the parameter has and its hooks, where autograd would run those for each
        microbatch: they see the gradient of a step, once."""
        self._restore()
        hooks = _hooks(self.tensor)
        if self.is_leaf and any(hooks):
            self._set_aside = self.tensor.grad, [dict(found) for found in hooks]
            self.tensor.grad = None
            for found in hooks:
                found.clear()

    @property
    def has_hooks(self) -> bool:
        """Whether anybody wants to see its gradients."""
        return self._set_aside is not None or any(_hooks(self.tensor))

    def _restore(self) -> None:
        if self._set_aside is not None:
            (self.tensor.grad, held), self._set_aside = self._set_aside, None
            for found, kept in zip(_hooks(self.tensor), held, strict=True):
                found.update(kept)

    def take_update(self, value: Tensor) -> None:
        """Keeps what forward makes of the parameter, whole or this rank's part of it, until the step ends."""
        if value.shape == self.declared.shape and value.shape != self.local.shape:
            value = value[local_slices(self.declared.shape, self.types, self.mesh.axes)]
        self._latest = value.to(self.declared.dtype)

    def drop_update(self) -> None:
        """Forgets what forward has made of the parameter: what is stored is what it set last."""
        self._latest = None

    def commit_update(self) -> None:
        """At the end of a step: stores what forward has made of the parameter, if it did."""
        if self._latest is not None:
            self.local.copy_(self._latest)
            self._latest = None

    def wrap_ahead(self, local: Tensor) -> None:
        """Makes the DTensor of what will be the step's gradient, while its values are still being summed."""
        self._wrapped = local, wrap(local, self.declared.shape, self.types, self.mesh)

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter still has the memory that the program computes with: nobody has set its `data`."""
        held: Any = self.tensor
        is_same = held.untyped_storage()._cdata == self._storage._cdata  # a DTensor's `data` leaves its local tensor
        return bool(is_same and getattr(held, "_local_tensor", held).data_ptr() == self.local.data_ptr())

    def add_gradient(self, local: Tensor, *, owned: bool) -> None:
        """Adds this rank's part of a gradient, in the stored placement. owned: nobody else reads its memory, so that
        others may be added to it in place."""
        if self.gradient is None:
            self.gradient, self._is_owned = local, owned
        elif self._is_owned:
            self.gradient.add_(local)
        else:
            self.gradient = local.add_(self.gradient) if owned else self.gradient + local
            self._is_owned = True

    def own_gradient(self) -> None:
        """A backward pass is over: nobody reads any more what it has made."""
        self._is_owned = True

    def landing(self) -> Tensor:
        """Memory on the host for this rank's part of a gradient that is sent there; `add_gradient` takes it."""
        return host_tensor(self.local.shape, self.declared.dtype, self.mesh.device)

    def _add_to(self, held: Tensor, gradient: Tensor) -> None:
        if held.shape != gradient.shape:
            raise ProgramError(
                f"{self.name}: expected a gradient as train_step leaves it, of which this rank has "
                f"{tuple(gradient.shape)}, found {tuple(held.shape)} set by hand; set parameter.grad = None before "
                "the step, or change the gradient that is there in place"
            )
        held.add_(gradient)

    def publish_gradient(self) -> None:
        """Hands the step's gradient over to the parameter, unless frozen since, adding to what it holds already."""
        wrapped, self._wrapped = self._wrapped, None
        if self._set_aside is not None:
            self.gradient = self.tensor.grad
            self._restore()
        if self.gradient is None or not self.tensor.requires_grad:
            self.gradient = None
            return
        if wrapped is not None and wrapped[0] is self.gradient:
            gradient = wrapped[1]
        else:
            gradient = wrap(self.gradient, self.declared.shape, self.types, self.mesh)
        self.gradient = None
        on_gradient, on_accumulated = _hooks(self.tensor)
        with torch.no_grad():
            for hook in list(on_gradient.values()):
                found = hook(gradient)
                gradient = gradient if found is None else found
            if self.tensor.grad is None:
                self.tensor.grad = gradient
            else:
                self._add_to(local_part(self.tensor.grad), local_part(gradient))
            for hook in list(on_accumulated.values()):
                hook(self.tensor)


def _hooks(tensor: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Those of `register_hook` and `register_post_accumulate_grad_hook`."""
    held: Any = tensor
    on_gradient, on_accumulated = held._backward_hooks, held._post_accumulate_grad_hooks
    return ({} if on_gradient is None else on_gradient), ({} if on_accumulated is None else on_accumulated)


class ParameterUse:
    """One use of a parameter: the leaf, and the steps that lead from the stored shard to it."""

    def __init__(self, parameter: StoredParameter, use: str, holder: Parameters, attribute: str) -> None:
        self.parameter, self.holder, self.attribute, self.use = parameter, holder, attribute, use
        declared, axes = parameter.declared, parameter.mesh.axes
        *_, self.types = parse_way(use, len(axes))
        way = conversion_way(parameter.types, use)
        self.steps = sized_steps(declared.shape, parameter.types, way, parameter.mesh)
        self.shape = local_shape(declared.shape, self.types, axes)
        self.dtype = declared.compute or declared.dtype
        self.is_cast = self.dtype != declared.dtype
        self.is_alias = not self.moves and not self.is_cast and not parameter.is_on_host
        self.leaf = self._make_leaf()
        self.target = self.leaf.data  # same memory, another version counter: writing it is unseen by autograd
        self.is_live = True
        self.is_pinned = False
        if self.is_alias:
            self.show()
        else:
            self.free()

    def _make_leaf(self) -> Tensor:
        parameter = self.parameter
        if self.is_alias and parameter.mesh.device_mesh is None and not parameter.is_tied:
            parameter.is_leaf = True
            return parameter.tensor
        if self.is_alias:
            return parameter.local.detach().requires_grad_(parameter.declared.requires_grad)
        empty = torch.empty(self.shape, dtype=self.dtype, device=parameter.mesh.device)
        return empty.requires_grad_(parameter.declared.requires_grad)

    @property
    def moves(self) -> bool:
        """Whether the way from the stored shard takes more than another name for it."""
        return not all(sized.is_free for sized in self.steps)

    @property
    def is_served(self) -> bool:
        """Whether the gradient is summed over servers, over the one axis that its way home begins with."""
        return self.use in self.parameter.declared.by_servers

    @property
    def levels(self) -> list[Axis]:
        """The axes that the gradient is summed over by levels, in this order; none where it is not."""
        axes, found = self.parameter.mesh.axes, list[Axis]()
        for sized in reversed(self.steps if self.parameter.declared.by_levels else ()):
            if (sized.step.source.kind, sized.step.target.kind) != ("I", "R"):
                break
            found.append(axes[sized.step.axis])
        return found if len(found) > 1 else []

    @property
    def num_bytes(self) -> int:
        return self.leaf.numel() * self.leaf.element_size()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient on its way home, in the dtype that is stored: sums lose nothing to a cast."""
        return self.leaf.numel() * self.parameter.declared.dtype.itemsize

    def allocate(self) -> None:
        storage = self.leaf.untyped_storage()
        if storage.nbytes() != self.num_bytes:  # torch takes new memory and copies even where the size stays
            storage.resize_(self.num_bytes)

    def free(self) -> None:
        """Gives the leaf's memory back and hides the leaf, so that nobody reads it by mistake."""
        self.hide()
        self.leaf.untyped_storage().resize_(0)

    def show(self) -> None:
        self.is_live = True
        self.holder.__dict__[self.attribute] = self.leaf

    def hide(self) -> None:
        self.is_live = False
        self.conceal()

    def conceal(self) -> None:
        """The leaf is in place, but who reads it must ask for it."""
        self.holder.__dict__.pop(self.attribute, None)


def slot_names(name: str, num_uses: int) -> list[str]:
    """Attribute names of a parameter's uses: weight, weight_1, weight_2, …"""
    return [name if use == 0 else f"{name}_{use}" for use in range(num_uses)]


def sized_steps(
    shape: Sequence[int], stored: Sequence[AxisType], way: Sequence[TypeChange], mesh: RankMesh
) -> list[SizedStep]:
    """The steps that start at a placement, on axes that really split, with the lengths of their dims.

    Copies that are apart use what they have: their gradients are theirs."""
    now, steps = list(stored), []
    for step in way:
        before = _length(shape, now, step.axis, step.source, mesh)
        now[step.axis] = step.target
        after = _length(shape, now, step.axis, step.target, mesh)
        axis = mesh.axes[step.axis]
        is_apart = axis.name == mesh.apart and (step.source.kind, step.target.kind) == ("I", "R")
        if axis.size > 1 and not is_apart:
            steps.append(SizedStep(step, (before, after)))
    return steps


def gathered(local: Tensor, shape: Sequence[int], types: Sequence[AxisType], mesh: RankMesh) -> Tensor:
    """The whole of what each rank has a part of, as a tensor of its own; gathered from the inner axis out."""
    cut = [TypeChange(axis, kind, AxisType("R")) for axis, kind in enumerate(types) if kind.is_shard]
    whole = local.detach().to(mesh.device)
    steps = sized_steps(shape, types, cut[::-1], mesh)
    for item in steps:
        step = item.step
        whole = forward_step(whole, mesh.axes[step.axis], step.source, step.target, item.sizes)
    return whole.contiguous() if steps else whole.clone()


def _length(shape: Sequence[int], types: Sequence[AxisType], axis: int, kind: AxisType, mesh: RankMesh) -> int | None:
    """Length of the dim that `kind` shards, as split by the axes outside `axis`."""
    if not kind.is_shard:
        return None
    outer = shard_axes(types[:axis], kind.dim, mesh.axes[:axis])
    return local_size(shape[kind.dim], *outer)


def unset_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of NaN (zeros for integers): weights that were never loaded show up in the first loss."""
    return fill_unset(torch.empty(tuple(shape), dtype=dtype, device=device))


def fill_unset(tensor: Tensor) -> Tensor:
    """The tensor, filled as `unset_tensor` is."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)


def wrap(local: Tensor, shape: Sequence[int], types: Sequence[AxisType], mesh: RankMesh) -> Tensor:
    """The DTensor of a local part; the tensor itself where there is no device mesh."""
    if mesh.device_mesh is None:
        return local
    size = torch.Size(shape)
    if local.device.type != mesh.device.type:
        return _on_host(local, size, types, mesh.device_mesh)
    return DTensor.from_local(
        local,
        mesh.device_mesh,
        _torch_placements(tuple(types)),
        run_check=False,
        shape=size,
        stride=_contiguous_stride(size),
    )


def _on_host(local: Tensor, shape: torch.Size, types: Sequence[AxisType], device_mesh: DeviceMesh) -> Tensor:
    """A DTensor whose part stays on the host, as FSDP2's CPUOffloadPolicy has it; `from_local` would move it."""
    meta = TensorMeta(shape, _contiguous_stride(shape), local.dtype)
    spec = DTensorSpec(device_mesh, _torch_placements(tuple(types)), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call] # torch's


@cache
def _torch_placements(types: tuple[AxisType, ...]) -> tuple[Placement, ...]:
    return tuple(Shard(kind.dim) if kind.is_shard else Replicate() for kind in types)


@cache
def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor (sharing its memory); the tensor itself otherwise."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
