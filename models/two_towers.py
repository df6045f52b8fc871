"""A retrieval model of two towers: who would like what? (Yi et al., 2019.)

One tower turns a user's features and the numbers of what they last saw into a vector, the other one turns an item's
features into one. In a batch of pairs, each user's own item should have the largest dot product among all items.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_integers, random_normals


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    num_items: int = 64  # rows of the table of what users saw
    num_seen: int = 6
    user_features: int = 12
    item_features: int = 20
    user_widths: tuple[int, ...] = (48, 32)  # hidden, the last one is the vector
    item_widths: tuple[int, ...] = (64, 48, 32)
    temperature: float = 0.1
    batch_size: int = 8


def large(batch_size: int = 64) -> Config:
    """Towers of wide layers: 262M parameters, 205M of them in the table."""
    return Config(50_000, 50, 512, 1024, (4096, 2048, 256), (4096, 4096, 2048, 256), 0.05, batch_size)


class Tower(nn.Module):
    """Linear layers with a ReLU between each two; the result has length one."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width_in, width_out) for width_in, width_out in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, widths[0]) → (batch, widths[-1])."""
        *hidden_layers, last_layer = self.layers
        for layer in hidden_layers:
            x = F.relu(layer(x))
        return F.normalize(last_layer(x), dim=1)


class UserTower(nn.Module):
    """The mean of what the user saw, beside the user's features, through a tower."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size = config.user_widths[0]
        self.seen = nn.Embedding(config.num_items, size)
        self.tower = Tower((config.user_features + size, *config.user_widths))

    def forward(self, users: Tensor, seen: Tensor) -> Tensor:
        """users (batch, user_features), seen (batch, num_seen) of item numbers → (batch, user_widths[-1])."""
        return self.tower(torch.cat((users, self.seen(seen).mean(dim=1)), dim=1))


class TwoTowers(nn.Module):
    """Both towers, and the mean cross-entropy of each user's own item among the batch's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.temperature = config.temperature
        self.user = UserTower(config)
        self.item = Tower((config.item_features, *config.item_widths))

    def forward(self, users: Tensor, seen: Tensor, items: Tensor, places: Tensor) -> Tensor:
        """users and items (batch, features), seen (batch, num_seen), places (batch) of each own item → loss ()."""
        logits = self.user(users, seen) @ self.item(items).T / self.temperature
        return F.cross_entropy(logits, places)


def build(config: Config) -> TwoTowers:
    """The model with fresh random weights."""
    return TwoTowers(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random users and items, in random order: `places` says whose item is where."""
    return {
        "users": random_normals((config.batch_size, config.user_features), seed),
        "seen": random_integers(config.num_items, (config.batch_size, config.num_seen), seed + 1),
        "items": random_normals((config.batch_size, config.item_features), seed + 2),
        "places": random_normals((config.batch_size,), seed + 3).argsort(),
    }
