"""An image classifier of modules with parallel branches: Inception-v3 (Szegedy et al., 2016), without its second head.

Every module reads one tensor, runs several small chains of convolutions on it, and joins their results by channel. The
letters of the modules are those of the authors' table: A has 5 × 5 and double 3 × 3 chains, C has 1 × 7 and 7 × 1
convolutions, E ends its chains in pairs; B and D halve the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_integers, random_normals


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    image_size: int = 32
    image_channels: int = 3
    modules: str = "ABCDE"
    width: float = 1 / 16  # of the paper's channels
    middle_channels: tuple[int, ...] = (128,)  # of the paper's C modules, one each
    pool_channels: tuple[int, ...] = (32,)  # of the paper's A modules, one each
    short_stem: bool = True  # one convolution of stride two instead of the paper's five and two poolings
    norm: bool = True  # batch norm after every convolution; without it, convolutions have biases
    num_classes: int = 10
    batch_size: int = 4


def inception_v3(batch_size: int = 32) -> Config:
    """The paper's model for ImageNet: 23.8M parameters."""
    return Config(299, 3, "AAABCCCCDEE", 1.0, (128, 160, 160, 192), (32, 64, 64), False, True, 1000, batch_size)


class Conv(nn.Module):
    """A convolution, batch norm and ReLU."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int | tuple[int, int], *, norm: bool, stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=padding, bias=not norm)
        self.norm = nn.BatchNorm2d(channels_out, eps=0.001) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels_in, height, width) → (batch, channels_out, height', width')."""
        return F.relu(self.norm(self.conv(x)))


class _Maker:
    """Makes convolutions of the paper's channels times the width."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def channels(self, count: int) -> int:
        return max(1, round(count * self.config.width))

    def chain(self, channels_in: int, *parts: tuple[int, int | tuple[int, int], int]) -> nn.Sequential:
        """(paper's channels, kernel, stride) each; what has stride one keeps the image's size."""
        convs = []
        for count, kernel, stride in parts:
            sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
            padding = (sizes[0] // 2, sizes[1] // 2) if stride == 1 else 0
            channels_out = self.channels(count)
            convs.append(Conv(channels_in, channels_out, kernel, norm=self.config.norm, stride=stride, padding=padding))
            channels_in = channels_out
        return nn.Sequential(*convs)


class Same(nn.Module):
    """A module that keeps the image's size: chains of convolutions, and one after average pooling."""

    def __init__(self, chains: list[nn.Module], pooled: nn.Module) -> None:
        super().__init__()
        self.chains, self.pooled = nn.ModuleList(chains), pooled

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, size, size) → (batch, channels', size, size)."""
        parts = [chain(x) for chain in self.chains]
        pooled = self.pooled(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat((*parts, pooled), dim=1)


class Smaller(nn.Module):
    """A module that halves the image's size: chains of convolutions, and max pooling."""

    def __init__(self, chains: list[nn.Module]) -> None:
        super().__init__()
        self.chains = nn.ModuleList(chains)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, size, size) → (batch, channels', (size − 1) // 2, (size − 1) // 2)."""
        parts = [chain(x) for chain in self.chains]
        return torch.cat((*parts, F.max_pool2d(x, kernel_size=3, stride=2)), dim=1)


class Pair(nn.Module):
    """A chain that ends in a 1 × 3 and a 3 × 1 convolution beside each other."""

    def __init__(self, first: nn.Module, wide: nn.Module, high: nn.Module) -> None:
        super().__init__()
        self.first, self.wide, self.high = first, wide, high

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, size, size) → (batch, channels', size, size)."""
        x = self.first(x)
        return torch.cat((self.wide(x), self.high(x)), dim=1)


def _module(make: _Maker, kind: str, channels_in: int, count: int) -> tuple[nn.Module, int]:
    """The module of a letter and its result's channels. count: its pooled or middle channels in the paper."""
    width = make.channels
    if kind == "A":
        chains = [make.chain(channels_in, (64, 1, 1)), make.chain(channels_in, (48, 1, 1), (64, 5, 1)),
                  make.chain(channels_in, (64, 1, 1), (96, 3, 1), (96, 3, 1))]  # fmt: skip
        return Same(chains, make.chain(channels_in, (count, 1, 1))), 2 * width(64) + width(96) + width(count)
    if kind == "B":
        chains = [make.chain(channels_in, (384, 3, 2)), make.chain(channels_in, (64, 1, 1), (96, 3, 1), (96, 3, 2))]
        return Smaller(chains), width(384) + width(96) + channels_in
    if kind == "C":
        chains = [
            make.chain(channels_in, (192, 1, 1)),
            make.chain(channels_in, (count, 1, 1), (count, (1, 7), 1), (192, (7, 1), 1)),
            make.chain(channels_in, (count, 1, 1), (count, (7, 1), 1), (count, (1, 7), 1), (count, (7, 1), 1),
                       (192, (1, 7), 1)),
        ]  # fmt: skip
        return Same(chains, make.chain(channels_in, (192, 1, 1))), 4 * width(192)
    if kind == "D":
        chains = [
            make.chain(channels_in, (192, 1, 1), (320, 3, 2)),
            make.chain(channels_in, (192, 1, 1), (192, (1, 7), 1), (192, (7, 1), 1), (192, 3, 2)),
        ]
        return Smaller(chains), width(320) + width(192) + channels_in

    def pair(*parts: tuple[int, int | tuple[int, int], int]) -> Pair:
        ends = [make.chain(width(384), (384, kernel, 1)) for kernel in ((1, 3), (3, 1))]
        return Pair(make.chain(channels_in, *parts), *ends)

    chains = [make.chain(channels_in, (320, 1, 1)), pair((384, 1, 1)), pair((448, 1, 1), (384, 3, 1))]
    return Same(chains, make.chain(channels_in, (192, 1, 1))), width(320) + 4 * width(384) + width(192)


def _stem(make: _Maker, config: Config) -> tuple[nn.Module, int]:
    if config.short_stem:
        return make.chain(config.image_channels, (192, 3, 2)), make.channels(192)
    first = make.chain(config.image_channels, (32, 3, 2))
    first.append(Conv(make.channels(32), make.channels(32), 3, norm=config.norm))
    first.extend(make.chain(make.channels(32), (64, 3, 1)))
    second = make.chain(make.channels(64), (80, 1, 1))
    second.append(Conv(make.channels(80), make.channels(192), 3, norm=config.norm))
    return nn.Sequential(first, nn.MaxPool2d(3, 2), second, nn.MaxPool2d(3, 2)), make.channels(192)


class Inception(nn.Module):
    """Stem, modules, the mean over all pixels, and the mean cross-entropy of the last layer's logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        make = _Maker(config)
        counts = {"A": iter(config.pool_channels), "C": iter(config.middle_channels)}
        self.stem, channels = _stem(make, config)
        self.modules_ = nn.ModuleList()
        for kind in config.modules:
            module, channels = _module(make, kind, channels, next(counts[kind]) if kind in counts else 0)
            self.modules_.append(module)
        self.head = nn.Linear(channels, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images (batch, channels, size, size), labels (batch) of class numbers → loss ()."""
        x = self.stem(images)
        for module in self.modules_:
            x = module(x)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


def build(config: Config) -> Inception:
    """The model with fresh random weights."""
    return Inception(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random images and labels."""
    shape = (config.batch_size, config.image_channels, config.image_size, config.image_size)
    return {
        "images": random_normals(shape, seed),
        "labels": random_integers(config.num_classes, (config.batch_size,), seed + 1),
    }
