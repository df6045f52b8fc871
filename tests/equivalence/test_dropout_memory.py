"""What dropout keeps for the backward pass: the mask, a byte an element, as is predicted."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.runtime.randomness import apply_mask
from models import gpt
from tests.equivalence import copying_out
from tests.equivalence.hard import state_of
from tests.rank_pool import pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 1])
def test_the_mask_is_all_that_is_kept_and_gradients_are_equal(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 33, dtype=dtype, requires_grad=True)
    mask, gradient = torch.rand(64, 33) > p, torch.randn(64, 33, dtype=dtype)
    factor = mask.to(dtype) if p == 1 else mask.to(dtype).div_(1 - p)
    kept = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        made = apply_mask(x, mask, p)
    assert torch.equal(made, x * factor)
    assert torch.equal(*(torch.autograd.grad(y, x, gradient)[0] for y in (made, x * factor)))
    assert kept == [mask.numel()]


@pytest.mark.ranks
def test_peaks_of_a_model_with_dropout_stay_below_the_prediction() -> None:
    torch.manual_seed(0)
    config = gpt.Config(
        vocab_size=128, seq_len=128, hidden_size=128, num_layers=3, num_heads=4, batch_size=8, dropout=0.1
    )
    model, batch = gpt.build(config), gpt.example_inputs(config)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, batch, dp=2, check=False)
    program = autopar.parallelize(model, mesh, batch, plan=plan, check=False)
    peaks = pool(2).run(copying_out.tracked_peak, program.source, state_of(model), batch)
    assert max(peaks) <= plan.predicted.peak_bytes < 1.2 * max(peaks)
