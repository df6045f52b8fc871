"""Parameters of the model, whole, as an optimizer takes them: read from what ranks store, and written back there.

A parameter is stored in shards, on the ranks of one stage, or in pieces of packed ones; here it has its own name and
shape. `pick` says what is meant of each stored parameter: its values, its gradient, or a state cut like it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime import comm
from autopar.runtime.declare import Parameter
from autopar.runtime.packed import PackedPart
from autopar.runtime.placement import local_slices
from autopar.runtime.slices import slice_of
from autopar.runtime.state import ProgramState
from autopar.runtime.stored import StoredParameter, gathered, local_part

Pick = Callable[[StoredParameter], Tensor]


@dataclass(frozen=True, slots=True)
class Source:
    """A stored parameter that has all of the model's, or the part of it that is told."""

    stored: str
    declared: Parameter
    part: PackedPart | None


@dataclass(frozen=True, slots=True, eq=False)
class WholeParameter:
    """A parameter of the model. is_everywhere: ranks of all stages read it together; otherwise those of its own."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[Source, ...]
    state: ProgramState
    is_everywhere: bool

    @property
    def own(self) -> list[StoredParameter]:
        """What this rank stores of it."""
        held = self.state.parameters
        return [held[source.stored] for source in self.sources if source.stored in held]

    @property
    def is_packed(self) -> bool:
        return any(source.part is not None for source in self.sources)

    @property
    def is_local(self) -> bool:
        """Whether each rank that reads it stores all of it, in one piece."""
        if self.is_everywhere or self.is_packed:
            return False
        (stored,) = self.own
        return stored.local.shape == self.shape and all(
            axis.size == 1 for axis, kind in zip(stored.mesh.axes, stored.types, strict=True) if kind.is_shard
        )

    @property
    def source_rank(self) -> int | None:
        """The rank that tells those of other stages; None where there are none that ask."""
        return self.state.source_of(self.sources[0].stored) if self.is_everywhere else None

    @property
    def speaks(self) -> bool:
        """Whether this rank's stage is the one that tells."""
        return not self.is_everywhere or self.state.speaks_for(self.sources[0].stored)

    @torch.no_grad()
    def read(self, pick: Pick) -> Tensor:
        """The whole of it, on all ranks that read together."""
        found = [(source.part, self._whole(source, pick)) for source in self.sources]
        if found[0][0] is None:
            return found[0][1]
        whole = found[0][1].new_zeros(self.shape)
        for part, tensor in found:
            assert part is not None, "a parameter is stored by its own name, or in pieces alone"
            whole[part.source].copy_(part.of_stored(tensor))
        return whole

    def _whole(self, source: Source, pick: Pick) -> Tensor:
        name, declared = source.stored, source.declared
        if self.speaks:
            stored = self.state.parameters[name]
            whole = gathered(local_part(pick(stored)), declared.shape, stored.types, stored.mesh)
        else:
            whole = torch.empty(declared.shape, dtype=declared.dtype, device=self.state.mesh.device)
        return self.told(whole, self.state.source_of(name) if self.is_everywhere else None)

    def told(self, whole: Tensor, source: int | None) -> Tensor:
        """What the rank that speaks has, on those of all stages."""
        if source is not None and self.state.group is not None:
            comm.broadcast(whole, source, self.state.group)
        return whole

    @torch.no_grad()
    def write(self, whole: Tensor, pick: Pick) -> None:
        """Stores what this rank has of it."""
        for source in self.sources:
            stored = self.state.parameters.get(source.stored)
            if stored is None:
                continue
            local, own = local_part(pick(stored)), local_slices(stored.declared.shape, stored.types, stored.mesh.axes)
            if source.part is None:
                local.copy_(whole[own])
                continue
            found = slice_of(source.part, own, local)
            if found is not None:
                offset, view = found
                view.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=True))])


def whole_parameters(state: ProgramState, is_everywhere: bool) -> dict[str, WholeParameter]:
    """All parameters of the model by name, in its order; those that this rank stores, unless everywhere."""
    declared = state.declared
    sources: dict[str, list[Source]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, item in declared.items():
        packed = state.packings.parts.get(name)
        parts = [(name, None)] if packed is None else [(part.name, part) for part in packed]
        for own, part in parts:
            sources.setdefault(own, []).append(Source(name, item, part))
            shapes[own], dtypes[own] = (item.shape if part is None else part.shape), item.dtype
    found = {n: WholeParameter(n, shapes[n], dtypes[n], tuple(s), state, is_everywhere) for n, s in sources.items()}
    return {name: entry for name, entry in found.items() if is_everywhere or entry.own}
