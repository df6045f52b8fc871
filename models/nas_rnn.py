"""A recurrent network whose cell was found by search (Zoph and Le, 2017), unrolled, as TASO (SOSP'19) benchmarks it.

A step's cell is a binary tree over eight sums of a product with the step's input and one with the state before it.
Nothing of a cell reads another of its products, so that all eight can be one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import random_normals

LEAVES = 8


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a global batch; the defaults train in seconds on a CPU."""

    num_steps: int = 3
    hidden_size: int = 32
    batch_size: int = 8


def nas_rnn_taso(batch_size: int = 1) -> Config:
    """The graph that TASO (SOSP'19) and Tensat (MLSys'21) optimise: five steps of 512 units."""
    return Config(num_steps=5, hidden_size=512, batch_size=batch_size)


class Cell(nn.Module):
    """One step of the network: sixteen matrices without biases."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.input = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(LEAVES))
        self.recurrent = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(LEAVES))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """x and state (batch, hidden) → the next state (batch, hidden)."""
        a, b, c, d, e, f, g, h = (
            of_input(x) + of_state(state) for of_input, of_state in zip(self.input, self.recurrent, strict=True)
        )
        first = torch.sigmoid(F.relu(a) + torch.sigmoid(d)) + torch.tanh(torch.sigmoid(b) + torch.tanh(c))
        second = torch.tanh(torch.sigmoid(e) * torch.tanh(f)) * torch.sigmoid(torch.sigmoid(g) * F.relu(h))
        return torch.tanh(torch.tanh(first) * torch.tanh(second))


class NasRNN(nn.Module):
    """The cell, step after step from a given state, and the mean squared error of the last state."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_steps = config.num_steps
        self.cell = Cell(config.hidden_size)

    def forward(self, frames: Tensor, state: Tensor, targets: Tensor) -> Tensor:
        """frames (step, batch, hidden), state and targets (batch, hidden) → loss ()."""
        for frame in frames.unbind(0):
            state = self.cell(frame, state)
        return F.mse_loss(state, targets)


def build(config: Config) -> NasRNN:
    """The model with fresh random weights."""
    return NasRNN(config)


def example_inputs(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """One global batch of random sequences, the states that they start from, and where they should end."""
    one = (config.batch_size, config.hidden_size)
    return {
        "frames": random_normals((config.num_steps, *one), seed),
        "state": random_normals(one, seed + 1).tanh(),
        "targets": random_normals(one, seed + 2).tanh(),
    }
