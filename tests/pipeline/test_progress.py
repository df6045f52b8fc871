"""Progress goes to the caller's function, to a bar on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import re
import signal
import sys

import pytest

import autopar
from autopar.clock import is_interrupted
from autopar.progress import reporting, reporting_passes
from models import mlp
from tests.oracles.frozen.cases import PROFILES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_logical_mesh_is_reported_to_the_function() -> None:
    lines: list[str] = []
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    mesh, alone = autopar.Mesh("h100", devices_per_node=4), [autopar.Constraint(stages=1)]
    autopar.parallelize(model, mesh, batch, search="fast", constraints=alone, progress=lines.append)
    assert [line.partition(":")[0] for line in lines] == [
        "trace",
        *("mesh 4", "mesh 2x2") * 2,  # within the limit, and between time and memory
        "place",
        "template",
        "refine",
        "emit",
    ]
    assert re.fullmatch(r"place: \d+\.\d{3} ms a step \(\d+\.\d s\)", lines[5])
    with pytest.raises(autopar.AutoparError):
        mesh = autopar.Mesh("h100", devices_per_node=2)
        autopar.parallelize(
            model, mesh, batch, search="fast", memory_limit=1000, constraints=alone, progress=lines.append
        )
    assert lines[-1].startswith("mesh 2 in ") and "microbatches: no plan found that fits (" in lines[-1]


def test_stages_are_reported_too() -> None:
    lines: list[str] = []
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    autopar.parallelize(model, autopar.Mesh(PROFILES["h100"], devices_per_node=2), batch, progress=lines.append)
    found = [line.partition(":")[0] for line in lines if not line.startswith("soap: ")]
    assert found == ["trace", "2 stages of 1", "stage", "mesh 2", "mesh 2", "place", "template", "refine", "emit"]


def test_a_terminal_gets_a_bar_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with reporting(None, 2) as report:
        report("mesh 4: 1.000 ms")
        report("mesh 2x2: 2.000 ms")
    assert "mesh 2x2: 2.000 ms" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()


def test_a_terminal_gets_a_line_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    ended = reporting_passes(None)
    ended("trace", "7 operators")
    assert re.fullmatch(r"trace: 7 operators \(0\.0 s\)\n", terminal.getvalue())


def test_an_interrupt_ends_the_search_with_the_best_plan_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C after the first of two logical meshes: no other is looked at, and the plan is whole."""
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    mesh, lines = autopar.Mesh("h100", devices_per_node=4), list[str]()

    def report(line: str) -> None:
        lines.append(line)
        if line.startswith("mesh 4"):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    alone = [autopar.Constraint(stages=1)]
    plan = autopar.parallelize(model, mesh, batch, constraints=alone, progress=report).plan
    assert [line.partition(":")[0] for line in lines] == ["trace", "mesh 4", "place", "emit"]
    assert "interrupted" in plan.search.stop_reason
    autopar.verify(plan, model, batch)
    assert "stopping with the best plan so far" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    assert not is_interrupted()


def test_an_interrupt_before_there_is_a_plan_gives_up() -> None:
    def report(line: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    mesh, alone = autopar.Mesh("h100", devices_per_node=4), [autopar.Constraint(stages=1)]
    with pytest.raises(KeyboardInterrupt):
        autopar.parallelize(model, mesh, batch, memory_limit=1000, constraints=alone, progress=report)


def test_anything_else_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with reporting(None, 2) as report:
        report("mesh 4: 1.000 ms")
    assert stream.getvalue() == ""
