"""A rank that is slower than others is seen, and gets less to do where that is worth the move."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli import main
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ladders.stores import StateStore
from autopar.ladders.stragglers import (
    LEAST,
    WINDOW,
    StragglerReport,
    read_own_times,
    rebalanced,
    report_lines,
    slowed_mesh,
    slowness,
)
from autopar.profiler import load_profile
from models import mlp
from tests.ladder.slow_ranks import own_seconds
from tests.rank_pool import pool

STEPS = [0.3] * WINDOW


@pytest.mark.ranks
def test_a_slow_rank_is_seen_and_equal_ones_are_not() -> None:
    """Rank 1 takes three times as long for a row; then it has a third of the rows of the other, as shares say."""
    config = mlp.Config(batch_size=8)
    model, inputs = mlp.build(config), mlp.example_inputs(config)
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, inputs, dp=2)
    source = autopar.parallelize(model, mesh, inputs, plan=plan, check=False).source
    found = {}
    for rows, row_s in (((4, 4), (0.02, 0.06)), ((6, 2), (0.02, 0.06)), ((4, 4), (0.03, 0.03))):
        own, steps = pool(2).run(own_seconds, source, rows, row_s, 6)[0]
        found[rows, row_s] = slowness(own, steps)
        assert all(max(each) <= step * 1.05 for each, step in zip(own[1:], steps[1:], strict=True))
    slow = found[(4, 4), (0.02, 0.06)]
    assert slow.slow == (1,) and slow.times[1] == pytest.approx(3.0, rel=0.15)
    assert found[(6, 2), (0.02, 0.06)].slow == found[(4, 4), (0.03, 0.03)].slow == ()


def test_what_is_slow_for_a_while_is_not_slow() -> None:
    even = [[1.0, 1.0, 1.0, 1.0]] * WINDOW
    assert slowness(even, STEPS).slow == ()
    held_up = [*even[: WINDOW - 8], *[[1.0, 9.0, 1.0, 1.0]] * 8]
    assert slowness(held_up, STEPS).slow == ()
    late = [*even, *[[1.0, 1.0, 1.0, 1.8]] * WINDOW]
    assert slowness(late, STEPS * 2) == StragglerReport((1.0, 1.0, 1.0, 1.8), 0.3, WINDOW)
    assert slowness(late, STEPS * 2, ranks_per_node=2).times == (1.0, 1.8)
    below = [[1.0, 1.0, 1.0, LEAST - 0.01]] * WINDOW
    assert slowness(below, STEPS).slow == ()


@cache
def planned() -> tuple[Plan, torch.nn.Module, Any]:
    config = mlp.Config((4096, 16384, 16384, 4096), batch_size=16384)
    with torch.device("meta"):
        model, inputs = mlp.build(config), mlp.example_inputs(config)
    return autopar.template_plan(model, autopar.Mesh("h100", nodes=4), inputs, dp=4), model, inputs


def test_a_slow_node_gets_fewer_rows_where_that_is_worth_it(tmp_path: Path) -> None:
    plan, model, inputs = planned()
    report = StragglerReport((1.0, 1.0, 2.0, 1.0), 10.0, WINDOW)
    store = StateStore(restart_s=50.0)
    many = rebalanced(plan, model, inputs, report, 100, tmp_path, store=store)
    assert many.is_worth_it and many.plan is not None and many.moved is not None
    saved_s = (many.now_s - many.then_s) * 100
    assert many.gain_s == pytest.approx(saved_s - many.cost_s) and many.cost_s == 50.0 + many.moved.pause_s
    assert 3.5 < 10 * many.then_s / many.now_s < 9  # rows of 3.5 equal nodes instead of 2 make 4 / 7
    (axes,) = {stage.axes for stage in many.plan.stages}
    shares = next((axis.shares for axis in axes if axis.shares), ())
    assert shares and shares[2] < min(shares[0], shares[1], shares[3])
    few = rebalanced(plan, model, inputs, report, int(many.cost_s / (many.now_s - many.then_s)), tmp_path, store=store)
    assert not few.is_worth_it and few.plan is not None and few.gain_s <= 0
    assert report_lines(few)[0].startswith("stay") and report_lines(many)[0].startswith("go over")
    again = Plan.from_json(many.plan.to_json())
    assert again.mesh == many.plan.mesh
    autopar.verify(again, model, inputs)


def test_the_slower_profile_is_the_profile_so_much_slower(tmp_path: Path) -> None:
    """Of what it computes; what a device holds and sends stays."""
    plan, model, inputs = planned()
    mesh = slowed_mesh(plan.mesh, (1.0, 1.5, 1.5, 1.0), tmp_path)
    assert [(group.nodes, group.devices_per_node) for group in mesh.groups] == [(1, 1), (2, 1), (1, 1)]
    slower, own = load_profile(mesh.groups[1].profile), load_profile("h100")
    assert slower.facts.capacity_bytes == own.facts.capacity_bytes and slower.links == own.links
    assert slower.peak_flops("bfloat16") == pytest.approx(own.peak_flops("bfloat16") / 1.5)
    for name, table in own.tables.items():
        place = [axis[0] for axis in table.axes]
        assert slower.tables[name].kernel_ns(place, 1e12) == pytest.approx(1.5 * table.kernel_ns(place, 1e12))
    host = slowed_mesh(autopar.Mesh("cpu", nodes=2), (1.0, 3.0), tmp_path)  # whose tables are in nanoseconds
    assert load_profile(host.groups[1].profile).facts.capacity_bytes == load_profile("cpu").facts.capacity_bytes
    with pytest.raises(PlanError, match="a plan for 4 equal nodes"):
        slowed_mesh(mesh, (1.0, 1.0, 2.0, 1.0), tmp_path)
    stays = rebalanced(replace(plan), model, inputs, StragglerReport((1.0,) * 4, 1.0, 5), 1000, tmp_path)
    assert not stays.is_worth_it and stays.plan is None and "no node is slower" in stays.reason


def test_a_log_is_read_since_its_last_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines: list[dict[str, Any]] = [
        {"step": 0, "loss": 1.0, "step_s": 9.0, "own_s": [1.0, 1.0, 5.0]}, {"goes_on_after": 0, "ranks": 2},
        {"step": 1, "loss": 1.0, "step_s": 0.5, "own_s": [0.25, 0.5]},
    ]  # fmt: skip
    log.write_text("\n".join(map(json.dumps, lines)))
    assert read_own_times(log) == ([[0.25, 0.5]], [0.5])
    log.write_text(json.dumps({"step": 0, "loss": 1.0, "step_s": 9.0}))
    with pytest.raises(PlanError, match="own_s"):
        read_own_times(log)


def test_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = mlp.Config()
    model, inputs = mlp.build(config), mlp.example_inputs(config)
    plan_file, log = tmp_path / "plan.json", tmp_path / "log"
    autopar.template_plan(model, autopar.Mesh("h100", nodes=3), inputs, dp=3).save(plan_file)
    line = {"step": 0, "loss": 1.0, "step_s": 0.5}
    command = ["rebalance", str(plan_file), "models.mlp", str(log), "--steps-left", "10", "-o", str(tmp_path / "out")]
    log.write_text("\n".join([json.dumps({**line, "own_s": [0.4, 0.4, 0.4]})] * 5))
    assert main(command) == 0
    assert capsys.readouterr().out == "stay with the plan: no node is slower than the others\n"
    log.write_text("\n".join([json.dumps({**line, "own_s": [0.4, 0.4, 1.2]})] * 5))
    assert main(command) == 0
    assert "stay with the plan: node 2 takes 3 times as long" in capsys.readouterr().out
    assert str(Plan.load(tmp_path / "out" / "plan.json").mesh).startswith("h100:2x1+")
