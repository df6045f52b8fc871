"""The memory of a piece of work on the CPU, from every allocation and release that torch's allocator makes.

What is live before the work starts is counted from the tensors that Python knows (each storage once); every change
after that is the allocator's own record, so that temporaries inside operators count too. What an operator's library
takes from the C allocator directly (oneDNN's scratch, gloo's sockets) is not seen.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Lifetimes:
    """Bytes live before the work, at its highest point, and what was live there, by what made it."""

    resident_bytes: int
    peak_bytes: int
    at_peak: tuple[tuple[str, int], ...]
    peak_in: str  # what was running at the highest point
    left_bytes: int  # live after the work, by the allocator's record: as much as `found_bytes` unless frees were missed
    found_bytes: int  # live after the work, counted from the tensors


def live_storages(but: Iterable[int] = ()) -> dict[int, int]:
    """Bytes of each storage on the CPU that a Python tensor holds, by address; without the addresses in `but`."""
    gc.collect()
    known, found = set(but), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at an object may warn that it is deprecated
        tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    for tensor in tensors:
        if type(tensor).__name__ == "DTensor":
            tensor = tensor.to_local()
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in found.items() if address not in known}


def track(work: Callable[[], object], but: Iterable[int] = ()) -> Lifetimes:
    """Runs the work under torch's profiler; storages at the addresses in `but` are left out of what is resident."""
    but = set(but)
    live = live_storages(but)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    left = sum(live_storages(but).values())
    events = sorted(_memory_events(profiler), key=lambda event: event.start_time_ns)
    return _play(events, live, left)


def _memory_events(profiler: Any) -> Iterator[Any]:
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            yield event


def _play(events: list[Any], live: dict[int, int], left: int) -> Lifetimes:
    resident = sum(live.values())
    blocks = {address: (size, "resident") for address, size in live.items()}
    total = peak = resident
    at_peak, peak_in = dict(blocks), ""
    for event in events:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        before, _ = blocks.pop(address, (0, ""))  # its end; or that of another block, whose end was not seen
        total -= before
        if size > 0:
            blocks[address] = (size, _maker(event))
            total += size
        if total > peak:
            peak, at_peak, peak_in = total, dict(blocks), _maker(event)
    by_maker: Counter[str] = Counter()
    for size, maker in at_peak.values():
        by_maker[maker] += size
    return Lifetimes(resident, peak, tuple(by_maker.most_common()), peak_in, total, left)


def _maker(event: Any) -> str:
    """The outermost operator around an event, with the innermost, as in "linear > empty"."""
    names, parent = [], event.parent
    while parent is not None:
        names.append(parent.name.removeprefix("aten::").removeprefix("autograd::engine::evaluate_function: "))
        parent = parent.parent
    return " > ".join(dict.fromkeys((names[-1], names[min(1, len(names) - 1)], names[0]))) if names else "?"
