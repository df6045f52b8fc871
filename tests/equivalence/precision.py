"""bf16 compute with float32 masters, on one device and on ranks: what tests/equivalence/test_precision.py compares."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from autopar.program import load_source

Tensors = dict[str, torch.Tensor]


def gradients_of(model: nn.Module, state: Tensors, batch: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, Tensors]:
    """Loss and gradients (float32) of one step of the model cast to the dtype; `state` holds float32 masters."""
    cast = {name: _cast(tensor, dtype) for name, tensor in state.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in cast.items() if tensor.is_floating_point()}
    inputs = {name: _cast(tensor, dtype) for name, tensor in batch.items()}
    output = functional_call(model, cast, kwargs=inputs)
    loss = output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    return loss.detach(), {name: leaf.grad.float() for name, leaf in leaves.items() if leaf.grad is not None}


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor


def train(model: nn.Module, batch: Tensors, steps: int) -> tuple[list[torch.Tensor], Tensors]:
    """The loop on one device: masters in float32, gradients of the model cast to bf16."""
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss, gradients = gradients_of(model, dict(masters), batch, torch.bfloat16)
        for name, parameter in masters.items():
            parameter.grad = gradients.get(name)
        optimizer.step()
        losses.append(loss)
    return losses, {name: p.detach() for name, p in masters.items()}


def run_rank(rank: int, world: int, source: str, state: Tensors, batch: Tensors, steps: int) -> Any:
    """On one rank: the first step's loss, gradients and bytes; losses and weights of some SGD steps."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    with rt.count_bytes() as counted:
        loss = built.train_step(**batch)
    gradients = built.full_gradients()
    sent: Counter[str] = Counter()
    for (collective, _), size in counted.items():
        sent[collective] += size
    optimizer = torch.optim.SGD(built.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(built.train_step(**batch))
        optimizer.step()
    return loss, gradients, dict(sent), losses, built.full_state_dict()
