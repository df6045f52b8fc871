"""What the diffusion models share: the noise that is added to an image, and the embedding of its timestep.

Denoising diffusion (Ho et al., 2020): a model is told a noisy image and its timestep, and predicts the noise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NoiseSchedule(nn.Module):
    """Mixes images with noise: x_t = √ᾱ_t · x + √(1 − ᾱ_t) · noise, with β from 1e-4 to 0.02 in even steps."""

    def __init__(self, num_timesteps: int) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, num_timesteps)
        kept = (1.0 - betas).cumprod(dim=0)
        self.register_buffer("signal", kept.sqrt())
        self.register_buffer("noise", (1.0 - kept).sqrt())

    def forward(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """images and noise (batch, …), timesteps (batch) → noisy images, like images."""
        shape = (-1, *[1] * (images.dim() - 1))
        return self.signal[timesteps].view(shape) * images + self.noise[timesteps].view(shape) * noise


class TimestepEmbedding(nn.Module):
    """Sinusoids of the timestep (Vaswani et al., 2017, with timesteps as positions), then an MLP."""

    def __init__(self, num_frequencies: int, hidden_size: int) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.up = nn.Linear(2 * num_frequencies, hidden_size)
        self.down = nn.Linear(hidden_size, hidden_size)

    def forward(self, timesteps: Tensor) -> Tensor:
        """timesteps (batch) → (batch, hidden)."""
        steps = torch.arange(self.num_frequencies, device=timesteps.device, dtype=torch.float32)
        frequencies = (steps * (-math.log(10_000.0) / self.num_frequencies)).exp()
        angles = timesteps.float()[:, None] * frequencies
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.down(F.silu(self.up(waves.to(self.up.weight.dtype))))
