"""Convolution, pooling and group norm over images that ranks share, against one device: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import runtime as rt
from tests.rank_pool import RankPool
from tests.runtime.test_lowering import check, part, summed


def integers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-5, 6, shape, generator=generator).double().requires_grad_()


def compare(
    mesh: rt.RankMesh, placement: str, x: Tensor, whole: Callable[[Tensor], Tensor], local: Callable[[Tensor], Tensor]
) -> None:
    """Values and the gradient of x, both split as `placement` says."""
    expected = whole(x)
    upstream = integers(torch.Generator().manual_seed(1), *expected.shape).detach()
    expected.backward(upstream)
    own = part(x, placement, mesh)
    found = local(own)
    found.backward(part(upstream, placement, mesh).detach())
    check(found, expected, placement, mesh)
    check(own.grad, x.grad, placement, mesh)


CONVOLUTIONS = [  # sizes of the image, kernel, STRIDE, padding, dilation
    ((8, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((15, 8), (3, 2), (2, 1), (1, 0), (2, 3)),
    ((7, 5), (1, 1), (1, 1), (0, 0), (1, 1)),
    ((7, 9), (5, 7), (1, 1), (2, 3), (1, 1)),  # a halo longer than a shard
    ((20, 6), (2, 3), (3, 2), (0, 1), (1, 1)),
]


def convolutions(rank: int, world: int, sizes: dict[str, int], placement: str) -> None:
    mesh = rt.make_rank_mesh(sizes)
    generator = torch.Generator().manual_seed(0)
    for size, kernel, STRIDE, padding, dilation in CONVOLUTIONS:
        x, bias = integers(generator, 2, 4, *size), integers(generator, 6)
        weight = integers(generator, 6, 2, *kernel)
        w, b = part(weight, "R " * len(sizes), mesh), part(bias, "R " * len(sizes), mesh)
        splits = [(int(t[2]), axis, size[int(t[2]) - 2]) for t, axis in zip(placement.split(), mesh.axes, strict=True)]

        def whole(x: Tensor, w: Any = weight, b: Any = bias, options: Any = (STRIDE, padding, dilation)) -> Tensor:
            return F.conv2d(x, w, b, *options, 2)

        def local(x: Tensor, w: Any = w, b: Any = b, options: Any = (STRIDE, padding, dilation, 2, splits)) -> Tensor:
            return rt.convolution(x, w, b, *options)

        compare(mesh, placement, x, whole, local)
        for leaf, original in ((w, weight), (b, bias)):
            check(summed(leaf.grad, mesh), original.grad, "R " * len(sizes), mesh)


@pytest.mark.parametrize(
    ("sizes", "placement"),
    [({"a": 2}, "S(2)"), ({"a": 2}, "S(3)"), ({"a": 4}, "S(2)"), ({"a": 2, "b": 2}, "S(2) S(3)")],
)
def test_convolution_with_halos(rank_pool: Callable[[int], RankPool], sizes: dict[str, int], placement: str) -> None:
    world = int(torch.tensor(list(sizes.values())).prod())
    rank_pool(world).run(convolutions, sizes, placement)


STRIDE = (2, 1)
POOLS = [((8, 7), (3, 2), (1, 1)), ((9, 5), (2, 2), (0, 0)), ((6, 6), (3, 3), (1, 0))]  # image, kernel, padding


def pools(rank: int, world: int, sizes: dict[str, int], placement: str) -> None:
    mesh = rt.make_rank_mesh(sizes)
    generator = torch.Generator().manual_seed(0)
    for size, kernel, padding in POOLS:
        splits = [(int(t[2]), axis, size[int(t[2]) - 2]) for t, axis in zip(placement.split(), mesh.axes, strict=True)]

        def maximum(x: Tensor, k: Any = kernel, p: Any = padding, splits: Any = splits) -> Tensor:
            return rt.max_pool(x, k, STRIDE, p, (1, 1), splits)

        x = torch.randperm(6 * size[0] * size[1], generator=generator).double().view(2, 3, *size).requires_grad_()
        compare(mesh, placement, x, lambda x, k=kernel, p=padding: F.max_pool2d(x, k, STRIDE, p), maximum)  # type: ignore[misc]
        for counts in (True, False):

            def average(x: Tensor, k: Any = kernel, p: Any = padding, c: bool = counts, s: Any = splits) -> Tensor:
                return rt.avg_pool(x, k, STRIDE, p, c, s)

            def whole(x: Tensor, k: Any = kernel, p: Any = padding, c: bool = counts) -> Tensor:
                return F.avg_pool2d(x, k, STRIDE, p, False, c)

            compare(mesh, placement, integers(generator, 2, 3, *size), whole, average)


@pytest.mark.parametrize(("sizes", "placement"), [({"a": 2}, "S(2)"), ({"a": 2, "b": 2}, "S(2) S(3)")])
def test_pooling_with_halos(rank_pool: Callable[[int], RankPool], sizes: dict[str, int], placement: str) -> None:
    rank_pool(2 ** len(sizes)).run(pools, sizes, placement)


def group_norms(rank: int, world: int) -> None:
    """Channels by groups on one axis, rows on the other, five of them on two ranks."""
    mesh = rt.make_rank_mesh({"a": 2, "b": 2})
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = integers(generator, 3, 8, 5, 2), integers(generator, 8), integers(generator, 8)
    w, b = part(weight, "S(0) R", mesh), part(bias, "S(0) R", mesh)
    compare(
        mesh, "S(1) S(2)", x,
        lambda x: F.group_norm(x, 4, weight, bias, 1e-3),
        lambda x: rt.group_norm(x, 2, w, b, 1e-3, (mesh["b"],), 20),
    )  # fmt: skip
    for leaf, original in ((w, weight), (b, bias)):
        gradient = rt.redistribute(leaf.grad, mesh["b"], "P -> I")
        check(gradient, original.grad, "S(0) I", mesh)


def test_group_norm_over_shards(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(4).run(group_norms)
