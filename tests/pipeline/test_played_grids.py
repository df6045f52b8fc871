"""Grids of templates that benchmarks play: what is played is the template, and no bound is above it."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

import pytest

from autopar import Mesh
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from benchmarks.quality.experts.best import best_of
from benchmarks.quality.experts.grid import Expert, Placed
from benchmarks.quality.experts.rewritten import Players
from tests.equivalence.adaptive import traced
from tests.oracles.frozen.cases import graph

MESH = Mesh("h100", nodes=2, devices_per_node=2)


@cache
def _players(model: str) -> Players:
    return Players(_graph(model), MESH, [expert for name, expert in GRID if name == model])


def _graph(model: str) -> Graph:
    return traced() if model == "experts" else graph(model)


GRID = [
    ("experts", Expert(Placed(2, ep=2, zero=1), pp=2, recompute="full")),
    ("experts", Expert(Placed(4, ep=2, zero=3))),
    ("experts", Expert(Placed(4, ep=4, zero=3))),
    ("experts", Expert(Placed(4, ep=4, zero=1, exchange="two-level"))),
    ("experts", Expert(Placed(2, tp=2, ep=2, sequence_parallel=True, exchange_chunks=4))),
    ("llama", Expert(Placed(2, cp=2, zero=3, microbatches=2))),
    ("llama", Expert(Placed(1, cp=4, context="ring", zero=1), recompute="block")),
    ("llama", Expert(Placed(1, cp=2, context="heads", microbatches=2), pp=2)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "expert"), GRID, ids=str)
def test_what_is_played_is_the_template(model: str, expert: Expert) -> None:
    players = _players(model)
    played = players.played(expert)
    options = {**asdict(expert.placed), "pp": expert.pp, "recompute": expert.recompute}
    found = template_of_graph(_graph(model), MESH, **options).predicted
    assert (played.step_ns, played.peak_bytes) == (found.step_time_ns, found.peak_bytes)
    assert players.least_ns(expert) <= played.step_ns
    assert players.least_ns(expert, own_count=True) <= played.step_ns


def test_the_best_is_found_though_few_are_played() -> None:
    """Of a grid in which one computes more again, and one cannot be."""
    grid = [expert for model, expert in GRID if model == "experts"]
    grid += [Expert(Placed(4, ep=4, zero=3), recompute="full"), Expert(Placed(4, ep=3, zero=3))]
    players = _players("experts")
    steps = {str(expert): players.played(expert).step_ns for expert in grid[:-1]}
    found = best_of(players, grid)
    best = found["best"][0]
    assert best["step_time_ns"] == steps[best["expert"]] == min(steps.values())
    assert found["configurations"] == len(grid) and found["played"] < len(grid)
    assert best_of(players, grid, best["step_time_ns"])["best"] == []
