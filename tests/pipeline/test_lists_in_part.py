"""Of a list's modules that run operators alone only those that are computed again become modules of the program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.program import model_state


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Running() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


class Running(nn.Module):
    """Without parameters: where nothing asks for a module, its operators are written out."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.cumsum(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = Scaled(), InAList()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))


@pytest.mark.parametrize(
    "again", [("rest.blocks.2",), ("rest.blocks.1", "rest.blocks.2"), ("rest.blocks.0", "rest.blocks.3")]
)
def test_a_list_of_which_some_are_there_is_built(again: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.randn(3, 4)}
    mesh = autopar.Mesh("cpu", devices_per_node=1)
    plan = replace(autopar.template_plan(model, mesh, batch), recompute=again)
    built = autopar.parallelize(model, mesh, batch, plan=plan).build()
    built.init_from(model_state(model) or {})
    loss = built.train_step(**batch)
    model(**batch).backward()
    assert torch.equal(loss, model(**batch).detach())
    gradient = next(iter(built.parameters())).grad
    assert gradient is not None and torch.equal(gradient, model.first.scale.grad)
