"""Loads a state from what processes hold, as torch.distributed.checkpoint loads one from files.

What each rank lacks follows from the slices that it needs and those that are held, as torch plans it. It is taken from
the rank itself, from one of its node, or else from the n-th of those that hold it, n being the rank's number; all that
goes from one to another goes in one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from autopar.runtime.elastic.held import HeldState, Key, Sizes, Whole, metadata_of
from autopar.runtime.elastic.mirrors import flat, of_flat, size_of
from autopar.runtime.elastic.wire import HostWire

Asked = tuple[Key, tuple[int, ...] | None, tuple[int, ...] | None]
"""A piece, and the part of it that is asked for, by offset and length of each dim; all of it where these are None."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is held of one state. every: the pieces that each process holds, with their shapes. nodes: where each is."""

    held: HeldState
    every: Sequence[Sequence[Sizes]]
    whole: dict[str, Whole]
    nodes: Sequence[str]


@dataclass(slots=True)
class _WantedPieces:
    asked: list[Asked] = field(default_factory=list)
    items: list[ReadItem] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class HeldReader(StorageReader):
    """Each process that loads has one; those that only serve call `serve`.

    state_bytes: what was received of tensors of parameters, buffers and what optimizers keep, but for single numbers.
    """

    def __init__(self, wire: HostWire, holdings: Holdings) -> None:
        self._wire, self._holdings = wire, holdings
        self.state_bytes = 0
        self._shapes = [dict(own) for own in holdings.every]
        self._holders: dict[Key, list[int]] = {}
        for number, own in enumerate(self._shapes):
            for key in own:
                self._holders.setdefault(key, []).append(number)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is to be done."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is held, by all together."""
        every = {key: shape for own in self._holdings.every for key, shape in own}
        found = metadata_of(self._holdings.whole, every.items())
        found.storage_meta = StorageMeta()
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As torch has made it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As torch has made them."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Memory has no path."""
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Asks all at once for what this rank lacks, and fills in what comes."""
        wanted: dict[int, _WantedPieces] = {}
        for item in plan.items:
            self._want(item, wanted)
        own = wanted.pop(self._wire.rank, _WantedPieces())
        came = self._exchange(wanted)
        pieces = [flat([part_of(self._holdings.held, asked)]) for asked in own.asked]
        for item, piece in zip(own.items, pieces, strict=True):
            self._fill(item, piece, planner)
        for source, one in wanted.items():
            start = 0
            for item, length in zip(one.items, one.lengths, strict=True):
                self._fill(item, came[source][start : start + length], planner)
                start += length
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def serve(self) -> None:
        """Takes part with nothing to ask for."""
        self._exchange({})

    def _exchange(self, wanted: dict[int, _WantedPieces]) -> dict[int, Tensor]:
        every = self._wire.gather({source: one.asked for source, one in wanted.items()})
        outgoing = {
            to: flat([part_of(self._holdings.held, asked) for asked in asks[self._wire.rank]])
            for to, asks in enumerate(every) if self._wire.rank in asks
        }  # fmt: skip
        self.state_bytes += sum(
            length for one in wanted.values() for (key, lengths, _), length in zip(one.asked, one.lengths, strict=True)
            if lengths and key[0].startswith(("model.", "optimizer.state."))
        )  # fmt: skip
        return self._wire.exchange(outgoing, {source: sum(one.lengths) for source, one in wanted.items()})

    def _want(self, item: ReadItem, wanted: dict[int, _WantedPieces]) -> None:
        name = item.storage_index.fqn
        kind = self._holdings.whole[name]
        if item.type == LoadItemType.BYTE_IO:
            key: Key = (name, ())
            asked: Asked = (key, None, None)
        else:
            offset = item.storage_index.offset
            assert kind is not None
            key = (name, tuple(offset) if offset is not None else (0,) * len(kind[0]))
            asked = (key, tuple(item.storage_offsets), tuple(item.lengths))
        source = self._source(key)
        shape = self._shapes[source][key] if asked[2] is None else asked[2]
        one = wanted.setdefault(source, _WantedPieces())
        one.asked.append(asked)
        one.items.append(item)
        one.lengths.append(size_of(shape, kind))

    def _source(self, key: Key) -> int:
        holders, own = self._holders[key], self._wire.rank
        if own in holders:
            return own
        nodes = self._holdings.nodes
        near = [holder for holder in holders if nodes[holder] == nodes[own]] or holders
        return near[own % len(near)]

    def _fill(self, item: ReadItem, data: Tensor, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, BytesIO(data.numpy().tobytes()))
            return
        target = planner.resolve_tensor(item).detach()
        kind = self._holdings.whole[item.storage_index.fqn]
        target.copy_(of_flat(data, item.lengths, kind))
        planner.commit_tensor(item, target)


def part_of(held: HeldState, asked: Asked) -> Tensor:
    """What is asked for of a piece that is held."""
    key, offsets, lengths = asked
    piece = held.pieces[key]
    for dim, (offset, length) in enumerate(zip(offsets or (), lengths or (), strict=True)):
        piece = piece.narrow(dim, offset, length)
    return piece.detach() if isinstance(piece, torch.Tensor) else piece
