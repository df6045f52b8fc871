"""A rank's step as a loss with a backward pass, as training loops take it.

A program runs forward and backward passes together, so `loss_with_backward` runs both, keeps the gradients apart, and
hands them to the parameters when the loop calls `backward`, times whatever the loop has multiplied the loss by. That is
the chain rule: what a loop makes of the loss alone, f(loss), has the gradient f'(loss) · ∇loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime import ProgramError, Rank


def loss_with_backward(rank: Rank, inputs: dict[str, Any]) -> Tensor:
    """The loss of the whole batch. Its backward pass adds to the gradients of the rank's parameters, once."""
    parameters = list(rank.parameters())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    loss = rank.train_step(**inputs)
    held = _HeldGradients(parameters, [parameter.grad for parameter in parameters])
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    anchor = torch.zeros((), requires_grad=True, device=loss.device)
    found: Tensor = _Loss.apply(anchor, loss, held)
    return found


class _HeldGradients:
    """The gradients of a loss, until its backward pass."""

    def __init__(self, parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> None:
        self._parameters = parameters
        self._gradients: list[Tensor | None] | None = gradients

    @torch.no_grad()
    def hand_over(self, scale: float) -> None:
        if self._gradients is None:
            raise ProgramError(
                "expected one backward pass of a loss, found a second: its gradients were handed over by the first. "
                "Call the model again"
            )
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if gradient is not None:
                _add(parameter, gradient if scale == 1.0 else gradient.mul_(scale))
        self._gradients = None


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def is_of_step(node: Any) -> bool:
    """Whether a function of autograd hands over the gradients of a step."""
    return isinstance(getattr(node, "held", None), _HeldGradients)


class _Loss(torch.autograd.Function):
    """The loss itself. Of the ranks' equal losses, loops make equal gradients: each rank scales its part by its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, held: _HeldGradients) -> Tensor:
        """The value of the loss; `anchor` needs a gradient, so that the result has a backward pass."""
        ctx.held = held
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        """Hands the gradients over, times that of the loss."""
        ctx.held.hand_over(gradients[0].item())
        return None, None, None
