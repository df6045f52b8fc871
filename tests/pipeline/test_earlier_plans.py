"""Plan files of versions 1 and 2, which those versions wrote, are read, and stated as version 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.emit import emit
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.rewrites import graph_of
from models import mlp
from tests.sent_files.bases import plans

FILES = Path(__file__).with_name("earlier_plans")
SEARCHED = "searched"  # what a search finds may change, what a template says does not
OF_VERSION_2 = sorted(path.stem for path in (FILES / "version_2").glob("*.json"))


def text_of(version: int, name: str) -> str:
    return FILES.joinpath(f"version_{version}", f"{name}.json").read_text()


def test_there_is_a_file_of_every_form() -> None:
    assert sorted(name.replace(" ", "_") for name in plans()) == OF_VERSION_2


@pytest.mark.parametrize("name", OF_VERSION_2)
def test_version_2_is_read_as_what_is_planned_now(name: str) -> None:
    """The source of a template's plan is that of one that is planned anew, character by character, but for the names of
    profiles in its first line."""
    base, plan = plans()[name.replace("_", " ")], Plan.from_json(text_of(2, name))
    graph = graph_of(plan, base.graph)
    check_plan(graph, plan)
    source = emit(graph, plan)
    assert name == SEARCHED or source.splitlines()[1:] == base.source.splitlines()[1:]
    assert all(axis.name != "microbatch" for stage in plan.stages for axis in stage.axes)


@pytest.mark.parametrize("name", ["one_stage", "microbatches"])
def test_version_1_is_read_and_fits_its_model(name: str) -> None:
    plan = Plan.from_json(text_of(1, name))
    model, batch = mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config())
    autopar.verify(plan, model, batch)
    program = autopar.parallelize(model, plan.mesh, batch, plan=plan)
    assert f"MICROBATCHES = {plan.microbatches}" in program.source
    assert plan.predicted.breakdown.recompute_ns == 0 and plan.schedule == "1f1b"


@pytest.mark.parametrize(("version", "name"), [*((2, name) for name in OF_VERSION_2), (1, "one_stage")])
def test_what_was_read_is_written_as_version_3(version: int, name: str) -> None:
    plan = Plan.from_json(text_of(version, name))
    again = Plan.from_json(plan.to_json())
    assert json.loads(plan.to_json())["autopar_plan"] == 3
    assert again == plan and again.to_json() == plan.to_json()


def _first(kind: str, of: str) -> Callable[[Any], None]:
    """Changes the first type, which is that over microbatches, of the first placement of a kind that has this one."""

    def change(data: Any) -> None:
        rows = data[kind]
        name, row = next((name, row) for name, row in rows.items() if _placement(row).startswith(of))
        other = "R" if of != "R" else "S(0)"
        text = _placement(row).replace(of, other, 1)
        if isinstance(row, str):
            rows[name] = text
        else:
            (row if kind == "storage" else row[0])[0] = text

    return change


def _placement(row: Any) -> str:
    while not isinstance(row, str):
        row = row[0] if row else ""
    return row


@pytest.mark.parametrize(("kind", "of"), [("inputs", "S(0)"), ("storage", "I"), ("storage", "R"), ("nodes", "S(0)")])
def test_other_types_over_microbatches_than_the_graph_gives_are_refused(kind: str, of: str) -> None:
    base, data = plans()["microbatches"], json.loads(text_of(2, "microbatches"))
    _first(kind, of)(data)
    plan = Plan.from_json(json.dumps(data))
    with pytest.raises(PlanError, match=r"expected \S+ over microbatches as follows from the model"):
        check_plan(base.graph, plan)


def test_other_types_over_microbatches_of_what_is_received_are_refused() -> None:
    base, data = plans()["stages"], json.loads(text_of(2, "stages"))
    inputs = data["stages"][1]["inputs"]
    (name,) = inputs.keys() - data["types"].keys()
    inputs[name] = "R"
    with pytest.raises(PlanError, match=f"expected {name} over microbatches as follows from the model"):
        check_plan(base.graph, Plan.from_json(json.dumps(data)))


BROKEN: dict[str, tuple[int, str, Callable[[Any], None], str]] = {
    "placements beside stages": (
        2, "stages", lambda data: data.update(axes=[["dp", 2, 1]]), "at /axes: expected nothing beside stages",
    ),
    "another number of microbatches": (
        2, "microbatches", lambda data: data.update(microbatches=4), "expected an outermost axis of 4 microb.*found 2",
    ),
    "no axis of microbatches": (
        2, "one_stage", lambda data: data.update(microbatches=2), "expected an outermost axis of 2 microb.*found 1",
    ),
    "stages in version 1": (1, "one_stage", lambda data: data.update(stages=[]), "at /stages: .* of version 1"),
    "version 2 by another name": (
        2, "microbatches", lambda data: data.update(autopar_plan=3), r"at the top level: .*'stages'|unexpected",
    ),
    "no nodes": (2, "one_stage", lambda data: data.pop("nodes"), "at /stages/0: .*'nodes' is a required property"),
    "version 0": (2, "one_stage", lambda data: data.update(autopar_plan=0), "of version 1 to 3, found 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_no_version_writes_is_refused(case: str) -> None:
    version, name, change, message = BROKEN[case]
    data = json.loads(text_of(version, name))
    change(data)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data))
