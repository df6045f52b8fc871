"""Bags of rows and routed experts over ranks that hold slices of the tables, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar.ops.experts  # noqa: F401  (defines the whole operator)
from autopar import runtime as rt
from autopar.runtime import redistribute
from tests.rank_pool import RankPool
from tests.runtime.test_lowering import check, part

BAGS: list[dict[str, Any]] = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "mean", "padding_idx": 4},
    {"mode": "sum", "include_last_offset": True, "padding_idx": 2},
]


def whole(x: Tensor, mesh: rt.RankMesh) -> Tensor:
    for axis in mesh.axes:
        x = redistribute(x, axis, "P -> I")
    return x


def bags(rank: int, world: int, sizes: dict[str, int]) -> None:
    """Seven rows, in bags of 3, 0, 4 and 1; in a sum each row has a factor."""
    mesh = rt.make_rank_mesh(sizes)
    generator = torch.Generator().manual_seed(0)
    rows, everywhere = " ".join(["S(0)"] * len(sizes)), " ".join(["R"] * len(sizes))
    for options in BAGS:
        begins = torch.tensor([0, 3, 3, 7] + ([8] if "include_last_offset" in options else []))
        table = torch.randint(-9, 9, (7, 5), generator=generator).double().requires_grad_()
        ids = torch.randint(7, (8,), generator=generator)
        factors = torch.randint(-3, 4, (8,), generator=generator).double().requires_grad_()
        weights = factors if options["mode"] == "sum" else None
        expected = F.embedding_bag(ids, table, begins, per_sample_weights=weights, **options)
        upstream = torch.randint(-9, 9, expected.shape, generator=generator).double()
        expected.backward(upstream)
        local, own = part(table, rows, mesh), part(factors, everywhere, mesh)
        options = {**options, "per_sample_weights": None if weights is None else own}
        found = whole(rt.embedding_bag(local, ids, begins, mesh.axes, 7, **options), mesh)
        found.backward(upstream)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        check(local.grad, table.grad, rows, mesh)
        if weights is not None:
            assert own.grad is not None
            check(whole(own.grad, mesh), factors.grad, everywhere, mesh)


def experts(rank: int, world: int, sizes: dict[str, int]) -> None:
    """Seven experts, of which some are chosen by no token; activations with and without gate."""
    mesh = rt.make_rank_mesh(sizes)
    generator = torch.Generator().manual_seed(0)
    rows, everywhere = " ".join(["S(0)"] * len(sizes)), " ".join(["R"] * len(sizes))
    for activation, gated in (("silu", True), ("gelu_tanh", False)):
        x, weights, up, down = (
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in ((9, 4), (9, 2), (7, 4, 6), (7, 3 if gated else 6, 4))
        )
        ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(9)])
        expected = torch.ops.autopar.routed_experts(x, ids, weights, up, down, activation, gated, 7)
        upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        expected.backward(upstream)
        own = [part(x, everywhere, mesh), part(weights, everywhere, mesh), part(up, rows, mesh), part(down, rows, mesh)]
        found = rt.routed_experts(own[0], ids, *own[1:], activation, gated, 7, mesh.axes)
        found = whole(found, mesh)
        found.backward(upstream)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        for leaf, original in zip(own[:2], (x, weights), strict=True):
            assert leaf.grad is not None
            check(whole(leaf.grad, mesh), original.grad, everywhere, mesh)
        for leaf, original in zip(own[2:], (up, down), strict=True):
            check(leaf.grad, original.grad, rows, mesh)


@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 4}, {"a": 2, "b": 2}])
@pytest.mark.parametrize("job", [bags, experts])
def test_tables_split_by_rows(rank_pool: Callable[[int], RankPool], job: Any, sizes: dict[str, int]) -> None:
    rank_pool(int(torch.tensor(list(sizes.values())).prod())).run(job, sizes)
