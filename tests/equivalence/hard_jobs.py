"""What ranks run for the tests of the hard cases: a module of its own, which they can import."""

from __future__ import annotations

from typing import Any

import torch

from autopar import runtime as rt
from autopar.program import load_source
from tests.equivalence.harness import Tensors

STEPS = 3


def exact_steps(rank: int, world: int, source: str, state: Tensors, batch: Tensors, seed: int) -> Any:
    """Losses, last gradients of some steps of exact mode, without touching torch's own generator."""
    torch.manual_seed(1000 + rank)  # ranks need not agree on it
    before = torch.get_rng_state()
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.set_exact_dropout(True)
    rt.seed_dropout(seed)
    losses = []
    for _ in range(STEPS):
        built.zero_grad()
        losses.append(built.train_step(**batch).item())
    rt.set_exact_dropout(False)
    assert torch.equal(before, torch.get_rng_state())
    return losses, built.full_gradients()


def outputs(rank: int, world: int, source: str, state: Tensors, batch: Tensors, seed: int, exact: bool) -> Any:
    """What forward returns, and what this rank holds of it before it is joined."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.set_exact_dropout(exact)
    rt.seed_dropout(seed)
    found = [built(**batch) for _ in range(2)]
    rt.set_exact_dropout(False)
    return found
