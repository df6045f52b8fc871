"""What a rank has of each tensor of the model, however its program packs and places it: slices that share memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from autopar.runtime.packed import parts_of
from autopar.runtime.placement import local_slices
from autopar.runtime.slices import slice_of
from autopar.runtime.state import ProgramState, StoredBuffer
from autopar.runtime.stored import StoredParameter
from autopar.runtime.weights.parts import Region, region_at


@dataclass(frozen=True, slots=True)
class OwnSlice:
    """A slice of a tensor of the model: its name there, where it lies, and its elements, of which a rank may be one of
    several that have them. is_first: whether this one speaks for them."""

    name: str
    region: Region
    values: Tensor
    is_first: bool


def own_slices(state: ProgramState, *, unsaved: bool = False) -> Iterator[OwnSlice]:
    """This rank's slices of all parameters and persistent buffers, if `unsaved` of other buffers too; none where it has
    nothing of a tensor."""
    held: dict[str, StoredParameter | StoredBuffer] = state.persistent()
    if unsaved:
        held |= state.buffers
    for name, stored in held.items():
        axes = stored.mesh.axes
        own = local_slices(stored.declared.shape, stored.types, axes)
        is_copy = any(axis.index for axis, kind in zip(axes, stored.types, strict=True) if not kind.is_shard)
        is_first = state.speaks_for(name) and not is_copy
        for part_name, region, values in _of_stored(stored, own):
            if values.numel():
                yield OwnSlice(part_name, region, values, is_first)


def _of_stored(
    stored: StoredParameter | StoredBuffer, own: tuple[slice, ...]
) -> Iterator[tuple[str, Region, Tensor]]:  # fmt: skip
    local = stored.local.detach()
    parts = list(parts_of(stored.name, stored.declared))
    if not parts:
        yield stored.name, own, local
    for part in parts:
        found = slice_of(part, own, local)
        if found is not None:
            offset, values = found
            yield part.name, region_at(offset, values.shape), values
