"""What a rank does to compare a compiled program with itself before it was compiled."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from autopar.program import load_source

Tensors = dict[str, torch.Tensor]
Steps = tuple[list[torch.Tensor], Tensors, Tensors]


def run_rank(
    rank: int, world: int, source: str, state: Tensors, batch: Tensors, backend: str, in_place: bool
) -> tuple[Steps, Steps, int, list[str]]:
    """Three optimizer steps eagerly, the same compiled; then how many graphs were compiled, and the warnings."""
    from torch._dynamo.utils import counters

    from autopar import runtime as rt

    torch._dynamo.reset()
    counters.clear()
    eager = steps(rt.build(load_source(source).Program), state, batch)
    built = rt.build(load_source(source).Program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if in_place:
            built.compile(backend=backend)
            compiled = steps(built, state, batch)
        else:
            compiled = steps(torch.compile(built, backend=backend), state, batch)
    told = [str(item.message) for item in caught if "torch.compile of a rank" in str(item.message)]
    return eager, compiled, counters["stats"]["unique_graphs"], told


def steps(rank: Any, state: Tensors, batch: Tensors) -> Steps:
    """Losses, the last step's gradients, and the weights that come out."""
    rank.init_from(state, broadcast=False)
    optimizer = torch.optim.SGD(rank.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(rank.train_step(**batch))
        optimizer.step()
    losses.append(rank(**batch))
    return losses, rank.full_gradients(), rank.full_state_dict()
