"""A diffusion transformer: patches of a noisy image go through a transformer that predicts the noise.

Peebles and Xie, 2023: the timestep and the class steer each layer by the scales, shifts and gates of its norms
(adaLN). There the gates start at zero; here they start small, so that every weight learns from the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_integers, random_normals
from models.diffusion import NoiseSchedule, TimestepEmbedding


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    image_size: int = 8
    image_channels: int = 4
    patch_size: int = 2
    num_layers: int = 2
    hidden_size: int = 32
    num_heads: int = 4
    mlp_ratio: int = 4
    num_classes: int = 10
    num_timesteps: int = 100
    batch_size: int = 8

    @property
    def num_patches(self) -> int:
        """Patches of one image: a transformer's sequence length."""
        return (self.image_size // self.patch_size) ** 2


def dit_s2() -> Config:
    """DiT-S/2 for latents of 256×256 images: 33M parameters."""
    return _imagenet(num_layers=12, hidden_size=384, num_heads=6)


def dit_b2() -> Config:
    """DiT-B/2 for latents of 256×256 images: 130M parameters."""
    return _imagenet(num_layers=12, hidden_size=768, num_heads=12)


def dit_xl2() -> Config:
    """DiT-XL/2 for latents of 256×256 images: 675M parameters."""
    return _imagenet(num_layers=28, hidden_size=1152, num_heads=16)


def _imagenet(*, num_layers: int, hidden_size: int, num_heads: int) -> Config:
    return Config(
        image_size=32,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_classes=1000,
        num_timesteps=1000,
        batch_size=256,
    )


class Attention(nn.Module):
    """Multi-head self-attention among all patches."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, patch, hidden) → (batch, patch, hidden)."""
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, patch, hidden) → (batch, head, patch, head_size)."""
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with a GELU (its tanh approximation) between them."""

    def __init__(self, hidden_size: int, mlp_ratio: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, mlp_ratio * hidden_size)
        self.down = nn.Linear(mlp_ratio * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, patch, hidden) → (batch, patch, hidden)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Modulation(nn.Module):
    """Vectors for the channels of a layer, from what the image is conditioned on."""

    def __init__(self, hidden_size: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(hidden_size, count * hidden_size)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """condition (batch, hidden) → `count` vectors, (batch, 1, hidden) each."""
        return self.linear(F.silu(condition)).unsqueeze(1).chunk(self.count, dim=-1)


class Layer(nn.Module):
    """x + gate · attention(modulated norm(x)), then x + gate · mlp(modulated norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.modulation = Modulation(config.hidden_size, 6)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=1e-6, elementwise_affine=False)
        self.attention = Attention(config.hidden_size, config.num_heads)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=1e-6, elementwise_affine=False)
        self.mlp = MLP(config.hidden_size, config.mlp_ratio)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x (batch, patch, hidden), condition (batch, hidden) → (batch, patch, hidden)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)
        x = x + gate * self.attention(modulate(self.attention_norm(x), shift, scale))
        return x + mlp_gate * self.mlp(modulate(self.mlp_norm(x), mlp_shift, mlp_scale))


class Head(nn.Module):
    """A modulated norm, and each patch's pixels."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.modulation = Modulation(config.hidden_size, 2)
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(config.hidden_size, config.patch_size**2 * config.image_channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x (batch, patch, hidden), condition (batch, hidden) → (batch, patch, patch_size² · channels)."""
        shift, scale = self.modulation(condition)
        return self.linear(modulate(self.norm(x), shift, scale))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (batch, patch, hidden) scaled by 1 + scale and shifted; both are (batch, 1, hidden)."""
    return x * (1.0 + scale) + shift


class DiT(nn.Module):
    """Noise schedule, patch embedding, layers, and the mean squared error of the predicted noise."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.schedule = NoiseSchedule(config.num_timesteps)
        self.patches = nn.Conv2d(config.image_channels, config.hidden_size, config.patch_size, config.patch_size)
        self.register_buffer("positions", position_waves(config))
        self.time = TimestepEmbedding(min(128, config.hidden_size), config.hidden_size)
        self.classes = nn.Embedding(config.num_classes, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.apply(initialize)

    def forward(self, images: Tensor, noise: Tensor, timesteps: Tensor, classes: Tensor) -> Tensor:
        """images and noise (batch, channels, size, size), timesteps and classes (batch) → loss ()."""
        noisy = self.schedule(images, noise, timesteps)
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(timesteps) + self.classes(classes)
        for layer in self.layers:
            x = layer(x, condition)
        return F.mse_loss(self._image(self.head(x, condition)), noise)

    def _image(self, patches: Tensor) -> Tensor:
        """(batch, patch, patch_size² · channels) → (batch, channels, size, size)."""
        side, size = round(patches.shape[1] ** 0.5), self.patch_size
        grid = patches.unflatten(2, (size, size, -1)).unflatten(1, (side, side))
        return grid.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def position_waves(config: Config) -> Tensor:
    """Sinusoids of each patch's row and column, half of the channels each: (patch, hidden)."""
    side, num_frequencies = config.image_size // config.patch_size, config.hidden_size // 4
    frequencies = 10_000.0 ** -(torch.arange(num_frequencies) / num_frequencies)
    angles = torch.arange(side)[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    return torch.cat((columns, rows), dim=-1).flatten(0, 1)


def initialize(module: nn.Module) -> None:
    """Modulations and embeddings N(0, 0.02), linear layers Xavier's uniform, no bias at first."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, Modulation):
        nn.init.normal_(module.linear.weight, std=0.02)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def build(config: Config) -> DiT:
    """The model with fresh random weights."""
    return DiT(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random images with noise, timesteps and classes."""
    shape = (config.batch_size, config.image_channels, config.image_size, config.image_size)
    return {
        "images": random_normals(shape, seed),
        "noise": random_normals(shape, seed + 1),
        "timesteps": random_integers(config.num_timesteps, (config.batch_size,), seed + 2),
        "classes": random_integers(config.num_classes, (config.batch_size,), seed + 3),
    }
