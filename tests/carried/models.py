"""Models that call such Functions, each between two layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.carried import functions as own

F = torch.nn.functional
Part = Callable[["Net", Tensor], Tensor]
WIDTH, CLASSES = 16, 8


class Net(nn.Module):
    """Two layers with a function of the first one's result between them."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.part = part

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.part(self, torch.tanh(self.up(x)) * 2)), y)


class Stack(nn.Module):
    """Equal blocks, each of which calls a Function on an activation and one on a parameter."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = own.Sign.apply(self.linear(x))
            return x + F.linear(own.Clipped.apply(h, 0.01), own.Reverse.apply(self.other.weight, 0.5), self.other.bias)

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stack.Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


def _top_two(net: Net, h: Tensor) -> Tensor:
    values, ids, doubled = own.TopTwo.apply(h, torch.ones((), dtype=torch.int64))
    return doubled + values.sum(-1, keepdim=True) + ids[:, :1]


def _no_grad(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        kept = own.Sign.apply(h)
    return h * kept


PARTS: dict[str, Part] = {
    "reverse": lambda net, h: own.reverse(h, 0.7),
    "sign": lambda net, h: own.Sign.apply(h),
    "clipped": lambda net, h: own.Clipped.apply(h, 0.05),
    "clipped each": lambda net, h: own.ClippedEach.apply(h, 0.01),
    "twice": lambda net, h: own.Clipped.apply(h, 0.05) + own.Clipped.apply(h, 0.05) * 2,
    "coupled": lambda net, h: own.BatchCoupled.apply(h, net.scale),
    "top two": _top_two,
    "none for second": lambda net, h: own.NoneForSecond.apply(h, torch.sigmoid(net.gate(h))),
    "outer": lambda net, h: own.Outer.apply(h, [0, 1], torch.float32, (8, WIDTH)),
    "own apply": lambda net, h: own.OwnApply.apply(h, factor=2.0),
    "noisy": lambda net, h: own.Noisy.apply(h * 3),
    "numpy": lambda net, h: own.ThroughNumpy.apply(h),
    "no grad": _no_grad,
    "of a parameter": lambda net, h: h * own.Clipped.apply(net.scale, 0.01),
    "of an input": lambda net, h: h * own.Sign.apply(h.detach()),
}
"""What is carried."""


def batch() -> tuple[Tensor, Tensor]:
    """Of eight samples."""
    made = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=made), torch.randint(CLASSES, (8,), generator=made)
