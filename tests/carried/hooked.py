"""Models with hooks on gradients, of each kind that is carried. They are made by functions: copies lose their hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.carried.models import CLASSES, WIDTH, Net, Stack

F = torch.nn.functional


def _halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _hooked(*hooks: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def part(net: Net, h: Tensor) -> Tensor:
        before = h.sin()
        for hook in hooks:
            h.register_hook(hook)
        return before + h * 2

    return lambda: Net(part)


def _clipped(gradient: Tensor) -> Tensor:
    return gradient * (0.01 / gradient.norm()).clamp(max=1.0)


def _in_place(gradient: Tensor) -> None:
    gradient.mul_(0.25)


def masked_parameter() -> nn.Module:
    """Rows of a matrix stand still."""
    net = Net(lambda net, h: h)
    mask = torch.ones(WIDTH, 1)
    mask[: WIDTH // 2] = 0
    net.up.weight.register_hook(lambda gradient: gradient * mask)
    return net


def clipped_parameters() -> nn.Module:
    """Each gradient has a norm of its own; one parameter has two hooks, whose order counts."""
    net = Net(lambda net, h: h * net.scale)
    for parameter in (net.up.weight, net.scale, net.down.bias):
        parameter.register_hook(_clipped)
    net.scale.register_hook(lambda gradient: gradient + 1)
    return net


class Tied(nn.Module):
    """A matrix that is read twice: its hook sees the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight
        self.up.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.up(x).tanh()), y)


def module_hook() -> nn.Module:
    net = Net(lambda net, h: net.gate(h) + h)
    net.gate.register_full_backward_hook(lambda module, inputs, outputs: tuple(x * 10 for x in inputs))
    return net


def module_pre_hook() -> nn.Module:
    net = Net(lambda net, h: net.gate(h) + h)
    net.gate.register_full_backward_pre_hook(lambda module, outputs: (outputs[0].clamp(-0.01, 0.01),))
    return net


def blocks_with_hooks() -> nn.Module:
    """In equal blocks, one hook on what a block makes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            h.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
            return x + h.tanh()

    return _Blocks(Block)


def blocks_with_hooks_on_inputs() -> nn.Module:
    """In equal blocks, hooks on what a block is given, which others read too."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(_halved)
            return self.linear(x).tanh()

    return _Blocks(Block, residual=True)


class _Blocks(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], residual: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(block() for _ in range(5)), nn.Linear(WIDTH, CLASSES)
        self.residual = residual

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x) if self.residual else block(x)
        return F.cross_entropy(self.head(x), y)


HOOKED: dict[str, Callable[[], nn.Module]] = {
    "scaled": _hooked(_halved),
    "mixes elements": _hooked(_clipped),
    "two in order": _hooked(lambda gradient: gradient.clamp(-0.01, 0.01), lambda gradient: gradient * 3),
    "in place": _hooked(_in_place),
    "masked parameter": masked_parameter,
    "clipped parameters": clipped_parameters,
    "tied": Tied,
    "module": module_hook,
    "module, before": module_pre_hook,
    "blocks": blocks_with_hooks,
    "inputs of blocks": blocks_with_hooks_on_inputs,
}


class Checkpointed(nn.Module):
    """Two layers that are computed again, before a statistic that needs no gradient; reentrant or not."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.stack, self.options = nn.Linear(WIDTH, WIDTH), Stack(2), options
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.stack.blocks:
            x = checkpoint(lambda x, block=block: self.drop(block(x)), x, **self.options)
        with torch.no_grad():
            scale = x.abs().mean()
        return F.cross_entropy(self.stack.head(x / scale), y)


class CheckpointedInputs(nn.Module):
    """Reentrant, of what needs no gradient: nothing inside gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(checkpoint(self.first, x, use_reentrant=True)), y)
