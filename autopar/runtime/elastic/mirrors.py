"""Which pieces go to other nodes as well: those that too few nodes hold, and that would be lost with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from autopar.runtime.elastic.held import HeldState, Key, Sizes, Whole
from autopar.runtime.elastic.wire import HostWire

Mirrored = dict[tuple[int, int], list[Key]]
"""By (from, to): the pieces, in order."""


def mirrored(sizes: Sequence[Sequence[Sizes]], nodes: Sequence[str], mirrors: int) -> Mirrored:
    """What each rank sends to which. sizes, nodes: what each rank holds, and the node it is on.

    Each piece is to be on one node more than there are mirrors: so many may be lost at once. The first rank that holds
    it sends it, to the next ranks that are on further nodes.
    """
    holders: dict[Key, list[int]] = {}
    for rank, own in enumerate(sizes):
        for key, _ in own:
            holders.setdefault(key, []).append(rank)
    found: Mirrored = {}
    for key, ranks in sorted(holders.items()):
        known = {nodes[rank] for rank in ranks}
        for to in _others(ranks[0], nodes, known)[: max(0, mirrors + 1 - len(known))]:
            found.setdefault((ranks[0], to), []).append(key)
    return found


def _others(rank: int, nodes: Sequence[str], known: Collection[str]) -> list[int]:
    """The next ranks on further nodes, one a node."""
    found: dict[str, int] = {}
    for step in range(1, len(nodes)):
        other = (rank + step) % len(nodes)
        if nodes[other] not in known:
            found.setdefault(nodes[other], other)
    return list(found.values())


def send_mirrored(
    held: HeldState, sent: Mirrored, every: Sequence[Mapping[Key, tuple[int, ...]]], whole: Mapping[str, Whole],
    wire: HostWire,
) -> HeldState:  # fmt: skip
    """Sends what this rank is to send, and returns what it receives. every: the shapes of what each rank holds."""
    outgoing = {to: flat([held.pieces[key] for key in keys]) for (own, to), keys in sent.items() if own == wire.rank}
    due = {source: keys for (source, to), keys in sent.items() if to == wire.rank}
    incoming = {source: sum(size_of(every[source][key], whole[key[0]]) for key in keys) for source, keys in due.items()}
    came = wire.exchange(outgoing, incoming)
    found = HeldState()
    for source, keys in due.items():
        start = 0
        for key in keys:
            shape, kind = every[source][key], whole[key[0]]
            length = size_of(shape, kind)
            found.pieces[key] = of_flat(came[source][start : start + length], shape, kind) if length else _empty(kind)
            found.whole[key[0]] = kind
            start += length
    return found


def flat(pieces: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after the other."""
    own = [piece.contiguous().view(-1).view(torch.uint8) for piece in pieces if piece.numel()]
    return torch.cat(own) if own else torch.empty(0, dtype=torch.uint8)


def size_of(shape: Sequence[int], kind: Whole) -> int:
    """Bytes of a piece."""
    return torch.Size(shape).numel() * dtype_of(kind).itemsize


def of_flat(data: Tensor, shape: Sequence[int], kind: Whole) -> Tensor:
    """A piece of its bytes, which may begin anywhere."""
    return data.clone().view(dtype_of(kind)).view(tuple(shape))


def dtype_of(kind: Whole) -> torch.dtype:
    """Of what is no tensor, bytes."""
    found: torch.dtype = torch.uint8 if kind is None else getattr(torch, kind[1])
    return found


def _empty(kind: Whole) -> Tensor:
    return torch.empty(0, dtype=dtype_of(kind))
