"""Eager or compiled: what is asked for, and the better of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, PlanError
from autopar.running import running
from autopar.trace import trace
from models import mlp

ONE = autopar.Mesh("h100", devices_per_node=1)


class Pointwise(nn.Module):
    """Little but operators that compiled blocks join."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(torch.sin(x * self.scale) + 1.0)
        return x.sum()


BATCH = {"x": torch.empty(1 << 14, 1024, device="meta")}


def test_compiled_blocks_are_taken_where_they_are_faster_and_the_script_compiles_them(tmp_path: Path) -> None:
    program = autopar.parallelize(Pointwise(), ONE, BATCH, search="fast", runs="either")
    eager = autopar.parallelize(Pointwise(), ONE, BATCH, search="fast")
    assert (program.plan.runs, eager.plan.runs) == ("compiled", "eager")
    assert program.plan.predicted.step_time_ns < eager.plan.predicted.step_time_ns
    assert program.plan.predicted.step_time_interval_ns is not None
    assert "rank.compile()" in (program.save(tmp_path / "compiled") / "train.py").read_text()
    assert "rank.compile()" not in (eager.save(tmp_path / "eager") / "train.py").read_text()
    again = autopar.parallelize(Pointwise(), ONE, BATCH, plan=program.plan)
    assert again.plan.runs == "compiled"


def test_a_gain_below_what_the_profile_can_tell_is_none() -> None:
    with torch.device("meta"):
        config = mlp.Config(widths=(1024, 4096, 1024), batch_size=4096)
        model, batch = mlp.build(config), mlp.example_inputs(config)
    plan = autopar.parallelize(model, ONE, batch, search="fast", runs="either").plan
    assert plan.runs == "eager"
    compiled = autopar.parallelize(model, ONE, batch, search="fast", runs="compiled").plan
    assert compiled.runs == "compiled" and compiled.predicted.step_time_ns <= plan.predicted.step_time_ns


def test_compiled_blocks_keep_to_the_limit() -> None:
    graph = trace(Pointwise(), BATCH)
    plan = autopar.template_plan(Pointwise(), ONE, BATCH)
    assert running(plan, graph, "either", memory_limit=1).runs == "eager"
    with pytest.raises(InfeasibleError, match="expected a compiled program within 1 bytes a device, found one that"):
        running(plan, graph, "compiled", memory_limit=1)


def test_another_way_is_refused() -> None:
    with pytest.raises(PlanError, match="expected runs as 'eager', 'compiled' or 'either', found 'jit'"):
        autopar.parallelize(Pointwise(), ONE, BATCH, runs="jit")
