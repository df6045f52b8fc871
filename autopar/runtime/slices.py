"""Checkpoints in the model's names, of parameters that are stored packed: each rank writes and reads its own slices.

A rank that stores rows 48 to 96 of `q_k_v.weight` has rows of `q.weight`, of `k.weight` and of `v.weight`. What it has
of each is a chunk at an offset, which `torch.distributed.checkpoint` writes and reads like the shard of a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.runtime.errors import ProgramError
from autopar.runtime.packed import PackedPart, parts_of
from autopar.runtime.placement import local_slices
from autopar.runtime.stored import StoredParameter, local_part
from autopar.runtime.unpickling import unpickled

Path = tuple[str, ...]
"""Where a tensor is in a state: ("model", "q.weight")."""


@dataclass(frozen=True, slots=True)
class Sliced:
    """What this rank has of a tensor of the model, by offset; it shares its memory with what is stored."""

    size: torch.Size
    chunks: dict[torch.Size, Tensor] = field(default_factory=dict)

    def described(self) -> Iterator[ChunkStorageMetadata]:
        """Where the chunks lie."""
        return (ChunkStorageMetadata(offset, tensor.size()) for offset, tensor in self.chunks.items())


def slices_of(parameter: StoredParameter, tensor: Tensor) -> Iterator[tuple[str, Sliced]]:
    """This rank's slices of the model's tensors, of a packed parameter or of a tensor cut like it; those of one part
    of it at a time."""
    own = local_slices(parameter.declared.shape, parameter.types, parameter.mesh.axes)
    local = local_part(tensor).detach()
    for part in parts_of(parameter.name, parameter.declared):
        sliced = Sliced(torch.Size(part.shape))
        found = slice_of(part, own, local)
        if found is not None:
            sliced.chunks[found[0]] = found[1]
        yield part.name, sliced


def slice_of(part: PackedPart, own: tuple[slice, ...], local: Tensor) -> tuple[torch.Size, Tensor] | None:
    """What a rank has of a part, as the model has it, and its offset there; None where it has none."""
    starts, lengths = [], []
    for target, here in zip(part.target, own, strict=True):
        start, end = max(target.start, here.start), min(target.stop, here.stop)
        if start >= end:
            return None
        starts.append(start)
        lengths.append(end - start)
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        local = local.narrow(dim, start - own[dim].start, length)
    inside = [start - target.start for start, target in zip(starts, part.target, strict=True)]
    offset = [s.start + o for s, o in zip(part.source, inside[::-1] if part.transposed else inside, strict=True)]
    return torch.Size(offset), local.t() if part.transposed else local


def merged(found: Iterable[tuple[str, Sliced]]) -> dict[str, Sliced]:
    """All slices of each tensor of the model."""
    merged: dict[str, Sliced] = {}
    for name, sliced in found:
        merged.setdefault(name, Sliced(sliced.size)).chunks.update(sliced.chunks)
    return merged


class SlicesWriter(DefaultSavePlanner):
    """Plans the writing of a state, and of slices beside it, by the paths where they belong."""

    def __init__(self, slices: Mapping[Path, Sliced]) -> None:
        super().__init__()
        self._paths = {".".join(path): path for path in slices}
        self._slices = {".".join(path): sliced for path, sliced in slices.items()}

    def create_local_plan(self) -> SavePlan:
        """The state's plan, and a shard for each slice that this rank has."""
        plan = super().create_local_plan()
        items = [*plan.items, *(item for key, sliced in self._slices.items() for item in _write_items(key, sliced))]
        self.plan = replace(plan, items=items, planner_data={**(plan.planner_data or {}), **self._paths})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """What goes to the file. Raises ProgramError for objects that `load_bytes` would refuse to read."""
        data = super().resolve_data(write_item)
        if isinstance(data, BytesIO):
            unpickled(BytesIO(data.getbuffer()), write_item.index.fqn)
        return data

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written for an item."""
        if index.fqn not in self._slices:
            return super().lookup_object(index)
        assert index.offset is not None, "of a shard"
        return self._slices[index.fqn].chunks[index.offset]


def _write_items(key: str, sliced: Sliced) -> Iterator[WriteItem]:
    for chunk, tensor in zip(sliced.described(), sliced.chunks.values(), strict=True):
        properties = TensorProperties.create_from_tensor(tensor)
        data = TensorWriteData(chunk, properties, sliced.size)
        yield WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class SlicesReader(DefaultLoadPlanner):
    """Plans the reading into a state, and into slices beside it."""

    def __init__(self, slices: Mapping[Path, Sliced]) -> None:
        super().__init__()
        self._slices = {".".join(path): sliced for path, sliced in slices.items()}
        self.metadata: Metadata | None

    def create_local_plan(self) -> LoadPlan:
        """The state's plan, and what fills each slice that this rank has."""
        plan = super().create_local_plan()
        assert self.metadata is not None, "set before a plan is made"
        items = list(plan.items)
        for key, sliced in self._slices.items():
            saved = self.metadata.state_dict_metadata.get(key)
            if not isinstance(saved, TensorStorageMetadata) or saved.size != sliced.size:
                raise ProgramError(f"expected {key} {list(sliced.size)} in the checkpoint, found {saved}")
            items += create_read_items_for_chunk_list(key, saved, list(sliced.described()))
        return replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """As torch's, which would run whatever a pickle asks for; here none has more than plain data and tensors."""
        plain = BytesIO()
        torch.save(unpickled(value, read_item.dest_index.fqn), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What is read into for an item."""
        if index.fqn not in self._slices:
            return super().lookup_tensor(index)
        assert index.offset is not None, "of a slice"
        return self._slices[index.fqn].chunks[index.offset]
