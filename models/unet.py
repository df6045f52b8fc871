"""A U-Net that predicts the noise in an image: denoising diffusion (Ho et al., 2020).

Residual blocks with group norm on the way down, each result kept; blocks on the way up read the kept results
from the last to the first, next to their own input. Images shrink by convolutions of stride two, and grow by
repeating each pixel and a convolution. Small images also attend to themselves.
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
    image_channels: int = 3
    base_channels: int = 16
    channel_factors: tuple[int, ...] = (1, 2)  # one for each image size, every next one half as large
    num_blocks: int = 1  # at each image size on the way down; one more on the way up
    attention_sizes: tuple[int, ...] = (4,)  # image sizes at which blocks are followed by attention
    num_groups: int = 4
    num_timesteps: int = 100
    batch_size: int = 8


def ddpm_cifar10() -> Config:
    """The model of Ho et al. for CIFAR-10: 35.7M parameters."""
    return Config(
        image_size=32,
        base_channels=128,
        channel_factors=(1, 2, 2, 2),
        num_blocks=2,
        attention_sizes=(16,),
        num_groups=32,
        num_timesteps=1000,
        batch_size=128,
    )


class Block(nn.Module):
    """shortcut(x) + two convolutions, each after group norm and SiLU; the timestep is added between them."""

    def __init__(self, config: Config, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(config.num_groups, channels_in)
        self.first_conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.time = nn.Linear(4 * config.base_channels, channels_out)
        self.second_norm = nn.GroupNorm(config.num_groups, channels_out)
        self.second_conv = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        same = channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x (batch, channels_in, height, width), time (batch, hidden) → (batch, channels_out, height, width)."""
        hidden = self.first_conv(F.silu(self.first_norm(x)))
        hidden = hidden + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.second_conv(F.silu(self.second_norm(hidden)))


class Attention(nn.Module):
    """x + attention of one head among all pixels of group norm(x)."""

    def __init__(self, config: Config, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(config.num_groups, channels)
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, height, width) → the same shape."""
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = (project(pixels).unsqueeze(1) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value).squeeze(1)
        return x + self.output(mixed).transpose(1, 2).unflatten(2, x.shape[2:])


class Level(nn.Module):
    """A block, and attention after it where the image is small."""

    def __init__(self, config: Config, image_size: int, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.block = Block(config, channels_in, channels_out)
        attends = image_size in config.attention_sizes
        self.attention = Attention(config, channels_out) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x (batch, channels_in, height, width), time (batch, hidden) → (batch, channels_out, height, width)."""
        return self.attention(self.block(x, time))


class Down(nn.Module):
    """Half the image: a convolution of stride two."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x (batch, channels, height, width) → (batch, channels, height / 2, width / 2)."""
        return self.conv(x)


class Up(nn.Module):
    """Twice the image: each pixel four times, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, height, width) → (batch, channels, 2 · height, 2 · width)."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Encoder(nn.Module):
    """The way down. `kept_channels` are those of each result that it keeps."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels, size = config.base_channels, config.image_size
        self.stem = nn.Conv2d(config.image_channels, channels, 3, padding=1)
        self.levels = nn.ModuleList()
        self.kept_channels = [channels]
        for index, factor in enumerate(config.channel_factors):
            if index > 0:
                self._add(Down(channels), channels)
                size //= 2
            for _ in range(config.num_blocks):
                self._add(Level(config, size, channels, config.base_channels * factor), config.base_channels * factor)
                channels = config.base_channels * factor

    def _add(self, level: nn.Module, channels_out: int) -> None:
        self.levels.append(level)
        self.kept_channels.append(channels_out)

    def forward(self, images: Tensor, time: Tensor) -> list[Tensor]:
        """images (batch, channels, size, size), time (batch, hidden) → every result, the first one first."""
        kept = [self.stem(images)]
        for level in self.levels:
            kept.append(level(kept[-1], time))
        return kept


class Decoder(nn.Module):
    """The way up: each block reads its input and one kept result, side by side."""

    def __init__(self, config: Config, kept_channels: list[int]) -> None:
        super().__init__()
        self.levels, self.ups = nn.ModuleList(), nn.ModuleList()
        channels = kept_channels[-1]
        unread = list(kept_channels)
        for index, factor in reversed(list(enumerate(config.channel_factors))):
            size, channels_out = config.image_size // 2**index, config.base_channels * factor
            levels = nn.ModuleList()
            for _ in range(config.num_blocks + 1):
                levels.append(Level(config, size, channels + unread.pop(), channels_out))
                channels = channels_out
            self.levels.append(levels)
            self.ups.append(Up(channels) if index > 0 else nn.Identity())

    def forward(self, x: Tensor, kept: list[Tensor], time: Tensor) -> Tensor:
        """x and kept as the encoder gives them, the last result first read → (batch, base_channels, size, size)."""
        unread = list(kept)
        for levels, up in zip(self.levels, self.ups, strict=True):
            for level in levels:
                x = level(torch.cat((x, unread.pop()), dim=1), time)
            x = up(x)
        return x


class UNet(nn.Module):
    """Noise schedule, encoder, middle, decoder, and the mean squared error of the predicted noise."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden_size = 4 * config.base_channels
        self.schedule = NoiseSchedule(config.num_timesteps)
        self.time = TimestepEmbedding(config.base_channels // 2, hidden_size)
        self.encoder = Encoder(config)
        channels = self.encoder.kept_channels[-1]
        self.middle_in = Block(config, channels, channels)
        self.middle_attention = Attention(config, channels)
        self.middle_out = Block(config, channels, channels)
        self.decoder = Decoder(config, self.encoder.kept_channels)
        self.norm = nn.GroupNorm(config.num_groups, config.base_channels)
        self.head = nn.Conv2d(config.base_channels, config.image_channels, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """images and noise (batch, channels, size, size), timesteps (batch) → loss ()."""
        time = self.time(timesteps)
        kept = self.encoder(self.schedule(images, noise, timesteps), time)
        x = self.middle_out(self.middle_attention(self.middle_in(kept[-1], time)), time)
        x = self.decoder(x, kept, time)
        return F.mse_loss(self.head(F.silu(self.norm(x))), noise)


def build(config: Config) -> UNet:
    """The model with fresh random weights."""
    return UNet(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random images, the noise to mix them with, and their timesteps."""
    shape = (config.batch_size, config.image_channels, config.image_size, config.image_size)
    return {
        "images": random_normals(shape, seed),
        "noise": random_normals(shape, seed + 1),
        "timesteps": random_integers(config.num_timesteps, (config.batch_size,), seed + 2),
    }
