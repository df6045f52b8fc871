"""What ranks run for the tests of recomputation: a module of its own, which they can import."""

from __future__ import annotations

from typing import Any
from unittest import mock

from autopar import runtime as rt
from autopar.program import load_source
from autopar.runtime import randomness
from tests.equivalence.hard_jobs import _whole
from tests.equivalence.harness import Tensors


def drawn_steps(rank: int, world: int, source: str, state: Tensors, batch: Tensors, forgets: bool) -> Any:
    """The losses and the last gradients of two steps; `forgets`: the second run of a block draws new numbers."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.seed_dropout(3)
    with mock.patch.object(randomness, "go_to", (lambda place: None) if forgets else randomness.go_to):
        losses = []
        for _ in range(2):
            built.zero_grad()
            losses.append(built.train_step(**batch).item())
    return losses, built.full_gradients()


def counted_step(rank: int, world: int, source: str, state: Tensors, batch: Tensors) -> Any:
    """A first step in exact mode: its loss, gradients, buffers and bytes by collective."""
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    rt.set_exact_dropout(True)
    rt.seed_dropout(7)
    with rt.count_bytes() as counted:
        loss = built.train_step(**batch)
    rt.set_exact_dropout(False)
    sent: dict[str, int] = {}
    for (kind, _), size in counted.items():
        sent[kind] = sent.get(kind, 0) + size
    return loss.item(), built.full_gradients(), {n: _whole(b) for n, b in built.named_buffers()}, sent
