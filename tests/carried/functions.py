"""Autograd Functions of every kind that a program has to call as the model does. They stand at the top of a module, so
that the program can import them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

F = torch.nn.functional


class Reverse(torch.autograd.Function):
    """Gradient reversal; a number that no gradient is for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Sign(torch.autograd.Function):
    """Straight through, where small: what a saved tensor decides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class Clipped(torch.autograd.Function):
    """Not linear in the gradient: no slice and no summand of it would do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (ctx.most / gradient.norm()).clamp(max=1.0), None


class ReadsTwice(torch.autograd.Function):
    """Asks for what it has saved as often as it likes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x = ctx.saved_tensors[0]
        return gradient * ctx.saved_tensors[1], (gradient * x).sum_to_size(*ctx.saved_tensors[1].shape)


class ClippedEach(torch.autograd.Function):
    """Not linear in the gradient, yet pointwise: slices of it do, summands would not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clamp(-ctx.most, ctx.most), None


class BatchCoupled(torch.autograd.Function):
    """Normalizes over the batch, in the style of setup_context."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, eps: float = 1e-3) -> Tensor:
        return x / (x.pow(2).mean(0, keepdim=True) + eps).sqrt() * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, eps = inputs
        ctx.save_for_backward(x, scale)
        ctx.eps = eps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        norm = (x.pow(2).mean(0, keepdim=True) + ctx.eps).sqrt()
        return gradient * scale / norm, (gradient * x / norm).sum(0), None


class TopTwo(torch.autograd.Function):
    """Several results, one of them integers that no gradient flows through; integers go in, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, ids = x.topk(2, dim=-1)
        ctx.save_for_backward(ids)
        ctx.width = x.shape[-1]
        ids = ids + shift
        ctx.mark_non_differentiable(ids)
        return values, ids, x * 2

    @staticmethod
    def backward(ctx: Any, values: Tensor, _: Tensor, doubled: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return doubled * 2 + torch.zeros_like(doubled).scatter(-1, ids, values) * 3, None


class NoneForSecond(torch.autograd.Function):
    """Has no gradient for its second operand, which depends on a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (gate,) = ctx.saved_tensors
        return gradient * gate, None


class Outer(torch.autograd.Function):
    """Calls another Function in its forward, and takes a list, a dtype and a shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        assert type(dims) is list and type(shape) is tuple
        ctx.shape = x.shape
        return (Sign.apply(x).to(dtype) * len(dims)).reshape(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.reshape(ctx.shape) * 0.25, None, None, None


class OwnApply(torch.autograd.Function):
    """With an `apply` of its own."""

    @classmethod
    def apply(cls, x: Tensor, *, factor: float = 3.0) -> Tensor:  # type: ignore[override]
        return super().apply(x, factor)

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Noisy(torch.autograd.Function):
    """Rounds at random, straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.floor(x + torch.rand_like(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class ThroughNumpy(torch.autograd.Function):
    """Computed outside of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(gradient.numpy() * 5)


class Writes(torch.autograd.Function):
    """In place: refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Captures(torch.autograd.Function):
    """Reads a tensor that it is not given: refused."""

    table = torch.arange(16.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Captures.table

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class DrawsBackward(torch.autograd.Function):
    """Random numbers in its backward: refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Takes(torch.autograd.Function):
    """An argument that has no text."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: object) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


reverse = Reverse.apply  # bound when the module is imported, as users do
