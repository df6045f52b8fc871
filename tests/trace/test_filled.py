"""A new tensor whose every part is written is traced as its parts side by side; any other as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.trace import trace
from tests.trace.interpret import graph_gradients


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4), write

    def forward(self, x: Tensor) -> Tensor:
        return (self.write(x, self.linear(x)) * torch.arange(1.0, 7.0)).square().mean()


def _filled(x: Tensor, y: Tensor) -> Tensor:
    whole = x.new_empty(3, 6)
    whole[..., :4].copy_(y)
    whole[..., 4:].copy_(x[:, :2])
    return whole


def _last_part_first(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros(3, 6)
    whole[:, -2:] = x[:, :2]
    whole[:, 1:4] = y[:, 1:]
    whole[:, :1] = y[:, :1]
    return whole


def _gap(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros(3, 6)
    whole[:, :3] = y[:, :3]
    whole[:, 4:] = x[:, :2]
    return whole


def _over_each_other(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros(3, 6)
    whole[:, :4] = y
    whole[:, 2:] = x
    return whole


def _read_between(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros(3, 6)
    whole[:, :4] = y
    before = whole.sum()
    whole[:, 4:] = x[:, :2]
    return whole * before


def _of_an_activation(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.cat([y, y[:, :2]], 1) * 2.0
    whole[:, :4] = y
    whole[:, 4:] = x[:, :2]
    return whole


def _every_other(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros(3, 6)
    whole[:, ::2] = y[:, :3]
    whole[:, 1::2] = x[:, :3]
    return whole


JOINED = [_filled, _last_part_first]
AS_THEY_ARE = [_gap, _over_each_other, _read_between, _of_an_activation, _every_other]


@pytest.mark.parametrize("write", [*JOINED, *AS_THEY_ARE])
def test_writes_into_a_new_tensor(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Written(write), torch.randn(3, 4)
    graph = trace(model, (x,))
    ops = [node.op for node in graph.nodes]
    assert ("aten.slice_scatter.default" in ops) == (write in AS_THEY_ARE)
    assert not any(op.startswith(("aten.new_empty", "aten.zeros")) for op in ops if write in JOINED)
    loss, gradients = graph_gradients(graph, model, {"x": x})
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients, {name: value.grad for name, value in model.named_parameters()})
