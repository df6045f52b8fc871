"""A model whose products are best folded, not merged."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """Products of one value, each with an adapter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(64, 2, bias=False) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(2, 64, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        layers = zip(self.base, self.down, self.up, strict=True)
        return sum(((base(x) + 2.0 * up(down(x))).relu().sum() for base, down, up in layers), torch.zeros(()))
