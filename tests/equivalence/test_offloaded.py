"""What is on the host trains as what is on the device: bit for bit, within the memory that was predicted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.plan import Plan
from autopar.program import model_state
from models import gpt, llama
from tests.equivalence.offloaded import Trained, accumulate, save_and_load, step_whole, train
from tests.rank_pool import pool

_SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "seq_len": 24, "vocab_size": 160}
STEPS = 3


@cache
def made(name: str, **more: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    if name == "gpt":
        config: Any = gpt.Config(**_SIZES, **more)
        return gpt.build(config), gpt.example_inputs(config)
    config = llama.Config(**_SIZES, num_kv_heads=2, mlp_size=112, **more)
    return llama.build(config), llama.example_inputs(config)


def trained(name: str, ranks: int, **choices: Any) -> tuple[Plan, list[Trained]]:
    model, batch = made(name, batch_size=8)
    mesh = autopar.Mesh("cpu", devices_per_node=ranks)
    plan = autopar.template_plan(model, mesh, batch, check=False, **choices)
    source = autopar.parallelize(model, mesh, batch, plan=plan, check=False).source
    return plan, pool(ranks).run(train, source, model_state(model), batch, STEPS)


PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt dp": ("gpt", 2, {"dp": 2}),
    "llama zero 1": ("llama", 2, {"dp": 2, "zero": 1}),
    "gpt zero 2 in microbatches": ("gpt", 2, {"dp": 2, "zero": 2, "microbatches": 2}),
    "llama zero 3 in microbatches": ("llama", 2, {"dp": 2, "zero": 3, "microbatches": 2}),
    "gpt zero 3 recomputed": ("gpt", 2, {"dp": 2, "zero": 3, "recompute": "full"}),
    "gpt tp": ("gpt", 2, {"tp": 2}),
    "llama stages": ("llama", 2, {"pp": 2, "microbatches": 2}),
    "llama bf16": ("llama", 2, {"dp": 2, "zero": 3, "precision": "bf16"}),
    "gpt dp, tp": ("gpt", 4, {"dp": 2, "tp": 2, "zero": 3}),
    "llama stages, zero 3": ("llama", 4, {"dp": 2, "pp": 2, "microbatches": 2, "zero": 3}),
    "gpt hsdp": ("gpt", 4, {"dp": 4, "zero": 3, "hsdp": 2}),
    "llama zero 1 in microbatches": ("llama", 4, {"dp": 4, "zero": 1, "microbatches": 2}),
}


@pytest.mark.ranks
@pytest.mark.sampled(only=("gpt zero 3 recomputed", "llama stages", "gpt dp, tp"))
@pytest.mark.parametrize("name", PLANS)
def test_training_is_the_same_wherever_state_is(name: str) -> None:
    """Losses, norms and weights after some steps of AdamW with clipping; no rank takes more of its device, or of its
    host, than was predicted, and no state of the optimizer is on the device."""
    model, ranks, choices = PLANS[name]
    _, without = trained(model, ranks, **choices)
    plan, found = trained(model, ranks, offload="optimizer", **choices)
    for a, b in zip(without, found, strict=True):
        assert a.losses == b.losses and a.norms == b.norms
        assert a.weights.keys() == b.weights.keys()
        assert all(torch.equal(weight, b.weights[key]) for key, weight in a.weights.items())
    most = max(one.peak_bytes for one in found)
    assert most <= plan.predicted.peak_bytes <= 1.1 * most
    assert most < max(one.peak_bytes for one in without)
    assert max(one.host_bytes for one in found) == plan.predicted.host_bytes
    assert max(one.other_state_bytes for one in found) == 0


@pytest.mark.ranks
def test_a_model_whose_state_is_four_times_what_its_ranks_have_is_trained() -> None:
    """16 bytes a parameter in float32, of which all ranks together may hold a quarter: nothing fits, but for what the
    search keeps on the host; then it trains as on one device."""
    sizes = {"num_layers": 8, "hidden_size": 96, "num_heads": 4, "seq_len": 16, "vocab_size": 64, "batch_size": 2}
    config = gpt.Config(**sizes)
    torch.manual_seed(0)
    model, batch = gpt.build(config), gpt.example_inputs(config)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    limit = 16 * sum(p.numel() for p in model.parameters()) // (4 * 2)
    asked: dict[str, Any] = {
        "memory_limit": limit, "search": autopar.SearchBudget(5.0, proposals=0, substitutions=False), "check": False,
    }  # fmt: skip
    with pytest.raises(InfeasibleError, match="smallest limit that can be met"):
        autopar.parallelize(model, mesh, batch, **asked)
    program = autopar.parallelize(model, mesh, batch, allow=("offload",), **asked)
    assert program.plan.predicted.peak_bytes <= limit
    found = pool(2).run(train, program.source, model_state(model), batch, STEPS)
    assert max(one.peak_bytes for one in found) <= program.plan.predicted.peak_bytes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert found[0].losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.ranks
def test_gradients_add_up_over_steps_and_stay_what_they_are() -> None:
    """A gradient that is there is added to, in place; memory of one that somebody holds is not taken for another."""
    model, batch = made("gpt", batch_size=8)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    found = []
    for offload in ("none", "optimizer"):
        plan = autopar.template_plan(model, mesh, batch, dp=2, zero=3, offload=offload, check=False)
        source = autopar.parallelize(model, mesh, batch, plan=plan, check=False).source
        found.append(pool(2).run(accumulate, source, model_state(model), batch)[0])
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


@pytest.mark.ranks
@pytest.mark.parametrize("order", [("optimizer", "none"), ("none", "optimizer")])
def test_checkpoints_and_files_are_the_same_wherever_state_is(tmp_path: Any, order: tuple[str, str]) -> None:
    """Training goes on under the other plan as if nothing had happened."""
    model, batch = made("gpt", batch_size=8)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    sources = []
    for offload in order:
        plan = autopar.template_plan(model, mesh, batch, dp=2, zero=3, offload=offload, check=False)
        sources.append(autopar.parallelize(model, mesh, batch, plan=plan, check=False).source)
    state = model_state(model)
    found = pool(2).run(save_and_load, sources, state, batch, str(tmp_path / "there"))[0]
    other = pool(2).run(save_and_load, [sources[0]] * 2, state, batch, str(tmp_path / "same"))[0]
    assert found == other


@pytest.mark.ranks
def test_optimizers_of_whole_parameters_are_refused_with_the_remedy() -> None:
    """When planned for, and when stepped."""
    model, batch = made("gpt", batch_size=8)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    with pytest.raises(PlanError, match="update of an element depends on no other"):
        autopar.template_plan(model, mesh, batch, dp=2, offload="optimizer", optimizer="lamb")
    plan = autopar.template_plan(model, mesh, batch, dp=2, offload="optimizer", check=False)
    source = autopar.parallelize(model, mesh, batch, plan=plan, check=False).source
    for text in pool(2).run(step_whole, source, model_state(model), batch):
        assert "is on the host, found Adafactor" in text and "use AdamW" in text
