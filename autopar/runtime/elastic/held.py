"""What a rank holds of a training's state, as pieces of tensors by name and offset, as a checkpoint has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from autopar.runtime.slices import Path, Sliced, SlicesWriter

Offset = tuple[int, ...]
Key = tuple[str, Offset]
"""A piece: the name of what it is of, and where it begins there."""

Whole = tuple[Offset, str] | None
"""Shape and dtype of a tensor; None of something else, which is kept as written."""

Sizes = tuple[Key, Offset]
"""A piece, and its shape."""


@dataclass(slots=True)
class HeldState:
    """pieces: on the host. whole: by name, what each is a piece of."""

    pieces: dict[Key, Tensor] = field(default_factory=dict)
    whole: dict[str, Whole] = field(default_factory=dict)

    @property
    def sizes(self) -> list[Sizes]:
        """The pieces and their shapes, in order."""
        return sorted((key, tuple(piece.shape)) for key, piece in self.pieces.items())

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces.values())


def held_of(state: Mapping[str, Any], slices: Mapping[Path, Sliced]) -> HeldState:
    """What this rank has of a state as `save_checkpoint` makes it. The pieces are copies, or may be the state's own."""
    planner = SlicesWriter(slices)
    plain = {name: item.state_dict() if isinstance(item, Stateful) else item for name, item in state.items()}
    planner.set_up_planner(plain, None, is_coordinator=True)
    held = HeldState()
    for item in planner.create_local_plan().items:
        name, data = item.index.fqn, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, BytesIO)
            held.whole[name] = None
            held.pieces[name, ()] = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
            continue
        assert item.tensor_data is not None and isinstance(data, Tensor)
        whole = tuple(item.tensor_data.size)
        held.whole[name] = whole, str(data.dtype).removeprefix("torch.")
        offset = tuple(item.index.offset) if item.index.offset is not None else (0,) * len(whole)
        if data.numel() or not math.prod(whole):
            held.pieces[name, offset] = data.detach().to("cpu").contiguous()
    return held


def metadata_of(whole: Mapping[str, Whole], sizes: Iterable[Sizes]) -> Metadata:
    """The same as torch.distributed.checkpoint describes it. Pieces of one tensor that overlap are those of several
    layouts: the first of them are taken."""
    chunks: dict[str, dict[Offset, Offset]] = {}
    for (name, offset), shape in sorted(sizes):
        known = chunks.setdefault(name, {})
        if not any(_overlap(offset, shape, *other) for other in known.items()):
            known[offset] = shape
    found: dict[str, Any] = {}
    for name, kind in whole.items():
        if kind is None:
            found[name] = BytesStorageMetadata()
            continue
        shape, dtype = kind
        own = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in sorted(chunks.get(name, {}).items())]
        properties = TensorProperties(dtype=getattr(torch, dtype))
        found[name] = TensorStorageMetadata(properties, torch.Size(shape), own)
    return Metadata(found)


def lacking(whole: Mapping[str, Whole], sizes: Iterable[Sizes]) -> list[str]:
    """The names of what is not all there."""
    known = list(sizes)
    there = {key for key, _ in known}
    found = metadata_of(whole, known).state_dict_metadata
    lacks = []
    for name, kind in whole.items():
        tensor = found[name]
        if kind is None or not isinstance(tensor, TensorStorageMetadata):
            if (name, ()) not in there:
                lacks.append(name)
        elif sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(kind[0]) or not tensor.chunks:
            lacks.append(name)
    return lacks


def _overlap(offset: Offset, shape: Offset, other: Offset, other_shape: Offset) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(offset, shape, other, other_shape, strict=True)
    )  # fmt: skip
