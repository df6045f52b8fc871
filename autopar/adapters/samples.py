"""Which batches a loader of samples will give: one to plan for, and the numbers of rows of the others.

A look at samples draws no random number that training would have drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import IterableDataset


@contextmanager
def as_before() -> Iterator[None]:
    """Random numbers go on, after the body, as if it had drawn none."""
    state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        numpy.random.set_state(state[1])
        torch.set_rng_state(state[2])


def first_batch(loader: Any, rows: int) -> Any:
    """The first samples, put together as the loader does; None of a stream, which would lose them."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    return loader.collate_fn([dataset[index] for index in range(min(rows, len(dataset)))])


def row_counts(loader: Any, rows: int, drop_last: bool) -> list[int]:
    """How many rows its batches have: all, and those that the last one has."""
    count = len(loader.dataset) if isinstance(loader.dataset, Sized) else 0
    last = 0 if drop_last or not count else count % rows
    whole = [rows] if not count or count >= rows else []
    return [*whole, *([last] if last else [])]


def with_rows(batch: Mapping[str, Any], rows: int) -> dict[str, tuple[int, ...]]:
    """The lengths of a batch's tensors, where it had so many rows; those without rows are left out."""
    size = num_rows(batch)
    found = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    return {name: (rows, *value.shape[1:]) for name, value in found.items() if value.size(0) == size}


def num_rows(batch: Mapping[str, Any]) -> int:
    """Of the first tensor that has any dim."""
    return next(value.size(0) for value in batch.values() if isinstance(value, Tensor) and value.dim())
