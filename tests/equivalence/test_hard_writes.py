"""What forward changes, in plans of every kind: programs compute what the model does, step after step."""

from __future__ import annotations

import pytest
from torch import nn

from tests.equivalence.on_threads import differences
from tests.trace.writes import Writes, batch

pytestmark = pytest.mark.sweep


def assert_alike(model: nn.Module, how: str, *, may_refuse: bool = False) -> None:
    """That the program of a plan computes what the model does; or, where it may be, that the plan is refused."""
    wrong = differences(model, batch(), how)
    assert wrong == [] or (wrong is None and may_refuse), wrong


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero=3", "microbatches", "stages=2", "searched"])
@pytest.mark.parametrize("target", ["activation", "view"])
def test_activations_that_are_written_to_without_gradients(target: str, plan: str) -> None:
    mixes_samples = target == "view" and plan == "microbatches"
    assert_alike(Writes("no_grad", "clamp_", target), plan, may_refuse=mixes_samples)
