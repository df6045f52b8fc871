"""Which parameters are gathered, and which gradients go home, together: the runtime packs them so, and the simulator
foretells it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

LONE_BYTES = 1 << 20  # a tensor from this size on is worth a collective of its own
BUCKET_BYTES = 25 << 20  # DDP's choice: large enough to reach the link's bandwidth, small enough to overlap
FIRST_BUCKET_BYTES = 1 << 20  # the first to be complete is small, so that the link is busy early
PIECE_BYTES = 1 << 18  # of a sum over servers: what is on its way back while the next is on its way there
BEHIND = 2  # steps that a rank may be behind under backup before others wait for it; they keep as many means
SAMPLED = 16  # values, of so many parameters, by which updates of copies are seen that nothing else tells of
MAX_IN_FLIGHT = 3  # buckets that hold a gradient as it is made beside what is stored, of another size


BACKUP_NUMBERS = 4  # the loss, what it is divided by, and two wishes; after them, which parameters have a gradient
BLOCK = 256  # values that share a scale, where gradients are sent in 8 bits


def backup_message_bytes(gradient_bytes: int, num_parameters: int) -> int:
    """Of what a rank sends of a step under backup: the gradients, and before them so many numbers of 8 bytes."""
    return gradient_bytes + 8 * (BACKUP_NUMBERS + num_parameters)


def padded_length(count: int, ranks: int) -> int:
    """Of a buffer that is sent in 8 bits: whole blocks for each rank."""
    return -(-count // (ranks * BLOCK)) * ranks * BLOCK


def num_kept(count: int, share: float) -> int:
    """How many of the values are sent, of the largest."""
    return max(1, round(count * share))


def compressed_matrix(shape: tuple[int, ...], rank: int) -> int:
    """The rank in which a gradient of that shape is sent; 0 where it is none of a matrix, or no smaller so."""
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    return rank if len(shape) > 1 and 2 * rank * (rows + columns) <= rows * columns else 0


class BucketSizes(NamedTuple):
    """From which size on a tensor travels alone, and the most that the first bucket of a way takes, and later ones."""

    lone_bytes: int
    first_bytes: int
    bucket_bytes: int


BUCKET_SIZES = BucketSizes(LONE_BYTES, FIRST_BUCKET_BYTES, BUCKET_BYTES)

T = TypeVar("T")


def pack_gathers(
    items: Iterable[T], way: Callable[[T], Hashable], num_bytes: Callable[[T], int], limits: BucketSizes = BUCKET_SIZES
) -> list[list[T]]:  # fmt: skip
    """Groups what is gathered at the begin of a step, in order of first use; large ones go alone.

    A bucket travels where its first item would, so that nobody waits for what is used later: small ones of the same way
    that are used later come along. The first of a way is small, so that it is there early.
    """
    groups: list[list[T]] = []
    latest: dict[Hashable, tuple[list[T], int, int]] = {}  # by way: the bucket, its bytes, and the most that it takes
    for item in items:
        size, key = num_bytes(item), way(item)
        group, filled, limit = latest.get(key, ([], 0, limits.first_bytes))
        if size >= limits.lone_bytes:
            groups.append([item])
            continue
        if filled + size > limit:
            group, filled, limit = [], 0, limits.bucket_bytes
        if not group:
            groups.append(group)
        group.append(item)
        latest[key] = group, filled + size, limit
    return groups


def pack_gradients(
    items: Iterable[T],
    way: Callable[[T], Hashable],
    num_bytes: Callable[[T], int],
    is_summed_first: Callable[[T], bool],
) -> list[list[T]]:
    """Groups what takes the same way home, in order; large ones go alone unless they are summed first.

    A bucket is closed before it would grow too large, not after: the last one, which nothing hides, stays small.
    """
    closed: list[list[T]] = []
    open_groups: dict[Hashable, list[T]] = {}
    limits: dict[Hashable, int] = {}
    filled: dict[Hashable, int] = {}
    for item in items:
        size = num_bytes(item)
        if size >= LONE_BYTES and not is_summed_first(item):
            closed.append([item])
            continue
        key = way(item)
        group = open_groups.setdefault(key, [])
        if group and filled[key] + size > limits.get(key, FIRST_BUCKET_BYTES):
            closed.append(group[:])
            limits[key] = BUCKET_BYTES
            group.clear()
        filled[key] = size + (filled[key] if group else 0)
        group.append(item)
    return closed + [group for group in open_groups.values() if group]
