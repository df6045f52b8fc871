"""Values of constants that are too large to be made, held against the same ones made whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.substitute import constants
from autopar.substitute.constants import Constants
from autopar.substitute.masks import ATTENTION, under_causal_masks
from autopar.trace import trace

LENGTH, BATCH = 24, 2
LEAST = torch.finfo(torch.float32).min


def _positions() -> tuple[Tensor, Tensor]:
    places = torch.arange(LENGTH)
    return places[:, None], places[None, :]


def _documents(of: Callable[[Tensor], Tensor]) -> Tensor:
    """Of positions made for each sample, the number of the document, as packed batches have it."""
    places = of(torch.arange(LENGTH)).expand(BATCH, LENGTH)
    before = torch.cat((places[:, :1] - 1, places), 1)
    return (torch.diff(before, dim=-1) != 1).cumsum(-1)


def _packed(of: Callable[[Tensor], Tensor]) -> Tensor:
    queries, keys = _positions()
    numbers = _documents(of)
    return (
        torch.ones(1, dtype=torch.bool) & (numbers[:, None, :, None] == numbers[:, None, None, :]) & (keys <= queries)
    )


def _ones() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool)


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "keys up to queries": lambda: _positions()[1] <= _positions()[0],
    "queries from keys on": lambda: _positions()[0] >= _positions()[1],
    "keys before the next query": lambda: _positions()[1] < _positions()[0] + 1,
    "no key after a query": lambda: ~(_positions()[1] > _positions()[0]),
    "not not": lambda: torch.logical_not((_positions()[1] > _positions()[0]).to(torch.bool)),
    "tril": lambda: _ones().tril(),
    "tril twice": lambda: _ones().tril(2).tril(),
    "not triu": lambda: ~_ones().triu(1),
    "compared with 0": lambda: torch.ones(LENGTH, LENGTH).tril() > 0,
    "distances": lambda: _positions()[0] - _positions()[1] >= 0,
    "distances turned": lambda: _positions()[1] - _positions()[0] <= 0,
    "falling": lambda: (LENGTH - _positions()[1]) >= (LENGTH - _positions()[0]),
    "one document": lambda: _packed(lambda places: places),
    "a window that all are in": lambda: (
        (_positions()[1] <= _positions()[0]) & (_positions()[1] > _positions()[0] - LENGTH)
    ),
    "keys that are there": lambda: (_positions()[1] <= _positions()[0]) & (_positions()[1] >= 0),
    "queries that are there": lambda: (_positions()[1] <= _positions()[0]) & (_positions()[0] < LENGTH),
    "in a or b": lambda: (_positions()[1] < _positions()[0]) | (_positions()[1] == _positions()[0]),
    "within a distance": lambda: ((_positions()[0] - _positions()[1]).abs() < LENGTH) & _ones().tril(),
    "a slice of a longer one": lambda: torch.ones(2 * LENGTH, 2 * LENGTH, dtype=torch.bool).tril()[
        LENGTH : 2 * LENGTH, LENGTH : 2 * LENGTH
    ],
    "added": lambda: torch.full((LENGTH, LENGTH), float("-inf")).triu(1),
    "filled": lambda: torch.zeros(LENGTH, LENGTH).masked_fill(~_ones().tril(), LEAST),
    "where": lambda: torch.where(_ones().tril(), torch.tensor(0.0), LEAST),
    "numbers": lambda: (1.0 - _ones().tril().to(torch.float32)) * LEAST,
    "expanded": lambda: _ones().tril()[None, None].expand(BATCH, 1, LENGTH, LENGTH),
    "whole numbers": lambda: torch.ones(LENGTH, LENGTH, dtype=torch.long).tril() == 1,
}
OTHER: dict[str, Callable[[], Tensor]] = {
    "a window": lambda: (_positions()[1] <= _positions()[0]) & (_positions()[1] > _positions()[0] - 5),
    "without itself": lambda: _positions()[1] < _positions()[0],
    "one more": lambda: _positions()[1] <= _positions()[0] + 1,
    "chunks": lambda: (_positions()[1] // 6 == _positions()[0] // 6) & _ones().tril(),
    "two documents": lambda: _packed(lambda places: places % (LENGTH // 2)),
    "within a short distance": lambda: (_positions()[0] - _positions()[1]).abs() < 4,
    "all": _ones,
    "upper": lambda: _ones().triu(),
    "weak": lambda: torch.zeros(LENGTH, LENGTH).masked_fill(~_ones().tril(), -1.0),
    "offset": lambda: torch.where(_ones().tril(), torch.tensor(1.0), LEAST),
    "keys that are not there": lambda: _ones().tril() & (_positions()[1] != 3),
    "a begin that all see": lambda: (_positions()[1] <= _positions()[0]) | (_positions()[1] < 4),
    "not causal": lambda: ~_ones().tril(),
    "of one head": lambda: torch.stack((_ones().tril(), _ones()))[None],
    "modulo": lambda: (_positions()[1] % 5 <= _positions()[0] % 5) & _ones().tril(),
}


class Masked(nn.Module):
    """Attention under a mask that forward makes."""

    def __init__(self, mask: Callable[[], Tensor]) -> None:
        super().__init__()
        self.mask, self.project = mask, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x).unflatten(-1, (2, 2)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=self.mask()).sum()


@pytest.mark.parametrize("name", [*CAUSAL, *OTHER])
def test_a_mask_is_known_without_being_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = (CAUSAL | OTHER)[name]
    graph = trace(Masked(mask), (torch.zeros(BATCH, LENGTH, 4),))
    (node,) = (node for node in graph.nodes if node.op == ATTENTION)
    assert bool(under_causal_masks(graph)) == (name in CAUSAL)
    graph.found.clear()
    monkeypatch.setattr(constants, "MOST_ELEMENTS", LENGTH * LENGTH - 1)  # a matrix of queries and keys is too large
    assert bool(under_causal_masks(graph)) == (name in CAUSAL)
    value, made = Constants(graph)[node.operands[-1]], mask()
    assert value is None or torch.equal((value if isinstance(value, Tensor) else value.matrix).expand(made.shape), made)


def test_a_mask_of_a_long_sequence_is_known_in_little_time_and_memory() -> None:
    length = 1 << 17

    def mask() -> Tensor:
        places = torch.arange(length)
        return torch.where(places[None, :] <= places[:, None], 0.0, LEAST)

    with torch.device("meta"):
        model = Masked(mask)
        graph = trace(model, (torch.zeros(1, length, 4),))
    assert len(under_causal_masks(graph)) == 1
