"""From the inputs of a whole step to the local inputs of each microbatch, and its outputs back.

The microbatch dim is cut first, then each microbatch is cut over the axes by the input's placement. So a
rank's shard of a step is its parts of all microbatches, one after the other along the microbatch dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.declare import Fields, Given, Input, Pipeline, Program
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import RankMesh
from autopar.runtime.placement import local_shape, local_slices, parse_placement


def split_named(
    program: type[Program], values: Mapping[str, Tensor], mesh: RankMesh, local: bool
) -> list[tuple[Tensor, ...]]:
    """The local inputs of each microbatch, in the order of the program's INPUTS.

    `values` are the global batch, or this rank's shard of it if `local`, by name (`by_name`). Raises ProgramError
    naming the input whose shape or dtype is not what the program was emitted for.
    """
    count = program.MICROBATCHES
    columns = [_split(spec, values[spec.name], mesh, count, local) for spec in program.INPUTS]
    return [tuple(column[index] for column in columns) for index in range(count)]


def check_unread(pipeline: type[Pipeline], values: Mapping[str, Any]) -> None:
    """The whole inputs that no stage of this rank reads: where the ranks that read them refuse, all must.

    The others would wait for them. None stands for an input that is not there, as a rank may do without it.
    """
    for spec in pipeline.INPUTS:
        if values[spec.name] is not None:
            _check(spec, values[spec.name], spec.shape, "the global batch")


def microbatch(x: Tensor, dim: int, index: int, count: int) -> Tensor:
    """One of `count` equal parts along `dim`: a microbatch's part of a tensor that is made for the whole step."""
    size = x.size(dim) // count
    return x.narrow(dim, index * size, size)


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what each microbatch has."""
    return torch.stack(list(parts)).sum(0)


def in_first(x: Tensor, index: int) -> Tensor:
    """What all microbatches have alike, as a summand of the first: zeros in the others, with gradients of zeros."""
    return x if index == 0 else x * 0


def microbatch_shape(spec: Input, count: int) -> tuple[int, ...]:
    """Global shape of one microbatch of the input."""
    if spec.microbatch_dim is None:
        return spec.shape
    size = spec.shape[spec.microbatch_dim]
    if size % count:
        raise ProgramError(f"input {spec.name}: {size} rows do not divide into {count} microbatches")
    return tuple(n // count if dim == spec.microbatch_dim else n for dim, n in enumerate(spec.shape))


def shard_shape(spec: Input, count: int, mesh: RankMesh) -> tuple[int, ...]:
    """Shape of this rank's shard of the input, over all microbatches."""
    types = parse_placement(spec.placement, len(mesh.axes))
    shape = local_shape(microbatch_shape(spec, count), types, mesh.batch_axes)
    return tuple(n * count if dim == spec.microbatch_dim else n for dim, n in enumerate(shape))


def by_name(program: type[Program | Pipeline], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inputs by name: given so, or as the arguments that the program was planned for.

    Raises ProgramError where they are not those that are declared.
    """
    names = [spec.name for spec in program.INPUTS]
    expected = program.ARGUMENTS or {name: Given(name) for name in names}
    if program.ARGUMENTS and not args and set(kwargs) == set(names) != set(expected):
        return dict(kwargs)
    values = dict(zip(expected, args, strict=False)) | dict(kwargs)
    if len(args) > len(expected) or set(values) != set(expected) or set(list(expected)[: len(args)]) & set(kwargs):
        raise ProgramError(
            f"expected the inputs {', '.join(expected)}; found {len(args)} by position and "
            f"{', '.join(kwargs) or 'none'} by name"
        )
    found: dict[str, Tensor] = {}
    for name, tree in expected.items():
        _match(tree, values[name], name, found)
    return found


def _match(tree: Any, value: Any, where: str, found: dict[str, Tensor]) -> None:
    """Finds the inputs in an argument. Raises ProgramError where it is not as the program was planned for."""
    if isinstance(tree, Given):
        found[tree.name] = value
    elif isinstance(tree, (Mapping, list, tuple)):
        expected, parts = _parts(tree), _parts(value)
        if parts is None or expected is None or (list(expected) != list(parts) and set(expected) != set(parts)):
            have = type(value).__name__ if parts is None else f"one of {', '.join(map(str, parts)) or 'nothing'}"
            raise ProgramError(
                f"input {where}: expected a {_kind(tree)} of {', '.join(map(str, expected or ())) or 'nothing'}, found "
                f"{have}; give it as it was given when the program was planned, or plan again"
            )
        for key, item in expected.items():
            _match(item, parts[key], f"{where}.{key}", found)
    elif isinstance(value, Tensor) or type(value) is not type(tree) or repr(value) != repr(tree):
        have = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ProgramError(
            f"input {where}: expected {tree!r}, for which the program was planned, found {have}; plan again with it, "
            "or with a tensor in its place"
        )


def _kind(tree: Any) -> str:
    return "dataclass" if isinstance(tree, Fields) else "dict" if isinstance(tree, Mapping) else type(tree).__name__


def _parts(value: Any) -> dict[Any, Any] | None:
    """What a container holds, by key, field or position; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else None


def _split(spec: Input, value: Tensor, mesh: RankMesh, count: int, local: bool) -> list[Tensor]:
    own = shard_shape(spec, count, mesh)
    if local:
        _check(spec, value, own, "this rank's shard")
    else:
        _check(spec, value, spec.shape, "the global batch", f" (this rank's shard, {own}, goes with local=True)")
    value = value.to(mesh.device, non_blocking=True)
    parts = [value] * count if spec.microbatch_dim is None else list(_chunks(value, count, spec.microbatch_dim))
    if local:
        return [part.to(spec.compute or spec.dtype).contiguous() for part in parts]
    types = parse_placement(spec.placement, len(mesh.axes))
    slices = local_slices(microbatch_shape(spec, count), types, mesh.batch_axes)
    return [part[slices].to(spec.compute or spec.dtype).contiguous() for part in parts]


def _chunks(value: Tensor, count: int, dim: int) -> Sequence[Tensor]:
    return torch.split(value, value.size(dim) // count, dim) if value.size(dim) else [value] * count


def _check(spec: Input, value: Any, shape: tuple[int, ...], what: str, other: str = "") -> None:
    """Raises ProgramError for what is no tensor of this shape and the input's dtype. what: that it should be. other:
    what it could be as well."""
    if not isinstance(value, Tensor):
        raise ProgramError(f"input {spec.name}: expected a tensor, found {type(value).__name__}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ProgramError(
            f"input {spec.name}: expected a tensor that needs no gradient, found requires_grad=True; each rank would "
            "have a part of it. Detach it, or make it a parameter of the model"
        )
    if tuple(value.shape) != tuple(shape) or value.dtype != spec.dtype:
        raise ProgramError(
            f"input {spec.name}: expected {what}, {tuple(shape)} {spec.dtype}{other}; found {tuple(value.shape)} "
            f"{value.dtype}; convert it, or plan again with such an example"
        )


def join_outputs(outputs: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """One result of all microbatches: scalars are summed, other tensors joined along the microbatch dim."""
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], Tensor):
        return _join(outputs, dims[0] if dims else 0)
    columns = zip(*outputs, strict=True)
    return tuple(_join(column, dims[i] if i < len(dims) else 0) for i, column in enumerate(columns))


def _join(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    if parts[0].dim() == 0:
        return total(parts)
    return parts[0] if dim is None else torch.cat(list(parts), dim)
