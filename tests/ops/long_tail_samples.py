"""Sample calls of indexing, scattering and the long tail: negative dims, broadcasts from 1, ties, duplicates."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.samples import Sample, buffer, close, distinct, exact, f, ids, mask, positive, unit


def _orders(count: int, length: int, size: int) -> Tensor:
    """Rows of different places."""
    return torch.stack([torch.randperm(size)[:length] for _ in range(count)])


def lookups() -> list[Sample]:
    index = "index.Tensor"
    return [
        exact(index, f(4, 12), [None, ids(12, 6)]),
        exact(index, f(12, 4), [ids(12, 6)]),
        exact(index, f(12, 4), [ids(12, 6) - 12]),
        exact(index, f(6, 4, 12), [ids(6, 4), ids(4, 4)]),
        exact(index, f(6, 4, 12), [ids(6, 4, 1), ids(4, 6)]),
        exact(index, f(4, 6, 12, 2), [None, ids(6, 4), None, ids(2, 4)]),
        exact(index, f(4, 6, 12, 2), [None, ids(6, 4), ids(12, 2, 4)]),
        exact(index, f(4, 6, 12), [None, None, ids(12)]),
        exact(index, f(4, 1, 12), [ids(4, 6), None, ids(12, 1)]),
        exact(index, buffer(6, 4), [torch.tensor([True, False, True, True, False, False])]),
        exact("_unsafe_index.Tensor", f(4, 12), [None, ids(12, 6)]),
        exact("index_select.default", f(4, 12), 1, ids(12, 6)),
        exact("index_select.default", f(12, 4), -2, ids(12, 6)),
        exact("index_select.default", f(4, 12), -1, ids(12)),
        exact("gather.default", f(4, 12), 1, ids(12, 4, 6)),
        exact("gather.default", f(4, 12), -1, ids(12, 2, 6)),
        exact("gather.default", f(4, 12, 6), 0, ids(4, 6, 12, 2)),
        exact("gather.default", f(12, 4), 0, ids(12, 1, 4)),
        exact("gather.default", f(12), 0, ids(12)),
        exact("take.default", f(4, 6), ids(24, 6, 2)),
        exact("bucketize.Tensor", f(4, 12), buffer(6).sort().values),
        exact("bucketize.Tensor", f(4, 12), buffer(6).sort().values, right=True),
        exact("searchsorted.Tensor", buffer(6).sort().values, f(4, 12)),
        exact("searchsorted.Tensor", buffer(4, 6).sort().values, f(4, 12), right=True),
        exact("searchsorted.Tensor", buffer(4, 6), buffer(4, 12), sorter=ids(6, 4, 6)),
    ]


def writes() -> list[Sample]:
    places, order = _orders(4, 6, 12), torch.randperm(12)
    put = "index_put.default"
    return [
        exact("scatter.src", f(4, 12), 1, places, f(4, 6)),
        exact("scatter.src", f(4, 12), -1, places, buffer(6, 6)),
        exact("scatter.src", f(6, 12), 1, places, f(4, 6)),
        exact("scatter.value", f(4, 12), 1, places, 2.0),
        exact("scatter.value", f(4, 12), 1, ids(12, 4, 6), 0),
        exact("scatter.reduce", buffer(4, 12), 1, ids(12, 4, 6), buffer(4, 6), reduce="add"),
        exact("scatter.reduce", buffer(4, 12), 1, places, buffer(4, 6), reduce="multiply"),
        exact("scatter.value_reduce", buffer(4, 12), 1, ids(12, 4, 6), 2.0, reduce="add"),
        exact("scatter_add.default", f(4, 12), 1, ids(12, 4, 6), f(4, 6)),
        exact("scatter_add.default", f(12, 6), 0, ids(12, 4, 6), f(4, 6)),
        exact("scatter_add.default", f(4, 12), -1, ids(12, 4, 6), buffer(4, 12)),
        exact("scatter_add.default", f(12, 6), -2, ids(12, 4, 2), buffer(6, 2)),
        exact("scatter_reduce.two", f(4, 12), 1, ids(12, 4, 6), f(4, 6), "sum"),
        exact("scatter_reduce.two", f(4, 12), 1, ids(12, 4, 6), f(4, 6), "sum", include_self=False),
        close("scatter_reduce.two", f(4, 12), 1, ids(12, 4, 6), f(4, 6), "amax"),
        close("scatter_reduce.two", f(4, 12), 1, ids(12, 4, 6), f(4, 6), "mean"),
        exact("index_add.default", f(4, 12), 1, ids(12, 6), f(4, 6)),
        exact("index_add.default", f(12, 4), -2, ids(12, 6), f(6, 4), alpha=3),
        exact("index_copy.default", f(4, 12), 1, order[:6], f(4, 6)),
        exact("index_fill.int_Scalar", f(4, 12), 1, order[:6], 2.0),
        exact("index_fill.int_Scalar", f(4, 12), 1, ids(12, 6), 0),
        exact("index_fill.int_Tensor", f(4, 12), -1, order[:6], f()),
        close("index_reduce.default", f(4, 12), 1, order[:6], f(4, 6), "amax"),
        exact(put, f(12, 4), [order[:6]], f(6, 4)),
        exact(put, f(4, 12), [None, order[:6]], f(4, 6), True),
        exact(put, f(4, 12), [None, ids(12, 6)], f(6), True),
        exact(put, f(12, 4), [order[:6]], f(), True),
        exact(put, f(12, 4), [ids(12, 6)], f(6, 1), True),
        exact(put, f(6, 4, 12), [ids(6, 2, 1), None, ids(12, 6)], f(2, 6, 4), True),
        exact(put, f(6, 12, 2), [ids(6, 4), ids(12, 4)], f(4, 2), True),
        exact(put, f(4, 6), [mask(4, 6)], f()),
        exact(put, f(4, 6, 2), [None, mask(6, 2)], f(1)),
        exact("_unsafe_index_put.default", f(12, 4), [order[:6]], f(6, 4)),
        exact("slice_scatter.default", f(4, 12), f(4, 6), 1, 2, 8),
        exact("slice_scatter.default", f(12, 4), f(4, 4), 0, 0, 12, 3),
        exact("select_scatter.default", f(4, 12, 6), f(4, 6), 1, 3),
        exact("select_scatter.default", f(4, 12, 6), f(12, 6), -3, -1),
    ]


def selections() -> list[Sample]:
    return [
        close("cumprod.default", positive(4, 6), 1),
        close("cumprod.default", positive(4, 6), -1),  # DTensor's rule takes this for dim 0
        close("logcumsumexp.default", f(4, 6), -2),
        exact("cummax.default", distinct(4, 12), -1),
        exact("cummin.default", distinct(4, 12), 0),
        exact("sort.stable", distinct(4, 12), stable=True, dim=-2),
        exact("sort.stable", ids(3, 4, 12), stable=True),
        exact("topk.default", distinct(4, 12), 2, -2, False),
        exact("median.dim", distinct(4, 6), -1),
        exact("nanmedian.dim", distinct(4, 6), 0, True),
        exact("kthvalue.default", distinct(4, 12), 2, 1),
        exact("mode.default", ids(3, 4, 6), 1),
        close("amax.default", ids(2, 4, 6).double().requires_grad_(), [-1]),  # ties share the gradient
        exact("argmax.default", ids(2, 4, 6), 1, True),
    ]


def sums() -> list[Sample]:
    norm = "linalg_vector_norm.default"
    return [
        exact("nansum.default", torch.where(mask(4, 6), torch.nan, buffer(4, 6)), [1]),
        exact("nansum.default", f(4, 6), [0], True),
        close(norm, positive(4, 6), 2, [1]),
        close(norm, positive(4, 6), 1, [0], True),
        close(norm, f(4, 6), 1),
        close(norm, f(4, 6), float("inf"), [-1]),
        close("var_mean.correction", f(4, 6, 12), [1], correction=0, keepdim=True),
        close("var_mean.correction", f(4, 6), None, correction=1),
        close("std.correction", f(4, 6, 12), [-2], correction=1),
        close("std_mean.correction", f(4, 6, 12), [0, 2]),
        close("prod.dim_int", positive(4, 6), 1),
        close("prod.dim_int", positive(4, 6), -2, True),
        exact("any.dims", mask(4, 6, 2), [1, 2]),
        exact("all.dims", mask(4, 6, 2), [0, -1], True),
        exact("histc.default", buffer(4, 12), 4, -4, 4),
        exact("histc.default", buffer(4, 12), 4),
    ]


def others() -> list[Sample]:
    return [
        exact("einsum.default", "...ij,...jk->...ik", [f(2, 4, 6), f(2, 6, 2)]),
        exact("einsum.default", "b...d,d->b...", [f(4, 2, 6, 12), f(12)]),
        exact("einsum.default", "...i,...i", [f(4, 6), f(1, 6)]),
        exact("einsum.default", "AB,BC->AC", [f(4, 6), f(6, 2)]),
        exact("einsum.default", "aA,Ab", [f(4, 6), f(6, 2)]),
        exact("einsum.default", "iij,ij->ij", [f(4, 4, 6), f(4, 6)]),
        exact("einsum.default", "ii", [f(4, 4)]),
        exact("einsum.default", "...ii->...i", [f(6, 4, 4)]),
        exact("addmv.default", f(4), f(4, 6), f(6), beta=2, alpha=3),
        exact("addmv.default", f(), f(4, 6), f(6)),
        exact("addbmm.default", f(2, 6), f(4, 2, 12), f(4, 12, 6)),
        exact("addr.default", f(4, 6), f(4), f(6)),
        exact("addr.default", f(6), f(4), f(6), beta=2),
        exact("baddbmm.default", f(6), f(4, 2, 12), f(4, 12, 6)),
        exact("diag_embed.default", f(4, 6)),
        exact("diag_embed.default", f(4, 2, 6), 1, 0, -2),
        exact("transpose.int", f(), 0, -1),
        exact("mean.dim", f(), [-1]),
        exact("view_copy.default", f(4, 6), [24]),
        exact("view_copy.default", f(12, 4), [-1, 6, 4]),
        exact("_reshape_copy.default", f(4, 6), [2, 2, 6]),
        exact("view.dtype", buffer(4, 6), torch.int64),
        exact("view.dtype", buffer(4, 6), torch.int32),
        exact("view_as_complex.default", f(4, 6, 2)),
        exact("view_as_real.default", torch.view_as_complex(buffer(4, 6, 2))),
        exact("repeat.default", f(4, 6), [2, 1, 3]),
        exact("repeat.default", f(4, 6), [1, 1]),
        exact("repeat.default", f(4, 1), [1, 6]),
        exact("unsafe_split.Tensor", f(4, 12), 6, 1),
        exact("unsafe_split_with_sizes.default", f(4, 12), [2, 10], -1),
        exact("lerp.Scalar", f(4, 6), f(4, 6), 2.0),
        exact("lerp.Tensor", f(4, 6), f(4, 6), f(4, 6)),
        exact("addcmul.default", f(4, 6), f(6), f(4, 1), value=3),
        exact("masked_fill.Scalar", f(4, 6), mask(4, 6), 0),
        close("linalg_solve_triangular.default", torch.eye(3).double().repeat(4, 1, 1), f(4, 3, 6), upper=True),
        close("linalg_solve_triangular.default", torch.eye(3).double(), f(4, 6, 3), upper=False, left=False),
        close("_cdist_forward.default", f(2, 4, 3), f(2, 6, 3), 2.0, None),
        close("_cdist_forward.default", f(4, 3), f(2, 6, 3), 1.0, None),
        close("_euclidean_dist.default", f(2, 4, 3), f(2, 6, 3)),
        close("_euclidean_dist.default", f(4, 3), f(6, 3)),
        close("binary_cross_entropy.default", unit(4, 6), unit(4, 6), None, 0),
        close("binary_cross_entropy.default", unit(4, 6), unit(4, 6), positive(4, 6).detach(), 0),
        close("grid_sampler_2d.default", f(4, 6, 3, 3), unit(4, 2, 6, 2), 0, 0, False),
        close("grid_sampler_3d.default", f(2, 4, 3, 3, 2), unit(2, 2, 4, 2, 3), 0, 1, True),
        exact("_prelu_kernel.default", f(4, 6, 2), f(1, 6, 1)),
        close("pad.default", f(4, 6, 12), [2, 1], "reflect"),
        close("pad.default", f(4, 6, 12), [2, 1], "circular"),
        close("pad.default", f(4, 6, 12), [0, 0, 2, 1], "replicate"),
        exact("roll.default", f(4, 6, 2), [1, -1], [0, -1]),
        exact("flip.default", f(4, 6, 2), [-1, 0]),
        exact("as_strided.default", f(4, 6), [2, 3], [6, 2]),
    ]


def ctc() -> list[Sample]:
    """Sound of twelve frames; targets in rows, some shorter, and one after another."""
    op, frames = "autopar.ctc_loss.default", torch.tensor([12, 9, 12, 6])
    short, rows = torch.tensor([3, 0, 2, 1]), ids(6, 4, 3) % 5 + 1
    flat = torch.cat([row[:length] for row, length in zip(rows, short.tolist(), strict=True)])
    return [
        Sample(op, (f(12, 4, 6), rows, frames, short, 0, False), {}, False),
        Sample(op, (f(12, 4, 6), rows, frames, torch.full((4,), 3), 0, True), {}, False),
        Sample(op, (f(12, 4, 6), flat, frames, short, 0, False), {}, False),
    ]


def caches() -> list[Sample]:
    """Rows of sequences that are of other lengths, some of which write nothing."""
    op, positions = "autopar.write_rows.default", (torch.arange(3) + torch.tensor([[5], [0], [4], [2]])) % 8
    is_written = torch.arange(3) < torch.tensor([[3], [0], [1], [2]])
    return [
        Sample(op, (f(4, 6, 8, 2).detach(), positions, f(4, 6, 3, 2).detach(), is_written), {}, True),
        Sample(op, (f(4, 6, 8, 2).detach(), positions[:, :1], f(4, 6, 1, 2).detach(), is_written[:, :1]), {}, True),
    ]


def long_tail() -> list[Sample]:
    return [sample for group in (lookups, writes, selections, sums, others, ctc, caches) for sample in group()]
