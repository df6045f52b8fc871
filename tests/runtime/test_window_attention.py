"""Attention over a sliding window: its pieces, alone and on ranks, with what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.lowering.band import band_pieces, needed_keys, passed_keys, seen_pairs
from autopar.runtime.lowering.halo import Range, overlap
from autopar.runtime.lowering.window import window_attention
from tests.rank_pool import pool
from tests.runtime.window_jobs import of_part


def _seen(queries: Range, keys: Range, window: int) -> Tensor:
    rows, columns = torch.arange(*queries)[:, None], torch.arange(*keys)
    return (columns <= rows) & (columns > rows - window)


@pytest.mark.parametrize("length", [1, 7, 12])
def test_pieces_cover_what_is_seen_and_each_pair_once(length: int) -> None:
    """For every window and number of ranks; and no rank computes more than it sees."""
    for window in range(1, length + 1):
        for ranks in range(1, 6):
            for queries, keys in zip(*needed_keys(length, ranks, window), strict=True):
                found = torch.zeros(queries[1] - queries[0], keys[1] - keys[0], dtype=torch.int)
                for piece in band_pieces(queries, keys, window):
                    part = torch.ones(piece.queries, piece.keys, dtype=torch.int)
                    part = part.tril() if piece.causal else part
                    part = part.flip(0, 1) if piece.is_behind else part
                    for first in range(0, piece.blocks * window, window):
                        place = found.narrow(0, piece.query + first, piece.queries)
                        place.narrow(1, piece.key + first, piece.keys).add_(part)
                wanted = _seen(queries, keys, window)
                assert torch.equal(found, wanted.int()), (window, ranks, queries)
                assert seen_pairs(queries, keys, window) == wanted.sum()


def test_a_ring_brings_what_is_needed_in_as_few_steps_as_the_window_reaches() -> None:
    for length, ranks, window, steps in ((32, 8, 5, 1), (32, 8, 6, 2), (32, 8, 32, 7), (32, 8, 1, 0), (6, 4, 3, 1)):
        held, needed = needed_keys(length, ranks, window)
        passed = passed_keys(length, ranks, window)
        assert len(passed) == steps
        for rank in range(1, ranks):
            come = [step[rank - 1] for step in passed if step[rank - 1][1] > step[rank - 1][0]]
            wanted = [overlap(held[other], needed[rank]) for other in reversed(range(rank))]
            assert come == [rows for rows in wanted if rows[1] > rows[0]]


def _whole(length: int, is_packed: bool, has_sinks: bool) -> dict[str, Tensor]:
    """Of two samples, and four heads in groups of two."""
    torch.manual_seed(0)
    shapes = {"query": (2, 4, length, 8), "key": (2, 2, length, 8), "value": (2, 2, length, 8)}
    made = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    made["gradient"] = torch.randn(2, 4, length, 8, dtype=torch.float64)
    if is_packed:
        made["documents"] = (torch.arange(length) + torch.arange(2)[:, None]) // 5
    if has_sinks:
        made["sinks"] = torch.randn(4, dtype=torch.float64)
    return made


def _learned(whole: dict[str, Tensor]) -> list[Tensor]:
    return [whole[name].clone().requires_grad_() for name in ("query", "key", "value", "sinks") if name in whole]


def _expected(whole: dict[str, Tensor], window: int) -> list[Tensor]:
    length, learned = whole["query"].size(2), _learned(whole)
    mask = _seen((0, length), (0, length), window).expand(2, 1, -1, -1)
    if "documents" in whole:
        mask = mask & (whole["documents"][:, None, :, None] == whole["documents"][:, None, None])
    if "sinks" in whole:
        made = _beside_sinks(*learned, mask)
    else:
        made = F.scaled_dot_product_attention(*learned, mask, enable_gqa=True)
    return [made.detach(), *torch.autograd.grad(made, learned, whole["gradient"])]


def _beside_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """As gpt-oss of transformers has it: a column of scores that is dropped after the softmax."""
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.mT / query.size(3) ** 0.5 + (~mask).to(query.dtype) * torch.finfo(query.dtype).min
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores - scores.amax(-1, True)).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("length", "window"), [(13, 4), (16, 1), (20, 6), (9, 9)])
def test_a_window_is_attention_under_its_mask(length: int, window: int, is_packed: bool, has_sinks: bool) -> None:
    whole = _whole(length, is_packed, has_sinks)
    query, key, value, *sinks = learned = _learned(whole)
    told = {"documents": whole.get("documents"), "sinks": sinks[0] if sinks else None}
    made = window_attention(query, key, value, window, None, length, None, **told)
    found = [made, *torch.autograd.grad(made, learned, whole["gradient"])]
    for one, other in zip(found, _expected(whole, window), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.ranks
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("ranks", "length", "window"), [(2, 13, 4), (4, 18, 5), (4, 18, 12), (4, 17, 6), (4, 16, 1), (4, 9, 2)]
)
def test_ranks_that_split_the_sequence_compute_the_same(ranks: int, length: int, window: int, ring: bool) -> None:
    """With windows within the part before, beyond it, and ranks without a query; what goes to another rank is what
    that sees, no more, and both ways send the same. Gradients of sinks are sums over ranks, and send nothing."""
    for is_packed, has_sinks in ((False, False), (True, False), (False, True)):
        whole = _whole(length, is_packed, has_sinks)
        results: list[dict[str, Any]] = pool(ranks).run(of_part, window, ring, whole)
        wanted = _expected(whole, window)
        torch.testing.assert_close(torch.cat([one["made"] for one in results], 2), wanted[0])
        for position in range(3):
            parts = [one["gradients"][position] for one in results]
            torch.testing.assert_close(torch.cat(parts, 2), wanted[position + 1])
        if has_sinks:
            torch.testing.assert_close(sum(one["gradients"][3] for one in results), wanted[4])
        held, needed = needed_keys(length, ranks, window)
        seen = sum(end - begin for begin, end in needed) - sum(end - begin for begin, end in held)
        row = 2 * 2 * (8 + 8) * 8  # samples, heads of keys, widths, bytes
        assert sum(one["bytes"][0] for one in results) == seen * row
        assert sum(one["bytes"][1] for one in results) == 2 * seen * row
