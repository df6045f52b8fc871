"""The memory of a piece of work on the CPU, from every allocation and release that torch's allocator makes.

What is live before the work starts is counted from the tensors that Python knows (each storage once); every change
after that is the allocator's own record, so that temporaries inside operators count too. What an operator's library
takes from the C allocator directly (oneDNN's scratch, gloo's sockets) is not seen.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Lifetimes:
    """Bytes live before the work, at its highest point and after it, and what was live there, by what made it.

    `unseen_bytes`: blocks that are left out. Gloo's threads make them: they gather into a buffer of their own and then
    copy, and their releases are mostly missing in the record. What was there before the work and is gone after it
    counts, too: when that was is not known; so does what nothing but an autograd graph holds after the work.
    """

    resident_bytes: int
    peak_bytes: int
    at_peak: tuple[tuple[str, int], ...]
    peak_in: str  # what was running at the highest point
    left_bytes: int
    unseen_bytes: int


class _Change(NamedTuple):
    """A block is taken (more than zero bytes) or given back."""

    address: int
    num_bytes: int
    maker: str


def live_storages(but: Iterable[int] = ()) -> dict[int, int]:
    """Bytes of each storage on the CPU that a Python tensor or its gradient holds, by address; not those in `but`."""
    gc.collect()
    known = set(but)
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter, DTensor)]
    tensors += [item.grad for item in tensors if item.is_leaf and item.grad is not None]
    storages = [item.untyped_storage() for item in map(_local, tensors) if _has_memory(item)]
    return {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in known}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is a tensor of memory of its own, not a fake one of tracing, nor one around others of `torch.func`."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_plain and tensor.device.type == "cpu" and tensor.layout == torch.strided


def track(work: Callable[[], object], but: Iterable[int] = ()) -> Lifetimes:
    """Runs the work under torch's profiler; storages at the addresses in `but` are left out of what is resident."""
    but = set(but)
    before = live_storages(but)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    after = live_storages(but)
    events = sorted(_memory_events(profiler), key=lambda event: event.start_time_ns)
    changes = [_Change(e.extra_fields.ptr, e.extra_fields.alloc_size, _maker(e)) for e in events]
    unseen = _without_release(changes, set(after))
    kept = {address: size for address, size in before.items() if address in after}
    return _play(changes, kept, unseen, sum(before.values()) - sum(kept.values()))


def _memory_events(profiler: Any) -> Iterator[Any]:
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            yield event


def _maker(event: Any) -> str:
    """The outermost operator around an event, with the innermost, as in "linear > empty"."""
    names, parent = [], event.parent
    while parent is not None:
        names.append(parent.name.removeprefix("aten::").removeprefix("autograd::engine::evaluate_function: "))
        parent = parent.parent
    return " > ".join(dict.fromkeys((names[-1], names[min(1, len(names) - 1)], names[0]))) if names else "?"


def _without_release(changes: list[_Change], alive: set[int]) -> set[int]:
    """The changes that take a block which is gone later, though no change gives it back; and those of gloo's own."""
    taken: dict[int, int] = {}  # address -> the change that took it
    unseen = {number for number, change in enumerate(changes) if "gloo:" in change.maker or "c10d::" in change.maker}
    for number, change in enumerate(changes):
        before = taken.pop(change.address, None)
        if change.num_bytes > 0:
            taken[change.address] = number
            if before is not None:
                unseen.add(before)
    return unseen | {number for address, number in taken.items() if address not in alive}


def _play(changes: list[_Change], live: dict[int, int], unseen: set[int], vanished: int) -> Lifetimes:
    blocks = {address: (size, "resident") for address, size in live.items()}
    resident = total = peak = sum(live.values())
    at_peak, peak_in = dict(blocks), ""
    for number, change in enumerate(changes):
        total -= blocks.pop(change.address, (0, ""))[0]
        if change.num_bytes > 0 and number not in unseen:
            blocks[change.address] = (change.num_bytes, change.maker)
            total += change.num_bytes
        if total > peak:
            peak, at_peak, peak_in = total, dict(blocks), change.maker
    by_maker: Counter[str] = Counter()
    for size, maker in at_peak.values():
        by_maker[maker] += size
    lost = vanished + sum(changes[number].num_bytes for number in unseen)
    return Lifetimes(resident, peak, tuple(by_maker.most_common()), peak_in, total, lost)
