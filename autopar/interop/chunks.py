"""Shares a chain of layers out to chunks: the stages in turn on each of P submeshes, from the first to the last in each
round; in schedules that turn back, in every other one from the last to the first.

A step is as long as its busiest submesh, so layers go where there is least, with what comes before and after them (the
embedding; head and loss) counted. A round of chunks, one on each submesh, is as slow as most of its chunks, and while a
round of forward passes meets one of backward passes that is longer, submeshes wait: least where rounds are equal, or
else the same from either end. So what equal rounds leave over is in the middle ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_ALIKE = 1.02
"""Layers are taken for equal where the longest takes so many times the shortest."""


def chunk_sizes(
    times_ns: Sequence[int], ends_ns: tuple[int, int], submeshes: int, chunks: int, turns_back: bool = False
) -> tuple[int, ...]:  # fmt: skip
    """How many of a chain of layers each of `submeshes` × `chunks` chunks has, in the order in which they run.

    times_ns: of each layer. ends_ns: of what comes before the first one and after the last. turns_back: every other
    round goes from the last submesh to the first. A chunk has one layer at least; where chunks are more than layers, by
    one or two, an end of the model is a chunk of its own.
    """
    count, mean = len(times_ns), max(1.0, sum(times_ns) / len(times_ns))
    order = np.arange(submeshes * chunks).reshape(chunks, submeshes)
    if turns_back:
        order[1::2] = order[1::2, ::-1]
    least = _least(count, ends_ns, submeshes * chunks)[order]
    last = int((order == order.max()).any(axis=0).argmax())
    totals = _totals(count, (ends_ns[0] / mean, ends_ns[1] / mean), last, least.sum(axis=0))
    sizes = np.empty(submeshes * chunks, np.int64)
    sizes[order] = _in_rounds(totals, least, last)
    is_alike = max(times_ns) <= _ALIKE * min(times_ns)
    return tuple(map(int, sizes if is_alike else _evened(sizes, times_ns, ends_ns, order)))


def round_lengths(layers: int, chunks: int) -> Int64Array:
    """Of so many layers on a submesh, those of each of its chunks, the same from either end where that can be."""
    lengths = np.full(chunks, layers // chunks, np.int64)
    over = layers % chunks
    pairs = [(number, chunks - 1 - number) for number in reversed(range(chunks // 2))]
    for pair in pairs[: over // 2]:
        lengths[[*pair]] += 1
    if over % 2:
        lengths[chunks // 2 if chunks % 2 else pairs[over // 2][1]] += 1
    return lengths


def chunk_counts(layers: int, submeshes: int, most: int) -> list[int]:
    """Numbers of chunks a submesh, from two on, each with shorter rounds than any fewer that are as even."""
    found, shortest = list[int](), layers + 1
    for chunks in range(2, min(most, (layers + 2) // submeshes) + 1):
        lengths = round_lengths(-(-layers // submeshes), chunks)
        if lengths.max() < shortest:
            found.append(chunks)
            is_even = bool((lengths == lengths[::-1]).all())
            shortest = int(lengths.max()) if is_even else shortest
    return found


def _least(count: int, ends_ns: tuple[int, int], chunks: int) -> Int64Array:
    """Of each chunk one layer; none where an end must be one, the longer end first."""
    assert chunks <= count + 2, "each chunk has a layer or an end of the model"
    least = np.ones(chunks, np.int64)
    ends = (-1, 0) if ends_ns[1] >= ends_ns[0] else (0, -1)
    least[[*ends[: max(0, chunks - count)]]] = 0
    return least


def _totals(count: int, ends: tuple[float, float], last: int, least: Int64Array) -> Int64Array:
    """The layers of each submesh: each goes where there is least so far, of equal ones to the last, which has fewest
    microbatches in flight. ends: what they take, in layers. last: the submesh of the last chunk."""
    totals, loads = least.copy(), least.astype(np.float64)
    loads[0] += ends[0]
    loads[last] += ends[1]
    for _ in range(count - int(least.sum())):
        place = len(loads) - 1 - int(loads[::-1].argmin())
        totals[place] += 1
        loads[place] += 1
    return totals


def _in_rounds(totals: Int64Array, least: Int64Array, last: int) -> Int64Array:
    """By round and submesh: as in a submesh of most layers, less what there are fewer, at the model's ends first."""
    chunks, submeshes = least.shape
    most = max(int(totals.max()), chunks)
    sizes = np.repeat(round_lengths(most, chunks)[:, None], submeshes, axis=1)
    for submesh, total in enumerate(totals):
        own, spare = sizes[:, submesh], most - int(total)
        for end in [0] * (submesh == 0) + [chunks - 1] * (submesh == last):
            taken = min(spare, int(own[end] - least[end, submesh]))
            own[end] -= taken
            spare -= taken
        for _ in range(spare):
            own[int((own - least[:, submesh]).argmax())] -= 1
    return sizes


def _evened(sizes: Int64Array, times_ns: Sequence[int], ends_ns: tuple[int, int], order: Int64Array) -> Int64Array:
    """Of unequal layers: one goes over a border of the busiest submesh for as long as that makes it less busy, and
    none busier than it was. order: of chunks, by round and submesh."""
    until = np.array([0, *accumulate(times_ns)], np.int64)
    loads = _loads(sizes, until, ends_ns, order)
    for _ in range(len(times_ns) * order.shape[1]):
        options = []
        for chunk in order[:, int(loads.argmax())].tolist():
            for other in (chunk - 1, chunk + 1):
                if sizes[chunk] > 1 and 0 <= other < len(sizes):
                    moved = sizes.copy()
                    moved[[chunk, other]] += (-1, 1)
                    options.append((int(_loads(moved, until, ends_ns, order).max()), other, moved))
        if not options or (best := min(options, key=lambda option: option[:2]))[0] >= loads.max():
            break
        sizes = best[2]
        loads = _loads(sizes, until, ends_ns, order)
    return sizes


def _loads(sizes: Int64Array, until: Int64Array, ends_ns: tuple[int, int], order: Int64Array) -> Int64Array:
    """What each submesh takes."""
    times = np.diff(until[np.concatenate([[0], np.cumsum(sizes)])])
    times[[0, -1]] += ends_ns
    loads: Int64Array = times[order].sum(axis=0)
    return loads
