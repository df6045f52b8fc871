"""Torch's optimizers on sharded parameters, of which a rank may have no rows, against the single device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import runtime as rt
from tests.rank_pool import RankPool

SHAPES = {"even": (6, 4), "uneven": (5, 3), "one_row": (1, 4), "columns": (4, 5), "whole": (3, 2), "vector": (5,)}
STORED = {"even": "S(0)", "uneven": "S(0)", "one_row": "S(0)", "columns": "S(1)", "whole": "I", "vector": "S(0)"}
STEPS = 4

ON_SHARDS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1}],
    "Adadelta": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1}],
    "Adafactor": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1}, {"maximize": True}],
    "Adagrad": [{}, {"foreach": True}, {"foreach": False}, {"fused": True}],
    "Adam": [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True, "maximize": True}],
    "AdamW": [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}],
    "Adamax": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1}],
    "Muon": [{}, {"momentum": 0.8}, {"weight_decay": 0.0}],
    "NAdam": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1}],
    "RAdam": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"foreach": True}, {"foreach": False}, {"momentum": 0.9, "centered": True}],
    "Rprop": [{}, {"foreach": True}, {"foreach": False}, {"maximize": True}],
    "SGD": [{}, {"foreach": True}, {"foreach": False}, {"momentum": 0.9, "fused": True}, {"momentum": 0.9}],
}
NOT_ON_SHARDS = {"LBFGS", "SparseAdam"}


def loss_of(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Far from quadratic, so that each step differs."""
    terms = [(tensor * (i + 1)).sin().sum() * x + tensor.pow(4).sum() for i, tensor in enumerate(tensors.values())]
    return torch.stack(terms).sum()


class Sharded(rt.Program):
    AXES = {"dp": 2}  # noqa: RUF012
    INPUTS = (rt.Input("x", (), torch.float32, "R"),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        declared = {name: rt.Parameter(shape, stored=STORED[name], uses=("I",)) for name, shape in SHAPES.items()}
        self.inner = rt.Parameters(**declared)

    def forward(self, x: Tensor) -> Tensor:
        return loss_of({name: getattr(self.inner, name) for name in SHAPES}, x)


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"inner.{name}": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer_of(name: str, parameters: list[Tensor], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Muon takes matrices alone; the others go in two groups."""
    kind, lr = getattr(torch.optim, name), 1e-2
    matrices, others = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    groups = [{"params": matrices}] + ([{"params": others, "lr": 2 * lr}] if name != "Muon" else [])
    made: torch.optim.Optimizer = kind(groups, lr=lr, **options)
    return made


def trained(rank: int, world: int, name: str, options: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Saved and loaded into another rank midway; a closure in the last step."""
    part = rt.build(Sharded)
    part.load_full_state_dict(start())
    optimizer = optimizer_of(name, list(part.parameters()), options)
    for step in range(STEPS - 1):
        if step == 2:
            rt.save_checkpoint(folder, part, optimizer, step=step)
            part = rt.build(Sharded)
            optimizer = optimizer_of(name, list(part.parameters()), options)
            rt.load_checkpoint(folder, part, optimizer)
        optimizer.zero_grad()
        part.train_step(torch.tensor(0.5 + step))
        optimizer.step()
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(part.train_step(torch.tensor(0.5 + STEPS - 1)))
        return losses[-1]

    assert optimizer.step(closure) is losses[0] and len(losses) == 1
    assert all(p.grad is not None for p in part.parameters())
    return part.full_state_dict()


def on_one_device(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    parameters = {key: nn.Parameter(tensor) for key, tensor in start().items()}
    optimizer = optimizer_of(name, list(parameters.values()), options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(parameters, torch.tensor(0.5 + step)).backward()
        optimizer.step()
    return {key: parameter.detach() for key, parameter in parameters.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ON_SHARDS)
def test_an_optimizer_on_shards_does_what_it_does_on_one_device(
    name: str, rank_pool: Callable[[int], RankPool], tmp_path: Any
) -> None:
    for number, options in enumerate(ON_SHARDS[name]):
        expected = on_one_device(name, options)
        for found in rank_pool(2).run(trained, name, options, str(tmp_path / str(number))):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_every_optimizer_of_torch_is_named() -> None:
    kinds = {n for n, k in vars(torch.optim).items() if inspect.isclass(k) and issubclass(k, torch.optim.Optimizer)}
    assert kinds - {"Optimizer"} == {*ON_SHARDS, *NOT_ON_SHARDS}


def with_lbfgs(rank: int, world: int) -> dict[str, Tensor]:
    part = rt.build(Sharded)
    part.load_full_state_dict(start())
    optimizer = torch.optim.LBFGS(part.parameters(), lr=0.1, max_iter=4)
    for step in range(2):
        optimizer.step(lambda step=step: _trained_anew(part, optimizer, step))
    return part.full_state_dict()


def _trained_anew(part: rt.Rank, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    optimizer.zero_grad()
    return part.train_step(torch.tensor(0.5 + step))


def test_lbfgs_has_one_vector_of_all_parameters(rank_pool: Callable[[int], RankPool]) -> None:
    parameters = {key: nn.Parameter(tensor) for key, tensor in start().items()}
    optimizer = torch.optim.LBFGS(parameters.values(), lr=0.1, max_iter=4)

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(parameters, torch.tensor(0.5 + step))
        loss.backward()
        return loss.detach()

    for step in range(2):
        optimizer.step(lambda step=step: closure(step))
    for found in rank_pool(2).run(with_lbfgs):
        torch.testing.assert_close(found, {k: p.detach() for k, p in parameters.items()}, rtol=1e-4, atol=1e-5)
