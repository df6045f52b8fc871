"""Plan files: byte-stable, refused with the reason when they are broken, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import autopar
from autopar.errors import MeshError, PlanError
from autopar.ir.plan import Move, Refinement
from models import gpt, mlp


@cache
def text_of(name: str) -> str:
    module: Any = {"mlp": mlp, "gpt": gpt}[name]
    mesh = autopar.Mesh("h100", devices_per_node=4)
    batch = module.example_inputs(module.Config())
    if name == "mlp":
        return autopar.template_plan(module.build(module.Config()), mesh, batch, dp=2, tp=2).to_json()
    few = autopar.SearchBudget(proposals=200)
    return autopar.parallelize(module.build(module.Config()), mesh, batch, search=few).plan.to_json()


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_round_trip_keeps_every_byte(name: str) -> None:
    text = text_of(name)
    plan = autopar.Plan.from_json(text)
    assert plan.to_json() == text
    assert autopar.Plan.from_json(plan.to_json()) == plan


def test_a_refinement_is_kept() -> None:
    plan = autopar.Plan.from_json(text_of("mlp"))
    move = Move("layers.0", "operator", 2, "S(0) R → S(0)", "R R → R", 1_000)
    refinement = Refinement(
        "the plan", 5_000, 4_000, 100, 20, 0.5, 7, "half of the budget passed without gain", {"operator": (100, 3)},
        {"the plan": (5_000, 4_000)}, ((0, 5_000, 5_000), (50, 4_000, 4_000)), (move,),
    )  # fmt: skip
    refined = replace(plan, search=replace(plan.search, refinement=refinement))
    assert autopar.Plan.from_json(refined.to_json()) == refined
    assert "refinement" not in json.loads(plan.to_json())["search"]


def changed(change: Callable[[Any], Any]) -> str:
    data = json.loads(text_of("mlp"))
    change(data)
    return json.dumps(data)


BROKEN = {
    "empty": ("", "expected a plan as JSON; at the top level: expected JSON, found text that is none"),
    "truncated": (lambda text: text[: len(text) // 2], "at the top level: expected JSON, found text that is none"),
    "nested without end": ("[" * 100_000, "expected lists and objects within at most 32 others, found far more"),
    "nested deeply": ("[" * 900 + "]" * 900, "expected lists and objects within at most 32 others, found more"),
    "a mark before it": (lambda text: "\ufeff" + text, "expected JSON, found text that is none: .*BOM"),
    "not an object": ("[1, 2]", "expected a plan of version 1 to 3, found None; plan again"),
    "another version": (
        lambda data: data.update(autopar_plan=9),
        "expected a plan of version 1 to 3, found 9; plan again",
    ),
    "a number like the version": (
        lambda data: data.update(autopar_plan=3.0),
        "a plan of version 1 to 3, found 3.0; plan ag",
    ),
    "unknown field": (lambda data: data.update(extra=1), r"at the top level: .*'extra' was unexpected"),
    "missing field": (
        lambda data: data["stages"][0].pop("nodes"),
        r"at /stages/0: .* found 'nodes' is a required property",
    ),
    "wrong kind": (lambda data: data.update(microbatches="2"), r"at /microbatches: expected an integer .* found '2'"),
    "a float": (lambda data: data.update(microbatches=1.0), r"at /microbatches: expected an integer .*, found 1\.0"),
    "a truth": (
        lambda data: data["stages"][0]["axes"][0].__setitem__(1, True),
        r"at /stages/0/axes/0/1: expected an integer, found True",
    ),
    "no number": (
        lambda data: data["search"].update(seconds=float("nan")),
        "/search/seconds: expected a number, found N",
    ),
    "endless": (
        lambda data: data["search"].update(seconds=float("inf")),
        "/search/seconds: expected a number, found Inf",
    ),
    "huge": (
        lambda data: data.update(memory_limit=10**400),
        "/memory_limit: expected a number of at most 64 bits, found",
    ),
    "half a character": (
        lambda data: data.update(model="\ud800"),
        r"at /model: expected text, found half of a characte",
    ),
    "half a name": (
        lambda data: data["types"].update({"\udfff": ""}),
        "at /types/.*: expected text, found half of a char",
    ),
    "a field twice": (
        lambda text: text.replace('"mode"', '"mode": 1, "mode"', 1),
        "at /mode: expected the field once, found",
    ),
    "unknown prediction": (lambda data: data["predicted"].update(speed=1), r"at /predicted: .*'speed' was unexp"),
    "missing prediction": (lambda data: data["predicted"].pop("breakdown"), r"/predicted: .*'breakdown' is a req"),
    "negative bytes": (
        lambda data: data["predicted"].update(peak_bytes=-1),
        r"/predicted/peak_bytes: expected at least 0",
    ),
    "no such type": (
        lambda data: data["stages"][0]["inputs"].update(features="S(x) R"),
        r"/stages/0/inputs/features: .*found 'S\(x\) R'",
    ),
    "too few types": (
        lambda data: data["stages"][0]["inputs"].update(features="R"),
        "/stages/0/inputs/features: expected a type for each of 2 ax",
    ),
    "no such axis": (
        lambda data: data["stages"][0]["redistributes"][0][2][0].__setitem__(0, 7),
        "steps on one of 2 axes, found one on a",
    ),
    "forks of nothing": (
        lambda data: data["stages"][0].update(forks=[["dp", []]]),
        "at /stages/0/forks/0: expected branches at some of the coord",
    ),
    "a limit below the peak": (
        lambda data: data.update(memory_limit=1),
        "/memory_limit: expected at least the predicted pe",
    ),
    "code for a name": (
        lambda data: data["stages"][0]["axes"][0].__setitem__(0, "__import__('os')"),
        r"at /stages/0/axes/0/0: expected text of",
    ),
    "a line after a name": (
        lambda data: data["stages"][0]["axes"][0].__setitem__(0, "dp\n"),
        r"at /stages/0/axes/0/0: expected text of the form",
    ),
    "a keyword": (
        lambda data: data["stages"][0]["axes"][0].__setitem__(0, "None"),
        "names of mesh axes as identifiers .*found 'None'",
    ),
    "a name of emitted code": (
        lambda data: data["stages"][0]["axes"][0].__setitem__(0, "torch"),
        "names of mesh axes .*found 'torch'",
    ),
    "a name twice": (
        lambda data: data["stages"][0]["axes"][0].__setitem__(0, "tp"),
        "names of mesh axes .*, none twice, found 'tp'",
    ),
    "a profile's name": (
        lambda data: data["mesh"][0].__setitem__(0, 'h100"""\nprint()'),
        "at /mesh/0/0: .*name of a cost",
    ),
    "too many devices": (lambda data: data["mesh"][0].__setitem__(1, 2**20), "expected 1 to 1,048,576 devices"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_text_is_refused_with_the_place(case: str) -> None:
    change, message = BROKEN[case]
    on_text = case in ("truncated", "a mark before it", "a field twice")
    text = change if isinstance(change, str) else change(text_of("mlp")) if on_text else changed(change)
    with pytest.raises(PlanError, match=message):
        autopar.Plan.from_json(text)


def test_file_that_is_broken_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match=r"expected a plan file at .*plan\.json, found none that can be read"):
        autopar.Plan.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"plan\.json, found none that can be read: 'utf-8' codec"):
        autopar.Plan.load(path)
    path.write_text("{")
    with pytest.raises(PlanError, match=r"plan\.json: expected a plan as JSON; at the top"):
        autopar.Plan.load(path)


def model_and_batch() -> tuple[nn.Module, dict[str, Any]]:
    return mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())


@pytest.mark.parametrize(
    "axes", [[["dp", 2, 2], ["tp", 4, 1]], [["dp", 2, 1], ["tp", 2, 1]], [["dp", 2, 1], ["tp", 2, 2]]]
)
def test_axes_that_are_not_the_mesh_are_refused(axes: list[Any]) -> None:
    model, batch = model_and_batch()
    text = changed(lambda data: data["stages"][0].update(axes=axes))
    with pytest.raises(
        PlanError, match=r"expected (axes whose sizes multiply to|ranks of) the 4 (devices )?of h100:1x4"
    ):
        autopar.verify(autopar.Plan.from_json(text), model, batch)


def test_plan_for_another_mesh_is_refused() -> None:
    model, batch = model_and_batch()
    plan = autopar.Plan.from_json(text_of("mlp"))
    with pytest.raises(PlanError, match="expected a plan for h100:2x4, found one for h100:1x4; plan again"):
        autopar.parallelize(model, autopar.Mesh("h100", 2, 4), batch, plan=plan)
    with pytest.raises(MeshError, match="expected at least one node"):
        autopar.Mesh("h100", 0, 4)


def test_writing_is_whole_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = autopar.Plan.from_json(text_of("mlp")), tmp_path / "deep" / "plan.json"
    plan.save(path)
    assert path.read_text() == text_of("mlp")

    def disk_full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(OSError, match="No space left"):
        autopar.Plan.from_json(text_of("gpt")).save(path)
    assert path.read_text() == text_of("mlp")
    assert [item.name for item in path.parent.iterdir()] == ["plan.json"]
