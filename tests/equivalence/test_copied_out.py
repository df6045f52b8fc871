"""Programs whose activations wait on the host compute what they do without, bit for bit, in the predicted memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.plan import Plan
from autopar.step import simulated_again
from models import gpt
from tests.equivalence import copying_out, planned, zoo
from tests.equivalence.hard import state_of
from tests.equivalence.harness import Tensors
from tests.equivalence.test_recompute import dropped_gpt
from tests.rank_pool import pool

pytestmark = pytest.mark.ranks

CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"dp": 2}),
    ("gpt", {"dp": 2, "zero": 3, "microbatches": 2}),
    ("llama", {"tp": 2, "sequence_parallel": True}),
    ("llama", {"dp": 2, "tp": 2, "zero": 3}),
    ("wide_resnet", {"dp": 2, "zero": 3}),
    ("hf_bert", {"tp": 2, "microbatches": 2}),
    ("moe", {"dp": 2, "zero": 1}),
    ("gpt", {"pp": 2, "microbatches": 4}),
    ("llama", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "gpipe"}),
    ("gpt", {"pp": 2, "microbatches": 4, "schedule": "interleaved"}),
]


def all_blocks(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for paths in plan.blocks for path in paths))


@pytest.mark.sampled
@pytest.mark.parametrize(("model_name", "choices"), CASES, ids=str)
def test_program_equals_the_same_without_copies_bit_for_bit(model_name: str, choices: dict[str, Any]) -> None:
    """All blocks copied out, the last too, which comes back at once."""
    model, batch = zoo.build(model_name)
    plain = planned.template(model_name, **choices)
    plan = planned.template(model_name, **choices, offload="activations")
    plan = replace(plan, copied_out=all_blocks(plan))
    assert replace(plan, copied_out=()).stages == plain.stages
    program = planned.program(model_name, plan)
    assert "rt.copied_out(" in program.source and "@rt.offloading" in program.source
    assert "copied_out" not in planned.program(model_name, plain).source
    ranks = pool(plan.mesh.num_devices)
    found = ranks.run(copying_out.losses_and_gradients, program.source, state_of(model), batch)
    expected = ranks.run(
        copying_out.losses_and_gradients, planned.program(model_name, plain).source, state_of(model), batch
    )
    for (loss, gradients), (plain_loss, plain_gradients) in zip(found, expected, strict=True):
        assert torch.equal(loss, plain_loss)
        assert gradients.keys() == plain_gradients.keys()
        assert all(torch.equal(gradients[name], value) for name, value in plain_gradients.items())


def test_state_and_activations_wait_together() -> None:
    """Parameters, gradients and optimizer state on the host beside activations."""
    model, batch = zoo.build("gpt")
    plain = planned.template("gpt", dp=2, microbatches=2)
    plan = planned.template("gpt", dp=2, microbatches=2, offload="both")
    assert plan.copied_out and all(storage.on_host for storage in plan.stage.storage.values())
    assert plan.predicted.peak_bytes < plain.predicted.peak_bytes
    sources = [planned.program("gpt", one).source for one in (plain, plan)]
    runs = [pool(2).run(copying_out.losses_and_gradients, source, state_of(model), batch) for source in sources]
    for (loss, gradients), (plain_loss, plain_gradients) in zip(runs[1], runs[0], strict=True):
        assert torch.equal(loss, plain_loss)
        assert all(torch.equal(gradients[name], value) for name, value in plain_gradients.items())


def test_dropout_and_recomputed_blocks_beside() -> None:
    """Masks wait on the host as well; a block that is computed again lies between two that are copied out."""
    model, batch = dropped_gpt()
    choices = {"dp": 2, "microbatches": 2}
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plain = autopar.template_plan(model, mesh, batch, **choices)  # type: ignore[arg-type] # of several types
    blocks = all_blocks(plain)
    several = autopar.template_plan(model, mesh, batch, **choices, offload="activations")  # type: ignore[arg-type]
    mixed = replace(several, copied_out=blocks[1:], recompute=blocks[:1])
    sources = [autopar.parallelize(model, mesh, batch, plan=one).source for one in (plain, several, mixed)]
    runs = [pool(2).run(copying_out.losses_and_gradients, source, state_of(model), batch) for source in sources]
    for other in runs[1:]:
        for (loss, gradients), (plain_loss, plain_gradients) in zip(other, runs[0], strict=True):
            assert torch.equal(loss, plain_loss)
            assert all(torch.equal(gradients[name], value) for name, value in plain_gradients.items())


@cache
def deep_gpt() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    config = gpt.Config(vocab_size=128, seq_len=128, hidden_size=128, num_layers=6, num_heads=4, batch_size=8)
    return gpt.build(config), gpt.example_inputs(config)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "choices",
    [{"dp": 2}, {"dp": 2, "zero": 3, "microbatches": 2}, {"tp": 2}, {"pp": 2, "microbatches": 4}],
    ids=str,
)
def test_tracked_peaks_stay_below_the_prediction_and_are_lower(choices: dict[str, Any]) -> None:
    model, batch = deep_gpt()
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    peaks, predicted = [], []
    for offload in ("none", "activations"):
        plan = autopar.template_plan(model, mesh, batch, **choices, offload=offload)
        program = autopar.parallelize(model, mesh, batch, plan=plan)
        peaks.append(max(pool(2).run(copying_out.tracked_peak, program.source, state_of(model), batch)))
        predicted.append(plan.predicted.peak_bytes)
    assert peaks[1] <= predicted[1] and peaks[0] <= predicted[0]
    assert predicted[1] < 0.8 * predicted[0] and peaks[1] < 0.8 * peaks[0]
    assert predicted[1] < 1.2 * peaks[1]


def test_prediction_again_is_the_same() -> None:
    graph = planned.graph("gpt")
    plan = planned.template("gpt", dp=2, offload="activations")
    assert simulated_again(plan, graph).predicted.peak_bytes == plan.predicted.peak_bytes
