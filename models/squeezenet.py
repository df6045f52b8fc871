"""SqueezeNet: an image classifier of few parameters (Iandola et al., 2016). No dropout.

A fire module squeezes the channels by a 1 × 1 convolution, and expands them by a 1 × 1 and a 3 × 3 one beside each
other, whose results are joined.
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

    stem: tuple[int, int] = (8, 3)  # channels and kernel of the first convolution, of stride two
    fires: tuple[tuple[int, int], ...] = ((4, 8), (4, 8))  # channels squeezed to, and of each of the two expanding ones
    pooled: tuple[int, ...] = (0,)  # fires with a max pooling of stride two before them
    image_size: int = 16
    num_classes: int = 10
    batch_size: int = 8


_FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))


def squeezenet1_0(batch_size: int = 1) -> Config:
    """The paper's model for ImageNet: 1.25M parameters."""
    return Config((96, 7), _FIRES, (0, 3, 7), 224, 1000, batch_size)


def squeezenet1_1(batch_size: int = 1) -> Config:
    """The authors' later release, with a smaller stem and earlier poolings: 1.24M parameters, half the work."""
    return Config((64, 3), _FIRES, (0, 2, 4), 224, 1000, batch_size)


class Fire(nn.Module):
    """Squeeze, then two expansions joined by channel, each with a ReLU."""

    def __init__(self, channels_in: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels_in, squeezed, 1)
        self.expand_1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand_3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels_in, size, size) → (batch, 2 × expanded, size, size)."""
        x = F.relu(self.squeeze(x))
        return torch.cat((F.relu(self.expand_1(x)), F.relu(self.expand_3(x))), dim=1)


class SqueezeNet(nn.Module):
    """Stem, fires, a 1 × 1 convolution to the classes, its mean over the image, and the mean cross-entropy."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels, kernel = config.stem
        self.pooled = config.pooled
        self.stem = nn.Conv2d(3, channels, kernel, stride=2)
        self.fires = nn.ModuleList()
        for squeezed, expanded in config.fires:
            self.fires.append(Fire(channels, squeezed, expanded))
            channels = 2 * expanded
        self.head = nn.Conv2d(channels, config.num_classes, 1)
        self.apply(_initialize)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images (batch, 3, size, size), labels (batch) of class numbers → loss ()."""
        x = F.relu(self.stem(images))
        for index, fire in enumerate(self.fires):
            if index in self.pooled:
                x = F.max_pool2d(x, kernel_size=3, stride=2, ceil_mode=True)
            x = fire(x)
        return F.cross_entropy(F.relu(self.head(x)).mean(dim=(2, 3)), labels)


def _initialize(module: nn.Module) -> None:
    """As large as a ReLU behind it wants (He et al., 2015)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)


def build(config: Config) -> SqueezeNet:
    """The model with fresh random weights."""
    return SqueezeNet(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random images and labels."""
    return {
        "images": random_normals((config.batch_size, 3, config.image_size, config.image_size), seed),
        "labels": random_integers(config.num_classes, (config.batch_size,), seed + 1),
    }
