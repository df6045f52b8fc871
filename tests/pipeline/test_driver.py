"""The loop over passes: what is refused is left out and said, the next best takes its place, plans can be dumped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan, SearchBudget
from autopar.driver import Candidate, Context, Front, of_plan, outline_of, search
from autopar.errors import InfeasibleError, InternalError, PlanError
from autopar.ir.buffers import joins_modules
from autopar.ir.graph import Graph
from autopar.ir.tried import Tried
from autopar.pipeline import planned_jointly, template_of_graph
from autopar.request import Request
from autopar.trace import trace
from models import mlp

MESH = autopar.Mesh("h100", devices_per_node=4)
REQUEST = Request(MESH, "train", "adamw", None, (), SearchBudget(5.0, proposals=0))


@cache
def graph() -> Graph:
    return trace(mlp.build(mlp.Config()), mlp.example_inputs(mlp.Config()))


@cache
def plan(dp: int) -> Plan:
    return template_of_graph(graph(), MESH, dp=dp, tp=4 // dp)


def wrong(faster: int) -> Plan:
    """A plan that the verifier refuses, which claims to be faster than any."""
    good = plan(4)
    return replace(good.placed(nodes={}), predicted=replace(good.predicted, step_time_ns=faster))


def found(front: Front, *plans: Plan) -> list[Candidate]:
    return [of_plan(front.given, outline_of(one), one) for one in plans]


def test_a_plan_that_the_verifier_refuses_is_left_out_and_the_next_best_taken() -> None:
    def place(front: Front, context: Context) -> list[Candidate]:
        return found(front, wrong(2), plan(4), wrong(1))

    answer = search((place,), graph(), Context(REQUEST))[1]
    assert answer.stages == plan(4).stages
    reasons = [row.infeasible for row in answer.search.tried]
    assert len(reasons) == 2 and all(reason and "expected" in reason for reason in reasons)


def test_what_only_an_answer_says_is_said_of_the_answer_alone() -> None:
    """What a plan sends is counted operator by operator: passes, which ask for many plans, ask for none of that."""
    asked = list[Plan]()

    def told(one: Plan) -> Plan:
        asked.append(one)
        return replace(one, predicted=replace(one.predicted, comm_bytes={"send": 7}))

    def place(front: Front, context: Context) -> list[Candidate]:
        return [of_plan(front.given, outline_of(one), one, told=told) for one in (plan(4), plan(2))]

    def later(front: Front, context: Context) -> list[Candidate]:
        assert front.best is not None and front.best.plan in (plan(4), plan(2)) and not asked
        return []

    answer = search((place, later), graph(), Context(REQUEST))[1]
    assert len(asked) == 1 and answer.predicted.comm_bytes == {"send": 7} and answer.stages == asked[0].stages


def test_later_passes_see_what_is_left() -> None:
    """A step that no plan has must not keep a slower search from looking."""
    seen = list[float]()

    def stage(front: Front, context: Context) -> list[Candidate]:
        return found(front, wrong(1), plan(4))

    def place(front: Front, context: Context) -> list[Candidate]:
        assert front.best is not None
        seen.append(front.best.step_ns)
        return []

    search((stage, place), graph(), Context(REQUEST))
    assert seen == [plan(4).predicted.step_time_ns]


def test_where_nothing_is_left_the_first_refusal_is_raised() -> None:
    def place(front: Front, context: Context) -> Iterator[Candidate]:
        yield from found(front, wrong(1))
        raise InfeasibleError("too large")

    with pytest.raises(InfeasibleError, match="too large"):
        search((place,), graph(), Context(REQUEST))

    def stage(front: Front, context: Context) -> list[Candidate]:
        return found(front, wrong(1))

    with pytest.raises(PlanError):
        search((stage,), graph(), Context(REQUEST))


def test_a_refusal_of_a_later_pass_is_a_row() -> None:
    def place(front: Front, context: Context) -> list[Candidate]:
        return found(front, plan(4))

    def refine(front: Front, context: Context) -> list[Candidate]:
        raise PlanError("no refinement")

    answer = search((place, refine), graph(), Context(REQUEST))[1]
    assert Tried(setting="refine", infeasible="no refinement") in answer.search.tried

    def branch(front: Front, context: Context) -> list[Candidate]:
        raise InternalError("a fault")

    with pytest.raises(InternalError):
        search((place, branch), graph(), Context(REQUEST))


def test_plans_are_dumped_between_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path))

    def place(front: Front, context: Context) -> list[Candidate]:
        return found(front, plan(4), plan(2))

    search((place,), graph(), Context(REQUEST))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["1-place-000.json", "1-place-001.json"]
    assert Plan.load(files[1]) == plan(2)


class Counted(nn.Module):
    """Blocks that read and update one buffer, each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = CountedOnce()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.count(layer(x).relu())
        return x.square().mean()


class CountedOnce(nn.Module):
    """Scales by a running number, which each call changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.5).add_(1.0)
        return x * self.seen


@pytest.mark.parametrize("mesh", [autopar.Mesh("v100", nodes=2), autopar.Mesh("cpu", devices_per_node=2)], ids=str)
def test_a_buffer_that_stages_would_part_is_planned_on_one_stage(mesh: autopar.Mesh) -> None:
    """The default search ended in a PlanError that asked for one stage, though it had slower plans of one."""
    whole = trace(Counted(), (torch.randn(1, 1024),))
    assert whole.mutations and not joins_modules(whole), "nothing but the verifier sees it"
    used_whole = autopar.Constraint("*", ("R",), what="used")

    def found(*rules: autopar.Constraint, limit: int | None = None) -> Plan:
        budget = SearchBudget(5.0, substitutions=False, proposals=0)
        return planned_jointly(whole, Request(mesh, "train", "adamw", limit, (used_whole, *rules), budget))[1]

    answer = found()
    faster = [row for row in answer.search.tried if (row.step_time_ns or 10**12) < answer.predicted.step_time_ns]
    assert len(answer.stages) == 1 and faster and all((row.stages or 1) > 1 for row in faster)
    assert any("take one stage" in str(row.infeasible) for row in answer.search.tried)
    with pytest.raises(PlanError, match="take one stage"):
        found(autopar.Constraint(stages=2))
    with pytest.raises(InfeasibleError, match="smallest limit that can be met"):
        found(limit=answer.predicted.peak_bytes // 8)
