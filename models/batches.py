"""Random batches of the right shape, equal for equal seeds, on torch's default device (meta included)."""

from __future__ import annotations

import torch
from torch import Tensor


def language_batch(batch_size: int, seq_len: int, vocab_size: int, seed: int) -> dict[str, Tensor]:
    """Random token sequences, (batch, seq) each; `labels` are the `tokens` one position later."""
    text = random_integers(vocab_size, (batch_size, seq_len + 1), seed)
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def random_integers(high: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Integers drawn uniformly from 0 up to, not including, `high`."""
    drawn = torch.randint(high, shape, generator=_generator(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def random_normals(shape: tuple[int, ...], seed: int) -> Tensor:
    """Draws from the standard normal distribution."""
    drawn = torch.randn(shape, generator=_generator(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def _generator(seed: int) -> torch.Generator:
    # Always the CPU's: a meta device has no generator, and a batch should not depend on the device.
    return torch.Generator(device="cpu").manual_seed(seed)
