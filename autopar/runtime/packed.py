"""Packed parameters in the model's own names and shapes: what a program stores merged, split or transposed.

stored   attn.q_k_v.weight (96, 32), pieces ..q.weight, ..k.weight, ..v.weight
model's  attn.q.weight (32, 32), attn.k.weight (32, 32), attn.v.weight (32, 32)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.declare import Buffer, Parameter, Piece

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Where a piece lies: `source` in the model's parameter of this name and shape, `target` in what is stored."""

    name: str
    shape: tuple[int, ...]
    source: Slices
    target: Slices
    transposed: bool

    def of_model(self, tensor: Tensor) -> Tensor:
        """The piece of the model's parameter, as it is stored; shares its memory."""
        piece = tensor[self.source]
        return piece.t() if self.transposed else piece

    def of_stored(self, tensor: Tensor) -> Tensor:
        """The piece of what is stored, as the model has it; shares its memory."""
        piece = tensor[self.target]
        return piece.t() if self.transposed else piece


def parts_of(name: str, declared: Parameter | Buffer) -> Iterator[PackedPart]:
    """The pieces of a stored parameter of this name; none for one of the model's own."""
    if isinstance(declared, Buffer):
        return
    start = 0
    for piece in declared.pieces:
        source = _source(piece)
        target = [slice(0, length) for length in declared.shape]
        if target:
            lengths = [span.stop - span.start for span in source]
            length = (lengths[::-1] if piece.transposed else lengths)[declared.packed_dim]
            target[declared.packed_dim] = slice(start, start + length)
            start += length
        yield PackedPart(absolute_name(name, piece.name), piece.shape, source, tuple(target), piece.transposed)


def _source(piece: Piece) -> Slices:
    source = [slice(0, length) for length in piece.shape]
    if piece.length is not None:
        source[piece.dim] = slice(piece.start, piece.start + piece.length)
    return tuple(source)


def absolute_name(stored: str, relative: str) -> str:
    """The name in the model that a piece of a stored parameter states: each dot but the first leads a module up."""
    own = relative.lstrip(".")
    module = stored.split(".")[: -max(len(relative) - len(own), 1)]
    return ".".join([*module, own])


class Packings:
    """All that a program declares, between the names that it stores and the model's."""

    def __init__(self, declared: Mapping[str, Parameter | Buffer]) -> None:
        self._declared = declared
        found = {name: list(parts_of(name, item)) for name, item in declared.items()}
        self.parts = {name: parts for name, parts in found.items() if parts}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The model's names with their shapes."""
        found: dict[str, tuple[int, ...]] = {}
        for name, item in self._declared.items():
            own = self.parts.get(name)
            found |= {name: item.shape} if own is None else {part.name: part.shape for part in own}
        return found

    def sources(self, name: str) -> list[str]:
        """The model's names of what a stored tensor is made of: its own, if it is not packed."""
        return [part.name for part in self.parts[name]] if name in self.parts else [name]

    def unpacked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by the model's names, of those by stored names, which are used up; zeros for what is missing
        of a tensor of the model."""
        found: dict[str, Tensor] = {}
        for name in list(tensors):
            whole = tensors.pop(name)
            if name not in self.parts:
                found[name] = whole
            for part in self.parts.get(name, ()):
                if part.name not in found:
                    found[part.name] = whole.new_zeros(part.shape)
                found[part.name][part.source].copy_(part.of_stored(whole))
        return found

    def packed(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A stored tensor, whole, of those of the model."""
        if name not in self.parts:
            return tensors[name]
        declared, first = self._declared[name], tensors[self.parts[name][0].name]
        whole = torch.empty(declared.shape, dtype=declared.dtype, device=first.device)
        for part in self.parts[name]:
            whole[part.target].copy_(part.of_model(tensors[part.name]))
        return whole
