"""The same request gives the same plan, byte for byte: whatever the clock shows, and in whatever order sets are gone
through; where the clock's guard ends a search, the report says so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autopar
from autopar import clock
from autopar.ir.graph import Graph
from autopar.pipeline import planned
from autopar.request import Request
from autopar.trace import trace
from models import gpt

MESH = autopar.Mesh("h100", nodes=2, devices_per_node=2)
BUDGET = autopar.SearchBudget(2.0, proposals=60)


@cache
def graph() -> Graph:
    config = gpt.Config(num_layers=2, hidden_size=256, num_heads=4, seq_len=64, vocab_size=512, batch_size=16)
    with torch.device("meta"):
        return trace(gpt.build(config), gpt.example_inputs(config))


@cache
def first() -> autopar.Plan:
    return found()


def found() -> autopar.Plan:
    return planned(graph(), Request(MESH, "train", "adamw", None, (), BUDGET))


def showing(seconds: float, step: float = 0.0) -> SimpleNamespace:
    """A clock that runs so many times as fast, and is so much later whenever somebody looks."""
    looks = iter(range(1 << 62))
    return SimpleNamespace(monotonic=lambda: time.monotonic() * seconds + next(looks) * step)


def test_a_clock_that_runs_100_times_faster_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "struck" not in first().search.stop_reason
    monkeypatch.setattr(clock, "time", showing(100.0))
    monkeypatch.setattr("autopar.driver.GUARD", 6_000.0)
    assert found().to_json() == first().to_json()


def test_work_that_is_counted_ends_a_search_at_the_same_place_whatever_came_before() -> None:
    assert first()
    clock.worked(0.1)
    assert found().to_json() == first().to_json()
    assert 0 < first().search.seconds < BUDGET.seconds * 5


def test_where_the_guard_strikes_the_report_says_in_which_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time", showing(1.0, step=60.0))
    plan = found()
    assert "the clock struck in pass " in plan.search.stop_reason
    assert plan.predicted.peak_bytes <= plan.memory_limit
    assert not clock.Clock.of(1.0).is_over, "the guard of a search that has ended is none of the next"


def test_the_order_in_which_sets_are_gone_through_changes_nothing() -> None:
    code = "from tests.pipeline.test_determinism import found; print(found().to_json())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"  # this process has another, mostly a random one
    said = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=Path(__file__).parents[2],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert said == f"{first().to_json()}\n"
