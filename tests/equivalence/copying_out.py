"""What ranks run for the tests of activations that wait on the host: a module of its own, which they can import."""

from __future__ import annotations

from typing import Any

import torch

from autopar import runtime as rt
from autopar.program import load_source
from benchmarks.accuracy.lifetimes import live_storages, track
from benchmarks.accuracy.memory import own_shard
from tests.equivalence.harness import Tensors


def losses_and_gradients(rank: int, world: int, source: str, state: Tensors, batch: Tensors) -> Any:
    """Of two steps with SGD."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.seed_dropout(5)
    optimizer, losses = torch.optim.SGD(built.parameters(), lr=0.05), []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(built.train_step(**batch))
        optimizer.step()
    return torch.stack(losses), built.full_gradients()


def tracked_peak(rank: int, world: int, source: str, state: Tensors, batch: Tensors) -> int:
    """Bytes of the second step with AdamW at its highest point, without what is on the host."""
    before = live_storages()
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    is_whole = built.num_stages > 1
    shard = None if is_whole else own_shard(built, batch)

    def step() -> None:
        if shard is None:
            built.train_step(**batch)
        else:
            built.train_step(*shard, local=True)
        optimizer.step()

    step()
    optimizer.zero_grad()
    return track(step, before).peak_bytes
