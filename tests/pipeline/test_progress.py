"""Progress goes to the caller's function, to a bar on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

import autopar
from autopar.progress import reporting
from models import mlp


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_logical_mesh_is_reported_to_the_function() -> None:
    lines: list[str] = []
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    mesh, alone = autopar.Mesh("h100", devices_per_node=4), [autopar.Constraint(stages=1)]
    autopar.parallelize(model, mesh, batch, search="fast", constraints=alone, progress=lines.append)
    assert [line.partition(":")[0] for line in lines] == ["mesh 4", "mesh 2x2"]
    with pytest.raises(autopar.AutoparError):
        mesh = autopar.Mesh("h100", devices_per_node=2)
        autopar.parallelize(
            model, mesh, batch, search="fast", memory_limit=1000, constraints=alone, progress=lines.append
        )
    assert lines[-1].startswith("mesh 2 in ") and "microbatches: no plan found that fits (" in lines[-1]


def test_stages_are_reported_too() -> None:
    lines: list[str] = []
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=2), batch, progress=lines.append)
    assert [line.partition(":")[0] for line in lines] == ["2 stages of []", "1 stages of [2]", "mesh 2"]


def test_a_terminal_gets_a_bar_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with reporting(None, 2) as report:
        report("mesh 4: 1.000 ms")
        report("mesh 2x2: 2.000 ms")
    assert "mesh 2x2: 2.000 ms" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()


def test_anything_else_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with reporting(None, 2) as report:
        report("mesh 4: 1.000 ms")
    assert stream.getvalue() == ""
