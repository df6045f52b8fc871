"""Whatever is built works with everything else: each cell of the table in docs/guide.md, shown on a small model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from autopar import Constraint, Plan, SearchBudget
from autopar.driver import Candidate, Context, Front
from autopar.emit import emit
from autopar.interop import ChosenStage
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh, make_axes
from autopar.ir.outline import Outline
from autopar.ir.schedule import SCHEDULES
from autopar.microbatch import check_plan, divided_graph
from autopar.passes.balance import balance
from autopar.passes.kinds import kinds
from autopar.passes.place import place
from autopar.passes.refine import refine
from autopar.passes.stage import stage
from autopar.pipeline import planned_jointly
from autopar.profiler import profiles_of
from autopar.request import Request
from autopar.simulate import simulate
from autopar.soap import Space
from autopar.staged.mixing import _candidates
from autopar.substitute import GraphCandidate
from autopar.trace import trace
from models import gpt, llama
from tests.oracles.frozen.cases import PROFILES

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
BUDGET = SearchBudget(10.0, substitutions=False, proposals=0)


@cache
def graph(num_layers: int = 4, hidden_size: int = 64, seq_len: int = 64, batch_size: int = 16) -> Graph:
    config = gpt.Config(
        num_layers=num_layers, hidden_size=hidden_size, num_heads=8, seq_len=seq_len, vocab_size=256,
        batch_size=batch_size,
    )  # fmt: skip
    with torch.device("meta"):
        return trace(gpt.build(config), gpt.example_inputs(config))


@cache
def joined_graph() -> Graph:
    """One in which substitutions find something."""
    config = llama.Config(512, 64, 2, 256, 4, 4, 704, batch_size=4)
    with torch.device("meta"):
        return trace(llama.build(config), llama.example_inputs(config))


class Row(NamedTuple):
    """Of the table: whether devices are of one kind, whether stages are several."""

    is_alike: bool
    is_staged: bool

    def mesh(self, a_kind: int = 2) -> Mesh:
        if self.is_alike:
            return Mesh(PROFILES["h100"], 1, 2 * a_kind)
        return Mesh([(PROFILES[kind], 1, a_kind) for kind in ("a100", "v100")])

    def request(self, a_kind: int = 2, stages: int = 2, **asked: Any) -> Request:
        """For plans of one stage, or of so many on devices of one kind, of two on those of two kinds."""
        pinned = (stages if self.is_alike else 2) if self.is_staged else 1
        mesh = self.mesh(a_kind)
        request = Request(mesh, "train", "adamw", None, (Constraint(stages=pinned),), BUDGET)
        return replace(request, **asked)

    @property
    def search(self) -> Callable[[Front, Context], Any]:
        """The pass that finds plans."""
        if self.is_alike:
            return stage if self.is_staged else place
        return kinds if self.is_staged else balance


def found(row: Row, request: Request, whole: Graph, outline: Outline | None = None) -> Front:
    """What the row's pass finds; in an outline where one is given."""
    front = Front(whole)
    front.next_round()
    if outline is not None:
        front.open = [Candidate(GraphCandidate(whole, (), 0), outline)]
    for one in row.search(front, Context(request)):
        front.add(one, row.search.__name__)
    return front


def well_typed(whole: Graph, plan: Plan, row: Row) -> Plan:
    """A plan of the row that the verifier takes, of which a program is written, whose step is the simulated one."""
    check_plan(whole, plan)
    compile(emit(whole, plan), "program", "exec")
    assert Plan.from_json(plan.to_json()) == plan
    assert (len(plan.stages) > 1, plan.mesh.is_homogeneous) == (row.is_staged, row.is_alike)
    played = simulate(divided_graph(whole, plan.microbatches), plan, profiles_of(plan.mesh))
    assert played.step_time_ns == plan.predicted.step_time_ns
    return plan


# Columns ----------------------------------------


def substitutions(row: Row) -> None:
    """An equal graph is taken."""
    request = row.request(1, budget=SearchBudget(4.0, proposals=0))
    whole, plan = planned_jointly(joined_graph(), request)
    assert well_typed(whole, plan, row).substitutions


def three_axes(row: Row) -> None:
    """A plan on three axes."""
    cubes = make_axes(("d0", "d1", "d2"), (2, 2, 2))
    a_kind = 8 if row.is_staged else 4
    outline = Outline((cubes,) * (2 if row.is_staged else 1), 4)
    request = row.request(a_kind, budget=replace(BUDGET, seconds=60.0, everywhere=True))
    front = found(row, request, graph(), outline)
    plan = well_typed(graph(), min(front.found, key=lambda one: one.step_ns).plan, row)
    assert all([axis.size for axis in one.axes] == [2, 2, 2] for one in plan.stages)


def mixed_submeshes(row: Row) -> None:
    """Stages on submeshes of several sizes, or logical shapes."""
    whole = graph(5, 256, batch_size=32)
    if row.is_alike:
        plan = _on_two_sizes(found(row, row.request(4, constraints=(Constraint(microbatches=2),)), whole))
    else:
        front = found(row, row.request(constraints=()), whole)
        plan = next(one.plan for one in front.found if one.outline and len({*_sizes(one.outline)}) > 1)
    assert len({one.num_ranks for one in well_typed(whole, plan, row).stages}) > 1


def _on_two_sizes(front: Front) -> Plan:
    """Two stages on two ranks each and one on four, out of the ways that a search has found for both sizes."""
    finalists = front.kept["stage", front.given]
    layered, chosen = finalists.layered, [ChosenStage(0, 2, 0), ChosenStage(2, 3, 0), ChosenStage(3, 5, 1)]
    every = [one.ways[0] for one in finalists.found]
    of_size = [layered.kind(next(way for way in every if way.setting.num_devices == size)) for size in (2, 4)]
    one = next(iter(_candidates(layered, of_size, chosen, 1, 1)))
    return finalists.stated(one, finalists._simulated(one))


def _sizes(outline: Outline) -> list[tuple[int, ...]]:
    return [tuple(axis.size for axis in axes) for axes in outline.submeshes]


def every_schedule(row: Row) -> None:
    """Every schedule is looked at, and a plan of each is well typed."""
    whole = graph(8)
    front = found(row, row.request(), whole)
    plans: dict[str, Plan] = {}
    if row.is_alike:
        finalists = front.kept["stage", front.given]
        first = {one.schedule: one for one in reversed(finalists.found)}
        plans = {name: finalists.stated(one, finalists._simulated(one)) for name, one in first.items()}
    else:
        plans = {one.outline.schedule: one.plan for one in front.found if one.outline}
    assert plans.keys() == SCHEDULES.keys()
    for name, plan in plans.items():
        assert well_typed(whole, plan, row).schedule == name


TIGHT = {Row(True, False): 0.4, Row(True, True): 0.4, Row(False, False): 0.4, Row(False, True): 0.23}
"""A part of the memory that the fastest plan takes, in which no plan of the row fits that computes nothing again."""


def recomputation(row: Row) -> None:
    """Under a tight limit more is computed again of some blocks than of others."""
    whole, count = graph(5, 128, 256), 4 if row.is_staged else 1
    request = row.request(constraints=(*row.request().constraints, Constraint(microbatches=count)))
    free = planned_jointly(whole, request)[1]
    limit = int(TIGHT[row] * free.predicted.peak_bytes)
    plan = planned_jointly(whole, replace(request, memory_limit=limit))[1]
    assert well_typed(whole, plan, row).predicted.peak_bytes <= limit
    again = [{name.split(".", 2)[-1] for name in plan.recompute if name.split(".")[1] == str(n)} for n in range(5)]
    assert plan.recompute and len({frozenset(block) for block in again}) > 1


def soap(row: Row) -> None:
    """Proposals are made around a plan, each simulated, and what they find is no slower."""
    whole = graph(4, 512)
    request = row.request(budget=replace(BUDGET, proposals=100, refine_seconds=4.0))
    front = found(row, request, whole)
    context, best = Context(request), front.best
    assert best is not None
    (refined,) = refine(front, context)
    report = well_typed(whole, refined.plan, row).search.refinement
    assert report is not None and report.proposals > 10 and report.after_ns <= report.before_ns
    assert refined.step_ns <= best.step_ns


def bound(row: Row) -> None:
    """The report says how fast a step could be at most."""
    plan = planned_jointly(graph(), row.request())[1]
    assert 0 < plan.search.lower_bound_ns <= plan.search.cost_ns


COLUMNS: dict[str, Callable[[Row], None]] = {
    "substitutions": substitutions,
    "three axes": three_axes,
    "mixed submeshes": mixed_submeshes,
    "schedules": every_schedule,
    "recomputation by layer": recomputation,
    "SOAP": soap,
    "bound": bound,
}
ROWS = {
    "equal devices, one stage": Row(True, False),
    "equal devices, stages": Row(True, True),
    "unequal devices, one stage": Row(False, False),
    "unequal devices, stages": Row(False, True),
}
CELLS = [
    (row, column)
    for row in ROWS
    for column in COLUMNS
    if ROWS[row].is_staged or column not in ("mixed submeshes", "schedules")
]


@pytest.mark.sampled
@pytest.mark.parametrize(("row", "column"), CELLS)
def test_it_works(row: str, column: str) -> None:
    COLUMNS[column](ROWS[row])


def test_the_table_says_what_is_shown_here() -> None:
    """In docs/guide.md: "yes", or "–" where there is nothing to choose."""
    lines = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head = next(number for number, own in enumerate(cells) if own[1:] == [*COLUMNS])
    table = {own[0]: dict(zip(COLUMNS, own[1:], strict=True)) for own in cells[head + 2 : head + 2 + len(ROWS)]}
    assert table == {row: {column: "yes" if (row, column) in CELLS else "–" for column in COLUMNS} for row in ROWS}


def test_stages_that_are_in_no_space_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["unequal devices, stages"]
    request = row.request(budget=replace(BUDGET, proposals=100))
    front = found(row, request, graph())
    monkeypatch.setattr(Space, "redistributed", lambda self, plan: None)
    (refined,) = refine(front, Context(request))
    assert front.best is not None and refined.plan.stages == front.best.plan.stages
    assert refined.plan.search.refinement is not None
    assert "in no space of the search" in refined.plan.search.refinement.stop_reason
