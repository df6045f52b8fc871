"""A multilayer perceptron that classifies feature vectors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_integers, random_normals


@dataclass(frozen=True)
class Config:
    """Layer widths from the features to the classes, and the size of a global batch."""

    widths: tuple[int, ...] = (64, 256, 256, 16)
    bias: bool = True
    batch_size: int = 32


class MLP(nn.Module):
    """Linear layers with a ReLU between each two, and the mean cross-entropy of the last one's logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width_in, width_out, bias=config.bias) for width_in, width_out in pairwise(config.widths)
        )

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """features (batch, widths[0]), labels (batch) of class numbers → loss ()."""
        *hidden_layers, last_layer = self.layers
        hidden = features
        for layer in hidden_layers:
            hidden = F.relu(layer(hidden))
        return F.cross_entropy(last_layer(hidden), labels)


def build(config: Config) -> MLP:
    """The model with fresh random weights."""
    return MLP(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random features and labels."""
    return {
        "features": random_normals((config.batch_size, config.widths[0]), seed),
        "labels": random_integers(config.widths[-1], (config.batch_size,), seed + 1),
    }
