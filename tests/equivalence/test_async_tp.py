"""Products beside what is sent around them: the program equals the model, and sends and holds what the plan says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.program import model_state
from benchmarks.accuracy.memory import measure_rank
from models import llama
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool

OPTIMIZERS = ("sgd", "adamw")
WIDTH, ROWS, BATCH = 128, 256, 4


class Block(nn.Module):
    """Products of one input, with biases and without, and products of what is split by them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.left, self.right = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, rows, width) → the same."""
        hidden = self.norm(x)
        return x + self.down(F.gelu(self.left(hidden)) * self.right(hidden))


class Blocks(nn.Module):
    """Two blocks of which one has biases, a product that is called twice, and one of which the weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(bias) for bias in (True, False))
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.up.weight.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """x (batch, rows, width), target as x → loss ()."""
        for block in self.blocks:
            x = block(x)
        for _ in range(2):
            x = x + self.down(F.relu(self.up(self.norm(x))))
        return F.mse_loss(x, target)


def _blocks(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Blocks(), {"x": torch.randn(batch, ROWS, WIDTH), "target": torch.randn(batch, ROWS, WIDTH)}


def _llama(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    config = llama.Config(hidden_size=128, mlp_size=384, seq_len=ROWS, num_heads=8, num_kv_heads=4, batch_size=batch)
    return llama.build(config), llama.example_inputs(config)


MODELS = {"blocks": _blocks, "llama": _llama}


@cache
def made(model: str, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return MODELS[model](batch)


@cache
def single(model: str, batch: int) -> Any:
    return run_single(*made(model, batch), OPTIMIZERS)


TEMPLATES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "tp2_selective": {"tp": 2, "recompute": "selective"},
    "tp2_full": {"tp": 2, "recompute": "full"},
    "dp_tp_microbatches": {"dp": 2, "tp": 2, "microbatches": 2},
    "zero3_tp": {"dp": 2, "tp": 2, "zero": 3},
    "pp_tp": {"pp": 2, "tp": 2, "microbatches": 2},
    "bf16": {"tp": 2, "precision": "bf16"},
}


@cache
def planned(model: str, name: str, batch: int = BATCH) -> autopar.PlannedProgram:
    template = {**TEMPLATES[name], "sequence_parallel": True, "async_tp": True}
    sizes = [template.get(axis, 1) for axis in ("dp", "tp", "pp")]
    mesh = autopar.Mesh("cpu", devices_per_node=sizes[0] * sizes[1] * sizes[2])
    given, inputs = made(model, batch)
    plan = autopar.template_plan(given, mesh, inputs, check=False, **template)
    return autopar.parallelize(given, mesh, inputs, plan=plan, precision=template.get("precision"), check=False)


@pytest.mark.sampled
@pytest.mark.ranks
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("model", MODELS)
def test_programs_equal_the_model(model: str, name: str) -> None:
    program = planned(model, name)
    assert "rt.gathered_linears" in program.source
    assert "rt.scattered_linear" in program.source
    given, inputs = made(model, BATCH)
    results = pool(program.plan.mesh.num_devices).run(run_rank, program.source, given.state_dict(), inputs, OPTIMIZERS)
    if name != "bf16":
        found = differences(single(model, BATCH), results[0])
        assert not found, "\n".join(found)
    said = {kind: size for kind, size in program.plan.predicted.comm_bytes.items() if size}
    assert max((result[4] for result in results), key=lambda sent: sum(sent.values())) == said


@pytest.mark.sampled
@pytest.mark.ranks
@pytest.mark.parametrize(("model", "name"), [("blocks", "tp2"), ("blocks", "tp2_selective"), ("llama", "tp2")])
@pytest.mark.parametrize("batch", [1, BATCH])
def test_ranks_hold_no_more_than_the_plan_says(model: str, name: str, batch: int) -> None:
    program = planned(model, name, batch)
    given, inputs = made(model, batch)
    results = pool(2).run(measure_rank, program.source, model_state(given) or {}, inputs)
    most = max(lifetimes.peak_bytes for lifetimes, _ in results)
    assert most <= program.plan.predicted.peak_bytes <= 1.2 * most


def test_a_plan_without_rows_to_send_is_refused() -> None:
    given, inputs = made("blocks", BATCH)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    with pytest.raises(PlanError, match="async_tp"):
        autopar.template_plan(given, mesh, inputs, check=False, dp=2, async_tp=True)


def test_a_file_keeps_it() -> None:
    plan = planned("blocks", "tp2").plan
    again = autopar.Plan.from_json(plan.to_json())
    assert again == plan
    given, inputs = made("blocks", BATCH)
    assert (
        autopar.parallelize(given, plan.mesh, inputs, plan=again, check=False).source == planned("blocks", "tp2").source
    )


def test_rows_that_ranks_do_not_divide_stay_as_they_were() -> None:
    config = llama.Config(hidden_size=128, mlp_size=384, seq_len=ROWS - 1, batch_size=BATCH)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    options: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "async_tp": True, "check": False}
    with pytest.raises(PlanError, match="async_tp"):
        autopar.template_plan(llama.build(config), mesh, llama.example_inputs(config), **options)
