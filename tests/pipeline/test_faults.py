"""What trips autopar itself ends in an InternalError that says what was done and where; what is the user's stays so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar import cli
from autopar.emit import emit
from autopar.errors import AutoparError, InternalError, PlanError, TraceError
from autopar.ir.faults import faults_told
from autopar.pipeline import simulated_step, template_of_graph
from autopar.trace import trace
from models import mlp

MESH = autopar.Mesh("h100", devices_per_node=2)
NAME = "models.mlp"


def model_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = mlp.Config(widths=(16, 32, 32, 32, 8))
    return mlp.build(config), mlp.example_inputs(config)


def planned(how: str) -> Any:
    model, batch = model_and_batch()
    if how == "search":
        return autopar.parallelize(model, MESH, batch, search="fast")
    if how == "stages":
        return autopar.template_plan(model, MESH, batch, pp=2, microbatches=2)
    return autopar.template_plan(model, MESH, batch, dp=2)


ROOMS = [
    ("autopar.trace.export.check_markers", "template", "tracing the model"),
    ("autopar.trace.tracing.clean", "search", "tracing the model"),
    ("autopar.trace.guard._estimate_s", "search", "tracing the model"),
    ("autopar.by_hand.divided", "template", "planning"),
    ("autopar.intraop.builder._undominated", "template", "planning"),
    ("autopar.staging._reads", "stages", "planning"),
    ("autopar.simulate.variants.known_segments", "template", "planning"),
    ("autopar.ir.verifier._check_axes", "template", "checking the plan"),
    ("autopar.emit.program.build_tree", "search", "writing the program"),
]


@pytest.mark.parametrize(("planted", "how", "doing"), ROOMS)
@pytest.mark.parametrize("kind", [KeyError, AssertionError])
def test_faults_of_each_room_say_what_was_done(planted: str, how: str, doing: str, kind: type[Exception]) -> None:
    fault = kind("mean_1")
    with mock.patch(planted, side_effect=fault), pytest.raises(InternalError) as caught:
        planned(how)
    assert caught.value.__cause__ is fault and fault.__traceback__ is not None
    text = str(caught.value)
    print(text)
    assert f"found {kind.__name__}: " in text and "mean_1" in text, text
    assert "raised at autopar/" in text and "fault of autopar" in text, text
    assert f"expected {doing}" in text or doing == "planning", text


@pytest.mark.parametrize("kind", [IndexError, AttributeError, TypeError, ValueError, RuntimeError, ZeroDivisionError])
def test_faults_of_each_kind_are_told(kind: type[Exception]) -> None:
    with mock.patch("autopar.ir.verifier._check_axes", side_effect=kind()), pytest.raises(InternalError):
        planned("template")


def broken() -> tuple[Any, Any, Any]:
    """A graph, its plan, and the node of the graph whose result nothing knows any more."""
    model, batch = model_and_batch()
    graph = trace(model, batch)
    node = next(node for node in graph.nodes if "linear" in node.op)
    left = {name: tensor for name, tensor in graph.tensors.items() if name != node.results[0]}
    return replace(graph, tensors=left), template_of_graph(graph, MESH, dp=2), node


@pytest.mark.parametrize("act", [emit, lambda graph, plan: simulated_step(graph, plan)])
def test_the_node_at_hand_is_named_with_its_line(act: Any) -> None:
    graph, plan, _ = broken()
    with pytest.raises(InternalError, match="KeyError") as caught:
        act(graph, plan)
    known = {f"node {node.name} ({node.op}) at {node.source}" for node in graph.nodes}
    assert any(text in str(caught.value) for text in known), str(caught.value)


@pytest.mark.parametrize("act", ["explain", "diff", "report", "load", "print"])
def test_readers_of_plans_tell_faults(act: str, tmp_path: Path) -> None:
    plan = planned("template")
    plan.save(tmp_path / "plan.json")
    places = {
        "explain": ("autopar.show.explain.explain_text", lambda: plan.explain("layers")),
        "diff": ("autopar.show.text.diff_text", lambda: plan.diff(plan)),
        "report": ("autopar.show.report.write_report", lambda: plan.report(tmp_path / "plan.html")),
        "load": ("autopar.ir.serialization.check_consistent", lambda: autopar.Plan.load(tmp_path / "plan.json")),
        "print": ("autopar.show.text.plan_text", lambda: str(plan)),
    }
    planted, call = places[act]
    with mock.patch(planted, side_effect=IndexError("list index")), pytest.raises(InternalError, match="IndexError"):
        call()


class Raising(nn.Module):
    """Its forward raises when it runs on numbers, and can be traced."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


def test_what_a_forward_raises_names_its_line() -> None:
    with pytest.raises(TraceError, match=r"test_faults.py:\d+: raise self.error"):
        autopar.template_plan(Raising(KeyError("mine")), MESH, (torch.zeros(2, 4),), dp=2)


@pytest.mark.parametrize("kind", [KeyError, AttributeError, AssertionError])
def test_what_a_callback_raises_keeps_its_type(kind: type[Exception]) -> None:
    model, batch = model_and_batch()

    def report(line: str) -> None:
        raise kind("mine")

    with pytest.raises(kind, match="mine") as caught:
        autopar.parallelize(model, MESH, batch, search="fast", progress=report)
    assert not isinstance(caught.value, AutoparError)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError("disk"), ImportError("lib"),
                                   torch.OutOfMemoryError(), UserWarning("x"), PlanError("ours")])  # fmt: skip
def test_what_is_meant_goes_on_as_it_is(error: BaseException) -> None:
    with mock.patch("autopar.ir.verifier._check_axes", side_effect=error), pytest.raises(type(error)) as caught:
        planned("template")
    assert caught.value is error


def test_errors_of_callers_and_their_libraries_are_theirs() -> None:
    with pytest.raises(ZeroDivisionError), faults_told():
        _ = 1 / 0
    with pytest.raises(RuntimeError, match="mat1") as caught, faults_told():
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not isinstance(caught.value, AutoparError)


def test_the_command_line_prints_traceback_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("autopar.emit.program.build_tree", side_effect=KeyError("mean_1")):
        assert cli.main(["plan", NAME, "--mesh", "h100:2", "--search", "fast"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told and "autopar: expected writing the program to end, found KeyError: 'mean_1'" in told
