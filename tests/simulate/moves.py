"""What ranks run for the test of conversions' memory: a module of its own, which they can import."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from autopar import runtime as rt
from autopar.runtime import redistribute
from autopar.runtime.placement import local_shape, parse_type
from benchmarks.accuracy.lifetimes import _maker, _memory_events

Changes = tuple[int, int, bool]
"""The most bytes that are taken beside what is there, those that stay, and whether all releases were seen: threads of
gloo may be the last to hold a buffer, and their releases are in no record."""

CLASSES, ROWS = 12, 40


@contextmanager
def _nothing_given_back() -> Iterator[None]:
    """What earlier jobs left goes before; a collection for each piece of work would take longer than all of them."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Move(NamedTuple):
    """A tensor of a whole shape on its way along one axis, through types; whether its dims lie in memory turned
    around."""

    shape: tuple[int, ...]
    way: tuple[str, ...]
    is_permuted: bool = False


@_nothing_given_back()
def memory_of_moves(rank: int, world: int, moves: Sequence[Move]) -> list[tuple[Changes, Changes]]:
    """Of each, on the way of the tensor and on that of its gradient."""
    axis = rt.make_rank_mesh({"x": world})["x"]
    found = []
    for move in moves:
        shape = local_shape(move.shape, [parse_type(move.way[0])], [axis])
        x = torch.ones(shape[::-1]).permute(*range(len(shape))[::-1]) if move.is_permuted else torch.ones(shape)
        made = _walked(x.requires_grad_(), axis, move)
        gradient = torch.ones_like(made, memory_format=torch.contiguous_format)
        del made
        found.append(_both(partial(_walked, x, axis, move), x, gradient))
    return found


def _walked(x: Tensor, axis: rt.Axis, move: Move) -> Tensor:
    for before, after in pairwise(move.way):
        dim = parse_type(before).dim if before.startswith("S") else None
        x = redistribute(x, axis, f"{before} -> {after}", None if dim is None else move.shape[dim])
    return x


def _both(run: Callable[[], Tensor], x: Tensor, gradient: Tensor) -> tuple[Changes, Changes]:
    """Of a function, and of its gradient."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward = changes(lambda: saved.append(run()), saved)
    made, made_of_it = saved[-1], list[Tensor]()
    saved.clear()
    return forward, changes(lambda: made_of_it.extend(torch.autograd.grad(made, x, gradient)), made_of_it)


def changes(work: Callable[[], object], kept: Sequence[Tensor]) -> Changes:
    """Of a piece of work; gloo's own buffers are left out. kept: tensors that are there after it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in _memory_events(profiler) if not _is_of_gloo(event)]
    events.sort(key=lambda event: int(event.start_time_ns))
    released = Counter(event.extra_fields.ptr for event in events if event.extra_fields.alloc_size < 0)
    taken = Counter(event.extra_fields.ptr for event in events if event.extra_fields.alloc_size > 0)
    there = {tensor.untyped_storage().data_ptr() for tensor in kept}
    lost = {address for address, count in taken.items() if count > released[address] and address not in there}
    sizes = [event.extra_fields.alloc_size for event in events if event.extra_fields.ptr not in lost]
    return max(0, *itertools.accumulate(sizes), 0), sum(sizes), not lost


def _is_of_gloo(event: Any) -> bool:
    return any(name in _maker(event) for name in ("gloo:", "c10d::"))


@_nothing_given_back()
def memory_of_functions(rank: int, world: int) -> dict[str, tuple[Changes, Changes]]:
    """Of the runtime's cross-entropy and lookups in tables split by classes or rows."""
    axis = rt.make_rank_mesh({"x": world})["x"]
    logits = torch.ones(ROWS, CLASSES // world).requires_grad_()
    targets, table = torch.arange(ROWS) % CLASSES, torch.ones(CLASSES // world, 16).requires_grad_()
    work = {
        "cross_entropy": lambda: rt.cross_entropy(logits, targets, class_axes=(axis,), num_classes=CLASSES),
        "embedding": lambda: rt.embedding(targets, table, axis, CLASSES),
        "embedding with padding": lambda: rt.embedding(targets, table, axis, CLASSES, padding_idx=3),
    }
    found = {}
    for name, run in work.items():
        gradient = torch.ones_like(run())
        found[name] = _both(run, logits if name == "cross_entropy" else table, gradient)
    return found
