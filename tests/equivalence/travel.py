"""What a rank does of a training that is interrupted: steps before the checkpoint, and after it under another plan."""

from __future__ import annotations

from typing import Any

import torch

from autopar.program import load_source

BEFORE, AFTER = 2, 3
Tensors = dict[str, torch.Tensor]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-6)


def save(rank: int, world: int, source: str, state: Tensors, batch: Tensors, folder: str) -> list[float]:
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = optimizer_of(built.parameters())
    losses = _steps(built, optimizer, batch, BEFORE)
    rt.save_checkpoint(folder, built, optimizer, step=BEFORE)
    return losses


def resume(rank: int, world: int, source: str, batch: Tensors, folder: str) -> tuple[list[float], Tensors]:
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    optimizer = optimizer_of(built.parameters())
    assert rt.load_checkpoint(folder, built, optimizer) == BEFORE
    return _steps(built, optimizer, batch, AFTER), built.full_state_dict()


def _steps(built: Any, optimizer: torch.optim.Optimizer, batch: Tensors, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(built.train_step(**batch).item())
        optimizer.step()
    return losses
