"""Sample calls of every operator in the table, of pointwise operators, and of the registry's long tail."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers.integrations.moe  # noqa: F401  (defines grouped_mm_fallback)
from torch import Tensor

import autopar.runtime.ctc  # noqa: F401  (defines ctc_loss)
from autopar.ops import overload


class Sample(NamedTuple):
    """An operator call. `exact`: integer inputs give integer results and gradients, so nothing may differ."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: bool

    def __str__(self) -> str:
        shapes = [_text(argument) for argument in (*self.args, *self.kwargs.values())]
        return f"{self.op}({', '.join(shapes)})"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, (list, tuple)) else str(value)


def exact(op: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(f"aten.{op}", args, kwargs, True)


def close(op: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(f"aten.{op}", args, kwargs, False)


def f(*shape: int) -> Tensor:
    """Small integers as float64, with a gradient."""
    return torch.randint(-4, 5, shape).to(torch.float64).requires_grad_()


def buffer(*shape: int) -> Tensor:
    return f(*shape).detach()


def distinct(*shape: int) -> Tensor:
    """No two values are equal, so that sorting has one answer."""
    count = torch.Size(shape).numel()
    return (torch.randperm(count) - count // 2).reshape(shape).to(torch.float64).requires_grad_()


def positive(*shape: int) -> Tensor:
    return torch.randint(1, 6, shape).to(torch.float64).requires_grad_()


def unit(*shape: int) -> Tensor:
    """Values strictly between 0 and 1."""
    return (torch.rand(shape, dtype=torch.float64) * 0.9 + 0.05).requires_grad_()


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def mask(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).bool()


def _ignored(targets: Tensor, value: int = -100) -> Tensor:
    return targets.masked_fill(torch.arange(targets.numel()).reshape(targets.shape) % 3 == 1, value)


def _cell(gates: int, inputs: int, width: int) -> list[Tensor]:
    shapes = [(gates * width, inputs), (gates * width, width), (gates * width,), (gates * width,)]
    return [f(*shape) for shape in shapes]


def _layers(projection: int) -> list[Tensor]:
    """Two layers of both directions, 3 units each, projected; the second layer reads both projections of the first."""
    sizes = [2, 2, 2 * projection, 2 * projection]
    shapes = [((12, size), (12, projection), (12,), (12,), (projection, 3)) for size in sizes]
    return [f(*shape) for cell in shapes for shape in cell]


def contractions() -> list[Sample]:
    return [
        exact("linear.default", f(4, 6), f(12, 6)),
        exact("linear.default", f(4, 6), f(12, 6), f(12)),
        exact("linear.default", f(2, 4, 6), f(12, 6), f(12)),
        exact("linear.default", f(1, 12, 6), f(12, 6), f(12)),
        exact("linear.default", f(6), f(4, 6), f(4)),
        exact("mm.default", f(4, 6), f(6, 12)),
        exact("mm.default", f(1, 12), f(12, 4)),
        exact("bmm.default", f(4, 6, 2), f(4, 2, 6)),
        exact("baddbmm.default", f(4, 2, 6), f(4, 2, 12), f(4, 12, 6)),
        exact("baddbmm.default", f(1, 2, 6), f(4, 2, 12), f(4, 12, 6), beta=2, alpha=3),
        exact("matmul.default", f(4, 6), f(6, 12)),
        exact("matmul.default", f(2, 4, 6), f(6, 12)),
        exact("matmul.default", f(2, 4, 6), f(2, 6, 2)),
        exact("matmul.default", f(2, 6, 4, 2), f(6, 2, 4)),
        exact("matmul.default", f(2, 1, 4, 2), f(1, 6, 2, 4)),
        exact("matmul.default", f(12), f(12)),
        exact("matmul.default", f(4, 12), f(12)),
        exact("matmul.default", f(12), f(2, 12, 6)),
        exact("matmul.default", f(12), f(12, 6)),
        exact("addmm.default", f(12), f(4, 6), f(6, 12)),
        exact("addmm.default", f(4, 12), f(4, 6), f(6, 12), beta=2, alpha=3),
        exact("addmm.default", f(1, 12), f(4, 6), f(6, 12)),
        exact("addmm.default", f(), f(4, 6), f(6, 12)),
        exact("addmm.default", f(4, 1), f(4, 6), f(6, 12)),
        exact("einsum.default", "bmk,bkn->bmn", [f(4, 6, 2), f(4, 2, 6)]),
        exact("einsum.default", "bthd,bshd->bhts", [f(2, 4, 6, 2), f(2, 12, 6, 2)]),
        exact("einsum.default", "gsec,gsm->egcm", [f(2, 6, 4, 2), f(2, 6, 12)]),
        exact("einsum.default", "ij,jk,kl->il", [f(4, 6), f(6, 2), f(2, 12)]),
        exact("einsum.default", "ij->j", [f(4, 6)]),
        exact("einsum.default", "ii->i", [f(4, 4)]),
        exact("einsum.default", "ab,cb->ac", [f(4, 1), f(6, 1)]),
        exact("einsum.default", "ab,cb->ac", [f(4, 1), f(6, 12)]),
        exact("einsum.default", "...ij,...jk->...ik", [f(2, 4, 6), f(2, 6, 2)]),
        exact("einsum.default", "AB,BC->AC", [f(4, 6), f(6, 2)]),
        exact("dot.default", f(12), f(12)),
        exact("mv.default", f(4, 6), f(6)),
        exact("conv1d.default", f(4, 6, 8), f(12, 6, 3), f(12), [1], [1]),
        exact("conv2d.default", f(4, 6, 5, 5), f(4, 6, 3, 3)),
        exact("conv2d.default", f(2, 6, 5, 5), f(12, 6, 3, 3), f(12), [2, 2], [1, 1]),
        exact("conv2d.default", f(4, 6, 4, 4), f(12, 1, 3, 3), f(12), [1, 1], [1, 1], [1, 1], 6),
        exact("conv2d.default", f(4, 12, 4, 4), f(12, 6, 1, 1), f(12), [1, 1], [0, 0], [1, 1], 2),
        exact("conv_transpose1d.default", f(4, 6, 4), f(6, 12, 3), f(12)),
        exact("conv_transpose2d.input", f(2, 6, 3, 3), f(6, 4, 2, 2), f(4), [2, 2]),
        exact("conv_transpose2d.input", f(4, 6, 3, 3), f(6, 2, 2, 2), f(12), [1, 1], [0, 0], [0, 0], 6),
        exact("conv_transpose3d.input", f(2, 4, 2, 2, 2), f(4, 6, 2, 2, 2)),
        exact("conv3d.default", f(2, 4, 3, 3, 3), f(6, 4, 2, 2, 2), f(6)),
    ]


def attentions() -> list[Sample]:
    op = "scaled_dot_product_attention.default"
    return [
        close(op, f(4, 6, 4, 2), f(4, 6, 8, 2), f(4, 6, 8, 4)),
        close(op, f(2, 4, 12, 2), f(2, 4, 12, 2), f(2, 4, 12, 2), None, 0.0, True),
        close(op, f(4, 6, 2), f(4, 8, 2), f(4, 8, 4)),
        close(op, f(2, 4, 6, 2), f(2, 4, 6, 2), f(2, 4, 6, 2), mask(6, 6) | torch.eye(6).bool()),
        close(op, f(2, 4, 6, 2), f(2, 4, 6, 2), f(2, 4, 6, 2), f(2, 4, 6, 6)),
        close(op, f(2, 4, 6, 2), f(2, 4, 6, 2), f(2, 4, 6, 2), f(2, 1, 6, 6)),
        close(op, f(2, 4, 6, 2), f(2, 4, 6, 2), f(2, 4, 6, 2), buffer(1, 1, 1, 6), scale=0.5),
        close(op, f(2, 4, 6, 2), f(2, 4, 6, 2), f(2, 4, 6, 2), f(4, 6, 6)),
        close(op, f(4, 6, 2), f(4, 6, 2), f(4, 6, 2), f(4, 6, 6)),
        close(op, f(4, 6, 2), f(4, 6, 2), f(4, 6, 2), f(6, 6)),
        close(op, f(2, 12, 4, 2), f(2, 4, 4, 2), f(2, 4, 4, 2), None, 0.0, True, enable_gqa=True),
        close(op, f(2, 12, 4, 2), f(2, 6, 4, 2), f(2, 6, 4, 2), None, 0.0, False, enable_gqa=True),
        close(op, f(2, 12, 4, 2), f(2, 2, 4, 2), f(2, 2, 4, 2), f(2, 12, 4, 4), 0.0, False, enable_gqa=True),
        close(op, f(2, 4, 4, 2), f(2, 1, 4, 2), f(2, 1, 4, 2), None, 0.0, False, enable_gqa=True),
        close(op, f(2, 4, 1, 2), f(2, 2, 6, 2), f(2, 2, 6, 2), f(2, 1, 1, 6), enable_gqa=True),
        close(op, f(2, 12, 1, 2), f(2, 4, 6, 2), f(2, 4, 6, 4), f(2, 12, 1, 6), enable_gqa=True, scale=0.5),
        close(op, f(2, 4, 4, 2), f(1, 4, 4, 2), f(1, 4, 4, 2)),
        close(op, f(2, 4, 4, 2), f(2, 1, 4, 2), f(2, 1, 4, 2)),
    ]


def contexts() -> list[Sample]:
    """Attention whose sequence may be split, too."""
    op, causal = "autopar.context_attention.default", (None, 0.0, True)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((f(4, 6, 4, 2), f(4, 6, 8, 2), f(4, 6, 8, 2)), {"length": 8}),
        ((f(4, 6, 6, 2), f(4, 6, 6, 2), f(4, 6, 6, 4)), {"length": 6}),
        ((f(2, 4, 12, 2), f(2, 4, 12, 2), f(2, 4, 12, 2), *causal), {"length": 12, "scale": 0.5}),
        ((f(4, 7, 2), f(4, 7, 2), f(4, 7, 4), *causal), {"length": 7}),
        ((f(2, 12, 12, 2), f(2, 4, 12, 2), f(2, 4, 12, 2), *causal), {"length": 12, "enable_gqa": True}),
        ((f(2, 6, 10, 2), f(2, 1, 10, 2), f(2, 1, 10, 2)), {"length": 10, "enable_gqa": True}),
        ((f(2, 4, 4, 2), f(2, 4, 4, 2), f(2, 4, 4, 2), f(4, 4)), {"length": 4}),
        ((f(2, 4, 4, 2), f(2, 4, 6, 2), f(2, 4, 6, 2), *causal), {"length": 6}),
        ((f(4, 6, 4, 2), f(4, 6, 8, 2), f(4, 6, 8, 4)), {"length": 8, "ring": True}),
        ((f(2, 12, 12, 2), f(2, 4, 12, 2), f(2, 4, 12, 2), *causal), {"length": 12, "enable_gqa": True, "ring": True}),
        ((f(4, 7, 2), f(4, 7, 2), f(4, 7, 2), *causal), {"length": 7, "ring": True}),
        ((f(2, 4, 6, 2), f(2, 4, 6, 2), f(2, 4, 6, 2), _seen(2, 1, 6, 6)), {"length": 6, "ring": True}),
        ((f(2, 4, 6, 2), f(2, 4, 4, 2), f(2, 4, 4, 2), buffer(6, 4)), {"length": 4, "ring": True}),
    ]
    return [Sample(op, args, kwargs, False) for args, kwargs in calls] + _windows()


def async_linears() -> list[Sample]:
    """Linear operators that may compute beside what they send: side by side, of rows of one dim and of two."""
    gathered, scattered = "autopar.gathered_linears.default", "autopar.scattered_linear.default"
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (gathered, (f(8, 6), [f(4, 6), f(8, 6)], []), {}),
        (gathered, (f(2, 4, 6), [f(4, 6), f(8, 6)], [f(4), f(8)]), {}),
        (gathered, (f(4, 8, 3), [f(12, 3)], [f(12)]), {}),
        (gathered, (f(7, 3), [f(5, 3)], []), {}),
        (scattered, (f(8, 12), f(5, 12)), {"dim": 0}),
        (scattered, (f(2, 4, 12), f(6, 12), f(6)), {"dim": 1}),
        (scattered, (f(4, 3, 8), f(2, 8), f(2)), {"dim": 0}),
        (scattered, (f(2, 7, 4), f(3, 4)), {"dim": 1}),
    ]
    return [Sample(op, args, kwargs, True) for op, args, kwargs in calls]


def _windows() -> list[Sample]:
    """Attention over windows that are shorter than a rank's part, longer, and of one key; of documents, too."""
    op, documents = "autopar.window_attention.default", torch.arange(12).div(5, rounding_mode="floor").expand(2, -1)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((f(2, 4, 12, 2), f(2, 4, 12, 2), f(2, 4, 12, 2)), {"window": 3, "length": 12, "scale": 0.5}),
        ((f(2, 12, 12, 2), f(2, 4, 12, 2), f(2, 4, 12, 2)), {"window": 8, "length": 12, "enable_gqa": True}),
        ((f(4, 2, 7, 2), f(4, 2, 7, 2), f(4, 2, 7, 4)), {"window": 1, "length": 7}),
        ((f(2, 4, 12, 2), f(2, 4, 12, 2), f(2, 4, 12, 2), documents.clone()), {"window": 4, "length": 12}),
        ((f(2, 4, 7, 2), f(2, 4, 7, 2), f(2, 4, 7, 2)), {"window": 5, "length": 7, "ring": True}),
        ((f(2, 4, 12, 2), f(2, 1, 12, 2), f(2, 1, 12, 2), documents.clone()),
         {"window": 7, "length": 12, "ring": True, "enable_gqa": True}),
    ]  # fmt: skip
    return [Sample(op, args, kwargs, False) for args, kwargs in calls] + _sinks(documents)


def _sinks(documents: Tensor) -> list[Sample]:
    """The same with a sink for each head: over windows, and over all before."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((f(2, 4, 12, 2), f(2, 4, 12, 2), f(2, 4, 12, 2), f(4)), {"window": 3, "length": 12, "scale": 0.5}),
        ((f(2, 12, 7, 2), f(2, 4, 7, 2), f(2, 4, 7, 2), f(12)), {"window": 7, "length": 7, "enable_gqa": True}),
        ((f(2, 4, 12, 2), f(2, 1, 12, 2), f(2, 1, 12, 2), f(4), documents.clone()),
         {"window": 7, "length": 12, "ring": True, "enable_gqa": True}),
    ]  # fmt: skip
    return [Sample("autopar.sink_attention.default", args, kwargs, False) for args, kwargs in calls]


def _seen(*shape: int) -> Tensor:
    """A mask that hides some keys, and from one query all."""
    mask = buffer(*shape) > 0
    mask[..., 1, :] = False
    return mask


def normalisations() -> list[Sample]:
    loss = "cross_entropy_loss.default"
    batch_norm = "_native_batch_norm_legit_functional.default"
    statistics = (buffer(6), positive(6).detach())
    return [
        close("layer_norm.default", f(4, 6, 12), [12], f(12), f(12)),
        close("layer_norm.default", f(4, 6), [6]),
        close("layer_norm.default", f(4, 6), [6], f(6)),
        close("layer_norm.default", f(4, 6), [6], None, f(6)),
        close("layer_norm.default", f(4, 2, 6), [2, 6], f(2, 6), f(2, 6)),
        close("group_norm.default", f(4, 6, 12), 3, f(6), f(6)),
        close("group_norm.default", f(4, 6, 2, 2), 2),
        close("rms_norm.default", f(4, 6, 12), [12], f(12), 1e-5),
        close("rms_norm.default", f(4, 6), [6]),
        close(batch_norm, f(12, 6), f(6), f(6), *statistics, True, 0.1, 1e-5),
        close(batch_norm, f(4, 6, 3, 2), f(6), f(6), *statistics, True, 0.1, 1e-5),
        close(batch_norm, f(4, 6, 3, 2), f(6), f(6), *statistics, False, 0.1, 1e-5),
        close("_weight_norm_interface.default", positive(6, 4, 3), f(6, 1, 1), 0),
        close("_weight_norm_interface.default", positive(4, 6, 12), f(1, 1, 12), 2),
        close("_weight_norm_interface.default", positive(12, 4), f(12, 1)),
        close(loss, f(12, 6), ids(6, 12)),
        close(loss, f(12, 6), _ignored(ids(6, 12)), None, 1),
        close(loss, f(12, 6), _ignored(ids(6, 12), 3), None, 1, 3),
        close(loss, f(12, 6), _ignored(ids(6, 12)), None, 2),
        close(loss, f(12, 6), _ignored(ids(6, 12)), None, 0),
        close(loss, f(12, 6), _ignored(ids(6, 12)), None, 1, -100, 0.1),
        close(loss, f(4, 6, 12), _ignored(ids(6, 4, 12))),
        close(loss, f(4, 6, 2, 4), _ignored(ids(6, 4, 2, 4)), None, 0),
        close(loss, f(4, 6, 2), _ignored(ids(6, 4, 2)), None, 2),
        close(loss, f(12, 6), ids(6, 12), positive(6).detach()),
        close(loss, f(12, 6), unit(12, 6)),
        close(loss, f(6), ids(6)),
        exact("embedding.default", f(12, 6), ids(12, 4)),
        exact("embedding.default", f(12, 6), ids(12, 4, 6)),
        exact("embedding.default", f(12, 6), ids(12, 4, 6), 3),
        close("embedding.default", f(12, 6), ids(12, 4), -1, True),
        exact("embedding.default", f(12, 6), ids(12)),
        exact("native_dropout.default", f(4, 6), 0.0, True),
        close("lstm.input", f(4, 3, 2), [f(1, 4, 3), f(1, 4, 3)], _cell(4, 2, 3), True, 1, 0.0, True, False, True),
        close("gru.input", f(3, 4, 2), f(2, 4, 3), [*_cell(3, 2, 3), *_cell(3, 2, 3)], True, 1, 0.0, True, True, False),
        close("lstm.input", f(3, 4, 2), [f(4, 4, 2), f(4, 4, 3)], _layers(2), True, 2, 0.0, True, True, False),
        close(
            "lstm.input", f(3, 4, 2), [f(1, 4, 3), f(1, 4, 3)], _cell(4, 2, 3)[:2], False, 1, 0.0, True, False, False
        ),
        close("rnn_tanh.input", f(4, 3, 2), f(1, 4, 3), _cell(1, 2, 3), True, 1, 0.0, True, False, True),
        close("rnn_relu.input", f(4, 3, 2), f(1, 4, 3), _cell(1, 2, 3), True, 1, 0.0, True, False, True),
        close("softmax.int", f(4, 6, 12), -1),
        close("softmax.int", f(4, 6), 0),
        close("_softmax.default", f(4, 6), 1, False),
        close("_safe_softmax.default", f(4, 6), -2),
        close("log_softmax.int", f(4, 6), 1),
        close("_log_softmax.default", f(4, 6), 1, False),
        exact("cumsum.default", f(4, 6), 1),
        exact("topk.default", distinct(4, 12), 2),
        exact("topk.default", distinct(4, 12), 2, 0),
        exact("sort.default", distinct(4, 12)),
        exact("sort.default", distinct(4, 12), 0, True),
        exact("one_hot.default", ids(6, 4, 12), 6),
        exact("gather.default", f(4, 12), 1, ids(12, 4, 6)),
        exact("gather.default", f(4, 12), 1, ids(12, 2, 6)),
        exact("gather.default", f(4, 12, 6), 0, ids(4, 6, 12, 2)),
        exact("gather.default", f(12, 4), 0, ids(12, 1, 4)),
    ]


def reductions() -> list[Sample]:
    return [
        exact("sum.default", f(4, 6)),
        exact("sum.dim_IntList", f(4, 6, 2), [1]),
        exact("sum.dim_IntList", f(4, 6, 2), [0, -1], True),
        exact("sum.dim_IntList", f(4, 6), None),
        exact("sum.dim_IntList", f(4, 6), []),
        exact("sum.dim_IntList", mask(4, 6), [1]),
        exact("sum.default", f()),
        close("mean.default", f(4, 6)),
        close("mean.dim", f(4, 6, 12), [1]),
        close("mean.dim", f(4, 6, 12), [0, -1], True),
        close("mean.dim", f(4, 6), None),
        close("amax.default", f(4, 6, 2), [1]),
        close("amax.default", f(4, 6), [], True),
        close("amin.default", f(4, 6, 2), [0, 2], True),
        exact("argmax.default", distinct(4, 6), 1),
        exact("argmax.default", distinct(4, 6)),
        exact("argmin.default", distinct(4, 6), 0, True),
        close("var.correction", f(4, 6, 12), [1], correction=0, keepdim=True),
        close("var.correction", f(4, 6), None),
        exact("max.dim", distinct(4, 6), 1),
        exact("min.dim", distinct(4, 6), 0, True),
        exact("any.dim", mask(4, 6), 1),
        exact("all.dim", mask(4, 6), 0, True),
        close("logsumexp.default", f(4, 6, 2), [1]),
        close("logsumexp.default", f(4, 6), [0, 1], True),
    ]


def rearrangements() -> list[Sample]:
    return [
        exact("alias.default", f(4, 6)),
        *(
            exact(op, f(*before), after)
            for op in ("view.default", "_unsafe_view.default", "reshape.default")
            for before, after in RESHAPES
        ),
        exact("transpose.int", f(4, 6, 2), 0, -1),
        exact("transpose.int", f(4, 6, 2), 1, 1),
        exact("t.default", f(4, 6)),
        exact("t.default", f(6)),
        exact("permute.default", f(4, 6, 2), [2, 0, 1]),
        exact("permute.default", f(4, 6, 2), [-1, -2, -3]),
        exact("unsqueeze.default", f(4, 6), 1),
        exact("unsqueeze.default", f(4, 6), -1),
        exact("unsqueeze.default", f(4), 0),
        exact("squeeze.default", f(1, 4, 1, 6)),
        exact("squeeze.dim", f(4, 1, 6), 1),
        exact("squeeze.dim", f(4, 2, 6), 1),
        exact("squeeze.dims", f(4, 1, 6, 1), [1, 3]),
        exact("squeeze.default", f(2, 3, 1)),
        exact("squeeze.dims", f(2, 3, 1), [0, 2]),
        exact("expand.default", f(4, 1, 6), [4, 12, 6]),
        exact("expand.default", f(4, 1), [2, 4, 6]),
        exact("expand.default", f(1, 4), [6, -1]),
        exact("expand.default", f(), [4, 6]),
        exact("slice.Tensor", f(4, 12), 1, 2, 8),
        exact("slice.Tensor", f(4, 12), 1, 0, 9223372036854775807, 2),
        exact("slice.Tensor", f(4, 12), 0),
        exact("slice.Tensor", f(4, 12), -1, -12, 12),
        exact("select.int", f(4, 12, 6), 1, 3),
        exact("select.int", f(4, 12, 6), 0, -1),
        exact("split.Tensor", f(4, 12), 6, 1),
        exact("split.Tensor", f(4, 12), 5, -1),
        exact("split_with_sizes.default", f(4, 12), [2, 4, 6], 1),
        exact("unbind.int", f(2, 4, 6)),
        exact("unbind.int", f(4, 2, 6), 1),
        exact("cat.default", [f(4, 6), f(4, 12)], 1),
        exact("cat.default", [f(4, 6), f(2, 6), f(6, 6)]),
        exact("cat.default", [f(12, 6)]),
        exact("stack.default", [f(4, 6), f(4, 6)]),
        exact("stack.default", [f(4, 6), f(4, 6), f(4, 6)], -1),
        exact("pad.default", f(4, 6), [1, 2]),
        exact("pad.default", f(4, 6, 4), [0, 0, 1, 0], "constant", 3.0),
        exact("constant_pad_nd.default", f(4, 6), [0, 0, 1, -1], 2),
        exact("flip.default", f(4, 6, 2), [1]),
        exact("roll.default", f(4, 6), [1], [0]),
        exact("roll.default", f(4, 6), [2]),
    ]


RESHAPES: list[tuple[tuple[int, ...], list[int]]] = [
    ((2, 4, 6), [8, 6]),
    ((4, 12), [4, 2, 6]),
    ((4, 12), [4, 6, -1]),
    ((4, 6, 2), [4, 12]),
    ((12, 4), [-1, 6, 4]),
    ((4, 6), [6, 4]),
    ((4, 6), [2, 12]),
    ((4, 6), [24]),
    ((24,), [4, 6]),
    ((1, 4, 6), [4, 6]),
    ((4, 6), [4, 1, 6, 1]),
    ((2, 1, 12), [2, 12]),
    ((6, 4), [3, 8]),
    ((1, 1), []),
    ((), [1, 1]),
    ((4, 6), [4, 6]),
    ((2, 2, 6), [1, 4, 3, 2]),
]


def pooling() -> list[Sample]:
    return [
        close("max_pool1d.default", distinct(4, 6, 6), [2]),
        close("max_pool3d.default", distinct(2, 4, 2, 4, 4), [2, 2, 2]),
        close("avg_pool1d.default", f(4, 6, 6), [2]),
        close("avg_pool3d.default", f(2, 4, 2, 4, 4), [2, 2, 2]),
        close("adaptive_avg_pool1d.default", f(4, 6, 6), [3]),
        close("adaptive_avg_pool3d.default", f(2, 4, 2, 4, 4), [1, 2, 2]),
        close("adaptive_max_pool1d.default", distinct(4, 6, 6), [3]),
        close("adaptive_max_pool2d.default", distinct(4, 6, 4, 4), [2, 2]),
        close("adaptive_max_pool2d.default", distinct(6, 4, 4), [2, 2]),
        close("adaptive_max_pool3d.default", distinct(2, 4, 2, 4, 4), [1, 2, 2]),
        close("upsample_nearest1d.vec", f(4, 6, 2), [4], None),
        close("upsample_nearest3d.vec", f(2, 4, 2, 2, 2), [4, 4, 4], None),
        close("upsample_linear1d.vec", f(4, 6, 2), [4], False, None),
        close("upsample_bilinear2d.vec", f(4, 6, 2, 3), [4, 6], True, None),
        close("upsample_bicubic2d.vec", f(4, 6, 4, 4), [6, 6], False, None),
        close("upsample_trilinear3d.vec", f(2, 4, 2, 2, 2), [4, 4, 4], False, None),
        exact("tril.default", f(4, 6, 6)),
        exact("triu.default", f(4, 2, 6, 6), 1),
        exact("diagonal.default", f(4, 6, 6), 0, 1, 2),
        exact("diagonal.default", f(4, 6, 12), 1, -1, 0),
        exact("unfold.default", f(4, 12, 6), 1, 4, 2),
        exact("argsort.default", distinct(4, 12), 1),
        close("max_pool2d.default", f(4, 6, 6, 6), [2, 2]),
        close("max_pool2d.default", f(6, 6, 6), [2, 2]),
        close("max_pool2d.default", f(6, 4, 8), [2, 2]),
        close("avg_pool2d.default", f(4, 6, 6, 6), [3, 3], [2, 2], [1, 1]),
        close("adaptive_avg_pool2d.default", f(4, 6, 6, 6), [3, 2]),
        close("adaptive_avg_pool2d.default", f(6, 4, 6), [1, 1]),
        close("upsample_nearest2d.vec", f(4, 6, 2, 3), [4, 6], None),
        close("upsample_nearest2d.vec", f(4, 6, 2, 3), None, [2.0, 2.0]),
    ]


_UNARY = ("relu", "gelu", "silu", "tanh", "sigmoid", "exp", "neg", "abs", "sin", "cos", "square", "elu", "leaky_relu",
          "hardtanh", "softplus", "erf", "hardswish", "mish", "log_sigmoid", "detach", "clone", "contiguous", "sign",
          "floor", "isnan", "relu6", "selu", "reciprocal_square", "expm1", "tan", "frac", "logit_unit", "sgn",
          "positive", "square", "zeros_like", "ones_like", "round", "trunc")  # fmt: skip


def _unary() -> list[Sample]:
    found = []
    for name in _UNARY:
        if hasattr(torch.ops.aten, name) and "default" in getattr(torch.ops.aten, name).overloads():
            found.append(close(f"{name}.default", f(4, 6)))
    return found


def pointwise() -> list[Sample]:
    return [
        *_unary(),
        *(close(f"{name}.default", positive(4, 6)) for name in ("sqrt", "rsqrt", "log", "reciprocal", "log1p")),
        *(close(f"{name}.default", unit(4, 6)) for name in ("asin", "acos", "atanh", "logit")),
        exact("add.Tensor", f(4, 6), f(4, 6)),
        exact("add.Tensor", f(4, 6), f(6), alpha=3),
        exact("add.Tensor", f(4, 1, 6), f(12, 1)),
        exact("add.Tensor", f(4, 6), 2),
        exact("add.Tensor", f(4, 6), ids(5, 4, 6)),
        exact("add.Tensor", f(4, 6), f()),
        exact("sub.Tensor", f(4, 6), f(1, 6), alpha=2),
        exact("rsub.Scalar", f(4, 6), 1.0),
        exact("mul.Tensor", f(4, 6), f(4, 6)),
        exact("mul.Tensor", f(4, 6), f(4, 1)),
        exact("mul.Tensor", f(4, 6), 3.0),
        exact("mul.Tensor", f(4, 6), mask(4, 6)),
        exact("mul.Scalar", f(4, 6), 3),
        close("div.Tensor", f(4, 6), positive(4, 6)),
        close("div.Tensor", f(4, 6), positive(6)),
        exact("div.Tensor", f(4, 6), 2.0),
        exact("div.Scalar", f(4, 6), 2.0),
        close("div.Tensor_mode", f(4, 6), positive(6), rounding_mode="floor"),
        close("pow.Tensor_Scalar", f(4, 6), 2),
        close("pow.Tensor_Tensor", positive(4, 6), positive(6)),
        close("pow.Scalar", 2.0, f(4, 6)),
        exact("where.self", mask(4, 6), f(4, 6), f(4, 6)),
        exact("where.self", mask(4, 6), f(6), f()),
        exact("where.self", mask(6), f(4, 6), buffer()),
        exact("masked_fill.Scalar", f(4, 6), mask(4, 6), 1.0),
        exact("masked_fill.Scalar", f(4, 6), mask(6), 1.0),
        exact("masked_fill.Tensor", f(4, 6), mask(4, 6), f()),
        exact("eq.Scalar", f(4, 6), 1),
        exact("eq.Tensor", f(4, 6), f(6)),
        exact("ge.Tensor", ids(5, 4, 6), ids(5, 6)),
        exact("logical_and.default", mask(4, 6), mask(6)),
        exact("logical_not.default", mask(4, 6)),
        exact("bitwise_or.Tensor", mask(4, 6), mask(6)),
        exact("__and__.Tensor", mask(4, 6), mask(6)),
        exact("__or__.Tensor", mask(4, 6), mask(4, 6)),
        close("maximum.default", distinct(4, 6), f(6)),
        close("minimum.default", f(4, 6), distinct(4, 6)),
        close("clamp.default", f(4, 6), -2, 2),
        close("clamp.Tensor", f(4, 6), buffer(6), None),
        close("clamp_min.default", f(4, 6), 0.0),
        close("atan2.default", f(4, 6), positive(6)),
        close("lerp.Tensor", f(4, 6), f(4, 6), f(6)),
        close("lerp.Scalar", f(4, 6), f(6), 0.5),
        exact("addcmul.default", f(4, 6), f(4, 6), f(6), value=2),
        close("addcdiv.default", f(4, 6), f(4, 6), positive(6)),
        close("threshold.default", f(4, 6), 1.0, 0.0),
        close("nan_to_num.default", f(4, 6)),
        close("xlogy.Tensor", f(4, 6), positive(6)),
        close("remainder.Scalar", f(4, 6), 3),
        close("fmod.Scalar", f(4, 6), 3),
        exact("floor_divide.default", ids(9, 4, 6), 2),
        exact("bitwise_and.Scalar", ids(9, 4, 6), 3),
        exact("bitwise_or.Scalar", ids(9, 4, 6), 3),
        exact("bitwise_xor.Scalar", ids(9, 4, 6), 3),
        exact("__xor__.Tensor", mask(4, 6), mask(6)),
        exact("__lshift__.Scalar", ids(9, 4, 6), 2),
        exact("__rshift__.Scalar", ids(9, 4, 6), 1),
        exact("__rshift__.Tensor", ids(9, 4, 6), ids(3, 6)),
        exact("__lshift__.Tensor", ids(9, 4, 6), ids(3, 4, 1)),
        exact("__and__.Scalar", ids(9, 4, 6), 3),
        exact("__or__.Scalar", ids(9, 4, 6), 3),
        exact("__xor__.Scalar", ids(9, 4, 6), 3),
        exact("bitwise_left_shift.Tensor_Scalar", ids(9, 4, 6), 2),
        exact("bitwise_right_shift.Tensor_Scalar", ids(9, 4, 6), 2),
        exact("remainder.Scalar_Tensor", 7, ids(4, 4, 6) + 1),
        close("div.Scalar_mode", f(4, 6), 3.0, rounding_mode="trunc"),
        close("float_power.Tensor_Scalar", positive(4, 6), 1.5),
        close("float_power.Scalar", 2.0, f(4, 6)),
        close("clamp_max.default", f(4, 6), 1.0),
        close("xlogy.Scalar_Other", f(4, 6), 2.0),
        close("xlogy.Scalar_Self", 2.0, positive(4, 6)),
        exact("_to_copy.default", f(4, 6), dtype=torch.float32),
        exact("_to_copy.default", f(4, 6)),
        exact("_to_copy.default", f(4, 6), dtype=torch.int64),
        exact("_to_copy.default", mask(4, 6), dtype=torch.float64),
        exact("to.dtype", f(4, 6), torch.float32),
        exact("full_like.default", f(4, 6), 3.0),
        exact("empty_like.default", f(0, 4)),
        exact("ones_like.default", f(4, 6)),
    ]


def communicating() -> list[Sample]:
    """Operators that communicate inside when their images, groups, rows or experts are split."""
    statistics = (buffer(6), positive(6).detach())
    batch_norm = "_native_batch_norm_legit"
    return [
        exact("convolution.default", f(4, 6, 5), f(4, 6, 3), f(4), [1], [1], [1], False, [0], 1),
        exact("convolution.default", f(2, 6, 5, 5), f(6, 3, 3, 3), None, [1], [1], [1], False, [0], 2),
        exact("convolution.default", f(2, 6, 3, 4), f(6, 2, 2, 2), f(4), [2, 2], [0, 0], [1, 1], True, [0, 0], 2),
        exact("conv1d.default", f(2, 3, 12), f(4, 3, 5), f(4), [1], [2]),
        exact("conv1d.default", f(2, 3, 12), f(4, 3, 1), f(4), [1], [0]),
        exact("conv1d.default", f(2, 3, 12), f(4, 3, 1), None, [1], [2]),
        exact("conv1d.default", f(2, 3, 12), f(4, 3, 2), None, [2]),
        exact("conv1d.default", f(2, 3, 13), f(4, 3, 3), None, [2], [4], [3]),
        exact("conv1d.default", f(2, 3, 6), f(4, 3, 7), None, [1], [3]),  # a halo longer than a shard
        exact("conv1d.default", f(4, 12), f(6, 4, 3), f(6), [1], [1]),  # without a batch
        exact("conv1d.default", f(6, 12), f(6, 1, 3), None, [1], [1], [1], 6),
        exact("conv_transpose1d.default", f(6, 4), f(6, 12, 3), f(12)),
        exact("conv_transpose1d.default", f(6, 4), f(6, 2, 3), None, [1], [0], [0], 6),
        exact("conv2d.default", f(2, 3, 8, 6), f(4, 3, 3, 3), f(4), [1, 1], [1, 1]),
        exact("conv2d.default", f(2, 3, 9, 8), f(4, 3, 3, 2), None, [2, 1], [1, 0], [2, 3]),
        exact("conv2d.default", f(2, 4, 8, 6), f(8, 1, 3, 3), f(8), [1, 1], [1, 1], [1, 1], 4),
        exact("conv2d.default", f(2, 3, 4, 4), f(6, 3, 4, 4), f(6), [4, 4]),
        exact("conv3d.default", f(1, 2, 4, 6, 4), f(3, 2, 3, 3, 3), f(3), [1, 1, 1], [1, 1, 1]),
        exact("max_pool1d.default", distinct(2, 3, 12), [3], [2], [1]),
        exact("max_pool2d.default", distinct(2, 3, 8, 6), [3, 3], [2, 2], [1, 1]),
        exact("max_pool2d.default", distinct(2, 3, 8, 6), [2], [2], [0], [2]),
        exact("max_pool2d.default", distinct(2, 3, 7, 6), [2, 2], [2, 2], [0, 0], [1, 1], True),
        exact("max_pool3d.default", distinct(1, 2, 4, 4, 6), [3, 3, 3], [1, 1, 1], [1, 1, 1]),
        close("avg_pool1d.default", f(2, 3, 12), [3], [2], [1]),
        close("avg_pool1d.default", f(2, 3, 12), [3], [2], [1], False, False),
        close("avg_pool2d.default", f(2, 3, 8, 6), [3, 2], [2, 1], [1, 1], False, False),
        close("avg_pool2d.default", f(2, 3, 8, 6), [2, 2], [2, 2], [0, 0], True, True, 3),
        close("avg_pool3d.default", f(1, 2, 4, 4, 6), [3, 3, 3], [1, 1, 1], [1, 1, 1]),
        close("adaptive_avg_pool1d.default", f(4, 6, 6), [1]),
        close("adaptive_avg_pool2d.default", f(4, 6, 4, 6), [1, 1]),
        close("adaptive_avg_pool3d.default", f(2, 3, 4, 2, 6), [1, 1, 1]),
        exact("upsample_nearest1d.vec", f(2, 3, 4), None, [3.0]),
        exact("upsample_nearest2d.vec", f(2, 3, 4, 6), None, [2.0, 1.0]),
        close("upsample_nearest2d.vec", f(2, 3, 4, 6), None, [1.5, 2.0]),
        exact("upsample_nearest3d.vec", f(1, 2, 2, 4, 3), None, [2.0, 2.0, 2.0]),
        close("group_norm.default", f(2, 12, 4, 6), 6, f(12), f(12)),
        close("group_norm.default", f(2, 12, 4, 6), 4, None, None, 1e-3),
        close("group_norm.default", f(4, 6, 8), 1, f(6), f(6)),
        close("group_norm.default", f(4, 6), 3, f(6), f(6)),
        close("_native_batch_norm_legit_functional.default", f(4, 6, 8), None, None, *statistics, True, 0.3, 1e-5),
        close(f"{batch_norm}.no_stats", f(4, 6, 3), f(6), f(6), True, 0.1, 1e-5),
        close(f"{batch_norm}.no_stats", f(1, 12, 3), None, None, True, 0.1, 1e-5),
        close(f"{batch_norm}.no_stats", f(4, 6, 4, 2), f(6), f(6), True, 0.1, 1e-5),
        close(f"{batch_norm}_no_training.default", f(4, 6, 4), f(6), f(6), *statistics, 0.1, 1e-5),
        close(f"{batch_norm}_no_training.default", f(4, 6, 4), None, None, *statistics, 0.1, 1e-5),
        *_bags(),
        *_routing(),
    ]


def _bags() -> list[Sample]:
    """Twelve rows 6 wide, in bags of which one is empty."""
    op = "_embedding_bag.default"
    begins, ends_too = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 3, 3, 8, 12])
    return [
        exact(op, f(12, 6), ids(12, 12), begins),
        exact(op, f(12, 6), ids(12, 12), begins, False, 0, False, f(12)),
        exact(op, f(12, 6), ids(12, 12), ends_too, False, 0, False, f(12), True, 5),
        close(op, f(12, 6), ids(12, 12), begins, False, 1),
        close(op, f(12, 6), ids(4, 12), ends_too, False, 1, False, None, True, 2),
        exact(op, distinct(12, 6), ids(12, 12), torch.tensor([0, 3, 5, 8]), False, 2),
        close(op, f(12, 6), ids(12, 12), begins, True, 0),
    ]


def _routing() -> list[Sample]:
    """Tokens 6 wide, two of eight experts each; one expert is chosen by no token."""
    chosen = torch.stack([torch.randperm(7)[:2] for _ in range(12)])
    experts = f(8, 6, 4), f(8, 4, 6)
    ends = torch.tensor([0, 3, 3, 8, 12]).int()
    exact_groups = Sample("transformers.grouped_mm_fallback.default", (f(12, 6), f(5, 6, 4), ends), {}, True)
    op = "autopar.routed_experts.default"
    product, clamped = "c = mul(a, b)", "c = clamp(a, None, 0.5); d = sigmoid(c); e = add(b, 1); g = mul(d, e)"
    return [
        Sample(op, (f(12, 6), chosen, f(12, 2), *experts, "relu", False, 8), {}, True),
        Sample(op, (f(12, 6), chosen, unit(12, 2), f(8, 6, 8), f(8, 4, 6), "silu", True, 8), {}, False),
        Sample(op, (f(12, 6), chosen[:, :1], unit(12, 1), f(8, 6, 8), f(8, 4, 6), "gelu_tanh", True, 8), {}, False),
        Sample(
            op, (f(12, 6), chosen, f(12, 2), f(8, 6, 2, 4), f(8, 4, 6), product, True, 8, f(8, 2, 4), f(8, 6)), {}, True
        ),
        Sample(
            op,
            (f(12, 6), chosen % 5, unit(12, 2), f(5, 6, 4, 2), f(5, 4, 6), clamped, True, 5, f(5, 4, 2), f(5, 6)),
            {"paired": True, "chunks": 3},
            False,
        ),
        exact_groups,
        exact("histc.default", buffer(4, 12), 4, -4, 4),
        exact("histc.default", buffer(4, 12), 4),
    ]


def table_samples() -> list[Sample]:
    """Samples of every operator that the table or torch's pointwise tag covers."""
    torch.manual_seed(0)
    groups = (
        *(
            contractions,
            async_linears,
            attentions,
            contexts,
            normalisations,
            reductions,
            rearrangements,
            pooling,
            pointwise,
        ),
        communicating,
    )
    return [sample for group in groups for sample in group()]


def exists(op: str) -> bool:
    try:
        overload(op)
    except Exception:
        return False
    return True


def registry_samples() -> list[Sample]:
    """Samples of operators that only DTensor's registry has rules for."""
    torch.manual_seed(0)
    return [
        exact("diagonal_scatter.default", f(4, 6, 6), f(4, 6), 0, 1, 2),
        close("prod.default", positive(2, 4)),
        exact("max.default", distinct(4, 6)),
        exact("min.default", distinct(4, 6)),
        exact("any.default", mask(4, 6)),
        exact("all.default", mask(4, 6)),
        exact("median.default", distinct(4, 6)),
        close("native_layer_norm.default", f(4, 6, 12), [12], f(12), f(12), 1e-5),
        close("native_group_norm.default", f(4, 6, 4), f(6), f(6), 4, 6, 4, 2, 1e-5),
        close("_fused_rms_norm.default", f(4, 6, 12), [12], f(12), 1e-5),
        close("nll_loss_forward.default", f(12, 6), ids(6, 12), None, 1, -100),
        close("nll_loss_forward.default", f(12, 6), ids(6, 12), None, 0, -100),
        close("nll_loss2d_forward.default", f(4, 6, 2, 4), ids(6, 4, 2, 4), None, 2, -100),
        close("_adaptive_avg_pool2d.default", f(4, 6, 6, 6), [3, 2]),
        close("max_pool2d_with_indices.default", distinct(4, 6, 4, 4), [2, 2]),
        close("max_pool3d_with_indices.default", distinct(2, 4, 2, 4, 4), [2, 2, 2]),
        close("upsample_bilinear2d.default", f(4, 6, 2, 3), [4, 6], False),
        close("upsample_nearest1d.default", f(4, 6, 2), [4]),
        exact("linalg_cross.default", f(4, 3, 6), f(4, 3, 6), dim=1),
        close("linalg_inv_ex.default", unit(4, 3, 3)),
        close("cholesky.default", torch.eye(3, dtype=torch.float64).expand(4, 3, 3).clone().requires_grad_()),
        exact("expand_copy.default", f(4, 1), [4, 6]),
        exact("split_with_sizes_copy.default", f(4, 12), [6, 6], 1),
        exact("diagonal_copy.default", f(4, 6, 6), 0, 1, 2),
        exact("diag.default", f(6)),
    ]
