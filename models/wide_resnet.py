"""Residual networks with more channels inside each block (Zagoruyko and Komodakis, 2016), with batch norm.

Basic blocks are two 3×3 convolutions, both of the wider size. Bottleneck blocks are 1×1, 3×3, 1×1, wide
in the middle only, as in the common wide ResNet-50-2. With the 3×3 convolution in groups, such a network is a
ResNeXt (Xie et al., 2017).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_integers, random_normals


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    depths: tuple[int, ...] = (1, 1)  # blocks in each stage; every stage but the first halves the image
    base_channels: int = 8
    width_factor: int = 2
    bottleneck: bool = False
    groups: int = 1  # of the 3×3 convolution of bottlenecks
    large_images: bool = False  # a 7×7 stem that shrinks the image four times, instead of a 3×3 one
    image_size: int = 16
    num_classes: int = 10
    batch_size: int = 8


def wide_resnet50_2() -> Config:
    """Wide ResNet-50-2 for ImageNet: 69M parameters."""
    return _imagenet(depths=(3, 4, 6, 3))


def wide_resnet101_2() -> Config:
    """Wide ResNet-101-2 for ImageNet: 127M parameters."""
    return _imagenet(depths=(3, 4, 23, 3))


def resnext50(batch_size: int = 256) -> Config:
    """ResNeXt-50 for ImageNet, 32 groups of 4 channels in the first blocks: 25M parameters."""
    return replace(_imagenet(depths=(3, 4, 6, 3)), groups=32, batch_size=batch_size)


def _imagenet(depths: tuple[int, ...]) -> Config:
    return Config(
        depths,
        base_channels=64,
        bottleneck=True,
        large_images=True,
        image_size=224,
        num_classes=1000,
        batch_size=256,
    )


class ConvNorm(nn.Module):
    """A convolution without bias that keeps the image size but for its stride, then batch norm."""

    def __init__(self, channels_in: int, channels_out: int, kernel_size: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        padding = kernel_size // 2
        self.conv = nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels_in, height, width) → (batch, channels_out, height / stride, width / stride)."""
        return self.norm(self.conv(x))


class Block(nn.Module):
    """relu(shortcut(x) + convolutions(x)), with a ReLU between each two convolutions."""

    def __init__(self, convolutions: list[ConvNorm], shortcut: nn.Module) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels_in, height, width) → (batch, channels_out, height / stride, width / stride)."""
        *hidden_convolutions, last_convolution = self.convolutions
        hidden = x
        for convolution in hidden_convolutions:
            hidden = F.relu(convolution(hidden))
        return F.relu(self.shortcut(x) + last_convolution(hidden))


def block(config: Config, channels_in: int, channels: int, stride: int) -> tuple[Block, int]:
    """A block for a stage of `channels` before widening, and the number of channels that it gives."""
    wide = channels * config.width_factor
    if config.bottleneck:
        channels_out = 4 * channels
        convolutions = [
            ConvNorm(channels_in, wide, 1),
            ConvNorm(wide, wide, 3, stride, config.groups),
            ConvNorm(wide, channels_out, 1),
        ]
    else:
        channels_out = wide
        convolutions = [ConvNorm(channels_in, wide, 3, stride), ConvNorm(wide, wide, 3)]
    same_shape = stride == 1 and channels_in == channels_out
    shortcut = nn.Identity() if same_shape else ConvNorm(channels_in, channels_out, 1, stride)
    return Block(convolutions, shortcut), channels_out


class Stem(nn.Module):
    """The first convolution; for large images of stride two, with a max pool of stride two after it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.shrinks = config.large_images
        kernel_size, stride = (7, 2) if config.large_images else (3, 1)
        self.convolution = ConvNorm(3, config.base_channels, kernel_size, stride)

    def forward(self, images: Tensor) -> Tensor:
        """images (batch, 3, size, size) → (batch, base_channels, size or size / 4, the same)."""
        x = F.relu(self.convolution(images))
        return F.max_pool2d(x, kernel_size=3, stride=2, padding=1) if self.shrinks else x


class WideResNet(nn.Module):
    """Stem, stages of blocks, mean over the image, and the mean cross-entropy of a linear classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = Stem(config)
        self.blocks = nn.ModuleList()
        channels = config.base_channels
        for stage, depth in enumerate(config.depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                new_block, channels = block(config, channels, config.base_channels * 2**stage, stride)
                self.blocks.append(new_block)
        self.head = nn.Linear(channels, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images (batch, 3, size, size), labels (batch) of class numbers → loss ()."""
        x = self.stem(images)
        for layer in self.blocks:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


def build(config: Config) -> WideResNet:
    """The model with fresh random weights."""
    return WideResNet(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random images and labels."""
    shape = (config.batch_size, 3, config.image_size, config.image_size)
    return {
        "images": random_normals(shape, seed),
        "labels": random_integers(config.num_classes, (config.batch_size,), seed + 1),
    }
