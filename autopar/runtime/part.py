"""A part of a model that a loop of the user's own calls as a module: outputs and inputs have gradients.

To autograd a call is one function. Its forward pass runs the program; its backward pass runs the program's, with the
gradients of the outputs, sends the parameters' gradients home, and returns those of the inputs.

    whole     every rank has the whole tensor, and the whole gradient: type I
    DTensor   Shard is S, Replicate is I: as DTensor itself has it
    local     this rank's slices, as the program's inputs are placed; where they are not cut, as whole tensors

Inputs are brought from these types to the program's, and outputs, which leave it as I, to those that the inputs came
in: what has as many rows as the first input is cut into rows like it. All of these are redistributions, so that
gradients follow from the types.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.runtime import comm
from autopar.runtime.building import build
from autopar.runtime.declare import Input, Program
from autopar.runtime.errors import ProgramError
from autopar.runtime.inputs import by_name, shard_shape
from autopar.runtime.local import Local
from autopar.runtime.placement import AxisType, parse_placement
from autopar.runtime.rank import Rank
from autopar.runtime.redistributing import redistribute

Restore = Callable[[Sequence[Any]], Any]

_WHOLE = AxisType("I")


class _Came(NamedTuple):
    """How inputs came: as "whole", "DTensor" or "local", on which mesh, and how the rows of the first are cut."""

    form: str
    device_mesh: DeviceMesh | None
    rows: int
    types: tuple[AxisType, ...]


class PartRank(Rank):
    """This rank's part of a part of a model. Called, it returns what the model's forward does."""

    _restore: Restore
    _call: Callable[[], _CalledPart | None]

    def train_step(self, *inputs: Tensor, local: bool = False, **named_inputs: Tensor) -> Tensor:
        """Raises ProgramError: a part has no loss."""
        raise ProgramError(
            "expected a whole model to train a step of, found a part of one; call it, and backward of your loss"
        )

    def _built_again(self) -> Rank:
        copy = PartRank(type(self._locals[0].program)(self._mesh), self._mesh)
        copy.__dict__.update(_restore=self._restore, _call=_no_run)
        return copy

    def forward(self, *inputs: Any, local: bool = False, **named_inputs: Any) -> Any:
        """The part's outputs, as the inputs came: whole, as DTensors, or if `local` as this rank's slices.

        With gradients enabled, each call's backward pass must come before the next call. Raises ProgramError for inputs
        of another shape, dtype or layout than the program takes.
        """
        values = by_name(self._declared, inputs, named_inputs)
        came = self._came(values, local)
        specs = {spec.name: spec for spec in self._locals[0].program.INPUTS}
        own = {name: self._brought(specs[name], value, came) for name, value in values.items()}
        outputs = self._run_part(values, own, came)
        return self._restore([self._taken(x, came) for x in outputs])

    # Inputs ----------------------------------------

    def _came(self, values: Mapping[str, Any], local: bool) -> _Came:
        distributed = [value for value in values.values() if isinstance(value, DTensor)]
        if distributed and local:
            raise ProgramError("expected DTensors or local=True, found both; a DTensor says itself how it is placed")
        first = next((spec for spec in self._locals[0].program.INPUTS if spec.shape), None)
        rows = first.shape[0] if first is not None else -1
        types: tuple[AxisType, ...] = ()
        if first is not None:
            placed = parse_placement(first.placement, len(self._mesh.axes))
            types = tuple(type_ if type_ == AxisType("S", 0) else _WHOLE for type_ in placed)
        if not distributed:
            return _Came("local" if local else "whole", None, rows, types)
        mesh = distributed[0].device_mesh
        self._check_mesh(mesh)
        return _Came("DTensor", mesh, rows, types)

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        own = self._mesh.device_mesh
        sizes = tuple(axis.size for axis in self._mesh.axes)
        if own is None or tuple(mesh.shape) != sizes or not torch.equal(mesh.mesh.cpu(), own.mesh.cpu()):
            axes = " × ".join(f"{axis.name}={axis.size}" for axis in self._mesh.axes)
            raise ProgramError(
                f"expected DTensors on the program's mesh ({axes}), found one on {mesh}; make them on the mesh that "
                "the part was built with, or give whole tensors"
            )

    def _brought(self, spec: Input, value: Any, came: _Came) -> Tensor:
        """The input as this rank's part of the program takes it, from the type that it came in."""
        wanted = parse_placement(spec.placement, len(self._mesh.axes))
        if isinstance(value, DTensor):
            have = self._types_of(spec, value)
            if tuple(value.shape) != spec.shape:
                raise _wrong_shape(spec, "a DTensor of", spec.shape, value)
            local = value.to_local()
        elif came.form == "DTensor" or not isinstance(value, Tensor):
            what = type(value).__name__ if not isinstance(value, Tensor) else "a plain tensor"
            raise ProgramError(
                f"input {spec.name}: expected a tensor, and of inputs of which one is a DTensor all as DTensors, found "
                f"{what}; distribute it, with Replicate() where every rank has all of it"
            )
        elif came.form == "local":
            have = tuple(type_ if type_.is_shard else _WHOLE for type_ in wanted)
            shape, local = shard_shape(spec, 1, self._mesh), value
            if tuple(value.shape) != shape:
                raise _wrong_shape(spec, "this rank's shard,", shape, value)
        else:
            have, local = tuple(_WHOLE for _ in wanted), value
            if tuple(value.shape) != spec.shape:
                raise _wrong_shape(spec, "the whole tensor (a shard goes with local=True),", spec.shape, value)
        if value.dtype != spec.dtype:
            raise ProgramError(f"input {spec.name}: expected {spec.dtype}, found {value.dtype}; convert it")
        return self._converted(local, have, wanted, f"input {spec.name}")

    def _types_of(self, spec: Input, value: DTensor) -> tuple[AxisType, ...]:
        found = []
        for axis, placement in zip(self._mesh.axes, value.placements, strict=True):
            if isinstance(placement, Shard) and type(placement) is Shard:
                if spec.shape[placement.dim] % axis.size:
                    raise ProgramError(
                        f"input {spec.name}: expected a dim that the axis divides, found {spec.shape[placement.dim]} "
                        f"on {axis.name}={axis.size}; give it as Replicate()"
                    )
                found.append(AxisType("S", placement.dim))
            elif isinstance(placement, Replicate):
                found.append(_WHOLE)
            else:
                raise ProgramError(
                    f"input {spec.name}: expected Shard or Replicate on axis {axis.name}, found {placement}; "
                    "redistribute it first"
                )
        return tuple(found)

    def _converted(
        self, x: Tensor, have: Sequence[AxisType], wanted: Sequence[AxisType], what: str
    ) -> Tensor:  # fmt: skip
        """Axis by axis, the outer one first. Dims that several axes cut change on none of them but from or to whole."""
        axes = self._mesh.batch_axes
        for number, (axis, source, target) in enumerate(zip(axes, have, wanted, strict=True)):
            if source == target or axis.size == 1:
                continue
            inner = [have[other].dim for other in range(number + 1, len(axes)) if have[other].is_shard]
            if source.is_shard and source.dim in inner:
                raise ProgramError(
                    f"{what}: expected axes that cut other dims than {source.dim}, which {axis.name} and another cut, "
                    f"found {source} where the program takes {target}; redistribute it first"
                )
            x = redistribute(x, axis, f"{source} -> {target}")
        return x

    # The call ----------------------------------------

    def _run_part(self, values: Mapping[str, Any], own: Mapping[str, Tensor], came: _Came) -> list[Tensor]:
        """The whole outputs. values: as they came, to be compared among ranks; own: brought to the program's types."""
        is_whole = came.form == "whole"
        given = {name: (values[name] if is_whole else x).detach() for name, x in own.items()}
        names = [spec.name for spec in self._locals[0].program.INPUTS]
        differentiable = [own[name] for name in names]
        if not torch.is_grad_enabled():
            with self._own_precision():
                (microbatches,) = self._prepare((), given, not is_whole, trains=False)
                run = _CalledPart(self._locals[0], microbatches, [False] * len(names))
                outputs = run.forward()
                run.part.finish_late()
                return [x.detach() for x in outputs]
        held = self._call()
        if held is not None and not held.is_done:
            raise ProgramError(
                "expected the backward pass of the last call before the next one, found none; call what has no "
                "backward pass under torch.no_grad()"
            )
        with self._own_precision(), torch.enable_grad():
            (microbatches,) = self._prepare((), given, not is_whole, trains=True)
        run = _CalledPart(self._locals[0], microbatches, [x.requires_grad for x in differentiable])
        self.__dict__["_call"] = weakref.ref(run)
        stored = list(self._state.parameters.values())
        trains = any(parameter.tensor.requires_grad for parameter in stored)
        anchor = torch.zeros((), requires_grad=trains)
        found = _PartFunction.apply(run, stored, anchor, *differentiable)  # type: ignore[no-untyped-call] # torch's
        return list(found)

    def _taken(self, x: Tensor, came: _Came) -> Any:
        """An output as the inputs came."""
        if came.form == "whole":
            return x
        has_rows = x.dim() > 0 and x.size(0) == came.rows
        types = came.types if has_rows else tuple(_WHOLE for _ in came.types)
        shape, stride = x.shape, x.stride()
        local = self._converted(x, [_WHOLE for _ in types], types, "an output") if x.is_floating_point() else x
        if not x.is_floating_point():
            types = tuple(_WHOLE for _ in types)
        if came.form == "local" or came.device_mesh is None:
            return local
        placements: list[Placement] = [Shard(type_.dim) if type_.is_shard else Replicate() for type_ in types]
        return DTensor.from_local(local, came.device_mesh, placements, run_check=False, shape=shape, stride=stride)


class _CalledPart:
    """One call: the program's forward pass, and the backward pass that may follow."""

    def __init__(self, part: Local, microbatches: list[tuple[Tensor, ...]], needs: list[bool]) -> None:
        self.part, self.is_done = part, False
        (inputs,) = microbatches
        pairs = zip(inputs, needs, strict=True)
        self.inputs = tuple(x.detach().requires_grad_() if wanted else x for x, wanted in pairs)
        self.outputs: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[Tensor, ...]:
        """The outputs without the loss that stands in for the user's."""
        self.part.begin_step([self.inputs])
        try:
            returned = self.part.forward(0, self.inputs)
        finally:
            self.part.end_pass()
        comm.finish_late(self.part.mesh)
        self.outputs = tuple(returned[1:])
        return self.outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs; those of parameters are at home then."""
        pairs = [(x, g) for x, g in zip(self.outputs, gradients, strict=True) if g is not None and x.requires_grad]
        try:
            if pairs:
                outputs, given = zip(*pairs, strict=True)
                self.part.backward(0, lambda: torch.autograd.backward(outputs, given))
            else:
                self.part.backward_of_nothing(0)
        finally:
            self.part.end_pass()
            self.is_done = True
        self.part.end_step()
        self.outputs = ()
        return [x.grad if x.requires_grad else None for x in self.inputs]


class _PartFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: _CalledPart, stored: Sequence[Any], anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.stored, ctx.dtypes = run, stored, [x.dtype for x in inputs]
        ctx.set_materialize_grads(False)
        for parameter in stored:
            parameter.begin_step()
        with torch.enable_grad():
            outputs = run.forward()
        whole = tuple(x.detach() for x in outputs)
        ctx.mark_non_differentiable(*(x for x, made in zip(whole, outputs, strict=True) if not made.requires_grad))
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        with torch.enable_grad():
            found = ctx.run.backward(gradients)
        for parameter in ctx.stored:
            parameter.publish_gradient()
        made = (None if g is None else g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True))
        return None, None, None, *made


def _no_run() -> None:
    return None


def _wrong_shape(spec: Input, what: str, shape: tuple[int, ...], value: Tensor) -> ProgramError:
    return ProgramError(
        f"input {spec.name}: expected {what} {tuple(shape)}, found {tuple(value.shape)}; convert it, or plan again "
        "with such an example"
    )


def build_part(
    program: type[Program], device_mesh: DeviceMesh | None, device: str | None, restore: Restore
) -> PartRank:  # fmt: skip
    """This rank's part of the program of a part. restore: what forward returns, of its tensors."""
    rank = build(program, device_mesh, device, rank_type=PartRank)
    assert isinstance(rank, PartRank), "as it was asked for"
    rank.__dict__.update(_restore=restore, _call=_no_run)
    return rank
