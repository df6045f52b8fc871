"""The CTC loss of each sample as one operator: torch's own has results whose shape depends on values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Of log-probabilities (T, N, C) and targets (N, S) or (Σ lengths): the losses (N,), as `F.ctc_loss` has them."""
    return _losses(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)


def _losses(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero: bool) -> Tensor:
    return F.ctc_loss(log_probs, targets, inputs, lengths, blank, "none", zero)


@ctc_loss.register_fake
def _shape(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    """By the loss again: what torch's backward pass reads of the forward one is none of the operator's results."""
    log_probs, *others = ctx.saved_tensors
    with torch.enable_grad():
        log_probs = log_probs.detach().requires_grad_()
        losses = _losses(log_probs, *others, *ctx.options)
    (found,) = torch.autograd.grad(losses, log_probs, gradient)
    return found, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_keep)
