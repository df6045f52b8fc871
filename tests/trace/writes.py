"""Small models that write to tensors where autograd does not look: {how} × {what is done} × {to what}."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


@contextmanager
def _switched() -> Iterator[None]:
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


#: where the write is: how a tensor is reached there, and the region
HOW: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "no_grad": (lambda x: x, torch.no_grad),
    "inference_mode": (lambda x: x, torch.inference_mode),
    "set_grad_enabled": (lambda x: x, lambda: torch.set_grad_enabled(False)),
    "switch": (lambda x: x, _switched),
    "data": (lambda x: x.data, torch.enable_grad),
    "detach": (lambda x: x.detach(), torch.enable_grad),
    "data in no_grad": (lambda x: x.data, torch.no_grad),
}


def _out(x: Tensor) -> None:
    torch.mul(x.clone(), 0.5, out=x)


def _first(x: Tensor) -> None:
    x[:, 0] = 1.0


def _rows(x: Tensor) -> None:
    x.index_put_((torch.tensor([1, 0]),), x[:2] * 2)


def _swapped(x: Tensor) -> None:
    """By an alias this would part it from the others: refused."""
    x.data = F.normalize(x.detach(), dim=1)


def _twice(x: Tensor) -> None:
    x.add_(0.25)
    x[1:].mul_(x[:1])


OPS: dict[str, Callable[[Tensor], object]] = {
    "clamp_": lambda x: x.clamp_(-0.3, 0.3),
    "mul_": lambda x: x.mul_(0.9),
    "copy_": lambda x: x.copy_(torch.tanh(x)),
    "out=": _out,
    "column": _first,
    "transposed": lambda x: x.t().mul_(0.5),
    "flat": lambda x: x.view(-1)[3:11].zero_(),
    "part": lambda x: x.chunk(2, 1)[1].neg_(),
    "masked_fill_": lambda x: x.masked_fill_(x > 0.2, 0.1),
    "index_put_": _rows,
    "index_copy_": lambda x: x.index_copy_(1, torch.tensor([2, 0]), x[:, :2] * 3),
    "fill_diagonal_": lambda x: x.fill_diagonal_(0.5),
    "foreach": lambda x: torch._foreach_mul_([x[0], x[1]], [0.5, 2.0]),
    "twice": _twice,
    "swapped": _swapped,
}


class Writes(nn.Module):
    """Two layers; `target` says what is written to: an activation, a parameter, a buffer, or one that a block has."""

    def __init__(self, how: str, op: str, target: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("state", torch.randn(WIDTH, WIDTH))
        self.how, self.op, self.target = how, op, target

    def write(self, x: Tensor) -> None:
        reach, region = HOW[self.how]
        with region():
            OPS[self.op](reach(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.target == "parameter":
            self.write(self.first.weight)
        h = self.first(x)
        if self.target == "activation":
            self.write(h)
        if self.target == "view":
            self.write(h.view(2, -1, WIDTH)[1])
        if self.target == "buffer":
            self.write(self.state)
        return self.second(torch.sin(h) @ self.state + h).sin().mean()


class Stacked(nn.Module):
    """The write in blocks that are alike."""

    def __init__(self, how: str, op: str, target: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(how, op, target) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class _Block(Writes):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


TARGETS = ("activation", "view", "parameter", "buffer")
CASES = [
    case
    for case in product(HOW, OPS, TARGETS)
    if case[1] != "swapped" or (case[2] != "view" and not case[0].startswith(("data", "detach")))
]


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))}
