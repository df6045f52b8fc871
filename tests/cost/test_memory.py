"""What autograd saves, against what torch really saves; and what optimizers keep."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost.memory import (
    optimizer_moved_bytes,
    optimizer_state_bytes,
    saved_values,
    storage_root,
)
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ops.saved import Extra
from autopar.trace import trace
from models import gpt


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        hidden = F.max_pool2d(torch.relu(self.norm(self.convolution(images))), 2)
        pooled = F.dropout(hidden.mean((2, 3)), 0.1, True)
        return F.cross_entropy(self.head(pooled), labels)


class Gated(nn.Module):
    """The operators of a Llama block that GPT lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(16, 16)
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return torch.einsum("bd,be->de", F.silu(self.gate(normal)) * self.up(normal), x.exp()).tanh().sum()


def really_saved(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes of all storages that autograd saves, without parameters, buffers and inputs."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*inputs)
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in own)


def predicted_saved(graph: Graph) -> int:
    own = {*graph.inputs, *(item.tensor for item in graph.stored)}
    total, roots = 0, set()
    for node in graph.nodes:
        for value in saved_values(node, graph):
            if isinstance(value, Extra):
                total += value.num_bytes(graph.tensors[value.like].shape)
            else:
                roots.add(storage_root(value, graph))
    return total + sum(graph.tensors[name].num_bytes for name in roots - own)


def gpt_case() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = gpt.Config(num_layers=2, hidden_size=64, num_heads=4, seq_len=64, batch_size=4, dropout=0.0)
    return gpt.build(config), tuple(gpt.example_inputs(config).values())


CASES = {
    "gpt": gpt_case,
    "convolutional": lambda: (Convolutional(), (torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))),
    "gated": lambda: (Gated(), (torch.randn(64, 16),)),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_bytes_are_those_that_torch_saves(case: str) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[case]()
    graph = trace(model, inputs)
    real, predicted = really_saved(model, inputs), predicted_saved(graph)
    assert predicted == pytest.approx(real, rel=0.02)
    assert predicted >= 0.99 * real, "never much under"


def test_saved_values_follow_the_gradients_that_are_wanted() -> None:
    model = nn.Linear(16, 8)
    model.weight.requires_grad_(False)
    graph = trace(model, (torch.randn(4, 16),), loss_fn=lambda y: y.sum())
    linear = next(node for node in graph.nodes if "linear" in node.op)
    assert saved_values(linear, graph) == (), "the input needs no gradient, so the frozen weight is not kept"


def test_a_saved_view_keeps_its_base() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).view(2, 4, 4).transpose(1, 2).exp().sin().sum()

    graph = trace(Viewing(), (torch.randn(2, 2, 16),))
    exp = next(node for node in graph.nodes if ".exp" in node.op)
    linear = next(node for node in graph.nodes if "linear" in node.op)
    assert storage_root(exp.operands[0], graph) == linear.results[0]


def test_extras_scale_with_the_local_shape() -> None:
    assert Extra("x", (0, 1), 8).num_bytes((4, 5, 6)) == 160


def test_optimizer_state() -> None:
    shape = (10, 20)
    assert Counter({name: optimizer_state_bytes(name, shape) for name in ("adamw", "sgd_momentum", "adafactor")}) == {
        "adamw": 1600,
        "sgd_momentum": 800,
        "adafactor": 120,
    }
    assert optimizer_state_bytes("sgd", shape) == optimizer_state_bytes(None, shape) == 0
    assert optimizer_moved_bytes("adamw", shape) == 7 * 800
    with pytest.raises(PlanError, match=r"expected an optimizer whose memory is known \(adafactor, .*found 'newton'"):
        optimizer_state_bytes("newton", shape)
