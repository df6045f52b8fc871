"""A recommendation model: will this user click? DLRM (Naumov et al., 2019).

Dense features go through the bottom MLP. Each sparse feature is a bag of numbers, whose rows of a table are
summed. All these vectors meet pairwise, by dot products, and the top MLP reads them with the dense vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_integers, random_normals

# Distinct values of the 26 sparse features of the Criteo display-advertising data set (Kaggle, 2014).
_CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    num_dense: int = 13
    table_rows: tuple[int, ...] = (64, 50, 32)
    bag_size: int = 2  # numbers in each bag
    embedding_size: int = 16
    bottom_widths: tuple[int, ...] = (32,)  # between the dense features and embedding_size
    top_widths: tuple[int, ...] = (64, 32)  # between the interactions and the one logit
    batch_size: int = 16


def criteo_kaggle() -> Config:
    """The model of the authors' Kaggle run: 540M parameters, nearly all in tables."""
    return Config(13, _CRITEO_ROWS, 1, 16, bottom_widths=(512, 256, 64), top_widths=(512, 256), batch_size=128)


class MLP(nn.Module):
    """Linear layers, each but the last followed by a ReLU; the last one too if `ends_in_relu`."""

    def __init__(self, widths: tuple[int, ...], *, ends_in_relu: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width_in, width_out) for width_in, width_out in pairwise(widths))
        self.num_relus = len(self.layers) - (not ends_in_relu)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, widths[0]) → (batch, widths[-1])."""
        for index, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if index < self.num_relus else layer(x)
        return x


class Tables(nn.Module):
    """A table for each sparse feature; a bag's vector is the sum of its rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(num_rows, config.embedding_size, mode="sum") for num_rows in config.table_rows
        )

    def forward(self, bags: Tensor) -> list[Tensor]:
        """bags (batch, table, bag_size) of row numbers → a vector for each table, (batch, embedding_size)."""
        return [table(bags[:, index]) for index, table in enumerate(self.tables)]


class Interaction(nn.Module):
    """The dot product of each pair of vectors, next to the first vector."""

    def forward(self, vectors: list[Tensor]) -> Tensor:
        """vectors (batch, size) each, n of them → (batch, size + n · (n − 1) / 2)."""
        stacked = torch.stack(vectors, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.tril_indices(len(vectors), len(vectors), offset=-1, device=stacked.device)
        return torch.cat((vectors[0], products[:, rows, columns]), dim=1)


class DLRM(nn.Module):
    """Bottom MLP, tables, interaction, top MLP, and the mean cross-entropy of its one logit."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        num_vectors = 1 + len(config.table_rows)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        bottom = (config.num_dense, *config.bottom_widths, config.embedding_size)
        self.bottom = MLP(bottom, ends_in_relu=True)
        self.sparse = Tables(config)
        self.interaction = Interaction()
        self.top = MLP((config.embedding_size + num_pairs, *config.top_widths, 1), ends_in_relu=False)

    def forward(self, dense: Tensor, bags: Tensor, clicks: Tensor) -> Tensor:
        """dense (batch, num_dense), bags (batch, table, bag_size), clicks (batch) of 0.0 or 1.0 → loss ()."""
        interactions = self.interaction([self.bottom(dense), *self.sparse(bags)])
        logits = self.top(interactions).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


def build(config: Config) -> DLRM:
    """The model with fresh random weights."""
    return DLRM(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random features, and whether each was clicked."""
    shape = (config.batch_size, config.bag_size)
    bags = [random_integers(num_rows, shape, seed + 2 + index) for index, num_rows in enumerate(config.table_rows)]
    return {
        "dense": random_normals((config.batch_size, config.num_dense), seed),
        "bags": torch.stack(bags, dim=1),
        "clicks": random_integers(2, (config.batch_size,), seed + 1).float(),
    }
