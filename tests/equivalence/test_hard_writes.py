"""What forward changes, in plans of every kind: programs compute what the model does, step after step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.equivalence.on_threads import differences, kept
from tests.trace.writes import Writes, batch

pytestmark = pytest.mark.sweep


def assert_alike(how: str, make: Callable[..., nn.Module], *given: str, may_refuse: bool = False) -> None:
    """That the program of a plan computes what the model does; or, where it may be, that the plan is refused."""
    wrong = differences(*kept(make, batch, *given), how)
    assert wrong == [] or (wrong is None and may_refuse), wrong


@pytest.mark.sampled
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero=3", "microbatches", "stages=2", "searched"])
@pytest.mark.parametrize("target", ["activation", "view"])
def test_activations_that_are_written_to_without_gradients(target: str, plan: str) -> None:
    mixes_samples = target == "view" and plan == "microbatches"
    assert_alike(plan, Writes, "no_grad", "clamp_", target, may_refuse=mixes_samples)


class Averaged(nn.Module):
    """A running mean at the top, which layers update and read: never parted over stages, never read by a second run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            x = x - self.mean
        return x.square().mean()


class Power(nn.Module):
    """Layers that keep an estimate in a buffer, which they update and read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(torch.nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "recompute", "stages=2", "searched"])
def test_a_buffer_that_several_modules_update(plan: str) -> None:
    assert_alike(plan, Averaged, may_refuse=plan == "stages=2")


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "recomputed", "stages=2"])
def test_a_buffer_that_a_layer_updates_and_reads(plan: str) -> None:
    assert_alike("recompute" if plan == "recomputed" else plan, Power, may_refuse=plan in ("recomputed", "stages=2"))
