"""VGG: plain chains of 3 × 3 convolutions, and three linear layers (Simonyan and Zisserman, 2015). No dropout."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_integers, random_normals


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    depths: tuple[int, ...] = (1, 1, 2)  # convolutions before each pooling, which halves the image
    channels: tuple[int, ...] = (8, 16, 32)
    image_size: int = 16
    linear_size: int = 64
    num_classes: int = 10
    batch_size: int = 8


def vgg19(batch_size: int = 1) -> Config:
    """VGG-19 (the paper's E) for ImageNet: 144M parameters."""
    return Config((2, 2, 4, 4, 4), (64, 128, 256, 512, 512), 224, 4096, 1000, batch_size)


class Convolutions(nn.Module):
    """Convolutions of stride one with ReLUs, then a max pooling of stride two."""

    def __init__(self, depth: int, channels_in: int, channels: int) -> None:
        super().__init__()
        sizes = [channels_in, *[channels] * depth]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels_in, size, size) → (batch, channels, size // 2, size // 2)."""
        for convolution in self.convolutions:
            x = F.relu(convolution(x))
        return F.max_pool2d(x, kernel_size=2, stride=2)


class Classifier(nn.Module):
    """Three linear layers with ReLUs between them."""

    def __init__(self, features: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden_size)
        self.second = nn.Linear(hidden_size, hidden_size)
        self.last = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, features) → (batch, num_classes)."""
        return self.last(F.relu(self.second(F.relu(self.first(x)))))


class VGG(nn.Module):
    """Groups of convolutions, a classifier, and the mean cross-entropy of the classes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        sizes = [3, *config.channels]
        self.groups = nn.ModuleList(
            Convolutions(depth, a, b) for depth, a, b in zip(config.depths, sizes, sizes[1:], strict=False)
        )
        last_size = config.image_size >> len(config.depths)
        self.classifier = Classifier(sizes[-1] * last_size**2, config.linear_size, config.num_classes)
        self.apply(_initialize)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images (batch, 3, size, size), labels (batch) of class numbers → loss ()."""
        x = images
        for group in self.groups:
            x = group(x)
        return F.cross_entropy(self.classifier(x.flatten(1)), labels)


def _initialize(module: nn.Module) -> None:
    """As large as a ReLU behind it wants (He et al., 2015): without norms, smaller weights let images vanish."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(module.bias)


def build(config: Config) -> VGG:
    """The model with fresh random weights."""
    return VGG(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random images and labels."""
    return {
        "images": random_normals((config.batch_size, 3, config.image_size, config.image_size), seed),
        "labels": random_integers(config.num_classes, (config.batch_size,), seed + 1),
    }
